"""`POST /v1/chat/completions`: the request's JSON to a MediaPlan.  Its answers are in chat_reply.py.

Fields, ranges and codes: SMG 1.13's measured answers (`docs/compatibility.md` lists where ours differ).  Unknown fields
are accepted and ignored, as clients expect.  Functions are read in chat_tools.py, what holds the output to a shape in
constraints.py.
"""

import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engines.base import Constraint, Modality, Sampling
from pipeline.errors import GatewayError
from pipeline.models.base import Hints
from pipeline.plan import MediaPart, MediaPlan
from pipeline.protocols.chat_tools import ChoiceField, FunctionForm, ToolForm, tool_use
from pipeline.protocols.constraints import FormatField, constraint_of
from pipeline.protocols.parts import UINT32, RawText, called_otherwise, decode_body, no_media_of, raw_string
from pipeline.protocols.sampling import SamplingFields
from pipeline.tooluse import ToolUse

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class MediaUrl(msgspec.Struct, frozen=True):
    """A medium by http(s) or data URL."""

    url: RawText
    max_long_side_pixel: Annotated[int, Meta(le=UINT32)] | None = None
    fps: float | None = None


class SoundData(msgspec.Struct, frozen=True):
    """`data`: base64, or a data URL.  `format` ("wav", "mp3") is not believed: the bytes tell."""

    data: RawText
    format: str | None = None


class Part(msgspec.Struct, frozen=True):
    """One content part; `type` decides which member is read."""

    type: str
    text: str | None = None
    image_url: MediaUrl | str | None = None
    video_url: MediaUrl | str | None = None
    audio_url: MediaUrl | str | None = None
    input_audio: SoundData | None = None


