"""Runs interceptors around tool calls and model requests.

Not here: the order of all layers (`capabilities`), what an interceptor is (`interception`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

from ..bean_references import BeanReference
from ..chat import ChatResponse, ToolExecutionResult
from ..errors import EndsInvocation, IllegalConfigurationError, Problem
from ..execution.cancellation import OwnCode
from ..services.invocation import Invocation, Perform
from ..services.loop import CallModel, ModelReplied, RunTool
from ..services.plans import EffectLayer
from ..tools.results import Encoded, EncodedInFull
from ..tools.tool_calls import IMMUTABLE, Tool, ToolCall, ToolLayer, ToolStep, running_again
from .interception import ModelInterceptor, ModelInvocation, ToolInterceptor, ToolInvocation

# --- around a tool


def intercepted_tool(
    step: ToolStep, tool: Tool, named: Sequence[BeanReference], before: Sequence[ToolLayer]
) -> ToolStep:
    """Wrap the step in its interceptors. Changed arguments pass through the layers `before` again."""
    return _wrap_step(step, tool, [each for each in named if not _is_innermost(each)], before)


def retried_tool(step: ToolStep, tool: Tool, named: Sequence[BeanReference]) -> ToolStep:
    """Wrap the step in those of its interceptors that run inside of all others, and of the record of a run."""
    return _wrap_step(step, tool, [each for each in named if _is_innermost(each)], ())


def _is_innermost(named: BeanReference) -> bool:
    return getattr(named.type, "__toolbox_innermost__", False)


def _wrap_step(step: ToolStep, tool: Tool, named: Sequence[BeanReference], before: Sequence[ToolLayer]) -> ToolStep:
    for each in reversed([each for each in named if issubclass(each.type, ToolInterceptor)]):
        changed = step
        for layer in reversed(before):
            changed = layer(changed, tool)
        step = _AroundTool(each, tool, step, changed).run
    return step


class _AroundTool:
    """One interceptor around the calls of one tool."""

    __slots__ = ("_changed", "_copies_arguments", "_interceptor", "_step")

    def __init__(self, interceptor: BeanReference, tool: Tool, step: ToolStep, changed: ToolStep) -> None:
        self._interceptor, self._step, self._changed = interceptor, step, changed
        self._copies_arguments = not tool.has_immutable_arguments

    async def run(self, call: ToolCall) -> Encoded:
        """Run a call inside the interceptor."""
        bean = await self._interceptor.find(call.environment.scope)
        shown = call.visible_arguments()
        if self._copies_arguments:
            shown = _copy_arguments(shown)
        place = call.context.place
        replayed = place is not None and place.is_recorded
        invocation = ToolInvocation(call.request, call.tool.specification, shown, call.context, replayed)
        results: list[tuple[Encoded, ToolExecutionResult]] = []

        async def proceed(given: ToolInvocation) -> ToolExecutionResult:
            interception.raise_if_over()
            changes = _find_changes(given, invocation, call)
            running, step = (call.with_changed(changes), self._changed) if changes else (call, self._step)
            try:
                encoded = await _run_step(running, step)
            except BaseException as error:
                interception.note_error(error)
                raise
            results.append((encoded, encoded.as_result()))
            return results[-1][1]

        interception = _Interception()
        returned = await interception.run(bean.around_tool(invocation, proceed))
        # A result that the interceptor did not change keeps what only the framework knows of it.
        for encoded, result in results:
            if returned is result:
                return encoded
        if not isinstance(returned, ToolExecutionResult):
            raise _make_value_error(bean, "around_tool", returned, ToolExecutionResult)
        return EncodedInFull.of(returned)


async def _run_step(call: ToolCall, step: ToolStep) -> Encoded:
    """Run a step, perhaps not for the first time: the timeout of an earlier run does not count."""
    if not call.is_late:
        return await step(call)
    with running_again(call) as again:
        return await step(again)


class _Interception:
    """One run of an interceptor, which may call `proceed` several times and catch what it raises.

    An error that ends the invocation, such as `ToolAbort`, ends it even if the interceptor catches it, and so does a
    cancellation from outside. Nothing more is run after either.
    """

    __slots__ = ("_code", "_ending", "_is_over")

    _code: OwnCode[Any]

    def __init__(self) -> None:
        self._ending: BaseException | None = None
        self._is_over = False

    async def run(self, code: Awaitable[Any]) -> Any:
        """Return what the interceptor returns, unless the invocation must end."""
        self._code = OwnCode(code)
        try:
            returned = await self._code
        except Exception:
            self._raise_ending()
            raise
        finally:
            self._is_over = True
        self._raise_ending()
        return returned

    def raise_if_over(self) -> None:
        """Raise an error if `proceed` may not be called any more."""
        if self._is_over:
            fact = "proceed was called after the interceptor had returned"
            problem = Problem("proceed(call)", fact, "await it inside around_tool or around_model")
            raise IllegalConfigurationError([problem])
        self._raise_ending()

    def note_error(self, error: BaseException) -> None:
        """Remember the first error that must end the invocation."""
        if self._ending is None and _ends_invocation(error):
            self._ending = error

    def _raise_ending(self) -> None:
        if self._ending is not None:
            raise self._ending
        if self._code.was_cancelled:
            raise asyncio.CancelledError


def _find_changes(given: object, invocation: ToolInvocation, call: ToolCall) -> dict[str, Any]:
    """Return the arguments that the interceptor changed."""
    if given is invocation:
        return {}
    if not isinstance(given, ToolInvocation):
        fact = f"proceed was called with {type(given).__name__}"
        problem = Problem(call.tool.where, fact, "pass the ToolInvocation, or call.with_arguments(…)")
        raise IllegalConfigurationError([problem])
    known, shown = call.visible_arguments(), invocation.arguments
    return {
        name: value
        for name, value in given.arguments.items()
        if name not in known
        or not (value is known[name] or (value is shown.get(name) and _are_equal(value, known[name])))
    }


def _copy_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for an interceptor: copies, so that changing one in place has no effect on the tool.

    An object that cannot be copied is passed as it is.
    """
    shown = arguments
    for name, value in arguments.items():
        if type(value) not in IMMUTABLE:
            if shown is arguments:
                shown = dict(arguments)
            with suppress(Exception):  # `__deepcopy__` and `__reduce__` of user types can raise anything
                shown[name] = deepcopy(value)
    return shown


