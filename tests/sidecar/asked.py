"""The jobs that were put to the published sidecar (`tools/record_sidecar.py`), to be put to ours.

Every file is one of the repository's test data; prompts are rendered by the model's own template.
"""

import base64
from pathlib import Path

import msgspec

from engines.base import Modality
from pipeline import models
from pipeline.bundle import Bundle
from pipeline.models.base import Anchor, Vocabulary

_DATA = Path(__file__).resolve().parent.parent / "data"
FILES = {
    "blocks": _DATA / "engines_real" / "media" / "blocks_105x65.png",
    "shapes": _DATA / "engines_real" / "media" / "shapes_500x380.jpg",
    "clip": _DATA / "clips" / "cases" / "h264_4s.mp4",
}
_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".mp4": "video/mp4"}
NOWHERE = "http://127.0.0.1:9/picture.png"  # port 9: nothing listens there


class Asked(msgspec.Struct, frozen=True):
    """One job.  `media`: (modality, a name of the files above, else a URL); `anchors`: of pictures in the prompt,
    when they are not as many.
    """

    name: str
    media: tuple[tuple[str, str], ...]
    anchors: int | None = None
    is_late: bool = False
    other_model: bool = False

    def items(self) -> list[tuple[str, str]]:
        """(modality, URL) in prompt order."""
        return [(modality, data_url(FILES[what]) if what in FILES else what) for modality, what in self.media]

    def prompt(self, bundle: Bundle) -> tuple[str, list[int]]:
        """The rendered text and its ids, an anchor for each item."""
        modalities = [modality for modality, _ in self.media]
        if self.anchors is not None:
            modalities = ["image"] * self.anchors
        parts = [{"type": modality} for modality in modalities]
        content = [{"type": "text", "text": "Look: "}, *parts, {"type": "text", "text": "What is it?"}]
        text = bundle.template.render([{"role": "user", "content": content}], anchors_of(bundle))
        return text, list(bundle.tokenizer.encode_now(text))


def anchors_of(bundle: Bundle) -> dict[Modality, Anchor]:
    """The family's anchors for the modalities it takes."""
    family = models.family_of("", str(bundle.config.config.get("model_type", "")))
    assert family is not None
    tokenizer = bundle.tokenizer
    vocabulary = Vocabulary(id_of=tokenizer.id_of, token_of=tokenizer.token_of, encode=tokenizer.encode_now)
    return {kind: family.anchor(bundle.config, vocabulary, kind) for kind in family.modalities(bundle.config)}


def data_url(path: Path) -> str:
    return f"data:{_TYPES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


CASES: tuple[Asked, ...] = (
    Asked("picture", (("image", "blocks"),)),
    Asked("photo", (("image", "shapes"),)),
    Asked("two pictures", (("image", "shapes"), ("image", "blocks"))),
    Asked("the same picture twice", (("image", "blocks"), ("image", "blocks"))),
    Asked("clip", (("video", "clip"),)),
    Asked("picture and clip", (("image", "blocks"), ("video", "clip"))),
    Asked("late", (("image", "blocks"),), is_late=True),
    Asked("other model", (("image", "blocks"),), other_model=True),
    Asked("other scheme", (("image", "ftp://127.0.0.1/picture.png"),)),
    Asked("no file", (("image", "file:///etc/hostname"),)),
    Asked("nobody there", (("image", NOWHERE),)),
    Asked("no picture", (("image", "data:image/png;base64,aGVsbG8gd29ybGQ="),)),
    Asked("no base64", (("image", "data:image/png;base64,====!"),)),
    Asked("fewer anchors", (("image", "blocks"), ("image", "shapes")), anchors=1),
    Asked("more anchors", (("image", "blocks"),), anchors=2),
    Asked("too many", (("image", "blocks"),) * 5),
    Asked("another modality", (("smell", "blocks"),)),
    Asked("sound", (("audio", "blocks"),)),
)
