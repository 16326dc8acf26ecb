"""Events of runs are written as JSON, read by number in any process, and end with the run."""

import asyncio
import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from toolbox import (
    AiMessage,
    BeforeToolExecution,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    FinishReason,
    IntermediateResponse,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    TokenUsage,
    ToolExecuted,
    ToolExecution,
    ToolExecutionRequest,
)
from toolbox.errors import RunNotFoundError, TranscriptError
from toolbox.runs import InMemoryRunStore, PendingCall, RunChanges, RunSuspended
from toolbox.runs.documents import RunDocument
from toolbox.runs.event_log import EventLog, event_from_json, event_to_json
from toolbox.runs.run_events import RunEnded, RunEvents, number_after
from toolbox.runs.run_session import RunSession

from .one_run import events_of, store_with_a_run, stored_in

pytestmark = pytest.mark.anyio

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
REQUEST = ToolExecutionRequest("c1", "add", '{"a": 1}', {"thought": "x"})
RESPONSE = ChatResponse(AiMessage("hi", [REQUEST]), TokenUsage(3, 4), FinishReason.STOP, "r1", "gpt")
EVENTS: list[Any] = [
    PartialResponse("ä\x00🦜"),
    PartialReasoning("hm"),
    PartialToolCall(0, "c1", "add", '{"a'),
    CompleteToolCall(0, REQUEST),
    IntermediateResponse(RESPONSE),
    BeforeToolExecution(REQUEST),
    ToolExecuted(ToolExecution(REQUEST, "3", {"sum": 3}, False, NOW, 0.5, {"status": 200})),
    RunSuspended("run", (PendingCall("0/1", "add", {"a": 1}, "shop:Desk", "deferred", "wait", {"x": [1]}),)),
    CompleteResponse(RESPONSE),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda each: type(each).__name__)
def test_a_stored_event_is_read_unchanged(event: Any) -> None:
    assert event_from_json(event_to_json(event)) == event


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 1, "type": "Other"}', '{"version": 1, "type": "ToolExecuted"}']
)
def test_invalid_events_are_rejected(text: str) -> None:
    with pytest.raises(TranscriptError):
        event_from_json(text)


@pytest.fixture
async def store() -> InMemoryRunStore:
    return await store_with_a_run()


def following(store: InMemoryRunStore, after: int | str | None = None, run_id: str = "run") -> RunEvents:
    return events_of(store, after, run_id, why="why")


async def end(store: InMemoryRunStore) -> None:
    await store.append("run", 1, [], RunChanges(status="failed"))


async def test_a_reader_gets_past_and_future_events(store: InMemoryRunStore) -> None:
    await store.add_events("run", 1, [event_to_json(PartialResponse("a"))])
    reader = following(store)
    first = await anext(reader)

    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    assert not waiting.done()
    await store.add_events("run", 1, [event_to_json(PartialResponse("b"))])
    second = await waiting
    await end(store)
    rest = [each async for each in reader]

    assert [(each.number, each.event) for each in (first, second, *rest)] == [
        (1, PartialResponse("a")),
        (2, PartialResponse("b")),
        (3, RunEnded("failed", "why")),
    ]


async def test_a_suspension_does_not_end_the_iteration(store: InMemoryRunStore) -> None:
    suspended = RunSuspended("run", ())
    await store.append("run", 1, [], RunChanges(status="suspended"), [event_to_json(suspended)])
    reader = following(store)
    assert (await anext(reader)).event == suspended

    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    found = await store.load("run")
    assert found is not None
    await store.change("run", found.version, RunChanges(status="cancelled"))

    assert (await waiting).event == RunEnded("cancelled", "why")


@pytest.mark.parametrize(
    ("after", "numbers"),
    [(None, [1, 2, 3]), (0, [1, 2, 3]), ("1", [2, 3]), (2, [3]), ("3", []), (9, []), ("x", [1, 2, 3])],
)
async def test_a_reader_continues_after_a_number(
    store: InMemoryRunStore, after: int | str | None, numbers: list[int]
) -> None:
    await store.add_events("run", 1, [event_to_json(PartialResponse("a"))] * 2)
    await end(store)

    reader = following(store, after)

    assert await reader.is_over() == (not numbers)
    assert [each.number async for each in reader] == numbers


