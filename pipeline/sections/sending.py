"""How tensors reach an engine: form, transport, segments.

Sections of the configuration; the rules are told in `pipeline.sections`.
"""

from typing import Annotated, Literal

import msgspec

from pipeline.setting import TRANSPORT, setting, size


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
