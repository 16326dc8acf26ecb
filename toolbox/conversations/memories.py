"""The conversations of a container: entering one, loading its messages; and `ChatMemory`, the access of programs.

Not here: which messages are kept (`views`), stores (`stores`), storing a call's messages (`services`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial, reduce
from threading import current_thread
from typing import Any, Protocol, TypeAlias, TypeVar
from weakref import ReferenceType, ref

from ..chat import Message, TokenUsage, UserMessage, check_messages
from ..di.scopes import ConversationScope, find_conversation
from ..errors import ConversationBusyError, MemoryInUseError
from ..execution.threads import keep_inherited, on_event_loop, register_for_fork
from ..store_clock import clock_of
from .keys import ChatMemoryKey, Owner
from .log import (
    NO_USAGE,
    Head,
    KeptApproval,
    Log,
    LogWrite,
    Turn,
    TurnState,
    ViewNotes,
    begin_head,
    claimed,
    only_beans,
    with_approval,
)
from .queues import CallQueues, queues_of
from .stopping import Stopping
from .stores import ChatMemoryStore, LogStore, find_head, keeps_logs
from .views import FEW, NEWEST, ChosenView, Excerpt, NoMessages, OwnView, View, Window, as_view, since

logger = logging.getLogger("toolbox.memory")

T = TypeVar("T")


Caller: TypeAlias = "ReferenceType[Any]"
"""The task, or the thread without a loop, that waits for a call or reads its stream."""


def caller_here() -> Caller:
    """Return the current task or thread."""
    return ref((asyncio.current_task() if on_event_loop() else None) or current_thread())


class Calling(Protocol):
    """A call that takes a turn. `caller` is the current reader of a stream, or None without a reader."""

    caller: Caller | None

    @property
    def stop(self) -> Callable[[str | None], None] | None:
        """Return what ends the call for one who stops the conversation, on the call's loop; None if nobody may."""
        ...


class Program:
    """The program itself as the caller, which is the task or thread that makes this."""

    def __init__(self) -> None:
        self.caller: Caller | None = caller_here()
        self.stop = None


class _Held:
    """The turn of one call in a conversation. `ended` is True afterwards, for tasks that outlive the call."""

    __slots__ = ("ended", "key", "store")

    def __init__(self, store: ChatMemoryStore, key: ChatMemoryKey) -> None:
        self.store, self.key, self.ended = store, key, False


_held: ContextVar[tuple[_Held, ...]] = ContextVar("toolbox.conversations", default=())


class HoldingBlock:
    """A block of the program that holds a conversation. The calls inside it take turns in it.

    The scope of the block's beans has it as its key: code is inside if that scope is around it.
    """

    def __init__(self) -> None:
        self.queue = CallQueues()


