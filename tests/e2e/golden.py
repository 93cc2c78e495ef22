"""Records of the real gateway (`tests/data/golden`) as values that compare: requests with their media filled in, what
came back, what the engine saw.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.e2e.origin import DATA, Reply
from tests.e2e.running import Answer, data_url

MODEL = "qwen3-vl"
PICTURES = DATA / "pictures" / "oracle"
CLIPS = DATA / "clips" / "oracle"
MIME = {".jpg": "image/jpeg", ".png": "image/png", ".webp": "image/webp", ".gif": "image/gif", ".bmp": "image/bmp"}

_KEPT = {"object", "model", "role", "system_fingerprint", "service_tier", "type", "refusal", "index"}


def media_file(name: str) -> Path:
    return (CLIPS if name.endswith(".mp4") else PICTURES) / name


def filled(value: Any, base: str) -> Any:
    """A recorded body with its media: `@data:FILE` a data URL, `@http:TARGET` a URL on the media host."""
    if isinstance(value, dict):
        return {key: filled(inner, base) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, base) for inner in value]
    if not isinstance(value, str):
        return value
    if value.startswith("@data:"):
        path = media_file(value.removeprefix("@data:"))
        return data_url(path.read_bytes(), MIME.get(path.suffix, "application/octet-stream"))
    if value.startswith("@http:"):
        return f"{base}/{value.removeprefix('@http:')}"
    return value.replace("http://localhost:18999", base.replace("127.0.0.1", "localhost"))


def media_targets() -> dict[str, Reply]:
    """Every clip and picture, and what the media host of the records answered under other names."""
    found: dict[str, Reply] = {}
    for path in CLIPS.iterdir():
        found[f"/{path.name}"] = {"file": f"clips/oracle/{path.name}", "headers": {"Content-Type": "video/mp4"}}
    for path in PICTURES.iterdir():
        file, typed = f"pictures/oracle/{path.name}", {"Content-Type": MIME.get(path.suffix, "image/tiff")}
        found[f"/{path.name}"] = {"file": file, "headers": typed}
        found[f"/notype/{path.name}"] = {"file": file}
        found[f"/html/{path.name}"] = {"file": file, "headers": {"Content-Type": "text/html"}}
        found[f"/status/500/{path.name}"] = {"file": file, "status": 500}
        found[f"/redirect/{path.name}"] = {"status": 302, "headers": {"Location": f"/{path.name}"}}
    return found


def likeness(value: Any, key: str = "") -> Any:
    """The shape of an answer: names and constants stay, everything else becomes its kind; equal list items once."""
    if isinstance(value, dict):
        return {name: likeness(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        found: list[Any] = []
        for inner in map(likeness, value):
            if inner not in found:
                found.append(inner)
        return found
    if value is None or isinstance(value, bool) or key in _KEPT:
        return value
    return "number" if isinstance(value, int | float) else "string"


def answer_shape(answer: Answer) -> dict[str, Any]:
    """A stream is the list of its events' shapes, repeated ones once."""
    content_type = answer.headers["content-type"]
    if not content_type.startswith("text/event-stream"):
        return {"content_type": content_type, "body": likeness(answer.json)}
    shapes: list[Any] = []
    for event in answer.events:
        shape = event if event == "[DONE]" else likeness(event)
        if shapes[-1:] != [shape]:
            shapes.append(shape)
    return {"content_type": content_type, "body": shapes}


def engine_view(record: dict[str, Any]) -> dict[str, Any]:
    """A journal record in the form of the data: key lists in order, nothing twice."""
    message = json.loads(json.dumps(record["message"]))
    for batch in [message.get("mm_inputs", {}), *message.get("extra_mm_inputs", [])]:
        for name in ("mm_hashes", "mm_placeholders"):
            batch.pop(name, None)
        for name in ("batched_keys", "keep_on_cpu_keys"):
            if name in batch:
                batch[name].sort()
    media = [
        {
            "modality": batch["modality"],
            "tensors": {
                name: {field: tensor[field] for field in ("dtype", "shape", "transport", "sha256")}
                for name, tensor in batch["tensors"].items()
            },
            "ranges": batch["ranges"],
            "hashes": batch["hashes"],
        }
        for batch in record["media"]
    ]
    return {"input_ids": record["input_ids"], "media": media, "message": message}


def differences(expected: Any, found: Any, path: str = "") -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() | found.keys()):
            here = f"{path}.{key}".lstrip(".")
            if key not in expected or key not in found:
                side = "only in the record" if key in expected else "not in the record"
                yield f"{here}: {side}: {expected.get(key, found.get(key))!r}"
            else:
                yield from differences(expected[key], found[key], here)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif expected != found:
        yield f"{path}: {expected!r} in the record, ours {found!r}"


def keep_only(tokenizer_file: Path, texts: Sequence[str]) -> None:
    """Cut a byte-level BPE tokenizer down to what can occur inside `texts`, ids as they were: it loads in no time.

    Merging looks at neighbours within one word only, so a merge whose result is no substring of any word of these texts
    is never tried.
    """
    whole = Tokenizer.from_file(str(tokenizer_file))
    data = json.loads(tokenizer_file.read_text())
    plain = [piece for text in texts for piece in re.split(r"<\|\w+\|>", text) if piece]
    words = {word for piece in plain for word, _ in whole.pre_tokenizer.pre_tokenize_str(piece)}
    parts = {word[begin:end] for word in words for begin in range(len(word)) for end in range(begin + 1, len(word) + 1)}
    model = data["model"]
    pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    model["merges"] = [pair for pair in pairs if "".join(pair) in parts]
    model["vocab"] = {token: at for token, at in model["vocab"].items() if len(token) == 1 or token in parts}
    model["vocab"] |= {added["content"]: added["id"] for added in data["added_tokens"]}  # else they are renumbered
    tokenizer_file.write_text(json.dumps(data))
    small = Tokenizer.from_file(str(tokenizer_file))
    for text in texts:
        assert small.encode(text, add_special_tokens=False).ids == whole.encode(text, add_special_tokens=False).ids
