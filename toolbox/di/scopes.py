"""Live scopes: what they hold, how they are entered, and their end.

Not here: who makes a bean when several ask (`making`), how it is made (`providers`, `resolvers`), closing (`closing`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, NoReturn

from ..errors import IllegalConfigurationError, Problem, ScopeNotActiveError
from .closing import (
    Closer,
    OwnTask,
    close_awaiting,
    close_on_this_thread,
    close_own_task,
    close_waiting,
    finish,
    finish_async,
    raise_failures,
    stop,
    stop_async,
    yielded_nothing,
)
from .making import BeanMaking

_log = logging.getLogger("toolbox")

active: ContextVar[OpenScope | None] = ContextVar("toolbox.scope", default=None)
"""The innermost scope that was entered in this context, of whichever container."""


@contextmanager
def outside_scopes() -> Iterator[None]:
    """Let the code inside find only application beans: for what outlives the request that it is first needed in."""
    token = active.set(None)
    try:
        yield
    finally:
        active.reset(token)


class OpenScope(BeanMaking):
    """What lives in one scope. Entered, it is the active scope of the context; left, it closes what it holds.

    `request` is the request scope it is or lies in. `seeds` are beans it was given that do not live as long as a
    request, `extras` objects that are no beans, by type; `direct` is its home as long as there are none of these.
    """

    what = "scope"
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
        self.outer: OpenScope | None = None
        self.wakers = None

    def label(self, key: int) -> str:
        """The bean with this key, as a reader knows it."""
        return self.home.label(key)

    def around(self) -> Iterator[BeanMaking]:
        """The scopes in which a thread may be making something at the same time, the longest-lived first."""
        yield from dict.fromkeys((self.home.application, self.request or self, self))

    # --- what has to be closed

    def keep(self, value: Any, closer: Closer) -> Any:
        """Remembers how to close what was made; in a scope that has ended meanwhile it is closed at once."""
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
        """The same for what has to be awaited to be closed."""
        self.closers.append(closer)
        if self.closing:
            if self._take_back(closer):
                await close_awaiting([closer], None, [])
            raise self.ended(closer.key)
        return value

    def _take_back(self, closer: Closer) -> bool:
        """Whether the closer is still there and the scope's end will not see to it any more."""
        if not self.closed:
            return False
        try:
            self.closers.remove(closer)
        except ValueError:
            return False
        return True

    def keep_stopping(self, bean: Any, key: int | None) -> Any:
        """A bean whose `stop()` is called when this scope ends."""
        return self.keep(bean, Closer(stop, bean, self.store, key))

    def keep_stopping_async(self, bean: Any, key: int | None) -> Any:
        """A bean whose `stop()` is awaited when this scope ends."""
        self._refuse_awaited_end(bean)
        loop = asyncio._get_running_loop() or self.home.loop
        return self.keep(bean, Closer(stop_async, bean, self.store, key, loop))

    def enter(self, generator: Any, key: int | None) -> Any:
        """What a producer yields, which ends with this scope."""
        try:
            value = next(generator)
        except StopIteration:
            raise yielded_nothing(generator) from None
        return self.keep(value, Closer(finish, generator, self.store, key))

    async def enter_async(self, generator: Any, key: int | None, own_task: bool) -> Any:
        """What an asynchronous producer yields, which ends with this scope."""
        self._refuse_awaited_end(generator)
        loop = asyncio.get_running_loop()
        if own_task:
            task = OwnTask(generator)
            value = await task.open()
            return await self.keep_awaiting(value, Closer(close_own_task, task, self.store, key, loop))
        try:
            value = await anext(generator)
        except StopAsyncIteration:
            raise yielded_nothing(generator) from None
        return await self.keep_awaiting(value, Closer(finish_async, generator, self.store, key, loop))

    def _refuse_awaited_end(self, made: Any) -> None:
        if self.entered_on_loop:
            reason = "its scope was entered with `with` on the event loop's thread, where its end cannot be awaited"
            raise ScopeNotActiveError(getattr(made, "__name__", type(made).__name__), reason)

    # --- the end

    def ended(self, key: int | None) -> ScopeNotActiveError:
        """The error of who asks for something new when it is too late."""
        wanted = self.label(key) if key is not None else "a dependent bean"
        return ScopeNotActiveError(wanted, f"its {self.what} has ended, and this code outlived it")

    def close_here(self, error: BaseException | None) -> None:
        """Closes beans on this thread, newest first, until one has to be awaited; raises what they raise."""
        self.closing = True
        if not self.closers:
            return
        failures: list[BaseException] = []
        close_on_this_thread(self.closers, error, failures)
        raise_failures(self.what, failures)

    async def aclose(self, error: BaseException | None) -> None:
        """Closes what is left, all of it, with `error` thrown into generators; raises what they raise."""
        self.closing = True
        if not self.closers:
            self.closed = True
            self.store = {}
            if not self.closers:  # nobody has added one meanwhile, who would have found it open
                return
        failures: list[BaseException] = []
        try:
            while self.closers:
                await close_awaiting(self.closers, error, failures)
                self._end()
        except asyncio.CancelledError:
            self._tell(failures)
            raise
        if isinstance(error, asyncio.CancelledError):
            self._tell(failures)
            return
        raise_failures(self.what, failures)

    def _tell(self, failures: list[BaseException]) -> None:
        # Who is cancelled must end as cancelled: what failed meanwhile can only be told.
        if failures:
            _log.error("closing a %s failed", self.what, exc_info=BaseExceptionGroup("closing", failures))

    def close_waiting(self, error: BaseException | None) -> None:
        """Closes everything while this thread waits."""
        self.closing = True
        failures: list[BaseException] = []
        while not self.closed or self.closers:
            close_waiting(self.closers, error, failures, self.home.loop)
            self._end()
        raise_failures(self.what, failures)

    def _end(self) -> None:
        # Who adds a closer after this takes it back; who added one before finds it closed by the loop around this.
        self.closed = True
        self.store = {}

    # --- being the active scope

    def _activate(self) -> None:
        if self._token is not None or self.closing:
            self._refuse_second_entry()
        self.outer = active.get()
        self._token = active.set(self)

    def _refuse_second_entry(self) -> NoReturn:
        problem = Problem(f"a {self.what}", "it is entered a second time", "open a new one")
        raise IllegalConfigurationError([problem])

    def _deactivate(self) -> None:
        if self._token is not None:
            try:
                active.reset(self._token)
            except ValueError:  # left in another context than entered, as when a generator is finalised
                return


