"""What the engine says back, as text: one `ChoiceReader` per choice, one `Tally` per request.

Tokens come in any portions, and the joined pieces do not depend on the portions.  End tokens are taken out by id; the
rest is detokenized (`pipeline.detokenize`); stop strings are looked for in the text (`pipeline.stops`) whatever the
engine does itself.  A piece with an `ending` closes its choice; when that ending is ours the engine still runs, and
the caller aborts it once no choice needs it.  No API's JSON is known here: `pipeline.protocols` makes that of pieces.
"""

from collections.abc import Sequence

import msgspec

from engines.base import Chunk, Event, Finished, Sampling, TokenLogprob
from pipeline.stops import StopMatcher
from pipeline.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity; OpenAI and vLLM send this number


class ReplyRules(msgspec.Struct, frozen=True):
    """How one request's answers are read.

    `end_ids`: tokens that end an answer.  `trimmed`: stop strings and end tokens stay out of the text.
    `top_logprobs`: rivals told per token at most; None: the client asked for no log-probabilities.  `kept`: special
    tokens whose text appears although the others are skipped.
    """

    end_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    trimmed: bool = True
    skip_special_tokens: bool = True
    min_tokens: int = 0
    top_logprobs: int | None = None
    kept: frozenset[int] = frozenset()


def reply_rules(
    sampling: Sampling,
    eos_ids: frozenset[int],
    *,
    no_stop_trim: bool = False,
    skip_special_tokens: bool = True,
    top_logprobs: int | None = None,
    kept: frozenset[int] = frozenset(),
) -> ReplyRules:
    """The rules a request asks for: with `ignore_eos` only its own stop tokens end an answer, the model's are text.
    `kept`: tokens that whoever reads the text has to see.
    """
    return ReplyRules(
        end_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_ids),
        stops=sampling.stop,
        trimmed=not no_stop_trim,
        skip_special_tokens=skip_special_tokens,
        min_tokens=sampling.min_tokens,
        top_logprobs=top_logprobs,
        kept=kept,
    )


class TokenText(msgspec.Struct, frozen=True, gc=False):
    """A token with its log-probability, as OpenAI tells it: `data` are the token's own bytes, `text` has U+FFFD where
    they are no whole character.
    """

    text: str
    data: bytes
    logprob: float


class LogprobEntry(TokenText, frozen=True, gc=False):
    """One token of the output; `top`: its most likely rivals, most likely first.  `place`: of its first character in
    the choice's text.
    """

    top: tuple[TokenText, ...] = ()
    place: int = 0


class Ending(msgspec.Struct, frozen=True):
    """The end of a choice.  `matched_stop`: the stop string, or the end token's id when the engine told it.  `ours`:
    found by the gateway, so the engine may still be running.
    """

    finish_reason: str
    matched_stop: int | str | None = None
    ours: bool = False


class Piece(msgspec.Struct, frozen=True):
    """What one portion of tokens added to a choice."""

    text: str = ""
    logprobs: tuple[LogprobEntry, ...] = ()
    ending: Ending | None = None


NOTHING = Piece()


