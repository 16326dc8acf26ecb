"""What a call finds around it: its invocation, attributes, time limit, active bean scope, injected parameters.

All of it travels in context variables, so that it follows tasks, threads and streams. Not here: how scopes hold beans
(`di.scopes`), how a call is carried to another thread (`execution`).
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar, cast

from typing_extensions import TypeForm

from .chat import ToolExecutionRequest, UserMessage
from .errors import IllegalConfigurationError, Problem

T = TypeVar("T")


# --- a context of its own for a piece of a task

NOT_BEGUN: Any = object()
"""What an `InContext` step that has not been begun waits for."""


class InContext(Awaitable[T]):
    """Awaits `step`, a coroutine or what is awaited like one, with every piece of its code run in `context`.

    The context variables that it sets stay in that context; the task is the one that awaits this. `asked` is what the
    step waits for, when it has been begun already.
    """

    __slots__ = ("_asked", "_context", "_step")

    def __init__(self, context: Context, step: Any, asked: Any = NOT_BEGUN) -> None:
        self._context, self._step, self._asked = context, step, asked

    def __await__(self) -> Generator[Any, Any, T]:
        run, step, asked = self._context.run, self._step, self._asked
        answer: Any = None
        error: BaseException | None = None
        while True:
            if asked is not NOT_BEGUN:
                answer, error = None, None
                try:
                    answer = yield asked
                except BaseException as thrown:  # GeneratorExit too: the code inside decides what to do
                    error = thrown
            try:
                asked = run(step.send, answer) if error is None else run(step.throw, error)
            except StopIteration as stop:
                return cast("T", stop.value)


# --- parameters that are filled by the library, hidden from the model


@dataclass(frozen=True, slots=True)
class MemoryIdMark:
    """Marks the parameter that holds the conversation's id."""


@dataclass(frozen=True, slots=True)
class InjectMark:
    """Marks a parameter that receives a bean of the current scope."""

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> object:
        # Only FastAPI asks for this, on a route whose annotations were evaluated before FastAPI was imported.
        raise IllegalConfigurationError(
            [
                Problem(
                    where=f"a parameter Inject[{getattr(source, '__name__', source)}]",
                    what="FastAPI was imported after this annotation was evaluated, so it does not know Inject",
                    fix="import fastapi or toolbox_fastapi above it, or write `from toolbox_fastapi import Inject`",
                )
            ]
        )


_endpoint_metadata: Callable[[object], tuple[object, ...]] | None = None


def support_endpoints(metadata: Callable[[object], tuple[object, ...]]) -> None:
    """Set the function that returns what a web framework needs in the metadata of `Inject[T]`, given T."""
    global _endpoint_metadata
    _endpoint_metadata = metadata


MEMORY_ID = MemoryIdMark()
INJECT = InjectMark()

if TYPE_CHECKING:
    MemoryId = Annotated[T, MEMORY_ID]
    Inject = Annotated[T, INJECT]
else:

    class MemoryId:
        """`MemoryId[T]`: names the conversation; in a tool, that of the calling service."""

        def __class_getitem__(cls, item: object) -> object:
            return Annotated[item, MEMORY_ID]

    class Inject:
        """A parameter that the container fills: `Inject[T]` receives a bean of type T from the current scope.

        Works in tools, in functions that the container calls, and in FastAPI endpoints and dependencies. A model and an
        HTTP client never see the parameter.

            @tool
            def my_orders(self, user: Inject[User]) -> list[Order]: ...
        """

        def __class_getitem__(cls, item: object) -> object:
            if _endpoint_metadata is None and "fastapi" in sys.modules:
                import_module("toolbox_fastapi")  # calls support_endpoints; by name, because it lies above this package
            return Annotated[item, INJECT, *(_endpoint_metadata(item) if _endpoint_metadata is not None else ())]


# --- the active scope


class CallScope(Protocol):
    """The bean scope of one tool call. Entered where the tool is dispatched, closed when it has ended."""

    def __enter__(self) -> CallScope:
        """Makes it the active scope of the current context."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Makes the scope that was active before the active one again; closes nothing."""
        ...

    def close_here(self, error: BaseException | None) -> None:
        """Closes beans on this thread, newest first, until one has to be awaited; raises what they raise."""
        ...

    async def aclose(self, error: BaseException | None) -> None:
        """Closes what is left, all of it, with `error` thrown into generators; raises what they raise."""
        ...


