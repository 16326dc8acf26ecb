"""The object behind a service's Protocol: each method binds its arguments, begins an invocation and waits for it.

Not here: what an invocation does (`driver`), a service without a container (`standalone`).
"""

from __future__ import annotations

import asyncio
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, cast

from ..context import WhileCallerWaits, given_up_with_outer
from ..execution import CallerRunner, refuse_on_event_loop
from .declaration import SERVICE_MARK
from .driver import Invocation
from .host import ServiceHost
from .outcomes import items, run_to_end, texts
from .outputs import Shape
from .plans import MethodPlan
from .streams import EventStream, ServiceStream, iterate


def implementation_of(cls: type[Any], plans: Mapping[str, MethodPlan], host: ServiceHost) -> type[Any]:
    """A class that implements the service `cls`: its methods call models through `host`."""

    def tool_call(self: object, name: str) -> Callable[..., Any]:
        function = functools.partial(_call, plans[name], host, True)
        setattr(function, SERVICE_MARK, True)
        return function

    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": f"{cls.__qualname__}Implementation",
        "__doc__": cls.__doc__,
        "__toolbox_tool_call__": tool_call,
    }
    for name, plan in plans.items():
        namespace[name] = _method(cls, plan, host)
    return types.new_class(f"{cls.__name__}Implementation", (cls,), {}, lambda body: body.update(namespace))


def _method(cls: type[Any], plan: MethodPlan, host: ServiceHost) -> Callable[..., Any]:
    declared = getattr(cls, plan.name)
    if plan.is_coroutine:

        @functools.wraps(declared)
        async def asynchronous(self: object, *args: Any, **kwargs: Any) -> Any:
            return await _call(plan, host, False, *args, **kwargs)

        method: Callable[..., Any] = asynchronous
    else:

        @functools.wraps(declared)
        def synchronous(self: object, *args: Any, **kwargs: Any) -> Any:
            return _call(plan, host, False, *args, **kwargs)

        method = synchronous
    method.__dict__.pop("__isabstractmethod__", None)
    return method


def _call(plan: MethodPlan, host: ServiceHost, as_tool: bool, /, *args: Any, **kwargs: Any) -> Any:
    """A call: a coroutine, a stream or the value, as the method is declared. As a tool: no memory, and no stream."""
    if as_tool and plan.memory_parameter is not None:
        kwargs.setdefault(plan.memory_parameter, None)
    try:
        bound = plan.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{plan.where}(): {error}") from None
    bound.apply_defaults()
    streaming = plan.output.is_stream and not as_tool

    def begin() -> Invocation:
        return Invocation(plan, host, bound.arguments, streaming=streaming, as_tool=as_tool)

    if streaming:
        return _stream(plan, host, begin)
    if plan.is_async:
        return _awaited(host, begin)
    return _waited_for(plan, host, begin)


async def _awaited(host: ServiceHost, begin: Callable[[], Invocation]) -> Any:
    with WhileCallerWaits():
        home = host.loop
        invocation = begin()
        if home is None or home is asyncio.get_running_loop():
            return await run_to_end(invocation)
        running = asyncio.run_coroutine_threadsafe(run_to_end(invocation), home)
        return await asyncio.wrap_future(given_up_with_outer(running))


def _waited_for(plan: MethodPlan, host: ServiceHost, begin: Callable[[], Invocation]) -> Any:
    refuse_on_event_loop(f"{plan.where}()")
    loop = host.sync_loop()
    invocation = begin()
    runner = _caller_runner(invocation)
    running = asyncio.run_coroutine_threadsafe(_while_caller_waits(invocation), loop)
    return runner.wait_for(given_up_with_outer(running))


def _caller_runner(invocation: Invocation) -> CallerRunner:
    runner = cast("CallerRunner", invocation.runner)
    runner.has_deadline = invocation.deadline is not None
    return runner


async def _while_caller_waits(invocation: Invocation) -> Any:
    with WhileCallerWaits():
        return await run_to_end(invocation)


def watched_call(
    plan: MethodPlan, host: ServiceHost, arguments: Mapping[str, Any]
) -> tuple[EventStream, Callable[[], Any]]:
    """Begin a call of a method, whatever it returns, as the stream of its events, for code that shows them.

    The function gives the method's value when the stream has ended.
    """
    bound = plan.signature.bind(**arguments)
    bound.apply_defaults()
    begun: list[Invocation] = []

    def begin() -> Invocation:
        begun.append(Invocation(plan, host, bound.arguments, streaming=True))
        return begun[0]

    return EventStream(begin, lambda invocation: invocation.events()), lambda: begun[0].value()


def _stream(plan: MethodPlan, host: ServiceHost, begin: Callable[[], Invocation]) -> Any:
    match plan.output.shape:
        case Shape.EVENT_STREAM:
            return EventStream(begin, lambda invocation: invocation.events())
        case Shape.ITEM_STREAM:
            return ServiceStream(begin, items)
        case _ if not plan.output.synchronous:
            return ServiceStream(begin, texts)
    refuse_on_event_loop(f"{plan.where}()")
    invocation = begin()
    stream = ServiceStream(lambda: invocation, texts)
    return iterate(stream, _caller_runner(invocation), host.sync_loop(), f"{plan.where}()")
