"""The layers around an invocation: listeners, roles, the turn in a conversation and its memory, the check of the input.

A layer of an invocation is an async context manager, so that it works for coroutines and streams. Not here: the types
of layers (`plans`), layers of tools (`capabilities`), deadlines (`interruptions`), limits (`usage_layers`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from ..chat import Message
from ..context import complete_context, current_invocation
from ..conversations.keys import ChatMemoryKey, Owner, refuse_other
from ..conversations.log import Head, Turn, only_beans
from ..conversations.memories import ChatMemories
from ..conversations.stores import InMemoryChatMemoryStore
from ..conversations.views import Excerpt
from ..di.scopes import ConversationScope
from ..errors import (
    AsyncBeanError,
    ConversationBusyError,
    ConversationSuspendedError,
    MemoryLeaseLostError,
    RunStoreError,
    StoredBeanError,
    ToolboxError,
)
from ..events import (
    MemoryWrittenEvent,
    ServiceCompletedEvent,
    ServiceFailedEvent,
    ServiceStartedEvent,
    ServiceSuspendedEvent,
)
from ..execution.cancellation import finish_before_cancellation
from ..request_hooks import RELEASES_CONNECTION
from ..safe_text import describe_store_error, error_of_database
from ..security import identity_in, identity_now
from .conversation_beans import with_beans
from .handing_over import charge_to_store, take_stored_charge
from .host_needs import ServiceHost
from .interruptions import NOTHING, within_limits
from .invocation import Invocation
from .loop import Finish, Suspend
from .model_calls import call_hooks, reported
from .plans import MethodPlan
from .recording_needs import PlaceInRun, TurnWrite
from .turns import (
    answered_turn,
    client_ids_in,
    has_begun_tool,
    state_after,
    unfinished_turn,
    waiting_turn_of,
    with_rest_of,
)
from .usage_layers import in_account

logger = logging.getLogger("toolbox.memory")

_LAST_WRITE = 5.0
"""Seconds for the write of a turn whose call has ended already, and whose caller waits for it."""

# --- the conversation


@asynccontextmanager
async def in_conversation(invocation: Invocation) -> AsyncIterator[None]:
    """Take the turn in the conversation and load its messages.

    If the invocation ends without an answer, stores what it did until then.
    """
    async with AsyncExitStack() as turn:
        joined = await _begin_turn(turn, invocation)
        try:
            async with with_beans(invocation, joined) if invocation.plan.keeps_beans else NOTHING:
                yield  # also the compensation of a failure, so that what is stored says what was undone
        except (Exception, asyncio.CancelledError, KeyboardInterrupt, SystemExit) as error:
            await _keep_unfinished(error, invocation)
            raise
        finally:
            if invocation.place is not None:
                invocation.place.run.stay_in(turn)


async def _begin_turn(turn: AsyncExitStack, invocation: Invocation) -> ConversationScope | None:
    """Take the turn until `turn` is closed, and load the messages. Raises the errors of a conversation in use.

    Returns the scope of a block that holds the conversation and that the call joins, or None.
    """
    key, plan = invocation.memory_key, invocation.entry
    assert key is not None
    memories = await invocation.host.memories()
    if not isinstance(memories.store, InMemoryChatMemoryStore):
        # The turn may have to wait for a call at work, and needs a connection: where all of the pool are held by
        # requests that wait for one, nobody would go on.
        await call_hooks(invocation, RELEASES_CONNECTION)
    with _store_errors_of_run(invocation):
        joined = await _take_turn(turn, memories, key, invocation)
        invocation.excerpt = await _load(invocation, key, memories)
    invocation.owner = await _refuse_other(invocation, memories, invocation.excerpt.head)
    if invocation.owner is not None and memories.keeps_logs:
        invocation.use_approvals(partial(memories.approvals, key, invocation.owner))
    checks = plan.checks_suspended or plan.providers or invocation.host.added_may_suspend
    checks = checks and plan.options.on_suspended != "continue" and not invocation.is_resumed
    if checks and await _refuse_suspended(key, invocation):
        invocation.excerpt = await _load(invocation, key, memories)
    invocation.history = invocation.excerpt.messages
    head = invocation.excerpt.head
    if head is not None and head.in_charge is not None and not invocation.is_resumed:
        await take_stored_charge(invocation, head.in_charge)
    if plan.options.on_suspended == "continue":
        invocation.before_suspension = partial(_append_waiting, invocation)
    else:
        invocation.before_suspension = partial(_confirm_turn, invocation)
    return joined


@contextmanager
def _store_errors_of_run(invocation: Invocation) -> Iterator[None]:
    """Raise `RunStoreError` for an error of the store inside the block, if a run continues that a process has begun.

    The run stays as it is: it would fail before anything could undo its tools.
    """
    try:
        yield
    except ToolboxError:
        raise
    except Exception as error:
        if invocation.place is None or not (invocation.is_recorded and invocation.is_resumed):
            raise
        # Logs show the cause too. That of a database has the values of the statement, such as messages.
        cause = None if error_of_database(error) is not None else error
        reason = f"its conversation cannot be loaded: {describe_store_error(error)}"
        raise RunStoreError(invocation.place.run_id, reason) from cause


async def _load(invocation: Invocation, key: ChatMemoryKey, memories: ChatMemories) -> Excerpt:
    """Return what the view of an invocation sends of its conversation, but for what its own run has stored there.

    A turn whose run has ended does not wait any more: its process was killed before it could write that.
    """
    place, view = invocation.place, invocation.plan.window
    own = place.run_id if place is not None and invocation.is_recorded else None
    excerpt = await memories.load(key, view, without_run=own)
    has_changed = False
    for each in excerpt.turns:
        if each.state == "waiting" and each.run_id is not None:
            state = await invocation.host.runs.turn_state_after(each.run_id)
            if state is not None:
                has_changed |= await memories.end_waiting(key, each.run_id, state)
    return await memories.load(key, view, without_run=own) if has_changed else excerpt


@asynccontextmanager
async def with_memory(invocation: Invocation) -> AsyncIterator[None]:
    """Store the turn in the conversation if the invocation succeeds, and the owner if it is suspended."""
    key, excerpt = invocation.memory_key, invocation.excerpt
    assert key is not None
    assert excerpt is not None
    try:
        yield
    finally:
        invocation.is_ending = True
    if isinstance(invocation.end, Suspend) and (excerpt.head is None or excerpt.head.owner is None):
        with suppress(MemoryLeaseLostError):  # the run is suspended; the call that has the conversation now creates it
            await (await invocation.host.memories()).begin(key, invocation.owner)
    if not isinstance(invocation.end, Finish):
        return
    if invocation.is_recorded and invocation.place is not None:
        await invocation.place.settle()
    if not invocation.end.is_fallback:
        await _append(answered_turn(invocation), invocation, leaves=True)
    elif await _keeps_unfinished(invocation) and (turn := unfinished_turn(invocation, "failed")) is not None:
        await _append(turn, invocation, leaves=True)  # no model has given the answer, so it is not in the conversation


async def _confirm_turn(invocation: Invocation) -> None:
    """Raise `MemoryLeaseLostError` if a call that is to be suspended has lost its conversation, as for its last write.

    Otherwise its run would close the conversation to the calls of the process that has it now. A stored run has a
    separate lease.
    """
    key, place = invocation.memory_key, invocation.place
    assert key is not None
    if place is not None and not place.run.is_stored:
        await (await invocation.host.memories()).keep(key)


async def _append_waiting(invocation: Invocation) -> None:
    """Store what waits of a call that is suspended, so that the conversation goes on."""
    if (turn := waiting_turn_of(invocation)) is not None:
        await _append(turn, invocation)
        invocation.has_waiting_turn = True


async def _append(turn: Turn, invocation: Invocation, *, leaves: bool = False) -> None:
    """Append the turn of the invocation to its conversation, with what changed of the beans, in one write.

    With `leaves` it is the last write of the call, which leaves the conversation with it. A stored run leaves it later:
    its end may be stored with the turn, in one transaction.
    """
    key, excerpt, beans = invocation.memory_key, invocation.excerpt, invocation.beans
    assert key is not None
    assert excerpt is not None
    if (block := invocation.joined) is not None and block.closing:
        raise MemoryLeaseLostError(key.service, key.memory_id)
    if (place := invocation.place) is not None:
        place.drop_turn()
    turn = replace(turn, beans=_changed_beans(turn, invocation), client_ids=await _client_ids_of(turn, invocation))
    if (invocation.entry.team or invocation.stored_charge) and turn.state != "waiting":
        answered_by = invocation.plan.where if turn.state == "answered" else None
        turn = replace(turn, in_charge=charge_to_store(invocation), answered_by=answered_by)
    memories, owner, may_be_stored = await invocation.host.memories(), invocation.owner, _may_be_written(invocation)
    window, written = invocation.plan.window, tuple[Message, ...]()
    leaves = leaves and not (place is not None and place.run.is_stored)

    async def write() -> None:
        nonlocal written
        if place is not None and place.run.cancels:  # it has not taken the turn
            await memories.write(key, turn if window is not None else only_beans(turn), owner)
        else:
            written = await memories.append(
                key, turn, excerpt, window, owner=owner, may_be_stored=may_be_stored, leaves=leaves
            )

    def end(is_written: bool) -> None:
        if beans is not None and not is_written:
            beans.take_back(turn.beans)
        if is_written and written and invocation.host.listeners is not None:
            invocation.host.listeners.tell(MemoryWrittenEvent(invocation.context, written))

    # A call that is not stored ends without a write of a run; that it waits is its first one. Where tools are undone if
    # the turn cannot be written, it is written here, inside of that.
    is_undone = turn.state == "answered" and bool(invocation.plan.layers.around_turn)
    is_taken = (
        place is not None
        and (place.run.is_stored or turn.state == "waiting")
        and not is_undone
        and place.take_turn(TurnWrite(memories.store, write, end))
    )
    if not is_taken:
        await write()
    if beans is not None:
        beans.note_stored(turn.beans)
    if not is_taken:
        end(True)


async def _client_ids_of(turn: Turn, invocation: Invocation) -> Mapping[int, str]:
    """Return the ids that a client gave to the user's messages in a turn."""
    if invocation.place is None or not turn.messages:
        return {}
    if not invocation.has_begun:
        first, *_ = await invocation.place.client_ids(0)
        return {} if first is None else {0: first}
    state = invocation.state
    return client_ids_in(state, await invocation.place.client_ids(len(state.added)))


