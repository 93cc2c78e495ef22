"""A model bundle: the files that make a checkpoint's prompts and tell how its media are prepared.

Three places to have one from: a local folder, the Hugging Face hub by id, the archive of an engine worker
(`pipeline.archive`). Whatever the place, `load_bundle` reads a folder.  Rules: files as transformers reads them, one
sentence when something is missing.  `pipeline.catalog` decides the order of the places and keeps what was loaded;
families read `Bundle.config`.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import jinja2
import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from pipeline.archive import ArchiveReceiver, BundleError
from pipeline.models.base import BundleConfig
from pipeline.template import ChatTemplate
from pipeline.tokenizer import Tokenizer

__all__ = ["ArchiveReceiver", "Bundle", "BundleError", "load_bundle", "locate"]

log = logging.getLogger("mediagate.bundle")

# what is asked of the hub: the files read here, and nothing of the weights
HUB_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# where composite models keep the settings of their language model
_LANGUAGE_MODELS = ("text_config", "llm_config", "language_config", "thinker_config")
_CONTEXT_KEYS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length", "n_positions")


class Bundle(msgspec.Struct, frozen=True):
    """One model, ready to make prompts.

    `eos_ids`: tokens that end an answer.  `max_context`: the window by config.json, None when it does not say (a
    worker's own word is better).  `source`: where it came from, for logs.
    """

    config: BundleConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    eos_ids: frozenset[int]
    source: str
    max_context: int | None = None


def locate(source: str) -> Path:
    """The folder of a bundle: `source` itself when it is one, else a snapshot of the hub repository of that id.

    Blocks (disk, network): call it in a thread.  The hub's own cache and variables (HF_HOME, HF_HUB_OFFLINE,
    HF_TOKEN) apply. Raises BundleError, one sentence, also when the hub cannot be reached.
    """
    folder = Path(os.path.expanduser(source))
    if source and folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(source) or ".." in source:
        raise BundleError(f"model bundle '{source}' is no folder on this host")
    try:
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the hub's client raises its own errors, httpx's and OSError
        reason = " ".join(str(error).split("\n", 1)[0].split())[:200] or type(error).__name__
        raise BundleError(
            f"model bundle '{source}' is no folder on this host and cannot be had from the Hugging Face hub ({reason})"
        ) from error


def load_bundle(directory: Path, *, chat_template: Path | None = None) -> Bundle:
    """Read the bundle in `directory`; `chat_template` (.jinja, or .json with that key) replaces its template.

    Blocks for up to a second: call it in a thread.  The folder may be deleted afterwards.  Raises BundleError.
    """
    for required in ("tokenizer.json", "config.json"):
        if not (directory / required).is_file():
            raise BundleError(f"model bundle {directory} lacks {required}")
    config = read_config(directory)
    settings = _read_json(directory / "tokenizer_config.json")
    special = special_tokens(settings, _read_json(directory / "special_tokens_map.json"))
    tokenizer = _read_tokenizer(directory / "tokenizer.json", settings)
    try:
        template = ChatTemplate(read_templates(directory, settings, chat_template), special)
    except jinja2.TemplateSyntaxError as error:
        raise BundleError(f"chat template of {chat_template or directory} is broken: {error}") from None
    return Bundle(
        config=config,
        tokenizer=tokenizer,
        template=template,
        eos_ids=eos_ids(config, tokenizer, special),
        source=str(directory),
        max_context=max_context(config.config),
    )


def read_config(directory: Path) -> BundleConfig:
    """The configuration files.  transformers 5 may keep all processors in processor_config.json: there the sound and
    picture settings are laid over one another, as they stand side by side in the older preprocessor_config.json.
    """
    processors = _read_json(directory / "processor_config.json")
    preprocessor = _read_json(directory / "preprocessor_config.json")
    if not preprocessor:
        for part in ("feature_extractor", "audio_processor", "image_processor"):
            preprocessor = {**preprocessor, **_mapping(processors.get(part))}
    video = _read_json(directory / "video_preprocessor_config.json") or _mapping(processors.get("video_processor"))
    return BundleConfig(
        config=_read_json(directory / "config.json"),
        preprocessor=preprocessor,
        video=video or preprocessor,
        generation=_read_json(directory / "generation_config.json"),
    )


def read_templates(directory: Path, settings: Mapping[str, Any], given: Path | None) -> dict[str, str]:
    """Templates by name, "default" mostly alone.  A given file wins, then chat_template.jinja, chat_template.json,
    tokenizer_config.json; additional_chat_templates/NAME.jinja come on top of the bundle's own."""
    if given is not None:
        return _given_template(given)
    found: dict[str, str] = {}
    for value in (settings.get("chat_template"), _read_json(directory / "chat_template.json").get("chat_template")):
        found.update(_named(value))
    single = directory / "chat_template.jinja"
    if single.is_file():
        found["default"] = _read_text(single)
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _read_text(path)
    return found


