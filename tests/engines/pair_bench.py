"""A dispatcher in front of prefill and decode workers, all of them stand-ins, and what must be left in the end."""

from contextlib import AsyncExitStack, asynccontextmanager

import grpc

from engines.dispatch import Dispatcher, DispatchSettings
from engines.health import HealthSettings
from engines.registry import Registry, RegistrySettings
from engines.transport import Transport, TransportSettings
from engines.worker import WorkerSpec
from tests.engines.fakes import DirectoryStore, Figures
from tests.engines.stand_in import complete, engine, until
from tests.engines.test_dispatch import QUICK

HANDED_OVER = '{"do_remote_prefill": true, "remote_block_ids": [1, 2]}'


def prefills(params=HANDED_OVER, **fields):
    """vLLM's prefill leg: one token and where its blocks are."""

    async def action(engine, request, context):
        told = {"kv_transfer_params_json": params} if params else {}
        yield complete([11], finish_reason="length", **told, **fields)

    return action


def falls(status, after=0, details="because"):
    """Any engine: so many chunks, then that status."""

    async def action(engine, request, context):
        for done in range(after):
            body = engine.pb.GenerateStreamChunk(token_ids=[11 + done], completion_tokens=done + 1)
            yield engine.pb.GenerateResponse(chunk=body)
        await context.abort(getattr(grpc.StatusCode, status), details)

    return action


def waits(event, then):
    """The action `then`, once `event` is set."""

    async def action(engine, request, context):
        await event.wait()
        async for reply in then(engine, request, context):
            yield reply

    return action


class PairBench:
    def __init__(self, directory, *, retry=QUICK, policies=None, dp_aware=False, encoders=False, **transport):
        self.figures = Figures()
        self.store = DirectoryStore(directory)
        self.free = []
        health = HealthSettings(interval_s=600.0, timeout_s=2.0)
        roles = ("encode", "prefill", "decode") if encoders else ("prefill", "decode")
        settings = RegistrySettings(health=health, drain_settle_s=0.0, roles=roles, dp_aware=dp_aware)
        self.registry = Registry(settings, self.figures)
        transport = {"owner_id": "smg:7", "writable": True, "shm_min_bytes": 1, **transport}
        self.transport = Transport(TransportSettings(**transport), self.store, self.figures)
        settings = DispatchSettings(retry=retry, in_pairs=True, with_encoders=encoders, role_policies=policies or {})
        self.dispatcher = Dispatcher(self.registry, self.transport, settings, self.figures)

    async def add(self, served, role, **spec):
        worker = await self.registry.add(WorkerSpec(url=served.url, worker_type=role, **spec))
        await until(lambda: worker.is_healthy)
        return worker

    def generate(self, request, **options):
        return self.dispatcher.generate(request, on_media_free=self.free.append, **options)

    async def events(self, request, **options):
        async with self.generate(request, **options) as generation:
            return [event async for event in generation]

    async def close(self):
        await self.dispatcher.close()
        await self.registry.close()
        self.transport.close()


def after_prefill(engines, answer):
    """A decode engine's `answer`, once a prefill engine has the request: before, it would have nothing to go on."""

    async def action(engine, request, context):
        def is_there():
            return any(one.request_id == request.request_id for prefill in engines for one in prefill.received)

        if engine.runtime != "vllm":
            await until(is_there)
        async for reply in answer(engine, request, context):
            yield reply

    return action


@asynccontextmanager
async def pairs(directory, runtime, *, prefill=1, decode=1, labels=None, decode_labels=None, port=None, **options):
    """The bench, its prefill engines and its decode engines; in the end nothing of them may be left."""
    segments = directory if options.get("mode") else None
    async with AsyncExitStack() as stack:
        bench = PairBench(directory, **options)
        made = {"prefill": [], "decode": []}
        for role, count, told in (("prefill", prefill, labels), ("decode", decode, decode_labels)):
            for _ in range(count):
                served = await stack.enter_async_context(engine(runtime=runtime, segments=segments))
                spec = {"bootstrap_port": port} if role == "prefill" and port else {}
                await bench.add(served, role, labels=told or {}, **spec)
                made[role].append(served)
        for served in made["decode"]:
            served.otherwise = after_prefill(made["prefill"], served.otherwise)
        try:
            yield bench, made["prefill"], made["decode"]
        finally:
            await bench.close()
        assert {worker.load for worker in bench.registry.workers} <= {0}
        assert set(bench.figures.loads.values()) <= {0}
        assert bench.store.files == []
