"""A model bundle as an engine worker sends it (GetTokenizer): a ZIP in chunks, its SHA-256 on the last one.

The worker is trusted with tokens, not with the gateway's disk: everything is counted while it arrives and again while
it is unpacked, whatever the archive says of itself, and nothing is written outside the folder given.  Limits are SMG
v1.11.0's. `pipeline.bundle` loads what was unpacked.
"""

import hashlib
import io
import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import ClassVar

PIECE = 1 << 20


class BundleError(Exception):
    """A model's bundle cannot be had or cannot be used; the message is one sentence for the log."""


class ArchiveReceiver:
    """One archive: `feed` every chunk in order, then `extract` (which blocks: call it in a thread)."""

    TIMEOUT_S: ClassVar[float] = 120.0  # for the whole stream; the caller's clock
    MOST_BYTES: ClassVar[int] = 200 << 20
    MOST_ENTRIES: ClassVar[int] = 50
    MOST_UNPACKED: ClassVar[int] = 500 << 20

    def __init__(self) -> None:
        self._data = bytearray()
        self._digest = hashlib.sha256()
        self._announced: str | None = None  # of the last chunk

    def feed(self, data: bytes, sha256: str = "") -> None:
        """Take one chunk; `sha256` is the whole archive's, on the last chunk.  Raises BundleError above 200 MiB."""
        if len(self._data) + len(data) > self.MOST_BYTES:
            raise BundleError(f"tokenizer archive is larger than {self.MOST_BYTES} bytes")
        self._data += data
        self._digest.update(data)
        self._announced = sha256

    def extract(self, to: Path) -> None:
        """Check the archive and unpack it into the existing, empty folder `to`; the received bytes are given up.

        Raises BundleError; `to` may then hold some of the files.
        """
        self._check_digest()
        data, self._data = self._data, bytearray()
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                self._unpack(archive, to)
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError) as error:
            # RuntimeError: encrypted; NotImplementedError: a compression this Python lacks
            raise BundleError(f"tokenizer archive cannot be read: {error}") from None
        except OSError as error:
            raise BundleError(f"tokenizer archive cannot be unpacked: {error.strerror or error}") from None

    def _check_digest(self) -> None:
        if self._announced is None:
            raise BundleError("tokenizer archive has no chunk")
        if not self._announced:
            raise BundleError("tokenizer archive: the last chunk carries no SHA-256")
        if self._announced.lower() != self._digest.hexdigest():
            raise BundleError("tokenizer archive does not match its SHA-256")

    def _unpack(self, archive: zipfile.ZipFile, to: Path) -> None:
        entries = archive.infolist()
        if len(entries) > self.MOST_ENTRIES:
            raise BundleError(f"tokenizer archive has {len(entries)} entries, more than {self.MOST_ENTRIES}")
        for entry in entries:
            _check_entry(entry)
        declared = sum(entry.file_size for entry in entries)
        if declared > self.MOST_UNPACKED:
            raise BundleError(f"tokenizer archive unpacks to {declared} bytes, more than {self.MOST_UNPACKED}")
        left = self.MOST_UNPACKED
        for entry in entries:
            if not entry.is_dir():
                left = self._write(archive, entry, to / entry.filename, left)

    def _write(self, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path, left: int) -> int:
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(entry) as source, target.open("xb") as sink:  # x: a name given twice is refused
            while piece := source.read(PIECE):
                left -= len(piece)
                if left < 0:
                    raise BundleError(f"tokenizer archive unpacks to more than {self.MOST_UNPACKED} bytes")
                sink.write(piece)
        return left


def _check_entry(entry: zipfile.ZipInfo) -> None:
    """Only plain files below the folder.  The name is judged by both systems' rules, for the archive may come from
    either.
    """
    name = entry.orig_filename
    windows = PureWindowsPath(name)
    if (
        "\0" in name
        or name.startswith(("/", "\\"))
        or windows.drive
        or ".." in (*windows.parts, *PurePosixPath(name).parts)
    ):
        raise BundleError(f"tokenizer archive names a path outside it: {name[:100]!r}")
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise BundleError(f"tokenizer archive holds something that is no plain file: {name[:100]!r}")
