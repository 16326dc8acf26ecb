"""Calls of functions as tools, without a service."""

from typing import Any

import pytest

from toolbox import ToolArgumentsError, ToolExecutionRequest, ToolExecutionResult, tool_executor_from


def call(function: Any, arguments: str = "{}", memory_id: object = None) -> Any:
    """Return what the function returned for the arguments of a model."""
    result: Any = tool_executor_from(function)(ToolExecutionRequest("1", "f", arguments), memory_id)
    assert isinstance(result, ToolExecutionResult)
    assert not result.is_error, result.text
    return result.result_object


def refusal(function: Any, arguments: str) -> ToolArgumentsError:
    """Return the error that the arguments of a model cause."""
    with pytest.raises(ToolArgumentsError) as raised:
        call(function, arguments)
    return raised.value


def add(a: int, b: int = 0) -> int:
    return a + b


def nothing() -> str:
    return "ran"
