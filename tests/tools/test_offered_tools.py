"""Tools that a service offers: beans, functions, instances, services, executors and mappings."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Annotated, Any, Protocol

import pytest

from tests.problems import problems_of
from tests.tools.listing import Calculator, by_hand, offered, results, weather
from toolbox import (
    AiMessage,
    AiServiceTool,
    Container,
    Inject,
    InvocationContext,
    MemoryId,
    Named,
    Result,
    ReturnBehavior,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolProviderRequest,
    ToolProviderResult,
    ToolSpecification,
    ToolTimeoutError,
    application_scoped,
    create_ai_service,
    produces,
    register_ai_service,
    request_scoped,
    tool,
    toolbox,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Clock:
    @tool
    async def now(self) -> str:
        return "noon"


def unmarked(city: str) -> str:
    """A listed function without `@tool`."""
    return f"rain in {city}"


# --- sources


async def test_all_kinds_of_sources_are_offered_in_order() -> None:
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


async def test_a_single_tool_needs_no_tuple() -> None:
    @register_ai_service(tools=Calculator)
    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel(["done"])
    async with Container(models={"default": model}).register(Assistant) as container:
        await container.get(Assistant).chat("x")
    assert offered(model) == ["add"]


async def test_a_mapping_can_be_the_tools() -> None:
    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("mapped"), "done"])
    await create_ai_service(Assistant, chat_model=model, tools={ToolSpecification("mapped"): by_hand}).chat("x")
    assert results(model) == ["mapped {} None"]


# --- beans


async def test_tool_classes_are_registered_implicitly_with_injected_beans() -> None:
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


async def test_classes_in_a_toolbox_are_registered_implicitly() -> None:
    @register_ai_service
    class Assistant(Protocol):
        @toolbox(Calculator)
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("add", {"a": 1, "b": 2}), "done"])
    async with Container(models={"default": model}).register(Assistant) as container:
        await container.get(Assistant).chat("x")
        assert isinstance(container.get(Calculator), Calculator)
    assert results(model) == ["3"]


def test_missing_beans_of_tool_classes_are_a_problem() -> None:
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


async def test_registered_instances_are_used_as_tools() -> None:
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


async def test_interfaces_as_tools_use_the_bound_bean() -> None:
    model = ScriptedChatModel([tool_call("speak"), "done"])
    container = Container(models={"default": model}).register(SpeakerAssistant, Loud, Quiet).bind(Speaker, Quiet)
    async with container:
        await container.get(SpeakerAssistant).chat("x")
    assert results(model) == ["quiet"]


async def test_named_beans_can_be_tools() -> None:
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


def test_missing_named_beans_are_a_problem() -> None:
    @register_ai_service(tools=(Annotated[Loud, Named("third")],))
    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel([])}).register(Assistant)
    [problem] = container.register_instance(Loud(), name="first").check()
    assert "third" in str(problem)
    assert "Assistant" in problem.where


async def test_tool_beans_are_looked_up_per_call() -> None:
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


def test_missing_injected_beans_of_a_tool_are_a_problem() -> None:
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


async def test_toolbox_replaces_the_tools_of_the_class() -> None:
    model = ScriptedChatModel(["ok"] * 4)
    service = create_ai_service(Toolboxed, chat_model=model, tools=(Calculator(),))
    await service.plain("x")
    await service.replaced("x")
    await service.none("x")
    await service.same("x")

    assert [offered(model, number) for number in range(4)] == [["add"], ["now"], [], ["add", "weather"]]


async def test_provided_tools_are_added_to_class_tools_and_toolboxes() -> None:
    model = ScriptedChatModel(["ok"] * 4)

    def provide(request: ToolProviderRequest) -> ToolProviderResult:
        return ToolProviderResult([unmarked])

    service = create_ai_service(Toolboxed, chat_model=model, tools=(Calculator(),), tool_provider=provide)
    await service.plain("x")
    await service.replaced("x")
    await service.none("x")

    assert [offered(model, number) for number in range(3)] == [["add", "unmarked"], ["now", "unmarked"], ["unmarked"]]


# --- problems


class Assistant(Protocol):
    async def chat(self, text: str) -> Result[str]: ...


def test_duplicate_tool_names_are_a_problem() -> None:
    class Other:
        @tool(name="add")
        def plus(self, a: int) -> int:
            return a

    [problem] = problems_of(Assistant, tools=(Calculator(), Other()))
    assert "'add'" in problem.what
    assert "Calculator.add" in problem.what
    assert "Other.plus" in problem.what


def test_the_same_source_listed_twice_is_a_problem() -> None:
    [problem] = problems_of(Assistant, tools=(weather, weather))
    assert "'weather'" in problem.what


def test_different_methods_may_use_the_same_tool_names() -> None:
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


def test_listed_classes_without_tools_are_a_problem() -> None:
    class Nothing: ...

    @register_ai_service(tools=(Nothing,))
    class Other(Protocol):
        async def chat(self, text: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Other).check()
    assert "Nothing" in problem.what
    assert "Other" in problem.where


def test_listed_services_without_tool_methods_are_a_problem() -> None:
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


def test_services_that_are_their_own_tool_are_a_problem() -> None:
    tools: list[Any] = []

    @register_ai_service(tools=tools)
    class Snake(Protocol):
        @tool
        async def bite(self, text: str) -> str: ...

    tools.append(Snake)
    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Snake).check()
    assert "Snake -> Snake" in problem.what


def test_tool_classes_without_a_container_are_a_problem() -> None:
    [problem] = problems_of(Assistant, tools=(Calculator,))
    assert "Calculator" in problem.what
    assert problem.fix


def test_classes_with_static_tools_need_no_instance() -> None:
    class Statics:
        @tool
        @staticmethod
        def one() -> int:
            return 1

    create_ai_service(Assistant, chat_model=ScriptedChatModel([]), tools=(Statics,))


# --- executors


async def test_ai_service_tools_have_a_return_behavior_and_a_timeout() -> None:
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

    results = [each.result for each in result.tool_executions]
    assert (result.content, results) == (None, ["too late", "fast {} None"])
    assert isinstance(seen[0], TimeoutError)
    assert isinstance(seen[0], ToolTimeoutError)


async def test_executors_can_return_a_tool_execution_result() -> None:
    ready = ToolExecutionResult("text", {"raw": True}, attributes={"a": 1})
    model = ScriptedChatModel([tool_call("mapped"), "done"])
    service = create_ai_service(Assistant, chat_model=model, tools={ToolSpecification("mapped"): lambda r, m: ready})
    result = await service.chat("x")

    assert result.tool_executions[0].result_object == {"raw": True}
    assert result.tool_executions[0].attributes == {"a": 1}


async def test_errors_of_executors_are_tool_failures() -> None:
    def fail(request: ToolExecutionRequest, memory_id: object) -> str:
        raise ValueError("by hand")

    model = ScriptedChatModel([tool_call("mapped"), "done"])
    await create_ai_service(Assistant, chat_model=model, tools={ToolSpecification("mapped"): fail}).chat("x")
    assert results(model) == ["by hand"]


async def test_tool_specifications_are_sent_unchanged() -> None:
    specification = ToolSpecification(
        "mapped",
        "A tool",
        {"type": "object", "properties": {"x": {"type": "string", "title": "X"}}, "required": ["x"]},
        {"k": 1},
    )
    model = ScriptedChatModel(["done"])
    await create_ai_service(Assistant, chat_model=model, tools={specification: by_hand}).chat("x")
    assert model.requests[0].tool_specifications == (specification,)


class FakeCalculator:
    def add(self, a: int, b: int) -> int:
        return 42


@register_ai_service(tools=(Calculator,))
class CalculatorAssistant(Protocol):
    async def chat(self, text: str) -> str: ...


async def test_tool_beans_can_be_overridden_in_the_container_and_in_a_request() -> None:
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


async def test_tool_beans_of_async_producers_are_created_before_the_tool_runs() -> None:
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


def test_interfaces_without_a_bean_are_a_problem() -> None:
    [problem] = Container(models={"default": ScriptedChatModel([])}).register(SpeakerAssistant).check()
    assert "Speaker" in problem.what
    assert "SpeakerAssistant" in problem.where


async def test_the_only_subclass_is_the_bean_of_an_interface() -> None:
    model = ScriptedChatModel([tool_call("speak"), "done"])
    async with Container(models={"default": model}).register(SpeakerAssistant, Loud) as container:
        await container.get(SpeakerAssistant).chat("x")
    assert results(model) == ["LOUD"]
