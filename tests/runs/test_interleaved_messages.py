"""Messages of the user beside replies, calls that wait, limits and crashes: none is lost, and none is read twice."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from hypothesis import given, settings
from hypothesis import strategies as st

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    Result,
    TokenUsage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolRoundsExceededError,
    UserMessage,
    register_ai_service,
    tool,
)
from toolbox.runs import RunFailedError, RunId, RunStateError, RunStore, approve, durable, reject
from toolbox.store_clock import skip

from .crashing import Crashing, Kept


@tool
async def look(n: int) -> str:
    return f"seen {n}"


@tool(requires_approval=True)
async def pay(n: int) -> str:
    return f"paid {n}"


class Disobedient:
    """Says what its script says, whatever it may: each reply has a text or not, and calls. Then it answers.

    `during` is called while it thinks about a request.
    """

    def __init__(self, script: Sequence[tuple[bool, tuple[str, ...]]], during: Any) -> None:
        self.script, self.during = script, during
        self.requests: list[ChatRequest] = []

    async def chat(self, request: ChatRequest) -> ChatResponse:
        self.requests.append(request)
        done = sum(isinstance(each, AiMessage) for each in request.messages)
        await self.during(request)
        speaks, names = self.script[done] if done < len(self.script) else (True, ())
        calls = [ToolExecutionRequest(f"c{done}.{at}", name, f'{{"n": {at}}}') for at, name in enumerate(names)]
        text = f"reply {done}" if speaks or not calls else None
        return ChatResponse(AiMessage(text, tuple(calls)), TokenUsage(1, 1))


REPLIES = st.tuples(st.booleans(), st.lists(st.sampled_from(["look", "look", "pay", "unknown"]), max_size=2).map(tuple))


def assert_well_formed(request: ChatRequest) -> None:
    """No message of the user follows another one, and each call has one result, before anything else is said."""
    waiting: list[str] = []
    last: Any = None
    for each in request.messages:
        if isinstance(each, ToolExecutionResultMessage):
            waiting.remove(each.id)
            continue
        assert not waiting
        assert not (isinstance(each, UserMessage) and isinstance(last, UserMessage))
        waiting = [call.id for call in getattr(each, "tool_execution_requests", ())]
        last = each
    assert not waiting


async def play(
    script: Sequence[tuple[bool, tuple[str, ...]]],
    tells: Sequence[int],
    rounds: int,
    answers_at_limit: bool,
    crash: tuple[int, bool] | None,
) -> None:
    @register_ai_service(
        tools=[look, pay],
        max_tool_rounds=rounds,
        on_limit="answer" if answers_at_limit else "raise",
        on_unknown_tool=lambda error, _: str(error),
        name="guide",
    )
    class Guide(Protocol):
        @durable
        async def ask(self, run: RunId, text: str) -> Result[str]: ...

    kept, taken, left = Kept(), list[str](), list(tells)
    requests: list[ChatRequest] = []
    when: dict[str, int] = {}

    async def tell() -> None:
        text = f"<{len(when)}>"
        when[text] = len(requests)
        await here.runs.tell("r", text)
        taken.append(text)

    async def during(request: ChatRequest) -> None:
        requests.append(request)
        for _ in range(left.pop(0) if left else 0):
            await tell()

    async def execute(store: Any) -> Result[str] | None:
        nonlocal here
        model = Disobedient(script, during)
        here = Container(models={"default": model}).register(Guide).register_instance(store, RunStore)
        async with here:
            try:
                result = await here.get(Guide).ask("r", "start")
                while result.pending:
                    for _ in range(left.pop(0) if left else 0):
                        await tell()
                    decisions = {each.id: approve() if int(each.id) % 2 else reject("no") for each in result.pending}
                    result = await here.runs.resume("r", decisions)
            except (ToolRoundsExceededError, RunFailedError):
                return None
            try:
                await here.runs.tell("r", "late")
            except RunStateError:
                return result
            raise AssertionError("an ended run took a message")

    here: Any = None
    if crash is None:
        result = await execute(kept)
    else:
        try:
            result = await execute(Crashing(kept, *crash))
        except AssertionError:
            raise
        except Exception:  # each layer wraps the crash differently
            skip([kept.clock], timedelta(seconds=kept.lease))
            result = await execute(kept)

    for request in requests:
        assert_well_formed(request)
    if result is None:
        assert not answers_at_limit or requests[-1].tool_choice == "none"  # a last reply of calls alone
        return
    users = [each.text for each in result.messages if isinstance(each, UserMessage)]
    stored = [text for text in when if any(text in each for each in await kept.messages("r"))]
    assert users == ["start", *stored]  # each once, in order
    assert set(taken) <= set(stored)
    if result.stopped_by is None:
        read = "".join(each.text for each in requests[-1].messages if isinstance(each, UserMessage))
        assert all(text in read for text in stored)
    else:
        assert requests[-1].tool_choice == "none"
    answer = (
        result.messages[-1]
        if result.stopped_by is None
        else next(each for each in reversed(result.messages) if isinstance(each, AiMessage))
    )
    assert isinstance(answer, AiMessage)
    assert answer.text == result.content
    assert not answer.tool_execution_requests


@settings(deadline=None, max_examples=40)
@given(
    script=st.lists(REPLIES, max_size=4),
    tells=st.lists(st.integers(0, 2), max_size=6),
    rounds=st.integers(0, 3),
    answers_at_limit=st.booleans(),
    crash=st.none() | st.tuples(st.integers(1, 25), st.booleans()),
)
def test_no_message_is_lost_or_read_twice(
    script: list[tuple[bool, tuple[str, ...]]],
    tells: list[int],
    rounds: int,
    answers_at_limit: bool,
    crash: tuple[int, bool] | None,
) -> None:
    asyncio.run(play(script, tells, rounds, answers_at_limit, crash))
