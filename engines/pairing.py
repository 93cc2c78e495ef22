"""Which decode workers can take over from a prefill worker: those that hand keys and values over in the same way.

Rule: as SMG's lenient mode.  What both workers tell must be equal: the transport, and of the keys' and values' layout
each fact for itself; what one of them does not tell decides nothing.  Two workers with the label `pairing_protocol`
pair when that is equal, and nothing else is compared.  Both legs are of one engine in any case.  Pure; a worker's facts
are taken when its labels are read.
"""

from collections.abc import Mapping

import msgspec

_CONNECTORS = {"NixlConnector": "nixl", "MooncakeConnector": "mooncake"}
_UNKNOWN = "?"


class Facts(msgspec.Struct, frozen=True):
    """Of one worker's hand-over; empty where it says nothing.  `page`: tokens of a block."""

    runtime: str = ""
    protocol: str = ""
    transport: str = ""
    dtype: str = ""
    page: str = ""
    attn: str = ""
    model: str = ""

    def __str__(self) -> str:
        """As `GET /workers` shows it."""
        if self.protocol:
            return self.protocol
        layout = ",".join(f"{name}={getattr(self, name)}" for name in _LAYOUT if getattr(self, name))
        return f"{self.runtime or _UNKNOWN}/{self.transport or _UNKNOWN}/{layout or _UNKNOWN}"


_LAYOUT = ("dtype", "page", "attn", "model")


def facts(runtime: str, labels: Mapping[str, str], kv: Mapping[str, str]) -> Facts:
    """`kv`: the worker's `kv_connector` and the like, which are no labels."""
    return Facts(
        runtime,
        labels.get("pairing_protocol", ""),
        _transport(runtime, labels, kv.get("kv_connector", "")),
        dtype=labels.get("kv_cache_dtype", ""),
        page=labels.get("page_size") or labels.get("block_size", ""),
        attn=labels.get("attention_backend", ""),
        model=labels.get("model_dtype", ""),
    )


def _transport(runtime: str, labels: Mapping[str, str], connector: str) -> str:
    if runtime == "vllm":
        return _CONNECTORS.get(connector, connector.lower())
    told = labels.get("disaggregation_transfer_backend", "")
    return told or ("mooncake" if runtime == "tokenspeed" else "")


def difference(prefill: Facts, decode: Facts) -> str:
    """What keeps them apart, in words; empty when they pair."""
    if prefill.runtime == decode.runtime and prefill.protocol and decode.protocol:
        names: tuple[str, ...] = ("protocol",)
    else:
        names = ("runtime", "transport", *_LAYOUT)
    told = [(name, getattr(prefill, name), getattr(decode, name)) for name in names]
    return ", ".join(f"{name} {one} and {other}" for name, one, other in told if one and other and one != other)
