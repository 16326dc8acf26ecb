"""Making a bean once per scope, whoever asks first: threads wait on events, tasks on futures.

Who makes it may fail or be cancelled: then a waiter takes over. A wait that could never end is an error with the path.
Not here: what a scope holds and how it ends (`scopes`), how a bean is made (`providers`, `resolvers`).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar, Token
from threading import get_ident
from typing import Any

from ..errors import IllegalConfigurationError, Problem, ScopeNotActiveError


class AsyncMaking:
    """A bean being made by a task: within which other making, and which beans it waits for meanwhile."""

    __slots__ = ("key", "outer", "scope", "waits")

    def __init__(self, scope: BeanMaking, key: int, outer: AsyncMaking | None) -> None:
        self.scope, self.key, self.outer = scope, key, outer
        self.waits: list[tuple[BeanMaking, int]] = []

    @property
    def chain(self) -> Iterator[AsyncMaking]:
        """This making and those it is part of, innermost first."""
        making: AsyncMaking | None = self
        while making is not None:
            yield making
            making = making.outer


_current_making: ContextVar[AsyncMaking | None] = ContextVar("toolbox.making", default=None)

# Only those who find a bean being made by someone else come here.
_waiting_lock = threading.Lock()
_waiting_threads: dict[int, tuple[BeanMaking, int]] = {}


def _forget_waiting() -> None:
    global _waiting_lock
    _waiting_lock = threading.Lock()
    _waiting_threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_waiting)


class BeanMaking:
    """The part of a scope in which its beans are made.

    `store` has the beans made, by key; `making` who is making one: a thread's ident, or an `AsyncMaking`.
    """

    store: dict[int, Any]
    making: dict[int, int | AsyncMaking]
    wakers: dict[int, list[Callable[[], None]]] | None
    closing = False

    def label(self, key: int) -> str:
        """The bean with this key, as a reader knows it."""
        raise NotImplementedError

    def ended(self, key: int | None) -> ScopeNotActiveError:
        """The error of who asks for something new when it is too late."""
        raise NotImplementedError

    def around(self) -> Iterator[BeanMaking]:
        """The scopes in which a thread may be making something at the same time, the longest-lived first."""
        raise NotImplementedError

    # --- making, without awaiting

    def create(self, key: int, make: Callable[[Any], Any]) -> Any:
        """The bean, made now by `make(self)` unless somebody else makes it meanwhile."""
        making, me = self.making, get_ident()
        # Only this thread itself can have put its own ident there, so the first look needs no lock.
        if (key in making or making.setdefault(key, me) != me) and self._wait_on_thread(key, me):
            return self.store[key]
        try:
            store = self.store
            if key in store:
                return store[key]
            if self.closing:
                raise self.ended(key)
            value = store[key] = make(self)
            return value
        finally:
            del making[key]
            if self.wakers is not None:
                self._wake(key)

    def _wait_on_thread(self, key: int, me: int) -> bool:
        """Whether the bean was made while this thread waited; else it is this thread's turn."""
        while True:
            made = threading.Event()
            with _waiting_lock:
                self._refuse_endless_wait(key, me)
                self._notify(key, made.set)
                if key not in self.making:
                    made.set()
                else:
                    _waiting_threads[me] = (self, key)
            made.wait()
            with _waiting_lock:
                _waiting_threads.pop(me, None)
                if key in self.store:
                    return True
                if self.making.setdefault(key, me) == me:
                    return False

    # --- making, with awaiting

    async def create_awaiting(self, key: int, make: Callable[[Any], Awaitable[Any]]) -> Any:
        """The bean, made now by awaiting `make(self)` unless somebody else makes it meanwhile."""
        me = AsyncMaking(self, key, _current_making.get())
        making = self.making
        while key in making or making.setdefault(key, me) is not me:
            await self.settled(key)
            if key in self.store:
                return self.store[key]
        try:
            if key in self.store:
                return self.store[key]
            if self.closing:
                raise self.ended(key)
            token = _current_making.set(me)
            try:
                value = await make(self)
            finally:
                _reset(_current_making, token)
            self.store[key] = value
            return value
        finally:
            del making[key]
            if self.wakers is not None:
                self._wake(key)

    async def settled(self, key: int) -> None:
        """Waits until nobody is making the bean any more."""
        loop = asyncio.get_running_loop()
        made = loop.create_future()

        def wake() -> None:
            if not made.done():
                made.set_result(None)

        def notify() -> None:
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:  # its loop is closed: nobody waits any more
                return

        within = _current_making.get()
        entry = (self, key)
        with _waiting_lock:
            self._refuse_endless_wait(key, within)
            self._notify(key, notify)
            if key not in self.making:
                wake()
            elif within is not None:
                for each in within.chain:
                    each.waits.append(entry)
        try:
            await made
        finally:
            if within is not None:
                with _waiting_lock:
                    for each in within.chain:
                        if entry in each.waits:
                            each.waits.remove(entry)

    # --- waiting for each other

    def _notify(self, key: int, waker: Callable[[], None]) -> None:
        if self.wakers is None:
            self.wakers = {}
        self.wakers.setdefault(key, []).append(waker)

    def _wake(self, key: int) -> None:
        with _waiting_lock:
            wakers = self.wakers.pop(key, ()) if self.wakers else ()
        for wake in wakers:
            wake()

    def _refuse_endless_wait(self, key: int, me: int | AsyncMaking | None) -> None:
        """Raises when whoever makes the bean waits, directly or through others, for the one who asks."""
        asking = list(me.chain) if isinstance(me, AsyncMaking) else [me if me is not None else get_ident()]
        todo: list[tuple[BeanMaking, int]] = [(self, key)]
        seen: set[tuple[int, int]] = set()
        while todo:
            scope, wanted = todo.pop()
            maker = scope.making.get(wanted)
            if maker is None or (id(scope), wanted) in seen:
                continue
            seen.add((id(scope), wanted))
            if maker in asking:
                raise self._endless(key, me)
            if isinstance(maker, AsyncMaking):
                todo += maker.waits
            elif maker in _waiting_threads:
                todo.append(_waiting_threads[maker])

    def _endless(self, key: int, me: int | AsyncMaking | None) -> IllegalConfigurationError:
        label = self.label
        if isinstance(me, AsyncMaking):
            path = [label(each.key) for each in me.chain][::-1]
        else:
            thread = me if me is not None else get_ident()
            path = [label(k) for scope in self.around() for k, maker in list(scope.making.items()) if maker == thread]
        if label(key) in path:
            path = path[path.index(label(key)) :]
        text = " -> ".join([*path, label(key)])
        problem = Problem(label(key), f"it needs itself while it is being made: {text}", "look it up after it was made")
        return IllegalConfigurationError([problem])


def _reset(variable: ContextVar[Any], token: Token[Any]) -> None:
    try:
        variable.reset(token)
    except ValueError:  # left in another context than entered, as when a coroutine is finalised
        return
