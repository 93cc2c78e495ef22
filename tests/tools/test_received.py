"""What the stand-in accepts and refuses: the real gateway's recorded messages pass, each broken copy names its rule."""

import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tools.fake.received import Expectations, receive
from tools.fake.tensors import Reader, Refused
from tools.fake.words import sentence

DATA = Path(__file__).resolve().parent.parent / "data" / "tools"
ANCHORS = {"image": 151655, "video": 151656}
QWEN = Expectations(vocabulary=151936, anchors=ANCHORS)


def recorded(name: str) -> Any:
    raw = (DATA / name).read_bytes()
    return pb.GenerateRequest.FromString(lzma.decompress(raw) if name.endswith(".xz") else raw)


def picture() -> Any:
    return recorded("img_png_1bit_256_png-1.pb.xz")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("text_hi-1.pb", "I received no media, 9 prompt tokens"),
        (
            "img_png_1bit_256_png-1.pb.xz",
            "1 image: pixel_values float32 (256, 1536), image_grid_thw [1, 16, 16], 64 image",
        ),
        (
            "ten_images-1.pb.xz",
            "10 images: pixel_values float32 (2560, 1536), image_grid_thw [1, 16, 16], 64 image tokens",
        ),
        (
            "video_short-1.pb.xz",
            "1 clip: pixel_values float32 (96, 1536), video_grid_thw [2, 6, 8], 40 video tokens at 4..43",
        ),
    ],
)
def test_recorded_messages_are_accepted(name: str, words: str) -> None:
    assert words in sentence(receive(recorded(name), QWEN, Reader(), light=False), "")


def _cut_tensor(message: Any) -> None:
    message.mm_inputs.pixel_values.inline = message.mm_inputs.pixel_values.inline[:-4]


def _not_a_number(message: Any) -> None:
    data = bytearray(message.mm_inputs.pixel_values.inline)
    data[:4] = b"\x00\x00\xc0\x7f"
    message.mm_inputs.pixel_values.inline = bytes(data)


def _swap_grid(message: Any) -> None:
    grid = message.mm_inputs.model_specific_tensors["image_grid_thw"]
    grid.inline = b"".join(side.to_bytes(8, "little") for side in (1, 16, 18))


def _range_into_text(message: Any) -> None:
    message.mm_inputs.mm_placeholders[0].offset += 1


def _range_too_short(message: Any) -> None:
    message.mm_inputs.mm_placeholders[0].length -= 1


def _range_outside(message: Any) -> None:
    message.mm_inputs.mm_placeholders[0].offset = 10_000


def _one_hash_more(message: Any) -> None:
    message.mm_inputs.mm_hashes.append("0" * 64)


def _short_hash(message: Any) -> None:
    message.mm_inputs.mm_hashes[0] = "0" * 63


def _no_pixels(message: Any) -> None:
    message.mm_inputs.ClearField("pixel_values")


def _no_sizes(message: Any) -> None:
    del message.mm_inputs.model_specific_tensors["patches_per_image"]


def _other_dtype(message: Any) -> None:
    message.mm_inputs.pixel_values.dtype = "float64"


def _no_token(message: Any) -> None:
    message.mm_inputs.ClearField("im_token_id")


def _bare_anchor(message: Any) -> None:
    message.tokenized.input_ids.append(151655)


def _outside_vocabulary(message: Any) -> None:
    message.tokenized.input_ids[0] = 151936


def _twice_the_batch(message: Any) -> None:
    message.extra_mm_inputs.add().CopyFrom(message.mm_inputs)


def _empty_prompt(message: Any) -> None:
    del message.tokenized.input_ids[:]


