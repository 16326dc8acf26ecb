"""Conversations from elsewhere: `restore` takes them, and what is sent of them obeys the rules of all servers."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Protocol

from hypothesis import given, settings

from tests.generated import Choices, made
from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    MemoryId,
    MessageWindow,
    TokenWindow,
    UserMessage,
    register_ai_service,
)
from toolbox.conversations import FullHistory, Summary

from .server_rules import check_request

VIEWS: tuple[Any, ...] = (
    MessageWindow(1),
    MessageWindow(4),
    TokenWindow(60),
    FullHistory(),
    Summary(MessageWindow(5), keep_messages=2),
)
IDS = ("call_1", "call_2", "", "a b", "call_" + "x" * 80)
ARGUMENTS = ("{}", "", "null", "{broken", "[1]", '{"a": NaN}')


def messages_of_turn(choices: Choices) -> Iterator[dict[str, Any]]:
    """Yield the messages of a turn as servers and other libraries record them."""
    yield {"type": "user", "contents": [{"type": "text", "text": choices.one_of(("Hi", " x\n", "\ud83d"))}]}
    for _ in range(choices.below(3)):
        ids = [choices.one_of(IDS) for _ in range(1 + choices.below(3))]
        yield reply_of(choices, ids)
        for each in choices.shuffled([each for each in ids if choices.below(8)]):
            yield {"type": "tool_result", "id": each, "tool_name": "look", "text": choices.one_of(("", "x"))}
        if choices.below(8) == 7:
            yield {"type": "tool_result", "id": "of no call", "tool_name": "look", "text": "x"}
    yield reply_of(choices, [])


def reply_of(choices: Choices, ids: list[str]) -> dict[str, Any]:
    text = choices.one_of(("", " ", "It is so.\n"))
    reply: dict[str, Any] = {"type": "ai", "text": text}
    if ids:
        calls = [{"id": each, "name": choices.one_of(("look", "no name", "")), "arguments": "{}"} for each in ids]
        reply["tool_execution_requests"] = [{**each, "arguments": choices.one_of(ARGUMENTS)} for each in calls]
    if choices.below(3) == 2:  # the blocks of Anthropic
        blocks = [{"type": "tool_use", "id": each, "name": "look", "input": {}} for each in ids]
        thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
        reply["attributes"] = {"content": [thought, {"type": "text", "text": text}, *blocks]}
    return reply


class Checking:
    """A model that checks what it gets as servers do."""

    async def chat(self, request: ChatRequest) -> ChatResponse:
        check_request(request)
        return ChatResponse(AiMessage("ok"))


@settings(deadline=None, max_examples=60)
@given(made(lambda choices: choices, size=200))
def test_what_is_restored_is_sent_by_the_rules_of_all_servers(drawn: tuple[Choices]) -> None:
    asyncio.run(go_through(*drawn))


async def go_through(choices: Choices) -> None:
    @register_ai_service(chat_memory=choices.one_of(VIEWS))
    class Desk(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    states = ("answered", "answered", "failed", "stopped", "waiting")
    turns = [
        {"state": choices.one_of(states), "messages": list(messages_of_turn(choices))}
        for _ in range(1 + choices.below(6))
    ]
    async with Container(models={"default": Checking()}).register(Desk) as container:
        conversations, desk = container.conversations, container.get(Desk)
        room = await conversations.restore(Desk, "room", {"turns": turns})
        entries = await room.history(limit=1000)
        assert len(entries) == (await room.info()).messages == sum(len(each["messages"]) for each in turns)
        await desk.chat("room", "one")
        await desk.chat("room", "two")

        await room.fork("fork", upto=choices.one_of(entries))
        await desk.chat("fork", "three")
        await room.rewind(choices.one_of([each for each in entries if isinstance(each.message, UserMessage)]))
        await desk.chat("room", "four")
        await conversations.restore(Desk, "again", json.loads(json.dumps(await room.export())))
        await desk.chat("again", "five")
