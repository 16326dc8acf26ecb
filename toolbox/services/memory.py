"""Conversations: stores, the order of calls, and `ChatMemory`, the access to one conversation.

Not here: which messages are kept (`windows`), the order of calls of several processes (`conversation_leases`), stores
in databases (`sql`, `redis`), loading and storing a call's messages (`layers`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock, current_thread
from typing import Any, Protocol, TypeAlias, TypeVar
from weakref import ReferenceType, WeakValueDictionary, ref

from ..chat import Message
from ..errors import InvalidMemoryIdError, MemoryInUseError
from ..execution.threads import keep_inherited, on_event_loop, register_for_fork
from ..service_names import stored_name
from .windows import Window, keep_newest, repaired, without_cut_turn

T = TypeVar("T")


LONGEST_MEMORY_ID = 2048
"""The maximum length of a memory id in bytes, because PostgreSQL cannot index much more."""


@dataclass(frozen=True, slots=True)
class ChatMemoryKey:
    """The key of a conversation: the stored name of the service, and the memory id as text."""

    service: str
    memory_id: str

    def __post_init__(self) -> None:
        """Raise `InvalidMemoryIdError` for an id that a database cannot store."""
        text = str(self.memory_id)
        if "\0" in text:
            raise InvalidMemoryIdError(self.service, text, "it contains a NUL character")
        try:
            size = len(text) if text.isascii() else len(text.encode())
        except UnicodeEncodeError:
            reason = "it contains a lone surrogate, which is not a valid character"
            raise InvalidMemoryIdError(self.service, text, reason) from None
        if size > LONGEST_MEMORY_ID:
            raise InvalidMemoryIdError(self.service, text, f"it has {size} bytes, more than {LONGEST_MEMORY_ID}")

    @classmethod
    def of(cls, service: type[Any], memory_id: object) -> ChatMemoryKey:
        """Return the key of a conversation of this service.

        `memory_id` becomes text with `str`. Raises `InvalidMemoryIdError` for a NUL character, for a lone surrogate,
        and for more than 2,048 bytes of UTF-8.
        """
        return cls(stored_name(service), str(memory_id))


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


class InMemoryChatMemoryStore(ChatMemoryStore):
    """Stores conversations in the memory of this process. This is the default store."""

    def __init__(self) -> None:
        self._conversations: dict[ChatMemoryKey, tuple[Message, ...]] = {}

    async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
        return self._conversations.get(key, ())

    async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
        self._conversations[key] = tuple(messages)

    async def delete_messages(self, key: ChatMemoryKey) -> None:
        self._conversations.pop(key, None)


# --- turns


class Turns:
    """Lets one caller at a time into each conversation, in order of arrival; works across event loops."""

    def __init__(self) -> None:
        self.renew_after_fork()
        register_for_fork(self)

    def renew_after_fork(self) -> None:
        """Forget all turns: the calls continue in the parent process only."""
        self._lock = Lock()
        self._waiting: dict[ChatMemoryKey, deque[Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, key: ChatMemoryKey) -> AsyncIterator[None]:
        ahead: Future[None] | None = None
        with self._lock:
            if (queue := self._waiting.get(key)) is None:
                self._waiting[key] = deque()
            else:
                ahead = Future()
                queue.append(ahead)
        if ahead is not None:
            await self._wait(key, ahead)
        try:
            yield
        finally:
            self._pass_on(key)

    async def _wait(self, key: ChatMemoryKey, ahead: Future[None]) -> None:
        try:
            await asyncio.wrap_future(ahead)
        except BaseException:
            with self._lock:
                if ahead in (queue := self._waiting.get(key, deque())):
                    queue.remove(ahead)
                    raise
            self._pass_on(key)  # the turn arrived at the moment of the cancellation
            raise

    def _pass_on(self, key: ChatMemoryKey) -> None:
        with self._lock:
            queue = self._waiting.get(key)
            if queue is None:  # this process was forked during the turn
                return
            if queue:
                following = queue.popleft()
            else:
                del self._waiting[key]
                return
        # A caller that is cancelled at this moment passes its turn on itself (`_wait`).
        if following.set_running_or_notify_cancel():
            following.set_result(None)


class _TurnsOfStores:
    """The turns of each store. Containers that share a store share its turns."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._turns: WeakValueDictionary[int, Turns] = WeakValueDictionary()
        register_for_fork(self)

    def renew_after_fork(self) -> None:
        self._lock = Lock()

    def of(self, store: ChatMemoryStore) -> Turns:
        """Return the turns in this store."""
        with self._lock:
            turns = self._turns.get(id(store))
            if turns is None:
                turns = self._turns[id(store)] = Turns()
            return turns


