"""Every family at a glance, for docs/models.md: what it takes, what its pixels equal, what a picture costs.

    .venv/bin/python tools/family_table.py             print the table; some minutes
    .venv/bin/python tools/family_table.py --write     put it into docs/models.md and docs/performance.md
    .venv/bin/python tools/family_table.py --only llama4,kimi_k3 --no-peer

A row is a test bundle.  "Vectors": recorded pictures whose tensor has the reference's SHA-256, or what its test allows
where a reference resizes with stock Pillow.  "As the peer": what both gateways send an engine stand-in of three
pictures: all equal; or the replaced anchors, grids and shapes are, and 256 values of each tensor lie that close.  CPU
is that of a 1080p JPEG in this process, to float32; "textbook" is numpy's conversion to float, division and transpose
into a tensor of the same size, to be held against ours without resizing.
"""

import argparse
import contextlib
import hashlib
import json
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from engines.base import Form, Modality  # noqa: E402
from pipeline import allocator  # noqa: E402
from pipeline.media.image import decode  # noqa: E402
from pipeline.models.base import Hints  # noqa: E402
from tests.models.served import REFERENCE, Served, picture_cases, through_png  # noqa: E402
from tests.pipeline.bundles import unpack_bundle  # noqa: E402
from tools.compare_peer import PEER  # noqa: E402
from tools.environments import environment  # noqa: E402
from tools.fake.servicer import DIGEST_MARKER  # noqa: E402
from tools.launch import ROOT, Gateway, LaunchError, fake_engine, known_flags, request  # noqa: E402
from tools.load.bodies import Bodies, Kind, media_files  # noqa: E402
from tools.load.client import ROUTE  # noqa: E402
from tools.load.scenarios import QUIET  # noqa: E402
from tools.usage import Usage  # noqa: E402

BUNDLES = (
    *(
        "qwen3_vl",
        "qwen3_5",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_omni",
        "minimax_m3",
        "glm53_flash",
        "kimi_k25",
        "kimi_k3",
    ),
    *("deepseek_v41", "llama4", "llava15", "llava_next", "phi3_v", "phi35_v", "inkling", "qwen3_asr"),
)
PHOTO = Kind(1, 1920, 1080, "jpeg")
PEER_KINDS = (PHOTO, Kind(1, 333, 217, "png"), Kind(1, 640, 480, "webp"))
ROUNDS = 5
MODELS = ROOT / "docs" / "models.md"
MARKS = "<!-- made by tools/family_table.py -->", "<!-- end of what tools/family_table.py made -->"


class Cost(NamedTuple):
    """Milliseconds of CPU: decoding, resizing, the rest of the family's work, and the textbook's way for that rest."""

    decode: float
    resize: float
    layout: float
    textbook: float

    @property
    def picture(self) -> float:
        return self.decode + self.resize + self.layout


class Row(NamedTuple):
    name: str
    takes: dict[Modality, bool]
    vectors: str
    peer: str
    cost: Cost | None


def row(name: str, peer: list[str] | None) -> Row:
    served = Served(name)
    has = served.family.modalities(served.config)
    sees = Modality.IMAGE in has
    return Row(
        name,
        {modality: modality in has for modality in Modality},
        vectors(served) if sees else "-",
        as_peer(name, peer) if sees and peer else "-",
        cost(served) if sees else None,
    )


def vectors(served: Served) -> str:
    """How many recorded pictures give the reference's bytes."""
    if not (REFERENCE / f"{served.name}.json").is_file():
        return "-"
    cases = picture_cases(served.name)
    equal = sum(_is_equal(served, case) for case in cases)
    stated = re.search(rf"^\| `{served.family.name}` \|.*\| (\d levels) \|$", MODELS.read_text(), re.MULTILINE)
    return f"{equal} of {len(cases)}" if stated is None else f"within {stated[1]}"


def _is_equal(served: Served, case: Any) -> bool:
    wanted = {
        tensor.get("sha256") for backend in case.get("backends", {}).values() for tensor in backend["tensors"].values()
    }
    try:
        _, out = served.encode(through_png(case), hints=Hints(max_long_side=case.get("max_long_side_pixel")))
    except Exception:
        return "refused" in case
    return hashlib.sha256(out).hexdigest() in wanted


