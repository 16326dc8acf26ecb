"""Tool providers: objects, functions and beans that add tools to a call."""

import asyncio
import threading
from typing import Annotated, Any, Protocol

import pytest

from tests.problems import problems_of
from tests.tools.listing import Calculator, by_hand, offered, results, weather
from toolbox import (
    AiServiceTool,
    Container,
    IllegalConfigurationError,
    Inject,
    InvocationContext,
    MemoryId,
    Named,
    Result,
    ToolProvider,
    ToolProviderRequest,
    ToolProviderResult,
    ToolSpecification,
    UserMessage,
    application_scoped,
    create_ai_service,
    invocation_attributes,
    register_ai_service,
    request_scoped,
    run_on,
    tool,
    tools_from,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Assistant(Protocol):
    async def chat(self, text: str) -> Result[str]: ...


async def call_with(provider: Any, *replies: Any, **options: Any) -> ScriptedChatModel:
    model = ScriptedChatModel(replies or ["done"])
    await create_ai_service(Assistant, chat_model=model, tool_provider=provider, **options).chat("hello")
    return model


async def test_providers_can_be_sync_and_async_objects_and_functions() -> None:
    class Sync:
        def provide_tools(self, request: ToolProviderRequest) -> ToolProviderResult:
            return ToolProviderResult({ToolSpecification("mapped"): by_hand})

    class Async:
        async def provide_tools(self, request: ToolProviderRequest) -> ToolProviderResult | None:
            return ToolProviderResult([AiServiceTool(ToolSpecification("ready"), by_hand)])

    def function(request: ToolProviderRequest) -> ToolProviderResult:
        return ToolProviderResult([Calculator(), weather])

    async def later(request: ToolProviderRequest) -> ToolProviderResult | None:
        return None

    assert offered(await call_with(Sync())) == ["mapped"]
    assert offered(await call_with(Async())) == ["ready"]
    assert offered(await call_with(function)) == ["add", "weather"]
    assert offered(await call_with(later)) == []
    assert offered(await call_with((Sync(), later, function, Async()))) == ["mapped", "add", "weather", "ready"]
    assert offered(await call_with([Sync(), Async()], tools=(weather,))) == ["weather", "mapped", "ready"]


async def test_providers_are_called_once_per_invocation_with_its_context() -> None:
    asked: list[ToolProviderRequest] = []

    def provide(request: ToolProviderRequest) -> ToolProviderResult:
        asked.append(request)
        assert InvocationContext.current() == request.context
        return ToolProviderResult({ToolSpecification("mapped"): by_hand})

    class Remembering(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> str: ...

    model = ScriptedChatModel([tool_call("mapped"), tool_call("mapped"), "done", "done"])
    service = create_ai_service(Remembering, chat_model=model, tool_provider=provide)
    with invocation_attributes(role="admin"):
        await service.chat("room", "book")
    assert len(asked) == 1
    assert asked[0].user_message == UserMessage("book")
    assert asked[0].memory_id == "room"
    assert asked[0].context.attributes == {"role": "admin"}
    assert asked[0].context.method == "chat"
    assert results(model) == ["mapped {} room"] * 2

    await service.chat("room", "again")
    assert len(asked) == 2


async def test_synchronous_providers_run_on_a_thread() -> None:
    threads = []

    def provide(request: ToolProviderRequest) -> None:
        threads.append(threading.current_thread())

    class Both(Protocol):
        async def chat(self, text: str) -> str: ...

        def wait(self, text: str) -> str: ...

    service = create_ai_service(Both, chat_model=ScriptedChatModel(["a", "b"]), tool_provider=provide)
    await service.chat("x")
    assert threads[0] is not threading.current_thread()

    callers = []

    def caller() -> None:
        callers.append(threading.current_thread())
        service.wait("x")

    thread = threading.Thread(target=caller)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert threads[1] is thread


async def test_errors_of_a_provider_reach_the_caller_before_the_model_is_called() -> None:
    def provide(request: ToolProviderRequest) -> ToolProviderResult:
        raise LookupError("no tools today")

    model = ScriptedChatModel(["done"])
    with pytest.raises(LookupError, match="no tools today"):
        await create_ai_service(Assistant, chat_model=model, tool_provider=provide).chat("x")
    assert model.requests == []


@pytest.mark.parametrize(
    "provided",
    [
        [weather],
        [AiServiceTool(ToolSpecification("weather"), by_hand)],
        {ToolSpecification("weather"): by_hand},
        {ToolSpecification("one"): by_hand, ToolSpecification("one", "again"): by_hand},
        ["nothing"],
        {ToolSpecification("not a name"): by_hand},
    ],
)
async def test_invalid_provided_tools_fail_the_call_before_the_model_is_called(provided: Any) -> None:
    model = ScriptedChatModel(["done"])
    service = create_ai_service(
        Assistant, chat_model=model, tools=(weather,), tool_provider=lambda request: ToolProviderResult(provided)
    )

    with pytest.raises(IllegalConfigurationError) as raised:
        await service.chat("x")
    assert "Assistant.chat" in raised.value.problems[0].where
    assert model.requests == []


@application_scoped
class Booking:
    @tool
    def book(self, seat: int) -> str:
        return f"booked {seat}"


class BookingTools:
    """A provider that is a bean."""

    def __init__(self, booking: Booking) -> None:
        self.booking = booking

    def provide_tools(self, request: ToolProviderRequest) -> ToolProviderResult | None:
        if "book" not in request.user_message.text:
            return None
        return ToolProviderResult(tools_from(self.booking))


@register_ai_service(tool_provider=BookingTools)
class BookingAssistant(Protocol):
    async def chat(self, text: str) -> str: ...


async def test_providers_can_be_beans() -> None:
    model = ScriptedChatModel(["nothing", tool_call("book", {"seat": 3}), "booked"])
    container = Container(models={"default": model}).register(BookingAssistant, BookingTools, Booking)
    async with container:
        await container.get(BookingAssistant).chat("hello")
        assert offered(model) == []
        await container.get(BookingAssistant).chat("book a seat")
    assert offered(model, 1) == ["book"]
    assert results(model) == ["booked 3"]


async def test_provider_classes_are_registered_implicitly() -> None:
    model = ScriptedChatModel(["nothing"])
    async with Container(models={"default": model}).register(BookingAssistant, Booking) as container:
        assert await container.get(BookingAssistant).chat("book") == "nothing"
    assert offered(model) == ["book"]


def test_missing_beans_of_a_provider_are_a_problem() -> None:
    [problem] = Container(models={"default": ScriptedChatModel([])}).register(BookingAssistant).check()
    assert problem.where == "BookingTools.booking"


async def test_providers_can_be_bound_interfaces() -> None:
    @register_ai_service(tool_provider=ToolProvider)
    class Other(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel(["nothing"])
    container = Container(models={"default": model}).register(Other, BookingTools, Booking)
    async with container.bind(ToolProvider, BookingTools):
        await container.get(Other).chat("book")
    assert offered(model) == ["book"]


def test_provider_interfaces_without_a_bean_are_a_problem() -> None:
    @register_ai_service(tool_provider=ToolProvider)
    class Other(Protocol):
        async def chat(self, text: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Other).check()
    assert "ToolProvider" in problem.what
    assert "Other" in problem.where


async def test_providers_can_be_named_beans() -> None:
    @register_ai_service(tool_provider=(Annotated[ToolProvider, Named("mcp")],))
    class Other(Protocol):
        async def chat(self, text: str) -> str: ...

    class Mcp:
        async def provide_tools(self, request: ToolProviderRequest) -> ToolProviderResult:
            return ToolProviderResult({ToolSpecification("remote"): by_hand})

    model = ScriptedChatModel(["nothing"])
    container = Container(models={"default": model}).register(Other).register_instance(Mcp(), ToolProvider, name="mcp")
    async with container:
        await container.get(Other).chat("x")
    assert offered(model) == ["remote"]


def test_provider_classes_without_a_container_are_a_problem() -> None:
    [problem] = problems_of(Assistant, tool_provider=BookingTools)
    assert "BookingTools" in problem.what


def test_objects_without_provide_tools_are_a_problem() -> None:
    class NoProvider: ...

    [problem] = problems_of(Assistant, tool_provider=NoProvider())
    assert "NoProvider" in problem.what
    assert "provide_tools" in str(problem)


async def test_providers_can_be_request_scoped() -> None:
    @request_scoped
    class PerRequest:
        made = 0

        def __init__(self) -> None:
            type(self).made += 1

        def provide_tools(self, request: ToolProviderRequest) -> ToolProviderResult:
            return ToolProviderResult({ToolSpecification(f"tool_{self.made}"): by_hand})

    @register_ai_service(tool_provider=PerRequest)
    class Other(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel(["done"] * 3)
    async with Container(models={"default": model}).register(Other, PerRequest) as container:
        for _ in range(2):
            async with container.request_scope():
                await container.get(Other).chat("x")
    assert offered(model, 0) == ["tool_1"]
    assert offered(model, 1) == ["tool_2"]


async def test_provided_tools_are_checked_before_the_model_is_called() -> None:
    class Missing: ...

    class Unregistered:
        @tool
        def hi(self) -> str:
            return "hi"

    @tool
    def wants(missing: Inject[Missing]) -> str:
        return "x"

    @tool
    @run_on("nowhere")
    def lost() -> str:
        return "x"

    for source in (Unregistered, wants, lost):

        @register_ai_service(tool_provider=lambda request, source=source: ToolProviderResult([source]))
        class Other(Protocol):
            async def chat(self, text: str) -> str: ...

        model = ScriptedChatModel([])
        async with Container(models={"default": model}).register(Other) as container:
            with pytest.raises(IllegalConfigurationError, match=r"Other\.chat"):
                await container.get(Other).chat("x")
        service = create_ai_service(
            Assistant, chat_model=model, tool_provider=lambda request, source=source: ToolProviderResult([source])
        )
        with pytest.raises(IllegalConfigurationError, match=r"Assistant\.chat"):
            await service.chat("x")
        assert model.requests == []


async def test_provided_tool_classes_are_beans_of_the_container() -> None:
    def provide(request: ToolProviderRequest) -> ToolProviderResult:
        return ToolProviderResult([Calculator])

    @register_ai_service(tool_provider=provide)
    class Other(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("add", {"a": 1, "b": 2}), "done"])
    async with Container(models={"default": model}).register(Other, Calculator) as container:
        await container.get(Other).chat("x")
    assert results(model) == ["3"]
