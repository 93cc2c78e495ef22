"""A sidecar of this project as a process, and the worker's side of its queue."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import redis
from smg_grpc_servicer import mm_sidecar_protocol as published

from tests.pipeline.bundles import unpack_bundle
from tests.sidecar.records import Record
from tools.launch import ROOT, LaunchError, free_port, request, stop
from tools.redis_server import RedisServer

_NUMBERS = itertools.count(1)


def until(condition: Callable[[], bool], what: str, wait_s: float = 30) -> None:
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {wait_s:g} s"
        time.sleep(0.02)


class Sidecar:
    """`python gateway.py sidecar`, ready when made.  `log` holds what it said."""

    def __init__(
        self, flags: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None, wait: bool = True
    ) -> None:
        self.port = free_port()
        self.log = log
        command = [sys.executable, "gateway.py", "sidecar", "--prometheus-port", str(self.port)]
        self._output = log.open("ab")
        self.process = subprocess.Popen(
            [*command, "--pool-processes", "1", "--pool-ring-bytes", str(256 << 20), *flags],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self, wait_s: float = 60) -> None:
        """Raises LaunchError and ends it."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):
                if self.ask("/readiness")[0] == 200:
                    return
            time.sleep(0.05)
        self.stop()
        raise LaunchError(f"the sidecar is not ready:\n{self.log.read_text()[-3000:]}")

    def ask(self, path: str) -> tuple[int, str]:
        status, body = request("127.0.0.1", self.port, path, timeout_s=5)
        return status, body.decode()

    def metric(self, line: str) -> float:
        """The value of a sample, 0 when there is none."""
        _, text = self.ask("/metrics")
        found = [one.rpartition(" ")[2] for one in text.splitlines() if one.rpartition(" ")[0] == line]
        return float(found[0]) if found else 0.0

    def kill(self) -> None:
        self.process.kill()
        self.stop()

    def stop(self, number: int = signal.SIGTERM, grace_s: float = 20) -> int:
        code = stop(self.process, grace_s=grace_s, number=number)
        self._output.close()
        return code


class Worker:
    """The worker's side: puts jobs in as the published servicer does, and reads answers with its codec."""

    def __init__(self, server: RedisServer, fingerprint: published.Fingerprint, namespace: str | None = None) -> None:
        self.fingerprint = fingerprint
        self.keys = published.Keys.for_namespace(published.resolve_namespace(fingerprint, namespace))
        self.redis: Any = redis.from_url(server.url, socket_timeout=None)

    def job(self, like: bytes | None = None, **more: Any) -> published.Job:
        """A recorded job with an id, an age and a deadline of its own."""
        assert like is not None
        now_ms = int(time.time() * 1000)
        changes = {"job_id": f"{next(_NUMBERS):032x}", "enqueued_ms": now_ms, "deadline_ms": now_ms + 30_000}
        return msgspec.structs.replace(published.decode_job(like), **{**changes, **more})

    def put(self, job: published.Job) -> str:
        self.redis.lpush(self.keys.jobs, published.encode_job(job))
        return job.job_id

    def get(self, job_id: str, wait_s: float = 20) -> published.JobResult | None:
        popped = self.redis.brpop([self.keys.result(job_id)], timeout=wait_s)
        return published.decode_result(popped[1]) if popped else None

    def asked(self, job: published.Job) -> published.JobResult:
        self.put(job)
        found = self.get(job.job_id)
        assert found is not None, "no answer"
        assert found.job_id == job.job_id and found.v == published.SCHEMA_VERSION
        return found

    def close(self) -> None:
        self.redis.close()


def flags_of(record: Record, folder: Path) -> list[str]:
    """The flags of a sidecar for the worker the record was made with."""
    fingerprint = {name: record.hello[name] for name in published.Fingerprint.__struct_fields__}
    device = "--no-mm-device-do-normalize" not in record.flags and record.bundle != "llama4"
    described = folder / "worker.json"
    described.write_text(json.dumps(fingerprint | {"mm_device_do_normalize": device}))
    bundle = folder / record.bundle
    if not bundle.exists():
        unpack_bundle(record.bundle, folder)
    return ["--fingerprint-file", str(described), "--tokenizer-path", str(bundle)]


def fingerprint_of(record: Record) -> published.Fingerprint:
    found = published.Fingerprint.from_hello(record.hello)
    assert found is not None
    return found


@contextlib.contextmanager
def sidecar(server: RedisServer, record: Record, folder: Path, *flags: str) -> Iterator[Sidecar]:
    """One for the record's worker; ended in the end."""
    running = Sidecar(["--redis-url", server.url, *flags_of(record, folder), *flags], folder / "sidecar.log")
    try:
        yield running
    finally:
        running.stop()
