"""Invalid declarations of services are reported with place, fact and fix."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from toolbox import (
    AiServiceTool,
    Container,
    IllegalConfigurationError,
    Inject,
    Problem,
    ServiceEvent,
    TokenStream,
    ToolSpecification,
    create_ai_service,
    register_ai_service,
    system_message,
    tool,
    toolbox,
    user_message,
)
from toolbox.models import fallback
from toolbox.testing import ScriptedChatModel

pytestmark = pytest.mark.anyio


class Assistant(Protocol):
    async def chat(self, text: str) -> str: ...


def problem_of(cls: Any = Assistant, **options: Any) -> Problem:
    with pytest.raises(IllegalConfigurationError) as raised:
        create_ai_service(cls, chat_model=ScriptedChatModel([]), **options)
    [problem] = raised.value.problems
    return problem


def test_a_problem_of_a_method_does_not_hide_those_of_its_tools() -> None:
    class Missing:
        pass

    @tool
    def look(missing: Inject[Missing]) -> str:
        return ""

    @register_ai_service(tools=look)
    class Unreadable(Protocol):
        def chat(self, text: str): ...  # type: ignore[no-untyped-def]  # the mistake

    @register_ai_service
    class Unsaid(Protocol):
        @toolbox(look)
        def chat(self) -> str: ...

    for service, own in ((Unreadable, "return annotation"), (Unsaid, "no user message")):
        problems = Container(models={"default": ScriptedChatModel([])}).register(service).check()

        assert len(problems) == 2
        assert own in problems[0].what
        assert "Missing" in problems[1].what


@pytest.mark.parametrize(
    "options",
    [
        {"max_tool_rounds": "3"},
        {"max_tool_rounds": None},
        {"max_tool_rounds": True},
        {"max_tool_calls_per_response": -1},
        {"timeout": 0},
        {"max_output_retries": 1.5},
        {"timeout": "5"},
        {"timeout": True},
        {"temperature": True},
        {"temperature": "0.5"},
        {"temperature": float("nan")},
        {"model": ""},
        {"chat_memory": 20},
        {"chat_memory": "window"},
        {"model": ScriptedChatModel([])},
        {"output_mode": "yaml"},
        {"concurrent_tools": 4},
        {"parameters": [("seed", 1)]},
        {"on_unknown_tool": "ignore"},
        {"on_tool_execution_error": lambda error: "one parameter"},
        {"tool_choice": "no_such_tool"},
        {"tool_provider": 5},
        {"tool_provider": lambda: None},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_with_invalid_values_are_a_problem(options: dict[str, Any]) -> None:
    problem = problem_of(**options)
    assert problem.where.startswith("Assistant")
    assert problem.fix
    [name] = options
    assert name in problem.what or "provider" in problem.what


def test_executors_with_the_wrong_parameters_are_a_problem() -> None:
    problem = problem_of(tools={ToolSpecification("short"): lambda request: "x"})
    assert "short" in problem.where
    assert "memory" in problem.what
    problem = problem_of(tools=[AiServiceTool(ToolSpecification("long"), lambda a, b, c: "x")])
    assert "long" in problem.where


def test_decorators_without_parentheses_are_reported() -> None:
    with pytest.raises(TypeError, match="parentheses"):

        class One(Protocol):
            @user_message  # type: ignore[arg-type]
            async def chat(self, text: str) -> str: ...

    class Two(Protocol):
        @system_message
        async def chat(self, text: str) -> str: ...

    class Three(Protocol):
        @toolbox
        async def chat(self, text: str) -> str: ...

    class Four(Protocol):
        @fallback
        async def chat(self, text: str) -> str: ...

    assert "@system_message" in problem_of(Two).what
    assert problem_of(Two).where == "Two.chat"
    assert "@toolbox" in problem_of(Three).what
    assert "@fallback" in problem_of(Four).what


def test_several_messages_of_one_kind_on_one_object_are_problems() -> None:
    class System(Protocol):
        @system_message("a")
        @system_message("b")
        async def chat(self, text: str) -> str: ...

    class User(Protocol):
        @user_message("a {text}")
        @system_message("b")
        @user_message("c {text}")
        async def chat(self, text: str) -> str: ...

    @system_message(lambda context: "a")
    @system_message("b")
    class Class(Protocol):
        async def chat(self, text: str) -> str: ...

    class Inherited(System, Protocol):
        pass

    for cls, where, decorator in (
        (System, "System.chat", "@system_message"),
        (User, "User.chat", "@user_message"),
        (Class, "Class", "@system_message"),
        (Inherited, "System.chat", "@system_message"),
    ):
        problem = problem_of(cls)
        assert problem.where == where
        assert problem.what == f"has several {decorator} decorators"


def test_one_message_on_a_class_and_one_on_its_method_are_allowed() -> None:
    @system_message("a")
    class Both(Protocol):
        @system_message("b")
        @user_message("c {text}")
        async def chat(self, text: str) -> str: ...

    create_ai_service(Both, chat_model=ScriptedChatModel([]))


@pytest.mark.parametrize("parameters", [int, (int, 3), ServiceEvent])
def test_a_token_stream_has_no_parameter(parameters: Any) -> None:
    class Parametrized(Protocol):
        def chat(self, text: str) -> Any: ...

    Parametrized.chat.__annotations__["return"] = TokenStream[parameters]  # type: ignore[misc,type-arg]  # the mistake

    problem = problem_of(Parametrized)

    assert problem.where == "Parametrized.chat"
    assert "TokenStream has no parameter" in problem.what


def test_unbound_methods_as_tools_are_a_problem() -> None:
    class Calculator:
        @tool
        def double(self, x: int) -> int:
            return 2 * x

    assert "instance" in problem_of(tools=[Calculator.double]).fix


async def test_invalid_results_of_a_tool_provider_are_rejected() -> None:
    service = create_ai_service(Assistant, chat_model=ScriptedChatModel([]), tool_provider=lambda request: 5)
    with pytest.raises(IllegalConfigurationError, match="returned 5"):
        await service.chat("x")


def test_services_without_abstract_methods_are_a_problem() -> None:
    class Forgotten(ABC):  # noqa: B024 - the mistake
        async def chat(self, text: str) -> str: ...  # noqa: B027 - likewise

    assert "@abstractmethod" in problem_of(Forgotten).fix

    class Written(Protocol):
        async def chat(self, text: str) -> AsyncIterator[str]:
            yield text

    assert "body" in problem_of(Written).what


def test_abstract_properties_are_a_problem() -> None:
    class Named(ABC):
        @property
        @abstractmethod
        def name(self) -> str: ...

        @abstractmethod
        async def chat(self, text: str) -> str: ...

    assert problem_of(Named).where == "Named.name"


def test_streams_without_an_item_type_are_a_problem() -> None:
    class Bare(Protocol):
        def chat(self, text: str) -> AsyncIterator: ...  # type: ignore[type-arg]

    assert "AsyncIterator[str]" in problem_of(Bare).what


def test_tool_rejects_classes() -> None:
    with pytest.raises(TypeError, match="function or method"):

        @tool
        class Tools:
            pass


async def test_missing_beans_of_tools_with_the_same_name_in_two_methods_are_reported() -> None:
    class Missing: ...

    class One:
        @tool
        def find(self) -> str:
            return "one"

    class Two:
        def __init__(self, missing: Missing) -> None: ...

        @tool
        def find(self) -> str:
            return "two"

    @register_ai_service
    class Both(Protocol):
        @toolbox(One)
        async def one(self, text: str) -> str: ...

        @toolbox(Two)
        async def two(self, text: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Both).check()
    assert problem.where == "Two.missing"
