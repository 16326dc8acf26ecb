"""Creates the class that implements a service: each method binds its arguments, starts an invocation and waits for it.

Some methods return a stream, which starts with its first step; each step runs in the context of the call that created
it. It is closed when its reader leaves or drops it, or when its container stops. Not here: running an invocation
(`invocation`, `driver`), services without a container (`standalone`).
"""

from __future__ import annotations

import asyncio
import functools
import types
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar, cast

from ..chat import IntermediateResponse, PartialResponse, ServiceEvent
from ..chat_streams import TextPieces, pieces_in
from ..context import (
    NOT_BEGUN,
    InContext,
    WhileCallerWaits,
    current_bean_caller,
    current_invocation,
    given_up_with_outer,
)
from ..execution.runners import CallerRunner
from ..execution.threads import on_event_loop, refuse_on_event_loop
from ..tools.marks import OWN_TOOL_CALLS, SERVICE_MARK
from .driver import run, stream
from .invocation import Invocation, ServiceHost, is_part_of_run
from .layers import admit, within
from .loop import Finish
from .memory import Caller, caller_here
from .outputs import ItemReader, Shape, TokenStream
from .plans import MethodPlan


def implementation_of(cls: type[Any], plans: Mapping[str, MethodPlan], host: ServiceHost) -> type[Any]:
    """Return a class that implements the service `cls`. Its methods call models through `host`."""

    def tool_call(self: object, name: str) -> Callable[..., Any]:
        function = functools.partial(_as_tool, plans[name], host)
        setattr(function, SERVICE_MARK, True)
        return function

    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": f"{cls.__qualname__}Implementation",
        "__doc__": cls.__doc__,
        OWN_TOOL_CALLS: tool_call,
        "__toolbox_runs__": staticmethod(lambda: host.runs),
    }
    for name, plan in plans.items():
        namespace[name] = _method(cls, plan, host)
    return types.new_class(f"{cls.__name__}Implementation", (cls,), {}, lambda body: body.update(namespace))


def _method(cls: type[Any], plan: MethodPlan, host: ServiceHost) -> Callable[..., Any]:
    declared = getattr(cls, plan.name)
    if plan.is_coroutine:

        @functools.wraps(declared)
        async def asynchronous(self: object, *args: Any, **kwargs: Any) -> Any:
            with WhileCallerWaits():
                home = host.running_loop
                if home is not asyncio.get_running_loop():
                    home = host.loop
                if plan.durable:
                    return await host.runs.call(plan, bound_arguments(plan, args, kwargs))
                invocation = Invocation(plan, host, bound_arguments(plan, args, kwargs))
                if home is None or home is asyncio.get_running_loop():
                    return await run(invocation)
                return await _on_loop(home, invocation)

        method: Callable[..., Any] = asynchronous
    else:

        @functools.wraps(declared)
        def synchronous(self: object, *args: Any, **kwargs: Any) -> Any:
            arguments = bound_arguments(plan, args, kwargs)
            if plan.output.is_stream:
                return _stream(plan, host, _admitted(plan, host, arguments))
            return _waited_for(plan, host, arguments)

        method = synchronous
    method.__dict__.pop("__isabstractmethod__", None)
    return method


def _admitted(plan: MethodPlan, host: ServiceHost, arguments: Mapping[str, Any]) -> Callable[[], Invocation]:
    """Return a function that begins a stream, after the roles of the caller were checked.

    Raises `UnauthenticatedError` or `ForbiddenError`.
    """
    if plan.access is None:
        return lambda: Invocation(plan, host, arguments)
    invocation = Invocation(plan, host, arguments)
    admit(invocation)
    return lambda: invocation


