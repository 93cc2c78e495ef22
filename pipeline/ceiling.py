"""What the gateway may hold in memory at most, under any load: the sum of what its settings bound.

`docs/limits.md` explains every share; tests/hostile/test_soak.py holds running gateways against it.  Shares that no
setting names are measured figures of this version.  What the kernel holds for sockets is not counted, nor are answers
that are collected while engines send them.
"""

import msgspec

from pipeline.config import Config, Media, Pool
from pipeline.rdma_lane import rdma_settings
from pool.row import Row

MIB = 1 << 20

SUPERVISOR_BYTES = 64 * MIB  # program and libraries, of which the others share nearly all
FRONTEND_BYTES = 256 * MIB  # with one model's tokenizer
POOL_PROCESS_BYTES = 64 * MIB
PARSING_BYTES = 96 * MIB  # JSON of one body as objects (`protocols.http.MOST_PARSED_BYTES`), one body at a time
WIDEST_CHARACTER = 4  # a text with one emoji takes four bytes for each of its letters
PROMPTS_BYTES = 512 * MIB  # two long texts in the tokenizer, one in the template
CONNECTION_BYTES = 160 << 10  # of a request that has no room yet
TLS_BYTES = 256 << 10  # more when it came over TLS: uvloop's buffers
REMEMBERED_BYTES = 200  # of one block of a prompt, in the index of cache_aware
WORKER_BYTES = 128 * MIB  # four connections with windows of 32 MiB


class Share(msgspec.Struct, frozen=True):
    """`what` is held, at most `nbytes` of it; `setting` bounds it ("" for what is as it is)."""

    what: str
    nbytes: int
    setting: str = ""


def shares(config: Config, *, workers: int | None = None) -> tuple[Share, ...]:
    """`workers`: how many engine workers there will be; None: those of the command line."""
    pool, admission, transport = config.pool, config.admission, config.transport
    count = max(1, len(config.workers.urls)) if workers is None else workers
    programs = SUPERVISOR_BYTES + FRONTEND_BYTES + pool.processes * POOL_PROCESS_BYTES
    connection = CONNECTION_BYTES + (TLS_BYTES if config.tls.cert_path else 0)
    lane = rdma_settings(transport)
    places = admission.max_concurrent_requests + admission.queue_size
    return (
        Share("programs and libraries", programs),
        Share("rings", Row.nbytes(pool.processes), "--pool-processes"),
        Share("encoded media and tensors in the mapping", pool.ring_bytes, "--pool-ring-bytes"),
        Share(
            "tensors in /dev/shm", 0 if transport.mode == "inline" else transport.shm_max_bytes, "--mm-shm-max-bytes"
        ),
        Share("prompts remembered for one model", _remembered_bytes(config), "--max-tree-size"),
        Share("slots of the RDMA lane", lane.slots * lane.slot_bytes if lane else 0, "SMG_RDMA_POOL_SLOTS"),
        Share(
            "bodies, fetched media, prompts", admission.max_inflight_body_bytes * 9 // 8, "--max-inflight-body-bytes"
        ),
        Share("requests that wait for room", places * connection, "--max-concurrent-requests, --queue-size"),
        Share(
            "one body being read",
            PARSING_BYTES + WIDEST_CHARACTER * config.server.max_payload_bytes,
            "--max-payload-size",
        ),
        Share("prompts being made", PROMPTS_BYTES),
        Share(
            "kept responses",
            config.responses.most_bytes if config.responses.backend == "memory" else 0,
            "--history-memory-max-bytes",
        ),
        Share("engines' answers on their way", count * WORKER_BYTES, "number of workers"),
        Share("decoding", pool.processes * pool.process_memory_bytes, "--pool-processes x --pool-process-memory-bytes"),
        Share(
            "clips and sounds for another decoder",
            pool.processes * outside_bytes(pool, config.media),
            "SMG_VIDEO_DECODE_BACKEND and SMG_AUDIO_DECODE_BACKEND",
        ),
    )


def outside_bytes(pool: Pool, media: Media) -> int:
    """Of one pool process, with one job at a time: the ffmpeg program has its limit of memory, OpenCV reads a file in
    memory.
    """
    program = pool.process_memory_bytes if "ffmpeg" in (media.video_backend, media.audio_backend) else 0
    return max(program, media.video_max_input_bytes if media.video_backend == "opencv" else 0)


def _remembered_bytes(config: Config) -> int:
    """Every role that is chosen by cache_aware has an index."""
    pairs, routing = config.pairs, config.routing
    roles = (config.workers.policy, pairs.prefill_policy, pairs.decode_policy)
    return roles.count("cache_aware") * routing.max_tree_tokens // routing.block_size * REMEMBERED_BYTES


def ceiling_bytes(config: Config, *, workers: int | None = None) -> int:
    return sum(share.nbytes for share in shares(config, workers=workers))


def told(config: Config) -> str:
    """The line of the start: the sum, then its shares."""
    rows = ", ".join(f"{share.what} {share.nbytes / MIB:.0f}" for share in shares(config) if share.nbytes)
    return f"memory under any load: at most {ceiling_bytes(config) / MIB:.0f} MiB ({rows})"