def _given_template(path: Path) -> dict[str, str]:
    text = _read_text(path)
    if path.suffix != ".json":
        return {"default": text}
    found = _named(_read_json(path).get("chat_template"))
    if not found:
        raise BundleError(f"chat template {path} has no key chat_template")
    return found


def _named(value: Any) -> dict[str, str]:
    """A template as tokenizer_config.json states it: a string, a list of {name, template}, or an object by name."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        value = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
    return {str(name): text for name, text in _mapping(value).items() if isinstance(text, str)}


def special_tokens(settings: Mapping[str, Any], token_map: Mapping[str, Any]) -> dict[str, Any]:
    """What templates know as bos_token, eos_token and so on; only those that are set, as in transformers."""
    found: dict[str, Any] = {}
    for source in (token_map, settings):
        for name, value in source.items():
            if name.endswith("_token") and _spelling(value) is not None:
                found[name] = _spelling(value)
        more = source.get("additional_special_tokens")
        if isinstance(more, list):
            found["additional_special_tokens"] = [text for text in map(_spelling, more) if text is not None]
    return found


def _spelling(value: Any) -> str | None:
    """A token as the files state it: its text, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def eos_ids(config: BundleConfig, tokenizer: Tokenizer, special: Mapping[str, Any]) -> frozenset[int]:
    """generation_config.json decides, config.json when that is silent; the tokenizer's eos_token always ends an
    answer too.
    """
    found = set(_ids(config.generation.get("eos_token_id")))
    for part in _language_configs(config.config):
        found = found or set(_ids(part.get("eos_token_id")))
    named = tokenizer.id_of(special.get("eos_token", ""))
    return frozenset(found if named is None else found | {named})


def max_context(config: Mapping[str, Any]) -> int | None:
    """The language model's window in tokens."""
    for part in _language_configs(config):
        for key in _CONTEXT_KEYS:
            value = part.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _language_configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """config.json itself, then what it says of its language model, outermost first."""
    yield config
    for key in _LANGUAGE_MODELS:
        if isinstance(config.get(key), dict):
            yield from _language_configs(config[key])


def _ids(value: Any) -> Sequence[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _read_tokenizer(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    try:
        library = LibraryTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for what it cannot read
        raise BundleError(f"{path} cannot be read as a tokenizer: {str(error)[:200]}") from None
    _add_tokens(library, _mapping(settings.get("added_tokens_decoder")))
    return Tokenizer(library)


def _add_tokens(library: LibraryTokenizer, added: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows, in the order of their ids (as transformers does)."""
    for key, described in sorted(added.items(), key=lambda item: int(item[0]) if item[0].isdigit() else -1):
        content = _spelling(described)
        if content is None or library.token_to_id(content) is not None:
            continue
        flags = {
            name: bool(described.get(name, False))
            for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        library.add_tokens([AddedToken(content, **flags)])
        if str(library.token_to_id(content)) != key:
            log.warning(
                "token %r is %s in tokenizer_config.json but became %s", content, key, library.token_to_id(content)
            )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from None


def _read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file, {} when there is none.  Python's reader: checkpoints hold NaN and Infinity."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BundleError(f"{path} holds no JSON object")
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
