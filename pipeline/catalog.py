"""The models the fleet serves: loaded once, when the first engine worker of a model becomes ready.

Where a model's bundle comes from, first hit wins: the worker's own path when it is a folder on this host;
`--tokenizer-path`, then `--model-path`; the archive the worker serves (GetTokenizer): it is what the engine runs; the
worker's path as a hub id.  (SMG asks the hub before the worker; a gateway without network would then wait for its
time-outs.)
"""

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engines.base import Modality
from engines.worker import ModelSpec, Worker
from pipeline import models, parsers
from pipeline.archive import ArchiveReceiver, BundleError
from pipeline.bundle import Bundle, load_bundle, locate
from pipeline.config import Config
from pipeline.errors import GatewayError, model_not_found
from pipeline.jobs import ModelSettings
from pipeline.models.base import Anchor, BundleConfig, Family, FamilyError, Vocabulary
from pipeline.plan import ServedModel

_log = logging.getLogger("mediagate.catalog")


class Catalog:
    """Model id to ServedModel.  `configure(key, payload)` hands a family's settings to every pool process;
    `model_of(name)` is the id behind an alias (`engines.registry`).
    """

    def __init__(
        self,
        config: Config,
        configure: Callable[[int, bytes], None],
        model_of: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        self._config = config
        self._model_of = model_of
        self._configure = configure
        self._models: dict[str, ServedModel] = {}
        self._loading: dict[str, asyncio.Lock] = {}
        self._next_key = 1

    def get(self, model: str) -> ServedModel | None:
        return self._models.get(model)

    def serving(self, model: str) -> ServedModel:
        """The model a request names; `model_not_found`, or `tokenizer_not_ready` while its worker is still starting."""
        served = self._models.get(model) or self._models.get(self._model_of(model) or "")
        if served is not None:
            return served
        if model in self._loading:
            raise GatewayError(
                "tokenizer_not_ready", f"the tokenizer of model '{model}' is not loaded yet", retry_after_s=1
            )
        raise model_not_found(model)

    def all(self) -> list[ServedModel]:
        return list(self._models.values())

    async def load(self, worker: Worker) -> None:
        """Load the worker's model unless that was done; awaited before the worker counts as ready.

        What a worker tells with its labels is taken over each time: an engine may come back with another window.
        Raises BundleError with one sentence when no bundle can be had; the registry tries again later.
        """
        async with self._loading.setdefault(worker.model_id, asyncio.Lock()):
            known = self._models.get(worker.model_id)
            if known is not None:
                self._models[worker.model_id] = self._informed(known, worker)
                return
            bundle = await self._bundle_for(worker)
            served = self._serve(worker, bundle)
            self._models[worker.model_id] = served
            _log.info(
                "model loaded model=%s family=%s bundle=%s",
                served.model,
                served.family.name if served.family else "none (text only)",
                bundle.source,
            )

    async def _bundle_for(self, worker: Worker) -> Bundle:
        label = worker.labels.get("tokenizer_path") or worker.labels.get("model_path") or ""
        flags = [path for path in (self._config.model.tokenizer_path, self._config.model.path) if path]
        reasons = []
        if label and Path(label).is_dir():
            return await self._load(Path(label))
        for source in flags:
            try:
                return await self._load(await asyncio.to_thread(locate, source))
            except BundleError as error:
                reasons.append(f"{source}: {error}")
        try:
            return await self._from_worker(worker)
        except Exception as error:  # whatever the worker's stream did: say it, try the hub, and report all reasons
            reasons.append(f"worker {worker.url}: {error}")
        if label:
            try:
                return await self._load(await asyncio.to_thread(locate, label))
            except BundleError as error:
                reasons.append(f"{label}: {error}")
        raise BundleError(f"no tokenizer bundle for model '{worker.model_id}': " + "; ".join(reasons))

    async def _load(self, directory: Path) -> Bundle:
        template = self._config.model.chat_template
        return await asyncio.to_thread(load_bundle, directory, chat_template=Path(template) if template else None)

    async def _from_worker(self, worker: Worker) -> Bundle:
        receiver = ArchiveReceiver()
        async with asyncio.timeout(ArchiveReceiver.TIMEOUT_S):
            assert worker.client is not None
            async for data, digest in worker.client.tokenizer_bundle():
                receiver.feed(data, digest)
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="mediagate-bundle-"))
        try:
            await asyncio.to_thread(receiver.extract, folder)
            bundle = await self._load(folder)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return msgspec.structs.replace(bundle, source=f"worker {worker.url}")

    def _serve(self, worker: Worker, bundle: Bundle) -> ServedModel:
        model_type = str(bundle.config.config.get("model_type", ""))
        family = models.family_of(worker.model_id, model_type)
        base = self._informed(ServedModel(model=worker.model_id, bundle=bundle, family=None), worker)
        if family is None:
            return base
        try:
            return self._with_family(base, family)
        except FamilyError as error:
            _log.warning("model serves text only model=%s family=%s reason=%s", worker.model_id, family.name, error)
            return base

    def _informed(self, model: ServedModel, worker: Worker) -> ServedModel:
        """With what the worker's registration and labels say, which an engine that comes back may say otherwise."""
        settings, labels, card = self._config.model, worker.labels, worker.card or ModelSpec(model.model)
        names = (model.model, labels.get("model_path"), str(model.bundle.config.config.get("model_type", "")))
        calls = (settings.tool_call_parser, card.tool_parser, labels.get("tool_parser"), *names)
        thinking = (settings.reasoning_parser, card.reasoning_parser, labels.get("reasoning_parser"), *names)
        return msgspec.structs.replace(
            model,
            max_context=worker.context_length or model.bundle.max_context,
            sampling_defaults=_sampling_defaults(labels.get("default_sampling_params_json")),
            call_format=parsers.call_format(calls),
            thinking_format=parsers.thinking_format(thinking),
        )

    def _with_family(self, base: ServedModel, family: Family) -> ServedModel:
        settings = family.settings(base.bundle.config)
        key, self._next_key = self._next_key, self._next_key + 1
        self._configure(key, pool_configuration(family, settings))
        limits = {modality: self._limit(family, modality) for modality in family.modalities(base.bundle.config)}
        return msgspec.structs.replace(
            with_family(base, family, settings, key),
            limits={modality: limit for modality, (limit, _) in limits.items()},
            limit_source={modality: source for modality, (_, source) in limits.items()},
        )

    def _limit(self, family: Family, modality: Modality) -> tuple[int, str]:
        media = self._config.media
        if modality is Modality.IMAGE and media.image_limit is not None:
            return media.image_limit, "--mm-per-request-image-limit"
        if modality is Modality.IMAGE and media.image_max_count is not None:
            return media.image_max_count, "SMG_IMAGE_MAX_COUNT"
        if modality is Modality.VIDEO and media.video_max_count is not None:
            return media.video_max_count, "SMG_VIDEO_MAX_COUNT"
        if modality is Modality.AUDIO and media.audio_max_count is not None:
            return media.audio_max_count, "SMG_AUDIO_MAX_COUNT"
        return family.limits[modality], "the model spec"


