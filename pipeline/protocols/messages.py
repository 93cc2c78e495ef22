"""`POST /v1/messages`: Anthropic's messages to a MediaPlan.  Its answers are in messages_reply.py.

Fields, ranges and defaults: SMG 1.13's measured answers, as in chat.py.  Blocks become what chat templates know: a
`tool_result` is a message of its own with the role "tool", its pictures included, where it stands between the others.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engines.base import Constraint, Modality, Sampling
from pipeline.errors import GatewayError
from pipeline.plan import MediaPart, MediaPlan
from pipeline.protocols.chat_tools import FunctionForm, ToolForm, tool_use
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
from pipeline.tooluse import ToolUse, schema_constraint


class Source(msgspec.Struct, frozen=True):
    """Where a picture is.  `data` and `url` stay raw JSON: megabytes are copied once, into their span.  The bytes
    decide the format; `media_type` is only told on to a worker that processes the picture itself.
    """

    type: str
    media_type: Any = None
    data: RawText | UnsetType = UNSET
    url: RawText | UnsetType = UNSET


class Block(msgspec.Struct, frozen=True):
    """One content block; `type` decides which members are read."""

    type: str
    text: str | None = None
    source: Source | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    thinking: str | None = None


class Message(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Thinking(msgspec.Struct, frozen=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None


class Tool(msgspec.Struct, frozen=True):
    """A function; tools that Anthropic runs itself have no schema, and are nothing here."""

    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """What the text of the answer is held to."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    format: OutputFormat | None = None
    effort: str | None = None


class Prompt(msgspec.Struct, frozen=True, dict=True):
    """What a prompt is made of: all of a request that counting tokens needs.

    `thread`: a conversation the server is to keep, or has kept.
    """

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[Block] | None = None
    thinking: Thinking | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thread: dict[str, Any] | None = None

    @property
    def thinks(self) -> bool:
        """Whether reasoning is to be told apart from the answer."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @functools.cached_property
    def tool_use(self) -> ToolUse:
        """Raises GatewayError for tools and choices that make no sense."""
        forms = [
            ToolForm("function", FunctionForm(tool.name, tool.description, tool.input_schema))
            for tool in self.tools or ()
            if tool.input_schema is not None
        ]
        choice = self.tool_choice or ToolChoice()
        named = {"type": "function", "name": choice.name}
        chosen: Any = {"any": "required", "tool": named}.get(choice.type, choice.type)
        return tool_use(forms, chosen, parallel=not choice.disable_parallel_tool_use)


class MessagesRequest(Prompt, frozen=True, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=UINT32)]
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=UINT32)] | None = None
    stop_sequences: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=64)] | None = None
    output_format: OutputFormat | None = None  # its place in Anthropic's beta; SDKs of then still write it

    @functools.cached_property
    def constraint(self) -> Constraint | None:
        """What holds the output; calls that must be made come before a format of the answer."""
        config = self.output_config
        wanted = (config.format if config is not None else None) or self.output_format
        asked = None if wanted is None else schema_constraint(wanted.schema, "output_config.format.schema")
        return self.tool_use.constraint or asked


_ELSEWHERE = {"image_url": "image", "input_image": "image", "input_text": "text"}
_REQUEST = msgspec.json.Decoder(MessagesRequest)
_PROMPT = msgspec.json.Decoder(Prompt)


def read(body: bytes | bytearray) -> MessagesRequest:
    """The request; GatewayError for what does not parse or is out of range."""
    request = decode_body(_REQUEST, body)
    check_prompt(request)
    request.constraint  # noqa: B018  (raises)
    thinking = request.thinking
    if thinking is not None and thinking.budget_tokens is not None and thinking.budget_tokens >= request.max_tokens:
        raise GatewayError(
            "thinking_budget_exceeds_max_tokens",
            f"thinking.budget_tokens: {thinking.budget_tokens} must be less than max_tokens, {request.max_tokens}",
            param="thinking.budget_tokens",
        )
    return request


def read_prompt(body: bytes | bytearray) -> Prompt:
    """A body of which only the tokens are to be counted."""
    prompt = decode_body(_PROMPT, body)
    check_prompt(prompt)
    return prompt


def check_prompt(prompt: Prompt) -> None:
    if prompt.thread is not None:  # Anthropic's SDK then sends the whole conversation each time
        raise GatewayError(
            "thread_unsupported_request", "thread: conversations are not kept here, send all of it", param="thread"
        )
    prompt.tool_use  # noqa: B018  (raises)
    thinking = prompt.thinking
    if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is None:
        raise GatewayError(
            "missing_required_parameter",
            "Invalid JSON data: thinking: missing field `budget_tokens`",
            param="thinking.budget_tokens",
        )


def plan_of(request: MessagesRequest, defaults: Mapping[str, Any]) -> MediaPlan:
    """Messages for the template, media in prompt order, sampling.  `defaults`: the worker's sampling defaults.

    Raises `unsupported_content_part`, `missing_required_parameter`.
    """
    plan = prompt_plan(request)
    return msgspec.structs.replace(plan, sampling=sampling_of(request, defaults), stream=bool(request.stream))


def prompt_plan(prompt: Prompt) -> MediaPlan:
    """The plan of a prompt alone."""
    parts: list[MediaPart] = []
    messages: list[dict[str, Any]] = []
    if prompt.system:
        messages.append({"role": "system", "content": _texts("system", prompt.system)})
    for index, message in enumerate(prompt.messages):
        messages += template_messages(f"messages[{index}].content", message, parts)
    return MediaPlan(
        model=prompt.model,
        messages=messages,
        parts=tuple(parts),
        sampling=Sampling(),
        stream=False,
        template_variables=template_variables(prompt),
    )


def template_variables(prompt: Prompt) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if shown := prompt.tool_use.shown:
        found["tools"] = [function.shown() for function in shown]
    if prompt.thinking is not None:
        found["enable_thinking"] = prompt.thinks
    if prompt.output_config is not None and prompt.output_config.effort is not None:
        found["reasoning_effort"] = prompt.output_config.effort
    return found


def sampling_of(request: MessagesRequest, defaults: Mapping[str, Any]) -> Sampling:
    """The client's value, else the worker's, else SMG's for this API: a temperature of 1."""

    def chosen(name: str, otherwise: Any = None) -> Any:
        value = getattr(request, name)
        value = defaults.get(name) if value is None else value
        return otherwise if value is None else value

    return Sampling(
        temperature=chosen("temperature", 1.0),
        top_p=chosen("top_p"),
        top_k=chosen("top_k"),
        min_p=defaults.get("min_p"),
        repetition_penalty=defaults.get("repetition_penalty"),
        max_tokens=request.max_tokens,
        stop=tuple(request.stop_sequences or ()),
        constraint=request.constraint,
    )


