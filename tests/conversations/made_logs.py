"""Makes turns of conversations, and checks what is sent of them against the rules of all wires."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tests.generated import Choices
from toolbox import AiMessage, Message, ToolExecutionRequest, ToolExecutionResultMessage, UserMessage
from toolbox.chat import TokenUsage
from toolbox.conversations.log import Turn, TurnState

STATES: tuple[TurnState, ...] = ("answered", "answered", "answered", "failed", "stopped", "waiting")


def make_turn(choices: Choices, name: str) -> Turn:
    """Return a turn as services store it; one that was interrupted ends anywhere behind the user's message.

    As in conversations from elsewhere, ids of calls may be missing or occur twice; and answers may be empty.
    """
    state = choices.one_of(STATES)
    messages: list[Message] = [UserMessage(f"q{name}")]
    if state == "waiting":
        return Turn(id=name, messages=tuple(messages), state=state, run_id=name)
    for round_ in range(choices.below(3)):
        ids = [choices.one_of((f"{name}-{round_}-{n}", "call_0", "")) for n in range(1 + choices.below(3))]
        calls = [ToolExecutionRequest(each, "add", "{}") for each in ids]
        messages.append(AiMessage(choices.one_of((None, "let me see")), calls))
        messages += [ToolExecutionResultMessage.of(each, "5") for each in calls]
    messages.append(AiMessage(choices.one_of((f"a{name}", "", None))))
    if state != "answered":
        del messages[1 + choices.below(len(messages)) :]
    return Turn(id=name, messages=tuple(messages), state=state, usage=TokenUsage(1, 1))


def check_pairs(messages: Sequence[Message]) -> None:
    """Each tool call has one result, directly behind its message, and nothing else is between the two."""
    waiting: list[str] = []
    for each in messages:
        if isinstance(each, ToolExecutionResultMessage):
            waiting.remove(each.id)
        else:
            assert not waiting
        if isinstance(each, AiMessage):
            waiting = [request.id for request in each.tool_execution_requests]
    assert not waiting


def check_alternation(messages: Sequence[Message]) -> None:
    """User and assistant take turns; results of tools belong to the side of the user."""
    sides: list[Any] = []
    for each in messages:
        side = "assistant" if isinstance(each, AiMessage) else "results" if _is_result(each) else "user"
        if side != "results" or sides[-1:] != ["results"]:
            sides.append(side)
    pairs = pairwise(sides)
    assert all((one == "assistant") != (following == "assistant") for one, following in pairs), sides


def _is_result(message: Message) -> bool:
    return isinstance(message, ToolExecutionResultMessage)