_turns = _TurnsOfStores()


Caller: TypeAlias = "ReferenceType[Any]"
"""The task, or the thread without a loop, that waits for a call or reads its stream."""


def caller_here() -> Caller:
    """Return the current task or thread."""
    return ref((asyncio.current_task() if on_event_loop() else None) or current_thread())


class Calling(Protocol):
    """A call that takes a turn. `caller` is the current reader of a stream, or None without a reader."""

    caller: Caller | None


class _Program:
    """The program itself as the caller, for `ChatMemory`."""

    def __init__(self) -> None:
        self.caller: Caller | None = caller_here()


class _Turn:
    """The turn of one call in a conversation. `ended` is True afterwards, for tasks that outlive the call."""

    __slots__ = ("ended", "key", "store")

    def __init__(self, store: ChatMemoryStore, key: ChatMemoryKey) -> None:
        self.store, self.key, self.ended = store, key, False


_held: ContextVar[tuple[_Turn, ...]] = ContextVar("toolbox.conversations", default=())


class ChatMemories:
    """The conversations of one container: takes turns, loads messages."""

    def __init__(self, store: ChatMemoryStore) -> None:
        self.store = store
        self._turns = _turns.of(store)
        self._under_way: dict[ChatMemoryKey, Calling] = {}
        register_for_fork(self)

    def renew_after_fork(self) -> None:
        """Forget the current calls, which continue in the parent process."""
        keep_inherited(self._under_way)
        self._under_way = {}

    def lock(self, key: ChatMemoryKey) -> AbstractAsyncContextManager[object]:
        """Return the lock of a conversation: the store's own lock, or one in this process."""
        lock: Callable[[ChatMemoryKey], AbstractAsyncContextManager[object]] | None
        lock = getattr(self.store, "lock", None)
        return lock(key) if lock is not None else self._turns.turn(key)

    @asynccontextmanager
    async def turn(self, key: ChatMemoryKey, call: Calling | None = None) -> AsyncIterator[None]:
        """Take the turn of `call`, or of the program itself, in a conversation.

        Raises `MemoryInUseError` for a call that would wait for itself, because it comes from a tool of the current
        call, or from the reader of its stream.
        """
        call = call or _Program()
        held = tuple(each for each in _held.get() if not each.ended)
        other = self._under_way.get(key)
        reads_it = other is not None and other.caller is not None and other.caller is call.caller
        if reads_it or any(each.key == key and each.store is self.store for each in held):
            raise MemoryInUseError(key.service, key.memory_id)
        async with self.lock(key):
            turn = _Turn(self.store, key)
            token = _held.set((*held, turn))
            self._under_way[key] = call
            try:
                yield
            finally:
                self._under_way.pop(key, None)
                turn.ended = True
                _reset(token)

    async def load(self, key: ChatMemoryKey, window: Window) -> tuple[Message, ...]:
        """Return the messages in the window, with missing tool results added."""
        stored = repaired(without_cut_turn(window, await self.store.get_messages(key)))
        return repaired(keep_newest(window, stored))


def _reset(token: Any) -> None:
    with suppress(ValueError):  # a stream may be closed in another context than the one it started in
        _held.reset(token)


class MemoryHost(Protocol):
    """Provides the conversations of a container, and runs work on the event loop of their store."""

    async def memories(self) -> ChatMemories:
        """Return the conversations."""
        ...

    async def on_own_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await `work()` on the loop that the store's connections belong to."""
        ...


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
        """Append messages. Waits until a running call of the conversation has ended."""
        program = _Program()

        async def write() -> None:
            memories = await self._host.memories()
            async with memories.turn(self._key, program):
                before = await memories.store.get_messages(self._key)
                await memories.store.update_messages(self._key, (*before, *messages))

        await self._host.on_own_loop(write)

    async def clear(self) -> None:
        """Delete the conversation. Waits until a running call of the conversation has ended."""
        program = _Program()

        async def delete() -> None:
            memories = await self._host.memories()
            async with memories.turn(self._key, program):
                await memories.store.delete_messages(self._key)

        await self._host.on_own_loop(delete)
