"""One call of a service method, from its arguments to its value: `run_call` is all of it, in the order of what happens.

A stream and a durable run are the same call. What a stream adds is `streamed` (`streamed_call`): the model is asked for
pieces, and the reader gets each event when it happens. What a run adds is the `place` of the invocation, which a call
has if it is durable or may be suspended. A durable run is stored before `run_call`, another one at its first
suspension; its end is stored after `run_call` (`runs/run_execution.py`). The layers of its plan give what is recorded
of a model request or a tool call, else perform it and write the record (`runs/service_calls/run_layers.py`); before
the run is stored, they only remember results of tools. One that continues begins with its stored state. A plain call
has neither, and nothing of what `blocks_around` and `within_layers` list.

Not here: making the invocation of the arguments (`methods`, `invocation`), deciding the next effect (`loop`), handing
the items of a stream over (`streams`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any

from ..chat import CompleteResponse, ToolSpecification
from ..chat_streams import no_response
from ..context import current_bean_caller, current_invocation
from ..errors import ContextLengthError
from ..events import ToldEvent
from ..execution.cancellation import CancellationsHere
from ..service_events import ServiceEvent
from ..tools.pipeline import execute_tool
from ..tools.tool_calls import ToolSuspension
from .abandoned_runs import abandon_runs
from .bean_calls import call_with_beans
from .compaction import shorten
from .fallback_answers import or_fallback
from .handing_over import answer_in_place, hand_over
from .inner_events import Send, current_reader, sent_around
from .interruptions import within_limits
from .invocation import Invocation, Perform
from .invocation_records import note_in_records
from .layers import in_conversation, observed, with_checked_input, with_memory, with_roles
from .loop import (
    CallModel,
    CheckAnswer,
    Effect,
    Event,
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
from .plans import AfterRound, InvocationLayer
from .retrieving import after_retrieval, find_passages, note_passages
from .streamed_call import StreamedCall
from .tool_tasks import ToolTasks
from .usage_layers import counted, in_account, limited, or_limit, with_recorded_usage

# --- the call


async def run_call(invocation: Invocation, streamed: StreamedCall | None = None) -> Any:
    """Run one call, and return the method's value; None in a stream, whose reader has all of it.

    In a plain call, `invocation.perform` is the function `perform` below: its request goes to the model and its tool
    call to the tool, with nothing in between.
    """
    cancellations = CancellationsHere()
    async with current_call(invocation):
        await invocation.host.note_caller(invocation.context)  # the user's name, for logs and traces
        async with AsyncExitStack() as around:
            for block in blocks_around(invocation):  # none in a plain call; such as the turn of a conversation
                await around.enter_async_context(block(invocation))

            # What the call works with. The host knows models by name: the run, the call or the plan has the name.
            await find_model(invocation)  # a router chooses later, by the first request, in `begin`
            await find_tools(invocation)  # those of the plan; more for blocks and tool providers, fewer for roles
            plan = invocation.plan  # now that of a run, if one of these tools may suspend the call
            if (tasks := find_tasks(invocation, streamed)) is not None:  # in a stream, and if tools run together
                around.push_async_callback(tasks.cancel)
            if plan.retrievers:
                await find_passages(invocation, streamed)
            invocation.perform = within_layers(invocation, streamed)

            # Its first effect: a request with the system message, the history and the user message.
            stored = invocation.stored_state  # of a run that continues
            effect = await (begin(invocation) if stored is None else resume(invocation, stored))
            if plan is not invocation.entry and stored is None:
                # An earlier call has handed the conversation over: a bean that replaces its target, in a test, answers.
                effect = await answer_in_place(effect, invocation, streamed)
            if invocation.environment.passages is not None:  # found by retrievers
                note_passages(invocation)

            # Rounds: the model replies, and the tools that it calls run, until a reply is the answer.
            event: Event
            while not isinstance(effect, (Finish, Fail, Suspend)):
                performed = effect
                if isinstance(effect, CallModel):
                    try:
                        event = await invocation.perform(effect, invocation)
                    except ContextLengthError as error:
                        effect = await shorten(invocation, error, streamed)  # raises it if nothing can be left out
                        continue
                elif isinstance(effect, RunTools) and tasks is None:
                    # An error goes to its handler, in `execute_tool`. By default the model reads what a tool raises, as
                    # the call's result; an unknown tool and invalid arguments end the call. No handler gets a
                    # `ToolRetry`, which the model reads, or an `EndsInvocation`, which ends the call.
                    call = RunTool(effect.first, effect.pending[effect.first].request)
                    event = await invocation.perform(call, invocation)
                else:
                    event = await perform_other(effect, invocation, streamed, tasks)
                invocation.state, effect = advance(invocation.rules, invocation.state, event)
                invocation.environment.sent = invocation.state.sent  # a reply may only call the tools of its request
                if invocation.environment.passages is not None:  # a tool may be a retriever
                    note_passages(invocation, event)
                if cancellations.came:
                    # The result is kept, and the call ends before anything is sent to a reader who has left.
                    raise asyncio.CancelledError("cancelled; a tool or a model caught the first CancelledError")
                if streamed is not None:
                    await streamed.advanced(performed, event, effect)
                if plan.layers.after_round is not None:  # undoes the other tools if one has failed
                    effect = await end_round(performed, effect, invocation, plan.layers.after_round)

            if isinstance(effect, Fail):
                raise effect.error
            if invocation.before_end is not None and isinstance(effect, Finish) and not effect.is_fallback:
                invocation.before_end(effect)  # a stream of items refuses an answer whose last item is cut off
            invocation.end = effect
            if isinstance(effect, Suspend) and invocation.place is not None:
                await invocation.place.suspend(invocation)  # the run is stored, and waits for an answer

        # The blocks have ended: the listeners have the answer, and its turn is written. That of a stored run is written
        # with its end, in one transaction, if both stores are on one engine and no failed write undoes tools.
        if streamed is not None:
            await streamed.end()
            return None
        return invocation.value()


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
    specifications, rules = effect.request.tool_specifications, invocation.rules
    sent = rules.names if specifications is rules.specifications else names_of_tools(specifications)
    if invocation.put_piece is None:  # not a stream
        return ModelReplied(await ask_model(invocation, effect.request), sent=sent)
    invocation.environment.sent = sent  # tools may start before the reply is complete
    async with aclosing(await model_stream(invocation, effect.request)) as events:
        async for event in events:
            if isinstance(event, CompleteResponse):
                return ModelReplied(event.response, sent=sent)
            await invocation.put_piece(event)
    raise no_response(invocation.model)


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


# --- what a call can have in addition


def blocks_around(invocation: Invocation) -> Iterator[InvocationLayer]:
    """Yield what this call needs around it, outermost first. Their order is that of `capabilities`."""
    plan = invocation.plan
    if invocation.account is not None:
        yield in_account
        if invocation.is_resumed:
            yield with_recorded_usage
    if invocation.host.listeners is not None:
        yield observed
    is_taken_over = plan is not invocation.entry  # by a run that continues
    if (invocation.entry.access is not None and not invocation.is_admitted) or (is_taken_over and plan.access):
        yield with_roles
    has_memory = invocation.memory_key is not None
    if has_memory:
        yield in_conversation  # loads the messages; after an error, writes what was done, if a tool had begun
    yield from plan.layers.around_turn  # compensation, if the call fails
    if has_memory:
        yield with_memory  # writes the turn of an answer; that of a `@fallback` counts as failed
    if invocation.entry.checks_input and not invocation.is_resumed:
        yield with_checked_input  # the conversation says whose guardrails judge: who is in charge


def within_layers(invocation: Invocation, streamed: StreamedCall | None) -> Perform:
    """Return the function that performs the effects of the call: `perform`, inside the layers that it needs.

    Those of the plan change or record requests: tools that are found later, interceptors, the records of a run. Only
    that of a run acts on tool calls too, which get their places in it; what is around a tool is in its `Layers.tools`.
    """
    performing: Perform = perform
    if invocation.account is not None:
        performing = counted(performing)
    for layer in reversed(invocation.plan.layers.effects):
        performing = layer(performing)
    if invocation.account is not None:
        performing = limited(performing)
    may_be_given = performing is not perform  # by one of these layers, so that a reply comes without pieces
    if invocation.plan.fallback is not None:
        performing = or_fallback(performing, streamed)
    if invocation.answers_at_limit:
        performing = or_limit(performing)
    if streamed is not None:
        performing = streamed.requesting(performing, may_be_given=may_be_given)
    if invocation.asks_again:
        performing = after_retrieval(performing, streamed)
    return performing


def find_tasks(invocation: Invocation, streamed: StreamedCall | None) -> ToolTasks | None:
    """Return what runs the tools, if they run together, or their reader or a limit looks on; None in a plain call."""
    if streamed is not None:
        return streamed.tasks
    return ToolTasks(invocation) if invocation.together or invocation.answers_at_limit else None


def names_of_tools(specifications: Iterable[ToolSpecification]) -> tuple[str, ...]:
    """Return the names of the tools in a request that a layer has changed; the answer tool is not one."""
    return tuple([each.name for each in specifications if each.name != ANSWER_TOOL])


async def perform_other(
    effect: Effect, invocation: Invocation, streamed: StreamedCall | None, tasks: ToolTasks | None
) -> Event:
    """Perform an effect that a plain call does not have, and return its result."""
    if isinstance(effect, CheckAnswer):
        check = invocation.plan.layers.check_answer
        assert check is not None
        return await check(effect, invocation)
    if isinstance(effect, HandOver):
        taken = await hand_over(effect, invocation, streamed)
        invocation.perform = within_layers(invocation, streamed)
        return taken
    if isinstance(effect, Listen):
        return await listen(effect, invocation, streamed)
    assert isinstance(effect, RunTools)
    assert tasks is not None
    finished: Event = await tasks.run_next(effect)
    return finished


async def listen(effect: Listen, invocation: Invocation, streamed: StreamedCall | None) -> Heard:
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


async def end_round(performed: Effect, following: Effect, invocation: Invocation, undo: AfterRound) -> Effect:
    """Let `undo` see the tools of a round that has ended. Return the next effect, which sends what it has changed."""
    if not isinstance(performed, (RunTools, HandOver)) or invocation.state.pending:
        return following
    await undo(invocation, len(invocation.state.executions) - len(performed.pending))
    return CallModel(request_of(invocation.rules, invocation.state)) if isinstance(following, CallModel) else following


# --- for callers


async def run(invocation: Invocation) -> Any:
    """Run an invocation on the current event loop, and return its value. The host waits for it when it stops."""
    with invocation.host.running.task(invocation.where):
        if current_reader.get() is None:
            return await run_call(invocation)
        async with sent_around(invocation) as send:
            if send is None:
                return await run_call(invocation)
            await run_call(invocation, StreamedCall(invocation, send))
            return invocation.value()


async def stream(invocation: Invocation, send: Send) -> None:
    """Run an invocation and send its events. It pauses at each event until `send` returns.

    A stream does what a call does, in one task: its deadline, its limits and its blocks are around all of its rounds,
    while the reader's code runs in the reader's task. The time that the reader takes counts for the deadline.
    """
    if current_reader.get() is None:
        await run_call(invocation, StreamedCall(invocation, send))
        return
    async with sent_around(invocation) as around:

        async def send_to_both(event: ServiceEvent) -> None:
            assert around is not None
            await around(event)
            await send(event)

        await run_call(invocation, StreamedCall(invocation, send if around is None else send_to_both))
