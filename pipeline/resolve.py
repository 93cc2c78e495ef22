"""From command line and environment to a Config: precedence, then the defaults that must be computed, then the checks.

A flag beats its variable, the variable its older name, that the default.  A bad flag stops the start.  A bad variable
is ignored with a WARN, so that a typo in a limit is seen; only where the declaration says so does it stop the start.
A flag that is given silences its variables altogether.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from pipeline.checks import check_sections
from pipeline.config import DECLARED, Config, ConfigError
from pipeline.machine import memory_bytes, shm_bytes, usable_cores
from pipeline.setting import Declared, Source
from pipeline.strangers import strangers
from pipeline.tls import check_tls

# What the largest picture within the limits takes, measured: 178 megapixels are 1.3 GiB as JPEG or PNG, 2.7 GiB as WebP
# or with a long-side cap, 3.3 GiB as JPEG 2000.
LARGEST_PICTURE_BYTES = 3584 << 20

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_DTYPE_ALIASES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}
_DTYPE_ALIASES["half"] = "float16"


def read(one: Declared, text: str) -> Any:
    """The value a flag or variable spells, in the flag's unit; ValueError says what was expected.  No range check."""
    text = text.strip()
    if one.known:
        word = re.sub(r"\s", "", text).lower()
        word = _DTYPE_ALIASES.get(word, word) if "float32" in one.known else word
        if word not in one.known:
            raise ValueError("|".join(one.choices))
        return word
    if one.kind is int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise ValueError("an integer" if one.ge is None or one.ge < 0 else f"an integer, at least {one.ge:.15g}")
        return int(text)
    if one.kind is float:
        return _number(text)
    if one.kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError("|".join(_TRUE + _FALSE))
        return text.lower() in _TRUE
    if one.setting.comma:
        return tuple(item.strip().lower() for item in text.split(",") if item.strip())
    return text


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or "_" in text or not text.isascii():
        raise ValueError("a number")
    return value


def resolve(given: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """The Config of this start.

    `given` holds what stood on the command line: "section.field" to the value `read` gave, in the flag's unit.
    ConfigError when the gateway must not start.
    """
    warnings: list[str] = []
    values, sources = chosen(DECLARED, given, environ, warnings)
    warnings.extend(strangers(environ, DECLARED))
    _compute(values, sources)
    warnings.extend(check_sections(values))
    warnings.extend(check_tls(values["tls"]))
    return msgspec.convert({**values, "sources": sources, "warnings": warnings}, Config)


def chosen(
    declared: Iterable[Declared], given: Mapping[str, Any], environ: Mapping[str, str], warnings: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Source]]:
    """By section and name the value of each setting, by key where it came from; before anything is computed."""
    values: dict[str, dict[str, Any]] = {}
    sources: dict[str, Source] = {}
    for one in declared:
        value, sources[one.key] = _choose(one, given, environ, warnings)
        values.setdefault(one.section, {})[one.name] = value
    return values, sources


def _choose(
    one: Declared, given: Mapping[str, Any], environ: Mapping[str, str], warnings: list[str]
) -> tuple[Any, Source]:
    if given.get(one.key, "") not in ("", None):
        return _accept(one, given[one.key], one.flag), "flag"
    for name, source in ((one.setting.variable, "env"), (one.setting.legacy, "legacy env")):
        text = environ.get(name, "").strip() if name else ""
        if not text:
            continue
        value = _from_variable(one, name, text, warnings)
        if value is None:
            break
        if source == "legacy env":
            warnings.append(
                "Deprecated multimodal transport env var is set; migrate to the canonical name "
                f'deprecated="{name}" canonical="{one.setting.variable}"'
            )
            return value, "legacy env"
        if one.setting.deprecated:
            warnings.append(f"{name} is deprecated in favour of {one.flag}; env support ends in the next minor release")
        return value, "env"
    return one.default, "default"


def _accept(one: Declared, value: Any, origin: str) -> Any:
    """The field's value for a value in the flag's unit; ConfigError when it is out of range or not there."""
    if one.kind in (int, float):
        reason = one.misfit(value)
        if reason:
            raise ConfigError(f"Configuration error: Invalid value for field '{one.field}': {value:.15g} - {reason}")
    if isinstance(value, str) and value in one.setting.later:
        raise ConfigError(
            f"Configuration error: {origin} {value}: this version does not yet have {one.setting.later[value]}"
        )
    if isinstance(value, str) and value in one.setting.never:
        raise ConfigError(f"Configuration error: {origin} {value}: {one.setting.never[value]}")
    return value * one.setting.scale if one.kind is float else value


def _from_variable(one: Declared, name: str, text: str, warnings: list[str]) -> Any:
    """The variable's value, None when it is bad and ignored."""
    try:
        value = read(one, text)
        if one.kind in (int, float) and one.misfit(value):
            raise ValueError(_range(one))
    except ValueError as error:
        shown = "..." if one.setting.secret else text[:64]
        words = one.setting.bad_variable.replace("{value}", shown)
        if one.setting.stops:
            raise ConfigError(words) from error
        warnings.append(words or f"{name}={shown!r} is ignored, expected {error}; using {one.shown_default()}")
        return None
    return _accept(one, value, name)


def _range(one: Declared) -> str:
    return f"a number, at least {one.ge:.15g}" if one.kind is float else f"an integer, at least {one.ge:.15g}"


def _compute(values: dict[str, dict[str, Any]], sources: Mapping[str, Source]) -> None:
    """Put in the defaults that depend on the machine or on other settings."""
    if values["admission"]["max_concurrent_requests"] == -1:
        values["admission"]["max_concurrent_requests"] = max(4096, 1024 * usable_cores())
    computed = {
        "admission.max_inflight_body_bytes": 2 * values["server"]["max_payload_bytes"],
        **pool_defaults(),
        "transport.shm_max_bytes": min(shm_bytes(), memory_bytes()) // 2,
        "model.tokenizer_path": values["model"]["path"],
        "metrics.host": values["server"]["host"],
    }
    if values["transport"]["pixel_rdma"]:
        computed["transport.mode"] = "rdma"
    put_in(values, sources, computed)


def pool_defaults() -> dict[str, Any]:
    """Of the settings of the pool, by key: what the machine suggests."""
    memory = memory_bytes()
    return {
        "pool.processes": usable_cores(),
        "pool.ring_bytes": max(memory // 2 & ~4095, 1 << 20),
        "pool.process_memory_bytes": max(min(LARGEST_PICTURE_BYTES, memory // 4), 128 << 20),
    }


def put_in(values: dict[str, dict[str, Any]], sources: Mapping[str, Source], computed: Mapping[str, Any]) -> None:
    """Put computed defaults, by key, where nobody has said anything."""
    for key, value in computed.items():
        if sources[key] == "default":
            section, name = key.split(".")
            values[section][name] = value
