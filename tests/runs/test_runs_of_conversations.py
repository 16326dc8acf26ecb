"""The runs of a conversation: lists, the newest that goes on, and deleting them with the conversation."""

from datetime import datetime, timedelta
from typing import Any, Protocol

import pytest

from toolbox import IllegalConfigurationError, MemoryId, Result, register_ai_service
from toolbox.conversations.keys import Owner
from toolbox.runs import InMemoryRunStore, RunStatus, StoredRun, approve
from toolbox.security import SecurityIdentity

from .approved_refunds import REFUND, Desk, container, refund, run_id_of
from .replies import asks, says

pytestmark = pytest.mark.anyio


class Older(InMemoryRunStore):
    """A store of a program, which knows nothing of conversations."""

    supports: frozenset[str] = frozenset()

    async def find(  # type: ignore[override]
        self,
        *,
        status: RunStatus | None = None,
        service: str | None = None,
        limit: int = 100,
        before: tuple[datetime, str] | None = None,
        waiting_longer_than: timedelta | None = None,
        started_by: str | None = None,
    ) -> list[StoredRun]:
        given: Any = {"waiting_longer_than": waiting_longer_than, "started_by": started_by}
        return await super().find(status=status, service=service, limit=limit, before=before, **given)


@register_ai_service(tools=refund, name="new", former_names=("old",), on_suspended="continue")
class Renamed(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service(tools=refund, name="old", on_suspended="continue")
class Former(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


async def test_runs_are_listed_by_conversation() -> None:
    async with container(*[asks(REFUND)] * 3) as here:
        ids = [(await here.get(Desk).chat(room, "refund")).run_id for room in ("a", "b")]
        assert [each.id for each in await here.runs.list(memory_id="a", service=Desk)] == ids[:1]
        assert [each.id for each in await here.runs.list(memory_id="b")] == ids[1:]
        assert await here.runs.list(memory_id="a", status="running") == []
        assert await here.runs.list(memory_id="c\0") == []


async def test_a_store_that_knows_no_conversations_says_so_in_lists_and_does_all_else() -> None:
    async with container(asks(REFUND), asks(REFUND), store=Older()) as here:
        waiting = await here.get(Desk).chat("a", "refund")
        await here.get(Desk).chat("b", "refund")
        with pytest.raises(IllegalConfigurationError, match="Older does not say that its find"):
            await here.runs.list(memory_id="a")
        found = await here.runs.run_of(Desk, "a")
        assert found is not None
        assert found.id == waiting.run_id
        assert await here.runs.cancel_waiting(Desk, "a", "gone") == 1
        assert await here.runs.forget_runs(service=Desk, memory_id="a") == 1
        assert [each.memory_id for each in await here.runs.list()] == ["b"]


async def test_the_newest_run_that_has_not_ended_is_found_under_all_names() -> None:
    store = InMemoryRunStore()
    async with container(*[asks(REFUND)] * 2, store=store, services=(Former,)) as here:
        first = await here.get(Former).chat("room", "refund")
        await here.get(Former).chat("other", "refund")
    async with container(asks(REFUND), says("done"), store=store, services=(Renamed,)) as here:
        assert (await here.runs.run_of(Renamed, "room")).id == first.run_id
        second = await here.get(Renamed).chat("room", "refund")
        assert (await here.runs.run_of("old", "room")).id == second.run_id
        await here.runs.resume(second.run_id or "", {"0": approve()})
        assert (await here.runs.run_of(Renamed, "room")).id == first.run_id
        assert await here.runs.run_of(Renamed, "unknown") is None
        assert await here.runs.cancel_waiting(Renamed, "room", "gone") == 1
        assert await here.runs.run_of(Renamed, "room") is None
        assert await here.runs.forget_runs(service="new", memory_id="room") == 2
        assert [each.memory_id for each in await here.runs.list()] == ["other"]


@pytest.mark.parametrize("pages", [1, 3])
async def test_all_ended_runs_of_a_service_are_deleted(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolbox.runs.conversation_runs._PAGE", pages)
    async with container(*[asks(REFUND)] * 6) as here:
        for number in range(5):
            await here.get(Desk).chat(str(number), "refund")
        await run_id_of(here.get(Desk).invoice("refund"))
        assert await here.runs.cancel_waiting(Desk, None, "gone") == 5
        assert await here.runs.forget_runs(service=Desk) == 5
        assert [each.method for each in await here.runs.list()] == ["invoice"]


async def test_runs_that_a_person_started_outside_of_conversations_are_deleted_once_they_have_ended() -> None:
    async def start(here: Any, name: str, tenant: str, room: str | None) -> str:
        async with here.request_scope({SecurityIdentity: SecurityIdentity(name, attributes={"tenant": tenant})}):
            if room is not None:
                return str((await here.get(Desk).chat(room, "refund")).run_id)
            return await run_id_of(here.get(Desk).invoice("refund"))

    async with container(*[asks(REFUND)] * 6, run_identity=("tenant",)) as here:
        names = ("ann", "a"), ("ann", "b"), ("bob", "a")
        plain = [await start(here, *each, None) for each in names]
        in_room = await start(here, "ann", "a", "room")
        ann = Owner("ann", {"tenant": "a"})
        for each in [*plain, in_room]:
            await here.runs.cancel(each)
        await here.chat_memory(Desk, "room").clear()  # it had the turn of the cancelled run
        kept = [each.id for each in await here.runs.list()]
        assert await here.runs.forget_runs(owner=ann) == 2  # also that of the room, of which nothing is kept
        assert {each.id for each in await here.runs.list()} == {*kept} - {plain[0], in_room}
