"""Clips by reference, held against the same clips by tensors on the same engine: no recorded answer is needed.

The worker chooses frames by its own loader and decodes them itself, vLLM with OpenCV; an equal answer says that times,
frames and pixels are those of the gateway.  Not among them is a clip whose header contradicts its frames' times: the
gateway goes by the times (`pipeline/media/video_timeline.py`), vLLM and smg by the header.
"""

from collections.abc import Callable

from tests.engines_real.answers import Differs, ask, clip_part, compare_logprobs
from tests.engines_real.checks import UNIQUE, Bench, Check, gateway_worker_port
from tests.pipeline.clips import clip, moving_noise
from tools.launch import Gateway
from tools.load.bodies import made_unique

_QUIET = {"x265-params": "log-level=none"}
_HUNDREDTHS = [10 * number + 3 * (number % 3) for number in range(40)]
_CLIPS: dict[str, Callable[[], bytes]] = {
    "three frames": lambda: clip(moving_noise(3, 96, 128), rate=10),
    "five seconds, 30 a second": lambda: clip(moving_noise(150, 96, 128), rate=30),
    "12.4 seconds, 25 a second": lambda: clip(moving_noise(310, 96, 128), rate=25),
    "a size that is no multiple": lambda: clip(moving_noise(47, 98, 130), rate=15),
    "a variable rate": lambda: clip(moving_noise(40, 96, 128), times=_HUNDREDTHS),
    "rotated": lambda: clip(moving_noise(40, 96, 128), rotation=90),
    "HEVC in Matroska": lambda: clip(moving_noise(50, 96, 128), container="matroska", codec="libx265", options=_QUIET),
    "VP9 in WebM": lambda: clip(moving_noise(50, 96, 128), container="webm", codec="libvpx-vp9"),
}


def _as_by_tensors(bench: Bench, gateway: Gateway, transport: str) -> None:
    different = []
    with bench.gateway(gateway_worker_port(gateway), "inline", processing="router") as by_tensors:
        for kind, made in _CLIPS.items():
            try:
                _compare(made(), gateway, by_tensors)
            except Differs as error:
                different.append(f"{kind}: {error}")
    if different:
        raise Differs("; ".join(different))


def _compare(file: bytes, by_reference: Gateway, by_tensors: Gateway) -> None:
    """Under two hashes, so that the engine's cache does not answer for it."""
    one = ask(by_reference, _question(made_unique(file, next(UNIQUE))))
    other = ask(by_tensors, _question(made_unique(file, next(UNIQUE))))
    if one.prompt_tokens != other.prompt_tokens:
        raise Differs(f"{one.prompt_tokens} prompt tokens, by tensors {other.prompt_tokens}")
    compare_logprobs(one.logprobs, other.logprobs)


def _question(file: bytes) -> dict[str, object]:
    content = [clip_part(file), {"type": "text", "text": "What happens?"}]
    common = {"temperature": 0, "max_tokens": 16, "logprobs": True, "top_logprobs": 2}
    return {"model": "tiny-qwen3vl", "messages": [{"role": "user", "content": content}], **common}


CLIP_CHECKS: dict[str, Check] = {"clips as by tensors": _as_by_tensors}