class MustAwait(Exception):  # noqa: N818 - never leaves the container
    """The bean with this key has to be awaited and is not there yet."""

    def __init__(self, key: int) -> None:
        super().__init__(key)
        self.key = key


class Home:
    """What the scopes of one container have in common.

    `application` is its application scope, `loop` its event loop, `awaited` the beans that are made by awaiting, `deep`
    those at the end of a long chain.
    """

    application: ApplicationScope
    loop: asyncio.AbstractEventLoop | None = None
    awaited: frozenset[int] = frozenset()
    deep: frozenset[int] = frozenset()

    def label(self, key: int) -> str:
        """The bean with this key, as a reader knows it."""
        raise NotImplementedError

    def make_deep(self, key: int, scope: OpenScope) -> Any:
        """Make a bean at the end of a long chain for `scope`, without awaiting."""
        raise NotImplementedError

    def refuse(self, key: int, scope: OpenScope) -> NoReturn:
        """Raises for a bean that does not live in `scope`: no request scope is active."""
        raise ScopeNotActiveError(self.label(key), "no request scope is active here")

    def no_seed(self, key: int, absent: Any = ...) -> Any:
        """What stands for a seed that the request scope was not given; raises when nothing does."""
        raise NotImplementedError


class ApplicationScope(OpenScope):
    """The beans of a container from its start to its stop."""

    what = "container"


class RequestScope(OpenScope):
    """The beans of one request. A request scope inside another is independent of it."""

    what = "request scope"

    def __init__(self, home: Home) -> None:
        # Written out, as below: there is one of these for every request, and most hold nothing that has to be closed.
        self.home = self.direct = home
        self.request = self
        self.store = {}
        self.making = {}
        self.closers = []
        self.outer = self.wakers = None

    def __enter__(self) -> RequestScope:
        self._activate()
        self.entered_on_loop = asyncio._get_running_loop() is not None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close_waiting(error)
        finally:
            self._deactivate()

    async def __aenter__(self) -> RequestScope:
        self._activate()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.closing = True
            if not self.closers:
                self._end()
            if self.closers:
                await self.aclose(error)
        finally:
            self._deactivate()


class CallScope(OpenScope):
    """The beans of one tool call, below whatever scope is active where it is opened."""

    what = "call scope"

    def __init__(self, home: Home, request: OpenScope | None, direct: Home | None) -> None:
        self.home, self.request, self.direct = home, request, direct
        self.store = {}
        self.making = {}
        self.closers = []
        self.outer = self.wakers = None

    def __enter__(self) -> CallScope:
        if self._token is not None or self.closing:
            self._refuse_second_entry()
        self.outer = active.get()
        self._token = active.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deactivate()
