"""Record what a checkpoint's own image processor makes of eleven drawn pictures: what a family's test compares with.

    PYTHON tools/reference_vectors.py CHECKPOINT tests/data/reference/FAMILY.json [--class CLASS]

PYTHON is one with transformers, torch, torchvision, numpy and Pillow; the project's own .venv has the first three not.
CHECKPOINT is a folder with preprocessor_config.json, or a hub id.  `--class` names a class of transformers for a
checkpoint whose configuration names none.  For every picture: grids and other small tensors as values, large ones as
shape, SHA-256 and first values; `num_tokens` where the processor tells its grid and merge size.
"""

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.models.synthetic import digest, draw  # noqa: E402
from tools.usage import Usage, file_to_write  # noqa: E402

# name: width, height, mode, seed
PICTURES: Mapping[str, tuple[int, int, str, int]] = {
    "tiny": (9, 7, "RGB", 1),
    "small": (64, 48, "RGB", 2),
    "odd": (333, 217, "RGB", 3),
    "square": (448, 448, "RGB", 4),
    "half_even": (400, 400, "RGB", 5),
    "tall": (120, 700, "RGB", 6),
    "wide": (900, 150, "RGB", 7),
    "thin": (900, 10, "RGB", 8),
    "rgba": (200, 140, "RGBA", 9),
    "gray": (250, 300, "L", 10),
    "large": (1920, 1283, "RGB", 11),
}
_PACKAGES = ("transformers", "torch", "torchvision", "numpy", "pillow")
_SMALL = 64

Processor = Callable[[Image.Image], Mapping[str, Any]]


def cases(
    process: Processor, *, merge: int | None, names: tuple[str, ...] = tuple(PICTURES)
) -> Iterator[dict[str, Any]]:
    """One case for each picture; one the processor refuses has `refused` in place of tensors."""
    for name in names:
        width, height, mode, seed = PICTURES[name]
        picture = draw(width, height, mode, seed)
        given = {"width": width, "height": height, "mode": mode, "seed": seed, "pixels_sha256": digest(picture)}
        case: dict[str, Any] = {"kind": "images", "name": name, "input": given}
        try:
            tensors = {key: np.asarray(value) for key, value in process(picture).items()}
        except ValueError as error:
            yield {**case, "refused": str(error)}
            continue
        made: dict[str, Any] = {"tensors": {key: fingerprint(value) for key, value in tensors.items()}}
        if merge is not None and "image_grid_thw" in tensors:
            made["num_tokens"] = [int(tensors["image_grid_thw"].prod()) // merge**2]
        yield {**case, "backends": {"torchvision": made}}


def fingerprint(value: Any) -> dict[str, Any]:
    """Shape, type (int64 or float32) and the values, or of a larger tensor SHA-256 and first values."""
    kind = np.int64 if value.dtype.kind in "iub" else np.float32
    plain = np.ascontiguousarray(value.astype(kind))
    found: dict[str, Any] = {"shape": list(plain.shape), "dtype": plain.dtype.name}
    if plain.size <= _SMALL:
        return {**found, "values": plain.tolist()}
    return {**found, "sha256": hashlib.sha256(plain.tobytes()).hexdigest(), "first8": plain.reshape(-1)[:8].tolist()}


def _load(checkpoint: str, name: str | None) -> Any:
    import transformers  # not in .venv

    loader = getattr(transformers, name) if name else transformers.AutoImageProcessor
    return loader.from_pretrained(checkpoint)


def main() -> int:
    parser = Usage(__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("out", type=file_to_write)
    parser.add_argument("--class", dest="name", metavar="CLASS", help="a class of transformers")
    options = parser.parse_args()
    try:
        processor = _load(options.checkpoint, options.name)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        parser.error(f"{options.checkpoint}: {str(error).splitlines()[0]}")

    def process(picture: Image.Image) -> Mapping[str, Any]:
        made: Mapping[str, Any] = processor(images=picture, return_tensors="pt")
        return made

    written = {
        "family": options.out.stem,
        "versions": {package: importlib.metadata.version(package) for package in _PACKAGES},
        "class": type(processor).__name__,
        "cases": list(cases(process, merge=getattr(processor, "merge_size", None))),
    }
    options.out.write_text(json.dumps(written, indent=1) + "\n")
    print(f"{options.out}: {len(written['cases'])} pictures through {type(processor).__name__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
