"""One engine worker as the gateway sees it: what was asked for, what it said about itself, and how it is.

Rule: a `Worker` is a record.  Only `engines.registry` changes its status and labels, only `engines.dispatch` its load;
everybody else reads.  The words of `describe` are those of `GET /workers`.
"""

import asyncio
import enum
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from uuid import uuid4

import msgspec

from engines import labels, pairing
from engines.base import EngineError, EngineRequest, Form, Modality, SchemeRefused
from engines.breaker import Breaker, BreakerSettings
from engines.engine import Engine
from engines.transport import Mode

RuntimeName = Literal["vllm", "sglang", "trtllm", "tokenspeed", "mlx"]
WorkerType = Literal["regular", "prefill", "decode", "encode"]


class ModelSpec(msgspec.Struct, frozen=True):
    """What an operator says about the model a worker serves; `aliases` are further names clients may use."""

    id: str
    aliases: tuple[str, ...] = ()
    context_length: int | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None


class HealthOverride(msgspec.Struct, frozen=True):
    """A worker's own health settings; None: as the gateway's."""

    timeout_secs: Annotated[int, msgspec.Meta(ge=1)] | None = None
    check_interval_secs: Annotated[int, msgspec.Meta(ge=1)] | None = None
    success_threshold: Annotated[int, msgspec.Meta(ge=1)] | None = None
    failure_threshold: Annotated[int, msgspec.Meta(ge=1)] | None = None
    disable_health_check: bool | None = None


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A registration as it comes by flag or `POST /workers` (decodes from its JSON; unknown fields are ignored).

    `labels` win over what the engine says.  `multimodal_tensor_transport` and `multimodal_shm_min_bytes` win over the
    gateway's flags for this worker.  `bootstrap_host` and `bootstrap_port`: where a prefill worker waits for the decode
    workers of its pairs; host of the URL and 8998 when unset.  `priority` and `cost` are shown and not used by any
    policy yet.
    """

    url: str
    runtime_type: RuntimeName | None = None
    worker_type: WorkerType = "regular"
    bootstrap_host: str | None = None
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    labels: Mapping[str, str] = {}
    models: tuple[ModelSpec, ...] = ()
    priority: int = 50
    cost: float = 1.0
    health: HealthOverride = HealthOverride()
    multimodal_tensor_transport: Mode | None = None
    multimodal_shm_min_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None


class WorkerPatch(msgspec.Struct, frozen=True):
    """What of a registration can be changed alone; `labels` come on top of those it has.  None: as it is."""

    labels: Mapping[str, str] | None = None
    priority: int | None = None
    cost: float | None = None
    health: HealthOverride | None = None

    def applied(self, spec: WorkerSpec) -> WorkerSpec:
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        if self.labels is not None:
            given["labels"] = {**spec.labels, **self.labels}
        return msgspec.structs.replace(spec, **given)


class Status(enum.Enum):
    """pending: never was ready yet; not_ready: was; failed: given up; draining: on its way out."""

    PENDING = "pending"
    READY = "ready"
    NOT_READY = "not_ready"
    FAILED = "failed"
    DRAINING = "draining"


class Worker:
    """`address` is canonical (`grpc://host:port`), and so is `url`, but for a data-parallel `rank` (`engines.ranks`).
    `client` is None until the engine was recognised.

    `is_stale` is set while its connection was lost and the labels were not read again: the engine behind the URL may
    be another one.  `failure` says why it is not ready, for logs and `describe`.  `breaker` counts how its requests
    end.
    """

    def __init__(
        self, spec: WorkerSpec, url: str, breaker: Breaker | None = None, aliases: Mapping[str, str] = {}
    ) -> None:
        self.address = url
        self.rank: int | None = None
        self.ranks = 0  # there were at most, seen by rank 0
        self.id = str(uuid4())
        self.spec = spec
        self.url = url
        self.status = Status.PENDING
        self.is_stale = False
        self.labels: dict[str, str] = {}
        self.item_limits: dict[Modality, int] = {}  # the engine's own bounds on items of one prompt, where it has any
        self.reference_schemes: frozenset[str] | None = None  # of URLs it fetches itself; None: it does not say
        self.kv: dict[str, str] = {}
        self.handover = pairing.Facts()  # how it hands keys and values over in a pair
        self.model_id = spec.models[0].id if spec.models else ""
        self.client: Engine | None = None
        self.failure = ""
        self.load = 0
        self._configured = aliases
        self.breaker = breaker or Breaker(BreakerSettings(disabled=True))
        self.examined = asyncio.Event()  # the labels were read, or that failed, since the connection was lost
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def runtime(self) -> str:
        return self.client.name if self.client is not None else self.spec.runtime_type or ""

    @property
    def worker_type(self) -> str:
        return self.spec.worker_type

    @property
    def priority(self) -> int:
        return self.spec.priority

    @property
    def cost(self) -> float:
        return self.spec.cost

    @property
    def is_healthy(self) -> bool:
        """Whether its engine is there, and well by its own word."""
        return self.status is Status.READY and not self.is_stale

    @property
    def is_available(self) -> bool:
        """Whether it may be given a request now."""
        return self.is_healthy and self.breaker.admits

    @property
    def aliases(self) -> frozenset[str]:
        """Further names of its model, by its registration and by the gateway's; none before it has told its model."""
        if not self.model_id:
            return frozenset()
        configured = (alias for alias, model in self._configured.items() if model == self.model_id)
        return frozenset({*configured, *(alias for model in self.spec.models for alias in model.aliases)})

    @property
    def card(self) -> ModelSpec | None:
        """What its registration says of its model."""
        return self.spec.models[0] if self.spec.models else None

    def learn(self, told: dict[str, str]) -> None:
        """Take over what the engine says about itself (all labels at once, see `engines.labels.merged`)."""
        self.kv = {name: told.pop(name) for name in labels.KV_FIELDS if name in told}
        self.labels = told
        self.handover = pairing.facts(self.runtime, told, self.kv)
        self.item_limits = labels.item_limits(told)
        self.reference_schemes = labels.reference_schemes(told)
        self.model_id = labels.model_id(told, self.card.id if self.card is not None else None)

    # ------------------------------------------------------------ what it takes

    def form(self, default_dtype: str | None, dtypes: Mapping[Modality, str] = {}) -> Form:
        """In which form it wants media.

        `default_dtype` is the operator's variable for this runtime, None when unset; `dtypes` those by modality.
        """
        if self.client is None:
            return labels.form(self.labels, default_dtype)
        return self.client.form(self.labels, default_dtype, dtypes)

    def accepts(self, modality: Modality) -> bool:
        """Whether the engine takes such media at all; one without eyes (`supports_vision=false`) may still hear."""
        if modality is not Modality.AUDIO and self.labels.get("supports_vision") == "false":
            return False
        return self.client is not None and modality in self.client.modalities

    @property
    def takes_references(self) -> bool:
        """Whether it can be sent media by URL: its engine's protocol has them, and it runs a media processor.

        An encode worker is sent pixels, whatever its labels say.
        """
        if self.client is None or not self.client.takes_references or self.worker_type == "encode":
            return False
        return labels.has_media_processor(self.labels)

    @property
    def context_length(self) -> int | None:
        """Most tokens of prompt and answer together, as configured or told; None when nobody says."""
        if self.card is not None and self.card.context_length is not None:
            return self.card.context_length
        told = self.labels.get("max_context_length", "")
        return int(told) if told.isdecimal() else None

    @property
    def takes_segments(self) -> bool:
        return self.client is not None and self.client.takes_segments

    @property
    def pulls_tensors(self) -> bool:
        return self.client is not None and self.client.pulls_tensors

    @property
    def keeps_segments(self) -> bool:
        return self.client is not None and self.client.keeps_segments

    @property
    def tensor_transport(self) -> Mode | None:
        return self.spec.multimodal_tensor_transport

    @property
    def shm_min_bytes(self) -> int | None:
        return self.spec.multimodal_shm_min_bytes

    def shares_memory(self, namespace: str | None) -> bool:
        """Whether it told the same /dev/shm as ours (`engines.transport.shm_namespace`)."""
        return namespace is not None and self.labels.get("shm_namespace_id") == namespace

    def refusal(self, request: EngineRequest) -> EngineError | None:
        """Why its engine cannot be sent this request, whatever else may happen; None when it can."""
        if (schemes := self.reference_schemes) is not None:
            for item, reference in enumerate(request.references):
                if reference.scheme not in schemes:
                    return SchemeRefused(item, reference.scheme, schemes)
        try:
            if self.client is not None:
                self.client.check(request)
        except EngineError as error:
            return error
        return None

    # ------------------------------------------------------------ load

    def begin(self) -> None:
        self.load += 1
        self.idle.clear()

    def finish(self) -> None:
        self.load -= 1
        if self.load == 0:
            self.idle.set()

    # ------------------------------------------------------------ shown

    def describe(self) -> dict[str, Any]:
        """The worker as `GET /workers` shows it."""
        shown: dict[str, Any] = {
            "id": self.id,
            "model_id": self.model_id or "unknown",
            "url": self.url,
            "models": self._model_cards(),
            "worker_type": self.worker_type,
            "connection_mode": "grpc",
            "runtime_type": self.runtime or None,
            "labels": dict(sorted(self.labels.items())),
            "priority": self.priority,
            "cost": self.cost,
            "is_healthy": self.is_healthy,
            "status": self.status.value,
            "load": self.load,
            "circuit_breaker": {"state": self.breaker.state.value, "failures": self.breaker.failures},
        }
        if self.rank is not None:
            shown["dp_rank"] = self.rank
        if self.spec.bootstrap_port is not None:
            shown["bootstrap_port"] = self.spec.bootstrap_port
        if self.worker_type in ("prefill", "decode"):
            shown["pd_pairing"] = str(self.handover)
        shown.update(self.kv)
        if self.failure and not self.is_healthy:
            shown["error"] = self.failure
        return shown

    def _model_cards(self) -> list[dict[str, Any]]:
        if not self.model_id:
            return []
        takes_media = any(self.accepts(modality) for modality in Modality)
        card: dict[str, Any] = {
            "id": self.model_id,
            "aliases": sorted(self.aliases),
            "context_length": self.context_length,
            "model_type": ["chat", "vision"] if takes_media and self.labels.get("supports_vision") else ["chat"],
        }
        return [card]
