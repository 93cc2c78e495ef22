"""Pictures of every format, and changes that keep a file's structure while its figures become wrong.

A decoder throws a file with a broken check sum or box away at the door; what is behind the door is only reached by
files whose frame is right.  `seeds` makes the whole ones, `reshape` changes one by the rules of its format.
"""

import io
import random
import struct
import zlib
from collections.abc import Callable

import numpy as np
from PIL import ExifTags, Image

from tools.fuzzing.mutate import number, put

_SHAPES = ((1, 1), (40, 60), (33, 7), (96, 128))


def _drawn(mode: str, height: int, width: int) -> Image.Image:
    chance = np.random.default_rng(height * width + len(mode))
    rgb = Image.fromarray(chance.integers(0, 256, (height, width, 3), np.uint8).repeat(1, 0))
    if mode == "I;16":
        return Image.fromarray(chance.integers(0, 65536, (height, width)).astype(np.uint16))
    if mode == "LAB":
        return Image.new(mode, (width, height), (90, 30, 60))
    picture = rgb.convert("P", palette=Image.Palette.ADAPTIVE) if mode == "P" else rgb.convert(mode)
    if mode in ("LA", "RGBA"):
        picture.putalpha(rgb.convert("L"))
    return picture


def _saved(picture: Image.Image, name: str, **options: object) -> bytes:
    held = io.BytesIO()
    picture.save(held, name, **options)
    return held.getvalue()


