"""Runs interceptors around tool calls and model requests.

Not here: the order of all layers (`capabilities`), what an interceptor is (`interception`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

from ..bean_references import BeanReference
from ..chat import ChatResponse, ToolExecutionResult
from ..errors import EndsInvocation, IllegalConfigurationError, Problem
from ..execution.cancellation import OwnCode
from ..services.invocation import Invocation, Perform
from ..services.loop import CallModel, ModelReplied, RunTool
from ..services.plans import EffectLayer
from ..tools.codec import Encoded, EncodedInFull
from ..tools.pipeline import IMMUTABLE, Tool, ToolCall, ToolLayer, ToolStep, running_again
from .interception import ModelInterceptor, ModelInvocation, ToolInterceptor, ToolInvocation

# --- around a tool


def intercepted_tool(
    step: ToolStep, tool: Tool, named: Sequence[BeanReference], before: Sequence[ToolLayer]
) -> ToolStep:
    """Wrap the step in its interceptors. Changed arguments pass through the layers `before` again."""
    return _wrapped(step, tool, [each for each in named if not _is_innermost(each)], before)


def retried_tool(step: ToolStep, tool: Tool, named: Sequence[BeanReference]) -> ToolStep:
    """Wrap the step in those of its interceptors that run inside of all others, and of the record of a run."""
    return _wrapped(step, tool, [each for each in named if _is_innermost(each)], ())


def _is_innermost(named: BeanReference) -> bool:
    return getattr(named.type, "__toolbox_innermost__", False)


def _wrapped(step: ToolStep, tool: Tool, named: Sequence[BeanReference], before: Sequence[ToolLayer]) -> ToolStep:
    for each in reversed([each for each in named if issubclass(each.type, ToolInterceptor)]):
        changed = step
        for layer in reversed(before):
            changed = layer(changed, tool)
        step = _AroundTool(each, tool, step, changed).run
    return step


class _AroundTool:
    """One interceptor around the calls of one tool."""

    __slots__ = ("_bean", "_changed", "_copies", "_count", "_defaults", "_has_timeout", "_instance", "_step")

    def __init__(self, interceptor: BeanReference, tool: Tool, step: ToolStep, changed: ToolStep) -> None:
        self._bean, self._instance, self._step, self._changed = interceptor.bean, interceptor.instance, step, changed
        self._copies, self._count = not tool.has_immutable_arguments, len(tool.visible)
        self._defaults = {} if tool.complete is None else tool.complete({})
        self._has_timeout = tool.timeout is not None

    async def run(self, call: ToolCall) -> Encoded:
        # Written for speed: a closure costs less than an object with this state, and `_check` is called only if it
        # raises.
        encoded: Encoded | None = None
        result: ToolExecutionResult | None = None
        ending: BaseException | None = None
        is_over = False

        async def proceed(given: ToolInvocation) -> ToolExecutionResult:
            nonlocal encoded, ending, result
            if is_over or ending is not None or code.was_cancelled:
                _check(ending, code, is_over)
            running, step = call, self._step
            if given is not invocation and (changes := _changes(given, invocation, call)):
                running, step = call.with_changed(changes), self._changed
            try:
                if self._has_timeout and running.is_late:
                    with running_again(running) as running:
                        encoded = await step(running)
                else:
                    encoded = await step(running)
            except BaseException as error:
                if ending is None and _ends_invocation(error):
                    ending = error
                raise
            return encoded.as_result()

        environment, bean, decoded = call.environment, self._instance, call.arguments
        if bean is None:
            bean = await environment.scope.aget(self._bean)
        if decoded is None:
            shown = call.visible_arguments()
        else:
            shown = {**decoded} if len(decoded) == self._count else {**self._defaults, **decoded}
        if self._copies:
            shown = _shown(shown)
        place = call.context.place
        replayed = place is not None and place.is_recorded
        invocation = ToolInvocation(call.request, call.tool.specification, shown, call.context, replayed)
        code = OwnCode(bean.around_tool(invocation, proceed))
        try:
            returned = await code
        except Exception:
            _check(ending, code)
            raise
        finally:
            is_over = True
        if ending is not None or code.was_cancelled:
            _check(ending, code)
        if encoded is not None and returned is result:
            return encoded
        if not isinstance(returned, ToolExecutionResult):
            raise _wrong_value(bean, "around_tool", returned, ToolExecutionResult)
        return EncodedInFull.of(returned)


def _check(ending: BaseException | None, code: OwnCode, is_over: bool = False) -> None:
    """Raise an error if the invocation must end, or if `proceed` is called after the interceptor's end.

    `ending` is the first error that passed `proceed` and must end the invocation.
    """
    if is_over:
        fact = "proceed was called after the interceptor had returned"
        problem = Problem("proceed(call)", fact, "await it inside around_tool or around_model")
        raise IllegalConfigurationError([problem])
    if ending is not None:
        raise ending
    if code.was_cancelled:
        raise asyncio.CancelledError


def _changes(given: object, invocation: ToolInvocation, call: ToolCall) -> dict[str, Any]:
    """Return the arguments that the interceptor changed."""
    if not isinstance(given, ToolInvocation):
        fact = f"proceed was called with {type(given).__name__}"
        problem = Problem(call.tool.where, fact, "pass the ToolInvocation, or call.with_arguments(…)")
        raise IllegalConfigurationError([problem])
    known, shown = call.visible_arguments(), invocation.arguments
    return {
        name: value
        for name, value in given.arguments.items()
        if name not in known or not (value is known[name] or (value is shown.get(name) and _equal(value, known[name])))
    }


def _shown(arguments: dict[str, Any]) -> dict[str, Any]:
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


def _equal(one: object, other: object) -> bool:
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


def _wrong_value(bean: object, method: str, value: object, wanted: type[Any]) -> IllegalConfigurationError:
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
            ending: BaseException | None = None
            is_over = False

            async def proceed(given: ModelInvocation) -> ChatResponse:
                nonlocal ending
                _check(ending, code, is_over)
                if not isinstance(given, ModelInvocation) or given.model != invocation.model_name:
                    fact = "proceed was called with another object than its ModelInvocation, or with another model"
                    fix = "change only its request: `proceed(dataclasses.replace(call, request=…))`"
                    raise IllegalConfigurationError([Problem(invocation.plan.where, fact, fix)])
                try:
                    replied: Any = await perform(CallModel(given.request, effect.recorded), invocation)
                except BaseException as error:
                    if ending is None and _ends_invocation(error):
                        ending = error
                    raise
                replies.append(replied)
                response: ChatResponse = replied.response
                return response

            bean = await self._interceptor.find(invocation.host.scope)
            replayed = effect.recorded is not None
            call = ModelInvocation(effect.request, invocation.model_name, invocation.context, replayed)
            code = OwnCode(bean.around_model(call, proceed))
            try:
                returned = await code
                _check(ending, code)
            except Exception:
                _check(ending, code)
                raise
            finally:
                is_over = True
            if not isinstance(returned, ChatResponse):
                raise _wrong_value(bean, "around_model", returned, ChatResponse)
            if not replies:
                return ModelReplied(returned)
            # The tools that were sent are those of the request whose reply this is; of a changed reply, the last one's.
            used = next((each for each in replies if each.response is returned), replies[-1])
            return ModelReplied(returned, used.aside, sent=used.sent)

        def performing(effect: CallModel | RunTool, invocation: Invocation) -> Awaitable[Any]:
            return perform(effect, invocation) if isinstance(effect, RunTool) else ask(effect, invocation)

        return performing
