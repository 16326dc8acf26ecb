"""The `Result` of a durable run: the whole one, on every call with its id and from `runs.result`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from toolbox import (
    Container,
    FinishReason,
    Result,
    ReturnBehavior,
    ToolboxSettings,
    ToolDeferred,
    register_ai_service,
    sql,
    tool,
)
from toolbox.runs import RunId, approve, respond
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel, tool_call

from .replies import asks, says

pytestmark = pytest.mark.anyio


@dataclass
class Price:
    euros: int


@tool
def price(item: str) -> Price:
    return Price(len(item))


@tool(requires_approval=True)
def pay(euros: int) -> str:
    return f"paid {euros}"


@register_ai_service(tools=[price, pay], durable=True)
class Shop(Protocol):
    async def ask(self, run: RunId, text: str) -> Result[str]: ...

    async def say(self, run: RunId, text: str) -> str: ...


def container(path: Path, *replies: Any) -> Container:
    settings = ToolboxSettings(sql=SqlSettings(url=f"sqlite:///{path / 'runs.db'}"))
    made = Container(settings=settings, models={"default": ScriptedChatModel(replies)}, take_over_runs=False)
    return made.register(Shop, sql.engine, sql.SqlRunStore)


async def test_each_call_with_the_id_gives_the_whole_result(tmp_path: Path) -> None:
    async with container(tmp_path, asks(tool_call("price", {"item": "lamp"})), says("4 euros")) as here:
        first = await here.get(Shop).ask("r", "How much?")
        assert await here.get(Shop).ask("r", "How much?") == first
    async with container(tmp_path) as there:
        again = await there.get(Shop).ask("r", "How much?")
        from_runs = await there.runs.result("r")

    assert again == from_runs == first
    assert (again.content, again.finish_reason) == ("4 euros", FinishReason.STOP)
    assert again.token_usage == first.token_usage
    assert again.token_usage is not None
    assert [each.result_object for each in again.tool_executions] == [Price(4)]
    assert len(again.messages) == 4


async def test_another_method_gives_its_value(tmp_path: Path) -> None:
    async with container(tmp_path, says("4 euros")) as here:
        assert await here.get(Shop).say("r", "How much?") == "4 euros"
        assert await here.get(Shop).say("r", "How much?") == "4 euros"
        assert await here.runs.result("r") == "4 euros"


async def test_a_suspended_run_gives_the_whole_result_too(tmp_path: Path) -> None:
    calls = asks(tool_call("price", {"item": "lamp"}), tool_call("pay", {"euros": 4}))
    async with container(tmp_path, calls) as here:
        first = await here.get(Shop).ask("r", "Buy")
    async with container(tmp_path, says("done")) as there:
        assert await there.get(Shop).ask("r", "Buy") == first
        assert [each.result_object for each in first.tool_executions] == [Price(4)]

        done = await there.runs.resume("r", {"1": approve()})

        assert await there.get(Shop).ask("r", "Buy") == done == await there.runs.result("r")
        assert [each.result for each in done.tool_executions][1:] == ["paid 4"]


async def test_a_started_run_of_a_method_with_a_result_gives_it(tmp_path: Path) -> None:
    async with container(tmp_path, asks(tool_call("price", {"item": "lamp"})), says("4 euros")) as here:
        run = await here.runs.start(here.get(Shop).ask, "r", "How much?")

        result = await here.runs.result(run)

    assert (result.content, len(result.tool_executions), len(result.messages)) == ("4 euros", 1, 4)


@tool
def mean() -> float:
    return math.nan


@tool
def limits() -> list[float | None]:
    return [math.inf, -math.inf, None]


@tool(deferred=True)
async def measure() -> float:
    raise ToolDeferred


@tool(return_behavior=ReturnBehavior.IMMEDIATE)
async def highest() -> float:
    return math.inf


@register_ai_service(tools=[mean, limits, measure, pay], durable=True)
class Measurements(Protocol):
    async def ask(self, run: RunId, text: str) -> Result[str]: ...


@register_ai_service(tools=highest, durable=True)
class Highest(Protocol):
    async def ask(self, run: RunId, text: str) -> float: ...


async def test_nan_and_infinity_in_results_survive_suspensions_and_processes(tmp_path: Path) -> None:
    calls = [tool_call("mean"), tool_call("limits"), tool_call("measure"), tool_call("pay", {"euros": 1})]
    async with container(tmp_path, asks(*calls)).register(Measurements) as here:
        waiting = await here.get(Measurements).ask("r", "x")
    async with container(tmp_path, says("done")).register(Measurements) as there:
        given = {each.id: respond(-math.inf) if each.tool_name == "measure" else approve() for each in waiting.pending}
        first = await there.runs.resume("r", given)
    async with container(tmp_path).register(Measurements) as there:
        again = await there.runs.result("r")

    for result in (first, again):
        found = [each.result_object for each in result.tool_executions]
        assert isinstance(found[0], float)
        assert math.isnan(found[0])
        assert found[1:3] == [[math.inf, -math.inf, None], -math.inf]
        texts = [each.result for each in result.tool_executions]
        assert texts == ["NaN", '["Infinity","-Infinity",null]', "-Infinity", "paid 1"]


async def test_infinity_as_the_value_of_a_method_survives_processes(tmp_path: Path) -> None:
    async with container(tmp_path, asks(tool_call("highest"))).register(Highest) as here:
        assert await here.get(Highest).ask("r", "x") == math.inf
    async with container(tmp_path).register(Highest) as there:
        assert await there.get(Highest).ask("r", "x") == math.inf
