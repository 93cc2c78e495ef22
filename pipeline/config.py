"""The configuration of the gateway: one frozen struct, read once, and what may be asked of it.

`pipeline.sections` declares the settings, `pipeline.flags` builds the command line from them, `pipeline.resolve`
fills them (default < older variable < variable < flag), `tools/reference_docs.py` writes docs/configuration.md.
A Config is made before the first fork and handed on as an argument; nobody else looks at the environment.
"""

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Literal

import msgspec

from pipeline.sections import (
    Admission,
    Log,
    Media,
    Metrics,
    Model,
    Pairs,
    Pool,
    Responses,
    Routing,
    Server,
    Tls,
    Transport,
    Workers,
)
from pipeline.setting import Declared, declarations

__all__ = [
    "Admission",
    "Config",
    "ConfigError",
    "Log",
    "Media",
    "Metrics",
    "Model",
    "Pairs",
    "Pool",
    "Responses",
    "Routing",
    "Server",
    "Tls",
    "Transport",
    "Workers",
]

EXIT_OK = 0
EXIT_CONFIG = 1
EXIT_USAGE = 2
EXIT_PORT_TAKEN = 3
EXIT_POOL = 4
EXIT_FRONTEND = 5
EXIT_CODES: Mapping[int, str] = {
    EXIT_OK: "clean stop",
    EXIT_CONFIG: "a setting is wrong",
    EXIT_USAGE: "the command line cannot be read",
    EXIT_PORT_TAKEN: "an address or port cannot be listened on",
    EXIT_POOL: "the pool cannot start",
    EXIT_FRONTEND: "the frontend died",
}

Source = Literal["flag", "env", "legacy env", "default"]


class ConfigError(Exception):
    """The gateway must not start: `message` is for stderr, `exit_code` one of EXIT_CODES."""

    def __init__(self, message: str, exit_code: int = EXIT_CONFIG) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


class Config(msgspec.Struct, frozen=True):
    """What the gateway runs with.

    `sources` has a key "section.field" for each setting; `warnings` are to be logged at WARN, once, at start.
    """

    server: Server = Server()
    tls: Tls = Tls()
    admission: Admission = Admission()
    media: Media = Media()
    transport: Transport = Transport()
    model: Model = Model()
    workers: Workers = Workers()
    routing: Routing = Routing()
    pairs: Pairs = Pairs()
    pool: Pool = Pool()
    responses: Responses = Responses()
    metrics: Metrics = Metrics()
    log: Log = Log()
    sources: Mapping[str, Source] = {}
    warnings: tuple[str, ...] = ()

    @property
    def private_media_hosts(self) -> bool:
        """Whether a request from this machine may name media on loopback and private addresses."""
        given = self.media.allow_private_hosts
        return given if given is not None else ip_address(self.server.host).is_loopback

    def summary(self) -> str:
        """The line of the start that tells the resolved multimodal settings and where each came from."""
        shown = [one for one in DECLARED if one.section in _MULTIMODAL and not one.is_fixed]
        return "multimodal settings: " + ", ".join(f"{one.field}={self.told(one)}" for one in shown)

    def listing(self) -> list[str]:
        """Every setting with its source, one a line, for --check-config."""
        return [f"{one.key} = {self.told(one)}" for one in DECLARED]

    def told(self, one: Declared) -> str:
        """The value of a setting as a line of text shows it, with its source."""
        return f"{self._value(one)} ({'fixed' if one.is_fixed else self.sources.get(one.key, 'default')})"

    def _value(self, one: Declared) -> str:
        value = getattr(getattr(self, one.section), one.name)
        if one.key == "media.allow_private_hosts" and value is None:
            return f"{'allowed' if self.private_media_hosts else 'refused'}, as --host is {self.server.host}"
        return one.shown(value) + (f" {one.setting.unit}" if one.setting.unit and value is not None else "")


_MULTIMODAL = ("media", "transport")
DECLARED: tuple[Declared, ...] = tuple(declarations(Config))
