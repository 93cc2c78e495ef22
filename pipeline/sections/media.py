"""Media: where they are preprocessed, how many, how large, and where they may be fetched.

Sections of the configuration; the rules are told in `pipeline.sections`.
"""

from typing import Annotated, Literal

import msgspec

from pipeline.setting import MEDIA, OBSERVING, seconds, setting, size


class Media(msgspec.Struct, frozen=True):
    processing: Annotated[
        Literal["auto", "router", "worker"],
        setting(
            MEDIA,
            "--mm-processing",
            "Where media are processed: here, by vLLM workers sent references, or auto: there if every worker can.",
            variable="SMG_MM_PROCESSING",
            deprecated=True,
            stops=True,
            bad_variable="SMG_MM_PROCESSING: invalid multimodal processing mode '{value}'; expected auto|router|worker",
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
        Literal["auto", "pyav", "opencv", "ffmpeg"],
        setting(
            MEDIA,
            "",
            "What decodes clips: pyav (ffmpeg's libraries, auto means this), the ffmpeg program, opencv (cv2).",
            variable="SMG_VIDEO_DECODE_BACKEND",
            stops=True,
            bad_variable="unsupported SMG_VIDEO_DECODE_BACKEND={value}; expected auto, pyav, opencv, or ffmpeg",
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
        Literal["auto", "pyav", "ffmpeg"],
        setting(
            MEDIA,
            "",
            "What decodes sounds: pyav (ffmpeg's libraries, auto means this), the ffmpeg program.",
            variable="SMG_AUDIO_DECODE_BACKEND",
            stops=True,
            bad_variable="unsupported SMG_AUDIO_DECODE_BACKEND={value}; expected auto, pyav, or ffmpeg",
            never={"symphonia": "it is a library for Rust programs, which this is none of; take auto, pyav or ffmpeg"},
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
