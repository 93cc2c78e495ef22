"""Which pictures of an H.264 clip need no decoding although the encoder kept them as references.

A picture is needed when it is wanted, or when it stands in a list of references of a picture that is needed: nothing
else of it can be predicted from (8.2.4; the picture that direct prediction takes vectors from is the first of such a
list).  So the decoder's memory is followed here, by the headers of every picture it is given: numbers, order of
showing, which references are held, both lists of every slice.  Whatever is not followed (`h264_headers.Unclear`), or is
missing where a header asks for it, leaves all references up to the next IDR picture as they are.

A picture nobody needs is still given to the decoder, without its macroblocks (`hollow`): it takes its place among the
references, and is shown in its turn.  Were it left out, numbers would have a gap that libavcodec fills by guessing.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

from av.packet import Packet
from av.video.stream import VideoStream

from pipeline.media.h264_headers import (
    BIPREDICTED,
    INTRA,
    WINDOW,
    Sets,
    Slice,
    Unclear,
    is_idr,
    is_intra,
    is_parameter_set,
    is_plain,
    is_slice,
    parameter_sets,
    read_slice,
)
from pipeline.media.nal_units import length_bytes, units

# The number of a slice's first macroblock that no picture has: libavcodec takes the header in, and decodes nothing.
# It stands before the number 0, which is one bit, so that all that follows keeps its place in its byte.
_NO_MACROBLOCK = b"\0\0\3\0\xff\xff\xff"
_FIRST_MACROBLOCK = 0x80
# What libavcodec takes for another stream, or for start codes, where lengths are expected.
_ODD_BEGINNINGS = (b"\0\0\0\1", b"\1")
_MOST_UNITS = 2048  # of a packet
_MOST_NOTED = 400_000  # slices of a clip, each a few hundred bytes of memory


class Held(NamedTuple):
    """A reference in the decoder's memory.

    `at`: its packet; `number`: how many references were before it since the IDR picture; `order`: of showing.
    """

    at: int
    number: int
    order: int


class Headers:
    """Notes every packet's slices, while packets are read, and makes packets without macroblocks."""

    def __init__(self, stream: VideoStream) -> None:
        extradata = stream.codec_context.extradata or b""
        self._prefix = length_bytes("h264", extradata)
        self._slices: list[tuple[bytes, ...] | None] = []
        self._sees_all = True
        self._noted = 0
        self._beginnings: set[int] = set()
        try:
            self._sets, self._known = parameter_sets(extradata)
        except Unclear:
            self._sets, self._known = {}, frozenset()

    @classmethod
    def of(cls, stream: VideoStream) -> "Headers | None":
        """None for another codec than H.264."""
        return cls(stream) if stream.codec_context.name == "h264" else None

    def see(self, packet: "Packet[VideoStream]") -> None:
        data = bytes(packet)
        try:
            if packet.is_keyframe and self._begins(data):
                self._beginnings.add(len(self._slices))
            if packet.has_sidedata("new_extradata"):
                raise Unclear
            self._slices.append(tuple(self._windows(data)) if self._sees_all else None)
        except Unclear:  # from here on other parameter sets may count
            self._sees_all = False
            self._slices.append(None)

    def _units(self, data: bytes) -> Iterator[tuple[int, int]]:
        for count, place in enumerate(units(data, self._prefix)):
            if count == _MOST_UNITS:
                raise Unclear
            yield place

    def _begins(self, data: bytes) -> bool:
        """Whether the first frame or field in a packet refers to no other."""
        has_slice = False
        for begin, _ in self._units(data):
            unit = data[begin : begin + WINDOW]
            if len(unit) < 2 or not is_slice(unit[0]):
                continue
            if has_slice and unit[1] & _FIRST_MACROBLOCK:
                break
            if not is_intra(unit):
                return False
            has_slice = True
        return has_slice

    def _windows(self, data: bytes) -> Iterator[bytes]:
        if self._prefix and data.startswith(_ODD_BEGINNINGS):
            raise Unclear
        for begin, end in self._units(data):
            if begin >= end or end > len(data) or data[begin] & 0x80 or data.find(b"\0\0\1", begin, end) >= 0:
                raise Unclear
            if is_slice(data[begin]):
                self._noted += 1
                if self._noted > _MOST_NOTED:
                    raise Unclear
                yield data[begin : min(end, begin + WINDOW)]
            elif is_parameter_set(data[begin]):
                if data[begin:end].rstrip(b"\0") not in self._known:
                    raise Unclear
            elif not is_plain(data[begin]):
                raise Unclear

    def picture(self, at: int) -> tuple[Slice, ...]:
        """The slices of packet `at`, all of one picture.  Raises Unclear."""
        windows = self._slices[at]
        if not windows:
            raise Unclear
        found = [read_slice(window, self._sets) for window in windows]
        first = found[0][1]
        for place, (macroblock, one) in enumerate(found):
            if bool(macroblock) is not bool(place) or one[1:3] + one[4:7] != first[1:3] + first[4:7]:
                raise Unclear
        return tuple(one for _, one in found)

    def is_beginning(self, at: int) -> bool:
        """Whether a decoder may begin with it: the first of several that repair the picture bit by bit is called a key
        frame, too.
        """
        return at in self._beginnings

    def is_idr(self, at: int) -> bool:
        windows = self._slices[at] or ()
        return any(is_idr(window[0]) for window in windows)

    def is_referred_to(self, at: int) -> bool:
        """Whether the decoder takes it in when it is told to skip what is no reference."""
        windows = self._slices[at]
        return windows is None or any(window[0] & 0x60 for window in windows)

    def hollow(self, packet: "Packet[VideoStream]") -> "Packet[VideoStream]":
        """The same packet as far as headers tell: of the slices the first is left, without a macroblock.

        The packet itself when it is cut or made of too many pieces, or when lengths have no room for more.
        """
        data, pieces, has_slice = bytes(packet), [], False
        for count, (begin, end) in enumerate(units(data, self._prefix)):
            if end > len(data) or count == _MOST_UNITS:
                return packet
            unit = data[begin:end]
            if unit and is_slice(unit[0]):
                if has_slice:
                    continue
                has_slice, unit = True, unit[:1] + _NO_MACROBLOCK + unit[1:]
            if self._prefix and len(unit) >> 8 * self._prefix:
                return packet
            pieces.append(len(unit).to_bytes(self._prefix, "big") + unit if self._prefix else b"\0\0\1" + unit)
        made = cast("Packet[VideoStream]", Packet(b"".join(pieces)))
        made.pts, made.dts, made.time_base = packet.pts, packet.dts, packet.time_base
        return made


