"""Records what the published media sidecar announces and answers, for tests/data/sidecar.

    python tools/record_sidecar.py                 every record below
    python tools/record_sidecar.py llama4          one of them

For each record the published sidecar of `smg-grpc-servicer` runs in vLLM's environment (tests/engines_real) against a
Redis of its own, and is asked what tests/sidecar/asked.py lists, in messages the published codec writes.  Kept are its
hello, every job and every result, as the bytes that lay in Redis.
"""

import lzma
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import redis

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    from smg_grpc_servicer.mm_sidecar_protocol import (
        Fingerprint,
        Job,
        JobItem,
        Keys,
        decode_result,
        encode_job,
        resolve_namespace,
    )

    from pipeline.bundle import Bundle, load_bundle
    from tests.engines_real.published_sidecar import published_sidecar
    from tests.pipeline.bundles import unpack_bundle
    from tests.sidecar.asked import CASES, Asked, anchors_of
    from tests.sidecar.records import DATA, Exchange, Record
    from tools.redis_server import RedisServer, redis_server
    from tools.usage import Usage
except ModuleNotFoundError as _error:
    sys.exit(f"record_sidecar.py: {_error}: tools/setup tests installs what this needs")


FLAGS = ("--dtype", "float32", "--limit-mm-per-prompt", '{"image": 4, "video": 1}', "--max-model-len", "4096")
# name of the record -> bundle, further flags
RECORDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen3_vl": ("qwen3_vl", ()),
    "qwen3_vl_normalised": ("qwen3_vl", ("--no-mm-device-do-normalize",)),
    "llama4": ("llama4", ()),
    "minimax_m3": ("minimax_m3", ()),
    "glm53_flash": ("glm53_flash", ()),
}


def _job(case: Asked, bundle: Bundle, fingerprint: Fingerprint) -> Job:
    text, ids = case.prompt(bundle)
    now_ms = int(time.time() * 1000)
    return Job(
        v=1,
        job_id=f"{len(case.name):032x}",
        request_id=f"record-{case.name}",
        fingerprint=msgspec.structs.replace(fingerprint, model="another") if case.other_model else fingerprint,
        prompt_token_ids=ids,
        prompt=text,
        items=[JobItem(modality, url) for modality, url in case.items()],
        enqueued_ms=now_ms,
        deadline_ms=now_ms - 1 if case.is_late else now_ms + 120_000,
    )


def _exchanges(server: RedisServer, bundle: Bundle) -> tuple[dict[str, str], list[Exchange]]:
    client = redis.from_url(server.url, socket_timeout=None)
    (key,) = client.keys("smg:mm:v1:*:hello")
    hello = {name.decode(): value.decode() for name, value in client.hgetall(key).items()}
    fingerprint = Fingerprint.from_hello(hello)
    assert fingerprint is not None
    keys = Keys.for_namespace(resolve_namespace(fingerprint, None))
    assert keys.hello == key.decode()
    taken = {modality.value for modality in anchors_of(bundle)}
    found = []
    for case in CASES:
        if {modality for modality, _ in case.media} & {"video"} - taken:
            continue
        job = _job(case, bundle, fingerprint)
        raw = encode_job(job)
        client.lpush(keys.jobs, raw)
        popped = client.brpop([keys.result(job.job_id)], timeout=150)
        if popped is None:
            print(f"{case.name}: no answer", flush=True)
            continue
        result = decode_result(popped[1])
        print(f"{case.name}: {len(popped[1])} bytes {result.code} {result.message[:200]!r} {result.timing}", flush=True)
        found.append(Exchange(case.name, raw, popped[1]))
    client.close()
    return hello, found


def record(name: str) -> None:
    bundle_name, more = RECORDS[name]
    with tempfile.TemporaryDirectory(prefix="mediagate-record-") as made, redis_server() as server:
        model = unpack_bundle(bundle_name, Path(made))
        log = Path(tempfile.gettempdir()) / f"published-sidecar-{name}.log"
        with published_sidecar(model, server.url, log, [*FLAGS, *more]):
            hello, exchanges = _exchanges(server, load_bundle(model))
    DATA.mkdir(parents=True, exist_ok=True)
    whole = msgspec.msgpack.encode(Record(bundle_name, [*FLAGS, *more], hello, exchanges))
    packed = lzma.compress(whole, preset=9 | lzma.PRESET_EXTREME)
    (DATA / f"{name}.xz").write_bytes(packed)
    print(f"{name}: {len(packed)} bytes", flush=True)


def main() -> int:
    parser = Usage(__doc__)
    parser.add_argument("names", nargs="*", choices=[*RECORDS], metavar="RECORD")
    for name in parser.parse_args().names or RECORDS:
        record(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
