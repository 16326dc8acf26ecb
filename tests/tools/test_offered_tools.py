"""Where a service's tools come from: beans, functions, instances, services, tools by hand, mappings, providers."""

import asyncio
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Annotated, Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    AiServiceTool,
    Container,
    IllegalConfigurationError,
    Inject,
    InvocationContext,
    MemoryId,
    Named,
    Problem,
    Result,
    ReturnBehavior,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolExecutionResultMessage,
    ToolProvider,
    ToolProviderRequest,
    ToolProviderResult,
    ToolSpecification,
    ToolTimeoutError,
    UserMessage,
    application_scoped,
    create_ai_service,
    invocation_attributes,
    produces,
    register_ai_service,
    request_scoped,
    run_on,
    tool,
    toolbox,
    tools_from,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


def offered(model: ScriptedChatModel, number: int = 0) -> list[str]:
    return [each.name for each in model.requests[number].tool_specifications]


def results(model: ScriptedChatModel) -> list[str]:
    return [each.text for each in model.requests[-1].messages if isinstance(each, ToolExecutionResultMessage)]


class Calculator:
    @tool
    def add(self, a: int, b: int) -> int:
        return a + b


class Clock:
    @tool
    async def now(self) -> str:
        return "noon"


@tool
def weather(city: str) -> str:
    return f"sun in {city}"


def unmarked(city: str) -> str:
    """Not marked, but listed."""
    return f"rain in {city}"


def by_hand(request: ToolExecutionRequest, memory_id: object) -> str:
    return f"{request.name} {request.arguments} {memory_id}"


# --- all kinds


async def test_all_kinds_of_sources_together_in_their_order() -> None:
    @register_ai_service
    class Inner(Protocol):
        @tool
        async def ask(self, question: str) -> str: ...

    class Held:
        def __init__(self, name: str) -> None:
            self.name = name

        @tool
        def who(self) -> str:
            return self.name

    @register_ai_service(
        tools=(
            Calculator,
            weather,
            unmarked,
            Held("Ada"),
            Clock().now,
            Inner,
            AiServiceTool(ToolSpecification("ready"), by_hand),
            {ToolSpecification("mapped"): by_hand, ToolSpecification("mapped_too"): by_hand},
        )
    )
    class Assistant(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> str: ...

    names = ["add", "weather", "unmarked", "who", "now", "ask", "ready", "mapped", "mapped_too"]
    arguments: dict[str, Any] = {
        "add": {"a": 1, "b": 2},
        "weather": {"city": "Bern"},
        "unmarked": {"city": "Bern"},
        "ask": {"question": "q"},
        "mapped": {"x": 1},
    }
    requests = [tool_call(name, arguments.get(name)) for name in names]
    model = ScriptedChatModel([AiMessage(None, requests), "inner answer", "done"])
    async with Container(models={"default": model}).register(Assistant) as container:
        await container.get(Assistant).chat("room", "x")

    assert offered(model) == names
    assert results(model) == [
        "3",
        "sun in Bern",
        "rain in Bern",
        "Ada",
        "noon",
        "inner answer",
        "ready {} room",
        'mapped {"x": 1} room',
        "mapped_too {} room",
    ]


async def test_a_partial_and_a_lambda_free_callable_are_functions() -> None:
    def scaled(factor: int, value: int) -> int:
        return factor * value

    double = functools.partial(scaled, 2)

    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("scaled", {"value": 3}), "done"])
    await create_ai_service(Assistant, chat_model=model, tools=[double]).chat("x")
    assert results(model) == ["6"]


async def test_one_tool_need_not_stand_in_a_tuple() -> None:
    @register_ai_service(tools=Calculator)
    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel(["done"])
    async with Container(models={"default": model}).register(Assistant) as container:
        await container.get(Assistant).chat("x")
    assert offered(model) == ["add"]


async def test_one_mapping_may_be_the_tools() -> None:
    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("mapped"), "done"])
    await create_ai_service(Assistant, chat_model=model, tools={ToolSpecification("mapped"): by_hand}).chat("x")
    assert results(model) == ["mapped {} None"]


# --- beans


async def test_a_class_that_is_not_registered_is_registered_implicitly_with_what_it_needs() -> None:
    @application_scoped
    class Store:
        def __init__(self) -> None:
            self.count = 0

    @application_scoped
    class Counter:
        def __init__(self, store: Store) -> None:
            self.store = store

        @tool
        def count(self) -> int:
            self.store.count += 1
            return self.store.count

    @register_ai_service(tools=(Counter,))
    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("count"), tool_call("count"), "done"])
    async with Container(models={"default": model}).register(Assistant, Store) as container:
        await container.get(Assistant).chat("x")
        assert container.get(Counter).store.count == 2
    assert results(model) == ["1", "2"]


