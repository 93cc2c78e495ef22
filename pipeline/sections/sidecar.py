"""The sidecar's own sections: its Redis and jobs, the engine of the worker it serves, its listener and its end.

Media and pool settings are the gateway's, as far as `pipeline.sidecar.settings` takes them over.
"""

from typing import Annotated, Literal

import msgspec

from pipeline.setting import MEDIA, OBSERVING, STOPPING, seconds, setting, size

JOBS = "Redis and jobs"
ENGINE = "The worker's engine"


class Jobs(msgspec.Struct, frozen=True):
    redis_url: Annotated[
        str,
        setting(
            JOBS,
            "--redis-url",
            "Where the worker puts its jobs: redis://, rediss:// (TLS) or unix://.",
            variable="SMG_VLLM_MM_REDIS_URL",
            secret=True,
            computed="redis://127.0.0.1:6379/0",
        ),
    ] = "redis://127.0.0.1:6379/0"
    namespace: (
        Annotated[
            str,
            setting(
                JOBS,
                "--namespace",
                "Part of the keys' names, when the worker's is set as well.",
                variable="SMG_VLLM_MM_SIDECAR_NAMESPACE",
                computed="made of the fingerprint",
            ),
        ]
        | None
    ) = None
    concurrency: Annotated[
        int, setting(JOBS, "--concurrency", "Jobs at once.", ge=1, le=1024, computed="2 x --pool-processes")
    ] = 0
    max_job_bytes: Annotated[
        int,
        size(
            JOBS,
            "--max-job-bytes",
            "Largest job that is read, media inside it included; above it limit_exceeded.",
            ge=1 << 16,
            le=(1 << 32) - 1,
        ),
    ] = 128 << 20
    max_result_bytes: Annotated[
        int,
        size(
            JOBS,
            "",
            "Largest answer; above it result_too_large. Redis's own proto-max-bulk-len lowers it.",
            variable="SMG_VLLM_MM_MAX_RESULT_BYTES",
            le=(1 << 32) - 1,
        ),
    ] = 512 << 20
    max_fetched_bytes: Annotated[
        int,
        size(
            JOBS,
            "--max-fetched-bytes",
            "Media being fetched, of all jobs; above it sidecar_overloaded.",
            ge=1 << 20,
        ),
    ] = 1 << 30


class Engine(msgspec.Struct, frozen=True):
    """What the worker was started with: its fingerprint."""

    model: (
        Annotated[
            str,
            setting(
                ENGINE,
                "--model",
                "The worker's --model, letter by letter; also where the bundle is, a folder or hub id.",
                computed="none: needed",
            ),
        ]
        | None
    ) = None
    tokenizer_path: (
        Annotated[
            str,
            setting(ENGINE, "--tokenizer-path", "Folder or hub id of the bundle, if elsewhere.", computed="--model"),
        ]
        | None
    ) = None
    vllm_version: Annotated[str, setting(ENGINE, "--vllm-version", "The worker's vLLM.")] = "0.32.0"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        setting(ENGINE, "--dtype", "The worker's --dtype; auto is what config.json says, where vLLM follows it."),
    ] = "auto"
    limit_per_prompt: Annotated[
        str,
        setting(
            ENGINE,
            "--limit-mm-per-prompt",
            "The worker's own, as JSON; it is what limits a job's items.",
        ),
    ] = "{}"
    video_backend: Annotated[
        str,
        setting(ENGINE, "--video-backend", "The worker's loader of clips.", variable="VLLM_VIDEO_LOADER_BACKEND"),
    ] = "opencv"
    media_io_kwargs: Annotated[
        str, setting(ENGINE, "--media-io-kwargs", "The worker's own, as JSON; served is only {}.")
    ] = "{}"
    mm_processor_kwargs: Annotated[
        str, setting(ENGINE, "--mm-processor-kwargs", "The worker's own, as JSON; served is only {}.")
    ] = "{}"
    device_do_normalize: (
        Annotated[
            bool,
            setting(
                ENGINE,
                "--mm-device-do-normalize",
                "Whether the worker normalises pixels itself; a wrong word gives wrong answers and no error.",
                computed="vLLM 0.32's default for the model",
            ),
        ]
        | None
    ) = None
    fingerprint_file: (
        Annotated[
            str,
            setting(
                ENGINE,
                "--fingerprint-file",
                "JSON printed by tools/vllm_fingerprint.py in the worker's environment, instead of the flags above.",
                computed="none",
            ),
        ]
        | None
    ) = None
    max_video_frames: Annotated[
        int,
        setting(
            ENGINE,
            "",
            "Most frames used of a clip; 0 = as many as the model's rule says.",
            variable="SMG_VLLM_MM_MAX_VIDEO_FRAMES",
            ge=0,
        ),
    ] = 0


class Watch(msgspec.Struct, frozen=True):
    """Whom it fetches from, who may look at it, how it ends."""

    allow_private_hosts: Annotated[
        bool,
        setting(
            MEDIA,
            "--mm-allow-private-media-hosts",
            "Fetch from loopback, private, link-local and metadata addresses as well.",
            variable="SMG_MM_ALLOW_PRIVATE_MEDIA_HOSTS",
        ),
    ] = False
    host: Annotated[str, setting(OBSERVING, "--prometheus-host", "Address of the listener for health and metrics.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, setting(OBSERVING, "--prometheus-port", "Its TCP port.", ge=1, le=65535)] = 29100
    shutdown_grace_s: Annotated[
        float,
        seconds(
            STOPPING,
            "--shutdown-grace-period-secs",
            "Longest wait for running jobs at the end; those that have not ended are given back.",
        ),
    ] = 30.0
