"""The configuration of the gateway: one frozen struct, read once, and what may be asked of it.

`pipeline.sections` declares the settings, `pipeline.flags` builds the command line from them, `pipeline.resolve`
fills them (default < older variable < variable < flag), `tools/reference_docs.py` writes docs/configuration.md.
A Config is made before the first fork and handed on as an argument; nobody else looks at the environment.
"""

from collections.abc import Mapping
from ipaddress import ip_address

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
from pipeline.setting import Declared, Resolved, declarations

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


class ConfigError(Exception):
    """The gateway must not start: `message` is for stderr, `exit_code` one of EXIT_CODES."""

    def __init__(self, message: str, exit_code: int = EXIT_CONFIG) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


class Config(Resolved, frozen=True):
    """What the gateway runs with."""

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

    @property
    def private_media_hosts(self) -> bool:
        """Whether a request from this machine may name media on loopback and private addresses."""
        given = self.media.allow_private_hosts
        return given if given is not None else ip_address(self.server.host).is_loopback

    @classmethod
    def declared(cls) -> tuple[Declared, ...]:
        return DECLARED

    def shown(self, one: Declared) -> str:
        if one.key == "media.allow_private_hosts" and self.media.allow_private_hosts is None:
            return f"{'allowed' if self.private_media_hosts else 'refused'}, as --host is {self.server.host}"
        return super().shown(one)


DECLARED: tuple[Declared, ...] = tuple(declarations(Config))
