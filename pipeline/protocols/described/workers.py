"""Answers of the routes of engine workers, and what is said of them."""

from typing import Any, Literal

import msgspec

from engines.worker import WorkerSpec
from pipeline.protocols.described.operation import Operation, Parameter, Told


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


class WorkerRemoved(Told, frozen=True):
    status: Literal["accepted"]
    worker_id: str
    message: str


class WorkerRefusal(Told, frozen=True):
    """The error body of these routes, as SMG has it."""

    error: str
    code: str


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
    refuses=("json_parse_error", "invalid_json", "request_body_too_large", "request_timeout"),
    headers={"Location": "Where the worker is told."},
)
REMOVE_WORKER = Operation(
    tag="Workers",
    summary="Drains an engine worker and forgets it",
    gives=WorkerRemoved,
    status=202,
    others={404: WorkerRefusal},
)
