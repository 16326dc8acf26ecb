"""Turns of calls that end without an answer: what the log keeps of them, and what the next call's model reads.

Not here: calls that somebody stops (`test_stop`), how a view sends such turns (`test_views`).
"""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, Protocol

import anyio
import pytest
from hypothesis import given, settings
from pydantic import BaseModel

from tests.conversations.made_logs import check_alternation, check_pairs
from tests.conversations.three_methods import ThreeMethods
from tests.generated import Choices, made
from toolbox import (
    AiMessage,
    ChatMemoryKey,
    ChatMemoryStore,
    ChatRequest,
    ChatResponse,
    CompleteToolCall,
    Container,
    FinishReason,
    MemoryId,
    Message,
    PartialResponse,
    TokenStream,
    ToolAbort,
    ToolboxSettings,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
    compensate_for,
    register_ai_service,
    return_to_model,
    tool,
)
from toolbox.conversations import conversation_scoped
from toolbox.conversations.log import NOTES, LogEntry, Turn, entries_of
from toolbox.conversations.stores import InMemoryChatMemoryStore
from toolbox.conversations.views import pieces_of, sent
from toolbox.errors import InvocationTimeoutError, ModelConnectionError, ModelRefusedError, ToolRoundsExceededError
from toolbox.guardrails import GuardrailResult, OutputGuardrail, OutputGuardrailRequest, output_guardrails
from toolbox.models import fallback
from toolbox.services.loop import (
    CallModel,
    ModelReplied,
    Rules,
    RunTools,
    ToolFinished,
    ToolSuspended,
    advance,
    begin,
    with_early_call,
)
from toolbox.services.outputs import ANSWER_TOOL, read_output
from toolbox.services.turns import unfinished_messages
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox.tools.tool_calls import ToolOutcome

pytestmark = pytest.mark.anyio


class Till:
    """Tools that pay, wait, fail, and end the call."""

    def __init__(self) -> None:
        self.paid: list[int] = []
        self.waits = asyncio.Event()

    @tool
    async def pay(self, amount: int) -> str:
        self.paid.append(amount)
        return f"paid {amount}"

    @tool
    async def wait(self) -> str:
        self.waits.set()
        await asyncio.Event().wait()
        return "never"

    @tool
    async def end(self) -> str:
        raise ToolAbort("enough")


