"""What every wire does alike: chat completions, Responses, Anthropic's messages, and the models of pydantic-ai."""

from typing import Any, Protocol

import pytest
from pydantic_ai.messages import ModelResponse, TextPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from tests.models.every_wire import OWN_WIRES, Connect, parameters_in, reply_of
from tests.models.scripted_server import Serve
from toolbox import (
    ChatRequest,
    PydanticAiChatModel,
    ToolSpecification,
    UserMessage,
    create_ai_service,
    register_ai_service,
)

pytestmark = pytest.mark.anyio

HI = UserMessage("Hi")

# --- schemas of tools


@register_ai_service(output_mode="tool")
class Prices(Protocol):
    async def read(self, text: str) -> dict[str, int]: ...


OPEN = {"type": "object", "properties": {}}
CLOSED = {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize("wire", OWN_WIRES)
@pytest.mark.parametrize(
    ("schema", "sent"),
    [
        ({"type": "object"}, OPEN),
        ({"type": "object", "properties": None}, OPEN),
        ({}, OPEN),
        ({"type": ["object", "null"]}, OPEN),
        ({"type": "object", "additionalProperties": False}, CLOSED),
        (
            {"type": "object", "additionalProperties": {"type": "string"}},
            OPEN | {"additionalProperties": {"type": "string"}},
        ),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}, None),
        ({"type": "object", "properties": {"a": {"type": "object"}}}, None),
    ],
    ids=str,
)
async def test_the_schema_of_each_tool_has_properties(
    serve: Serve, connect: Connect, wire: str, schema: dict[str, Any], sent: dict[str, Any] | None
) -> None:
    server = await serve([reply_of(wire, "ok")])
    tool = ToolSpecification("stop", "Stops.", schema)

    await connect(wire, server).chat(ChatRequest([HI], (tool,)))

    assert parameters_in(server.requests[0]) == [{"properties": {}, **schema} if sent is None else sent]


@pytest.mark.parametrize("wire", OWN_WIRES)
@pytest.mark.parametrize(
    ("schema", "is_strict"), [({"type": "object"}, False), ({"type": "object", "additionalProperties": False}, True)]
)
async def test_a_tool_without_properties_is_strict_if_it_takes_none(
    serve: Serve, connect: Connect, wire: str, schema: dict[str, Any], is_strict: bool
) -> None:
    server = await serve([reply_of(wire, "ok")])
    tool = ToolSpecification("stop", "Stops.", schema, strict=True)

    await connect(wire, server).chat(ChatRequest([HI], (tool,)))

    [sent] = server.requests[0]["tools"]
    assert bool(sent.get("function", sent).get("strict")) is is_strict
    assert parameters_in(server.requests[0])[0]["properties"] == {}


@pytest.mark.parametrize("wire", OWN_WIRES)
async def test_an_answer_tool_whose_answer_is_an_open_object_has_properties(
    serve: Serve, connect: Connect, wire: str
) -> None:
    server = await serve([reply_of(wire, calls=[("c", "final_answer", {"a": 1})])])
    prices = create_ai_service(Prices, chat_model=connect(wire, server))

    assert await prices.read("x") == {"a": 1}
    assert parameters_in(server.requests[0]) == [OPEN | {"additionalProperties": {"type": "integer"}}]


async def test_a_model_of_pydantic_ai_gets_schemas_with_properties() -> None:
    given: list[Any] = []

    def reply(messages: object, info: AgentInfo) -> ModelResponse:
        given.extend(each.parameters_json_schema for each in info.function_tools)
        return ModelResponse([TextPart("ok")])

    tools = (ToolSpecification("stop", "Stops.", {"type": "object"}), ToolSpecification("go", "Goes.", {}))
    await PydanticAiChatModel(FunctionModel(reply)).chat(ChatRequest([HI], tools))

    assert given == [OPEN, OPEN]
