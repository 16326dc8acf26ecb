"""Mistakes a user makes, and what is said of them: the place, the fact, the fix; never a crash from inside."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import pytest

from toolbox import (
    AiServiceTool,
    ChatMemoryKey,
    ChatMemoryStore,
    Container,
    IllegalConfigurationError,
    MemoryId,
    Message,
    Problem,
    ToolSpecification,
    call_scoped,
    create_ai_service,
    register_ai_service,
    request_scoped,
    system_message,
    tool,
    toolbox,
    user_message,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Assistant(Protocol):
    async def chat(self, text: str) -> str: ...


def problem_of(cls: Any = Assistant, **options: Any) -> Problem:
    with pytest.raises(IllegalConfigurationError) as raised:
        create_ai_service(cls, chat_model=ScriptedChatModel([]), **options)
    [problem] = raised.value.problems
    return problem


@pytest.mark.parametrize(
    "options",
    [
        {"max_tool_rounds": "3"},
        {"max_tool_rounds": None},
        {"max_output_retries": 1.5},
        {"timeout": "5"},
        {"chat_memory": 20},
        {"chat_memory": "window"},
        {"model": ScriptedChatModel([])},
        {"output_mode": "yaml"},
        {"concurrent_tools": 4},
        {"parameters": [("seed", 1)]},
        {"on_unknown_tool": "ignore"},
        {"on_tool_execution_error": lambda error: "one parameter"},
        {"tool_choice": "no_such_tool"},
        {"tool_provider": 5},
        {"tool_provider": lambda: None},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_of_the_wrong_kind_is_a_problem_at_start(options: dict[str, Any]) -> None:
    problem = problem_of(**options)
    assert problem.where.startswith("Assistant")
    assert problem.fix
    [name] = options
    assert name in problem.what or "provider" in problem.what


def test_an_executor_of_the_wrong_shape_is_a_problem() -> None:
    problem = problem_of(tools={ToolSpecification("short"): lambda request: "x"})
    assert "short" in problem.where
    assert "memory" in problem.what
    problem = problem_of(tools=[AiServiceTool(ToolSpecification("long"), lambda a, b, c: "x")])
    assert "long" in problem.where


def test_a_decorator_without_its_parentheses_is_told() -> None:
    with pytest.raises(TypeError, match="parentheses"):

        class One(Protocol):
            @user_message  # type: ignore[arg-type]
            async def chat(self, text: str) -> str: ...

    class Two(Protocol):
        @system_message
        async def chat(self, text: str) -> str: ...

    class Three(Protocol):
        @toolbox
        async def chat(self, text: str) -> str: ...

    assert "@system_message" in problem_of(Two).what
    assert problem_of(Two).where == "Two.chat"
    assert "@toolbox" in problem_of(Three).what


def test_a_method_taken_from_its_class_is_told() -> None:
    class Calculator:
        @tool
        def double(self, x: int) -> int:
            return 2 * x

    assert "instance" in problem_of(tools=[Calculator.double]).fix


async def test_what_a_provider_may_not_give_is_told() -> None:
    service = create_ai_service(Assistant, chat_model=ScriptedChatModel([]), tool_provider=lambda request: 5)
    with pytest.raises(IllegalConfigurationError, match="gave 5"):
        await service.chat("x")


def test_a_service_without_abstract_methods_is_told() -> None:
    class Forgotten(ABC):  # noqa: B024 - the mistake
        async def chat(self, text: str) -> str: ...  # noqa: B027 - likewise

    assert "@abstractmethod" in problem_of(Forgotten).fix

    class Written(Protocol):
        async def chat(self, text: str) -> AsyncIterator[str]:
            yield text

    assert "body" in problem_of(Written).what


def test_an_abstract_property_is_a_problem() -> None:
    class Named(ABC):
        @property
        @abstractmethod
        def name(self) -> str: ...

        @abstractmethod
        async def chat(self, text: str) -> str: ...

    assert problem_of(Named).where == "Named.name"


def test_a_stream_of_nothing_said_is_a_problem() -> None:
    class Bare(Protocol):
        def chat(self, text: str) -> AsyncIterator: ...  # type: ignore[type-arg]

    assert "AsyncIterator[str]" in problem_of(Bare).what


def test_a_tool_mark_on_a_class_is_told() -> None:
    with pytest.raises(TypeError, match="function or method"):

        @tool
        class Tools:
            pass


def test_a_store_that_dies_with_its_request_is_a_problem() -> None:
    @register_ai_service
    class Remembering(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> str: ...

    @register_ai_service
    class Another(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> str: ...

    class Store(ChatMemoryStore):
        async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
            return ()

        async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None: ...

        async def delete_messages(self, key: ChatMemoryKey) -> None: ...

    model = ScriptedChatModel([])
    for scoped in (request_scoped, call_scoped):
        store = scoped(type("ScopedStore", (Store,), {}))
        [problem] = Container(models={"default": model}).register(Remembering, Another, store).check()
        assert "ScopedStore" in problem.what
        assert "application" in problem.fix


async def test_an_unmarked_store_lives_as_long_as_the_container() -> None:
    stopped: list[bool] = []

    class Store(ChatMemoryStore):
        def __init__(self) -> None:
            self.kept: dict[ChatMemoryKey, Sequence[Message]] = {}

        async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
            assert not stopped
            return self.kept.get(key, ())

        async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
            self.kept[key] = messages

        async def delete_messages(self, key: ChatMemoryKey) -> None: ...

        def stop(self) -> None:
            stopped.append(True)

    @register_ai_service
    class Remembering(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> str: ...

    model = ScriptedChatModel(["a", "b"])
    async with Container(models={"default": model}).register(Remembering, Store) as container:
        for text in ("x", "y"):
            async with container.request_scope():
                await container.get(Remembering).chat("s", text)
        assert stopped == []
    assert stopped == [True]
    assert len(model.requests[1].messages) == 3


async def test_a_task_that_outlives_its_call_may_use_its_conversation() -> None:
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
        assert await asyncio.wait_for(tasks[0], 5) == "followed up"


async def test_two_containers_with_one_store_take_turns() -> None:
    class Store:
        def __init__(self) -> None:
            self.kept: dict[ChatMemoryKey, Sequence[Message]] = {}

        async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
            return self.kept.get(key, ())

        async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
            await asyncio.sleep(0)
            self.kept[key] = messages

        async def delete_messages(self, key: ChatMemoryKey) -> None: ...

    @register_ai_service
    class Remembering(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> str: ...

    async def slowly(request: Any) -> str:
        await asyncio.sleep(0.001)
        return "answer"

    store = Store()

    def container() -> Container:
        made = Container(models={"default": ScriptedChatModel([slowly] * 5)}).register(Remembering)
        return made.register_instance(store, ChatMemoryStore)

    async with container() as one, container() as two:
        calls = [each.get(Remembering).chat("s", "x") for each in (one, two) for _ in range(5)]
        await asyncio.gather(*calls)
    [kept] = store.kept.values()
    assert len(kept) == 20


async def test_problems_of_beans_of_tools_of_one_name_in_two_methods_are_both_told() -> None:
    class Missing: ...

    class One:
        @tool
        def find(self) -> str:
            return "one"

    class Two:
        def __init__(self, missing: Missing) -> None: ...

        @tool
        def find(self) -> str:
            return "two"

    @register_ai_service
    class Both(Protocol):
        @toolbox(One)
        async def one(self, text: str) -> str: ...

        @toolbox(Two)
        async def two(self, text: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Both).check()
    assert problem.where == "Two.missing"
