"""Durable runs whose conversation is summarized, or too long for the model: crashes at every write to the store."""

from datetime import timedelta
from typing import Any, Protocol

import pytest

from tests.runs.test_crashes import Crashing, Kept
from toolbox import (
    AiMessage,
    ChatMemoryStore,
    ChatRequest,
    ChatResponse,
    Container,
    ContextLengthError,
    InMemoryChatMemoryStore,
    MemoryId,
    MessageWindow,
    Result,
    TokenUsage,
    TokenWindow,
    UserMessage,
    register_ai_service,
    tool,
)
from toolbox.conversations import FullHistory, Summary
from toolbox.conversations.keys import ChatMemoryKey
from toolbox.conversations.log import LogWrite, Turn
from toolbox.runs import RunId, RunStore, approve, durable
from toolbox.service_names import stored_name
from toolbox.store_clock import skip
from toolbox.testing import tool_call

pytestmark = pytest.mark.anyio


class Files:
    @tool
    def read(self, name: str) -> str:
        return f"{name} " + "x" * 5000

    @tool(requires_approval=True)
    def pay(self) -> str:
        return "paid"


@register_ai_service(
    name="short", tools=Files, on_unknown_outcome="retry", chat_memory=Summary(MessageWindow(4), keep_messages=2)
)
class Summarized(Protocol):
    @durable
    async def chat(self, run: RunId, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service(name="full", tools=Files, on_unknown_outcome="retry", chat_memory=FullHistory())
class Full(Protocol):
    @durable
    async def chat(self, run: RunId, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service(
    name="both", tools=Files, on_unknown_outcome="retry", chat_memory=Summary(TokenWindow(100_000), keep_messages=2)
)
class Both(Protocol):
    @durable
    async def chat(self, run: RunId, room: MemoryId[str], text: str) -> Result[str]: ...


class Server:
    """Answers from what it gets, refuses what is too long, and notes what was asked."""

    def __init__(self, most: int) -> None:
        self.most, self.asked = most, list[list[str]]()

    async def chat(self, request: ChatRequest) -> ChatResponse:
        texts = [each.text or "" for each in request.messages]
        usage = TokenUsage(1, 0)
        if "Summarize" in texts[-1]:
            self.asked.append(["summary", *texts[:-1]])
            return ChatResponse(AiMessage("They met."), usage)
        self.asked.append(texts)
        if len(texts) > self.most or any(len(each) > 4000 for each in texts):
            raise ContextLengthError(400, "too long")
        if not isinstance(request.messages[-1], UserMessage):
            return ChatResponse(AiMessage("paid" if texts[-1] == "paid" else "ok"), usage)
        asks = tool_call("read", {"name": "a"}) if "read" in texts[-1] else tool_call("pay", {})
        return ChatResponse(AiMessage(None, [asks]), usage)


async def conversation(service: type[Any], turns: int) -> InMemoryChatMemoryStore:
    """Return a store with a conversation of so many turns."""
    store = InMemoryChatMemoryStore()
    store.persistent = True  # type: ignore[attr-defined]
    for each in range(1, turns + 1):
        turn = Turn(messages=(UserMessage(f"q{each}"), AiMessage(f"a{each}")))
        await store.write(key_of(service), LogWrite(turn=turn))
    return store


def key_of(service: type[Any]) -> ChatMemoryKey:
    return ChatMemoryKey(stored_name(service), "7")


def program(service: type[Any], server: Server, runs: Any, memory: Any) -> Container:
    made = Container(models={"default": server}).register(service)
    return made.register_instance(runs, RunStore).register_instance(memory, ChatMemoryStore)


async def finish(service: type[Any], server: Server, runs: Any, memory: Any) -> Result[Any]:
    """Continue the only run until it ends."""
    async with program(service, server, runs, memory) as app:
        for _ in range(3):
            [run] = await app.runs.list()
            result = await app.runs.resume(run.id, {each.id: approve() for each in run.pending})
            if not result.pending:
                return result
    raise AssertionError("the run does not end")


@pytest.mark.parametrize("text", ["read", "pay"])
@pytest.mark.parametrize("service", [Summarized, Full, Both], ids=lambda each: each.__name__)
async def test_after_a_crash_the_run_goes_on_with_what_it_had(service: type[Any], text: str) -> None:
    most = 100 if service is Summarized or text == "read" else 5
    turns = 3 if service is Summarized or text == "pay" else 1
    at, ends, repeated = 1, set[Any](), list[int]()
    while True:
        for after in (False, True):
            kept, memory, server = Kept(), await conversation(service, turns), Server(most)
            crashing = Crashing(kept, at, after)
            try:
                async with program(service, server, crashing, memory) as app:
                    first = await app.get(service).chat("r", "7", text)
                    if first.pending:
                        await app.runs.resume("r", {each.id: approve() for each in first.pending})
            except Exception:
                if not crashing.crashed:
                    raise
            if crashing.crashed:
                if not kept._runs:
                    continue
                skip([kept.clock], timedelta(seconds=kept.lease))
                await finish(service, server, kept, memory)
            stored = await memory.get_messages(key_of(service))
            ends.add((tuple(each.text for each in stored), tuple(server.asked[-1])))
            summaries = [tuple(each) for each in server.asked if each[0] == "summary"]
            repeated.append(len(summaries) - len(set(summaries)))
            if not crashing.crashed:
                assert len(ends) == 1
                assert sum(repeated) <= len(set(summaries))  # only where the crash came before the record
                assert service is Full or summaries
                return
        at += 1
