"""What every wire does alike: chat completions, Responses, Anthropic's messages, and the models of pydantic-ai."""

import re
from typing import Any, Protocol

import pytest
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from tests.models.every_wire import OWN_WIRES, WIRES, Connect, called_names_in, parameters_in, reply_of
from tests.models.scripted_server import Serve
from toolbox import (
    AiMessage,
    ChatRequest,
    Container,
    MemoryId,
    PydanticAiChatModel,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolSpecification,
    UserMessage,
    create_ai_service,
    register_ai_service,
    return_to_model,
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


# --- names of tools

LEGAL = re.compile(r"[a-zA-Z0-9_-]{1,64}")
INVENTED = ("read<|channel|>commentary", "search.evidence", "läs fil", "x" * 200, "functions:read{}")


@register_ai_service(on_unknown_tool=return_to_model)
class Desk(Protocol):
    async def ask(self, room: MemoryId[str], text: str) -> str: ...


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", INVENTED)
async def test_a_tool_name_that_the_model_invented_is_sent_back_as_a_valid_one(
    serve: Serve, connect: Connect, wire: str, name: str
) -> None:
    server = await serve([reply_of(wire, "Hm.", [("c1", name, {})]), *[reply_of(wire, "ok")] * 2])
    async with Container(models={"default": connect(wire, server)}).register(Desk) as container:
        for text in ("one", "two"):
            assert await container.get(Desk).ask("r", text) == "ok"

    sent = [[*called_names_in(each)] for each in server.requests]
    assert [len(each) for each in sent] == [0, 1, 1]
    assert all(LEGAL.fullmatch(each) for [each] in sent[1:])


async def test_pydantic_ai_gets_valid_names_in_calls_and_results_and_offered_ones_as_they_are() -> None:
    asked: list[Any] = []

    def reply(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        asked.extend(part for each in messages for part in each.parts if hasattr(part, "tool_name"))
        return ModelResponse([TextPart("ok")])

    calls = [ToolExecutionRequest("c1", "läs fil", "{}"), ToolExecutionRequest("c2", "fs.read", "{}")]
    results = [ToolExecutionResultMessage.of(each, "x") for each in calls]
    request = ChatRequest([HI, AiMessage(None, calls), *results], (ToolSpecification("fs.read"),))
    await PydanticAiChatModel(FunctionModel(reply)).chat(request)

    assert [each.tool_name for each in asked] == ["l_s_fil", "fs.read"] * 2
