"""Any order of calls, answers, cancellations and retries in a conversation that goes on while calls wait."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Protocol

from hypothesis import given, settings

from tests.conversations.made_logs import check_alternation, check_pairs
from tests.generated import Choices, made
from toolbox import (
    AiMessage,
    ChatMemoryKey,
    ChatMemoryStore,
    ChatRequest,
    ChatResponse,
    Container,
    InMemoryChatMemoryStore,
    MemoryId,
    Result,
    SystemMessage,
    ToolExecutionResultMessage,
    UserMessage,
    register_ai_service,
    tool,
)
from toolbox.conversations.log import entries_of
from toolbox.conversations.views import FullHistory, MessageWindow, TokenWindow
from toolbox.runs import approve, reject
from toolbox.testing import tool_call


@tool(requires_approval=True)
async def refund(order: int) -> str:
    return f"refunded {order}"


def service(view: Any) -> Any:
    @register_ai_service(tools=refund, chat_memory=view, on_suspended="continue")
    class Room(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    return Room


ROOMS = [service(view) for view in (FullHistory(), MessageWindow(4), TokenWindow(60), MessageWindow(20))]


class Model:
    """Asks for as many refunds as the message says, and checks each request."""

    async def chat(self, request: ChatRequest) -> ChatResponse:
        messages = [each for each in request.messages if not isinstance(each, SystemMessage)]
        assert isinstance(messages[0], UserMessage)
        check_pairs(messages)
        check_alternation(messages)
        asked = [each.text for each in messages if isinstance(each, UserMessage)]
        assert len({*asked}) == len(asked), asked  # a run that goes on does not see its own entry
        await asyncio.sleep(0)
        last = messages[-1]
        if isinstance(last, ToolExecutionResultMessage):
            return ChatResponse(AiMessage("done"))
        calls = [tool_call("refund", {"order": each}) for each in range(int(last.text.partition(" ")[0]))]
        return ChatResponse(AiMessage(None if calls else "an answer", calls))


@dataclass
class Course:
    """What happens in one room."""

    here: Container
    room: Any
    choices: Choices
    asked: dict[str, str | None] = field(default_factory=dict)
    """The runs that waited, by what was asked."""

    async def step(self) -> None:
        acts = [self.call, self.call, self.answer, self.answer, self.cancel, self.retry]
        if self.choices.below(4) == 3:
            await asyncio.gather(self.call(), self.answer())
        else:
            await self.choices.one_of(acts)()

    async def call(self) -> None:
        text = f"{self.choices.below(3)} refunds, question {len(self.asked)}"
        self.asked[text] = None
        self.asked[text] = (await self.here.get(self.room).chat("room", text)).run_id

    async def answer(self) -> None:
        if run := await self._find("suspended"):
            some = run.pending[: 1 + self.choices.below(len(run.pending))]
            answers = {each.id: approve() if self.choices.below(2) else reject("no") for each in some}
            await self.here.runs.resume(run.id, answers)

    async def cancel(self) -> None:
        if run := await self._find("suspended"):
            await self.here.runs.cancel(run.id)

    async def retry(self) -> None:
        if run := await self._find("cancelled"):
            await self.here.runs.retry(run.id)

    async def _find(self, status: Any) -> Any:
        found = await self.here.runs.list(status=status, memory_id="room")
        return self.choices.one_of(sorted(found, key=lambda each: each.created_at)) if found else None

    async def check(self, store: InMemoryChatMemoryStore) -> None:
        log = await store.read_since(ChatMemoryKey.of(self.room, "room"), lambda head: 0)
        entries = [] if log is None else [*entries_of(log.turns)]
        assert log is None or log.head.messages == len(entries)
        shown = [each for each in entries if isinstance(each.message, UserMessage)]
        assert sorted(each.message.text or "" for each in shown) == sorted(self.asked)
        ends = {"suspended": "waiting", "completed": "answered", "cancelled": "stopped"}
        for each in shown:
            run_id = self.asked[each.message.text or ""]
            status = "completed" if run_id is None else (await self.here.runs.get(run_id)).status
            assert each.state == ends[status], each


@settings(deadline=None, max_examples=60)
@given(made(lambda choices: choices, size=128))
def test_every_request_obeys_the_rules_of_models_and_the_log_says_what_became_of_each_call(
    drawn: tuple[Choices],
) -> None:
    asyncio.run(go_through(drawn[0]))


async def go_through(choices: Choices) -> None:
    room, store = choices.one_of(ROOMS), InMemoryChatMemoryStore()
    container = Container(models={"default": Model()}).register(room).register_instance(store, ChatMemoryStore)
    async with container as here:
        course = Course(here, room, choices)
        for _ in range(3 + choices.below(10)):
            await course.step()
            await course.check(store)
