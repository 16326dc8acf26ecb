"""An OpenAPI document is untrusted: it cannot move requests or credentials, and a model cannot go beyond it."""

import json
import re
import time
from typing import Any

import httpx2
import pytest
from pydantic import create_model

from toolbox import ToolExecutionRequest
from toolbox.errors import IllegalConfigurationError, RestClientError, ToolArgumentsError
from toolbox.openapi import tools_from_openapi
from toolbox.schemas import INLINED_LIMIT, schema_of

pytestmark = pytest.mark.anyio


def document(
    operation: dict[str, Any] | None = None, path: str = "/x", verb: str = "get", **more: Any
) -> dict[str, Any]:
    """A document with one operation, whose id is `op`."""
    paths = {path: {verb: {"operationId": "op", **(operation or {})}}}
    return {"openapi": "3.1.0", "info": {"title": "x", "version": "1"}, "paths": paths, **more}


def query(schema: dict[str, Any], name: str = "q", **more: Any) -> dict[str, Any]:
    return {"parameters": [{"name": name, "in": "query", "schema": schema, **more}]}


async def call(tools: Any, **arguments: Any) -> object:
    [executor] = tools.values()
    return await executor(ToolExecutionRequest("1", "op", json.dumps(arguments)), None)


# --- where requests go


@pytest.mark.parametrize(
    "path",
    [
        "@evil.example/x",
        ":1@evil.example/x",
        ".evil.example/x",
        "x",
        "//evil.example/x",
        "http://evil.example/x",
        "/../../admin",
        "/a/../../admin",
        "/a/..",
        "/./a",
        "/%2e%2e/admin",
        "/%2E./admin",
        "/%252e%252e/admin",
        "/a%2f..%2f..%2fadmin",
        "/..;a=b/admin",
        "/a\\..\\admin",
        "\\\\evil.example",
        "/a?admin=1",
        "/a#b",
        "/a b",
        "/a\r\nHost: evil.example",
        "/a\u0000",
    ],
)
def test_a_path_that_could_lead_elsewhere_is_refused(path) -> None:
    with pytest.raises(IllegalConfigurationError, match="invalid path"):
        tools_from_openapi(document(path=path), "https://shop.example/api", bearer_token="t")


def test_all_invalid_paths_are_reported_at_once_and_others_can_still_be_chosen() -> None:
    bad = document(path="/a/../b")
    bad["paths"]["@evil"] = {"get": {"operationId": "evil"}}
    bad["paths"]["/{id}"] = {"get": {"operationId": "open"}}
    bad["paths"]["/good"] = {"get": {"operationId": "good"}}

    with pytest.raises(IllegalConfigurationError) as caught:
        tools_from_openapi(bad, "https://shop.example")
    assert len(caught.value.problems) == 3

    assert [each.name for each in tools_from_openapi(bad, "https://shop.example", include=["good"])] == ["good"]


@pytest.mark.parametrize(
    "settings",
    [
        {"bearer_token": "t0ken"},
        {"username": "ann"},
        {"password": "pa55"},
        {"api_key": "k3y"},
        {"headers": {"X-Tenant": "acme"}},
        {"auth": httpx2.BasicAuth("ann", "pa55")},
        {"propagate_headers": "authorization"},
    ],
)
async def test_credentials_go_to_a_server_only_when_base_url_names_it(server, settings) -> None:
    for servers in ([{"url": server.url}], [{"url": "/"}]):
        server.answer(document(servers=servers))
        for source in (document(servers=servers), f"{server.url}/openapi.json"):
            if isinstance(source, dict) and servers[0]["url"] == "/":
                continue
            with pytest.raises(IllegalConfigurationError, match="base_url="):
                tools_from_openapi(source, **settings)

    server.answer({})
    tools = tools_from_openapi(document(servers=[{"url": "http://evil.example"}]), server.url, **settings)
    await call(tools)
    assert server.last.path == "/x"


async def test_without_credentials_the_documents_server_is_used(server) -> None:
    await call(tools_from_openapi(document(servers=[{"url": f"{server.url}/api"}]), timeout=5))

    assert server.last.path == "/api/x"
    assert server.last.header("Authorization") is None


