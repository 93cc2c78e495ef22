"""The demo's course: start the stand-in and the gateway, ask, print, compare with the reference, stay until Ctrl-C.

The gateway runs as it always does, as a child with its default settings and the stand-in as its only worker.  What
the engine saw is read from the stand-in's journal and compared with `reference.py` value by value; the pixels by
their SHA-256.
"""

import base64
import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.demo.ask import Reply, ask
from tools.demo.picture import encoded, picture
from tools.demo.reference import Expected, picture_prompt, text_prompt
from tools.launch import Gateway, LaunchError, fake_engine, hindrance

EXIT_PORT_TAKEN = 3
MODEL = "qwen3-vl-demo"
TEXT_QUESTION = "What do you get when I send no picture?"
PICTURE_QUESTION = "What is in this picture?"


@dataclasses.dataclass(frozen=True)
class Question:
    """`note` describes what goes along with the words."""

    words: str
    note: str
    content: Any
    stream: bool
    expected: Expected


def questions() -> list[Question]:
    """A text and a picture, each asked with and without streaming."""
    image = picture()
    file = encoded(image)
    url = "data:image/png;base64," + base64.b64encode(file).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": PICTURE_QUESTION}]
    note = f"  [{image.width}x{image.height} PNG, {len(file) / 1000:.0f} kB]"
    text, seen = text_prompt(TEXT_QUESTION), picture_prompt(image, file, PICTURE_QUESTION)
    return [
        Question(TEXT_QUESTION, "", TEXT_QUESTION, False, text),
        Question(TEXT_QUESTION, "  [streamed]", TEXT_QUESTION, True, text),
        Question(PICTURE_QUESTION, note, parts, False, seen),
        Question(PICTURE_QUESTION, note + "  [streamed]", parts, True, seen),
    ]


def run_demo(
    host: str = "127.0.0.1",
    port: int = 30000,
    once: bool = False,
    *,
    command: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> int:
    """Run the demo and give its exit code: 0 when the engine saw exactly what the reference says.

    `once`, or a standard output that is no terminal: end after the answers.  `command` starts a gateway other than
    gateway.py.
    """
    stay = not once and sys.stdout.isatty()
    why = "" if once else "demo: it ends here, because its output is no terminal"
    if why_not := hindrance(host, port):  # else the demo would talk to whoever listens there
        print(f"demo: cannot listen on {host} port {port}: {why_not}", file=sys.stderr)
        return EXIT_PORT_TAKEN
    try:
        with _sigterm_as_interrupt(), tempfile.TemporaryDirectory(prefix="mediagate-demo-") as folder:
            started = command or (sys.executable, "gateway.py")
            code = _run(host, port, stay, Path(folder), started, flags if command else ("--server-timing", *flags))
        if why and not stay:
            print(why, flush=True)
        return code
    except KeyboardInterrupt:
        return 0 if stay else 130
    except (LaunchError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def _run(host: str, port: int, stay: bool, folder: Path, command: Sequence[str], flags: Sequence[str]) -> int:
    journal, log = folder / "journal.jsonl", folder / "gateway.log"
    with fake_engine("--model-name", MODEL, "--journal", str(journal)) as engine_port:
        flags = ["--worker-urls", f"grpc://127.0.0.1:{engine_port}", *flags]
        gateway = Gateway(command, flags, host=host, port=port, log=log, environment=_default_settings())
        try:
            gateway.wait_until("/readiness")
            print(f"mediagate demo on {gateway.url}   engine: fake vLLM on port {engine_port}")
            print(f"metrics: {gateway.metrics_url}   log: {log} (until the demo ends)", flush=True)
            faults = _talk(gateway, journal)
            if stay:
                print(f"Open {gateway.url}/ to try your own. Ctrl-C to stop.", flush=True)
                faults.append(f"the gateway left with exit code {gateway.process.wait()}{gateway.tail()}")
        except OSError as error:
            raise LaunchError(f"{error}{gateway.tail()}") from error
        finally:
            code = gateway.stop()
    if not stay and code:
        faults.append(f"the gateway ended with exit code {code}")
    for fault in faults:
        print(f"demo: {fault}", file=sys.stderr)
    return 1 if faults else 0


def _default_settings() -> dict[str, str]:
    """The demo shows the defaults: an empty variable is an unset one."""
    return {name: "" for name in os.environ if name.startswith(("MEDIAGATE_", "SMG_"))}


def _talk(gateway: Gateway, journal: Path) -> list[str]:
    """Ask everything; what the engine saw wrongly, in words."""
    faults = [fault for question in questions() for fault in _converse(gateway, question, journal)]
    verdict = "something else than the reference says" if faults else "what the reference says"
    print(f"demo: the engine saw {verdict}", flush=True)
    return faults


def _converse(gateway: Gateway, question: Question, journal: Path) -> list[str]:
    """Ask one question, print both sides, and return what the engine saw wrongly."""
    print(f"> {question.words}{question.note}")
    before = len(_seen(journal))
    reply = ask(gateway.host, gateway.port, MODEL, question.content, stream=question.stream)
    print(f"< {reply.text}")
    if reply.stages:
        print("  " + "  ".join(f"{name} {duration:.1f}" for name, duration in reply.stages.items()) + " ms")
    sys.stdout.flush()
    if reply.status != 200:
        return [f"{question.words!r} was answered with status {reply.status}"]
    records = _seen(journal)[before:]
    if len(records) != 1:
        return [f"the engine saw {len(records)} requests instead of one"]
    return differences(question.expected, records[0], reply)


def _seen(journal: Path) -> list[dict[str, Any]]:
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [record for record in map(json.loads, lines) if record["event"] == "generate"]


def differences(expected: Expected, record: dict[str, Any], reply: Reply) -> list[str]:
    """What differs between the reference and a journal record, in words; empty when nothing does."""
    ids = [token for token, count in record["input_ids"] for _ in range(count)]
    rows: list[tuple[str, Any, Any]] = [("prompt ids", expected.input_ids, ids)]
    if not expected.grid:
        rows.append(("media", [], record["media"]))
        rows.append(("answer", f"I received no media, {len(ids)} prompt tokens", reply.text.partition(":")[0]))
    elif len(record["media"]) != 1:
        rows.append(("batches", 1, len(record["media"])))
    else:
        batch = record["media"][0]
        tensors = batch["tensors"]
        pixels = tensors.get("pixel_values", {})
        rows += [
            ("ranges", expected.ranges, batch["ranges"]),
            ("hashes", [expected.content_hash], batch["hashes"]),
            ("image_grid_thw", expected.grid, tensors.get("image_grid_thw", {}).get("values")),
            ("shape of pixel_values", expected.pixel_shape, pixels.get("shape")),
            ("dtype of pixel_values", "float32", pixels.get("dtype")),
            ("SHA-256 of pixel_values", expected.pixel_sha256, pixels.get("sha256")),
            ("answer", True, f"image_grid_thw {expected.grid}" in reply.text),
        ]
    return [f"{name}: the reference says {want}, the engine saw {got}" for name, want, got in rows if want != got]


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """A `kill` ends the demo the way Ctrl-C does, so that both children are stopped."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
