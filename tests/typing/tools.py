"""What type checkers know of tools that are called by hand. Checked, never run."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Protocol, assert_type

from toolbox import (
    InvocationContext,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolExecutor,
    register_ai_service,
    tool,
    tool_executor_from,
    tool_specification_from,
)


@tool
def add(a: int, b: int) -> int:
    return a + b


@tool
async def fetch(name: str) -> str:
    return name


def costs_much(arguments: Mapping[str, Any], context: InvocationContext) -> bool:
    return arguments["euros"] > 10 and context.memory_id is None


async def is_new_customer(arguments: dict[str, Any], context: InvocationContext) -> bool:
    return True


@tool(requires_approval=costs_much)
def pay(euros: int) -> None: ...


@tool(requires_approval=is_new_customer)
def lend(euros: int) -> None: ...


@tool(requires_approval=lambda arguments, context: costs_much(arguments, context))
def give(euros: int) -> None: ...


@tool(requires_approval=lambda arguments: True)  # type: ignore[arg-type, misc]  # without the context
def send(euros: int) -> None: ...


@register_ai_service
class Storyteller(Protocol):
    def tell(self, wish: str) -> AsyncGenerator[str, None]: ...


async def an_executor_says_whether_it_is_awaited(request: ToolExecutionRequest) -> None:
    assert_type(tool_executor_from(add)(request, None), ToolExecutionResult)
    assert_type(await tool_executor_from(fetch)(request, None), ToolExecutionResult)


def an_executor_is_what_a_service_takes() -> dict[object, ToolExecutor]:
    return {
        tool_specification_from(add): tool_executor_from(add),
        tool_specification_from(fetch): tool_executor_from(fetch),
    }


async def a_stream_declared_as_a_generator_can_be_closed(storyteller: Storyteller) -> None:
    async with aclosing(storyteller.tell("a story")) as pieces:
        async for piece in pieces:
            assert_type(piece, str)
