"""Model bundles of tests/data/bundles, put together in a temporary folder and loaded once for the whole run."""

import functools
import json
import lzma
import shutil
import tempfile
from pathlib import Path

from pipeline.bundle import Bundle, load_bundle

DATA = Path(__file__).parent.parent / "data" / "bundles"
NAMES = sorted(json.loads((DATA / "tokenizers.json").read_text()))


def unpack_bundle(name: str, to: Path) -> Path:
    """The bundle's folder below `to`, every file in place."""
    folder = to / name
    shutil.copytree(DATA / name, folder)
    digest = json.loads((DATA / "tokenizers.json").read_text())[name]
    packed = DATA / "tokenizers" / f"{digest}.json.xz"
    (folder / "tokenizer.json").write_bytes(lzma.decompress(packed.read_bytes()))
    return folder


@functools.cache
def bundle(name: str) -> Bundle:
    """The loaded bundle; its folder is gone already, as after a worker's archive."""
    with tempfile.TemporaryDirectory() as folder:
        return load_bundle(unpack_bundle(name, Path(folder)))
