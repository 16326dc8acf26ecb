"""Tests interceptors around tool calls and model requests: order, results, errors, streams, problems at start."""

from typing import Any, Protocol

import pytest

from toolbox import (
    ChatResponse,
    Container,
    Result,
    ToolExecutionResult,
    create_ai_service,
    register_ai_service,
    tool,
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
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

LOG: list[Any] = []


@pytest.fixture(autouse=True)
def fresh_log() -> None:
    LOG.clear()


class Noting(ToolInterceptor, ModelInterceptor):
    """Notes its name before and after each call."""

    @property
    def label(self) -> str:
        return type(self).__name__

    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        LOG.append(f"{self.label} {call.specification.name}")
        result = await proceed(call)
        LOG.append(f"{self.label} {result.text}")
        return result

    async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        LOG.append(f"{self.label} asks {call.model}")
        return await proceed(call)


class OfClass(Noting): ...


class OfMethod(Noting): ...


class OfTool(Noting): ...


@global_interceptor
class First(Noting): ...


@global_interceptor
class Second(Noting): ...


@global_interceptor(priority=-1)
class Outermost(Noting): ...


@tool
@interceptors(OfTool)
def add(a: int, b: int = 5) -> int:
    """Add two numbers."""
    LOG.append(f"add {a} {b}")
    return a + b


@register_ai_service(tools=[add])
@interceptors(OfClass)
class Desk(Protocol):
    @interceptors(OfMethod)
    async def ask(self, question: str) -> Result[str]: ...


def scripted(*replies: Any) -> dict[str, Any]:
    return {"default": ScriptedChatModel([*replies] or [ADD, "done"])}


ADD = tool_call("add", {"a": 1})


async def test_interceptors_run_by_priority_then_class_method_and_tool() -> None:
    async with Container(models=scripted()).register(First, Desk, Second, Outermost) as container:
        result = await container.get(Desk).ask("1 + 5?")

    names = ["Outermost", "First", "Second", "OfClass", "OfMethod", "OfTool"]
    asking = [f"{each} asks default" for each in names[:-1]]
    around = [f"{each} add" for each in names], [f"{each} 6" for each in reversed(names)]
    assert [*asking, *around[0], "add 1 5", *around[1], *asking] == LOG
    assert result.content == "done"


async def test_a_service_without_a_container_instantiates_named_classes_and_takes_global_ones() -> None:
    desk = create_ai_service(Desk, chat_model=scripted()["default"], interceptors=[First(), Outermost])

    await desk.ask("1 + 5?")

    assert [each for each in LOG if each.endswith(" add")] == [
        f"{each} add" for each in ("Outermost", "First", "OfClass", "OfMethod", "OfTool")
    ]
