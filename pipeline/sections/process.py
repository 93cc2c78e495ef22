"""The gateway's own processes, its metrics and its log.

Sections of the configuration; the rules are told in `pipeline.sections`.
"""

from typing import Annotated, Literal

import msgspec

from pipeline.setting import OBSERVING, POOL, seconds, setting, size


class Pool(msgspec.Struct, frozen=True):
    processes: Annotated[
        int,
        setting(POOL, "--pool-processes", "Processes that decode and preprocess.", ge=1, computed="the usable cores"),
    ] = 0
    ring_bytes: Annotated[
        int,
        size(
            POOL,
            "--pool-ring-bytes",
            "Shared memory for encoded media and tensors; untouched pages cost nothing.",
            ge=1 << 20,
            computed="half of the memory this process may use",
        ),
    ] = 0
    process_memory_bytes: Annotated[
        int,
        size(
            POOL,
            "--pool-process-memory-bytes",
            "Memory of its own one process may take for a picture; one that asks for more is refused.",
            ge=128 << 20,
            computed="3758096384, at most a quarter of the memory",
        ),
    ] = 0
    job_timeout_s: Annotated[
        float, seconds(POOL, "--pool-job-timeout-secs", "Longest job; a process that overruns is replaced.", ge=1)
    ] = 60.0


class Metrics(msgspec.Struct, frozen=True):
    host: Annotated[
        str, setting(OBSERVING, "--prometheus-host", "Address of the metrics listener.", computed="--host")
    ] = ""
    port: Annotated[
        int,
        setting(
            OBSERVING,
            "--prometheus-port",
            "TCP port of the metrics listener.",
            ge=1,
            le=65535,
            refusal="Port must be > 0 (0 would request an unstable OS-ephemeral port) and at most 65535",
        ),
    ] = 29000


class Log(msgspec.Struct, frozen=True):
    level: Annotated[
        Literal["debug", "info", "warn", "error"], setting(OBSERVING, "--log-level", "Least severe lines to log.")
    ] = "info"
    json: Annotated[bool, setting(OBSERVING, "--log-json", "Log one JSON object a line.")] = False
