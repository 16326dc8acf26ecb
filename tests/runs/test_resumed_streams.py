"""Streams and synchronous services whose runs are suspended and continue."""

import asyncio
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    ChatResponse,
    CompleteResponse,
    Container,
    FinishReason,
    ModelTruncatedError,
    Result,
    TokenUsage,
    ToolExecuted,
    register_ai_service,
    tool,
)
from toolbox.runs import RunAnswerError, RunSuspended, RunSuspendedError, approve, reject
from toolbox.testing import tool_call

from .approved_refunds import REFUND, Desk, Invoice, container, run_id_of
from .replies import asks, ran, says

pytestmark = pytest.mark.anyio


async def test_a_stream_of_events_ends_with_the_suspension_and_continues_as_a_stream() -> None:
    async with container(asks(REFUND), says("done")) as here:
        events = [each async for each in here.get(Desk).events("refund")]
        last = events[-1]
        assert isinstance(last, RunSuspended)
        assert [each.id for each in last.pending] == ["0"]
        assert not any(isinstance(each, CompleteResponse) for each in events)

        events = [each async for each in here.runs.resume_stream(last.run_id, {"0": approve()})]

    assert [each.execution.result for each in events if isinstance(each, ToolExecuted)] == ["refunded 7"]
    assert isinstance(events[-1], CompleteResponse)
    assert events[-1].response.ai_message.text == "done"
    assert events[-1].response.token_usage == TokenUsage(20, 6)


async def test_a_resumed_stream_may_be_suspended_again() -> None:
    async with container(asks(REFUND), asks(REFUND), says("done")) as here:
        [*_, first] = [each async for each in here.get(Desk).events("refund")]
        assert isinstance(first, RunSuspended)
        [*_, second] = [each async for each in here.runs.resume_stream(first.run_id, {"0": approve()})]
        assert isinstance(second, RunSuspended)
        assert [each.id for each in second.pending] == ["1"]
        result = await here.runs.resume(second.run_id, {"1": reject("enough")})
    assert result.content == "done"
    assert ran == [7]


async def test_refused_answers_of_a_stream_are_raised_at_its_first_step() -> None:
    async with container(asks(REFUND)) as here:
        [*_, last] = [each async for each in here.get(Desk).events("refund")]
        assert isinstance(last, RunSuspended)
        with pytest.raises(RunAnswerError):
            _ = [each async for each in here.runs.resume_stream(last.run_id, {"9": approve()})]


async def test_a_resumed_stream_that_has_begun_stores_its_answers_once() -> None:
    async with container(asks(REFUND), says("done")) as here:
        [*_, last] = [each async for each in here.get(Desk).events("refund")]
        assert isinstance(last, RunSuspended)
        stream = here.runs.resume_stream(last.run_id, {"0": approve()})
        await stream.begin()
        assert len((await here.runs.get(last.run_id)).history) == 1
        await stream.begin()
        events = [each async for each in stream]
        await stream.aclose()
    assert isinstance(events[-1], CompleteResponse)
    assert ran == [7]


async def test_a_resumed_stream_that_is_closed_unread_leaves_the_run_as_it_was() -> None:
    async with container(asks(REFUND), says("done")) as here:
        [*_, last] = [each async for each in here.get(Desk).events("refund")]
        assert isinstance(last, RunSuspended)
        stream = here.runs.resume_stream(last.run_id, {"0": approve()})
        await stream.aclose()
        assert [each async for each in stream] == []
        assert (await here.runs.get(last.run_id)).status == "suspended"
        assert (await here.runs.resume(last.run_id, {"0": approve()})).content == "done"


@pytest.mark.parametrize("method", ["texts", "items"])
async def test_other_streams_raise_the_suspension_at_their_end(method: str) -> None:
    answer = "done" if method == "texts" else '{"value": [{"number": 1}]}'
    async with container(asks(REFUND), says(answer)) as here:
        with pytest.raises(RunSuspendedError) as raised:
            _ = [each async for each in getattr(here.get(Desk), method)("refund")]
        result = await here.runs.resume(raised.value.run_id, {"0": approve()})
    assert result.content == ("done" if method == "texts" else [Invoice(number=1)])


async def test_items_of_a_resumed_call_that_were_cut_are_no_answer() -> None:
    cut = ChatResponse(AiMessage('[{"number": 1}, {"nu'), finish_reason=FinishReason.LENGTH)
    async with container(asks(REFUND), cut) as here:
        with pytest.raises(RunSuspendedError) as raised:
            _ = [each async for each in here.get(Desk).items("refund")]
        with pytest.raises(ModelTruncatedError):
            await here.runs.resume(raised.value.run_id, {"0": approve()})


async def test_the_content_of_a_resumed_call_has_the_type_of_the_method() -> None:
    async with container(asks(REFUND), says('{"number": 3}')) as here:
        run_id = await run_id_of(here.get(Desk).invoice("refund"))
        result = await here.runs.resume(run_id, {"0": approve()})
        again = await here.runs.resume(run_id, {})
    assert result.content == again.content == Invoice(number=3)


def test_synchronous_services_raise_the_suspension_and_are_resumed() -> None:
    with container(asks(REFUND), asks(REFUND), says("done")) as here:
        with pytest.raises(RunSuspendedError) as raised:
            here.get(Desk).waiting("refund")
        with pytest.raises(RunSuspendedError):
            list(here.get(Desk).waiting_texts("refund"))
        result = asyncio.run(here.runs.resume(raised.value.run_id, {"0": approve()}))
        streamed = asyncio.run(_collected(here, raised.value.run_id))
    assert result.content == "done"
    assert streamed == []


async def _collected(here: Container, run_id: str) -> list[Any]:
    return [each async for each in here.runs.resume_stream(run_id, {})]


def test_blocking_tools_of_a_resumed_synchronous_service_run_once() -> None:
    @tool(requires_approval=True)
    def pay(euros: int) -> str:
        ran.append(euros)
        return "paid"

    @register_ai_service(tools=pay)
    class Payments(Protocol):
        def ask(self, text: str) -> Result[str]: ...

    with container(asks(tool_call("pay", {"euros": 5})), says("done"), services=(Payments,)) as here:
        result = here.get(Payments).ask("x")
        assert asyncio.run(here.runs.resume(result.run_id or "", {"0": approve()})).content == "done"
    assert ran == [5]