class Message(msgspec.Struct, frozen=True):
    role: Role
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True, dict=True):
    """The body of a chat completion."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=UINT32)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=UINT32)] | None = None
    n: Annotated[int, Meta(ge=1, le=10)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=UINT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolForm] | None = None
    tool_choice: ChoiceField = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionForm] | None = None
    function_call: Any = None
    response_format: FormatField = None
    regex: str | None = None
    ebnf: str | None = None
    reasoning_effort: str | float | None = None
    separate_reasoning: bool | None = None
    continue_final_message: bool | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @functools.cached_property
    def tool_use(self) -> ToolUse:
        """Raises GatewayError for tools and choices that make no sense."""
        return tool_use(
            self.tools,
            self.tool_choice,
            functions=self.functions,
            function_call=self.function_call,
            parallel=self.parallel_tool_calls,
        )

    @functools.cached_property
    def constraint(self) -> Constraint | None:
        """What holds the output; calls that must be made come before a format of the answer."""
        asked = constraint_of(self.response_format, self.regex, self.ebnf)
        return self.tool_use.constraint or asked


_DECODER = msgspec.json.Decoder(ChatRequest)
_PART_AT = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\]")
_NO_THINKING = ("none", "minimal")  # efforts
_THINKING_SWITCHES = ("enable_thinking", "thinking")  # as templates call them
_URL_MODALITIES = {"image_url": Modality.IMAGE, "video_url": Modality.VIDEO, "audio_url": Modality.AUDIO}
_ELSEWHERE = {"image": "image_url", "input_image": "image_url", "video": "video_url", "audio": "input_audio"}
_ELSEWHERE |= {"input_text": "text", "output_text": "text"}


class MalformedPart(GatewayError):
    """A content part of the wrong shape: `unsupported_content_part` by its own type, as the peer answers.

    `model`: the one asked for, as an unknown model is to be told first.
    """

    def __init__(self, kind: str, fault: GatewayError, model: str) -> None:
        super().__init__("unsupported_content_part", _unsupported_text(kind, fault.message), param=fault.param)
        self.model = model


def read(body: bytes | bytearray) -> ChatRequest:
    """The request; GatewayError for what does not parse, is out of range or belongs to a later version."""
    try:
        request = decode_body(_DECODER, body)
    except GatewayError as error:
        place = _PART_AT.match(error.param or "")
        if place is None or error.code == "invalid_json":
            raise
        raise _malformed(body, int(place[1]), int(place[2]), error) from None
    check_fields(request)
    return request


def _malformed(body: bytes | bytearray, message: int, part: int, fault: GatewayError) -> GatewayError:
    """What a part that does not parse calls itself, and whom it was for."""
    try:
        whole = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # what comes behind the part is no JSON at all
        return unsupported("<missing>", fault.param or "")
    found = whole["messages"][message]["content"][part]
    kind = found.get("type") if isinstance(found, dict) else None
    kind = kind if isinstance(kind, str) else "<missing>"
    model = whole.get("model")
    if isinstance(model, str):
        return MalformedPart(kind, fault, model)
    return GatewayError("unsupported_content_part", _unsupported_text(kind, fault.message), param=fault.param)


def check_fields(request: ChatRequest) -> None:
    """What types and ranges alone cannot say."""
    request.constraint  # noqa: B018  (raises)
    final = request.messages[-1]
    if request.continue_final_message and (final.role != "assistant" or final.tool_calls):
        raise GatewayError(
            "invalid_value",
            "continue_final_message: the last message must be an assistant's, without tool calls",
            param="continue_final_message",
        )
    if request.top_logprobs and not request.logprobs:
        raise GatewayError("top_logprobs_requires_logprobs", "top_logprobs is only allowed when logprobs is enabled")
    if request.stream_options is not None and not request.stream:
        raise GatewayError(
            "stream_options_requires_stream",
            "The 'stream_options' parameter is only allowed when 'stream' is enabled",
            param="stream_options",
        )
    request.check()
    limit = request.max_completion_tokens or request.max_tokens
    if limit is not None and request.min_tokens is not None and request.min_tokens > limit:
        raise GatewayError(
            "integer_above_max_value",
            f"min_tokens: {request.min_tokens} is above the maximum of {limit} tokens",
            param="min_tokens",
        )


def plan_of(request: ChatRequest, defaults: Mapping[str, Any]) -> MediaPlan:
    """Messages for the template, media in prompt order, sampling.  `defaults`: the worker's sampling defaults.

    Raises `unsupported_content_part`, `invalid_type`, `process_messages_failed`.
    """
    parts: list[MediaPart] = []
    messages = [template_message(index, message, parts) for index, message in enumerate(request.messages)]
    continuation = text_of(messages.pop()["content"]) if request.continue_final_message else ""
    return MediaPlan(
        model=request.model,
        messages=messages,
        parts=tuple(parts),
        sampling=sampling_of(request, defaults),
        stream=bool(request.stream),
        template_variables=template_variables(request),
        continuation=continuation,
    )


def template_variables(request: ChatRequest) -> dict[str, Any]:
    """The client's own come last."""
    found: dict[str, Any] = {}
    if shown := request.tool_use.shown:
        found["tools"] = [function.shown() for function in shown]
    effort = request.reasoning_effort
    if effort is not None:
        found["reasoning_effort"] = effort
        if effort in _NO_THINKING:
            found.update(dict.fromkeys(_THINKING_SWITCHES, False))
    return {**found, **(request.chat_template_kwargs or {})}


