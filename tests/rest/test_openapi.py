"""Tools of a published OpenAPI document."""

import asyncio
import json

import pytest

from tests.rest.http_server import Answer
from toolbox.chat import ToolExecutionRequest
from toolbox.contents import AudioContent, ImageContent, PdfContent
from toolbox.errors import IllegalConfigurationError, RestClientError, ToolArgumentsError
from toolbox.openapi import tools_from_openapi

pytestmark = pytest.mark.anyio

STORE = {
    "openapi": "3.0.3",
    "info": {"title": "Store", "version": "1"},
    "servers": [{"url": "/api"}],
    "paths": {
        "/pets/{petId}": {
            "parameters": [{"name": "petId", "in": "path", "required": True, "schema": {"type": "string"}}],
            "get": {
                "operationId": "getPet",
                "summary": "Finds a pet.",
                "description": "By its id.",
                "tags": ["pets"],
                "parameters": [
                    {"$ref": "#/components/parameters/Tenant"},
                    {"name": "page[size]", "in": "query", "schema": {"type": "integer", "maximum": 9}},
                    {"name": "tags", "in": "query", "schema": {"type": "array", "items": {"type": "string"}}},
                    {
                        "name": "fields",
                        "in": "query",
                        "explode": False,
                        "schema": {"type": "array", "items": {"type": "string"}},
                    },
                    {
                        "name": "filter",
                        "in": "query",
                        "style": "deepObject",
                        "explode": True,
                        "schema": {"type": "object", "properties": {"kind": {"type": "string"}}},
                    },
                    {"name": "session", "in": "cookie", "schema": {"type": "string"}},
                ],
                "responses": {"200": {"description": "ok"}},
            },
            "put": {
                "tags": ["pets", "write"],
                "requestBody": {"$ref": "#/components/requestBodies/Pet"},
                "responses": {"200": {"description": "ok"}},
            },
        },
        "/login": {
            "post": {
                "operationId": "log in!",
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/x-www-form-urlencoded": {
                            "schema": {"type": "object", "properties": {"user": {"type": "string"}}}
                        }
                    },
                },
                "responses": {"204": {"description": "ok"}},
            }
        },
        "/upload": {
            "post": {
                "operationId": "upload",
                "requestBody": {
                    "required": True,
                    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
                },
                "responses": {"204": {"description": "ok"}},
            }
        },
    },
    "components": {
        "parameters": {
            "Tenant": {"name": "X-Tenant", "in": "header", "required": True, "schema": {"type": "string"}},
        },
        "requestBodies": {
            "Pet": {
                "required": True,
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Pet"}}},
            }
        },
        "schemas": {
            "Pet": {
                "title": "Pet",
                "type": "object",
                "required": ["id", "name"],
                "properties": {
                    "id": {"type": "integer", "readOnly": True},
                    "name": {"type": "string", "example": "Rex"},
                    "age": {"type": "integer", "nullable": True, "minimum": 0, "exclusiveMinimum": True},
                    "owner": {"$ref": "#/components/schemas/Owner"},
                    "children": {"type": "array", "items": {"$ref": "#/components/schemas/Pet"}},
                },
            },
            "Owner": {"type": "object", "properties": {"name": {"type": "string"}}},
        },
    },
}


def tools_by_name(*args, **kwargs):
    return {spec.name: (spec, executor) for spec, executor in tools_from_openapi(*args, **kwargs).items()}


def call(executor, **arguments):
    return executor(ToolExecutionRequest("1", "x", json.dumps(arguments)), None)


def test_each_operation_is_a_tool_with_a_schema_a_model_can_read() -> None:
    tools = tools_by_name(STORE, "http://127.0.0.1:1")

    assert list(tools) == ["getPet", "put_pets_petId", "log_in"]
    spec = tools["getPet"][0]
    assert spec.description == "Finds a pet.\nBy its id."
    assert list(spec.parameters["properties"]) == [
        "petId",
        "X-Tenant",
        "page_size",
        "tags",
        "fields",
        "filter",
        "session",
    ]
    assert spec.parameters["required"] == ["petId", "X-Tenant"]
    assert spec.parameters["properties"]["page_size"] == {"type": "integer", "maximum": 9}


def test_references_are_inlined_and_read_only_properties_omitted() -> None:
    [spec] = tools_from_openapi(STORE, "http://127.0.0.1:1", include=["put_pets_petId"])

    body = spec.parameters["properties"]["body"]
    assert body["required"] == ["name"]
    assert body["properties"]["owner"] == {"type": "object", "properties": {"name": {"type": "string"}}}
    assert body["properties"]["age"] == {"type": ["integer", "null"], "exclusiveMinimum": 0}
    assert body["properties"]["name"] == {"type": "string"}
    assert body["properties"]["children"]["items"] == {"$ref": "#/$defs/Pet"}
    assert "id" not in body["properties"]
    assert "Pet" in spec.parameters["$defs"]


