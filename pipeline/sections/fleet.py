"""The models that are served and the workers that serve them.

Sections of the configuration; the rules are told in `pipeline.sections`.
"""

from typing import Annotated, Literal

import msgspec

from pipeline.absent import LATER_CALL_FORMATS, LATER_THINKING_FORMATS
from pipeline.parsers import CallFormat, ThinkingFormat
from pipeline.setting import MODEL, PAIRS, RETRIES, WORKERS, seconds, setting


class Model(msgspec.Struct, frozen=True):
    path: (
        Annotated[
            str,
            setting(
                MODEL,
                "--model-path --model",
                "Folder or hub id of the tokenizer bundle, for workers that name none.",
                computed="what the worker names or serves",
            ),
        ]
        | None
    ) = None
    tokenizer_path: (
        Annotated[
            str,
            setting(
                MODEL, "--tokenizer-path", "Folder or hub id of the tokenizer, if elsewhere.", computed="--model-path"
            ),
        ]
        | None
    ) = None
    chat_template: (
        Annotated[str, setting(MODEL, "--chat-template", "File that holds the chat template.", computed="the bundle's")]
        | None
    ) = None
    tool_call_parser: (
        Annotated[
            CallFormat,
            setting(
                MODEL,
                "--tool-call-parser",
                "How models write calls of functions, for every model.",
                computed="the worker's label, else by the model's name",
                later=dict.fromkeys(LATER_CALL_FORMATS, "that parser"),
            ),
        ]
        | None
    ) = None
    reasoning_parser: (
        Annotated[
            ThinkingFormat,
            setting(
                MODEL,
                "--reasoning-parser",
                "How models write reasoning, for every model.",
                computed="the worker's label, else by the model's name",
                later=dict.fromkeys(LATER_THINKING_FORMATS, "that parser"),
            ),
        ]
        | None
    ) = None
    aliases: Annotated[
        tuple[str, ...],
        setting(MODEL, "--model-alias", "Further name of a served model: alias=model; repeat for more."),
    ] = ()


Policy = Literal["cache_aware", "round_robin", "random", "power_of_two", "consistent_hashing", "prefix_hash"]
_LATER_POLICIES = dict.fromkeys(
    ("least_load", "manual", "bucket", "passthrough"),
    "that policy (choose from cache_aware, round_robin, random, power_of_two, consistent_hashing, prefix_hash)",
)


