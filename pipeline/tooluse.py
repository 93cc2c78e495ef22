"""The functions a request offers, and what follows of them: what the template is shown, what the engine is held to,
how the output is read.  The same for every API.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engines.base import Constraint
from pipeline import parsers
from pipeline.errors import GatewayError
from pipeline.parsers.call_parser import CallParser
from pipeline.parsers.json_calls import JsonCalls, WholeArguments

_DEFINITIONS = ("$defs", "definitions")


class Function(msgspec.Struct, frozen=True):
    """`parameters`: a JSON schema; {} when the client gave none."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = {}
    strict: bool | None = None

    def shown(self) -> dict[str, Any]:
        """As chat templates expect it, keys in the order models were trained with."""
        found: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            found["description"] = self.description
        found["parameters"] = self.parameters
        if self.strict is not None:
            found["strict"] = self.strict
        return {"type": "function", "function": found}


class ToolUse(msgspec.Struct, frozen=True):
    """`shown`: what the template is given.  `callable`: what may be called.  `must_call`: the output is a list of
    calls; `named`: it is the arguments of that function.  Nothing is looked for when `callable` is empty.
    """

    shown: tuple[Function, ...] = ()
    callable: tuple[Function, ...] = ()
    must_call: bool = False
    named: str | None = None
    one_call: bool = False

    @property
    def constraint(self) -> Constraint | None:
        """What the engine is held to: SMG 1.13's schemas."""
        if self.named is not None:
            return schema_constraint(self._schemas[self.named] or {"type": "object"}, "tools")
        return schema_constraint(calls_schema(self.callable, self.one_call), "tools") if self.must_call else None

    @property
    def _schemas(self) -> dict[str, Mapping[str, Any]]:
        return {function.name: function.parameters for function in self.callable}

    def parser(self, call_format: str) -> CallParser | None:
        """For one output of a model that writes calls in that format; a held engine writes JSON."""
        if not self.callable:
            return None
        if self.named is not None:
            return WholeArguments(self.named)
        return JsonCalls(self._schemas) if self.must_call else parsers.call_parser(call_format, self._schemas)


NO_TOOLS = ToolUse()


def calls_schema(functions: Sequence[Function], one_call: bool = False) -> dict[str, Any]:
    """A list of at least one call.  Definitions that parameters refer to by `#/$defs/...` move to the schema's root;
    two of one name that differ are refused.
    """
    alternatives = []
    definitions: dict[str, dict[str, Any]] = {}
    for function in functions:
        parameters = dict(function.parameters)
        for word in _DEFINITIONS:
            moved = parameters.pop(word, None)
            for name, schema in moved.items() if isinstance(moved, dict) else ():
                if definitions.setdefault(word, {}).setdefault(name, schema) != schema:
                    raise GatewayError(
                        "invalid_value", f"tools: two functions define '{name[:80]}' differently", param="tools"
                    )
        call = {"name": {"type": "string", "enum": [function.name]}, "parameters": parameters}
        alternatives.append({"properties": call, "required": ["name", "parameters"]})
    items = {"type": "object", "anyOf": alternatives}
    found = {"type": "array", "minItems": 1, "items": items, **definitions}
    return {**found, "maxItems": 1} if one_call else found


def schema_constraint(schema: Any, param: str) -> Constraint:
    """A schema as engines read it: JSON, keys in the client's order."""
    try:
        return Constraint("json_schema", msgspec.json.encode(schema).decode())
    except RecursionError:
        raise GatewayError("invalid_value", f"{param}: the schema is nested too deeply", param=param) from None
