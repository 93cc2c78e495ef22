"""The routes of engine workers: who there is, who comes, changes and goes, how busy they are, and their caches.

Shapes, statuses and codes are SMG 1.13's; errors are `{"error": text, "code"}` with codes in capitals.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from engines.base import EngineError
from engines.engine import Engine
from engines.loads import SchedulerLoad
from engines.registry import Registry, RegistryError, WorkerNotFound
from engines.worker import Worker, WorkerPatch, WorkerSpec
from pipeline.admission import Bodies
from pipeline.errors import GatewayError
from pipeline.protocols.http import json_reply, read_body
from pipeline.protocols.parts import describe
from pipeline.ticket import Ticket
from pipeline.versions import VERSION

BODY_LIMIT = 1 << 20
ASK_S = 5.0  # for one worker's answer

T = TypeVar("T")

_SPEC = msgspec.json.Decoder(WorkerSpec)
_PATCH = msgspec.json.Decoder(WorkerPatch)


class WorkerRoutes:
    def __init__(self, registry: Registry, bodies: Bodies) -> None:
        self._registry = registry
        self._bodies = bodies

    async def all(self, request: web.Request, ticket: Ticket) -> web.Response:
        workers = self._registry.workers
        if (name := request.query.get("model")) is not None:
            workers = self._registry.workers_of(name, healthy_only=False)
        shown = [worker.describe() for worker in workers]
        kinds = [row["worker_type"] for row in shown]
        stats = {f"{kind}_count": kinds.count(kind) for kind in ("prefill", "decode", "regular")}
        return json_reply({"workers": shown, "total": len(shown), "stats": stats})

    async def get(self, request: web.Request, ticket: Ticket) -> web.Response:
        try:
            return json_reply(self._registry.get(request.match_info["id"]).describe())
        except WorkerNotFound as error:
            return refused(error)

    async def add(self, request: web.Request, ticket: Ticket) -> web.Response:
        spec = await self._body(request, _SPEC)
        if isinstance(spec, web.Response):
            return spec
        try:
            worker = await self._registry.add(spec)
        except RegistryError as error:
            return refused(error)
        location = f"/workers/{worker.id}"
        told = {
            "status": "accepted",
            "worker_id": worker.id,
            "url": worker.url,
            "location": location,
            "message": "Worker addition queued for background processing",
        }
        return json_reply(told, status=202, headers={"Location": location})

    async def change(self, request: web.Request, ticket: Ticket) -> web.Response:
        """`PATCH`: what the body names, of what can be changed alone."""
        patch = await self._body(request, _PATCH)
        if isinstance(patch, web.Response):
            return patch
        return self._changed(request, lambda worker: patch.applied(worker.spec))

    async def replace(self, request: web.Request, ticket: Ticket) -> web.Response:
        """`PUT`: another registration as a whole, for the same URL."""
        spec = await self._body(request, _SPEC)
        if isinstance(spec, web.Response):
            return spec
        return self._changed(request, lambda worker: spec)

    async def remove(self, request: web.Request, ticket: Ticket) -> web.Response:
        try:
            worker = self._registry.remove(request.match_info["id"])
        except WorkerNotFound as error:
            return refused(error)
        return _accepted(worker, "Worker is draining")

    async def loads(self, request: web.Request, ticket: Ticket) -> web.Response:
        """What engines' schedulers hold; workers whose engine does not tell, or not in time, are not in it."""
        asked = await self._ask(lambda engine: engine.loads(ASK_S))
        rows = [
            {"worker": worker.url, "worker_type": worker.worker_type, **msgspec.structs.asdict(load)}
            for worker, loads in asked
            if not isinstance(loads, str)
            for load in loads
        ]
        head = {"timestamp": datetime.now(UTC).isoformat(), "version": VERSION, "dp_rank_count": len(rows)}
        told = [load for _, loads in asked if not isinstance(loads, str) for load in loads]
        return json_reply({**head, "loads": rows, **({"aggregate": _aggregate(told)} if told else {})})

    async def health_generate(self, request: web.Request, ticket: Ticket) -> web.Response:
        """Whether any engine says at this moment that it is well."""
        asked = await self._ask(lambda engine: engine.is_healthy(ASK_S))
        if any(answer is True for _, answer in asked):
            return web.Response(text="OK")
        return web.Response(text="no engine worker is healthy", status=503)

    async def flush_cache(self, request: web.Request, ticket: Ticket) -> web.Response:
        """Every worker forgets its cached prefixes; 206 when one of them did not."""
        asked = await self._ask(lambda engine: engine.flush_cache(ASK_S))
        failed = [{"worker": worker.url, "error": why} for worker, why in asked if why is not None]
        flushed = [worker.url for worker, why in asked if why is None]
        counts = {
            "workers_flushed": len(flushed),
            "total_http_workers": 0,
            "total_grpc_workers": len(asked),
            "total_zmq_workers_skipped": 0,
            "total_workers": len(asked),
        }
        if not failed:
            message = f"Successfully flushed cache on all {len(asked)} workers"
            return json_reply({"status": "success", "message": message, **counts})
        message = f"Cache flush: {len(flushed)} succeeded, {len(failed)} failed"
        told = {"status": "partial_success", "message": message, **counts, "successful": flushed, "failed": failed}
        return json_reply(told, status=206)

    async def _ask(self, question: Callable[[Engine], Awaitable[T]]) -> list[tuple[Worker, T | str]]:
        """Every worker at once: its answer, or in words why there is none."""

        async def answer(worker: Worker) -> T | str:
            if worker.client is None:
                return worker.failure or "not introduced yet"
            try:
                return await question(worker.client)
            except EngineError as error:
                return f"{error.status}: {error.message}"

        workers = self._registry.workers
        return list(zip(workers, await asyncio.gather(*map(answer, workers)), strict=True))

    def _changed(self, request: web.Request, spec_of: Callable[[Worker], WorkerSpec]) -> web.Response:
        try:
            worker = self._registry.get(request.match_info["id"])
            self._registry.change(worker.id, spec_of(worker))
        except RegistryError as error:
            return refused(error)
        return _accepted(worker, "Worker update queued for background processing")

    async def _body(self, request: web.Request, decoder: "msgspec.json.Decoder[T]") -> T | web.Response:
        """The decoded body, or the answer to one that is not right."""
        body, grant = await read_body(request, self._bodies, BODY_LIMIT)
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            found = describe(str(error), lambda _: msgspec.UNSET, decoder.type)
            return _refusal(400, "BAD_REQUEST", f"invalid worker: {found.message.removeprefix('Invalid JSON data: ')}")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _refusal(400, "BAD_REQUEST", f"invalid worker: {error}")
        finally:
            grant.release()


def _aggregate(loads: list[SchedulerLoad]) -> dict[str, Any]:
    def mean(name: str) -> float:
        return sum(float(getattr(load, name)) for load in loads) / len(loads)

    return {
        "total_running_reqs": sum(load.num_running_reqs for load in loads),
        "total_waiting_reqs": sum(load.num_waiting_reqs for load in loads),
        "total_reqs": sum(load.num_total_reqs for load in loads),
        "avg_token_usage": mean("token_usage"),
        "avg_throughput": mean("gen_throughput"),
        "avg_utilization": mean("utilization"),
    }


def _accepted(worker: Worker, message: str) -> web.Response:
    return json_reply({"status": "accepted", "worker_id": worker.id, "message": message}, status=202)


def refused(error: RegistryError) -> web.Response:
    status = {"BAD_REQUEST": 400, "WORKER_NOT_FOUND": 404}.get(error.code, 409)
    return _refusal(status, error.code, str(error))


def _refusal(status: int, code: str, text: str) -> web.Response:
    shown = text if len(text) <= GatewayError.MOST_CHARACTERS else text[: GatewayError.MOST_CHARACTERS - 3] + "..."
    return json_reply({"error": shown, "code": code}, status=status, headers={"X-SMG-Error-Code": code})