class ChoiceReader:
    """One choice from its first token to its ending; afterwards it answers `NOTHING`."""

    def __init__(self, tokenizer: Tokenizer, rules: ReplyRules) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._left_out = rules.end_ids if rules.trimmed else frozenset[int]()
        self._stream = tokenizer.decode_stream(
            skip_special_tokens=rules.skip_special_tokens,
            kept=rules.kept if rules.trimmed else rules.kept | rules.end_ids,
        )
        self._matcher = StopMatcher(rules.stops, trim=rules.trimmed)
        self._entries = _Entries()
        self._tokens = 0
        self.ended = False

    def read(self, event: Event) -> Piece:
        """An engine's event of this choice."""
        if self.ended:
            return NOTHING
        piece = self.feed(event.token_ids, event.logprobs)
        if piece.ending is not None or isinstance(event, Chunk):
            return piece
        last = self.finish(event.finish_reason, event.matched_stop)
        return Piece(piece.text + last.text, piece.logprobs + last.logprobs, last.ending)

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> Piece:
        """New tokens, with their log-probabilities or none.  The ending, if any, is our stop string."""
        if self.ended or not token_ids:
            return NOTHING
        unarmed = max(0, min(self._rules.min_tokens - self._tokens, len(token_ids)))
        self._tokens += len(token_ids)
        text = self._show(token_ids[:unarmed], logprobs[:unarmed], armed=False) if unarmed else ""
        if unarmed < len(token_ids):
            text += self._show(token_ids[unarmed:], logprobs[unarmed:], armed=True)
        return self._piece(text)

    def finish(self, finish_reason: str, matched_stop: int | str | None = None) -> Piece:
        """The engine ended the choice: what was held back, and the ending (ours if a stop string turns up in that)."""
        if self.ended:
            return NOTHING
        text = self._matcher.feed(self._stream.finish(), armed=self._tokens > self._rules.min_tokens)
        if self._matcher.matched is not None:
            return self._piece(text)
        self.ended = True
        text += self._matcher.finish()
        return Piece(text, self._entries.rest(), Ending(finish_reason, matched_stop))

    def _show(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], *, armed: bool) -> str:
        """Detokenize and look for stop strings; entries are placed on the way when they are wanted."""
        if self._rules.top_logprobs is None or not logprobs:
            content = [token for token in token_ids if token not in self._left_out] if self._left_out else token_ids
            return self._pass(self._stream.feed(content), armed)
        shown = []
        for place, token in enumerate(token_ids):
            if token in self._left_out:
                continue
            if place < len(logprobs):
                self._entries.place(self._entry(logprobs[place]))
            shown.append(self._pass(self._stream.feed((token,)), armed))
        return "".join(shown)

    def _pass(self, text: str, armed: bool) -> str:
        self._entries.produced += len(text)
        return self._matcher.feed(text, armed=armed)

    def _piece(self, text: str) -> Piece:
        self._entries.shown += len(text)
        entries = self._entries.due()
        matched = self._matcher.matched
        if matched is None:
            return Piece(text, entries) if text or entries else NOTHING
        self.ended = True
        return Piece(text, entries, Ending("stop", matched, ours=True))

    def _entry(self, told: TokenLogprob) -> LogprobEntry:
        data = self._tokenizer.bytes_of(told.token_id)
        rivals = told.top[: self._rules.top_logprobs or 0]
        return LogprobEntry(
            data.decode("utf-8", "replace"),
            data,
            finite(told.logprob),
            tuple(self._token_text(rival.token_id, rival.logprob) for rival in rivals),
            self._entries.produced,
        )

    def _token_text(self, token_id: int, logprob: float) -> TokenText:
        data = self._tokenizer.bytes_of(token_id)
        return TokenText(data.decode("utf-8", "replace"), data, finite(logprob))


def finite(logprob: float) -> float:
    """As it may stand in JSON."""
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB  # a NaN compares false as well


class _Entries:
    """Log-probability entries waiting for their text.

    An entry stands where its token's text begins.  It is due once text beyond that place was shown, so a token whose
    text a stop string took away never appears, one that begins before the stop string does, and how tokens were
    portioned is all one.
    """

    def __init__(self) -> None:
        self.produced = 0  # characters out of the detokenizer
        self.shown = 0  # characters past the stop matcher
        self._waiting: list[LogprobEntry] = []

    def place(self, entry: LogprobEntry) -> None:
        self._waiting.append(entry)

    def due(self) -> tuple[LogprobEntry, ...]:
        count = 0
        while count < len(self._waiting) and self._waiting[count].place < self.shown:
            count += 1
        found = tuple(self._waiting[:count])
        del self._waiting[:count]
        return found

    def rest(self) -> tuple[LogprobEntry, ...]:
        found = tuple(self._waiting)
        self._waiting.clear()
        return found


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request: the prompt counted once, completions summed over choices, end tokens included;
    `reasoning_tokens` are part of the completions.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Tally:
    """Counts while events pass; `usage` may be asked at any time.

    `prompt_tokens`: the expanded prompt when the gateway made it; None where the worker expands it and tells the
    number.
    """

    def __init__(self, prompt_tokens: int | None = None) -> None:
        self._prompt_given = prompt_tokens
        self._prompt_told = 0
        self._cached = 0
        self._completion: dict[int, int] = {}

    def see(self, event: Event) -> None:
        self._prompt_told = max(self._prompt_told, event.prompt_tokens)
        self._cached = max(self._cached, event.cached_tokens)
        counted = self._completion.get(event.index, 0) + len(event.token_ids)
        if isinstance(event, Finished):
            counted = max(counted, event.completion_tokens)
        self._completion[event.index] = counted

    @property
    def usage(self) -> Usage:
        prompt = self._prompt_told if self._prompt_given is None else self._prompt_given
        return Usage(prompt, sum(self._completion.values()), self._cached)
