"""Tools are described once per process, and again after a change."""

import gc
import weakref
from typing import Any, Protocol

from toolbox import (
    Container,
    DemoChatModel,
    ToolExecutionRequest,
    register_ai_service,
    tool,
    tool_executor_from,
    tool_specification_from,
    tool_specifications_from,
)


class Counted:
    """A parameter type that counts how often its schema is built."""

    schemas = 0

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import no_info_plain_validator_function, to_string_ser_schema

        cls.schemas += 1
        return no_info_plain_validator_function(lambda value: cls(), serialization=to_string_ser_schema())

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
        return {"type": "string"}


class Listed:
    @tool
    def look_up(self, place: Counted) -> str:
        """Looks a place up."""
        return str(place)


@tool
def look_around(place: Counted) -> str:
    """Looks around a place."""
    return str(place)


@register_ai_service(tools=[Listed, look_around])
class First(Protocol):
    async def chat(self, question: str) -> str: ...


@register_ai_service(tools=[Listed, look_around])
class Second(Protocol):
    async def chat(self, question: str) -> str: ...


def test_tools_are_described_once_for_all_services_and_containers() -> None:
    names = [each.name for each in (*tool_specifications_from(Listed), tool_specification_from(look_around))]
    assert names == ["look_up", "look_around"]
    before = Counted.schemas

    for _ in range(2):
        container = Container(models={"default": DemoChatModel()}).register(First, Second)
        assert container.check() == []
        with container:
            container.get(First)
        tool_specifications_from(Listed())

    assert Counted.schemas == before


def test_replaced_tools_are_described_again() -> None:
    class Changing:
        @tool
        def answer(self, text: str) -> str:
            """Answers."""
            return text

    assert tool_specifications_from(Changing)[0].description == "Answers."

    @tool("Answers well.")
    def answer(self: Any, number: int) -> int:
        return number

    Changing.answer = answer  # type: ignore[assignment,method-assign]
    [specification] = tool_specifications_from(Changing)

    assert specification.description == "Answers well."
    assert list(specification.parameters["properties"]) == ["number"]


def test_functions_marked_again_are_described_again() -> None:
    def answer(text: str) -> str:
        """Answers."""
        return text

    assert tool_specification_from(answer).name == "answer"

    assert tool_specification_from(tool(name="reply")(answer)).name == "reply"


def test_tools_of_two_objects_of_a_class_are_separate() -> None:
    class Greeter:
        def __init__(self, greeting: str) -> None:
            self.greeting = greeting

        @tool
        def greet(self) -> str:
            """Greets."""
            return self.greeting

    hello, goodbye = tool_executor_from(Greeter("hello").greet), tool_executor_from(Greeter("goodbye").greet)
    request = ToolExecutionRequest("1", "greet", "{}")

    assert (hello(request, None).text, goodbye(request, None).text) == ("hello", "goodbye")


def test_descriptions_do_not_keep_classes_and_functions_alive() -> None:
    def make() -> list[weakref.ref[Any]]:
        class Local:
            @tool
            def answer(self, text: str) -> str:
                """Answers."""
                return text

        @tool
        def reply(text: str) -> str:
            """Replies."""
            return text

        tool_specifications_from(Local)
        tool_specification_from(reply)
        return [weakref.ref(Local), weakref.ref(reply)]

    references = make()
    gc.collect()

    assert [each() for each in references] == [None, None]