class Chat(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...

    def text(self, room: MemoryId[str], text: str) -> AsyncIterator[str]: ...

    def events(self, room: MemoryId[str], text: str) -> TokenStream: ...


PAY, WAIT, END = tool_call("pay", {"amount": 7}), tool_call("wait"), tool_call("end")
FAILS = ModelConnectionError("the server is away")


class Room:
    """A container with a service whose first turn is answered, its model, and its log."""

    def __init__(self, *replies: Any, store: ChatMemoryStore | None = None, model: Any = None, **options: Any) -> None:
        @register_ai_service(tools=Till, name="tests.unfinished", **options)
        class Service(Chat, Protocol): ...

        self.service, self.till = Service, Till()
        self.model = ScriptedChatModel(["hello", *replies])
        self.store: Any = InMemoryChatMemoryStore() if store is None else store
        models = {"default": self.model if model is None else model}
        self.container = Container(models=models, settings=ToolboxSettings(stop_timeout=0.1)).register(Service)
        self.container.register_instance(self.till).register_instance(self.store, as_type=ChatMemoryStore)
        self.key = ChatMemoryKey.of(Service, "r")

    async def __aenter__(self) -> "Room":
        await self.container.__aenter__()
        self.chat: Any = self.container.get(self.service)
        await self.chat.chat("r", "hi")
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self.container.__aexit__(*raised)

    async def entries(self) -> list[LogEntry]:
        """Return what the second turn has stored."""
        log = await self.store.read_since(self.key, lambda head: 0)
        return list(entries_of(log.turns))[2:]

    async def said(self) -> list[Message]:
        return [each.message for each in await self.entries()]

    async def state(self) -> set[str]:
        return {each.state for each in await self.entries()}

    async def sent_next(self) -> tuple[Message, ...]:
        """Return what the model of a third call gets of the second turn."""
        self.model.will_reply("next")
        await self.chat.chat("r", "and now?")
        messages = self.model.requests[-1].messages
        check_pairs(messages)
        check_alternation(messages)
        return tuple(messages[2:-1])


def result(request: Any, text: str, is_error: bool = False) -> ToolExecutionResultMessage:
    return ToolExecutionResultMessage(request.id, request.name, text, is_error)


async def cancelled(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- what is stored


async def test_a_call_that_fails_after_a_tool_stores_its_turn_as_failed() -> None:
    async with Room(PAY, FAILS) as room:
        with pytest.raises(ModelConnectionError):
            await room.chat.chat("r", "pay")

        assert await room.said() == [UserMessage("pay"), AiMessage(None, [PAY]), result(PAY, "paid 7")]
        assert await room.state() == {"failed"}
        sent = await room.sent_next()
    assert sent == (UserMessage("pay"), AiMessage(None, [PAY]), result(PAY, "paid 7"), AiMessage(NOTES["failed"]))


async def test_a_call_in_which_no_tool_has_begun_stores_nothing() -> None:
    refused = tool_call("pay", {"amount": "many"})
    handlers = dict.fromkeys(("on_unknown_tool", "on_tool_arguments_error"), return_to_model)
    for replies in ((FAILS,), (tool_call("unknown"), FAILS), (refused, FAILS)):
        async with Room(*replies, **handlers) as room:
            with pytest.raises(ModelConnectionError):
                await room.chat.chat("r", "pay")
            assert await room.said() == []
    async with Room(PAY, max_tool_rounds=0) as room:
        with pytest.raises(ToolRoundsExceededError):
            await room.chat.chat("r", "pay")
        assert await room.said() == []


async def test_a_call_that_is_cancelled_in_a_tool_stores_the_call_as_interrupted() -> None:
    both = AiMessage("a moment", [PAY, WAIT, END])
    async with Room(both) as room:
        task = asyncio.create_task(room.chat.chat("r", "pay"))
        await room.till.waits.wait()
        await cancelled(task)

        interrupted = [result(each, "interrupted", is_error=True) for each in (WAIT, END)]
        assert await room.said() == [UserMessage("pay"), both, result(PAY, "paid 7"), *interrupted]
        assert await room.state() == {"stopped"}
        sent = await room.sent_next()
    assert sent[-1] == AiMessage(NOTES["stopped"])


def test_a_tool_that_the_user_interrupts_with_the_keyboard_stays_in_the_turn() -> None:
    """A blocking tool runs on the thread that waits for the call, where Python raises the error."""

    @tool
    def interrupted() -> str:
        raise KeyboardInterrupt

    @register_ai_service(tools=interrupted, name="tests.interrupted")
    class Terminal(Protocol):
        def ask(self, room: MemoryId[str], text: str) -> str: ...

    model = ScriptedChatModel([tool_call("interrupted"), "go on"])
    with Container(models={"default": model}).register(Terminal) as container:
        with pytest.raises(KeyboardInterrupt):
            container.get(Terminal).ask("room", "q1")
        assert container.get(Terminal).ask("room", "q2") == "go on"

    *turn, note, _ = model.requests[-1].messages
    assert [each.text for each in turn] == ["q1", None, "interrupted"]
    assert note.text == NOTES["stopped"]


async def test_a_call_whose_time_is_up_has_failed_and_an_outer_limit_counts_too() -> None:
    async with Room(WAIT, timeout=0.05) as room:
        with pytest.raises(InvocationTimeoutError):
            await room.chat.chat("r", "pay")
        assert await room.state() == {"failed"}


async def test_the_reader_of_a_stream_leaves_and_the_text_so_far_stays() -> None:
    async with Room(PAY, "one two three four") as room:
        async with room.chat.events("r", "pay") as events:
            async for each in events:
                if getattr(each, "text", "") == "three ":
                    break

        assert (await room.said())[-1] == AiMessage("one two three ")
        assert await room.state() == {"stopped"}
        sent = await room.sent_next()
    assert sent[-1] == AiMessage(f"one two three \n\n{NOTES['stopped']}")


async def test_the_text_that_a_reader_got_before_a_content_filter_cut_the_stream_stays() -> None:
    cut = ChatResponse(AiMessage("half an"), finish_reason=FinishReason.CONTENT_FILTER)
    async with Room(PAY, cut) as room:
        with pytest.raises(ModelRefusedError):
            [each async for each in room.chat.text("r", "pay")]

        assert (await room.said())[-1] == AiMessage("half an")
        assert await room.state() == {"failed"}


@pytest.mark.parametrize("leave", ["close", "drop", "cancel"])
async def test_every_way_to_leave_a_stream_stores_its_turn(leave: str) -> None:
    async with Room(PAY, "one two three", *[WAIT] * (leave == "cancel")) as room:
        stream = room.chat.text("r", "pay")
        assert await anext(stream) == "one "
        if leave == "close":
            await stream.aclose()
        elif leave == "cancel":
            assert [each async for each in stream] == ["two ", "three"]
            waiting = room.chat.text("r", "wait")
            task = asyncio.create_task(anext(waiting))
            await room.till.waits.wait()
            await cancelled(task)
        del stream
        room.model.will_reply("next")
        await asyncio.wait_for(room.chat.chat("r", "and now?"), 30)  # waits for the turn of the stream
        states = [each.state for each in await room.entries() if isinstance(each.message, UserMessage)]
    assert states == (["answered", "stopped", "answered"] if leave == "cancel" else ["stopped", "answered"])


async def test_text_that_output_guardrails_hold_back_is_not_stored() -> None:
    class Strict(OutputGuardrail):
        async def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
            return self.failure("no")

    @register_ai_service(tools=Till)
    class Guarded(Protocol):
        @output_guardrails(Strict)
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    model, store = ScriptedChatModel([PAY, "a secret"]), InMemoryChatMemoryStore()
    made = Container(models={"default": model}).register(Guarded, Strict, Till)
    async with made.register_instance(store, as_type=ChatMemoryStore) as container:
        with pytest.raises(Exception, match="guardrail"):
            await container.get(Guarded).chat("r", "pay")
        kept = await container.chat_memory(Guarded, "r").messages()
    assert kept == [UserMessage("pay"), AiMessage(None, [PAY]), result(PAY, "paid 7")]


async def test_tools_that_began_before_the_reply_was_complete_are_stored_with_it() -> None:
    class Early:
        """Streams a call, and then never ends."""

        async def chat(self, request: Any) -> ChatResponse:
            return ChatResponse(AiMessage("hello"))

        async def stream(self, request: Any) -> AsyncIterator[Any]:
            yield PartialResponse("I pay. ")
            yield CompleteToolCall(0, PAY)
            yield PartialResponse("And")
            await asyncio.Event().wait()

    async with Room(model=Early(), concurrent_tools=True) as room:
        async with room.chat.events("r", "pay") as events:
            async for each in events:
                if type(each).__name__ == "ToolExecuted":
                    break
        assert await room.said() == [UserMessage("pay"), AiMessage("I pay. ", [PAY]), result(PAY, "paid 7")]


async def test_undone_tools_say_so() -> None:
    class Desk:
        def __init__(self) -> None:
            self.steps: list[str] = []

        @tool
        async def book(self) -> str:
            return "booked"

        @compensate_for(book)
        async def unbook(self) -> None:
            self.steps.append("unbooked")

        @tool
        async def rent(self) -> str:
            return "rented"

        @compensate_for(rent)
        async def return_it(self) -> None:
            raise ValueError("closed")

    @register_ai_service(tools=Desk, compensate_on_failure=True)
    class Careful(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    book, rent, ask = tool_call("book"), tool_call("rent"), AiMessage(None, [tool_call("book"), tool_call("rent")])
    replies = [AiMessage(None, [book, rent]), ask, FAILS, "next"]
    model, store, desk = ScriptedChatModel(replies), InMemoryChatMemoryStore(), Desk()
    made = Container(models={"default": model}).register(Careful).register_instance(desk)
    async with made.register_instance(store, as_type=ChatMemoryStore) as container:
        with pytest.raises(ModelConnectionError):
            await container.get(Careful).chat("r", "go")
        assert desk.steps == ["unbooked", "unbooked"]
        await container.get(Careful).chat("r", "and now?")
    results = [each for each in model.requests[-1].messages if isinstance(each, ToolExecutionResultMessage)]
    assert len(results) == 4
    assert all(each.is_error for each in results)
    assert ["rolled back" in each.text for each in results] == [True, False, True, False]
    assert ["undoing it" in each.text for each in results] == [False, True, False, True]
    [note] = [each.text for each in model.requests[-1].messages if isinstance(each, AiMessage)][-1:]
    assert "undone" in (note or "")


async def test_the_answer_of_a_fallback_is_not_stored_but_the_tools_before_it_are() -> None:
    for replies, kept in (((PAY, FAILS), 3), ((FAILS,), 0)):

        @register_ai_service(tools=Till)
        class Service(Protocol):
            async def chat(self, room: MemoryId[str], text: str) -> str: ...

            @fallback(chat)
            @staticmethod
            def offline() -> str:
                return "later"

        model, store = ScriptedChatModel(replies), InMemoryChatMemoryStore()
        made = Container(models={"default": model}).register(Service, Till)
        async with made.register_instance(store, as_type=ChatMemoryStore) as container:
            assert await container.get(Service).chat("r", "pay") == "later"
            log = await store.read_since(ChatMemoryKey.of(Service, "r"), lambda head: 0)
        entries = [] if log is None else list(entries_of(log.turns))
        assert len(entries) == kept
        assert {each.state for each in entries} <= {"failed"}
        assert "later" not in [getattr(each.message, "text", None) for each in entries]


# --- the write


class Broken(InMemoryChatMemoryStore):
    """Fails to write from a certain time on."""

    is_broken = False

    async def write(self, key: ChatMemoryKey, write: Any) -> None:
        if self.is_broken:
            raise OSError("the disk is full")
        await super().write(key, write)


async def test_a_store_that_fails_does_not_replace_the_error_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    store = Broken()
    async with Room(PAY, FAILS, store=store) as room:
        store.is_broken = True
        with pytest.raises(ModelConnectionError):
            await room.chat.chat("r", "pay")
        assert "the disk is full" in caplog.text
        assert await room.said() == []


class Slow(InMemoryChatMemoryStore):
    """Takes its time to write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes, self.may_write = asyncio.Event(), asyncio.Event()
        self.may_write.set()

    async def write(self, key: ChatMemoryKey, write: Any) -> None:
        self.writes.set()
        await self.may_write.wait()
        await super().write(key, write)


async def test_a_second_cancellation_does_not_tear_the_write() -> None:
    store = Slow()
    async with Room(WAIT, store=store) as room:
        store.may_write.clear()
        store.writes.clear()
        task = asyncio.create_task(room.chat.chat("r", "pay"))
        await room.till.waits.wait()
        task.cancel()
        await store.writes.wait()
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        store.may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await room.state() == {"stopped"}


async def test_a_cancelled_scope_of_anyio_does_not_tear_the_write() -> None:
    store = Slow()
    async with Room(WAIT, store=store) as room:
        store.may_write.clear()
        store.writes.clear()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:

                async def leave() -> None:
                    await room.till.waits.wait()
                    scope.cancel()
                    await store.writes.wait()

                group.start_soon(leave)
                asyncio.get_running_loop().call_later(0.05, store.may_write.set)
                await room.chat.chat("r", "pay")
        assert scope.cancelled_caught
        assert await room.state() == {"stopped"}


async def test_a_store_that_hangs_ends_the_call_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolbox.services.layers._LAST_WRITE", 0.05)
    store = Slow()
    async with Room(PAY, FAILS, store=store) as room:
        store.may_write.clear()
        with pytest.raises(ModelConnectionError):
            await asyncio.wait_for(room.chat.chat("r", "pay"), 30)


async def test_an_answered_turn_whose_write_seemed_to_fail_is_there_once() -> None:
    class Unsure(InMemoryChatMemoryStore):
        fails = False

        async def write(self, key: ChatMemoryKey, write: Any) -> None:
            await super().write(key, write)
            if self.fails:
                self.fails = False
                raise ConnectionError("the connection broke after the commit")

    store = Unsure()
    async with Room(PAY, "done", store=store) as room:
        store.fails = True
        with pytest.raises(ConnectionError):
            await room.chat.chat("r", "pay")
        assert await room.state() == {"answered"}
        assert len(await room.said()) == 4


async def test_a_container_that_stops_stores_the_turns_of_its_calls() -> None:
    room = Room(PAY, WAIT)
    async with room:
        task = asyncio.create_task(room.chat.chat("r", "pay"))
        await room.till.waits.wait()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await room.state() == {"stopped"}


@conversation_scoped
class Kept(BaseModel):
    words: list[str] = []


waits = asyncio.Event()


@tool
async def wait_for_ever() -> str:
    """Wait."""
    waits.set()
    await asyncio.Event().wait()
    return ""


@register_ai_service(name="keeper", tools=wait_for_ever)
class Keeper(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


def keeper(store: InMemoryChatMemoryStore, stop_timeout: float = 10.0) -> Container:
    """Return a container whose model says what the user said, or calls the tool for `wait`."""

    def reply(request: ChatRequest) -> Any:
        text = request.messages[-1].text
        return AiMessage(None, [tool_call("wait_for_ever", {})]) if text == "wait" else text

    model, settings_ = ScriptedChatModel([reply] * 9), ToolboxSettings(stop_timeout=stop_timeout)
    container = Container(models={"default": model}, settings=settings_)
    return container.register(Keeper, Kept).register_instance(store, ChatMemoryStore)


async def kept(store: InMemoryChatMemoryStore) -> list[str]:
    log = await store.read_since(ChatMemoryKey("keeper", "r"), lambda head: 0)
    return [] if log is None else log.head.beans[f"{__name__}.Kept"]["words"]


async def block_of(here: Container, began: asyncio.Event, goes_on: asyncio.Event, words: list[str]) -> None:
    """Change a bean in a block, and call the service there with each of some words."""
    async with here.conversation_scope(Keeper, "r"):
        (await here.aget(Kept)).words.append("first")
        for each in words:
            await here.get(Keeper).chat("r", each)
        began.set()
        await goes_on.wait()
        (await here.aget(Kept)).words.append("last")


async def test_a_container_that_stops_waits_for_the_blocks_of_conversations() -> None:
    began, goes_on, store = asyncio.Event(), asyncio.Event(), InMemoryChatMemoryStore()
    here = keeper(store)
    async with here:
        task = asyncio.create_task(block_of(here, began, goes_on, []))
        await began.wait()
        asyncio.get_running_loop().call_soon(goes_on.set)
    await task
    assert await kept(store) == ["first", "last"]


@pytest.mark.parametrize("words", [[], ["one"], ["wait"]])
async def test_a_block_that_outlasts_its_container_is_cancelled_and_leaves_the_conversation(words: list[str]) -> None:
    began, store = asyncio.Event(), InMemoryChatMemoryStore()
    here = keeper(store, stop_timeout=0.05)
    async with here:
        task = asyncio.create_task(block_of(here, began, asyncio.Event(), words))
        await (waits.wait() if words == ["wait"] else began.wait())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await kept(store) == (["first"] if words else [])
    async with keeper(store) as there, asyncio.timeout(5):
        assert await there.get(Keeper).chat("r", "two") == "two"


# --- the option


async def test_unfinished_turns_can_be_discarded() -> None:
    async with Room(PAY, FAILS, unfinished_turns="discard") as room:
        with pytest.raises(ModelConnectionError):
            await room.chat.chat("r", "pay")
        assert await room.said() == []


async def test_a_store_of_three_methods_keeps_no_unfinished_turns() -> None:
    store = ThreeMethods()
    async with Room(PAY, FAILS, store=store) as room:
        with pytest.raises(ModelConnectionError):
            await room.chat.chat("r", "pay")
        assert list(store.kept.values()) == [(UserMessage("hi"), AiMessage("hello"))]


def test_another_value_is_a_problem_at_start() -> None:
    @register_ai_service(unfinished_turns="drop")  # type: ignore[call-overload]
    class Service(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    problems = Container(models={"default": ScriptedChatModel()}).register(Service).check()
    assert ["unfinished_turns='drop'" in each.what for each in problems] == [True]


# --- calls that end anywhere

PARSED = read_output(list[int]).structure


def outcome_of(request: ToolExecutionRequest, ran: bool) -> ToolOutcome:
    execution = ToolExecution(request, "done" if ran else "no", None, not ran, datetime.now(UTC), 0.0)
    return ToolOutcome(execution, ran=ran)


def reply_of(choices: Choices, number: int, mode: str) -> ChatResponse:
    """Return a reply with calls, also repeated ones and calls of the answer tool; or one without."""
    names = ["add", "add", "pay", *([ANSWER_TOOL] if mode == "tool" else [])]
    count = choices.below(4)
    calls = [
        ToolExecutionRequest(f"{number}-{choices.below(9) or at}-{at}", choices.one_of(names), "{}")
        for at in range(count)
    ]
    return ChatResponse(AiMessage(choices.one_of((None, "hm", "[1]", "nonsense")), calls))


@settings(deadline=None)
@given(made(lambda choices: choices, size=96))
def test_a_turn_that_ends_anywhere_can_be_sent(drawn: tuple[Choices]) -> None:
    [choices] = drawn
    mode = choices.one_of(("prompt", "tool"))
    structure = choices.one_of((None, PARSED)) if mode == "prompt" else PARSED
    rules = Rules(max_rounds=choices.below(4), structure=structure, max_output_retries=1, streams=choices.below(2) == 1)
    state, effect = begin(rules, None, (), UserMessage("go"), mode=mode)
    said, undone = "", dict[int, bool]()
    for number in range(choices.below(12)):
        if isinstance(effect, CallModel):
            reply = reply_of(choices, number, mode)
            if choices.below(3) == 0:  # it ends while the reply comes
                said = choices.one_of(("", "so far"))
                for each in reply.ai_message.tool_execution_requests[: choices.below(3)]:
                    if each.name != ANSWER_TOOL:
                        state, _ = with_early_call(rules, state, each)
                break
            state, effect = advance(rules, state, ModelReplied(reply))
        elif isinstance(effect, RunTools):
            index = choices.one_of(effect.indexes)
            request = effect.pending[index].request
            event = choices.one_of((ToolSuspended(index, {}), ToolFinished(index, outcome_of(request, True)), None))
            if event is None:
                break
            state, effect = advance(rules, state, event)
        else:
            break
    for position in range(len(state.all_executions)):
        if choices.below(3) == 0:
            undone[position] = choices.below(2) == 0

    messages = unfinished_messages(state, said, undone)

    check_pairs(messages)
    assert messages[0] == UserMessage("go")
    told = [each for each in messages if isinstance(each, ToolExecutionResultMessage)]
    assert ANSWER_TOOL not in [each.tool_name for each in told]
    assert len([each for each in told if each.text == "done"]) == len(state.all_executions) - len(undone)
    view = pieces_of([Turn(id="1", messages=messages, state="failed", number=1)])
    check_pairs(sent(view))
    check_alternation((*sent(view), UserMessage("and now?")))