async def test_a_run_without_events_has_an_end(store: InMemoryRunStore) -> None:
    await end(store)

    assert [each.number async for each in following(store)] == [1]
    assert [each.number async for each in following(store, 1)] == []


async def test_events_are_read_in_several_batches(store: InMemoryRunStore) -> None:
    await store.add_events("run", 1, [event_to_json(PartialResponse("a"))] * 1201)
    await end(store)

    assert [each.number async for each in following(store)] == list(range(1, 1203))


async def test_an_unknown_run_cannot_be_followed(store: InMemoryRunStore) -> None:
    with pytest.raises(RunNotFoundError):
        await anext(following(store, run_id="unknown"))
    with pytest.raises(RunNotFoundError):
        await following(store, run_id="unknown").is_over()


@pytest.mark.parametrize(("after", "error"), [(-1, ValueError), (True, TypeError), (1.5, TypeError), (b"1", TypeError)])
def test_other_positions_are_rejected(after: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="after="):
        number_after(after)


async def log_of(store: InMemoryRunStore, generation: int) -> EventLog:
    """The log of an owner with this generation."""
    stored = await store.load("run")
    assert stored is not None
    owned = replace(stored, generation=generation)
    return EventLog(RunSession.of(owned, RunDocument(), [], store), stored_in(store).looks)


async def test_pieces_are_written_together_and_nothing_is_lost(store: InMemoryRunStore) -> None:
    log = await log_of(store, 1)
    await log.open()

    for number in range(100):
        log.put(PartialResponse(str(number)))
    await log.flush()

    events = await store.events("run", 0)
    assert [event_from_json(each.data) for each in events] == [PartialResponse(str(number)) for number in range(100)]
    assert len({each.at for each in events}) < 10


async def test_the_next_owner_does_not_repeat_the_events_of_a_round(store: InMemoryRunStore) -> None:
    other = ToolExecutionRequest("c2", "add", "{}")
    first = await log_of(store, 1)
    await first.open()
    done = [IntermediateResponse(RESPONSE), BeforeToolExecution(REQUEST), EVENTS[6], BeforeToolExecution(other)]
    for event in done:
        first.put(event)
    await first.flush()
    await store.release("run", 1)
    await store.acquire("run", "other")

    second = await log_of(store, 2)
    await second.open()
    again = [*done[1:], ToolExecuted(ToolExecution(other, "4", 4, False, NOW, 0.5))]
    for event in again:
        second.put(event)
    await second.flush()

    events = [event_from_json(each.data) for each in await store.events("run", 0)]
    assert events == [*done, again[-1]]


async def test_an_event_log_of_a_lost_run_writes_nothing(store: InMemoryRunStore) -> None:
    log = await log_of(store, 0)
    log.put(PartialResponse("a"))
    await log.flush()

    assert await store.events("run", 0) == []


class Slow(InMemoryRunStore):
    """Writing events takes a while, and fails as often as `fails` says."""

    fails = 0
    in_use = 0

    def __init__(self) -> None:
        super().__init__()
        self.writes, self.failed = asyncio.Event(), asyncio.Event()

    async def add_events(self, run_id: str, generation: int, events: Sequence[str]) -> None:
        self.in_use += 1
        self.writes.set()
        try:
            for _ in range(1000):
                await asyncio.sleep(0)
            if self.fails:
                self.fails -= 1
                self.failed.set()
                raise ConnectionError("the store is away")
            await super().add_events(run_id, generation, events)
        finally:
            self.in_use -= 1


async def test_a_closed_event_log_uses_the_store_no_more() -> None:
    store = Slow()
    await store_with_a_run(store)
    log = await log_of(store, 1)
    log.put(BeforeToolExecution(REQUEST))
    await store.writes.wait()

    await log.close()

    assert store.in_use == 0
    assert await store.events("run", 0) == []


