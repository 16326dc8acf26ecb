"""`@fallback`: a function gives the answer of a method if no model answers."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import pytest

from tests.listening import Events
from toolbox import (
    AiMessage,
    ChatModel,
    ChatRequest,
    ChatResponse,
    Container,
    FallbackUsedEvent,
    MemoryId,
    ModelConnectionError,
    ModelError,
    ModelHttpError,
    ModelRefusedError,
    PartialReasoning,
    PartialResponse,
    Result,
    ReturnBehavior,
    ServiceCompletedEvent,
    StreamEvent,
    TokenStream,
    ToolRetry,
    UserMessage,
    blocking,
    create_ai_service,
    register_ai_service,
    run_on,
    run_on_thread,
    tool,
)
from toolbox.limits import UsageLimitExceededError, UsageLimits
from toolbox.models import fallback
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

DOWN = ModelHttpError(503, "overloaded")


@register_ai_service
class Desk(Protocol):
    async def chat(self, text: str) -> str: ...

    @fallback(chat)
    @staticmethod
    def offline(error: ModelError, text: str) -> str:
        return f"offline: {text} ({type(error).__name__})"

    async def detailed(self, text: str) -> Result[str]: ...

    @staticmethod
    @fallback(detailed)
    async def offline_too(text: str) -> str:
        return text.upper()

    def pieces(self, text: str) -> AsyncIterator[str]: ...

    def events(self, text: str) -> TokenStream: ...

    def numbers(self, text: str) -> AsyncIterator[int]: ...

    async def remember(self, room: MemoryId[str], text: str) -> str: ...


@fallback(Desk.pieces)
def offline_pieces() -> str:
    return "offline"


@fallback(Desk.events)
def offline_events() -> str:
    return "offline"


@fallback(Desk.numbers)
def offline_number() -> int:
    return 7


@fallback(Desk.remember)
def offline_memory(text: str) -> str:
    return "offline"


def desk(*replies: Any) -> Desk:
    return create_ai_service(Desk, chat_model=ScriptedChatModel(replies))


async def test_a_function_answers_if_the_model_fails() -> None:
    assert await desk(DOWN).chat("Hi") == "offline: Hi (ModelHttpError)"


async def test_a_result_has_the_value_of_the_function() -> None:
    result = await desk(DOWN).detailed("Hi")

    assert result.content == "HI"


async def test_a_stream_gets_the_answer_as_one_piece() -> None:
    service = desk(DOWN, DOWN, DOWN)

    assert [each async for each in service.pieces("Hi")] == ["offline"]
    assert [type(each).__name__ async for each in service.events("Hi")] == ["PartialResponse", "CompleteResponse"]
    assert [each async for each in service.numbers("Hi")] == [7]


@pytest.mark.parametrize("error", [ModelRefusedError("No."), ModelHttpError(400, "wrong"), ValueError("bug")], ids=str)
async def test_other_errors_reach_the_caller(error: Exception) -> None:
    with pytest.raises(type(error)):
        await desk(error).chat("Hi")


async def test_it_answers_after_the_last_model_of_the_chain() -> None:
    class First(ScriptedChatModel):
        fallback = ("local",)

    events = Events()
    models: dict[str, ChatModel] = {
        "default": First([DOWN]),
        "local": ScriptedChatModel([ModelConnectionError("gone")]),
    }
    async with Container(models=models).register(Desk).register_instance(events) as container:
        answer = await (await container.aget(Desk)).chat("Hi")

    assert answer == "offline: Hi (ModelConnectionError)"
    [used] = events.of(FallbackUsedEvent)
    assert isinstance(used.error, ModelConnectionError)
    assert (used.context.service, used.context.method) == (Desk, "chat")
    [completed] = events.of(ServiceCompletedEvent)
    assert completed.value == answer


async def test_nothing_of_the_call_enters_the_memory() -> None:
    async with Container(models={"default": ScriptedChatModel([DOWN])}).register(Desk) as container:
        assert await (await container.aget(Desk)).remember("room", "Hi") == "offline"
        assert list(await container.chat_memory(Desk, "room").messages()) == []


async def test_tools_that_ran_stay_done() -> None:
    done: list[str] = []

    def order() -> str:
        """Order."""
        done.append("order")
        return "ok"

    service = create_ai_service(Desk, chat_model=ScriptedChatModel([tool_call("order"), DOWN]), tools=order)

    assert await service.chat("Hi") == "offline: Hi (ModelHttpError)"
    assert done == ["order"]


async def test_limits_are_not_answered() -> None:
    model = ScriptedChatModel([tool_call("_order"), "done"])
    limited = create_ai_service(Desk, chat_model=model, tools=_order, limits=UsageLimits(model_calls=1))

    with pytest.raises(UsageLimitExceededError):
        await limited.chat("Hi")


def _order() -> str:
    """Order."""
    return "ok"


async def test_the_error_of_the_function_reaches_the_caller() -> None:
    class Broken(Protocol):
        async def chat(self, text: str) -> str: ...

        @fallback(chat)
        @staticmethod
        def offline() -> str:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await create_ai_service(Broken, chat_model=ScriptedChatModel([DOWN])).chat("Hi")


def test_what_cannot_work_is_a_problem_at_start() -> None:
    @register_ai_service
    class Wrong(Protocol):
        async def chat(self, text: str) -> str: ...

        @fallback(chat)
        @staticmethod
        def offline(words: str) -> int:
            return 1

        def helper(self) -> str:
            return "own"

        @fallback(helper)
        @staticmethod
        def unused() -> str:
            return ""

    text = "\n".join(map(str, Container(models={"default": ScriptedChatModel()}).register(Wrong).check()))

    assert "the method has no parameter 'words'" in text
    assert "it returns int, which does not fit the method's str" in text
    assert "Wrong.helper: @fallback has no effect" in text


def test_a_decorator_without_its_method_is_an_error() -> None:
    with pytest.raises(TypeError, match="@fallback"):
        fallback("chat")  # type: ignore[arg-type]


class Begins(ChatModel):
    """Sends some pieces of a reply, then fails."""

    def __init__(self, *pieces: StreamEvent) -> None:
        self._pieces = pieces

    async def chat(self, request: ChatRequest) -> ChatResponse:
        raise DOWN

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        for each in self._pieces:
            yield each
        raise DOWN


@pytest.mark.parametrize("piece", [PartialResponse("Once "), PartialReasoning("Hm")], ids=repr)
async def test_a_stream_that_has_begun_ends_with_the_error(piece: StreamEvent) -> None:
    seen: list[object] = []
    with pytest.raises(ModelHttpError):
        async for each in create_ai_service(Desk, chat_model=Begins(piece)).events("Hi"):
            seen.append(each)
    assert seen == [piece]


async def test_a_started_run_gets_the_answer_also_after_text_of_the_model() -> None:
    """Its caller waits for a value; who follows its events has seen more."""

    @tool
    def look() -> str:
        """Look."""
        return "a door"

    @register_ai_service(tools=look)
    class Watch(Protocol):
        async def chat(self, text: str) -> str: ...

        @fallback(chat)
        @staticmethod
        def offline() -> str:
            return "offline"

    model = ScriptedChatModel([AiMessage("I look.", [tool_call("look")]), DOWN])
    async with Container(models={"default": model}).register(Watch) as container:
        run = await container.runs.start(container.get(Watch).chat, "Hi")

        assert await container.runs.result(run) == "offline"


async def test_a_stream_has_nothing_but_the_answer_after_an_immediate_tool_failed() -> None:
    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    def broken() -> str:
        """Break."""
        raise ToolRetry("try another one")

    service = create_ai_service(Desk, chat_model=ScriptedChatModel([tool_call("broken"), DOWN]), tools=broken)
    assert [each async for each in service.pieces("Hi")] == ["offline"]


async def test_the_next_call_does_not_see_a_call_that_a_function_answered() -> None:
    model = ScriptedChatModel([DOWN, "Hello."])
    async with Container(models={"default": model}).register(Desk) as container:
        service = await container.aget(Desk)
        assert await service.remember("room", "first") == "offline"
        assert await service.remember("room", "second") == "Hello."
    assert [str(each) for each in model.requests[1].messages] == [str(UserMessage("second"))]


@pytest.mark.parametrize("mark", [lambda function: function, blocking, run_on_thread])
async def test_a_def_runs_where_a_def_tool_runs(mark: Callable[[Any], Any]) -> None:
    class Here(Protocol):
        async def chat(self, text: str) -> str: ...

        @mark
        @fallback(chat)
        @staticmethod
        def offline(text: str) -> str:
            return threading.current_thread().name

    service = create_ai_service(Here, chat_model=ScriptedChatModel([DOWN]))
    assert await service.chat("Hi") != threading.current_thread().name


async def test_a_def_may_return_an_awaitable() -> None:
    class Later(Protocol):
        async def chat(self, text: str) -> str: ...

        @fallback(chat)
        @staticmethod
        def offline(text: str) -> Awaitable[str]:
            async def answer() -> str:
                return text

            return answer()

    assert await create_ai_service(Later, chat_model=ScriptedChatModel([DOWN])).chat("Hi") == "Hi"


async def test_a_value_of_another_type_is_an_error() -> None:
    class Untyped(Protocol):
        async def chat(self, text: str) -> str: ...

        @fallback(chat)
        @staticmethod
        def offline():  # type: ignore[no-untyped-def]
            return 3

    with pytest.raises(TypeError, match=r"Untyped\.chat, @fallback offline returned int, which does not fit str"):
        await create_ai_service(Untyped, chat_model=ScriptedChatModel([DOWN])).chat("Hi")


async def test_a_subclass_keeps_replaces_or_removes_the_function() -> None:
    class Redeclared(Desk, Protocol):
        async def chat(self, text: str) -> str: ...

    class Other(Desk, Protocol):
        @staticmethod
        def offline(error: ModelError, text: str) -> str:
            return "other"

    class Without(Desk, Protocol):
        offline = None  # type: ignore[assignment]

    assert await create_ai_service(Redeclared, chat_model=ScriptedChatModel([DOWN])).chat("Hi") == (
        "offline: Hi (ModelHttpError)"
    )
    assert await create_ai_service(Other, chat_model=ScriptedChatModel([DOWN])).chat("Hi") == "other"
    with pytest.raises(ModelHttpError):
        await create_ai_service(Without, chat_model=ScriptedChatModel([DOWN])).chat("Hi")


def _problems_with(function: Callable[..., Any]) -> list[str]:
    class Checked(Protocol):
        async def chat(self, text: str) -> str: ...

    fallback(Checked.chat)(function)
    container = Container(models={"default": ScriptedChatModel()}).register(register_ai_service(Checked))
    return [each.what for each in container.check()]


def test_functions_that_do_not_fit_are_problems_at_start() -> None:
    def maybe() -> str | None: ...

    def result() -> Result[str]: ...  # type: ignore[empty-body]

    @run_on("nowhere")
    def elsewhere() -> str: ...  # type: ignore[empty-body]

    def everything(**values: Any) -> str: ...  # type: ignore[empty-body]

    assert _problems_with(maybe) == ["it returns str | None, which does not fit the method's str"]
    assert _problems_with(result) == ["it returns Result[str], which does not fit the method's str"]
    assert _problems_with(elsewhere) == ["unknown executor 'nowhere'"]
    assert _problems_with(everything) == ["the parameter 'values' cannot be passed by its name"]


def test_a_module_that_is_loaded_again_replaces_its_function() -> None:
    for _ in range(2):

        def offline() -> str: ...  # type: ignore[empty-body]

        fallback(Reloaded.chat)(offline)
    assert Container(models={"default": ScriptedChatModel()}).register(Reloaded).check() == []


@register_ai_service
class Reloaded(Protocol):
    async def chat(self, text: str) -> str: ...


async def test_cancellation_is_not_answered() -> None:
    with pytest.raises(asyncio.CancelledError):
        await desk(asyncio.CancelledError()).chat("Hi")
