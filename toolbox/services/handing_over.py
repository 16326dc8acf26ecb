"""Hands a call over to another method of its team, and finds out who is in charge when a call begins.

What changes with the method in charge is in one place: `Invocation.put_in_charge`, with the plans of `teams`. Not here:
when a call is handed over (`loop`), who may take over (`teams`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from pydantic_core import to_json

from ..chat import (
    AiMessage,
    ChatResponse,
    FinishReason,
    PartialResponse,
    ToolExecuted,
    ToolExecution,
    ToolExecutionRequest,
    UserMessage,
)
from ..context import current_invocation
from ..di.decorating import decorates_mark_of
from ..events import HandedOverEvent
from ..execution.markers import marked_execution
from ..handover import MOST_HANDOVERS
from ..security import identity_in
from ..service_events import HandedOver
from ..tools.function_calls import has_own_tool_calls
from ..tools.tool_calls import ToolOutcome
from .invocation import Invocation
from .loop import Charge, Effect, Finish, HandOver, TakenOver
from .opening import open_charge
from .outputs import Result, Shape
from .plans import MethodPlan
from .recording_needs import HANDOVER
from .retrieving import find_passages_of_charge
from .streamed_call import StreamedCall
from .teams import HANDED_OVER
from .templates import text_of

logger = logging.getLogger("toolbox.services")


# --- who is in charge when a call begins


async def take_stored_charge(invocation: Invocation, stored: str) -> None:
    """Put the method in charge that the conversation has stored, if the called method reaches it and the caller may."""
    entry = invocation.entry
    invocation.stored_charge = stored
    if stored == entry.where:
        return
    plan = invocation.find_member(stored)
    if plan is None:
        invocation.leaves_charge = _is_known(stored, invocation)
        if not invocation.leaves_charge:
            text = "%s: the conversation was handed over to %s, which this program does not have; %s answers again"
            logger.warning(text, entry.where, stored, entry.where)
            invocation.stored_charge = entry.where
    elif plan is not entry and await _may_call(plan, invocation):
        _switch(plan, invocation)


def charge_to_store(invocation: Invocation) -> str | None:
    """Return the method in charge to store with the turn of a call; None to leave that as it was."""
    entry, plan = invocation.entry, invocation.plan
    if invocation.leaves_charge:
        return None
    if plan is entry and not (invocation.has_begun and invocation.state.handovers):
        return invocation.stored_charge or entry.where  # that of another caller, which this one may not call
    return plan.where


async def _may_call(plan: MethodPlan, invocation: Invocation) -> bool:
    """Return True if the identity of the call may call a method."""
    return plan.access is None or plan.access.allows(await identity_in(invocation.host.scope))


def _is_known(method: str, invocation: Invocation) -> bool:
    return any(plan.where == method for methods in invocation.host.plans.values() for plan in methods.values())


def _switch(plan: MethodPlan, invocation: Invocation) -> None:
    invocation.put_in_charge(plan)
    current_invocation.set(invocation.context)


# --- handing over


async def hand_over(effect: HandOver, invocation: Invocation, streamed: StreamedCall | None) -> TakenOver:
    """Hand the call over to the method that the model has chosen first. Raises `InputGuardrailError` of that method."""
    begun = _Begun(effect)
    refusal, plan = await _find_target(effect.request, invocation)
    if plan is None:
        outcomes = dict(begun.outcomes(refusal, refusal))
        await _send_outcomes(outcomes, streamed)
        return TakenOver(outcomes)
    source = invocation.plan.where
    _switch(plan, invocation)
    await _begin_charge(source, invocation)
    outcomes = dict(begun.outcomes(HANDED_OVER.format(method=plan.where), f"Not done: {source} hands over only once."))
    await _send_outcomes(outcomes, streamed)
    if streamed is not None:
        await streamed.put_event(HandedOver(source, plan.where))
    charge = await _open(invocation, streamed)
    if streamed is not None and charge.answer is not None:
        await _send_answer(charge.answer, streamed)
    return TakenOver(outcomes, charge)


async def _send_outcomes(outcomes: Mapping[int, ToolOutcome], streamed: StreamedCall | None) -> None:
    if streamed is not None:
        for outcome in outcomes.values():
            await streamed.put_event(ToolExecuted(outcome.execution))


async def _begin_charge(source: str, invocation: Invocation) -> None:
    """Let the target's input guardrails judge the user message, and tell the listeners: once in all processes of a run.

    Raises `InputGuardrailError`.
    """
    plan, place, listeners = invocation.plan, invocation.place, invocation.host.listeners
    if place is not None and place.run.cancels:  # its tools are undone, and nothing else happens
        return

    async def begin_charge() -> tuple[str, UserMessage]:
        if plan is not invocation.entry and plan.layers.check_input is not None:  # the entry's have judged it
            await plan.layers.check_input(invocation)
        if listeners is not None:
            listeners.tell(HandedOverEvent(invocation.context, source, plan.where))
        return plan.where, invocation.user_message

    number = 1 + invocation.state.handovers
    _, asked = await (begin_charge() if place is None else place.effect(HANDOVER, begin_charge, number))
    if asked != invocation.user_message:
        invocation.replace_user_message(asked)


async def _open(invocation: Invocation, streamed: StreamedCall | None) -> Charge:
    if (answer := await answer_of_replacement(invocation)) is not None:
        plan, state = invocation.plan, invocation.state
        return Charge(plan.where, state.system, state.mode, state.model or "", invocation.user_message, answer=answer)
    charge = await open_charge(invocation)
    if invocation.plan.retrievers:
        await find_passages_of_charge(invocation, streamed)
    return charge


async def _find_target(request: ToolExecutionRequest, invocation: Invocation) -> tuple[str, MethodPlan | None]:
    """Return the plan of the method that takes over; or None, with what the model reads then."""
    if invocation.state.handovers >= MOST_HANDOVERS:
        return f"Not done: a call is handed over at most {MOST_HANDOVERS} times. Answer the user yourself.", None
    method = invocation.toolset.handovers.get(request.name)
    plan = None if method is None else invocation.find_member(method)
    if plan is not None and plan is not invocation.entry and not await _may_call(plan, invocation):
        plan = None
    return f"There is no tool named {request.name!r}.", plan


class _Begun:
    """The calls that hand over, which begin now."""

    def __init__(self, effect: HandOver) -> None:
        self._effect, self._at, self._clock = effect, datetime.now(UTC), perf_counter()

    def outcomes(self, first: str, others: str) -> Iterator[tuple[int, ToolOutcome]]:
        """Yield the outcome of each call by its index. `others` is what the model reads as an error."""
        for index in self._effect.indexes:
            is_first = index == self._effect.indexes[0]
            text, is_error = (first, first == others) if is_first else (others, True)
            request, taken = self._effect.pending[index].request, perf_counter() - self._clock
            yield index, ToolOutcome(ToolExecution(request, text, None, is_error, self._at, taken))


# --- a target that was replaced, such as in a test


async def answer_of_replacement(invocation: Invocation) -> Finish | None:
    """Return what the method in charge of a replaced bean returns, as the end of the call; None for our own service.

    A bean that decorates the service is not called: a hand-over is not a call of the target's own conversation.
    """
    plan, place = invocation.plan, invocation.place
    if plan is invocation.entry or (place is not None and place.run.cancels):
        return None
    bean = await invocation.host.scope.find(plan.service)
    is_ours = has_own_tool_calls(bean) and plan.service in inspect.getmro(type(bean))
    if bean is None or is_ours or decorates_mark_of(type(bean)) is not None:
        return None
    method, arguments = getattr(bean, plan.name), invocation.arguments_in_charge
    value = await invocation.runner.run(marked_execution(method), lambda: method(**arguments), plan.where)
    if plan.output.is_stream:
        items = [each async for each in value] if isinstance(value, AsyncIterator) else [*value]
        text = _joined(items, plan)
        value = items if plan.output.shape is Shape.ITEM_STREAM else text
        return Finish(value, FinishReason.OTHER, ChatResponse(AiMessage(text), finish_reason=FinishReason.OTHER))
    said = value
    if isinstance(value, Result) and plan.output.shape is Shape.RESULT:
        value, said = replace(value, answered_by=value.answered_by or plan.where), value.content
    message = said if isinstance(said, AiMessage) else AiMessage(None if said is None else text_of(said))
    return Finish(value, FinishReason.OTHER, ChatResponse(message, finish_reason=FinishReason.OTHER))


def _joined(items: list[Any], plan: MethodPlan) -> str:
    """Return the items of a stream as the text that a model would have written."""
    if plan.output.shape is Shape.ITEM_STREAM:
        return to_json(items).decode()
    texts = (each.text if isinstance(each, PartialResponse) else each for each in items)
    return "".join(each for each in texts if isinstance(each, str))


async def _send_answer(answer: Finish, streamed: StreamedCall) -> None:
    """Send the text of a replaced bean's answer to the reader of a stream."""
    if text := answer.response.ai_message.text:
        await streamed.put_event(PartialResponse(text))


async def answer_in_place(effect: Effect, invocation: Invocation, streamed: StreamedCall | None) -> Effect:
    """Return the answer of the bean that is in charge when the call begins, if it is a replaced one; else `effect`."""
    answer = await answer_of_replacement(invocation)
    if answer is None:
        return effect
    message, state = answer.response.ai_message, invocation.state
    invocation.state = state.changed(messages=(*state.messages, message), response=answer.response)
    if streamed is not None:
        await _send_answer(answer, streamed)
    return answer