def text_of(content: str | list[dict[str, Any]]) -> str:
    """A message's text; an assistant's message has nothing else."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def sampling_of(request: ChatRequest, defaults: Mapping[str, Any]) -> Sampling:
    return request.sampling(
        defaults,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        min_tokens=request.min_tokens,
        n=request.n,
        logprobs=min(request.top_logprobs or 1, 20) if request.logprobs else None,
        constraint=request.constraint,
    )


def template_message(index: int, message: Message, parts: list[MediaPart]) -> dict[str, Any]:
    """One message as chat templates expect it; its media are appended to `parts`."""
    if message.content is None and message.role not in ("assistant", "function"):
        raise GatewayError(
            "invalid_type",
            f"messages[{index}]: content must be a string or an array of parts",
            param=f"messages[{index}]",
        )
    if message.role == "tool" and message.tool_call_id is None:
        raise GatewayError(
            "missing_required_parameter",
            f"Invalid JSON data: messages[{index}]: missing field `tool_call_id`",
            param=f"messages[{index}].tool_call_id",
        )
    # chat templates know "system"; "developer" is OpenAI's newer word for it (SMG 1.13 renders media of both)
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    if isinstance(message.content, list):
        found["content"] = [
            template_part(part, message.role, parts, f"messages[{index}].content[{number}]")
            for number, part in enumerate(message.content)
        ]
    else:  # an assistant's null beside tool calls: many templates iterate over what is no string
        found["content"] = message.content or ""
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            found[name] = getattr(message, name)
    if message.tool_calls:
        found["tool_calls"] = [
            tool_call(call, f"messages[{index}].tool_calls[{number}]") for number, call in enumerate(message.tool_calls)
        ]
    return found


def tool_call(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A call in the history; templates want its arguments as an object, clients send them as text."""
    function = call.get("function")
    if not isinstance(function, dict):
        raise GatewayError("process_messages_failed", f"{place}: a tool call in the history has no function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise GatewayError(
                "process_messages_failed",
                f"{place}: Failed to parse tool call arguments as JSON: {arguments[:80]!r}. Error: {error}",
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}


def unsupported(kind: str, place: str, why: str = "") -> GatewayError:
    """`place` is the path of what is wrong; `why` is said when elsewhere, or made otherwise, the type would do."""
    return GatewayError("unsupported_content_part", _unsupported_text(kind, why), param=place)


def _wrong_member(kind: str, place: str, why: str) -> GatewayError:
    return unsupported(kind, place, f"{place} {why}")


def _unsupported_text(kind: str, why: str) -> str:
    """The peer's words, and what is wrong with a part whose type is known."""
    text = f'Unsupported chat content part type "{kind[:80]}" for gRPC backends'
    return f"{text} ({why.removeprefix('Invalid JSON data: ')})" if why else text


def template_part(part: Part, role: str, parts: list[MediaPart], place: str) -> dict[str, Any]:
    """`place` is the part's path in the body."""
    if part.type == "text":
        if part.text is None:
            raise _wrong_member(part.type, f"{place}.text", "is missing")
        return {"type": "text", "text": part.text}
    media = media_part(part, place)
    if role == "assistant":
        raise unsupported(part.type, place, no_media_of(role))
    parts.append(media)
    return {"type": media.modality.value}


def media_part(part: Part, place: str) -> MediaPart:
    if part.type == "input_audio":
        return _sound_part(part.input_audio, f"{place}.input_audio")
    modality = _URL_MODALITIES.get(part.type)
    if modality is None:
        raise unsupported(part.type, place, called_otherwise(part.type, _ELSEWHERE))
    given: MediaUrl | str | None = getattr(part, part.type)
    if given is None:
        raise _wrong_member(part.type, f"{place}.{part.type}", "is missing")
    if isinstance(given, str):
        return MediaPart(modality=modality, url=given.encode())
    url = raw_string(given.url)
    if url is None:
        raise _wrong_member(part.type, f"{place}.{part.type}.url", "must be a string")
    return MediaPart(modality=modality, url=url, hints=Hints(max_long_side=given.max_long_side_pixel, fps=given.fps))


def _sound_part(given: SoundData | None, place: str) -> MediaPart:
    """Base64, or the data URL some clients put there."""
    data = raw_string(given.data) if given is not None else None
    if data is None:
        raise _wrong_member("input_audio", f"{place}.data", "must be a string of base64")
    is_url = bytes(data[:5]).lower() == b"data:"
    return MediaPart(modality=Modality.AUDIO, url=data, is_bare_base64=not is_url)
