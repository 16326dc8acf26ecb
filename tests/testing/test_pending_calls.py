"""Answers and assertions for the pending calls of suspended runs."""

from typing import Any, Protocol

import pytest

from toolbox import Container, Result, register_ai_service, tool
from toolbox.runs import PendingCall, ToolDeferred, reject, respond
from toolbox.testing import ScriptedChatModel, approve_all, assert_pending, resume_until_done, tool_call

pytestmark = pytest.mark.anyio


@tool(requires_approval=True)
def refund(order: int) -> str:
    return f"refunded {order}"


@tool(deferred=True)
def stock(item: str) -> str:
    raise ToolDeferred


@register_ai_service(tools=[refund, stock])
class Desk(Protocol):
    async def chat(self, text: str) -> Result[str]: ...


def container(*replies: Any) -> Container:
    return Container(models={"default": ScriptedChatModel(replies)}).register(Desk)


def call(kind: Any = "approval") -> PendingCall:
    return PendingCall("0", "refund", {"order": 7}, "shop:Desk", kind)


async def test_all_calls_can_be_approved_at_once_and_until_the_end() -> None:
    calls = [tool_call("refund", {"order": number}) for number in (1, 2, 3)]
    async with container(calls[0], calls[1], calls[2], "done") as here:
        result = await here.get(Desk).chat("x")
        assert_pending(result, "refund")
        result = await here.runs.resume(result.run_id or "", approve_all(result))
        assert_pending(await here.runs.get(result.run_id or ""), tool_call("refund", {"order": 2}))
        result = await resume_until_done(here.runs, result)

    assert [each.result for each in result.tool_executions] == ["refunded 1", "refunded 2", "refunded 3"]


async def test_answers_are_scripted_by_the_name_of_the_tool() -> None:
    script = (
        tool_call("refund", {"order": 1}),
        tool_call("stock", {"item": "lamp"}),
        tool_call("stock", {"item": "bed"}),
    )
    async with container(*script, "done") as here:
        result = await here.get(Desk).chat("x")
        answers = {"refund": reject("no"), "stock": [respond("1 lamp"), respond("2 beds")]}
        result = await resume_until_done(here.runs, result, answers, by="ann")

    assert [each.result for each in result.tool_executions] == ["no", "1 lamp", "2 beds"]


async def test_a_pending_call_without_an_answer_fails_the_test() -> None:
    async with container(tool_call("refund", {"order": 1})) as here:
        result = await here.get(Desk).chat("x")
        with pytest.raises(AssertionError, match="no answer for the pending call refund"):
            await resume_until_done(here.runs, result, {"stock": respond("x")})


def test_assertions_name_the_pending_calls() -> None:
    assert_pending([call()], "refund")
    assert_pending([])
    for expected in ("pay", tool_call("refund", {"order": 8})):
        with pytest.raises(AssertionError, match=r"got refund \{'order': 7\}"):
            assert_pending([call()], expected)
    with pytest.raises(AssertionError, match="got none"):
        assert_pending([], "refund")


def test_only_calls_that_wait_for_approval_are_approved() -> None:
    with pytest.raises(AssertionError, match="no pending calls"):
        approve_all([])
    with pytest.raises(AssertionError, match="respond"):
        approve_all([call("deferred")])
