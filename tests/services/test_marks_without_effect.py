"""Marks that can have no effect where they are: each decorator at each place has an effect or is a problem at start."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Protocol

import pytest
from fastapi import Depends, FastAPI

from toolbox import (
    AiServiceTool,
    Container,
    IllegalConfigurationError,
    ToolExecutionRequest,
    ToolProviderRequest,
    ToolProviderResult,
    ToolSpecification,
    application_scoped,
    blocking,
    compensate_for,
    create_ai_service,
    handle_tool_arguments_error,
    handle_tool_execution_error,
    handle_unknown_tool,
    non_blocking,
    on_start,
    on_success,
    only_if,
    produces,
    register_ai_service,
    request_scoped,
    run_on,
    run_on_thread,
    system_message,
    tool,
    toolbox,
    user_message,
)
from toolbox.guardrails import (
    MaxLength,
    input_guardrails,
    output_guardrails,
    tool_input_guardrails,
    tool_output_guardrails,
)
from toolbox.interceptors import RetryOnError, before_model_request, interceptors
from toolbox.mcp import mcp_toolbox
from toolbox.models.fallback_marks import fallback
from toolbox.rest import client_exception_mapper, client_header_param, register_rest_client
from toolbox.rest import get as rest_get
from toolbox.runs import durable
from toolbox.security import SecurityIdentity, authenticated, permit_all, roles_allowed
from toolbox.testing import ScriptedChatModel
from toolbox_fastapi import install

pytestmark = pytest.mark.anyio

Mark = Callable[[Any], Any]


@tool
def add(a: int) -> int:
    return a + 1


# --- the decorators

OF_TOOLS: dict[str, Mark] = {
    "@interceptors": interceptors(RetryOnError()),
    "@tool_input_guardrails": tool_input_guardrails(MaxLength(9)),
    "@tool_output_guardrails": tool_output_guardrails(MaxLength(9)),
}
OF_ANSWERS: dict[str, Mark] = {
    "@input_guardrails": input_guardrails(MaxLength(9)),
    "@output_guardrails": output_guardrails(MaxLength(9)),
}
OF_SERVICES: dict[str, Mark] = {"@system_message": system_message("Be brief."), "@mcp_toolbox": mcp_toolbox("files")}
OF_METHODS: dict[str, Mark] = {"@user_message": user_message("Hello"), "@durable": durable, "@toolbox": toolbox(add)}
OF_CALLS: dict[str, Mark] = {
    "@blocking": blocking,
    "@non_blocking": non_blocking,
    "@run_on_thread": run_on_thread,
    "@run_on": run_on("pool"),
}
OF_HANDLERS: dict[str, Mark] = {
    "@handle_unknown_tool": handle_unknown_tool,
    "@handle_tool_arguments_error": handle_tool_arguments_error,
    "@handle_tool_execution_error": handle_tool_execution_error,
}
OF_CLIENTS: dict[str, Mark] = {
    "the HTTP verb": rest_get("/x"),
    "a fixed parameter": client_header_param("a", "b"),
    "@client_exception_mapper": client_exception_mapper(404),
}
OF_ROLES: dict[str, Mark] = {
    "roles_allowed": roles_allowed("clerk"),
    "authenticated": authenticated,
    "permit_all": permit_all,
}
OTHERS: dict[str, Mark] = {"@compensate_for": compensate_for(add), "@before_model_request": before_model_request}
METHOD_MARKS = {
    **OF_TOOLS,
    **OF_ANSWERS,
    **OF_SERVICES,
    **OF_METHODS,
    **OF_CALLS,
    **OF_HANDLERS,
    **OF_CLIENTS,
    **OTHERS,
}
CLASS_MARKS: dict[str, Mark] = {
    **OF_TOOLS,
    **OF_ANSWERS,
    **OF_SERVICES,
    "@user_message": user_message("Hello"),
    "@durable": durable,
    **OF_CALLS,
    "a fixed parameter": client_header_param("a", "b"),
}


POOL = ThreadPoolExecutor(1)


def container(*registered: Any) -> Container:
    models = {"default": ScriptedChatModel([])}
    return Container(models=models, seeds=[SecurityIdentity], executors={"pool": POOL}).register(*registered)


def problems(*registered: Any) -> list[str]:
    return [str(each) for each in container(*registered).check()]


def reports(found: list[str], where: str, decorator: str) -> bool:
    """Return True if one of the problems names the place and the decorator."""
    return any(each.startswith(where) and decorator in each for each in found)


# --- places without an effect


def on_class(mark: Mark) -> list[str]:
    @application_scoped
    @mark
    class Stock:
        def count(self) -> int:
            return 1

    return problems(Stock)


@pytest.mark.parametrize("decorator", CLASS_MARKS)
def test_a_mark_of_a_class_without_tools_is_a_problem(decorator: str) -> None:
    assert reports(on_class(CLASS_MARKS[decorator]), "Stock: ", f"{decorator} has no effect here")


@pytest.mark.parametrize("decorator", METHOD_MARKS)
def test_a_mark_of_a_method_that_is_no_tool_is_a_problem(decorator: str) -> None:
    mark = METHOD_MARKS[decorator]

    class Counting:
        @mark
        def inherited(self) -> int:
            return 1

    @application_scoped
    class Stock(Counting):
        @mark
        def count(self) -> int:
            return 1

        @staticmethod
        @mark
        def price() -> int:
            return 1

    found = problems(Stock)

    if decorator == "@before_model_request":  # of an application-scoped bean, which names the registered class
        assert reports(found, "Stock.count: ", decorator)
        return
    for where in ("Stock.count", "Stock.price", "Counting.inherited"):
        assert reports(found, f"{where}: ", decorator)


@pytest.mark.parametrize("kind", [property, cached_property])
@pytest.mark.parametrize("decorator", [*METHOD_MARKS, *OF_ROLES, "@on_success"])
def test_a_mark_of_a_property_is_a_problem(decorator: str, kind: Any) -> None:
    @request_scoped
    class Stock:
        @tool
        def count(self) -> int:
            return 1

        def _size(self) -> int:
            return 1

        size = kind({**METHOD_MARKS, **OF_ROLES, "@on_success": on_success}[decorator](_size))
        del _size

    [found] = problems(Stock)

    assert found.startswith("Stock.size: ")
    assert ("roles" if decorator in OF_ROLES else decorator) in found


@pytest.mark.parametrize("decorator", [*OF_TOOLS, *OF_ANSWERS, *OF_CALLS, *OF_METHODS])
def test_a_mark_of_a_helper_in_a_class_of_tools_is_a_problem(decorator: str) -> None:
    class Stock:
        @tool
        def count(self) -> int:
            return self.helper()

        @METHOD_MARKS[decorator]
        def helper(self) -> int:
            return 1

    found = problems(Stock)

    assert len(found) == 1
    assert reports(found, "Stock.helper: ", decorator)


@pytest.mark.parametrize("decorator", [*OF_TOOLS, *OF_ANSWERS, "@toolbox", "@durable", *OF_CALLS, *OF_CLIENTS])
def test_a_mark_of_a_service_method_with_a_body_is_a_problem(decorator: str) -> None:
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

        @METHOD_MARKS[decorator]
        async def shout(self, text: str) -> str:
            return (await self.ask(text)).upper()

    with pytest.raises(IllegalConfigurationError) as caught:
        create_ai_service(Desk, chat_model=ScriptedChatModel([]))

    for found in (problems(register_ai_service(Desk)), [str(each) for each in caught.value.problems]):
        assert reports(found, "Desk.shout: ", decorator)


@pytest.mark.parametrize("decorator", [*OF_CALLS, *OF_CLIENTS])
def test_a_mark_that_a_model_does_not_follow_is_a_problem_on_a_service_method(decorator: str) -> None:
    @register_ai_service
    class Desk(Protocol):
        @METHOD_MARKS[decorator]
        async def ask(self, text: str) -> str: ...

    assert reports(problems(Desk), "Desk.ask: ", decorator)


@pytest.mark.parametrize("decorator", [*OF_TOOLS, *OF_ANSWERS, *OF_SERVICES, *OF_METHODS, *OF_CALLS])
def test_a_mark_of_a_rest_client_is_a_problem_unless_its_method_is_a_tool(decorator: str) -> None:
    @register_rest_client(base_url="http://stock.test")
    class Stock(Protocol):
        @METHOD_MARKS[decorator]
        @rest_get("/count")
        async def count(self) -> str: ...

    assert reports(problems(Stock), "Stock.count: ", decorator)


@pytest.mark.parametrize("decorator", [*METHOD_MARKS, *OF_ROLES])
def test_a_mark_of_a_producer_and_of_a_function_at_start_is_a_problem(decorator: str) -> None:
    mark = {**METHOD_MARKS, **OF_ROLES}[decorator]

    @produces()
    @mark
    def numbers() -> dict[str, int]:
        return {}

    @on_start
    @mark
    def begin() -> None:
        print("begins")

    found, name = problems(numbers, begin), "a mark of roles" if decorator in OF_ROLES else decorator
    assert reports(found, "numbers: ", name)
    assert reports(found, "begin: ", name) or decorator in OF_CALLS


@pytest.mark.parametrize("decorator", [*METHOD_MARKS, "@only_if"])
async def test_a_mark_of_an_endpoint_and_of_its_dependency_is_a_problem(decorator: str) -> None:
    mark = {**METHOD_MARKS, "@only_if": only_if(profile="test")}[decorator]
    app = FastAPI()
    install(app, container())

    @mark
    def dependency() -> str:
        return ""

    @app.get("/count", dependencies=[Depends(dependency)])
    @mark
    def count() -> str:
        return ""

    with pytest.raises(IllegalConfigurationError) as caught:
        async with app.router.lifespan_context(app):
            pass

    found = [str(each) for each in caught.value.problems]
    assert reports(found, "GET /count (count): ", decorator) or decorator == "@toolbox"
    assert reports(found, "GET /count (count), dependency dependency: ", decorator)


@pytest.mark.parametrize("decorator", [*OF_SERVICES, *OF_METHODS, *OF_HANDLERS, *OF_CLIENTS])
def test_a_mark_of_services_is_a_problem_on_a_tool(decorator: str) -> None:
    @tool
    @METHOD_MARKS[decorator]
    def count() -> int:
        return 1

    class Stock:
        @tool
        @METHOD_MARKS[decorator]
        def price(self) -> int:
            return 1

    @register_ai_service(tools=[count, Stock])
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    found = problems(Desk)

    assert reports(found, "Stock.price: ", decorator)
    assert reports(found, "count: ", decorator) or decorator == "@toolbox"  # it may be an endpoint as well


def test_durable_on_a_function_with_a_body_says_that_it_is_not_supported() -> None:
    class Work:
        @durable
        async def do(self) -> str:
            return "done"

    @register_ai_service
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

        @durable
        async def shout(self, text: str) -> str:
            return await self.ask(text)

    @durable
    def alone() -> int:
        return 1

    found = problems(Work, Desk, alone)

    for where in ("Work.do", "Desk.shout", "alone"):
        assert reports(found, f"{where}: ", "@durable on a function with a body is not supported")


def test_fallback_for_a_method_of_a_bean_is_a_problem() -> None:
    class Work:
        def do(self) -> str:
            return "done"

        @fallback(do)
        @staticmethod
        def otherwise() -> str:
            return ""

    assert reports(problems(Work), "Work.do: ", "@fallback has no effect here")


def test_another_scope_of_a_service_or_client_is_a_problem() -> None:
    @request_scoped
    @register_ai_service
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    @request_scoped
    @register_rest_client(base_url="http://stock.test")
    class Stock(Protocol):
        @rest_get("/count")
        async def count(self) -> str: ...

    found = problems(Desk, Stock)

    assert reports(found, "Desk: ", "@request_scoped has no effect here: AI services are application-scoped")
    assert reports(found, "Stock: ", "@request_scoped has no effect here: REST clients are application-scoped")


# --- places with an effect


@pytest.mark.parametrize("decorator", [*OF_TOOLS, *OF_CALLS])
def test_a_mark_of_a_tool_is_no_problem_wherever_the_tool_is(decorator: str) -> None:
    mark = METHOD_MARKS[decorator]

    @tool
    @mark
    def count() -> int:
        return 1

    class Stock:
        @tool
        @mark
        def price(self) -> int:
            return 1

        @tool
        def colour(self) -> str:
            return ""

    class Inherits(Stock):
        @mark
        def colour(self) -> str:
            return "red"

    class Listed:
        @mark
        def find(self) -> str:
            return ""

    @register_rest_client(base_url="http://stock.test")
    class Client(Protocol):
        @tool
        @mark
        @rest_get("/amount")
        def amount(self) -> str: ...

    @register_ai_service(tools=[count, Inherits, Listed().find, Client])
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    assert problems(Desk, Listed) == []


@pytest.mark.parametrize("decorator", OF_CALLS)
def test_an_execution_marker_is_no_problem_on_what_the_library_calls(decorator: str) -> None:
    mark = METHOD_MARKS[decorator]

    def needs_it(arguments: dict[str, Any], context: Any) -> bool:
        return True

    class Executors:
        @mark
        def run(self, request: ToolExecutionRequest, memory_id: object) -> str:
            return ""

    class Provider:
        def provide_tools(self, request: ToolProviderRequest) -> ToolProviderResult:
            return ToolProviderResult({ToolSpecification("later"): self._later})

        @mark
        def _later(self, call: ToolExecutionRequest, memory_id: object) -> str:
            return ""

    class Stock:
        @tool
        def credit(self) -> None: ...

        @compensate_for(credit)
        @mark
        def debit(self) -> None: ...

        @staticmethod
        @mark
        def rule(arguments: dict[str, Any], context: Any) -> bool:
            return needs_it(arguments, context)

        @tool(requires_approval=rule)
        def pay(self) -> None: ...

    @request_scoped
    class Basket:
        @before_model_request
        @mark
        def unlock(self) -> None: ...

        @on_start
        @mark
        def begin(self) -> None: ...

    class Guard(MaxLength):
        def __init__(self) -> None:
            super().__init__(9)

        @mark
        def validate(self, request: Any) -> Any:
            return self.success()

    @application_scoped
    @mark
    class Callable:
        def __call__(self, request: ToolExecutionRequest, memory_id: object) -> str:
            return ""

    by_hand = AiServiceTool(ToolSpecification("by_hand"), Executors().run)

    @register_ai_service(tools=[by_hand, Stock], tool_provider=Provider, compensate_on_failure=True)
    @input_guardrails(Guard)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

        @staticmethod
        @handle_tool_execution_error
        @mark
        def failed(error: Exception, context: Any) -> str:
            return ""

        @fallback(ask)
        @staticmethod
        @mark
        def offline() -> str:
            return ""

    assert problems(Desk, Executors, Provider, Basket, Callable) == []


def test_what_an_abstract_class_marks_for_its_implementations_is_no_problem() -> None:
    class Assistant(Protocol):
        @system_message("Be brief.")
        @input_guardrails(MaxLength(9))
        async def ask(self, text: str) -> str: ...

    class Fake(Assistant):  # in place of the service, in a test
        async def ask(self, text: str) -> str:
            return "ok"

    @interceptors(RetryOnError())
    class Retried:
        """A mixin."""

    class Tools(Retried):
        @tool
        def count(self) -> int:
            return 1

    class NoTools(Retried): ...

    assert problems(Fake, Tools, NoTools) == []
    assert reports(problems(NoTools), "Retried: ", "@interceptors")
