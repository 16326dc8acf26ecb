"""Models in services: custom models, the demo model and the selection of models."""

from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    Container,
    DemoChatModel,
    IllegalConfigurationError,
    ImageContent,
    OpenAiChatModel,
    PartialResponse,
    ResponseFormat,
    Result,
    StreamEvent,
    SystemMessage,
    TextContent,
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


# --- custom models


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


async def test_models_can_stream_with_any_async_iterator() -> None:
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


# --- demo model


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def impossible(key: dict[str, int]) -> str:
    """The model cannot find arguments for it."""
    return "x"


class Assistant(Protocol):
    async def chat(self, text: str) -> Result[str]: ...

    def stream(self, text: str) -> AsyncIterator[str]: ...


async def test_the_demo_calls_tools_that_it_can_fill_once_and_ends_with_a_sentence() -> None:
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


async def test_the_demo_answers_without_tools() -> None:
    service = create_ai_service(Assistant, chat_model=DemoChatModel())
    assert (await service.chat("Hello")).content


async def test_the_demo_fills_a_response_format() -> None:
    class Structured(Protocol):
        async def count(self, text: str) -> int: ...

        async def flag(self, text: str) -> bool: ...

        async def words(self, text: str) -> list[str]: ...

    service = create_ai_service(Structured, chat_model=DemoChatModel())
    assert isinstance(await service.count("There are 3 apples"), int)
    assert isinstance(await service.flag("Is it?"), bool)
    assert isinstance(await service.words("a b"), list)


# --- selection of models


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


def test_a_container_without_services_needs_no_model() -> None:
    assert Container().check() == []
    with Container():
        pass


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


def test_an_openai_model_is_created_without_a_request() -> None:
    model = OpenAiChatModel("gpt", "http://localhost:1/v1", "key")
    assert hasattr(model, "chat")
    assert hasattr(model, "stream")
    assert hasattr(model, "aclose")


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
