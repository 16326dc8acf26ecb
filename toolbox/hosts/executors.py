"""Tools without a service: specifications and executors for programs that talk to a model themselves.

Not here: running a call (`tools.pipeline`), the beans without a container (`named_instances`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextvars import copy_context
from dataclasses import replace
from typing import Any, overload

from ..capabilities import named_problems, tool_layers
from ..chat import ToolExecutionRequest, ToolExecutionResult, ToolExecutor, ToolSpecification
from ..context import Cancellation, InContext, InvocationContext, in_tool
from ..errors import IllegalConfigurationError, Problem, ScopeNotActiveError, ToolTimeoutError
from ..execution.markers import Execution
from ..execution.threads import Finish
from ..services.method_marks import named_at_tool
from ..tools.failures import DEFAULTS
from ..tools.function_calls import with_layers
from ..tools.pipeline import answer, error_result
from ..tools.results import cut
from ..tools.sources import is_function, read_function, read_method, read_tools
from ..tools.tool_calls import NoService, Tool, ToolEnvironment
from .named_instances import NamedInstances


def tool_specifications_from(class_or_object: object) -> list[ToolSpecification]:
    """Return the specifications of the tools of a class or an object.

        [specification] = tool_specifications_from(Calculator)

    Raises `IllegalConfigurationError` if a tool is declared wrongly.
    """
    return [tool.specification for tool in _tools_of(class_or_object)]


def tool_specification_from(function: Callable[..., Any]) -> ToolSpecification:
    """Return the specification of one function or method, marked or not.

    Raises `IllegalConfigurationError` if it cannot be a tool.
    """
    return _tool_of(function).specification


@overload
def tool_executor_from(  # pyright: ignore[reportOverlappingOverload]  # a coroutine function is the narrower case
    function: Callable[..., Coroutine[Any, Any, Any]],
) -> Callable[[ToolExecutionRequest, Any], Awaitable[ToolExecutionResult]]: ...


@overload
def tool_executor_from(function: Callable[..., Any]) -> Callable[[ToolExecutionRequest, Any], ToolExecutionResult]: ...


def tool_executor_from(function: Callable[..., Any]) -> ToolExecutor:
    """Return an executor that runs a function for a model's tool calls, like a service with the default handlers.

        execute = tool_executor_from(add)
        result = execute(request, None)  # a ToolExecutionResult

    For an asynchronous function it returns an awaitable of the result. An exception of the function becomes an error
    result; invalid arguments raise `ToolArgumentsError`. You can also list the executor as a tool of a service, which
    then uses its own handlers. Without a service, nobody can approve a call: one that needs approval does not run,
    and the result is an error. Raises `IllegalConfigurationError` if the function cannot be a tool.
    """
    return StandaloneExecutor(_with_instance([_tool_of(function)])[0])


def tools_from(source: object) -> dict[ToolSpecification, ToolExecutor]:
    """Return `{specification: executor}` for the tools of an object, to call them without a service.

    The executors work as described for `tool_executor_from`. Raises `IllegalConfigurationError` if a tool is declared
    wrongly, or needs an instance and `source` is a class.
    """
    return {tool.specification: StandaloneExecutor(tool) for tool in _with_instance(_tools_of(source))}


def _with_instance(tools: Sequence[Tool]) -> Sequence[Tool]:
    """Return the same tools. Raises `IllegalConfigurationError` for those of a class."""
    problems = [
        Problem(tool.where, "is a method and needs an instance", "pass an instance instead of the class")
        for tool in tools
        if tool.bean is not None
    ]
    if problems:
        raise IllegalConfigurationError(problems)
    return tools


def _tools_of(source: object) -> tuple[Tool, ...]:
    tools, problems = read_tools((source,), getattr(source, "__name__", type(source).__name__))
    if problems:
        raise IllegalConfigurationError(problems)
    return tools


def _tool_of(function: Any) -> Tool:
    if not is_function(function):
        problem = Problem(
            repr(function), "is not a function", "pass a function, or use tools_from(…) for the tools of an object"
        )
        raise IllegalConfigurationError([problem])
    problems: list[Problem] = []
    method = read_method(function, lambda cls: cls, problems)
    tools = (read_function(function, problems),) if method is None else method
    if problems or not tools or tools[0] is None:
        raise IllegalConfigurationError(problems)
    return tools[0]


def _with_own_layers(tool: Tool) -> tuple[NamedInstances, Tool]:
    """Return the tool with the layers that its decorators and options need, and a scope with the instances for them.

    Raises `IllegalConfigurationError`.
    """
    named, scope = tuple(named_at_tool(tool)), NamedInstances()
    problems = [problem for each in named for problem in named_problems(each)]
    problems = problems or [problem for each in named for problem in scope.add(each.reference, each.where)]
    if problems:
        raise IllegalConfigurationError(problems)
    return scope, with_layers(tool, tool_layers())


class StandaloneExecutor:
    """Runs one tool on the calling thread. The timeout applies to asynchronous tools only."""

    __slots__ = ("_environment", "_own_context", "_running", "tool")

    def __init__(self, tool: Tool) -> None:
        scope, layered = _with_own_layers(tool)
        self.tool, self._running = tool, layered
        runner = _CallingRunner(tool)
        if not tool.execution.is_coroutine and tool.timeout is not None:
            self._running = replace(layered, timeout=None)  # if it returns an awaitable, the runner applies the timeout
        self._environment = ToolEnvironment({tool.name: tool}, _NO_INVOCATION, scope, runner, DEFAULTS)
        hidden = tool.memory_id_names or tool.context_names or tool.decode is None
        self._own_context = bool(hidden) or tool.timeout is not None

    def __call__(self, request: ToolExecutionRequest, memory_id: Any = None) -> Any:
        """Return the result; for an asynchronous tool, an awaitable of it."""
        tool = self.tool
        if tool.injected:
            wanted = ", ".join(each.name for each in tool.injected)
            raise ScopeNotActiveError(f"{tool.where} ({wanted})", "a tool without a container has no beans to inject")
        steps = self._steps(request, memory_id)
        if tool.execution.is_coroutine:
            return steps
        try:
            waits_for = steps.send(None)
        except StopIteration as stop:
            return stop.value
        return _Rest(steps, waits_for)

    async def _steps(self, request: ToolExecutionRequest, memory_id: Any) -> ToolExecutionResult:
        context = _context_for(request, memory_id) if self._own_context else _NO_INVOCATION
        try:
            encoded = await answer(self._running, request, context, self._environment)
        except Exception as error:
            encoded = await error_result(
                error, self.tool, request, in_tool(context, request, context.cancellation), self._environment
            )
        limit = self.tool.max_result_chars
        if limit is not None and len(encoded.text) > limit:
            text, contents = cut(encoded.text, tuple(encoded.contents), limit)
            return replace(encoded.as_result(), text=text, contents=contents)
        return encoded.as_result()


_NO_INVOCATION = InvocationContext(NoService, "")


def _context_for(request: ToolExecutionRequest, memory_id: Any) -> InvocationContext:
    """Return the context of a call that belongs to no service, or to the one whose code makes it."""
    outer = InvocationContext.current()
    if outer is None:
        return InvocationContext(NoService, request.name, memory_id, request=request)
    return replace(outer, memory_id=memory_id, request=request, cancellation=Cancellation())


class _CallingRunner:
    """Calls a `def` tool directly. If it returns an awaitable, the caller gets an awaitable of the result."""

    is_for_loop = False

    def __init__(self, tool: Tool) -> None:
        self._tool = tool
        self.together = False

    def warn_if_slow(self, label: str, began: float) -> None:
        """Do nothing: the tool blocks its own caller only."""

    async def run(
        self,
        execution: Execution,
        call: Callable[[], Any],
        label: str,
        *,
        finish: Finish | None = None,
        shipped: Callable[[], Callable[[], Any]] | None = None,
        has_timeout: bool = False,
    ) -> Any:
        value = call()
        if not inspect.isawaitable(value):
            return value
        await _Pause()
        timeout = self._tool.timeout
        if timeout is None:
            return await value
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                return await value
        except TimeoutError:
            if limit.expired():
                raise ToolTimeoutError(self._tool.name, timeout) from None
            raise


class _Pause(Awaitable[None]):
    """Signals `StandaloneExecutor` that the rest of the call must be awaited."""

    def __await__(self) -> Generator[Any, Any, None]:
        yield self


class _Rest(Awaitable[ToolExecutionResult]):
    """The rest of a call that must be awaited."""

    def __init__(self, steps: Coroutine[Any, Any, ToolExecutionResult], waits_for: object) -> None:
        self._steps, self._waits_for = steps, waits_for

    def __await__(self) -> Generator[Any, Any, ToolExecutionResult]:
        if isinstance(self._waits_for, _Pause):
            return (yield from self._steps.__await__())
        # A guardrail or an interceptor has begun to wait.
        return (yield from InContext(copy_context(), self._steps, self._waits_for).__await__())
