"""Parameter sets and slice headers of H.264 (Rec. ITU-T H.264, 7.3), as far as they tell which pictures are referred
to.

Only of frames that are coded as frames.  Fields, slice groups, slices that repeat others, references that are held for
long: each raises Unclear where it shows, and whoever asked goes without an answer.
"""

from collections.abc import Mapping
from typing import NamedTuple

from pipeline.media.nal_units import units

# Bytes of a slice that are looked at: headers are longer only with many explicit weights.
WINDOW = 160

PREDICTED, BIPREDICTED, INTRA = 0, 1, 2
_SLICE, _IDR_SLICE, _SEQUENCE, _PICTURE = 1, 5, 7, 8
_WITH_CHROMA_FORMAT = frozenset({100, 110, 122, 244, 44, 83, 86, 118, 128, 134, 135, 138, 139})
_MOST_REFERENCES = 16
_MOST_ENTRIES = 32  # of a list


class Unclear(Exception):
    """Something that is not followed here, or damage."""


class Sets(NamedTuple):
    """A picture parameter set together with the sequence parameter set it names.

    `counts_order`: the order of showing is written in every slice; else it is that of decoding.  `held`: references a
    decoder holds at most.  `active`: how long lists of references are where a slice does not say.
    """

    frame_number_bits: int
    counts_order: bool
    order_bits: int
    held: int
    has_chroma: bool
    tells_bottom: bool
    active: tuple[int, int]
    weighs_predicted: bool
    weighs_bipredicted: bool


class Slice(NamedTuple):
    """`order`: of showing, its low bits; `bottom`: how much later the second field is.  `active`: how long both lists
    of references are; `changes`: to each, (operation, value).  `unmarked`: distances back to references that are
    dropped; None: the oldest is, when there is no room.
    """

    kind: int
    is_idr: bool
    is_referred_to: bool
    sets: Sets
    frame_number: int
    order: int
    bottom: int
    active: tuple[int, int]
    changes: tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
    unmarked: tuple[int, ...] | None


class _Bits:
    """Reads a unit bit by bit, emulation prevention taken out."""

    def __init__(self, unit: bytes) -> None:
        if b"\0\0\0" in unit or b"\0\0\1" in unit or b"\0\0\2" in unit:
            raise Unclear
        plain = unit.replace(b"\0\0\3", b"\0\0")
        self._value = int.from_bytes(plain, "big")
        self.left = 8 * len(plain)

    def take(self, count: int) -> int:
        self.left -= count
        if self.left < 0:
            raise Unclear
        return self._value >> self.left & (1 << count) - 1

    def flag(self) -> bool:
        return bool(self.take(1))

    def number(self) -> int:
        """ue(v)"""
        zeros = self.left - (self._value & (1 << self.left) - 1).bit_length()
        if zeros > 31:
            raise Unclear
        return self.take(2 * zeros + 1) - 1

    def signed(self) -> int:
        """se(v)"""
        number = self.number()
        return (number + 1) // 2 if number % 2 else -(number // 2)


class _Sequence(NamedTuple):
    frame_number_bits: int
    counts_order: bool
    order_bits: int
    held: int
    has_chroma: bool


def is_slice(first: int) -> bool:
    """Whether a unit with this header byte is a slice."""
    return first & 0x1F in (_SLICE, _IDR_SLICE)


def is_idr(first: int) -> bool:
    return first & 0x1F == _IDR_SLICE


def is_intra(unit: bytes) -> bool:
    """Whether this slice refers to no other picture.  False for one that cannot be read."""
    try:
        bits = _Bits(unit[1:])
        bits.number()
        return bits.number() % 5 == INTRA
    except Unclear:
        return False


def is_parameter_set(first: int) -> bool:
    return first & 0x1F in (_SEQUENCE, _PICTURE)


def is_plain(first: int) -> bool:
    """Whether it changes no picture: supplemental information, a delimiter, filling."""
    return first & 0x1F in (6, 9, 12)


def parameter_sets(extradata: bytes) -> tuple[Mapping[int, Sets], frozenset[bytes]]:
    """Of a stream: the sets by their number, and their units.  Raises Unclear."""
    found = [unit.rstrip(b"\0") for unit in _units_of(extradata)]
    sequences: dict[int, _Sequence] = {}
    for unit in found:
        if unit and unit[0] & 0x1F == _SEQUENCE:
            number, sequence = _sequence(_Bits(unit[1:]))
            if sequences.setdefault(number, sequence) != sequence:
                raise Unclear
    pictures: dict[int, Sets] = {}
    for unit in found:
        if unit and unit[0] & 0x1F == _PICTURE:
            number, sets = _picture(_Bits(unit[1:]), sequences)
            if pictures.setdefault(number, sets) != sets:
                raise Unclear
    if len(sequences) != 1 or not pictures:  # a decoder starts afresh where another sequence begins
        raise Unclear
    return pictures, frozenset(found)