def pool_configuration(family: Family, settings: msgspec.Struct) -> bytes:
    """What pool processes are told of a model."""
    return msgspec.json.encode(ModelSettings(family.name, msgspec.Raw(msgspec.json.encode(settings))))


def with_family(base: ServedModel, family: Family, settings: msgspec.Struct, key: int) -> ServedModel:
    """The model with what its family knows about the checkpoint; `key`: what pool processes know `settings` by.

    Raises FamilyError.
    """
    config = base.bundle.config
    tokenizer = base.bundle.tokenizer
    vocabulary = Vocabulary(id_of=tokenizer.id_of, token_of=tokenizer.token_of, encode=tokenizer.encode_now)
    modalities = family.modalities(config)
    return msgspec.structs.replace(
        base,
        family=family,
        vocabulary=vocabulary,
        settings=settings,
        key=key,
        anchors={modality: family.anchor(config, vocabulary, modality) for modality in modalities},
        guards=_guards(family, config, vocabulary, modalities),
        feature_tokens={modality: family.feature_token(config, vocabulary, modality) for modality in modalities},
    )


def _guards(
    family: Family, config: BundleConfig, vocabulary: Vocabulary, served: frozenset[Modality]
) -> dict[Modality, Anchor]:
    """Anchors the checkpoint knows for modalities it is not served with: in text they would reach the engine raw."""
    found = {}
    for modality in frozenset(Modality) - served:
        with contextlib.suppress(FamilyError):
            found[modality] = family.anchor(config, vocabulary, modality)
    return found


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What of a worker's generation config a request falls back on; `20.0` is a top_k too."""

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0)] | None = None


def _sampling_defaults(text: str | None) -> Mapping[str, Any]:
    """The worker's generation defaults; what is no JSON object, or out of range, says nothing."""
    if not text:
        return {}
    try:
        return msgspec.structs.asdict(msgspec.json.decode(text, type=SamplingDefaults, strict=False))
    except (msgspec.DecodeError, UnicodeDecodeError):
        _log.warning("the worker's default_sampling_params_json is not usable value=%s", text[:200])
        return {}
