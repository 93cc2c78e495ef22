"""Where a request's media are processed: here, or by the vLLM worker that is sent references to them.

SMG v1.11.0, "Where Media Is Processed".  Only vLLM workers with a media processor take references, only for families
whose anchor vLLM expands itself (`Family.worker_side`), and a reference carries neither sound nor hints.  All
registered workers of a model count, healthy or not, so that a health flap does not move it between the two ways.
Everything here is pure; `pipeline.references` makes the references.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from engines.base import Modality
from engines.worker import Worker
from pipeline.errors import GatewayError
from pipeline.models.base import Hints
from pipeline.plan import MediaPart, ServedModel


class Decision(msgspec.Struct, frozen=True):
    """`reason`: SMG's word for `smg_mm_processing_total`."""

    mode: Literal["router", "worker"]
    reason: str


def decide(
    asked: Literal["auto", "router", "worker"],
    model: ServedModel,
    parts: Sequence[MediaPart],
    workers: Sequence[Worker],
) -> Decision:
    """`asked`: `--mm-processing`.  `workers`: every registered worker of the model.

    With "worker", raises GatewayError for parts that cannot be forwarded.  Whether any worker takes them is
    `check_reachable`'s to say, since SMG counts such a request.
    """
    if asked == "router":
        return Decision("router", "config")
    if asked == "worker":
        _check_forwardable(model, parts)
        return Decision("worker", "config")
    if any(part.modality is Modality.AUDIO or _has_hints(part) for part in parts):
        return Decision("router", "plan_not_forwardable")
    if _not_expandable(model, parts) is not None:
        return Decision("router", "model_not_opted_in")
    if not workers:
        return Decision("router", "auto_none")
    if all(worker.takes_references for worker in workers):
        return Decision("worker", "auto_uniform")
    return Decision("router", "auto_mixed")


def check_reachable(model: ServedModel, workers: Sequence[Worker]) -> None:
    """Refuse references that no registered worker of the model can be sent: `multimodal_not_supported` when an encode
    worker is to see the media first, else `no_media_ref_capable_worker`.  Both legs of a pair must be able to take
    them.  No worker at all is dispatch's to tell.
    """
    if any(worker.worker_type == "encode" for worker in workers):
        raise GatewayError("multimodal_not_supported", "media references cannot reach an encode worker")
    able = {worker.worker_type for worker in workers if worker.takes_references}
    if {worker.worker_type for worker in workers} <= able:
        return
    if any(worker.client is not None and worker.client.takes_references for worker in workers):
        why = (
            "has vLLM gRPC workers but none advertises mm_processor; set SMG_VLLM_MM_PROCESSOR on the workers or "
            "--mm-processing router on the gateway"
        )
    else:
        why = "has no vLLM gRPC worker, and no other engine takes media references; use --mm-processing router"
    raise GatewayError("no_media_ref_capable_worker", f"model {model.model} {why}")


def _check_forwardable(model: ServedModel, parts: Sequence[MediaPart]) -> None:
    for item, part in enumerate(parts):
        if part.modality is Modality.AUDIO:
            raise GatewayError(
                "multimodal_not_supported", "audio inputs cannot be forwarded to a worker as references", item=item
            )
        if _has_hints(part):
            raise GatewayError(
                "multimodal_hint_unsupported_in_worker_mode",
                "per-item media hints (max_long_side_pixel, fps) cannot be forwarded to a worker",
                item=item,
            )
    if (modality := _not_expandable(model, parts)) is not None:
        raise GatewayError(
            "multimodal_worker_processing_unsupported_model",
            f"this model's {modality.value} placeholder is not expandable by a vLLM worker",
        )


def _not_expandable(model: ServedModel, parts: Sequence[MediaPart]) -> Modality | None:
    """The first modality whose anchor vLLM does not expand."""
    expandable = model.family.worker_side if model.family is not None else frozenset[Modality]()
    return next((part.modality for part in parts if part.modality not in expandable), None)


def _has_hints(part: MediaPart) -> bool:
    return part.hints != Hints()
