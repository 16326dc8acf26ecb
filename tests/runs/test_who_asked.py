"""Who asked for a run: `Run.started_by`, `Run.memory_id` and `PendingCall.started_by`."""

from typing import Any, Protocol

import pytest

from toolbox import Container, MemoryId, Result, create_ai_service, register_ai_service, tool
from toolbox.runs import InMemoryRunStore, Runs, RunStore, RunSuspended, approve, runs_of
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, tool_call

from .replies import ANN, BOB, asks, says

pytestmark = pytest.mark.anyio


@tool(requires_approval=True)
def pay(euros: int) -> str:
    return f"paid {euros}"


@register_ai_service(tools=pay)
class Payments(Protocol):
    @tool(name="arrange")
    async def ask(self, text: str) -> Result[str]: ...


@register_ai_service(tools=pay)
class Rooms(Protocol):
    async def ask(self, room: MemoryId[int], text: str) -> Result[str]: ...


@register_ai_service(tools=Payments)
class Desk(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


PAY = asks(tool_call("pay", {"euros": 5}))


def container(*replies: Any, store: RunStore | None = None) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, seeds=(SecurityIdentity,), take_over_runs=False)
    return made.register(Payments, Rooms, Desk).register_instance(store or InMemoryRunStore(), RunStore)


async def suspended(here: Container, identity: SecurityIdentity | None = ANN) -> Result[str]:
    async with here.request_scope({} if identity is None else {SecurityIdentity: identity}):
        return await here.get(Payments).ask("Pay")


async def test_a_suspended_call_names_who_asked() -> None:
    async with container(PAY) as here:
        result = await suspended(here)

        assert [each.started_by for each in result.pending] == ["ann"]
        run = await here.runs.get(result.run_id or "")
        assert (run.started_by, run.memory_id) == ("ann", None)
        assert [each.started_by for each in run.pending] == ["ann"]
        assert [each.started_by for each in await here.runs.list()] == ["ann"]


async def test_an_anonymous_starter_has_no_name() -> None:
    async with container(PAY) as here:
        result = await suspended(here, identity=None)

        run = await here.runs.get(result.run_id or "")
        assert run.started_by is None
        assert [each.started_by for each in run.pending] == [None]


async def test_a_call_of_an_inner_service_names_who_asked_the_outermost_one() -> None:
    async with container(asks(tool_call("arrange", {"text": "Pay"})), PAY) as here:
        async with here.request_scope({SecurityIdentity: ANN}):
            [call] = (await here.get(Desk).ask("Pay")).pending

        assert (call.id, call.started_by) == ("0/0", "ann")


async def test_a_run_names_its_conversation() -> None:
    async with container(PAY) as here:
        async with here.request_scope({SecurityIdentity: ANN}):
            result = await here.get(Rooms).ask(7, "Pay")

        assert (await here.runs.get(result.run_id or "")).memory_id == "7"


async def test_events_and_another_process_name_who_asked() -> None:
    store = InMemoryRunStore()
    async with container(PAY, store=store) as here, here.request_scope({SecurityIdentity: ANN}):
        run = await here.runs.start(here.get(Payments).ask, "Pay")
        async for event in here.runs.events(run):
            if isinstance(event.event, RunSuspended):
                assert [each.started_by for each in event.event.pending] == ["ann"]
                break
    async with container(PAY, says("done"), store=store) as there:
        # The person who answers has not asked: the next pending call still names who did.
        result = await there.runs.resume(run.id, {"0": approve()}, by=BOB)

        assert [each.started_by for each in result.pending] == ["ann"]


async def test_a_service_without_a_container_names_who_asked() -> None:
    desk = create_ai_service(Payments, chat_model=ScriptedChatModel([PAY]), identity=lambda: ANN)

    result = await desk.ask("Pay")

    runs: Runs = runs_of(desk)
    assert (await runs.get(result.run_id or "")).started_by == "ann"
