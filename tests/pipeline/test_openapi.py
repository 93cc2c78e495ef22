"""`/openapi.json`: every route is in it, its schemas are JSON Schema, and what a configuration changes it changes."""

from typing import Any
from unittest.mock import MagicMock

import jsonschema_rs
import pytest
from aiohttp import web

from engines.worker import WorkerSpec
from pipeline.config import Config, Server
from pipeline.errors import STATUS_OF_CODE
from pipeline.openapi import _codes_by_status, document
from pipeline.protocols import described
from pipeline.routes import all_routes
from pipeline.serve import Doorkeeper, Route, application

LOCKED = Config(server=Server(api_key="k", server_timing=True))


def routes(config: Config) -> list[Route]:
    stations = MagicMock()
    stations.config = config
    return all_routes(stations, MagicMock(), MagicMock(), MagicMock())


@pytest.fixture(scope="module")
def opened() -> dict[str, Any]:
    return document(routes(Config()), Config())


@pytest.fixture(scope="module")
def locked() -> dict[str, Any]:
    return document(routes(LOCKED), LOCKED)


def operations(whole: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(verb.upper(), path): one for path, verbs in whole["paths"].items() for verb, one in verbs.items()}


def test_every_route_is_told_and_no_other(opened: dict[str, Any]) -> None:
    config = Config()
    app: web.Application = application(config, Doorkeeper(config, MagicMock(), MagicMock()), routes(config))
    served = {(one.method, one.resource.canonical) for one in app.router.routes() if one.resource is not None}
    told = {key for verb, path in operations(opened) for key in [(verb, path)]}
    heads = {("HEAD", path) for verb, path in told if verb == "GET"}
    patterns = {route.pattern: route.path for route in routes(config)}
    assert {(verb, patterns.get(path, path)) for verb, path in served} == told | heads


def test_operation_ids_are_unique(opened: dict[str, Any]) -> None:
    ids = [one["operationId"] for one in operations(opened).values()]
    assert len(ids) == len(set(ids)) and all(one.isidentifier() for one in ids)


def test_schemas_are_schemas(opened: dict[str, Any]) -> None:
    for name, schema in opened["components"]["schemas"].items():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
        assert "." not in name


def test_every_reference_leads_somewhere(opened: dict[str, Any]) -> None:
    def refs(value: Any) -> list[str]:
        if isinstance(value, list):
            return [ref for one in value for ref in refs(one)]
        if not isinstance(value, dict):
            return []
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [ref for one in value.values() for ref in refs(one)]

    found = refs(opened)
    assert len(found) > 100
    for ref in found:
        _, components, kind, name = ref.split("/")
        assert components == "components" and name in opened["components"][kind], ref


def test_a_media_url_is_a_string(opened: dict[str, Any]) -> None:
    """In the code it is raw JSON."""
    schemas = opened["components"]["schemas"]
    assert schemas["MediaUrl"]["properties"]["url"] == {"type": "string"}
    assert schemas["Source"]["properties"]["data"] == {"type": "string"} and schemas["Source"]["required"] == ["type"]


def test_types_of_one_name_are_told_apart(opened: dict[str, Any]) -> None:
    assert {"ChatPart", "ResponsesPart", "ChatMessage", "MessagesMessage"} <= opened["components"]["schemas"].keys()


def test_refusals_are_those_of_the_table(opened: dict[str, Any]) -> None:
    chat = opened["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"400", "404", "408", "413", "429", "500", "501", "502", "503", "504"} <= chat.keys()
    assert "`multimodal_payload_too_large`" in chat["413"]["description"]
    assert chat["400"]["content"]["application/json"]["schema"]["$ref"].endswith("/Error")
    messages = opened["paths"]["/v1/messages"]["post"]["responses"]
    assert messages["400"]["content"]["application/json"]["schema"]["$ref"].endswith("/MessagesError")
    assert "Retry-After" in chat["429"]["headers"] and "Retry-After" not in chat["400"]["headers"]


def test_every_code_is_told_by_some_route() -> None:
    """A new code belongs to the `refuses` of the routes that answer with it."""
    told = {code for route in routes(LOCKED) for codes in _codes_by_status(route, LOCKED).values() for code in codes}
    assert STATUS_OF_CODE.keys() - told == {"unknown_url", "method_not_allowed"}  # of what is no route
    assert told <= STATUS_OF_CODE.keys()


def test_a_key_is_told_where_one_is_asked_for(opened: dict[str, Any], locked: dict[str, Any]) -> None:
    assert "securitySchemes" not in opened["components"]
    assert not any("security" in one for one in operations(opened).values())
    assert "401" not in opened["paths"]["/workers"]["get"]["responses"]
    assert locked["components"]["securitySchemes"]["x-api-key"] == {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
    }
    told = {key: one.get("security") for key, one in operations(locked).items()}
    assert told["POST", "/v1/messages"] == [{"bearer": []}, {"x-api-key": []}]
    assert told["GET", "/workers"] == [{"bearer": []}] and told["GET", "/health"] is None
    assert "Server-Timing" in locked["paths"]["/v1/messages"]["post"]["responses"]["200"]["headers"]


def test_a_route_cannot_be_declared_without_what_is_said_of_it() -> None:
    with pytest.raises(TypeError, match="about"):
        Route("GET", "/x", MagicMock())  # type: ignore[call-arg]


def test_bodies_are_the_types_they_are_decoded_with() -> None:
    assert described.workers.ADD_WORKER.takes is WorkerSpec
