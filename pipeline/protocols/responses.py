"""`POST /v1/responses`: items to a MediaPlan.  Its answers are in responses_reply.py, what is kept of them in
responses_store.py.

Fields, ranges and codes: SMG 1.13's measured answers, as in chat.py.  What it drops in silence (files, pictures by id)
is refused here.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engines.base import Constraint, Modality, Sampling
from pipeline.errors import GatewayError
from pipeline.plan import MediaPart, MediaPlan
from pipeline.protocols.chat_tools import ChoiceField, FunctionForm, ToolForm, tool_use
from pipeline.protocols.constraints import response_constraint
from pipeline.protocols.parts import (
    UINT32,
    RawText,
    called_otherwise,
    decode_body,
    missing,
    no_media_of,
    raw_string,
    unsupported,
)
from pipeline.tooluse import ToolUse


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """One content part; `type` decides which members are read.  `image_url` stays raw JSON."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: RawText | UnsetType = UNSET
    file_id: Any = None
    detail: str | None = None
    annotations: list[Any] | None = None


class Item(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item of the input, or of an earlier output; `type` decides which members are read, none means a message."""

    type: str | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Any] | None = None


class Reasoning(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None


class TextSettings(msgspec.Struct, frozen=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ConversationName(msgspec.Struct, frozen=True):
    id: str


class ToolItem(msgspec.Struct, frozen=True):
    """A function; unlike in chat its members stand beside the type."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, dict=True):
    model: str
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=UINT32)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    text: TextSettings | None = None
    metadata: dict[str, Any] | None = None
    tools: list[ToolItem] | None = None
    tool_choice: ChoiceField = None
    parallel_tool_calls: bool | None = None
    user: str | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    background: bool | None = None
    conversation: str | ConversationName | None = None
    prompt: Any = None

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation

    @property
    def logprobs(self) -> int | None:
        """Rivals wanted for each token of the text, None for no log-probabilities at all."""
        wanted = self.top_logprobs or _LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None

    @property
    def items(self) -> list[Item]:
        if isinstance(self.input, str):
            return [Item(role="user", content=self.input)]
        return self.input

    @functools.cached_property
    def tool_use(self) -> ToolUse:
        """Raises GatewayError for tools and choices that make no sense."""
        for index, tool in enumerate(self.tools or ()):
            if tool.type == "function" and not tool.name:
                raise GatewayError(
                    "invalid_value",
                    f"tools[{index}]: a function's name must not be empty; here it stands beside the type",
                    param=f"tools[{index}]",
                )
        forms = [
            ToolForm(tool.type, FunctionForm(tool.name, tool.description, tool.parameters, tool.strict))
            for tool in self.tools or ()
        ]
        return tool_use(forms, self.tool_choice, parallel=self.parallel_tool_calls)

    @functools.cached_property
    def constraint(self) -> Constraint | None:
        """What holds the output; calls that must be made come before a format of the answer."""
        return self.tool_use.constraint or text_constraint(self.text)


_DECODER = msgspec.json.Decoder(ResponsesRequest)
_ELSEWHERE = {"image_url": "input_image", "image": "input_image"}
_NO_THINKING = ("none", "minimal")
_LOGPROBS = "message.output_text.logprobs"


def read(body: bytes | bytearray) -> ResponsesRequest:
    """The request; GatewayError for what does not parse, is out of range or belongs to a later version."""
    request = decode_body(_DECODER, body)
    if not request.input and not isinstance(request.input, str):
        raise GatewayError("input_items_empty", "input: Input items cannot be empty", param="input")
    if request.prompt:
        raise GatewayError("unsupported_parameter", "'prompt' is not available in this version", param="prompt")
    if request.logprobs is not None and request.tool_use.callable:
        raise GatewayError("unsupported_parameter", "log-probabilities are not told beside tools", param="top_logprobs")
    if request.background and request.stream:
        raise GatewayError(
            "unsupported_parameter", "'background': a stream ends with its request here", param="background"
        )
    if request.previous_response_id is not None and request.conversation is not None:
        raise GatewayError(
            "mutually_exclusive_parameters",
            "Ensure you are only providing one of: 'previous_response_id' or 'conversation'.",
            param="conversation",
        )
    request.constraint  # noqa: B018  (raises)
    return request


