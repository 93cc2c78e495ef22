"""The routes that tell how the gateway is and what it serves: health, models."""

from collections.abc import Callable
from typing import Any

from aiohttp import web

from engines.base import Modality
from engines.registry import Registry
from pipeline.catalog import Catalog
from pipeline.config import Config
from pipeline.errors import GatewayError, model_not_found
from pipeline.plan import ServedModel
from pipeline.protocols.http import json_reply
from pipeline.ticket import Ticket
from pipeline.versions import VERSION


class AdminRoutes:
    """`unready`: why the gateway takes no traffic, or None."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        catalog: Catalog,
        unready: Callable[[], str | None],
        is_alive: Callable[[], bool],
    ) -> None:
        self._config = config
        self._registry = registry
        self._catalog = catalog
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
            return json_reply({"status": "not ready", "reason": reason}, status=503)
        healthy = sum(worker.is_healthy for worker in workers)
        return json_reply({"status": "ready", "healthy_workers": healthy, "total_workers": len(workers)})

    async def models(self, request: web.Request, ticket: Ticket) -> web.Response:
        known = self._registry.models()
        if not known:
            raise GatewayError("no_models_available", "No models available", retry_after_s=1)
        return json_reply({"object": "list", "data": [self._model_card(name) for name in known]})

    async def model(self, request: web.Request, ticket: Ticket) -> web.Response:
        """A model by its id or an alias; the card has the id."""
        name = request.match_info["id"]
        known = self._registry.model_of(name)
        if known is None:
            raise GatewayError("model_not_found", f"The model '{name[:200]}' does not exist", param="model")
        return json_reply(self._model_card(known))

    async def model_info(self, request: web.Request, ticket: Ticket) -> web.Response:
        """What the engine workers say of the model `?model=`, or of the first one."""
        known = self._registry.models()
        if not known:
            raise GatewayError("no_workers", "No workers available", retry_after_s=1)
        name = request.query.get("model", known[0])
        workers = self._registry.workers_of(name, healthy_only=False)
        if not workers:
            raise model_not_found(name)
        return json_reply({**workers[0].labels, **self._model_card(workers[0].model_id)})

    async def server_info(self, request: web.Request, ticket: Ticket) -> web.Response:
        workers = self._registry.workers
        if not workers:
            raise GatewayError("no_workers", "No workers available", retry_after_s=1)
        healthy = sum(worker.is_healthy for worker in workers)
        told = {"version": VERSION, "models": self._registry.models(), "runtimes": sorted({w.runtime for w in workers})}
        return json_reply({**told, "healthy_workers": healthy, "total_workers": len(workers)})

    def _model_card(self, name: str) -> dict[str, Any]:
        card: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "self_hosted"}
        served = self._catalog.get(name)
        if served is not None:
            card["max_model_len"] = served.max_context
            card["multimodal"] = multimodal_card(served)
        return card


def multimodal_card(served: ServedModel) -> dict[str, Any] | None:
    """Family, modalities and limits, for /v1/models and --check-config."""
    if served.family is None:
        return None
    limits: dict[Modality, int] = dict(served.limits)
    return {
        "family": served.family.name,
        "limits": {modality.value: limit for modality, limit in sorted(limits.items(), key=lambda row: row[0].value)},
    }
