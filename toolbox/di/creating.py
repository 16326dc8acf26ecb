"""Creates each bean of a scope once, also if several threads and tasks request it at the same time.

One of them creates it; threads wait on events, tasks on futures. If the creator fails or is cancelled, a waiter takes
over. A wait that can never end raises an error with the path. Not here: how a bean is created (`resolvers`), the scopes
(`scopes`).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextvars import ContextVar, Token
from threading import get_ident
from typing import Any

from ..errors import IllegalConfigurationError, Problem, ScopeNotActiveError


class AsyncCreation:
    """The creation of a bean by a task: `outer` is the creation that contains it, `waits` the beans it waits for."""

    __slots__ = ("key", "outer", "scope", "waits")

    def __init__(self, scope: BeanStore, key: int, outer: AsyncCreation | None) -> None:
        self.scope, self.key, self.outer = scope, key, outer
        self.waits: list[tuple[BeanStore, int]] = []

    @property
    def chain(self) -> Iterator[AsyncCreation]:
        """Yield this creation and the creations that contain it, innermost first."""
        making: AsyncCreation | None = self
        while making is not None:
            yield making
            making = making.outer


_current_creation: ContextVar[AsyncCreation | None] = ContextVar("toolbox.making", default=None)

# Used only while a thread or task waits for another one to create a bean.
_waiting_lock = threading.Lock()
_waiting_threads: dict[int, tuple[BeanStore, int]] = {}
_wakers: dict[tuple[BeanStore, int], list[Callable[[], None]]] = {}


def _forget_waiters() -> None:
    global _waiting_lock
    _waiting_lock = threading.Lock()
    _waiting_threads.clear()
    _wakers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_waiters)


class BeanStore:
    """The beans of one scope, by key, and who creates which of them now: a thread, by its number, or a task."""

    store: dict[int, Any]
    making: dict[int, int | AsyncCreation]
    closing = False

    def label(self, key: int) -> str:
        """Return the name of a bean for messages."""
        raise NotImplementedError

    def ended_error(self, key: int | None) -> ScopeNotActiveError:
        """Return the error for a bean that is requested after the scope has ended."""
        raise NotImplementedError

    def stores_around(self) -> Iterable[BeanStore]:
        """Return the stores in which a lookup in this one can create beans, longest-lived first."""
        raise NotImplementedError

    # --- creating beans without await

    def create(self, key: int, make: Callable[[Any], Any]) -> Any:
        """Return the bean; create it with `make(self)`, or wait for the thread or task that already creates it."""
        making, me = self.making, get_ident()
        # No lock: only this thread can set its own ident.
        if (key in making or making.setdefault(key, me) != me) and self._wait_on_thread(key, me):
            return self.store[key]
        try:
            store = self.store
            if key in store:
                return store[key]
            if self.closing:
                raise self.ended_error(key)
            value = store[key] = make(self)
            return value
        finally:
            del making[key]
            if _wakers:
                self._wake(key)

    def _wait_on_thread(self, key: int, me: int) -> bool:
        """Wait for the creator. Return True if the bean exists, False if this thread must create it."""
        while True:
            made = threading.Event()
            with _waiting_lock:
                self._refuse_endless_wait(key, me)
                self._notify(key, made.set)
                if key not in self.making:
                    self._wake_waiting(key)
                else:
                    _waiting_threads[me] = (self, key)
            made.wait()
            with _waiting_lock:
                _waiting_threads.pop(me, None)
                if key in self.store:
                    return True
                if self.making.setdefault(key, me) == me:
                    return False

    # --- creating beans with await

    async def create_awaiting(self, key: int, make: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return the bean; create it with `await make(self)`, or wait for its current creator."""
        me = AsyncCreation(self, key, _current_creation.get())
        making = self.making
        while key in making or making.setdefault(key, me) is not me:
            await self.wait_until_settled(key)
            if key in self.store:
                return self.store[key]
        try:
            if key in self.store:
                return self.store[key]
            if self.closing:
                raise self.ended_error(key)
            token = _current_creation.set(me)
            try:
                value = await make(self)
            finally:
                reset_variable(_current_creation, token)
            self.store[key] = value
            return value
        finally:
            del making[key]
            if _wakers:
                self._wake(key)

    async def wait_until_settled(self, key: int) -> None:
        """Wait until no thread or task creates the bean."""
        loop = asyncio.get_running_loop()
        made = loop.create_future()

        def wake() -> None:
            if not made.done():
                made.set_result(None)

        def notify() -> None:
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:  # the loop is closed, so no task waits
                return

        within = _current_creation.get()
        entry = (self, key)
        with _waiting_lock:
            self._refuse_endless_wait(key, within)
            self._notify(key, notify)
            if key not in self.making:
                self._wake_waiting(key)
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
        """Let `waker` be called when the bean is settled. Look at `making` after this, not before.

        The creator leaves `making`, then looks for wakers. So either it finds this one, or the caller sees that the
        bean is settled. Then it calls `_wake_waiting`: no creator may ever look again, and `_wakers` keeps the scope.
        """
        _wakers.setdefault((self, key), []).append(waker)

    def _wake(self, key: int) -> None:
        with _waiting_lock:
            self._wake_waiting(key)

    def _wake_waiting(self, key: int) -> None:
        """Wake all who wait for the bean, and forget them. The caller holds the lock."""
        for wake in _wakers.pop((self, key), ()):
            wake()

    def _refuse_endless_wait(self, key: int, me: int | AsyncCreation | None) -> None:
        """Raise if the creator of the bean waits, directly or indirectly, for the caller."""
        asking = list(me.chain) if isinstance(me, AsyncCreation) else [me if me is not None else get_ident()]
        todo: list[tuple[BeanStore, int]] = [(self, key)]
        seen: set[tuple[int, int]] = set()
        while todo:
            scope, wanted = todo.pop()
            maker = scope.making.get(wanted)
            if maker is None or (id(scope), wanted) in seen:
                continue
            seen.add((id(scope), wanted))
            if maker in asking:
                raise self._endless_wait_error(key, me)
            if isinstance(maker, AsyncCreation):
                todo += maker.waits
            elif maker in _waiting_threads:
                todo.append(_waiting_threads[maker])

    def _endless_wait_error(self, key: int, me: int | AsyncCreation | None) -> IllegalConfigurationError:
        label = self.label
        if isinstance(me, AsyncCreation):
            path = [label(each.key) for each in me.chain][::-1]
        else:
            thread = me if me is not None else get_ident()
            path = [
                label(k) for scope in self.stores_around() for k, maker in list(scope.making.items()) if maker == thread
            ]
        if label(key) in path:
            path = path[path.index(label(key)) :]
        text = " -> ".join([*path, label(key)])
        problem = Problem(
            label(key), f"dependency cycle during creation: {text}", "look the bean up after it is created"
        )
        return IllegalConfigurationError([problem])


def reset_variable(variable: ContextVar[Any], token: Token[Any] | None) -> None:
    try:
        if token is not None:
            variable.reset(token)
    except ValueError:  # exited in another context than entered, for example by a finalised coroutine
        return
