"""The NAL units of H.264 and HEVC packets: where they lie, in both ways they are put one behind the other."""

import re
from collections.abc import Iterator

_START_CODE = re.compile(rb"\x00\x00\x01")


def length_bytes(codec: str, extradata: bytes) -> int:
    """Of the length before each unit, as MP4 and Matroska have it; 0 where start codes part them."""
    place = {"h264": 4, "hevc": 21}.get(codec, 0)
    if len(extradata) <= place or extradata[:3] in (b"\0\0\0", b"\0\0\1"):
        return 0
    return (extradata[place] & 3) + 1


def units(data: bytes, prefix: int) -> Iterator[tuple[int, int]]:
    """Begin and end of every unit in a packet, its header byte included.  `prefix`: as `length_bytes` tells.

    An end may lie behind the packet's, when that is cut.
    """
    if not prefix:
        yield from _between_start_codes(data)
        return
    at = 0
    while at + prefix < len(data):
        begin = at + prefix
        at = begin + int.from_bytes(data[at:begin], "big")
        yield begin, at


def _between_start_codes(data: bytes) -> Iterator[tuple[int, int]]:
    begin = -1
    for code in _START_CODE.finditer(data):
        if begin >= 0:
            yield begin, code.start()
        begin = code.end()
    if begin >= 0:
        yield begin, len(data)
