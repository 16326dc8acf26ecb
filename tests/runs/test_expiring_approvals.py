"""Calls that wait for an approval are rejected when their time is over: `@tool(approval_expires=…)`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest

from toolbox import (
    Container,
    EventListener,
    IllegalConfigurationError,
    MemoryId,
    Result,
    RunAnsweredEvent,
    create_ai_service,
    register_ai_service,
    sql,
    tool,
)
from toolbox.runs import InMemoryRunStore, Run, RunAnswerError, RunStore, RunSuspended, approve, reject
from toolbox.testing import ScriptedChatModel, skip_time, tool_call

from .replies import asks, ran

pytestmark = pytest.mark.anyio

SECOND, HOUR, DAY = timedelta(seconds=1), timedelta(hours=1), timedelta(days=1)


class Desk:
    @tool(requires_approval=True, approval_expires=DAY)
    async def pay(self, euros: int) -> str:
        ran.append(euros)
        return "paid"

    @tool(requires_approval=True, approval_expires=HOUR)
    async def refund(self, euros: int) -> str:
        ran.append(-euros)
        return "refunded"

    @tool(requires_approval=True)
    async def sign(self) -> str:
        ran.append("sign")
        return "signed"


@register_ai_service(tools=Desk)
class Helper(Protocol):
    @tool
    async def delegate(self, wish: str) -> str:
        """Let another service work."""
        ...


@register_ai_service(tools=[Desk, Helper])
class Clerk(Protocol):
    async def ask(self, text: str) -> Result[str]: ...

    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


class Kept(InMemoryRunStore):
    persistent = True


Start = Callable[..., Awaitable[Container]]


@pytest.fixture(params=["default", "memory", "SQLite"])
async def start(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts containers, with the same runs unless there is no bean for a store."""
    in_memory = Kept()
    async with AsyncExitStack() as stack:

        async def make(*replies: Any, **options: Any) -> Container:
            container = Container(models={"default": ScriptedChatModel(replies)}, **options).register(Clerk, Helper)
            if request.param == "memory":
                container.register_instance(in_memory, RunStore)
            elif request.param == "SQLite":
                engine = await stack.enter_async_context(sql.open_engine(f"sqlite:///{tmp_path / 'data.db'}"))
                container.register_instance(sql.SqlRunStore(engine), RunStore)
            return await stack.enter_async_context(container)

        yield make


async def wait_for(here: Container, run_id: str, status: str) -> Run[Any]:
    async with asyncio.timeout(60):
        while (run := await here.runs.get(run_id)).status != status:  # noqa: ASYNC110 - the store has no event
            await asyncio.sleep(0.01)
    return run


async def test_a_call_that_nobody_answers_is_rejected(start: Start) -> None:
    here = await start(tool_call("pay", {"euros": 5}), "not paid")
    suspended = await here.get(Clerk).ask("hi")
    run_id, [pending] = suspended.run_id or "", suspended.pending
    before = await here.runs.get(run_id)
    assert pending.expires_at is not None
    assert before.pending == (pending,)
    assert abs(pending.expires_at - before.updated_at - DAY) < timedelta(minutes=1)

    await skip_time(here, HOUR)
    assert (await here.runs.get(run_id)).status == "suspended"
    await skip_time(here, DAY)

    assert [
        (each.by, each.call_id, each.tool_name, each.answer, each.reason)
        for each in (await here.runs.get(run_id)).history
    ] == [(None, pending.id, "pay", "reject", "expired")]
    done = await wait_for(here, run_id, "completed")
    assert (done.attempts, ran) == (1, [])
    result = await here.runs.resume(run_id, {})
    assert result.content == "not paid"
    assert [(each.result, each.is_error) for each in result.tool_executions] == [("expired", True)]


