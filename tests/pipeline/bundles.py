"""Model bundles of tests/data/bundles, put together in a temporary folder and loaded once for the whole run."""

import functools
import hashlib
import json
import lzma
import shutil
import tempfile
from pathlib import Path

from pipeline.bundle import Bundle, load_bundle

DATA = Path(__file__).parent.parent / "data" / "bundles"
DIGESTS: dict[str, str] = json.loads((DATA / "tokenizers.json").read_text())
NAMES = sorted(DIGESTS)


def unpack_bundle(name: str, to: Path) -> Path:
    """The bundle's folder below `to`, every file in place."""
    folder = to / name
    shutil.copytree(DATA / name, folder)
    (folder / "tokenizer.json").write_bytes(_tokenizer(DIGESTS[name]))
    return folder


def _tokenizer(digest: str) -> bytes:
    """tokenizer.json: packed whole, or made of Qwen3-VL's text vocabulary and a list of added tokens."""
    packed = DATA / "tokenizers" / f"{digest}.json.xz"
    if packed.exists():
        return lzma.decompress(packed.read_bytes())
    made = json.loads(_tokenizer(DIGESTS["qwen3_vl"]))
    made["model"]["merges"] = [" ".join(merge) for merge in made["model"]["merges"]]
    made["added_tokens"] = json.loads((DATA / "tokenizers" / f"{digest}.added.json").read_text())
    for token in made["added_tokens"]:
        made["model"]["vocab"][token["content"]] = token["id"]
    data = (json.dumps(made, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
    assert hashlib.sha256(data).hexdigest().startswith(digest)
    return data


@functools.cache
def bundle(name: str) -> Bundle:
    """The loaded bundle; its folder is gone already, as after a worker's archive."""
    with tempfile.TemporaryDirectory() as folder:
        return load_bundle(unpack_bundle(name, Path(folder)))
