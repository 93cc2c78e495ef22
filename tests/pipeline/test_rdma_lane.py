"""The RDMA lane as the settings open it; without what it needs there is one warning, and no reason not to start."""

import logging

import pytest

from engines.rdma import LaneUnavailable, RdmaLane
from pipeline.config import Transport
from pipeline.flags import parse
from pipeline.rdma_lane import open_lane


def transport(*argv: str) -> Transport:
    config = parse(["--multimodal-tensor-transport", "rdma", *argv], {}).config
    assert config is not None
    return config.transport


def opened(config: Transport, caplog: pytest.LogCaptureFixture) -> tuple[RdmaLane | None, list[str]]:
    with caplog.at_level(logging.INFO):
        return open_lane(config), [f"{record.levelname}: {record.getMessage()}" for record in caplog.records]


def test_without_an_address(caplog: pytest.LogCaptureFixture) -> None:
    lane, lines = opened(transport(), caplog)
    assert lane is None
    assert lines == ["WARNING: no RDMA lane: --rdma-listen-ip is not set; tensors go inline"]


def test_nobody_asked_for_it(caplog: pytest.LogCaptureFixture) -> None:
    config = parse([], {}).config
    assert config is not None and opened(config.transport, caplog) == (None, [])


def test_without_the_package(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.rdma_nixl._PACKAGES", ("no_such_nixl._api",))
    lane, lines = opened(transport("--rdma-listen-ip", "127.0.0.1"), caplog)
    assert lane is None
    (line,) = lines
    assert line.startswith("WARNING: no RDMA lane: the package nixl is not installed")


class Exporter:
    def __init__(self, listen_port: int) -> None:
        self.port = listen_port

    def register(self, address: int, nbytes: int) -> None:
        if nbytes > 1 << 30:
            raise LaneUnavailable(f"{nbytes} bytes cannot be registered")

    def notifications(self) -> list[bytes]:
        return []

    def close(self) -> None: ...


@pytest.mark.parametrize(("slots", "is_open"), [("4", True), ("64", False)])
def test_an_arena_that_the_card_takes_or_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, slots: str, is_open: bool
) -> None:
    monkeypatch.setattr("pipeline.rdma_lane.NixlExporter", Exporter)
    asked = ["--multimodal-tensor-transport", "rdma", "--rdma-listen-ip", "10.0.0.9"]
    config = parse(asked, {"SMG_RDMA_POOL_SLOTS": slots, "SMG_RDMA_LISTEN_PORT": "7000"}).config
    assert config is not None
    lane, (line,) = opened(config.transport, caplog)
    assert (lane is not None) == is_open
    if is_open:
        assert lane is not None and lane.free == 4
        assert line == "INFO: RDMA lane open listen=10.0.0.9:7000 slots=4 slot_bytes=33554432 ttl_s=210"
    else:
        assert line == "WARNING: no RDMA lane: 2147483648 bytes cannot be registered; tensors go inline"
