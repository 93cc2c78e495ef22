"""One measured round before a gateway, and the check that two gateways sent the same tensors.

A round is some uncounted requests, then the counted ones, with the gateway's process tree watched.  For the check every
picture or film of the rotation is sent once with the stand-in's digest marker; what it journals of both gateways is
compared: prompt ids, ranges, shapes, dtypes and the SHA-256 of every tensor.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.pipeline.bundles import unpack_bundle
from tools.demo.flow import MODEL
from tools.fake.servicer import DIGEST_MARKER
from tools.launch import ROOT, Gateway, fake_engine, listening, request
from tools.load.bodies import Bodies, Kind, media_files, parse_mix
from tools.load.client import ROUTE, Outcome, closed_loop
from tools.load.figures import figures
from tools.load.processes import Watch
from tools.load.scenarios import Scenario

OTHER_ENGINE = ROOT / "tests" / "e2e" / "other_engine.py"
BUNDLE = ROOT / "tools" / "demo" / "bundle"
WARM_UP = 5
READY = {
    "model": MODEL,
    "max_tokens": 1,
    "messages": [{"role": "user", "content": "ready?"}],
}


class RoundFailed(Exception):
    """A gateway did not answer every request."""


@contextlib.contextmanager
def stand_in(scenario: Scenario, journal: Path, log: Path) -> Iterator[int]:
    """The light engine both gateways send to."""
    flags = ["--light", "--journal", str(journal)]
    flags += [word for label in scenario.labels for word in ("--label", label)]
    with log.open("ab") as output:
        if scenario.runtime == "vllm":
            with fake_engine(*flags, log=output) as port:
                yield port
            return
        command = [sys.executable, str(OTHER_ENGINE), "--runtime", scenario.runtime, "--model", MODEL]
        with _bundle(scenario) as bundle, listening([*command, "--bundle", str(bundle), *flags], log=output) as port:
            yield port


@contextlib.contextmanager
def _bundle(scenario: Scenario) -> Iterator[Path]:
    if not scenario.bundle:
        yield BUNDLE
        return
    with tempfile.TemporaryDirectory(prefix="mediagate-bundle-") as folder:
        yield unpack_bundle(scenario.bundle, Path(folder))


@contextlib.contextmanager
def gateway(command: list[str], flags: list[str], engine_port: int, log: Path) -> Iterator[Gateway]:
    """A gateway that has answered one text."""
    started = Gateway(command, ["--worker-urls", f"grpc://127.0.0.1:{engine_port}", *flags], log=log)
    try:
        started.wait_until(ROUTE, READY)
        yield started
    finally:
        started.stop()


def bodies(scenario: Scenario) -> Bodies:
    mix = parse_mix(scenario.mix) if scenario.mix else []
    return Bodies(MODEL, mix, stream=False, max_tokens=2)


def measure(started: Gateway, scenario: Scenario, sent: Bodies, requests: int) -> dict[str, Any]:
    """Raises RoundFailed when a request is not answered with 200."""
    outcomes: list[Outcome] = []
    clients = scenario.concurrency
    warm_up = max(WARM_UP, clients)
    asyncio.run(closed_loop(started.url, sent, clients=clients, requests=warm_up, report=outcomes.append))
    _all_answered(outcomes, started)
    outcomes.clear()
    with Watch(started.pid) as watch:
        begun = time.perf_counter()
        asyncio.run(
            closed_loop(
                started.url,
                sent,
                clients=clients,
                requests=requests,
                report=outcomes.append,
            )
        )
        elapsed_s = time.perf_counter() - begun
    _all_answered(outcomes, started)
    return figures(outcomes, elapsed_s, watch)


def _all_answered(outcomes: list[Outcome], started: Gateway) -> None:
    bad = [outcome.problem for outcome in outcomes if outcome.status != 200]
    if bad:
        raise RoundFailed(f"{len(bad)} of {len(outcomes)} requests failed: {bad[0]}{started.tail()}")


def sent_tensors(started: Gateway, scenario: Scenario, journal: Path, most: int | None = None) -> list[dict[str, Any]]:
    """What the engine saw of each picture or film of the rotation (of the first `most`), as its journal tells it,
    without ids that differ anyway.
    """
    before = len(_records(journal))
    sent = Bodies(MODEL, [], stream=False, max_tokens=2)
    for files in _one_by_one(parse_mix(scenario.mix))[:most] if scenario.mix else [[]]:
        body = sent.of(files, f"{DIGEST_MARKER} What is it?")
        status, text = request(started.host, started.port, ROUTE, json.loads(body.data))
        if status != 200:
            raise RoundFailed(f"{status} {text[:200]!r}{started.tail()}")
    seen = [_what(record) for record in _records(journal)[before:]]
    return seen if scenario.is_exact else _without_digests(seen)


def _without_digests(seen: Any) -> Any:
    if isinstance(seen, list):
        return [_without_digests(one) for one in seen]
    if isinstance(seen, dict):
        return {name: _without_digests(one) for name, one in seen.items() if name != "sha256"}
    return seen


def _what(record: dict[str, Any]) -> dict[str, Any]:
    if "media" not in record:  # of an engine that is not vLLM
        message = record["message"]
        return {"input_ids": message["tokenized"]["input_ids"], "media": [message.get("mm_inputs")]}
    return {"input_ids": record["input_ids"], "media": [_comparable(m) for m in record["media"]]}


def _one_by_one(mix: list[Kind]) -> list[list[tuple[Kind, bytes]]]:
    """As many requests as the kind with the most different files has."""
    known = [media_files(kind, place) for place, kind in enumerate(mix)]
    return [
        [(kind, files[number % len(files)]) for kind, files in zip(mix, known, strict=True) for _ in range(kind.count)]
        for number in range(max(map(len, known)))
    ]


def _comparable(batch: dict[str, Any]) -> dict[str, Any]:
    """Hashes are made by other recipes in other versions, and transports are what is being compared."""
    tensors = {
        name: {key: value for key, value in tensor.items() if key != "transport"}
        for name, tensor in batch["tensors"].items()
    }
    return {
        "modality": batch["modality"],
        "ranges": batch["ranges"],
        "tensors": tensors,
    }


def _records(journal: Path) -> list[dict[str, Any]]:
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [record for record in map(json.loads, lines) if record["event"] == "generate"]
