"""What families say of a whole request and of transparency reaches the steps: items settled together, alpha kept."""

import io

import msgspec
import numpy as np
import pytest
from PIL import Image

from engines.base import Form, Modality
from pipeline.encode import Look, reconciled
from pipeline.errors import GatewayError
from pipeline.intake import Item
from pipeline.jobs import Encode, Inspected, MediaWorkshop, ModelSettings, SpanSink
from pipeline.media.image import decode
from pipeline.models.base import Hints
from pipeline.plan import ServedModel
from pool.spans import Span
from tests.models.served import Served
from tests.pipeline.test_jobs import Desk

PLAIN = Hints()


def model_of(served: Served) -> ServedModel:
    return ServedModel(
        model="m", bundle=served.bundle, family=served.family, settings=served.settings, vocabulary=served.vocabulary
    )


def look(served: Served, positions: tuple[int, ...], height: int, width: int) -> Look:
    item = Item(positions=positions, modality=Modality.IMAGE, source=Span(0, 1), base64=False, hints=PLAIN)
    facts = Inspected(
        nbytes=1,
        content_hash="0" * 64,
        height=height,
        width=width,
        frames=1,
        stored_height=height,
        stored_width=width,
        format="PNG",
    )
    return Look(item, facts, served.measure(height, width))


def test_pictures_are_settled_together_in_prompt_order() -> None:
    served = Served("llava_next")
    looks = [look(served, (2, 0), 300, 300), look(served, (1,), 1080, 1920)]
    found = reconciled(model_of(served), looks)
    assert [one.measured.primary_shape[1] for one in found] == [5, 5]
    assert [one.item for one in found] == [one.item for one in looks]


def test_families_that_say_nothing_leave_items_as_they_are() -> None:
    served = Served("llama4")
    looks = (look(served, (0,), 300, 300), look(served, (1,), 1080, 1920))
    assert reconciled(model_of(served), looks) == looks


def test_a_picture_that_occurs_twice_counts_twice() -> None:
    served = Served("inkling", {"in_patch_limit": 250})
    once, twice = look(served, (0,), 400, 400), look(served, (0, 1, 2), 400, 400)
    assert len(reconciled(model_of(served), [once])) == 1
    with pytest.raises(GatewayError) as refused:
        reconciled(model_of(served), [twice])
    assert refused.value.code == "multimodal_processing_failed"
    assert "330 patches, above the limit of 250" in str(refused.value)


def png(picture: Image.Image, **options: object) -> memoryview:
    file = io.BytesIO()
    picture.save(file, "PNG", **options)
    return memoryview(file.getvalue())


def test_alpha_is_kept_only_where_it_is_asked_for() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (6, 9, 4), np.uint8)
    data = png(Image.fromarray(pixels))
    assert np.array_equal(np.asarray(decode(data, PLAIN, keep_alpha=True)), pixels)
    assert decode(data, PLAIN).mode == "RGB"
    assert decode(png(Image.new("RGB", (3, 3))), PLAIN, keep_alpha=True).mode == "RGB"


@pytest.mark.parametrize("mode", ["LA", "P"])
def test_transparency_of_other_modes_becomes_alpha(mode: str) -> None:
    if mode == "LA":
        data = png(Image.new("LA", (4, 4), (77, 0)))
        expected = (77, 77, 77, 0)
    else:
        palette = Image.new("P", (4, 4), 1)
        palette.putpalette([0, 0, 0, 10, 20, 30])
        data = png(palette, transparency=1)
        expected = (10, 20, 30, 0)
    found = decode(data, PLAIN, keep_alpha=True)
    assert found.mode == "RGBA" and found.getpixel((0, 0)) == expected


def test_a_capped_picture_keeps_its_alpha_and_its_colours() -> None:
    """Clear pixels must not bleed into visible ones."""
    pixels = np.zeros((56, 56, 4), np.uint8)
    pixels[:, 28:] = (200, 100, 50, 255)
    found = np.asarray(decode(png(Image.fromarray(pixels)), Hints(max_long_side=28), keep_alpha=True))
    assert found.shape == (28, 28, 4)
    seen = found[found[..., 3] > 128]
    assert len(seen) and np.abs(seen[:, :3].astype(int) - (200, 100, 50)).max() <= 2


@pytest.mark.parametrize("name", ["kimi_k3", "kimi_k25"])
def test_a_job_decodes_as_its_family_wants(name: str) -> None:
    served = Served(name)
    workshop = MediaWorkshop()
    described = ModelSettings(served.family.name, msgspec.Raw(msgspec.json.encode(served.settings)))
    workshop.configure(1, msgspec.json.encode(described))
    data = bytes(png(Image.new("RGBA", (28, 28), (0, 0, 0, 0))))
    desk = Desk(1 << 16)
    measured = served.measure(28, 28)
    sink = Span(32768, 4 * 3 * 14 * 14)
    job = Encode(
        item=0,
        model=1,
        modality=Modality.IMAGE,
        source=desk.put(data),
        nbytes=len(data),
        hints=PLAIN,
        measured=measured,
        form=Form("uint8", normalised=False),
        sinks=(SpanSink(sink),),
    )
    workshop.run(job, desk)
    assert set(desk.span(sink)) == ({180, 255} if name == "kimi_k3" else {255})
