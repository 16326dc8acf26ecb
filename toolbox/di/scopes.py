"""Open scopes: they are entered, store beans, call their `@on_success` methods, and close what they hold, newest first.

Not here: which of several threads creates a bean (`creating`), how it is created (`resolvers`) and closed (`closing`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Self

from ..context import ActiveScope
from ..errors import IllegalConfigurationError, Problem, ScopeNotActiveError, is_suspension
from ..execution.cancellation import finish_before_cancellation, opening, running
from ..execution.markers import awaitable_of, marked_execution
from ..execution.runners import Runner
from ..execution.threads import running_loop
from ..introspection import type_name
from ..request_hooks import BEFORE_MODEL_REQUEST, ON_SUCCESS, Hook, hooks_of
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
    wait_on_loop,
    yielded_nothing,
)
from .creating import AsyncCreation, BeanStore, reset_variable
from .decorators import LendingScope, Scope
from .stored_beans import StoredBeans

_log = logging.getLogger("toolbox")

active: ContextVar[OpenScope | None] = ContextVar("toolbox.scope", default=None)
"""The innermost scope entered in this context; it can belong to any container."""


def find_conversation(key: Hashable) -> ConversationScope | None:
    """Return the open scope of a conversation around this code, also outside of the active request, or None."""
    scope = active.get()
    while scope is not None:
        if (found := scope.conversation) is not None and found.key == key and not found.closing:
            return found
        scope = scope.outer
    return None


def conversation_here() -> ConversationScope | None:
    """Return the conversation scope whose beans this code gets, or None."""
    scope = active.get()
    return None if scope is None else scope.conversation


def innermost_scope() -> ActiveScope | None:
    """Return the lookups of the container whose scope was entered last, or None outside of all scopes."""
    scope = active.get()
    return scope.home.lookup if scope is not None else None


def request_hooks(hook: Hook = BEFORE_MODEL_REQUEST) -> list[Callable[[], Any]]:
    """Return the methods of all beans of the entered scopes that `hook` marks, of the innermost scope first.

    These are the request scope, the call scopes of the tools that led here, and the requests around them: a durable
    call has its own request scope inside that of its caller, who waits.
    """
    found: dict[tuple[int, str], Callable[[], Any]] = {}
    scope = active.get()
    while scope is not None:
        for bean in scope.held_beans():
            kind: Any = type(bean)
            for name in hooks_of(kind, hook):
                found.setdefault((id(bean), name), getattr(bean, name))
        scope = scope.outer
    return [*found.values()]


@contextmanager
def outside_scopes() -> Iterator[None]:
    """Hide request and call scopes inside the block, for objects that outlive the request that first needs them."""
    token = active.set(None)
    try:
        yield
    finally:
        active.reset(token)


class OpenScope(BeanStore):
    """Stores and closes the beans of one scope. While entered, it is the active scope of the context.

    `request` and `conversation` are the scopes of these kinds that it is or lies in; `SCOPES` names them as holders of
    beans. `seeds` are beans it was given that do not live as long as a request, `extras` objects that are not beans, by
    type. `prepared` are new instances for the next lookups by `get`. `is_of_program` is True if it was opened for the
    program itself, outside of all requests: it has no caller, not even an anonymous one.
    """

    what = "scope"
    opened_by = Scope.REQUEST.rule.opened_by
    # Defaults are class attributes: each request and each tool call opens a scope, and few of them have seeds.
    seeds: Mapping[int, Any] = MappingProxyType({})
    extras: Mapping[Any, Any] = MappingProxyType({})
    is_seeded = closed = entered_on_loop = is_of_program = False
    _token: Token[OpenScope | None] | None = None

    def __init__(self, home: Home, outer: OpenScope | None = None) -> None:
        self.home, self.outer = home, outer
        self.store: dict[int, Any] = {}
        self.making: dict[int, int | AsyncCreation] = {}
        self.prepared: dict[int, list[Any]] = {}
        self.closers: list[Closer] = []

    @property
    def request(self) -> OpenScope | None:
        """The request scope that it is or lies in."""
        return None

    @property
    def conversation(self) -> ConversationScope | None:
        """The conversation scope that it is or lies in."""
        return None

    def label(self, key: int) -> str:
        """Return the name of a bean for messages."""
        return self.home.label(key)

    def held_beans(self) -> list[Any]:
        """Return the beans that the scope holds: stored ones, seeds, and dependent ones that it closes."""
        # Other threads may create beans during this: each mapping is copied in one step, and a list may grow.
        closed = [each.bean for each in self.closers]
        return [*self.store.values(), *self.seeds.values(), *self.extras.values(), *closed]

    def stores_around(self) -> Iterable[OpenScope]:
        """Return the scopes in which a lookup in this one can create beans, longest-lived first."""
        return dict.fromkeys((self.home.application, self.request or self, self.conversation or self, self))

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
            raise self.ended_error(closer.key)
        return value

    async def keep_awaiting(self, value: Any, closer: Closer) -> Any:
        """Do the same as `keep` for a bean that async code closes."""
        self.closers.append(closer)
        if self.closing:
            if self._take_back(closer):
                await close_awaiting([closer], None, [], self.home.stop_timeout)
            raise self.ended_error(closer.key)
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
        return self.keep(bean, Closer(stop, bean, self.store, key, bean=bean))

    def keep_stopping_async(self, bean: Any, key: int | None) -> Any:
        """Return the bean; await its `stop()` when this scope ends."""
        self._refuse_awaited_end(bean)
        loop = running_loop() or self.home.loop
        return self.keep(bean, Closer(stop_async, bean, self.store, key, loop, bean))

    def enter(self, generator: Any, key: int | None) -> Any:
        """Return the value that a producer yields; finish the generator when this scope ends."""
        try:
            value = next(generator)
        except StopIteration:
            raise yielded_nothing(generator) from None
        return self.keep(value, Closer(finish, generator, self.store, key, bean=value))

    async def enter_async(self, generator: Any, key: int | None, own_task: bool) -> Any:
        """Return the value that an async producer yields; finish the generator when this scope ends."""
        self._refuse_awaited_end(generator)
        loop = asyncio.get_running_loop()
        if own_task:
            task = OwnTask(generator)
            value = await task.open()
            return await self.keep_awaiting(value, Closer(close_own_task, task, self.store, key, loop, value))
        try:
            with running(generator), opening() as scope:  # its timeouts and task groups still work while it is closed
                value = await anext(generator)
        except StopAsyncIteration:
            raise yielded_nothing(generator) from None
        closer = Closer(finish_async, generator, self.store, key, loop, value, scope.left_open)
        return await self.keep_awaiting(value, closer)

    def _refuse_awaited_end(self, made: Any) -> None:
        if self.entered_on_loop:
            reason = "its scope was entered with `with` on the event loop's thread, so async code cannot close it"
            raise ScopeNotActiveError(getattr(made, "__name__", type(made).__name__), reason)

    # --- the end

    def ended_error(self, key: int | None) -> ScopeNotActiveError:
        """Return the error for a bean that is requested after the scope has ended."""
        wanted = self.label(key) if key is not None else "a dependent bean"
        return ScopeNotActiveError(wanted, f"its {self.what} has ended", self.opened_by)

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


class MustAwait(Exception):  # noqa: N818 - never leaves the container
    """The bean with this key does not exist yet, and async code must create it.

    `behind` is the provider that has shown this by returning an awaitable, if that was unknown before.
    """

    def __init__(self, key: int, behind: Any = None) -> None:
        super().__init__(key)
        self.key, self.behind = key, behind


class Home:
    """Data and functions shared by the scopes of one container.

    `application` is the application scope, `lookup` gets beans from the active scope, `loop` is the event loop.
    `runner` places the methods of beans that are called in scopes. `decorated` has the bean inside of each decorator's
    bean. `stop_timeout` are the seconds that closing a scope may take after it was cancelled.
    """

    application: ApplicationScope
    lookup: LendingScope
    runner: Runner
    decorated: Mapping[int, int]
    loop: asyncio.AbstractEventLoop | None = None
    stop_timeout: float = 10.0

    def label(self, key: int) -> str:
        """Return the name of a bean for messages."""
        raise NotImplementedError

    def refuse(self, key: int, scope: OpenScope) -> NoReturn:
        """Raise `ScopeNotActiveError`: the bean is of a scope that is not active."""
        raise NotImplementedError

    def replace_absent(self, key: int, instead: Any) -> Any:
        """Return `instead` for a bean without a value. Raises `MissingBeanError` if there is nothing instead."""
        raise NotImplementedError

    def get_overridden(self, key: int, scope: OpenScope) -> Any:
        """Return what replaces an overridden bean in `scope`. Raises `MustAwait` if that must be awaited."""
        raise NotImplementedError

    async def aget_overridden(self, key: int, scope: OpenScope) -> Any:
        """Return what replaces an overridden bean in `scope`; await it if necessary."""
        raise NotImplementedError


class Loan(OpenScope):
    """What one lookup creates in a scope for its caller alone, who can give it back before the scope ends.

    Generated functions take it for the scope, whose beans it shares; the closers of new dependent beans are noted here,
    too. `bean` is what the caller gets, `loans` are all, by the ids of their beans. A closer that begins leaves its
    loan, which ends with the last one: else it would be kept until the next garbage collection.
    """

    def __init__(self, scope: OpenScope, loans: dict[int, list[Loan]]) -> None:
        self.home, self.outer = scope.home, scope.outer
        self.store, self.making, self.prepared = scope.store, scope.making, scope.prepared
        self.seeds, self.extras, self.entered_on_loop = scope.seeds, scope.extras, scope.entered_on_loop
        self.closers = []
        self.bean: Any = None
        self._scope, self._loans = scope, loans

    @property
    def request(self) -> OpenScope | None:
        """The request scope that it lies in."""
        return self._scope.request

    @property
    def conversation(self) -> ConversationScope | None:
        """The conversation scope that it lies in."""
        return self._scope.conversation

    def stores_around(self) -> Iterable[OpenScope]:
        """Return those of the scope."""
        return self._scope.stores_around()

    def create(self, key: int, make: Callable[[Any], Any]) -> Any:
        """Create a bean that the scope stores."""
        return self._find_storing(key).create(key, make)

    async def create_awaiting(self, key: int, make: Callable[[Any], Awaitable[Any]]) -> Any:
        """Create a bean that the scope stores."""
        return await self._find_storing(key).create_awaiting(key, make)

    def _find_storing(self, key: int) -> OpenScope:
        return self.home.refuse(key, self._scope) if isinstance(self._scope, ApplicationScope) else self._scope

    def keep(self, value: Any, closer: Closer) -> Any:
        """Register the closer with the scope, as one of this loan."""
        self._note(closer)
        return self._scope.keep(value, closer)

    async def keep_awaiting(self, value: Any, closer: Closer) -> Any:
        """Do the same as `keep` for a bean that async code closes."""
        self._note(closer)
        return await self._scope.keep_awaiting(value, closer)

    def _note(self, closer: Closer) -> None:
        closer.begun = self._forget
        self.closers.append(closer)

    def _forget(self, closer: Closer) -> None:
        self.closers.remove(closer)
        if not self.closers and self in (of_bean := self._loans.get(id(self.bean), [])):
            of_bean.remove(self)
            if not of_bean:
                del self._loans[id(self.bean)]

    def hand_out(self, bean: Any) -> Any:
        """Return the bean; note it, if there is something to close."""
        if self.closers and bean is not None:
            self.bean = bean
            self._loans.setdefault(id(bean), []).append(self)
        return bean

    @property
    def needs_await(self) -> bool:
        """True if async code must close a part of it."""
        return any(each.loop is not None for each in self.closers)

    def claim(self) -> OpenScope:
        """Return another scope that closes it, with the closers that nobody else is closing now."""
        apart = OpenScope(self.home)
        apart.what = "bean"
        for closer in [*self.closers]:
            with suppress(ValueError):  # the scope has ended, or another thread gives the bean back
                self._scope.closers.remove(closer)
                apart.closers.append(closer)
        return apart


class ApplicationScope(OpenScope):
    """The scope of application beans, from start to stop."""

    what = "container"

    def abandon(self, error: BaseException | None) -> None:
        """Close the beans that need no event loop, newest first; log the others. Raise the beans' errors."""
        self.closing = True
        failures: list[BaseException] = []
        left: list[str] = []
        while self.closers:
            close_on_this_thread(self.closers, error, failures)
            if self.closers:
                closer = self.closers.pop()
                of_dependent = type_name(type(closer.target if closer.bean is None else closer.bean))
                left.append(of_dependent if closer.key is None else self.label(closer.key))
        self._end()
        if left:
            _log.error("cannot close %s: the event loop is blocked", ", ".join(left))
        raise_failures(self.what, failures)