class Workers(msgspec.Struct, frozen=True):
    urls: Annotated[
        tuple[str, ...],
        setting(WORKERS, "--worker-urls", "Engine workers: grpc://host:port, grpcs://host:port or host:port."),
    ] = ()
    policy: Annotated[
        Policy,
        setting(WORKERS, "--policy", "How one of a model's workers is chosen.", later=_LATER_POLICIES),
    ] = "cache_aware"
    dp_aware: Annotated[
        bool, setting(WORKERS, "--dp-aware", "One worker for every data-parallel rank of an engine (label dp_size).")
    ] = False
    startup_timeout_s: Annotated[
        float, seconds(WORKERS, "--worker-startup-timeout-secs", "Longest wait for a new worker.")
    ] = 1800.0
    startup_check_interval_s: Annotated[
        float, seconds(WORKERS, "--worker-startup-check-interval", "Pause between two tries of a new worker.")
    ] = 30.0
    health_enabled: Annotated[
        bool, setting(WORKERS, "--disable-health-check", "Never ask workers how they are.", inverted=True)
    ] = True
    health_interval_s: Annotated[
        float, seconds(WORKERS, "--health-check-interval-secs", "Pause between two health checks.", ge=1)
    ] = 60.0
    health_timeout_s: Annotated[
        float, seconds(WORKERS, "--health-check-timeout-secs", "Longest health check.", ge=1)
    ] = 5.0
    failure_threshold: Annotated[
        int, setting(WORKERS, "--health-failure-threshold", "Failed checks in a row that take a worker out.", ge=1)
    ] = 3
    success_threshold: Annotated[
        int, setting(WORKERS, "--health-success-threshold", "Good checks in a row that bring a worker back.", ge=1)
    ] = 2
    breaker_enabled: Annotated[
        bool,
        setting(
            RETRIES, "--disable-circuit-breaker", "Never leave a worker out because its requests fail.", inverted=True
        ),
    ] = True
    breaker_failures: Annotated[
        int,
        setting(RETRIES, "--cb-failure-threshold", "Failures in a row that open a worker's circuit breaker.", ge=1),
    ] = 10
    breaker_successes: Annotated[
        int, setting(RETRIES, "--cb-success-threshold", "Answers that close one that is half-open.", ge=1)
    ] = 3
    breaker_timeout_s: Annotated[
        float,
        seconds(RETRIES, "--cb-timeout-duration-secs", "Time until one that is open lets some requests through.", ge=1),
    ] = 60.0
    breaker_window_s: Annotated[
        float, seconds(RETRIES, "--cb-window-duration-secs", "Time within which the failures must be.", ge=1)
    ] = 120.0
    retry_attempts: Annotated[
        int,
        setting(
            RETRIES,
            "--retry-max-retries",
            "Attempts in all, the first one included.",
            ge=1,
            refusal="Must be >= 1 (set to 1 to effectively disable retries)",
        ),
    ] = 5
    retry_initial_backoff_s: Annotated[
        float,
        setting(
            RETRIES, "--retry-initial-backoff-ms", "Pause before the second attempt.", ge=0, unit="ms", scale=0.001
        ),
    ] = 0.05
    retry_max_backoff_s: Annotated[
        float,
        setting(RETRIES, "--retry-max-backoff-ms", "Longest pause between attempts.", ge=0, unit="ms", scale=0.001),
    ] = 30.0
    retry_backoff_multiplier: Annotated[
        float, setting(RETRIES, "--retry-backoff-multiplier", "Each pause is this times the one before.", ge=1)
    ] = 1.5
    retry_jitter: Annotated[
        float, setting(RETRIES, "--retry-jitter-factor", "Share of a pause that is left to chance.", ge=0, le=1)
    ] = 0.2


class Pairs(msgspec.Struct, frozen=True):
    enabled: Annotated[
        bool,
        setting(PAIRS, "--pd-disaggregation", "Serve every request with a prefill and a decode worker."),
    ] = False
    with_encoders: Annotated[
        bool,
        setting(PAIRS, "--epd-disaggregation", "The same, and encode workers get the media (TokenSpeed)."),
    ] = False
    encode: Annotated[
        tuple[str, ...],
        setting(
            PAIRS,
            "--encode",
            "An encode worker, and the port where prefill workers meet it (8998 when unset or none); repeatable.",
            words="URL PORT",
        ),
    ] = ()
    prefill: Annotated[
        tuple[str, ...],
        setting(
            PAIRS,
            "--prefill",
            "A prefill worker, and the port where decode workers meet it (8998 when unset or none); repeatable.",
            words="URL PORT",
        ),
    ] = ()
    decode: Annotated[tuple[str, ...], setting(PAIRS, "--decode", "A decode worker; repeatable.", words="URL")] = ()
    encode_policy: (
        Annotated[
            Literal["random", "round_robin", "consistent_hashing"],
            setting(
                PAIRS,
                "--encode-policy",
                "How an item's encode worker is chosen; hashing goes by its content.",
                computed="consistent_hashing",
            ),
        ]
        | None
    ) = None
    prefill_policy: (
        Annotated[
            Policy,
            setting(
                PAIRS,
                "--prefill-policy",
                "How the prefill worker is chosen.",
                computed="--policy",
                later=_LATER_POLICIES,
            ),
        ]
        | None
    ) = None
    decode_policy: (
        Annotated[
            Policy,
            setting(
                PAIRS, "--decode-policy", "How the decode worker is chosen.", computed="--policy", later=_LATER_POLICIES
            ),
        ]
        | None
    ) = None

    @property
    def roles(self) -> tuple[Literal["regular", "encode", "prefill", "decode"], ...]:
        """The worker types the gateway serves with."""
        if self.with_encoders:
            return ("encode", "prefill", "decode")
        return ("prefill", "decode") if self.enabled else ("regular",)
