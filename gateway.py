"""`python gateway.py`: flags to Config, shared memory, forks.  Wiring only.

    gateway.py            supervisor: this file, then pool/supervisor.py; no event loop, no thread
     ├── frontend         pipeline/frontend.py: uvloop, HTTP, engines
     └── pool process × N pipeline/jobs.py: decode, preprocess, hash

Shared between them, and made here before the first fork: one anonymous mapping with rings and spans, two eventfds for
each pool process, one control socket pair between supervisor and frontend.
"""

import os
import sys

# Before numpy and tokenizers are imported: the supervisor forks and must have one thread.
for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import logging  # noqa: E402
import resource  # noqa: E402

from pipeline import ceiling, frontend, logs  # noqa: E402
from pipeline.config import EXIT_CONFIG, EXIT_OK, Config, ConfigError  # noqa: E402
from pipeline.flags import Invocation, parse  # noqa: E402
from pipeline.jobs import MediaWorkshop  # noqa: E402
from pool.supervisor import Supervisor  # noqa: E402

_log = logging.getLogger("mediagate")

STOP_MARGIN_S = 10.0  # beyond settle time and grace, before the supervisor kills a frontend that does not end


def main(argv: list[str]) -> int:
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


def serve(config: Config) -> int:
    logs.set_up(config.log, os.environ)
    for warning in config.warnings:
        _log.warning("%s", warning)
    _log.info("%s", config.summary())
    _log.info("%s", ceiling.told(config))
    _open_files()
    workshop = MediaWorkshop(memory_bytes=config.pool.process_memory_bytes, clip_backend=config.media.video_backend)
    workshop.preload()
    try:
        supervisor = Supervisor(
            processes=config.pool.processes,
            mapping_bytes=config.pool.ring_bytes,
            keep_bytes=config.pool.ring_bytes // 4,
            stop_timeout_s=config.server.drain_settle_s + config.server.shutdown_grace_s + STOP_MARGIN_S,
        )
    except OSError as error:
        _log.critical("the shared mapping of %d bytes cannot be made: %s", config.pool.ring_bytes, error)
        return EXIT_CONFIG
    return supervisor.run(lambda link: frontend.run(link, config), workshop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
