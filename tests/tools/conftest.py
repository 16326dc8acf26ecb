"""Fixtures for tests of a single tool call: an environment with the real runner and a recording scope."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from toolbox import InvocationContext, MissingBeanError, ToolErrors, ToolExecutionRequest
from toolbox.execution.runners import LoopRunner
from toolbox.execution.threads import Workers
from toolbox.tools.pipeline import execute_tool
from toolbox.tools.sources import read_tools
from toolbox.tools.tool_calls import Tool, ToolEnvironment, ToolOutcome


class NotedScope:
    """A scope with the given beans that records its call scopes in `events`."""

    def __init__(self, beans: dict[Any, Any] | None = None, close_error: Exception | None = None) -> None:
        self.beans, self.close_error = beans or {}, close_error
        self.events: list[object] = []

    def get(self, wanted: Any, name: str | None = None) -> Any:
        if wanted not in self.beans:
            raise MissingBeanError(str(wanted))
        return self.beans[wanted]

    async def aget(self, wanted: Any, name: str | None = None) -> Any:
        return self.get(wanted)

    async def find(self, wanted: Any, name: str | None = None) -> Any:
        return self.beans.get(wanted)

    def find_now(self, wanted: Any, name: str | None = None) -> Any:
        return self.beans.get(wanted)

    async def prepare(self, wanted: Any, name: str | None = None) -> None: ...

    def open_call_scope(self) -> NotedScope:
        self.events.append("entered")
        return self

    def leave(self) -> None:
        self.events.append("left")

    def close_if_empty(self) -> bool:
        return False

    def close_here(self, error: BaseException | None) -> None:
        self.events.append(("closed here", error))
        if self.close_error is not None:
            raise self.close_error

    async def aclose(self, error: BaseException | None) -> None:
        self.events.append(("closed", error))


class Bench:
    """Runs single tools as a service would."""

    def __init__(self) -> None:
        self.workers = Workers(pool_size=2)
        self.scope = NotedScope()
        self.failures = ToolErrors()
        self.context = InvocationContext(Bench, "ask", memory_id="m1")
        self.max_result_chars: int | None = None

    def environment(self, tools: Mapping[str, Tool]) -> ToolEnvironment:
        return ToolEnvironment(
            tools, self.context, self.scope, LoopRunner(self.workers), self.failures, self.max_result_chars
        )

    async def run(self, source: Any, arguments: str = "{}") -> ToolOutcome:
        """Return the outcome of one call of the only tool of `source`."""
        tool = tool_in(source)
        request = ToolExecutionRequest("1", tool.specification.name, arguments)
        return await execute_tool(request, self.environment({tool.name: tool}))


def tool_in(source: Any) -> Tool:
    """Return the only tool of `source`."""
    [tool], problems = read_tools((source,), "here")
    assert not problems
    return tool


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.workers.pool.shutdown()


@pytest.fixture
def problems_of() -> Callable[..., list[str]]:
    """Return a function that lists the problems of sources as text."""

    def read(*sources: Any) -> list[str]:
        return [str(each) for each in read_tools(sources, "here")[1]]

    return read
