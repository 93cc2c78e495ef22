"""Chat completions as one of the APIs that generate: its reader and its answers put together, in frames."""

from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from engines.base import EngineRequest, Event
from pipeline.errors import GatewayError
from pipeline.plan import ServedModel
from pipeline.protocols import chat, chat_reply
from pipeline.protocols.generation import Asked, ServingModel
from pipeline.protocols.http import COMMENT_PING, data_frame


class ChatApi:
    endpoint = "chat_completions"
    keepalive = COMMENT_PING

    def read(self, body: bytearray, serving: ServingModel) -> Asked:
        try:
            asked = chat.read(body)
        except chat.MalformedPart as error:
            serving(error.model)  # an unknown model is told before a bad part (order of SMG's checks)
            raise
        model = serving(asked.model)
        plan = chat.plan_of(asked, model.sampling_defaults)
        # messages hold the whole body; answers name the model, not its alias
        settings = msgspec.structs.replace(asked, messages=[], model=model.model)
        continuation = plan.continuation
        return Asked(model, plan, lambda request: ChatAnswer(model, settings, request, continuation))


class ChatAnswer:
    """`chat_reply.Answer` with its chunks as data events."""

    def __init__(self, model: ServedModel, asked: chat.ChatRequest, request: EngineRequest, continuation: str) -> None:
        self._answer = chat_reply.Answer(model, asked, request, continuation)
        self.tally = self._answer.tally

    async def whole(self, events: AsyncIterator[Event]) -> bytes:
        return await self._answer.whole(events)

    async def stream(self, events: AsyncIterator[Event], first_out: Callable[[], None]) -> AsyncIterator[bytes]:
        async for chunk in self._answer.stream(events, first_out):
            yield data_frame(chunk)

    def closing(self) -> Sequence[bytes]:
        return (data_frame(chat_reply.DONE),)

    def failing(self, error: GatewayError) -> Sequence[bytes]:
        return (data_frame(chat_reply.stream_error(error)), data_frame(chat_reply.DONE))
