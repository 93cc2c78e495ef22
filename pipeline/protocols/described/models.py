"""Answers of the routes that tell what is served and how the gateway is, and what is said of them."""

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from pipeline.protocols.described.operation import Operation, Parameter, Told


class MultimodalCard(Told, frozen=True):
    """`limits`: most items of one request, by modality."""

    family: str
    limits: dict[str, int]


class ModelCard(Told, frozen=True):
    """`multimodal` is null for a model that takes text alone; both last members come once its tokenizer is loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None | UnsetType = UNSET
    multimodal: MultimodalCard | None | UnsetType = UNSET


class ModelList(Told, frozen=True):
    object: Literal["list"]
    data: list[ModelCard]


class ServerInfo(Told, frozen=True):
    version: str
    models: list[str]
    runtimes: list[str]
    healthy_workers: int
    total_workers: int


class Ready(Told, frozen=True):
    status: Literal["ready"]
    healthy_workers: int
    total_workers: int


class NotReady(Told, frozen=True):
    status: Literal["not ready"]
    reason: str


MODELS = Operation(
    tag="Models", summary="Every model that is served", gives=ModelList, refuses=("no_models_available",)
)
MODEL = Operation(tag="Models", summary="One model", gives=ModelCard, refuses=("model_not_found",))
MODEL_INFO = Operation(
    tag="Models",
    summary="What the engine workers say of a model",
    text="The labels of its first worker, and its card.",
    gives=dict[str, Any],
    refuses=("no_workers", "model_not_found"),
    parameters=(Parameter("model", "Which one; the first that is served when absent."),),
)
SERVER_INFO = Operation(tag="Gateway", summary="Version, models and workers", gives=ServerInfo, refuses=("no_workers",))
HEALTH = Operation(tag="Gateway", summary="Answers as long as the gateway lives", gives=str, media_type="text/plain")
LIVENESS = Operation(
    tag="Gateway",
    summary="Whether the gateway should go on living",
    gives=str,
    media_type="text/plain",
    others={503: str},
)
READINESS = Operation(
    tag="Gateway",
    summary="Whether the gateway takes traffic",
    gives=Ready,
    others={503: NotReady},
)
DOCUMENT = Operation(tag="Gateway", summary="This document", gives=dict[str, Any])
PAGE = Operation(tag="Gateway", summary="A page to try models with", gives=str, media_type="text/html")
