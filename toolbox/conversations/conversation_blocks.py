"""`container.conversation_scope(…)`: a block in which a conversation is held, and the beans of its scope can be used.

Not here: the scope (`di.scopes`), its beans (`di.stored_beans`), who may hold a conversation and where it is stored,
which the container's host decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Hashable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..di.closing import OwnTask
from ..di.scopes import ConversationScope, RequestScope
from ..di.stored_beans import StoredBeans
from ..execution.cancellation import finish_before_cancellation
from ..execution.threads import refuse_idle, refuse_on_event_loop

if TYPE_CHECKING:
    from ..di.wiring import Wiring

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HeldConversation:
    """A conversation that nobody else holds.

    `key` is that of its scope: calls that join the block find it by this key. `loaded` are the JSON values of its
    beans, by their stored names, and `room` is the object that the block gets. `store` stores the JSON values of beans
    that changed, and creates the conversation if it is unknown.
    """

    key: Hashable
    loaded: Mapping[str, Any]
    room: Any
    store: Callable[[Mapping[str, Any]], Coroutine[Any, Any, None]]


Hold: TypeAlias = Callable[[], AbstractAsyncContextManager[HeldConversation]]
"""Holds a conversation until its end: takes the lock, checks the owner and what is suspended, and loads the beans.

It is entered and left in one task on the container's loop, with the context variables of the block's opener, and gets
the error of the block.
"""

Track: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Lets the container wait for the current task, which runs on its loop, when it stops, and cancel it in the end."""

AtHome: TypeAlias = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Coroutine[Any, Any, Any]]
"""Awaits work on the container's loop."""


class ConversationBlock:
    """Holds a conversation in a block, with `async with` or, outside of event loops, with `with`.

    What changed of the beans is stored at the end, unless the block raises. Calls of the conversation inside the block
    join its scope. A request scope is opened if none is active: after the owner was checked, because outside of
    requests the program itself uses the conversation.
    """

    def __init__(self, wiring: Wiring, hold: Hold, at_home: AtHome, track: Track) -> None:
        self._wiring, self._hold, self._at_home, self._track = wiring, hold, at_home, track
        self._awaiting = self._open_tracked()
        self._waiting = self._open_waiting()

    async def __aenter__(self) -> Any:
        return await self._awaiting.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._awaiting.__aexit__(kind, error, trace)

    def __enter__(self) -> Any:
        refuse_on_event_loop("conversation_scope")
        refuse_idle(self._wiring.loop, "conversation_scope")
        return self._waiting.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.__exit__(kind, error, trace)

    @asynccontextmanager
    async def _open_tracked(self) -> AsyncIterator[Any]:
        # After the container has stopped, nothing could be stored, and the conversation would stay held.
        is_home = asyncio.get_running_loop() is self._wiring.loop
        with self._track() if is_home else nullcontext():
            async with self._open_awaiting() as room:
                yield room

    @asynccontextmanager
    async def _open_awaiting(self) -> AsyncIterator[Any]:
        task, held = await self._at_home(self._begin)
        try:
            async with AsyncExitStack() as scopes:
                if self._wiring.active_scope().request is None:
                    await scopes.enter_async_context(self._open_request())
                scope = await scopes.enter_async_context(self._open_scope(held))
                yield held.room
        except BaseException as error:
            await self._end_awaiting(task.close(error))
            raise
        await self._end_awaiting(_store_and_release(task, held, scope.beans))

    async def _end_awaiting(self, work: Coroutine[Any, Any, None]) -> None:
        # A client that leaves must not tear the write, or keep the conversation held.
        ending = self._at_home(lambda: work)
        await finish_before_cancellation(ending, self, self._wiring.stop_timeout)

    @contextmanager
    def _open_waiting(self) -> Iterator[Any]:
        task, held = self._wait_for(self._begin())
        try:
            with ExitStack() as scopes:
                if self._wiring.active_scope().request is None:
                    scopes.enter_context(self._open_request())
                scope = scopes.enter_context(self._open_scope(held))
                yield held.room
        except BaseException as error:
            self._wait_for(task.close(error))
            raise
        self._wait_for(_store_and_release(task, held, scope.beans))

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._wiring.loop is not None
        future = asyncio.run_coroutine_threadsafe(work, self._wiring.loop)
        try:
            return future.result()
        except BaseException:  # also a KeyboardInterrupt of this thread, after which nobody would use the conversation
            future.cancel()
            raise

    def _open_request(self) -> RequestScope:
        request = self._wiring.open_request({})
        request.is_of_program = True
        return request

    def _open_scope(self, held: HeldConversation) -> ConversationScope:
        return self._wiring.open_conversation(held.key, StoredBeans(held.loaded))

    async def _begin(self) -> tuple[OwnTask, HeldConversation]:
        """Hold the conversation in a task, because a block on a thread has none in which it could end."""
        task = OwnTask(self._live())
        return task, await task.open()

    async def _live(self) -> AsyncGenerator[HeldConversation, None]:
        async with self._hold() as held:
            yield held


async def _store_and_release(task: OwnTask, held: HeldConversation, beans: StoredBeans) -> None:
    """Store what changed, if anything did, and let others use the conversation."""
    try:
        if changed := beans.changed():
            await held.store(changed)
    except BaseException as error:
        await task.close(error)
        raise
    await task.close(None)
