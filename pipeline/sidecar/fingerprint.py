"""What worker and sidecar must agree on before either believes the other: seven strings about the worker's engine.

They come from the engine flags the worker was started with, or from a file that was printed in the worker's own
environment (`tools/vllm_fingerprint.py`).  Source of every rule: `smg_grpc_servicer.mm_sidecar_protocol` and
`vllm.mm_processor` 0.14.1.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

UNSET_LIMIT = 999  # vLLM's for a modality nobody has configured


class Fingerprint(msgspec.Struct, frozen=True):
    """`dtype` as torch prints it ("torch.bfloat16"); the last three are JSON with sorted keys."""

    model: str
    vllm_version: str
    dtype: str
    video_backend: str
    media_io_kwargs: str
    mm_processor_kwargs: str
    limit_per_prompt: str

    def namespace(self) -> str:
        """Where its keys are: 16 hex digits, unless an operator names something else."""
        joined = "|".join(getattr(self, name) for name in self.__struct_fields__)
        return hashlib.sha256(joined.encode()).hexdigest()[:16]

    def mismatches(self, other: "Fingerprint") -> list[str]:
        """The names of the fields that differ."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]

    def fields(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in self.__struct_fields__}

    def told(self) -> str:
        """In one line of the log."""
        return ", ".join(f"{name}={value}" for name, value in self.fields().items())

    def limit(self, modality: str) -> int:
        """The most items of one prompt; ValueError for limits that are not as `limits_text` writes them."""
        try:
            limits = json.loads(self.limit_per_prompt)
            return int(limits.get(modality, limits["*"])["count"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"limit_per_prompt cannot be read: {error!r}") from None


def canonical(values: Mapping[str, Any]) -> str:
    """As both ends write a mapping into the fingerprint."""
    return json.dumps(values, sort_keys=True)


def limits_text(given: Mapping[str, Any]) -> str:
    """`--limit-mm-per-prompt` as vLLM resolves it: counts, or `{"count": n, ...}` with further options.

    What only spells out the default is left out.  Raises ValueError.
    """
    unset = {"count": UNSET_LIMIT}
    limits: dict[str, dict[str, Any]] = {"*": unset}
    for modality in sorted(given):
        value = given[modality]
        entry = dict(value) if isinstance(value, Mapping) else {"count": value}
        entry = {"count": entry.get("count", UNSET_LIMIT)} | {k: v for k, v in entry.items() if v is not None}
        if type(entry["count"]) is not int or entry["count"] < 0:
            raise ValueError(f"the limit of {modality} must be an integer from 0 on, or an object with such a count")
        if entry != unset:
            limits[modality] = entry
    return canonical(limits)
