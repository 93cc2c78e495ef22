"""Decoding against what the reference software made of the same files; damage, bombs and limits from the header."""

import hashlib
import io
import json
import random
import resource
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from engines.base import Form, Modality
from pipeline.media import image_header
from pipeline.media.image import FORMATS, MAX_PIXELS, Header, decode, inspect
from pipeline.models import by_name
from pipeline.models.base import BundleConfig, Hints, MediaError, Source

PICTURES = Path(__file__).parent.parent / "data" / "pictures"
CASES: dict[str, Any] = json.loads((PICTURES / "cases.json").read_text())
GOLDEN: dict[str, Any] = json.loads((PICTURES / "golden.json").read_text())
PLAIN = Hints()
QWEN3 = by_name("qwen3_vl")
SETTINGS = QWEN3.settings(BundleConfig({}))


def read(name: str) -> memoryview:
    return memoryview((PICTURES / name).read_bytes())


def tensor_of(picture: Image.Image, form: Form) -> tuple[tuple[int, ...], np.ndarray]:
    measured = QWEN3.measure(SETTINGS, Modality.IMAGE, Source(picture.height, picture.width))
    width = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}[form.dtype]
    out = np.empty(measured.primary_shape[0] * measured.primary_shape[1] * width, np.uint8)
    QWEN3.encode(SETTINGS, Modality.IMAGE, picture, measured, form, out)
    return measured.side["image_grid_thw"].values, out  # type: ignore[return-value]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.get("rgb_sha256")])
def test_pixels_are_the_reference_s(name: str) -> None:
    case = CASES[name]
    data = read(f"cases/{case['file']}")
    header, picture = inspect(data, PLAIN), decode(data, PLAIN)
    assert picture.mode == "RGB"
    assert hashlib.sha256(picture.tobytes()).hexdigest() == case["rgb_sha256"]
    width, height = case["size"]
    stored_width, stored_height = case["stored_size"]
    assert header == Header(case["format"], stored_height, stored_width, height, width)
    measured = QWEN3.measure(SETTINGS, Modality.IMAGE, Source(height, width))
    assert list(measured.side["image_grid_thw"].values) == case["grid_thw"]
    assert measured.feature_tokens == case["tokens"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["verdict"] == "reject"])
def test_refused_cases(name: str) -> None:
    data = read(f"cases/{CASES[name]['file']}")
    with pytest.raises(MediaError) as refused:
        picture = decode(data, PLAIN)
        QWEN3.measure(SETTINGS, Modality.IMAGE, Source(picture.height, picture.width))
    assert 20 < len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "name", [name for name, record in GOLDEN.items() if record.get("sha256") and not name.startswith("bad_")]
)
def test_tensors_equal_what_the_peer_sent(name: str) -> None:
    """File to bytes on the wire: every format, the long-side cap, the narrow types and raw bytes."""
    record = GOLDEN[name]
    hints = Hints(max_long_side=record.get("cap"))
    picture = decode(read(f"oracle/{record.get('file', name)}"), hints)
    grid, out = tensor_of(picture, Form(record["dtype"], normalised=record["dtype"] != "uint8"))
    if "grid_thw" in record:
        assert list(grid) == record["grid_thw"]
    assert hashlib.sha256(out).hexdigest() == record["sha256"]


def test_the_cap_s_rounding_is_the_peer_s() -> None:
    """The peer's float sums run in another order: a level in under one value of ten thousand, and no more."""
    record = GOLDEN["long_side_280"]
    picture = decode(read(f"oracle/{record['file']}"), Hints(max_long_side=280))
    assert picture.size == (280, 187)
    resized = np.asarray(picture.resize((320, 224), Image.Resampling.BICUBIC)).astype(int)
    peer = np.asarray(Image.open(PICTURES / "oracle" / record["pixels"])).astype(int)
    difference = np.abs(resized - peer)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-4


