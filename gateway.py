"""`python gateway.py`: flags to Config, shared memory, forks.  Wiring only.

    gateway.py            supervisor: this file, then pool/supervisor.py; no event loop, no thread
     ├── frontend         pipeline/frontend.py: uvloop, HTTP, engines
     └── pool process × N pipeline/jobs.py: decode, preprocess, hash

Shared between them, and made here before the first fork: one anonymous mapping with rings and spans, two eventfds for
each pool process, one control socket pair between supervisor and frontend.  `gateway.py sidecar` has the front process
of pipeline/sidecar/front.py instead.
"""

import os
import sys

# Before numpy and tokenizers are imported: the supervisor forks and must have one thread.
for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import logging  # noqa: E402
import resource  # noqa: E402
from collections.abc import Callable  # noqa: E402

try:
    from pipeline import ceiling, frontend, logs
    from pipeline.config import EXIT_CONFIG, EXIT_OK, Config, ConfigError, Media, Pool
    from pipeline.flags import Invocation, parse
    from pipeline.jobs import MediaWorkshop
    from pipeline.setting import Resolved
    from pool.link import FrontendLink
    from pool.supervisor import Supervisor
except ModuleNotFoundError as _error:
    sys.exit(f"gateway.py: {_error} in {sys.executable}: tools/setup makes .venv, tools/run starts it from there")

_log = logging.getLogger("mediagate")

STOP_MARGIN_S = 10.0  # beyond settle time and grace, before the supervisor kills a frontend that does not end


def main(argv: list[str]) -> int:
    if argv[:1] == ["sidecar"]:
        return sidecar(argv[1:])
    try:
        invocation = parse(argv, os.environ)
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return error.exit_code
    if invocation.action in ("help", "version", "check_config"):
        sys.stdout.write(invocation.text)
        return EXIT_OK
    if invocation.action == "demo":
        return demo(invocation)
    assert invocation.config is not None
    return serve(invocation.config)


def demo(invocation: Invocation) -> int:
    from tools.demo import run_demo

    assert invocation.config is not None
    return run_demo(invocation.config.server.host, invocation.config.server.port, invocation.once)


def _open_files() -> None:
    """Every connection is a descriptor, and the usual soft limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _tell(config: Resolved) -> None:
    """What it runs with: all that is set at INFO, everything at DEBUG."""
    for warning in config.warnings:
        _log.warning("%s", warning)
    _log.info("%s", config.summary())
    for line in config.listing():
        _log.debug("setting %s", line)


def serve(config: Config) -> int:
    logs.set_up(config.log, os.environ)
    _tell(config)
    _log.info("%s", ceiling.told(config))
    _open_files()
    return _supervised(
        config.pool,
        config.media,
        config.server.drain_settle_s + config.server.shutdown_grace_s,
        lambda link: frontend.run(link, config),
    )


def sidecar(argv: list[str]) -> int:
    """The same processes with another front: jobs out of Redis instead of requests over HTTP."""
    from pipeline.sidecar import ceiling as sidecar_ceiling
    from pipeline.sidecar import front, settings

    try:
        invocation = settings.parse(argv, os.environ)
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return error.exit_code
    config = invocation.config
    if invocation.action != "run" or config is None:
        sys.stdout.write(invocation.text)
        return EXIT_OK
    logs.set_up(config.log, os.environ)
    _tell(config)
    _log.info("%s", sidecar_ceiling.told(config))
    _open_files()
    return _supervised(config.pool, config.media, config.watch.shutdown_grace_s, lambda link: front.run(link, config))


def _supervised(pool: Pool, media: Media, stop_s: float, front_process: Callable[[FrontendLink], int]) -> int:
    """Map the memory, fork, watch; `stop_s`: what the front process may take to end by itself."""
    workshop = MediaWorkshop(
        memory_bytes=pool.process_memory_bytes, clip_backend=media.video_backend, sound_backend=media.audio_backend
    )
    workshop.preload()
    try:
        supervisor = Supervisor(
            processes=pool.processes,
            mapping_bytes=pool.ring_bytes,
            keep_bytes=pool.ring_bytes // 4,
            stop_timeout_s=stop_s + STOP_MARGIN_S,
        )
    except OSError as error:
        _log.critical("the shared mapping of %d bytes cannot be made: %s", pool.ring_bytes, error)
        return EXIT_CONFIG
    return supervisor.run(front_process, workshop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