async def test_a_class_in_a_methods_toolbox_is_registered_implicitly() -> None:
    @register_ai_service
    class Assistant(Protocol):
        @toolbox(Calculator)
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("add", {"a": 1, "b": 2}), "done"])
    async with Container(models={"default": model}).register(Assistant) as container:
        await container.get(Assistant).chat("x")
        assert isinstance(container.get(Calculator), Calculator)
    assert results(model) == ["3"]


def test_what_an_implicit_bean_lacks_is_a_problem_at_start() -> None:
    class Store: ...

    class Counter:
        def __init__(self, store: Store) -> None: ...

        @tool
        def count(self) -> int:
            return 1

    @register_ai_service(tools=(Counter,))
    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Assistant).check()
    assert problem.where == "Counter.store"
    assert "Store" in problem.what


async def test_a_registered_instance_or_producer_is_used_as_it_is() -> None:
    class Counter:
        def __init__(self, start: int) -> None:
            self.value = start

        @tool
        def count(self) -> int:
            self.value += 1
            return self.value

    @register_ai_service(tools=(Counter,))
    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    counter = Counter(41)
    model = ScriptedChatModel([tool_call("count"), "done"])
    container = Container(models={"default": model}).register(Assistant).register_instance(counter)
    async with container:
        await container.get(Assistant).chat("x")
    assert counter.value == 42


class Speaker(ABC):
    @tool
    @abstractmethod
    def speak(self) -> str: ...


class Loud(Speaker):
    def speak(self) -> str:
        return "LOUD"


class Quiet(Speaker):
    def speak(self) -> str:
        return "quiet"


@register_ai_service(tools=(Speaker,))
class SpeakerAssistant(Protocol):
    async def chat(self, text: str) -> str: ...


async def test_an_interface_with_tools_means_the_bean_bound_to_it() -> None:
    model = ScriptedChatModel([tool_call("speak"), "done"])
    container = Container(models={"default": model}).register(SpeakerAssistant, Loud, Quiet).bind(Speaker, Quiet)
    async with container:
        await container.get(SpeakerAssistant).chat("x")
    assert results(model) == ["quiet"]


async def test_a_named_bean_is_asked_for_by_name() -> None:
    @register_ai_service(tools=(Annotated[Loud, Named("second")],))
    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    class Louder(Loud):
        def speak(self) -> str:
            return "LOUDER"

    model = ScriptedChatModel([tool_call("speak"), "done"])
    container = Container(models={"default": model}).register(Assistant)
    container.register_instance(Loud(), name="first").register_instance(Louder(), Loud, name="second")
    async with container:
        await container.get(Assistant).chat("x")
    assert results(model) == ["LOUDER"]


def test_a_named_bean_that_is_missing_is_a_problem() -> None:
    @register_ai_service(tools=(Annotated[Loud, Named("third")],))
    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel([])}).register(Assistant)
    [problem] = container.register_instance(Loud(), name="first").check()
    assert "third" in str(problem)
    assert "Assistant" in problem.where


async def test_tools_of_any_scope_are_looked_up_per_call() -> None:
    @request_scoped
    class Session:
        def __init__(self) -> None:
            self.calls = 0

        @tool
        def count(self) -> int:
            self.calls += 1
            return self.calls

    class Dependent:
        def __init__(self) -> None:
            self.calls = 0

        @tool
        def fresh(self) -> int:
            self.calls += 1
            return self.calls

    @register_ai_service(tools=(Session, Dependent))
    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    script = [tool_call("count"), tool_call("fresh"), tool_call("count"), tool_call("fresh"), "done"]
    model = ScriptedChatModel([*script, *script])
    async with Container(models={"default": model}).register(Assistant) as container:
        assistant = container.get(Assistant)
        for _ in range(2):
            async with container.request_scope():
                await assistant.chat("x")
                assert results(model) == ["1", "1", "2", "1"]


def test_an_injected_bean_that_is_missing_is_a_problem_at_start() -> None:
    class Missing: ...

    class Tools:
        @tool
        def use(self, missing: Inject[Missing]) -> str:
            return "x"

        @tool
        def maybe(self, missing: Inject[Missing | None]) -> str:
            return "x"

        @tool
        def default(self, missing: Inject[Missing | None] = None) -> str:
            return "x"

    @register_ai_service(tools=(Tools,))
    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Assistant).check()
    assert "Missing" in problem.what
    assert "use" in problem.where
    assert "missing" in problem.where


