"""Variables that look like ours and are none: a misspelt limit is no limit, a misspelt key an open door.

Values are never shown.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipeline.absent import ENGINE_VARIABLES
from pipeline.setting import Declared

_PREFIXES = ("SMG_", "MEDIAGATE_")
_ENGINES = "SMG_VLLM_"  # the engine servicer's own settings may well stand in a shared environment, newer ones too
_ALIKE = 0.8  # of two names behind their prefixes, as difflib measures
_NEARLY_EQUAL = 0.93  # of whole names, when the prefix itself is misspelt: one letter, or two that changed places


def strangers(
    environ: Mapping[str, str], declared: Sequence[Declared], others: Iterable[Declared] = ()
) -> Iterator[str]:
    """A warning for each variable with our prefix, or nearly one of our names, that nobody reads.

    `declared` is what this process reads, `others` what may stand beside it for another process of ours.
    """
    ours = sorted(_variables(declared))
    known = {*ours, *_variables(others), *ENGINE_VARIABLES}
    for name in sorted(environ):
        if name in known or not environ[name].strip():
            continue
        if name.upper().startswith(_PREFIXES):
            hint = _hint(name.upper(), sorted(known), declared)
            if hint or not name.startswith(_ENGINES):
                yield f"{name} is not a variable of this gateway; it has no effect{hint}"
        elif near := difflib.get_close_matches(name.upper(), ours, 1, _NEARLY_EQUAL):
            yield f"{name} is not a variable of this gateway; it has no effect. Did you mean {near[0]}?"


def _variables(declared: Iterable[Declared]) -> set[str]:
    return {name for one in declared for name in (one.setting.variable, one.setting.legacy) if name}


def _hint(name: str, known: list[str], declared: Sequence[Declared]) -> str:
    by_rest = {_rest(one): one for one in known}
    if near := difflib.get_close_matches(_rest(name), list(by_rest), 1, _ALIKE):
        return f". Did you mean {by_rest[near[0]]}?"
    flag = "--" + _rest(name).lower().replace("_", "-")
    return f". Did you mean the flag {flag}?" if any(flag in one.setting.flags for one in declared) else ""


def _rest(name: str) -> str:
    return name.split("_", 1)[1]
