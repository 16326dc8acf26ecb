"""`on_limit="answer"` in runs: whatever a process has written when it ends, the next one comes to the same answer."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import pytest

from toolbox import AiMessage, ChatRequest, ChatResponse, Container, Result, TokenUsage, register_ai_service, tool
from toolbox.limits import UsageLimits
from toolbox.runs import RunId, Runs, RunStore, approve, durable
from toolbox.store_clock import skip
from toolbox.testing import ScriptedChatModel, tool_call

from .crashing import Crashing, Kept, writes_of

pytestmark = pytest.mark.anyio


class Eager:
    """Always calls the tool, until it must not; then it answers with the number of results that it has read."""

    def __init__(self) -> None:
        self.requests: list[ChatRequest] = []

    async def chat(self, request: ChatRequest) -> ChatResponse:
        self.requests.append(request)
        done = sum(type(each).__name__ == "ToolExecutionResultMessage" for each in request.messages)
        if request.tool_choice == "none":
            return ChatResponse(AiMessage(f"{done} seen"), TokenUsage(5, 5))
        return ChatResponse(AiMessage(None, (tool_call("look", {"n": done}),)), TokenUsage(5, 5))


ran: list[int] = []


@tool
async def look(n: int) -> str:
    ran.append(n)
    return f"seen {n}"


def service(**options: Any) -> Any:
    @register_ai_service(tools=look, on_limit="answer", name="guide", **options)
    class Guide(Protocol):
        @durable
        async def ask(self, run: RunId, text: str) -> Result[str]: ...

    return Guide


async def call(guide: Any, store: Any) -> Any:
    container = Container(models={"default": Eager()}).register(guide).register_instance(store, RunStore)
    async with container:
        return await container.get(guide).ask("r", "Look around")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("limit", "options"),
    [
        ("max_tool_rounds", {"max_tool_rounds": 2}),
        ("tool_calls", {"limits": UsageLimits(tool_calls=2)}),
        ("model_calls", {"limits": UsageLimits(model_calls=2)}),
        ("total_tokens", {"limits": UsageLimits(total_tokens=25)}),
    ],
)
async def test_a_crash_at_any_write_leads_to_the_same_answer(limit: str, options: dict[str, Any], after: bool) -> None:
    guide = service(**options)
    count = await writes_of(Kept(), lambda store: call(guide, store))

    for at in range(1, count + 1):
        kept, place = Kept(), f"write {at}"
        ran.clear()
        crashing = Crashing(kept, at, after)
        with pytest.raises(Exception):  # noqa: B017 - each layer wraps the crash differently
            await call(guide, crashing)
        skip([kept.clock], timedelta(seconds=kept.lease))
        result = await call(guide, kept)

        assert (result.content, result.stopped_by) == ("2 seen", limit), place
        assert [each.request.arguments for each in result.tool_executions] == ['{"n": 0}', '{"n": 1}'], place
        assert len(ran) == len(set(ran)), place


async def test_the_result_of_an_ended_run_names_the_limit() -> None:
    guide, kept = service(max_tool_rounds=1), Kept()

    first = await call(guide, kept)
    again = await call(guide, kept)

    assert first.stopped_by == again.stopped_by == "max_tool_rounds"
    assert first == again


async def test_a_call_that_waits_beside_the_limit_is_answered_first() -> None:
    paid: list[int] = []

    @tool(requires_approval=True)
    async def pay(amount: int) -> str:
        paid.append(amount)
        return "paid"

    @register_ai_service(tools=look, model="inner")
    class Scout(Protocol):
        @tool
        async def explore(self, text: str) -> str:
            """Explore."""
            ...

    @register_ai_service(tools=[pay, Scout], limits=UsageLimits(model_calls=2), on_limit="answer")
    class Guide(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    calls: Sequence[Any] = (tool_call("pay", {"amount": 3}), tool_call("explore", {"text": "x"}))
    model = ScriptedChatModel([AiMessage(None, calls), "Paid."])
    container = Container(models={"default": model, "inner": Eager()}).register(Guide, Scout)
    async with container:
        waiting = await container.get(Guide).ask("Pay and explore")
        runs = container.get(Runs)
        result = await runs.resume(waiting.run_id or "", {waiting.pending[0].id: approve()})

    assert paid == [3]
    assert (result.content, result.stopped_by) == ("Paid.", "model_calls")
    assert [each.is_error for each in result.tool_executions] == [False, True]
    assert model.requests[-1].tool_choice == "none"