def dispensable(headers: Headers, given: Sequence[int], kept: frozenset[int], check: Callable[[], None]) -> set[int]:
    """Of the packets `given` to the decoder one after the other, in this order and none before them, those whose
    pictures nobody needs.  `kept`: those that are decoded whether or not anything refers to them.
    """
    found: set[int] = set()
    begins = [place for place, at in enumerate(given) if headers.is_idr(at)]
    for begin, end in zip(begins, [*begins[1:], len(given)], strict=False):
        try:
            found |= _dispensable(headers, given[begin:end], kept, check)
        except Unclear:
            continue
    return found


def _dispensable(headers: Headers, given: Sequence[int], kept: frozenset[int], check: Callable[[], None]) -> set[int]:
    """As `dispensable`, from an IDR picture to the next.  Raises Unclear."""
    lists = references(headers, given, check)
    needed = set(kept)
    for at in reversed(given):
        if at in needed:
            needed |= lists[at]
    return set(given) - needed


def references(headers: Headers, given: Sequence[int], check: Callable[[], None]) -> dict[int, set[int]]:
    """By packet, from an IDR picture to the next: the packets its picture may refer to.  Raises Unclear."""
    memory, found = Memory(), {}
    for at in given:
        check()
        found[at] = memory.take(at, headers.picture(at))
    return found


class Memory:
    """The references a decoder holds."""

    def __init__(self) -> None:
        self._held: list[Held] = []  # the youngest first
        self._number = -1
        self._high, self._low = 0, 0  # the order of the last reference

    def take(self, at: int, slices: Sequence[Slice]) -> set[int]:
        """The next picture: the packets of those it may refer to.  Raises Unclear."""
        first = slices[0]
        number = 0 if first.is_idr else self._number + 1
        if first.frame_number != number % (1 << first.sets.frame_number_bits):
            raise Unclear
        high, order = self._order(first, number)
        found = {entry.at for one in slices for entry in referred_to(one, self._held, number, order)}
        if first.is_referred_to:
            self._number, self._high, self._low = number, high, first.order
            self._drop(first, number)
            self._held.insert(0, Held(at, number, order))
            if len({entry.order for entry in self._held}) < len(self._held) or len(self._held) > first.sets.held:
                raise Unclear
        return found

    def _order(self, first: Slice, number: int) -> tuple[int, int]:
        """The high part of the order of showing, and the whole."""
        if not first.sets.counts_order:
            return 0, 2 * number - (not first.is_referred_to)
        high, span = self._high, 1 << first.sets.order_bits
        if first.is_idr:
            high = 0
        elif self._low - first.order >= span // 2:
            high += span
        elif first.order - self._low > span // 2:
            high -= span
        return high, high + first.order + min(0, first.bottom)

    def _drop(self, first: Slice, number: int) -> None:
        if first.is_idr:
            self._held.clear()
        elif first.unmarked is None:
            del self._held[first.sets.held - 1 :]
        else:
            for distance in first.unmarked:
                self._held.remove(_held(self._held, number, distance, first.sets))


def _held(held: Sequence[Held], number: int, distance: int, sets: Sets) -> Held:
    """The reference that many pictures before picture `number`; numbers are counted round."""
    wanted = number - distance % (1 << sets.frame_number_bits)
    for one in held:
        if one.number == wanted:
            return one
    raise Unclear


def referred_to(one: Slice, held: Sequence[Held], number: int, order: int) -> Iterator[Held]:
    """The entries of both lists of a slice.  Raises Unclear when one is missing."""
    for length, changes, default in zip(one.active, one.changes, _default_lists(one, held, order), strict=True):
        entries: list[Held | None] = [*default, *[None] * length][:length]
        distance = 0
        for place, (operation, change) in enumerate(changes):
            if place >= length:
                raise Unclear
            distance += -change if operation else change
            chosen = _held(held, number, distance, one.sets)
            later = entries.index(chosen, place) if chosen in entries[place:] else length - 1
            del entries[later]
            entries.insert(place, chosen)
        for entry in entries:
            if entry is None:
                raise Unclear
            yield entry


def _default_lists(one: Slice, held: Sequence[Held], order: int) -> tuple[Sequence[Held], Sequence[Held]]:
    if one.kind == INTRA:
        return (), ()
    if one.kind != BIPREDICTED:
        return held, ()
    if any(entry.order == order for entry in held):
        raise Unclear
    before = sorted((entry for entry in held if entry.order < order), key=lambda entry: -entry.order)
    behind = sorted((entry for entry in held if entry.order > order), key=lambda entry: entry.order)
    first, second = before + behind, behind + before
    if len(second) > 1 and first == second:
        second[:2] = second[1::-1]
    return first, second
