"""The Responses API as one of the APIs that generate, and the routes of what is kept of it."""

from typing import Any

import msgspec
from aiohttp import web

from engines.base import EngineRequest
from pipeline.errors import GatewayError
from pipeline.plan import ServedModel
from pipeline.protocols import responses
from pipeline.protocols.choice import Reading
from pipeline.protocols.conversations import completed
from pipeline.protocols.generation import Asked, ServingModel
from pipeline.protocols.http import COMMENT_PING, MOST_PARSED_BYTES, json_reply, parsed_bytes
from pipeline.protocols.paging import page
from pipeline.protocols.parts import as_json
from pipeline.protocols.responses import Item, ResponsesRequest
from pipeline.protocols.responses_background import BackgroundResponse, RunningResponses
from pipeline.protocols.responses_reply import Asking, ResponseAnswer
from pipeline.protocols.responses_store import Kept, ResponseStore
from pipeline.ticket import Ticket

_ITEMS = msgspec.json.Decoder(list[Item])


class _Status(msgspec.Struct, frozen=True):
    status: str


_OBJECTS = msgspec.json.Decoder(list[msgspec.Raw])


class ResponsesApi:
    endpoint = "responses"
    keepalive = COMMENT_PING

    def __init__(self, store: ResponseStore, running: RunningResponses) -> None:
        self._store = store
        self._running = running

    def read(self, body: bytearray, serving: ServingModel) -> Asked:
        asked = responses.read(body)
        model = serving(asked.model)
        pieces = self._history(asked)
        history = [item for items in pieces for item in _ITEMS.decode(items)]
        plan = responses.plan_of(asked, history, model.sampling_defaults)
        kept = self._input(asked)
        asking = asking_of(asked, model.model, plan.sampling.temperature, kept)
        if asked.background and self._running.most > 0:
            self._check_background(kept)
            asking = msgspec.structs.replace(asking, background=True)
        answer = self._answers(model, Reading(use=asked.tool_use, top_logprobs=asked.logprobs), asking)
        return Asked(model, plan, answer, len(kept or b""), sum(map(len, pieces)))

    def _answers(self, model: ServedModel, reading: Reading, asking: Asking) -> Any:
        """A function of its own, so that nothing of the body is held by the answer."""

        def answer(request: EngineRequest) -> ResponseAnswer:
            if asking.background:
                return BackgroundResponse(model, request, reading, asking, self._store, self._running)
            return ResponseAnswer(model, request, reading, asking, self._store)

        return answer

    def _check_background(self, kept: bytes | None) -> None:
        if kept is None:  # nobody could ask for it
            raise GatewayError(
                "invalid_value", "background: the response would not be kept, or is too large to be", param="background"
            )
        self._running.check()

    def _history(self, asked: ResponsesRequest) -> list[bytes]:
        """What was said before, oldest first, as arrays of items; pictures will be views of what the store keeps.

        Bodies that are small enough each must not be too much together: they become objects at the same time.
        """
        pieces, param = self._earlier(asked)
        if sum(map(parsed_bytes, pieces)) > MOST_PARSED_BYTES:
            raise GatewayError(
                "request_body_too_large", "the conversation so far holds too many JSON values", param=param
            )
        return pieces

    def _earlier(self, asked: ResponsesRequest) -> tuple[list[bytes], str]:
        previous, conversation = asked.previous_response_id, asked.conversation_id
        if conversation is not None:
            kept = self._store.conversation(conversation)
            if kept is None:
                raise GatewayError(
                    "conversation_not_found",
                    f"Conversation '{conversation[:80]}' not found. Please create the conversation first using the "
                    "conversations API.",
                    param="conversation",
                )
            return [b"[" + b",".join(kept.items) + b"]"], "conversation"
        if previous is None:
            return [], ""
        chain = self._store.chain(previous)
        if chain is None:
            raise GatewayError(
                "previous_response_not_found",
                f"Previous response with id '{previous[:80]}' not found.",
                param="previous_response_id",
            )
        return [items for kept in chain for items in (kept.input, kept.output)], "previous_response_id"

    def _input(self, asked: ResponsesRequest) -> bytes | None:
        """A copy of the request's own items, each with an id, unless they are not to be kept, or too large."""
        if asked.store is False:
            return None
        copied = as_json([completed(item) for item in asked.items])
        return copied if self._store.takes(len(copied)) else None


def asking_of(asked: ResponsesRequest, model: str, temperature: float | None, kept: bytes | None) -> Asking:
    """`model`: its id, where the request may have an alias."""
    text: dict[str, Any] = {"format": {"type": "text"}, "verbosity": "medium"}
    if asked.text is not None:
        text = {"format": asked.text.format or text["format"], "verbosity": asked.text.verbosity or "medium"}
    return Asking(
        model=model,
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        previous_response_id=asked.previous_response_id,
        conversation=asked.conversation_id,
        effort=asked.reasoning.effort if asked.reasoning is not None else None,
        temperature=1.0 if temperature is None else temperature,
        text=text,
        tool_choice="auto" if asked.tool_choice is None else asked.tool_choice,
        tools=asked.tools or [],
        top_logprobs=asked.logprobs or 0,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        user=asked.user,
        metadata=asked.metadata or {},
        input=kept,
    )


class KeptResponses:
    """`GET`, `DELETE /v1/responses/{id}`, its input items, and cancelling, of those that still run and of those that
    are kept.
    """

    def __init__(self, store: ResponseStore, running: RunningResponses) -> None:
        self._store = store
        self._running = running

    async def get(self, request: web.Request, ticket: Ticket) -> web.Response:
        running = self._running.get(request.match_info["id"])
        return json_reply(self._kept(request).response if running is None else running.now())

    async def delete(self, request: web.Request, ticket: Ticket) -> web.Response:
        response_id = request.match_info["id"]
        running = self._running.get(response_id)
        if running is not None:
            running.forget()
        else:
            self._kept(request)
            self._store.remove(response_id)
        return json_reply({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: web.Request, ticket: Ticket) -> web.Response:
        """One that is cancelled already is told again; for one that is complete it is too late."""
        running = self._running.get(request.match_info["id"])
        if running is not None:
            return json_reply(running.cancel())
        kept = self._kept(request)
        if msgspec.json.decode(kept.response, type=_Status).status == "cancelled":
            return json_reply(kept.response)
        raise GatewayError("response_already_completed", "Cannot cancel a response that is complete")

    async def input_items(self, request: web.Request, ticket: Ticket) -> web.Response:
        running = self._running.get(request.match_info["id"])
        items = self._kept(request).input if running is None else running.input
        return json_reply(page(_OBJECTS.decode(items), request.query))

    def _kept(self, request: web.Request) -> Kept:
        response_id = request.match_info["id"]
        kept = self._store.get(response_id)
        if kept is None:
            raise _unknown(response_id)
        return kept


def _unknown(response_id: str) -> GatewayError:
    return GatewayError("not_found", f"Response with id '{response_id[:80]}' not found.")
