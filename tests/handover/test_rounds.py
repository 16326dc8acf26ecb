"""The end of a round: hand-overs, messages that the user adds, and models that do what they should not."""

import asyncio
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolbox import (
    AiMessage,
    ChatRequest,
    Container,
    MemoryId,
    Result,
    ToolExecutionResultMessage,
    UserMessage,
    register_ai_service,
    return_to_model,
    tool,
)
from toolbox.handover import hands_over_to
from toolbox.runs import InMemoryRunStore, RunId
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


@tool
def note(text: str) -> str:
    """Note something."""
    return "noted"


@register_ai_service(tools=note, on_unknown_tool=return_to_model, max_tool_rounds=20)
class One(Protocol):
    """The first."""

    @hands_over_to("Two.chat")
    @hands_over_to("Three.chat")
    async def chat(self, run: RunId, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service(on_unknown_tool=return_to_model)
class Two(Protocol):
    """The second."""

    @hands_over_to(One.chat)
    async def chat(self, run: RunId, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service(tools=note, on_unknown_tool=return_to_model)
class Three(Protocol):
    """The third, which keeps what it has."""

    async def chat(self, run: RunId, room: MemoryId[str], text: str) -> Result[str]: ...


NAMES = ("note", "transfer_to_one", "transfer_to_two", "transfer_to_three", "made_up")
LEADS_TO = {"transfer_to_one": "One", "transfer_to_two": "Two", "transfer_to_three": "Three"}
OFFERED = {"One": {"transfer_to_two", "transfer_to_three"}, "Two": {"transfer_to_one"}, "Three": set[str]()}


def expected_charge(rounds: list[list[str]]) -> str:
    """Return who is in charge after these rounds."""
    here, handed = "One", 0
    for names in rounds:
        valid = [name for name in names if name in OFFERED[here]]
        if valid and handed < 4:
            here, handed = LEADS_TO[valid[0]], handed + 1
    return f"{here}.chat"


def is_paired(request: ChatRequest) -> bool:
    """Return True if each call has its result right behind it, and users and assistants take turns."""
    open_calls: list[tuple[str, str]] = []
    before = ""
    for message in request.messages:
        if isinstance(message, ToolExecutionResultMessage):
            if not open_calls or open_calls.pop(0) != (message.id, message.tool_name):
                return False
            before = "result"
            continue
        if open_calls or (isinstance(message, UserMessage) and before == "user"):
            return False
        before = "user" if isinstance(message, UserMessage) else "assistant"
        if isinstance(message, AiMessage):
            open_calls = [(each.id, each.name) for each in message.tool_execution_requests]
    return not open_calls


@given(
    st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4), max_size=7),
    st.sets(st.integers(min_value=0, max_value=7), max_size=3),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whoever_is_in_charge_answers_and_no_message_is_lost(rounds: list[list[str]], told_at: set[int]) -> None:
    asyncio.run(_play(rounds, told_at))


async def _play(rounds: list[list[str]], told_at: set[int]) -> None:
    container: Container
    asked: list[ChatRequest] = []
    told: list[str] = []

    def reply_of(position: int) -> Any:
        async def reply(request: ChatRequest) -> Any:
            asked.append(request)
            assert is_paired(request)
            if position in told_at:
                told.append(f"told {position}")
                await container.runs.tell("run", f"told {position}")
            if position >= len(rounds):
                return "The end."
            calls = [tool_call(name, {"text": "x"} if name == "note" else {}) for name in rounds[position]]
            return AiMessage(tool_execution_requests=calls)

        return reply

    model = ScriptedChatModel([reply_of(position) for position in range(len(rounds) + 4)])
    container = Container(models={"default": model}).register(One, Two, Three).register_instance(InMemoryRunStore())
    async with container:
        await container.runs.start(One.chat, "run", "room", "Hi")
        result = await container.runs.result("run")
        assert result.answered_by == expected_charge(rounds)
        texts = [each.text for each in result.messages if isinstance(each, UserMessage)]
        assert texts == ["Hi", *told]
        assert len(result.tool_executions) == sum(map(len, rounds))
        assert (await container.conversations.of(One, "room").info()).in_charge == result.answered_by