@pytest.mark.parametrize("value", ["../admin", "8/refunds", "8\\refunds", "..", "."])
async def test_a_path_argument_stays_one_segment(server, value) -> None:
    parameters = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    tools = tools_from_openapi(document({"parameters": parameters}, "/orders/{id}"), server.url)

    with pytest.raises((RestClientError, ToolArgumentsError)):
        await call(tools, id=value)

    assert server.received == []


# --- what a document may declare


@pytest.mark.parametrize(
    "name",
    ["Authorization", "cookie", "COOKIE", "Host", "X-API-Key", "x-tenant", "Content-Length", "Proxy-Authorization"],
)
async def test_a_header_parameter_cannot_replace_credentials_or_set_cookies(server, name) -> None:
    parameters = [{"name": name, "in": "header", "required": True, "schema": {"type": "string"}}]
    settings = {"api_key": "k3y-of-the-client", "headers": {"X-Tenant": "acme"}}
    tools = tools_from_openapi(document({"parameters": parameters}), server.url, **settings)
    [specification] = tools

    await call(tools, **{name: "of-the-model"})

    assert specification.parameters["properties"] == {}
    assert "of-the-model" not in str(server.last.headers)
    assert server.last.header("X-API-Key") == "k3y-of-the-client"
    assert server.last.header("X-Tenant") == "acme"
    assert server.last.header("Cookie") is None


async def test_a_query_parameter_cannot_double_the_key(server) -> None:
    for operation in (query({"type": "string"}, "key"), query({"type": "object", "properties": {"key": {}, "a": {}}})):
        tools = tools_from_openapi(document(operation), server.url, api_key="k3y-of-the-client", api_key_query="key")
        await call(tools, key="of-the-model", **({"q": {"a": "1"}} if "q" in str(operation) else {}))
        assert [value for name, value in server.last.query if name == "key"] == ["k3y-of-the-client"]

    with pytest.raises(ToolArgumentsError, match="unknown property 'key'"):
        await call(tools, q={"key": "of-the-model"})


async def test_a_cookie_parameter_cannot_replace_the_clients_cookie(server) -> None:
    parameters = [{"name": "session", "in": "cookie", "schema": {"type": "string"}}]
    tools = tools_from_openapi(document({"parameters": parameters}), server.url, headers={"Cookie": "session=own"})

    await call(tools, session="of-the-model")

    assert server.last.header("Cookie") == "session=own"


@pytest.mark.parametrize(("place", "name"), [("header", "X\r\nY"), ("cookie", "a=b; admin"), ("header", "")])
def test_an_invalid_name_of_a_header_or_cookie_is_refused(place, name) -> None:
    parameters = [{"name": name, "in": place, "schema": {"type": "string"}}]

    with pytest.raises(IllegalConfigurationError, match=f"invalid name of a {place}"):
        tools_from_openapi(document({"parameters": parameters}), "https://shop.example")


@pytest.mark.parametrize(
    "reference", ["#/components/schemas/None", "http://127.0.0.1:1/x.json", "#", "file:///etc/passwd"]
)
def test_a_schema_that_refers_to_nothing_in_the_document_is_refused(reference) -> None:
    inner = {"type": "object", "properties": {"a": {"$ref": reference}}}

    with pytest.raises(IllegalConfigurationError, match="is unknown"):
        tools_from_openapi(document(query(inner)), "https://shop.example")


# --- what a model may send


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string"}, {"admin": "true"}),
        ({"type": "string"}, ["a", "b"]),
        ({"type": "string"}, 7),
        ({"type": "integer", "maximum": 9}, 10),
        ({"type": "integer"}, "7; drop"),
        ({"type": "boolean"}, 1),
        ({"type": "string", "enum": ["a", "b"]}, "c"),
        ({"type": "string", "pattern": "^[a-z]+$"}, "a b"),
        ({"type": "string", "maxLength": 3}, "abcd"),
        ({"type": "array", "items": {"type": "string"}}, [{"a": 1}]),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, {}),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, {"a": 1}),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, {"a": "x", "admin": "true"}),
        ({"type": "object"}, {"admin": "true"}),
        ({"type": "object", "additionalProperties": {"type": "string"}}, {"admin": "true"}),
        ({}, {"admin": "true"}),
        ({"$ref": "#/components/schemas/Kind"}, "other"),
    ],
)
@pytest.mark.parametrize("style", ["form", "deepObject"])
async def test_arguments_that_do_not_fit_their_schema_are_not_sent(server, schema, value, style) -> None:
    components = {"schemas": {"Kind": {"type": "string", "enum": ["one"]}}}
    tools = tools_from_openapi(document(query(schema, style=style), components=components), server.url)

    with pytest.raises(ToolArgumentsError, match="q"):
        await call(tools, q=value)

    assert server.received == []


