"""What a request holds the engine's output to: `response_format`, `regex`, `ebnf`.  The gateway does not check the
output; the engine cannot write anything else.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from engines.base import Constraint
from pipeline.errors import GatewayError
from pipeline.tooluse import schema_constraint

FormatField = Annotated[
    Any,
    Meta(
        description="text, json_object, or json_schema with a schema of that name",
        extra_json_schema={
            "type": ["object", "null"],
            "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
            "required": ["type"],
        },
    ),
]
"""`response_format` as it comes: what is wrong with it is told in words of its own."""


def constraint_of(response_format: Any, regex: str | None, ebnf: str | None) -> Constraint | None:
    """At most one of the three may say something; a `text` format says nothing."""
    return one_constraint(
        {
            "response_format": response_constraint(response_format),
            "regex": Constraint("regex", regex) if regex else None,
            "ebnf": Constraint("grammar", ebnf) if ebnf else None,
        }
    )


def one_constraint(given: Mapping[str, Constraint | None]) -> Constraint | None:
    """The one that says something, by the name of its field; several are refused."""
    found = {name: one for name, one in given.items() if one is not None}
    if len(found) > 1:
        names = " and ".join(f"'{name}'" for name in found)
        raise GatewayError("invalid_value", f"only one of {names} can hold the output", param=list(found)[-1])
    return next(iter(found.values()), None)


def response_constraint(value: Any) -> Constraint | None:
    """The schema of a `response_format`; any object for `json_object`."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json_schema", '{"type":"object"}')
    if kind != "json_schema":
        raise GatewayError(
            "invalid_value",
            "response_format.type must be text, json_object or json_schema",
            param="response_format.type",
        )
    described = _member(value, "json_schema", "response_format")
    if not isinstance(described, dict):
        raise GatewayError(
            "invalid_type",
            "Invalid JSON data: response_format.json_schema: must be an object",
            param="response_format.json_schema",
        )
    name = _member(described, "name", "response_format.json_schema")
    if not isinstance(name, str) or not name:
        raise GatewayError(
            "invalid_value",
            "response_format.json_schema.name: a schema's name must not be empty",
            param="response_format.json_schema.name",
        )
    schema = _member(described, "schema", "response_format.json_schema")
    if not isinstance(schema, dict | bool):
        raise GatewayError(
            "invalid_type",
            "Invalid JSON data: response_format.json_schema.schema: must be a JSON schema",
            param="response_format.json_schema.schema",
        )
    return schema_constraint(schema, "response_format.json_schema.schema")


def _member(value: dict[str, Any], name: str, where: str) -> Any:
    if value.get(name) is None:
        raise GatewayError(
            "missing_required_parameter",
            f"Invalid JSON data: {where}: missing field `{name}`",
            param=f"{where}.{name}",
        )
    return value[name]
