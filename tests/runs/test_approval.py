"""Approval: calls wait for a person, in memory or in a database, at any depth, and run once."""

from decimal import Decimal
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    ChatResponse,
    Container,
    FinishReason,
    Result,
    TokenUsage,
    register_ai_service,
    tool,
)
from toolbox.runs import InMemoryRunStore, RunStore, approve, reject
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

ran: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


class Refunds:
    @tool(requires_approval=True)
    def refund(self, order: int, euros: Decimal) -> str:
        ran.append(("refund", order, euros))
        return f"refunded {order}"

    @tool
    def look(self, order: int) -> str:
        ran.append(("look", order))
        return f"order {order} is paid"


@register_ai_service(tools=Refunds)
class Desk(Protocol):
    async def chat(self, text: str) -> Result[str]: ...


def asks(*calls: Any) -> ChatResponse:
    return ChatResponse(AiMessage(None, calls), TokenUsage(10, 1), FinishReason.TOOL_EXECUTION)


def says(text: str) -> ChatResponse:
    return ChatResponse(AiMessage(text), TokenUsage(10, 5), FinishReason.STOP)


REFUND = tool_call("refund", {"order": 7, "euros": "12.50"}, id="same")
LOOK = tool_call("look", {"order": 7}, id="same")


def container(*replies: Any, store: RunStore | None = None, services: Any = (Desk,), **options: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, **options).register(*services)
    if store is not None:
        made.register_instance(store, RunStore)
    return made


async def test_a_call_waits_for_approval_while_the_others_of_the_reply_run() -> None:
    async with container(asks(REFUND, LOOK), says("done")) as here:
        result = await here.get(Desk).chat("refund order 7")

        [call] = result.pending
        assert (result.content, result.finish_reason) == (None, FinishReason.TOOL_EXECUTION)
        assert (call.id, call.tool_name, call.arguments, call.kind) == (
            "0",
            "refund",
            {"order": 7, "euros": "12.50"},
            "approval",
        )
        assert ran == [("look", 7)]
        assert result.run_id is not None

        result = await here.runs.resume(result.run_id, {call.id: approve()})

        assert (result.content, result.pending, result.run_id) == ("done", (), None)
        assert ran == [("look", 7), ("refund", 7, Decimal("12.50"))]
        assert [each.result for each in result.tool_executions] == ["refunded 7", "order 7 is paid"]
        assert result.token_usage == TokenUsage(20, 6)


async def test_a_rejected_call_does_not_run_and_the_model_reads_the_reason() -> None:
    model = ScriptedChatModel([asks(REFUND), says("sorry")])
    async with Container(models={"default": model}).register(Desk) as here:
        waiting = await here.get(Desk).chat("refund")
        result = await here.runs.resume(waiting.run_id or "", {"0": reject("over the limit")})

    assert result.content == "sorry"
    assert ran == []
    [execution] = result.tool_executions
    assert (execution.result, execution.is_error) == ("over the limit", True)


async def test_a_run_is_continued_by_another_container_with_the_same_store() -> None:
    store = InMemoryRunStore()
    async with container(asks(REFUND), store=store) as first:
        waiting = await first.get(Desk).chat("refund")
    async with container(says("done"), store=store) as second:
        run = await second.runs.get(waiting.run_id or "")
        assert run.pending == waiting.pending
        result = await second.runs.resume(run.id, {"0": approve()})

    assert result.content == "done"
    assert ran == [("refund", 7, Decimal("12.50"))]