async def test_declared_properties_are_sent_wherever_the_schema_declares_them(server) -> None:
    schema = {
        "allOf": [
            {"$ref": "#/components/schemas/Page"},
            {"type": "object", "properties": {"size": {"type": "integer"}}},
        ],
        "anyOf": [{"properties": {"sort": {"type": "string"}}}, {"properties": {"order": {"type": "string"}}}],
    }
    components = {"schemas": {"Page": {"type": "object", "properties": {"page": {"type": "integer"}}}}}
    tools = tools_from_openapi(document(query(schema), components=components), server.url)

    await call(tools, q={"page": 1, "size": 2, "sort": "a", "order": "b"})

    assert server.last.query == [("page", "1"), ("size", "2"), ("sort", "a"), ("order", "b")]


async def test_properties_are_validated_by_the_patterns_of_their_names(server) -> None:
    patterns = {"^x-": {"type": "integer"}, "^(?=lookahead)": {"type": "boolean"}}  # one the engine does not know
    schema = {
        "type": "object",
        "properties": {"name": {}},
        "patternProperties": patterns,
        "additionalProperties": False,
    }
    body = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    tools = tools_from_openapi(document(body, verb="post"), server.url)

    with pytest.raises(ToolArgumentsError, match="x-size"):
        await call(tools, body={"x-size": "large"})
    await call(tools, body={"name": "n", "x-size": 1})

    del patterns["^(?=lookahead)"]
    tools = tools_from_openapi(document(body, verb="post"), server.url)
    with pytest.raises(ToolArgumentsError, match="admin"):
        await call(tools, body={"admin": True})
    assert len(server.received) == 1


async def test_properties_of_a_component_with_an_escaped_name_are_declared(server) -> None:
    components = {"schemas": {"Page~x": {"type": "object", "properties": {"page": {"type": "integer"}}}}}
    schema = {"allOf": [{"$ref": "#/components/schemas/Page~0x"}]}
    tools = tools_from_openapi(document(query(schema), components=components), server.url)

    await call(tools, q={"page": 1})

    assert server.last.query == [("page", "1")]


async def test_bodies_are_validated_and_forms_hold_declared_fields_only(server) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    for media_type in ("application/json", "application/x-www-form-urlencoded"):
        body = {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}
        tools = tools_from_openapi(document(body, verb="post"), server.url)
        for wrong in ({}, {"name": 1}, "name=x", ["name"]):
            with pytest.raises(ToolArgumentsError, match="body"):
                await call(tools, body=wrong)
        await call(tools, body={"name": "x"})

    with pytest.raises(ToolArgumentsError, match="unknown property 'admin'"):
        await call(tools, body={"name": "x", "admin": "true"})
    assert len(server.received) == 2


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string", "pattern": "^(a+)+$"}, "a" * 5000 + "!"),
        (
            {"type": "object", "patternProperties": {"^(a+)+$": {"type": "string"}}, "additionalProperties": False},
            {"a" * 5000 + "!": "x"},
        ),
        (
            {
                "allOf": [{"patternProperties": {"^(a+)+$": {"type": "string"}}}],
                "unevaluatedProperties": {"not": {}},
                "minProperties": 2,
            },
            {"a" * 5000 + "!": "x"},
        ),
    ],
)
async def test_a_slow_pattern_does_not_block(server, schema: dict[str, Any], value: object) -> None:
    body = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    tools = tools_from_openapi(document(body, verb="post"), server.url)
    started = time.process_time()

    with pytest.raises(ToolArgumentsError):
        await call(tools, body=value)

    assert time.process_time() - started < 5


