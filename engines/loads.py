"""How busy an engine's schedulers are, by its own word: one row a data-parallel rank."""

from typing import Any

import msgspec


class SchedulerLoad(msgspec.Struct, frozen=True):
    """Requests, tokens of the KV cache (`num_used_tokens`, `max_total_num_tokens`; `token_usage` is their ratio),
    tokens a second (`gen_throughput`).  What an engine does not tell is 0.
    """

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    max_running_requests: int


def scheduler_load(message: Any) -> SchedulerLoad:
    """A row as any of the engines' protocols has it."""
    return SchedulerLoad(*(getattr(message, name) for name in SchedulerLoad.__struct_fields__))
