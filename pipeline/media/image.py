"""A picture's bytes to RGB pixels, as the reference loads them, and its size from the header alone.

The rule is that of vLLM and transformers 5.24: open, apply the EXIF orientation (whatever the format; a broken tag is
ignored), take the first frame, composite what has transparency over white, convert the rest to RGB; colour profiles and
gamma are not applied.  Two decisions of ours: 16-bit gray is scaled, not clipped, and a file that ends early is an
error, never a half-gray picture.

Only the formats listed here are opened, so nothing that starts an outside program can be.  Limits are checked on the
header's figures, before anything of the picture's size is allocated.  Every failure is a MediaError.
"""

import ctypes
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, cast

import msgspec
import numpy as np
from PIL import ExifTags, Image, ImageFile, _imaging, features
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.Jpeg2KImagePlugin import Jpeg2KImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from pipeline.media import image_header
from pipeline.media.cap import capped, capped_size
from pipeline.media.window import Window
from pipeline.models.base import Hints, MediaError

MAX_PIXELS = 178_956_970
MAX_DECODED_BYTES = 512 * 1024 * 1024

# The first picture of an MPO file is its base JPEG: opened as JPEG, a malformed index cannot matter.
_OPENERS: dict[str, Callable[[IO[bytes]], ImageFile.ImageFile]] = {
    "BMP": BmpImageFile,
    "GIF": GifImageFile,
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "TIFF": TiffImageFile,
}
# What the libraries found when pillow-simd was built add: format, the feature's name, the opener.
_OPTIONAL = (("WEBP", "webp", WebPImageFile), ("JPEG2000", "jpg_2000", Jpeg2KImageFile))
for _format, _feature, _opener in _OPTIONAL:
    if features.check(_feature):
        _OPENERS[_format] = _opener
if features.check("avif"):
    from PIL.AvifImagePlugin import AvifImageFile

    _OPENERS["AVIF"] = AvifImageFile

FORMATS = tuple(sorted(_OPENERS))

_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDES_SWAP = frozenset({5, 6, 7, 8})

_WHITE = (255, 255, 255)


class Header(msgspec.Struct, frozen=True):
    """What the header tells.  `height`, `width`: of the decoded picture, after orientation and the long-side cap."""

    format: str
    stored_height: int
    stored_width: int
    height: int
    width: int


def preload() -> None:
    """Touch what every picture needs, before the fork: pages of the libraries are then shared by the pool processes."""
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS  # Pillow's own checks inside formats; ours come first
    _quieten()
    for opener in _OPENERS:
        if opener in ("JPEG", "PNG", "WEBP"):
            encoded = io.BytesIO()
            Image.new("RGB", (64, 64)).save(encoded, opener)
            decode(memoryview(encoded.getvalue()), Hints())


def _quieten() -> None:
    """What libraries say about clients' bytes goes nowhere: libtiff writes lines of its own to standard error, Pillow
    logs errors, so anybody could fill the log."""
    logging.getLogger("PIL").setLevel(logging.CRITICAL + 1)
    library = ctypes.CDLL(_imaging.__file__)
    for name in ("TIFFSetErrorHandler", "TIFFSetWarningHandler"):
        with suppress(AttributeError):  # built without libtiff
            getattr(library, name)(None)


def inspect(data: memoryview, hints: Hints) -> Header:
    """The picture's header; no pixel is decoded.  Raises MediaError: unknown format, broken header, a limit."""
    image, orientation, name = _open(data)
    return _header(image, orientation, name, hints)


