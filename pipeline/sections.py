"""The sections of the configuration: each field declared once, with its sentence, range, flag, variable and default.

`pipeline.config` joins them to the Config that the gateway hands around.  A default that depends on the machine or on
another setting is a placeholder here (0, "" or None); `computed` says what `pipeline.resolve` makes of it.

Seconds are floats, bytes are ints.  Flags and variables are called as in SMG 1.11: its command lines carry over.
"""

from typing import Annotated, Literal

import msgspec

from pipeline.absent import LATER_CALL_FORMATS, LATER_THINKING_FORMATS
from pipeline.parsers import CallFormat, ThinkingFormat
from pipeline.setting import (
    ADMISSION,
    LISTENING,
    MEDIA,
    MODEL,
    OBSERVING,
    POOL,
    RESPONSES,
    RETRIES,
    STOPPING,
    TRANSPORT,
    WORKERS,
    seconds,
    setting,
    size,
)


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

    def __repr__(self) -> str:
        """Without the key: a Config may end up in a log."""
        shown = [f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "api_key"]
        return f"Server({', '.join(shown)}, api_key={'set' if self.api_key else None})"


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


class Media(msgspec.Struct, frozen=True):
    processing: Annotated[
        Literal["auto", "router"],
        setting(
            MEDIA,
            "--mm-processing",
            "Where media are preprocessed; auto means router until workers can be sent references.",
            variable="SMG_MM_PROCESSING",
            deprecated=True,
            stops=True,
            bad_variable="SMG_MM_PROCESSING: invalid multimodal processing mode '{value}'; expected auto|router|worker",
            later={"worker": "media references"},
        ),
    ] = "auto"
    image_limit: (
        Annotated[
            int,
            setting(
                MEDIA,
                "--mm-per-request-image-limit",
                "Images in one request, for every model that takes images; beats SMG_IMAGE_MAX_COUNT.",
                ge=1,
                computed="the model's limit",
            ),
        ]
        | None
    ) = None
    image_max_count: (
        Annotated[
            int,
            setting(
                MEDIA,
                "",
                "Images in one request, for every model that takes images.",
                variable="SMG_IMAGE_MAX_COUNT",
                ge=1,
                computed="the model's limit",
            ),
        ]
        | None
    ) = None
    image_max_input_bytes: Annotated[
        int, size(MEDIA, "", "Largest encoded image.", variable="SMG_IMAGE_MAX_INPUT_BYTES")
    ] = 256 << 20
    video_max_count: (
        Annotated[
            int,
            setting(
                MEDIA,
                "",
                "Clips in one request, for every model that takes clips.",
                variable="SMG_VIDEO_MAX_COUNT",
                ge=1,
                computed="the model's limit",
            ),
        ]
        | None
    ) = None
    video_max_input_bytes: Annotated[
        int, size(MEDIA, "", "Largest encoded clip.", variable="SMG_VIDEO_MAX_INPUT_BYTES")
    ] = 256 << 20
    video_max_decoded_bytes: Annotated[
        int,
        size(
            MEDIA,
            "",
            "RGB bytes of all frames used of one clip; above it 400, before any is decoded.",
            variable="SMG_VIDEO_MAX_DECODED_BYTES",
        ),
    ] = 1 << 30
    video_timeout_s: Annotated[
        float,
        seconds(
            MEDIA,
            "",
            "Longest look at a clip and longest decoding and preprocessing of it.",
            ge=0.001,
            variable="SMG_VIDEO_PROCESS_TIMEOUT_SECS",
        ),
    ] = 30.0
    video_backend: Annotated[
        Literal["auto", "pyav"],
        setting(
            MEDIA,
            "",
            "What decodes clips; auto means pyav, ffmpeg's libraries inside the pool processes.",
            variable="SMG_VIDEO_DECODE_BACKEND",
            stops=True,
            bad_variable="unsupported SMG_VIDEO_DECODE_BACKEND={value}; expected auto, pyav, opencv, or ffmpeg",
            later={"opencv": "decoding with OpenCV", "ffmpeg": "decoding with the ffmpeg program"},
        ),
    ] = "auto"
    audio_max_count: (
        Annotated[
            int,
            setting(
                MEDIA,
                "",
                "Sounds in one request, for every model that takes sounds.",
                variable="SMG_AUDIO_MAX_COUNT",
                ge=1,
                computed="the model's limit",
            ),
        ]
        | None
    ) = None
    audio_max_input_bytes: Annotated[
        int, size(MEDIA, "", "Largest encoded sound.", variable="SMG_AUDIO_MAX_INPUT_BYTES")
    ] = 256 << 20
    audio_max_decoded_bytes: Annotated[
        int,
        size(
            MEDIA,
            "",
            "Samples of one sound, as one channel in float32 at its own rate; above it 400.",
            variable="SMG_AUDIO_MAX_DECODED_BYTES",
        ),
    ] = 512 << 20
    audio_timeout_s: Annotated[
        float,
        seconds(
            MEDIA,
            "",
            "Longest look at a sound and longest decoding and preprocessing of it.",
            ge=0.001,
            variable="SMG_AUDIO_PROCESS_TIMEOUT_SECS",
        ),
    ] = 30.0
    audio_backend: Annotated[
        Literal["auto", "pyav"],
        setting(
            MEDIA,
            "",
            "What decodes sounds; auto means pyav, ffmpeg's libraries inside the pool processes.",
            variable="SMG_AUDIO_DECODE_BACKEND",
            stops=True,
            bad_variable="unsupported SMG_AUDIO_DECODE_BACKEND={value}; expected auto, pyav, symphonia, or ffmpeg",
            later={"symphonia": "decoding with Symphonia", "ffmpeg": "decoding with the ffmpeg program"},
        ),
    ] = "auto"
    inflight_max_bytes: (
        Annotated[
            int,
            size(
                MEDIA,
                "--multimodal-max-inflight-bytes",
                "Preprocessed media held for engines at once; what does not fit waits 2 s, then 429.",
                computed="unbounded",
            ),
        ]
        | None
    ) = None
    inflight_wait_s: Annotated[float, seconds(MEDIA, "", "Longest wait for room in flight.")] = 2.0
    unread_bytes_per_worker: Annotated[
        int,
        size(
            MEDIA,
            "--mm-unread-bytes-per-worker",
            "Tensors made ahead of what a model's workers have read, for each worker; 0 = no bound.",
            ge=0,
        ),
    ] = 256 << 20
    allowed_domains: (
        Annotated[
            tuple[str, ...],
            setting(
                MEDIA,
                "--mm-allowed-media-domains",
                "The only hosts media are fetched from: exact names, separated by commas.",
                comma=True,
                computed="any host",
            ),
        ]
        | None
    ) = None
    allow_private_hosts: (
        Annotated[
            bool,
            setting(
                MEDIA,
                "--mm-allow-private-media-hosts",
                "Whether media may be fetched from loopback and private addresses.",
                variable="SMG_MM_ALLOW_PRIVATE_MEDIA_HOSTS",
                computed="only while --host is a loopback address",
            ),
        ]
        | None
    ) = None
    fetch_timeout_s: Annotated[float, seconds(MEDIA, "", "Longest fetch of one URL.")] = 10.0
    max_fetches: Annotated[
        int, setting(MEDIA, "--mm-max-concurrent-fetches", "Media fetches at once, of all requests.", ge=1)
    ] = 128
    max_fetches_per_request: Annotated[int, setting(MEDIA, "", "Media fetches at once, of one request.")] = 16
    pixel_cache_mb: Annotated[
        int,
        setting(
            MEDIA,
            "--mm-pixel-cache-mb",
            "Cache of preprocessed images, within the shared memory below; 0 = off.",
            variable="SMG_MM_PIXEL_CACHE_MB",
            deprecated=True,
            bad_variable="SMG_MM_PIXEL_CACHE_MB is not a number; pixel cache stays off",
            ge=0,
            unit="MiB",
            in_parser=True,
        ),
    ] = 0
    log_timing: Annotated[
        bool,
        setting(
            OBSERVING,
            "--log-mm-timing",
            "Log the time of each multimodal step at INFO.",
            variable="SMG_LOG_MM_TIMING",
            deprecated=True,
        ),
    ] = False


