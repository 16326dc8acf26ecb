"""Messages to the model: templates, files, functions, history, contents and the user message."""

import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Annotated, Any, Protocol
from uuid import UUID

import pytest
from pydantic import BaseModel

from tests.problems import problems_of
from toolbox import (
    AiMessage,
    Container,
    Content,
    IllegalConfigurationError,
    ImageContent,
    Inject,
    InvocationContext,
    MemoryId,
    Message,
    SystemMessage,
    TextContent,
    UserMessage,
    create_ai_service,
    invocation_attributes,
    register_ai_service,
    request_scoped,
    system_message,
    user_message,
)
from toolbox.testing import ScriptedChatModel

pytestmark = pytest.mark.anyio


def service(cls: Any, *replies: Any, **options: Any) -> tuple[Any, ScriptedChatModel]:
    model = ScriptedChatModel(replies or ["ok"] * 20)
    return create_ai_service(cls, chat_model=model, **options), model


# --- templates


async def test_first_service_of_the_documentation_renders_its_messages() -> None:
    class Assistant(Protocol):
        @system_message("You answer in {language}.")
        @user_message("Question: {question}")
        async def chat(self, session: MemoryId[str], question: str, language: str) -> str: ...

    assistant, model = service(Assistant)
    assert await assistant.chat("room 7", "How many seats?", "English") == "ok"
    assert await assistant.chat(session="room 7", question="Why?", language="German") == "ok"

    assert model.requests[0].messages == (
        SystemMessage("You answer in English."),
        UserMessage("Question: How many seats?"),
    )
    assert model.requests[1].messages == (
        SystemMessage("You answer in German."),
        UserMessage("Question: How many seats?"),
        AiMessage("ok"),
        UserMessage("Question: Why?"),
    )


async def test_it_is_the_only_parameter_besides_the_memory_id() -> None:
    class Assistant(Protocol):
        @user_message("Translate: {it}")
        async def one(self, text: str) -> str: ...

        @user_message("Translate: {it}")
        async def with_memory(self, session: MemoryId[str], text: str) -> str: ...

        @user_message("Number {it}")
        async def number(self, n: int) -> str: ...

        @system_message("About {it}.")
        @user_message("Say {it} twice: {it}")
        async def both(self, text: str) -> str: ...

    assistant, model = service(Assistant)
    await assistant.one("x {y}")
    await assistant.with_memory("room", "x")
    await assistant.number(3)
    await assistant.both("z")

    said = [[each.text for each in request.messages] for request in model.requests]  # type: ignore[union-attr]
    assert said == [["Translate: x {y}"], ["Translate: x"], ["Number 3"], ["About z.", "Say z twice: z"]]


def test_it_with_several_parameters_is_a_problem() -> None:
    class Assistant(Protocol):
        @user_message("{it}")
        async def chat(self, a: str, b: str) -> str: ...

    problems = problems_of(Assistant)
    assert problems[0].where == "Assistant.chat"
    assert "{it}" in problems[0].what


async def test_a_parameter_named_it_is_used_for_it() -> None:
    class Assistant(Protocol):
        @user_message("{it} and {other}")
        async def chat(self, it: str, other: str) -> str: ...

    assistant, model = service(Assistant)
    await assistant.chat("a", "b")
    assert model.requests[0].messages == (UserMessage("a and b"),)


async def test_doubled_braces_are_rendered_as_braces() -> None:
    class Assistant(Protocol):
        @system_message('Answer as {{"city": "…"}}. {{}} {{x}}')
        async def chat(self, text: str) -> str: ...

    assistant, model = service(Assistant)
    await assistant.chat("{text} {{it}}")
    assert model.requests[0].messages == (
        SystemMessage('Answer as {"city": "…"}. {} {x}'),
        UserMessage("{text} {{it}}"),
    )


def test_doubled_braces_around_a_known_parameter_are_a_problem() -> None:
    class Assistant(Protocol):
        @user_message("Hello {{name}}, {name}")
        async def chat(self, name: str) -> str: ...

    [problem] = problems_of(Assistant)
    assert problem.where == "Assistant.chat"
    assert "{{name}}" in problem.what
    assert "{name}" in problem.fix


@pytest.mark.parametrize(
    "text", ["{name.first}", "{name[0]}", "{name!r}", "{name:>3}", "{}", "{0}", "{", "}", "{ name }"]
)
def test_expressions_in_braces_are_a_problem(text: str) -> None:
    class Assistant(Protocol):
        @user_message(text)
        async def chat(self, name: str) -> str: ...

    assert all(problem.where == "Assistant.chat" for problem in problems_of(Assistant))


