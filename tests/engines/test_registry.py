"""Registration against a real gRPC server: labels, refusals, late engines, health, restarts, draining."""

import asyncio
import json

import msgspec
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engines.base import EngineError, EngineRequest, Form, Modality, Sampling
from engines.health import HealthSettings
from engines.labels import dtype_name, flatten, item_limits, merged
from engines.probe import ENGINES
from engines.registry import (
    Registry,
    RegistrySettings,
    WorkerBeingCreated,
    WorkerExists,
    WorkerNotFound,
    WorkerRefused,
    canonical_url,
)
from engines.worker import HealthOverride, ModelSpec, Status, WorkerSpec
from tests.engines.fakes import Figures
from tests.engines.golden import FOLDER
from tests.engines.stand_in import MODEL_INFO, SERVER_INFO, Engine, engine, until

LABELS = json.loads((FOLDER / "labels.json").read_text())


def settings(roles=("regular",), **health):
    health = {"interval_s": 0.05, "timeout_s": 1.0, "startup_check_interval_s": 0.3, **health}
    return RegistrySettings(health=HealthSettings(**health), drain_settle_s=0.0, drain_grace_s=5.0, roles=roles)


@pytest.fixture
def figures():
    return Figures()


@pytest.fixture
async def make_registry(figures):
    made = []

    def make(options=None, **kwargs):
        made.append(Registry(options or settings(), figures, **kwargs))
        return made[-1]

    yield make
    for registry in made:
        await registry.close()


async def ready(registry, spec):
    worker = await registry.add(spec if isinstance(spec, WorkerSpec) else WorkerSpec(url=spec))
    await until(lambda: worker.is_healthy)
    return worker


# ---------------------------------------------------------------- labels


def replies_that_tell(labels):
    """The info replies of the recording engine that was told `labels`."""
    infos = [pb.GetModelInfoResponse(**MODEL_INFO), pb.GetServerInfoResponse(**SERVER_INFO)]
    for text in labels:
        key, _, value = text.partition("=")
        reply = next(reply for reply in infos if key in reply.DESCRIPTOR.fields_by_name)
        kind = type(getattr(reply, key))
        setattr(reply, key, value == "true" if kind is bool else kind(value))
    return infos


@pytest.mark.parametrize("setup", sorted(LABELS))
def test_labels_equal_those_of_the_real_gateway(setup):
    ours = merged(replies_that_tell(LABELS[setup]["told"]), {})
    ours.pop("mm_encoder_budget", None)  # a field newer than the gateway of the records
    assert ours == LABELS[setup]["seen"]


def test_flattening_rules():
    reply = pb.GetServerInfoResponse(
        kv_connector="null", kv_role="", max_num_seqs=0, block_size=16, mm_device_do_normalize=False, active_requests=7
    )
    assert flatten(reply) == {"block_size": "16", "mm_device_do_normalize": "false"}
    told = pb.GetModelInfoResponse(default_sampling_params_json='{"top_k": 20, "temperature": 0.7}')
    assert flatten(told)["default_sampling_params_json"] == '{"temperature":0.7,"top_k":20}'
    told.default_sampling_params_json = "{broken"
    assert "default_sampling_params_json" not in flatten(told)


def test_registration_labels_win():
    given = {"served_model_name": "mine", "extra": "x"}
    labels = merged([pb.GetModelInfoResponse(**MODEL_INFO)], given)
    assert labels["served_model_name"] == "mine" and labels["extra"] == "x"


def test_item_limits(caplog):
    assert item_limits({"mm_item_limits": "image=8,video=2"}) == {Modality.IMAGE: 8, Modality.VIDEO: 2}
    assert item_limits({}) == {}
    assert item_limits({"mm_item_limits": "image=x, video=0,hologram=3,image=-1"}) == {Modality.VIDEO: 0}
    assert caplog.text.count("cannot use") == 3


def test_dtype_names():
    names = ("float32", " FP32", "f32", "BFloat16", "bf16 ", "float16", "fp16", "f16", "half", "int8", "")
    assert [dtype_name(name) for name in names] == [
        "float32", "float32", "float32", "bfloat16", "bfloat16", "float16", "float16", "float16", "float16", None, None,
    ]  # fmt: skip