class BlockScope(OpenScope):
    """A scope that is entered with `with` or `async with`: it is active inside the block, and closed at its end."""

    def __enter__(self) -> Self:
        self._become_active()
        self.entered_on_loop = running_loop() is not None
        return self

    async def __aenter__(self) -> Self:
        self._become_active()
        return self

    def _become_active(self) -> None:
        if self._token is not None or self.closing:
            problem = Problem(f"a {self.what}", "the scope was already entered", "open a new scope")
            raise IllegalConfigurationError([problem])
        self.outer = active.get()
        self._token = active.set(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close_waiting(error)
        finally:
            reset_variable(active, self._token)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self.close_if_empty():
                await self.aclose(error)
        finally:
            reset_variable(active, self._token)


class RequestScope(BlockScope):
    """The scope of one request. A request scope inside another one is independent of it.

    `has_failed` is True if the work in it is known to have failed, so that no `@on_success` method is called. `failure`
    is the error of such a method, which producers get also if the caller has made a result of it.
    """

    what = "request scope"
    given: Mapping[Any, Any] = MappingProxyType({})
    """The seeds that it was given, by type."""
    has_failed = False
    failure: BaseException | None = None
    _settled = 0  # how many of the stored beans were asked
    _asked: frozenset[int] = frozenset()
    _conversation: ConversationScope | None = None

    @property
    def request(self) -> OpenScope:
        """The scope itself. It has no attribute for this, which would keep it until the next garbage collection."""
        return self

    @property
    def conversation(self) -> ConversationScope | None:
        """The conversation scope that it was opened for; no other one is active in it."""
        return self._conversation

    def join(self, conversation: ConversationScope) -> None:
        """Make the beans of a conversation, which is open elsewhere, those of this request."""
        self._conversation = conversation

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None or is_suspension(error):
                self._settle_waiting()
        except BaseException as raised:
            error = raised
            raise
        finally:
            super().__exit__(kind, error, trace)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None or is_suspension(error):
                await self.settle()
        except BaseException as raised:
            error = raised
            raise
        finally:
            try:
                await super().__aexit__(kind, error or self.failure, trace)
            finally:
                self.failure = None  # its traceback refers to the scope

    # --- work that ended well

    @property
    def is_settled(self) -> bool:
        """True if no bean was made since `settle`, the work has failed, or the scope is closing."""
        return self.has_failed or self.closing or self._settled >= len(self.store)

    async def settle(self) -> None:
        """Call the `@on_success` methods of the beans, in the order in which they were made: the work has ended well.

        Each bean is asked once. Raises the error of the first method that fails; the others are not called.
        """
        while methods := self._take_success_methods():  # a method may make further beans
            # A commit that has begun must not be torn by a client that leaves.
            await finish_before_cancellation(self._call_methods(methods), self, self.home.stop_timeout)

    async def _call_methods(self, methods: Iterable[tuple[Callable[[], Any], str]]) -> None:
        try:
            for method, label in methods:
                await self.home.runner.run(marked_execution(method), method, label)
        except BaseException as error:
            self.has_failed, self.failure = True, error
            raise

    def _settle_waiting(self) -> None:
        """Do the same as `settle`, on this thread; what must be awaited runs on the container's loop."""
        try:
            while methods := self._take_success_methods():
                for method, label in methods:
                    self._wait_for(method(), label)
        except BaseException:
            self.has_failed = True
            raise

    def _take_success_methods(self) -> list[tuple[Callable[[], Any], str]]:
        """Return the `@on_success` methods of the beans made since the last time, with their names."""
        if self.is_settled:
            return []
        made = [*self.store.items()][self._settled :]
        self._settled += len(made)
        outer_of = {inner: outer for outer, inner in self.home.decorated.items() if outer in self.store}
        found: list[tuple[Callable[[], Any], str]] = []
        for key, bean in made:
            kind: Any = type(bean)
            names = hooks_of(kind, ON_SUCCESS)
            if not names or id(bean) in self._asked:  # one object may be the bean of several types
                continue
            self._asked = self._asked | {id(bean)}
            # A decorator with the same method takes the place of its bean, and calls the bean's if it wants.
            outer: Any = type(self.store[outer_of[key]]) if key in outer_of else object
            replaced = hooks_of(outer, ON_SUCCESS)
            found += [(getattr(bean, name), f"{kind.__name__}.{name}") for name in names if name not in replaced]
        return found

    def _wait_for(self, returned: object, label: str) -> None:
        """Wait until what a method has returned is done, if it must be awaited."""
        if (awaited := awaitable_of(returned)) is None:
            return
        if running_loop() is not None and running_loop() is self.home.loop:
            if isinstance(awaited, Coroutine):
                awaited.close()
            reason = "its scope was entered with `with` on the event loop's thread, so it cannot be awaited"
            raise ScopeNotActiveError(label, reason)
        wait_on_loop(awaited, self.home.loop)


class ConversationScope(BlockScope):
    """The scope of one conversation while it is open: of a call with a memory id, or of a block.

    `key` tells who has opened it, for `find_conversation`. `beans` has what was loaded with it, and says what changed;
    the code that opens the scope stores that. The scope lies in the active one, and may be open outside of all
    requests. `turns` is for code that uses the beans one after another.
    """

    what = "conversation scope"
    opened_by = Scope.CONVERSATION.rule.opened_by

    def __init__(self, home: Home, within: OpenScope, key: Hashable, beans: StoredBeans) -> None:
        super().__init__(home)
        self.key, self.beans = key, beans
        self.turns = asyncio.Lock()
        self._request = within.request
        self.seeds = within.seeds

    @property
    def request(self) -> OpenScope | None:
        """The request scope that it lies in."""
        return self._request

    @property
    def conversation(self) -> ConversationScope:
        """The scope itself."""
        return self

    def join(self) -> None:
        """Let the requests between this scope and the current code use its beans: the code belongs to it."""
        scope = active.get()
        while scope is not None and scope is not self:
            if isinstance(scope, RequestScope) and scope.home is self.home:
                scope.join(self)
            scope = scope.outer


class CallScope(OpenScope):
    """The scope of one tool call, inside the scope that is active when it is created; active until `leave`.

    `within` is the active scope of its container.
    """

    what = "call scope"

    def __init__(self, home: Home, outer: OpenScope | None, within: OpenScope) -> None:
        super().__init__(home, outer)
        self._within, self._request = within, within.request
        if self._request is not None:
            self.seeds = self._request.seeds
        self._token = active.set(self)

    @property
    def request(self) -> OpenScope | None:
        """The request scope that it lies in."""
        return self._request

    @property
    def conversation(self) -> ConversationScope | None:
        """The conversation scope that it lies in."""
        return self._within.conversation

    def leave(self) -> None:
        """Make the outer scope active again; close nothing."""
        reset_variable(active, self._token)
