"""Checks of settings that a range cannot express: addresses, URLs, names, files, and settings against each other.

Each raises ConfigError in SMG's words: `Configuration error: Invalid value for field 'X': V - why`.  Values are brought
into the one form the rest of the gateway compares (lower case, no brackets, a scheme before every worker).
"""

import importlib
import os
import re
import shutil
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Never
from urllib.parse import urlsplit

from pipeline.config import ConfigError
from pipeline.machine import memory_bytes

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, a header's name
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def refuse(field: str, value: object, why: str) -> Never:
    shown = str(value)
    shown = shown if len(shown) <= 200 else shown[:200] + "..."
    raise ConfigError(f"Configuration error: Invalid value for field '{field}': {shown} - {why}")


def check_sections(values: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Check and normalise in place; yields what to warn of."""
    server, media, model = values["server"], values["media"], values["model"]
    server["host"] = check_address("host", server["host"])
    values["metrics"]["host"] = check_address("prometheus_host", values["metrics"]["host"])
    if values["metrics"]["port"] == server["port"] and values["metrics"]["host"] == server["host"]:
        refuse("prometheus_port", server["port"], "Must differ from --port on the same host")
    if server["api_key"] is not None and not re.fullmatch(r"[!-~]+", server["api_key"]):
        refuse("api_key", "...", "Must be visible ASCII without blanks")
    server["cors_allowed_origins"] = check_origins(server["cors_allowed_origins"])
    for name in server["request_id_headers"]:
        if not _TOKEN.fullmatch(name):
            refuse("request_id_headers", name, "Must be a header name")
    server["request_id_headers"] = tuple(dict.fromkeys(name.lower() for name in server["request_id_headers"]))
    yield from _check_lane(values["transport"])
    _check_sizes(values)
    yield from check_video_backend(media["video_backend"])
    yield from _check_audio_backend(media["audio_backend"])
    media["allowed_domains"] = check_domains(media["allowed_domains"])
    model["path"] = check_model("model_path", model["path"])
    model["tokenizer_path"] = check_model("tokenizer_path", model["tokenizer_path"])
    check_template(model["chat_template"])
    model["aliases"] = check_aliases(model["aliases"])
    urls = [check_worker_url(url) for url in values["workers"]["urls"]]
    values["workers"]["urls"] = tuple(dict.fromkeys(urls))
    if len(set(urls)) < len(urls):
        yield "--worker-urls names a worker twice; it is used once"
    yield from _check_pairs(values["pairs"], values["workers"])
    if server["api_key"] is None and not ip_address(server["host"]).is_loopback:
        yield f"listening on {server['host']} without --api-key: whoever reaches it may use it and register workers"
    if values["pool"]["ring_bytes"] > memory_bytes():
        yield f"--pool-ring-bytes {values['pool']['ring_bytes']} is more than the memory this process may use"


def _check_lane(transport: dict[str, Any]) -> Iterator[str]:
    """The RDMA lane's settings against each other."""
    if transport["rdma_listen_ip"] is not None:
        transport["rdma_listen_ip"] = check_address("rdma_listen_ip", transport["rdma_listen_ip"])
    ttl_s, hold_s = transport["rdma_slot_ttl_s"], transport["rdma_landing_wait_s"] + transport["rdma_read_timeout_s"]
    if ttl_s is not None and ttl_s <= hold_s:
        yield f"--rdma-slot-ttl-s {ttl_s:g} is no longer than a worker may hold a slot ({hold_s:g} s); it is ignored"
    if transport["pixel_rdma"] and transport["mode"] != "rdma":
        yield f"--mm-pixel-rdma is ignored: --multimodal-tensor-transport is {transport['mode']}"


def _check_sizes(values: dict[str, dict[str, Any]]) -> None:
    bodies, payload = values["admission"]["max_inflight_body_bytes"], values["server"]["max_payload_bytes"]
    if bodies < payload:
        refuse("max_inflight_body_bytes", bodies, f"Must be at least --max-payload-size ({payload})")
    workers = values["workers"]
    if workers["retry_max_backoff_s"] < workers["retry_initial_backoff_s"]:
        initial = f"{workers['retry_initial_backoff_s'] * 1000:g}"
        refuse(
            "retry_max_backoff_ms",
            f"{workers['retry_max_backoff_s'] * 1000:g}",
            f"Must be at least --retry-initial-backoff-ms ({initial})",
        )


def check_aliases(pairs: tuple[str, ...]) -> tuple[str, ...]:
    """`alias=model` each, without blanks around; no alias for two models."""
    models: dict[str, str] = {}
    for pair in pairs:
        alias, _, model = (word.strip() for word in pair.partition("="))
        if not (alias and model):
            refuse("model_alias", pair, "Must be alias=model")
        if models.setdefault(alias, model) != model:
            refuse("model_alias", pair, f"Must not stand for two models, the other is {models[alias]}")
    return tuple(f"{alias}={model}" for alias, model in models.items())


def _check_pairs(pairs: dict[str, Any], workers: dict[str, Any]) -> Iterator[str]:
    """Every worker in one form, `URL PORT` or `URL`; a worker has one role."""
    roles: dict[str, str] = {}
    for role in ("encode", "prefill", "decode"):
        pairs[role] = tuple(dict.fromkeys(_check_leg(role, text) for text in pairs[role]))
        for url in (text.split()[0] for text in pairs[role]):
            if roles.setdefault(url, role) != role:
                refuse(role, url, f"Is a worker of the role {roles[url]} already: a worker has one role")
    if pairs["enabled"] and pairs["with_encoders"]:
        refuse("epd_disaggregation", "on", "Not with --pd-disaggregation: it is one or the other")
    in_pairs = pairs["enabled"] or pairs["with_encoders"]
    if not in_pairs:
        _refuse_any(pairs, ("prefill", "decode"), "Only with --pd-disaggregation or --epd-disaggregation")
    if not pairs["with_encoders"]:
        _refuse_any(pairs, ("encode",), "Only with --epd-disaggregation")
    if not in_pairs:
        return
    flag = "--epd-disaggregation" if pairs["with_encoders"] else "--pd-disaggregation"
    if workers["urls"]:
        refuse("worker_url", workers["urls"][0], f"Not with {flag}: use --prefill and --decode")
    for role in ("encode", "prefill", "decode") if pairs["with_encoders"] else ("prefill", "decode"):
        if not pairs[role]:
            yield f"{flag} without --{role}: nothing is served until POST /workers adds one"


def _refuse_any(pairs: dict[str, Any], roles: tuple[str, ...], why: str) -> None:
    for role in roles:
        for field in (role, f"{role}_policy"):
            given = pairs[field]
            if given:
                refuse(field, given if isinstance(given, str) else given[0], why)


def _check_leg(role: str, text: str) -> str:
    words = text.split()
    if len(words) > 2:
        refuse(role, text, "Names one worker each time, URL [PORT]")
    url = check_worker_url(words[0] if words else "", role)
    port = words[1] if len(words) == 2 else "none"
    if port.lower() == "none":
        return url
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        refuse(role, text, "The port where other workers meet it must be from 1 to 65535, or none")
    return f"{url} {int(port)}"


def check_video_backend(name: str) -> Iterator[str]:
    """OpenCV is imported before the start is over; the ffmpeg program may still be installed while the gateway runs."""
    if name == "opencv":
        try:
            importlib.import_module("cv2")
        except ImportError as error:
            raise ConfigError(
                "Configuration error: SMG_VIDEO_DECODE_BACKEND opencv: cv2 cannot be imported "
                f"(pip install opencv-python-headless): {error}"
            ) from error
    if name == "ffmpeg" and shutil.which(name) is None:
        yield "SMG_VIDEO_DECODE_BACKEND is ffmpeg, which is not in PATH: clips are refused until it is"


def _check_audio_backend(name: str) -> Iterator[str]:
    if name == "ffmpeg" and shutil.which(name) is None:
        yield "SMG_AUDIO_DECODE_BACKEND is ffmpeg, which is not in PATH: sounds are refused until it is"


def check_address(field: str, text: str) -> str:
    """An address to bind, without brackets; `localhost` is 127.0.0.1."""
    bare = text.strip().strip("[]").lower()
    if bare == "localhost":
        return "127.0.0.1"
    try:
        return str(ip_address(bare))
    except ValueError:
        refuse(field, text, "Must be an IPv4 or IPv6 address")


def check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    if "*" in origins and len(origins) > 1:
        refuse("cors_allowed_origins", "*", "'*' stands alone: either any origin or a list of exact origins")
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", origin):
            refuse("cors_allowed_origins", origin, "Must be scheme://host or scheme://host:port, without a path")
    return tuple(dict.fromkeys(origins))


def check_domains(domains: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Exact host names.  An empty list is refused: a typo must not open the gate."""
    if domains is None:
        return None
    if not domains:
        refuse("mm_allowed_media_domains", "''", "Must name at least one host")
    return tuple(dict.fromkeys(_media_host(domain) for domain in domains))


def _media_host(text: str) -> str:
    try:
        return str(ip_address(text.strip("[]")))
    except ValueError:
        pass
    if not _HOST.fullmatch(text):
        refuse("mm_allowed_media_domains", text, "Must be a host name alone, without scheme, port, path or wildcard")
    return text


def check_worker_url(text: str, field: str = "worker_url") -> str:
    """A worker's URL with its scheme; a bare host:port is gRPC."""
    url = text.strip()
    if "," in url:
        refuse(field, text, "Must be one worker; several are separated by blanks")
    scheme = url.split("://", 1)[0] if "://" in url else ""
    if scheme in ("http", "https", "ipc"):
        refuse(field, text, f"gRPC workers only, {scheme}:// cannot be served: use grpc:// or grpcs://")
    if scheme not in ("", "grpc", "grpcs") or url.startswith(("unix:", "/")):
        refuse(field, text, "URL must start with a lowercase grpc:// or grpcs:// scheme, or be host:port")
    url = url if scheme else f"grpc://{url}"
    try:
        parts = urlsplit(url)
        whole = parts.hostname and parts.port and not parts.path.strip("/") and not (parts.query or parts.username)
    except ValueError:
        whole = False
    if not whole:
        refuse(field, text, "Must be host:port with a port from 1 to 65535 and nothing after it")
    return url.rstrip("/")


def check_model(field: str, text: str | None) -> str | None:
    """A folder that exists, or what may be a hub id (never something that looks like a path)."""
    if text is None:
        return None
    path = Path(os.path.expanduser(text))
    if path.exists():
        if not path.is_dir():
            refuse(field, text, "is not a folder")
        return str(path)
    if not _HUB_ID.fullmatch(text) or ".." in text:
        refuse(field, text, "does not exist")
    return text


def check_template(text: str | None) -> None:
    if text is None:
        return
    path = Path(os.path.expanduser(text))
    if not path.is_file():
        refuse("chat_template", text, "does not exist" if not path.exists() else "is not a file")
    if path.stat().st_size == 0:
        refuse("chat_template", text, "is empty")