class ChatMemories:
    """The conversations of one container: enters one at a time, loads what is sent, appends turns."""

    def __init__(self, store: ChatMemoryStore) -> None:
        self.store = store
        self.keeps_logs = keeps_logs(store)
        self._port: MemoryPort = StoredLogs(store) if keeps_logs(store) else StoredMessages(store)
        self._queues = queues_of(store)
        self._calls = Stopping(store)
        self._under_way: dict[ChatMemoryKey, Calling] = {}
        self._has_warned = False
        self._blocks: dict[ChatMemoryKey, HoldingBlock] = {}
        register_for_fork(self)

    def renew_after_fork(self) -> None:
        """Forget the current calls, which continue in the parent process."""
        keep_inherited(self._under_way, self._calls)
        self._under_way, self._blocks, self._calls = {}, {}, Stopping(self.store)

    @asynccontextmanager
    async def lock(self, key: ChatMemoryKey, *, wait: bool = True) -> AsyncIterator[None]:
        """Lock a conversation under all its names: with the store's own lock, or with one in this process.

        With `wait=False`, raises `ConversationBusyError` if another caller has it; not with a program's own lock.
        """
        lock: Callable[..., AbstractAsyncContextManager[object]]
        lock = getattr(self.store, "lock", self._queues.enter)
        if not wait and (keeps_logs(self.store) or not hasattr(self.store, "lock")):
            lock = partial(lock, wait=False)
        async with AsyncExitStack() as entered:
            try:
                # Always in the same order, so that two callers never wait for each other.
                for each in sorted(key.places, key=lambda place: place.service):
                    await entered.enter_async_context(lock(each))
            except ConversationBusyError:  # which may name a former name
                raise ConversationBusyError(key.service, key.memory_id) from None
            yield

    @asynccontextmanager
    async def enter(
        self, key: ChatMemoryKey, call: Calling | None = None, *, wait: bool = True
    ) -> AsyncIterator[ConversationScope | None]:
        """Enter a conversation for `call`, or for the program itself, when all others have left it.

        A call inside of a block that holds the conversation joins it, when the calls before it have ended: yields the
        block's scope. With `wait=False`, raises `ConversationBusyError` if another caller is inside.
        Raises `MemoryInUseError` for a call that would wait for itself, because it comes from a tool of the current
        call, or from the reader of its stream; and inside of such a block for the program itself.
        """
        call = call or Program()
        if key in self.entered_by(call):
            raise MemoryInUseError(key.service, key.memory_id)
        block, joined = self._blocks.get(key), self.find_block(key)
        lock = self.lock if block is None or joined is None else block.queue.enter
        async with lock(key, wait=wait):
            held_here = _Held(self.store, key)
            token = _held.set((*(each for each in _held.get() if not each.ended), held_here))
            around = self._under_way.get(key)  # the block that the call joins
            self._under_way[key] = call
            try:
                async with self.at_work(key, call):
                    yield joined
            finally:
                if around is None:
                    self._under_way.pop(key, None)
                else:
                    self._under_way[key] = around
                held_here.ended = True
                _reset(token)

    def find_block(self, key: ChatMemoryKey) -> ConversationScope | None:
        """Return the scope of a block around this code that holds the conversation, or None."""
        block = self._blocks.get(key)
        return None if block is None else find_conversation(block)

    @asynccontextmanager
    async def hold(self, key: ChatMemoryKey) -> AsyncIterator[HoldingBlock]:
        """Hold a conversation for a block of the program, when all others have left it."""
        async with self.enter(key):
            block = self._blocks[key] = HoldingBlock()
            try:
                yield block
            finally:
                del self._blocks[key]

    def entered_by(self, call: Calling) -> set[ChatMemoryKey]:
        """Return the conversations that wait for `call`: it comes from their tools, or from the reader of their stream.

        For the program itself, also those of the blocks around it, which its calls would join.
        """
        around = self.entered_here()
        if isinstance(call, Program):
            around |= {each for each in [*self._blocks] if self.find_block(each) is not None}
        if call.caller is None:
            return around
        return around | {key for key, each in [*self._under_way.items()] if each.caller is call.caller}

    async def is_at_work(self, key: ChatMemoryKey) -> bool:
        """Return True if a call of any process is in the conversation; False on a store without logs."""
        if not keeps_logs(self.store):
            return False
        return any([await self.store.holder(each) is not None for each in key.places])

    def warn_without_owners(self, owner: Owner | None) -> None:
        """Warn once, if a store without logs is used for an identity, that it does not know whose a conversation is."""
        if owner is not None and not self.keeps_logs and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s keeps no owners: everyone who knows the id of a conversation can use it; check that the caller may",
                type(self.store).__name__,
            )

    async def remember(self, key: ChatMemoryKey, given: Sequence[KeptApproval]) -> None:
        """Remember approvals in a conversation, which must exist, on a store with logs. Takes no lock."""

        def remembering(head: Head) -> Head:
            return reduce(with_approval, given, head)

        if keeps_logs(self.store):
            await self.store.change(key, remembering)

    async def approvals(self, key: ChatMemoryKey, owner: Owner) -> Sequence[KeptApproval]:
        """Return the approvals that a conversation remembers, now, for calls in the name of this person."""
        head = await self.head(key)
        return () if head is None else [each for each in head.approvals if each.owner == owner]

    async def head(self, key: ChatMemoryKey) -> Head | None:
        """Return the head of a conversation; None for an unknown one, and on a store without logs."""
        return await find_head(self.store, key) if keeps_logs(self.store) else None

    # --- stopping

    def at_work(self, key: ChatMemoryKey, call: Calling) -> AbstractAsyncContextManager[None]:
        """Let others stop a call inside the block, in which it has the conversation; nobody stops the program."""
        return nullcontext() if call.stop is None else self._calls.at_work(key, call.stop)

    def entered_here(self) -> set[ChatMemoryKey]:
        """Return the conversations whose calls wait for the current code, such as that of their tools."""
        return {each.key for each in _held.get() if not each.ended and each.store is self.store}

    async def stop(self, key: ChatMemoryKey, by: str | None = None) -> bool:
        """End the call that is at work in a conversation, in any process. Returns False if there is none.

        Takes no lock, and returns when the call has left the conversation, with its turn stored: in code of the call
        itself, at once. If the process of the call is gone, that is when its lease has ended.
        """
        under_way = self._under_way.get(key)
        if under_way is not None and under_way.stop is None:
            return False  # the program itself has the conversation, in this process
        return await self._calls.stop(key, by, waits=key not in self.entered_here())

    # --- the port of services

    async def load(self, key: ChatMemoryKey, view: ChosenView | None, *, without_run: str | None = None) -> Excerpt:
        """Return what a view sends of a conversation, without what this run has stored in it before.

        Without a view, only its head.
        """
        return await self._port.load(key, as_view(view), without_run)

    async def append(
        self,
        key: ChatMemoryKey,
        turn: Turn,
        excerpt: Excerpt,
        view: ChosenView | None,
        *,
        owner: Owner | None = None,
        may_be_stored: bool = False,
        leaves: bool = False,
    ) -> tuple[Message, ...]:
        """Append a turn after what was loaded, in one write; a turn whose id is there already is not appended again.

        Without a view, only the beans of the turn are stored, if there are any.
        `owner` is that of a conversation whose first turn this is. `may_be_stored` says that an earlier process may
        have appended the turn, for stores that know no ids. `leaves` says that the call writes nothing after it.
        Returns the messages that are sent, then those of the turn; none if nothing was written.
        """
        leaves = leaves and key not in self._blocks  # a block goes on after the calls in it
        stored = AppendedTurn(turn, excerpt, as_view(view), owner, may_be_stored, leaves)
        return await self._port.append(key, stored)

    async def begin(self, key: ChatMemoryKey, owner: Owner | None) -> None:
        """Note a first call that stores no turn yet: create the conversation with its owner, on a store with logs."""
        if keeps_logs(self.store):
            new = Log(begin_head(key, clock_of(self.store).now(), owner))
            if not await self.store.create(key, new) and owner is not None:
                await self.store.change(key, lambda head: claimed(head, owner))

    async def keep(self, key: ChatMemoryKey) -> None:
        """Note that a conversation is used, so that it expires later, on a store with logs.

        Raises `MemoryLeaseLostError` if this process held it and has lost it.
        """
        if keeps_logs(self.store):
            await self.store.write(key, LogWrite())

    async def store_beans(self, key: ChatMemoryKey, beans: Mapping[str, Any], owner: Owner | None = None) -> None:
        """Store the JSON values of beans outside of calls. `owner` is that of a conversation that begins with them."""
        if keeps_logs(self.store):
            await self.store.write(key, LogWrite(turn=Turn(beans=beans), owner=owner))

    async def note(self, key: ChatMemoryKey, excerpt: Excerpt, usage: TokenUsage = NO_USAGE) -> None:
        """Store the notes of a view at once, without a turn: a new summary and its `usage`, or a cut."""
        await self._port.note(key, excerpt, usage)

    async def add(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
        """Append messages of the program, as one turn; it leaves the conversation then."""
        await self._port.add(key, messages)

    # --- turns that wait

    async def read_run(self, key: ChatMemoryKey, run_id: str) -> Turn | None:
        """Return what a run has stored in a conversation; None for nothing, and on a store without logs."""
        return await self.store.read_run(key, run_id) if keeps_logs(self.store) else None

    async def end_waiting(self, key: ChatMemoryKey, run_id: str, state: TurnState) -> bool:
        """Let the turn of a run that waits end in this state; return False if it does not wait. Takes no lock."""
        turn = await self.read_run(key, run_id)
        if turn is None or turn.state != "waiting" or not turn.counts:
            return False
        await self.write(key, replace(turn, id=f"{turn.id}:{state}", state=state, note=None, beans={}))
        return True

    async def write(self, key: ChatMemoryKey, turn: Turn, owner: Owner | None = None) -> None:
        """Append a turn of a run that nobody executes, or replace it; without the lock, so notes of views stay."""
        assert keeps_logs(self.store)
        if turn.messages or turn.beans:
            await self.store.write(key, LogWrite(turn=turn, owner=owner))


def _reset(token: Any) -> None:
    with suppress(ValueError):  # a stream may be closed in another context than the one it started in
        _held.reset(token)


# --- the two kinds of stores


@dataclass(frozen=True, slots=True)
class AppendedTurn:
    """A turn to append, and what was known when its call began; see `ChatMemories.append`."""

    turn: Turn
    excerpt: Excerpt
    view: View | OwnView
    owner: Owner | None = None
    may_be_stored: bool = False
    leaves: bool = False


class MemoryPort(Protocol):
    """What services need of a store: load what a view sends, append one turn, with its id."""

    async def load(self, key: ChatMemoryKey, view: View | OwnView, without_run: str | None = None) -> Excerpt:
        """Return what a view sends, without what a run has stored."""
        ...

    async def append(self, key: ChatMemoryKey, appended: AppendedTurn) -> tuple[Message, ...]:
        """Append a turn. Returns what is sent then; nothing if it was there."""
        ...

    async def note(self, key: ChatMemoryKey, excerpt: Excerpt, usage: TokenUsage) -> None:
        """Store the notes of a view."""
        ...

    async def add(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
        """Append messages of the program, which leaves the conversation then."""
        ...


class StoredLogs:
    """Conversations in a store that keeps whole logs."""

    def __init__(self, store: LogStore) -> None:
        self._store = store

    async def load(self, key: ChatMemoryKey, view: View | OwnView, without_run: str | None = None) -> Excerpt:
        """Read the turns that the view needs."""
        if isinstance(view, View):
            log = await self._store.read_since(key, view.first_turn)
        else:
            log = await self._store.read_newest(key, NEWEST)
        if log is not None and isinstance(view, Window):
            log = await self._fill(key, log, view)
        if log is None:
            return Excerpt()
        if without_run is not None:
            log = replace(log, turns=tuple(each for each in log.turns if each.run_id != without_run))
        return view.excerpt(log)

    async def _fill(self, key: ChatMemoryKey, log: Log, window: Window) -> Log | None:
        """Read backwards, more each time, until there is enough for a window that has not been cut yet."""
        messages, before = FEW, -1
        read: Log | None = log
        while read is not None and len(read.turns) > before and not window.has_enough(read):
            before = len(read.turns)
            read = await self._store.read_newest(key, messages)
            messages *= 4
        return read

    async def append(self, key: ChatMemoryKey, appended: AppendedTurn) -> tuple[Message, ...]:
        """Append a turn with the notes of the view."""
        turn, excerpt, owner, leaves = appended.turn, appended.excerpt, appended.owner, appended.leaves
        if isinstance(appended.view, NoMessages):
            if turn.beans:
                await self._store.write(key, LogWrite(turn=only_beans(turn), owner=owner, leaves=leaves))
            return ()
        await self._store.write(key, LogWrite(turn=turn, notes=excerpt.notes, owner=owner, leaves=leaves))
        return (*excerpt.messages, *turn.messages)

    async def note(self, key: ChatMemoryKey, excerpt: Excerpt, usage: TokenUsage) -> None:
        """Store the notes of a view."""
        await self._store.write(key, LogWrite(notes=excerpt.notes, usage=usage))

    async def add(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
        """Append messages as one turn."""
        if not messages:
            return
        await self._store.write(key, LogWrite(turn=Turn(messages=tuple(messages)), leaves=True))


class StoredMessages:
    """Conversations in a store of the three methods of `ChatMemoryStore`, which keeps what is sent and no more.

    A summary is its first message: one of the user, with an attribute.
    """

    def __init__(self, store: ChatMemoryStore) -> None:
        self._store = store

    async def load(self, key: ChatMemoryKey, view: View | OwnView, without_run: str | None = None) -> Excerpt:
        """Return what the view sends of the stored messages."""
        summary, messages = _split_summary(await self._store.get_messages(key))
        return view.excerpt(_log_of(key, messages, summary))

    async def append(self, key: ChatMemoryKey, appended: AppendedTurn) -> tuple[Message, ...]:
        """Store what the view keeps of the messages with the turn."""
        excerpt, new = appended.excerpt, appended.turn.messages
        if not new or isinstance(appended.view, NoMessages):
            return ()
        before = _kept_of(excerpt)
        if appended.may_be_stored and before[-len(new) :] == new:
            return ()
        view, summary, messages = appended.view, excerpt.notes.summary, (*before, *new)
        if isinstance(view, View):
            messages = _kept_of(view.excerpt(_log_of(key, messages, summary)))
        else:
            messages = tuple(view.chooses.newest((*excerpt.messages, *new)))
        await self._store.update_messages(key, _join_summary(summary, messages))
        return messages

    async def note(self, key: ChatMemoryKey, excerpt: Excerpt, usage: TokenUsage) -> None:
        """Store a summary with what follows it; a cut is not stored."""
        if excerpt.notes.summary is not None:
            await self._store.update_messages(key, _join_summary(excerpt.notes.summary, _kept_of(excerpt)))

    async def add(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
        """Append messages to those that are stored."""
        before = await self._store.get_messages(key)
        await self._store.update_messages(key, (*before, *messages))


_SUMMARY = "toolbox_summary"
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


def _split_summary(stored: Sequence[Message]) -> tuple[str | None, tuple[Message, ...]]:
    first = stored[0] if stored else None
    if isinstance(first, UserMessage) and first.attributes.get(_SUMMARY):
        return first.text, tuple(stored[1:])
    return None, tuple(stored)


def _join_summary(summary: str | None, messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(messages) if summary is None else (UserMessage(summary, None, {_SUMMARY: True}), *messages)


def _log_of(key: ChatMemoryKey, messages: Sequence[Message], summary: str | None) -> Log:
    """Return stored messages as a log of one turn. Nobody knows what was before them."""
    turn = Turn(id="", messages=tuple(messages), at=_LONG_AGO, start=1)
    head = replace(begin_head(key, _LONG_AGO), notes=ViewNotes(summary=summary), messages=len(messages))
    return Log(head, (turn,) if messages else ())


def _kept_of(excerpt: Excerpt) -> tuple[Message, ...]:
    """Return the messages from where what is sent begins, as they are stored."""
    notes = excerpt.notes
    begin = notes.begin if notes.begin is not None else notes.summarized
    return tuple(message for each in since(excerpt.turns, begin) for message in each.shown)


# --- the access of programs


class MemoryHost(Protocol):
    """Provides the conversations of a container, and runs work on the event loop of their store."""

    async def memories(self) -> ChatMemories:
        """Return the conversations."""
        ...

    async def on_own_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await `work()` on the loop that the store's connections belong to."""
        ...

    async def cancel_waiting(self, key: ChatMemoryKey, reason: str) -> None:
        """Cancel the runs of a conversation that wait."""
        ...


DELETED = "its conversation was deleted"
"""The reason in the history of a run that ends because somebody deletes its conversation."""


class ChatMemory:
    """Reads and changes one conversation: `await container.chat_memory(Assistant, id).messages()`.

    You can await its methods on any event loop. The store is used on the container's loop.
    """

    def __init__(self, host: MemoryHost, key: ChatMemoryKey) -> None:
        self._host, self._key = host, key

    async def messages(self) -> list[Message]:
        """Return the stored messages, oldest first."""

        async def read() -> list[Message]:
            memories = await self._host.memories()
            return list(await memories.store.get_messages(self._key))

        return await self._host.on_own_loop(read)

    async def add(self, *messages: Message) -> None:
        """Append messages. Waits until a running call of the conversation has ended.

        Raises `TypeError` for anything but messages.
        """
        check_messages(messages, "ChatMemory.add")
        program = Program()

        async def write() -> None:
            memories = await self._host.memories()
            async with memories.enter(self._key, program):
                await memories.add(self._key, messages)

        await self._host.on_own_loop(write)

    async def clear(self) -> None:
        """Delete the conversation, and cancel its runs that wait. Waits until a running call of it has ended."""
        program = Program()

        async def delete() -> None:
            memories = await self._host.memories()
            async with memories.enter(self._key, program):
                await self._host.cancel_waiting(self._key, DELETED)
                await memories.store.delete_messages(self._key)

        await self._host.on_own_loop(delete)
