"""`check()` and the next start analyze a program once, and again after a change."""

from typing import Any, Protocol

import pytest

from toolbox import Container, DemoChatModel, IllegalConfigurationError, application_scoped, register_ai_service


class Counted:
    """A return type that counts how often its schema is built."""

    schemas = 0

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        cls.schemas += 1
        return handler(str)


@register_ai_service
class Assistant(Protocol):
    async def chat(self, question: str) -> Counted: ...


@application_scoped
class Added: ...


@application_scoped
class Needy:
    def __init__(self, added: Added) -> None:
        self.added = added


def container() -> Container:
    return Container(models={"default": DemoChatModel()}).register(Assistant)


def test_start_after_check_reuses_the_plans() -> None:
    program = container()
    assert program.check() == []
    planned = Counted.schemas

    with program:
        program.get(Assistant)

    assert Counted.schemas == planned


def test_each_start_creates_new_beans() -> None:
    program = container().register(Added)
    assert program.check() == []
    with program:
        first = program.get(Added)
    with program:
        assert program.get(Added) is not first


def test_beans_registered_after_check_are_started() -> None:
    program = container().register(Needy)
    assert [each.where for each in program.check()] == ["Needy.added"]

    with program.register(Added):
        assert program.get(Needy).added is program.get(Added)


def test_models_given_after_a_check_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    program = container()
    assert program.check() == []
    del program.models["default"]

    with pytest.raises(IllegalConfigurationError, match="Assistant"), program:
        pass


def test_settings_that_changed_after_a_check_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    program = container()
    assert program.check() == []
    monkeypatch.setenv("TOOLBOX_POOL_SIZE", "0")

    with pytest.raises(IllegalConfigurationError, match="TOOLBOX_POOL_SIZE"), program:
        pass