def _references_too(message: Any) -> None:
    message.media_refs.items.add(modality=1, url="data:,")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_cut_tensor, "do not make float32"),
        (_not_a_number, "not finite"),
        (_swap_grid, "names 288 patches, pixel_values has 256 rows"),
        (_range_into_text, "holds 63 feature tokens, the item yields 64"),
        (_range_too_short, "holds 63 feature tokens, the item yields 64"),
        (_range_outside, "not inside the prompt"),
        (_one_hash_more, "1 placeholder ranges, 2 hashes"),
        (_short_hash, "not 64 hex characters"),
        (_no_pixels, "without pixel_values"),
        (_no_sizes, "missing flat sizes tensor patches_per_image"),
        (_other_dtype, "unknown dtype 'float64'"),
        (_no_token, "without im_token_id"),
        (_bare_anchor, "covered by no range"),
        (_outside_vocabulary, "outside the vocabulary"),
        (_twice_the_batch, "overlaps another"),
        (_empty_prompt, "empty prompt"),
        (_references_too, "no media processor"),
    ],
)
def test_broken_messages_are_refused_by_name(damage: Callable[[Any], None], reason: str) -> None:
    message = picture()
    damage(message)
    with pytest.raises(Refused, match=reason):
        receive(message, QWEN, Reader(), light=False)


def test_a_worker_that_normalises_itself_refuses_floats() -> None:
    with pytest.raises(Refused, match="this worker takes raw uint8 pixels"):
        receive(picture(), Expectations(vocabulary=151936, normalises=True), Reader(), light=False)


def test_references_need_one_anchor_each() -> None:
    message = recorded("text_hi-1.pb")
    message.tokenized.input_ids.extend([151655])
    for _ in range(2):
        message.media_refs.items.add(modality=1, url="https://example.invalid/a.png")
    taking = Expectations(vocabulary=151936, references=True, anchors=ANCHORS)
    with pytest.raises(Refused, match="2 image references, 1 anchors"):
        receive(message, taking, Reader(), light=False)


def _as_segment(message: Any, directory: Path, *, mode: int = 0o600, short: int = 0) -> Path:
    """Move the pixels of a recorded message into a segment."""
    pixels = message.mm_inputs.pixel_values
    path = directory / "smg-tokenspeed-1-2-3"
    path.write_bytes(pixels.inline[: len(pixels.inline) - short])
    path.chmod(mode)
    pixels.shm.name, pixels.shm.nbytes, pixels.shm.owner_id = path.name, 256 * 1536 * 4, "smg:1"
    return path


@pytest.mark.parametrize("light", [False, True])
def test_a_segment_is_read_and_unlinked(tmp_path: Path, light: bool) -> None:
    inline = receive(picture(), QWEN, Reader(), light=light).batches[0].tensors["pixel_values"]
    message = picture()
    path = _as_segment(message, tmp_path)
    seen = receive(message, QWEN, Reader(str(tmp_path)), light=light).batches[0].tensors["pixel_values"]
    assert not path.exists()
    assert (inline.transport, seen.transport) == ("inline", "shm")
    assert (seen.sha256, seen.nbytes) == (inline.sha256, inline.nbytes)
    assert bool(seen.sha256) is not light


@pytest.mark.parametrize(
    ("mode", "short", "reason"), [(0o644, 0, "mode 0600"), (0o600, 1, "segment is short, 1572863 of 1572864 bytes")]
)
def test_a_bad_segment_is_refused_and_still_consumed(tmp_path: Path, mode: int, short: int, reason: str) -> None:
    message = picture()
    path = _as_segment(message, tmp_path, mode=mode, short=short)
    with pytest.raises(Refused, match=reason):
        receive(message, QWEN, Reader(str(tmp_path)), light=True)
    assert not path.exists()


def test_a_linked_or_foreign_name_is_not_followed(tmp_path: Path) -> None:
    message = picture()
    path = _as_segment(message, tmp_path)
    path.rename(tmp_path / "target")
    os.symlink(tmp_path / "target", path)
    with pytest.raises(Refused, match="cannot be opened"):
        receive(message, QWEN, Reader(str(tmp_path)), light=True)
    assert (tmp_path / "target").exists()
    message.mm_inputs.pixel_values.shm.name = "../target"
    with pytest.raises(Refused, match="bad segment name"):
        receive(message, QWEN, Reader(str(tmp_path)), light=True)
