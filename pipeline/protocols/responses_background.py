"""Responses that go on after their request was answered: `background`.

The request is answered `queued` once its prompt and media are ready, so what is wrong with it is still an error of its
own.  Until it is over, a response is told from here; then it is kept as any other, failed and cancelled ones too.
"""

import asyncio

from engines.base import EngineRequest
from pipeline.errors import GatewayError
from pipeline.plan import ServedModel
from pipeline.protocols.choice import Reading
from pipeline.protocols.generation import Detached
from pipeline.protocols.parts import as_json
from pipeline.protocols.responses_reply import Asking, ResponseAnswer
from pipeline.protocols.responses_store import Kept, ResponseStore


class RunningResponses:
    """Those that are not over, by id; at most `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._running: dict[str, BackgroundResponse] = {}

    def get(self, response_id: str) -> "BackgroundResponse | None":
        return self._running.get(response_id)

    def check(self) -> None:
        if len(self._running) >= self.most:
            raise GatewayError(
                "background_responses_limit_reached",
                f"This gateway already runs its maximum of {self.most} background responses; retry later or run the "
                "request without 'background'.",
                retry_after_s=1,
            )

    def begin(self, response: "BackgroundResponse") -> None:
        self.check()
        self._running[response.id] = response

    def end(self, response: "BackgroundResponse") -> None:
        self._running.pop(response.id, None)


class BackgroundResponse(ResponseAnswer, Detached):
    def __init__(
        self,
        model: ServedModel,
        request: EngineRequest,
        reading: Reading,
        asking: Asking,
        store: ResponseStore,
        running: RunningResponses,
    ) -> None:
        super().__init__(model, request, reading, asking, store)
        self._running = running
        self._task: asyncio.Task[None] | None = None

    @property
    def input(self) -> bytes:
        """Its items, as JSON."""
        assert self._asking.input is not None
        return self._asking.input

    def queued(self) -> bytes:
        self._running.begin(self)
        return as_json(self.response("queued"))

    def runs_in(self, task: asyncio.Task[None]) -> None:
        self._task = task
        task.add_done_callback(lambda _: self._running.end(self))

    def now(self) -> bytes:
        return as_json(self.response("in_progress"))

    def cancel(self) -> bytes:
        """Ends it; the response as it is kept."""
        self._stop()
        return self._keep_as("cancelled")

    def forget(self) -> None:
        """Ends it, and nothing is kept."""
        self._stop()

    def failed(self, error: GatewayError) -> None:
        if self._is_running:
            self._keep_as("failed", {"code": error.code, "message": error.message})

    @property
    def _is_running(self) -> bool:
        """Not when it was cancelled or forgotten at the last moment."""
        return self._running.get(self.id) is self

    def _keep(self) -> bytes:
        if not self._is_running:
            return b""
        self._running.end(self)
        return super()._keep()

    def _keep_as(self, status: str, error: dict[str, str] | None = None) -> bytes:
        self._running.end(self)
        body = as_json(self.response(status, error))
        self._store.put(self.id, Kept(body, self.input, b"[]", self._asking.previous_response_id))
        return body

    def _stop(self) -> None:
        self._running.end(self)
        if self._task is not None:
            self._task.cancel()
