"""Who may call, how many at once, and what is kept of answers.

Sections of the configuration; the rules are told in `pipeline.sections`.
"""

from typing import Annotated, Literal

import msgspec

from pipeline.setting import ADMISSION, LISTENING, OBSERVING, RESPONSES, STOPPING, TLS, seconds, setting, size


class Server(msgspec.Struct, frozen=True):
    host: Annotated[
        str, setting(LISTENING, "--host", "IPv4 or IPv6 address to listen on; a loopback address keeps others out.")
    ] = "127.0.0.1"
    port: Annotated[int, setting(LISTENING, "--port", "TCP port to listen on.", ge=1, le=65535)] = 30000
    api_key: (
        Annotated[
            str,
            setting(
                LISTENING,
                "--api-key",
                "Bearer token that inference and admin routes ask for (the variable keeps it out of the process list).",
                variable="MEDIAGATE_API_KEY",
                secret=True,
                computed="none: open to everybody",
            ),
        ]
        | None
    ) = None
    cors_allowed_origins: Annotated[
        tuple[str, ...],
        setting(LISTENING, "--cors-allowed-origins", "Origins whose pages may call, or * alone for any."),
    ] = ()
    request_id_headers: Annotated[
        tuple[str, ...],
        setting(LISTENING, "--request-id-headers", "Headers a request's id is taken from; the first one present wins."),
    ] = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")
    max_payload_bytes: Annotated[int, size(LISTENING, "--max-payload-size", "Largest request body; above it 413.")] = (
        512 << 20
    )
    request_timeout_s: Annotated[
        float, seconds(LISTENING, "--request-timeout-secs", "Longest time for one request; then 504.", ge=1)
    ] = 1800.0
    header_read_timeout_s: Annotated[
        float,
        seconds(
            LISTENING,
            "--header-read-timeout-secs",
            "Longest time from the first byte of a request to the end of its head, then 408; for a TLS handshake too; "
            "0 = off.",
        ),
    ] = 30.0
    idle_connection_timeout_s: Annotated[
        float,
        seconds(
            LISTENING,
            "--idle-connection-timeout-secs",
            "Time after which a connection without a request is closed; 0 = off.",
        ),
    ] = 90.0
    sse_keepalive_s: Annotated[
        float, seconds(LISTENING, "--sse-keepalive-secs", "Pause after which a quiet stream gets a ping; 0 = off.")
    ] = 15.0
    drain_settle_s: Annotated[
        float, seconds(STOPPING, "--drain-settle-secs", "Time after SIGTERM in which it still accepts, but unready.")
    ] = 5.0
    shutdown_grace_s: Annotated[
        float, seconds(STOPPING, "--shutdown-grace-period-secs", "Longest wait for running requests at the end.")
    ] = 180.0
    server_timing: Annotated[
        bool, setting(OBSERVING, "--server-timing", "Answer with a Server-Timing header that names each stage's time.")
    ] = False

    page: Annotated[
        bool,
        setting(
            LISTENING,
            "--no-page",
            "Serve no page for trying models at /, and tell no request what was done with its media.",
            inverted=True,
        ),
    ] = True

    def __repr__(self) -> str:
        """Without the key: a Config may end up in a log."""
        shown = [f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "api_key"]
        return f"Server({', '.join(shown)}, api_key={'set' if self.api_key else None})"


class Tls(msgspec.Struct, frozen=True):
    """Paths of PEM files; `pipeline.tls` checks them and makes contexts of them."""

    cert_path: (
        Annotated[
            str,
            setting(
                TLS,
                "--tls-cert-path",
                "PEM file of the server's certificate and those that lead to its authority: HTTPS instead of HTTP.",
                computed="none: plain HTTP",
            ),
        ]
        | None
    ) = None
    key_path: (
        Annotated[
            str,
            setting(TLS, "--tls-key-path", "PEM file of its private key, without a passphrase.", computed="none"),
        ]
        | None
    ) = None
    client_cert_path: (
        Annotated[
            str,
            setting(
                TLS,
                "--client-cert-path",
                "PEM file of the certificate for grpcs:// workers that ask for one.",
                computed="none",
            ),
        ]
        | None
    ) = None
    client_key_path: (
        Annotated[str, setting(TLS, "--client-key-path", "PEM file of its private key.", computed="none")] | None
    ) = None
    ca_cert_paths: Annotated[
        tuple[str, ...],
        setting(TLS, "--ca-cert-paths", "PEM files of authorities trusted for grpcs:// workers, beside the system's."),
    ] = ()


class Admission(msgspec.Struct, frozen=True):
    max_concurrent_requests: Annotated[
        int,
        setting(
            ADMISSION,
            "--max-concurrent-requests",
            "Requests served at once, each to the end of its answer; -1 = 1024 per core, at least 4096; 0 = no limit.",
            ge=-1,
            refusal="Must be -1 (1024 per core, at least 4096), 0 (no limit) or more",
        ),
    ] = -1
    queue_size: Annotated[
        int, setting(ADMISSION, "--queue-size", "Requests that may wait for a place; above it 429.", ge=0)
    ] = 100
    queue_timeout_s: Annotated[
        float, seconds(ADMISSION, "--queue-timeout-secs", "Longest wait for a place; then 503.")
    ] = 60.0
    max_inflight_body_bytes: Annotated[
        int,
        size(ADMISSION, "--max-inflight-body-bytes", "Sum of the bodies held.", computed="2 x --max-payload-size"),
    ] = 0


class Responses(msgspec.Struct, frozen=True):
    backend: Annotated[
        Literal["memory", "none"],
        setting(
            RESPONSES,
            "--history-backend",
            "Where answers of /v1/responses are kept for `previous_response_id` and GET; none keeps none.",
            later=dict.fromkeys(("oracle", "postgres", "redis"), "a database for responses"),
        ),
    ] = "memory"
    most: Annotated[
        int, setting(RESPONSES, "--history-memory-max-responses", "Responses kept; the least recently used go.", ge=0)
    ] = 10_000
    most_background: Annotated[
        int,
        setting(
            RESPONSES,
            "--max-background-responses",
            "Responses with `background` at once, above it 429; with 0 they are answered when complete.",
            ge=0,
        ),
    ] = 1024
    most_items: Annotated[
        int,
        setting(
            RESPONSES,
            "--history-memory-max-items",
            "Items of all conversations; the conversation least recently used goes.",
            ge=1,
        ),
    ] = 100_000
    most_bytes: Annotated[
        int,
        size(RESPONSES, "--history-memory-max-bytes", "Their bytes, pictures included; one has at most a quarter."),
    ] = 256 << 20
    retention_s: Annotated[
        float, seconds(RESPONSES, "--history-memory-retention-secs", "Time after which a response is forgotten.", ge=1)
    ] = 86400.0