def _changed_beans(turn: Turn, invocation: Invocation) -> Mapping[str, Any]:
    """Return what changed of the beans. Raises `StoredBeanError` for a turn with an answer; others are kept anyway."""
    if invocation.beans is None:
        return {}
    try:
        return invocation.beans.changed()
    except StoredBeanError as error:
        if turn.state == "answered":
            raise
        logger.error("%s: its conversation-scoped beans are not stored: %s", invocation.where, error)
        return {}


async def _keep_unfinished(error: BaseException, invocation: Invocation) -> None:
    """Store the turn of an invocation that ends with an error. The error stays the one that the caller gets."""
    place, behind = invocation.place, invocation.error_behind(error)
    if invocation.excerpt is None or not await _keeps_unfinished(invocation):
        return
    if place is not None and place.is_tried_again(behind, invocation.plan):
        await _store_beans(place, invocation)
        return
    if place is not None and place.run.is_stored and not place.ends_with(behind, invocation.plan):
        return  # it is suspended, or goes on in another process
    if place is not None and place.run.cancels and not invocation.undone:
        return  # stored when the run was cancelled, perhaps with a part of a reply that no record has
    if (turn := unfinished_turn(invocation, state_after(error, invocation))) is None:
        return

    async def write() -> None:
        async with asyncio.timeout(_LAST_WRITE):
            kept, key = turn, invocation.memory_key
            if place is not None and place.run.cancels and key is not None:
                kept = with_rest_of(await (await invocation.host.memories()).read_run(key, place.run_id), turn)
            await _append(kept, invocation, leaves=True)

    # Most of these calls are being cancelled, perhaps again during the write: by a server that stops, for example.
    try:
        await finish_before_cancellation(write(), _append, _LAST_WRITE)
    except Exception as failure:
        what = describe_store_error(failure).partition("\n")[0]
        logger.error("%s: what it did before it ended is not stored in its conversation: %s", invocation.where, what)


