"""The `Result` of a durable run: the whole one, on every call with its id and from `runs.result`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from toolbox import Container, FinishReason, Result, ToolboxSettings, register_ai_service, sql, tool
from toolbox.runs import RunId, approve
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