class ActiveScope(Protocol):
    """Where a call finds its beans: whatever scope of its container is active at that moment."""

    def get(self, wanted: TypeForm[T], name: str | None = None) -> T:
        """The bean, made now if need be. Raises `AsyncBeanError` when a part of it has to be awaited."""
        ...

    async def aget(self, wanted: TypeForm[T], name: str | None = None) -> T:
        """The bean, awaiting what has to be."""
        ...

    async def prepare(self, wanted: TypeForm[Any], name: str | None = None) -> None:
        """Makes only what has to be awaited for this bean, so that `get` can make the rest on any thread."""
        ...

    def open_call_scope(self) -> CallScope:
        """A new scope for one tool call, below the active one."""
        ...


# --- the invocation


class Cancellation:
    """Whether an invocation has been given up; shared by all who work for it, on any thread."""

    __slots__ = ("_followers", "_given_up")

    def __init__(self) -> None:
        self._given_up = False
        self._followers: dict[object, Callable[[], object]] = {}

    @property
    def cancelled(self) -> bool:
        """Whether it has been given up."""
        return self._given_up

    def cancel(self) -> None:
        """It is given up, and so is what its tools have begun and wait for on other threads."""
        self._given_up = True
        for follow in [*self._followers.values()]:
            follow()

    def followed_by(self, follow: Callable[[], object]) -> Callable[[], object]:
        """Calls `follow` when it is given up, at once if it has been; what this returns ends that. For any thread."""
        key = object()
        self._followers[key] = follow
        if self.cancelled:
            follow()
        return lambda: self._followers.pop(key, None)


_numbers = count(1)
_process_id = ""


def _name_process() -> None:
    global _process_id
    _process_id = os.urandom(8).hex()


_name_process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_name_process)


def _new_invocation_id() -> str:
    """No other invocation's, in any process; cheap, for each invocation makes one."""
    return f"{_process_id}-{next(_numbers):x}"


@dataclass(frozen=True)
class InvocationContext:
    """The call of a service that is under way.

    `service` is the class, `method` its name; `deadline` is in `time.monotonic()` seconds, None without a limit;
    `request` is set inside a tool call. `cancelled` is live: it turns true when the invocation is given up, which a
    tool on a thread should look at from time to time. `invocation_id` names it, in logs for instance, and
    `outer_invocation_id` the one it was begun in, as when a service is another's tool. `notes` is one dictionary for
    the whole invocation, empty at first: its tools, tool providers, handlers and system message may read and change it.
    A service that is called as a tool has its own. A tool in another process gets a copy of the notes that pickle.
    """

    service: type[Any]
    method: str
    memory_id: Any = None
    user_message: UserMessage | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    deadline: float | None = None
    request: ToolExecutionRequest | None = None
    cancellation: Cancellation = field(default_factory=Cancellation, compare=False, repr=False)
    invocation_id: str = field(default_factory=_new_invocation_id, compare=False, repr=False)
    outer_invocation_id: str | None = field(default=None, compare=False, repr=False)
    notes: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def cancelled(self) -> bool:
        """Whether the invocation has been cancelled or has run out of time."""
        return self.cancellation.cancelled

    def __reduce__(self) -> tuple[Any, ...]:
        # To another process goes what can go there: attributes that pickle, no live cancellation.
        service = self.service if _travels(self.service) else object
        memory_id = self.memory_id if _travels(self.memory_id) else None
        attributes = {name: value for name, value in self.attributes.items() if _travels(value)}
        # A copy in one step: other threads may add notes meanwhile.
        notes = {name: value for name, value in self.notes.copy().items() if _travels(value)}
        facts = (service, self.method, memory_id, self.user_message, attributes, self.deadline, self.request)
        return InvocationContext, (*facts, Cancellation(), self.invocation_id, self.outer_invocation_id, notes)

    def in_tool(self, request: ToolExecutionRequest, cancellation: Cancellation | None = None) -> InvocationContext:
        """The same invocation, inside the tool call `request`, which may be given up by itself."""
        inside = object.__new__(InvocationContext)
        fields = inside.__dict__  # the quickest way to a copy: each tool call makes one
        fields.update(self.__dict__)
        fields["request"] = request
        if cancellation is not None:
            fields["cancellation"] = cancellation
        return inside

    @staticmethod
    def current() -> InvocationContext | None:
        """The invocation this code runs for; None outside of one."""
        return current_invocation.get()


