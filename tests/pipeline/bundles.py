"""Model bundles of tests/data/bundles, put together in a temporary folder and loaded once for the whole run.

`python -m tests.pipeline.bundles FOLDER` adds one.
"""

import functools
import hashlib
import json
import lzma
import shutil
import sys
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


def pack_bundle(folder: Path) -> str:
    """Add a folder with config.json, preprocessor_config.json, tokenizer.json and a chat template to the test bundles;
    its name.
    """
    tokenizer = (folder / "tokenizer.json").read_bytes()
    digest = hashlib.sha256(tokenizer).hexdigest()[:12]
    packed = DATA / "tokenizers" / f"{digest}.json.xz"
    if not packed.exists():
        packed.write_bytes(lzma.compress(tokenizer, preset=9))
    shutil.copytree(folder, DATA / folder.name, ignore=shutil.ignore_patterns("tokenizer.json"))
    listed = dict(sorted({**DIGESTS, folder.name: digest}.items()))
    (DATA / "tokenizers.json").write_text(json.dumps(listed, indent=1) + "\n")
    return folder.name


if __name__ == "__main__":
    print(pack_bundle(Path(sys.argv[1]).resolve()))
