"""Hand-over: a method hands a call over to another one, which answers in its place."""

from typing import Any, Protocol, TypeGuard

import pytest

from toolbox import (
    AiMessage,
    ChatMemoryStore,
    Container,
    InMemoryChatMemoryStore,
    MemoryId,
    Message,
    Result,
    ToolExecutionResultMessage,
    register_ai_service,
    system_message,
    tool,
)
from toolbox.handover import hands_over_to
from toolbox.service_names import stored_name
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Invoices:
    @tool
    def refund(self, order: int) -> str:
        """Refund an order."""
        return f"refunded {order}"


@register_ai_service(tools=Invoices)
class Billing(Protocol):
    @system_message("You handle invoices and refunds. Be exact.")
    @hands_over_to("Desk.chat", description="anything else")
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service
class Desk(Protocol):
    @system_message("You greet customers.")
    @hands_over_to(Billing.chat, description="invoices and refunds")
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


def program(*replies: Any) -> tuple[Container, ScriptedChatModel]:
    model = ScriptedChatModel([*replies])
    return Container(models={"default": model}).register(Desk, Billing), model


def is_result(message: Message) -> TypeGuard[ToolExecutionResultMessage]:
    return isinstance(message, ToolExecutionResultMessage)


TO_BILLING, TO_DESK = tool_call("transfer_to_billing", {}), tool_call("transfer_to_desk", {})


async def test_the_target_answers_within_the_call_and_the_next_ones() -> None:
    container, model = program(TO_BILLING, "Which order?", tool_call("refund", {"order": 7}), "Done.")
    async with container:
        desk = container.get(Desk)
        first = await desk.chat("ada", "I want my money back")
        second = await desk.chat("ada", "It was order 7")
        assert (first.content, first.answered_by) == ("Which order?", "Billing.chat")
        assert (second.content, second.answered_by) == ("Done.", "Billing.chat")
        room = container.conversations.of(Desk, "ada")
        assert (await room.info()).in_charge == "Billing.chat"
        assert [entry.answered_by for entry in await room.history()][-1] == "Billing.chat"

    asked = [request.messages[0].text for request in model.requests]
    assert asked == ["You greet customers.", *["You handle invoices and refunds. Be exact."] * 3]
    offered = [[each.name for each in request.tool_specifications] for request in model.requests]
    assert offered == [["transfer_to_billing"], *[["refund", "transfer_to_desk"]] * 3]
    assert model.requests[1].messages[-1].text == "Handed over to Billing.chat."
    assert [type(each).__name__ for each in first.messages] == [
        "UserMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
        "AiMessage",
    ]
    assert [each.request.name for each in first.tool_executions] == ["transfer_to_billing"]


async def test_all_other_calls_of_the_reply_run_first_and_the_first_hand_over_counts() -> None:
    both = AiMessage(tool_execution_requests=[TO_DESK, tool_call("refund", {"order": 1}), TO_DESK])
    container, model = program(TO_BILLING, both, "Hello again.")
    async with container:
        result = await container.get(Desk).chat("ada", "Refund order 1, and then …")
    assert result.answered_by == "Desk.chat"
    results = [(each.text, each.is_error) for each in model.requests[2].messages[-3:] if is_result(each)]
    assert results == [
        ("Handed over to Desk.chat.", False),
        ("refunded 1", False),
        ("Not done: Billing.chat hands over only once.", True),
    ]


async def test_what_others_have_is_an_error_result_that_names_them() -> None:
    container, model = program(TO_BILLING, TO_DESK, tool_call("refund", {"order": 1}), TO_DESK, "I ask my colleague.")
    async with container:
        result = await container.get(Desk).chat("ada", "Hello")
    assert result.content == "I ask my colleague."
    assert [(each.result, each.is_error) for each in result.tool_executions][2:] == [
        ("You do not have the tool 'refund' now; Billing.chat has it.", True),
        ("You do not have the tool 'transfer_to_desk' now; Billing.chat has it.", True),
    ]
    assert len(model.requests) == 5


