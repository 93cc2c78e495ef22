"""Qwen3-ASR: sounds, and nothing else.

Token ids stand in config.json's `thinker_config`.  Features are those of `WhisperFeatureExtractor`, which the engine
that takes sounds expects, not of transformers' `Qwen3ASRFeatureExtractor`, which fills every sound up to half a second
and to whole windows.
"""

import msgspec

from engines.base import Modality
from pipeline.models._audio import QwenSounds, SoundSettings
from pipeline.models._values import section
from pipeline.models.base import Anchor, BundleConfig, FamilyError, Vocabulary

_ANCHOR = "<|audio_pad|>"


class AsrSettings(msgspec.Struct, frozen=True):
    sound: SoundSettings


class Qwen3Asr(QwenSounds):
    name = "qwen3_asr"
    model_types = frozenset({"qwen3_asr"})
    name_patterns = (("qwen3-asr",), ("qwen3_asr",))
    limits = {Modality.AUDIO: 10}
    settings_type = AsrSettings

    def settings(self, bundle: BundleConfig) -> AsrSettings:
        return AsrSettings(self.sound_settings(bundle))

    def anchor(self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality) -> Anchor:
        token_id = self.feature_token(bundle, vocabulary, modality)
        text = vocabulary.token_of(token_id)
        if text is None:
            raise _missing()
        return Anchor(token_id=token_id, text=text)

    def feature_token(self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality) -> int:
        """The configured id, else the id of the family's own placeholder."""
        if modality is not Modality.AUDIO:
            raise FamilyError(f"{self.name} has no token for {modality.value}")
        configured = {**bundle.config, **section(bundle.config, "thinker_config")}.get("audio_token_id")
        if isinstance(configured, int) and not isinstance(configured, bool):
            return configured
        token_id = vocabulary.id_of(_ANCHOR)
        if token_id is None:
            raise _missing()
        return token_id


def _missing() -> FamilyError:
    return FamilyError(f"audio placeholder token '{_ANCHOR}' is missing from the tokenizer vocabulary")
