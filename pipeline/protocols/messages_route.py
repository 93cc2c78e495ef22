"""The Messages API as one of the APIs that generate, and its counting of tokens, which asks no engine."""

import asyncio

from aiohttp import web

from pipeline.counting import TokenCounter
from pipeline.plan import check_text
from pipeline.protocols import messages
from pipeline.protocols.choice import Reading
from pipeline.protocols.generation import Asked, InTime, ServingModel, Stations
from pipeline.protocols.http import read_body
from pipeline.protocols.messages_reply import PING, MessageAnswer
from pipeline.protocols.parts import as_json, check_content_type
from pipeline.ticket import Ticket


class MessagesApi:
    endpoint = "messages"
    keepalive = PING

    def read(self, body: bytearray, serving: ServingModel) -> Asked:
        asked = messages.read(body)
        model = serving(asked.model)
        plan = messages.plan_of(asked, model.sampling_defaults)
        reading = Reading(use=asked.tool_use, separates=asked.thinks)
        return Asked(model, plan, lambda request: MessageAnswer(model, request, reading))


class CountTokensRoute:
    """`POST /v1/messages/count_tokens`: the tokens a message would be charged for, its media expanded.

    Media are fetched and inspected as for an answer; no pixel is decoded and no engine is asked.
    """

    def __init__(self, stations: Stations, counter: TokenCounter) -> None:
        self._stations = stations
        self._counter = counter

    async def handle(self, request: web.Request, ticket: Ticket) -> web.StreamResponse:
        check_content_type(request.headers.get("Content-Type", ""))
        server = self._stations.config.server
        deadline = asyncio.get_running_loop().time() + server.request_timeout_s
        async with InTime(deadline, server.request_timeout_s):
            count = await self._count(request, ticket)
        return web.Response(body=as_json({"input_tokens": count}), content_type="application/json")

    async def _count(self, request: web.Request, ticket: Ticket) -> int:
        with ticket.stage("admit"):
            limit = self._stations.config.server.max_payload_bytes
            body, grant = await read_body(request, self._stations.bodies, limit)
        try:
            prompt = messages.read_prompt(body)
            model = self._stations.catalog.serving(prompt.model)
            ticket.model = model.model
            plan = messages.prompt_plan(prompt)
            check_text(model, len(body) - sum(len(part.url) for part in plan.parts))
            ticket.items = len(plan.parts)
            return await self._counter.count(model, plan, ticket)
        finally:
            grant.release()