# ---------------------------------------------------------------- URLs and specifications


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("grpc://host:50051", "grpc://host:50051"),
        ("grpcs://host:50051/", "grpcs://host:50051"),
        ("host:50051", "grpc://host:50051"),
        (" 10.0.0.1:80 ", "grpc://10.0.0.1:80"),
        ("grpc://[::1]:50051", "grpc://[::1]:50051"),
    ],
)
def test_urls(given, canonical):
    assert canonical_url(given) == canonical


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("http://host:80", "HTTP workers are not supported"),
        ("HTTPS://host:80", "HTTP workers are not supported"),
        ("ipc:///tmp/x", "direct ZMQ workers are not supported"),
        ("ftp://host:1", "not supported"),
        ("grpc://host", "grpc://host:port"),
        ("grpc://host:0", "port"),
        ("grpc://host:99999", "[Pp]ort"),
        ("", "grpc://host:port"),
    ],
)
async def test_refused_urls(make_registry, given, says):
    registry = make_registry()
    with pytest.raises(WorkerRefused, match=says) as refused:
        await registry.add(WorkerSpec(url=given))
    assert refused.value.code == "BAD_REQUEST"
    assert registry.workers == []


@pytest.mark.parametrize("worker_type", ["prefill", "decode", "encode"])
async def test_refused_types(make_registry, worker_type):
    with pytest.raises(WorkerRefused, match=f"a {worker_type} worker gets no requests here"):
        await make_registry().add(WorkerSpec(url="grpc://host:1", worker_type=worker_type))


async def test_a_gateway_of_pairs_takes_their_roles_only(make_registry):
    registry = make_registry(settings(roles=("prefill", "decode")))
    assert registry.missing_role == "prefill"
    for number, role in enumerate(("prefill", "decode"), 1):
        await registry.add(WorkerSpec(url=f"grpc://127.0.0.1:{number}", worker_type=role))
    with pytest.raises(WorkerRefused, match="serves with prefill and decode workers"):
        await registry.add(WorkerSpec(url="grpc://127.0.0.1:3"))


def test_specification_from_json():
    """What `POST /workers` takes: only the URL is needed, unknown fields are ignored, wrong ones are named."""
    body = {
        "url": "grpc://host:1",
        "runtime_type": "vllm",
        "labels": {"mm_device_do_normalize": "true"},
        "models": [{"id": "m", "aliases": ["n"], "something": 1}],
        "api_key": "ignored",
        "health": {"check_interval_secs": 5, "disable_health_check": True},
        "multimodal_tensor_transport": "auto",
        "multimodal_shm_min_bytes": 0,
    }
    spec = msgspec.json.decode(json.dumps(body), type=WorkerSpec)
    assert (spec.priority, spec.cost, spec.worker_type) == (50, 1.0, "regular")
    assert spec.models == (ModelSpec(id="m", aliases=("n",)),)
    health = HealthSettings().overridden(spec.health)
    assert (health.interval_s, health.disabled, health.timeout_s) == (5, True, 5.0)
    for field, wrong in [("runtime_type", "llamafile"), ("worker_type", "lazy"), ("multimodal_shm_min_bytes", -1)]:
        with pytest.raises(msgspec.ValidationError, match=field):
            msgspec.json.decode(json.dumps({**body, field: wrong}), type=WorkerSpec)
    with pytest.raises(msgspec.ValidationError, match="url"):
        msgspec.json.decode("{}", type=WorkerSpec)


# ---------------------------------------------------------------- introduction


