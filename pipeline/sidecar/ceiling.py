"""What a sidecar may hold in memory at most, whatever is put into its queue; as `pipeline.ceiling` for a gateway."""

from pipeline.ceiling import FRONTEND_BYTES, MIB, POOL_PROCESS_BYTES, SUPERVISOR_BYTES, Share, outside_bytes
from pipeline.sidecar.protocol import MOST_TOKENS
from pipeline.sidecar.settings import SidecarConfig
from pool.row import Row

TOKEN_BYTES = 2 * 36  # of a prompt's id as an object in a list, before and after expansion


def shares(config: SidecarConfig) -> tuple[Share, ...]:
    pool, jobs = config.pool, config.jobs
    programs = SUPERVISOR_BYTES + FRONTEND_BYTES + pool.processes * POOL_PROCESS_BYTES
    longest_prompt = min(MOST_TOKENS, jobs.max_job_bytes)
    return (
        Share("programs and libraries", programs),
        Share("rings", Row.nbytes(pool.processes), "--pool-processes"),
        Share("encoded media and tensors in the mapping", pool.ring_bytes, "--pool-ring-bytes"),
        Share("jobs", jobs.concurrency * jobs.max_job_bytes, "--concurrency x --max-job-bytes"),
        Share("prompts", jobs.concurrency * longest_prompt * TOKEN_BYTES, "--concurrency"),
        Share("answers", jobs.concurrency * jobs.max_result_bytes, "--concurrency x SMG_VLLM_MM_MAX_RESULT_BYTES"),
        Share("media being fetched", jobs.max_fetched_bytes, "--max-fetched-bytes"),
        Share("decoding", pool.processes * pool.process_memory_bytes, "--pool-processes x --pool-process-memory-bytes"),
        Share(
            "clips for another decoder", pool.processes * outside_bytes(pool, config.media), "SMG_VIDEO_DECODE_BACKEND"
        ),
    )


def told(config: SidecarConfig) -> str:
    """The line of the start: the sum, then its shares."""
    found = shares(config)
    rows = ", ".join(f"{share.what} {share.nbytes / MIB:.0f}" for share in found if share.nbytes)
    return f"memory under any load: at most {sum(share.nbytes for share in found) / MIB:.0f} MiB ({rows})"
