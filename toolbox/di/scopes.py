"""Open scopes: they store beans, create each of them once, are entered, and close what they hold, newest first.

Several threads and tasks can request a bean at the same time: one creates it, threads wait on events, tasks on futures.
If the creator fails or is cancelled, a waiter takes over. A wait that can never end raises an error with the path.
Beans are closed one at a time, also after failures and during cancellation.
Not here: how a bean is created (`creation`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from threading import get_ident
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from ..context import ActiveScope
from ..errors import IllegalConfigurationError, Problem, ScopeNotActiveError
from ..execution.cancellation import Patience, running, shielded

_log = logging.getLogger("toolbox")

active: ContextVar[OpenScope | None] = ContextVar("toolbox.scope", default=None)
"""The innermost scope entered in this context; it can belong to any container."""


def innermost_scope() -> ActiveScope | None:
    """Return the lookups of the container whose scope was entered last, or None outside of all scopes."""
    scope = active.get()
    return scope.home.lookup if scope is not None else None


@contextmanager
def outside_scopes() -> Iterator[None]:
    """Hide request and call scopes inside the block, for objects that outlive the request that first needs them."""
    token = active.set(None)
    try:
        yield
    finally:
        active.reset(token)


class AsyncCreation:
    """The creation of a bean by a task: `outer` is the creation that contains it, `waits` the beans it waits for."""

    __slots__ = ("key", "outer", "scope", "waits")

    def __init__(self, scope: OpenScope, key: int, outer: AsyncCreation | None) -> None:
        self.scope, self.key, self.outer = scope, key, outer
        self.waits: list[tuple[OpenScope, int]] = []

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
_waiting_threads: dict[int, tuple[OpenScope, int]] = {}


def _forget_waiting() -> None:
    global _waiting_lock
    _waiting_lock = threading.Lock()
    _waiting_threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_waiting)


class OpenScope:
    """Stores and closes the beans of one scope. While entered, it is the active scope of the context.

    `request` is the request scope it is or lies in. `seeds` are beans it was given that do not live as long as a
    request, `extras` objects that are not beans, by type; `direct` is its home as long as there are none of these.
    """

    what = "scope"
    store: dict[int, Any]
    making: dict[int, int | AsyncCreation]
    # Defaults are class attributes, for speed: each request and each tool call opens a scope.
    wakers: dict[int, list[Callable[[], None]]] | None = None
    outer: OpenScope | None = None
    closing = False
    seeds: dict[int, Any] | None = None
    extras: dict[Any, Any] | None = None
    prepared: dict[int, list[Any]] | None = None
    is_seeded = False
    closed = False
    entered_on_loop = False
    _token: Token[OpenScope | None] | None = None

    def __init__(self, home: Home, request: OpenScope | None = None) -> None:
        self.home = home
        self.direct: Home | None = home
        self.request = request
        self.store = {}
        self.making = {}
        self.closers: list[Closer] = []

    def label(self, key: int) -> str:
        """Return the name of a bean for messages."""
        return self.home.label(key)

    def around(self) -> Iterator[OpenScope]:
        """Yield the scopes in which one thread can create beans at the same time, longest-lived first."""
        yield from dict.fromkeys((self.home.application, self.request or self, self))

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
                raise self.ended(key)
            value = store[key] = make(self)
            return value
        finally:
            del making[key]
            if self.wakers is not None:
                self._wake(key)

    def _wait_on_thread(self, key: int, me: int) -> bool:
        """Wait for the creator. Return True if the bean exists, False if this thread must create it."""
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

    # --- creating beans with await

    async def create_awaiting(self, key: int, make: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return the bean; create it with `await make(self)`, or wait for its current creator."""
        me = AsyncCreation(self, key, _current_creation.get())
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
            token = _current_creation.set(me)
            try:
                value = await make(self)
            finally:
                _reset(_current_creation, token)
            self.store[key] = value
            return value
        finally:
            del making[key]
            if self.wakers is not None:
                self._wake(key)

    async def settled(self, key: int) -> None:
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

    def _refuse_endless_wait(self, key: int, me: int | AsyncCreation | None) -> None:
        """Raise if the creator of the bean waits, directly or indirectly, for the caller."""
        asking = list(me.chain) if isinstance(me, AsyncCreation) else [me if me is not None else get_ident()]
        todo: list[tuple[OpenScope, int]] = [(self, key)]
        seen: set[tuple[int, int]] = set()
        while todo:
            scope, wanted = todo.pop()
            maker = scope.making.get(wanted)
            if maker is None or (id(scope), wanted) in seen:
                continue
            seen.add((id(scope), wanted))
            if maker in asking:
                raise self._endless(key, me)
            if isinstance(maker, AsyncCreation):
                todo += maker.waits
            elif maker in _waiting_threads:
                todo.append(_waiting_threads[maker])

    def _endless(self, key: int, me: int | AsyncCreation | None) -> IllegalConfigurationError:
        label = self.label
        if isinstance(me, AsyncCreation):
            path = [label(each.key) for each in me.chain][::-1]
        else:
            thread = me if me is not None else get_ident()
            path = [label(k) for scope in self.around() for k, maker in list(scope.making.items()) if maker == thread]
        if label(key) in path:
            path = path[path.index(label(key)) :]
        text = " -> ".join([*path, label(key)])
        problem = Problem(
            label(key), f"dependency cycle during creation: {text}", "look the bean up after it is created"
        )
        return IllegalConfigurationError([problem])

    # --- registering beans to close

    def keep(self, value: Any, closer: Closer) -> Any:
        """Register the closer and return the value. If the scope has ended, close the value now and raise."""
        self.closers.append(closer)
        if self.closing:
            if self._take_back(closer):
                if closer.loop is None:
                    close_on_this_thread([closer], None, [])
                else:
                    asyncio.run_coroutine_threadsafe(closer.begin(None), closer.loop)
            raise self.ended(closer.key)
        return value

    async def keep_awaiting(self, value: Any, closer: Closer) -> Any:
        """Do the same as `keep` for a bean that async code closes."""
        self.closers.append(closer)
        if self.closing:
            if self._take_back(closer):
                await close_awaiting([closer], None, [], self.home.stop_timeout)
            raise self.ended(closer.key)
        return value

    def _take_back(self, closer: Closer) -> bool:
        """Remove a closer that was added after the scope closed. Return True if it was still registered."""
        if not self.closed:
            return False
        try:
            self.closers.remove(closer)
        except ValueError:
            return False
        return True

    def keep_stopping(self, bean: Any, key: int | None) -> Any:
        """Return the bean; call its `stop()` when this scope ends."""
        return self.keep(bean, Closer(stop, bean, self.store, key))

    def keep_stopping_async(self, bean: Any, key: int | None) -> Any:
        """Return the bean; await its `stop()` when this scope ends."""
        self._refuse_awaited_end(bean)
        loop = asyncio._get_running_loop() or self.home.loop
        return self.keep(bean, Closer(stop_async, bean, self.store, key, loop))

    def enter(self, generator: Any, key: int | None) -> Any:
        """Return the value that a producer yields; finish the generator when this scope ends."""
        try:
            value = next(generator)
        except StopIteration:
            raise yielded_nothing(generator) from None
        return self.keep(value, Closer(finish, generator, self.store, key))

    async def enter_async(self, generator: Any, key: int | None, own_task: bool) -> Any:
        """Return the value that an async producer yields; finish the generator when this scope ends."""
        self._refuse_awaited_end(generator)
        loop = asyncio.get_running_loop()
        if own_task:
            task = OwnTask(generator)
            value = await task.open()
            return await self.keep_awaiting(value, Closer(close_own_task, task, self.store, key, loop))
        try:
            with running(generator):  # its timeouts and task groups still work while it is closed
                value = await anext(generator)
        except StopAsyncIteration:
            raise yielded_nothing(generator) from None
        return await self.keep_awaiting(value, Closer(finish_async, generator, self.store, key, loop))

    def _refuse_awaited_end(self, made: Any) -> None:
        if self.entered_on_loop:
            reason = "its scope was entered with `with` on the event loop's thread, so async code cannot close it"
            raise ScopeNotActiveError(getattr(made, "__name__", type(made).__name__), reason)

    # --- the end

    def ended(self, key: int | None) -> ScopeNotActiveError:
        """Return the error for a bean that is requested after the scope has ended."""
        wanted = self.label(key) if key is not None else "a dependent bean"
        return ScopeNotActiveError(wanted, f"its {self.what} has ended")

    def close_if_empty(self) -> bool:
        """Close the scope if it has no beans to close. Returns False if it must be closed with another method."""
        if self.closers:
            return False
        self.closing = self.closed = True
        self.store = {}
        return not self.closers  # a thread may have added one in between

    def close_here(self, error: BaseException | None) -> None:
        """Close beans on this thread, newest first, up to the first that needs `await`. Raise the beans' errors."""
        self.closing = True
        if not self.closers:
            return
        failures: list[BaseException] = []
        close_on_this_thread(self.closers, error, failures)
        raise_failures(self.what, failures)

    async def aclose(self, error: BaseException | None) -> None:
        """Close all remaining beans; throw `error` into generators. Raise the beans' errors."""
        self.closing = True
        if self.close_if_empty():
            return
        failures: list[BaseException] = []
        try:
            while self.closers:
                await close_awaiting(self.closers, error, failures, self.home.stop_timeout)
                self._end()
        except asyncio.CancelledError:
            self._log_failures(failures)
            raise
        if isinstance(error, asyncio.CancelledError):
            self._log_failures(failures)
            return
        raise_failures(self.what, failures)

    def _log_failures(self, failures: list[BaseException]) -> None:
        # The cancellation must propagate, so the failures can only be logged.
        if failures:
            _log.error("closing a %s failed", self.what, exc_info=BaseExceptionGroup("closing", failures))

    def close_waiting(self, error: BaseException | None) -> None:
        """Close everything; block this thread until then."""
        self.closing = True
        failures: list[BaseException] = []
        while not self.closed or self.closers:
            close_waiting(self.closers, error, failures, self.home.loop)
            self._end()
        raise_failures(self.what, failures)

    def _end(self) -> None:
        # The loop of the caller closes beans added before this line; `_take_back` handles those added after it.
        self.closed = True
        self.store = {}

    # --- being the active scope

    def _refuse_second_entry(self) -> NoReturn:
        problem = Problem(f"a {self.what}", "the scope was already entered", "open a new scope")
        raise IllegalConfigurationError([problem])


