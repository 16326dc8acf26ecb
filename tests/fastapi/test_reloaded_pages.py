"""Pages that are loaded again at any moment of an answer show what one page without a break shows."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from toolbox import ChatRequest
from toolbox.chat import StreamEvent
from toolbox.testing import ScriptedChatModel, tool_call

from .front_desk import REFUND, Refunds, answered, answers, events_in, made, message_of, posted, said, says
from .front_end_scenes import shown_by_ag_ui, shown_by_use_chat
from .test_ag_ui import interrupts_in, messages_of, resumed
from .test_vercel_ai import read_frames

pytestmark = pytest.mark.anyio

Running = Callable[..., Any]
LOOK = says(tool_call("look_up", {"order": 7}), tool_call("fail", {}), text="Let me see.", thought="Hm.")


class PausedAt(ScriptedChatModel):
    """A model that waits before one of its events, counted over all replies."""

    def __init__(self, replies: Any, pause: int) -> None:
        super().__init__(replies)
        self.waits, self.may_go_on = asyncio.Event(), asyncio.Event()
        self._left = pause

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        async for each in super().stream(request):
            if self._left == 0:
                self.waits.set()
                await self.may_go_on.wait()
            self._left -= 1
            yield each

    @property
    def has_paused(self) -> bool:
        """True if there was an event to wait before."""
        return self._left < 0


async def leave(client: Any, path: str, body: dict[str, Any], model: PausedAt) -> None:
    """Send a body, and leave when the model waits or the answer is complete."""
    async with client.stream("POST", path, json=body) as response:
        reading = asyncio.create_task(read_frames(response, 10_000))
        waiting = asyncio.create_task(model.waits.wait())
        await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()
        waiting.cancel()


async def listen(client: Any, method: str, path: str, model: PausedAt, **more: Any) -> list[dict[str, Any]]:
    """Get the rest of an answer; the model goes on when the client listens."""
    events: list[dict[str, Any]] = []
    async with client.stream(method, path, **more) as response:
        if model.waits.is_set():
            model.waits.clear()  # it does not wait again: `leave` reads the rest, which nothing holds up
            model.may_go_on.set()
        async for line in response.aiter_lines():
            events += events_in(line)
    return events


async def load_use_chat(client: Any, model: PausedAt) -> list[str]:
    """What `useChat` shows with the history and `resume: true`; with the new history if the answer has just ended."""
    messages = (await client.get("/api/chat/room/messages")).json()
    if chunks := await listen(client, "GET", "/api/chat/room/stream", model):
        message = message_of(chunks)
        messages = [*(each for each in messages if each["id"] != message["id"]), message]
    else:
        messages = (await client.get("/api/chat/room/messages")).json()
    for each in messages:
        each["parts"] = [part for part in each["parts"] if not part["type"].startswith("data-")]
    return shown_by_use_chat(messages)


@pytest.mark.parametrize("approves", [False, True])
async def test_use_chat_shows_all_of_an_answer_once(approves: bool, serving: Running) -> None:
    replies = [LOOK, REFUND, "All is done."] if approves else [LOOK, "All is done."]
    refund = "[refund output-available] " if approves else ""
    whole = f"assistant: (Hm.) Let me see. [look_up output-available] [fail output-error] {refund}All is done."
    for pause in itertools.count():
        model = PausedAt(replies, pause)
        app, container = made(model)
        async with serving(app) as client:
            await leave(client, "/api/chat", said("hi"), model)
            shown = await load_use_chat(client, model)
            if approves:
                assert shown[-1].endswith("[refund approval-requested]")
                [_, message] = (await client.get("/api/chat/room/messages")).json()
                await leave(client, "/api/chat", answers(answered(message)), model)
                shown = await load_use_chat(client, model)
                assert container.get(Refunds).refunded == [7]
            assert len(await container.runs.list()) == 1
        assert shown == ["user: hi", whole]
        if not model.has_paused:
            break
    assert pause > 10


async def load_ag_ui(client: Any, model: PausedAt) -> tuple[list[Any], list[Any]]:
    """What an AG-UI client has with the history, and with the answer that is under way."""
    messages = (await client.get("/agui/room/messages")).json()
    events = await listen(client, "POST", "/agui", model, json=posted(*messages))
    if not events:  # 422: the answer has ended
        return (await client.get("/agui/room/messages")).json(), events
    before = next(each["messages"] for each in events if each["type"] == "MESSAGES_SNAPSHOT")
    read = messages_of(events, before)
    for each in read:
        for call in each.get("toolCalls", ()):
            call.setdefault("function", {"name": call.get("name"), "arguments": call.get("arguments")})
    return read, events


@pytest.mark.parametrize("approves", [False, True])
async def test_an_ag_ui_client_has_all_of_an_answer_once(approves: bool, serving: Running) -> None:
    replies = [LOOK, REFUND, "All is done."] if approves else [LOOK, "All is done."]
    refund = ["assistant: refund", "tool: refunded 7"] if approves else []
    results = ['tool: {"order":7,"euros":20}', "tool: no such order"]
    whole = ["reasoning: Hm.", "assistant: Let me see. look_up fail", *results, *refund, "assistant: All is done."]
    for pause in itertools.count():
        model = PausedAt(replies, pause)
        app, container = made(model)
        async with serving(app) as client:
            await leave(client, "/agui", posted("hi"), model)
            messages, events = await load_ag_ui(client, model)
            if approves:
                answer = resumed(interrupts_in(events), True)
                await leave(client, "/agui", {**answer, "messages": messages}, model)
                messages, _ = await load_ag_ui(client, model)
                assert container.get(Refunds).refunded == [7]
            assert len(await container.runs.list()) == 1
        assert shown_by_ag_ui(messages) == ["user: hi", *whole]
        if not model.has_paused:
            break
    assert pause > 10
