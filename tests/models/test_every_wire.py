"""What every wire does alike: chat completions, Responses, Anthropic's messages, and the models of pydantic-ai."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest
from pydantic import BaseModel
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from tests.models import messages_api
from tests.models.every_wire import OWN_WIRES, WIRES, Connect, Model, called_names_in, parameters_in, reply_of, texts_in
from tests.models.scripted_server import Scripted, Serve, chunk, stream
from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    Container,
    ContextLengthError,
    FinishReason,
    MemoryId,
    ModelHttpError,
    ModelProtocolError,
    ModelRefusedError,
    PydanticAiChatModel,
    ResponseFormat,
    Result,
    SystemMessage,
    TokenStream,
    TokenUsage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolSpecification,
    UserMessage,
    create_ai_service,
    register_ai_service,
    return_to_model,
    tool,
)
from toolbox.models.fallbacks import is_worth_another_model
from toolbox.testing import ScriptedChatModel
from toolbox.transcripts import messages_to_json

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


# --- replies that a server could not complete

SAID = "half of the"


async def end_of(model: Model, streamed: bool) -> ChatResponse:
    """Return the whole reply, or raise the error at its end."""
    request = ChatRequest([HI], (ToolSpecification("look"),))
    if not streamed:
        return await model.chat(request)
    *_, last = [event async for event in model.stream(request)]
    assert isinstance(last, CompleteResponse)
    return last.response


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("wire", OWN_WIRES)
@pytest.mark.parametrize(
    "word",
    [
        *("insufficient_system_resource", "error", "ERROR", "model_error", "network_error", "server_error", "aborted"),
        *("timeout", "resource-exhausted", "cancelled", "overloaded"),
    ],
)
async def test_a_server_that_gave_up_is_an_error_that_another_try_may_mend(
    serve: Serve, connect: Connect, wire: str, streamed: bool, word: str
) -> None:
    server = await serve([reply_of(wire, SAID, [("c", "look", {})], word, streamed)])

    with pytest.raises(ModelHttpError) as caught:
        await end_of(connect(wire, server), streamed)

    assert (caught.value.status, is_worth_another_model(caught.value), len(server.requests)) == (503, True, 1)
    assert word in caught.value.message


@pytest.mark.parametrize(
    ("ending", "word"),
    [("error", None), ("error", "network_error"), ("length", "network_error"), (None, "insufficient_system_resource")],
)
async def test_a_server_behind_pydantic_ai_that_gave_up_is_an_error(ending: Any, word: str | None) -> None:
    details = None if word is None else {"finish_reason": word}
    reply = ModelResponse([TextPart(SAID)], finish_reason=ending, provider_details=details)

    with pytest.raises(ModelHttpError) as caught:
        await PydanticAiChatModel(FunctionModel(lambda *_: reply)).chat(ChatRequest([HI]))

    assert caught.value.status == 503


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("wire", OWN_WIRES)
async def test_a_full_context_window_is_an_error_even_after_a_text(
    serve: Serve, connect: Connect, wire: str, streamed: bool
) -> None:
    server = await serve([reply_of(wire, SAID, ending="model_context_window_exceeded", streamed=streamed)])

    with pytest.raises(ContextLengthError) as caught:
        await end_of(connect(wire, server), streamed)

    assert (caught.value.status, is_worth_another_model(caught.value)) == (400, False)


async def test_a_full_context_window_behind_pydantic_ai_is_an_error() -> None:
    details = {"finish_reason": "model_context_window_exceeded"}
    reply = ModelResponse([TextPart(SAID)], finish_reason="length", provider_details=details)

    with pytest.raises(ContextLengthError):
        await PydanticAiChatModel(FunctionModel(lambda *_: reply)).chat(ChatRequest([HI]))


@pytest.mark.parametrize("wire", OWN_WIRES)
async def test_a_text_before_a_call_that_the_server_cannot_read_is_not_an_answer(
    serve: Serve, connect: Connect, wire: str
) -> None:
    server = await serve([reply_of(wire, "I look.", ending="malformed_function_call")])

    with pytest.raises(ModelProtocolError, match="malformed_function_call"):
        await end_of(connect(wire, server), False)


# --- replies that a filter stopped

LOOKED: list[str] = []


@tool
def look() -> str:
    """Look."""
    LOOKED.append("looked")
    return "seen"


class Facts(BaseModel):
    number: int


@register_ai_service(tools=look)
class Reader(Protocol):
    async def text(self, room: MemoryId[str], question: str) -> str: ...
    async def details(self, room: MemoryId[str], question: str) -> Result[str]: ...
    async def message(self, room: MemoryId[str], question: str) -> AiMessage: ...
    async def facts(self, room: MemoryId[str], question: str) -> Facts: ...
    def pieces(self, room: MemoryId[str], question: str) -> AsyncIterator[str]: ...
    def events(self, room: MemoryId[str], question: str) -> TokenStream: ...
    def items(self, room: MemoryId[str], question: str) -> AsyncIterator[Facts]: ...


FILTERED = (("chat", "content_filter"), ("responses", "content_filter"), ("bridge", "content_filter"))
FILTERED_ANTHROPIC = (("anthropic", "content_filtered"), ("anthropic", "guardrail_intervened"))


@pytest.mark.parametrize(("wire", "word"), [*FILTERED, *FILTERED_ANTHROPIC, ("chat", "content_filter: SAFETY")])
@pytest.mark.parametrize("calls", [[], [("c1", "look", {})]])
async def test_a_text_that_a_filter_cut_is_returned_and_its_calls_do_not_run(
    serve: Serve, connect: Connect, wire: str, word: str, calls: Any
) -> None:
    LOOKED.clear()
    cut = reply_of(wire, SAID, calls, word)
    server = await serve([cut, cut, cut, reply_of(wire, "ok")])
    async with Container(models={"default": connect(wire, server)}).register(Reader) as container:
        reader = container.get(Reader)
        text = await reader.text("r", "x")
        details = await reader.details("r", "x")
        message = await reader.message("r", "x")
        assert await reader.text("r", "And now?") == "ok"

    assert (text, details.content, message.text) == (SAID, SAID, SAID)
    assert details.finish_reason is FinishReason.CONTENT_FILTER
    assert (LOOKED, message.tool_execution_requests) == ([], ())
    assert [*called_names_in(server.requests[-1])] == []
    assert [*texts_in(server.requests[-1])].count(SAID) == 3


@pytest.mark.parametrize(("wire", "word"), [*FILTERED, *FILTERED_ANTHROPIC])
@pytest.mark.parametrize("calls", [[], [("c1", "look", {})]])
@pytest.mark.parametrize("method", ["facts", "pieces", "events", "items"])
async def test_a_structured_answer_or_a_stream_that_a_filter_cut_is_an_error(
    serve: Serve, connect: Connect, wire: str, word: str, calls: Any, method: str
) -> None:
    LOOKED.clear()
    said = '{"number": 1}' if method in ("facts", "items") else SAID
    server = await serve([reply_of(wire, said, calls, word, streamed=method != "facts")])
    got: list[object] = []
    async with Container(models={"default": connect(wire, server)}).register(Reader) as container:
        ask = getattr(container.get(Reader), method)
        with pytest.raises(ModelRefusedError) as caught:
            if method == "facts":
                await ask("r", "x")
            else:
                async for each in ask("r", "x"):
                    got.append(each)
        assert await container.chat_memory(Reader, "r").messages() == []

    assert (caught.value.text, LOOKED) == (said, [])
    assert not any(isinstance(each, CompleteResponse) for each in got)
    assert method != "pieces" or "".join(map(str, got)) == SAID


async def test_a_filter_of_a_model_of_the_program_counts_alike() -> None:
    call = ToolExecutionRequest("c1", "look", "{}")
    cut = ChatResponse(AiMessage(SAID, [call]), finish_reason=FinishReason.CONTENT_FILTER)
    LOOKED.clear()
    async with Container(models={"default": ScriptedChatModel([cut, cut])}).register(Reader) as container:
        assert await container.get(Reader).text("r", "x") == SAID
        with pytest.raises(ModelRefusedError):
            await container.get(Reader).facts("r", "x")

    assert LOOKED == []


@pytest.mark.parametrize("wire", ["chat", "responses", "bridge"])
async def test_a_reply_that_a_filter_stopped_before_any_text_is_an_error(
    serve: Serve, connect: Connect, wire: str
) -> None:
    server = await serve([reply_of(wire, None, ending="content_filter")])

    with pytest.raises(ModelRefusedError):
        await connect(wire, server).chat(ChatRequest([HI]))


# --- halves of characters

HALF, OTHER_HALF, WHOLE = "cut \ud83d", "\udc97 cut", "\ufffd"
ESCAPED = '{"a": "\\ud83d", "\\uDC97": "\\\\ud83d \\ud83d\\ude00"}'
READ_ARGUMENTS = {"a": "\ufffd", "\ufffd": "\\ud83d \U0001f600"}


def arguments_in(body: dict[str, Any]) -> list[Any]:
    """Return the arguments of the calls in the messages of a request."""
    found: list[Any] = []
    for message in [*body.get("messages", ()), *body.get("input", ())]:
        found += [json.loads(each["function"]["arguments"]) for each in message.get("tool_calls") or ()]
        blocks = message.get("content")
        found += [each["input"] for each in blocks if "input" in each] if isinstance(blocks, list) else []
        found += [json.loads(message["arguments"])] if "arguments" in message else []
    return found


@pytest.mark.parametrize("wire", WIRES)
async def test_half_a_character_is_sent_as_the_replacement_character(serve: Serve, connect: Connect, wire: str) -> None:
    def reply(body: dict[str, Any]) -> Scripted:
        for text in texts_in(body):
            text.encode()  # as a strict server, which refuses the escape of half a character
        return reply_of(wire, "ok")

    server = await serve(reply)
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": HALF}}}
    tools = (ToolSpecification("look", HALF, schema, {"about": OTHER_HALF}),)
    call = ToolExecutionRequest("c1", "look", ESCAPED)
    raw = ToolExecutionRequest("c2", "look\ud83d", json.dumps({"a": HALF}, ensure_ascii=False))
    messages = [
        SystemMessage(HALF),
        UserMessage([HALF, OTHER_HALF], name=None if wire == "bridge" else HALF),
        AiMessage(HALF, [call, raw]),
        ToolExecutionResultMessage.of(call, HALF),
        ToolExecutionResultMessage.of(raw, "ok"),
        UserMessage("\ud83d\ude00"),
    ]
    wanted = ResponseFormat("answer", {**schema, "required": ["a"]}, HALF)
    options: Any = {} if wire == "bridge" else {"send_tool_metadata": "about"}
    model = connect(wire, server, parameters={"metadata": {HALF: OTHER_HALF}}, **options)

    response = await model.chat(ChatRequest(messages, tools, wanted))

    assert response.ai_message.text == "ok"
    [body] = server.requests
    assert arguments_in(body) == [READ_ARGUMENTS, {"a": f"cut {WHOLE}"}]
    texts = [*texts_in(body)]
    assert "\U0001f600" in texts
    assert sum(f"cut {WHOLE}" in each for each in texts) >= 5


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("wire", WIRES)
async def test_half_a_character_in_a_reply_is_replaced_in_texts_and_arguments(
    serve: Serve, connect: Connect, wire: str, streamed: bool
) -> None:
    server = await serve([reply_of(wire, HALF, [("c1", "look", {"a": HALF})], streamed=streamed)])

    message = (await end_of(connect(wire, server), streamed)).ai_message

    assert message.text == f"cut {WHOLE}"
    [request] = message.tool_execution_requests
    assert json.loads(request.arguments) == {"a": f"cut {WHOLE}"}
    messages_to_json([message]).encode()


async def test_blocks_of_anthropic_with_half_a_character_are_sent_back_as_they_came(
    serve: Serve, connect: Connect
) -> None:
    blocks = [messages_api.thinking("Hm."), messages_api.tool_use("look", {"a": HALF}, id="c1")]
    server = await serve([messages_api.message(*blocks, stop="tool_use"), reply_of("anthropic", "ok")])
    model = connect("anthropic", server)
    said = (await model.chat(ChatRequest([HI]))).ai_message

    await model.chat(ChatRequest([HI, said, ToolExecutionResultMessage.of(said.tool_execution_requests[0], "x")]))

    [_, reply, _] = server.requests[1]["messages"]
    assert [each["type"] for each in reply["content"]] == ["thinking", "tool_use"]
    assert reply["content"][1]["input"] == {"a": f"cut {WHOLE}"}


# --- token counts


def usage_chunks(wire: str, *counts: dict[str, Any]) -> Scripted:
    """Return a stream with these token counts, one after the other."""
    if wire == "anthropic":
        first, *others = counts
        ends = [messages_api.ending("end_turn", each) for each in others]
        return messages_api.events(messages_api.started(usage=first), *block_events, *ends, messages_api.END)
    later = [{"choices": [], "usage": each} for each in counts[1:]]
    return stream(chunk({"content": "ok"}, usage=counts[0]), chunk({}, "stop"), *later)


block_events = messages_api.block_events(0, messages_api.text("ok"))
OPENAI_COUNTS = {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 80}}
ANTHROPIC_COUNTS = {"input_tokens": 20, "output_tokens": 1, "cache_read_input_tokens": 80}


@pytest.mark.parametrize(
    ("wire", "counts", "usage"),
    [
        ("chat", [OPENAI_COUNTS, {"completion_tokens": 7}], TokenUsage(100, 7, 80)),
        (
            "chat",
            [
                OPENAI_COUNTS,
                {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": None},
                {"completion_tokens_details": {"reasoning_tokens": 3}},
            ],
            TokenUsage(100, 7, 80, 3),
        ),
        ("chat", [OPENAI_COUNTS, {"prompt_tokens_details": {"cached_tokens": None}}], TokenUsage(100, 1, 80)),
        ("chat", [OPENAI_COUNTS, {"prompt_tokens_details": {"audio_tokens": 2}}], TokenUsage(100, 1, 80)),
        ("chat", [OPENAI_COUNTS, {"prompt_tokens_details": {"cached_tokens": 0}}], TokenUsage(100, 1, 0)),
        ("anthropic", [ANTHROPIC_COUNTS, {"output_tokens": 7}], TokenUsage(100, 7, 80)),
        (
            "anthropic",
            [ANTHROPIC_COUNTS, {"output_tokens": 7, "cache_read_input_tokens": None}, {"input_tokens": 20}],
            TokenUsage(100, 7, 80),
        ),
    ],
)
async def test_counts_that_a_later_part_of_a_stream_does_not_name_stay(
    serve: Serve, connect: Connect, wire: str, counts: Any, usage: TokenUsage
) -> None:
    server = await serve([usage_chunks(wire, *counts)])

    assert (await end_of(connect(wire, server), True)).token_usage == usage


# --- schemas that a server enforces


class Part(BaseModel):
    name: str
    count: int = 1


class Review(BaseModel):
    text: str
    stars: int = 3
    tags: list[str] = []
    parts: list[Part] = []
    note: str | None = None


@register_ai_service(strict=True)
class Critic(Protocol):
    async def read(self, text: str) -> Review: ...


@register_ai_service(strict=True, output_mode="tool")
class CriticWithTool(Protocol):
    async def read(self, text: str) -> Review: ...


def answer_schema_in(body: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the answer in a request, if the server must enforce it."""
    if "tools" in body:
        form = body["tools"][0].get("function", body["tools"][0])
        return {"schema": form.get("parameters", form.get("input_schema")), **form}
    if "output_config" in body:
        return {"strict": True, **body["output_config"]["format"]}  # this API enforces all of them
    found: dict[str, Any] = body["text"]["format"] if "text" in body else body["response_format"]["json_schema"]
    return found


