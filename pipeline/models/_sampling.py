"""Which frames of a clip are used: the rules of the references, and the times they state.

Not a family.  Frames have numbers from 0 to `total` - 1; their times are number / rate, whatever the container says of
each (references do not look there).
"""

import math
from collections.abc import Sequence

import numpy as np

_EARLY_S = 0.0001  # MiniMax: a frame so little too early counts as in time


def clamped(count: float, least: int, most: int) -> int:
    return int(min(max(count, least), most))


def spread_to_nearest(total: int, count: int) -> tuple[int, ...]:
    """`count` frames evenly from the first to the last, halves to even: numpy's `linspace().round()` (Qwen3-VL)."""
    return tuple(np.linspace(0, total - 1, count).round().astype(int).tolist())


def spread_down(total: int, count: int) -> tuple[int, ...]:
    """The same, cut off: frame i is `i * (total - 1) // (count - 1)`; frames repeat when there are too few (SMG's
    rule for families whose reference has none).
    """
    if count == 1:
        return (0,)
    return tuple(at * (total - 1) // (count - 1) for at in range(count))


def by_interval(total: int, rate: float, seconds: float) -> tuple[int, ...]:
    """Frame 0, then always the first frame at least `seconds` after the one before; the last frame ends it."""
    chosen, at = [0], 0
    while True:
        due = at / rate + seconds - _EARLY_S
        at = max(at + 1, math.ceil(due * rate))
        while at - 1 > chosen[-1] and (at - 1) / rate >= due:  # ceil may be one late in floating point
            at -= 1
        if at >= total:
            break
        chosen.append(at)
    return tuple(chosen) if chosen[-1] == total - 1 else (*chosen, total - 1)


def at_rate(total: int, rate: float, wanted: float, most: int) -> tuple[int, ...]:
    """The first frame at or after each multiple of `1 / wanted` seconds, evenly spread where their number differs from
    the duration times `wanted`; no frame twice, but for the last when their number is odd (GLM-5.3-Flash).
    """
    duration = total / rate
    count = max(1, min(int(duration * wanted), most))
    chosen: list[int] = []
    if total < count:
        chosen = np.linspace(0, total - 1, count, dtype=int).tolist()
    else:
        due = 0.0
        for index in range(total):
            if index * (1 / rate) >= due:
                due += 1 / wanted
                chosen.append(index)
                if due >= int(duration):
                    break
    if len(chosen) < count:
        chosen = np.linspace(chosen[0], chosen[-1], count, dtype=int).tolist()
    elif len(chosen) > count:
        chosen = np.linspace(0, total - 1, count, dtype=int).tolist()
    distinct = list(dict.fromkeys(chosen))
    return (*distinct, *distinct[-1:]) if len(distinct) % 2 else tuple(distinct)


def seconds_of(indices: Sequence[int], rate: float, temporal: int, *, middle: bool) -> tuple[float, ...]:
    """The time of every temporal step: of its first frame, or the mean of its first and last (`middle`).

    A step that lacks frames is filled with the last one.
    """
    steps = range(0, len(indices), temporal)
    firsts = [indices[at] / rate for at in steps]
    if not middle:
        return tuple(firsts)
    lasts = [indices[min(at + temporal, len(indices)) - 1] / rate for at in steps]
    return tuple((first + last) / 2 for first, last in zip(firsts, lasts, strict=True))