async def test_introduction(make_registry, figures):
    prepared = []

    async def prepare(worker):
        assert worker.status is Status.PENDING and not worker.is_healthy
        prepared.append((worker.model_id, worker.labels["model_type"]))

    registry = make_registry(prepare=prepare)
    async with engine() as served:
        worker = await registry.add(WorkerSpec(url=f"127.0.0.1:{served.port}"))
        assert worker.describe()["status"] == "pending"
        assert registry.models() == [] and registry.workers_of("qwen3-vl", healthy_only=False) == []
        await until(lambda: worker.is_healthy)
        assert prepared == [("qwen3-vl", "qwen3_vl")]
        assert served.calls["HealthCheck"] >= 3 and served.calls["GetModelInfo"] == 1
        assert registry.models() == ["qwen3-vl"]
        assert registry.workers_of("qwen3-vl") == [worker] and registry.get(worker.id) is worker
        assert figures.health == [(served.url, True)]
        shown = worker.describe()
        assert json.loads(json.dumps(shown)) == {
            "id": worker.id,
            "model_id": "qwen3-vl",
            "url": served.url,
            "models": [{"id": "qwen3-vl", "aliases": [], "context_length": 262144, "model_type": ["chat", "vision"]}],
            "worker_type": "regular",
            "connection_mode": "grpc",
            "runtime_type": "vllm",
            "labels": LABELS["vllm_router"]["seen"],
            "priority": 50,
            "cost": 1.0,
            "is_healthy": True,
            "status": "ready",
            "load": 0,
            "circuit_breaker": {"state": "closed", "failures": 0},
        }


async def test_model_id_and_aliases(make_registry):
    registry = make_registry()
    async with engine(model_info={"served_model_name": ""}) as first, engine() as second:
        by_path = await ready(registry, first.url)
        configured = await ready(
            registry,
            WorkerSpec(url=second.url, models=(ModelSpec(id="vl", aliases=("vl-latest",), context_length=4096),)),
        )
        assert by_path.model_id == "qwen3-vl"
        assert configured.model_id == "vl" and configured.context_length == 4096
        assert registry.workers_of("vl-latest") == [configured]
        assert registry.models() == ["qwen3-vl", "vl"]


async def test_what_a_worker_takes(make_registry):
    registry = make_registry()
    options = {"mm_item_limits": "image=2", "shm_namespace_id": "boot:7", "kv_connector": "NixlConnector"}
    async with engine(server_info=options) as served:
        worker = await ready(registry, served.url)
    assert worker.accepts(Modality.IMAGE) and worker.accepts(Modality.VIDEO) and not worker.accepts(Modality.AUDIO)
    assert worker.item_limits == {Modality.IMAGE: 2}
    assert worker.shares_memory("boot:7") and not worker.shares_memory("boot:8") and not worker.shares_memory(None)
    assert worker.kv == {"kv_connector": "NixlConnector"} and "kv_connector" not in worker.labels
    assert worker.describe()["kv_connector"] == "NixlConnector"
    worker.labels["supports_vision"] = "false"
    assert not worker.accepts(Modality.IMAGE)


@pytest.mark.parametrize(
    ("labels", "default", "form"),
    [
        ({}, None, Form("float32")),
        ({"multimodal_encoder_dtype": " BF16"}, None, Form("bfloat16")),
        ({"multimodal_encoder_dtype": "bfloat16"}, "float16", Form("float16")),
        ({"multimodal_encoder_dtype": "int3"}, None, Form("float32")),
        ({"mm_device_do_normalize": "true"}, "bfloat16", Form("uint8", normalised=False)),
        ({"mm_device_do_normalize": "false"}, None, Form("float32")),
    ],
)
async def test_form(make_registry, labels, default, form):
    async with engine() as served:
        worker = await ready(make_registry(), WorkerSpec(url=served.url, labels=labels))
    assert worker.form(default) == form


async def test_late_engine_is_found_soon(make_registry):
    registry = make_registry(settings(startup_check_interval_s=30.0))
    late = await Engine().start()
    await late.stop()
    worker = await registry.add(WorkerSpec(url=late.url))
    await asyncio.sleep(1.5)
    assert worker.status is Status.PENDING and "cannot be reached" in worker.describe()["error"]
    await late.start()
    try:
        await until(lambda: worker.is_healthy, within=1.5)
        assert "error" not in worker.describe()
    finally:
        await late.stop()


