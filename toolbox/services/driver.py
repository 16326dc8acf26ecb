"""One call of a service method, from its arguments to its value: `run_call` is all of it, in the order of what happens.

A stream and a durable run are the same call. What a stream adds is `streamed` (`streamed_call`): its reader gets each
event when it happens. What a run adds is the `place` of the invocation: the layers of its plan read or write a record
around each effect (`toolbox/runs/run_layers.py`), one that continues begins with its stored state, and a suspension is
stored.

Not here: making the invocation of the arguments (`methods`, `invocation`), deciding the next effect (`loop`), handing
the items of a stream over (`streams`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any

from ..chat import CompleteResponse
from ..chat_streams import no_response
from ..context import current_bean_caller, current_invocation
from ..errors import ContextLengthError, ModelError
from ..events import ToldEvent
from ..execution.cancellation import CancellationsHere
from ..models.fallbacks import is_worth_another_model
from ..service_events import ServiceEvent
from ..tools.pipeline import execute_tool
from ..tools.tool_calls import ToolSuspension
from .abandoned_runs import abandon_runs
from .bean_calls import call_with_beans
from .compaction import shorten
from .handing_over import answer_of_replacement, hand_over, send_answer, take_answer
from .inner_events import Send, current_reader, sender_of
from .interruptions import within_limits
from .invocation import Invocation, Perform
from .invocation_records import note_in_records
from .layers import in_conversation, observed, with_checked_input, with_memory, with_roles
from .loop import (
    AnswerChecked,
    CallModel,
    CheckAnswer,
    Effect,
    Fail,
    Finish,
    HandOver,
    Heard,
    Listen,
    ModelReplied,
    RunTool,
    RunTools,
    Suspend,
    ToolFinished,
    ToolSuspended,
    advance,
    request_of,
)
from .model_calls import ask_model, model_stream
from .opening import begin, find_model, find_tools, resume
from .outputs import ANSWER_TOOL
from .plans import InvocationLayer
from .retrieving import find_passages, find_passages_again, note_passages
from .state import ReachedLimit
from .streamed_call import StreamedCall
from .tool_tasks import ToolTasks
from .usage_layers import counted, in_account, limited, or_reached_limit, with_recorded_usage

# --- the call


async def run_call(invocation: Invocation, streamed: StreamedCall | None = None) -> Any:
    """Run one call, and return the method's value; in a stream, the reader has all of it by then.

    A plain call needs none of `blocks_around`, and `invocation.perform` is the function `perform` below: its request
    goes to the model and its tool call to the tool, with nothing in between.
    """
    cancellations = CancellationsHere()
    async with current_call(invocation):
        await invocation.host.note_caller(invocation.context)  # the user's name, for logs and traces
        async with AsyncExitStack() as around:
            for block in blocks_around(invocation):  # such as listeners, roles, and the turn of its conversation
                await around.enter_async_context(block(invocation))

            await find_model(invocation)  # the run's, the call's or the plan's name; else a router chooses in `begin`
            await find_tools(invocation)  # those of the plan; more for blocks and tool providers, fewer for roles
            plan = invocation.plan  # `find_tools` has put that of a run here, if these tools may suspend the call
            invocation.perform = within_layers(invocation)  # one of a run reads or writes a record for each effect
            tasks = streamed.tasks if streamed is not None else ToolTasks(invocation) if invocation.together else None
            if tasks is not None:
                around.push_async_callback(tasks.cancel)

            if plan.retrievers:
                await find_passages(invocation, streamed)
            answers_at_limit = invocation.account is not None and invocation.rules.answers_at_limit
            stored = invocation.stored_state  # of a run that continues
            effect = await (begin(invocation) if stored is None else resume(invocation, stored))
            if plan is not invocation.entry and stored is None and (given := await answer_of_replacement(invocation)):
                effect = take_answer(given, invocation)
                if streamed is not None:
                    await send_answer(given, streamed)
            if invocation.environment.passages is not None:
                note_passages(invocation)
            while not isinstance(effect, (Finish, Fail, Suspend)):
                event: Any
                if isinstance(effect, CallModel):
                    if invocation.asks_again:  # of a run that continues; the other calls have asked their retrievers
                        effect = await find_passages_again(invocation, effect, streamed)
                    if streamed is not None:
                        await streamed.begin_request()
                    asking = invocation.perform if plan.fallback is None else partial(_ask_or_fall_back, streamed)
                    try:
                        if answers_at_limit:
                            event = await or_reached_limit(partial(asking, effect, invocation), invocation)
                        else:
                            event = await asking(effect, invocation)
                    except ContextLengthError as error:
                        if streamed is not None and streamed.has_sent_pieces:
                            raise
                        effect = await shorten(invocation, error)  # raises the error if nothing can be left out
                        continue
                    if isinstance(event, Finish):  # a `@fallback` gave the value
                        effect = event
                        break
                    if isinstance(event, ModelReplied):
                        if streamed is not None:
                            # A layer may have given the reply; the execution that asked for a recorded one has sent it.
                            if invocation.perform is not perform and not event.is_replayed:
                                await streamed.send_unsent(event.response)
                            streamed.end_reply()
                        invocation.environment.sent = event.sent
                elif isinstance(effect, CheckAnswer):
                    event = await _check_answer(effect, invocation)
                elif isinstance(effect, HandOver):
                    event = await hand_over(effect, invocation, streamed)
                    invocation.perform = within_layers(invocation)
                elif isinstance(effect, Listen):
                    event = await _listen(effect, invocation, streamed)
                elif answers_at_limit:
                    event = await _run_until_limit(effect, invocation, tasks)
                elif tasks is None:
                    # What a tool raises becomes a result that the model reads: the answer of the error's handler. Only
                    # an `EndsInvocation`, and what a handler raises, comes out here and ends the call.
                    call = RunTool(effect.first, effect.pending[effect.first].request)
                    event = await invocation.perform(call, invocation)
                else:
                    event = await tasks.run_next(effect)  # the same; in a stream, and where tools run together
                performed, rounds_done = effect, len(invocation.state.executions)
                invocation.state, effect = advance(invocation.rules, invocation.state, event)
                if invocation.environment.passages is not None:
                    note_passages(invocation, event)
                if cancellations.came:
                    # The result is kept, and the call ends before anything is sent to a reader who has left.
                    raise asyncio.CancelledError("cancelled; a tool or a model caught the first CancelledError")
                if streamed is not None:
                    await streamed.advanced(performed, event, effect)
                is_of_tools = isinstance(performed, (RunTools, HandOver))
                has_ended = is_of_tools and len(invocation.state.executions) > rounds_done
                if has_ended and (compensate := plan.layers.after_round) is not None:
                    await compensate(invocation, rounds_done)
                    if isinstance(effect, CallModel):
                        effect = CallModel(request_of(invocation.rules, invocation.state))
            await _end(effect, invocation)

        # The blocks have ended: the conversation is written, and the listeners have the answer.
        return invocation.value() if streamed is None else await streamed.end()


async def _ask_or_fall_back(streamed: StreamedCall | None, effect: CallModel, invocation: Invocation) -> Any:
    """Ask the model. If none answers, return the `Finish` of the method's `@fallback`."""
    answer, cancellations = invocation.plan.fallback, CancellationsHere()
    assert answer is not None
    try:
        return await invocation.perform(effect, invocation)
    except ModelError as error:
        # A reader who has a part of an answer must not get another one. The caller of a method that returns a value has
        # none: there, the reader follows the events of a run, or of a call in a tool.
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


