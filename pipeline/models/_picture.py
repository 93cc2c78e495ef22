"""What families share that take pictures and nothing else here: tokens from config or vocabulary, one run of features.

Not a family itself.  A family names its anchor and feature tokens and may override any method; shapes and pixels are
its own.  The Qwen families have their base in `_qwen_vl.py`.
"""

from typing import ClassVar

from engines.base import Modality
from pipeline.models.base import (
    Anchor,
    BundleConfig,
    Family,
    FamilyError,
    Measured,
    MediaError,
    Replacement,
    Vocabulary,
)


class PictureFamily(Family):
    """Pictures with one anchor each.  `feature_keys`: where config.json may state the token embeddings land on."""

    limits = {Modality.IMAGE: 10}
    anchor_text: ClassVar[str]
    feature_keys: ClassVar[tuple[str, ...]] = ()

    def anchor(self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality) -> Anchor:
        """The feature token as the vocabulary spells it: right where the template renders the very token that is
        repeated.
        """
        self._pictures_only(modality)
        token_id = self.feature_token(bundle, vocabulary, modality)
        text = vocabulary.token_of(token_id)
        if text is None:
            raise missing_token(self.anchor_text)
        return Anchor(token_id=token_id, text=text)

    def feature_token(self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality) -> int:
        """The configured id, else the id of the family's own placeholder."""
        self._pictures_only(modality)
        for key in self.feature_keys:
            configured = bundle.config.get(key)
            if isinstance(configured, int) and not isinstance(configured, bool):
                return configured
        return token(vocabulary, self.anchor_text)

    def replacement(
        self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality, measured: Measured
    ) -> Replacement:
        """The anchor becomes one feature token for each embedding."""
        count = measured.feature_tokens
        return Replacement((self.feature_token(bundle, vocabulary, modality),) * count, features=((0, count),))

    def _pictures_only(self, modality: Modality) -> None:
        """FamilyError: the checkpoint has no token for the modality."""
        if modality is not Modality.IMAGE:
            raise FamilyError(f"{self.name} has no token for {modality.value}")

    def _measures_pictures(self, modality: Modality, height: int, width: int) -> None:
        """MediaError for what is no picture with an area."""
        if modality is not Modality.IMAGE:
            raise MediaError(f"{self.name} takes no {modality.value} here")
        if min(height, width) < 1:
            raise MediaError(f"a picture of {width}x{height} pixels has no area")


def missing_token(text: str) -> FamilyError:
    return FamilyError(f"image placeholder token '{text}' is missing from the tokenizer vocabulary")


def token(vocabulary: Vocabulary, text: str) -> int:
    """The id of a token the family cannot do without."""
    token_id = vocabulary.id_of(text)
    if token_id is None:
        raise missing_token(text)
    return token_id
