"""Most requests of a long conversation begin like the one before, so that model servers find them in their caches."""

from itertools import pairwise
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    MemoryId,
    MessageWindow,
    SystemMessage,
    TokenWindow,
    register_ai_service,
    system_message,
)
from toolbox.conversations import FullHistory, Summary
from toolbox.models.chat_wire import ChatWire

pytestmark = pytest.mark.anyio

WIRE = ChatWire()


class Server:
    """Answers, and keeps what the wire sends of each request but those for summaries."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    async def chat(self, request: ChatRequest) -> ChatResponse:
        if isinstance(request.messages[0], SystemMessage):
            self.sent.append(WIRE.fields(request)["messages"].removesuffix(b"]"))
        return ChatResponse(AiMessage("A sentence of some forty characters here."))


@pytest.mark.parametrize(
    ("view", "least"),
    [
        (MessageWindow(20), 0.7),
        (TokenWindow(600), 0.7),
        (Summary(MessageWindow(20), keep_messages=6), 0.8),
        (FullHistory(), 1),
    ],
    ids=lambda each: type(each).__name__,
)
async def test_most_requests_of_a_long_conversation_begin_like_the_one_before(view: Any, least: float) -> None:
    @register_ai_service(chat_memory=view)
    class Assistant(Protocol):
        @system_message("Be kind.")
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    server = Server()
    async with Container(models={"default": server}).register(Assistant) as app:
        for each in range(100):
            await app.get(Assistant).chat("7", f"Question {each}, which has about as many characters.")

    pairs = list(pairwise(server.sent))
    assert len(pairs) == 99
    assert sum(following.startswith(before) for before, following in pairs) / len(pairs) >= least
    if not isinstance(view, FullHistory):
        assert max(map(len, server.sent)) < 6000
