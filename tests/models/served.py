"""A family with one of the test bundles, as the gateway serves it: settings, pixels, prompts."""

import functools
import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from engines.base import ITEM_BYTES, Form, Modality
from pipeline import models
from pipeline.media.image import decode
from pipeline.models.base import Anchor, Family, FamilyError, Hints, Measured, Source, Vocabulary
from pipeline.prompt import Expanded, check_anchors, expand
from tests.models.synthetic import digest, draw
from tests.pipeline.bundles import bundle

REFERENCE = Path(__file__).parent.parent / "data" / "reference"
FLOAT32 = Form()


class Served:
    """`name`: of a bundle in tests/data/bundles.  `preprocessor`: overrides of its preprocessor_config.json."""

    def __init__(self, name: str, preprocessor: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.bundle = bundle(name)
        self.config = msgspec.structs.replace(
            self.bundle.config, preprocessor={**self.bundle.config.preprocessor, **(preprocessor or {})}
        )
        found = models.family_of(name, str(self.config.config["model_type"]))
        assert found is not None
        self.family: Family = found
        tokenizer = self.bundle.tokenizer
        self.vocabulary = Vocabulary(tokenizer.id_of, tokenizer.token_of, tokenizer.encode_now)
        # through JSON, as the settings reach a pool process
        self.settings = msgspec.json.decode(
            msgspec.json.encode(self.family.settings(self.config)), type=self.family.settings_type
        )

    @functools.cached_property
    def anchors(self) -> dict[Modality, Anchor]:
        """Of the modalities it serves."""
        return {
            modality: self.family.anchor(self.config, self.vocabulary, modality)
            for modality in self.family.modalities(self.config)
        }

    def guarded(self) -> dict[Modality, int]:
        """Anchors it knows for modalities it does not serve."""
        found = {}
        for modality in set(Modality) - set(self.anchors):
            try:
                found[modality] = self.family.anchor(self.config, self.vocabulary, modality).token_id
            except FamilyError:
                continue
        return found

    def measure(self, height: int, width: int, *, hints: Hints = Hints()) -> Measured:  # noqa: B008
        return self.family.measure(self.settings, Modality.IMAGE, Source(height, width, hints=hints))

    def encode(
        self,
        picture: Image.Image,
        form: Form = FLOAT32,
        *,
        hints: Hints = Hints(),  # noqa: B008
    ) -> tuple[Measured, Any]:
        """The measure and the flat bytes of the primary tensor; bytes nobody wrote would be 0xA5."""
        measured = self.measure(picture.height, picture.width, hints=hints)
        out = np.full(math.prod(measured.primary_shape) * ITEM_BYTES[form.dtype], 0xA5, np.uint8)
        self.family.encode(self.settings, Modality.IMAGE, picture, measured, form, out)
        return measured, out

    def prompt(self, content: Sequence[str | tuple[int, int]]) -> tuple[str, list[int], Expanded]:
        """One user turn, texts and pictures (height, width) as written: the rendered text, its ids, and the ids with
        every anchor replaced.
        """
        parts = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in content]
        sizes = [part for part in content if not isinstance(part, str)]
        text = self.bundle.template.render([{"role": "user", "content": parts}], self.anchors)
        ids = self.vocabulary.encode(text)
        check_anchors(ids, {Modality.IMAGE: (self.anchors[Modality.IMAGE], len(sizes))})
        replacements = [
            self.family.replacement(self.config, self.vocabulary, Modality.IMAGE, self.measure(*size)) for size in sizes
        ]
        anchor = self.anchors[Modality.IMAGE].token_id
        return text, list(ids), expand(ids, [anchor] * len(sizes), replacements)


def picture_cases(name: str) -> list[Any]:
    """The pictures of tests/data/reference/<name>.json."""
    cases = json.loads((REFERENCE / f"{name}.json").read_text())["cases"]
    return [case for case in cases if case["kind"] == "images"]


def through_png(case: Any) -> Image.Image:
    """The case's picture after it went through a file, so that the decoder's rules (white under alpha) apply."""
    drawn = draw(**{name: case["input"][name] for name in ("width", "height", "mode", "seed")})
    assert digest(drawn) == case["input"]["pixels_sha256"]
    encoded = io.BytesIO()
    drawn.save(encoded, "PNG", compress_level=1)
    return decode(memoryview(encoded.getvalue()), Hints())


def equals_reference(served: Served, case: Any) -> None:
    """Grid, token count, shape and every bit of the float32 tensor against the reference's torchvision backend."""
    expected = case["backends"]["torchvision"]
    measured, out = served.encode(through_png(case), hints=Hints(max_long_side=case.get("max_long_side_pixel")))
    tensor = expected["tensors"]["pixel_values"]
    assert measured.side["image_grid_thw"].values == tuple(expected["tensors"]["image_grid_thw"]["values"][0])
    assert measured.side["patches_per_image"].values == (tensor["shape"][0],)
    assert measured.feature_tokens == expected["num_tokens"][0]
    assert list(measured.primary_shape) == tensor["shape"]
    assert out.view(np.float32)[:8].tolist() == tensor["first8"]
    assert hashlib.sha256(out).hexdigest() == tensor["sha256"]


def vocabulary(**tokens: int) -> Vocabulary:
    """A vocabulary of these tokens only."""
    names = {token_id: name for name, token_id in tokens.items()}
    return Vocabulary(id_of=tokens.get, token_of=names.get, encode=lambda text: [])
