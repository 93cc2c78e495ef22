"""Data-parallel ranks (`--dp-aware`): one worker for every rank of an engine, all at one address.

Rule: how many there are the engine says (label `dp_size`), so the worker that was registered becomes rank 0 when it is
introduced, and brings the others into being.  Every rank is a worker of its own in everything: connections, health,
load, circuit breaker; its URL is `<address>@<rank>`, and each request names its rank to the engine.
"""

from engines.base import EngineError
from engines.worker import Worker


def ranked_url(address: str, rank: int) -> str:
    return f"{address}@{rank}"


def check_rank(worker: Worker) -> int:
    """How many ranks the engine of an introduced worker has.  Raises EngineError when it does not say, takes no rank,
    or has this worker's rank no more.
    """
    told = worker.labels.get("dp_size", "")
    if not told.isdecimal() or not int(told):
        raise EngineError("FAILED_PRECONDITION", f"--dp-aware: the label dp_size is {told!r}, not a positive integer")
    if worker.client is None or worker.client.rank_field is None:
        raise EngineError("FAILED_PRECONDITION", f"--dp-aware: backend {worker.runtime} takes no rank")
    if worker.rank is not None and worker.rank >= int(told):
        raise EngineError("FAILED_PRECONDITION", f"--dp-aware: the engine has {told} ranks now, this is {worker.rank}")
    return int(told)
