"""What an engine tells about itself, as string labels, and what the labels decide.

Rule: labels are verbatim what the info replies say, flattened as SMG 1.13 does it (recorded next to the golden
messages), and the labels of a registration win over them.  Everything here is pure; `engines.registry` asks the
engine, `engines.worker` keeps the result.  An unusable value never stops a worker: the field's default stands and a
line in the log says so.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from engines.base import Form, Modality

log = logging.getLogger(__name__)

# facts of the moment, not of the engine
_TRANSIENT = frozenset({"active_requests", "is_paused", "last_receive_timestamp", "uptime_seconds", "server_type"})
_RENAMED = {
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "context_parallel_size": "cp_size",
    "data_parallel_size": "dp_size",
}
# prefill/decode facts that are fields of a worker, not labels
KV_FIELDS = ("kv_connector", "kv_role", "kv_engine_id")

_DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "f32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
}


def flatten(message: Message) -> dict[str, str]:
    """The fields of an info reply as labels.

    Empty texts, the text "null", zeros and empty lists are left out; booleans stay as "true" and "false"; lists
    become compact JSON.  Fields that are messages of their own are not labels.
    """
    labels = {}
    for field in message.DESCRIPTOR.fields:
        if field.name in _TRANSIENT or field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            continue
        text = _text(field.name, getattr(message, field.name), is_list=field.is_repeated)
        if text and text != "null":
            labels[_RENAMED.get(field.name, field.name)] = text
    return labels


def _text(name: str, value: Any, *, is_list: bool) -> str:
    if is_list:
        return json.dumps(list(value), separators=(",", ":")) if value else ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if name == "default_sampling_params_json":
        return _canonical_json(value)
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) and value else str(value) if value else ""
    return str(value)


def flatten_struct(struct: Struct, names: Iterable[str]) -> dict[str, str]:
    """Some fields of a free-form part of an info reply, by the same rules."""
    labels = {}
    for name in names:
        value = MessageToDict(struct.fields[name]) if name in struct.fields else None
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # a Struct knows no integers
        text = _text(name, value, is_list=isinstance(value, list)) if value is not None else ""
        if text and text != "null":
            labels[_RENAMED.get(name, name)] = text
    return labels


def _canonical_json(text: str) -> str:
    """Sorted keys, no blanks; nothing when it is no JSON."""
    try:
        return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except ValueError:
        return ""


def merged(
    replies: Iterable[Message],
    given: Mapping[str, str],
    flattened: Callable[[Message], Mapping[str, str]] = flatten,
) -> dict[str, str]:
    """Labels of all replies in turn, overridden by those of the registration."""
    labels: dict[str, str] = {}
    for reply in replies:
        labels.update(flattened(reply))
    labels.update(given)
    return labels


def model_id(labels: Mapping[str, str], configured: str | None) -> str:
    """The model a worker serves: as configured for it, else what it calls itself; "unknown" when nobody says."""
    return configured or next(
        (labels[key] for key in ("served_model_name", "model_id", "model_path") if labels.get(key)), "unknown"
    )


def item_limits(labels: Mapping[str, str]) -> dict[Modality, int]:
    """The engine's own bound on items of one prompt, from `mm_item_limits` ("image=8,video=2")."""
    limits = {}
    for pair in labels.get("mm_item_limits", "").split(","):
        name, _, count = pair.strip().partition("=")
        if not name:
            continue
        try:
            limits[Modality(name.strip())] = _count(count)
        except ValueError:
            log.warning("label mm_item_limits: cannot use %r", pair)
    return limits


def has_media_processor(labels: Mapping[str, str]) -> bool:
    """Whether the engine worker processes media references itself (`mm_processor`: "inprocess", "redis", ...)."""
    return labels.get("mm_processor", "").strip().lower() not in ("", "off")


def reference_schemes(labels: Mapping[str, str]) -> frozenset[str] | None:
    """URL schemes the worker fetches, from `mm_media_ref_schemes` ("http,https,data"); None: it does not say."""
    told = labels.get("mm_media_ref_schemes")
    if told is None:
        return None
    return frozenset(scheme.strip().lower() for scheme in told.split(",") if scheme.strip())


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def dtype_name(text: str) -> str | None:
    """The wire name of an encoder dtype, case and blanks ignored; None for one that is not known."""
    return _DTYPES.get(text.strip().lower())


def form(labels: Mapping[str, str], default_dtype: str | None, otherwise: str = "float32") -> Form:
    """In which form the worker wants pixels.

    `mm_device_do_normalize=true` beats everything: such an engine rescales and normalises whatever comes, so anything
    but the resized pixels' own bytes gives silently wrong answers.  Then `default_dtype` (the operator's variable,
    already checked), then the label `multimodal_encoder_dtype`, then `otherwise`.
    """
    if labels.get("mm_device_do_normalize") == "true":
        return Form("uint8", normalised=False)
    if default_dtype:
        return Form(default_dtype)
    advertised = labels.get("multimodal_encoder_dtype")
    if not advertised:
        return Form(otherwise)
    name = dtype_name(advertised)
    if name is None:
        log.warning("label multimodal_encoder_dtype: %r is not known, float32 is sent", advertised)
    return Form(name or "float32")