@pytest.mark.parametrize("service", [Critic, CriticWithTool])
@pytest.mark.parametrize("wire", WIRES)
async def test_fields_with_defaults_are_required_where_the_server_enforces_the_answer(
    serve: Serve, connect: Connect, wire: str, service: Any
) -> None:
    given = {"text": "t", "stars": 4, "tags": [], "parts": [{"name": "p", "count": 2}], "note": None}
    as_call = service is CriticWithTool
    calls = [("c", "final_answer", given)] if as_call else []
    server = await serve([reply_of(wire, None if as_call else json.dumps(given), calls)])
    options = {"supports_response_format": True} if wire == "bridge" else {}
    model = connect(wire, server, **options)
    async with Container(models={"default": model}).register(service) as container:
        review = await container.get(service).read("x")

    sent = answer_schema_in(server.requests[0])
    assert review == Review(**given)
    assert sent["strict"] is True
    assert set(sent["schema"]["required"]) == {*Review.model_fields}
    assert set(sent["schema"]["properties"]["parts"]["items"]["required"]) == {"name", "count"}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (dict[str, int], "keys are not known"),
        (list[dict[str, Any]], "keys are not known"),
        (tuple[int, str], "prefixItems"),
        (list, "any type"),
    ],
)
def test_an_answer_that_no_server_can_enforce_is_a_problem_at_start(answer: Any, reason: str) -> None:
    @register_ai_service(strict=True)
    class Reader(Protocol):
        async def read(self, text: str) -> answer: ...

    Reader.read.__annotations__["return"] = answer
    [problem] = Container(models={"default": ScriptedChatModel()}).register(Reader).check()

    assert problem.where == "Reader.read"
    assert reason in problem.what
    assert "strict=True" in problem.fix


