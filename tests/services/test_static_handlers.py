"""Error handlers that are static methods of a service."""

from abc import ABC, abstractmethod
from typing import Any, Protocol

import pytest

from toolbox import (
    Container,
    IllegalConfigurationError,
    InvocationContext,
    Result,
    ToolArgumentsError,
    ToolErrors,
    UnknownToolError,
    create_ai_service,
    handle_tool_arguments_error,
    handle_tool_execution_error,
    handle_unknown_tool,
    register_ai_service,
    return_to_model,
    tool,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


@tool
async def add(a: int, b: int) -> int:
    if a < 0:
        raise ValueError("negative")
    return a + b


class Desk(Protocol):
    async def chat(self, text: str) -> Result[str]: ...

    @handle_unknown_tool
    @staticmethod
    def unknown(error: UnknownToolError, context: InvocationContext) -> str:
        return f"unknown: {error.request.name} in {context.method}"

    @staticmethod
    @handle_tool_arguments_error
    async def wrong(error: ToolArgumentsError, context: InvocationContext) -> str:
        return f"wrong: {error.problems[0][0]}"

    @staticmethod
    @handle_tool_execution_error
    def _failed(error: Exception, context: InvocationContext) -> str:
        return f"failed: {error}"


CALLS = (tool_call("sub"), tool_call("add", {"a": "x", "b": 1}), tool_call("add", {"a": -1, "b": 1}))


async def executed(service: Any) -> list[tuple[str, bool]]:
    result = await service.chat("q")
    return [(each.result, each.is_error) for each in result.tool_executions]


EXPECTED = [("unknown: sub in chat", True), ("wrong: a", True), ("failed: negative", True)]


async def test_static_methods_handle_the_three_kinds_of_errors() -> None:
    service = create_ai_service(Desk, chat_model=ScriptedChatModel([*CALLS, "done"]), tools=[add])

    assert await executed(service) == EXPECTED
    assert service.unknown(UnknownToolError(CALLS[0], ()), InvocationContext(Desk, "m")) == "unknown: sub in m"


async def test_static_handlers_win_over_those_of_the_container() -> None:
    marked = register_ai_service(tools=[add])(Desk)
    models = {"default": ScriptedChatModel([*CALLS, "done"])}
    errors = ToolErrors(return_to_model, return_to_model, return_to_model)
    async with Container(models=models, tool_errors=errors).register(marked) as container:
        assert await executed(container.get(Desk)) == EXPECTED


async def test_handlers_are_inherited_and_can_be_overridden() -> None:
    class Base(ABC):  # noqa: B024 - its subclass has the abstract method
        @staticmethod
        @handle_tool_execution_error
        def failed(error: Exception, context: InvocationContext) -> str:
            return "base"

        @staticmethod
        @handle_unknown_tool
        def unknown(error: Exception, context: InvocationContext) -> str:
            return "base"

    class Child(Base):
        @abstractmethod
        async def chat(self, text: str) -> Result[str]: ...

        @staticmethod
        def failed(error: Exception, context: InvocationContext) -> str:
            return "child"

    model = ScriptedChatModel([CALLS[0], CALLS[2], "done"])
    service: Any = create_ai_service(Child, chat_model=model, tools=[add])
    assert await executed(service) == [("base", True), ("child", True)]


def problems_with(cls: type[Any], **options: Any) -> list[str]:
    with pytest.raises(IllegalConfigurationError) as raised:
        create_ai_service(cls, chat_model=ScriptedChatModel([]), **options)
    return [f"{each.where}: {each.what}" for each in raised.value.problems]


def test_a_handler_and_an_option_of_the_same_kind_are_a_problem() -> None:
    assert problems_with(Desk, on_unknown_tool=return_to_model) == [
        "Desk.unknown: @handle_unknown_tool is given twice: on_unknown_tool= and unknown"
    ]


def test_two_handlers_of_a_kind_are_a_problem() -> None:
    class Twice(Desk, Protocol):
        @staticmethod
        @handle_unknown_tool
        def another(error: Exception, context: InvocationContext) -> str:
            return ""

    assert problems_with(Twice) == ["Twice.another: @handle_unknown_tool is given twice: unknown and another"]


def test_handlers_that_are_not_static_or_take_other_parameters_are_problems() -> None:
    class Wrong(Protocol):
        async def chat(self, text: str) -> str: ...

        @handle_unknown_tool
        def method(self, error: Exception, context: InvocationContext) -> str:
            return ""

        @handle_tool_arguments_error
        @classmethod
        def of_class(cls, error: Exception, context: InvocationContext) -> str:
            return ""

        @staticmethod
        @handle_tool_execution_error
        def short(error: Exception) -> str:
            return ""

    assert problems_with(Wrong) == [
        "Wrong.method: @handle_unknown_tool is not on a static method",
        "Wrong.of_class: @handle_tool_arguments_error is not on a static method",
        "Wrong.short: @handle_tool_execution_error needs a method with two parameters",
    ]


def test_a_class_is_not_a_handler() -> None:
    with pytest.raises(TypeError, match="expected a static method"):
        handle_unknown_tool(int)
