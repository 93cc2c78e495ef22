"""Protobuf written as a list of buffers, so that a tensor of many megabytes is never copied into a message.

A message is a list of parts: the serialised message without its big fields, then every big field as tag and length
followed by the raw views of its payload.  Rules of the encoding that this rests on: a parser merges a further
occurrence of a singular message field into the first one, appends a further occurrence of a repeated field, and lets
the last occurrence of a string or bytes field win.  So a bytes field deep inside singular messages is added by one
more occurrence of the fields around it (`splice`), while an element of a repeated field, or an entry of a map, is
written whole from its own parts (`field`).

Pure: nothing here waits.  `engines.scatter` sends such a list, `b"".join` makes the plain message of it.
"""

from collections.abc import Iterable, Sequence

Part = bytes | memoryview

_VARINT, _LENGTH_DELIMITED = 0, 2
MAX_FIELD_NUMBER = (1 << 29) - 1


def varint(value: int) -> bytes:
    """`value`, 0 to 2**64 - 1, in groups of seven bits, lowest first."""
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{value} is no unsigned 64-bit integer")
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def length_delimited(number: int, nbytes: int) -> bytes:
    """Tag and length in front of a string, bytes or message field of `nbytes` bytes."""
    if not 1 <= number <= MAX_FIELD_NUMBER:
        raise ValueError(f"{number} is no field number")
    return varint(number << 3 | _LENGTH_DELIMITED) + varint(nbytes)


def number_field(number: int, value: int) -> bytes:
    """An integer field, also when it is 0: presence may mean something."""
    return varint(number << 3 | _VARINT) + varint(value)


def nbytes_of(parts: Iterable[Part]) -> int:
    """Bytes of all parts together (a view counts its bytes, whatever its items are)."""
    return sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)


def field(path: Sequence[int], content: Sequence[Part]) -> list[Part]:
    """One occurrence of the field at `path`, outermost number first, whose content is `content` joined.

    Every number but the last is a message field; the last is a string, bytes or message field.  The returned list
    holds the very objects of `content` (nothing is copied) behind one small header.
    """
    if not path:
        raise ValueError("a field path needs at least one number")
    nbytes = nbytes_of(content)
    header = b""
    for number in reversed(path):
        header = length_delimited(number, len(header) + nbytes) + header
    return [header, *content]


def splice(head: bytes, *fields: Sequence[Part]) -> list[Part]:
    """The serialised message `head`, continued by further occurrences of its fields (each made by `field`)."""
    return [head, *(part for parts in fields for part in parts)]
