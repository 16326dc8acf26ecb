"""Models of pydantic-ai: its own test models, and its providers against local servers."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import pytest
from pydantic_ai import exceptions as theirs
from pydantic_ai.messages import (
    BinaryContent,
    ImageUrl,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, DeltaThinkingPart, DeltaToolCall, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.native_tools import WebSearchTool
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.usage import RequestUsage

from tests.models import messages_api
from tests.models.scripted_server import Scripted, Serve, call, chunk, completion, stream
from toolbox import (
    AiMessage,
    AudioContent,
    ChatRequest,
    CompleteResponse,
    CompleteToolCall,
    FinishReason,
    IllegalConfigurationError,
    ImageContent,
    ModelConnectionError,
    ModelError,
    ModelHttpError,
    ModelProtocolError,
    ModelRefusedError,
    ModelTimeoutError,
    ModelTruncatedError,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    PdfContent,
    PydanticAiChatModel,
    ResponseFormat,
    StreamEvent,
    SystemMessage,
    TokenUsage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolSpecification,
    UnsupportedContentError,
    UserMessage,
    create_ai_service,
)

pytestmark = pytest.mark.anyio

HI = ChatRequest([UserMessage("Hi")])
ADD = ToolSpecification("add", "Adds", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
SOON = {"retry-after": "0.01"}


class Function:
    """A model that answers with a function, and keeps what it was asked."""

    def __init__(self, *replies: ModelResponse | Exception, **profile: Any) -> None:
        self.replies = list(replies)
        self.asked: list[list[ModelMessage]] = []
        self.infos: list[AgentInfo] = []
        known = ModelProfile(supports_json_schema_output=True, **profile)
        self.model = FunctionModel(self._reply, stream_function=self._stream, profile=known)

    def _reply(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        self.asked.append(messages)
        self.infos.append(info)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def _stream(self, messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        for number, part in enumerate(self._reply(messages, info).parts):
            match part:
                case TextPart(content):
                    for word in content.split(" "):
                        yield f"{word} "
                case ThinkingPart(content):
                    yield {number: DeltaThinkingPart(content=content)}
                case ToolCallPart(name, arguments, identity):
                    yield {number: DeltaToolCall(name=name, json_args="", tool_call_id=identity)}
                    yield {number: DeltaToolCall(json_args=json.dumps(arguments))}


async def events_of(model: PydanticAiChatModel, request: ChatRequest = HI) -> list[StreamEvent]:
    return [event async for event in model.stream(request)]


# --- a model of the library's own


async def test_text_thoughts_calls_and_usage_are_read() -> None:
    usage = RequestUsage(
        input_tokens=10, output_tokens=5, cache_read_tokens=3, cache_write_tokens=2, details={"reasoning_tokens": 4}
    )
    parts = [ThinkingPart("Hm."), TextPart("Let me see."), ToolCallPart("add", {"a": 1}, "call_1")]
    function = Function(ModelResponse(parts, usage=usage, finish_reason="tool_call", provider_response_id="r1"))

    response = await PydanticAiChatModel(function.model).chat(ChatRequest([UserMessage("Hi")], (ADD,)))

    assert response.ai_message.text == "Let me see."
    assert response.ai_message.reasoning == "Hm."
    assert response.ai_message.tool_execution_requests == (ToolExecutionRequest("call_1", "add", '{"a":1}'),)
    assert response.token_usage == TokenUsage(10, 5, 3, 4, 2)
    assert (response.finish_reason, response.id) == (FinishReason.TOOL_EXECUTION, "r1")
    assert response.model == function.model.model_name


async def test_reasoning_tokens_that_the_library_counts_are_read() -> None:
    usage = RequestUsage(input_tokens=10, output_tokens=5, output_reasoning_tokens=3)
    function = Function(ModelResponse([TextPart("Hi")], usage=usage))

    response = await PydanticAiChatModel(function.model).chat(HI)

    assert response.token_usage == TokenUsage(10, 5, 0, 3)


async def test_a_stream_has_pieces_and_one_complete_response() -> None:
    parts = [ThinkingPart("Hm."), TextPart("Let me see."), ToolCallPart("add", {"a": 1}, "call_1")]

    events = await events_of(PydanticAiChatModel(Function(ModelResponse(parts)).model))

    kinds = [PartialReasoning, PartialResponse, PartialResponse, PartialResponse]
    assert [type(each) for each in events] == [*kinds, PartialToolCall, CompleteToolCall, CompleteResponse]
    assert events[-2] == CompleteToolCall(0, ToolExecutionRequest("call_1", "add", '{"a": 1}'))
    last = events[-1]
    assert isinstance(last, CompleteResponse)
    assert last.response.ai_message.text == "Let me see. "
    assert last.response.ai_message.reasoning == "Hm."


async def test_messages_are_translated() -> None:
    function = Function(ModelResponse([TextPart("ok")]))
    png = b"\x89PNG"
    asked = AiMessage("So", [ToolExecutionRequest("c1", "add", '{"a": 1,}')])
    result = ToolExecutionResultMessage("c1", "add", "no", is_error=True)
    contents = [
        "Look",
        ImageContent(data=png, detail="low"),
        ImageContent("https://a.example/a.png"),
        PdfContent(data=b"%PDF-"),
    ]
    messages = [SystemMessage("Be brief."), UserMessage("Hi"), asked, result, UserMessage(contents)]

    await PydanticAiChatModel(function.model).chat(ChatRequest(messages, (ADD,)))

    first, reply, second = function.asked[0]
    assert isinstance(first, ModelRequest)
    assert [(part.part_kind, part.content) for part in first.parts] == [  # type: ignore[union-attr]  # both have it
        ("system-prompt", "Be brief."),
        ("user-prompt", "Hi"),
    ]
    assert [part.part_kind for part in reply.parts] == ["text", "tool-call"]
    assert isinstance(called := reply.parts[1], ToolCallPart)
    assert called.args_as_dict() == {"a": 1}
    returned, prompt = second.parts
    assert isinstance(returned, ToolReturnPart)
    assert (returned.tool_call_id, returned.content, returned.outcome) == ("c1", "no", "failed")
    assert isinstance(prompt, UserPromptPart)
    text, image, link, document = prompt.content
    assert text == "Look"
    assert isinstance(image, BinaryContent)
    assert (image.data, image.media_type, image.vendor_metadata) == (png, "image/png", {"detail": "low"})
    assert isinstance(link, ImageUrl)
    assert isinstance(document, BinaryContent)
    assert document.media_type == "application/pdf"


async def test_tools_formats_and_settings_are_sent() -> None:
    function = Function(ModelResponse([TextPart("{}")]), supports_thinking=True)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request = ChatRequest(
        [UserMessage("Hi")],
        (ADD,),
        ResponseFormat("person", schema, "A person"),
        "auto",
        {"top_p": 0.5, "stop": ["x"]},
        temperature=0.1,
        reasoning="low",
        max_output_tokens=99,
    )

    await PydanticAiChatModel(function.model, parallel_tool_calls=False, temperature=1.0).chat(request)

    [info] = function.infos
    assert [(each.name, each.description, each.parameters_json_schema) for each in info.function_tools] == [
        ("add", "Adds", ADD.parameters)
    ]
    settings: Any = info.model_settings
    assert settings | {"thinking": "low"} == {
        "temperature": 0.1,
        "parallel_tool_calls": False,
        "top_p": 0.5,
        "stop_sequences": ["x"],
        "max_tokens": 99,
        "thinking": "low",
        "tool_choice": "auto",
    }
    assert info.model_request_parameters.thinking == "low"
    wanted = info.model_request_parameters.output_object
    assert wanted is not None
    assert (wanted.name, wanted.description, info.model_request_parameters.output_mode) == (
        "person",
        "A person",
        "native",
    )


async def test_server_side_tools_are_those_of_the_library() -> None:
    function = Function(ModelResponse([TextPart("found")]), supported_native_tools=frozenset({WebSearchTool}))
    model, asked = PydanticAiChatModel(function.model), UserMessage("Hi")
    tool = WebSearchTool()

    await model.chat(ChatRequest([asked], parameters={"tools": [tool]}))
    assert function.infos[0].model_request_parameters.native_tools == [tool]

    with pytest.raises(IllegalConfigurationError, match="contains a dict"):
        await model.chat(ChatRequest([asked], parameters={"tools": [{"type": "web_search"}]}))


@pytest.mark.parametrize(
    ("choice", "sent"), [("required", "required"), ("any", "required"), ("add", ["add"]), ("none", "none")]
)
async def test_tool_choices_have_the_names_of_the_library_and_turn_reasoning_off(choice: str, sent: Any) -> None:
    function = Function(ModelResponse([TextPart("ok")]), supports_thinking=True)

    await PydanticAiChatModel(function.model, reasoning="high").chat(
        ChatRequest([UserMessage("Hi")], (ADD,), tool_choice=choice)
    )

    settings: Any = function.infos[0].model_settings
    assert settings["tool_choice"] == sent
    assert (function.infos[0].model_request_parameters.thinking is None) is (choice != "none")


async def test_reasoning_can_be_turned_off() -> None:
    function = Function(ModelResponse([TextPart("ok")]), supports_thinking=True)

    await PydanticAiChatModel(function.model, reasoning="none").chat(HI)

    assert function.infos[0].model_request_parameters.thinking is False


async def test_replies_are_sent_back_as_they_came_until_they_change() -> None:
    parts = [
        ThinkingPart("Hm.", signature="sig", provider_name="function"),
        TextPart("So"),
        ToolCallPart("add", {"a": 1}, "c1"),
    ]
    function = Function(ModelResponse(parts), ModelResponse([TextPart("1")]), ModelResponse([TextPart("1")]))
    model = PydanticAiChatModel(function.model)
    reply = (await model.chat(ChatRequest([UserMessage("Hi")], (ADD,)))).ai_message
    kept = AiMessage(reply.text, reply.tool_execution_requests, None, json.loads(json.dumps(reply.attributes)))
    changed = AiMessage("Other", reply.tool_execution_requests, None, reply.attributes)
    result = ToolExecutionResultMessage("c1", "add", "1")

    await model.chat(ChatRequest([UserMessage("Hi"), kept, result]))
    await model.chat(ChatRequest([UserMessage("Hi"), changed, result]))

    assert [part.part_kind for part in function.asked[1][1].parts] == ["thinking", "text", "tool-call"]
    assert isinstance(thought := function.asked[1][1].parts[0], ThinkingPart)
    assert thought.signature == "sig"
    assert [part.part_kind for part in function.asked[2][1].parts] == ["text", "tool-call"]


async def test_paused_replies_are_continued_and_their_usage_is_added() -> None:
    usage = RequestUsage(input_tokens=10, output_tokens=5)
    paused = ModelResponse([TextPart("One. ")], usage=usage, state="suspended")
    function = Function(paused, paused, ModelResponse([TextPart("Two.")], usage=usage))

    response = await PydanticAiChatModel(function.model).chat(HI)

    assert response.ai_message.text == "One. One. Two."
    assert response.token_usage == TokenUsage(30, 15)
    assert [len(messages) for messages in function.asked] == [1, 2, 3]


async def test_a_reply_is_continued_at_most_ten_times() -> None:
    function = Function(*[ModelResponse([TextPart("x")], state="suspended") for _ in range(20)])

    with pytest.raises(ModelProtocolError, match="10 continuations"):
        await PydanticAiChatModel(function.model).chat(HI)

    assert len(function.asked) == 11


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (
            ModelResponse([TextPart("no")], finish_reason="content_filter", provider_details={"refusal": "No."}),
            ModelRefusedError,
        ),
        (
            ModelResponse([], finish_reason="content_filter", provider_details={"finish_reason": "refusal"}),
            ModelRefusedError,
        ),
        (ModelResponse([], finish_reason="content_filter"), ModelRefusedError),
        (ModelResponse([], finish_reason="length"), ModelTruncatedError),
        (theirs.ModelHTTPError(418, "m", {"error": {"message": "teapot"}}), ModelHttpError),
        (theirs.ContentFilterError("no"), ModelRefusedError),
        (theirs.UnexpectedModelBehavior("odd"), ModelProtocolError),
        (theirs.ModelAPIError("m", "gone"), ModelConnectionError),
        (theirs.ModelTimeoutError("m", "late"), ModelTimeoutError),
    ],
)
async def test_failures_are_errors_of_models(reply: Any, error: type[ModelError]) -> None:
    with pytest.raises(error) as caught:
        await PydanticAiChatModel(Function(reply).model, max_retries=0).chat(HI)

    if isinstance(caught.value, ModelHttpError):
        assert (caught.value.status, caught.value.message) == (418, "teapot")


@pytest.mark.parametrize("failure", [ModelHttpError(400, "no"), LookupError("a bug")])
async def test_errors_that_are_not_converted_are_not_their_own_cause(failure: Exception) -> None:
    for ask in (PydanticAiChatModel.chat, events_of):
        with pytest.raises(type(failure)) as caught:
            await ask(PydanticAiChatModel(Function(failure).model, max_retries=0), HI)

        assert caught.value is failure
        assert caught.value.__cause__ is None


async def test_errors_of_a_program_stay_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError):
        await PydanticAiChatModel(Function(ZeroDivisionError()).model).chat(HI)


@pytest.mark.parametrize("status", [408, 409, 429, 500, 529])
async def test_transient_failures_are_retried(status: int) -> None:
    failure = theirs.ModelHTTPError(status, "m", headers=SOON)
    for streamed in (False, True):
        function = Function(failure, failure, ModelResponse([TextPart("ok")]))
        model = PydanticAiChatModel(function.model)

        _ = await events_of(model) if streamed else await model.chat(HI)

        assert len(function.asked) == 3


@pytest.mark.parametrize(
    "failure", [theirs.ModelHTTPError(400, "m"), theirs.ModelHTTPError(429, "m", headers={"retry-after": "900"})]
)
async def test_other_failures_are_not_retried(failure: Exception) -> None:
    function = Function(failure)

    with pytest.raises(ModelHttpError):
        await PydanticAiChatModel(function.model).chat(HI)

    assert len(function.asked) == 1


async def test_a_stream_is_not_retried_after_a_piece() -> None:
    asked = 0

    async def broken(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        nonlocal asked
        asked += 1
        yield "Hel"
        raise theirs.ModelHTTPError(503, "m")

    seen: list[StreamEvent] = []
    with pytest.raises(ModelHttpError):
        async for event in PydanticAiChatModel(FunctionModel(stream_function=broken)).stream(HI):
            seen.append(event)

    assert seen == [PartialResponse("Hel")]
    assert asked == 1


async def test_replies_are_limited_in_size() -> None:
    for streamed in (False, True):
        model = PydanticAiChatModel(Function(ModelResponse([TextPart("x" * 99)])).model, max_reply_bytes=50)

        with pytest.raises(ModelProtocolError, match="max_reply_bytes"):
            _ = await events_of(model) if streamed else await model.chat(HI)


async def test_a_call_that_takes_too_long_is_a_timeout() -> None:
    async def slow(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(ModelTimeoutError, match="raise timeout="):
        await PydanticAiChatModel(FunctionModel(slow), timeout=0.05).chat(HI)


async def test_a_service_with_tools_runs_on_the_librarys_test_model() -> None:
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    ran: list[int] = []

    def add(a: int) -> int:
        """Add."""
        ran.append(a)
        return a + 1

    desk = create_ai_service(Desk, chat_model=PydanticAiChatModel(TestModel()), tools=[add])

    assert "add" in await desk.ask("Hi")
    assert len(ran) == 1


async def test_the_profile_says_if_schemas_are_supported() -> None:
    known = FunctionModel(lambda *_: ModelResponse([]), profile=ModelProfile(supports_json_schema_output=False))

    assert PydanticAiChatModel(known).supports_response_format is False
    assert PydanticAiChatModel(known, supports_response_format=True).supports_response_format is True
    assert PydanticAiChatModel(Function().model).supports_response_format is True


@pytest.mark.parametrize(
    ("model", "options", "problem"),
    [
        ("nobody:model", {}, "nobody"),
        ("", {}, "expected a model"),
        (7, {}, "expected a model, got int"),
        (TestModel(), {"reasoning": "much"}, "unknown reasoning 'much'"),
        (TestModel(), {"timeout": 0}, "invalid timeout=0"),
        (TestModel(), {"max_retries": -1}, "invalid max_retries=-1"),
        (TestModel(), {"max_reply_bytes": 0}, "invalid max_reply_bytes=0"),
    ],
)
def test_invalid_settings_are_problems(model: Any, options: Any, problem: str) -> None:
    with pytest.raises(IllegalConfigurationError, match=problem):
        PydanticAiChatModel(model, **options)


# --- real providers of the library


# The providers' packages are imported by these tests only: each worker collects all tests.


def on_openai(url: str) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel("gpt-4o", provider=OpenAIProvider(base_url=url, api_key="key-of-the-test"))


def on_anthropic(url: str) -> Any:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    provider = AnthropicProvider(base_url=url.removesuffix("/v1"), api_key="key-of-the-test")
    return AnthropicModel("claude-haiku-4-5", provider=provider)


ASKING = completion(
    {"role": "assistant", "content": None, "tool_calls": [call("add", '{"a": 1}', id="c1", type="function")]},
    "tool_calls",
)
ASKING_STREAM = stream(
    chunk({"role": "assistant", "content": "So"}),
    chunk({"tool_calls": [call("add", '{"a"', id="c1", type="function", index=0)]}),
    chunk({"tool_calls": [call(None, ": 1}", index=0)]}),
    chunk({}, "tool_calls"),
    {
        "id": "1",
        "object": "chat.completion.chunk",
        "model": "m",
        "choices": [],
        "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18},
    },
)


async def test_the_openai_provider_sends_and_reads_tools(serve: Serve) -> None:
    server = await serve([ASKING, ASKING_STREAM])
    model = PydanticAiChatModel(on_openai(server.url))
    request = ChatRequest([SystemMessage("Be brief."), UserMessage("Hi")], (ADD,))

    whole = (await model.chat(request)).ai_message
    *_, last = await events_of(model, request)
    await model.aclose()

    assert isinstance(last, CompleteResponse)
    for reply in (whole, last.response.ai_message):
        assert [(each.id, each.name, json.loads(each.arguments)) for each in reply.tool_execution_requests] == [
            ("c1", "add", {"a": 1})
        ]
    assert last.response.token_usage == TokenUsage(11, 7)
    assert [each["role"] for each in server.requests[0]["messages"]] == ["system", "user"]
    assert server.requests[0]["tools"][0]["function"]["name"] == "add"


@pytest.mark.parametrize("streamed", [False, True])
async def test_there_is_one_layer_of_retries(serve: Serve, streamed: bool) -> None:
    server = await serve(lambda _: Scripted(b'{"error": {"message": "busy"}}', status=503, headers=SOON))
    model = PydanticAiChatModel(on_openai(server.url))

    with pytest.raises(ModelHttpError, match="busy") as caught:
        _ = await events_of(model) if streamed else await model.chat(HI)
    await model.aclose()

    assert (caught.value.status, len(server.requests)) == (503, 3)


async def test_an_unreachable_server_is_a_connection_error() -> None:
    async with Serve() as serve:
        url = (await serve([])).url
    model = PydanticAiChatModel(on_openai(url), max_retries=0)

    with pytest.raises(ModelConnectionError):
        await model.chat(HI)
    await model.aclose()


async def test_contents_that_a_provider_cannot_send_raise_before_anything_is_sent(serve: Serve) -> None:
    server = await serve([])
    model = PydanticAiChatModel(on_anthropic(server.url))

    with pytest.raises(UnsupportedContentError, match="AudioContent"):
        await model.chat(ChatRequest([UserMessage(["Listen", AudioContent(b"RIFF", "audio/wav")])]))
    await model.aclose()

    assert server.requests == []


async def test_thoughts_of_the_anthropic_provider_are_sent_back(serve: Serve) -> None:
    said = [messages_api.thinking("Hm."), messages_api.tool_use("add", {"a": 1})]
    server = await serve([messages_api.message(*said, stop="tool_use"), messages_api.message(messages_api.text("1"))])
    model = PydanticAiChatModel(on_anthropic(server.url), reasoning="low", max_tokens=4096)
    messages = [UserMessage("Hi")]

    first = await model.chat(ChatRequest(messages, (ADD,)))
    result = ToolExecutionResultMessage("toolu_1", "add", "1")
    await model.chat(ChatRequest([*messages, first.ai_message, result], (ADD,)))
    await model.aclose()

    assert first.token_usage == TokenUsage(15, 5, 3, 0, 2)
    assert server.requests[0]["thinking"]["type"] == "enabled"
    kinds: Callable[[Any], list[str]] = lambda turn: [each["type"] for each in turn["content"]]  # noqa: E731
    assert kinds(server.requests[1]["messages"][1]) == ["thinking", "tool_use"]
    assert server.requests[1]["messages"][1]["content"][0] == said[0]
