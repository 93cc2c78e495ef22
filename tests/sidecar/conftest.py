"""A Redis and a sidecar that a module's tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sidecar.media_host import MediaHost
from tests.sidecar.records import record
from tests.sidecar.running import Sidecar, Worker, fingerprint_of, sidecar
from tools.redis_server import RedisServer, redis_server


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def serving(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """One for the raw Qwen3-VL worker; it may fetch from this machine."""
    folder = tmp_path_factory.mktemp("sidecar")
    with sidecar(redis, record("qwen3_vl"), folder, "--mm-allow-private-media-hosts") as running:
        yield running


@pytest.fixture
def worker(redis: RedisServer) -> Iterator[Worker]:
    made = Worker(redis, fingerprint_of(record("qwen3_vl")))
    yield made
    made.close()


@pytest.fixture
def media_host() -> Iterator[MediaHost]:
    with MediaHost() as host:
        yield host


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