async def _store_beans(place: PlaceInRun, invocation: Invocation) -> None:
    """Store what a run that is tried again has changed of the beans: other calls find it, and may change it too."""
    key, beans = invocation.memory_key, invocation.beans
    if key is None or beans is None or not has_begun_tool(invocation):
        return
    turn = Turn(run_id=place.run_id, state="failed")  # replaced by the turn with which the run ends
    turn = replace(turn, beans=_changed_beans(turn, invocation))
    try:
        await (await invocation.host.memories()).write(key, turn, invocation.owner)
        beans.note_stored(turn.beans)
    except Exception as failure:  # they are recorded too
        what = describe_store_error(failure).partition("\n")[0]
        logger.warning("%s: its beans are stored when its run ends: %s", invocation.where, what)


async def _keeps_unfinished(invocation: Invocation) -> bool:
    """Return True if turns without an answer are stored: not in a store that has no log, which cannot mark them."""
    keeps = invocation.plan.options.unfinished_turns == "keep"
    return keeps and (await invocation.host.memories()).keeps_logs


def _may_be_written(invocation: Invocation) -> bool:
    """Return True if another process may have written the messages of this call, before it crashed."""
    # It had recorded all replies and results by then. Equal messages alone do not tell: a conversation can contain the
    # same words twice, and model servers repeat the ids of calls.
    place = invocation.place
    return invocation.is_resumed and not (place is not None and place.run.has_new_records)