def _units_of(extradata: bytes) -> list[bytes]:
    if extradata[:1] != b"\1":
        return [extradata[begin:end] for begin, end in units(extradata, 0)]
    found, at = [], 5
    for mask in (0x1F, 0xFF):
        if at >= len(extradata):
            raise Unclear
        count, at = extradata[at] & mask, at + 1
        for _ in range(count):
            end = at + 2 + int.from_bytes(extradata[at : at + 2], "big")
            if end > len(extradata):
                raise Unclear
            found.append(extradata[at + 2 : end])
            at = end
    return found


def _sequence(bits: _Bits) -> tuple[int, _Sequence]:
    profile = bits.take(8)
    bits.take(16)
    number, chroma = bits.number(), 1
    if profile in _WITH_CHROMA_FORMAT:
        chroma = bits.number()
        if chroma == 3 and bits.flag():
            raise Unclear
        bits.number(), bits.number(), bits.take(1)
        if bits.flag():
            _skip_scaling(bits, 12 if chroma == 3 else 8)
    frame_number_bits, kind = bits.number() + 4, bits.number()
    if kind not in (0, 2):
        raise Unclear
    order_bits = bits.number() + 4 if kind == 0 else 0
    held, has_gaps = bits.number(), bits.flag()
    bits.number(), bits.number()
    is_of_frames = bits.flag()
    if has_gaps or not is_of_frames or held > _MOST_REFERENCES or max(frame_number_bits, order_bits) > 16:
        raise Unclear
    return number, _Sequence(frame_number_bits, kind == 0, order_bits, max(held, 1), chroma != 0)


def _skip_scaling(bits: _Bits, lists: int) -> None:
    for at in range(lists):
        if not bits.flag():
            continue
        last, following = 8, 8
        for _ in range(16 if at < 6 else 64):
            if following:
                following = (last + bits.signed()) % 256
            last = following or last


def _picture(bits: _Bits, sequences: Mapping[int, _Sequence]) -> tuple[int, Sets]:
    number, sequence = bits.number(), sequences.get(bits.number())
    bits.take(1)
    tells_bottom, groups = bits.flag(), bits.number()
    if sequence is None or groups:
        raise Unclear
    active = bits.number() + 1, bits.number() + 1
    weighs_predicted, weighs_bipredicted = bits.flag(), bits.take(2) == 1
    bits.signed(), bits.signed(), bits.signed(), bits.take(2)
    if bits.flag():  # slices that repeat others
        raise Unclear
    return number, Sets(*sequence, tells_bottom, active, weighs_predicted, weighs_bipredicted)


def read_slice(unit: bytes, pictures: Mapping[int, Sets]) -> tuple[int, Slice]:
    """The number of its first macroblock, and the header.  `unit`: its first WINDOW bytes, or all.  Raises Unclear."""
    first, bits = unit[0], _Bits(unit[1:])
    begins_anew, is_referred_to = is_idr(first), bool(first & 0x60)
    macroblock, kind = bits.number(), bits.number() % 5
    sets = pictures.get(bits.number())
    if sets is None or kind > INTRA or (begins_anew and not (is_referred_to and kind == INTRA)):
        raise Unclear
    frame_number = bits.take(sets.frame_number_bits)
    if begins_anew:
        bits.number()
    order = bits.take(sets.order_bits)
    bottom = bits.signed() if sets.counts_order and sets.tells_bottom else 0
    if kind == BIPREDICTED:
        bits.take(1)
    active = _active(bits, kind, sets)
    changes = _changes(bits) if active[0] else (), _changes(bits) if active[1] else ()
    if (sets.weighs_predicted and kind == PREDICTED) or (sets.weighs_bipredicted and kind == BIPREDICTED):
        _skip_weights(bits, active, has_chroma=sets.has_chroma)
    unmarked = _unmarked(bits, is_idr=begins_anew) if is_referred_to else None
    header = Slice(kind, begins_anew, is_referred_to, sets, frame_number, order, bottom, active, changes, unmarked)
    return macroblock, header


def _active(bits: _Bits, kind: int, sets: Sets) -> tuple[int, int]:
    if kind == INTRA:
        return 0, 0
    first, second = sets.active
    if bits.flag():
        first = bits.number() + 1
        second = bits.number() + 1 if kind == BIPREDICTED else 0
    if max(first, second) > _MOST_ENTRIES:
        raise Unclear
    return first, second if kind == BIPREDICTED else 0


def _changes(bits: _Bits) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    if bits.flag():
        while (operation := bits.number()) != 3:
            if operation > 1:  # references that are held for long, other views
                raise Unclear
            found.append((operation, bits.number() + 1))
    return tuple(found)


def _skip_weights(bits: _Bits, active: tuple[int, int], *, has_chroma: bool) -> None:
    bits.number()
    if has_chroma:
        bits.number()
    for _ in range(sum(active)):
        if bits.flag():
            bits.signed(), bits.signed()
        if has_chroma and bits.flag():
            bits.signed(), bits.signed(), bits.signed(), bits.signed()


def _unmarked(bits: _Bits, *, is_idr: bool) -> tuple[int, ...] | None:
    if is_idr:
        bits.take(1)
        if bits.flag():  # held for long
            raise Unclear
        return ()
    if not bits.flag():
        return None
    found: list[int] = []
    while operation := bits.number():
        if operation != 1:  # references that are held for long, numbers that start anew
            raise Unclear
        found.append(bits.number() + 1)
    return tuple(found)