def _travels(value: object) -> bool:
    """Whether a value can be pickled."""
    try:
        pickle.dumps(value)
    except Exception:  # whatever an object's own pickling raises
        return False
    return True


current_invocation: ContextVar[InvocationContext | None] = ContextVar("toolbox.invocation", default=None)


def given_up_with_outer(future: Future[T]) -> Future[T]:
    """`future`, an invocation on another thread; it is cancelled when the one that this code runs for is given up."""
    outer = current_invocation.get()
    if outer is not None:
        forget = outer.cancellation.followed_by(future.cancel)
        future.add_done_callback(lambda _: forget())
    return future


_NOTHING: Mapping[str, Any] = MappingProxyType({})
_attributes: ContextVar[Mapping[str, Any]] = ContextVar("toolbox.attributes", default=_NOTHING)


def current_attributes() -> Mapping[str, Any]:
    """What `invocation_attributes` has set around this code."""
    return _attributes.get()


def run_for(context: InvocationContext | None, call: Callable[[], T]) -> T:
    """`call()` in a fresh context in which only `context` is known: in another process, whatever was forked with it."""

    def run() -> T:
        current_invocation.set(context)
        _attributes.set(context.attributes if context is not None else _NOTHING)
        return call()

    return Context().run(run)


@contextmanager
def invocation_attributes(**attributes: Any) -> Iterator[None]:
    """Sets what `InvocationContext.attributes` holds in the invocations begun inside; nested, they are merged."""
    token = _attributes.set(MappingProxyType({**_attributes.get(), **attributes}))
    try:
        yield
    finally:
        _attributes.reset(token)


# --- time limits


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """A limit on the invocations begun in a block.

    `deadline` is in `time.monotonic()` seconds, `seconds` is what the user asked for. The invocation `within` which the
    block stands is not ended by it; those begun inside it are.
    """

    deadline: float
    seconds: float
    within: InvocationContext | None


current_limit: ContextVar[TimeLimit | None] = ContextVar("toolbox.limit", default=None)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends invocations begun inside with `InvocationTimeoutError`, `seconds` after the block was entered.

    The limit belongs to the outermost invocation inside: those that its tools begin are just cancelled with it.
    """
    if not seconds > 0:
        raise ValueError(f"time_limit({seconds}); use a number of seconds above 0")
    limit = TimeLimit(time.monotonic() + seconds, seconds, current_invocation.get())
    outer = current_limit.get()
    # A longer limit inside a shorter one changes nothing.
    token = current_limit.set(outer if outer is not None and outer.deadline <= limit.deadline else limit)
    try:
        yield
    finally:
        current_limit.reset(token)


# --- the caller that may leave


class Caller(Protocol):
    """Who waits for what an invocation answers and may leave before it is there: the client of a web request."""

    def watch(self, leave: Callable[[Exception], None]) -> Callable[[], None]:
        """Calls `leave(error)`, on any thread, when the caller leaves; what this returns ends the watch."""
        ...


current_caller: ContextVar[Caller | None] = ContextVar("toolbox.caller", default=None)


class WhileCallerWaits:
    """`with WhileCallerWaits():` around what an invocation awaits: if the caller leaves, that ends with its error.

    As with `asyncio.timeout`, the task is cancelled and the cancellation then replaced, here by what the caller gave.
    Only the outermost invocation is ended so; those that its tools began are just cancelled with it. A stream enters
    it around each step, since between two steps the task is its consumer's.
    """

    __slots__ = ("_cancelling", "_end", "_error", "_loop", "_task")

    _task: asyncio.Task[Any] | None

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._end: Callable[[], None] | None = None

    def __enter__(self) -> None:
        caller = current_caller.get()
        if caller is None or current_invocation.get() is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        self._end = caller.watch(self._leave)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._end is None:
            return
        self._end()
        task, self._task = self._task, None
        if self._error is None or task is None:
            return
        # Someone else may have cancelled the task as well, and then it stays cancelled.
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._error from error

    def _leave(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._cancel, error)

    def _cancel(self, error: Exception) -> None:
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()