def text_constraint(settings: TextSettings | None) -> Constraint | None:
    """`text.format` is chat's `response_format`, which has the schema's members one level deeper."""
    given = settings.format if settings is not None else None
    if given is not None and given.get("type") == "json_schema":
        given = {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
    try:
        return response_constraint(given)
    except GatewayError as error:
        raise GatewayError(error.code, _renamed(error.message), param=_renamed(error.param or "")) from None


def _renamed(text: str) -> str:
    return text.replace("response_format.json_schema", "text.format").replace("response_format", "text.format")


def plan_of(request: ResponsesRequest, history: Sequence[Item], defaults: Mapping[str, Any]) -> MediaPlan:
    """Messages for the template, media in prompt order, sampling.  `history`: the items of earlier responses.
    `defaults`: the worker's sampling defaults.

    Raises `unsupported_content_part`, `convert_request_failed`, `missing_required_parameter`,
    `process_messages_failed`.
    """
    turns = Turns()
    if request.instructions:
        turns.add({"role": "system", "content": request.instructions})
    for index, item in enumerate(history):
        turns.take(f"previous_response_id: item {index}", item)
    for index, item in enumerate(request.items):
        turns.take(f"input[{index}]", item)
    return MediaPlan(
        model=request.model,
        messages=turns.whole(),
        parts=tuple(turns.parts),
        sampling=sampling_of(request, defaults),
        stream=bool(request.stream),
        template_variables=template_variables(request),
    )


def template_variables(request: ResponsesRequest) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if shown := request.tool_use.shown:
        found["tools"] = [function.shown() for function in shown]
    effort = request.reasoning.effort if request.reasoning is not None else None
    if effort is not None:
        found["reasoning_effort"] = effort
        if effort in _NO_THINKING:
            found |= {"enable_thinking": False, "thinking": False}
    return found


def sampling_of(request: ResponsesRequest, defaults: Mapping[str, Any]) -> Sampling:
    """The client's value, else the worker's, else SMG's for this API: a temperature of 1."""

    def chosen(name: str) -> Any:
        value = getattr(request, name)
        return defaults.get(name) if value is None else value

    temperature = chosen("temperature")
    return Sampling(
        temperature=1.0 if temperature is None else temperature,
        top_p=chosen("top_p"),
        top_k=defaults.get("top_k"),
        min_p=defaults.get("min_p"),
        repetition_penalty=defaults.get("repetition_penalty"),
        max_tokens=request.max_output_tokens,
        logprobs=None if request.logprobs is None else max(request.logprobs, 1),
        constraint=request.constraint,
    )


def _no_picture(place: str, part: Part) -> GatewayError:
    """An `input_image` without a URL that can be read."""
    if part.file_id is not None:
        return unsupported(
            f"{place}.file_id", part.type, "files are not kept here: give image_url, an http(s) or data URL"
        )
    why = "is missing" if part.image_url is UNSET else "must be a string, an http(s) or data URL"
    return unsupported(f"{place}.image_url", part.type, f"{place}.image_url {why}")


class Turns:
    """Items as the messages chat templates expect: reasoning and calls belong to the assistant's turn they stand in."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.parts: list[MediaPart] = []

    def add(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    def whole(self) -> list[dict[str, Any]]:
        """All messages; templates want a content of each."""
        return [message if "content" in message else {**message, "content": ""} for message in self.messages]

    def take(self, place: str, item: Item) -> None:
        match item.type:
            case None | "message":
                self._message(place, item)
            case "reasoning":
                self._reasoning(item)
            case "function_call":
                self._call(place, item)
            case "function_call_output":
                self._result(place, item)
            case "input_text" | "input_image" | "output_text" | "text":
                raise unsupported(place, item.type, "it belongs into the `content` of a message")
            case _:
                raise unsupported(place, item.type)

    def _message(self, place: str, item: Item) -> None:
        if item.role is None:
            raise missing(f"{place}.role")
        if item.content is None:
            raise missing(f"{place}.content")
        role = "system" if item.role == "developer" else item.role
        content: Any = item.content
        if not isinstance(content, str):
            content = [self._part(f"{place}.content[{at}]", part, role) for at, part in enumerate(content)]
        last = self._assistant() if role == "assistant" else None
        if last is not None and "content" not in last:
            last["content"] = content
        else:
            self.add({"role": role, "content": content})

    def _part(self, place: str, part: Part, role: str) -> dict[str, Any]:
        if part.type in ("input_text", "output_text", "text"):
            if part.text is None:
                raise missing(f"{place}.text")
            return {"type": "text", "text": part.text}
        if part.type == "refusal" and role == "assistant":
            return {"type": "text", "text": part.refusal or ""}
        if part.type != "input_image":
            raise unsupported(place, part.type, called_otherwise(part.type, _ELSEWHERE))
        if role == "assistant":
            raise unsupported(place, part.type, no_media_of(role))
        url = raw_string(part.image_url)
        if url is None:
            raise _no_picture(place, part)
        self.parts.append(MediaPart(modality=Modality.IMAGE, url=url))
        return {"type": "image"}

    def _reasoning(self, item: Item) -> None:
        thoughts = item.content if isinstance(item.content, list) else []
        text = "".join(part.text or "" for part in thoughts)
        if text:
            turn = self._open_turn(lambda turn: "content" not in turn and "tool_calls" not in turn)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def _call(self, place: str, item: Item) -> None:
        if item.name is None:
            raise missing(f"{place}.name")
        try:
            arguments = msgspec.json.decode(item.arguments or "{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise GatewayError(
                "process_messages_failed", f"{place}: Failed to parse tool call arguments as JSON: {error}"
            ) from None
        function = {"name": item.name, "arguments": arguments}
        turn = self._open_turn(lambda turn: True)
        turn.setdefault("tool_calls", []).append({"id": item.call_id or "", "type": "function", "function": function})

    def _result(self, place: str, item: Item) -> None:
        if item.call_id is None:
            raise missing(f"{place}.call_id")
        output: Any = item.output or ""
        if not isinstance(output, str):
            if any(part.type not in ("input_text", "output_text", "text") for part in output):
                raise GatewayError(
                    "convert_request_failed",
                    f"Failed to convert request: {place}: media in a function's output are not supported",
                    param=f"{place}.output",
                )
            output = [self._part(f"{place}.output[{at}]", part, "tool") for at, part in enumerate(output)]
        self.add({"role": "tool", "tool_call_id": item.call_id, "content": output})

    def _assistant(self) -> dict[str, Any] | None:
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last["role"] == "assistant" else None

    def _open_turn(self, fits: Any) -> dict[str, Any]:
        """The assistant's turn that what comes next belongs to; a new one when there is none."""
        last = self._assistant()
        if last is None or not fits(last):
            last = {"role": "assistant"}
            self.add(last)
        return last
