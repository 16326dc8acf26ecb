"""Sources of tools and their problems."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, Protocol, TypeVar

import pytest
from pydantic import AliasChoices, BaseModel, BeforeValidator, Field

from toolbox import (
    AiServiceTool,
    IllegalConfigurationError,
    Inject,
    InvocationContext,
    MemoryId,
    ReturnBehavior,
    ToolArgumentsError,
    ToolExecutionRequest,
    ToolProviderResult,
    ToolSpecification,
    non_blocking,
    run_on_thread,
    tool,
)
from toolbox.execution.markers import BLOCKING, COROUTINE, NON_BLOCKING, THREAD
from toolbox.hosts.executors import tool_executor_from, tool_specifications_from, tools_from
from toolbox.security import SecurityIdentity
from toolbox.testing import tool_call
from toolbox.tools.marks import ToolMark, tool_mark_of, toolbox, toolbox_of
from toolbox.tools.sources import bean_types, read_tools

from .conftest import Bench, tool_in

if TYPE_CHECKING:
    from fractions import Fraction

Problems = Callable[..., list[str]]


class Calculator:
    @tool
    def add(self, a: int, b: int) -> int:
        return a + b

    @tool
    @staticmethod
    def zero() -> int:
        return 0


@tool
def double(n: int) -> int:
    """Doubles."""
    return 2 * n


def by_hand(request: ToolExecutionRequest, memory_id: object) -> str:
    return f"{request.arguments} {memory_id}"


def names(*sources: Any) -> list[str]:
    tools, problems = read_tools(sources, "here")
    assert not problems
    return [each.specification.name for each in tools]


# --- kinds of sources


def test_classes_are_beans_and_static_tools_need_none() -> None:
    (add, zero), _ = read_tools([Calculator], "here")

    assert (add.bean, add.member, add.where) == (Calculator, "add", "Calculator.add")
    assert (zero.bean, zero.function) == (None, Calculator.zero)


def test_named_beans_are_looked_up_with_their_name() -> None:
    named: Any = Annotated[Calculator, "name"]
    (add, _), problems = read_tools([named], "here")

    assert not problems
    assert add.bean is named


def test_bean_types_are_classes_that_need_an_instance() -> None:
    class Statics:
        @staticmethod
        @tool
        def only() -> None: ...

    assert bean_types([Calculator, double, Statics, Calculator(), {}]) == (Calculator,)


async def call(bench: Bench, source: Any, arguments: str = "{}") -> str:
    return (await bench.run(source, arguments)).message.text


@pytest.mark.anyio
async def test_executors_from_tools_from_are_decoded_like_functions(bench: Bench) -> None:
    async def fails(n: int) -> None:
        raise LookupError("x")

    [(specification, executor)] = tools_from(fails).items()
    made = tool_in(AiServiceTool(specification, executor, ReturnBehavior.IMMEDIATE, timeout=3))

    assert (made.execution, made.return_behavior, made.timeout) == (COROUTINE, ReturnBehavior.IMMEDIATE, 3)
    assert made.decode is not None
    assert await call(bench, {ToolSpecification("other"): tool_executor_from(double)}, '{"n": 2}') == "4"


def test_an_executor_from_a_tool_keeps_the_options_that_the_entry_does_not_change() -> None:
    @tool(return_behavior=ReturnBehavior.IMMEDIATE, timeout=3, deferred=True, approvers=("boss",))
    def pay(euros: int) -> str:
        return "paid"

    specification, executor = ToolSpecification("pay"), tool_executor_from(pay)
    listed = tool_in({specification: executor})
    assert listed == tool_in(AiServiceTool(specification, executor))
    assert (listed.return_behavior, listed.approvers) == (ReturnBehavior.IMMEDIATE, ("boss",))
    changed = tool_in(AiServiceTool(specification, executor, ReturnBehavior.IMMEDIATE_IF_LAST))
    assert (changed.return_behavior, changed.timeout) == (ReturnBehavior.IMMEDIATE_IF_LAST, 3)


@pytest.mark.anyio
async def test_executors_receive_the_request_and_the_memory_id(bench: Bench) -> None:
    class Executor:
        async def __call__(self, request: ToolExecutionRequest, memory_id: object) -> object:
            return by_hand(request, memory_id)

    assert await call(bench, {ToolSpecification("by_hand"): by_hand}, "{broken") == "{broken m1"
    assert await call(bench, {ToolSpecification("by_hand"): Executor()}, "{}") == "{} m1"
    assert tool_in({ToolSpecification("by_hand"): Executor()}).execution is COROUTINE


@pytest.mark.anyio
async def test_partials_are_tools_with_their_remaining_parameters(bench: Bench) -> None:
    def scaled(factor: int, value: int) -> int:
        return factor * value

    assert await call(bench, functools.partial(scaled, 2), '{"value": 3}') == "6"
    assert await call(bench, functools.partial(double, 4)) == "8"


def test_tool_provider_results_are_tuples() -> None:
    result = ToolProviderResult([double])

    assert result == ToolProviderResult((double,))
    assert hash(result) == hash(ToolProviderResult((double,)))


# --- execution models


def test_functions_get_their_execution_model_from_marks_and_kind() -> None:
    class Kinds:
        @tool
        def plain(self) -> None: ...

        @tool
        async def coroutine(self) -> None: ...

        @tool
        def awaitable(self) -> Awaitable[str]: ...

        @tool
        @non_blocking
        def quick(self) -> None: ...

        @run_on_thread
        @tool
        @staticmethod
        def alone() -> None: ...

    class Overriding(Kinds):
        def quick(self) -> None: ...

        async def plain(self) -> None: ...  # type: ignore[override]  # an override may be asynchronous

    def places(cls: type) -> list[Any]:
        return [each.execution for each in read_tools([cls], "here")[0]]

    assert places(Kinds) == [BLOCKING, COROUTINE, NON_BLOCKING, NON_BLOCKING, THREAD]
    assert places(Overriding) == [COROUTINE, COROUTINE, NON_BLOCKING, NON_BLOCKING, THREAD]


# --- inheritance


class Base:
    @tool("Adds", name="sum")
    def add(self, a: int) -> int:
        """The base's."""
        return a

    @tool
    def gone(self) -> None: ...

    @tool
    def described(self) -> None:
        """By the base."""