def test_unknown_names_in_a_template_are_a_problem() -> None:
    class Assistant(Protocol):
        @system_message("Be {tone}.")
        @user_message("{quetsion}")
        async def chat(self, question: str) -> str: ...

    texts = [problem.what + problem.fix for problem in problems_of(Assistant)]
    assert any("{tone}" in text for text in texts)
    assert any("{quetsion}" in text and "{question}" in text for text in texts)


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 2


class City(BaseModel):
    name: str
    twin: str | None = None


@dataclass
class Point:
    x: int
    y: float


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "x"),
        ("", ""),
        (3, "3"),
        (3.5, "3.5"),
        (True, "True"),
        (Decimal("1.50"), "1.50"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Colour.RED, "red"),
        (Level.HIGH, "2"),
        (date(2026, 1, 2), "2026-01-02"),
        (datetime(2026, 1, 2, 3, 4, tzinfo=UTC), "2026-01-02T03:04:00+00:00"),
        (time(3, 4), "03:04:00"),
        ([1, "ü"], '[1,"ü"]'),
        ({"a": None}, '{"a":null}'),
        (City(name="Zürich"), '{"name":"Zürich","twin":null}'),
        (Point(1, 2.5), '{"x":1,"y":2.5}'),
        ([City(name="x")], '[{"name":"x","twin":null}]'),
        ((Colour.RED, date(2026, 1, 2)), '["red","2026-01-02"]'),
    ],
)
async def test_values_are_rendered_as_text_or_compact_json(value: object, text: str) -> None:
    class Assistant(Protocol):
        @user_message("<{value}>")
        async def chat(self, value: object) -> str: ...

    assistant, model = service(Assistant)
    await assistant.chat(value)
    assert model.requests[0].messages == (UserMessage(f"<{text}>"),)


async def test_default_values_are_rendered() -> None:
    class Assistant(Protocol):
        @system_message("Be {tone}.")
        async def chat(self, text: str, tone: str = "kind") -> str: ...

    assistant, model = service(Assistant)
    await assistant.chat("x")
    await assistant.chat("x", tone="stern")
    await assistant.chat("x", "curt")
    assert [request.messages[0].text for request in model.requests] == ["Be kind.", "Be stern.", "Be curt."]  # type: ignore[union-attr]


async def test_unusual_parameter_names_work_in_templates() -> None:
    class Assistant(Protocol):
        @user_message("{_private} {größe} {self_} {class_} {x1}")
        async def chat(self, _private: str, größe: int, self_: str, class_: str, x1: str) -> str: ...

    assistant, model = service(Assistant)
    await assistant.chat("a", 2, "c", "d", x1="e")
    assert model.requests[0].messages == (UserMessage("a 2 c d e"),)


async def test_parameters_may_have_names_that_the_framework_uses() -> None:
    class Assistant(Protocol):
        @user_message("{plan} {host} {as_tool} {name} {args} {kwargs}")
        async def chat(self, plan: str, host: str, as_tool: str, name: str, args: str, kwargs: str) -> str: ...

    assistant, model = service(Assistant)
    await assistant.chat("a", "b", "c", name="d", args="e", kwargs="f")
    assert model.requests[0].messages == (UserMessage("a b c d e f"),)


async def test_keyword_only_and_positional_only_parameters_are_rendered() -> None:
    class Assistant(Protocol):
        @system_message("Be {tone}.")
        async def chat(self, text: str, /, *, tone: str) -> str: ...

    assistant, model = service(Assistant)
    await assistant.chat("x", tone="kind")
    assert model.requests[0].messages == (SystemMessage("Be kind."), UserMessage("x"))


def test_calls_with_wrong_arguments_raise_type_error() -> None:
    class Assistant(Protocol):
        def chat(self, text: str) -> str: ...

        async def later(self, text: str) -> str: ...

    assistant, model = service(Assistant)
    with pytest.raises(TypeError, match="text"):
        assistant.chat()
    with pytest.raises(TypeError, match="other"):
        assistant.chat("x", other=1)
    assert model.requests == []


# --- files


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that creates a module with files next to it."""

    def make(source: str, **files: bytes) -> ModuleType:
        for name, content in files.items():
            path = tmp_path / name.replace("__", "/").replace("_txt", ".txt")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        path = tmp_path / "prompting_module.py"
        path.write_text(dedent(source), encoding="utf-8")
        made = ModuleType("prompting_module")
        made.__file__ = str(path)
        monkeypatch.setitem(sys.modules, "prompting_module", made)
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(made))
        return made

    return make


SERVICE_WITH_FILES = """
    from typing import Protocol
    from toolbox import system_message, user_message, register_ai_service

    @register_ai_service
    @system_message(file="prompts/system.txt")
    class Assistant(Protocol):
        @user_message(file="user.txt")
        async def chat(self, question: str) -> str: ...