async def _take_turn(
    turn: AsyncExitStack, memories: ChatMemories, key: ChatMemoryKey, invocation: Invocation
) -> ConversationScope | None:
    """Take the turn until `turn` is closed. For a run that is recorded, waiting does not count for the `timeout`."""
    if invocation.place is not None and invocation.place.run.cancels:
        # It only undoes its tools, and its end is appended. The call that has cancelled it may be the one at work.
        return None
    # It may continue at any time, also while a long call has the conversation, and must not fail for that.
    with _stop_clock(invocation) if invocation.is_recorded else nullcontext():
        # A run waits also with `when_busy="raise"`: it was accepted when it was stored.
        waits = invocation.is_recorded or invocation.plan.options.when_busy == "wait"
        return await turn.enter_async_context(memories.enter(key, invocation, wait=waits))


async def _refuse_other(invocation: Invocation, memories: ChatMemories, head: Head | None) -> Owner | None:
    """Return the owner of a conversation that begins with this call. Raises `AccessDeniedError` in that of another."""
    host, key = invocation.host, invocation.memory_key
    assert key is not None
    identity = await host.caller()
    if identity is None:
        return None
    owner = Owner.of(identity, host.run_identity)
    memories.warn_without_owners(owner)
    # What a stored run has begun, it may end. One that only starts is checked again, because its conversation may have
    # got an owner since; that of the program has an anonymous identity.
    checks = not invocation.is_resumed and not (invocation.is_recorded and owner is None)
    if head is not None and checks and not invocation.plan.options.shared_conversations:
        refuse_other(head.owner, key, identity, host.run_identity)
    return owner


async def check_conversation_first(host: ServiceHost, plan: MethodPlan, key: ChatMemoryKey) -> None:
    """Check the conversation of a call that will run later, as a run, before that is stored.

    Raises `AccessDeniedError`, and with `when_busy="raise"` `ConversationBusyError`.
    """
    memories = await host.memories()
    if not plan.options.shared_conversations and (identity := await host.caller()) is not None:
        head = await memories.head(key)
        refuse_other(None if head is None else head.owner, key, identity, host.run_identity)
    if plan.options.when_busy == "raise":
        run = await host.runs.run_of(key.service, key.memory_id)  # it may have been started, and not be at work yet
        if (run is not None and run.status == "running") or await memories.is_at_work(key):
            raise ConversationBusyError(key.service, key.memory_id)


async def _refuse_suspended(key: ChatMemoryKey, invocation: Invocation) -> bool:
    """Raise `ConversationSuspendedError` if the conversation has a suspended run, or cancel that and return True."""
    host, plan = invocation.host, invocation.entry
    was_cancelled = False
    while (run_id := await host.suspended_run(key)) is not None:  # several, if the program said "continue" before
        if plan.options.on_suspended == "raise":
            raise ConversationSuspendedError(plan.service.__name__, run_id)
        await host.cancel_run(run_id, "a new call began in its conversation")
        was_cancelled = True
    return was_cancelled


@contextmanager
def _stop_clock(invocation: Invocation) -> Iterator[None]:
    """Move the deadline by the time that the block takes."""
    limit = invocation.limit
    if limit is None or limit.expired():
        yield
        return
    began, ends = time.monotonic(), limit.when()
    limit.reschedule(None)
    try:
        yield
    finally:
        taken = time.monotonic() - began
        invocation.move_deadline(taken)
        limit.reschedule(None if ends is None else ends + taken)


