"""The pool with real processes."""

import asyncio
from pathlib import Path

from tests.pool.shop import Echo
from tests.pool.stage import Scene, play


async def echoes(scene: Scene) -> None:
    outcome = await scene.pool.submit(Echo("a", 3), deadline_s=5)
    assert outcome.result.text == "aaa"
    outcomes = await asyncio.gather(*(scene.pool.submit(Echo(str(i)), deadline_s=5) for i in range(200)))
    assert [outcome.result.text for outcome in outcomes] == [str(i) for i in range(200)]


def test_jobs_are_answered(tmp_path: Path) -> None:
    play(echoes, tmp_path)