def drawn(height: int = 40, width: int = 60, mode: str = "RGB", seed: int = 3) -> Image.Image:
    """Blocks of colour with an edge in every direction, so that no two orientations look alike."""
    levels = np.random.default_rng(seed).integers(0, 256, (5, 7, len(mode)), np.uint8)
    pixels = np.kron(levels, np.ones((height // 5 + 1, width // 7 + 1, 1), np.uint8))[:height, :width]
    return Image.fromarray(pixels[..., 0] if mode == "L" else np.ascontiguousarray(pixels))


def saved(picture: Image.Image, name: str, **options: Any) -> bytes:
    encoded = io.BytesIO()
    picture.save(encoded, name, **options)
    return encoded.getvalue()


def both(data: bytes, hints: Hints = PLAIN) -> Image.Image:
    """Decoded; what the header announced is what came."""
    header, picture = inspect(memoryview(data), hints), decode(memoryview(data), hints)
    assert (header.height, header.width) == (picture.height, picture.width)
    assert picture.mode == "RGB"
    return picture


TURNED = {  # what a viewer does with orientations 1 to 8: numpy's words for it
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: lambda pixels: np.rot90(pixels),
}


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_is_applied_for_every_format(name: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    picture = drawn()
    lossless = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95}}.get(name, {})
    data = saved(picture, name, exif=exif, **lossless)
    expected = np.asarray(picture if name != "JPEG" else Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(np.asarray(both(data)), TURNED[orientation](expected))


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


XMP = b"XML:com.adobe.xmp\0\0\0\0\0" + b'<rdf tiff:Orientation="6"/>'
EXIF_6 = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"


@pytest.mark.parametrize("chunk", [(b"eXIf", EXIF_6), (b"iTXt", XMP)], ids=["exif", "xmp"])
@pytest.mark.parametrize("behind", [False, True])
def test_png_orientation_before_or_behind_the_pixels(chunk: tuple[bytes, bytes], behind: bool) -> None:
    """A header look must know what loading the whole file would find."""
    data = saved(drawn(), "PNG")
    place = data.rindex(b"IEND") - 4 if behind else 33
    picture = both(data[:place] + png_chunk(*chunk) + data[place:])
    assert picture.size == (40, 60)
    assert np.array_equal(np.asarray(picture), TURNED[6](np.asarray(drawn())))


def test_metadata_behind_a_later_frame_is_not_looked_for() -> None:
    frames = [drawn(seed=seed) for seed in (3, 4)]
    data = saved(frames[0], "PNG", save_all=True, append_images=frames[1:])
    place = data.rindex(b"IEND") - 4
    assert both(data[:place] + png_chunk(b"eXIf", EXIF_6) + data[place:]).size == (60, 40)


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP"])
def test_broken_exif_is_ignored(name: str) -> None:
    for garbage in (b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\x7f", b"Exif\0\0MM\0*\0\0\0\x08\0\x09\x01\x12\0\x03"):
        assert both(saved(drawn(), name, exif=garbage)).size == (60, 40)


def test_animations_give_their_first_frame() -> None:
    frames = [drawn(seed=seed) for seed in (3, 4, 5)]
    for name, options in (("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True})):
        data = saved(frames[0], name, save_all=True, append_images=frames[1:], **options)
        expected = both(saved(frames[0], name, **options))
        assert np.array_equal(np.asarray(both(data)), np.asarray(expected))


def test_the_first_picture_of_an_mpo_file_is_its_base_jpeg() -> None:
    first, second = drawn(), drawn(seed=4)
    data = saved(first, "MPO", save_all=True, append_images=[second])
    assert inspect(memoryview(data), PLAIN).format == "JPEG"
    assert both(data).tobytes() == both(saved(first, "JPEG")).tobytes()
    index = data.index(b"MPF\0")
    assert both(data[: index + 4] + b"\xff" * 20 + data[index + 24 :]).size == (60, 40)  # a malformed index


@pytest.mark.parametrize("name", ["PNG", "TIFF"])
def test_16_bit_gray_is_scaled(name: str) -> None:
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    expected = np.rint(values / 257).astype(np.uint8)
    found = np.asarray(both(saved(Image.fromarray(values), name)))
    assert all(np.array_equal(found[..., channel], expected) for channel in range(3))


def test_a_clear_16_bit_gray_becomes_white() -> None:
    values = np.array([[0, 1000], [2570, 65535]], np.uint16)
    data = saved(Image.fromarray(values), "PNG")
    data = data[:33] + png_chunk(b"tRNS", struct.pack(">H", 1000)) + data[33:]
    assert np.asarray(both(data))[..., 0].tolist() == [[0, 255], [10, 255]]


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK", "I", "F", "LAB"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    assert both(saved(Image.new(mode, (40, 32)), "TIFF")).size == (40, 32)


def test_white_under_transparency() -> None:
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[0, 1] = (10, 20, 30, 255)
    pixels[1, 0] = (255, 0, 0, 128)
    found = np.asarray(both(saved(Image.fromarray(pixels), "PNG")))
    assert found[0, 0].tolist() == [255, 255, 255]
    assert found[0, 1].tolist() == [10, 20, 30]
    assert found[1, 0].tolist() == [255, 127, 127]


SOURCES = {
    "JPEG": saved(drawn(96, 128), "JPEG", quality=90),
    "progressive": saved(drawn(96, 128), "JPEG", quality=90, progressive=True),
    "PNG": saved(drawn(96, 128), "PNG"),
    "WEBP": saved(drawn(96, 128), "WEBP", quality=90),
    "lossless WEBP": saved(drawn(96, 128), "WEBP", lossless=True),
    "GIF": saved(drawn(96, 128), "GIF"),
    "BMP": saved(drawn(96, 128), "BMP"),
    "TIFF": saved(drawn(96, 128), "TIFF"),
    "deflate TIFF": saved(drawn(96, 128), "TIFF", compression="tiff_deflate"),
    "JPEG2000": saved(drawn(96, 128), "JPEG2000"),
    "bare JPEG2000": saved(drawn(96, 128), "JPEG2000", no_jp2=True),
    "tiled JPEG2000": saved(drawn(96, 128), "JPEG2000", tile_size=(64, 64)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_cut_file_is_refused_or_whole(name: str) -> None:
    """At every offset: never a half-gray picture.  Only what carries no pixel (an end mark) may be missing."""
    data = SOURCES[name]
    whole = decode(memoryview(data), PLAIN).tobytes()
    refused = 0
    offsets = range(len(data)) if len(data) < 4000 else random.Random(5).sample(range(len(data)), 2500)
    for end in offsets:
        try:
            picture = decode(memoryview(data)[:end], PLAIN)
        except MediaError:
            refused += 1
        else:
            assert picture.tobytes() == whole, f"{end} of {len(data)} bytes"
    assert refused > 0.9 * len(offsets)


@pytest.mark.parametrize("name", SOURCES)
def test_flipped_bits_never_raise_anything_else(name: str) -> None:
    """A picture of the announced size or a MediaError; headers are hit most often."""
    chance = random.Random(7)
    data = SOURCES[name]
    for _ in range(400):
        spoiled = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            spoiled[int(len(data) * chance.random() ** 3)] ^= 1 << chance.randrange(8)
        try:
            header = inspect(memoryview(spoiled), PLAIN)
            if header.height * header.width > 4_000_000:
                continue  # allowed, but slow to decode
            picture = decode(memoryview(spoiled), PLAIN)
        except MediaError as refused:
            assert len(str(refused)) < 400
        else:
            assert (picture.height, picture.width) == (header.height, header.width)


def bomb(name: str, side: int) -> bytes:
    """A small file that announces a square of `side` pixels."""
    if name == "PNG":
        head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    if name == "BMP":
        return (
            b"BM"
            + struct.pack("<IHHI", 54, 0, 0, 54)
            + struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)
        )
    if name == "GIF":
        return (
            b"GIF89a"
            + struct.pack("<HHBBB", side, side, 0x80, 0, 0)
            + b"\0" * 6
            + b",\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;"
        )
    if name == "WEBP":
        body = b"VP8X\x0a\0\0\0\0\0\0\0" + (side - 1).to_bytes(3, "little") * 2
        return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body
    data = bytearray(saved(drawn(), name))
    if name == "JPEG":
        frame = data.index(b"\xff\xc0")
        data[frame + 5 : frame + 9] = struct.pack(">HH", side, side)
        return bytes(data)
    size = data.index(b"ihdr")
    data[size + 4 : size + 12] = struct.pack(">II", side, side)
    code = data.index(b"\xff\x51")
    data[code + 6 : code + 14] = struct.pack(">II", side, side)
    return bytes(data)


@pytest.mark.parametrize("name", ["PNG", "BMP", "GIF", "WEBP", "JPEG", "JPEG2000"])
@pytest.mark.parametrize("look", [inspect, decode], ids=["inspect", "decode"])
def test_bombs_are_refused_from_the_header(name: str, look: Any) -> None:
    data = memoryview(bomb(name, 40_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MediaError) as refused:
        look(data, PLAIN)
    assert str(refused.value) == (
        f"image decode error: 40000x40000 are 1600000000 pixels, above the limit of {MAX_PIXELS}"
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


def test_the_recorded_bomb_is_refused() -> None:
    with pytest.raises(MediaError, match=f"above the limit of {MAX_PIXELS}"):
        inspect(read("oracle/bad_bomb_40000.png"), PLAIN)


def test_bytes_decoded_are_limited_too() -> None:
    """13,000 x 13,000 pixels are allowed, but not of four bytes each."""
    head = struct.pack(">IIBBBBB", 13_000, 13_000, 8, 6, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", b"")
    with pytest.raises(MediaError, match="676000000 bytes decoded, above the limit of 536870912"):
        inspect(memoryview(data), PLAIN)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "there are no bytes"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC is not supported"),
        (b"<?xml version='1.0'?>\n<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG is not a raster picture"),
        (b"  <!DOCTYPE html><html>", "this is an HTML page"),
        (b"%PDF-1.7", "PDF is not a picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "the format is not known"),
        (b"\x1f\x8b\x08", "gzip-compressed data is not a picture"),
        (b"hello world, this is text", "the format is not known"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0", "this is a clip or a sound, not a picture"),
        (b"\x1a\x45\xdf\xa3\x01\0\0\0\0\0\0\x1f", "this is a clip or a sound, not a picture"),
        (b"RIFF\x24\x08\0\0WAVEfmt ", "this is a clip or a sound, not a picture"),
    ],
)
def test_what_is_no_picture_is_named(data: bytes, reason: str) -> None:
    with pytest.raises(MediaError) as refused:
        inspect(memoryview(data), PLAIN)
    assert str(refused.value) == f"image decode error: {reason} (known: {', '.join(FORMATS)})"


def test_a_format_this_build_lacks_is_named() -> None:
    with pytest.raises(MediaError, match="AVIF is not supported by this build"):
        inspect(memoryview(b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf"), PLAIN)


def test_the_formats_the_reference_reads_are_there() -> None:
    assert set(FORMATS) >= {"JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000"}


@pytest.mark.parametrize(
    ("size", "cap", "expected"),
    [
        ((640, 480), 280, (280, 210)),
        ((480, 640), 280, (210, 280)),
        ((300, 200), 112, (112, 75)),
        ((300, 200), 300, (300, 200)),
        ((300, 200), 308, (300, 200)),
        ((900, 2), 28, (28, 1)),
    ],
)
def test_long_side_cap(size: tuple[int, int], cap: int, expected: tuple[int, int]) -> None:
    data = saved(drawn(size[1], size[0]), "PNG")
    assert both(data, Hints(max_long_side=cap)).size == expected


def test_the_cap_sees_the_turned_picture() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    data = saved(drawn(100, 300), "JPEG", exif=exif)
    header = inspect(memoryview(data), Hints(max_long_side=140))
    assert header == Header("JPEG", 100, 300, 140, 47)
    assert both(data, Hints(max_long_side=140)).size == (47, 140)


def test_webp_canvas_is_read_from_all_three_headers() -> None:
    alpha = drawn(mode="RGBA")
    for data in (saved(drawn(), "WEBP"), saved(drawn(), "WEBP", lossless=True), saved(alpha, "WEBP", quality=50)):
        assert image_header.webp_canvas(memoryview(data)) == (40, 60)
    assert image_header.webp_canvas(memoryview(b"RIFF")) is None