def _are_equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:  # `__eq__` of user types can raise anything
        return False


def _ends_invocation(error: BaseException) -> bool:
    """Return True for an error that an interceptor must not swallow. The task knows of a cancellation."""
    if isinstance(error, EndsInvocation):
        return True
    if isinstance(error, BaseExceptionGroup) and error.subgroup(EndsInvocation) is not None:
        return True
    return not isinstance(error, (Exception, asyncio.CancelledError, GeneratorExit))


def _make_value_error(bean: object, method: str, value: object, wanted: type[Any]) -> IllegalConfigurationError:
    fact = f"returned {type(value).__name__}"
    fix = f"return a {wanted.__name__}, for example the one that proceed(call) returns"
    return IllegalConfigurationError([Problem(f"{type(bean).__name__}.{method}", fact, fix)])


# --- around a model request


def model_layers(named: Sequence[BeanReference]) -> tuple[EffectLayer, ...]:
    """Return the layers of those interceptors that wrap model requests."""
    return tuple(_AroundModel(each) for each in named if issubclass(each.type, ModelInterceptor))


class _AroundModel:
    """One interceptor around the model requests of a method."""

    __slots__ = ("_interceptor",)

    def __init__(self, interceptor: BeanReference) -> None:
        self._interceptor = interceptor

    def __call__(self, perform: Perform) -> Perform:
        async def ask(effect: CallModel, invocation: Invocation) -> ModelReplied:
            replies: list[ModelReplied] = []

            async def proceed(given: ModelInvocation) -> ChatResponse:
                interception.raise_if_over()
                if not isinstance(given, ModelInvocation) or given.model != invocation.model_name:
                    fact = "proceed was called with another object than its ModelInvocation, or with another model"
                    fix = "change only its request: `proceed(dataclasses.replace(call, request=…))`"
                    raise IllegalConfigurationError([Problem(invocation.plan.where, fact, fix)])
                try:
                    replied: Any = await perform(CallModel(given.request, effect.recorded), invocation)
                except BaseException as error:
                    interception.note_error(error)
                    raise
                replies.append(replied)
                response: ChatResponse = replied.response
                return response

            bean = await self._interceptor.find(invocation.host.scope)
            replayed = effect.recorded is not None
            call = ModelInvocation(effect.request, invocation.model_name, invocation.context, replayed)
            interception = _Interception()
            returned = await interception.run(bean.around_model(call, proceed))
            if not isinstance(returned, ChatResponse):
                raise _make_value_error(bean, "around_model", returned, ChatResponse)
            if not replies:
                return ModelReplied(returned)
            # The tools that were sent are those of the request whose reply this is; of a changed reply, the last one's.
            used = next((each for each in replies if each.response is returned), replies[-1])
            return replace(used, response=returned)

        def perform_with_interceptors(effect: CallModel | RunTool, invocation: Invocation) -> Awaitable[Any]:
            return perform(effect, invocation) if isinstance(effect, RunTool) else ask(effect, invocation)

        return perform_with_interceptors