class Transport(msgspec.Struct, frozen=True):
    mode: Annotated[
        Literal["inline", "shm", "auto"],
        setting(
            TRANSPORT,
            "--multimodal-tensor-transport",
            "How tensors reach a worker: in the message, by /dev/shm, or auto: by /dev/shm where the worker shares it.",
            variable="SMG_MM_TENSOR_TRANSPORT",
            legacy="SMG_TOKENSPEED_MM_TENSOR_TRANSPORT",
            later={"rdma": "an RDMA lane"},
        ),
    ] = "inline"
    shm_min_bytes: Annotated[
        int,
        size(
            TRANSPORT,
            "--multimodal-shm-min-bytes",
            "Smallest tensor that goes by shared memory; 0 = every tensor.",
            variable="SMG_MM_SHM_MIN_BYTES",
            legacy="SMG_TOKENSPEED_MM_SHM_MIN_BYTES",
            ge=0,
        ),
    ] = 65536
    shm_max_bytes: Annotated[
        int,
        size(
            TRANSPORT,
            "--mm-shm-max-bytes",
            "All segments in /dev/shm together; what does not fit goes in the message.",
            ge=0,
            computed="half of /dev/shm, at most half of the memory",
        ),
    ] = 0
    vllm_dtype: (
        Annotated[
            Literal["float32", "bfloat16", "float16"],
            setting(
                TRANSPORT,
                "",
                "Width of the tensors for vLLM's encoder.",
                variable="SMG_VLLM_ENCODER_INPUT_DTYPE",
                computed="the worker's label, else float32",
            ),
        ]
        | None
    ) = None
    tokenspeed_dtype: (
        Annotated[
            Literal["float32", "bfloat16", "float16"],
            setting(
                TRANSPORT,
                "",
                "Width of the tensors for TokenSpeed's encoders.",
                variable="SMG_TOKENSPEED_ENCODER_INPUT_DTYPE",
                computed="the worker's label, else bfloat16",
            ),
        ]
        | None
    ) = None
    tokenspeed_image_dtype: (
        Annotated[
            Literal["float32", "bfloat16", "float16"],
            setting(
                TRANSPORT,
                "",
                "The same for pictures alone.",
                variable="SMG_TOKENSPEED_IMAGE_ENCODER_INPUT_DTYPE",
                computed="SMG_TOKENSPEED_ENCODER_INPUT_DTYPE",
            ),
        ]
        | None
    ) = None
    tokenspeed_video_dtype: (
        Annotated[
            Literal["float32", "bfloat16", "float16"],
            setting(
                TRANSPORT,
                "",
                "The same for clips alone.",
                variable="SMG_TOKENSPEED_VIDEO_ENCODER_INPUT_DTYPE",
                computed="SMG_TOKENSPEED_ENCODER_INPUT_DTYPE",
            ),
        ]
        | None
    ) = None
    tokenspeed_audio_dtype: (
        Annotated[
            Literal["float32", "bfloat16", "float16"],
            setting(
                TRANSPORT,
                "",
                "The same for sounds alone.",
                variable="SMG_TOKENSPEED_AUDIO_ENCODER_INPUT_DTYPE",
                computed="SMG_TOKENSPEED_ENCODER_INPUT_DTYPE",
            ),
        ]
        | None
    ) = None


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