async def test_a_call_is_handed_over_at_most_four_times() -> None:
    container, _ = program(TO_BILLING, TO_DESK, TO_BILLING, TO_DESK, TO_BILLING, "Here I am.")
    async with container:
        result = await container.get(Desk).chat("ada", "Hello")
    assert (result.content, result.answered_by) == ("Here I am.", "Desk.chat")
    assert [each.is_error for each in result.tool_executions] == [False, False, False, False, True]


async def test_reach_lists_the_ways_through_hand_overs() -> None:
    container, _ = program()
    found = {(each.entry, each.path, each.tool) for each in container.reach()}
    assert ("Desk.chat", ("Billing.chat",), "refund") in found


async def test_rewind_and_fork_begin_with_who_was_in_charge_then() -> None:
    container, _ = program("Hello.", TO_BILLING, "Which order?", TO_DESK, "Bye.")
    async with container:
        desk, conversations = container.get(Desk), container.conversations
        room = conversations.of(Desk, "ada")
        for text in ("Hi", "Money back", "Thanks"):
            await desk.chat("ada", text)
        asked = [each for each in await room.history() if type(each.message).__name__ == "UserMessage"]
        fork = await room.fork("copy", upto=asked[1])
        assert (await fork.info()).in_charge == "Billing.chat"
        assert (await room.info()).in_charge == "Desk.chat"
        exported = await room.export()
        assert [each["in_charge"] for each in exported["turns"]] == ["Desk.chat", "Billing.chat", "Desk.chat"]
        assert [each["answered_by"] for each in exported["turns"]] == ["Desk.chat", "Billing.chat", "Desk.chat"]
        await room.rewind(asked[2])
        assert (await room.info()).in_charge == "Billing.chat"
        await room.put_in_charge(Desk.chat)
        assert (await room.info()).in_charge == "Desk.chat"
        again = await conversations.restore(Desk, "again", await room.export())
        assert (await again.info()).in_charge == "Desk.chat"
        with pytest.raises(ValueError, match="cannot be in charge"):
            await room.put_in_charge(program)


async def test_a_method_that_is_gone_leaves_the_entry_in_charge(caplog: pytest.LogCaptureFixture) -> None:
    container, _ = program("Hello.", "Hello again.", "And again.")
    async with container:
        desk, room = container.get(Desk), container.conversations.of(Desk, "ada")
        await desk.chat("ada", "Hi")
        exported = await room.export()
        exported["turns"][-1]["in_charge"] = "Gone.chat"
        await container.conversations.restore(Desk, "bob", exported)
        first = await desk.chat("bob", "Hi")
        assert first.answered_by == "Desk.chat"
        assert len([each for each in caplog.records if "Gone.chat" in each.getMessage()]) == 1
        assert (await container.conversations.of(Desk, "bob").info()).in_charge == "Desk.chat"
        await desk.chat("bob", "Hi")
        assert len([each for each in caplog.records if "Gone.chat" in each.getMessage()]) == 1


async def test_an_entry_that_hands_over_no_more_is_in_charge_again(caplog: pytest.LogCaptureFixture) -> None:
    @register_ai_service(name=stored_name(Desk))
    class Alone(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    store = InMemoryChatMemoryStore()

    def started(*services: Any) -> Container:
        model = ScriptedChatModel([lambda request: TO_BILLING if request.tool_specifications else "Hello."] * 9)
        return Container(models={"default": model}).register(*services).register_instance(store, ChatMemoryStore)

    async with started(Desk, Billing) as container:
        await (await container.conversations.create(Desk, "ada")).put_in_charge(Billing.chat)
    async with started(Alone) as container:
        for _ in range(2):
            assert (await container.get(Alone).chat("ada", "Hi")).answered_by == "Alone.chat"
        assert (await container.conversations.of(Alone, "ada").info()).in_charge == "Alone.chat"
    assert len([each for each in caplog.records if "Billing.chat" in each.getMessage()]) == 1


async def test_a_target_that_is_named_by_its_method_need_not_be_registered() -> None:
    model = ScriptedChatModel([TO_BILLING, "Which order?"])
    async with Container(models={"default": model}).register(Desk) as container:
        assert (await container.get(Desk).chat("ada", "Hi")).answered_by == "Billing.chat"
