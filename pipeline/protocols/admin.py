"""The routes that tell and change the gateway's state: health, models, engine workers."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from engines.base import Modality
from engines.registry import Registry, RegistryError, WorkerNotFound
from engines.worker import WorkerSpec
from pipeline.admission import Bodies
from pipeline.catalog import Catalog
from pipeline.config import Config
from pipeline.errors import GatewayError
from pipeline.plan import ServedModel
from pipeline.protocols.http import read_body
from pipeline.protocols.parts import as_json
from pipeline.ticket import Ticket
from pipeline.versions import VERSION

BODY_LIMIT = 1 << 20


_WORKER_SPEC = msgspec.json.Decoder(WorkerSpec)


def reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=as_json(body), status=status, headers=headers, content_type="application/json")


class AdminRoutes:
    """`unready`: why the gateway takes no traffic, or None."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        catalog: Catalog,
        bodies: Bodies,
        unready: Callable[[], str | None],
        is_alive: Callable[[], bool],
    ) -> None:
        self._config = config
        self._registry = registry
        self._catalog = catalog
        self._bodies = bodies
        self._unready = unready
        self._is_alive = is_alive

    async def health(self, request: web.Request, ticket: Ticket) -> web.Response:
        return web.Response(text="OK")

    async def liveness(self, request: web.Request, ticket: Ticket) -> web.Response:
        """This loop answers; the supervisor must be there to replace what dies."""
        if self._is_alive():
            return web.Response(text="OK")
        return web.Response(text="the supervisor is gone", status=503)

    async def readiness(self, request: web.Request, ticket: Ticket) -> web.Response:
        workers = self._registry.workers
        reason = self._unready()
        if reason is not None:
            return reply({"status": "not ready", "reason": reason}, status=503)
        healthy = sum(worker.is_healthy for worker in workers)
        return reply({"status": "ready", "healthy_workers": healthy, "total_workers": len(workers)})

    async def models(self, request: web.Request, ticket: Ticket) -> web.Response:
        known = self._registry.models()
        if not known:
            raise GatewayError("no_models_available", "No models available", retry_after_s=1)
        return reply({"object": "list", "data": [self._model_card(name) for name in known]})

    async def model(self, request: web.Request, ticket: Ticket) -> web.Response:
        name = request.match_info["id"]
        if name not in self._registry.models():
            raise GatewayError("model_not_found", f"The model '{name[:200]}' does not exist", param="model")
        return reply(self._model_card(name))

    async def model_info(self, request: web.Request, ticket: Ticket) -> web.Response:
        """What the engine workers say of the model `?model=`, or of the first one."""
        known = self._registry.models()
        if not known:
            raise GatewayError("no_workers", "No workers available", retry_after_s=1)
        name = request.query.get("model", known[0])
        workers = self._registry.workers_of(name, healthy_only=False)
        if not workers:
            raise GatewayError("model_not_found", f"No worker available for model '{name[:200]}'")
        return reply({**workers[0].labels, **self._model_card(name)})

    async def server_info(self, request: web.Request, ticket: Ticket) -> web.Response:
        workers = self._registry.workers
        if not workers:
            raise GatewayError("no_workers", "No workers available", retry_after_s=1)
        healthy = sum(worker.is_healthy for worker in workers)
        told = {"version": VERSION, "models": self._registry.models(), "runtimes": sorted({w.runtime for w in workers})}
        return reply({**told, "healthy_workers": healthy, "total_workers": len(workers)})

    def _model_card(self, name: str) -> dict[str, Any]:
        card: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "local"}
        served = self._catalog.get(name)
        if served is not None:
            card["max_model_len"] = served.max_context
            card["multimodal"] = multimodal_card(served)
        return card

    async def list_workers(self, request: web.Request, ticket: Ticket) -> web.Response:
        model = request.query.get("model")
        shown = [worker.describe() for worker in self._registry.workers if model in (None, worker.model_id)]
        kinds = [row["worker_type"] for row in shown]
        stats = {f"{kind}_count": kinds.count(kind) for kind in ("prefill", "decode", "regular")}
        return reply({"workers": shown, "total": len(shown), "stats": stats})

    async def get_worker(self, request: web.Request, ticket: Ticket) -> web.Response:
        try:
            return reply(self._registry.get(request.match_info["id"]).describe())
        except WorkerNotFound as error:
            return refused(404, error.code, str(error))

    async def add_worker(self, request: web.Request, ticket: Ticket) -> web.Response:
        body, grant = await read_body(request, self._bodies, BODY_LIMIT)
        try:
            spec = _WORKER_SPEC.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return refused(400, "BAD_REQUEST", f"invalid worker: {error}")
        finally:
            grant.release()
        try:
            worker = await self._registry.add(spec)
        except RegistryError as error:
            return refused(409 if error.code.startswith("WORKER_") else 400, error.code, str(error))
        location = f"/workers/{worker.id}"
        body_out = {
            "status": "accepted",
            "worker_id": worker.id,
            "url": worker.url,
            "location": location,
            "message": "Worker addition queued for background processing",
        }
        return reply(body_out, status=202, headers={"Location": location})

    async def remove_worker(self, request: web.Request, ticket: Ticket) -> web.Response:
        try:
            worker = self._registry.remove(request.match_info["id"])
        except WorkerNotFound as error:
            return refused(404, error.code, str(error))
        return reply({"status": "accepted", "worker_id": worker.id, "message": "Worker is draining"}, status=202)


def refused(status: int, code: str, text: str) -> web.Response:
    """The error body of the worker routes, which differs from the OpenAI one."""
    shown = text if len(text) <= GatewayError.MOST_CHARACTERS else text[: GatewayError.MOST_CHARACTERS - 3] + "..."
    return reply({"error": shown, "code": code}, status=status, headers={"X-SMG-Error-Code": code})


def multimodal_card(served: ServedModel) -> dict[str, Any] | None:
    """Family, modalities and limits, for /v1/models and --check-config."""
    if served.family is None:
        return None
    limits: dict[Modality, int] = dict(served.limits)
    return {
        "family": served.family.name,
        "limits": {modality.value: limit for modality, limit in sorted(limits.items(), key=lambda row: row[0].value)},
    }