@pytest.mark.parametrize("wire", ["chat", "responses"])
@pytest.mark.parametrize(("strict", "is_sent"), [(True, True), (None, False)])
async def test_fields_inside_of_arguments_are_required_only_where_the_tool_is_strict(
    serve: Serve, connect: Connect, wire: str, strict: bool | None, is_sent: bool
) -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"inner": inner, "b": {"type": "integer"}}, "required": ["inner"]}
    server = await serve([reply_of(wire, "ok")])
    request = ChatRequest([HI], (ToolSpecification("take", None, schema, strict=strict),))

    await connect(wire, server, strict_tools=True).chat(request)

    [tool] = [each.get("function", each) for each in server.requests[0]["tools"]]
    assert bool(tool.get("strict")) is is_sent
    assert not is_sent or tool["parameters"]["properties"] == {
        "inner": {**inner, "required": ["a"], "additionalProperties": False},
        "b": {"type": ["integer", "null"]},
    }


async def test_a_reply_format_that_wants_it_is_enforced_with_all_its_fields(serve: Serve, connect: Connect) -> None:
    server = await serve([reply_of("chat", "{}")] * 2)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for strict in (True, None):
        await connect("chat", server).chat(ChatRequest([HI], response_format=ResponseFormat("x", schema, None, strict)))

    enforced, other = [each["response_format"]["json_schema"] for each in server.requests]
    assert (enforced["strict"], enforced["schema"]["required"]) == (True, ["a"])
    assert ("strict" in other, other["schema"]) == (False, schema)


