"""Crashes at every write to the store: afterwards a run is either suspended or goes on, and no tool runs twice.

A crash is a store that fails from one write on, before or after that write has happened. Another container with the
same data then continues.
"""

from datetime import timedelta
from typing import Any, Protocol

import pytest

from toolbox import AiMessage, ChatResponse, Container, Result, TokenUsage, register_ai_service, tool
from toolbox.runs import RunAnswerError, RunId, RunStore, approve, durable
from toolbox.store_clock import skip
from toolbox.testing import tool_call

from .crashing import Crashing, Kept, writes_of

pytestmark = pytest.mark.anyio


class Once:
    """Answers like a model from the conversation, and counts how often each step was asked."""

    def __init__(self, asked: list[str]) -> None:
        self.asked = asked

    async def chat(self, request: Any) -> ChatResponse:
        messages = [each for each in request.messages if getattr(each, "role", "") != "system"]
        done = sum(type(each).__name__ == "ToolExecutionResultMessage" for each in messages)
        first = next(each.text for each in messages if type(each).__name__ == "UserMessage")
        self.asked.append(f"{first}{done}")
        call: Any = {
            "outer0": [tool_call("note", {"n": 1}), tool_call("delegate", {"wish": "inner"})],
            "outer2": [tool_call("note", {"n": 4})],
            "inner0": [tool_call("note", {"n": 2}), tool_call("risky", {"n": 3})],
        }.get(f"{first}{done}")
        if call is None:
            return ChatResponse(AiMessage(f"{first} done"), TokenUsage(1, 1))
        return ChatResponse(AiMessage(None, call), TokenUsage(1, 1))


ran: list[int] = []


@tool
async def note(n: int) -> int:
    ran.append(n)
    return n


@tool(requires_approval=True)
async def risky(n: int) -> int:
    ran.append(n)
    return n


@register_ai_service(tools=[note, risky])
class Inner(Protocol):
    @tool
    async def delegate(self, wish: str) -> str:
        """Delegate."""
        ...


@register_ai_service(tools=[note, Inner])
class Outer(Protocol):
    async def ask(self, text: str) -> Result[str]: ...

    @durable
    async def ask_durable(self, run: RunId, text: str) -> Result[str]: ...


def program(store: Any, asked: list[str]) -> Container:
    made = Container(models={"default": Once(asked)})
    return made.register(Outer, Inner).register_instance(store, RunStore)


async def first_call(store: Any, asked: list[str], is_durable: bool) -> None:
    async with program(store, asked) as here:
        service = here.get(Outer)
        await (service.ask_durable("r", "outer") if is_durable else service.ask("outer"))


async def answer(store: Any, asked: list[str]) -> None:
    """Continue the only run, as a person or a program would who sees it after a crash."""
    async with program(store, asked) as here:
        [run] = await here.runs.list()
        if run.status == "running":
            await here.runs.resume(run.id, {})
            [run] = await here.runs.list()
        if run.status == "suspended":
            await here.runs.resume(run.id, {each.id: approve() for each in run.pending})


async def until_the_end(kept: Kept, asked: list[str]) -> Any:
    """Continue the only run until it ends, after the lease of the crashed program has ended."""
    skip([kept.clock], timedelta(seconds=kept.lease))
    async with program(kept, asked) as here:
        for _ in range(3):
            [run] = await here.runs.list()
            if run.status == "suspended":
                result = await here.runs.resume(run.id, {each.id: approve() for each in run.pending})
            else:
                result = await here.runs.resume(run.id, {})
            if not result.pending:
                return result
    raise AssertionError("the run does not end")


async def suspended(is_durable: bool) -> tuple[Kept, list[str]]:
    kept, asked = Kept(), list[str]()
    ran.clear()
    await first_call(kept, asked, is_durable)
    return kept, asked


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("is_durable", [False, True])
async def test_a_crash_while_resuming_loses_neither_answers_nor_results(is_durable: bool, after: bool) -> None:
    before, asked_before = await suspended(is_durable)
    ran_before = list(ran)
    assert sorted(ran) == [1, 2]
    count = await writes_of(before.copied(), lambda store: answer(store, []))
    assert count > 6

    for at in range(1, count + 1):
        kept, asked, ran[:] = before.copied(), list(asked_before), ran_before
        crashing = Crashing(kept, at, after)
        with pytest.raises(Exception):  # noqa: B017 - each layer wraps the crash differently
            await answer(crashing, asked)
        assert crashing.crashed
        result = await until_the_end(kept, asked)

        place = f"write {at}"
        assert result.content == "outer done", place
        # A call that had started without a transaction has an unknown outcome, which the model reads.
        unknown = [each for each in result.tool_executions if "unknown" in each.result]
        assert sorted(ran) == [1, 2, 3, 4] or (len(ran) < 5 and len(set(ran)) == len(ran)), place
        assert len(set(ran)) == len(ran), place
        assert len(asked) == len(set(asked)) or not after, place
        assert len(unknown) <= 1, place


async def test_a_crash_before_the_suspension_is_stored_loses_the_call_only() -> None:
    for at, after in [(1, False), (1, True)]:
        kept, asked = Kept(), list[str]()
        ran.clear()
        with pytest.raises(Exception):  # noqa: B017 - as above
            await first_call(Crashing(kept, at, after), asked, False)
        runs = await kept.find()
        assert [each.status for each in runs] == (["suspended"] if after else [])
        if after:
            assert (await until_the_end(kept, asked)).content == "outer done"
            assert sorted(ran) == [1, 2, 3, 4]


@pytest.mark.parametrize("after", [False, True])
async def test_a_durable_run_continues_after_a_crash_at_any_write(after: bool) -> None:
    asked: list[str] = []
    kept = Kept()
    count = await writes_of(kept, lambda store: first_call(store, asked, True))
    assert count >= 8

    for at in range(1, count + 1):
        kept, asked = Kept(), []
        ran.clear()
        crashing = Crashing(kept, at, after)
        with pytest.raises(Exception):  # noqa: B017 - as above
            await first_call(crashing, asked, True)
        if not await kept.find():
            assert (at, after) == (1, False)
            continue
        result = await until_the_end(kept, asked)

        place = f"write {at}"
        assert result.content == "outer done", place
        assert len(set(ran)) == len(ran), place
        # A reply is asked for again only if the process stopped before it was recorded.
        assert len(asked) - len(set(asked)) <= (0 if after else 1), place


async def test_a_second_resume_during_the_first_is_refused() -> None:
    kept, asked = await suspended(False)
    async with program(kept, asked) as one, program(kept, asked) as other:
        [run] = await one.runs.list()
        answers = {each.id: approve() for each in run.pending}
        first = await one.runs.resume(run.id, answers)
        with pytest.raises(RunAnswerError):
            await other.runs.resume(run.id, answers)
        again = await other.runs.resume(run.id, {})

    assert first.content == again.content == "outer done"
    assert sorted(ran) == [1, 2, 3, 4]
