"""Counts what calls of models use, and keeps their limits: for services, and for models that a program uses directly.

Not here: the limits and their accounts (`limits`), asking a model (`model_calls`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from ..chat import ChatResponse, Message
from ..errors import IllegalConfigurationError
from ..events import UsageCountedEvent
from ..limits import (
    NO_TOKENS,
    CostEstimator,
    Refusal,
    Usage,
    UsageLimitExceededError,
    cost_of,
    current_account,
    model_name,
    no_estimator,
)
from .interruptions import ModelCall, StepOfTask
from .invocation import Invocation, Perform
from .loop import CallModel, ModelReplied, RunTool
from .outputs import ANSWER_TOOL

logger = logging.getLogger("toolbox.limits")


@asynccontextmanager
async def in_account(call: ModelCall) -> AsyncIterator[None]:
    """Let everything inside the block draw on the call's account."""
    account = call.account
    assert account is not None
    token = current_account.set(account)
    account.is_running = True
    try:
        yield
    finally:
        account.stop()
        current_account.reset(token)


# --- the layers of a service


@asynccontextmanager
async def with_recorded_usage(invocation: Invocation) -> AsyncIterator[None]:
    """Count what a resumed invocation and services within have used since its last record, which has its usage so far.

    What services within still replay is counted then. An inner invocation counts its own part itself.
    """
    account, stored = invocation.account, invocation.stored
    assert account is not None
    if stored is not None:
        if account.limits is not None:
            account.usage += await _usage_of(stored.inner_replies, invocation)
        account.restore(await _usage_of(stored.dropped, invocation))  # as the replay of it would
    yield


async def take_back_usage(replies: Iterable[tuple[ChatResponse, str | None]], invocation: Invocation) -> None:
    """Count less by recorded replies of services within, which are given again, and counted then."""
    if (account := invocation.account) is not None:
        account.restore(Usage() - await _usage_of(replies, invocation))


async def _usage_of(replies: Iterable[tuple[ChatResponse, str | None]], invocation: Invocation) -> Usage:
    estimator, used = await _estimator(invocation), Usage()
    for response, model in replies:
        cost = cost_of(estimator, model_name(response, None, model), response.token_usage)
        calls = sum(each.name != ANSWER_TOOL for each in response.ai_message.tool_execution_requests)
        used += Usage(1, calls, response.token_usage or NO_TOKENS, cost)
    return used


def limited(perform: Perform) -> Perform:
    """Check the limits before a model request and after its reply; refuse a reply with too many tool calls.

    The outermost layer of the effects. A limit that this invocation has raises its error here; one of an outer
    invocation ends that invocation, and this one is cancelled.
    """

    async def check(effect: CallModel | RunTool, invocation: Invocation) -> Any:
        account = invocation.account
        assert account is not None
        if invocation.refused is not None:  # other code has swallowed the cancellation
            raise invocation.refused
        if isinstance(effect, RunTool):
            return await perform(effect, invocation)
        await refuse_exceeded(invocation)
        event: Any = await perform(effect, invocation)
        if not isinstance(event, ModelReplied):
            return event
        calls = invocation.count_tool_calls(event.response)
        if event.is_replayed:
            name = _model_of(event.response, invocation)
            cost = cost_of(await _estimator(invocation), name, event.response.token_usage)
            tokens = event.response.token_usage or NO_TOKENS
            account.restore(Usage(1, 0, tokens, cost))
            if event.is_followed:
                account.restore(Usage(0, calls))
                return event
        try:
            if event.is_replayed:  # it may have reached a limit: no call of it has begun
                await _restore_tool_calls(invocation, event.response, calls)
            else:
                await reserve_tool_calls(invocation, event.response)
        except UsageLimitExceededError as error:
            if (reached := invocation.reach(error)) is None:
                raise
            return replace(event, reached=reached)
        return event

    return check


def or_limit(perform: Perform) -> Perform:
    """Return the limit that has ended a model request, if the model is to be asked for its answer then."""

    async def ask(effect: CallModel | RunTool, invocation: Invocation) -> Any:
        if isinstance(effect, RunTool):  # `ToolTasks` does it, for all that run together
            return await perform(effect, invocation)
        return await or_reached_limit(partial(perform, effect, invocation), invocation)

    return ask


