"""Answers of the routes of engine workers, and what is said of them."""

from typing import Any, Literal

import msgspec

from engines.loads import SchedulerLoad
from engines.worker import WorkerPatch, WorkerSpec
from pipeline.protocols.described.operation import Operation, Parameter, Told


class BreakerCard(msgspec.Struct, frozen=True):
    """`failures`: in a row, that count."""

    state: Literal["closed", "open", "half_open"]
    failures: int


class WorkerCard(msgspec.Struct, frozen=True):
    """A worker as it is now.  `labels`: what it says about itself, and what its registration says.  Engines of
    disaggregated serving have further members.
    """

    id: str
    model_id: str
    url: str
    models: list[dict[str, Any]]
    worker_type: Literal["regular", "prefill", "decode", "encode"]
    connection_mode: Literal["grpc"]
    runtime_type: str | None
    labels: dict[str, str]
    priority: int
    cost: float
    is_healthy: bool
    status: Literal["pending", "ready", "not_ready", "failed", "draining"]
    load: int
    circuit_breaker: BreakerCard
    dp_rank: int | msgspec.UnsetType = msgspec.UNSET
    error: str | msgspec.UnsetType = msgspec.UNSET


class WorkerCounts(Told, frozen=True):
    prefill_count: int
    decode_count: int
    regular_count: int


class WorkerList(Told, frozen=True):
    workers: list[WorkerCard]
    total: int
    stats: WorkerCounts


class WorkerAdded(Told, frozen=True):
    status: Literal["accepted"]
    worker_id: str
    url: str
    location: str
    message: str


class WorkerChanged(Told, frozen=True):
    status: Literal["accepted"]
    worker_id: str
    message: str


class LoadRow(Told, SchedulerLoad, frozen=True, kw_only=True):
    """One data-parallel rank of one worker; what its engine does not tell is 0."""

    worker: str
    worker_type: str


class LoadSum(Told, frozen=True):
    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_throughput: float
    avg_utilization: float


class Loads(Told, frozen=True):
    """Workers whose engine does not tell are left out; `aggregate` when any told."""

    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[LoadRow]
    aggregate: LoadSum | msgspec.UnsetType = msgspec.UNSET


class Unflushed(Told, frozen=True):
    worker: str
    error: str


class FlushCounts(Told, frozen=True):
    message: str
    workers_flushed: int
    total_http_workers: int
    total_grpc_workers: int
    total_zmq_workers_skipped: int
    total_workers: int


class Flushed(FlushCounts, frozen=True):
    status: Literal["success"]


class PartlyFlushed(FlushCounts, frozen=True):
    status: Literal["partial_success"]
    successful: list[str]
    failed: list[Unflushed]


class WorkerRefusal(Told, frozen=True):
    """The error body of these routes, as SMG has it."""

    error: str
    code: str


_BODY = ("json_parse_error", "invalid_json", "request_body_too_large", "request_timeout")

LIST_WORKERS = Operation(
    tag="Workers",
    summary="Every engine worker",
    gives=WorkerList,
    parameters=(Parameter("model", "Only workers of this model."),),
)
GET_WORKER = Operation(tag="Workers", summary="One engine worker", gives=WorkerCard, others={404: WorkerRefusal})
ADD_WORKER = Operation(
    tag="Workers",
    summary="Registers an engine worker",
    text="It is probed after the answer: `status` of the worker tells when it serves.",
    takes=WorkerSpec,
    gives=WorkerAdded,
    status=202,
    others={400: WorkerRefusal, 409: WorkerRefusal},
    refuses=_BODY,
    headers={"Location": "Where the worker is told."},
)
CHANGE_WORKER = Operation(
    tag="Workers",
    summary="Changes what is named of a worker's registration",
    text="Labels come on top of those it has. The worker is introduced again; its requests in flight go on.",
    takes=WorkerPatch,
    gives=WorkerChanged,
    status=202,
    others={400: WorkerRefusal, 404: WorkerRefusal},
    refuses=_BODY,
)
REPLACE_WORKER = Operation(
    tag="Workers",
    summary="Gives a worker another registration, for the same URL",
    text="The worker is introduced again; its requests in flight go on.",
    takes=WorkerSpec,
    gives=WorkerChanged,
    status=202,
    others={400: WorkerRefusal, 404: WorkerRefusal},
    refuses=_BODY,
)
LOADS = Operation(tag="Workers", summary="What the engines' schedulers hold, by their own word", gives=Loads)
HEALTH_GENERATE = Operation(
    tag="Workers",
    summary="Whether any engine says now that it is well",
    gives=str,
    media_type="text/plain",
    others={503: str},
)
FLUSH_CACHE = Operation(
    tag="Workers",
    summary="Every engine forgets its cached prefixes",
    gives=Flushed,
    others={206: PartlyFlushed},
)
REMOVE_WORKER = Operation(
    tag="Workers",
    summary="Drains an engine worker and forgets it",
    gives=WorkerChanged,
    status=202,
    others={404: WorkerRefusal},
)
