"""Stores of conversations: the protocol `ChatMemoryStore`, those that keep whole logs, and the one in memory.

Not here: stores in databases (`sql`, `redis`), the order of calls (`queues`, `leases`), using a store (`memories`).
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from threading import Lock
from typing import Protocol, TypeGuard

from ..chat import Message
from ..execution.threads import register_for_fork
from ..introspection import is_count
from ..store_clock import StoreClock
from .keys import ChatMemoryKey, Owner
from .log import (
    Head,
    Log,
    LogWrite,
    Replaced,
    Turn,
    before_entry,
    begin_head,
    choose_newest,
    emptied,
    head_after,
    head_before,
    place_of_entry,
    place_of_user_message,
    read_entry_id,
    state_after,
    with_beans_of,
)
from .queues import queues_of


class ChatMemoryStore(Protocol):
    """Stores conversations. Register a bean of this type, and all services of the container use it.

        class Files(ChatMemoryStore):  # implement the three methods
            ...

    A store can also have these, which the container uses if they exist:

    - `lock(key)`: an async context manager that lets one caller at a time into a conversation across processes. Without
      it, calls wait for each other in this process only. If another process can take the lock from a caller, as it can
      take a lease that has ended, `update_messages` and `delete_messages` of that caller raise `MemoryLeaseLostError`
      and write nothing.
    - `open_at_start()`: checks or prepares the store when the container starts.
    - `stop()` and `ready()`, as every bean: the end of the application, and the readiness check.
    - `store_tables`: what `toolbox migrate` migrates.

    Methods are awaited on the event loop: a store does blocking work in a thread, for example with `asyncio.to_thread`.
    `toolbox.testing.conversation_store_checks` has a check for each promise, for a store of your own; but no check can
    end a lease for every kind of store, so test `MemoryLeaseLostError` yourself.
    """

    async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
        """Return the stored messages, oldest first; an empty sequence for an unknown conversation."""
        ...

    async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
        """Replace the stored messages by `messages`, oldest first; store them if the conversation is unknown."""
        ...

    async def delete_messages(self, key: ChatMemoryKey) -> None:
        """Delete the conversation; do nothing for an unknown one."""
        ...


@dataclass(frozen=True, slots=True)
class Deleted:
    """What was deleted with conversations: how many of each."""

    conversations: int = 0
    messages: int = 0
    beans: int = 0

    def __add__(self, other: Deleted) -> Deleted:
        return Deleted(
            self.conversations + other.conversations, self.messages + other.messages, self.beans + other.beans
        )


class LogStore(ChatMemoryStore):
    """A store that keeps the whole log of each conversation. For the stores of toolbox; not a protocol for programs.

    A key may have former names: what lies under one of them is found, if nothing lies under the key itself, and moves
    with the next turn. Writes of a process that holds the conversation (`lock`) raise `MemoryLeaseLostError`, and write
    nothing, if it has lost it. Reading takes no lock, and sees whole turns.
    """

    # --- reading

    @abstractmethod
    async def read_since(self, key: ChatMemoryKey, first: Callable[[Head], int]) -> Log | None:
        """Return the log from the turn with a number on, which `first` decides; None for an unknown conversation.

        With the turns that have no messages: `fork_log` needs their beans.
        """
        ...

    @abstractmethod
    async def read_newest(self, key: ChatMemoryKey, messages: int, before: str | None = None) -> Log | None:
        """Return the newest turns with at least so many messages, or all. None for an unknown conversation.

        With `before`, only what stands before this entry counts. Raises `ValueError` for an unknown entry.
        """
        ...

    @abstractmethod
    async def read_run(self, key: ChatMemoryKey, run_id: str) -> Turn | None:
        """Return what a run has stored in a conversation, also if a rewind has hidden it; None for nothing."""
        ...

    @abstractmethod
    async def find_heads(
        self,
        *,
        owner: Owner | None = None,
        services: Collection[str] | None = None,
        limit: int,
        before: tuple[datetime, str] | None = None,
    ) -> list[Head]:
        """Return the heads that match all given conditions, by `updated_at` and `id`, both descending.

        They have neither notes nor beans. Raises `IllegalConfigurationError` in a store that cannot list.
        """
        ...

    # --- writing

    @abstractmethod
    async def write(self, key: ChatMemoryKey, write: LogWrite) -> None:
        """Store a turn and what belongs to it, whole or not at all. Costs the same for a log of any length.

        Creates the conversation if it is unknown and there is a turn. Does nothing if the id of the turn is there.
        """
        ...

    @abstractmethod
    async def change(self, key: ChatMemoryKey, change: Callable[[Head], Head]) -> Head | None:
        """Change the head without taking the lock: the title, the owner, who is in charge. Returns the new one.

        None for an unknown conversation. `change` may be called again, with a newer head.
        """
        ...

    @abstractmethod
    async def rewind(self, key: ChatMemoryKey, entry: str) -> Head | None:
        """Hide everything from a user message on; None for an unknown conversation. Raises `ValueError`."""
        ...

    @abstractmethod
    async def create(self, key: ChatMemoryKey, log: Log) -> bool:
        """Store a whole log. Returns False, and stores nothing, if there is a conversation already."""
        ...

    @abstractmethod
    async def replace(self, key: ChatMemoryKey, turn: Turn) -> None:
        """Replace all turns by one, and forget the notes of the view."""
        ...

    @abstractmethod
    async def delete(self, key: ChatMemoryKey) -> Deleted:
        """Delete the conversation with all that belongs to it, also what lies under former names."""
        ...

    # --- one caller at a time

    @abstractmethod
    def lock(self, key: ChatMemoryKey, *, wait: bool = True) -> AbstractAsyncContextManager[object]:
        """Lock the conversation under this key for one caller at a time; former names are locked by themselves.

        With `wait=False`, raises `ConversationBusyError` if another caller has it.
        """
        ...

    @abstractmethod
    async def holder(self, key: ChatMemoryKey) -> str | None:
        """Return a text that is different for each lock of the conversation; None if nobody holds it."""
        ...

    @abstractmethod
    async def ask_to_stop(self, key: ChatMemoryKey, by: str | None) -> bool:
        """Leave the wish to stop for the one who holds the conversation. Returns False if nobody does."""
        ...

    @abstractmethod
    async def wishes(self) -> Mapping[ChatMemoryKey, str | None]:
        """Return the wishes to stop the conversations that this object holds, and by whom, with one look."""
        ...

    # --- ChatMemoryStore

    async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
        """Return all messages of the log, oldest first."""
        log = await self.read_since(key, lambda head: 0)
        return () if log is None else _messages_of(log)

    async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
        """Append what is new if `messages` begin with the whole log; replace the log otherwise.

        Raises `MemoryLeaseLostError` if another process has the conversation.
        """
        log = await self.read_since(key, lambda head: 0)
        before, after = () if log is None else _messages_of(log), tuple(messages)
        if after[: len(before)] == before:
            rest = after[len(before) :]
            await self.write(key, LogWrite(turn=Turn(messages=rest) if rest or not before else None))
        else:
            await self.replace(key, Turn(messages=after, beans={} if log is None else log.head.beans))

    async def delete_messages(self, key: ChatMemoryKey) -> None:
        """Delete the conversation. Raises `MemoryLeaseLostError` if another process has it."""
        await self.delete(key)


def _messages_of(log: Log) -> tuple[Message, ...]:
    return tuple(message for turn in log.turns for message in turn.shown)


async def find_head(store: LogStore, key: ChatMemoryKey) -> Head | None:
    """Return the head of a conversation; None for an unknown one."""
    log = await store.read_since(key, lambda head: head.next_number)
    return None if log is None else log.head


def keeps_logs(store: ChatMemoryStore) -> TypeGuard[LogStore]:
    """Return True for a store with logs. A subclass that changes how messages are kept has only messages."""
    return is_log_store(type(store))


def is_log_store(cls: type[object]) -> bool:
    """Return True if the stores of a class keep logs."""
    methods = ("get_messages", "update_messages", "delete_messages")
    return issubclass(cls, LogStore) and all(getattr(cls, each) is getattr(LogStore, each) for each in methods)


# --- in memory


@dataclass(slots=True)
class _Kept:
    """A log in memory: the head, turns by number, and their numbers by id and by run.

    `size` is the number of messages, where a turn without any counts as one. `dropped` has the state after the turns
    that are gone, so that a rewind finds it.
    """

    head: Head
    dropped: Turn = field(default_factory=lambda: Turn(id=""))
    turns: dict[int, Turn] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)
    size: int = 0

    @classmethod
    def of(cls, log: Log) -> _Kept:
        kept = cls(log.head)
        for each in log.turns:
            kept.add(each)
        return kept

    def add(self, turn: Turn) -> None:
        self.turns[turn.number] = turn
        self.ids[turn.id] = turn.number
        if turn.run_id is not None:
            self.runs[turn.run_id] = turn.number
        self.size += len(turn.messages) or 1

    def remove(self, number: int) -> Turn:
        turn = self.turns.pop(number)
        del self.ids[turn.id]
        if turn.run_id is not None and self.runs.get(turn.run_id) == number:
            del self.runs[turn.run_id]
        self.size -= len(turn.messages) or 1
        return turn

    def trim(self, most: int) -> None:
        """Drop the oldest messages, so that at most so many are kept."""
        while (excess := self.size - most) > 0:
            turn = next(iter(self.turns.values()))
            shown = len(turn.shown)
            if excess >= len(turn.messages):
                self._drop(turn)
            else:
                rest = replace(turn, messages=turn.messages[excess:], start=turn.start + excess)
                self.turns[turn.number] = rest
                self.size -= excess
                shown -= len(rest.shown)
            self.head = replace(self.head, messages=self.head.messages - shown)

    def _drop(self, turn: Turn) -> None:
        self.remove(turn.number)
        if turn.counts:
            beans, in_charge = state_after((self.dropped, turn))
            self.dropped = replace(self.dropped, beans=beans, in_charge=in_charge, at=turn.at)

    def turn_of(self, entry: str) -> Turn | None:
        return self.turns.get(self.ids.get(read_entry_id(entry)[0], 0))

    def seen(self, first: int = 0) -> tuple[Turn, ...]:
        """Return the turns from a number on that are not hidden as a whole."""
        has_state = self.dropped.beans or self.dropped.in_charge
        turns = (self.dropped, *self.turns.values()) if has_state else self.turns.values()
        return tuple(each for each in turns if each.number >= first and each.counts)


@dataclass(slots=True)
class _Holding:
    """Who holds a conversation, and the wish to stop it."""

    token: str = field(default_factory=lambda: secrets.token_hex(16))
    is_to_stop: bool = False
    by: str | None = None


class InMemoryChatMemoryStore(LogStore):
    """Stores conversations in the memory of this process. This is the default store.

    It keeps the newest `max_messages` messages of each conversation. Raises `ValueError` if they are fewer than 1.
    """

    def __init__(self, *, max_messages: int = 1000) -> None:
        if not is_count(max_messages, 1):
            raise ValueError(f"invalid max_messages={max_messages!r}; use 1 or more")
        self.clock = StoreClock()
        self._most = max_messages
        self._logs: dict[ChatMemoryKey, _Kept] = {}
        self.renew_after_fork()
        register_for_fork(self)

    def renew_after_fork(self) -> None:
        """Forget who holds conversations: the calls continue in the parent process only."""
        self._guard = Lock()
        self._held: dict[ChatMemoryKey, _Holding] = {}

    def _find(self, key: ChatMemoryKey) -> _Kept | None:
        return next((self._logs[each] for each in key.places if each in self._logs), None)

    # --- reading

    async def read_since(self, key: ChatMemoryKey, first: Callable[[Head], int]) -> Log | None:
        with self._guard:
            kept = self._find(key)
            return None if kept is None else Log(kept.head, kept.seen(first(kept.head)))

    async def read_newest(self, key: ChatMemoryKey, messages: int, before: str | None = None) -> Log | None:
        with self._guard:
            if (kept := self._find(key)) is None:
                return None
            turns = tuple(each for each in kept.seen() if each.shown)
            if before is not None:
                earlier = before_entry(turns, place_of_entry(kept.turn_of(before), before))
                turns = tuple(each for each in earlier if each.shown)
            first = choose_newest(((each.number, len(each.shown)) for each in reversed(turns)), messages)
            return Log(kept.head, () if first is None else tuple(each for each in turns if each.number >= first))

    async def read_run(self, key: ChatMemoryKey, run_id: str) -> Turn | None:
        with self._guard:
            kept = self._find(key)
            return None if kept is None else kept.turns.get(kept.runs.get(run_id, 0))

    async def find_heads(
        self,
        *,
        owner: Owner | None = None,
        services: Collection[str] | None = None,
        limit: int,
        before: tuple[datetime, str] | None = None,
    ) -> list[Head]:
        with self._guard:
            heads = [each.head for each in self._logs.values()]
        found = [
            each
            for each in heads
            if (owner is None or each.owner == owner)
            and (services is None or each.key.service in services)
            and (before is None or (each.updated_at, each.id) < before)
        ]
        return sorted(found, key=lambda each: (each.updated_at, each.id), reverse=True)[:limit]

    # --- writing

    async def write(self, key: ChatMemoryKey, write: LogWrite) -> None:
        now = self.clock.now()
        with self._guard:
            kept = self._find(key)
            turn = write.turn
            if kept is None:
                if turn is None:
                    return
                kept = self._logs[key.places[0]] = _Kept(begin_head(key, now, write.owner))
            elif turn is not None and turn.id in kept.ids:
                return
            replaced = Replaced()
            if turn is not None and (number := kept.runs.get(turn.run_id or "")) is not None:
                before = kept.remove(number)
                replaced = Replaced(len(before.shown), before.usage)
                turn = with_beans_of(turn, before.beans, kept.head)
            if turn is not None:
                kept.add(replace(turn, number=kept.head.next_number, at=now))
                self._move(kept, key)
            kept.head = head_after(kept.head, write, now, replaced)
            kept.trim(self._most)

    def _move(self, kept: _Kept, key: ChatMemoryKey) -> None:
        """Move what lies under a former name to the present one."""
        if kept.head.key != key:
            del self._logs[kept.head.key]
            kept.head = replace(kept.head, key=key.places[0])
            self._logs[kept.head.key] = kept

    async def change(self, key: ChatMemoryKey, change: Callable[[Head], Head]) -> Head | None:
        with self._guard:
            if (kept := self._find(key)) is None:
                return None
            kept.head = change(kept.head)
            return kept.head

    async def rewind(self, key: ChatMemoryKey, entry: str) -> Head | None:
        with self._guard:
            if (kept := self._find(key)) is None:
                return None
            place = place_of_user_message(kept.turn_of(entry), entry)
            after = [each for each in kept.turns.values() if each.number >= place.turn]
            hidden = sum(len(each.shown) for each in after)
            for each in after:
                index = place.index if each.number == place.turn else each.start
                kept.turns[each.number] = changed = replace(each, hidden_from=min(index, each.end))
                hidden -= len(changed.shown)
            before = [each for each in (kept.dropped, *kept.turns.values()) if each.number < place.turn and each.counts]
            kept.head = head_before(kept.head, place, hidden, before)
            return kept.head

    async def create(self, key: ChatMemoryKey, log: Log) -> bool:
        with self._guard:
            if self._find(key) is not None:
                return False
            kept = self._logs[log.head.key] = _Kept.of(log)
            kept.trim(self._most)
            return True

    async def replace(self, key: ChatMemoryKey, turn: Turn) -> None:
        with self._guard:
            if (kept := self._find(key)) is not None:
                for number in [*kept.turns]:
                    kept.remove(number)
                kept.head = emptied(kept.head)
        await self.write(key, LogWrite(turn=turn))

    async def delete(self, key: ChatMemoryKey) -> Deleted:
        with self._guard:
            found = [self._logs.pop(each) for each in key.places if each in self._logs]
        return sum((Deleted(1, each.head.messages, len(each.head.beans)) for each in found), Deleted())

    # --- one caller at a time

    @asynccontextmanager
    async def lock(self, key: ChatMemoryKey, *, wait: bool = True) -> AsyncIterator[None]:
        """Lock the conversation for one caller at a time."""
        async with queues_of(self).enter(key, wait=wait):
            self._held[key] = _Holding()
            try:
                yield
            finally:
                self._held.pop(key, None)

    async def holder(self, key: ChatMemoryKey) -> str | None:
        found = self._held.get(key)
        return None if found is None else found.token

    async def ask_to_stop(self, key: ChatMemoryKey, by: str | None) -> bool:
        if (found := self._held.get(key)) is None:
            return False
        found.is_to_stop, found.by = True, by
        return True

    async def wishes(self) -> Mapping[ChatMemoryKey, str | None]:
        return {key: each.by for key, each in [*self._held.items()] if each.is_to_stop}
