"""What an engine's stream says, as events; the engine is held to its order.

Rule: a chunk carries new tokens only, one `complete` ends each choice, and no token is emitted twice.  The bodies of
the five protocols differ in a few names, which a subclass gives.  A streamed `complete` has every token of its choice,
or with vLLM (`repeats_all` False) the last ones again or none; without streaming it carries everything.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from engines.base import Chunk, EngineError, EngineRequest, Event, Finished, TokenLogprob, TopLogprob
from engines.leg import Handoff

UNBOUNDED_TOKENS = 1 << 22  # of a choice whose request named no limit
SURPLUS_TOKENS = 64  # an engine that guesses ahead may end a few tokens late


class StreamReplies:
    """One stream's GenerateResponse messages.  `response` is the oneof of chunk and complete."""

    repeats_all: ClassVar[bool] = True
    index_field: ClassVar[str] = "index"
    output_field: ClassVar[str] = "output_ids"

    def __init__(self, request: EngineRequest) -> None:
        self._streams = request.stream
        self._tokens = [0] * request.sampling.n  # emitted by chunks, per choice
        self._most = (request.sampling.max_tokens or UNBOUNDED_TOKENS) + SURPLUS_TOKENS
        self._open = set(range(request.sampling.n))

    @property
    def all_finished(self) -> bool:
        return not self._open

    def event(self, message: Any) -> Event:
        """Raises EngineError INTERNAL for a message that has no place in the order."""
        kind = message.WhichOneof("response")
        if kind is None:
            raise EngineError("INTERNAL", "the engine sent a message that is neither chunk nor end", started=True)
        body = getattr(message, kind)
        index = getattr(body, self.index_field)
        if index not in self._open:
            known = index < len(self._tokens)
            told = f"more of choice {index} after its end" if known else f"a choice {index} nobody asked for"
            raise EngineError("INTERNAL", f"the engine sent {told}", started=True)
        return self._chunk(index, body) if kind == "chunk" else self._finished(index, body)

    def end(self) -> None:
        """The stream is over: raises EngineError INTERNAL when a choice has no end."""
        if self._open:
            raise EngineError(
                "INTERNAL", f"the engine's stream ended before choice {min(self._open)} did", started=True
            )

    def _chunk(self, index: int, body: Any) -> Chunk:
        self._tokens[index] += len(body.token_ids)
        self._check_tokens(self._tokens[index])
        return Chunk(
            index=index,
            token_ids=list(body.token_ids),
            logprobs=self.logprobs(body),
            prompt_tokens=body.prompt_tokens,
            cached_tokens=body.cached_tokens,
        )

    def _finished(self, index: int, body: Any) -> Finished:
        self._open.discard(index)
        emitted = self._tokens[index]
        self._check_tokens(len(getattr(body, self.output_field)))
        told = list(getattr(body, self.output_field))
        logprobs = self.logprobs(body)
        if self._streams and not self.repeats_all:
            new, logprobs = ([], ()) if emitted else (told, logprobs)
            total = emitted + len(new)
        else:
            new, logprobs = told[emitted:], logprobs[emitted:]
            total = body.completion_tokens or emitted + len(new)
        return Finished(
            index=index,
            finish_reason=self.finish_reason(body),
            token_ids=new,
            logprobs=logprobs,
            matched_stop=self.matched_stop(body),
            prompt_tokens=body.prompt_tokens,
            completion_tokens=total,
            cached_tokens=body.cached_tokens,
            handoff=self.handoff(body),
        )

    def _check_tokens(self, tokens: int) -> None:
        """An answer that is collected grows with every token; one without an end must not."""
        if tokens > self._most:
            raise EngineError("INTERNAL", "the engine sent more tokens than were asked for", started=True)

    # ------------------------------------------------------------ where the protocols differ

    def finish_reason(self, body: Any) -> str:
        return str(body.finish_reason)

    def handoff(self, body: Any) -> Handoff | None:
        """What the end of a prefill leg says for the decode leg."""
        return None

    def matched_stop(self, body: Any) -> int | str | None:
        """The end token's id or the stop string, when the engine says."""
        matched = body.WhichOneof("matched_stop")
        return None if matched is None else getattr(body, matched)

    def logprobs(self, body: Any) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of the tokens of this message; empty when the engine sent none."""
        return columns(body.output_logprobs) if body.HasField("output_logprobs") else ()


class PrefillReplies(StreamReplies):
    """A prefill leg whose engine hands over by itself: what it says is no part of the answer, only that it goes on."""

    def event(self, message: Any) -> Event:
        kind = message.WhichOneof("response")
        if kind == "complete":
            self._open.discard(getattr(message.complete, self.index_field))
        return Chunk(0, ())

    def end(self) -> None:
        """However many choices it told the end of."""


def replies_to(request: EngineRequest) -> StreamReplies:
    """The rules for a whole request, or for the leg of a pair whose engines meet."""
    is_prefill = request.leg is not None and request.leg.role == "prefill"
    return PrefillReplies(request) if is_prefill else StreamReplies(request)


def columns(told: Any) -> tuple[TokenLogprob, ...]:
    """An OutputLogProbs: ids and values in columns, rivals by token."""
    if len(told.token_ids) != len(told.token_logprobs):
        raise EngineError("INTERNAL", "the engine sent log-probabilities without their tokens", started=True)
    rivals = [ranked(zip(entry.token_ids, entry.values, strict=False)) for entry in told.top_logprobs]
    rivals += [()] * (len(told.token_ids) - len(rivals))
    return tuple(map(TokenLogprob, told.token_ids, told.token_logprobs, rivals))


def ranked(pairs: Any) -> tuple[TopLogprob, ...]:
    """Most likely first, as `TokenLogprob` promises; engines put the sampled token in front.  `pairs`: (id, value)."""
    ordered: Sequence[tuple[int, float]] = sorted(pairs, key=lambda pair: -pair[1])
    return tuple(TopLogprob(token_id, value) for token_id, value in ordered)
