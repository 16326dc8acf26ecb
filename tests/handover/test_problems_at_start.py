"""Problems with hand-overs are reported at start."""

from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from toolbox import Container, MemoryId, Result, register_ai_service, system_message, tool, toolbox
from toolbox.handover import hands_over_to
from toolbox.testing import ScriptedChatModel


@register_ai_service
class Billing(Protocol):
    """Invoices."""

    async def chat(self, room: MemoryId[str], text: str) -> str: ...
    async def check(self, room: MemoryId[str], text: str) -> str: ...
    async def result(self, room: MemoryId[str], text: str) -> Result[str]: ...
    def blocking(self, room: MemoryId[str], text: str) -> str: ...
    def stream(self, room: MemoryId[str], text: str) -> AsyncIterator[str]: ...
    async def forgetful(self, text: str) -> str: ...


def problems_of(*services: Any) -> str:
    container = Container(models={"default": ScriptedChatModel([])}).register(Billing, *services)
    return "\n".join(map(str, container.check()))


def test_a_target_of_another_return_type_is_a_problem() -> None:
    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Billing.result)
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    assert "Desk.chat: hands over to Billing.result, which returns another type" in problems_of(Desk)


@pytest.mark.parametrize("target", [Billing.blocking, Billing.stream])
def test_a_target_that_is_not_async_is_a_problem(target: Any) -> None:
    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(target)
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    assert "which returns another type" in problems_of(Desk)


def test_a_target_without_a_memory_id_is_a_problem() -> None:
    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Billing.forgetful)
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    assert "has a memory id, but hands over to Billing.forgetful, which has none" in problems_of(Desk)


def test_a_parameter_that_the_entry_lacks_is_a_problem_also_over_several_hand_overs() -> None:
    @register_ai_service
    class Expert(Protocol):
        """Knows everything."""

        @system_message("Answer in {language}, in the style {style}.")
        async def chat(self, room: MemoryId[str], text: str, language: str, style: str = "short") -> str: ...

    @register_ai_service
    class Middle(Protocol):
        """Knows a bit."""

        @system_message("Answer in {language}.")
        @hands_over_to(Expert.chat)
        async def chat(self, room: MemoryId[str], text: str, language: str = "English") -> str: ...

    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Middle.chat)
        async def chat(self, chat: MemoryId[str], said: str) -> str: ...

    found = problems_of(Desk, Middle, Expert)
    assert found.count("Desk.chat: hands over to Expert.chat, whose parameter 'language' it does not have") == 1
    assert found.count("\n") == 0


def test_names_that_nothing_or_several_have_are_problems() -> None:
    def another() -> Any:
        @register_ai_service(name="other")
        class Billing(Protocol):
            async def chat(self, room: MemoryId[str], text: str) -> str: ...

        return Billing

    @register_ai_service
    class Desk(Protocol):
        @hands_over_to("Biling.chat", description="invoices")
        @hands_over_to("Billing.chat", description="invoices")
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    assert "@hands_over_to(Biling.chat): no AI service that is registered has this method" in problems_of(Desk)
    assert "names several methods" in problems_of(Desk, another())


def test_a_method_that_hands_over_to_itself_is_a_problem() -> None:
    @register_ai_service
    class Desk(Protocol):
        @hands_over_to("Desk.chat", description="more of the same")
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    assert "@hands_over_to names the method itself" in problems_of(Desk)


def test_a_target_that_nothing_describes_is_a_problem() -> None:
    @register_ai_service
    class Silent(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Silent.chat)
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    assert "the model does not know what Silent.chat is for" in problems_of(Desk, Silent)


@tool
def transfer_to_billing() -> str:
    """Transfer money."""
    return ""


def test_a_tool_with_the_name_of_a_hand_over_is_a_problem() -> None:
    @register_ai_service
    class Desk(Protocol):
        @toolbox(transfer_to_billing)
        @hands_over_to(Billing.chat)
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    assert "2 tools have the same name 'transfer_to_billing'" in problems_of(Desk)


def test_two_methods_of_one_class_have_tools_of_their_own() -> None:
    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        @hands_over_to(Billing.check)
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel([])}).register(Billing, Desk)
    assert not container.check()
    assert {each.tool for each in container.reach() if each.entry == "Desk.chat"} == {
        "transfer_to_billing_chat",
        "transfer_to_billing_check",
    }


def test_what_cannot_be_a_target_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="expected a method of a service"):
        hands_over_to(Billing)
    with pytest.raises(TypeError, match="expected a method of a service"):
        hands_over_to("chat")
    with pytest.raises(TypeError, match="is a class"):
        hands_over_to("Desk.chat")(Billing)
    with pytest.raises(TypeError, match="write one decorator for each method"):
        hands_over_to(Billing.chat, Billing.chat)  # type: ignore[arg-type]  # a mistake


def test_a_hand_over_of_a_method_with_a_body_has_no_effect_and_is_a_problem() -> None:
    @register_ai_service
    class Desk(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

        @hands_over_to(Billing.chat)
        async def helper(self) -> str:
            return "no model answers"

    assert "@hands_over_to" in problems_of(Desk)
