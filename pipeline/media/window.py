"""A file over a memoryview: what Pillow and PyAV read clients' bytes through, without a copy of the whole."""

import io


class Window:
    """Reads copy only what is asked for, so a header costs no copy of the file."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def read(self, count: int | None = -1) -> bytes:
        start = self._position
        end = len(self._data) if count is None or count < 0 else min(start + count, len(self._data))
        self._position = max(start, end)
        return bytes(self._data[start:end])

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._position, len(self._data))[whence]
        if base + offset < 0:
            raise ValueError("seek before the start of the file")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position