async def test_events_are_written_again_after_an_error_of_the_store_which_asyncio_does_not_report() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    store = Slow()
    store.fails = 1
    await store_with_a_run(store)
    log = await log_of(store, 1)
    log.put(BeforeToolExecution(REQUEST))
    await store.failed.wait()
    await asyncio.sleep(0)  # the writer has ended

    log.put(IntermediateResponse(RESPONSE))
    await log.flush()
    gc.collect()

    events = [event_from_json(each.data) for each in await store.events("run", 0)]
    assert events == [BeforeToolExecution(REQUEST), IntermediateResponse(RESPONSE)]
    assert reported == []


class Counting(InMemoryRunStore):
    """Counts how often it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.looked = asyncio.Event()

    async def look(self, run_id: str) -> Any:
        self.reads["look"] += 1
        self.looked.set()
        return await super().look(run_id)

    async def events(self, run_id: str, after: int, limit: int = 1000) -> Any:
        self.reads["events"] += 1
        return await super().events(run_id, after, limit)

    async def load(self, run_id: str) -> Any:
        self.reads["load"] += 1
        return await super().load(run_id)

    async def wait_for_looks(self, count: int) -> None:
        for _ in range(count):
            self.looked.clear()
            await self.looked.wait()


async def test_many_who_follow_a_run_in_one_process_read_as_often_as_one() -> None:
    store = await store_with_a_run(Counting())
    assert isinstance(store, Counting)
    runs = stored_in(store)
    readers = [RunEvents(runs, "run", 0, lambda run: "why") for _ in range(100)]
    waiting = [asyncio.ensure_future(anext(each)) for each in readers]
    results = [asyncio.ensure_future(runs.wait_for_end("run")) for _ in range(100)]
    await store.wait_for_looks(3)
    store.reads.clear()

    await store.wait_for_looks(3)
    assert store.reads == {"look": 3}  # a quiet run
    await store.add_events("run", 1, [event_to_json(PartialResponse("a"))])
    first = await asyncio.gather(*waiting)
    assert {(each.number, each.event) for each in first} == {(1, PartialResponse("a"))}
    assert store.reads["events"] == 1
    waiting = [asyncio.ensure_future(anext(each)) for each in readers]
    await end(store)
    assert {each.event for each in await asyncio.gather(*waiting)} == {RunEnded("failed", "why")}
    assert {each.status for each in await asyncio.gather(*results)} == {"failed"}
    assert store.reads["events"] <= 4


async def test_a_run_is_read_no_more_when_nobody_waits() -> None:
    store = await store_with_a_run(Counting())
    assert isinstance(store, Counting)
    reader = following(store)
    waiting = asyncio.ensure_future(anext(reader))
    await store.wait_for_looks(2)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    await asyncio.sleep(0.6)  # seconds; more than the pause after which nobody comes back
    looks = store.reads["look"]
    await asyncio.sleep(0.3)
    assert store.reads["look"] == looks


async def test_an_error_of_the_store_reaches_all_who_wait_and_is_not_kept() -> None:
    store = await store_with_a_run()
    runs = stored_in(store)
    readers = [RunEvents(runs, "run", 0, lambda run: None) for _ in range(3)]
    waiting = [asyncio.ensure_future(anext(each)) for each in readers]
    await asyncio.sleep(0.05)
    await store.delete("run")

    assert {type(each) for each in await asyncio.gather(*waiting, return_exceptions=True)} == {RunNotFoundError}
    again = await store_with_a_run(store)
    await again.add_events("run", 1, [event_to_json(PartialResponse("a"))])
    assert (await anext(readers[0])).event == PartialResponse("a")


async def test_a_follower_that_leaves_does_not_disturb_the_others() -> None:
    store = await store_with_a_run()
    runs = stored_in(store)
    readers = [RunEvents(runs, "run", 0, lambda run: None) for _ in range(3)]
    waiting = [asyncio.ensure_future(anext(each)) for each in readers]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await store.add_events("run", 1, [event_to_json(PartialResponse("a"))])

    assert [each.number for each in await asyncio.gather(*waiting[1:])] == [1, 1]
