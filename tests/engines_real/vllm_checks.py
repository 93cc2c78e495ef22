"""vLLM itself, behind its servicer in Python and in Rust: every way media reach it, each on an engine of its own.

| group | pixels are made by | they arrive |
|---|---|---|
| `<servicer> raw inline`, `raw shm`, `float inline`, `float shm` | the gateway | in the message, in segments |
| `<servicer> references inprocess` | vLLM in the worker | as URLs |
| `rust references smg` | the pipeline of smg in the worker | as URLs |
| `<servicer> redis published`, `redis ours` | the published media sidecar, and this project's | as URLs |
"""

import functools
from pathlib import Path

from tests.engines_real import pair_checks, redis_mode, reference_checks
from tests.engines_real.checks import Bench, by_tensors, on_engine
from tests.engines_real.sdk_checks import SDK_CHECKS
from tests.engines_real.tally import Tally
from tests.engines_real.vllm_cpu import SERVICERS

_MODES = {"python": ("inprocess",), "rust": ("inprocess", "smg")}
_PRIVATE_HOSTS = {"SMG_MM_ALLOW_PRIVATE_MEDIA_HOSTS": "1"}  # smg's pipeline fetches from loopback only when told to


def with_vllm(tally: Tally, bench: Bench, model: Path, nixl: pair_checks.FindNixl) -> None:
    """Everything; `nixl` gives the folder that has NIXL's package."""
    for servicer in SERVICERS:
        label = f"vllm {servicer}"
        by_tensors(tally, bench, label, servicer=servicer)
        for mode in _MODES[servicer]:
            checks, how = reference_checks.checks(mode), {"processor": mode, "servicer": servicer}
            on_engine(tally, bench, f"{label} references {mode}", checks, "inline", settings=_PRIVATE_HOSTS, **how)
        for kind in redis_mode.SIDECARS:
            _by_sidecar(tally, bench, model, servicer, kind)
        on_engine(tally, bench, label, SDK_CHECKS, "inline", servicer=servicer)
    for servicer in SERVICERS:
        pair_checks.with_pairs(tally, bench, model, servicer, nixl)


def _by_sidecar(tally: Tally, bench: Bench, model: Path, servicer: str, kind: str) -> None:
    group = f"vllm {servicer} redis {kind}"
    wanted = tally.chosen(group, redis_mode.checks(kind))
    if not wanted:
        return
    with tally.group(group), redis_mode.served(kind, bench, model, servicer) as started:
        for name, check in wanted.items():
            tally.run(name, functools.partial(check, bench, started, "inline"))
