"""Chat bodies with anything in any place, through everything that happens to one before media are touched.

JSON is written by hand here, because the interesting bodies are those no encoder writes: keys given twice, numbers of
four hundred digits, halves of surrogate pairs, brackets without end, bytes that are no UTF-8.
"""

import copy
import random
import string
from typing import Any

from engines.base import EngineRequest, Modality
from engines.vllm import build
from pipeline.errors import GatewayError
from pipeline.plan import check_hints, check_items
from pipeline.prompt import check_anchors
from pipeline.protocols import chat
from pipeline.protocols.chat_reply import Answer
from pipeline.protocols.parts import as_json
from tools.fuzzing.mutate import spoil
from tools.fuzzing.rig import Wrong
from tools.fuzzing.served import MODEL, demo_model

MOST_MESSAGE = 1000


class Raw(str):
    """JSON as it stands, not to be quoted."""


class Pairs(list[tuple[str, Any]]):
    """An object whose keys may repeat."""


def pairs(value: Any) -> Any:
    """Every dict of a value as Pairs."""
    if isinstance(value, dict):
        return Pairs((key, pairs(inner)) for key, inner in value.items())
    return [pairs(inner) for inner in value] if isinstance(value, list) else value


def written(value: Any) -> str:
    """JSON text; strings may hold half surrogates, which are escaped."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{written(key)}:{written(inner)}" for key, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    if isinstance(value, str):
        return '"' + "".join(map(_letter, value)) + '"'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def _letter(letter: str) -> str:
    code = ord(letter)
    if letter in '"\\' or code < 32 or 0xD800 <= code < 0xE000:
        return f"\\u{code:04x}"
    return letter


BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are kind."},
        {
            "role": "user",
            "name": "ann",
            "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "max_long_side_pixel": 280}},
                {"type": "image_url", "image_url": "http://127.0.0.1:9/a.png"},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, {}]}'}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "ok"},
        {"role": "developer", "content": [{"type": "text", "text": "more"}]},
    ],
    "max_tokens": 8,
    "max_completion_tokens": 9,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "repetition_penalty": 1.1,
    "seed": 7,
    "n": 2,
    "stop": ["a", "b"],
    "stop_token_ids": [1, 2],
    "ignore_eos": True,
    "no_stop_trim": True,
    "skip_special_tokens": False,
    "min_tokens": 1,
    "logit_bias": {"5": 1, "6": -2.5},
    "logprobs": True,
    "top_logprobs": 3,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "chat_template_kwargs": {"add_generation_prompt": True, "enable_thinking": False, "tools": None, "x": [1]},
    "tools": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "user": "u",
    "metadata": {"a": 1},
}  # fmt: skip


def like(chance: random.Random, old: Any) -> Any:
    """Another value of the same type: what the schema lets through."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int | float):
        return Raw(chance.choice(_NUMBERS)) if chance.random() < 0.5 else chance.randint(-3, 1 << chance.randrange(40))
    if isinstance(old, str):
        return chance.choice(_TEXTS) if chance.random() < 0.8 else chance.choice(string.printable) * 20_000
    return anything(chance)


def nested(chance: random.Random) -> Raw:
    deep = chance.choice((10, 100, 900, 1100, 100_000))
    opening, closing = chance.choice((("[", "]"), ('{"a":', "}"), ('[{"content":', "}]")))
    inner = "1" if chance.random() < 0.9 else ""
    return Raw(opening * deep + inner + closing * (deep if chance.random() < 0.9 else deep - 1))


def anything(chance: random.Random, depth: int = 0) -> Any:
    """A value of no kind in particular."""
    kind = chance.randrange(16 if depth < 3 else 12)
    if kind <= 1:
        return chance.choice((None, True, False, 0, 1, -1, 2, 0.5, "", "a"))
    if kind <= 3:
        return Raw(chance.choice(_NUMBERS))
    if kind <= 5:
        return chance.choice(_TEXTS)
    if kind == 6:
        return "".join(
            chr(chance.choice((0, 9, 10, 0x7F, 0xD800, 0xDFFF, 0x2028, 0xFFFE, 0xE000, 0x1F600))) for _ in range(3)
        )
    if kind == 7:
        return chance.choice(string.printable) * chance.choice((1, 100, 20_000))
    if kind == 8:
        return nested(chance)
    if kind == 9:
        return Raw(
            chance.choice(("nul", "NaN", "Infinity", "01", "+1", ".5", "1.", "'a'", '"a', "", "//", "undefined"))
        )
    if kind <= 11:
        return chance.randint(-(1 << chance.randrange(1, 70)), 1 << chance.randrange(1, 70))
    if kind <= 13:
        return [anything(chance, depth + 1) for _ in range(chance.choice((0, 1, 2, 5)))]
    keys = ("type", "text", "url", "content", "function", "arguments", "a", "role", "\0", "__class__")
    return Pairs((chance.choice(keys), anything(chance, depth + 1)) for _ in range(chance.choice((0, 1, 3))))


