"""What the published sidecar announced and answered: the files of tests/data/sidecar."""

import functools
import lzma
from pathlib import Path

import msgspec

DATA = Path(__file__).resolve().parent.parent / "data" / "sidecar"


class Exchange(msgspec.Struct, frozen=True):
    """One job and its result, as they lay in Redis."""

    case: str
    job: bytes
    result: bytes


class Record(msgspec.Struct, frozen=True):
    """A run of the published sidecar: its engine flags, what stood at its hello key, what it was asked and answered."""

    bundle: str
    flags: list[str]
    hello: dict[str, str]
    exchanges: list[Exchange]

    def of(self, case: str) -> Exchange:
        (found,) = [exchange for exchange in self.exchanges if exchange.case == case]
        return found


@functools.cache
def record(name: str) -> Record:
    return msgspec.msgpack.decode(lzma.decompress((DATA / f"{name}.xz").read_bytes()), type=Record)
