"""`/openapi.json`: the routes as OpenAPI 3.1, made once from the routes themselves and the types of their bodies.

What a route is (path, key, place, error bodies) comes from `pipeline.serve.Route`, the rest from its Operation.  Codes
become statuses by the table of `pipeline.errors`.  Every GET answers HEAD too, which is not listed.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from pipeline.config import Config
from pipeline.errors import ENGINE_CODES, ENGINE_STATUS, STATUS_OF_CODE
from pipeline.protocols.described.errors import ERROR_TYPES
from pipeline.protocols.described.models import DOCUMENT
from pipeline.protocols.described.operation import Operation, Parameter
from pipeline.protocols.parts import as_json
from pipeline.serve import Route
from pipeline.ticket import Ticket
from pipeline.versions import VERSION

PATH = "/openapi.json"

_REFS = "#/components/schemas/{name}"
_NAMED = re.compile(r"{(\w+)}")
_QUALIFIED = re.compile(r"(?:\w+\.)*(\w+)\.(\w+)")
_FROM_ENGINE = {status for status, _ in ENGINE_STATUS.values()}
# Codes whose status is not the table's alone: an engine's decides; a body that does not come is the client's delay.
_STATUSES: Mapping[str, set[int]] = {
    **dict.fromkeys(sorted(ENGINE_CODES), _FROM_ENGINE),
    "request_timeout": {408, 504},
}
_ANY_ROUTE = ("expectation_failed", "internal_error", "shutting_down")
_ROUTE_WITH_BODY = ("malformed_request",)
_GUARDED_ROUTE = ("invalid_api_key",)
_ADMITTED_ROUTE = ("admission_queue_full", "admission_queue_timeout")
_TEXT = {"type": "string"}
_HEADERS = {
    "x-request-id": "The request's id, the client's own if it sent one.",
    "request-id": "The same, where Anthropic's SDKs look for it.",
    "X-SMG-Error-Code": "The error's code.",
    "WWW-Authenticate": "How to send a key.",
    "Retry-After": "Seconds to wait, where waiting helps.",
    "Server-Timing": "Milliseconds by stage.",
}
_HEADERS_OF_STATUS = {401: ("WWW-Authenticate",), 429: ("Retry-After",), 503: ("Retry-After",)}


def document_route(routes: Sequence[Route], config: Config) -> Route:
    """The route of the document, which holds `routes` and itself."""

    async def answer(request: web.Request, ticket: Ticket) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    route = Route("GET", PATH, answer, guarded=False, about=DOCUMENT)
    body = as_json(document([*routes, route], config))
    return route


def document(routes: Sequence[Route], config: Config) -> dict[str, Any]:
    """The whole document, of routes under this configuration: with a key, and `Server-Timing`, if it has them."""
    schemas = Schemas(kind for route in routes for kind in _kinds(route))
    paths: dict[str, dict[str, Any]] = {}
    for route in sorted(routes, key=lambda one: one.path):
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas, config)
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "mediagate",
            "version": VERSION,
            "description": "The multimodal front end of an LLM serving fleet. Unknown members of a request are "
            "ignored; every GET answers HEAD too.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "headers": {name: {"description": text, "schema": _TEXT} for name, text in _HEADERS.items()},
        },
    }
    if config.server.api_key is not None:
        found["components"]["securitySchemes"] = _security_schemes(routes)
    return found


class Schemas:
    """JSON schemas of types; what has a name is a component, under a short name where that is unique."""

    def __init__(self, kinds: Iterable[Any]) -> None:
        distinct = list({repr(kind): kind for kind in kinds}.values())
        schemas, components = msgspec.json.schema_components(distinct, ref_template=_REFS)
        self._of = {repr(kind): _renamed(schema) for kind, schema in zip(distinct, schemas, strict=True)}
        self.components = {_short(name): _renamed(schema) for name, schema in sorted(components.items())}

    def of(self, *kinds: Any) -> dict[str, Any]:
        """The schema of one type, or of any of several."""
        found = [self._of[repr(kind)] for kind in dict.fromkeys(kinds)]
        return found[0] if len(found) == 1 else {"anyOf": found}


def _kinds(route: Route) -> Iterator[Any]:
    about = route.about
    yield ERROR_TYPES[route.error_body]
    yield from (kind for kind in (about.takes, about.gives) if kind is not None)
    yield from about.events
    yield from about.others.values()
    yield from (parameter.kind for parameter in about.parameters)


def _short(name: str) -> str:
    """Types of the same name are told apart by their modules: `pipeline.protocols.chat.Part` is `ChatPart`."""
    found = _QUALIFIED.fullmatch(name)
    return name if found is None else found[1].capitalize() + found[2]


def _renamed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_renamed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    prefix = _REFS.format(name="")
    return {
        name: prefix + _short(value.removeprefix(prefix)) if name == "$ref" else _renamed(value)
        for name, value in schema.items()
    }


def _operation(route: Route, schemas: Schemas, config: Config) -> dict[str, Any]:
    about = route.about
    found: dict[str, Any] = {
        "tags": [about.tag],
        "summary": about.summary,
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "responses": dict(sorted(_responses(route, schemas, config).items())),
    }
    if about.text:
        found["description"] = about.text
    if parameters := _parameters(route, schemas):
        found["parameters"] = parameters
    if about.takes is not None:
        content = {"application/json": {"schema": schemas.of(about.takes)}}
        found["requestBody"] = {"required": True, "content": content}
    if _asks_for_key(route, config):
        found["security"] = [{name: []} for name in _keys(route)]
    return found


def _parameters(route: Route, schemas: Schemas) -> list[dict[str, Any]]:
    path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _NAMED.findall(route.path)
    ]
    return path + [_parameter(one, schemas) for one in route.about.parameters]


def _parameter(one: Parameter, schemas: Schemas) -> dict[str, Any]:
    return {"name": one.name, "in": one.place, "description": one.text, "schema": schemas.of(one.kind)}


def _responses(route: Route, schemas: Schemas, config: Config) -> dict[str, Any]:
    about, codes = route.about, _codes_by_status(route, config)
    found = {
        str(status): _refusal(status, codes.get(status, []), about.others.get(status), route, schemas)
        for status in {*codes, *about.others}
    }
    if about.gives is not None:
        found[str(about.status)] = _success(route, schemas, config)
    return found


def _success(route: Route, schemas: Schemas, config: Config) -> dict[str, Any]:
    about = route.about
    content = {about.media_type: {"schema": schemas.of(about.gives)}}
    if about.events:
        content["text/event-stream"] = {"schema": _event(about, schemas)}
    headers: dict[str, Any] = {name: _header(name) for name in _id_headers(route)}
    headers |= {name: {"description": text, "schema": _TEXT} for name, text in about.headers.items()}
    if config.server.server_timing and about.events:
        headers["Server-Timing"] = _header("Server-Timing")
    return {"description": about.summary, "headers": headers, "content": content}


def _event(about: Operation, schemas: Schemas) -> dict[str, Any]:
    """One event of a stream; before 3.2 the schema of such a body is commonly read as an event's."""
    data = {**_TEXT, "contentMediaType": "application/json", "contentSchema": schemas.of(*about.events)}
    return {
        "type": "object",
        "description": "With `stream`: one server-sent event.",
        "properties": {
            "event": _TEXT,
            "data": data if about.last is None else {"anyOf": [{"const": about.last}, data]},
        },
        "required": ["data"],
    }