def _reset(variable: ContextVar[Any], token: Token[Any] | None) -> None:
    try:
        if token is not None:
            variable.reset(token)
    except ValueError:  # exited in another context than entered, for example by a finalised coroutine
        return


class MustAwait(Exception):  # noqa: N818 - never leaves the container
    """The bean with this key does not exist yet, and async code must create it."""

    def __init__(self, key: int) -> None:
        super().__init__(key)
        self.key = key


class Home:
    """Data and functions shared by the scopes of one container.

    `application` is the application scope, `lookup` gets beans from the active scope, `loop` is the event loop.
    `stop_timeout` are the seconds that closing a scope may take after it was cancelled.
    `awaited` has the beans that async code creates, `deep` the beans at the end of a long chain.
    """

    application: ApplicationScope
    lookup: ActiveScope
    loop: asyncio.AbstractEventLoop | None = None
    stop_timeout: float = 10.0
    awaited: frozenset[int] = frozenset()
    deep: frozenset[int] = frozenset()

    def label(self, key: int) -> str:
        """Return the name of a bean for messages."""
        raise NotImplementedError

    def make_deep(self, key: int, scope: OpenScope) -> Any:
        """Create a bean at the end of a long chain for `scope`, without await."""
        raise NotImplementedError

    def refuse(self, key: int, scope: OpenScope) -> NoReturn:
        """Raise `ScopeNotActiveError`: the bean needs a request scope, and none is active."""
        raise ScopeNotActiveError(self.label(key), "no request scope is active here")

    def no_seed(self, key: int, absent: Any = ...) -> Any:
        """Return the replacement for a seed that the request scope does not have. Raises `MissingBeanError`."""
        raise NotImplementedError

    def required(self, key: int, made: Any, absent: Any) -> Any:
        """Return what a producer that can return None has made, else `absent`. Raises `MissingBeanError`."""
        raise NotImplementedError