async def test_an_answer_after_the_time_is_refused(start: Start) -> None:
    here = await start(tool_call("pay", {"euros": 5}), "not paid", take_over_runs=False)
    suspended = await here.get(Clerk).ask("hi")
    run_id = suspended.run_id or ""
    await skip_time(here, DAY + SECOND)

    for answer in (approve(), reject("late")):
        with pytest.raises(RunAnswerError, match="expired"):
            await here.runs.resume(run_id, {"0": answer})

    assert (await here.runs.get(run_id)).status == "suspended"


async def test_an_answer_in_time_counts(start: Start) -> None:
    here = await start(tool_call("pay", {"euros": 5}), "done")
    suspended = await here.get(Clerk).ask("hi")
    run_id = suspended.run_id or ""
    await skip_time(here, HOUR)

    assert (await here.runs.resume(run_id, {"0": approve()})).content == "done"

    await skip_time(here, DAY)
    assert ran == [5]
    assert [each.answer for each in (await here.runs.get(run_id)).history] == ["approve"]


async def test_each_pending_call_has_its_own_time(start: Start) -> None:
    calls = asks(tool_call("pay", {"euros": 5}), tool_call("refund", {"euros": 6}), tool_call("sign"))
    here = await start(calls, "done")
    suspended = await here.get(Clerk).ask("hi")
    run_id = suspended.run_id or ""
    pay, refund, sign = suspended.pending
    assert sign.expires_at is None

    await skip_time(here, HOUR + SECOND)
    run = await wait_for(here, run_id, "suspended")
    async with asyncio.timeout(60):
        while [each.id for each in run.pending] != [pay.id, sign.id]:
            await asyncio.sleep(0.01)
            run = await here.runs.get(run_id)
    assert run.pending[0].expires_at == pay.expires_at
    with pytest.raises(RunAnswerError, match="no pending call"):
        await here.runs.resume(run_id, {refund.id: approve()})
    partly = await here.runs.resume(run_id, {sign.id: approve()})
    assert [each.id for each in partly.pending] == [pay.id]
    await skip_time(here, DAY)

    await wait_for(here, run_id, "completed")
    history = (await here.runs.get(run_id)).history
    assert [(each.tool_name, each.answer) for each in history] == [
        ("refund", "reject"),
        ("sign", "approve"),
        ("pay", "reject"),
    ]
    assert ran == ["sign"]


async def test_a_call_within_a_service_that_is_a_tool_expires(start: Start) -> None:
    here = await start(tool_call("delegate", {"wish": "x"}), tool_call("pay", {"euros": 5}), "no", "done")
    suspended = await here.get(Clerk).ask("hi")
    run_id, [pending] = suspended.run_id or "", suspended.pending
    assert pending.id == "0/0"
    assert pending.expires_at is not None

    await skip_time(here, 2 * DAY)

    await wait_for(here, run_id, "completed")
    assert (await here.runs.resume(run_id, {})).content == "done"


async def test_a_run_of_a_conversation_expires(start: Start) -> None:
    here = await start(tool_call("pay", {"euros": 5}), "not paid", "later")
    run_id = (await here.get(Clerk).chat("room", "first")).run_id or ""

    await skip_time(here, 2 * DAY)

    await wait_for(here, run_id, "completed")
    await here.get(Clerk).chat("room", "second")
    texts = [getattr(each, "text", None) for each in await here.chat_memory(Clerk, "room").messages()]
    assert (texts[0], texts[-3:]) == ("first", ["not paid", "second", "later"])


async def test_a_person_and_the_expiry_do_not_both_answer(start: Start) -> None:
    here = await start(tool_call("pay", {"euros": 5}), "one", "other")
    suspended = await here.get(Clerk).ask("hi")
    run_id = suspended.run_id or ""

    await asyncio.gather(skip_time(here, 2 * DAY), here.runs.resume(run_id, {"0": approve()}), return_exceptions=True)

    done = await wait_for(here, run_id, "completed")
    [entry] = done.history
    assert (entry.answer, ran) in (("approve", [5]), ("reject", []))


