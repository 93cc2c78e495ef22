"""One half of a disaggregated generation, as far as an engine's message has to say it.

A *pair* of engine workers serves such a generation: the *prefill* leg reads the prompt with its media, the *decode*
leg produces the answer from the prefill's keys and values, which the engines hand over among themselves.  With encode
workers every media item has a leg of its own before: its pixels go there, and its embeddings from there to the prefill
worker.  What the legs must be told for that stands here; `engines.legs` fills it, the engine files write it.  Plain
types, no gRPC: a `Handoff` is passed on as it came.
"""

from typing import Literal

import msgspec

Role = Literal["encode", "prefill", "decode"]
MediaShare = Literal["whole", "identity", "hashes"]

DEFAULT_BOOTSTRAP_PORT = 8998
"""Where a prefill or encode worker waits for its counterpart, when nobody says."""


class Meeting(msgspec.Struct, frozen=True):
    """Where two engines find each other for one hand-over: the first one's host and port, and a number of their own."""

    host: str
    port: int
    room: int


class Handoff(msgspec.Struct, frozen=True):
    """What the end of a prefill leg says for the decode leg.

    `kv_params`: the KV connector's JSON, empty when there is none.  `identity`: the engine's own serialised message
    about media it processed itself from references, empty when there is none.
    """

    kv_params: str = ""
    identity: bytes = b""


class Leg(msgspec.Struct, frozen=True):
    """`media`: what this leg's message has of the request's media: everything; all but the pixels (the engine places
    and hashes them); or their content hashes alone (a decode worker that has no eyes at all).

    vLLM: `kv_params` is the connector's JSON, `kv_address` the older form of it (host, port), `identity` the
    `Handoff.identity` of the prefill leg.  SGLang and TokenSpeed: `meeting` is where the two legs meet, or where an
    encode leg meets the prefill worker; `encoders` is where each item's embeddings come from, in prompt order, when
    encode workers make them.
    """

    role: Role
    media: MediaShare = "whole"
    kv_params: str = ""
    kv_address: tuple[str, int] | None = None
    identity: bytes = b""
    meeting: Meeting | None = None
    encoders: tuple[Meeting, ...] = ()
