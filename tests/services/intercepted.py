"""Interceptors, services and tools of the tests of interceptors."""

from typing import Any, Protocol

from toolbox import (
    ChatResponse,
    Result,
    TokenStream,
    ToolAbort,
    ToolExecution,
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
    interceptors,
)
from toolbox.testing import ScriptedChatModel, tool_call

from .log import LOG


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


ADD = tool_call("add", {"a": 1})


def scripted(*replies: Any) -> ScriptedChatModel:
    return ScriptedChatModel([*replies] or [ADD, "done"])


def around(function: Any) -> ToolInterceptor:
    """Return an interceptor with this function as its `around_tool`."""

    class Around(ToolInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
            return await function(call, proceed)  # type: ignore[no-any-return]  # of a test

    return Around()


class Assistant(Protocol):
    async def ask(self, question: str) -> Result[str]: ...
    def wait(self, question: str) -> Result[str]: ...
    def events(self, question: str) -> TokenStream: ...


@tool
def plus(a: int, b: int = 5) -> int:
    """Add two numbers."""
    LOG.append(f"plus {a} {b}")
    return a + b


PLUS = tool_call("plus", {"a": 1})


def assistant(*used: Any, model: Any = None, tools: Any = (plus,), **options: Any) -> Any:
    model = model or scripted(PLUS, "done")
    return create_ai_service(Assistant, chat_model=model, tools=tools, interceptors=used, **options)


async def execution(*used: Any, **options: Any) -> ToolExecution:
    """Return the execution of one call of `plus`."""
    [done] = (await assistant(*used, **options).ask("go")).tool_executions
    return done


class Stop(ToolAbort): ...


async def swallowing(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
    for _ in range(3):
        try:
            return await proceed(call)
        except BaseException as error:
            LOG.append(type(error).__name__)
    return ToolExecutionResult("swallowed")


class Plain:
    async def around_tool(self, call: Any, proceed: Any) -> Any: ...


@tool
def look() -> str:
    LOG.append("looked")
    return "looked"