# --- toolbox


class Toolboxed(Protocol):
    async def plain(self, text: str) -> str: ...

    @toolbox(Clock())
    async def replaced(self, text: str) -> str: ...

    @toolbox()
    async def none(self, text: str) -> str: ...

    @toolbox(Calculator(), weather)
    async def same(self, text: str) -> str: ...


async def test_a_toolbox_replaces_the_class_tools_for_its_method() -> None:
    model = ScriptedChatModel(["ok"] * 4)
    service = create_ai_service(Toolboxed, chat_model=model, tools=(Calculator(),))
    await service.plain("x")
    await service.replaced("x")
    await service.none("x")
    await service.same("x")

    assert [offered(model, number) for number in range(4)] == [["add"], ["now"], [], ["add", "weather"]]


async def test_a_providers_tools_are_added_to_either() -> None:
    model = ScriptedChatModel(["ok"] * 4)

    def provide(request: ToolProviderRequest) -> ToolProviderResult:
        return ToolProviderResult([unmarked])

    service = create_ai_service(Toolboxed, chat_model=model, tools=(Calculator(),), tool_provider=provide)
    await service.plain("x")
    await service.replaced("x")
    await service.none("x")

    assert [offered(model, number) for number in range(3)] == [["add", "unmarked"], ["now", "unmarked"], ["unmarked"]]


# --- problems


def problems_of(cls: Any, **options: Any) -> list[Problem]:
    with pytest.raises(IllegalConfigurationError) as raised:
        create_ai_service(cls, chat_model=ScriptedChatModel([]), **options)
    return list(raised.value.problems)


class Assistant(Protocol):
    async def chat(self, text: str) -> Result[str]: ...


def test_two_tools_of_one_name_are_a_problem() -> None:
    class Other:
        @tool(name="add")
        def plus(self, a: int) -> int:
            return a

    [problem] = problems_of(Assistant, tools=(Calculator(), Other()))
    assert "'add'" in problem.what
    assert "Calculator.add" in problem.what
    assert "Other.plus" in problem.what


def test_the_same_source_twice_is_a_clash() -> None:
    [problem] = problems_of(Assistant, tools=(weather, weather))
    assert "'weather'" in problem.what


def test_the_same_names_in_different_methods_are_no_problem() -> None:
    class Other:
        @tool
        def add(self, a: int) -> int:
            return a

    class Two(Protocol):
        @toolbox(Calculator())
        async def one(self, text: str) -> str: ...

        @toolbox(Other())
        async def two(self, text: str) -> str: ...

    create_ai_service(Two, chat_model=ScriptedChatModel([]))


def test_a_listed_class_without_tools_is_a_problem() -> None:
    class Nothing: ...

    @register_ai_service(tools=(Nothing,))
    class Other(Protocol):
        async def chat(self, text: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Other).check()
    assert "Nothing" in problem.what
    assert "Other" in problem.where


def test_a_service_without_a_tool_among_its_methods_is_a_problem() -> None:
    @register_ai_service
    class Inner(Protocol):
        async def chat(self, text: str) -> str: ...

    @register_ai_service(tools=(Inner,))
    class Other(Protocol):
        async def chat(self, text: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Other).check()
    assert "Inner" in problem.what


def test_services_that_are_tools_of_each_other_are_a_problem() -> None:
    tools_of_first: list[Any] = []

    @register_ai_service(tools=tools_of_first)
    class First(Protocol):
        @tool
        async def one(self, text: str) -> str: ...

    @register_ai_service(tools=(First,))
    class Second(Protocol):
        @tool
        async def two(self, text: str) -> str: ...

    tools_of_first.append(Second)
    [problem] = Container(models={"default": ScriptedChatModel([])}).register(First, Second).check()
    assert "First" in problem.what
    assert "Second" in problem.what


def test_a_service_that_is_its_own_tool_is_a_problem() -> None:
    tools: list[Any] = []

    @register_ai_service(tools=tools)
    class Snake(Protocol):
        @tool
        async def bite(self, text: str) -> str: ...

    tools.append(Snake)
    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Snake).check()
    assert "Snake -> Snake" in problem.what


def test_a_class_without_a_container_is_a_problem() -> None:
    [problem] = problems_of(Assistant, tools=(Calculator,))
    assert "Calculator" in problem.what
    assert problem.fix


def test_a_class_with_static_tools_only_needs_no_instance() -> None:
    class Statics:
        @tool
        @staticmethod
        def one() -> int:
            return 1

    create_ai_service(Assistant, chat_model=ScriptedChatModel([]), tools=(Statics,))


