"""Problems of guardrails that are reported at startup."""

from typing import Any, Protocol

import pytest

from tests.services.guarded import Item, NoDigits, Polite, guarded, price, started
from toolbox import IllegalConfigurationError, create_ai_service, register_ai_service, tool
from toolbox.guardrails import (
    GuardrailResult,
    InputGuardrail,
    InputGuardrailRequest,
    OutputGuardrail,
    ToolInputGuardrail,
    ToolOutputGuardrail,
    input_guardrails,
    output_guardrails,
    tool_input_guardrails,
    tool_output_guardrails,
)
from toolbox.testing import ScriptedChatModel

pytestmark = pytest.mark.anyio


class Needy(InputGuardrail):
    def __init__(self, missing: Item) -> None: ...

    def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        return self.success()


def problems_of(*classes: Any) -> list[str]:
    return [str(each) for each in started(ScriptedChatModel([]), *classes).check()]


def test_a_guardrail_of_a_wrong_kind_is_a_problem_at_start() -> None:
    [problem] = problems_of(guarded(Polite))
    assert problem == "Guarded, @input_guardrails: Polite is not an InputGuardrail; inherit from InputGuardrail"


@pytest.mark.parametrize(
    ("decorator", "kind"),
    [
        (input_guardrails, InputGuardrail),
        (output_guardrails, OutputGuardrail),
        (tool_input_guardrails, ToolInputGuardrail),
        (tool_output_guardrails, ToolOutputGuardrail),
    ],
)
def test_an_abstract_guardrail_without_a_bean_is_a_problem_at_start(decorator: Any, kind: Any) -> None:
    @register_ai_service(tools=price)
    @decorator(kind)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    expected = f"Desk, @{decorator.__name__}: no bean provides {kind.__name__}, which is abstract"
    assert problems_of(Desk) == [f"{expected}; name a class that implements validate"]
    with pytest.raises(IllegalConfigurationError, match=f"{kind.__name__} is abstract; name a subclass or an instance"):
        create_ai_service(Desk, chat_model=ScriptedChatModel([]))


def test_a_guardrail_with_other_parameters_is_a_problem_at_start() -> None:
    class Short(InputGuardrail):
        def validate(self) -> GuardrailResult:  # type: ignore[override]  # the mistake
            raise AssertionError

    class Long(Short):
        async def validate(self, *requests: Any, strict: bool = True) -> GuardrailResult:  # type: ignore[override]
            raise AssertionError

    assert problems_of(guarded(Long)) == []
    expected = "Short.validate: does not take one argument, the InputGuardrailRequest"
    assert problems_of(guarded(Short)) == [f"{expected}; declare it `def validate(self, request)`"]
    with pytest.raises(IllegalConfigurationError, match=r"Short\.validate: does not take one argument"):
        create_ai_service(guarded(Short), chat_model=ScriptedChatModel([]))


def test_a_guardrail_with_a_missing_dependency_is_a_problem_at_start() -> None:
    [problem] = problems_of(guarded(Needy))
    assert "Needy" in problem
    assert "no bean provides Item" in problem


def test_an_abstract_guardrail_needs_a_bound_implementation() -> None:
    class Policy(InputGuardrail): ...

    class Open(Policy):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            return self.success()

    service = guarded(Policy)
    [problem] = problems_of(service)
    assert "no bean provides Policy" in problem
    container = started(ScriptedChatModel([]), service).bind(Policy, Open)
    assert container.check() == []


def test_a_service_guardrail_on_a_tool_is_a_problem_at_start() -> None:
    @tool
    @input_guardrails(NoDigits)
    def find(text: str) -> str:
        return text

    @register_ai_service(tools=[find])
    class Finder(Protocol):
        async def ask(self, text: str) -> str: ...

    [problem] = problems_of(Finder)
    assert "@input_guardrails: has no effect on a tool; use @tool_input_guardrails" in problem


def test_a_service_whose_guardrail_calls_it_is_a_problem_at_start() -> None:
    @register_ai_service
    @input_guardrails(NoDigits)
    class Loop(Protocol):
        async def ask(self, text: str) -> str: ...

    class Asking(InputGuardrail):
        def __init__(self, loop: Loop) -> None: ...

        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            return self.success()

    service = input_guardrails(Asking)(Loop)
    [problem] = [str(each) for each in started(ScriptedChatModel([]), service, Asking).check()]
    assert "Asking" in problem
    assert "Loop" in problem


def test_without_a_container_a_guardrail_that_needs_arguments_is_a_problem() -> None:
    with pytest.raises(IllegalConfigurationError, match="Needy needs arguments, so it needs a container"):
        create_ai_service(guarded(Needy), chat_model=ScriptedChatModel([]))


def test_decorators_without_names_or_parentheses_are_rejected() -> None:
    with pytest.raises(TypeError, match="needs at least one class or instance"):
        input_guardrails()
    with pytest.raises(TypeError, match="with parentheses"):

        class Desk(Protocol):
            @input_guardrails  # type: ignore[arg-type]  # the mistake
            async def ask(self, text: str) -> str: ...

    with pytest.raises(TypeError, match="@output_guardrails: expected a function, a method or a class, got 3"):
        output_guardrails(Polite)(3)


def test_tool_guardrails_of_a_method_without_tools_are_a_problem() -> None:
    from toolbox.guardrails import MaxLength

    @register_ai_service
    class NoTools(Protocol):
        @tool_input_guardrails(MaxLength(3))
        async def ask(self, text: str) -> str: ...

    [problem] = problems_of(NoTools)
    assert "the method offers no tools" in problem
