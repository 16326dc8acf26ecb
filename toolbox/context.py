"""Context of the current call: invocation, attributes, time limit and bean scope.

Context variables carry it, so it is available in tasks, threads and streams. Not here: beans of scopes (`di.scopes`),
running a call on another thread (`execution`).
"""

from __future__ import annotations

import importlib
import operator
import os
import pickle
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from typing_extensions import TypeForm

from .chat import ToolExecutionRequest, UserMessage
from .frozen_copies import copy_with
from .introspection import is_number

T = TypeVar("T")


# --- awaiting in another context

NOT_BEGUN: Any = object()
"""Default of the parameter `asked` of `InContext`: the step has not started."""


class InContext(Awaitable[T]):
    """Awaits `step`, a coroutine or a similar object, and runs its code in `context`, or in the current one if None.

    Context variables that the step sets stay in `context`. The code runs in the task that awaits this object. If the
    step has already started, `asked` is the object that it waits for.
    """

    __slots__ = ("_asked", "_context", "_step")

    def __init__(self, context: Context | None, step: Any, asked: Any = NOT_BEGUN) -> None:
        self._context, self._step, self._asked = context, step, asked

    def __await__(self) -> Generator[Any, Any, T]:
        step, asked = self._step, self._asked
        run: Callable[..., Any] = operator.call if self._context is None else self._context.run
        answer: Any = None
        error: BaseException | None = None
        while True:
            if asked is not NOT_BEGUN:
                answer, error = None, None
                try:
                    answer = yield asked
                except GeneratorExit:
                    run(step.close)
                    raise
                except BaseException as thrown:
                    error = thrown
            try:
                asked = run(step.send, answer) if error is None else run(step.throw, error)
            except StopIteration as stop:
                result: T = stop.value
                return result


# --- the active scope


class ToolCallScope(Protocol):
    """The bean scope of one tool call. It is opened when the tool is dispatched and closed when the tool ends."""

    def leave(self) -> None:
        """Make the previous scope active again; close nothing."""
        ...

    def close_if_empty(self) -> bool:
        """Close the scope if nothing in it must be closed. Returns False if `aclose` is needed."""
        ...

    def close_here(self, error: BaseException | None) -> None:
        """Close beans on this thread, newest first, up to the first that must be awaited. Raises the beans' errors."""
        ...

    async def aclose(self, error: BaseException | None) -> None:
        """Close all remaining beans; generators get `error` thrown in. Raises the beans' errors."""
        ...


class ActiveScope(Protocol):
    """The bean scope of the container that is active at the moment of the call."""

    def get(self, wanted: TypeForm[T], name: str | None = None) -> T:
        """Return the bean; create it if necessary. Raises `AsyncBeanError` if async code must create it."""
        ...

    async def aget(self, wanted: TypeForm[T], name: str | None = None) -> T:
        """Return the bean; await async producers if necessary."""
        ...

    async def find(self, wanted: TypeForm[T], name: str | None = None) -> T | None:
        """Return the bean as `aget` does, or None if nothing provides it. Raises no `MissingBeanError`."""
        ...

    def find_now(self, wanted: TypeForm[T], name: str | None = None) -> T | None:
        """Return the same without await. Raises `AsyncBeanError` if async code must create it."""
        ...

    async def prepare(self, wanted: TypeForm[Any], name: str | None = None) -> None:
        """Create only the async parts of a bean, if there is one, so that `get` can create the rest on any thread."""
        ...

    def open_call_scope(self) -> ToolCallScope:
        """Return a new scope for one tool call, inside the active scope; it is active until `leave` is called."""
        ...


class CallPlace(Protocol):
    """The place of a tool call in a run, implemented by `toolbox.runs`.

    `call` is the place of the call, such as `0/1`; `path` is that of its current attempt, such as `0/1.2`.
    """

    call: str
    path: str

    @property
    def run_id(self) -> str:
        """The id of the run."""
        ...

    @property
    def is_recorded(self) -> bool:
        """True if the next attempt of this call has a recorded result, so that the tool does not run."""
        ...

    @property
    def is_entered(self) -> bool:
        """True if a service already runs as the tool at this place."""
        ...


# --- the invocation


