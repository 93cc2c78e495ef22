"""What can be read from a picture's bytes without its decoder.

Pillow's plugins tell most of the header (`image.py` asks them); what is here they tell too late or not at all: the
format of bytes they refuse, a WebP canvas (opening the file allocates it twice), a PNG orientation behind the pixels
(seen only after decoding them), whether a JPEG 2000 file ends early (the decoder fills the rest with black in
silence), what a TIFF directory claims (reading it copies every claim), and how often a JPEG goes over its picture
(each time costs the decoder a pass, however few bytes it takes).
"""

import re
import struct
import zlib
from collections.abc import Iterator

_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),  # BigTIFF
    (b"MM\0+", "TIFF"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG2000"),
)

# Formats clients do send and this gateway does not read: named in the refusal.
_HEIF_BRANDS = frozenset({b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"})
_BLANKS = b"\xef\xbb\xbf \t\r\n"
HTML = "this is an HTML page"
_CLIPS = (b"\x1a\x45\xdf\xa3", b"OggS", b"ID3", b"fLaC")  # Matroska and WebM first
_RIFF_OTHERS = (b"AVI ", b"WAVE")

# Bytes of one value by TIFF type; a type that is not here is skipped by the reader.
_TIFF_UNITS = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_ENTRIES = {order: struct.Struct(order + "HHI4x") for order in "<>"}
_MOST_TIFF_ENTRIES = 65536
_TIFF_SLACK = 65536  # small values may share their place

# What begins a segment, also behind fill bytes: in an entropy-coded stretch FF stands only before 00 or a restart mark.
_JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
_JPEG_SEQUENTIAL = frozenset({0xC0, 0xC1, 0xC9})
MOST_JPEG_SCANS = 250  # the most thorough encoder known writes about 70
MOST_JPEG_SEGMENTS = 10_000

_PNG_METADATA = frozenset({b"eXIf", b"tEXt", b"zTXt", b"iTXt"})


def sniff(data: memoryview) -> str | None:
    """Pillow's name of the format, from the first bytes; None for what is not read here."""
    start = bytes(data[:16])
    for signature, name in _SIGNATURES:
        if start.startswith(signature):
            return name
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "WEBP"
    if start[4:12] in (b"ftypavif", b"ftypavis"):
        return "AVIF"
    return None


def name_foreign(data: memoryview) -> str:
    """What the bytes seem to be when `sniff` does not know them, in words for the client."""
    start = bytes(data[:256]).lstrip(_BLANKS)
    if not start:
        return "there are no bytes"
    if start[4:8] == b"ftyp" and start[8:12] in _HEIF_BRANDS:
        return "HEIC is not supported"
    if start[4:8] == b"ftyp" or start.startswith(_CLIPS) or (start[:4] == b"RIFF" and start[8:12] in _RIFF_OTHERS):
        return "this is a clip or a sound, not a picture"
    if start[:4] == b"%PDF":
        return "PDF is not a picture"
    if start[:2] == b"\x1f\x8b":
        return "gzip-compressed data is not a picture"
    if b"<svg" in start.lower():
        return "SVG is not a raster picture"
    return HTML if is_html(data) else "the format is not known"


def is_html(data: memoryview) -> bool:
    """What a host sends instead of a medium that is not there, or not for everybody."""
    return bytes(data[:256]).lstrip(_BLANKS).lower().startswith((b"<!doctype html", b"<html"))


def webp_canvas(data: memoryview) -> tuple[int, int] | None:
    """Height and width of a WebP file's canvas; None when the header does not tell."""
    if len(data) < 30:
        return None
    kind, body = bytes(data[12:16]), bytes(data[20:30])
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[7:10], "little"), 1 + int.from_bytes(body[4:7], "little")
    if kind == b"VP8L" and body[0] == 0x2F:
        sides = int.from_bytes(body[1:5], "little")
        return 1 + (sides >> 14 & 0x3FFF), 1 + (sides & 0x3FFF)
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", body, 6)
        return height & 0x3FFF, width & 0x3FFF
    return None


def _png_chunks(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    position = 8
    while position + 12 <= len(data):
        length, name = struct.unpack_from(">I4s", data, position)
        end = position + 8 + length
        if end + 4 > len(data):
            return
        yield name, data[position + 8 : end]
        position = end + 4


def png_with_late_metadata(data: memoryview) -> bytes | None:
    """A PNG of the same header and metadata but no pixels, when `data` has metadata behind its pixels; else None.

    Pillow reads such chunks while it loads the (first) picture; opening this file instead gives the same `info`.
    """
    metadata: list[tuple[bytes, memoryview]] = []
    pixels_seen = late = animated = False
    for name, body in _png_chunks(data):
        if name == b"IDAT":
            pixels_seen = True
        elif name == b"IEND" or (name == b"fcTL" and pixels_seen and animated):
            break  # the next frame: Pillow stops here
        elif name == b"acTL":
            animated = True
        elif name in _PNG_METADATA:
            metadata.append((name, body))
            late |= pixels_seen
    if not late:
        return None
    rest = [(b"IDAT", memoryview(b"")), (b"IEND", memoryview(b""))]
    return bytes(data[:33]) + b"".join(_png_chunk(name, body) for name, body in metadata + rest)


def claims_too_much(data: memoryview | bytes) -> bool:
    """Whether the first directory of a TIFF file, or of an EXIF block, claims more bytes than there are.

    Values do not overlap in honest files.  Pillow copies each value before it looks at any, so 40,000 tags that all
    point at the same 500 kB would take 20 GB out of a file of one megabyte.
    """
    is_big = bytes(data[2:4]) in (b"+\0", b"\0+")
    order = "<" if bytes(data[:2]) == b"II" else ">"
    count_form, entry = (order + "Q", struct.Struct(order + "HHQ8x")) if is_big else (order + "H", _ENTRIES[order])
    try:
        (at,) = struct.unpack_from(order + ("Q" if is_big else "I"), data, 8 if is_big else 4)
        (count,) = struct.unpack_from(count_form, data, at)
    except (struct.error, OverflowError):
        return False  # there is no directory to read
    first = at + struct.calcsize(count_form)
    there = min(count, (len(data) - first) // entry.size)  # at least the count itself is within the data
    if there > _MOST_TIFF_ENTRIES:
        return True
    claimed = 0
    for _, kind, values in entry.iter_unpack(data[first : first + there * entry.size]):
        nbytes = values * _TIFF_UNITS.get(kind, 0)
        if nbytes > (8 if is_big else 4):
            claimed += nbytes
    return claimed > len(data) + _TIFF_SLACK


def jpeg_is_endless(data: memoryview) -> bool:
    """Whether a JPEG has more segments or more scans than any encoder writes.

    A decoder passes over the whole picture for each scan, also for one of ten bytes: a megabyte of scan headers keeps
    it busy for a minute.  Only files that announce several scans are walked through, the others end with their first.
    """
    position, segments, scans, components = 2, 0, 0, 0
    while (found := _JPEG_MARKER.search(data, position)) is not None:
        marker, at = data[found.end() - 1], found.end()
        if marker == 0xD9 or at + 10 > len(data):
            break
        segments += 1
        scans += marker == 0xDA
        if segments > MOST_JPEG_SEGMENTS or scans > MOST_JPEG_SCANS:
            return True
        if marker in _JPEG_SEQUENTIAL:
            components = data[at + 7]
        elif marker == 0xDA and scans == 1 and data[at + 2] == components:
            break  # all components at once, and not progressive: the only scan
        (length,) = struct.unpack_from(">H", data, at)
        position = at + max(length, 2)
    return False


def jpeg2000_is_whole(data: memoryview) -> bool:
    """Whether every tile part and the end mark are there: the decoder fills what is missing with black in silence.

    ISO 15444-1: main header segments up to the first SOT (FF90); each tile part states its length (0: up to the end
    mark); then EOC (FFD9).  Whatever follows that does not matter.
    """
    position = _codestream(data) + 2  # behind SOC
    while position + 4 <= len(data):
        marker, length = struct.unpack_from(">HH", data, position)
        if marker == 0xFF90:
            if position + 10 > len(data):
                return False
            (part,) = struct.unpack_from(">I", data, position + 6)
            if part == 0:
                return bytes(data[position:]).rstrip(b"\0").endswith(b"\xff\xd9")
            position += max(part, 12)
        elif marker == 0xFFD9:
            return True
        else:
            position += 2 + max(length, 2)
    return bytes(data[position : position + 2]) == b"\xff\xd9"


def _codestream(data: memoryview) -> int:
    """Where a JPEG 2000 codestream begins: at once, or in the `jp2c` box of a JP2 file; else the data's length."""
    if bytes(data[:4]) == b"\xff\x4f\xff\x51":
        return 0
    position = 0
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        head = 8
        if length == 1 and position + 16 <= len(data):
            (length,) = struct.unpack_from(">Q", data, position + 8)
            head = 16
        if kind == b"jp2c":
            return position + head
        if length < head:
            break
        position += length
    return len(data)


def _png_chunk(name: bytes, body: memoryview) -> bytes:
    return struct.pack(">I4s", len(body), name) + body + struct.pack(">I", zlib.crc32(body, zlib.crc32(name)))
