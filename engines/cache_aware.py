"""The policy `cache_aware`: a request goes where the beginning of its prompt, or its pictures, were sent before.

Theory of operation.  Engines keep the keys and values of prompts they have served, and the encoder's output of
pictures, for a while.  The gateway does not see these caches; it remembers what it sent where (`Index`) and takes that
for what is there.  A worker's *match* is the tokens of the longest prefix it was sent, and those of the request's
other media it was sent in any prompt.  The best match wins when it is more than a share of the prompt
(`match_threshold`), or when a picture is in it, because encoding one again costs more than its tokens say.  A worker
that holds many more requests than the others (`balance_abs`, `balance_rel`) is passed over for the next best match;
without a match the least loaded one gets the request, among equals the one the media hash to, so that several gateways
agree.
"""

import functools
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from engines.affinity import Affinity
from engines.selection import RoundRobin, WorkerT, by_key

SMALLEST_MARGIN = 4
"""A worker that has so many requests more than the mean is never passed over for that."""


class CacheAwareSettings(msgspec.Struct, frozen=True):
    """Field names follow the flags.

    `match_threshold`: share of a prompt, 0 to 1.  `balance_abs`, `balance_rel`: more requests than the mean, and times
    the mean; a worker that is above both is passed over.  `max_tokens`: of all prefixes remembered, per model; one
    block of `block_size` tokens takes about 200 bytes.  `ttl_s`: seconds after which what was sent is forgotten.
    """

    match_threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5
    max_tokens: int = 4 << 20
    block_size: int = 16
    ttl_s: float = 180.0


class Index:
    """Which worker was sent what, and when last: at most `limit` entries, the least recently sent are forgotten.

    Keys are 64-bit digests, a worker's own by a salt of its URL; two that coincide by chance send one request to the
    wrong worker, which serves it as well.
    """

    def __init__(self, limit: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._ttl_s = ttl_s
        self._clock = clock
        self._sent: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sent)

    def knows(self, url: str, digest: int) -> bool:
        moment = self._sent.get(digest ^ _salt(url))
        return moment is not None and self._clock() - moment < self._ttl_s

    def record(self, url: str, digests: Sequence[int]) -> None:
        """In reverse, so that the beginning of a prompt, which more requests share, is forgotten last."""
        now, salt, sent = self._clock(), _salt(url), self._sent
        for digest in reversed(digests):
            sent[digest ^ salt] = now
            sent.move_to_end(digest ^ salt)
        while len(sent) > self._limit:
            sent.popitem(last=False)


class Match(msgspec.Struct, frozen=True, order=True):
    """What a worker may have of a request: tokens, and whether a media item is among them."""

    tokens: int
    has_media: bool


class CacheAware:
    """One per model; see the head of this file."""

    name = "cache_aware"

    def __init__(self, settings: CacheAwareSettings | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings or CacheAwareSettings()
        self._index = Index(max(1, self._settings.max_tokens // self._settings.block_size), self._settings.ttl_s, clock)
        self._turns = RoundRobin()

    def choose(self, candidates: Sequence[WorkerT], affinity: Affinity | None = None) -> WorkerT:
        if len(candidates) == 1:
            return candidates[0]
        if affinity is None:
            return self._turns.choose(_least_loaded(candidates))
        chosen = self.likely(candidates, affinity) or self._turns.choose(_least_loaded(candidates))
        digests = [digest for _, digest in affinity.prefixes(self._settings.block_size)]
        self._index.record(chosen.url, [*digests, *(_of_media(mark.content_hash) for mark in affinity.marks)])
        return chosen

    def likely(self, candidates: Sequence[WorkerT], affinity: Affinity) -> WorkerT | None:
        """The one with the best match that is not overloaded, or that the media hash to; None when any will do."""
        mean = sum(worker.load for worker in candidates) / len(candidates)
        matches = {worker.url: self._match(worker.url, affinity) for worker in candidates}
        matching = [worker for worker in candidates if self._qualifies(matches[worker.url], affinity.tokens)]
        free = [worker for worker in matching if not self._is_overloaded(worker.load, mean)]
        if free:
            best = max(matches[worker.url] for worker in free)
            return _least_loaded([worker for worker in free if matches[worker.url] == best])[0]
        key = affinity.key or affinity.media_key
        return by_key(_least_loaded(candidates), key) if key is not None else None

    def _match(self, url: str, affinity: Affinity) -> Match:
        index, reached = self._index, 0
        for place, digest in affinity.prefixes(self._settings.block_size):
            if not index.knows(url, digest):
                break
            reached = place
        within = [mark for mark in affinity.marks if mark.offset + mark.length <= reached]
        beyond = [mark for mark in affinity.marks if mark.offset + mark.length > reached]
        known = [mark for mark in beyond if index.knows(url, _of_media(mark.content_hash))]
        tokens = reached + sum(mark.offset + mark.length - max(mark.offset, reached) for mark in known)
        return Match(tokens, bool(within or known))

    def _qualifies(self, match: Match, tokens: int) -> bool:
        return match.has_media or (match.tokens > 0 and match.tokens >= self._settings.match_threshold * tokens)

    def _is_overloaded(self, load: int, mean: float) -> bool:
        """The margin is no larger than the swing of a load by chance (two standard deviations), as in SMG 1.13: a
        small fleet could not pass anybody over else.
        """
        margin = min(self._settings.balance_abs, max(SMALLEST_MARGIN, 2 * math.sqrt(mean)))
        return load > mean + margin and load > self._settings.balance_rel * mean


def _least_loaded(workers: Sequence[WorkerT]) -> list[WorkerT]:
    least = min(worker.load for worker in workers)
    return [worker for worker in workers if worker.load == least]


def _of_media(content_hash: str) -> int:
    return _digest(f"media {content_hash}")


@functools.lru_cache(maxsize=1024)
def _salt(url: str) -> int:
    return _digest(f"worker {url}")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