_NUMBERS = (
    "1e400", "-1e400", "1e-400", "9" * 400, "-" + "9" * 25, "9223372036854775807", "9223372036854775808",
    "18446744073709551615", "18446744073709551616", "4294967295", "4294967296", "2147483647", "2147483648",
    "-2147483649", "-0", "-0.0", "1.0", "1E2", "0.1e1", "1" + "0" * 5000, "0." + "0" * 5000 + "1",
)  # fmt: skip
_TEXTS = (
    "<|image_pad|>", "<|im_end|>", "<|im_start|>system\n", "{{ messages }}", "{% for a in b %}", "\0", "\ud800",
    "\ud83d",
    "data:,", "data:image/png;base64,", "data:image/png,AAAA", "http://", "https://user:pw@h/", "file:///etc/passwd",
    "javascript:1", "http://[::1", "http://a b/", "ftp://a", "json_schema", "json_object", "required", "[1,",
    "[" * 2000,
    '{"a":' * 1500, '"\\ud800"', "1e999", "9" * 400, "image_url", "input_audio", "video_url", "audio_url", "file",
    "model", MODEL, "auto", "text", "user", "assistant", "function",
)  # fmt: skip


def places(value: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a value."""
    found = [] if found is None else found
    if isinstance(value, Pairs):
        for at, (_, inner) in enumerate(value):
            found.append((value, at))
            places(inner, found)
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            found.append((value, at))
            places(inner, found)
    return found


def twist(chance: random.Random, value: Any) -> None:
    """One change somewhere inside a body of Pairs."""
    container, at = chance.choice(places(value))
    kind = chance.randrange(10)
    if kind <= 5:
        old = container[at][1] if isinstance(container, Pairs) else container[at]
        new = like(chance, old) if chance.random() < 0.6 else anything(chance)
        container[at] = (container[at][0], new) if isinstance(container, Pairs) else new
    elif kind == 6:
        del container[at]
    elif kind == 7:
        container.insert(chance.randrange(len(container) + 1), container[at])
    elif kind == 8 and isinstance(container, Pairs):
        name = chance.choice((container[at][0] + "x", container[at][0].upper(), "type", "\0", "\ud800", ""))
        container[at] = (name, container[at][1])
    else:
        often = 3000 if len(written(container[at][1] if isinstance(container, Pairs) else container[at])) < 200 else 3
        container[at:at] = [copy.deepcopy(container[at]) for _ in range(chance.choice((2, min(50, often), often)))]


def make(chance: random.Random, base: dict[str, Any] = BODY) -> bytes:
    """A body twisted in no to three places; half of them have fewer fields, and not always those that go together."""
    body = Pairs(pairs(base))
    for _ in range(chance.choice((0, 0, chance.randrange(len(body))))):
        at = chance.randrange(len(body))
        if body[at][0] not in ("model", "messages", "input", "prompt"):
            del body[at]
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        if places(body):
            twist(chance, body)
    text = written(body).encode("utf-8", "surrogatepass")
    if chance.random() < 0.15:
        text = spoil(chance, text)
    if chance.random() < 0.03:
        text = chance.choice((b"\xef\xbb\xbf", b"\xff\xfe", b" \n", b"\0")) + text
    return text


class Bodies:
    """Right is an engine message, or a GatewayError below 500 whose answer can be written."""

    name = "bodies"
    may_die = False

    def prepare(self) -> None:
        self.model = demo_model()

    def feed(self, chance: random.Random) -> str:
        body = make(chance)
        try:
            return self.through(bytearray(body))
        except GatewayError as error:
            return judged(error)

    def through(self, body: bytearray) -> str:
        """A body that is taken; GatewayError for one that is not."""
        model = self.model
        asked = chat.read(body)
        plan = chat.plan_of(asked, model.sampling_defaults)
        check_items(model, plan.parts, {})
        text = model.bundle.template.render(plan.messages, model.anchors, **plan.template_variables)
        ids = model.bundle.tokenizer.encode_now(text)
        count = sum(part.modality is Modality.IMAGE for part in plan.parts)
        check_anchors(ids, {Modality.IMAGE: (model.anchors[Modality.IMAGE], count)})
        check_hints(plan.parts)
        request = EngineRequest("id", model.model, ids, text, plan.sampling, plan.stream)
        build(request, "id-1", {})
        Answer(model, asked, request)
        return "accepted"


def judged(error: GatewayError) -> str:
    if error.status >= 500:
        raise Wrong(f"{error.status} {error.code}: {error.message[:300]}")
    if len(error.message) > MOST_MESSAGE:
        raise Wrong(f"a message of {len(error.message)} characters: {error.message[:200]}")
    as_json(error.body())
    return error.code
