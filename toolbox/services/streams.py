"""The streams that service methods return, and how they are read: with `async for`, and on threads with `for`.

A stream begins when its first item is requested, in the context of the call that created it. It is closed when its
reader leaves or drops it, or when its container stops. Not here: what happens in the call (`driver`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeAlias, TypeVar, cast

from ..callers import WhileCallerWaits
from ..chat import IntermediateResponse, PartialResponse
from ..context import given_up_with_outer
from ..conversations.memories import Caller, caller_here
from ..errors import OutputParsingError
from ..execution.runners import CallerRunner
from ..execution.threads import on_event_loop, refuse_on_event_loop
from ..service_events import ServiceEvent
from .driver import stream
from .host_needs import ServiceHost
from .invocation import Invocation
from .loop import Finish, cut_or_wrong, read_items
from .outputs import ItemReader, Shape, TokenStream
from .plans import MethodPlan

logger = logging.getLogger("toolbox.services")

T = TypeVar("T")

Put: TypeAlias = Callable[[Any], Awaitable[None]]
"""Gives the reader of a stream an item, and returns when the reader requests the next one."""

Produce: TypeAlias = Callable[[Invocation, Put], Coroutine[Any, Any, None]]
"""Runs an invocation, and puts the items of its stream."""


# --- what the streams contain


async def put_texts(invocation: Invocation, put: Put) -> None:
    """Put the text of all rounds, piece by piece."""

    async def send(event: ServiceEvent) -> None:
        if isinstance(event, PartialResponse):
            await put(event.text)

    await stream(invocation, send)


async def put_items(invocation: Invocation, put: Put) -> None:
    """Put the items of the list in the last reply, each as soon as it is complete."""
    structure = invocation.plan.output.structure
    assert structure is not None
    item_type = structure.item_type
    assert item_type is not None
    if any(each.layers.check_answer is not None for each in (invocation.entry, *invocation.entry.team.values())):
        # Exactly the items that the guardrails have judged, not a second reading of the same text.
        await stream(invocation, _ignore)
        end, value = invocation.end, invocation.value()
        is_fallback = isinstance(end, Finish) and end.is_fallback
        if (
            isinstance(end, Finish)
            and value is None
            and not is_fallback
            and invocation.plan.layers.check_answer is None
        ):
            # Guardrails of the team judge, but none of the method in charge, so the loop has not read the answer.
            reply = end.response.ai_message
            value = () if reply.has_tool_execution_requests else read_items(structure, end.response)
        for item in (value,) if is_fallback else value or ():
            await put(item)
        return
    reader = ItemReader(item_type, structure.item_beginnings)

    def check(end: Finish) -> None:
        if end.response.ai_message.has_tool_execution_requests:
            return
        try:
            reader.finish()
        except OutputParsingError as error:
            if invocation.state.stopped is None:
                raise cut_or_wrong(error, end.response) from None
            raise invocation.state.stopped.error(invocation.state.messages) from None

    async def send(event: ServiceEvent) -> None:
        nonlocal reader
        if isinstance(event, PartialResponse):
            for item in reader.feed(event.text):
                await put(item)
        elif isinstance(event, IntermediateResponse):
            reader = ItemReader(item_type, structure.item_beginnings)

    invocation.before_end = check
    await stream(invocation, send)
    if isinstance(invocation.end, Finish) and invocation.end.is_fallback:
        await put(invocation.end.value)


async def _ignore(_: ServiceEvent) -> None:
    """Ignore an event."""


# --- the stream

_END = object()
_NONE = object()


class Handover:
    """Passes items from a task to the reader of its stream, one at a time, so that a slow reader slows the task.

    Each of the two waits for the other with one future, on the loop of the task. An item that was passed on and not
    taken comes before the end.
    """

    _item: Any = _NONE
    _has_ended = False
    _reading: asyncio.Future[None] | None = None  # a reader waits for an item
    _requested: asyncio.Future[None] | None = None  # the task waits for a request

    async def put(self, item: Any) -> None:
        """Pass one item on. Returns when the next one is requested."""
        self._item = item
        _wake(self._reading)
        self._requested = asyncio.get_running_loop().create_future()
        await self._requested

    async def take(self) -> Any:
        """Request the next item, and wait for it; `_END` after the last."""
        _wake(self._requested)
        if self._item is _NONE and not self._has_ended:
            self._reading = asyncio.get_running_loop().create_future()
            await self._reading
        item, self._item = self._item, _NONE
        return _END if item is _NONE else item

    def end(self, _: object) -> None:
        """Tell the reader that the task has ended."""
        self._has_ended = True
        _wake(self._reading)


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


class ServiceStream(AsyncIterator[T], Generic[T]):
    """The stream of a streaming service method. `aclose()`, or leaving `async with`, cancels the call.

    The call runs in a separate task and hands over one item at a time. An async generator would run it in the tasks of
    its readers, in parts: timeouts, limits and the cancel scopes of tools belong to one task, and break if the next
    part runs in another one. So each item may be read by another task, which is free between two items.

    The task does not know the stream. A stream that its reader drops is therefore collected, which ends the task.
    """

    _task: asyncio.Task[None] | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _invocation: Invocation | None = None
    _is_awaited = False  # a reader waits for the next item
    _is_closed = False

    def __init__(self, begin: Callable[[], Invocation], produce: Produce) -> None:
        self._begin, self._produce = begin, produce
        self._context = copy_context()
        self._handover = Handover()

    def __aiter__(self) -> ServiceStream[T]:
        return self

    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            raise TypeError(
                "iterate a service's stream with `async for`, or return it from an endpoint with `return sse(…)`"
            )

    def __anext__(self) -> Coroutine[Any, Any, T]:
        """Return the next item."""
        return self.read()

    async def read(self, reader: Caller | None = None) -> T:
        """Return the next item, for the thread that is the `reader`, else for this task.

        Raises `StopAsyncIteration` at the end.
        """
        if self._is_closed:
            raise StopAsyncIteration
        if self._invocation is None:
            self._invocation = self._context.run(self._begin)
        invocation = self._invocation
        if invocation.memory_key is not None:
            reader = invocation.caller = reader or caller_here()  # whose own call in the conversation would wait
        home = self._loop or invocation.host.loop
        if home is not None and home is not asyncio.get_running_loop():
            reading = asyncio.run_coroutine_threadsafe(self.read(reader), home)
            return await asyncio.wrap_future(given_up_with_outer(reading))
        if self._is_awaited:
            raise RuntimeError(
                f"{invocation.where}: another task is already waiting for the next item of this stream; use one reader "
                "at a time"
            )
        self._is_awaited = True
        try:
            with WhileCallerWaits(), invocation.host.running.task(invocation.where):
                task = self._task or self._start(invocation)
                try:
                    item = await self._handover.take()
                except asyncio.CancelledError:
                    # A reader that is cancelled while it waits is inside of the call, as one that awaits a plain
                    # method: the call is cancelled with it, and has ended when the reader gets its `CancelledError`, so
                    # that nothing of it goes on unseen. A reader that is cancelled between two items is not: `aclose`
                    # or dropping the stream ends the call.
                    await self._cancel(task)
                    raise
        finally:
            self._is_awaited = False
        if item is _END:
            self._end_iteration(task)
        return cast("T", item)

    def _start(self, invocation: Invocation) -> asyncio.Task[None]:
        """Start the call in a task."""
        self._loop = asyncio.get_running_loop()
        producing = self._produce(invocation, self._handover.put)  # not a method of the stream, which it would keep
        self._task = task = self._loop.create_task(producing, context=self._context)
        _tasks.add(task)
        invocation.host.running.open_stream(invocation.where, self, task)
        task.add_done_callback(_tasks.discard)
        task.add_done_callback(self._handover.end)
        return task

    def _end_iteration(self, task: asyncio.Task[None]) -> NoReturn:
        """Raise the error of the call, or `StopAsyncIteration`. Who has left the stream knows that it is cancelled."""
        was_left, self._is_closed = self._is_closed, True
        if not (was_left and task.cancelled()):
            task.result()
        raise StopAsyncIteration

    # --- leaving

    async def aclose(self) -> None:
        """Cancel the call: close the model's stream, cancel the tools, store no answer.

        If a task is waiting for the next item, its iteration ends.
        """
        task, home = self._task, self._loop
        if task is None or home is None:
            self._is_closed = True
        elif home is not asyncio.get_running_loop():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.aclose(), home))
        elif task is asyncio.current_task():
            raise RuntimeError("a stream cannot be closed from inside its own call; raise ToolAbort(…) to end the call")
        else:
            is_reported = self._is_awaited or self._is_closed  # its reader gets an error of the call
            await self._cancel(task)
            if not (is_reported or task.cancelled()):
                task.result()

    async def _cancel(self, task: asyncio.Task[None]) -> None:
        """Cancel the call once, and wait for its end: a second cancellation would interrupt what it closes."""
        if not self._is_closed:
            self._is_closed = True
            self._forget_reader()
            task.cancel("the stream was left")
        await asyncio.wait([task])

    def _forget_reader(self) -> None:
        """Note that there is no reader, so that a former reader can wait for the conversation."""
        if self._invocation is not None:
            self._invocation.caller = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        try:
            await self.aclose()
        except Exception as error:
            if not any(raised):
                raise
            # The error of the reader goes on.
            assert self._invocation is not None
            where = self._invocation.where
            logger.warning(
                "%s failed, and the reader of its stream had another error: %s", where, error, exc_info=error
            )

    def __del__(self) -> None:
        # The reader dropped the stream: end the call on its own loop.
        if self._task is None or self._loop is None or self._task.done() or self._loop.is_closed():
            return
        self._forget_reader()
        with suppress(RuntimeError):  # the loop has just been closed
            self._loop.call_soon_threadsafe(self._task.cancel, "the stream was left")


_tasks: set[asyncio.Task[None]] = set()  # the loop itself has only weak references


class EventStream(ServiceStream[ServiceEvent], TokenStream):
    """The `TokenStream` that a service method returns."""


# --- streams of methods


def stream_of_method(plan: MethodPlan, host: ServiceHost, begin: Callable[[], Invocation]) -> Any:
    """Return the stream that a call of a streaming method returns."""
    match plan.output.shape:
        case Shape.EVENT_STREAM:
            return EventStream(begin, stream)
        case Shape.ITEM_STREAM:
            return ServiceStream(begin, put_items)
        case _ if not plan.output.synchronous:
            return ServiceStream(begin, put_texts)
    refuse_on_event_loop(f"{plan.where}()")
    invocation = begin()
    texts: ServiceStream[str] = ServiceStream(invocation.restart_clock, put_texts)
    return iterate(texts, invocation.caller_runner(), host.sync_loop())


def watched_call(
    plan: MethodPlan, host: ServiceHost, arguments: Mapping[str, Any]
) -> tuple[EventStream, Callable[[], Any]]:
    """Start a call of any method, on the running loop, as a stream of its events, for code that displays them.

    Returns the stream, and a function that returns the method's value after the stream has ended.
    """
    bound = plan.bind((), arguments)
    begun: list[Invocation] = []

    def begin() -> Invocation:
        begun.append(Invocation(plan, host, bound))
        begun[0].yields_suspension = True
        return begun[0]

    return EventStream(begin, stream), lambda: begun[0].value()


def iterate(stream: ServiceStream[T], runner: CallerRunner, loop: asyncio.AbstractEventLoop) -> Iterator[T]:
    """Iterate over `stream` on a thread without an event loop, which runs its blocking tools while it waits.

    The call runs on `loop`.
    """
    try:
        while True:
            try:
                reading = asyncio.run_coroutine_threadsafe(stream.read(caller_here()), loop)
                item = runner.wait_for(given_up_with_outer(reading))
            except StopAsyncIteration:
                return
            yield item
    finally:
        left = asyncio.run_coroutine_threadsafe(stream.aclose(), loop)
        if not on_event_loop():  # the garbage collector may run on any thread
            runner.wait_for(left)
