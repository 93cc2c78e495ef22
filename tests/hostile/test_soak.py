"""Many clients of every kind against a gateway with small limits: memory stays under what docs/limits.md computes, and
everything is given back."""

import pytest

from pipeline import ceiling
from pipeline.allocator import KEPT_BYTES
from pipeline.flags import parse
from tests.e2e.running import until
from tools.fuzzing.live import site
from tools.fuzzing.soak import soak
from tools.load.processes import memory

MIB = 1 << 20
RING, SHM, DECODE, PROCESSES = 96 * MIB, 48 * MIB, 384 * MIB, 2
LIMITS = (
    f"--pool-processes={PROCESSES}",
    f"--pool-ring-bytes={RING}",
    f"--mm-shm-max-bytes={SHM}",
    f"--pool-process-memory-bytes={DECODE}",
    "--max-payload-size=16777216",
    "--max-inflight-body-bytes=33554432",
    "--multimodal-max-inflight-bytes=50331648",
    "--max-concurrent-requests=16",
    "--queue-size=24",
    "--queue-timeout-secs=5",
    "--history-memory-max-bytes=16777216",
    "--request-timeout-secs=20",
)


@pytest.mark.parametrize("transport", ["inline", "auto"])
def test_memory_stays_within_the_formula(transport: str) -> None:
    flags = [*LIMITS, f"--multimodal-tensor-transport={transport}"]
    config = parse(flags, {}).config
    assert config is not None
    most = {share.what: share.nbytes for share in ceiling.shares(config)}
    with site(*flags) as place:
        before = memory(place.gateway.pid).held
        report = soak(place, seconds=4, clients=10, seed=4)
        assert not report.wrong, report.wrong
        assert report.answers["200"] > 10
        assert sum(report.answers.values()) - report.answers["200"] > 20
        peaks = report.peaks
        assert len(report.samples) > 5
        assert peaks.held < ceiling.ceiling_bytes(config)
        assert peaks.segments <= most["tensors in /dev/shm"]
        assert peaks.pools < ceiling.POOL_PROCESS_BYTES + DECODE
        others = ("bodies, fetched media, prompts", "one body being read", "requests that wait for room")
        assert peaks.frontend < ceiling.FRONTEND_BYTES + sum(most[what] for what in others)
        # pages are given back after two to four seconds
        kept = RING // 4 + SHM // 2 + PROCESSES * KEPT_BYTES + 32 * MIB
        until(lambda: memory(place.gateway.pid).held - before < kept)


def test_the_sum_is_that_of_its_shares_and_told_at_the_start() -> None:
    config = parse(list(LIMITS), {}).config
    assert config is not None
    rows = ceiling.shares(config, workers=3)
    assert ceiling.ceiling_bytes(config, workers=3) == sum(row.nbytes for row in rows)
    found = {row.what: row.nbytes for row in rows}
    assert found["tensors in /dev/shm"] == 0  # inline
    assert found["decoding"] == PROCESSES * DECODE
    assert found["engines' answers on their way"] == 3 * ceiling.WORKER_BYTES
    line = ceiling.told(config)
    assert line.startswith("memory under any load: at most ")
    assert f"encoded media and tensors in the mapping {RING // MIB}" in line
