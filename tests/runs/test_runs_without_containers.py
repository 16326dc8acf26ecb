"""Runs of services without a container, and their stores."""

from typing import Any, Protocol

import pytest

from toolbox import IllegalConfigurationError, Result, create_ai_service, tool
from toolbox.runs import InMemoryRunStore, approve, runs_of
from toolbox.testing import ScriptedChatModel, tool_call

from .approved_refunds import REFUND, Clerk, refund, run_id_of
from .replies import asks, ran, says

pytestmark = pytest.mark.anyio


async def test_services_without_a_container_are_suspended_and_resumed() -> None:
    store = InMemoryRunStore()
    model = ScriptedChatModel([asks(REFUND)])
    desk = create_ai_service(Clerk, chat_model=model, run_store=store)
    run_id = await run_id_of(desk.do("refund"))

    again = create_ai_service(Clerk, chat_model=ScriptedChatModel([says("done")]), run_store=store)
    result = await runs_of(again).resume(run_id, {"0": approve()})

    assert result.content == "done"
    assert ran == [7]
    with pytest.raises(TypeError, match="create_ai_service"):
        runs_of("desk")


async def test_nested_services_without_a_container_share_the_run() -> None:
    class Inner(Protocol):
        @tool
        async def help(self, text: str) -> str:
            """Help."""
            ...

    class Outer(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    inner = create_ai_service(Inner, chat_model=ScriptedChatModel([asks(REFUND), says("inner")]), tools=[refund])
    outer_model = ScriptedChatModel([asks(tool_call("help", {"text": "x"})), says("outer")])
    outer = create_ai_service(Outer, chat_model=outer_model, tools=[inner])
    waiting = await outer.ask("x")
    assert [each.id for each in waiting.pending] == ["0/0"]
    result = await runs_of(outer).resume(waiting.run_id or "", {"0/0": approve()})

    assert result.content == "outer"
    assert ran == [7]


async def test_services_without_a_container_start_runs() -> None:
    desk = create_ai_service(Clerk, chat_model=ScriptedChatModel([says("done")]))
    runs = runs_of(desk)

    run = await runs.start(desk.do, "x")

    assert await runs.result(run, timeout=60) == "done"
    with pytest.raises(TypeError, match="expected a method of a registered AI service"):
        await runs.start(refund, 1)


@pytest.mark.parametrize("store", [InMemoryRunStore(), InMemoryRunStore, None])
async def test_services_without_a_container_take_a_store_or_its_class(store: Any) -> None:
    made = create_ai_service(
        Clerk, chat_model=ScriptedChatModel([asks(REFUND), says("done")]), tools=[refund], run_store=store
    )
    run_id = await run_id_of(made.do("x"))
    assert (await runs_of(made).resume(run_id, {"0": approve()})).content == "done"


@pytest.mark.parametrize("store", [3, [], "sqlite:///runs.db", int])
def test_what_is_not_a_store_is_a_problem(store: Any) -> None:
    with pytest.raises(IllegalConfigurationError, match=r"run_store=: .* is not a RunStore"):
        create_ai_service(Clerk, chat_model=ScriptedChatModel([]), run_store=store)