class Cancellation:
    """The cancellation of one invocation, shared by all code that runs for it, on any thread."""

    # Defaults are class attributes: each invocation has one, and most are never cancelled or followed.
    _given_up = False
    _followers: Mapping[object, Callable[[], object]] = MappingProxyType({})

    @property
    def cancelled(self) -> bool:
        """Return True if the invocation was cancelled."""
        return self._given_up

    def cancel(self) -> None:
        """Cancel the invocation and the followers, such as invocations that its tools started on other threads."""
        self._given_up = True
        for follow in [*self._followers.values()]:
            follow()

    def followed_by(self, follow: Callable[[], object]) -> Callable[[], object]:
        """Call `follow` on cancellation, immediately if already cancelled. Return a function that stops following.

        Safe to call on any thread.
        """
        key = object()
        followers: dict[object, Callable[[], object]] = self.__dict__.setdefault("_followers", {})  # in one step
        followers[key] = follow
        if self.cancelled:
            follow()
        return lambda: followers.pop(key, None)


_numbers = count(1)
_process_id = ""


def _name_process() -> None:
    global _process_id
    _process_id = os.urandom(8).hex()


_name_process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_name_process)


def _make_invocation_id() -> str:
    """Return an id that is unique across processes. Must be fast: each invocation needs one."""
    return f"{_process_id}-{next(_numbers):x}"


@dataclass(frozen=True)
class InvocationContext:
    """The current service call: a tool parameter of this type, or `InvocationContext.current()`.

    - `service`, `method`: the service class and the name of the called method.
    - `memory_id`: the conversation's id, or None. `user_message`: the user message of the call.
    - `attributes`: the values of `invocation_attributes(…)`.
    - `deadline`: in `time.monotonic()` seconds, or None without a limit.
    - `request`: the tool call; None outside of tools.
    - `cancelled`: becomes True when the invocation is cancelled. Long tools on threads should check it.
    - `invocation_id`: unique id, for example in logs. `outer_invocation_id`: id of the invocation that started this
      one, for example when a service is a tool of another service.
    - `notes`: one dictionary per invocation, empty at first. Tools, tool providers, handlers and system messages may
      read and change it. A service that is called as a tool has separate notes. A tool in another process gets a copy
      of the notes that can be pickled.
    - `approved_by`: the name or `SecurityIdentity` of the person who approved this tool call; None without approval.
    - `user`: the name of the caller's `SecurityIdentity`, for logs and traces; None for an anonymous caller.
    - `entry`: the method that was called, such as `"Desk.chat"`. After a hand-over, `service` and `method` are those in
      charge, and this one stays. None outside of AI services.
    - `place`: for the framework only: the place of a tool call in its run.
    """

    service: type[Any]
    method: str
    memory_id: Any = None
    user_message: UserMessage | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    deadline: float | None = None
    request: ToolExecutionRequest | None = None
    cancellation: Cancellation = field(default_factory=Cancellation, compare=False, repr=False)
    invocation_id: str = field(default_factory=_make_invocation_id, compare=False, repr=False)
    outer_invocation_id: str | None = field(default=None, compare=False, repr=False)
    notes: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    approved_by: Any = None
    place: CallPlace | None = field(default=None, compare=False, repr=False)
    user: str | None = field(default=None, compare=False, repr=False)
    entry: str | None = field(default=None, compare=False, repr=False)

    @property
    def cancelled(self) -> bool:
        """Return True if the invocation was cancelled or its time is up."""
        return self.cancellation.cancelled

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process gets the values that can be pickled, and no live cancellation.
        service = self.service if _can_pickle(self.service) else object
        memory_id = self.memory_id if _can_pickle(self.memory_id) else None
        attributes = {name: value for name, value in self.attributes.items() if _can_pickle(value)}
        # Copy first, in one step: other threads can add notes during the loop.
        notes = {name: value for name, value in self.notes.copy().items() if _can_pickle(value)}
        facts = (service, self.method, memory_id, self.user_message, attributes, self.deadline, self.request)
        ids = (self.invocation_id, self.outer_invocation_id)
        return InvocationContext, (*facts, Cancellation(), *ids, notes, self.approved_by, None, self.user, self.entry)

    @staticmethod
    def current() -> InvocationContext | None:
        """Return the invocation that this code runs in, or None."""
        return current_invocation.get()


def in_tool(context: InvocationContext, request: ToolExecutionRequest, cancellation: Cancellation) -> InvocationContext:
    """Return a copy of a context for one tool call."""
    return copy_with(context, request=request, cancellation=cancellation)


def complete_context(context: InvocationContext, **facts: Any) -> None:
    """Set facts of a context that are known only while its call runs, such as who approved it."""
    # Frozen for everybody else. It is not replaced by a copy, because it is one object for the whole call: the tool,
    # the error handlers and the events have it, and listeners find by it where an operation began that has ended.
    for name, value in facts.items():
        object.__setattr__(context, name, value)


