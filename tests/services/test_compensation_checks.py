"""Problems of compensations that are reported at startup."""

from collections.abc import Callable
from typing import Any, Protocol

import pytest

from tests.services.bank import Session, assistant
from toolbox import (
    Container,
    IllegalConfigurationError,
    Inject,
    ToolExecution,
    compensate_for,
    register_ai_service,
    tool,
)
from toolbox.testing import ScriptedChatModel

pytestmark = pytest.mark.anyio


def problems_of(cls: Any, **options: Any) -> list[str]:
    try:
        assistant(tools=[cls()], **options)
    except IllegalConfigurationError as error:
        return [f"{each.where}: {each.what}" for each in error.problems]
    return []


class Base:
    @tool
    def credit(self, name: str, euros: int) -> str:
        return ""


def wrong_type() -> type[Base]:
    class Wrong(Base):
        @compensate_for("credit")
        def uncredit(self, name: str, euros: str) -> None: ...

    return Wrong


def fewer_parameters() -> type[Base]:
    class Wrong(Base):
        @compensate_for("credit")
        def uncredit(self, name: str) -> None: ...

    return Wrong


def more_than_the_execution() -> type[Base]:
    class Wrong(Base):
        @compensate_for(Base.credit)
        def uncredit(self, execution: ToolExecution, name: str) -> None: ...

    return Wrong


@pytest.mark.parametrize("make", [wrong_type, fewer_parameters, more_than_the_execution])
def test_a_signature_that_fits_neither_form_is_a_problem(make: Callable[[], type[Base]]) -> None:
    expected = ['Wrong.uncredit: @compensate_for("credit") has other parameters than the tool'] * 4
    assert problems_of(make())[:1] == expected[:1]
    assert problems_of(make(), compensate_on_tool_errors=False, compensate_on_failure=True)[:1] == expected[:1]
    assert problems_of(make(), compensate_on_tool_errors=False) == []
    with pytest.raises(IllegalConfigurationError, match="the same parameter types as the tool"):
        assistant(tools=[make()()])


def test_two_compensations_of_one_tool_are_a_problem() -> None:
    class Wrong(Base):
        @compensate_for("credit")
        def first(self, execution: ToolExecution) -> None: ...

        @compensate_for("credit")
        def second(self, execution: ToolExecution) -> None: ...

    expected = "Wrong.second: the tool 'credit' has two compensations: Wrong.first and Wrong.second"
    assert expected in problems_of(Wrong)


def test_an_unknown_tool_is_a_problem() -> None:
    class Wrong(Base):
        @compensate_for("debit")
        def first(self, execution: ToolExecution) -> None: ...

    assert "Wrong.first: @compensate_for names an unknown tool: 'debit'" in problems_of(Wrong)
    with pytest.raises(TypeError, match="expected a tool or its name, got 3"):
        compensate_for(3)  # type: ignore[arg-type]  # the mistake


def test_missing_beans_of_a_compensation_are_problems() -> None:
    class Needs(Base):
        @compensate_for("credit")
        def uncredit(self, execution: ToolExecution, session: Inject[Session]) -> None: ...

    @register_ai_service(tools=Needs, compensate_on_failure=True)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    found = Container(models={"default": ScriptedChatModel([])}).register(Desk).check()
    assert any("Session" in each.what for each in found)
    assert any("session needs a container" in each for each in problems_of(Needs))


def test_the_options_must_be_booleans() -> None:
    with pytest.raises(IllegalConfigurationError, match="invalid compensate_on_failure='yes'; use True or False"):
        assistant(compensate_on_failure="yes")
