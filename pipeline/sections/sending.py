"""How tensors reach an engine: form, transport, segments.

Sections of the configuration; the rules are told in `pipeline.sections`.
"""

from typing import Annotated, Literal

import msgspec

from pipeline.setting import TRANSPORT, seconds, setting, size


class Transport(msgspec.Struct, frozen=True):
    mode: Annotated[
        Literal["inline", "shm", "auto", "rdma"],
        setting(
            TRANSPORT,
            "--multimodal-tensor-transport",
            "How tensors reach a worker: inline, in the message; by /dev/shm, auto where it is shared; by RDMA.",
            variable="SMG_MM_TENSOR_TRANSPORT",
            legacy="SMG_TOKENSPEED_MM_TENSOR_TRANSPORT",
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
    pixel_rdma: Annotated[
        bool,
        setting(
            TRANSPORT,
            "--mm-pixel-rdma",
            "The older word for --multimodal-tensor-transport rdma, which it means when no transport is given.",
            variable="SMG_MM_PIXEL_RDMA",
            deprecated=True,
        ),
    ] = False
    rdma_listen_ip: (
        Annotated[
            str,
            setting(
                TRANSPORT,
                "--rdma-listen-ip",
                "Address of this host that workers reach the RDMA lane's listener by; without it there is no lane.",
                variable="SMG_RDMA_LISTEN_IP",
                deprecated=True,
                computed="no lane",
            ),
        ]
        | None
    ) = None
    rdma_listen_port: Annotated[
        int,
        setting(TRANSPORT, "", "TCP port of that listener.", variable="SMG_RDMA_LISTEN_PORT", ge=1, le=65535),
    ] = 18515
    rdma_pool_slots: Annotated[
        int,
        setting(
            TRANSPORT,
            "",
            "Slots of the RDMA lane; together they are 8 GiB at most.",
            variable="SMG_RDMA_POOL_SLOTS",
            ge=1,
        ),
    ] = 64
    rdma_slot_bytes: Annotated[
        int,
        size(
            TRANSPORT,
            "",
            "One slot, as workers have it; a larger tensor goes another way.",
            variable="SMG_RDMA_SLOT_BYTES",
        ),
    ] = 32 << 20
    rdma_landing_wait_s: Annotated[
        float,
        seconds(
            TRANSPORT,
            "",
            "Longest wait of a worker for room to read into; as the worker's.",
            variable="SMG_RDMA_LANDING_WAIT_S",
            ge=1,
        ),
    ] = 120.0
    rdma_read_timeout_s: Annotated[
        float,
        seconds(TRANSPORT, "", "Longest read of a worker; as the worker's.", variable="SMG_RDMA_READ_TIMEOUT_S", ge=1),
    ] = 60.0
    rdma_slot_ttl_s: (
        Annotated[
            float,
            seconds(
                TRANSPORT,
                "--rdma-slot-ttl-s",
                "Time after which a slot is free without a word of its reader; counts when it is longer than both.",
                variable="SMG_RDMA_SLOT_TTL_S",
                deprecated=True,
                ge=1,
                computed="landing wait, read timeout and 30 s",
            ),
        ]
        | None
    ) = None
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