def _refusal(status: int, codes: Sequence[str], own: Any, route: Route, schemas: Schemas) -> dict[str, Any]:
    """An answer that is no success: of type `own`, for `codes` the route's error body."""
    names = [*_id_headers(route), *(["X-SMG-Error-Code"] if codes else []), *_HEADERS_OF_STATUS.get(status, ())]
    kinds = [kind for kind in (own, ERROR_TYPES[route.error_body] if codes else None) if kind not in (None, str)]
    content: dict[str, Any] = {"text/plain": {"schema": _TEXT}} if own is str else {}
    if kinds:
        content["application/json"] = {"schema": schemas.of(*kinds)}
    return {
        "description": ", ".join(f"`{code}`" for code in codes) or "What the summary asks is not so.",
        "headers": {name: _header(name) for name in names},
        "content": content,
    }


def _id_headers(route: Route) -> list[str]:
    return ["x-request-id"] if route.id_header is None else ["x-request-id", route.id_header]


def _header(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/headers/{name}"}


def _codes_by_status(route: Route, config: Config) -> dict[int, list[str]]:
    codes = [*route.about.refuses, *_ANY_ROUTE]
    codes += _GUARDED_ROUTE if _asks_for_key(route, config) else ()
    codes += _ROUTE_WITH_BODY if route.about.takes is not None else ()
    codes += _ADMITTED_ROUTE if route.admitted else ()
    found: dict[int, list[str]] = {}
    for code in codes:
        for status in _STATUSES.get(code, {STATUS_OF_CODE[code]}):
            found.setdefault(status, []).append(code)
    return found


def _asks_for_key(route: Route, config: Config) -> bool:
    return route.guarded and config.server.api_key is not None


def _keys(route: Route) -> list[str]:
    return ["bearer"] if route.key_header is None else ["bearer", route.key_header]


def _security_schemes(routes: Sequence[Route]) -> dict[str, Any]:
    headers = {route.key_header for route in routes if route.key_header is not None}
    return {
        "bearer": {"type": "http", "scheme": "bearer"},
        **{name: {"type": "apiKey", "in": "header", "name": name} for name in sorted(headers)},
    }