async def _listen(effect: Listen, invocation: Invocation, streamed: StreamedCall | None) -> Heard:
    """Return the messages that the user has added to the run since its last request. Before its end, take no more."""
    place, count = invocation.place, len(invocation.state.added)
    assert place is not None
    if isinstance(effect.before, Finish) and await place.close_messages(count):
        return Heard((), effect.before)
    added = await place.messages_after(count)
    if added and streamed is not None:
        await streamed.end_intermediate(effect)
    for each in added:
        event = ToldEvent(invocation.context, each.message, each.by, each.client_id)
        if invocation.host.listeners is not None:
            invocation.host.listeners.tell(event)
        if streamed is not None:
            await streamed.put_event(event)
    return Heard([each.message for each in added], effect.before)


async def _run_until_limit(effect: RunTools, invocation: Invocation, tasks: ToolTasks | None) -> Any:
    """Run the next tool call. Return the limit that ended it, and all others that were running with it."""
    call = RunTool(effect.first, effect.pending[effect.first].request)
    run = partial(invocation.perform, call, invocation) if tasks is None else partial(tasks.run_next, effect)
    event = await or_reached_limit(run, invocation)
    if isinstance(event, ReachedLimit) and tasks is not None:
        await tasks.stop()
    return event


async def _check_answer(effect: CheckAnswer, invocation: Invocation) -> AnswerChecked:
    """Let the output guardrails judge the answer."""
    check = invocation.plan.layers.check_answer
    assert check is not None
    return await check(effect, invocation)


async def _end(effect: Effect, invocation: Invocation) -> None:
    """End the invocation with its last effect. Raises the error of a `Fail`."""
    if isinstance(effect, Fail):
        raise effect.error
    if isinstance(effect, Finish) and invocation.before_end is not None and not effect.is_fallback:
        invocation.before_end(effect)
    invocation.end = effect
    if isinstance(effect, Suspend) and invocation.place is not None:
        await invocation.place.suspend(invocation)


# --- performing one effect