class Child(Base):
    def add(self, a: int, b: int = 0) -> int:
        return a + b

    gone = None  # type: ignore[assignment]  # taken away

    def described(self) -> None: ...

    @tool
    def more(self) -> None: ...


def test_overrides_keep_the_mark_and_use_their_own_signature() -> None:
    found = {each.name: each for each in tool_specifications_from(Child)}

    assert list(found) == ["sum", "described", "more"]
    assert found["sum"].description == "Adds"
    assert list(found["sum"].parameters["properties"]) == ["a", "b"]
    assert found["described"].description == "By the base."


def test_private_names_are_not_mangled() -> None:
    class Private:
        @tool
        def __secret(self) -> str:
            return "secret"

        @tool
        def _hidden(self) -> None: ...

    assert names(Private) == ["__secret", "_hidden"]
    [secret, _] = tools_from(Private()).values()
    result: Any = secret(ToolExecutionRequest("1", "__secret", "{}"), None)
    assert result.text == "secret"


def test_methods_of_a_protocol_are_tools_of_its_bean() -> None:
    class Booking(Protocol):
        @tool
        async def cancel(self, number: str) -> bool: ...

    made = tool_in(Booking)

    assert (made.bean, made.member, made.execution) == (Booking, "cancel", COROUTINE)


# --- problems


