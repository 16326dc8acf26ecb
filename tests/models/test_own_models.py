"""The models of the documentation: scripted and demo models, choosing a model, a program's own model."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    Container,
    DemoChatModel,
    FinishReason,
    IllegalConfigurationError,
    ImageContent,
    OpenAiChatModel,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    ResponseFormat,
    Result,
    StreamEvent,
    SystemMessage,
    TextContent,
    TokenUsage,
    ToolboxSettings,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolSpecification,
    UserMessage,
    create_ai_service,
    register_ai_service,
    tool,
    tool_executor_from,
    tool_specification_from,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

ASKED = ChatRequest([UserMessage("hi")])


# --- scripted


async def test_scripts_accept_every_kind_of_reply() -> None:
    request = tool_call("add", {"a": 1}, id="7")
    whole = ChatResponse(AiMessage("whole"), TokenUsage(1, 2), FinishReason.LENGTH)

    async def later(asked: ChatRequest) -> str:
        await asyncio.sleep(0)
        return f"later {asked.messages[-1].text}"  # type: ignore[union-attr]

    model = ScriptedChatModel(
        [
            "text",
            AiMessage("message"),
            AiMessage(None, [request]),
            whole,
            ValueError("broken"),
            lambda asked: f"called {len(asked.messages)}",
            lambda asked: AiMessage("made"),
            lambda asked: whole,
            later,
        ]
    )
    assert (await model.chat(ASKED)).ai_message == AiMessage("text")
    assert (await model.chat(ASKED)).ai_message == AiMessage("message")
    asked = await model.chat(ASKED)
    assert asked.ai_message.tool_execution_requests == (request,)
    assert await model.chat(ASKED) is whole
    with pytest.raises(ValueError, match="broken"):
        await model.chat(ASKED)
    assert (await model.chat(ASKED)).ai_message.text == "called 1"
    assert (await model.chat(ASKED)).ai_message.text == "made"
    assert await model.chat(ASKED) is whole
    assert (await model.chat(ASKED)).ai_message.text == "later hi"
    assert model.requests == [ASKED] * 9


async def test_a_script_without_more_replies_raises_assertion_error() -> None:
    model = ScriptedChatModel([])
    with pytest.raises(AssertionError):
        await model.chat(ASKED)
    with pytest.raises(AssertionError):
        async for _ in model.stream(ASKED):
            pass


async def test_the_scripted_model_streams_its_reply() -> None:
    request = tool_call("add", {"a": 1})
    message = AiMessage("a b", [request], reasoning="r")
    model = ScriptedChatModel([message, ValueError("broken")])
    events = [each async for each in model.stream(ASKED)]
    assert "".join(each.text for each in events if isinstance(each, PartialResponse)) == "a b"
    assert "".join(each.text for each in events if isinstance(each, PartialReasoning)) == "r"
    pieces = [each.partial_arguments for each in events if isinstance(each, PartialToolCall)]
    assert "".join(pieces) == request.arguments
    assert CompleteToolCall(0, request) in events
    assert isinstance(events[-1], CompleteResponse)
    assert events[-1].response.ai_message == message
    with pytest.raises(ValueError, match="broken"):
        async for _ in model.stream(ASKED):
            pass
    assert len(model.requests) == 2


def test_tool_call_returns_a_tool_execution_request() -> None:
    assert tool_call("add", {"a": 1}, id="x") == ToolExecutionRequest("x", "add", '{"a": 1}')
    assert tool_call("add").arguments == "{}"
    assert tool_call("add", "raw {", id="y").arguments == "raw {"
    assert tool_call("add").id != tool_call("add").id
    assert isinstance(tool_call("add").id, str)


async def test_an_error_of_the_script_reaches_the_caller_of_a_service_unchanged() -> None:
    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    error = KeyError("x")
    with pytest.raises(KeyError) as raised:
        await create_ai_service(Assistant, chat_model=ScriptedChatModel([error])).chat("x")
    assert raised.value is error


# --- what it takes to be a model


async def test_any_object_with_chat_is_a_model() -> None:
    class Echo:
        async def chat(self, request: ChatRequest) -> ChatResponse:
            return ChatResponse(AiMessage(request.messages[-1].text))  # type: ignore[union-attr]

    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

        def stream(self, text: str) -> AsyncIterator[str]: ...

    service = create_ai_service(Assistant, chat_model=Echo())
    assert await service.chat("x") == "x"
    assert [each async for each in service.stream("y")] == ["y"]


async def test_a_model_may_stream_by_a_coroutine_free_iterator() -> None:
    class Stream:
        def __init__(self) -> None:
            self.events = iter([PartialResponse("a"), CompleteResponse(ChatResponse(AiMessage("a")))])

        def __aiter__(self) -> "Stream":
            return self

        async def __anext__(self) -> StreamEvent:
            for event in self.events:
                return event
            raise StopAsyncIteration

    class Model:
        async def chat(self, request: ChatRequest) -> ChatResponse:
            raise AssertionError("not asked for")

        def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
            return Stream()

    class Assistant(Protocol):
        def stream(self, text: str) -> AsyncIterator[str]: ...

    assert [each async for each in create_ai_service(Assistant, chat_model=Model()).stream("y")] == ["a"]


async def test_a_tool_loop_can_be_written_with_the_low_level_api() -> None:
    def add(a: int, b: int) -> int:
        return a + b

    specification, executor = tool_specification_from(add), tool_executor_from(add)
    model = ScriptedChatModel([tool_call("add", {"a": 1, "b": 2}), "3"])
    messages: list[Any] = [SystemMessage("Add."), UserMessage("1 + 2")]
    while True:
        reply = (await model.chat(ChatRequest(messages, [specification]))).ai_message
        messages.append(reply)
        if not reply.has_tool_execution_requests:
            break
        for request in reply.tool_execution_requests:
            result: Any = executor(request, None)
            messages.append(ToolExecutionResultMessage.of(request, result.text))
    assert [type(each).__name__ for each in messages] == [
        "SystemMessage",
        "UserMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
        "AiMessage",
    ]
    assert reply.text == "3"


def test_an_image_needs_either_a_url_or_data() -> None:
    assert ImageContent("http://x/y.png").url == "http://x/y.png"
    assert ImageContent(data=b"abc", mime_type="image/png").mime_type == "image/png"
    with pytest.raises(ValueError, match="url"):
        ImageContent()


# --- demo


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def remember(note: str) -> None:
    """Remembers."""


def impossible(key: dict[str, int]) -> str:
    """Cannot be filled from what is said."""
    return "x"


class Assistant(Protocol):
    async def chat(self, text: str) -> Result[str]: ...

    def stream(self, text: str) -> AsyncIterator[str]: ...


async def test_the_demo_calls_what_it_can_fill_once_and_ends_with_a_sentence() -> None:
    service = create_ai_service(Assistant, chat_model=DemoChatModel(), tools=(weather, impossible))
    result = await service.chat("Bern")
    assert [each.request.name for each in result.tool_executions] == ["weather"]
    assert "sunny in Bern" in result.content


async def test_the_demo_calls_one_tool_per_round() -> None:
    def now() -> str:
        return "noon"

    def where() -> str:
        return "here"

    service = create_ai_service(Assistant, chat_model=DemoChatModel(), tools=(now, where))
    result = await service.chat("x")
    replies = [each for each in result.messages if isinstance(each, AiMessage)]
    assert [len(each.tool_execution_requests) for each in replies] == [1, 1, 0]
    assert "noon" in result.content
    assert "here" in result.content


async def test_the_demo_is_deterministic_and_streams() -> None:
    service = create_ai_service(Assistant, chat_model=DemoChatModel(), tools=(weather,))
    answers = {(await service.chat("Bern")).content for _ in range(3)}
    assert len(answers) == 1
    assert "".join([each async for each in service.stream("Bern")]) in answers


async def test_the_demo_answers_without_tools() -> None:
    service = create_ai_service(Assistant, chat_model=DemoChatModel())
    assert (await service.chat("Hello")).content


async def test_the_demo_feeds_results_into_further_tools() -> None:
    def find_user(name: str) -> dict[str, int]:
        return {"user_id": 7}

    def orders(user_id: int) -> list[str]:
        return [f"order of {user_id}"]

    service = create_ai_service(Assistant, chat_model=DemoChatModel(), tools=(orders, find_user))
    result = await service.chat("Ada")
    assert [each.request.name for each in result.tool_executions] == ["find_user", "orders"]
    assert "order of 7" in result.content


async def test_the_demo_fills_a_response_format() -> None:
    class Structured(Protocol):
        async def count(self, text: str) -> int: ...

        async def flag(self, text: str) -> bool: ...

        async def words(self, text: str) -> list[str]: ...

    service = create_ai_service(Structured, chat_model=DemoChatModel())
    assert isinstance(await service.count("There are 3 apples"), int)
    assert isinstance(await service.flag("Is it?"), bool)
    assert isinstance(await service.words("a b"), list)


# --- which model


@pytest.fixture(autouse=True)
def no_models_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_MODEL", "OPENAI_API_KEY", "OPENAI_BASE_URL", "TOOLBOX_DEMO", "TOOLBOX_MODELS__DEFAULT__MODEL"):
        monkeypatch.delenv(name, raising=False)


@register_ai_service
class Service(Protocol):
    async def chat(self, text: str) -> str: ...


@register_ai_service(model="tool-use")
class ToolUse(Protocol):
    async def chat(self, text: str) -> str: ...


@register_ai_service(model="gpt-4.1")
class Dotted(Protocol):
    async def chat(self, text: str) -> str: ...


def test_a_service_without_a_model_is_a_problem_with_suggestions() -> None:
    [problem] = Container().register(Service).check()
    assert problem.where == "Service"
    for way in ("models", "TOOLBOX_MODELS__DEFAULT__MODEL", "OPENAI_MODEL", "TOOLBOX_DEMO"):
        assert way in problem.fix


def test_a_container_without_services_needs_no_model() -> None:
    assert Container().check() == []
    with Container():
        pass


async def test_the_demo_is_used_only_with_toolbox_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_DEMO", "1")
    async with Container().register(Service) as container:
        assert await container.get(Service).chat("Hello")


@pytest.mark.parametrize("variable", ["OPENAI_API_KEY", "OPENAI_BASE_URL"])
def test_the_variables_of_openai_configure_the_default_model(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("OPENAI_MODEL", "gpt")
    assert Container().register(Service).check() != []
    monkeypatch.setenv(variable, "http://localhost:1/v1")
    assert Container().register(Service).check() == []
    assert Container().register(ToolUse).check() != []


def test_models_are_configured_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    container = Container().register(ToolUse, Dotted)
    assert [problem.where for problem in container.check()] == ["ToolUse", "Dotted"]
    monkeypatch.setenv("TOOLBOX_MODELS__TOOL_USE__MODEL", "gpt")
    monkeypatch.setenv("TOOLBOX_MODELS__TOOL_USE__API_KEY", "secret")
    monkeypatch.setenv("TOOLBOX_MODELS__GPT_4_1__MODEL", "gpt")
    monkeypatch.setenv("TOOLBOX_MODELS__GPT_4_1__BASE_URL", "http://localhost:1/v1")
    assert container.check() == []


async def test_models_passed_by_the_program_win_over_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_DEMO", "1")
    monkeypatch.setenv("TOOLBOX_MODELS__DEFAULT__MODEL", "gpt")
    monkeypatch.setenv("OPENAI_MODEL", "gpt")
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    async with Container(models={"default": ScriptedChatModel(["given"])}).register(Service) as container:
        assert await container.get(Service).chat("x") == "given"


def test_an_unknown_name_is_reported_with_the_closest_match() -> None:
    container = Container(models={"default": ScriptedChatModel([]), "tool_use": ScriptedChatModel([])})
    [problem] = container.register(ToolUse).check()
    assert "tool-use" in problem.what
    assert "tool_use" in problem.what + problem.fix


async def test_a_model_passed_by_the_program_is_not_closed() -> None:
    closed: list[bool] = []

    class Model(ScriptedChatModel):
        async def aclose(self) -> None:
            closed.append(True)

    async with Container(models={"default": Model(["x"])}).register(Service) as container:
        await container.get(Service).chat("x")
    assert closed == []


def test_an_openai_model_is_created_without_a_request() -> None:
    model = OpenAiChatModel("gpt", "http://localhost:1/v1", "key")
    assert hasattr(model, "chat")
    assert hasattr(model, "stream")
    assert hasattr(model, "aclose")


def test_settings_have_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ToolboxSettings()
    assert (settings.pool_size, settings.thread_limit, settings.stop_timeout) == (32, 256, 10.0)
    assert (settings.max_result_chars, settings.max_concurrent_tools, settings.slow_call_warning) == (None, 16, 0.1)
    monkeypatch.setenv("TOOLBOX_POOL_SIZE", "3")
    assert ToolboxSettings().pool_size == 3


async def test_images_of_a_failed_tool_are_sent() -> None:
    image = ImageContent("http://x/y.png")

    @tool
    def look() -> list[Any]:
        return [TextContent("see"), image]

    model = ScriptedChatModel([tool_call("look"), "done"])
    await create_ai_service(Assistant, chat_model=model, tools=(look,)).chat("x")
    message = model.requests[1].messages[-1]
    assert isinstance(message, ToolExecutionResultMessage)
    assert message.contents == (TextContent("see"), image)


def test_requests_and_formats_are_comparable_data() -> None:
    request = ChatRequest(
        [UserMessage("x")], [ToolSpecification("n")], ResponseFormat("f", {"type": "object"}), "auto", {"seed": 1}
    )
    assert request == ChatRequest(
        messages=(UserMessage("x"),),
        tool_specifications=(ToolSpecification("n"),),
        response_format=ResponseFormat(name="f", schema={"type": "object"}),
        tool_choice="auto",
        parameters={"seed": 1},
    )


async def test_invalid_chat_models_are_rejected_without_a_container() -> None:
    with pytest.raises(TypeError):
        create_ai_service(Assistant)  # type: ignore[call-arg]
    with pytest.raises((TypeError, IllegalConfigurationError), match="chat_model"):
        create_ai_service(Assistant, chat_model=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["gpt-4", ScriptedChatModel, None, 5])
def test_objects_that_are_not_models_are_a_problem(wrong: Any) -> None:
    [problem] = Container(models={"default": wrong}).register(Service).check()
    assert problem.where == "Service"
    assert "is not a model" in problem.what


@pytest.mark.parametrize("answer", [None, AiMessage("x"), "x"])
async def test_replies_that_are_not_a_chat_response_are_rejected(answer: Any) -> None:
    class Wrong:
        async def chat(self, request: ChatRequest) -> Any:
            return answer

    with pytest.raises(TypeError, match="must return a ChatResponse"):
        await create_ai_service(Assistant, chat_model=Wrong()).chat("x")