class ApplicationScope(OpenScope):
    """The scope of application beans, from start to stop."""

    what = "container"


class RequestScope(OpenScope):
    """The scope of one request. A request scope inside another one is independent of it."""

    what = "request scope"

    def __init__(self, home: Home) -> None:
        # Not by `super().__init__`, for speed: every request creates one.
        self.home = self.direct = home
        self.request = self
        self.store = {}
        self.making = {}
        self.closers = []

    def __enter__(self) -> RequestScope:
        if self._token is not None or self.closing:
            self._refuse_second_entry()
        self.outer = active.get()
        self._token = active.set(self)
        self.entered_on_loop = asyncio._get_running_loop() is not None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close_waiting(error)
        finally:
            _reset(active, self._token)

    async def __aenter__(self) -> RequestScope:
        if self._token is not None or self.closing:  # inline for speed, as in `CallScope`
            self._refuse_second_entry()
        self.outer = active.get()
        self._token = active.set(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self.close_if_empty():
                await self.aclose(error)
        finally:
            _reset(active, self._token)


class CallScope(OpenScope):
    """The scope of one tool call, inside the scope that is active when it is created; active until `leave`."""

    what = "call scope"

    def __init__(self, home: Home, outer: OpenScope | None, request: OpenScope | None, direct: Home | None) -> None:
        self.home, self.outer, self.request, self.direct = home, outer, request, direct
        self.store = {}
        self.making = {}
        self.closers = []
        self._token = active.set(self)

    def leave(self) -> None:
        """Make the outer scope active again; close nothing."""
        try:  # inline for speed: each tool call opens one
            active.reset(self._token)  # type: ignore[arg-type]  # set by `__init__`
        except ValueError:  # left in another context than entered, for example by a finalised generator
            return


# --- closing one bean


class Closer(NamedTuple):
    """Closes one bean with `close(target, error)`; if `loop` is set, the result must be awaited on that loop.

    `key` is the key of the bean in `store`, from which it is removed first; None for a dependent bean.
    """

    close: Callable[[Any, BaseException | None], Any]
    target: Any
    store: dict[int, Any]
    key: int | None = None
    loop: asyncio.AbstractEventLoop | None = None

    def begin(self, error: BaseException | None) -> Any:
        """Close the bean. If `loop` is set, return an awaitable that closes it."""
        if self.key is not None:
            self.store.pop(self.key, None)
        return self.close(self.target, error)


def stop(bean: Any, error: BaseException | None) -> None:
    """Call the bean's `stop()`."""
    bean.stop()


async def stop_async(bean: Any, error: BaseException | None) -> None:
    """Await the bean's `stop()`."""
    await bean.stop()


def finish(generator: Generator[Any, None, None], error: BaseException | None) -> None:
    """Run the code after a producer's `yield`; raise `error` at the `yield`."""
    try:
        if error is None:
            next(generator)
        else:
            generator.throw(error)
    except StopIteration:
        return
    except BaseException as raised:
        if not _is_the_same(raised, error):
            raise
        return
    generator.close()
    raise _yielded_twice(generator)


async def finish_async(generator: AsyncGenerator[Any, None], error: BaseException | None) -> None:
    """Run the code after an async producer's `yield`; raise `error` at the `yield`."""
    try:
        if error is None:
            await anext(generator)
        else:
            await generator.athrow(error)
    except StopAsyncIteration:
        return
    except BaseException as raised:
        if not _is_the_same(raised, error):
            raise
        return
    await generator.aclose()
    raise _yielded_twice(generator)


def _is_the_same(raised: BaseException, error: BaseException | None) -> bool:
    """Return True if `raised` is the error thrown into a generator; Python wraps `StopIteration`."""
    is_wrapped = isinstance(error, (StopIteration, StopAsyncIteration)) and isinstance(raised, RuntimeError)
    return raised is error or (is_wrapped and raised.__cause__ is error)


def yielded_nothing(generator: Any) -> RuntimeError:
    """Return the error for a producer that ended without a yield."""
    return RuntimeError(f"{generator.__qualname__} did not yield; a producer must yield exactly once")


def _yielded_twice(generator: Any) -> RuntimeError:
    return RuntimeError(f"{generator.__qualname__} yielded a second time; a producer must yield exactly once")


# --- closing several beans, newest first


def close_on_this_thread(closers: list[Closer], error: BaseException | None, failures: list[BaseException]) -> None:
    """Close beans, newest first, up to the first that needs `await`. Append their errors to `failures`."""
    while closers and closers[-1].loop is None:
        closer = closers.pop()
        try:
            closer.begin(error)
        except BaseException as failure:
            failures.append(failure)


async def close_awaiting(
    closers: list[Closer], error: BaseException | None, failures: list[BaseException], seconds: float
) -> None:
    """Close all beans. If the task is cancelled during this, finish first, then raise the cancellation.

    Closing may take `seconds` after the cancellation. Then it is cancelled as well.
    """
    task = asyncio.current_task()
    assert task is not None, "asynchronous code runs in a task"
    patience = Patience(seconds)
    if task.cancelling():
        # A task that has cancelled itself gets the cancellation at its next `await`, which must not be one of a bean.
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError as pending:
            patience.hold(task, *pending.args[:1])
    while closers:
        close_on_this_thread(closers, error, failures)
        if closers:
            await _close_one(closers.pop(), error, failures, patience)
    await patience.deliver(task)


async def _close_one(
    closer: Closer, error: BaseException | None, failures: list[BaseException], patience: Patience
) -> None:
    work = closer.begin(error)
    if closer.loop is not asyncio.get_running_loop() and closer.loop is not None:
        if not closer.loop.is_running():
            work.close()
            failures.append(RuntimeError(f"cannot close {closer.target!r}: the event loop that created it has ended"))
            return
        work = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, closer.loop))
    steps = shielded(work, closer.target, patience)
    try:
        await steps
    except asyncio.CancelledError as cancellation:
        if not steps.is_given_up:
            failures.append(cancellation)
    except BaseException as failure:
        failures.append(failure)