async def test_arguments_are_sent_in_the_places_that_the_document_names(server) -> None:
    server.answer({"name": "Rex"})
    _, executor = tools_by_name(STORE, f"{server.url}/api", bearer_token="t")["getPet"]

    value = await call(
        executor,
        petId="..a b",
        **{"X-Tenant": "acme"},
        page_size=3,
        tags=["a", "b"],
        fields=["x", "y"],
        filter={"kind": "dog"},
        session="s",
        unknown=1,
    )

    assert value == {"name": "Rex"}
    assert server.last.path == "/api/pets/..a%20b"
    assert server.last.query == [
        ("page[size]", "3"),
        ("tags", "a"),
        ("tags", "b"),
        ("fields", "x,y"),
        ("filter[kind]", "dog"),
    ]
    assert server.last.header("X-Tenant") == "acme"
    assert server.last.header("Cookie") == "session=s"
    assert server.last.header("Authorization") == "Bearer t"


async def test_bodies_are_sent_as_json_or_as_a_form(server) -> None:
    tools = tools_by_name(STORE, server.url)

    await call(tools["put_pets_petId"][1], petId="1", body={"name": "Rex"})
    assert (server.last.verb, server.last.json) == ("PUT", {"name": "Rex"})
    server.answer(Answer("", 204))
    assert await call(tools["log_in"][1], body={"user": "a b"}) is None
    assert server.last.body == b"user=a%20b"


def posting(schema, media_type="application/json", **components):
    """A document whose only operation sends a body of this schema."""
    body = {"required": True, "content": {media_type: {"schema": schema}}}
    paths = {"/x": {"post": {"operationId": "op", "requestBody": body, "responses": {}}}}
    info = {"title": "x", "version": "1"}
    return {"openapi": "3.0.3", "info": info, "paths": paths, "components": {"schemas": components}}


TEXT = {"type": "string"}
CITY = {"type": "object", "properties": {"city": TEXT, "zip": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "body", "sent"),
    [
        ({"properties": {"a": TEXT, "b": TEXT}}, {"a": None, "b": ""}, {"b": ""}),
        ({"properties": {"a": {**TEXT, "nullable": True}}}, {"a": None}, {"a": None}),
        ({"properties": {"a": {}}}, {"a": None}, {"a": None}),
        ({"properties": {"home": {"$ref": "#/components/schemas/City"}}}, {"home": {"zip": None}}, {"home": {}}),
        ({"properties": {"home": {"$ref": "#/components/schemas/City"}}}, {"home": None}, {}),
        ({"properties": {"homes": {"type": "array", "items": CITY}}}, {"homes": [{"city": None}]}, {"homes": [{}]}),
        ({"additionalProperties": TEXT}, {"a": None, "b": "x"}, {"b": "x"}),
        ({"oneOf": [{**CITY, "required": ["zip"]}, {"required": ["b"]}]}, {"zip": 1, "city": None}, {"zip": 1}),
        ({"properties": {str(n): TEXT for n in range(250)}}, {str(n): None for n in range(250)}, {}),
    ],
)
async def test_null_for_an_optional_field_of_a_body_is_left_out_unless_it_is_a_value(
    server, schema, body, sent
) -> None:
    [executor] = tools_from_openapi(posting(schema, City=CITY), server.url).values()

    await call(executor, body=body)

    assert server.last.json == sent


async def test_null_for_an_optional_field_of_a_form_is_left_out(server) -> None:
    document = posting({"properties": {"a": TEXT, "b": TEXT}}, "application/x-www-form-urlencoded")
    [executor] = tools_from_openapi(document, server.url).values()

    await call(executor, body={"a": None, "b": "x"})

    assert server.last.body == b"b=x"


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        ({"properties": {"a": TEXT}, "required": ["a"]}, {"a": None}),
        ({"properties": {"a": {"type": "array", "items": TEXT}}}, {"a": [None]}),
        ({"properties": {"a": TEXT, "b": TEXT}}, {"a": None, "b": 1}),
        ({"type": "object"}, None),
    ],
)
async def test_null_for_what_is_required_is_an_invalid_argument(server, schema, body) -> None:
    [executor] = tools_from_openapi(posting(schema), server.url).values()

    with pytest.raises(ToolArgumentsError):
        await call(executor, body=body)

    assert server.received == []


@pytest.mark.parametrize(
    ("media_type", "value"),
    [
        ("image/png", ImageContent(data=b"\xff", mime_type="image/png")),
        ("application/pdf; charset=binary", PdfContent(data=b"\xff")),
        ("audio/wav", AudioContent(b"\xff", "audio/wav")),
        ("image/a b", "1 bytes of image/a b"),
        ("application/zip", "1 bytes of application/zip"),
    ],
)
async def test_images_documents_and_audio_of_a_reply_are_contents(server, media_type, value) -> None:
    server.answer(Answer(b"\xff", headers={"Content-Type": media_type}))

    assert await call(tools_by_name(STORE, server.url)["getPet"][1], petId="1", **{"X-Tenant": "a"}) == value