async def or_reached_limit(perform: Callable[[], Awaitable[Any]], invocation: Invocation) -> Any:
    """Perform an effect. Return the limit that ended it, if the model is to be asked for its answer then."""
    try:
        async with StepOfTask(invocation):
            return await perform()
    except UsageLimitExceededError as error:
        if (reached := invocation.reach(error)) is None:
            raise
        return reached


def counted(perform: Perform) -> Perform:
    """Count a model request before it is sent, and the tokens and the cost of its reply. The innermost layer."""

    async def count(effect: CallModel | RunTool, invocation: Invocation) -> Any:
        if isinstance(effect, RunTool):
            return await perform(effect, invocation)
        estimator = await reserve_request(invocation, is_outermost=not invocation.plan.layers.effects)
        event: Any = await perform(effect, invocation)
        count_reply(invocation, event.response, estimator)
        return event

    return count


# --- the steps of one request, in their order


async def refuse_exceeded(call: ModelCall) -> None:
    """End the call if a limit for tokens or cost is exceeded."""
    account = call.account
    assert account is not None
    if (refusal := account.exceeded()) is not None:
        await _refuse(refusal, call)
    account.asked = 0


async def reserve_request(call: ModelCall, *, is_outermost: bool = True) -> CostEstimator | None:
    """Count a request before it is sent; end the call if that exceeds a limit. Returns the host's estimator.

    Raises `IllegalConfigurationError` if a limit needs an estimator and there is none.
    """
    estimator = await _estimator(call)
    assert call.account is not None
    if (refusal := call.account.reserve(model_calls=1)) is not None:
        await _refuse(refusal, call, is_outermost=is_outermost)
    return estimator


def count_reply(call: ModelCall, response: ChatResponse, estimator: CostEstimator | None) -> None:
    """Count the tokens and the cost of a reply."""
    account = call.account
    assert account is not None
    name = _model_of(response, call)
    if response.token_usage is None and (account.limits_tokens or account.limits_cost):
        logger.warning("%s: a reply of model %r has no usage; it counts as 0 tokens", call.where, name)
    account.add(response.token_usage, cost_of(estimator, name, response.token_usage))
    account.asked += call.count_tool_calls(response)
    if call.host.listeners is not None:
        call.host.listeners.tell(UsageCountedEvent(call.context, *account.innermost))


async def reserve_tool_calls(call: ModelCall, response: ChatResponse) -> None:
    """Count the tool calls of a reply before they run; end the call if that exceeds a limit."""
    account = call.account
    assert account is not None
    if (refusal := account.reserve(tool_calls=max(call.count_tool_calls(response), account.asked))) is not None:
        await _refuse(refusal, call, response.ai_message)


async def _restore_tool_calls(call: ModelCall, response: ChatResponse, calls: int) -> None:
    """Count the tool calls of a recorded reply before they run; end the call if that exceeds a limit."""
    account = call.account
    assert account is not None
    if (refusal := account.restore_calls(calls)) is not None:
        await _refuse(refusal, call, response.ai_message)


def _model_of(response: ChatResponse, call: ModelCall) -> str:
    return model_name(response, call.model, call.model_name)


async def _estimator(call: ModelCall) -> CostEstimator | None:
    """Return the host's estimator. Raises `IllegalConfigurationError` if a limit needs one and there is none."""
    found = await call.host.cost_estimator()
    assert call.account is not None
    if found is None and call.account.limits_cost:
        raise IllegalConfigurationError([no_estimator(call.where)])
    return found


async def _refuse(
    refusal: Refusal, call: ModelCall, reply: Message | None = None, *, is_outermost: bool = True
) -> NoReturn:
    """End the call that the limit was set for with an error; this one, if it is another one, is cancelled."""
    assert call.account is not None
    raising, error, was_refused = call.account.refuse(refusal, reply)
    if raising is call and is_outermost:
        raise error
    # Cancelled, not raised: code between the two calls must not handle the error.
    task = asyncio.current_task()
    if was_refused and task is not None and task.cancelling():
        await asyncio.sleep(0)
        raise asyncio.CancelledError("cancelled again, because the first cancellation was caught")
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not over.done():
            over.set_result(None)

    def end() -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(wake)

    raising.end_with(error)
    forget = raising.context.cancellation.followed_by(end)
    try:
        await over
    finally:
        forget()
    raise asyncio.CancelledError(f"cancelled, because the limit {refusal.limit} was reached")
