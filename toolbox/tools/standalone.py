"""Tools without a service: their specifications, and executors that work by themselves.

For programs that talk to a model by hand. Not here: a call inside a service (`invocation`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext
from typing import Any, overload

from ..chat import ToolExecutionRequest, ToolExecutionResult, ToolExecutor, ToolSpecification
from ..context import InvocationContext
from ..errors import (
    FrameworkError,
    IllegalConfigurationError,
    Problem,
    ScopeNotActiveError,
    ToolAbort,
    ToolArgumentsError,
    ToolTimeoutError,
)
from .codec import printable
from .failures import message_of
from .members import read_function
from .prepared import Tool
from .sources import is_function, read_tools


def tool_specifications_from(class_or_object: object) -> list[ToolSpecification]:
    """The specifications of the tools of a class or an object. Raises `IllegalConfigurationError`."""
    return [tool.specification for tool in _tools_of(class_or_object)]


def tool_specification_from(function: Callable[..., Any]) -> ToolSpecification:
    """The specification of one function or method, marked or not. Raises `IllegalConfigurationError`."""
    return _tool_of(function).specification


@overload
def tool_executor_from(  # pyright: ignore[reportOverlappingOverload]  # a coroutine function is the narrower case
    function: Callable[..., Coroutine[Any, Any, Any]],
) -> Callable[[ToolExecutionRequest, Any], Awaitable[ToolExecutionResult]]: ...


@overload
def tool_executor_from(function: Callable[..., Any]) -> Callable[[ToolExecutionRequest, Any], ToolExecutionResult]: ...


def tool_executor_from(function: Callable[..., Any]) -> ToolExecutor:
    """What runs a function for a model's requests, as a service with the default handlers does.

    A call returns a `ToolExecutionResult`, or an awaitable of it when the function is asynchronous; what the function
    raises becomes an error result, unusable arguments raise `ToolArgumentsError`. Given to a service, it is a tool like
    any other, with the service's handlers. Raises `IllegalConfigurationError`.
    """
    return StandaloneExecutor(_tool_of(function))


def tools_from(source: object) -> dict[ToolSpecification, ToolExecutor]:
    """The tools of an object, as `tool_executor_from` makes them. Raises `IllegalConfigurationError`."""
    tools = _tools_of(source)
    problems = [
        Problem(tool.where, "is a method, and there is no instance to call it on", "give an instance of the class")
        for tool in tools
        if tool.bean is not None
    ]
    if problems:
        raise IllegalConfigurationError(problems)
    return {tool.specification: StandaloneExecutor(tool) for tool in tools}


def _tools_of(source: object) -> tuple[Tool, ...]:
    tools, problems = read_tools((source,), getattr(source, "__name__", type(source).__name__))
    if problems:
        raise IllegalConfigurationError(problems)
    return tools


def _tool_of(function: Any) -> Tool:
    if not is_function(function):
        problem = Problem(repr(function), "is not a function", "use tools_from(…) for the tools of an object")
        raise IllegalConfigurationError([problem])
    problems: list[Problem] = []
    tool = read_function(function, problems)
    if tool is None or problems:
        raise IllegalConfigurationError(problems)
    return tool


class StandaloneExecutor:
    """Runs one tool where it is called. Its time-out holds for asynchronous tools: a thread cannot be stopped."""

    __slots__ = ("tool",)

    def __init__(self, tool: Tool) -> None:
        self.tool = tool

    def __call__(self, request: ToolExecutionRequest, memory_id: Any = None) -> Any:
        """The result; for an asynchronous tool an awaitable of it."""
        try:
            value = self._start(request, memory_id)
            if inspect.isawaitable(value):
                return self._awaited(value, request)
            return self.tool.encode(value).as_result()
        except Exception as error:
            return _error_result(error, request)

    def _start(self, request: ToolExecutionRequest, memory_id: Any) -> Any:
        tool = self.tool
        assert tool.function is not None
        if tool.decode is None:
            return tool.function(request, memory_id)
        if tool.injected:
            wanted = ", ".join(each.name for each in tool.injected)
            raise ScopeNotActiveError(f"{tool.where} ({wanted})", "its beans are a container's, and this is none")
        arguments = tool.decode(request)
        arguments |= dict.fromkeys(tool.memory_id_names, memory_id)
        if tool.context_names:
            context = InvocationContext.current()
            inside = context.in_tool(request) if context is not None else None
            arguments |= dict.fromkeys(tool.context_names, inside)
        positional = [arguments.pop(name, default) for name, default in tool.positional]
        return tool.function(*positional, **arguments)

    async def _awaited(self, value: Any, request: ToolExecutionRequest) -> ToolExecutionResult:
        timeout = self.tool.timeout
        try:
            limit = asyncio.timeout(timeout) if timeout is not None else None
            try:
                async with limit or nullcontext():
                    returned = await value
            except TimeoutError:
                if limit is None or timeout is None or not limit.expired():
                    raise
                raise ToolTimeoutError(self.tool.specification.name, timeout) from None
            return self.tool.encode(returned).as_result()
        except Exception as error:
            return _error_result(error, request)


def _error_result(error: Exception, request: ToolExecutionRequest) -> ToolExecutionResult:
    if isinstance(error, (FrameworkError, ToolAbort)):
        raise error
    if isinstance(error, ToolArgumentsError) and error.request is request:
        raise error
    return ToolExecutionResult(printable(message_of(error)), is_error=True)
