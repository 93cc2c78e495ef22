"""Bytes spoiled without knowing what they mean."""

import random
import struct
from collections.abc import Sequence

NUMBERS = (0, 1, 2, 3, 4, 7, 8, 12, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 257, 4095, 4096, 16383, 16384, 32767,
           32768, 46340, 65534, 65535, 65536, 0xFFFFFF, 0x1000000, 0x7FFFFFFE, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF0,
           0xFFFFFFFE, 0xFFFFFFFF)  # fmt: skip
_FIELDS = ("<B", "<H", ">H", "<I", ">I", "<Q", ">Q")


def number(chance: random.Random) -> int:
    """One that likes to be wrong: a boundary, a near neighbour, or any."""
    pick = chance.random()
    if pick < 0.6:
        return chance.choice(NUMBERS)
    if pick < 0.8:
        return max(0, chance.choice(NUMBERS) + chance.randint(-2, 2))
    return chance.getrandbits(chance.choice((8, 16, 32)))


def place(chance: random.Random, length: int) -> int:
    """An offset below `length`, most often near the start, where headers are."""
    return min(length - 1, int(length * chance.random() ** 3)) if length else 0


def put(data: bytearray, at: int, form: str, value: int) -> None:
    """Write `value`, cut to the field's width, when it fits into `data`."""
    size = struct.calcsize(form)
    if 0 <= at <= len(data) - size:
        struct.pack_into(form, data, at, value & ((1 << 8 * size) - 1))


def spoil(chance: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """One to six changes of any kind."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        if not out:
            break
        out = _change(chance, out, others)
    return bytes(out)


def _change(chance: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    at = place(chance, len(data))
    end = min(len(data), at + chance.choice((1, 2, 4, 8, 16, 64, 256, 4096)))
    kind = chance.randrange(9)
    if kind <= 1:
        data[at] ^= 1 << chance.randrange(8)
    elif kind <= 3:
        put(data, at, chance.choice(_FIELDS), number(chance))
    elif kind == 4:
        del data[at:end]
    elif kind == 5:
        data[at:at] = data[at:end] * chance.choice((1, 1, 2, 16, 300))
    elif kind == 6:
        data[at:end] = chance.randbytes(end - at) if chance.random() < 0.5 else bytes(end - at)
    elif kind == 7 and others:
        other = chance.choice(others)
        start = chance.randrange(len(other)) if other else 0
        data[at:end] = other[start : start + chance.choice((8, 64, 1024, len(other)))]
    else:
        del data[chance.randrange(len(data)) :]
    return data
