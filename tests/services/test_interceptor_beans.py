"""Interceptors as beans, and their problems at start."""

from typing import Any, Protocol

import pytest

from toolbox import (
    ChatResponse,
    Container,
    IllegalConfigurationError,
    ToolExecutionResult,
    create_ai_service,
    register_ai_service,
    request_scoped,
    tool,
    tool_executor_from,
)
from toolbox.interceptors import (
    ModelInterceptor,
    ModelInvocation,
    ModelProceed,
    ToolInterceptor,
    ToolInvocation,
    ToolProceed,
    global_interceptor,
    interceptors,
)

from .intercepted import (
    PLUS,
    Plain,
    plus,
    scripted,
)
from .log import LOG

pytestmark = pytest.mark.anyio


# --- beans


async def test_interceptors_are_beans_with_a_scope_and_can_be_overridden() -> None:
    class Clock:
        def __init__(self) -> None:
            self.name = "clock"

    class Timed(ToolInterceptor):
        def __init__(self, clock: Clock) -> None:
            self.clock = clock

        async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
            LOG.append((self.clock.name, self))
            return await proceed(call)

    @request_scoped
    class PerRequest(Timed): ...

    class Fake(Timed):
        def __init__(self) -> None:
            self.clock = Clock()
            self.clock.name = "fake"

    @register_ai_service(tools=[plus])
    @interceptors(Timed, PerRequest)
    class Caller(Protocol):
        async def ask(self, question: str) -> str: ...

    model = scripted(*[PLUS, "done"] * 3)
    async with Container(models={"default": model}).register(Caller, Clock) as container:
        for _ in range(2):
            async with container.request_scope():
                await container.get(Caller).ask("x")
        (_, first), (_, one), _, (_, second), (_, two), _ = LOG
        assert first is second
        assert one is not two
        LOG.clear()
        with container.override(Timed, Fake()):
            async with container.request_scope():
                await container.get(Caller).ask("x")
        assert LOG[0][0] == "fake"


class Synchronous(ToolInterceptor):
    def around_tool(self, call: Any, proceed: Any) -> Any: ...  # the mistake


class OnlyModel(ModelInterceptor):
    async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        return await proceed(call)


class Needy(OnlyModel):
    def __init__(self, missing: Plain) -> None: ...


def problems_of(*classes: Any) -> list[str]:
    return [str(each) for each in Container(models={"default": scripted()}).register(*classes).check()]


def service_with(*named: Any) -> Any:
    @register_ai_service
    @interceptors(*named)
    class Service(Protocol):
        async def ask(self, question: str) -> str: ...

    return Service


# --- problems at start


def test_wrong_interceptors_are_problems_at_start() -> None:
    assert problems_of(service_with(Plain, Plain(), Synchronous)) == [
        "Service, @interceptors: Plain is neither a ToolInterceptor nor a ModelInterceptor; inherit from one of them",
        "Synchronous.around_tool: is not a coroutine function; declare it `async def around_tool(…)`",
    ]


@pytest.mark.parametrize("kind", [ToolInterceptor, ModelInterceptor])
def test_an_abstract_interceptor_without_a_bean_is_a_problem_at_start(kind: Any) -> None:
    service = service_with(kind)
    expected = f"Service, @interceptors: no bean provides {kind.__name__}, which is abstract"
    method = "around_tool" if kind is ToolInterceptor else "around_model"
    assert problems_of(service) == [f"{expected}; name a class that implements {method}"]
    with pytest.raises(IllegalConfigurationError, match=f"{kind.__name__} is abstract; name a subclass or an instance"):
        create_ai_service(service, chat_model=scripted())


def test_an_interceptor_with_other_parameters_is_a_problem_at_start() -> None:
    class Short(ToolInterceptor):
        async def around_tool(self, call: ToolInvocation) -> ToolExecutionResult:  # type: ignore[override]  # the mistake
            raise AssertionError

    class Static(OnlyModel):
        @staticmethod
        async def around_model(call: Any, proceed: Any) -> ChatResponse:  # type: ignore[override]  # without self
            raise AssertionError

    expected = "Short.around_tool: does not take two arguments, the call and proceed; declare it `async def around_tool"
    assert problems_of(service_with(Short, Static)) == [f"{expected}(self, call, proceed)`"]


def test_a_missing_dependency_of_an_interceptor_is_a_problem_at_start() -> None:
    [problem] = problems_of(service_with(Needy))
    assert "Needy" in problem
    assert "no bean provides Plain" in problem
    with pytest.raises(IllegalConfigurationError, match="Needy needs arguments, so it needs a container"):
        create_ai_service(service_with(Needy), chat_model=scripted())


def test_a_model_interceptor_on_a_tool_is_a_problem_at_start() -> None:
    @tool
    @interceptors(OnlyModel)
    def find(text: str) -> str:
        return text

    @register_ai_service(tools=[find])
    class Finder(Protocol):
        async def ask(self, question: str) -> str: ...

    [problem] = problems_of(Finder)
    assert "OnlyModel is a ModelInterceptor, but a tool sends no model requests" in problem


def test_a_global_interceptor_of_a_wrong_kind_is_a_problem_at_start() -> None:
    @global_interceptor
    class Wrong: ...

    @global_interceptor
    class AlsoWrong(Synchronous): ...

    first, second = problems_of(Wrong, AlsoWrong)
    assert "Wrong is neither a ToolInterceptor nor a ModelInterceptor" in first
    assert "AlsoWrong.around_tool: is not a coroutine function" in second


def test_decorators_refuse_what_cannot_be_meant() -> None:
    with pytest.raises(TypeError, match="needs at least one class or instance"):
        interceptors()
    with pytest.raises(TypeError, match="priority"):
        global_interceptor(priority="high")  # type: ignore[call-overload]  # the mistake
    with pytest.raises(TypeError, match="with parentheses"):

        @interceptors
        def find(text: str) -> str:
            return text

    with pytest.raises(TypeError, match="@interceptors: expected a function, a method or a class, got 3"):
        interceptors(Plain)(3)


def test_wrong_interceptors_of_tools_that_no_service_offers_are_found_too() -> None:
    class Tools:
        @tool
        @interceptors(Plain)
        def find(self, text: str) -> str:
            return text

    [problem] = problems_of(Tools)
    assert problem.startswith("Tools.find, @interceptors: Plain is neither")
    with pytest.raises(IllegalConfigurationError, match="Plain is neither"):
        tool_executor_from(Tools().find)
