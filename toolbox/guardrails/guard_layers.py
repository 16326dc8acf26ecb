"""The layers that run guardrails: around an invocation, at an answer, and around a tool.

A guardrail that raises refuses. Not here: the order of all layers (`capabilities`), asking again after a refused
answer (`services.loop`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, NoReturn, assert_never, get_args

from ..bean_references import BeanReference
from ..chat import ChatModel, ToolExecutionResult, UserMessage
from ..contents import AudioContent, Content, ImageContent, PdfContent, TextContent
from ..context import ActiveScope, InvocationContext
from ..errors import (
    EndsInvocation,
    InputGuardrailError,
    OutputGuardrailError,
    OutputParsingError,
    ToolArgumentsError,
    ToolGuardrailError,
)
from ..events import GuardrailExecutedEvent, GuardrailOutcome, Listeners
from ..execution.cancellation import CancellationsHere, OwnCode
from ..execution.markers import is_async, marked_execution
from ..execution.runners import Runner
from ..safe_text import printable
from ..services.invocation import Invocation
from ..services.loop import AnswerChecked, CheckAnswer, replaced_answer
from ..tools.failures import message_of
from ..tools.results import Encoded, EncodedInFull
from ..tools.tool_calls import Tool, ToolCall, ToolEnvironment, ToolStep
from .kinds import (
    GuardrailResult,
    InputGuardrailRequest,
    OutputGuardrailRequest,
    ToolInputGuardrailRequest,
    ToolOutputGuardrailRequest,
)

# --- running one guardrail

find_model: ContextVar[Callable[[str | None], Awaitable[ChatModel]] | None] = ContextVar(
    "toolbox.guardrail_models", default=None
)
"""Finds a model of the host by name, inside a guardrail."""

_REFUSING = frozenset({"failure", "fatal"})
_ASKING_AGAIN = frozenset({"retry", "reprompt"})


@dataclass(frozen=True, slots=True)
class _GuardContext:
    """The invocation or the tool call that a guardrail belongs to."""

    context: InvocationContext
    scope: ActiveScope
    runner: Runner
    listeners: Listeners | None
    model: Callable[[str | None], Awaitable[ChatModel]] | None

    @classmethod
    def of_invocation(cls, invocation: Invocation) -> _GuardContext:
        host = invocation.host
        return cls(invocation.context, host.scope, invocation.runner, host.listeners, host.models.find)

    @classmethod
    def of_tool(cls, call: ToolCall) -> _GuardContext:
        environment: ToolEnvironment = call.environment
        return cls(call.context, environment.scope, environment.runner, environment.listeners, environment.model)


async def _run_guardrail(
    named: BeanReference, request: Any, place: _GuardContext, accept: Callable[[Any], Any], *, asks_again: bool = False
) -> GuardrailResult:
    """Run one guardrail. A wrong result and any exception become a fatal result; errors that end the invocation pass.

    `accept` converts the value of `success_with`, and raises if it is wrong. `asks_again`: the kind may retry.
    """
    began = perf_counter()
    outcome: GuardrailOutcome = "fatal"
    cancellations = CancellationsHere()
    token = find_model.set(place.model)
    try:
        try:
            guardrail = await named.find(place.scope)
            validate = guardrail.validate
            if is_async(validate):
                result = await OwnCode(validate(request))
            else:
                execution = marked_execution(validate)
                result = await place.runner.run(
                    execution, lambda: validate(request), f"{_name_class(named)} (guardrail)"
                )
            result = _check_result(result, named, asks_again)
            if result.outcome == "modified":
                result = replace(result, value=accept(result.value))
            outcome = result.outcome
        except EndsInvocation:
            raise
        except Exception as error:
            if isinstance(error, ExceptionGroup) and error.subgroup(EndsInvocation) is not None:
                raise
            result = GuardrailResult("fatal", message_of(error), cause=error)
        if cancellations.came:  # the guardrail has caught it
            raise asyncio.CancelledError
        return result
    finally:
        find_model.reset(token)
        if place.listeners is not None:
            event = GuardrailExecutedEvent(place.context, named.type, outcome, perf_counter() - began)
            place.listeners.tell(event)


def _check_result(result: object, named: BeanReference, asks_again: bool) -> GuardrailResult:
    """Return the result of a guardrail. Raises `TypeError` if it is not one."""
    if not isinstance(result, GuardrailResult):
        returned = type(result).__name__
        raise TypeError(f"{_name_class(named)}.validate returned {returned}; return self.success() or another result")
    if result.outcome not in get_args(GuardrailOutcome):
        raise TypeError(f"{_name_class(named)}.validate returned the unknown outcome {result.outcome!r}")
    if result.outcome in _ASKING_AGAIN and not asks_again:
        raise TypeError(f"{_name_class(named)}.validate returned {result.outcome!r}, which only output guardrails may")
    if result.outcome == "reprompt" and not isinstance(result.prompt, str):
        raise TypeError(f"{_name_class(named)}.validate returned a reprompt without a prompt")
    return result


def _name_class(named: BeanReference) -> str:
    return str(getattr(named.type, "__name__", named.type))


# --- around an invocation: the user message


class InputCheck:
    """The input guardrails of a method."""

    __slots__ = ("_named",)

    def __init__(self, named: Sequence[BeanReference]) -> None:
        self._named = tuple(named)

    async def __call__(self, invocation: Invocation) -> None:
        """Let the guardrails judge the user message, and replace it. Raises `InputGuardrailError`."""
        if not invocation.ends_with_user_message:
            return  # results of tools at the end of a history are not the user's words
        place, failures = _GuardContext.of_invocation(invocation), []
        messages = invocation.conversation
        for named in self._named:
            request = InputGuardrailRequest(invocation.user_message, messages, invocation.context)
            result = await _run_guardrail(
                named, request, place, partial(_replace_user_message, invocation.user_message)
            )
            if result.outcome == "modified":
                invocation.replace_user_message(result.value)
            elif result.outcome in _REFUSING:
                failures.append((named.type, result.text or "Input validation failed"))
                if result.outcome == "fatal":
                    raise InputGuardrailError(failures) from result.cause
        if failures:
            raise InputGuardrailError(failures)


def _replace_user_message(message: UserMessage, value: object) -> UserMessage:
    """Return the new message. A text replaces the texts; images and other contents are kept."""
    if isinstance(value, UserMessage):
        return value
    if isinstance(value, str):
        others = with_texts(message.contents, lambda _: "")
        return UserMessage([TextContent(value), *others] if value else others, message.name, message.attributes)
    raise TypeError(f"success_with() of an input guardrail takes a UserMessage or a str, got {type(value).__name__}")


def with_texts(contents: Sequence[Content], change: Callable[[str], str]) -> tuple[Content, ...]:
    """Return the contents with changed texts; without texts that become empty."""
    changed: list[Content] = []
    for each in contents:
        match each:
            case TextContent(text):
                if new := change(text):
                    changed.append(TextContent(new))
            case ImageContent() | PdfContent() | AudioContent():
                changed.append(each)
            case _:
                assert_never(each)
    return tuple(changed)


# --- the answer


class OutputCheck:
    """Performs the effect `CheckAnswer` with the output guardrails of a method."""

    __slots__ = ("_named",)

    def __init__(self, named: Sequence[BeanReference]) -> None:
        self._named = tuple(named)

    async def __call__(self, effect: CheckAnswer, invocation: Invocation) -> AnswerChecked:
        """Let the guardrails judge the answer."""
        place, rules = _GuardContext.of_invocation(invocation), invocation.rules
        response, text, answer = effect.response, effect.text, effect.answer
        messages = (*invocation.state.history, *invocation.state.messages)
        failures: list[tuple[type, str]] = []
        refused = ""
        for named in self._named:
            request = OutputGuardrailRequest(
                response, answer.text, messages, invocation.context, answer.value, invocation.state.passages
            )
            result = await _run_guardrail(named, request, place, lambda value: value, asks_again=True)
            if result.outcome == "success" or (result.outcome == "modified" and _is_text(result.value, answer.text)):
                continue
            if result.outcome == "modified":
                try:
                    response, answer = replaced_answer(rules, response, result.value)
                except OutputParsingError as unfit:
                    return AnswerChecked(effect.response, effect.text, None, unfit)
                text = response.ai_message.text or ""
                continue
            failures.append((named.type, result.text or "Output validation failed"))
            refused = request.text
            if result.outcome != "failure":
                refusal = OutputGuardrailError(failures, refused)
                refusal.__cause__ = result.cause
                asks_again = result.outcome in _ASKING_AGAIN
                return AnswerChecked(effect.response, effect.text, None, refusal, asks_again, result.prompt)
        refusing = OutputGuardrailError(failures, refused) if failures else None
        return AnswerChecked(response, text, answer.value, refusing)


def _is_text(value: object, text: str) -> bool:
    return isinstance(value, str) and value == text


# --- around a tool


def guarded_input(step: ToolStep, tool: Tool, named: Sequence[BeanReference]) -> ToolStep:
    """Return the step after tool input guardrails."""
    guardrails = tuple(named)

    async def run(call: ToolCall) -> Encoded:
        place = _GuardContext.of_tool(call)
        for each in guardrails:
            request = ToolInputGuardrailRequest(call.request, call.visible_arguments(), call.context)
            before = {} if tool.has_immutable_arguments else call.written_arguments()
            result = await _run_guardrail(each, request, place, partial(_replace_arguments, call, before))
            match result.outcome:
                case "success":
                    continue
                case "modified":
                    call = result.value
                case "failure":
                    return _encode_refusal("Input validation failed", result.text)
                case _:
                    _end_invocation(each, call, result)
        return await step(call)

    return run


def _replace_arguments(call: ToolCall, before: Mapping[str, Any], values: object) -> ToolCall:
    if not isinstance(values, Mapping):
        kind = type(values).__name__
        raise TypeError(f"success_with() of a tool input guardrail takes a dict of all arguments, got {kind}")
    try:
        return call.with_validated(values, before)
    except ToolArgumentsError as error:
        raise ValueError(f"invalid arguments after success_with(): {error}") from error


def guarded_output(step: ToolStep, tool: Tool, named: Sequence[BeanReference]) -> ToolStep:
    """Return the step with tool output guardrails after it."""
    guardrails = tuple(named)

    async def run(call: ToolCall) -> Encoded:
        encoded = await step(call)
        place, result = _GuardContext.of_tool(call), encoded.as_result()
        unchanged = result
        for each in guardrails:
            request = ToolOutputGuardrailRequest(call.request, call.visible_arguments(), result, call.context)
            judged = await _run_guardrail(each, request, place, partial(_replace_result, result))
            match judged.outcome:
                case "success":
                    continue
                case "modified":
                    result = judged.value
                case "failure":
                    return _encode_refusal("Output validation failed", judged.text)
                case _:
                    _end_invocation(each, call, judged)
        return encoded if result is unchanged else EncodedInFull.of(replace(result, text=printable(result.text)))

    return run


def _replace_result(result: ToolExecutionResult, value: object) -> ToolExecutionResult:
    if isinstance(value, ToolExecutionResult):
        return value
    if isinstance(value, str):
        return ToolExecutionResult(value, is_error=result.is_error, attributes=result.attributes)
    kind = type(value).__name__
    raise TypeError(f"success_with() of a tool output guardrail takes a ToolExecutionResult or a str, got {kind}")


def _encode_refusal(what: str, text: str) -> Encoded:
    return EncodedInFull(printable(f"{what}: {text}" if text else what), is_error=True)


def _end_invocation(named: BeanReference, call: ToolCall, result: GuardrailResult) -> NoReturn:
    raise ToolGuardrailError(named.type, call.request, result.text) from result.cause
