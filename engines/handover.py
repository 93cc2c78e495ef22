"""How a pair of vLLM workers hands keys and values over: what each leg's message says, by the prefill's KV connector.

The connector is the prefill worker's word (`kv_connector` of GetServerInfo, or a label of its registration).

    NixlConnector       the prefill leg asks for a hand-over; its end says where the blocks are, the decode leg is told
    MooncakeConnector   both legs are told a transfer id made here, the decode leg also whom to ask; without the
                        engine's id the older address alone
    any other, none     what the prefill leg's end says, if anything, is passed on

A hand-over has one taker, so a request for several choices has none (Mooncake's older address excepted): its decode leg
gets everything and computes the prompt again.  Texts are as SMG 1.11 writes them.
"""

import json
from collections.abc import Mapping

import msgspec

from engines.base import EngineRequest, PairRefused
from engines.channel import parse_url
from engines.leg import DEFAULT_BOOTSTRAP_PORT, Handoff, Leg, MediaShare
from engines.worker import Worker

_ASKING: Mapping[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
_TAKING: Mapping[str, object] = {"do_remote_decode": False, "do_remote_prefill": True}
GRIDS = frozenset({"image_grid_thw", "video_grid_thw"})


class Handover(msgspec.Struct, frozen=True):
    """`asking`: the prefill leg's JSON.  `taking`, `address`: what the decode leg is told whatever the prefill leg
    says; `relays`: it is told what that says.  `connector` in SMG's word: "nixl", "mooncake", "passthrough".
    """

    asking: str = ""
    taking: str = ""
    address: tuple[str, int] | None = None
    relays: bool = False
    connector: str = "passthrough"


def handover(prefill: Worker, choices: int, transfer_id: str) -> Handover:
    """Of one generation; `transfer_id` is fresh."""
    connector = prefill.kv.get("kv_connector", "")
    if connector == "MooncakeConnector":
        return _mooncake(prefill, choices, transfer_id)
    if connector != "NixlConnector":
        return Handover(relays=choices == 1)
    return Handover(_json(_ASKING) if choices == 1 else "", relays=choices == 1, connector="nixl")


def _mooncake(prefill: Worker, choices: int, transfer_id: str) -> Handover:
    host, port = bootstrap_address(prefill)
    engine_id = _engine_id(prefill)
    if choices > 1 or not engine_id:
        return Handover(address=(host, port), connector="mooncake")
    named: dict[str, object] = {"transfer_id": transfer_id}
    shown = f"[{host}]" if ":" in host else host
    whom: dict[str, object] = {"remote_engine_id": engine_id, "remote_bootstrap_addr": f"http://{shown}:{port}"}
    taking = {**_TAKING, **named, **whom}
    return Handover(_json({**_ASKING, **named}), _json(taking), connector="mooncake")


def _engine_id(prefill: Worker) -> str:
    """Ranks of a data-parallel engine have ids of their own, so one that may be any rank has none."""
    base, size = prefill.kv.get("kv_engine_id", ""), prefill.labels.get("dp_size", "1")
    if base and size.isdecimal() and int(size) > 1 and prefill.rank is not None:
        return f"{base}_dp{prefill.rank}"
    return base if size == "1" else ""


def bootstrap_address(worker: Worker) -> tuple[str, int]:
    """Where its counterparts reach it: the host of its URL and the port of its registration, unless that says more."""
    spec = worker.spec
    return spec.bootstrap_host or parse_url(worker.address).host, spec.bootstrap_port or DEFAULT_BOOTSTRAP_PORT


def _json(facts: Mapping[str, object]) -> str:
    return json.dumps(facts, separators=(",", ":"))


# ---------------------------------------------------------------- the legs' requests


def prefill_request(request: EngineRequest, way: Handover) -> EngineRequest:
    """One token that nobody reads, and the whole of the media."""
    sampling = msgspec.structs.replace(
        request.sampling, max_tokens=1, min_tokens=0, n=1, stop=(), stop_token_ids=(), ignore_eos=True
    )
    leg = Leg("prefill", kv_params=way.asking)
    return msgspec.structs.replace(request, sampling=sampling, stop_ids=(), stream=False, leg=leg)


def decode_request(
    request: EngineRequest, way: Handover, told: Handoff | None, decode: Worker, *, fits: bool
) -> EngineRequest:
    """The client's request, with the media as far as the decode worker needs them.

    `fits`: the media are in the form it wants.  References stay, for it to process them again, unless the prefill leg
    told what became of them.  Raises PairRefused when it was handed nothing and cannot compute the prompt again.
    """
    params = way.taking or (told.kv_params if told is not None and way.relays else "")
    is_handed_over = bool(params or way.address)
    share: MediaShare = "whole"
    if request.media and not is_handed_over and (is_blind(decode) or not fits):
        why = "it is language-model-only" if is_blind(decode) else "it wants the media in another form"
        raise PairRefused(
            "pd_decode_missing_kv_transfer_params",
            f"the prefill worker returned no kv_transfer_params, and the decode worker cannot prefill itself: {why}",
        )
    if request.media and is_blind(decode):
        share = "hashes"
    elif is_handed_over and request.sampling.n == 1:
        share = "identity"
    leg = Leg("decode", share, kv_params=params, kv_address=way.address)
    if not request.references:
        return msgspec.structs.replace(request, leg=leg)
    if share == "identity" and told is not None and told.identity:
        leg = msgspec.structs.replace(leg, identity=told.identity)
        return msgspec.structs.replace(request, references=(), leg=leg)
    return msgspec.structs.replace(request, leg=msgspec.structs.replace(leg, media="whole"))


def is_blind(worker: Worker) -> bool:
    """Whether it is a vLLM worker that runs a vision model without its vision half (`--language-model-only`)."""
    return worker.runtime == "vllm" and worker.labels.get("supports_vision") == "false"


def refusal(request: EngineRequest, decode: Worker) -> PairRefused | None:
    """Why a decode worker cannot serve the request whatever the prefill leg says; None when it can."""
    grids = any(name in GRIDS for batch in request.media for name in batch.items[0].side)
    has_media = bool(request.media or request.references)
    if not has_media or not is_blind(decode):
        return None
    return blind_refusal(grids=grids, references=bool(request.references), choices=request.sampling.n)


def blind_refusal(*, grids: bool, references: bool, choices: int) -> PairRefused | None:
    """Of a request with media by a decode worker without eyes, in SMG's order.  `grids`: it has a grid tensor."""
    if grids:
        return PairRefused(
            "pd_decode_language_model_only_mrope",
            "the decode worker is language-model-only and cannot place this model's media: its positions need grids",
        )
    if references:
        return PairRefused(
            "pd_decode_language_model_only_media_refs",
            "the decode worker is language-model-only and takes no media references",
        )
    if choices > 1:
        return PairRefused(
            "pd_decode_language_model_only_n_samples",
            f"the decode worker is language-model-only and takes media for one choice, not for n={choices}",
        )
    return None
