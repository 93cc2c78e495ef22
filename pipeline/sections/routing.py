"""Settings of the policies that tie requests to workers (`engines.cache_aware`, `engines.selection`)."""

from typing import Annotated

import msgspec

from pipeline.setting import ROUTING, seconds, setting


class Routing(msgspec.Struct, frozen=True):
    cache_threshold: Annotated[
        float,
        setting(
            ROUTING,
            "--cache-threshold --cache-match-threshold",
            "cache_aware: share of a prompt a worker must have been sent before; with a picture it need not be.",
            ge=0,
            le=1,
        ),
    ] = 0.3
    balance_abs: Annotated[
        int,
        setting(
            ROUTING,
            "--balance-abs-threshold --spill-abs-threshold",
            "cache_aware: a worker with so many requests more than the mean is passed over, if also the next.",
            ge=0,
        ),
    ] = 64
    balance_rel: Annotated[
        float,
        setting(
            ROUTING,
            "--balance-rel-threshold --spill-rel-threshold",
            "cache_aware: and with so many times the mean.",
            ge=1,
        ),
    ] = 1.5
    max_tree_tokens: Annotated[
        int,
        setting(
            ROUTING,
            "--max-tree-size",
            "cache_aware: tokens of prompts remembered for each model; a block takes about 200 bytes.",
            ge=1,
            unit="tokens",
        ),
    ] = 4 << 20
    block_size: Annotated[
        int,
        setting(ROUTING, "--block-size", "cache_aware: tokens of the smallest prefix.", ge=1, unit="tokens"),
    ] = 16
    cache_ttl_s: Annotated[
        float, seconds(ROUTING, "--cache-ttl-secs", "cache_aware: time after which what was sent is forgotten.", ge=1)
    ] = 180.0
    prefix_tokens: Annotated[
        int,
        setting(ROUTING, "--prefix-token-count", "prefix_hash: tokens of a prompt that count.", ge=1, unit="tokens"),
    ] = 256
    prefix_load_factor: Annotated[
        float,
        setting(
            ROUTING,
            "--prefix-hash-load-factor",
            "prefix_hash: a worker with so many times the mean of requests is passed over, if also the next.",
            ge=1,
        ),
    ] = 1.25
    prefix_balance_abs: Annotated[
        int,
        setting(ROUTING, "--prefix-hash-balance-abs-threshold", "prefix_hash: and so many more than the mean.", ge=0),
    ] = 10