def cost(served: Served) -> Cost:
    file = media_files(PHOTO)[0]
    picture = decode(memoryview(file), Hints())
    measured = served.measure(picture.height, picture.width)
    out = np.empty(math.prod(measured.primary_shape) * 4, np.uint8)
    keeps = served.family.keeps_alpha(served.settings)
    decoding = _cpu_ms(lambda: decode(memoryview(file), Hints(), keep_alpha=keeps))
    with _resizing() as resizing:
        whole = _cpu_ms(lambda: served.family.encode(served.settings, Modality.IMAGE, picture, measured, Form(), out))
    resized = sum(resizing) * 1000 / (ROUNDS + 1)
    return Cost(decoding, resized, whole - resized, _cpu_ms(lambda: textbook(served, out)))


@contextlib.contextmanager
def _resizing() -> Iterator[list[float]]:
    """The seconds of CPU that Pillow's resize takes meanwhile."""
    spent: list[float] = []
    resize = Image.Image.resize

    def timed(image: Image.Image, *arguments: Any, **options: Any) -> Image.Image:
        begun = time.process_time()
        try:
            return resize(image, *arguments, **options)
        finally:
            spent.append(time.process_time() - begun)

    Image.Image.resize = timed
    try:
        yield spent
    finally:
        Image.Image.resize = resize