async def perform(effect: CallModel | RunTool, invocation: Invocation) -> Any:
    """Run one tool call or ask the model: the innermost `Perform`, inside all layers.

    In a stream, the pieces of the model's reply are passed on as they arrive.
    """
    if isinstance(effect, RunTool):
        try:
            outcome = await execute_tool(effect.request, effect.environment or invocation.environment)
            return ToolFinished(effect.index, outcome)
        except ToolSuspension as suspension:
            return ToolSuspended(effect.index, suspension.details)
    sent = find_sent_tools(effect, invocation)
    if invocation.put_piece is None:
        return ModelReplied(await ask_model(invocation, effect.request), sent=sent)
    invocation.environment.sent = sent  # tools may start before the reply is complete
    async with aclosing(await model_stream(invocation, effect.request)) as events:
        async for event in events:
            if isinstance(event, CompleteResponse):
                return ModelReplied(event.response, sent=sent)
            await invocation.put_piece(event)
    raise no_response(invocation.model)


def find_sent_tools(effect: CallModel, invocation: Invocation) -> tuple[str, ...]:
    """Return the names of the tools in a request that goes to the model; the answer tool is not one."""
    specifications, rules = effect.request.tool_specifications, invocation.rules
    if specifications is rules.specifications:
        return rules.names
    return tuple([each.name for each in specifications if each.name != ANSWER_TOOL])


def within_layers(invocation: Invocation) -> Perform:
    """Return the function that performs the effects of the call: `perform` inside the layers that it needs."""
    performing: Perform = perform
    if invocation.account is not None:
        performing = counted(performing)
    for layer in reversed(invocation.plan.layers.effects):
        performing = layer(performing)
    if invocation.account is not None:
        performing = limited(performing)
    return performing


# --- around the call


@asynccontextmanager
async def current_call(invocation: Invocation) -> AsyncIterator[None]:
    """Let code find the call as the current one inside the block, within its deadline and limits.

    If the call fails, what it has started elsewhere ends too.
    """
    # Not a method of the invocation: timers of its requests keep this context, and would keep its model.
    call_function = partial(call_with_beans, scope=invocation.host.scope, runner=invocation.runner)
    outer_call, outer_caller = current_invocation.set(invocation.context), current_bean_caller.set(call_function)
    try:
        if invocation.deadline is None and invocation.account is None and invocation.memory_key is None:
            yield
        else:
            async with within_limits(invocation):
                yield
    except BaseException as error:
        # Tools on threads, and calls on other loops that its tools have made, see this cancellation; the task's own
        # does not reach them. Runs that the error names wait for an answer that nobody would take: they are suspended
        # calls of services that code of this invocation has called, such as a guardrail.
        invocation.context.cancellation.cancel()
        own = invocation.place.run_id if invocation.place is not None else None
        await abandon_runs(error, invocation.host.cancel_run, own)
        raise
    finally:
        if invocation.has_begun:
            note_in_records(invocation.state)
        current_bean_caller.reset(outer_caller)
        current_invocation.reset(outer_call)


def blocks_around(invocation: Invocation) -> Iterator[InvocationLayer]:
    """Yield what this call needs around it, outermost first. Their order is that of `capabilities`."""
    plan = invocation.plan
    if invocation.account is not None:
        yield in_account
        if invocation.is_resumed:
            yield with_recorded_usage
    if invocation.host.listeners is not None:
        yield observed
    if invocation.entry.access is not None and not invocation.is_admitted:
        yield with_roles
    has_memory = invocation.memory_key is not None
    if has_memory:
        yield in_conversation  # loads the messages; writes what was done, if the call ends without an answer
    yield from plan.layers.around_turn  # compensation, if the call fails
    if has_memory:
        yield with_memory  # writes the turn at its end, if the call has ended with an answer
    # The conversation says who is in charge.
    if invocation.checks_input and not invocation.is_resumed:
        yield with_checked_input


# --- for callers


async def run(invocation: Invocation) -> Any:
    """Run an invocation on the current event loop, and return its value. The host waits for it when it stops."""
    with invocation.host.running.task(invocation.where):
        send = None if current_reader.get() is None else sender_of(invocation)
        if send is None:
            return await run_call(invocation)
        await run_call(invocation, StreamedCall(invocation, send))
        return invocation.value()


async def stream(invocation: Invocation, send: Send) -> None:
    """Run an invocation and send its events. It pauses at each event until `send` returns.

    A stream does what a call does, in one task: its deadline, its limits and its blocks are around all of its rounds,
    while the reader's code runs in the reader's task. The time that the reader takes counts for the deadline.
    """
    around = None if current_reader.get() is None else sender_of(invocation)

    async def send_to_both(event: ServiceEvent) -> None:
        assert around is not None
        await around(event)
        await send(event)

    await run_call(invocation, StreamedCall(invocation, send if around is None else send_to_both))
