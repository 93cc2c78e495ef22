"""Answers of `/v1/conversations`, and what is said of the routes."""

from typing import Any, Literal

from pipeline.protocols.conversations import AddedItems, ChangedConversation, NewConversation
from pipeline.protocols.described.operation import BODY_REFUSALS, MEDIA_REFUSALS, Operation, Told
from pipeline.protocols.described.responses import LIST_PARAMETERS, InputItems


class ConversationCard(Told, frozen=True):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, Any]


class ConversationDeleted(Told, frozen=True):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


_ITEMS_REFUSED = (*BODY_REFUSALS, *MEDIA_REFUSALS, "convert_request_failed")

CREATE = Operation(
    tag="Generation",
    summary="Begins a conversation",
    text="Kept in memory; `conversation` of a response reads it and adds to it.",
    takes=NewConversation,
    gives=ConversationCard,
    refuses=_ITEMS_REFUSED,
)
GET = Operation(tag="Generation", summary="A conversation", gives=ConversationCard, refuses=("not_found",))
UPDATE = Operation(
    tag="Generation",
    summary="Changes a conversation's metadata",
    takes=ChangedConversation,
    gives=ConversationCard,
    refuses=(*BODY_REFUSALS, "not_found"),
)
DELETE = Operation(
    tag="Generation", summary="Forgets a conversation", gives=ConversationDeleted, refuses=("not_found",)
)
ITEMS = Operation(
    tag="Generation",
    summary="A conversation's items",
    gives=InputItems,
    refuses=("not_found", "invalid_value"),
    parameters=LIST_PARAMETERS,
)
ADD_ITEMS = Operation(
    tag="Generation",
    summary="Adds items to a conversation",
    takes=AddedItems,
    gives=InputItems,
    refuses=(*_ITEMS_REFUSED, "not_found"),
)
ITEM = Operation(tag="Generation", summary="One item of a conversation", gives=dict[str, Any], refuses=("not_found",))
DELETE_ITEM = Operation(
    tag="Generation", summary="Takes an item out of a conversation", gives=ConversationCard, refuses=("not_found",)
)