# --- roles


def admit(invocation: Invocation) -> None:
    """Check the roles in the call that creates a stream; later, if async code must create the identity.

    Raises `UnauthenticatedError` or `ForbiddenError`.
    """
    plan, listeners = invocation.entry, invocation.host.listeners
    assert plan.access is not None
    try:
        identity = identity_now(invocation.host.scope)
    except AsyncBeanError:
        return
    if not plan.access.allows(identity):
        error = plan.access.refusal(identity, plan.where)
        if listeners is not None:
            complete_context(invocation.context, user=identity.name or None)
            listeners.tell(ServiceStartedEvent(invocation.context))
            listeners.tell(ServiceFailedEvent(invocation.context, error, 0.0))
        raise error
    invocation.is_admitted = True


@asynccontextmanager
async def with_roles(invocation: Invocation) -> AsyncIterator[None]:
    """Check that the current identity may call the method, and in a run that continues the one that has taken it over.

    Raises `UnauthenticatedError` or `ForbiddenError`.
    """
    identity = await identity_in(invocation.host.scope)
    complete_context(invocation.context, user=identity.name or None)
    for plan in (invocation.entry, invocation.plan):
        if plan.access is not None and not plan.access.allows(identity):
            raise plan.access.refusal(identity, plan.where)
    yield


# --- the check of the user message


@asynccontextmanager
async def with_checked_input(invocation: Invocation) -> AsyncIterator[None]:
    """Let the input guardrails judge the user message. Raises `InputGuardrailError`."""
    for plan in invocation.unchecked:
        assert plan.layers.check_input is not None
        await plan.layers.check_input(invocation)
    invocation.is_input_checked, invocation.input_checked_by = True, invocation.plan.where
    yield


async def check_input_first(invocation: Invocation) -> None:
    """Check the input of an invocation that will run later, as a run. Raises `InputGuardrailError`.

    The guardrails see its conversation as it stands now, without waiting for its turn.
    """
    plan, key = invocation.entry, invocation.memory_key
    token = current_invocation.set(invocation.context)
    began = perf_counter()
    try:
        async with within_limits(invocation), _limited_by(invocation):
            if key is not None:
                invocation.excerpt = await (await invocation.host.memories()).load(key, plan.window)
                invocation.history = invocation.excerpt.messages
                head = invocation.excerpt.head
                if plan.team and invocation.plan is plan and head is not None and head.in_charge is not None:
                    await take_stored_charge(invocation, head.in_charge)
            beans: AbstractAsyncContextManager[None] = NOTHING
            if key is not None and plan.keeps_beans:
                beans = with_beans(invocation, (await invocation.host.memories()).find_block(key))
            async with beans, with_checked_input(invocation):
                pass
    except Exception as error:
        if (listeners := invocation.host.listeners) is not None:
            listeners.tell(ServiceStartedEvent(invocation.context))
            listeners.tell(ServiceFailedEvent(invocation.context, error, perf_counter() - began))
        raise
    finally:
        current_invocation.reset(token)


def _limited_by(invocation: Invocation) -> AbstractAsyncContextManager[None]:
    return NOTHING if invocation.account is None else in_account(invocation)


# --- listeners


@asynccontextmanager
async def observed(invocation: Invocation) -> AsyncIterator[None]:
    """Send events to the listeners when an invocation starts, completes or fails: with who is in charge then."""
    listeners = invocation.host.listeners
    assert listeners is not None
    began = perf_counter()
    listeners.tell(ServiceStartedEvent(invocation.context))
    try:
        yield
    except BaseException as error:
        failure = reported(invocation.error_behind(error))
        listeners.tell(ServiceFailedEvent(invocation.context, failure, perf_counter() - began))
        raise
    end, context = invocation.end, invocation.context
    if isinstance(end, Suspend) and invocation.place is not None:
        place, taken = invocation.place, perf_counter() - began
        listeners.tell(ServiceSuspendedEvent(context, place.run_id, place.pending, taken))
    if isinstance(end, Finish):
        state = invocation.state
        executions, taken = tuple(state.executions), perf_counter() - began
        listeners.tell(
            ServiceCompletedEvent(context, end.response, invocation.value(), state.token_usage, executions, taken)
        )