async def test_the_pending_calls_of_a_retried_run_begin_to_wait_again(start: Start) -> None:
    here = await start(tool_call("pay", {"euros": 5}), "done")
    suspended = await here.get(Clerk).ask("hi")
    run_id, [pending] = suspended.run_id or "", suspended.pending
    await here.runs.cancel(run_id)
    await skip_time(here, 2 * DAY)

    [again] = (await here.runs.retry(run_id)).pending

    assert again.expires_at is not None
    assert pending.expires_at is not None
    assert again.expires_at - pending.expires_at >= 2 * DAY
    await skip_time(here, HOUR)
    assert (await here.runs.resume(run_id, {again.id: approve()})).content == "done"


async def test_an_expiry_sends_the_event_of_an_answer(start: Start) -> None:
    answered: list[RunAnsweredEvent] = []

    class Listener(EventListener):
        def on_event(self, event: object) -> None:
            if isinstance(event, RunAnsweredEvent):
                answered.append(event)

    here = await start(tool_call("pay", {"euros": 5}), "done")
    here._internals.host.add_listener(Listener())
    run_id = (await here.get(Clerk).ask("hi")).run_id or ""

    await skip_time(here, 2 * DAY)
    await wait_for(here, run_id, "completed")

    assert {(each.run_id, each.answer, each.by) for each in answered} == {(run_id, "reject", None)}


async def test_events_of_a_run_have_the_time(start: Start) -> None:
    here = await start(tool_call("pay", {"euros": 5}), "done")
    run = await here.runs.start(Clerk.ask, "hi")
    await wait_for(here, run.id, "suspended")
    [pending] = (await here.runs.get(run.id)).pending

    async for each in here.runs.events(run.id):
        if isinstance(each.event, RunSuspended):
            assert each.event.pending == (pending,)
            break
    assert pending.expires_at is not None


async def test_another_process_rejects_the_call(start: Start, request: pytest.FixtureRequest) -> None:
    if "default" in request.node.name:
        pytest.skip("there is no other process")
    here = await start(tool_call("pay", {"euros": 5}), take_over_runs=False)
    other = await start("not paid")
    run_id = (await here.get(Clerk).ask("hi")).run_id or ""

    await skip_time(other, 2 * DAY)

    await wait_for(other, run_id, "completed")


async def test_a_call_expires_by_itself() -> None:
    @tool(requires_approval=True, approval_expires=timedelta(milliseconds=1))
    async def hurry() -> str:
        return "x"

    @register_ai_service(tools=hurry)
    class Quick(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    model = ScriptedChatModel([tool_call("hurry"), "too late"])
    async with Container(models={"default": model}).register(Quick) as here:
        run_id = (await here.get(Quick).ask("hi")).run_id or ""

        assert await here.runs.result(run_id, timeout=60)


class Older(InMemoryRunStore):
    supports = frozenset()


async def test_approval_expires_needs_a_store_that_supports_it() -> None:
    container = Container(models={"default": ScriptedChatModel([])}).register(Clerk, Helper)
    container.register_instance(Older(), RunStore)

    problems = container.check()

    assert sorted(each.where for each in problems) == ["Desk.pay", "Desk.refund"]
    assert all("approval_expires= needs a RunStore" in each.what for each in problems)
    assert all("'expiry'" in each.fix or '"expiry"' in each.fix for each in problems)


def test_approval_expires_needs_a_container() -> None:
    with pytest.raises(IllegalConfigurationError, match="approval_expires= needs a container"):
        create_ai_service(Clerk, chat_model=ScriptedChatModel([]), tools=[Desk().pay])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"requires_approval": True, "approval_expires": 60}, TypeError),
        ({"requires_approval": True, "approval_expires": timedelta()}, ValueError),
        ({"requires_approval": True, "approval_expires": -DAY}, ValueError),
        ({"approval_expires": DAY}, TypeError),
    ],
)
def test_invalid_times_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="approval_expires="):
        tool(**options)
