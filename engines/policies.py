"""The policies of `--policy` by name, each made from its settings."""

from collections.abc import Callable, Mapping

import msgspec

from engines.cache_aware import CacheAware, CacheAwareSettings
from engines.selection import ConsistentHashing, Policy, PowerOfTwo, PrefixHash, Random, RoundRobin


class PrefixHashSettings(msgspec.Struct, frozen=True):
    """See `engines.selection.PrefixHash`."""

    tokens: int = 256
    factor: float = 1.25
    margin: int = 10


class PolicySettings(msgspec.Struct, frozen=True):
    """What the flags say of the policies that have settings."""

    cache_aware: CacheAwareSettings = CacheAwareSettings()
    prefix_hash: PrefixHashSettings = PrefixHashSettings()


POLICIES: Mapping[str, Callable[[PolicySettings], Policy]] = {
    "cache_aware": lambda settings: CacheAware(settings.cache_aware),
    "round_robin": lambda _settings: RoundRobin(),
    "random": lambda _settings: Random(),
    "power_of_two": lambda _settings: PowerOfTwo(),
    "consistent_hashing": lambda _settings: ConsistentHashing(),
    "prefix_hash": lambda settings: PrefixHash(**msgspec.structs.asdict(settings.prefix_hash)),
}


def policy_named(name: str, settings: PolicySettings | None = None) -> Policy:
    """A fresh policy; KeyError for a name that is none of POLICIES."""
    return POLICIES[name](settings or PolicySettings())