def close_waiting(
    closers: list[Closer],
    error: BaseException | None,
    failures: list[BaseException],
    home: asyncio.AbstractEventLoop | None,
) -> None:
    """Close all beans and block this thread until then; async closers run on the loop that created the bean.

    The loop of this thread is blocked, so its beans are closed on the `home` loop.
    """
    here = asyncio._get_running_loop()
    while closers:
        close_on_this_thread(closers, error, failures)
        if not closers:
            return
        closer = closers.pop()
        work = closer.begin(error)
        loop = home if closer.loop is here else closer.loop
        try:
            if loop is not None and loop.is_running():
                asyncio.run_coroutine_threadsafe(work, loop).result()
            else:
                asyncio.run(work)
        except BaseException as failure:
            failures.append(failure)


def raise_failures(what: str, failures: list[BaseException]) -> None:
    """Raise an `ExceptionGroup` of the failures, if there are any."""
    if failures:
        raise BaseExceptionGroup(f"closing {what} failed", failures)


# --- producers with own_task=


class OwnTask:
    """Runs an async generator in one task from start to end, so that it can hold a cancel scope."""

    def __init__(self, generator: AsyncGenerator[Any, None]) -> None:
        self._generator = generator
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[Any] = loop.create_future()
        self._ending: asyncio.Future[BaseException | None] = loop.create_future()
        self._task = loop.create_task(self._live())

    async def open(self) -> Any:
        """Start the generator and return the value that it yields."""
        try:
            await asyncio.wait((self._opened, self._task), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait((self._task,))
            raise
        if not self._opened.done():
            self._task.result()
            raise yielded_nothing(self._generator)
        return self._opened.result()

    async def close(self, error: BaseException | None) -> None:
        """Finish the generator; raise `error` at its `yield`."""
        if not self._ending.done():
            self._ending.set_result(error)
        await self._task

    async def _live(self) -> None:
        try:
            value = await anext(self._generator)
        except StopAsyncIteration:
            return
        self._opened.set_result(value)
        error = await self._ending
        await finish_async(self._generator, error)


async def close_own_task(task: OwnTask, error: BaseException | None) -> None:
    """Finish a producer that runs in a separate task."""
    await task.close(error)
