"""Answers of functions marked with `@fallback`, if no model of a call answers: reading the functions, and calling them.

Not here: the mark (`models.fallback_marks`), which errors of models count (`models.fallbacks`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ..bean_references import definitions_of
from ..chat import AiMessage, ChatResponse, FinishReason
from ..errors import ModelError, Problem
from ..events import FallbackUsedEvent
from ..execution.cancellation import CancellationsHere
from ..execution.markers import EXECUTION_MARK, Execution, execution_of, execution_problems
from ..introspection import EMPTY, Parameter, Signature, Unresolved, read_signature, type_name, unwrapped
from ..models.fallback_marks import fallbacks_at
from ..models.fallbacks import is_worth_another_model
from ..tools.results import awaited
from .invocation import Invocation, Perform
from .loop import CallModel, Finish, RunTool
from .outputs import Output, Result, Shape, always_can_be
from .streamed_call import StreamedCall
from .templates import text_of

ERROR = "error"
"""The parameter that gets the error of the last model."""


@dataclass(frozen=True, slots=True)
class FallbackAnswer:
    """A function that gives the answer of a method; `parameters` are those of the method that it takes."""

    where: str
    function: Callable[..., Any]
    execution: Execution
    parameters: tuple[str, ...]
    takes_error: bool

    async def give(self, error: ModelError, invocation: Invocation) -> Finish:
        """Call the function. Returns the end of the invocation.

        Raises what the function raises, and `TypeError` for a value that the method cannot return.
        """
        if invocation.host.listeners is not None:
            invocation.host.listeners.tell(FallbackUsedEvent(invocation.context, error))
        arguments: dict[str, Any] = {name: invocation.arguments[name] for name in self.parameters}
        if self.takes_error:
            arguments[ERROR] = error
        function = self.function
        value = await invocation.runner.run(self.execution, lambda: function(**arguments), self.where)
        output = invocation.plan.output
        said = value.content if isinstance(value, Result) and output.shape is Shape.RESULT else value
        try:
            output.adapter.validate_python(said, strict=True)
        except ValidationError:
            fact = f"{self.where} returned {type_name(type(said))}, which does not fit {type_name(output.type)}"
            raise TypeError(fact) from None
        message = said if isinstance(said, AiMessage) else AiMessage(None if said is None else text_of(said))
        response = ChatResponse(message, finish_reason=FinishReason.OTHER)
        return Finish(value, FinishReason.OTHER, response, is_fallback=True)


def or_fallback(perform: Perform, streamed: StreamedCall | None) -> Perform:
    """Return the layer that ends the call with what the method's `@fallback` function returns, if no model answers."""

    async def ask(effect: CallModel | RunTool, invocation: Invocation) -> Any:
        if isinstance(effect, RunTool):
            return await perform(effect, invocation)
        answer, cancellations = invocation.plan.fallback, CancellationsHere()
        assert answer is not None
        try:
            return await perform(effect, invocation)
        except ModelError as error:
            # A reader who has a part of an answer must not get another one. The caller of a method that returns a value
            # has none: there, the reader follows the events of a run, or of a call in a tool.
            has_part = streamed is not None and streamed.has_sent and invocation.plan.output.is_stream
            if has_part or not is_worth_another_model(error):
                raise
            failure = error
        finished: Finish = await answer.give(failure, invocation)
        if cancellations.came:
            raise asyncio.CancelledError("cancelled; a fallback caught the first CancelledError")
        if streamed is not None:
            await streamed.give_fallback(finished)
        return finished

    return ask


def read_fallback(
    cls: type[Any], method: str, parameters: Mapping[str, Parameter], output: Output | None, names: Mapping[str, Any]
) -> tuple[FallbackAnswer | None, list[Problem]]:
    """Read the function of a method's `@fallback`, and return its problems.

    `parameters` are those of the method; `names` are further names for annotations.
    """
    marked = next((found for each in definitions_of(cls, method) if (found := fallbacks_at(each))), ())
    members = [member for each in marked if (member := _member(cls, each)) is not None]
    if not members:
        return None, []
    where = f"{cls.__name__}.{method}"
    if len(members) > 1:
        several = ", ".join(getattr(each, "__func__", each).__qualname__ for each in members)
        return None, [Problem(where, f"several functions are its @fallback: {several}", "keep one of them")]
    [member] = members
    function = getattr(member, "__func__", member)
    signature = read_signature(function, nearer=names)
    taken, place = signature.parameters, f"{where}, @fallback {function.__name__}"
    mark = getattr(member, EXECUTION_MARK, None) or getattr(function, EXECUTION_MARK, None)
    execution = execution_of(function, mark, signature.returns)
    problems = [
        *_problems(place, function, signature, parameters, output),
        *execution_problems(place, function, execution),
    ]
    given = tuple(each.name for each in taken if each.name in parameters and each.name != ERROR)
    return FallbackAnswer(place, function, execution, given, any(each.name == ERROR for each in taken)), problems


def _member(cls: type[Any], function: Any) -> Any:
    """Return the static method that a function is, or the one that a subclass has instead; None if it removed it.

    A function of a module is returned as it is.
    """
    own = (vars(base).get(function.__name__) for base in cls.__mro__)
    is_member = any(getattr(each, "__func__", each) is function for each in own)
    return inspect.getattr_static(cls, function.__name__) if is_member else function


def _problems(
    place: str,
    function: Callable[..., Any],
    signature: Signature,
    parameters: Mapping[str, Parameter],
    output: Output | None,
) -> Iterator[Problem]:
    for each in signature.parameters:
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
    returns = awaited(signature.returns)
    if output is None or isinstance(returns, Unresolved) or returns is EMPTY:
        return
    is_result = unwrapped(returns).type is Result or getattr(unwrapped(returns).type, "__origin__", None) is Result
    if not always_can_be(returns, output.type) or (is_result and output.shape is not Shape.RESULT):
        wanted = f"Result[{type_name(output.type)}]" if output.shape is Shape.RESULT else type_name(output.type)
        fact = f"it returns {type_name(returns)}, which does not fit the method's {wanted}"
        yield Problem(place, fact, f"return {type_name(output.type)}")
