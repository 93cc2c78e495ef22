"""`tools` and `tool_choice` of a chat request in all their forms, and their older spellings `functions` and
`function_call`, as a ToolUse.

Codes are SMG 1.13's.  Where a choice names functions, all of the request's are shown to the model, except that
`allowed_tools` shows those it allows: nothing else would keep the model to them.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pipeline.errors import GatewayError
from pipeline.protocols.parts import converted
from pipeline.tooluse import NO_TOOLS, Function, ToolUse


class FunctionForm(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolForm(msgspec.Struct, frozen=True):
    type: str
    function: FunctionForm | None = None


class FunctionName(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True):
    """A function by name; the name may stand beside the type, as in newer APIs."""

    type: Literal["function"] = "function"
    function: FunctionName | None = None
    name: str | None = None

    @property
    def called(self) -> str | None:
        return self.function.name if self.function is not None else self.name


class AllowedTools(msgspec.Struct, frozen=True):
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool] = []


class ChoiceForm(msgspec.Struct, frozen=True):
    """The object forms; `allowed_tools` has its members inside or beside the type."""

    type: Literal["function", "allowed_tools"] = "function"
    function: FunctionName | None = None
    name: str | None = None
    allowed_tools: AllowedTools | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool] = []


Choice = Literal["auto", "none", "required"] | ChoiceForm

ChoiceField = Annotated[
    Any,
    Meta(
        description="auto, none, required, or an object that names a function or `allowed_tools`",
        extra_json_schema={"anyOf": [{"enum": ["auto", "none", "required", None]}, {"type": "object"}]},
    ),
]
"""`tool_choice` as it comes: what is wrong with it is told in words of its own."""


def tool_use(
    tools: Sequence[ToolForm] | None,
    choice: Any,
    *,
    functions: Sequence[FunctionForm] | None = None,
    function_call: Any = None,
    parallel: bool | None = None,
) -> ToolUse:
    """Raises `tool_choice_requires_tools`, `tool_choice_function_not_found` and what is wrong with a form."""
    forms = [_form(index, tool) for index, tool in enumerate(tools)] if tools else list(functions or ())
    where = "functions" if forms and not tools else "tools"
    offered = tuple(_function(f"{where}[{index}]", form) for index, form in enumerate(forms))
    param = "tool_choice" if choice is not None or function_call is None else "function_call"
    chosen = _choice(choice if choice is not None else function_call, param)
    if not offered:
        if chosen not in (None, "auto", "none"):
            raise GatewayError(
                "tool_choice_requires_tools",
                f"Invalid value for '{param}': '{param}' is only allowed when 'tools' are specified.",
                param=param,
            )
        return NO_TOOLS
    one_call = parallel is False
    match chosen:
        case "none":
            return NO_TOOLS
        case "required":
            return ToolUse(offered, offered, must_call=True, one_call=one_call)
        case ChoiceForm(type="allowed_tools"):
            allowed = chosen.allowed_tools or AllowedTools(chosen.mode, chosen.tools)
            found = tuple(_named(offered, one.called, param) for one in allowed.tools)
            return ToolUse(found, found, must_call=allowed.mode == "required" and bool(found), one_call=one_call)
        case ChoiceForm():
            name = chosen.function.name if chosen.function is not None else chosen.name
            return ToolUse(offered, offered, named=_named(offered, name, param).name, one_call=one_call)
    return ToolUse(offered, offered, one_call=one_call)


def _form(index: int, tool: ToolForm) -> FunctionForm:
    if tool.type != "function":
        raise GatewayError(
            "unsupported_parameter",
            f"tools[{index}].type: only functions can be called, not {tool.type[:80]!r}",
            param=f"tools[{index}].type",
        )
    if tool.function is None:
        raise GatewayError(
            "missing_required_parameter",
            f"Invalid JSON data: tools[{index}]: missing field `function`",
            param=f"tools[{index}].function",
        )
    return tool.function


def _function(where: str, form: FunctionForm) -> Function:
    if not form.name:
        raise GatewayError("invalid_value", f"{where}: a function's name must not be empty", param=where)
    return Function(form.name, form.description, form.parameters or {}, form.strict)


def _choice(value: Any, param: str) -> Any:
    """A word or a ChoiceForm; `{"name": ...}` of `function_call` is one too."""
    if value is None or value in ("auto", "none", "required"):
        return value
    if isinstance(value, str):
        raise GatewayError(
            "invalid_value", f"Invalid value for '{param}': {value[:80]!r} is not auto, none or required", param=param
        )
    return converted(value, ChoiceForm, param)


def _named(offered: Sequence[Function], name: str | None, param: str) -> Function:
    for function in offered:
        if function.name == name:
            return function
    if name is None:
        raise GatewayError(
            "missing_required_parameter", f"Invalid JSON data: {param}: missing field `function`", param=param
        )
    raise GatewayError(
        "tool_choice_function_not_found",
        f"Invalid value for '{param}': function '{name[:80]}' not found in 'tools'.",
        param=param,
    )
