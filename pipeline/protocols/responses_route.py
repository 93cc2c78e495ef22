"""The Responses API as one of the APIs that generate, and the routes of what is kept of it."""

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from engines.base import EngineRequest
from pipeline.errors import GatewayError
from pipeline.plan import ServedModel
from pipeline.protocols import responses
from pipeline.protocols.choice import Reading
from pipeline.protocols.generation import Asked, ServingModel
from pipeline.protocols.http import COMMENT_PING, MOST_PARSED_BYTES, json_reply, parsed_bytes
from pipeline.protocols.parts import as_json
from pipeline.protocols.responses import Item, ResponsesRequest
from pipeline.protocols.responses_reply import Asking, ResponseAnswer
from pipeline.protocols.responses_store import Kept, ResponseStore
from pipeline.ticket import Ticket, new_id

PAGE, LARGEST_PAGE = 20, 100  # input items in one answer, as OpenAI has it

_ITEMS = msgspec.json.Decoder(list[Item])
_OBJECTS = msgspec.json.Decoder(list[msgspec.Raw])


class _Named(msgspec.Struct, frozen=True):
    id: str


class ResponsesApi:
    endpoint = "responses"
    keepalive = COMMENT_PING

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def read(self, body: bytearray, serving: ServingModel) -> Asked:
        asked = responses.read(body)
        model = serving(asked.model)
        pieces = self._history(asked.previous_response_id)
        history = [item for items in pieces for item in _ITEMS.decode(items)]
        plan = responses.plan_of(asked, history, model.sampling_defaults)
        kept = self._input(asked)
        asking = asking_of(asked, model.model, plan.sampling.temperature, kept)
        answer = self._answers(model, Reading(use=asked.tool_use), asking)
        return Asked(model, plan, answer, len(kept or b""), sum(map(len, pieces)))

    def _answers(self, model: ServedModel, reading: Reading, asking: Asking) -> Any:
        """A function of its own, so that nothing of the body is held by the answer."""

        def answer(request: EngineRequest) -> ResponseAnswer:
            return ResponseAnswer(model, request, reading, asking, self._store)

        return answer

    def _history(self, previous: str | None) -> list[bytes]:
        """The conversation so far, oldest first, as arrays of items; pictures will be views of what the store keeps.

        Bodies that are small enough each must not be too much together: they become objects at the same time.
        """
        if previous is None:
            return []
        chain = self._store.chain(previous)
        if chain is None:
            raise GatewayError(
                "previous_response_not_found",
                f"Previous response with id '{previous[:80]}' not found.",
                param="previous_response_id",
            )
        pieces = [items for kept in chain for items in (kept.input, kept.output)]
        if sum(map(parsed_bytes, pieces)) > MOST_PARSED_BYTES:
            raise GatewayError(
                "request_body_too_large",
                "the conversation so far holds too many JSON values",
                param="previous_response_id",
            )
        return pieces

    def _input(self, asked: ResponsesRequest) -> bytes | None:
        """A copy of the request's own items, each with an id, unless they are not to be kept, or too large."""
        if asked.store is False:
            return None
        items = [
            item
            if item.id is not None
            else msgspec.structs.replace(item, id=new_id("msg_"), type=item.type or "message")
            for item in asked.items
        ]
        copied = as_json(items)
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
        effort=asked.reasoning.effort if asked.reasoning is not None else None,
        temperature=1.0 if temperature is None else temperature,
        text=text,
        tool_choice="auto" if asked.tool_choice is None else asked.tool_choice,
        tools=asked.tools or [],
        top_p=1.0 if asked.top_p is None else asked.top_p,
        user=asked.user,
        metadata=asked.metadata or {},
        input=kept,
    )


class KeptResponses:
    """`GET`, `DELETE /v1/responses/{id}`, its input items, and cancelling, for which every kept response is too
    late.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def get(self, request: web.Request, ticket: Ticket) -> web.Response:
        return json_reply(self._kept(request).response)

    async def delete(self, request: web.Request, ticket: Ticket) -> web.Response:
        response_id = request.match_info["id"]
        if not self._store.remove(response_id):
            raise _unknown(response_id)
        return json_reply({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: web.Request, ticket: Ticket) -> web.Response:
        self._kept(request)
        raise GatewayError("response_already_completed", "Cannot cancel a response that is complete")

    async def input_items(self, request: web.Request, ticket: Ticket) -> web.Response:
        """Newest first unless asked otherwise; `limit` and `after` as OpenAI has them."""
        items = _OBJECTS.decode(self._kept(request).input)
        if _word(request.query, "order", ("desc", "asc")) == "desc":
            items.reverse()
        ids = [msgspec.json.decode(item, type=_Named).id for item in items]
        after = request.query.get("after")
        begin = ids.index(after) + 1 if after in ids else 0
        end = begin + _limit(request.query)
        shown = ids[begin:end]
        body = {
            "object": "list",
            "data": items[begin:end],
            "first_id": shown[0] if shown else None,
            "last_id": shown[-1] if shown else None,
            "has_more": end < len(ids),
        }
        return json_reply(body)

    def _kept(self, request: web.Request) -> Kept:
        response_id = request.match_info["id"]
        kept = self._store.get(response_id)
        if kept is None:
            raise _unknown(response_id)
        return kept


def _unknown(response_id: str) -> GatewayError:
    return GatewayError("not_found", f"Response with id '{response_id[:80]}' not found.")


def _word(query: Mapping[str, str], name: str, words: tuple[str, ...]) -> str:
    given = query.get(name, words[0])
    if given not in words:
        raise GatewayError("invalid_value", f"{name}: must be one of {', '.join(words)}", param=name)
    return given


def _limit(query: Mapping[str, str]) -> int:
    text = query.get("limit", str(PAGE))
    if not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= LARGEST_PAGE):
        raise GatewayError("invalid_value", f"limit: must be between 1 and {LARGEST_PAGE}", param="limit")
    return int(text)