def _as_tool(plan: MethodPlan, host: ServiceHost, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method as a tool, without memory and without streaming. Returns the value or a coroutine."""
    arguments = arguments_as_tool(plan, args, kwargs)
    return (_awaited if plan.is_async else _waited_for)(plan, host, arguments, as_tool=True)


def arguments_as_tool(plan: MethodPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a method that is called as a tool: without those that a model cannot set."""
    hidden = (plan.memory_parameter, plan.call_options)
    return bound_arguments(plan, args, {**{each: None for each in hidden if each is not None}, **kwargs})


def bound_arguments(plan: MethodPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call by name, with defaults. Raises `TypeError`."""
    try:
        bound = plan.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{plan.where}(): {error}") from None
    bound.apply_defaults()
    return bound.arguments


async def _awaited(plan: MethodPlan, host: ServiceHost, arguments: Mapping[str, Any], as_tool: bool = False) -> Any:
    with WhileCallerWaits():
        home = host.loop
        if plan.durable and not is_part_of_run():
            return await host.runs.call(plan, arguments)
        invocation = Invocation(plan, host, arguments, as_tool=as_tool)
        if home is None or home is asyncio.get_running_loop():
            return await run(invocation)
        return await _on_loop(home, invocation)


async def _on_loop(home: asyncio.AbstractEventLoop, invocation: Invocation) -> Any:
    running = asyncio.run_coroutine_threadsafe(run(invocation), home)
    return await asyncio.wrap_future(given_up_with_outer(running))


def _waited_for(plan: MethodPlan, host: ServiceHost, arguments: Mapping[str, Any], as_tool: bool = False) -> Any:
    refuse_on_event_loop(f"{plan.where}()")
    loop = host.sync_loop()
    if plan.durable and not (as_tool and is_part_of_run()):
        calling = asyncio.run_coroutine_threadsafe(host.runs.call(plan, arguments), loop)
        return given_up_with_outer(calling).result()
    invocation = Invocation(plan, host, arguments, as_tool=as_tool)
    runner = _caller_runner(invocation)  # before the invocation can start on the loop's thread
    running = asyncio.run_coroutine_threadsafe(_while_caller_waits(invocation), loop)
    return runner.wait_for(given_up_with_outer(running))


def _caller_runner(invocation: Invocation) -> CallerRunner:
    runner = cast("CallerRunner", invocation.runner)
    runner.has_deadline = invocation.deadline is not None
    return runner


async def _while_caller_waits(invocation: Invocation) -> Any:
    with WhileCallerWaits():
        return await run(invocation)


def watched_call(
    plan: MethodPlan, host: ServiceHost, arguments: Mapping[str, Any]
) -> tuple[EventStream, Callable[[], Any]]:
    """Start a call of any method, on the running loop, as a stream of its events, for code that displays them.

    Returns the stream, and a function that returns the method's value after the stream has ended.
    """
    bound = plan.signature.bind(**arguments)
    bound.apply_defaults()
    begun: list[Invocation] = []

    def begin() -> Invocation:
        begun.append(Invocation(plan, host, bound.arguments, on_loop=True))
        begun[0].yields_suspension = True
        return begun[0]

    return EventStream(begin, stream), lambda: begun[0].value()


def _stream(plan: MethodPlan, host: ServiceHost, begin: Callable[[], Invocation]) -> Any:
    match plan.output.shape:
        case Shape.EVENT_STREAM:
            return EventStream(begin, stream)
        case Shape.ITEM_STREAM:
            return ServiceStream(begin, items)
        case _ if not plan.output.synchronous:
            return TextStream(begin, stream)
    refuse_on_event_loop(f"{plan.where}()")
    invocation = begin()
    texts = TextStream(lambda: invocation, stream)
    return iterate(texts, _caller_runner(invocation), host.sync_loop(), f"{plan.where}()")


# --- streams


T = TypeVar("T")


class ServiceStream(AsyncIterator[T], Generic[T]):
    """The stream of a streaming service method. `aclose()`, or leaving `async with`, cancels the call."""

    _steps: AsyncGenerator[Any, None]
    _texts_only = False  # yields only the pieces of text, not the events

    def __init__(
        self, begin: Callable[[], Invocation], read: Callable[[Invocation], AsyncGenerator[Any, None]]
    ) -> None:
        self._begin, self._read = begin, read
        self._context = copy_context()
        self._invocation: Invocation | None = None
        self._ended: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done = self._closing = False
        self._ready: deque[Any] = deque()  # pieces of text that arrived together
        self._taken_by: asyncio.Task[Any] | None = None  # the task of the current step
        self._left: asyncio.Event | None = None  # the stream was left during a step; set when that step has ended
        self._is_quick = False  # started, and steps that do not wait need no setup
        self._inside = False  # the stream's code runs in such a step
        self._interrupted = False  # the task of that step was cancelled

    def __aiter__(self) -> ServiceStream[T]:
        return self

    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            raise TypeError(
                "iterate a service's stream with `async for`, or return it from an endpoint with `return sse(…)`"
            )

    async def step(self, reader: Caller | None = None) -> T:
        """Return the next item. `reader` is the task or thread that reads; None for the current task."""
        if self._done:
            raise StopAsyncIteration
        taken: Any = None
        asked: Any = NOT_BEGUN
        if self._is_quick and self._taken_by is None:
            # Pieces that are already there need no setup: most pieces arrive several at a time.
            if self._invocation is not None and self._invocation.memory_key is not None:
                self._invocation.caller = reader or caller_here()
            while True:
                while self._ready:
                    item: Any = self._ready.popleft()
                    if not self._texts_only:
                        return cast("T", item)
                    if type(item) is PartialResponse:
                        return item.text  # type: ignore[return-value]  # a stream of texts
                if asyncio._get_running_loop() is not self._loop:
                    break
                taken, self._inside = self._steps.__anext__(), True
                try:
                    asked = self._context.run(taken.send, None)
                    break
                except StopIteration as stop:
                    self._ready.extend(stop.value if type(stop.value) is TextPieces else (stop.value,))
                except BaseException:
                    self._inside = False
                    await self._close()
                    raise
                finally:
                    self._inside = False
        return await self._wait(taken, asked, reader)

    __anext__ = step

    async def _wait(self, taken: Any, asked: Any, reader: Caller | None) -> T:
        """Wait for the next item, or continue a step that was started."""
        invocation = self._invocation or self._started()
        if invocation.memory_key is not None:
            invocation.caller = reader or caller_here()
        loop, home = asyncio.get_running_loop(), invocation.host.loop
        if home is not None and home is not loop:
            step = asyncio.run_coroutine_threadsafe(self.step(reader or caller_here()), home)
            return await asyncio.wrap_future(given_up_with_outer(step))
        if self._taken_by is not None:
            where = invocation.plan.where
            raise RuntimeError(
                f"{where}: another task is already waiting for the next item of this stream; use one reader at a time"
            )
        if self._ended is None:
            self._loop = loop
            self._ended = invocation.host.running.open_stream(self)
            self._is_quick = invocation.deadline is None and invocation.account is None
        self._taken_by = task = asyncio.current_task(loop)
        cancelling = task.cancelling() if task is not None else 0
        try:
            with WhileCallerWaits(), invocation.host.running.task(invocation.plan.where):
                while True:
                    async with within(invocation):
                        if not self._ready:
                            # Not created earlier: Python 3.13 warns about a step that a timeout prevents.
                            found: Any = await InContext(self._context, taken or self._steps.__anext__(), asked)
                            self._ready.extend(found if type(found) is TextPieces else (found,))
                        item: Any = self._ready.popleft()
                    if not self._texts_only:
                        return cast("T", item)
                    if type(item) is PartialResponse:
                        return item.text  # type: ignore[return-value]  # a stream of texts
                    taken, asked = None, NOT_BEGUN
        except BaseException as error:
            await self._close()  # the deadline may have passed between two steps
            # If the task was also cancelled from elsewhere, it stays cancelled.
            was_left = self._interrupted and task is not None and task.cancelling() - 1 <= cancelling
            if was_left and isinstance(error, asyncio.CancelledError):
                raise StopAsyncIteration from None
            raise
        finally:
            self._taken_by = None
            if self._left is not None:
                self._left.set()
            if self._interrupted and task is not None:
                task.uncancel()

    def _started(self) -> Invocation:
        self._invocation = invocation = self._context.run(self._begin)
        self._context.run(current_invocation.set, invocation.context)
        self._context.run(current_bean_caller.set, invocation.call_with_beans)
        self._steps = self._context.run(self._read, invocation)
        return invocation

    def _has_no_reader(self) -> None:
        """Record that there is no reader, so that a former reader can wait for the conversation."""
        if self._invocation is not None:
            self._invocation.caller = None

    def _end(self) -> None:
        self._done = True
        if self._ended is not None:
            self._ended()

    async def aclose(self) -> None:
        """Cancel the call: close the model's stream, cancel the tools, store nothing.

        If a task is waiting for the next item, its iteration ends.
        """
        if self._inside or (self._taken_by is not None and self._taken_by is asyncio.current_task()):
            raise RuntimeError("a stream cannot be closed from inside its own call; raise ToolAbort(…) to end the call")
        begun, self._done = self._ended is not None and (not self._done or self._taken_by is not None), True
        self._has_no_reader()
        if begun and self._loop is not None:
            closing = self._leave()
            if self._loop is asyncio.get_running_loop():
                await closing
            else:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(closing, self._loop))

    async def _leave(self) -> None:
        if self._taken_by is not None:
            if self._left is None:
                self._left, self._interrupted = asyncio.Event(), not self._closing
                if self._interrupted:
                    self._taken_by.cancel()
            await self._left.wait()
        await self._close()

    async def _close(self) -> None:
        self._closing = True
        self._has_no_reader()
        try:
            await InContext(self._context, self._steps.aclose())
        finally:
            self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._done or self._ended is None or self._loop is None or self._loop.is_closed():
            return
        # The reader dropped the stream: close it on its own loop.
        self._has_no_reader()
        closing = self._close()
        try:
            self._loop.call_soon_threadsafe(_spawn, self._loop, closing)
        except RuntimeError:  # the loop has just been closed
            closing.close()


_closing: set[asyncio.Task[None]] = set()


def _spawn(loop: asyncio.AbstractEventLoop, closing: Coroutine[Any, Any, None]) -> None:
    task = loop.create_task(closing)
    _closing.add(task)
    task.add_done_callback(_closing.discard)


class TextStream(ServiceStream[str]):
    """A stream of the text of all rounds."""

    _texts_only = True


async def items(invocation: Invocation) -> AsyncGenerator[Any, None]:
    """Yield the items of the list in the last reply, each as soon as it is complete."""
    structure = invocation.plan.output.structure
    assert structure is not None
    assert structure.item_type is not None
    if invocation.plan.layers.check_answer is not None:
        # Exactly the items that the guardrails have judged, not a second reading of the same text.
        async with aclosing(stream(invocation)) as events:
            async for _ in events:
                pass
        for item in invocation.value() or ():
            yield item
        return
    reader = ItemReader(structure.item_type, structure.item_beginnings)

    def check(end: Finish) -> None:
        if not end.response.ai_message.has_tool_execution_requests:
            reader.finish()

    invocation.before_end = check
    async with aclosing(stream(invocation)) as events:
        async for event in events:
            for piece in pieces_in(event):
                match piece:
                    case PartialResponse(text):
                        for item in reader.feed(text):
                            yield item
                    case IntermediateResponse():
                        reader = ItemReader(structure.item_type, structure.item_beginnings)


class EventStream(ServiceStream[ServiceEvent], TokenStream):
    """The `TokenStream` that a service method returns."""


def iterate(stream: ServiceStream[T], runner: CallerRunner, loop: asyncio.AbstractEventLoop, what: str) -> Iterator[T]:
    """Iterate over `stream` on a thread without an event loop, which runs its blocking tools while it waits.

    The steps run on `loop`. Raises `BlockingCallNotAllowedError` on a thread that runs an event loop.
    """
    refuse_on_event_loop(what)
    return _iterate(stream, runner, loop)


def _iterate(stream: ServiceStream[T], runner: CallerRunner, loop: asyncio.AbstractEventLoop) -> Iterator[T]:
    begun = False
    try:
        while True:
            begun = True
            try:
                step = asyncio.run_coroutine_threadsafe(stream.step(caller_here()), loop)
                item = runner.wait_for(given_up_with_outer(step))
            except StopAsyncIteration:
                return
            yield item
    finally:
        if begun:
            left = asyncio.run_coroutine_threadsafe(stream.aclose(), loop)
            if not on_event_loop():  # the garbage collector may run on any thread
                runner.wait_for(left)