async def test_a_directly_recursive_type_is_reported(server) -> None:
    components = {"schemas": {"A": {"$ref": "#/components/schemas/B"}, "B": {"$ref": "#/components/schemas/A"}}}
    tools = tools_from_openapi(document(query({"$ref": "#/components/schemas/A"}), components=components), server.url)

    with pytest.raises(ToolArgumentsError, match="nested too deeply"):
        await call(tools, q="x")


# --- how large a schema becomes


def doubling(depth: int, width: int) -> dict[str, Any]:
    """Types that use the next one several times: with all in place, there are width ** depth of them."""
    schemas: dict[str, Any] = {
        f"T{n}": {
            "type": "object",
            "properties": {f"p{at}": {"$ref": f"#/components/schemas/T{n + 1}"} for at in range(width)},
        }
        for n in range(depth)
    }
    return {"schemas": {**schemas, f"T{depth}": {"type": "string"}}}


@pytest.mark.parametrize(("depth", "width"), [(5, 8), (8, 8), (40, 2), (60, 20)])
async def test_a_schema_whose_types_multiply_keeps_them_apart(server, depth, width) -> None:
    body = {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/T0"}}}}}
    started = time.process_time()

    tools = tools_from_openapi(document(body, verb="post", components=doubling(depth, width)), server.url)

    assert time.process_time() - started < 10
    [specification] = tools
    assert len(json.dumps(specification.parameters)) < 2 * INLINED_LIMIT
    assert len(specification.parameters["$defs"]) == depth + 1
    if depth < 10:
        with pytest.raises(ToolArgumentsError):
            await call(tools, body={"p0": {"p1": {"p2": 7}}})


def test_many_parameters_of_one_large_type_are_bounded_together() -> None:
    components = {"schemas": {"Kind": {"type": "string", "enum": [f"kind-{n}" for n in range(500)]}}}
    parameters = [{"name": f"k{n}", "in": "query", "schema": {"$ref": "#/components/schemas/Kind"}} for n in range(300)]

    [specification] = tools_from_openapi(
        document({"parameters": parameters}, components=components), "http://x.example"
    )

    assert len(json.dumps(specification.parameters)) < 2 * INLINED_LIMIT


def test_a_long_chain_and_a_deep_schema_end_soon() -> None:
    chain = {f"T{n}": {"$ref": f"#/components/schemas/T{n + 1}"} for n in range(2000)}
    components = {"schemas": {**chain, "T2000": {"type": "string"}}}
    tools_from_openapi(document(query({"$ref": "#/components/schemas/T0"}), components=components), "http://x.example")

    deep: dict[str, Any] = {"type": "string"}
    for _ in range(20_000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(IllegalConfigurationError):
        tools_from_openapi(document(query(deep)), "http://x.example")
    with pytest.raises(IllegalConfigurationError):
        tools_from_openapi("{" + '"a":{' * 50_000, "http://x.example")


def test_python_types_that_multiply_stay_in_defs_as_well() -> None:
    from pydantic import TypeAdapter

    kind: Any = str
    for level in range(8):
        kind = create_model(f"Level{level}", **{f"p{at}": (kind, ...) for at in range(8)})

    schema = schema_of(TypeAdapter(kind))

    assert len(json.dumps(schema)) < INLINED_LIMIT
    assert schema["properties"]["p0"] == {"$ref": "#/$defs/Level6"}
    assert set(re.findall(r"#/\$defs/(\w+)", json.dumps(schema))) == schema["$defs"].keys()


def test_small_types_are_still_put_in_place() -> None:
    components = doubling(2, 2)

    [specification] = tools_from_openapi(
        document(query({"$ref": "#/components/schemas/T0"}), components=components), "http://x.example"
    )

    inner = {"type": "object", "properties": {"p0": {"type": "string"}, "p1": {"type": "string"}}}
    expected = {"type": "object", "properties": {"p0": inner, "p1": inner}}
    assert specification.parameters == {"type": "object", "properties": {"q": expected}}