def template_messages(place: str, message: Message, parts: list[MediaPart]) -> list[dict[str, Any]]:
    """One message as chat templates expect it, or several around its tool results; its media are appended to
    `parts`.
    """
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(place, message.content)]
    if message.role == "system":
        return [{"role": "system", "content": _texts(place, message.content)}]
    found: list[dict[str, Any]] = []
    said: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        here = f"{place}[{index}]"
        if block.type != "tool_result":
            said.append(_part(here, block, parts))
            continue
        if said:
            found.append({"role": "user", "content": said})
            said = []
        found.append(_tool_result(here, block, parts))
    return [*found, {"role": "user", "content": said}] if said or not found else found


def _assistant(place: str, blocks: Sequence[Block]) -> dict[str, Any]:
    texts, calls, thoughts = [], [], []
    for index, block in enumerate(blocks):
        here = f"{place}[{index}]"
        if block.type == "text":
            texts.append(_text(here, block))
        elif block.type == "tool_use":
            calls.append(_tool_use(here, block))
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":  # nobody but its maker can read that
            raise unsupported(here, block.type, no_media_of("assistant") if block.type == "image" else "")
    found: dict[str, Any] = {"role": "assistant", "content": texts or ""}
    if thoughts:
        found["reasoning_content"] = "".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


def _tool_use(place: str, block: Block) -> dict[str, Any]:
    if block.name is None:
        raise missing(f"{place}.name")
    arguments = {} if block.input is None else block.input
    return {"id": block.id or "", "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _tool_result(place: str, block: Block, parts: list[MediaPart]) -> dict[str, Any]:
    if block.tool_use_id is None:
        raise missing(f"{place}.tool_use_id")
    content: Any = block.content or ""
    if not isinstance(content, str):
        content = [_part(f"{place}.content[{index}]", inner, parts) for index, inner in enumerate(content)]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _part(place: str, block: Block, parts: list[MediaPart]) -> dict[str, Any]:
    if block.type == "text":
        return _text(place, block)
    if block.type != "image":
        raise unsupported(place, block.type, called_otherwise(block.type, _ELSEWHERE))
    parts.append(_picture(place, block.source))
    return {"type": "image"}


def _picture(place: str, source: Source | None) -> MediaPart:
    if source is None:
        raise missing(f"{place}.source")
    if source.type not in ("base64", "url"):
        raise unsupported(f"{place}.source", source.type)
    name = "data" if source.type == "base64" else "url"
    given = getattr(source, name)
    if given is UNSET:
        raise missing(f"{place}.source.{name}")
    text = raw_string(given)
    if text is None:
        where = f"{place}.source.{name}"
        raise GatewayError("invalid_type", f"Invalid JSON data: {where}: Expected `str`", param=where)
    return MediaPart(
        modality=Modality.IMAGE,
        url=text,
        is_bare_base64=source.type == "base64",
        media_type=source.media_type if isinstance(source.media_type, str) else "",
    )


def _texts(place: str, content: str | Sequence[Block]) -> Any:
    if isinstance(content, str):
        return content
    found = []
    for index, block in enumerate(content):
        if block.type != "text":
            raise unsupported(f"{place}[{index}]", block.type, no_media_of("system") if block.type == "image" else "")
        found.append(_text(f"{place}[{index}]", block))
    return found


def _text(place: str, block: Block) -> dict[str, Any]:
    if block.text is None:
        raise missing(f"{place}.text")
    return {"type": "text", "text": block.text}