@pytest.mark.parametrize("source", ["calculator", 5, None, [weather], {"add": by_hand}])
def test_what_is_no_tool_is_a_problem_and_no_crash(source: Any) -> None:
    problems = problems_of(Assistant, tools=(source,))
    assert problems[0].where.startswith("Assistant")
    assert problems[0].fix


# --- providers


async def call_with(provider: Any, *replies: Any, **options: Any) -> ScriptedChatModel:
    model = ScriptedChatModel(replies or ["done"])
    await create_ai_service(Assistant, chat_model=model, tool_provider=provider, **options).chat("hello")
    return model


async def test_a_provider_may_be_an_object_or_a_function_sync_or_async() -> None:
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


async def test_a_provider_is_asked_once_per_invocation_and_sees_it() -> None:
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


async def test_a_synchronous_provider_runs_where_a_def_tool_would() -> None:
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


async def test_what_a_provider_raises_reaches_the_caller_before_anything_is_sent() -> None:
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
async def test_a_providers_mistakes_fail_the_call_before_anything_is_sent(provided: Any) -> None:
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


async def test_a_provider_may_be_a_bean_type() -> None:
    model = ScriptedChatModel(["nothing", tool_call("book", {"seat": 3}), "booked"])
    container = Container(models={"default": model}).register(BookingAssistant, BookingTools, Booking)
    async with container:
        await container.get(BookingAssistant).chat("hello")
        assert offered(model) == []
        await container.get(BookingAssistant).chat("book a seat")
    assert offered(model, 1) == ["book"]
    assert results(model) == ["booked 3"]


async def test_a_provider_class_that_is_not_registered_is_registered_implicitly() -> None:
    model = ScriptedChatModel(["nothing"])
    async with Container(models={"default": model}).register(BookingAssistant, Booking) as container:
        assert await container.get(BookingAssistant).chat("book") == "nothing"
    assert offered(model) == ["book"]


def test_what_a_providers_bean_lacks_is_a_problem_at_start() -> None:
    [problem] = Container(models={"default": ScriptedChatModel([])}).register(BookingAssistant).check()
    assert problem.where == "BookingTools.booking"


async def test_a_provider_may_be_an_interface_that_is_bound() -> None:
    @register_ai_service(tool_provider=ToolProvider)
    class Other(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel(["nothing"])
    container = Container(models={"default": model}).register(Other, BookingTools, Booking)
    async with container.bind(ToolProvider, BookingTools):
        await container.get(Other).chat("book")
    assert offered(model) == ["book"]


def test_a_provider_interface_without_bean_is_a_problem_at_start() -> None:
    @register_ai_service(tool_provider=ToolProvider)
    class Other(Protocol):
        async def chat(self, text: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Other).check()
    assert "ToolProvider" in problem.what
    assert "Other" in problem.where


async def test_a_named_provider_is_asked_for_by_name() -> None:
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


def test_a_provider_class_without_a_container_is_a_problem() -> None:
    [problem] = problems_of(Assistant, tool_provider=BookingTools)
    assert "BookingTools" in problem.what


def test_what_is_no_provider_is_a_problem() -> None:
    class NoProvider: ...

    [problem] = problems_of(Assistant, tool_provider=NoProvider())
    assert "NoProvider" in problem.what
    assert "provide_tools" in str(problem)


async def test_a_request_scoped_provider_is_that_of_the_request() -> None:
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


# --- tools by hand


async def test_an_ai_service_tool_has_a_return_behavior_and_a_time_out() -> None:
    async def slow(request: ToolExecutionRequest, memory_id: object) -> str:
        await asyncio.Event().wait()
        return "never"

    seen: list[Exception] = []

    def handler(error: Exception, context: InvocationContext) -> str:
        seen.append(error)
        return "too late"

    tools = [
        AiServiceTool(ToolSpecification("fast"), by_hand, ReturnBehavior.IMMEDIATE),
        AiServiceTool(ToolSpecification("slow"), slow, timeout=0.01),
    ]
    model = ScriptedChatModel([tool_call("slow"), tool_call("fast")])
    service = create_ai_service(Assistant, chat_model=model, tools=tools, on_tool_execution_error=handler)
    result = await service.chat("x")

    assert result.content is None
    assert [each.result for each in result.tool_executions] == ["too late", "fast {} None"]
    assert isinstance(seen[0], TimeoutError)
    assert isinstance(seen[0], ToolTimeoutError)


async def test_an_executor_may_return_a_ready_result() -> None:
    ready = ToolExecutionResult("text", {"raw": True}, attributes={"a": 1})
    model = ScriptedChatModel([tool_call("mapped"), "done"])
    service = create_ai_service(Assistant, chat_model=model, tools={ToolSpecification("mapped"): lambda r, m: ready})
    result = await service.chat("x")

    assert result.tool_executions[0].result_object == {"raw": True}
    assert result.tool_executions[0].attributes == {"a": 1}


async def test_what_an_executor_raises_is_the_tools_failure() -> None:
    def fail(request: ToolExecutionRequest, memory_id: object) -> str:
        raise ValueError("by hand")

    model = ScriptedChatModel([tool_call("mapped"), "done"])
    await create_ai_service(Assistant, chat_model=model, tools={ToolSpecification("mapped"): fail}).chat("x")
    assert results(model) == ["by hand"]


async def test_the_specification_is_sent_as_it_was_made() -> None:
    specification = ToolSpecification(
        "mapped",
        "A tool",
        {"type": "object", "properties": {"x": {"type": "string", "title": "X"}}, "required": ["x"]},
        {"k": 1},
    )
    model = ScriptedChatModel(["done"])
    await create_ai_service(Assistant, chat_model=model, tools={specification: by_hand}).chat("x")
    assert model.requests[0].tool_specifications == (specification,)


async def test_a_providers_tools_are_checked_like_any_before_anything_is_sent() -> None:
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


async def test_a_providers_class_is_a_bean_of_the_container() -> None:
    def provide(request: ToolProviderRequest) -> ToolProviderResult:
        return ToolProviderResult([Calculator])

    @register_ai_service(tool_provider=provide)
    class Other(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("add", {"a": 1, "b": 2}), "done"])
    async with Container(models={"default": model}).register(Other, Calculator) as container:
        await container.get(Other).chat("x")
    assert results(model) == ["3"]


