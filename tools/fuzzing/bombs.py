"""Small files that ask for much: memory out of a few bytes, or a decoder's time.

Each function makes one file; `size` is about how many bytes the file may have.  What they must cost at most is held
by tests/hostile/test_bombs.py; the picture subject feeds them as well.
"""

import struct
import zlib
from collections.abc import Callable

from tools.fuzzing.formats import png_chunk

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def _png(side: int, *chunks: bytes, kind: int = 2) -> bytes:
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, kind, 0, 0, 0))
    rows = zlib.compress(bytes((1 + side * 3) * side))
    return SIGNATURE + head + b"".join(chunks) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")


def png_text_bomb(size: int) -> bytes:
    """zTXt and iTXt chunks that each unpack to some forty megabytes."""
    packed = zlib.compress(bytes(40 << 20), 1)
    count = max(1, size // (2 * len(packed)))
    texts = png_chunk(b"zTXt", b"key\0\0" + packed) + png_chunk(b"iTXt", b"key\0\1\0en\0key\0" + packed)
    return _png(32, *[texts] * count)


def png_many_texts(size: int) -> bytes:
    """zTXt chunks that each stay below the decoder's limit for one."""
    chunk = png_chunk(b"zTXt", b"key\0\0" + zlib.compress(bytes(1 << 20), 9))
    return _png(32, *[chunk] * (size // len(chunk)))


def png_profile_bomb(size: int) -> bytes:
    """An iCCP chunk that unpacks to gigabytes."""
    packer = zlib.compressobj(1)
    packed = b"".join(packer.compress(bytes(1 << 20)) for _ in range(size >> 10)) + packer.flush()
    return _png(32, png_chunk(b"iCCP", b"icc\0\0" + packed))


def png_many_chunks(size: int) -> bytes:
    """Unknown chunks of no bytes: an object each for whoever keeps them."""
    return _png(32, png_chunk(b"abCd", b"") * (size // 12))


def png_late_pixels(size: int) -> bytes:
    """Far more pixel data than the header's picture takes."""
    packer = zlib.compressobj(1)
    packed = b"".join(packer.compress(bytes(1 << 20)) for _ in range(size >> 10)) + packer.flush()
    return SIGNATURE + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 32, 32, 8, 2, 0, 0, 0)) + png_chunk(b"IDAT", packed)


def png_frames(size: int) -> bytes:
    """An animation of very many frames."""
    frame = png_chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, 32, 32, 0, 0, 1, 1, 0, 0))
    return _png(32, png_chunk(b"acTL", struct.pack(">II", 0x7FFFFFFF, 0)), *[frame] * (size // len(frame)))


def exif(entries: int, span: int) -> bytes:
    """A TIFF directory whose `entries` tags each claim the same `span` bytes behind it."""
    count = min(entries, 0xFFFF)
    rows = b"".join(struct.pack("<HHII", 1 + at, 7, span, 10 + 12 * count) for at in range(count))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", count) + rows + bytes(4)


def png_exif_bomb(size: int) -> bytes:
    """Half the file is a directory, the other half is claimed by every entry of it."""
    entries = min(size // 24, 0xFFFF)
    return _png(32, png_chunk(b"eXIf", exif(entries, size // 2) + bytes(size // 2)))


def jpeg_segments(size: int) -> bytes:
    """A header of nothing but empty application segments."""
    return b"\xff\xd8" + b"\xff\xe9\0\x02" * (size // 4)


def jpeg_comments(size: int) -> bytes:
    return b"\xff\xd8" + (b"\xff\xfe\xff\xff" + bytes(0xFFFD)) * (size // 65537)


def jpeg_scans(size: int) -> bytes:
    """A progressive picture of 16 megapixels, its one refinement scan told again and again."""
    side = 4096
    tables = b"\xff\xdb\0\x43\0" + b"\1" * 64
    frame = struct.pack(">BBHBHHB", 0xFF, 0xC2, 11, 8, side, side, 1) + b"\1\x11\0"
    huffman = b"\xff\xc4\0\x14\0\1" + bytes(15) + b"\0" + b"\xff\xc4\0\x14\x10\1" + bytes(15) + b"\0"
    scan = b"\xff\xda\0\x08\1\1\0" + b"\1\x3f\0" + bytes(8)
    first = b"\xff\xda\0\x08\1\1\0" + b"\0\0\0" + bytes(8)
    return b"\xff\xd8" + tables + frame + huffman + first + scan * (size // len(scan)) + b"\xff\xd9"


def tiff_tag_bomb(size: int) -> bytes:
    entries = min(size // 24, 60_000)
    return exif(entries, size // 2) + bytes(size // 2)


def tiff_strips(size: int) -> bytes:
    """One strip for every row, and all of them the same bytes."""
    rows = min(size // 8, 200_000)
    at = 8
    offsets, counts, strip = at, at + 4 * rows, at + 8 * rows
    body = struct.pack("<I", strip) * rows + struct.pack("<I", 64) * rows + bytes(64)
    tags = ((256, 3, 1, 64), (257, 4, 1, rows), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, rows, offsets),
            (277, 3, 1, 1), (278, 3, 1, 1), (279, 4, rows, counts))  # fmt: skip
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    return b"II*\0" + struct.pack("<I", at + len(body)) + body + directory


def tiff_huge_strip(size: int) -> bytes:
    """A deflate strip that claims four gigabytes."""
    packed = zlib.compress(bytes(1 << 20))
    tags = ((256, 4, 1, 64), (257, 4, 1, 64), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (273, 4, 1, 8),
            (277, 3, 1, 1), (278, 4, 1, 64), (279, 4, 1, 0xFFFFFFF0))  # fmt: skip
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(packed)) + packed + directory


def tiff_loop(size: int) -> bytes:
    """A directory that follows itself."""
    tags = (
        (256, 4, 1, 8),
        (257, 4, 1, 8),
        (258, 3, 1, 8),
        (259, 3, 1, 1),
        (262, 3, 1, 1),
        (273, 4, 1, 8),
        (279, 4, 1, 64),
    )
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<I", 72) + bytes(64) + directory + struct.pack("<I", 72)


def gif_canvas(size: int) -> bytes:
    """65535 by 65535 pixels around a frame of one."""
    head = b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0x80, 0, 0) + bytes(6)
    return head + b",\0\0\0\0\1\0\1\0\0\2\2D\1\0;"


def gif_frame(size: int) -> bytes:
    """A canvas of one pixel around a frame that is larger than any limit."""
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    return head + b"," + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\2\2D\1\0;"


def gif_blocks(size: int) -> bytes:
    """Comments without end."""
    return b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0x80, 0, 0) + bytes(6) + (b"!\xfe\1x\0") * (size // 5)


def webp_canvas(size: int) -> bytes:
    """A canvas within the limits around an animation frame of 16 by 16 that is not there."""
    sides = (13000 - 1).to_bytes(3, "little") * 2
    chunks = b"VP8X\x0a\0\0\0\2\0\0\0" + sides + b"ANIM\x06\0\0\0" + bytes(6)
    frame = bytes(6) + (15).to_bytes(3, "little") * 2 + bytes(4)
    chunks += b"ANMF" + struct.pack("<I", len(frame)) + frame
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks


def webp_chunks(size: int) -> bytes:
    """Unknown chunks of no bytes."""
    sides = (15).to_bytes(3, "little") * 2
    chunks = b"VP8X\x0a\0\0\0\0\0\0\0" + sides + b"abcd\0\0\0\0" * (size // 8)
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks


def jpeg2000_boxes(size: int) -> bytes:
    """Boxes of no content, and one that is said to be the rest of the file again and again."""
    return b"\0\0\0\x0cjP  \r\n\x87\n\0\0\0\x14ftypjp2 \0\0\0\0jp2 " + b"\0\0\0\x08free" * (size // 8)


def jpeg2000_components(size: int) -> bytes:
    """A code stream of 16384 components."""
    count = 16384
    siz = struct.pack(">HIIIIIIIIH", 0, 64, 64, 0, 0, 64, 64, 0, 0, count) + b"\7\1\1" * count
    return b"\xff\x4f\xff\x51" + struct.pack(">H", (len(siz) + 2) & 0xFFFF) + siz + b"\xff\xd9"


def bmp_runs(size: int) -> bytes:
    """Run-length codes that draw nothing."""
    head = struct.pack("<IiiHHIIiiII", 40, 4096, 4096, 1, 8, 1, 0, 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + 1024) + head + bytes(1024) + b"\0\0" * (size // 2)


BOMBS: dict[str, Callable[[int], bytes]] = {
    made.__name__: made
    for made in (
        png_text_bomb,
        png_many_texts,
        png_profile_bomb,
        png_many_chunks,
        png_late_pixels,
        png_frames,
        png_exif_bomb,
        jpeg_segments,
        jpeg_comments,
        jpeg_scans,
        tiff_tag_bomb,
        tiff_strips,
        tiff_huge_strip,
        tiff_loop,
        gif_canvas,
        gif_frame,
        gif_blocks,
        webp_canvas,
        webp_chunks,
        jpeg2000_boxes,
        jpeg2000_components,
        bmp_runs,
    )
}