def _can_pickle(value: object) -> bool:
    """Return True if a value can be pickled."""
    try:
        pickle.dumps(value)
    except Exception:  # `__reduce__` of user types can raise anything
        return False
    return True


current_invocation: ContextVar[InvocationContext | None] = ContextVar("toolbox.invocation", default=None)


current_bean_caller: ContextVar[Callable[[Callable[..., Any], str], Awaitable[Any]] | None] = ContextVar(
    "toolbox.bean_caller", default=None
)
"""Calls a function with its `Inject[…]` parameters, in the scope of the current invocation. For models, which do not
know beans; the text is the place of the function, for errors."""


current_scope: ContextVar[ActiveScope | None] = ContextVar("toolbox.scope", default=None)
"""The scope of the current tool call, for code without a container, such as the tools of an OpenAPI document."""


def given_up_with_outer(future: Future[T]) -> Future[T]:
    """Return `future`, an invocation on another thread; cancel it when the current invocation is cancelled."""
    outer = current_invocation.get()
    if outer is not None:
        forget = outer.cancellation.followed_by(future.cancel)
        future.add_done_callback(lambda _: forget())
    return future


current_observers: ContextVar[frozenset[int]] = ContextVar("toolbox.observers", default=frozenset())
"""The observers whose calls have led to this code: events that they cause do not reach them."""


def context_of_a_run() -> Context:
    """Return an empty context for a run: of the code that starts it, only the observers that led to it are known."""
    context = Context()
    context.run(current_observers.set, current_observers.get())
    return context


_NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})
current_attributes: ContextVar[Mapping[str, Any]] = ContextVar("toolbox.attributes", default=_NO_ATTRIBUTES)
"""The attributes that the surrounding `invocation_attributes` blocks set."""


def run_for(context: InvocationContext | None, call: Callable[[], T]) -> T:
    """Run `call` in a new context that contains only `context`, without variables that a fork copied."""

    def run() -> T:
        current_invocation.set(context)
        current_attributes.set(context.attributes if context is not None else _NO_ATTRIBUTES)
        return call()

    return Context().run(run)


@contextmanager
def invocation_attributes(**attributes: Any) -> Iterator[None]:
    """Set `InvocationContext.attributes` for invocations that start inside the block.

        with invocation_attributes(tenant="acme"):
            await assistant.chat("…")

    The attributes of nested blocks are merged.
    """
    token = current_attributes.set(MappingProxyType({**current_attributes.get(), **attributes}))
    try:
        yield
    finally:
        current_attributes.reset(token)


@contextmanager
def restored_attributes(attributes: Mapping[str, Any]) -> Iterator[None]:
    """Set exactly these attributes for invocations that start inside the block, without those of outer blocks."""
    token = current_attributes.set(MappingProxyType(dict(attributes)))
    try:
        yield
    finally:
        current_attributes.reset(token)


# --- time limits


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """A time limit for the invocations that start in a block.

    `deadline` is in `time.monotonic()` seconds; `seconds` is the user's value. The limit does not end the invocation
    `within`, which contains the block.
    """

    deadline: float
    seconds: float
    within: InvocationContext | None


current_limit: ContextVar[TimeLimit | None] = ContextVar("toolbox.limit", default=None)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Limit the time of service calls in the block: they raise `InvocationTimeoutError` after `seconds`.

        with time_limit(10):
            await assistant.chat("…")

    The time starts when the block is entered. The outermost service call in the block raises the error; calls that its
    tools make are cancelled. Raises `ValueError` unless `seconds` is above 0.
    """
    if not (is_number(seconds) and seconds > 0):
        raise ValueError(f"time_limit: invalid seconds={seconds!r}; use a number of seconds above 0")
    limit = TimeLimit(time.monotonic() + seconds, seconds, current_invocation.get())
    outer = current_limit.get()
    # A longer limit inside a shorter one has no effect.
    token = current_limit.set(outer if outer is not None and outer.deadline <= limit.deadline else limit)
    try:
        yield
    finally:
        current_limit.reset(token)


# --- the current span


def headers_of_current_span() -> dict[str, str]:
    """Return the headers with which OpenTelemetry's propagator passes the current span on; empty without tracing."""
    # A program that uses tracing has already imported OpenTelemetry; other programs may not have it installed.
    if "opentelemetry.trace" not in sys.modules:
        return {}
    headers: dict[str, str] = {}
    importlib.import_module("opentelemetry.propagate").inject(headers)
    return headers
