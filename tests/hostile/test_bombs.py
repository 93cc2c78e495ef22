"""Small files that ask for much, in a pool process's own limits: what each may cost at most.

Half a megabyte of a bomb is refused or decoded within a few CPU seconds and a bound of memory; a picture for which
there is not enough memory is refused too, and never ends the process.
"""

from pathlib import Path

import pytest
from PIL import Image

from tests.hostile.bench import Cost, costs
from tools.fuzzing.bombs import BOMBS

MIB = 1 << 20


@pytest.fixture(scope="module")
def small() -> dict[str, Cost]:
    return dict(zip(BOMBS, costs([{"bomb": name, "size": MIB // 2} for name in BOMBS]), strict=True))


@pytest.mark.parametrize("name", BOMBS)
def test_half_a_megabyte_costs_little(small: dict[str, Cost], name: str) -> None:
    cost = small[name]
    assert cost.answer.startswith(("refused: image decode error: ", "refused by shape", "decoded")), cost
    assert cost.cpu_s < 3
    assert cost.peak_bytes < 400 * MIB


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiff_tag_bomb", "broken TIFF data: its directory claims more bytes than there are"),
        ("jpeg_scans", "broken JPEG data: more segments or scans than a picture has"),
        ("jpeg_segments", "broken JPEG data: more segments or scans than a picture has"),
        ("gif_canvas", "65535x65535 are 4294836225 pixels, above the limit of 178956970"),
        ("gif_frame", "more than 178956970 pixels"),
        ("png_text_bomb", "Decompressed data too large"),
        ("png_many_texts", "Too much memory used in text chunks"),
        ("png_profile_bomb", "Decompressed data too large"),
    ],
)
def test_where_it_is_stopped(small: dict[str, Cost], name: str, words: str) -> None:
    assert words in small[name].answer


def test_metadata_that_claims_too_much_is_no_orientation(small: dict[str, Cost]) -> None:
    assert small["png_exif_bomb"].answer == "decoded PNG"
    assert small["png_exif_bomb"].peak_bytes < 16 * MIB


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "JPEG2000", "GIF"])
def test_memory_that_is_not_there_is_a_refusal(tmp_path: Path, kind: str) -> None:
    """128 MiB for what takes more, in every decoder: its allocation fails, a sentence comes back, the process lives."""
    path = tmp_path / "large"
    side = {"JPEG2000": 4000, "WEBP": 6000}.get(kind, 8000)  # which take 18 and 15 bytes a pixel
    coding = {"compression": "tiff_deflate"} if kind == "TIFF" else {}
    Image.new("L" if kind == "GIF" else "RGB", (side, side)).save(path, kind, **coding)
    (cost,) = costs([{"path": str(path)}], limit_bytes=128 * MIB)
    assert cost.answer.startswith("refused: "), cost
    assert cost.peak_bytes < 160 * MIB
