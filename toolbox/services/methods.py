"""Creates the class that implements a service: each method binds its arguments, starts an invocation and waits for it.

Not here: running an invocation (`invocation`, `driver`), streams (`streams`), services without a container
(`standalone`).
"""

from __future__ import annotations

import asyncio
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from ..callers import WhileCallerWaits
from ..context import given_up_with_outer
from ..execution.threads import refuse_on_event_loop
from ..service_names import SERVICE_MARK
from ..tools.marks import OWN_TOOL_CALLS
from .driver import run
from .host_needs import ServiceHost
from .inner_plans import PLAN_MARK
from .invocation import Invocation, is_part_of_run
from .layers import admit
from .plans import MethodPlan
from .streams import stream_of_method


def implementation_of(cls: type[Any], plans: Mapping[str, MethodPlan], host: ServiceHost) -> type[Any]:
    """Return a class that implements the service `cls`. Its methods call models through `host`."""

    def tool_call(self: object, name: str) -> Callable[..., Any]:
        function = functools.partial(_as_tool, plans[name], host)
        setattr(function, SERVICE_MARK, True)
        setattr(function, PLAN_MARK, plans[name])
        return function

    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": f"{cls.__qualname__}Implementation",
        "__doc__": cls.__doc__,
        OWN_TOOL_CALLS: tool_call,
        "__toolbox_runs__": staticmethod(lambda: host.runs),
    }
    for name, plan in plans.items():
        namespace[name] = _make_method(cls, plan, host)
    return types.new_class(f"{cls.__name__}Implementation", (cls,), {}, lambda body: body.update(namespace))


def _make_method(cls: type[Any], plan: MethodPlan, host: ServiceHost) -> Callable[..., Any]:
    declared = getattr(cls, plan.name)
    if plan.is_coroutine:

        @functools.wraps(declared)
        async def asynchronous(self: object, *args: Any, **kwargs: Any) -> Any:
            return await _await_call(plan, host, plan.bind(args, kwargs))

        method: Callable[..., Any] = asynchronous
    else:

        @functools.wraps(declared)
        def synchronous(self: object, *args: Any, **kwargs: Any) -> Any:
            arguments = plan.bind(args, kwargs)
            if plan.output.is_stream:
                return stream_of_method(plan, host, _begin_admitted(plan, host, arguments))
            return _wait_for_call(plan, host, arguments)

        method = synchronous
    method.__dict__.pop("__isabstractmethod__", None)
    return method


def _begin_admitted(plan: MethodPlan, host: ServiceHost, arguments: Mapping[str, Any]) -> Callable[[], Invocation]:
    """Return a function that begins a stream, after the roles of the caller were checked.

    Raises `UnauthenticatedError` or `ForbiddenError`.
    """
    begin = functools.partial(Invocation, plan, host, arguments, caller_waits=plan.is_sync_stream)
    if plan.access is None:
        return begin
    invocation = begin()
    admit(invocation)
    return invocation.restart_clock


def _as_tool(plan: MethodPlan, host: ServiceHost, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method as a tool, without memory and without streaming. Returns the value or a coroutine."""
    arguments = arguments_as_tool(plan, args, kwargs)
    return (_await_call if plan.is_async else _wait_for_call)(plan, host, arguments, as_tool=True)


def arguments_as_tool(plan: MethodPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a method that is called as a tool: without those that a model cannot set."""
    hidden = (plan.memory_parameter, plan.call_options)
    return plan.bind(args, {**{each: None for each in hidden if each is not None}, **kwargs})


async def _await_call(plan: MethodPlan, host: ServiceHost, arguments: Mapping[str, Any], as_tool: bool = False) -> Any:
    """Run a call and return its value: in the caller's task, which is almost always on the loop of its host."""
    with WhileCallerWaits():
        home = host.loop
        if plan.durable and not (as_tool and is_part_of_run()):
            return await host.runs.call(plan, arguments)  # as a run, which another process may begin or end
        invocation = Invocation(plan, host, arguments, as_tool=as_tool)
        if home is None or home is asyncio.get_running_loop():
            return await run(invocation)
        running = asyncio.run_coroutine_threadsafe(run(invocation), home)
        return await asyncio.wrap_future(given_up_with_outer(running))


def _wait_for_call(plan: MethodPlan, host: ServiceHost, arguments: Mapping[str, Any], as_tool: bool = False) -> Any:
    """Run a call on the loop of its host, and return its value. Its blocking tools run on this thread."""
    refuse_on_event_loop(f"{plan.where}()")
    loop = host.sync_loop()
    if plan.durable and not (as_tool and is_part_of_run()):
        calling = asyncio.run_coroutine_threadsafe(host.runs.call(plan, arguments), loop)
        return given_up_with_outer(calling).result()
    invocation = Invocation(plan, host, arguments, as_tool=as_tool, caller_waits=True)
    runner = invocation.caller_runner()  # before the invocation can start on the loop's thread
    running = asyncio.run_coroutine_threadsafe(_run_while_caller_waits(invocation), loop)
    return runner.wait_for(given_up_with_outer(running))


async def _run_while_caller_waits(invocation: Invocation) -> Any:
    with WhileCallerWaits():
        return await run(invocation)