# --- the last request at a limit


@tool
def visit(place: str) -> str:
    """Visit a place."""
    return place


@register_ai_service(tools=visit, max_tool_rounds=0, on_limit="answer", output_mode="tool")
class Limited(Protocol):
    async def say(self, text: str) -> Result[str]: ...
    async def read(self, text: str) -> Result[dict[str, int]]: ...
    def stream(self, text: str) -> AsyncIterator[str]: ...


VISIT = [("c1", "visit", {"place": "Rome"})]
NO_TOOL = {"chat": "none", "bridge": "none", "responses": "none", "anthropic": {"type": "none"}}


@pytest.mark.parametrize("wire", WIRES)
async def test_the_last_request_at_a_limit_has_the_same_tools_and_may_call_none(
    serve: Serve, connect: Connect, wire: str
) -> None:
    server = await serve([reply_of(wire, calls=VISIT), reply_of(wire, "Sunny.")])
    service = create_ai_service(Limited, chat_model=connect(wire, server))

    result = await service.say("How is it?")

    first, last = server.requests
    assert (result.content, result.stopped_by) == ("Sunny.", "max_tool_rounds")
    assert last["tool_choice"] == NO_TOOL[wire]
    assert last["tools"] == first["tools"]


@pytest.mark.parametrize("wire", OWN_WIRES)
async def test_the_last_request_of_a_stream_may_call_no_tool(serve: Serve, connect: Connect, wire: str) -> None:
    replies = [reply_of(wire, calls=VISIT, streamed=True), reply_of(wire, "Sunny.", streamed=True)]
    server = await serve(replies)
    service = create_ai_service(Limited, chat_model=connect(wire, server))

    assert "".join([each async for each in service.stream("How is it?")]) == "Sunny."
    assert server.requests[1]["tool_choice"] == NO_TOOL[wire]


@pytest.mark.parametrize("wire", OWN_WIRES)
async def test_the_last_request_at_a_limit_forces_the_answer_tool(serve: Serve, connect: Connect, wire: str) -> None:
    def answer(body: dict[str, Any]) -> Scripted:
        if len(server.requests) == 1:
            return reply_of(wire, calls=VISIT)
        name = body["tools"][-1].get("function", body["tools"][-1])["name"]
        return reply_of(wire, calls=[("c2", name, {"degrees": 20})])

    server = await serve(answer)
    service = create_ai_service(Limited, chat_model=connect(wire, server))

    result = await service.read("How is it?")

    choice = server.requests[1]["tool_choice"]
    assert (
        choice.get("function", choice)["name"]
        == server.requests[1]["tools"][-1].get("function", server.requests[1]["tools"][-1])["name"]
    )
    assert (result.content, result.stopped_by) == ({"degrees": 20}, "max_tool_rounds")