async def test_missing_arguments_are_reported_before_a_request_is_sent(server) -> None:
    _, executor = tools_by_name(STORE, server.url)["getPet"]

    with pytest.raises(ToolArgumentsError, match="X-Tenant"):
        await call(executor, petId="1")
    with pytest.raises(ToolArgumentsError):
        await executor(ToolExecutionRequest("1", "getPet", "[1]"), None)

    assert server.received == []


async def test_a_refusal_of_the_service_is_the_failure_of_the_tool(server) -> None:
    server.answer(Answer("no such pet", 404))
    _, executor = tools_by_name(STORE, server.url)["getPet"]

    with pytest.raises(RestClientError, match="no such pet"):
        await call(executor, petId="1", **{"X-Tenant": "a"})


def test_operations_are_chosen_by_id_tag_path_or_predicate() -> None:
    def names(include):
        return [spec.name for spec in tools_from_openapi(STORE, "http://127.0.0.1:1", include=include)]

    assert names(["getPet"]) == ["getPet"]
    assert names(["pets"]) == ["getPet", "put_pets_petId"]
    assert names(["GET *"]) == ["getPet"]
    assert names(lambda operation: operation.verb == "POST") == ["log_in"]
    assert names([]) == []


async def test_a_document_is_fetched_from_its_url_and_its_server_taken_from_there(server) -> None:
    server.answer(STORE)
    tools = tools_by_name(f"{server.url}/docs/openapi.json?v=1")
    assert server.last.target == "/docs/openapi.json?v=1"

    server.answer("pet")
    assert await call(tools["getPet"][1], petId="1", **{"X-Tenant": "a"}) == "pet"
    assert server.last.path == "/api/pets/1"


@pytest.mark.parametrize(
    ("servers", "path"),
    [
        (None, "/pets/1"),
        ([], "/pets/1"),
        ([{"url": "v2"}], "/docs/v2/pets/1"),
        ([{"url": "/v2/"}], "/v2/pets/1"),
        ([{"url": "/{version}", "variables": {"version": {"default": "v3"}}}], "/v3/pets/1"),
    ],
)
async def test_a_server_is_found_from_where_the_document_is(server, servers, path) -> None:
    document = {name: value for name, value in STORE.items() if name != "servers"}
    server.answer(document if servers is None else {**document, "servers": servers})
    tools = tools_by_name(f"{server.url}/docs/openapi.json")

    server.answer("pet")
    await call(tools["getPet"][1], petId="1", **{"X-Tenant": "a"})

    assert server.last.path == path


def test_include_patterns_without_a_match_are_rejected() -> None:
    with pytest.raises(IllegalConfigurationError, match="include='getDog' matches no operation; use one of: getPet"):
        tools_from_openapi(STORE, "http://127.0.0.1:1", include=["getPet", "getDog"])


def test_a_predicate_that_would_have_to_be_awaited_selects_nothing() -> None:
    async def none(operation):
        return False

    for include in (none, lambda operation: none(operation)):
        with pytest.raises(IllegalConfigurationError, match="returned an awaitable; use a `def`"):
            tools_from_openapi(STORE, "http://127.0.0.1:1", include=include)


def test_a_document_is_read_from_text_and_files(tmp_path) -> None:
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(STORE))

    for source in (json.dumps(STORE), path, str(path)):
        assert "getPet" in tools_by_name(source, "http://127.0.0.1:1")


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"swagger": "2.0"},
        "{broken",
        "openapi: 3.1.0\ninfo: {}",
        {**STORE, "paths": {"/x": {"get": {"parameters": [{"$ref": "#/nowhere"}]}}}},
    ],
)
def test_invalid_documents_are_rejected(document) -> None:
    with pytest.raises(IllegalConfigurationError):
        tools_from_openapi(document, "http://127.0.0.1:1")


def test_without_a_server_the_base_url_is_asked_for() -> None:
    with pytest.raises(IllegalConfigurationError, match="base_url="):
        tools_from_openapi({**STORE, "servers": []})


def test_without_the_library_the_error_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "openapi_pydantic", None)

    with pytest.raises(ModuleNotFoundError, match="toolbox-di\\[openapi\\]"):
        tools_from_openapi(STORE, "http://127.0.0.1:1")


def test_documents_of_3_1_are_read_too(server) -> None:
    document = {
        "openapi": "3.1.0",
        "info": {"title": "x", "version": "1"},
        "paths": {
            "/x": {
                "get": {
                    "parameters": [
                        {"name": "q", "in": "query", "schema": {"type": ["string", "null"], "examples": ["a"]}}
                    ]
                }
            }
        },
    }
    [(spec, executor)] = tools_from_openapi(document, server.url).items()

    assert spec.name == "get_x"
    assert spec.parameters["properties"]["q"]["type"] == ["string", "null"]
    server.answer([1, 2])
    assert asyncio.run(call(executor, q=None)) == [1, 2]
    assert server.last.target == "/x"
