"""`POST /v1/tokenize` and `/v1/detokenize`: a model's tokenizer, without an engine.  Shapes as in SMG, errors too."""

import asyncio
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from pipeline.errors import GatewayError
from pipeline.plan import UNKNOWN_WINDOW, ServedModel, check_text
from pipeline.protocols.generation import Stations
from pipeline.protocols.http import json_reply, read_body
from pipeline.protocols.parts import UINT32, check_content_type, decode_body
from pipeline.ticket import Ticket

TURN_TOKENS = 1024  # decoded between two turns of the loop


TokenId = Annotated[int, Meta(ge=0, le=UINT32)]


class TokenizeRequest(msgspec.Struct, frozen=True):
    model: str
    prompt: str | list[str]


class DetokenizeRequest(msgspec.Struct, frozen=True):
    model: str
    tokens: list[TokenId | list[TokenId]]
    skip_special_tokens: bool | None = None


_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


class TokenRoutes:
    def __init__(self, stations: Stations) -> None:
        self._stations = stations

    async def tokenize(self, request: web.Request, ticket: Ticket) -> web.Response:
        """Ids of a text, or of each in a list, and how many ids and characters there are."""
        body, grant = await self._body(request)
        try:
            asked = decode_body(_TOKENIZE, body)
            model = self._model(asked.model)
            check_text(model, len(body))
            texts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
            ids = [await _ids(model, text) for text in texts]
        finally:
            grant.release()
        counts, characters = [len(one) for one in ids], [len(text) for text in texts]
        if isinstance(asked.prompt, str):
            return json_reply({"tokens": ids[0], "count": counts[0], "char_count": characters[0]})
        return json_reply({"tokens": ids, "count": counts, "char_count": characters})

    async def detokenize(self, request: web.Request, ticket: Ticket) -> web.Response:
        """The text of ids, or of each list of ids; special tokens are left out unless `skip_special_tokens` is
        false.
        """
        body, grant = await self._body(request)
        try:
            asked = decode_body(_DETOKENIZE, body)
            model = self._model(asked.model)
            nested = bool(asked.tokens) and isinstance(asked.tokens[0], list)
            rows: Any = asked.tokens if nested else [asked.tokens]
            if any(isinstance(row, list) is not nested for row in asked.tokens):
                raise GatewayError("invalid_type", "Invalid JSON data: tokens: ids and lists of ids", param="tokens")
            skips = asked.skip_special_tokens is not False
            texts = [await _text(model, ids, skips) for ids in rows]
        finally:
            grant.release()
        return json_reply({"text": texts if nested else texts[0]})

    async def _body(self, request: web.Request) -> Any:
        check_content_type(request.headers.get("Content-Type", ""))
        return await read_body(request, self._stations.bodies, self._stations.config.server.max_payload_bytes)

    def _model(self, name: str) -> ServedModel:
        try:
            return self._stations.catalog.serving(name)
        except GatewayError as error:
            if error.code != "model_not_found":
                raise
            raise GatewayError("tokenizer_not_found", f"No tokenizer for model '{name[:200]}'", param="model") from None


async def _ids(model: ServedModel, text: str) -> list[int]:
    await asyncio.sleep(0)  # there may be thousands of short ones
    return await model.bundle.tokenizer.encode(text, most=UNKNOWN_WINDOW)


async def _text(model: ServedModel, ids: list[int], skips: bool) -> str:
    tokenizer = model.bundle.tokenizer
    stream = tokenizer.decode_stream(skip_special_tokens=skips)
    pieces = []
    for begin in range(0, len(ids), TURN_TOKENS):
        some = ids[begin : begin + TURN_TOKENS]
        unknown = next((token for token in some if tokenizer.token_of(token) is None), None)
        if unknown is not None:
            raise GatewayError("invalid_value", f"tokens: the model has no token {unknown}", param="tokens")
        pieces.append(stream.feed(some))
        await asyncio.sleep(0)
    return "".join([*pieces, stream.finish()])
