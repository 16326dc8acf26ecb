"""Tools and services in a module with `from __future__ import annotations`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import pytest
from pydantic import BaseModel

from toolbox import (
    AiMessage,
    Container,
    IllegalConfigurationError,
    Inject,
    InvocationContext,
    MemoryId,
    Message,
    Result,
    TokenStream,
    ToolExecutionRequest,
    UserMessage,
    create_ai_service,
    register_ai_service,
    system_message,
    tool,
    tool_executor_from,
    tool_specification_from,
    tool_specifications_from,
    user_message,
)
from toolbox.testing import ScriptedChatModel, tool_call

if TYPE_CHECKING:
    from fractions import Fraction

pytestmark = pytest.mark.anyio


class City(BaseModel):
    name: str


class Clock: ...


class Tools:
    @tool
    def find(
        self,
        city: City,
        memory: MemoryId[str | None],
        context: InvocationContext,
        clock: Inject[Clock],
        limit: Annotated[int, "how many"] = 3,
    ) -> list[City]:
        return [city] * limit

    @tool
    async def nothing(self) -> None: ...


@register_ai_service(tools=(Tools,))
class Assistant(Protocol):
    @system_message("Be {tone}.")
    async def chat(self, session: MemoryId[str], text: str, tone: str = "kind") -> Result[City]: ...

    def stream(self, text: str) -> AsyncIterator[str]: ...

    def events(self, text: str) -> TokenStream: ...

    def wait(self, text: str) -> Iterator[str]: ...


async def test_modules_with_future_annotations_work() -> None:
    model = ScriptedChatModel(
        [tool_call("find", {"city": {"name": "Bern"}}), '{"name": "Basel"}', "a b", tool_call("nothing"), "c"]
    )
    container = Container(models={"default": model}).register(Assistant, Clock)
    async with container:
        assistant = container.get(Assistant)
        result = await assistant.chat("room", "x")
        assert result.content == City(name="Basel")
        assert result.tool_executions[0].result_object == [City(name="Bern")] * 3
        assert [each async for each in assistant.stream("x")] == ["a ", "b"]
        events = [type(each).__name__ async for each in assistant.events("x")]
        assert events[-1] == "CompleteResponse"


def test_schemas_are_built_from_the_resolved_types() -> None:
    find, nothing = tool_specifications_from(Tools)

    assert list(find.parameters["properties"]) == ["city", "limit"]
    assert find.parameters["properties"]["limit"] == {"type": "integer", "description": "how many"}
    assert nothing.parameters == {"type": "object", "properties": {}}


def test_tools_in_a_function_can_use_its_local_classes() -> None:
    class Local(BaseModel):
        x: int

    class Kind(Enum):
        A = "a"

    class LocalTools:
        @tool
        def take(self, value: Local, kind: Kind = Kind.A, more: list[Local] | None = None) -> Local:
            return value

    [take] = tool_specifications_from(LocalTools())
    assert take.parameters["properties"]["value"]["properties"] == {"x": {"type": "integer"}}


def test_unmarked_functions_can_use_the_local_classes_of_their_closure() -> None:
    class Local(BaseModel):
        x: int

    def take(value: Local) -> int:
        return Local.model_validate(value).x

    result: Any = tool_executor_from(take)(ToolExecutionRequest("1", "take", '{"value": {"x": 3}}'), None)
    assert result.text == "3"


async def test_services_in_a_function_can_use_its_local_classes() -> None:
    class Answer(BaseModel):
        text: str

    class Tone(Enum):
        KIND = "kind"

    @dataclass
    class Person:
        name: str

    class LocalTools:
        @tool
        def who(self) -> Person:
            return Person("Ada")

    @register_ai_service
    class Local(Protocol):
        @user_message("{person}: {text}")
        async def one(self, person: Person, text: str) -> Answer: ...

        @system_message("Be {tone}.")
        async def result(self, text: str, tone: Tone = Tone.KIND) -> Result[Answer]: ...

        async def many(self, text: str) -> list[Answer]: ...

        async def either(self, text: str) -> Answer | None: ...

        async def tone(self, text: str) -> Tone: ...

        def items(self, text: str) -> AsyncIterator[Answer]: ...

    model = ScriptedChatModel(
        ['{"text": "a"}', '{"text": "b"}', '[{"text": "c"}]', "null", "kind", '[{"text": "d"}, {"text": "e"}]']
    )
    async with Container(models={"default": model}).register(Local) as container:
        local = container.get(Local)
        assert await local.one(Person("Ada"), "x") == Answer(text="a")
        assert (await local.result("x")).content == Answer(text="b")
        assert await local.many("x") == [Answer(text="c")]
        assert await local.either("x") is None
        assert await local.tone("x") is Tone.KIND
        assert [each async for each in local.items("x")] == [Answer(text="d"), Answer(text="e")]
    assert model.requests[0].messages[0].text.startswith('{"name":"Ada"}: x')  # type: ignore[union-attr]


async def test_unmarked_services_in_a_function_can_use_its_local_classes() -> None:
    class Answer(BaseModel):
        text: str

    class Local(Protocol):
        async def chat(self, text: str) -> Answer: ...

    service = create_ai_service(Local, chat_model=ScriptedChatModel(['{"text": "a"}']))

    assert await service.chat("x") == Answer(text="a")


async def test_abcs_in_a_function_can_use_its_local_classes() -> None:
    class Answer(BaseModel):
        text: str

    @register_ai_service
    class Local(ABC):
        @abstractmethod
        async def chat(self, text: str) -> Answer: ...

        async def shout(self, text: str) -> str:
            return (await self.chat(text)).text.upper()

    async with Container(models={"default": ScriptedChatModel(['{"text": "a"}'])}).register(Local) as container:
        assert await container.get(Local).shout("x") == "A"


async def test_services_as_tools_in_a_function_can_use_its_local_classes() -> None:
    class Question(BaseModel):
        text: str

    class Answer(BaseModel):
        text: str

    @register_ai_service
    class Inner(Protocol):
        @tool("Answers")
        @user_message("{question}")
        async def ask(self, question: Question) -> Answer: ...

    @register_ai_service(tools=(Inner,))
    class Outer(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("ask", {"question": {"text": "q"}}), '{"text": "a"}', "done"])
    async with Container(models={"default": model}).register(Outer) as container:
        assert await container.get(Outer).chat("x") == "done"
    assert model.requests[1].messages[0].text.startswith('{"text":"q"}')  # type: ignore[union-attr]


async def test_local_classes_can_be_defined_after_the_service() -> None:
    class Local(Protocol):
        async def chat(self, text: str) -> Later: ...

    class Later(BaseModel):
        text: str

    service = create_ai_service(Local, chat_model=ScriptedChatModel(['{"text": "a"}']))

    assert await service.chat("x") == Later(text="a")


def test_names_imported_under_type_checking_are_a_problem() -> None:
    class Hidden(Protocol):
        async def chat(self, text: Fraction) -> str: ...

        async def give(self, text: str) -> Fraction: ...

    with pytest.raises(IllegalConfigurationError) as raised:
        create_ai_service(Hidden, chat_model=ScriptedChatModel([]))

    assert {each.where for each in raised.value.problems} == {"Hidden.chat", "Hidden.give"}
    assert len(raised.value.problems) == 2
    assert all("Fraction" in each.what for each in raised.value.problems)

    def take(value: Fraction) -> int:
        return 1

    with pytest.raises(IllegalConfigurationError, match="Fraction"):
        tool_specification_from(take)


async def test_history_and_literals_work_with_future_annotations() -> None:
    class Local(Protocol):
        async def chat(self, history: list[Message], text: str) -> Literal["yes", "no"]: ...

        async def message(self, text: UserMessage | str) -> AiMessage: ...

    model = ScriptedChatModel(["yes", "raw"])
    service = create_ai_service(Local, chat_model=model)

    assert await service.chat([UserMessage("before")], "x") == "yes"
    assert model.requests[0].messages[0] == UserMessage("before")
    assert await service.message(UserMessage("y")) == AiMessage("raw")