@pytest.mark.parametrize("runtime", sorted(ENGINES))
async def test_every_engine_is_recognised(make_registry, runtime):
    bundles = []

    async def prepare(worker):
        bundles.append([piece async for piece in worker.client.tokenizer_bundle()])

    async with engine(runtime=runtime) as served:
        worker = await ready(make_registry(prepare=prepare), served.url)
        assert (worker.runtime, worker.describe()["runtime_type"]) == (runtime, runtime)
        assert worker.model_id == "qwen3-vl" and bundles == [[(b"PK", ""), (b"rest", "digest")]]
        takes = {modality.value for modality in Modality if worker.accepts(modality)}
        assert (
            takes
            == {
                "vllm": {"image", "video"},
                "tokenspeed": {"image", "video", "audio"},
                "sglang": {"image"},
                "trtllm": {"image"},
                "mlx": set(),
            }[runtime]
        )
        served.healthy = False
        await until(lambda: worker.status is Status.NOT_READY)


def test_order_of_the_probe():
    assert list(ENGINES) == ["sglang", "vllm", "trtllm", "tokenspeed", "mlx"]


async def test_a_told_runtime_is_not_probed(make_registry):
    async with engine(runtime="mlx") as served:
        worker = await ready(make_registry(), WorkerSpec(url=served.url, runtime_type="mlx"))
        assert worker.runtime == "mlx" and served.calls["HealthCheck"] == 2


async def test_unhealthy_engine_is_waited_for(make_registry):
    async with engine() as served:
        served.healthy = False
        worker = await make_registry().add(WorkerSpec(url=served.url))
        await until(lambda: served.calls["HealthCheck"] >= 2)
        assert worker.status is Status.PENDING
        served.healthy = True
        await until(lambda: worker.is_healthy)


async def test_giving_up(make_registry, figures):
    registry = make_registry(settings(startup_timeout_s=0.3))
    gone = await Engine().start()
    await gone.stop()
    worker = await registry.add(WorkerSpec(url=gone.url))
    await until(lambda: worker.status is Status.FAILED)
    assert "not ready after" in worker.failure
    assert (gone.url, False) in figures.health
    again = await registry.add(WorkerSpec(url=gone.url))  # a failed one makes room
    assert registry.workers == [again]


async def test_info_methods(make_registry):
    """Not implemented: no labels from it.  Any other failure: not ready, since settings that matter may be missing."""
    async with engine() as plain, engine() as failing:
        plain.fail_method = {"GetServerInfo": "UNIMPLEMENTED"}
        failing.fail_method = {"GetServerInfo": "INTERNAL"}
        registry = make_registry()
        worker = await ready(registry, plain.url)
        assert "dp_size" not in worker.labels and worker.labels["model_type"] == "qwen3_vl"
        other = await registry.add(WorkerSpec(url=failing.url))
        await until(lambda: other.failure)
        assert other.status is Status.PENDING
        failing.fail_method = {}
        await until(lambda: other.is_healthy)


async def test_prepare_that_fails_is_tried_again(make_registry):
    tries = []

    async def prepare(worker):
        tries.append(worker)
        if len(tries) < 3:
            raise RuntimeError("no tokenizer yet")

    async with engine() as served:
        worker = await make_registry(prepare=prepare).add(WorkerSpec(url=served.url))
        await until(lambda: worker.failure == "no tokenizer yet")
        assert not worker.is_healthy
        await until(lambda: worker.is_healthy)
        assert len(tries) == 3


async def test_duplicates(make_registry):
    registry = make_registry()
    async with engine() as served:
        worker = await registry.add(WorkerSpec(url=served.url))
        with pytest.raises(WorkerBeingCreated) as busy:
            await registry.add(WorkerSpec(url=served.url.removeprefix("grpc://")))
        assert busy.value.code == "WORKER_CREATE_IN_PROGRESS"
        await until(lambda: worker.is_healthy)
        with pytest.raises(WorkerExists) as exists:
            await registry.add(WorkerSpec(url=served.url))
        assert exists.value.code == "WORKER_ALREADY_EXISTS" and worker.id in str(exists.value)


