"""Answers of any shape, read back by the published codec; the message is built by hand, so the lengths matter."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_servicer import mm_sidecar_protocol as published

from engines.base import ITEM_BYTES, Form, Layout, MediaBatch, MediaItem, Modality, Range, Tensor
from pipeline.sidecar.answer import COPY_SLICE, Timing, _header, encode_answer, joined
from pipeline.sidecar.fingerprint import Fingerprint

FINGERPRINT = Fingerprint("m", "0.32.0", "torch.bfloat16", "opencv", "{}", "{}", '{"*": {"count": 999}}')
LAYOUT = Layout(batched=("image_grid_thw", "patches"), flat={"pixel_values": "patches"})


def tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    data = np.random.default_rng(seed).integers(0, 256, math.prod(shape) * ITEM_BYTES[dtype], dtype=np.uint8).tobytes()
    half = len(data) // 2
    return Tensor(dtype, shape, (memoryview(data)[:half], data[half:]))


def item(rows: int, width: int, *, dtype: str = "float32", start: int = 0, runs: tuple[Range, ...] = ()) -> MediaItem:
    side = {"image_grid_thw": tensor("int64", (1, 3)), "patches": tensor("int64", (1,))}
    length = max((run.offset + run.length - start for run in runs), default=1)
    features = runs or (Range(start, 1),)
    return MediaItem(f"{rows:064x}", Range(start, length), features, tensor(dtype, (rows, width), rows), side)


def batch(*items: MediaItem, modality: Modality = Modality.IMAGE, form: Form | None = None) -> MediaBatch:
    return MediaBatch(modality, items, 7, LAYOUT, form or Form())


def read(parts: list[Any]) -> tuple[published.JobResult, dict[str, list[dict[str, Any]]]]:
    result = published.decode_result(b"".join(parts))
    return result, {kind: [msgspec.msgpack.decode(one) for one in blobs] for kind, blobs in result.mm_kwargs.items()}


ROWS = st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 65_535, 65_536]))


@given(
    st.lists(st.tuples(ROWS, st.integers(1, 3), st.sampled_from(["uint8", "float32", "bfloat16"])), max_size=20),
    st.lists(st.integers(0, (1 << 32) - 1), max_size=40),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_answer_is_read_back(shapes: list[tuple[int, int, str]], prompt: list[int], times: bool) -> None:
    items = [item(rows, width, dtype=dtype) for rows, width, dtype in shapes]
    media = [batch(*items), batch(*items, modality=Modality.VIDEO)] if items else []
    seconds = [[0.5 * at for at in range(one.primary.shape[0] % 20)] for one in items] if times else []
    parts = encode_answer("0" * 32, FINGERPRINT, prompt, media, ("image_grid_thw",), Timing(1, 2, 3), seconds=seconds)
    result, blobs = read(parts)
    assert (result.ok, result.job_id, result.prompt_token_ids) == (True, "0" * 32, prompt)
    assert result.fingerprint is not None and result.fingerprint.to_hello() == FINGERPRINT.fields()
    assert result.timing == published.Timing(1, 2, 3)
    for one in media:
        kind = one.modality.value
        key = "pixel_values_videos" if kind == "video" else "pixel_values"
        assert len(blobs[kind]) == len(result.mm_hashes[kind]) == len(items)
        for at, (mine, theirs) in enumerate(zip(items, blobs[kind], strict=True)):
            pixels = theirs[key]
            assert pixels["data"][:2] == [mine.primary.dtype, list(mine.primary.shape)]
            assert pixels["data"][2] == msgspec.msgpack.Ext(3, b"".join(mine.primary.buffers))
            assert pixels["field"][1]["slices"] == [[[0, mine.primary.shape[0], None]]]
            assert theirs["image_grid_thw"]["data"][1] == [3]
            assert ("timestamps" in theirs) == (times and kind == "video")
            if "timestamps" in theirs:
                assert theirs["timestamps"]["data"] == seconds[at]
            assert "patches" not in theirs  # not among what vLLM's own items have


def test_placeholders_mask_what_is_no_feature() -> None:
    whole = item(1, 1, start=4, runs=(Range(4, 3),))
    holes = item(1, 1, start=10, runs=(Range(11, 2), Range(15, 1)))
    result, _ = read(encode_answer("0" * 32, FINGERPRINT, [], [batch(whole, holes)], (), Timing()))
    assert result.mm_placeholders["image"] == [
        published.Placeholder(4, 3, None),
        published.Placeholder(10, 6, [False, True, True, False, False, True]),
    ]


def test_hashes_tell_content_settings_and_form_apart() -> None:
    def hash_of(rows: int = 1, form: Form | None = None, fingerprint: Fingerprint = FINGERPRINT) -> str:
        media = [batch(item(rows, 1), form=form)]
        return read(encode_answer("0" * 32, fingerprint, [], media, (), Timing()))[0].mm_hashes["image"][0]

    raw, other = Form("uint8", normalised=False), msgspec.structs.replace(FINGERPRINT, limit_per_prompt="{}")
    found = [hash_of(), hash_of(2), hash_of(form=raw), hash_of(fingerprint=other)]
    assert len(set(found)) == 4 and found[0] == hash_of()
    assert f"{1:064x}" not in found  # not the one the router's own tensors have


@pytest.mark.parametrize("nbytes", [0, 255, 256, 65_535, 65_536, (1 << 32) - 1])
def test_headers_are_msgpack_s(nbytes: int) -> None:
    short = min(nbytes, 70_000)
    assert msgspec.msgpack.decode(_header(short, 0xC4) + bytes(short)) == bytes(short)
    assert len(_header(nbytes, 0xC4)) == 2 if nbytes < 256 else 3 if nbytes < 1 << 16 else 5


def test_more_than_a_header_says_is_refused() -> None:
    with pytest.raises(ValueError, match="4294967296"):
        _header(1 << 32, 0xC7)


async def test_joined_is_the_parts_one_after_the_other() -> None:
    parts = [b"a", memoryview(bytes(range(256)) * (COPY_SLICE // 100)), b"", b"z" * 10]
    assert await joined(parts) == b"".join(parts)
