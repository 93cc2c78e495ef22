"""TokenSpeed workers that hear: `tests.engines.stand_in` in a thread with its own loop, one for each test bundle."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.engines.stand_in import Engine
from tests.pipeline.bundles import unpack_bundle


def introduction(name: str, folder: Path) -> dict[str, Any]:
    """What a worker with this bundle says of itself."""
    path = str(unpack_bundle(name, folder))
    sees = name != "qwen3_asr"
    return {
        "model_path": path,
        "tokenizer_path": path,
        "served_model_name": name,
        "model_type": name,
        "supports_vision": sees,
    }


class Hearing:
    """The workers by model; `heard` takes what one received since it was last asked."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self._engines.values()]

    def heard(self, model: str) -> list[Any]:
        received = self._engines[model].received
        found = list(received)
        received.clear()
        return found


@contextlib.contextmanager
def hearing(names: list[str], folder: Path, **options: Any) -> Iterator[Hearing]:
    engines = {name: Engine(runtime="tokenspeed", model_info=introduction(name, folder), **options) for name in names}
    is_up, is_over = threading.Event(), threading.Event()

    async def serve() -> None:
        for engine in engines.values():
            await engine.start()
        is_up.set()
        await asyncio.to_thread(is_over.wait)
        for engine in engines.values():
            await engine.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert is_up.wait(10)
        yield Hearing(engines)
    finally:
        is_over.set()
        thread.join()
