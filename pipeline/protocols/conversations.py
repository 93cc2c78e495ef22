"""`/v1/conversations`: items kept under one id, which responses read and add to.

Shapes are SMG 1.13's and OpenAI's.  An item is kept as it will be told: with an id, and text as a part.
"""

import time
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from pipeline.errors import GatewayError
from pipeline.protocols.generation import Stations
from pipeline.protocols.http import json_reply, read_json
from pipeline.protocols.paging import item_id, page
from pipeline.protocols.parts import as_json
from pipeline.protocols.responses import Item, Part, Turns
from pipeline.protocols.responses_store import Conversation, ResponseStore
from pipeline.ticket import Ticket, new_id

MOST_ADDED = 20  # items of one request
MOST_METADATA = 16  # members

Items = Annotated[list[Item], Meta(max_length=MOST_ADDED)]


class NewConversation(msgspec.Struct, frozen=True):
    metadata: dict[str, Any] | None = None
    items: Items | None = None


class ChangedConversation(msgspec.Struct, frozen=True):
    """Members are added to those there are; null takes one away."""

    metadata: dict[str, Any]


class AddedItems(msgspec.Struct, frozen=True):
    items: Items


T = TypeVar("T")

_NEW = msgspec.json.Decoder(NewConversation)
_CHANGED = msgspec.json.Decoder(ChangedConversation)
_ADDED = msgspec.json.Decoder(AddedItems)


class ConversationRoutes:
    def __init__(self, stations: Stations, store: ResponseStore) -> None:
        self._stations = stations
        self._store = store

    async def create(self, request: web.Request, ticket: Ticket) -> web.Response:
        asked = await self._body(request, _NEW)
        conversation_id = new_id("conv_")
        kept = Conversation(int(time.time()), _merged({}, asked.metadata or {}), kept_items(asked.items or ()))
        self._keep(conversation_id, kept)
        return json_reply(card(conversation_id, kept))

    async def get(self, request: web.Request, ticket: Ticket) -> web.Response:
        return json_reply(card(*self._kept(request)))

    async def update(self, request: web.Request, ticket: Ticket) -> web.Response:
        asked = await self._body(request, _CHANGED)
        conversation_id, kept = self._kept(request)
        kept = msgspec.structs.replace(kept, metadata=_merged(kept.metadata, asked.metadata))
        self._keep(conversation_id, kept)
        return json_reply(card(conversation_id, kept))

    async def delete(self, request: web.Request, ticket: Ticket) -> web.Response:
        conversation_id, _ = self._kept(request)
        self._store.remove(conversation_id)
        return json_reply({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def items(self, request: web.Request, ticket: Ticket) -> web.Response:
        _, kept = self._kept(request)
        return json_reply(page([msgspec.Raw(item) for item in kept.items], request.query))

    async def add_items(self, request: web.Request, ticket: Ticket) -> web.Response:
        """The items that were added, as they are kept."""
        asked = await self._body(request, _ADDED)
        conversation_id, kept = self._kept(request)
        added = kept_items(asked.items)
        self._keep(conversation_id, msgspec.structs.replace(kept, items=kept.items + added))
        ids = [item_id(item) for item in added]
        told = {"object": "list", "data": [msgspec.Raw(item) for item in added]}
        first, last = (ids[0], ids[-1]) if ids else (None, None)
        return json_reply({**told, "first_id": first, "last_id": last, "has_more": False})

    async def item(self, request: web.Request, ticket: Ticket) -> web.Response:
        _, kept = self._kept(request)
        wanted = request.match_info["item_id"]
        found = next((item for item in kept.items if item_id(item) == wanted), None)
        if found is None:
            raise GatewayError("not_found", "Item not found in this conversation")
        return json_reply(found)

    async def delete_item(self, request: web.Request, ticket: Ticket) -> web.Response:
        """Whether there is such an item or not, there is none afterwards."""
        conversation_id, kept = self._kept(request)
        unwanted = request.match_info["item_id"]
        items = tuple(item for item in kept.items if item_id(item) != unwanted)
        self._keep(conversation_id, msgspec.structs.replace(kept, items=items))
        return json_reply(card(conversation_id, kept))

    def _kept(self, request: web.Request) -> tuple[str, Conversation]:
        conversation_id = request.match_info["id"]
        kept = self._store.conversation(conversation_id)
        if kept is None:
            raise GatewayError("not_found", "Conversation not found")
        return conversation_id, kept

    def _keep(self, conversation_id: str, kept: Conversation) -> None:
        before = self._store.conversation(conversation_id)
        if self._store.put(conversation_id, kept):
            return
        if before is not None:
            self._store.put(conversation_id, before)
        raise GatewayError("request_body_too_large", "the conversation would be larger than what is kept of one")

    async def _body(self, request: web.Request, decoder: "msgspec.json.Decoder[T]") -> T:
        return await read_json(request, self._stations.bodies, self._stations.config.server.max_payload_bytes, decoder)


def card(conversation_id: str, kept: Conversation) -> dict[str, Any]:
    return {
        "id": conversation_id,
        "object": "conversation",
        "created_at": kept.created,
        "metadata": kept.metadata,
    }


def kept_items(items: Sequence[Item]) -> tuple[bytes, ...]:
    """Items as they are kept.  Raises what a response would that was asked with them."""
    turns = Turns()
    for index, item in enumerate(items):
        turns.take(f"items[{index}]", item)
    return tuple(as_json(completed(item)) for item in items)


_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_"}


def completed(item: Item) -> Item:
    """As it is told when it is asked for again."""
    kind = item.type or "message"
    content: Any = item.content
    if isinstance(content, str):
        content = [Part(type="output_text" if item.role == "assistant" else "input_text", text=content)]
    return msgspec.structs.replace(
        item,
        type=kind,
        id=item.id or new_id(_PREFIXES[kind]),
        content=content,
        status=item.status or "completed",
    )


def _merged(there: Any, given: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in {**there, **given}.items() if value is not None}
    if len(found) > MOST_METADATA:
        raise GatewayError(
            "invalid_value", f"metadata cannot have more than {MOST_METADATA} properties", param="metadata"
        )
    return found