def decode(data: memoryview, hints: Hints, *, keep_alpha: bool = False) -> Image.Image:
    """The picture in mode RGB, oriented, capped, in the size `inspect` tells.  Raises MediaError.

    `keep_alpha`: one with transparency stays RGBA, for a family with a rule of its own.
    """
    image, orientation, name = _open(data)
    header = _header(image, orientation, name, hints)
    with _translated(name):
        image.load()
        rgb = _to_rgba(image) if keep_alpha and _is_transparent(image) else _to_rgb(image)
        # The TIFF plugin has turned the picture already when it loaded it.
        if orientation in _TRANSPOSITIONS and not isinstance(image, TiffImageFile):
            rgb = rgb.transpose(_TRANSPOSITIONS[orientation])
        full = _oriented(header.stored_height, header.stored_width, orientation)
        if (rgb.height, rgb.width) != full:
            raise MediaError(
                f"image decode error: {full[1]}x{full[0]} pixels announced, {rgb.width}x{rgb.height} found"
            )
        return capped(rgb, header.height, header.width)


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """Whatever a codec raises over a client's bytes is the client's error; Pillow documents no closed list of types."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on odd metadata; nobody would read them
            yield
    except MediaError:
        raise
    except Image.DecompressionBombError as error:
        raise MediaError(f"image decode error: more than {MAX_PIXELS} pixels") from error
    except MemoryError as error:
        raise MediaError(f"image decode error: {name} data asks for more memory than there is") from error
    except Exception as error:
        reason = str(error)[:200] or type(error).__name__
        raise MediaError(f"image decode error: broken {name} data: {reason}") from error


def _open(data: memoryview) -> tuple[ImageFile.ImageFile, int, str]:
    """The plugin's image, not loaded, within the limits; its orientation; Pillow's name of the format."""
    name = image_header.sniff(data)
    if name is None:
        raise MediaError(f"image decode error: {image_header.name_foreign(data)} (known: {', '.join(FORMATS)})")
    opener = _OPENERS.get(name)
    if opener is None:
        raise MediaError(f"image decode error: {name} is not supported by this build (known: {', '.join(FORMATS)})")
    if name == "WEBP" and (canvas := image_header.webp_canvas(data)):
        _check_limits(*canvas, 3)
    if name == "JPEG2000" and not image_header.jpeg2000_is_whole(data):
        raise MediaError("image decode error: broken JPEG2000 data: image file is truncated")
    if name == "TIFF" and image_header.claims_too_much(data):
        raise MediaError("image decode error: broken TIFF data: its directory claims more bytes than there are")
    if name == "JPEG" and image_header.jpeg_is_endless(data):
        raise MediaError("image decode error: broken JPEG data: more segments or scans than a picture has")
    with _translated(name):
        image = opener(cast(IO[bytes], Window(data)))
        _check_limits(image.height, image.width, _pixel_bytes(image.mode))
        return image, _orientation(image, data), name


def _check_limits(height: int, width: int, pixel_bytes: int) -> None:
    if height * width > MAX_PIXELS:
        raise MediaError(
            f"image decode error: {width}x{height} are {height * width} pixels, above the limit of {MAX_PIXELS}"
        )
    decoded = height * width * pixel_bytes
    if decoded > MAX_DECODED_BYTES:
        raise MediaError(f"image decode error: {decoded} bytes decoded, above the limit of {MAX_DECODED_BYTES}")


def _pixel_bytes(mode: str) -> int:
    """Bytes of one decoded pixel: one for each channel, more for wide grays."""
    return {"I": 4, "F": 4}.get(mode) or (2 if mode.startswith("I;16") else Image.getmodebands(mode))


def _orientation(image: ImageFile.ImageFile, data: memoryview) -> int:
    """EXIF orientation (or XMP's, where Pillow looks for it), 1 when there is none that can be read."""
    try:
        if isinstance(image, PngImageFile):
            late = image_header.png_with_late_metadata(data)
            image = image if late is None else PngImageFile(io.BytesIO(late))
        if image_header.claims_too_much(_exif_block(image)):
            return 1
        # PngImageFile.getexif would decode the pixels; the base class reads what was found before them.
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # the parser fails in many ways; design: a broken tag is ignored
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _exif_block(image: ImageFile.ImageFile) -> bytes:
    """What Pillow reads as EXIF, from its TIFF header on; empty when there is none, or when it is the file itself."""
    block = image.info.get("exif")
    if block is None and (raw := image.info.get("Raw profile type exif")):  # as ImageMagick writes it into a PNG
        block = bytes.fromhex("".join(raw.split("\n")[3:]))
    while block is not None and block.startswith(b"Exif\0\0"):
        block = block[6:]
    return block or b""


def _oriented(height: int, width: int, orientation: int) -> tuple[int, int]:
    return (width, height) if orientation in _SIDES_SWAP else (height, width)


def _header(image: ImageFile.ImageFile, orientation: int, name: str, hints: Hints) -> Header:
    width, height = image._tile_size if isinstance(image, TiffImageFile) else image.size  # `size` of a TIFF is turned
    full = _oriented(height, width, orientation)
    return Header(name, height, width, *capped_size(*full, hints.max_long_side))


def _to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB.  A colour key in an RGB file is left alone, as vLLM leaves it."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):
        return _scaled_gray(image)
    if _is_transparent(image):
        rgba = _to_rgba(image)
        canvas = Image.new("RGB", rgba.size, _WHITE)
        canvas.paste(rgba, mask=rgba.getchannel("A"))
        return canvas
    return image.convert("RGB")


def _is_transparent(image: Image.Image) -> bool:
    """Whether white would show through: a colour key in an RGB file or in wide gray does not make an alpha channel."""
    return image.mode != "RGB" and not image.mode.startswith("I;16") and image.has_transparency_data


def _to_rgba(image: Image.Image) -> Image.Image:
    return image if image.mode == "RGBA" else image.convert("RGBA")


def _scaled_gray(image: Image.Image) -> Image.Image:
    """16-bit gray to 8 bits: round(x / 257), where no tie is possible; a clear value (PNG's tRNS) becomes white."""
    values = np.asarray(image)
    gray = np.empty(values.shape, np.uint8)
    clear = image.info.get("transparency")
    rows = max(1, 65536 // values.shape[1])
    for top in range(0, values.shape[0], rows):
        block = values[top : top + rows].astype(np.uint32)
        gray[top : top + rows] = (block + 128) // 257
        if isinstance(clear, int):
            gray[top : top + rows][block == clear] = 255
    return Image.fromarray(gray).convert("RGB")
