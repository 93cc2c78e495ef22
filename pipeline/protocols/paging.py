"""Lists of items, a page at a time: `order`, `limit` and `after` as OpenAI has them."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pipeline.errors import GatewayError

PAGE, LARGEST_PAGE = 20, 100


class _Named(msgspec.Struct, frozen=True):
    id: str


def item_id(item: bytes | msgspec.Raw) -> str:
    """The id of an item that is JSON."""
    return msgspec.json.decode(item, type=_Named).id


def page(items: Sequence[msgspec.Raw], query: Mapping[str, str]) -> dict[str, Any]:
    """The part of `items` (oldest first) that a query asks for; newest first unless it says otherwise."""
    shown = list(items)
    if _word(query, "order", ("desc", "asc")) == "desc":
        shown.reverse()
    ids = [item_id(item) for item in shown]
    after = query.get("after")
    begin = ids.index(after) + 1 if after in ids else 0
    end = begin + _limit(query)
    return {
        "object": "list",
        "data": shown[begin:end],
        "first_id": ids[begin] if begin < len(ids) else None,
        "last_id": ids[min(end, len(ids)) - 1] if begin < len(ids) else None,
        "has_more": end < len(ids),
    }


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
