"""What type checkers know of tools that are called by hand. Checked, never run."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol, assert_type

from toolbox import (
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