class Workers(msgspec.Struct, frozen=True):
    urls: Annotated[
        tuple[str, ...],
        setting(WORKERS, "--worker-urls", "Engine workers: grpc://host:port, grpcs://host:port or host:port."),
    ] = ()
    policy: Annotated[
        Literal["round_robin", "random", "power_of_two", "consistent_hashing"],
        setting(
            WORKERS,
            "--policy",
            "How one of a model's workers is chosen.",
            later=dict.fromkeys(
                ("cache_aware", "least_load", "prefix_hash", "manual", "bucket", "passthrough"),
                "that policy (choose from round_robin, random, power_of_two, consistent_hashing)",
            ),
        ),
    ] = "round_robin"
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


class Pool(msgspec.Struct, frozen=True):
    processes: Annotated[
        int,
        setting(POOL, "--pool-processes", "Processes that decode and preprocess.", ge=1, computed="the usable cores"),
    ] = 0
    ring_bytes: Annotated[
        int,
        size(
            POOL,
            "--pool-ring-bytes",
            "Shared memory for encoded media and tensors; untouched pages cost nothing.",
            ge=1 << 20,
            computed="half of the memory this process may use",
        ),
    ] = 0
    process_memory_bytes: Annotated[
        int,
        size(
            POOL,
            "--pool-process-memory-bytes",
            "Memory of its own one process may take for a picture; one that asks for more is refused.",
            ge=128 << 20,
            computed="3758096384, at most a quarter of the memory",
        ),
    ] = 0
    job_timeout_s: Annotated[
        float, seconds(POOL, "--pool-job-timeout-secs", "Longest job; a process that overruns is replaced.", ge=1)
    ] = 60.0


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
    most_bytes: Annotated[
        int,
        size(RESPONSES, "--history-memory-max-bytes", "Their bytes, pictures included; one has at most a quarter."),
    ] = 256 << 20
    retention_s: Annotated[
        float, seconds(RESPONSES, "--history-memory-retention-secs", "Time after which a response is forgotten.", ge=1)
    ] = 86400.0


class Metrics(msgspec.Struct, frozen=True):
    host: Annotated[
        str, setting(OBSERVING, "--prometheus-host", "Address of the metrics listener.", computed="--host")
    ] = ""
    port: Annotated[
        int,
        setting(
            OBSERVING,
            "--prometheus-port",
            "TCP port of the metrics listener.",
            ge=1,
            le=65535,
            refusal="Port must be > 0 (0 would request an unstable OS-ephemeral port) and at most 65535",
        ),
    ] = 29000


class Log(msgspec.Struct, frozen=True):
    level: Annotated[
        Literal["debug", "info", "warn", "error"], setting(OBSERVING, "--log-level", "Least severe lines to log.")
    ] = "info"
    json: Annotated[bool, setting(OBSERVING, "--log-json", "Log one JSON object a line.")] = False