async def test_tokenizer_bundle(make_registry):
    async with engine() as served:
        worker = await ready(make_registry(), served.url)
        assert [piece async for piece in worker.client.tokenizer_bundle()] == [(b"PK", ""), (b"rest", "digest")]


# ---------------------------------------------------------------- health


async def test_health_thresholds(make_registry, figures, caplog):
    """Three failures out; back by two good checks and fresh labels."""
    registry = make_registry()
    async with engine() as served:
        worker = await ready(registry, served.url)
        served.fail_method["HealthCheck"] = "INTERNAL"
        await until(lambda: not worker.is_healthy)
        assert worker.status is Status.NOT_READY and worker.describe()["error"]
        assert "3 failed health checks, the last: INTERNAL: scripted" in caplog.text
        assert registry.workers_of("qwen3-vl") == [] and registry.models() == ["qwen3-vl"]
        served.fail_method.clear()
        served.server_info["mm_device_do_normalize"] = True
        await until(lambda: worker.is_healthy)
        assert worker.form(None) == Form("uint8", normalised=False)
        assert [healthy for _, healthy in figures.health if healthy] == [True, True]
        assert (served.url, False) in figures.health


async def test_one_good_check_forgives(make_registry, figures):
    registry = make_registry(settings(interval_s=0.01))
    async with engine() as served:
        worker = await ready(registry, served.url)
        served.health_script = [False, False, True] * 3
        await until(lambda: not served.health_script)
        assert worker.status is Status.READY and figures.health == [(served.url, True)]


async def test_checks_can_be_switched_off_per_worker(make_registry):
    registry = make_registry(settings(interval_s=0.01))
    async with engine() as served:
        spec = WorkerSpec(url=served.url, health=HealthOverride(disable_health_check=True))
        worker = await ready(registry, spec)
        served.healthy = False
        checks = served.calls["HealthCheck"]
        await asyncio.sleep(0.1)
        assert served.calls["HealthCheck"] == checks and worker.is_healthy


@pytest.mark.parametrize("disabled", [False, True])
async def test_restarted_engine_is_introduced_again(make_registry, disabled):
    """The health interval plays no part: the lost connection tells."""
    registry = make_registry(settings(interval_s=600.0, disabled=disabled))
    served = await Engine().start()
    worker = await ready(registry, served.url)
    await served.stop()
    await until(lambda: not worker.is_healthy)
    await until(lambda: worker.status is Status.NOT_READY)
    served.server_info["mm_device_do_normalize"] = True
    served.model_info["served_model_name"] = "another"
    await served.start()
    try:
        await until(lambda: worker.is_healthy)
        assert worker.form(None).dtype == "uint8"
        assert registry.models() == ["another"]
    finally:
        await served.stop()


# ---------------------------------------------------------------- removal


async def test_removal_drains(make_registry, figures):
    registry = make_registry()
    async with engine() as served:
        worker = await ready(registry, served.url)
        worker.begin()
        assert registry.remove(worker.id) is worker
        assert worker.describe()["status"] == "draining" and not worker.is_healthy
        assert registry.workers_of("qwen3-vl") == []
        registry.remove(worker.id)
        await asyncio.sleep(0.05)
        assert registry.workers == [worker] and figures.removed == []
        worker.finish()
        await until(lambda: registry.workers == [])
        assert figures.removed == [served.url]
        with pytest.raises(WorkerNotFound) as missing:
            registry.remove(worker.id)
        assert missing.value.code == "WORKER_NOT_FOUND"
        with pytest.raises(EngineError):
            await worker.client.is_healthy(1.0)
        await ready(registry, served.url)  # the address is free again


async def test_removal_does_not_wait_for_ever(make_registry, caplog):
    registry = make_registry(RegistrySettings(drain_settle_s=0.01, drain_grace_s=0.05))
    async with engine() as served:
        worker = await ready(registry, served.url)
        worker.begin()
        registry.remove(worker.id)
        await until(lambda: registry.workers == [])
        assert "1 requests in flight" in caplog.text


async def test_removal_of_a_pending_worker(make_registry):
    registry = make_registry()
    worker = await registry.add(WorkerSpec(url="grpc://127.0.0.1:1"))
    registry.remove(worker.id)
    await until(lambda: registry.workers == [])