"""


async def test_template_files_are_read_as_utf8_next_to_the_module(module: Any) -> None:
    made = module(SERVICE_WITH_FILES, prompts__system_txt="Sei höflich.\n".encode(), user_txt=b"Question: {question}")

    assistant, model = service(made.Assistant)
    await assistant.chat("why?")
    system, user = model.requests[0].messages
    assert isinstance(system, SystemMessage)
    assert system.text.strip() == "Sei höflich."
    assert user == UserMessage("Question: why?")


def test_template_files_are_checked_at_startup(module: Any) -> None:
    made = module(SERVICE_WITH_FILES, prompts__system_txt=b"Be {tone}.")

    texts = [str(problem) for problem in problems_of(made.Assistant)]
    assert any("user.txt" in text for text in texts)
    assert any("{tone}" in text for text in texts)


def test_template_files_with_another_encoding_are_a_problem(module: Any) -> None:
    made = module(SERVICE_WITH_FILES, prompts__system_txt=b"\xff\xfe", user_txt=b"{question}")

    [problem] = problems_of(made.Assistant)
    assert "system.txt" in problem.what
    assert "UTF-8" in str(problem)


async def test_byte_order_marks_are_removed_from_template_files(module: Any) -> None:
    made = module(SERVICE_WITH_FILES, prompts__system_txt=b"\xef\xbb\xbfBe kind.", user_txt=b"{question}")

    assistant, model = service(made.Assistant)
    await assistant.chat("why?")
    assert model.requests[0].messages[0] == SystemMessage("Be kind.")


@pytest.mark.parametrize("content", [b"", b" \n\t\n", b"\xef\xbb\xbf"])
def test_empty_or_blank_template_files_are_a_problem(module: Any, content: bytes) -> None:
    made = module(SERVICE_WITH_FILES, prompts__system_txt=content, user_txt=b"{question}")

    [problem] = problems_of(made.Assistant)
    assert problem.where == "Assistant.chat"
    assert problem.what == "the template of @system_message(file='prompts/system.txt') is empty"


@pytest.mark.parametrize("decorator", [system_message, user_message])
@pytest.mark.parametrize("text", ["", "  ", "\n"])
def test_empty_or_blank_templates_are_a_problem(decorator: Any, text: str) -> None:
    class Assistant(Protocol):
        @decorator(text)
        async def chat(self, question: str) -> str: ...

    [problem] = problems_of(Assistant)
    assert problem.what == f"the template of @{decorator.__name__} is empty"


def test_message_decorators_require_either_text_or_a_file() -> None:
    with pytest.raises(TypeError):
        system_message("x", file="y.txt")
    with pytest.raises(TypeError):
        user_message()


# --- the system message


async def test_system_message_of_a_method_overrides_that_of_the_class() -> None:
    @system_message("Class: {text}")
    class Assistant(Protocol):
        async def chat(self, text: str, more: str) -> str: ...

        @system_message("Method")
        async def other(self, text: str) -> str: ...

    assistant, model = service(Assistant)
    await assistant.chat("a", "b")
    await assistant.other("c")
    assert model.requests[0].messages == (SystemMessage("Class: a"), UserMessage("b"))
    assert model.requests[1].messages == (SystemMessage("Method"), UserMessage("c"))


async def test_system_messages_can_be_made_by_sync_and_async_functions() -> None:
    threads = []

    def persona(context: InvocationContext) -> str:
        threads.append(InvocationContext.current())
        return f"{context.service.__name__}.{context.method} for {context.memory_id}, {context.attributes['tenant']}"

    async def later(context: InvocationContext) -> str:
        assert context.user_message is not None
        return f"You were asked: {context.user_message.text} {{literally}}"

    class Assistant(Protocol):
        @system_message(persona)
        async def chat(self, session: MemoryId[str], text: str) -> str: ...

        @system_message(later)
        async def other(self, text: str) -> str: ...

        @system_message(persona)
        def sync(self, session: MemoryId[str], text: str) -> str: ...

    assistant, model = service(Assistant)
    with invocation_attributes(tenant="a"):
        await assistant.chat("room", "x")
        await assistant.other("y")
    assert model.requests[0].messages[0] == SystemMessage("Assistant.chat for room, a")
    assert model.requests[1].messages[0] == SystemMessage("You were asked: y {literally}")
    assert threads[0].method == "chat"


@request_scoped
class User:
    def __init__(self) -> None:
        self.name = "Ada"


class Clock:
    def now(self) -> str:
        return "noon"


def greeting(context: InvocationContext, user: Inject[User], clock: Inject[Clock]) -> str:
    return f"You talk to {user.name} at {clock.now()}."


async def late_greeting(context: InvocationContext, *, user: Inject[User], other: Inject[int | None] = None) -> str:
    return f"You talk to {user.name}, {other}."


@register_ai_service
class Greeter(Protocol):
    @system_message(greeting)
    async def chat(self, text: str) -> str: ...

    @system_message(late_greeting)
    async def later(self, text: str) -> str: ...


async def test_beans_of_the_current_scope_are_injected_into_system_message_functions() -> None:
    model = ScriptedChatModel(["ok"] * 2)
    async with Container(models={"default": model}).register(Greeter, User, Clock) as container:
        async with container.request_scope():
            container.get(User).name = "Grace"
            await container.get(Greeter).chat("x")
        async with container.request_scope():
            await container.get(Greeter).later("x")

    assert model.requests[0].messages[0] == SystemMessage("You talk to Grace at noon.")
    assert model.requests[1].messages[0] == SystemMessage("You talk to Ada, None.")


def test_missing_beans_of_system_message_functions_are_a_problem() -> None:
    container = Container(models={"default": ScriptedChatModel([])}).register(Greeter, User)

    [problem] = container.check()
    assert "Clock" in problem.what
    assert "Greeter.chat" in problem.where


def test_unknown_parameters_of_system_message_functions_are_a_problem() -> None:
    def persona(context: InvocationContext, tone: str) -> str:
        return tone

    class Assistant(Protocol):
        @system_message(persona)
        async def chat(self, text: str) -> str: ...

    [problem] = problems_of(Assistant)
    assert problem.where == "Assistant.chat"
    assert "tone" in problem.what


async def test_errors_of_system_message_functions_reach_the_caller() -> None:
    def broken(context: InvocationContext) -> str:
        raise LookupError("no persona")

    class Assistant(Protocol):
        @system_message(broken)
        async def chat(self, text: str) -> str: ...

    assistant, model = service(Assistant)
    with pytest.raises(LookupError, match="no persona"):
        await assistant.chat("x")
    assert model.requests == []


# --- the user's message


async def test_the_remaining_parameter_is_the_user_message() -> None:
    class Assistant(Protocol):
        @system_message("Be {tone}.")
        async def chat(self, tone: str, text: str) -> str: ...

        async def message(self, message: UserMessage) -> str: ...

        async def contents(self, contents: list[Content]) -> str: ...

        async def parts(self, contents: list[TextContent | ImageContent]) -> str: ...

        async def maybe(self, text: str | None) -> str: ...

        async def annotated(self, text: Annotated[str, "what is said"]) -> str: ...

    assistant, model = service(Assistant)
    image = ImageContent("http://x/y.png")
    await assistant.chat("kind", "hello")
    await assistant.message(UserMessage([TextContent("a"), image]))
    await assistant.contents([TextContent("a"), image])
    await assistant.parts([image])
    await assistant.annotated("hi")
    with pytest.raises(TypeError, match="text"):
        await assistant.maybe(None)
    assert [request.messages[-1] for request in model.requests] == [
        UserMessage("hello"),
        UserMessage([TextContent("a"), image]),
        UserMessage([TextContent("a"), image]),
        UserMessage([image]),
        UserMessage("hi"),
    ]


async def test_lists_of_messages_are_sent_as_history() -> None:
    class Assistant(Protocol):
        @system_message("S")
        async def chat(self, history: list[Message], text: str) -> str: ...

        @user_message("Q: {text}")
        async def optional(self, text: str, history: list[Message] | None = None) -> str: ...

    assistant, model = service(Assistant)
    history = [UserMessage("q"), AiMessage("a")]
    await assistant.chat(history, "x")
    await assistant.optional("y")
    await assistant.optional("y", tuple(history))
    assert model.requests[0].messages == (SystemMessage("S"), *history, UserMessage("x"))
    assert model.requests[1].messages == (UserMessage("Q: y"),)
    assert model.requests[2].messages == (*history, UserMessage("Q: y"))
    assert history == [UserMessage("q"), AiMessage("a")]


async def test_history_and_memory_can_be_combined() -> None:
    class Assistant(Protocol):
        async def chat(self, session: MemoryId[str], history: list[Message], text: str) -> str: ...

    assistant, model = service(Assistant, "one", "two")
    await assistant.chat("room", [UserMessage("h1"), AiMessage("h2")], "x")
    await assistant.chat("room", [UserMessage("h3"), AiMessage("h4")], "y")

    said = [each.text for each in model.requests[1].messages]  # type: ignore[union-attr]
    assert said == ["x", "one", "h3", "h4", "y"]


async def test_content_parameters_are_appended_to_the_user_message() -> None:
    class Assistant(Protocol):
        async def chat(self, text: str, image: ImageContent) -> str: ...

        @user_message("Compare {it_}:")
        async def compare(self, it_: str, images: list[ImageContent], last: ImageContent | None = None) -> str: ...

        @user_message("What is this?")
        async def what(self, image: ImageContent) -> str: ...

        async def texts(self, text: str, more: TextContent) -> str: ...

    assistant, model = service(Assistant)
    one, two, three = (ImageContent(f"http://x/{n}.png") for n in range(3))
    await assistant.chat("see", one)
    await assistant.compare("these", [one, two], three)
    await assistant.compare("these", [one])
    await assistant.what(image=one)
    await assistant.texts("a", TextContent("b"))
    assert [request.messages[0] for request in model.requests] == [
        UserMessage([TextContent("see"), one]),
        UserMessage([TextContent("Compare these:"), one, two, three]),
        UserMessage([TextContent("Compare these:"), one]),
        UserMessage([TextContent("What is this?"), one]),
        UserMessage([TextContent("a"), TextContent("b")]),
    ]


async def test_an_image_alone_is_a_user_message() -> None:
    class Assistant(Protocol):
        @system_message("Describe the image.")
        async def describe(self, image: ImageContent) -> str: ...

    assistant, model = service(Assistant)
    image = ImageContent("http://x/y.png")
    await assistant.describe(image)
    assert model.requests[0].messages == (SystemMessage("Describe the image."), UserMessage([image]))


BARE_SEQUENCES = [list, typing.List, typing.Sequence, tuple[()]]  # noqa: UP006 - as older programs write it


@pytest.mark.parametrize(
    "annotation", [Callable[[], int], dict[str, int], set[str], type[str], Iterator[str], *BARE_SEQUENCES]
)
def test_a_parameter_that_is_neither_text_nor_contents_is_not_the_user_message(annotation: Any) -> None:
    class Service(Protocol):
        async def ask(self, value: annotation) -> str: ...  # type: ignore[valid-type]  # a parameter of this test

    with pytest.raises(IllegalConfigurationError, match="'value' is not used in any message"):
        create_ai_service(Service, chat_model=ScriptedChatModel([]))


async def test_a_list_of_texts_and_contents_is_the_user_message() -> None:
    class Service(Protocol):
        async def ask(self, parts: list[str | ImageContent]) -> str: ...

    model, image = ScriptedChatModel(["ok"]), ImageContent(url="https://example.com/a.png")
    await create_ai_service(Service, chat_model=model).ask(["what is this?", image])
    assert model.requests[0].messages[-1] == UserMessage((TextContent("what is this?"), image))


def test_unused_parameters_are_a_problem() -> None:
    class Assistant(Protocol):
        @user_message("{text}")
        async def template(self, text: str, unused: int) -> str: ...

        async def two(self, text: str, other: str) -> str: ...

        async def number(self, text: str, number: int) -> str: ...

    problems = problems_of(Assistant)
    found = {(problem.where, problem.what) for problem in problems}
    assert any(where == "Assistant.template" and "unused" in what for where, what in found)
    assert any(where == "Assistant.number" and "number" in what for where, what in found)
    assert {where for where, _ in found} == {"Assistant.template", "Assistant.two", "Assistant.number"}
    assert all(problem.fix for problem in problems)


def test_methods_without_a_user_message_are_a_problem() -> None:
    class Assistant(Protocol):
        async def chat(self) -> str: ...

    [problem] = problems_of(Assistant)
    assert problem.where == "Assistant.chat"


async def test_methods_with_a_complete_template_need_no_parameters() -> None:
    class Assistant(Protocol):
        @user_message("Tell a joke.")
        async def joke(self) -> str: ...

    assistant, model = service(Assistant)
    await assistant.joke()
    assert model.requests[0].messages == (UserMessage("Tell a joke."),)


async def test_parameters_can_be_used_in_both_messages() -> None:
    class Assistant(Protocol):
        @system_message("About {topic}.")
        @user_message("Tell me of {topic}: {question}")
        async def chat(self, topic: str, question: str) -> str: ...

    assistant, model = service(Assistant)
    await assistant.chat("bees", "why?")
    assert model.requests[0].messages == (SystemMessage("About bees."), UserMessage("Tell me of bees: why?"))
