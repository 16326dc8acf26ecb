"""What one tool call costs in process, over calling the function: validate its JSON, call it, encode what it returns.

Ours in three forms - a coroutine and a small `def` in a service's call, with everything it has (call scope, context,
record for the caller), and an executor by itself - beside the peers that are installed. The coroutine once more with a
listener that does nothing, and with OpenTelemetry's spans and metrics, kept nowhere: without a listener no event is
made, so the first row is what a call costs whose events nobody wants. And once with an interceptor that only runs the
tool. One round of each after the other, so that what else the machine does hits all of them alike; printed are medians
of the rounds, less the function's own time, and ratios to the first row.

    python -m benchmarks.tools [--rounds 25] [--calls 500] [--json] [--save]

CPU time of the one thread is what is measured. The goal: ours below pydantic-ai's. Before Python 3.13, a coroutine
costs some 4 us more, because tools are watched for task groups that count as cancellations. A peer's row is the
narrowest entrance that it has for a call with JSON arguments; LangChain's takes them parsed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks import results
from toolbox import (
    Container,
    EventListener,
    InvocationContext,
    InvocationEvent,
    ToolErrors,
    ToolExecutionRequest,
    ToolExecutionResult,
    non_blocking,
    tool_executor_from,
)
from toolbox.bean_references import BeanReference
from toolbox.capabilities import tool_layers
from toolbox.container import internals_of
from toolbox.events import Listeners
from toolbox.execution.runners import LoopRunner
from toolbox.execution.threads import Workers
from toolbox.interceptors import ToolInterceptor, ToolInvocation, ToolProceed
from toolbox.tools.function_calls import with_layers
from toolbox.tools.pipeline import execute_tool
from toolbox.tools.sources import read_tools
from toolbox.tools.tool_calls import ToolEnvironment

ARGUMENTS = '{"city":"Valence","days":3,"unit":"C"}'

Call = Callable[[], Awaitable[object]]


async def forecast(city: str, days: int = 1, unit: str = "C") -> dict[str, int]:
    """Forecasts the weather.

    Args:
        city: where
        days: how many
        unit: C or F
    """
    return {"high": 20 + days, "low": 9}


@non_blocking
def forecast_here(city: str, days: int = 1, unit: str = "C") -> dict[str, int]:
    """Forecasts the weather."""
    return {"high": 20 + days, "low": 9}


async def the_function() -> object:
    return await forecast("Valence", 3, "C")


async def the_def() -> object:
    return forecast_here("Valence", 3, "C")


# --- ours


class Silent(EventListener):
    """Does nothing."""

    def on_event(self, event: InvocationEvent) -> None:
        """Nothing."""


class Passing(ToolInterceptor):
    """Does nothing but run the tool."""

    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        """Run the tool."""
        return await proceed(call)


def in_a_service(container: Container, function: Any, *listeners: EventListener, intercepted: bool = False) -> Call:
    """A call as the tool loop makes it, with an interceptor if `intercepted`."""
    [tool], problems = read_tools((function,), "benchmark")
    assert not problems
    tool = with_layers(tool, tool_layers([BeanReference.to(Passing)] if intercepted else []))
    environment = ToolEnvironment(
        {tool.name: tool},
        InvocationContext(Container, "chat"),
        internals_of(container).host.scope,
        LoopRunner(Workers()),
        ToolErrors(),
        listeners=Listeners(listeners) if listeners else None,
    )
    request = ToolExecutionRequest("call_1", tool.specification.name, ARGUMENTS)
    return lambda: execute_tool(request, environment)


def traced() -> EventListener:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider

    from toolbox.otel import OpenTelemetryListener

    return OpenTelemetryListener(TracerProvider(), MeterProvider([InMemoryMetricReader()]))


def with_listeners(container: Container) -> dict[str, Call]:
    rows = {"toolbox, a listener that does nothing": in_a_service(container, forecast, Silent())}
    try:
        rows["toolbox, OpenTelemetry"] = in_a_service(container, forecast, traced())
    except ImportError:
        print("OpenTelemetry's SDK is not installed", file=sys.stderr)
    return rows


def by_itself() -> Call:
    executor: Any = tool_executor_from(forecast)
    request = ToolExecutionRequest("call_1", "forecast", ARGUMENTS)
    return lambda: executor(request, None)


# --- the peers


async def pydantic_ai() -> Call:
    from pydantic_ai import RunContext
    from pydantic_ai.messages import ToolCallPart
    from pydantic_ai.models.test import TestModel
    from pydantic_ai.tool_manager import ToolManager
    from pydantic_ai.toolsets import FunctionToolset
    from pydantic_ai.usage import RunUsage

    context: Any = RunContext(deps=None, model=TestModel(), usage=RunUsage())
    toolset: Any = FunctionToolset([forecast])
    manager = await ToolManager(toolset).for_run_step(context)
    part = ToolCallPart("forecast", ARGUMENTS, "call_1")
    return lambda: manager.handle_call(part)


async def openai_agents() -> Call:
    from agents import function_tool
    from agents.tool_context import ToolContext

    made: Any = function_tool(forecast)
    context: Any = ToolContext(context=None, tool_name="forecast", tool_call_id="call_1", tool_arguments=ARGUMENTS)
    return lambda: made.on_invoke_tool(context, ARGUMENTS)


async def langchain() -> Call:
    from langchain_core.tools import tool

    made: Any = tool("forecast")(forecast)
    call = {"name": "forecast", "args": json.loads(ARGUMENTS), "id": "call_1", "type": "tool_call"}
    return lambda: made.ainvoke(call)


PEERS: dict[str, Callable[[], Awaitable[Call]]] = {
    "pydantic-ai (ToolManager)": pydantic_ai,
    "openai-agents (on_invoke_tool)": openai_agents,
    "LangChain (ainvoke)": langchain,
}


NEEDS = {
    "pydantic-ai (ToolManager)": "pydantic_ai",
    "openai-agents (on_invoke_tool)": "agents",
    "LangChain (ainvoke)": "langchain_core",
}


async def installed_peers() -> dict[str, Call]:
    return {name: await PEERS[name]() for name in results.installed(PEERS, NEEDS)}


# --- measuring


async def microseconds(call: Call, calls: int) -> float:
    began = time.thread_time()
    for _ in range(calls):
        await call()
    return (time.thread_time() - began) / calls * 1e6


async def measure(rounds: int, calls: int) -> dict[str, list[float]]:
    """Microseconds over the function's own, by row and round."""
    async with Container().register(Passing) as container, container.request_scope():
        rows = {
            "toolbox, in a service (async def)": in_a_service(container, forecast),
            "toolbox, in a service (def)": in_a_service(container, forecast_here),
            "toolbox, tool_executor_from": by_itself(),
            "toolbox, with an interceptor": in_a_service(container, forecast, intercepted=True),
            **with_listeners(container),
            **await installed_peers(),
        }
        taken: dict[str, list[float]] = {name: [] for name in rows}
        for call in rows.values():
            await microseconds(call, min(calls, 100))
        gc.collect()
        gc.disable()
        for _ in range(rounds):
            for name, call in rows.items():
                own = await microseconds(the_def if "(def)" in name else the_function, calls)
                taken[name].append(await microseconds(call, calls) - own)
            gc.collect()
        gc.enable()
    return taken


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=500)
    options = results.parse(parser, rounds=1, calls=20)
    found = asyncio.run(measure(options.rounds, options.calls))
    measured = {name: statistics.median(each) for name, each in found.items()}
    first, *_ = measured
    if not options.json:
        print("One tool call over the function itself, three arguments (goal: below pydantic-ai)\n")
        for name, taken in measured.items():
            print(f"  {name:38} {taken:8.2f} us   {taken / measured[first]:6.1f}x")
    chart = results.Chart(
        "tools",
        "Tools: one call",
        "CPU time of one tool call with three arguments, in addition to the function itself: validate the JSON "
        "arguments, call the function, encode the result. LangChain receives the arguments already parsed.",
        (results.compare("CPU time added to the function", "µs", found, base=first),),
        ("pydantic-ai-slim", "openai-agents", "langchain-core", "opentelemetry-sdk"),
    )
    results.finish(options, chart, measured)


if __name__ == "__main__":
    main()
