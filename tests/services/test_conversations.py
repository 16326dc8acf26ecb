"""Conversations: stored messages, keys, turns, windows and `ChatMemory`."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol
from uuid import UUID

import pytest

from toolbox import (
    DEFAULT,
    AiMessage,
    ChatRequest,
    Container,
    IllegalConfigurationError,
    InvocationContext,
    MemoryId,
    MemoryInUseError,
    Message,
    MessageWindow,
    Result,
    TokenStream,
    TokenWindow,
    ToolAbort,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolProviderRequest,
    UserMessage,
    create_ai_service,
    register_ai_service,
    return_to_model,
    system_message,
    tool,
    user_message,
)
from toolbox.testing import ScriptedChatModel, tool_call

from .conversing import Other, said

pytestmark = pytest.mark.anyio


@register_ai_service
class Assistant(Protocol):
    @system_message("Be kind.")
    async def chat(self, session: MemoryId[str], text: str) -> str: ...


# --- what is kept


async def test_conversations_are_kept_per_service_and_memory_id() -> None:
    model = ScriptedChatModel([f"answer {n}" for n in range(4)])
    async with Container(models={"default": model}).register(Assistant, Other) as container:
        assistant, other = container.get(Assistant), container.get(Other)
        await assistant.chat("a", "one")
        await assistant.chat("b", "two")
        await other.chat("a", "three")
        await assistant.chat("a", "four")
    assert [said(request) for request in model.requests] == [
        ["Be kind.", "one"],
        ["Be kind.", "two"],
        ["three"],
        ["Be kind.", "one", "answer 0", "four"],
    ]


async def test_methods_of_a_service_share_its_conversations() -> None:
    class Two(Protocol):
        async def one(self, session: MemoryId[str], text: str) -> str: ...

        @user_message("Q: {text}")
        async def two(self, text: str, session: MemoryId[str]) -> Result[str]: ...

        async def without(self, text: str) -> str: ...

    model = ScriptedChatModel(["a", "b", "c"])
    service = create_ai_service(Two, chat_model=model)
    await service.one("s", "x")
    await service.two("y", "s")
    await service.without("z")
    assert said(model.requests[1]) == ["x", "a", "Q: y"]
    assert said(model.requests[2]) == ["z"]


@pytest.mark.parametrize("memory_id", ["s", 7, UUID(int=1), ("a", 1)])
async def test_memory_ids_of_any_type_are_keyed_by_their_text(memory_id: Any) -> None:
    class Typed(Protocol):
        async def chat(self, session: MemoryId[Any], text: str) -> str: ...

    model = ScriptedChatModel(["a", "b"])
    async with Container(models={"default": model}).register(register_ai_service(Typed)) as container:
        service = container.get(Typed)
        await service.chat(memory_id, "x")
        await service.chat(text="y", session=str(memory_id))
        assert said(model.requests[1]) == ["x", "a", "y"]
        assert len(await container.chat_memory(Typed, memory_id).messages()) == 4


async def test_tools_receive_the_memory_id_with_its_original_type() -> None:
    seen = []

    class Tools:
        @tool
        def note(self, session: MemoryId[int]) -> None:
            seen.append(session)

    class Numbered(Protocol):
        async def chat(self, session: MemoryId[int], text: str) -> str: ...

    service = create_ai_service(Numbered, chat_model=ScriptedChatModel([tool_call("note"), "done"]), tools=(Tools(),))
    await service.chat(session=7, text="x")
    assert seen == [7]


async def test_calls_without_a_memory_id_share_no_messages() -> None:
    class Alone(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel(["a", "b"])
    service = create_ai_service(Alone, chat_model=model)
    await service.chat("x")
    await service.chat("y")
    assert said(model.requests[1]) == ["y"]


async def test_a_memory_id_of_none_keeps_no_messages() -> None:
    seen = []

    @tool
    def note(session: MemoryId[str | None]) -> None:
        seen.append(session)

    class Maybe(Protocol):
        async def chat(self, text: str, session: MemoryId[str | None] = None) -> str: ...

    model = ScriptedChatModel(["a", tool_call("note"), "b", "c"])
    service = create_ai_service(Maybe, chat_model=model, tools=(note,))
    await service.chat("x")
    await service.chat("y", None)
    await service.chat("z", "s")
    assert said(model.requests[-1]) == ["z"]
    assert seen == [None]


async def test_complete_tool_rounds_are_kept() -> None:
    @tool
    def add(a: int, b: int) -> int:
        return a + b

    request = tool_call("add", {"a": 1, "b": 2})
    model = ScriptedChatModel([AiMessage(None, [request]), "3", "again"])
    service = create_ai_service(Other, chat_model=model, tools=(add,))
    await service.chat("s", "x")
    await service.chat("s", "y")
    assert model.requests[2].messages == (
        UserMessage("x"),
        AiMessage(None, [request]),
        ToolExecutionResultMessage(request.id, "add", "3"),
        AiMessage("3"),
        UserMessage("y"),
    )


async def test_system_messages_are_rendered_per_call_and_never_stored() -> None:
    @register_ai_service
    class Toned(Protocol):
        @system_message("Be {tone}.")
        async def chat(self, session: MemoryId[str], text: str, tone: str) -> str: ...

    model = ScriptedChatModel(["a", "b"])
    async with Container(models={"default": model}).register(Toned) as container:
        await container.get(Toned).chat("s", "x", "kind")
        await container.get(Toned).chat("s", "y", "curt")
        kept = await container.chat_memory(Toned, "s").messages()
    assert said(model.requests[1]) == ["Be curt.", "x", "a", "y"]
    assert list(kept) == [UserMessage("x"), AiMessage("a"), UserMessage("y"), AiMessage("b")]


# --- complete or not at all


async def kept_after(*replies: Any, tools: Sequence[Any] = (), error: type[BaseException], **options: Any) -> list[Any]:
    @register_ai_service(tools=tools, **options)
    class Failing(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> str: ...

    model = ScriptedChatModel(["first", *replies, "last"])
    async with Container(models={"default": model}).register(Failing) as container:
        service = container.get(Failing)
        await service.chat("s", "one")
        with pytest.raises(error):
            await service.chat("s", "two")
        kept = list(await container.chat_memory(Failing, "s").messages())
        assert await service.chat("s", "three") == "last"
        return kept


async def test_calls_that_fail_before_a_tool_has_begun_are_not_stored() -> None:
    @tool
    def stop() -> str:
        raise ToolAbort("stop")

    @tool
    def fine() -> str:
        return "fine"

    before = [UserMessage("one"), AiMessage("first")]
    assert await kept_after(ConnectionError(), error=ConnectionError) == before
    discarding = {"tools": (stop, fine), "unfinished_turns": "discard"}
    assert await kept_after(tool_call("stop"), error=ToolAbort, **discarding) == before
    assert await kept_after(tool_call("fine"), ConnectionError(), error=ConnectionError, **discarding) == before
    assert await kept_after(tool_call("unknown"), error=Exception) == before
    assert await kept_after(tool_call("fine"), tools=(fine,), max_tool_rounds=0, error=Exception) == before


async def test_calls_that_are_cancelled_before_a_tool_has_begun_are_not_stored() -> None:
    entered = asyncio.Event()

    async def wait(_: ChatRequest) -> str:
        entered.set()
        await asyncio.Event().wait()
        return "never"

    model = ScriptedChatModel(["first", wait, "last"])
    service: Any = create_ai_service(Other, chat_model=model)
    await service.chat("s", "one")
    task = asyncio.create_task(service.chat("s", "two"))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(service.chat("s", "three"), 60) == "last"
    assert said(model.requests[-1]) == ["one", "first", "three"]


async def test_streams_are_stored_when_they_end_and_not_when_they_are_closed_early() -> None:
    @register_ai_service
    class Streaming(Protocol):
        def text(self, session: MemoryId[str], text: str) -> AsyncIterator[str]: ...

        def events(self, session: MemoryId[str], text: str) -> TokenStream: ...

    model = ScriptedChatModel(["a b c", "d e f", "g h i"])
    async with Container(models={"default": model}).register(Streaming) as container:
        service = container.get(Streaming)
        memory = container.chat_memory(Streaming, "s")
        assert [each async for each in service.text("s", "one")] == ["a ", "b ", "c"]
        assert len(await memory.messages()) == 2

        stream: Any = service.text("s", "two")
        assert await anext(stream) == "d "
        await stream.aclose()
        assert len(await memory.messages()) == 2

        async for _ in service.events("s", "three"):
            pass
        assert [each.text for each in await memory.messages()] == ["one", "a b c", "three", "g h i"]  # type: ignore[union-attr]


# --- turns


async def test_calls_with_the_same_memory_id_run_one_after_another() -> None:
    order: list[str] = []
    gates = {"one": asyncio.Event(), "two": asyncio.Event(), "other": asyncio.Event()}
    asked = {"one": asyncio.Event(), "two": asyncio.Event(), "other": asyncio.Event()}

    async def reply(request: Any) -> str:
        text = request.messages[-1].text
        order.append(f"asked {text}")
        asked[text].set()
        await gates[text].wait()
        order.append(f"answered {text}")
        return f"re {text}"

    model = ScriptedChatModel([reply] * 3)
    service: Any = create_ai_service(Other, chat_model=model)
    one = asyncio.create_task(service.chat("s", "one"))
    await asked["one"].wait()
    two = asyncio.create_task(service.chat("s", "two"))
    other = asyncio.create_task(service.chat("t", "other"))
    await asked["other"].wait()
    await asyncio.sleep(0.01)
    assert order == ["asked one", "asked other"]
    gates["other"].set()
    await other
    gates["one"].set()
    gates["two"].set()
    await asyncio.gather(one, two)
    assert order[-3:] == ["answered one", "asked two", "answered two"]
    assert said(model.requests[-1]) == ["one", "re one", "two"]


@pytest.mark.parametrize("handler", [None, return_to_model])
async def test_tools_that_reenter_their_conversation_raise_memory_in_use_error(handler: Any) -> None:
    class Tools:
        def __init__(self, container: Container) -> None:
            self.container = container

        @tool
        async def again(self, context: InvocationContext) -> str:
            return await self.container.get(Calling).chat(context.memory_id, "inner")

        @tool
        async def elsewhere(self) -> str:
            return await self.container.get(Calling).chat("another", "inner")

        @tool
        def blocking(self) -> str:
            return self.container.get(Calling).wait("s", "inner")

    @register_ai_service(on_tool_execution_error=handler, tools=(Tools,))
    class Calling(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> str: ...

        def wait(self, session: MemoryId[str], text: str) -> str: ...

    model = ScriptedChatModel(
        [tool_call("again"), tool_call("blocking"), tool_call("elsewhere"), "inner answer", "outer answer"]
    )
    async with Container(models={"default": model}).register(Calling) as container:
        service = container.get(Calling)
        for _ in range(2):
            with pytest.raises(MemoryInUseError, match="'s'"):
                await asyncio.wait_for(service.chat("s", "outer"), 60)
        assert await asyncio.wait_for(service.chat("s", "outer"), 60) == "outer answer"


# --- windows


async def count_later(message: Message) -> int:
    return 1


class Forgets:
    def newest(self) -> list[Message]:
        return []


NOT_NUMBERS: list[Any] = [0, -1, True, 2.5, "3", None, len]
NOT_COUNTING: list[Any] = [5, None, "text", count_later, lambda: 1, lambda one, other: 1]


@pytest.mark.parametrize(
    "window",
    [
        *map(MessageWindow, NOT_NUMBERS),
        *map(TokenWindow, NOT_NUMBERS),
        *(TokenWindow(800, count=each) for each in NOT_COUNTING),
        MessageWindow,
        Forgets(),
        3,
    ],
)
def test_invalid_windows_are_configuration_problems(window: Any) -> None:
    @register_ai_service(chat_memory=window)
    class Service(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Service).check()
    assert problem.where == "Service"
    assert "chat_memory" in problem.what
    if isinstance(window, MessageWindow | TokenWindow):
        assert type(window).__name__ in problem.what
        shown = window.limit if isinstance(window, MessageWindow) or window.limit != 800 else window.count
        assert repr(shown) in problem.what


async def conversation(window: Any, turns: int, *, rounds: bool = False) -> list[list[str]]:
    @tool
    def fine() -> str:
        return "fine"

    replies: list[Any] = []
    for number in range(turns):
        replies += [tool_call("fine"), f"a{number}"] if rounds else [f"a{number}"]
    model = ScriptedChatModel(replies)
    options = {} if window is ... else {"chat_memory": window}
    service = create_ai_service(Other, chat_model=model, tools=(fine,), **options)
    for number in range(turns):
        await service.chat("s", f"q{number}")
    firsts = [request for request in model.requests if isinstance(request.messages[-1], UserMessage)]
    return [[each.text or "call" for each in request.messages] for request in firsts]


async def test_message_window_keeps_the_last_messages() -> None:
    requests = await conversation(MessageWindow(max_messages=2), 3)
    assert requests == [["q0"], ["q0", "a0", "q1"], ["q1", "a1", "q2"]]


async def test_default_window_keeps_twenty_messages_and_then_moves_in_steps() -> None:
    for window in (..., DEFAULT, MessageWindow()):
        requests = await conversation(window, 16)
        assert len(requests[10]) == 21
        assert [each[0] for each in requests[11:]] == ["q5"] * 4 + ["q5"]
        assert [len(each) for each in requests[11:]] == [13, 15, 17, 19, 21]


async def test_chat_memory_none_keeps_no_messages() -> None:
    assert await conversation(None, 2) == [["q0"], ["q1"]]


async def test_tools_receive_the_memory_id_when_memory_is_off() -> None:
    seen = []

    @tool
    def note(session: MemoryId[str]) -> None:
        seen.append(session)

    service = create_ai_service(
        Other, chat_model=ScriptedChatModel([tool_call("note"), "done"]), tools=(note,), chat_memory=None
    )
    await service.chat("s", "x")
    assert seen == ["s"]


async def test_windows_begin_with_a_user_message_and_keep_the_newest_turn() -> None:
    for size in (1, 2, 3):
        requests = await conversation(MessageWindow(size), 3, rounds=True)
        assert requests[1:] == [["q0", "call", "fine", "a0", "q1"], ["q1", "call", "fine", "a1", "q2"]]


async def test_windows_are_applied_between_calls_and_not_within_one() -> None:
    @tool
    def fine() -> str:
        return "fine"

    model = ScriptedChatModel([tool_call("fine"), tool_call("fine"), "done"])
    service = create_ai_service(Other, chat_model=model, tools=(fine,), chat_memory=MessageWindow(1))
    await service.chat("s", "x")
    assert [len(request.messages) for request in model.requests] == [1, 3, 5]


async def test_token_window_uses_the_given_counter() -> None:
    counted: list[Message] = []

    def count(message: Message) -> int:
        counted.append(message)
        return 10

    requests = await conversation(TokenWindow(20, count=count), 3)
    assert requests[2] == ["q1", "a1", "q2"]
    assert counted
    assert await conversation(TokenWindow(10_000), 2) == [["q0"], ["q0", "a0", "q1"]]
    assert await conversation(TokenWindow(1), 3) == [["q0"], ["q0", "a0", "q1"], ["q1", "a1", "q2"]]


# --- reading and changing a conversation


async def test_conversations_can_be_seeded_read_and_cleared() -> None:
    model = ScriptedChatModel(["a", "b"])
    async with Container(models={"default": model}).register(Assistant) as container:
        memory = container.chat_memory(Assistant, "s")
        assert list(await memory.messages()) == []
        await memory.add(UserMessage("my name is Ada"), AiMessage("Hello Ada"))
        await memory.add(UserMessage("one more"))
        await container.get(Assistant).chat("s", "who am I?")
        assert said(model.requests[0]) == ["Be kind.", "my name is Ada", "Hello Ada", "one more\nwho am I?"]
        assert len(await memory.messages()) == 5
        await memory.clear()
        assert list(await memory.messages()) == []
        await container.get(Assistant).chat("s", "and now?")
    assert said(model.requests[1]) == ["Be kind.", "and now?"]


async def test_added_messages_wait_for_the_running_call() -> None:
    gate, asked = asyncio.Event(), asyncio.Event()

    async def reply(request: Any) -> str:
        asked.set()
        await gate.wait()
        return "answer"

    async with Container(models={"default": ScriptedChatModel([reply])}).register(Other) as container:
        memory = container.chat_memory(Other, "s")
        call = asyncio.create_task(container.get(Other).chat("s", "x"))
        await asked.wait()
        adding = asyncio.create_task(memory.add(UserMessage("later")))
        await asyncio.sleep(0.01)
        assert not adding.done()
        gate.set()
        await asyncio.gather(call, adding)
        assert [each.text for each in await memory.messages()] == ["x", "answer", "later"]  # type: ignore[union-attr]


async def test_incomplete_stored_conversations_are_repaired_before_they_are_sent() -> None:
    model = ScriptedChatModel(["a"])
    async with Container(models={"default": model}).register(Other) as container:
        request = ToolExecutionRequest("1", "gone", "{}")
        await container.chat_memory(Other, "s").add(
            ToolExecutionResultMessage("0", "orphan", "x"), UserMessage("q"), AiMessage(None, [request])
        )
        await container.get(Other).chat("s", "again")
    sent = model.requests[0].messages
    assert [type(each).__name__ for each in sent] == [
        "UserMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
        "UserMessage",
    ]
    assert sent[2].id == "1"  # type: ignore[union-attr]


async def test_containers_do_not_share_conversations_in_memory() -> None:
    for _ in range(2):
        model = ScriptedChatModel(["a"])
        async with Container(models={"default": model}).register(Other) as container:
            await container.get(Other).chat("s", "x")
        assert said(model.requests[0]) == ["x"]


def test_synchronous_methods_keep_the_conversation() -> None:
    @register_ai_service
    class Sync(Protocol):
        def chat(self, session: MemoryId[str], text: str) -> str: ...

    model = ScriptedChatModel(["a", "b"])
    with Container(models={"default": model}).register(Sync) as container:
        container.get(Sync).chat("s", "x")
        container.get(Sync).chat("s", "y")
    assert said(model.requests[1]) == ["x", "a", "y"]


def test_calls_from_several_threads_run_one_after_another() -> None:
    @register_ai_service
    class Sync(Protocol):
        def chat(self, session: MemoryId[str], text: str) -> str: ...

    model = ScriptedChatModel([f"a{n}" for n in range(8)])
    with Container(models={"default": model}).register(Sync) as container:
        service = container.get(Sync)
        threads = [threading.Thread(target=service.chat, args=("s", f"q{n}")) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(len(request.messages) for request in model.requests) == [1, 3, 5, 7, 9, 11, 13, 15]


# --- tools that need a memory id


class NeedsId:
    @tool
    def note(self, session: MemoryId[str]) -> str:
        return session


class TakesNone:
    @tool
    def note(self, session: MemoryId[str | None]) -> str:
        return repr(session)


class Alone(Protocol):
    async def chat(self, text: str) -> str: ...


def test_tools_that_require_a_memory_id_are_a_problem_in_methods_without_one() -> None:
    with pytest.raises(IllegalConfigurationError) as raised:
        create_ai_service(Alone, chat_model=ScriptedChatModel([]), tools=(NeedsId(),))
    [problem] = raised.value.problems
    assert problem.where == "Alone.chat"
    assert "note" in problem.what
    assert "None" in problem.fix


async def test_tools_with_an_optional_memory_id_receive_none() -> None:
    model = ScriptedChatModel([tool_call("note"), "done"])
    await create_ai_service(Alone, chat_model=model, tools=(TakesNone(),)).chat("x")
    assert model.requests[1].messages[-1].text == "None"  # type: ignore[union-attr]


async def test_provided_tools_that_require_a_memory_id_fail_calls_without_one() -> None:
    def provide(request: ToolProviderRequest) -> Any:
        from toolbox import ToolProviderResult

        return ToolProviderResult([NeedsId()])

    model = ScriptedChatModel([])
    service = create_ai_service(Alone, chat_model=model, tool_provider=provide)
    with pytest.raises(IllegalConfigurationError, match="note"):
        await service.chat("x")
    assert model.requests == []


async def test_services_called_as_tools_have_no_memory() -> None:
    seen: list[Any] = []

    @tool
    def note(session: MemoryId[str | None]) -> str:
        seen.append(session)
        return "noted"

    @register_ai_service(tools=(note,))
    class Inner(Protocol):
        @tool
        async def ask(self, session: MemoryId[str], question: str) -> str: ...

    @register_ai_service(tools=(Inner,))
    class Outer(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> str: ...

    ask = tool_call("ask", {"question": "q"})
    model = ScriptedChatModel([ask, tool_call("note"), "i1", ask, "i2", "done"])
    async with Container(models={"default": model}).register(Outer) as container:
        await container.get(Outer).chat("s", "x")
        assert list(await container.chat_memory(Inner, "s").messages()) == []
        assert list(await container.chat_memory(Inner, "None").messages()) == []
        direct = container.get(Inner)
        assert hasattr(direct, "ask")
    assert model.requests[0].tool_specifications[0].parameters["properties"].keys() == {"question"}
    assert seen == [None]
    assert said(model.requests[4]) == ["q"]


async def test_tasks_that_outlive_their_call_can_use_its_conversation() -> None:
    tasks: list[asyncio.Task[str]] = []

    class Tools:
        def __init__(self, container: Container) -> None:
            self.container = container

        @tool
        async def later(self) -> str:
            async def follow_up() -> str:
                await ended.wait()
                return await self.container.get(Remembering).chat("s", "follow up")

            tasks.append(asyncio.create_task(follow_up()))
            return "planned"

    @register_ai_service(tools=(Tools,))
    class Remembering(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> str: ...

    ended = asyncio.Event()
    model = ScriptedChatModel([tool_call("later"), "planned", "followed up"])
    async with Container(models={"default": model}).register(Remembering) as container:
        await container.get(Remembering).chat("s", "x")
        ended.set()
        assert await asyncio.wait_for(tasks[0], 60) == "followed up"


@pytest.mark.parametrize("given", ["hello", {"role": "user", "content": "hello"}, [UserMessage("hello")], None])
async def test_what_is_not_a_message_is_neither_sent_nor_stored(given: Any) -> None:
    @register_ai_service(name="desk")
    class Desk(Protocol):
        async def chat(self, room: MemoryId[str], history: list[Message], text: str) -> str: ...

    model = ScriptedChatModel(["answer"])
    async with Container(models={"default": model}).register(Desk) as container:
        with pytest.raises(TypeError, match=r"Desk.chat\(\), parameter history: expected messages such as UserMessage"):
            await container.get(Desk).chat("1", [given], "Hi")
        with pytest.raises(TypeError, match=r"ChatMemory\.add: expected messages such as UserMessage"):
            await container.chat_memory(Desk, "1").add(given)

        assert model.requests == []
        assert await container.chat_memory("desk", "1").messages() == []


async def test_a_conversation_is_found_by_the_class_or_the_stored_name_of_its_service() -> None:
    @register_ai_service(name="desk", former_names=("old",))
    class Desk(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    async with Container(models={"default": ScriptedChatModel(["answer"])}).register(Desk) as container:
        await container.get(Desk).chat("1", "Hi")

        for service in (Desk, "desk", "old"):
            assert len(await container.chat_memory(service, "1").messages()) == 2
        for wrong in (container.get(Desk), None):
            with pytest.raises(TypeError, match="use the class of a service, or its stored name"):
                container.chat_memory(wrong, "1")  # type: ignore[arg-type]  # neither
