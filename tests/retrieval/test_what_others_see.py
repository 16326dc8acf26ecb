"""What listeners, traces, logs and browsers see of retrieval, and what it does to open database sessions."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from tests.otel.telemetry import Telemetry
from toolbox import (
    Container,
    LoggingListener,
    Result,
    Retrieved,
    ToolboxSettings,
    register_ai_service,
    request_scoped,
    sql,
)
from toolbox.interceptors import before_model_request
from toolbox.otel import OpenTelemetryListener
from toolbox.retrieval import Passage, Query, Retriever
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi.streaming import public_json

pytestmark = pytest.mark.anyio

LEAVE = Passage("Employees have 30 days.", source="leave.md", score=0.9, attributes={"owner": "secret"})


class Handbook(Retriever):
    async def retrieve(self, query: Query) -> list[Passage]:
        return [LEAVE]


@register_ai_service(retrievers=Handbook, tools=Handbook)
class Clerk(Protocol):
    async def answer(self, question: str) -> Result[str]: ...


@pytest.mark.parametrize("content", [True, False])
async def test_a_search_is_a_span_inside_of_its_call_or_its_tool(content: bool) -> None:
    telemetry = Telemetry()
    model = ScriptedChatModel([tool_call("search_handbook", {"query": "days"}), "30"])
    container = Container(models={"default": model}).register(Clerk)
    async with container.register_instance(telemetry.listener(content), OpenTelemetryListener):
        await container.get(Clerk).answer("How much leave?")

    spans = {each.name: each for each in telemetry.spans}
    ids = {each.context.span_id: each.name for each in telemetry.spans}
    first, second = (each for each in telemetry.spans if each.name == "retrieval Handbook")
    assert ids[first.parent.span_id] == "invoke_agent Clerk"
    assert ids[second.parent.span_id] == "execute_tool search_handbook"
    assert first.attributes["gen_ai.data_source.id"] == "Handbook"
    assert first.attributes["toolbox.retrieval.passages"] == 1
    queries = [each.attributes.get("gen_ai.retrieval.query.text") for each in (first, second)]
    assert queries == (["How much leave?", "days"] if content else [None, None])
    assert first.end_time <= spans["chat"].end_time


def test_reach_lists_what_searches_for_a_method() -> None:
    container = Container(models={"default": ScriptedChatModel([])}).register(Clerk)
    assert {(each.entry, each.tool) for each in container.reach()} == {
        ("Clerk.answer", "search_handbook"),
        ("Clerk.answer", "Handbook.retrieve"),
    }


async def test_a_log_line_has_the_number_of_passages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    container = Container(models={"default": ScriptedChatModel(["30"])}).register(Clerk)
    async with container.register_instance(LoggingListener()):
        await container.get(Clerk).answer("How much leave?")

    [line] = [each.getMessage() for each in caplog.records if "retrieved" in each.getMessage()]
    assert "Handbook" in line
    assert "30 days" not in line


def test_a_browser_gets_no_values_that_are_for_the_program() -> None:
    for item in (Retrieved((LEAVE,)), Result("30", sources=(LEAVE,))):
        sent = public_json(item)
        assert "leave.md" in sent
        assert "secret" not in sent


# --- sessions


@request_scoped
class Counted:
    def __init__(self) -> None:
        self.calls: list[str] = []

    @before_model_request
    def note(self) -> None:
        self.calls.append("model")


class Rows(Retriever):
    """Notes how many connections are used while it searches, before it takes one itself."""

    def __init__(self, session: AsyncSession, engine: AsyncEngine) -> None:
        self.session, self.engine = session, engine

    async def retrieve(self, query: Query) -> list[Passage]:
        used: Any = self.engine.pool
        before = used.checkedout()
        found = (await self.session.execute(text("SELECT 'row'"))).scalar_one()
        return [Passage(f"{found}, {before} others, {used.checkedout()} with this one")]


@register_ai_service(retrievers=Rows)
class Guide(Protocol):
    async def answer(self, question: str) -> Result[str]: ...


@asynccontextmanager
async def guide(path: Path, model: ScriptedChatModel) -> AsyncIterator[Container]:
    settings = ToolboxSettings(sql=SqlSettings(url=f"sqlite:///{path / 'data.db'}"))
    async with Container(models={"default": model}, settings=settings).register(
        sql.engine, sql.session, Guide, Counted
    ) as container:
        yield container


async def test_sessions_give_their_connections_back_before_retrievers_run_and_before_the_model(tmp_path: Path) -> None:
    used: list[int] = []
    pool: Any = None

    class Watching(ScriptedChatModel):
        async def chat(self, request: Any) -> Any:
            used.append(pool.checkedout())
            return await super().chat(request)

    async with guide(tmp_path, Watching(["ok"])) as container, container.request_scope():
        pool = (await container.aget(AsyncEngine)).pool
        session, counted = await container.aget(AsyncSession), container.get(Counted)
        await session.execute(text("SELECT 1 FROM sqlite_master"))
        assert pool.checkedout() == 1
        result = await container.get(Guide).answer("x")

    assert result.sources[0].text == "row, 0 others, 1 with this one"
    assert used == [0]
    assert counted.calls == ["model"]  # a search is not a model request