class FakeCalculator:
    def add(self, a: int, b: int) -> int:
        return 42


@register_ai_service(tools=(Calculator,))
class CalculatorAssistant(Protocol):
    async def chat(self, text: str) -> str: ...


async def test_a_fake_may_stand_for_a_tools_bean_in_the_container_or_in_one_request() -> None:
    script = [tool_call("add", {"a": 1, "b": 2}), "done"]
    model = ScriptedChatModel(script * 4)
    async with Container(models={"default": model}).register(CalculatorAssistant) as container:
        assistant = container.get(CalculatorAssistant)
        with container.override(Calculator, FakeCalculator()):  # type: ignore[arg-type]
            await assistant.chat("x")
            assert results(model) == ["42"]
        await assistant.chat("x")
        assert results(model) == ["3"]
        async with container.request_scope({Calculator: FakeCalculator()}):
            await assistant.chat("x")
            assert results(model) == ["42"]
        await assistant.chat("x")
        assert results(model) == ["3"]


async def test_a_tools_bean_of_an_async_producer_is_made_before_it_runs() -> None:
    class Pool:
        def __init__(self, size: int) -> None:
            self.size = size

        @tool
        def size_of(self) -> int:
            return self.size

        @tool
        async def later(self) -> int:
            return self.size

    for scope in ("application", "request", "call"):

        @produces(scope=scope)
        async def pool() -> AsyncIterator[Pool]:
            await asyncio.sleep(0)
            yield Pool(7)

        @register_ai_service(tools=(Pool,))
        class Pooled(Protocol):
            async def chat(self, text: str) -> str: ...

            def wait(self, text: str) -> str: ...

        script = [AiMessage(None, [tool_call("size_of"), tool_call("later")]), "done"]
        model = ScriptedChatModel([*script, *script])
        container = Container(models={"default": model}).register(Pooled, pool)
        async with container, container.request_scope():
            await container.get(Pooled).chat("x")
            assert results(model) == ["7", "7"]
            await asyncio.to_thread(container.get(Pooled).wait, "x")
            assert results(model) == ["7", "7"]


def test_an_interface_with_tools_and_no_bean_is_a_problem() -> None:
    [problem] = Container(models={"default": ScriptedChatModel([])}).register(SpeakerAssistant).check()
    assert "Speaker" in problem.what
    assert "SpeakerAssistant" in problem.where


async def test_an_only_subclass_is_an_interfaces_bean() -> None:
    model = ScriptedChatModel([tool_call("speak"), "done"])
    async with Container(models={"default": model}).register(SpeakerAssistant, Loud) as container:
        await container.get(SpeakerAssistant).chat("x")
    assert results(model) == ["LOUD"]