def textbook(served: Served, out: np.ndarray[Any, Any]) -> None:
    """What a processor written from the paper does once the picture has its size: to float, scale, normalise, lay out
    by one transpose, copy.  The tensor is as large as `out`, its values are not looked at.
    """
    patch = getattr(served.settings, "patch", 336)
    temporal = getattr(served.settings, "temporal", 1)
    count = out.nbytes // 4 // (3 * temporal * patch * patch)
    columns = max(side for side in range(1, math.isqrt(count) + 1) if count % side == 0)
    image = np.full((count // columns * patch, columns * patch, 3), 128, np.uint8)
    values = (image.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    patches = values.reshape(-1, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)[:, :, :, None]
    whole = np.ascontiguousarray(np.repeat(patches, temporal, axis=3))
    out.view(np.float32)[: whole.size] = whole.reshape(-1)


def _cpu_ms(work: Callable[[], Any]) -> float:
    work()
    found = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        work()
        found.append((time.process_time() - begun) * 1000)
    return statistics.median(found)


def as_peer(name: str, peer: list[str]) -> str:
    """Whether both gateways send the same of some pictures."""
    ours = [sys.executable, "gateway.py"]
    with tempfile.TemporaryDirectory(prefix="mediagate-family-") as made:
        folder = Path(made)
        bundle = unpack_bundle(name, folder / "bundle")
        try:
            seen = {side: list(_sent(name, bundle, command, folder)) for side, command in (("o", ours), ("p", peer))}
        except LaunchError:
            return "not served"
    if not all(isinstance(one, dict) for one in seen["p"]):
        return "not served"
    if not all(isinstance(one, dict) for one in seen["o"]):
        return "differs"
    return apart(seen["o"], seen["p"])


def apart(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    """In words: "equal", how far the values that were looked at lie apart, or that something else differs."""
    worst = 0.0
    for one, other in zip(ours, theirs, strict=True):
        samples = [_samples(side) for side in (one, other)]
        if _without_values(one) != _without_values(other) or samples[0].shape != samples[1].shape:
            return "differs"
        if _digests(one) != _digests(other):
            worst = max(worst, float(np.abs(samples[0] - samples[1]).max(initial=0.0)), 1e-9)
    return f"within {worst:.1g}" if worst else "equal"


def _digests(seen: Any) -> list[str]:
    return [tensor["sha256"] for batch in seen["media"] for _, tensor in sorted(batch["tensors"].items())]


def _samples(seen: Any) -> np.ndarray[Any, Any]:
    tensors = [tensor for batch in seen["media"] for _, tensor in sorted(batch["tensors"].items())]
    return np.array([value for tensor in tensors for value in tensor.get("sample", ())], np.float64)


def _without_values(seen: Any) -> Any:
    """What has to be equal: the prompt's ids where the item stands, names, shapes, grids and counts.

    Not the rest of the prompt: test bundles have cut tokenizers, which the peer reads in another way.
    """
    plain = json.loads(json.dumps(seen["media"]))
    ids = [token for token, count in seen["input_ids"] for _ in range(count)]
    for batch in plain:
        batch["ranges"] = [ids[offset : offset + length] for offset, length in batch["ranges"]]
        for tensor in batch["tensors"].values():
            if "sample" in tensor:
                del tensor["sample"], tensor["sha256"]
    return plain


def _sent(name: str, bundle: Path, command: list[str], folder: Path) -> Iterator[dict[str, Any] | int]:
    """What the engine saw of each picture, or the status it was refused with."""
    journal = folder / f"{command[0].replace('/', '_')[-8:]}.jsonl"
    engine = ("--bundle", str(bundle), "--model-name", name, "--journal", str(journal))
    with contextlib.ExitStack() as held:
        log = held.enter_context((folder / "engine.log").open("ab"))
        port = held.enter_context(fake_engine(*engine, log=log))
        flags = ["--worker-urls", f"grpc://127.0.0.1:{port}", *known_flags(command, QUIET)]
        started = Gateway(command, flags, log=folder / "gateway.log")
        held.callback(started.stop)
        started.wait_until(ROUTE, {"model": name, "max_tokens": 1, "messages": [{"role": "user", "content": "?"}]})
        bodies = Bodies(name, [], stream=False, max_tokens=2)
        for kind in PEER_KINDS:
            body = bodies.of([(kind, media_files(kind)[0])], f"{DIGEST_MARKER} What is it?")
            status, _ = request(started.host, started.port, ROUTE, json.loads(body.data))
            yield _record(journal) if status == 200 else status


def _record(journal: Path) -> dict[str, Any]:
    last = json.loads(journal.read_text().splitlines()[-1])
    for batch in last["media"]:
        batch.pop("hashes")
        for tensor in batch["tensors"].values():
            tensor.pop("transport")
    return {"input_ids": last["input_ids"], "media": last["media"]}


def models_table(rows: Sequence[Row]) -> str:
    head = "| checkpoint | pictures | clips | sounds | vectors equal | as the peer | CPU of a 1080p JPEG, ms |\n"
    lines = [head + "|---|---|---|---|---|---|---|"]
    for one in rows:
        takes = ["yes" if one.takes[kind] else "no" for kind in (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)]
        spent = f"{one.cost.picture:.0f}" if one.cost else "-"
        lines.append(f"| {one.name} | {' | '.join(takes)} | {one.vectors} | {one.peer} | {spent} |")
    return "\n".join(lines)


def performance_table(rows: Sequence[Row]) -> str:
    head = "| checkpoint | decode, ms | resize, ms | values and layout, ms | textbook, ms | ratio |\n"
    lines = [head + "|---|---|---|---|---|---|"]
    for one in rows:
        if one.cost is not None:
            figures = " | ".join(f"{figure:.1f}" for figure in one.cost)
            lines.append(f"| {one.name} | {figures} | {one.cost.layout / one.cost.textbook:.2f} |")
    return "\n".join(lines)


def put(page: Path, table: str) -> None:
    """Replace what stands between the marks."""
    text = page.read_text()
    begin, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    page.write_text(f"{text[:begin]}\n\n{table}\n\n{text[end:]}")


def _bundles(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in BUNDLES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(BUNDLES)}")
    return names


def main(arguments: list[str] | None = None) -> int:
    parser = Usage(__doc__)
    parser.add_argument("--only", type=_bundles, default=BUNDLES, metavar="BUNDLES")
    parser.add_argument("--no-peer", action="store_true", help="leave the comparison with the peer out")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/")
    options = parser.parse_args(arguments)
    allocator.keep_pages()
    peer = None if options.no_peer else [str(environment("smg-1.13.0", [PEER]) / "smg"), "launch"]
    rows = []
    for name in options.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows.append(row(name, peer))
    tables = {"models.md": models_table(rows), "performance.md": performance_table(rows)}
    for page, table in tables.items():
        if options.write:
            put(ROOT / "docs" / page, table)
        else:
            print(f"{table}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
