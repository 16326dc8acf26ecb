"""`@tool`: names, descriptions, supported functions, inheritance and invalid marks."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from datetime import timedelta
from inspect import signature
from typing import Annotated, Any, Protocol

import pytest

from toolbox import (
    Container,
    IllegalConfigurationError,
    Problem,
    ReturnBehavior,
    SearchBehavior,
    ToolExecutionRequest,
    ToolSpecification,
    create_ai_service,
    register_ai_service,
    tool,
    tool_executor_from,
    tool_specification_from,
    tool_specifications_from,
    toolbox,
    tools_from,
)
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox.tools.marks import ToolMark
from toolbox.tools.sources import read_tools
from toolbox.tools.tool_calls import Tool

pytestmark = pytest.mark.anyio

NOTHING = {"type": "object", "properties": {}}


def specification(function: Any) -> ToolSpecification:
    return tool_specification_from(function)


def problems_of(source: Any) -> list[Problem]:
    with pytest.raises(IllegalConfigurationError) as raised:
        tool_specifications_from(source)
    return list(raised.value.problems)


# --- the mark


@pytest.mark.parametrize("exclusive", ["not_self", "may_remember"])
def test_each_option_that_a_call_needs_reaches_the_tool(exclusive: str) -> None:
    given: dict[str, Any] = {
        "return_behavior": ReturnBehavior.IMMEDIATE,
        "search_behavior": SearchBehavior.ALWAYS_VISIBLE,
        "timeout": 2.0,
        "max_result_chars": 3,
        "requires_approval": True,
        "approvers": ("manager",),
        exclusive: True,
        "approval_expires": timedelta(hours=1),
        "deferred": True,
        "on_unknown_outcome": "ask",
        "former_names": ("sum",),
    }

    @tool(**given)
    def add(a: int) -> int:
        return a

    [read], problems = read_tools([add], "here")
    assert problems == ()
    both = {each.name for each in fields(ToolMark)} & {each.name for each in fields(Tool)}
    assert both == {*given, "not_self", "may_remember"}
    assert {name: getattr(read, name) for name in given} == given


def test_an_unknown_option_is_refused_with_the_nearest_known_one() -> None:
    options: Any = {"time_out": 3}
    hidden: Any = {"local_names": {}}
    with pytest.raises(TypeError, match=r"@tool: unknown option 'time_out'; did you mean 'timeout'\?"):
        tool(**options)
    with pytest.raises(TypeError, match="@tool: unknown option 'local_names'"):
        tool(**hidden)


def test_the_signature_of_the_decorator_names_all_options() -> None:
    options = [each.name for each in signature(tool).parameters.values() if each.kind is each.KEYWORD_ONLY]
    assert sorted([*options, "local_names"]) == sorted(each.name for each in fields(ToolMark))


def test_name_and_description_default_to_the_function_name_and_first_docstring_paragraph() -> None:
    @tool
    def add(a: int) -> int:
        """Adds numbers,
        all of them.

        And more that the model does not need.

        Args:
            a: a number
        """
        return a

    assert specification(add).name == "add"
    assert specification(add).description == "Adds numbers,\nall of them."


def test_tools_without_docstring_have_no_description() -> None:
    @tool
    def add(a: int) -> int:
        return a

    assert specification(add).description is None


def test_description_strings_are_joined_with_newlines() -> None:
    @tool("Adds", "two numbers")
    def add(a: int) -> int:
        """Not this."""
        return a

    assert specification(add).description == "Adds\ntwo numbers"


def test_name_description_and_metadata_are_used() -> None:
    @tool(name="sum", description="Sums", return_behavior=ReturnBehavior.IMMEDIATE, metadata={"k": 1}, timeout=5.0)
    def add(a: int) -> int:
        return a

    assert specification(add) == ToolSpecification(
        "sum",
        "Sums",
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"k": 1},
    )


def test_empty_parentheses_change_nothing() -> None:
    @tool()
    def add() -> int:
        """Adds."""
        return 1

    assert specification(add) == ToolSpecification("add", "Adds.", NOTHING)


def test_tool_returns_the_function_unchanged() -> None:
    def add(a: int, b: int = 2) -> int:
        return a + b

    assert tool(add) is add
    assert tool("x")(add) is add
    assert add(1) == 3


async def test_tool_returns_coroutine_functions_unchanged() -> None:
    @tool
    async def add(a: int, b: int = 2) -> int:
        return a + b

    assert await add(1, b=1) == 2


def test_two_descriptions_raise_type_error() -> None:
    with pytest.raises(TypeError, match="description"):
        tool("Adds", description="Adds")


# --- supported functions


class Calculator:
    @tool
    def add(self, a: int, b: Annotated[int, "second"] = 0) -> int:
        return a + b

    @tool
    def _hidden(self) -> str:
        return "hidden"

    @tool
    def __very_hidden(self) -> str:
        return "very hidden"

    @tool
    @staticmethod
    def static_outside(a: int) -> int:
        return a

    @staticmethod
    @tool
    def static_inside(a: int) -> int:
        return a

    @tool
    @classmethod
    def class_outside(cls) -> str:
        return cls.__name__

    @classmethod
    @tool
    def class_inside(cls) -> str:
        return cls.__name__

    def no_tool(self) -> int:
        return 0


def test_private_static_and_class_methods_are_found_in_order() -> None:
    names = [each.name for each in tool_specifications_from(Calculator)]

    assert names == [
        "add",
        "_hidden",
        "__very_hidden",
        "static_outside",
        "static_inside",
        "class_outside",
        "class_inside",
    ]
    assert [each.name for each in tool_specifications_from(Calculator())] == names


async def test_every_kind_of_method_can_be_called_through_a_service() -> None:
    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    requests = [
        tool_call("add", {"a": 1}),
        tool_call("_hidden"),
        tool_call("__very_hidden"),
        tool_call("static_outside", {"a": 3}),
        tool_call("static_inside", {"a": 4}),
        tool_call("class_outside"),
        tool_call("class_inside"),
    ]
    from toolbox import AiMessage

    model = ScriptedChatModel([AiMessage(None, requests), "done"])
    await create_ai_service(Assistant, chat_model=model, tools=(Calculator(),)).chat("x")

    results = [each.text for each in model.requests[1].messages[2:]]  # type: ignore[union-attr]
    assert results == ["1", "hidden", "very hidden", "3", "4", "Calculator", "Calculator"]


def test_every_kind_of_method_can_be_called_directly() -> None:
    assert Calculator().add(1, 2) == 3
    assert Calculator.static_outside(3) == 3
    assert Calculator.static_inside(4) == 4
    assert Calculator.class_outside() == "Calculator"
    assert Calculator().class_inside() == "Calculator"


def test_bound_methods_are_tools() -> None:
    assert specification(Calculator().add).name == "add"
    assert specification(Calculator.class_inside).name == "class_inside"


def test_static_and_class_methods_do_not_need_an_instance() -> None:
    class Statics:
        @tool
        @staticmethod
        def one() -> int:
            return 1

        @classmethod
        @tool
        def two(cls) -> int:
            return 2

    assert [each.name for each in tools_from(Statics)] == ["one", "two"]


# --- inheritance


class Base:
    @tool("Base's")
    def shared(self) -> str:
        return "base"

    @tool
    def only_base(self) -> str:
        return "only base"


class Keeps(Base):
    def shared(self) -> str:
        return "kept"


class Renames(Base):
    @tool("Renamed's", name="renamed")
    def shared(self) -> str:
        return "new"


class Mixin:
    @tool
    def mixed(self) -> str:
        return "mixed"


class Both(Keeps, Mixin):
    @tool
    def own(self) -> str:
        return "own"


def run(source: object, name: str) -> Any:
    executor = next(each for key, each in tools_from(source).items() if key.name == name)
    return executor(ToolExecutionRequest("1", name, "{}"), None).text


def test_inherited_tools_are_found() -> None:
    assert {each.name for each in tool_specifications_from(Both)} == {"shared", "only_base", "mixed", "own"}
    assert run(Both(), "mixed") == "mixed"


def test_overrides_keep_the_mark_of_the_base_method() -> None:
    [shared] = [each for each in tool_specifications_from(Keeps) if each.name == "shared"]

    assert shared.description == "Base's"
    assert run(Keeps(), "shared") == "kept"


def test_marked_overrides_replace_the_mark() -> None:
    assert {each.name: each.description for each in tool_specifications_from(Renames)} == {
        "renamed": "Renamed's",
        "only_base": None,
    }
    assert run(Renames(), "renamed") == "new"


def test_implementations_inherit_the_mark_of_the_abstract_method() -> None:
    class Interface(ABC):
        @tool("From the interface")
        @abstractmethod
        def find(self, text: str) -> str: ...

    class Implementation(Interface):
        def find(self, text: str) -> str:
            return text

    [found] = tool_specifications_from(Implementation())
    assert found.description == "From the interface"


# --- problems


@pytest.mark.parametrize("name", ["", "with space", "ä", "a.b", "x" * 65, "a/b"])
def test_invalid_tool_names_are_a_problem(name: str) -> None:
    class Tools:
        @tool(name=name)
        def add(self) -> int:
            return 1

    [problem] = problems_of(Tools)
    assert problem.where == "Tools.add"
    assert problem.fix


@pytest.mark.parametrize("name", ["a", "A-b_9", "x" * 64, "-", "_"])
def test_valid_tool_names_are_accepted(name: str) -> None:
    @tool(name=name)
    def add() -> int:
        return 1

    assert specification(add).name == name


def test_variadic_parameters_of_tools_are_a_problem() -> None:
    class Tools:
        @tool
        def many(self, *args: int, **kwargs: int) -> int:
            return 1

    problems = problems_of(Tools)
    assert [problem.where for problem in problems] == ["Tools.many", "Tools.many"]
    assert "*args" in problems[0].what
    assert "**kwargs" in problems[1].what


def test_tool_parameters_without_annotation_are_a_problem() -> None:
    class Tools:
        @tool
        def add(self, a, b: int):  # type: ignore[no-untyped-def]
            return a

    [problem] = problems_of(Tools)
    assert problem.where == "Tools.add"
    assert "'a'" in problem.what
    assert "annotation" in problem.what


def test_generators_as_tools_are_a_problem() -> None:
    class Tools:
        @tool
        def count(self) -> Iterator[int]:
            yield 1

        @tool
        async def later(self) -> AsyncIterator[int]:
            yield 1

    assert {each.where for each in problems_of(Tools)} == {"Tools.count", "Tools.later"}


def test_duplicate_tool_names_in_a_class_are_a_problem() -> None:
    class Tools:
        @tool
        def one(self) -> int:
            return 1

        @tool(name="one")
        def other(self) -> int:
            return 1

    [problem] = problems_of(Tools)
    assert "'one'" in problem.what
    assert "Tools.one" in problem.what
    assert "Tools.other" in problem.what


def test_all_problems_of_tools_are_reported_together() -> None:
    class Tools:
        @tool(name="not a name")
        def one(self) -> int:
            return 1

        @tool
        def two(self, *args: int) -> int:
            return 1

        @tool
        def three(self, a) -> int:  # type: ignore[no-untyped-def]
            return 1

    @register_ai_service(tools=(Tools,))
    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel([])}).register(Assistant)

    assert [each.where for each in container.check()] == ["Tools.one", "Tools.two", "Tools.three"]


def test_tools_of_a_toolbox_are_checked() -> None:
    class Tools:
        @tool
        def two(self, *args: int) -> int:
            return 1

    class Assistant(Protocol):
        @toolbox(Tools())
        async def chat(self, text: str) -> str: ...

    with pytest.raises(IllegalConfigurationError) as raised:
        create_ai_service(Assistant, chat_model=ScriptedChatModel([]))
    assert [each.where for each in raised.value.problems] == ["Tools.two"]


@pytest.mark.parametrize("given", [0, -1.0, True, "3", float("nan"), len])
@pytest.mark.parametrize("option", ["timeout", "max_result_chars"])
def test_invalid_limits_are_a_problem(option: str, given: Any) -> None:
    @tool(**{option: given})
    def add() -> int:
        return 1

    with pytest.raises(IllegalConfigurationError, match=f"invalid {option}="):
        tool_executor_from(add)