class Odd:
    @tool(name="no spaces")
    def named(self) -> None: ...

    @tool
    def variadic(self, *args: int, **more: int) -> None: ...

    @tool
    def unannotated(self, a, b: int) -> None:  # type: ignore[no-untyped-def]
        ...

    @tool
    def generator(self) -> Iterator[int]:
        yield 1

    @tool
    def stream(self) -> AsyncIterator[int]: ...  # type: ignore[empty-body]  # never called

    @tool
    def later(self, a: Fraction, b: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    @tool
    def callback(self, done: Callable[[], None], fine: int) -> None: ...

    @tool
    def bean(self, calculator: Calculator) -> None: ...

    @tool(timeout=0, max_result_chars=-1)
    def limits(self) -> None: ...


def test_all_mistakes_of_a_class_are_reported_with_place_and_fix(problems_of: Problems) -> None:
    found = problems_of(Odd)

    assert [each.split(":")[0] for each in found] == [
        "Odd.named",
        "Odd.variadic",
        "Odd.variadic",
        "Odd.unannotated",
        "Odd.generator",
        "Odd.stream",
        "Odd.later",
        "Odd.later",
        "Odd.callback",
        "Odd.bean",
        "Odd.limits",
        "Odd.limits",
    ]
    text = "\n".join(found)
    for fact in [
        "'no spaces'",
        "*args",
        "**more",
        "parameter 'a' has no type annotation",
        "'Fraction' of parameter 'a' cannot be resolved",
        "'Nowhere' of parameter 'b' cannot be resolved",
        "parameter 'done'",
        "or Inject[…] if it is a bean",
        "invalid timeout=0",
        "invalid max_result_chars=-1",
    ]:
        assert fact in text


@pytest.mark.parametrize(
    ("source", "fact"),
    [
        ([Calculator], "a collection"),
        ("calculator", "'calculator' is not a tool"),
        (object(), "object has no tools"),
        (Bench, "Bench has no tools"),
        ({"name": by_hand}, "invalid entry in a mapping of tools: 'name'"),
        ({ToolSpecification("bad name"): by_hand}, "'bad name'"),
        (AiServiceTool(ToolSpecification("late"), by_hand, timeout=-1), "invalid timeout=-1"),
    ],
)
def test_invalid_tool_sources_are_a_problem(problems_of: Problems, source: Any, fact: str) -> None:
    [problem] = problems_of(source)

    assert fact in problem


def test_marks_are_found_on_their_function() -> None:
    marked = toolbox(Calculator, double)(double)

    assert toolbox_of(marked) == (Calculator, double)
    assert toolbox_of(by_hand) is None
    assert tool_mark_of(double) == ToolMark()
    assert tool_mark_of(by_hand) is None
    assert toolbox_of(toolbox()(by_hand)) == ()


# --- injected parameters


def test_tools_list_the_memory_id_and_beans_that_they_need() -> None:
    def needs(
        me: MemoryId[str], it: Inject[Calculator], other: Inject[Calculator] | None, d: Inject[int] = 1
    ) -> None: ...

    def may(me: MemoryId[str | None], also: MemoryId[int] | None, context: InvocationContext | None) -> None: ...

    first, second = tool_in(needs), tool_in(may)

    assert first.needs_memory_id
    assert not second.needs_memory_id
    assert [(each.name, each.wanted, each.optional) for each in first.injected] == [
        ("it", Calculator, False),
        ("other", Calculator | None, False),
        ("d", int, True),
    ]
    assert second.specification.parameters == {"type": "object", "properties": {}}


# --- local classes


def test_tools_can_use_local_classes_of_their_function() -> None:
    from pydantic import BaseModel

    class Local(BaseModel):
        n: int

    class Tools:
        @tool
        def take(self, value: list[Local], later: Later) -> Local: ...  # type: ignore[empty-body]  # never called

    class Later(BaseModel):
        n: int

    [specification] = tool_specifications_from(Tools)

    assert list(specification.parameters["properties"]) == ["value", "later"]
    assert specification.parameters["properties"]["value"]["items"]["properties"] == {"n": {"type": "integer"}}


def made_tools() -> Any:
    from pydantic import BaseModel

    class Local(BaseModel):
        n: int

    class Tools:
        @tool
        def take(self, value: Local) -> None: ...

    return Tools


def test_tools_can_use_local_classes_after_their_function_returned() -> None:
    [specification] = tool_specifications_from(made_tools())

    assert specification.parameters["properties"]["value"]["properties"] == {"n": {"type": "integer"}}


T = TypeVar("T")


class Crud(Generic[T]):
    def __init__(self) -> None:
        self.kept: list[T] = []

    @tool
    def keep(self, item: T) -> list[T]:
        self.kept.append(item)
        return self.kept


class Point(BaseModel):
    x: int


class Points(Crud[Point]):
    """Points."""


def test_inherited_tools_of_a_generic_base_use_the_type_argument() -> None:
    [specification] = tool_specifications_from(Points)

    assert specification.parameters["properties"]["item"]["properties"] == {"x": {"type": "integer"}}


# --- names and defaults of parameters


def test_aliases_are_the_parameter_names_for_the_model() -> None:
    @tool
    def flights(
        start: Annotated[str, Field(alias="from")],
        to: str = Field(alias="to.city"),
        day: Annotated[int, "of the month", Field(alias="day-of-month")] | None = None,
        seats: int = Field(2, alias="seats_wanted"),
    ) -> str:
        """Finds flights.

        Args:
            start: where it begins
        """
        return f"{start} {to} {day} {seats}"

    [specification] = tool_specifications_from(AiServiceTools(flights))
    assert specification.parameters == {
        "type": "object",
        "properties": {
            "from": {"type": "string", "description": "where it begins"},
            "to.city": {"type": "string"},
            "day-of-month": {"type": "integer", "description": "of the month"},
            "seats_wanted": {"type": "integer"},
        },
        "required": ["from", "to.city"],
    }
    executor = tool_executor_from(flights)
    assert executor(tool_call("flights", {"from": "Rome", "to.city": "Oslo"}), None).text == "Rome Oslo None 2"
    everything = {"from": "Rome", "to.city": "Oslo", "day-of-month": "3", "seats_wanted": 4}
    assert executor(tool_call("flights", everything), None).text == "Rome Oslo 3 4"
    with pytest.raises(ToolArgumentsError) as raised:
        executor(tool_call("flights", {"start": "Rome", "to.city": 1.5}), None)
    assert [path for path, _ in raised.value.problems] == ["from"]


class AiServiceTools:
    """A class with the given function as its only tool."""

    def __new__(cls, function: Any) -> Any:
        return type("Holder", (), {"tool": staticmethod(function)})()


def test_duplicate_and_invalid_aliases_are_a_problem(problems_of: Problems) -> None:
    def clashing(a: Annotated[int, Field(alias="b")], b: int) -> int:
        return a

    def clashing_hidden(a: Annotated[int, Field(alias="context")], context: InvocationContext) -> int:
        return a

    def empty(a: Annotated[int, Field(alias="")]) -> int:
        return a

    def spaced(a: int = Field(alias="two words")) -> int:
        return a

    def several(a: Annotated[int, Field(validation_alias=AliasChoices("x", "y"))]) -> int:
        return a

    found = problems_of(clashing, clashing_hidden, empty, spaced, several)
    assert [each.split(":")[0] for each in found] == ["clashing", "empty", "spaced", "several"]
    assert "the parameters 'a' and 'b' have the same name 'b' for the model" in found[0]
    assert "the alias '' of parameter 'a' is invalid" in found[1]
    assert "'two words'" in found[2]
    assert "AliasChoices" in found[3]


def test_defaults_of_another_type_are_a_problem(problems_of: Problems) -> None:
    def text(limit: int = "many") -> int:  # type: ignore[assignment]  # the mistake
        return limit

    def in_a_field(limit: int = Field("many")) -> int:
        return limit

    def in_annotated(limit: Annotated[int, Field(default="many")]) -> int:
        return limit

    def inside(names: list[int] = ["x"]) -> int:  # type: ignore[list-item]  # noqa: B006 - the mistake
        return len(names)

    def literal(kind: Literal["a", "b"] | None = "c") -> None:  # type: ignore[assignment]  # the mistake
        ...

    found = problems_of(text, in_a_field, in_annotated, inside, literal)

    fix = "use a default of this type, or None: `limit: int | None = None`"
    fact = "the default 'many' of parameter 'limit' is not valid for its type int"
    assert found[0] == f"text: {fact}; {fix}"
    assert found[1] == f"in_a_field: {fact}; {fix}"
    assert found[2] == f"in_annotated: {fact}; {fix}"
    assert "the default ['x'] of parameter 'names'" in found[3]
    assert "for its type Literal['a', 'b'] | None; use a default of this type, or None" in found[4]
    assert len(found) == 5


def test_sentinels_and_other_special_defaults_are_accepted(problems_of: Problems) -> None:
    absent: Any = object()

    def failing() -> int:
        raise AssertionError("a factory is called for a call, and not before")

    def fine(
        a: int = None,  # type: ignore[assignment]  # noqa: RUF013 - as many programs write it
        b: int = absent,
        c: Annotated[int, Field(ge=1)] = 0,
        d: int = Field(default_factory=failing),
        e: Sequence[str] = (),
        f: float = 1,
        g: list[str] = [],  # noqa: B006 - made for each call
        h: Annotated[list[str], BeforeValidator(str.split)] = "a b",  # type: ignore[assignment]  # the validator reads it
    ) -> None: ...

    assert problems_of(fine) == []


def test_classes_without_tools_are_rejected() -> None:
    class Empty:
        def method(self) -> None: ...

    for source in (Empty, Empty()):
        with pytest.raises(IllegalConfigurationError, match="Empty has no tools"):
            tool_specifications_from(source)


def test_values_that_cannot_have_tools_are_named(problems_of: Problems) -> None:
    found = problems_of(None, 5, "add")

    assert found[0] == "here: None is not a tool; list a class, an object or a function"
    assert found[1] == "here: 5 is not a tool; list a class, an object or a function"
    assert "'add' is not a tool" in found[2]


def test_markers_without_a_type_are_a_problem(problems_of: Problems) -> None:
    def conversation(session: MemoryId) -> str:
        return ""

    def bean(store: Inject) -> str:
        return ""

    assert problems_of(conversation, bean) == [
        "conversation: parameter 'session' uses MemoryId without a type; write `session: MemoryId[str]`",
        "bean: parameter 'store' uses Inject without a type; write `store: Inject[TheBean]`",
    ]


def test_an_identity_that_the_model_would_fill_is_a_problem(problems_of: Problems) -> None:
    def book(code: str, user: SecurityIdentity) -> None: ...

    def cancel(code: str, user: SecurityIdentity | None = None) -> None: ...

    def show(code: str, user: Inject[SecurityIdentity]) -> None: ...

    fact = "the model fills parameter 'user', so it could pass any identity"
    fix = "write `user: Inject[SecurityIdentity]` to get the caller"
    assert problems_of(book, cancel, show) == [f"book: {fact}; {fix}", f"cancel: {fact}; {fix}"]


def test_problems_contain_no_advice_for_pydantic_models(problems_of: Problems) -> None:
    class Bean: ...

    def bean(bean: Bean) -> None: ...

    def limited(number: Annotated[int, Field(gt="a")]) -> None: ...  # type: ignore[arg-type]  # the mistake

    first, second = problems_of(bean, limited)

    assert "arbitrary_types_allowed" not in first
    assert "or Inject[…] if it is a bean" in first
    assert "'gt'" in second or "gt" in second
    assert "validator:)" not in second