async def test_close_leaves_no_task(make_registry):
    registry = make_registry()
    async with engine() as served:
        worker = await ready(registry, served.url)
        other = await registry.add(WorkerSpec(url="grpc://127.0.0.1:1"))
        registry.remove(other.id)
        await registry.close()
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert not any(name.startswith(("worker ", "drain ")) for name in names)
        assert registry.workers == []
        with pytest.raises(EngineError):
            await worker.client.is_healthy(1.0)


# ---------------------------------------------------------------- data-parallel ranks


def dp_settings():
    return msgspec.structs.replace(settings(), dp_aware=True)


async def test_a_worker_for_every_rank(make_registry, figures):
    registry = make_registry(dp_settings())
    async with engine(server_info={"data_parallel_size": 3}) as served:
        worker = await registry.add(WorkerSpec(url=served.url, priority=7))
        await until(lambda: [one.is_healthy for one in registry.workers] == [True] * 3)
        assert [one.url for one in registry.workers] == [f"{served.url}@{rank}" for rank in range(3)]
        assert registry.workers[0] is worker and worker.describe()["dp_rank"] == 0
        assert {one.priority for one in registry.workers} == {7}
        for rank, one in enumerate(registry.workers):
            request = EngineRequest("id", "qwen3-vl", [1], "x", Sampling(), False)
            async with one.client.generate(request, f"id-{rank}", {}) as stream:
                assert [message async for message in stream]
        got = {message.request_id: message for message in served.received}
        assert [got[f"id-{rank}"].data_parallel_rank for rank in range(3)] == [0, 1, 2]
        assert all(message.HasField("data_parallel_rank") for message in served.received), "rank 0 is no unset rank"
        with pytest.raises(WorkerExists):
            await registry.add(WorkerSpec(url=served.url))
        assert served.url in figures.removed, "its series go on under the name of its rank"


async def test_ranks_that_come_and_go_with_a_restart(make_registry):
    registry = make_registry(dp_settings())
    served = await Engine(server_info={"data_parallel_size": 2}).start()
    try:
        first = await registry.add(WorkerSpec(url=served.url))
        await until(lambda: [one.is_healthy for one in registry.workers] == [True] * 2)
        await served.stop()
        served.server_info["data_parallel_size"] = 3
        await served.start()
        await until(lambda: [one.is_healthy for one in registry.workers] == [True] * 3)
        registry.remove(registry.workers[1].id)
        await until(lambda: len(registry.workers) == 2)
        await served.stop()
        served.server_info["data_parallel_size"] = 1
        await served.start()
        await until(lambda: "has 1 ranks now, this is 2" in registry.workers[1].failure)
        await until(lambda: first.is_healthy)
        assert [one.rank for one in registry.workers] == [0, 2], "what was removed stays away"
    finally:
        await served.stop()


@pytest.mark.parametrize(
    ("runtime", "info", "words"),
    [("vllm", {"data_parallel_size": 0}, "the label dp_size is ''"), ("mlx", {}, "the label dp_size is ''")],
)
async def test_an_engine_that_does_not_tell_its_ranks(make_registry, runtime, info, words):
    registry = make_registry(dp_settings())
    async with engine(runtime=runtime, server_info=info) as served:
        worker = await registry.add(WorkerSpec(url=served.url))
        await until(lambda: words in worker.failure)
        assert not worker.is_healthy and len(registry.workers) == 1


async def test_an_engine_that_takes_no_rank(make_registry):
    registry = make_registry(dp_settings())
    async with engine(runtime="mlx") as served:
        worker = await registry.add(WorkerSpec(url=served.url, labels={"dp_size": "2"}))
        await until(lambda: "backend mlx takes no rank" in worker.failure)


@pytest.mark.parametrize(("runtime", "number"), [("vllm", 9), ("sglang", 16), ("tokenspeed", 12), ("trtllm", None)])
def test_where_a_rank_stands(runtime, number):
    assert ENGINES[runtime](None).rank_field == number
