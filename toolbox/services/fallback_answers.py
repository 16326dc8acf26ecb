"""Answers of functions marked with `@fallback`, if no model of a call answers: reading the functions, and calling them.

Not here: the mark (`models.fallback_marks`), when a model has failed (`driver`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..chat import AiMessage, ChatResponse, FinishReason
from ..errors import ModelError, Problem
from ..events import FallbackUsedEvent
from ..execution.markers import EXECUTION_MARK, execution_of
from ..introspection import EMPTY, Parameter, Unresolved, read_signature, type_name, unwrapped
from ..tools.codec import awaited
from .invocation import Invocation
from .loop import Finish
from .outputs import Output, Result, Shape, can_be
from .plans import text_of

ERROR = "error"
"""The parameter that gets the error of the last model."""


@dataclass(frozen=True, slots=True)
class FallbackAnswer:
    """A function that gives the answer of a method; `parameters` are those of the method that it takes."""

    function: Callable[..., Any]
    parameters: tuple[str, ...]
    takes_error: bool

    async def give(self, error: ModelError, invocation: Invocation) -> Finish:
        """Call the function. Returns the end of the invocation; raises what the function raises."""
        if invocation.host.listeners is not None:
            invocation.host.listeners.tell(FallbackUsedEvent(invocation.context, error))
        arguments: dict[str, Any] = {name: invocation.arguments[name] for name in self.parameters}
        if self.takes_error:
            arguments[ERROR] = error
        function = self.function
        execution = execution_of(function, getattr(function, EXECUTION_MARK, None))
        value = await invocation.runner.run(execution, lambda: function(**arguments), function.__qualname__)
        said = value.content if isinstance(value, Result) else value
        response = ChatResponse(AiMessage(None if said is None else text_of(said)), finish_reason=FinishReason.OTHER)
        return Finish(value, FinishReason.OTHER, response, is_fallback=True)


def read_fallback(
    where: str, functions: Sequence[Callable[..., Any]], parameters: dict[str, Parameter], output: Output | None
) -> tuple[FallbackAnswer | None, list[Problem]]:
    """Read the function of a method's `@fallback`, and return its problems. `parameters` are those of the method."""
    if not functions:
        return None, []
    if len(functions) > 1:
        several = ", ".join(each.__qualname__ for each in functions)
        return None, [Problem(where, f"several functions are its @fallback: {several}", "keep one of them")]
    function = functions[0]
    taken = read_signature(function).parameters
    problems = list(_problems(where, function, taken, parameters, output))
    names = tuple(each.name for each in taken if each.name in parameters and each.name != ERROR)
    return FallbackAnswer(function, names, any(each.name == ERROR for each in taken)), problems


def _problems(
    where: str,
    function: Callable[..., Any],
    taken: tuple[Parameter, ...],
    parameters: dict[str, Parameter],
    output: Output | None,
) -> Iterator[Problem]:
    place = f"{where}, @fallback {function.__name__}"
    for each in taken:
        known = each.name in (*parameters, ERROR)
        if each.is_variadic or each.kind is inspect.Parameter.POSITIONAL_ONLY:
            yield Problem(
                place, f"the parameter {each.name!r} cannot be passed by its name", "declare it without * or /"
            )
        elif each.name == "self":
            yield Problem(place, "the function is a method", "add @staticmethod, and remove self")
        elif not known and each.default is EMPTY:
            offered = ", ".join((ERROR, *parameters))
            yield Problem(place, f"the method has no parameter {each.name!r}", f"take any of: {offered}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        yield Problem(place, "the function is a generator", "return the whole answer")
        return
    returns = awaited(read_signature(function).returns)
    if output is None or isinstance(returns, Unresolved) or returns is EMPTY:
        return
    is_result = unwrapped(returns).type is Result or getattr(unwrapped(returns).type, "__origin__", None) is Result
    if not can_be(returns, output.type) or (is_result and output.shape is not Shape.RESULT):
        wanted = f"Result[{type_name(output.type)}]" if output.shape is Shape.RESULT else type_name(output.type)
        fact = f"it returns {type_name(returns)}, which cannot be the method's {wanted}"
        yield Problem(place, fact, f"return {type_name(output.type)}")