def seeds() -> dict[str, list[bytes]]:
    """Whole files by format."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    exif[ExifTags.Base.Make] = "maker"
    icc = b"\0\0\1\0" + bytes(124) + b"\0\0\0\0"
    found: dict[str, list[bytes]] = {name: [] for name in ("PNG", "JPEG", "TIFF", "GIF", "WEBP", "JPEG2000", "BMP")}
    for height, width in _SHAPES:
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
            found["PNG"].append(_saved(_drawn(mode, height, width), "PNG"))
        rgb, more = _drawn("RGB", height, width), [_drawn("RGB", height, width) for _ in range(2)]
        found["PNG"].append(_saved(rgb, "PNG", save_all=True, append_images=more, exif=exif, icc_profile=icc))
        for options in ({}, {"progressive": True}, {"exif": exif, "icc_profile": icc}, {"restart_marker_rows": 1}):
            found["JPEG"].append(_saved(rgb, "JPEG", subsampling=height % 3, **options))
        found["JPEG"] += [_saved(_drawn(mode, height, width), "JPEG") for mode in ("L", "CMYK")]
        found["JPEG"].append(_saved(rgb, "MPO", save_all=True, append_images=more))
        for mode in ("1", "L", "P", "RGB", "RGBA", "CMYK", "I;16", "F", "LAB"):
            found["TIFF"].append(_saved(_drawn(mode, height, width), "TIFF"))
        for coding in ("tiff_deflate", "tiff_lzw", "packbits", "jpeg", "tiff_adobe_deflate"):
            found["TIFF"].append(_saved(rgb, "TIFF", compression=coding, exif=exif))
        found["TIFF"] += [_saved(_drawn("1", height, width), "TIFF", compression=c) for c in ("group3", "group4")]
        found["TIFF"].append(_saved(rgb, "TIFF", save_all=True, append_images=[_drawn("RGB", height, width)]))
        found["TIFF"].append(_saved(rgb, "TIFF", big_tiff=True))
        found["GIF"] += [
            _saved(_drawn("P", height, width), "GIF"),
            _saved(_drawn("L", height, width), "GIF", interlace=1),
        ]
        found["GIF"].append(_saved(rgb, "GIF", save_all=True, append_images=more, duration=40, disposal=2))
        for options in ({"lossless": True}, {"quality": 60}, {"exif": exif, "icc_profile": icc}):
            found["WEBP"] += [_saved(_drawn(mode, height, width), "WEBP", **options) for mode in ("RGB", "RGBA")]
        found["WEBP"].append(_saved(rgb, "WEBP", save_all=True, append_images=more))
        for options in ({}, {"no_jp2": True}, {"irreversible": True}) if height > 33 else ():  # the encoder's own bound
            found["JPEG2000"] += [_saved(_drawn(mode, height, width), "JPEG2000", **options) for mode in ("L", "RGBA")]
        found["BMP"] += [_saved(_drawn(mode, height, width), "BMP") for mode in ("1", "L", "P", "RGB", "RGBA")]
    found["JPEG2000"].append(_saved(_drawn("RGB", 96, 128), "JPEG2000", tile_size=(64, 64), num_resolutions=3))
    return found


def reshape(chance: random.Random, name: str, data: bytes) -> bytes:
    """`data`, a whole file of format `name`, with one to three of its units changed."""
    for _ in range(chance.randint(1, 3)):
        data = _RESHAPERS[name](chance, data)
    return data


# ---------------------------------------------------------------- PNG

_PNG_NAMES = (b"PLTE", b"tRNS", b"iCCP", b"zTXt", b"iTXt", b"tEXt", b"eXIf", b"acTL", b"fcTL", b"fdAT", b"pHYs",
              b"gAMA", b"cHRM", b"sRGB", b"IDAT", b"IEND", b"IHDR", b"abCd", b"CgBI")  # fmt: skip


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I4s", len(body), name) + body + struct.pack(">I", zlib.crc32(body, zlib.crc32(name)))


def _png_units(data: bytes) -> list[tuple[bytes, bytes]]:
    units, at = [], 8
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        units.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    return units


def _png_body(chance: random.Random, name: bytes) -> bytes:
    if name in (b"zTXt", b"iCCP"):
        return b"key\0" + chance.choice((b"\0", b"\1")) + zlib.compress(bytes(chance.choice((0, 10, 1 << 16, 1 << 22))))
    if name == b"iTXt":
        packed = zlib.compress(bytes(chance.choice((0, 10, 1 << 22))))
        return (
            chance.choice((b"k", b"XML:com.adobe.xmp"))
            + b"\0"
            + chance.choice((b"\1\0", b"\0\0"))
            + b"en\0k\0"
            + packed
        )
    if name in (b"acTL", b"fcTL", b"fdAT", b"IHDR"):
        return b"".join(struct.pack(">I", number(chance) & 0xFFFFFFFF) for _ in range(chance.choice((1, 2, 5, 6, 7))))
    if name == b"eXIf":
        return chance.choice((b"MM\0*\0\0\0\x08", b"II*\0\x08\0\0\0")) + chance.randbytes(chance.choice((0, 2, 14, 60)))
    return chance.randbytes(chance.choice((0, 1, 2, 3, 6, 9, 256, 768, 769)))


def _reshape_png(chance: random.Random, data: bytes) -> bytes:
    units = _png_units(data) or [(b"IHDR", bytes(13))]
    at = chance.randrange(len(units))
    kind = chance.randrange(7)
    if kind == 0 and units[0][0] == b"IHDR":
        head = bytearray(units[0][1])
        put(head, chance.choice((0, 4)), ">I", number(chance))
        units[0] = (b"IHDR", bytes(head))
    elif kind == 1:
        head = bytearray(units[0][1])
        put(head, chance.choice((8, 9, 10, 11, 12)), "<B", chance.choice((0, 1, 2, 3, 4, 6, 8, 16, 255)))
        units[0] = (units[0][0], bytes(head))
    elif kind == 2:
        units.insert(at, units[chance.randrange(len(units))])
    elif kind == 3:
        del units[at]
    elif kind == 4:
        raw = chance.randbytes(chance.choice((0, 1, 100, 5000))) * chance.choice((1, 1, 100))
        units[at] = (b"IDAT", zlib.compress(raw)[: chance.choice((5, 1 << 20))])
    elif kind == 5:
        body = bytearray(units[at][1])
        put(body, chance.randrange(len(body) + 1), chance.choice(("<B", ">H", ">I")), number(chance))
        units[at] = (units[at][0], bytes(body))
    else:
        name = chance.choice(_PNG_NAMES)
        units[at:at] = [(name, _png_body(chance, name))] * chance.choice((1, 1, 1, 3, 200))
    return data[:8] + b"".join(png_chunk(*unit) for unit in units)


# ---------------------------------------------------------------- JPEG


def _jpeg_units(data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """Segments before the first scan, and the rest."""
    units, at = [], 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        (length,) = struct.unpack_from(">H", data, at + 2)
        units.append((data[at + 1], data[at + 4 : at + 2 + length]))
        at += 2 + length
    return units, data[at:]


def _reshape_jpeg(chance: random.Random, data: bytes) -> bytes:
    units, rest = _jpeg_units(data)
    if not units:
        return data + chance.randbytes(4)
    at = chance.randrange(len(units))
    marker, body = units[at]
    frames = [place for place, (mark, _) in enumerate(units) if 0xC0 <= mark <= 0xCF and mark not in (0xC4, 0xC8, 0xCC)]
    kind = chance.randrange(8)
    if kind <= 1 and frames:
        changed = bytearray(units[frames[0]][1])
        put(changed, chance.choice((0, 1, 3, 5, 6, 7, 8)), chance.choice(("<B", ">H")), number(chance))
        mark = units[frames[0]][0] if chance.random() < 0.7 else 0xC0 + chance.randrange(16)
        units[frames[0]] = (mark, bytes(changed))
    elif kind == 2:
        del units[at]
    elif kind == 3:
        units.insert(chance.randrange(len(units)), units[at])
    elif kind == 4:
        changed = bytearray(body)
        put(changed, chance.randrange(len(changed) + 1), chance.choice(("<B", ">H", ">I")), number(chance))
        units[at] = (marker, bytes(changed))
    elif kind == 5:
        what = chance.choice(
            (
                (0xE0, b"JFIF\0\1\2\0" + chance.randbytes(6)),
                (0xE1, b"Exif\0\0" + chance.choice((b"MM\0*\0\0\0\x08", b"II*\0\x08\0\0\0")) + chance.randbytes(40)),
                (0xE1, b"http://ns.adobe.com/xap/1.0/\0" + b'<x tiff:Orientation="6"/>'),
                (0xE2, b"ICC_PROFILE\0" + chance.randbytes(2 + chance.randrange(200))),
                (0xE2, b"MPF\0" + chance.randbytes(80)),
                (0xED, b"Photoshop 3.0\0" + b"8BIM" + chance.randbytes(30)),
                (0xEE, b"Adobe\0\x64" + chance.randbytes(5)),
                (0xDD, struct.pack(">H", number(chance) & 0xFFFF)),
                (0xFE, b"comment"),
            )
        )
        units[at:at] = [what] * chance.choice((1, 1, 1, 300))
    elif kind == 6:
        scan = bytearray(rest)
        put(scan, chance.randrange(min(len(scan), 14) + 1), "<B", number(chance))
        rest = bytes(scan)
    else:
        rest = rest[: chance.randrange(len(rest) + 1)] + rest[: chance.choice((0, 14, len(rest)))] + b"\xff\xd9"
    return b"\xff\xd8" + b"".join(struct.pack(">BBH", 255, m, (len(b) + 2) & 0xFFFF) + b for m, b in units) + rest


# ---------------------------------------------------------------- TIFF


_TIFF_TAGS = (254, 256, 257, 258, 259, 262, 273, 274, 277, 278, 279, 284, 317, 322, 323, 324, 325, 338, 339, 347, 530,
              700, 34377, 34665, 34675)  # fmt: skip


def _reshape_tiff(chance: random.Random, data: bytes) -> bytes:
    """Entries of the first directory; a directory that follows itself; entries without end."""
    out = bytearray(data)
    if len(out) < 16:
        return bytes(out)
    order = "<" if out[:2] == b"II" else ">"
    is_big = 43 in (out[2], out[3])
    entry = 20 if is_big else 12
    word = order + ("Q" if is_big else "I")
    (at,) = struct.unpack_from(word, out, 8 if is_big else 4)
    if at + 8 > len(out):
        return bytes(out)
    (count,) = struct.unpack_from(order + ("Q" if is_big else "H"), out, at)
    first = at + (8 if is_big else 2)
    chosen = first + entry * chance.randrange(max(1, min(count, 60)))
    kind = chance.randrange(7)
    if kind == 0:
        put(out, chosen, order + "H", chance.choice(_TIFF_TAGS))
    elif kind == 1:
        put(out, chosen + 2, order + "H", chance.randrange(0, 18))
    elif kind == 2:
        put(out, chosen + 4, word, number(chance))
    elif kind <= 4:
        put(out, chosen + (12 if is_big else 8), chance.choice((order + "H", word)), number(chance))
    elif kind == 5:
        put(out, at, order + "H", number(chance))
    else:
        put(out, first + entry * count, word, chance.choice((at, number(chance))))
    return bytes(out)


# ---------------------------------------------------------------- GIF, WebP, JPEG 2000, BMP


def _reshape_gif(chance: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    places = [at for at in range(13, len(out) - 10) if out[at] == 0x2C][:6] or [6]
    at = chance.choice(places)
    kind = chance.randrange(6)
    if kind == 0:
        put(out, chance.choice((6, 8)), "<H", number(chance))
    elif kind == 1:
        put(out, 10, "<B", number(chance))
    elif kind <= 3:
        put(out, at + chance.choice((1, 3, 5, 7)), "<H", number(chance))
    elif kind == 4:
        put(out, at + chance.choice((9, 10, 11)), "<B", number(chance))
    else:
        block = (
            b"!" + bytes([chance.choice((0xF9, 0xFE, 0xFF, 1))]) + bytes([chance.randrange(12)]) + chance.randbytes(9)
        )
        out[at:at] = (block + b"\0") * chance.choice((1, 1, 500))
    return bytes(out)


def _reshape_webp(chance: random.Random, data: bytes) -> bytes:
    units, at = [], 12
    while at + 8 <= len(data):
        name, length = struct.unpack_from("<4sI", data, at)
        units.append((name, data[at + 8 : at + 8 + length]))
        at += 8 + length + (length & 1)
    if not units:
        return data + b"\0"
    at = chance.randrange(len(units))
    kind = chance.randrange(5)
    if kind == 0:
        units.insert(chance.randrange(len(units) + 1), units[at])
    elif kind == 1:
        del units[at]
    elif kind == 2:
        head = (
            b"VP8X" if chance.random() < 0.8 else chance.choice((b"ANIM", b"ANMF", b"ALPH", b"ICCP", b"EXIF", b"XMP "))
        )
        sides = (number(chance) & 0xFFFFFF).to_bytes(3, "little") + (number(chance) & 0xFFFFFF).to_bytes(3, "little")
        units.insert(chance.choice((0, at)), (head, bytes([chance.randrange(64), 0, 0, 0]) + sides))
    else:
        body = bytearray(units[at][1])
        put(body, min(len(body), chance.randrange(24)), chance.choice(("<B", "<H", "<I")), number(chance))
        units[at] = (units[at][0], bytes(body))
    body = b"".join(struct.pack("<4sI", name, len(b)) + b + b"\0" * (len(b) & 1) for name, b in units)
    size = len(body) + 4 if chance.random() < 0.9 else number(chance) & 0xFFFFFFFF
    return b"RIFF" + struct.pack("<I", size) + b"WEBP" + body


def _reshape_jpeg2000(chance: random.Random, data: bytes) -> bytes:
    """A field of a main header marker (SIZ, COD, QCD, SOT), or of a box."""
    out = bytearray(data)
    marks = (
        b"\xff\x51",
        b"\xff\x52",
        b"\xff\x5c",
        b"\xff\x90",
        b"ihdr",
        b"colr",
        b"pclr",
        b"cdef",
        b"cmap",
        b"jp2h",
        b"jp2c",
    )
    found = [out.find(mark) for mark in marks if out.find(mark) >= 0]
    if not found:
        return bytes(out)
    at = chance.choice(found)
    if chance.random() < 0.15:
        put(out, at - 4, ">I", number(chance))
    elif chance.random() < 0.1:
        box = chance.choice((b"pclr", b"cdef", b"cmap", b"bpcc", b"res ")) + chance.randbytes(chance.choice((2, 9, 40)))
        out[at - 4 : at - 4] = struct.pack(">I", len(box) + 4) + box
    else:
        put(out, at + 2 + chance.randrange(44), chance.choice((">B", ">H", ">I")), number(chance))
    return bytes(out)


def _reshape_bmp(chance: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    field = chance.choice(
        ((10, "<I"), (14, "<I"), (18, "<I"), (22, "<I"), (26, "<H"), (28, "<H"), (30, "<I"), (46, "<I"))
    )
    small = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 40, 64, 108, 124)
    put(out, *field, chance.choice(small) if chance.random() < 0.5 else number(chance))
    return bytes(out)


_RESHAPERS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "PNG": _reshape_png,
    "JPEG": _reshape_jpeg,
    "TIFF": _reshape_tiff,
    "GIF": _reshape_gif,
    "WEBP": _reshape_webp,
    "JPEG2000": _reshape_jpeg2000,
    "BMP": _reshape_bmp,
}
