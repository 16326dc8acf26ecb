"""Assertions on tool calls and their failure messages."""

from typing import Any, Protocol
from unittest.mock import ANY

import pytest

from toolbox import (
    AiMessage,
    ChatRequest,
    Container,
    Result,
    SystemMessage,
    TokenStream,
    ToolExecutionResultMessage,
    ToolRetry,
    UserMessage,
    create_ai_service,
    invocation_record,
    register_ai_service,
    system_message,
    tool,
)
from toolbox.testing import (
    EventRecord,
    ExpectedCall,
    ScriptedChatModel,
    assert_no_tool_calls,
    assert_tool_calls,
    called_tools,
    offered_tools,
    system_text,
    tool_call,
    user_text,
)

pytestmark = pytest.mark.anyio


@tool
def find(wish: str, limit: int = 5) -> list[str]:
    return [wish] * limit


@tool
def cancel(number: int) -> str:
    if number < 0:
        raise ToolRetry("there is no such booking")
    return "cancelled"


class Desk(Protocol):
    @system_message("Be brief.")
    async def ask(self, question: str) -> Result[str]: ...

    def follow(self, question: str) -> TokenStream: ...


def script() -> ScriptedChatModel:
    return ScriptedChatModel(
        [
            tool_call("find", {"wish": "room", "limit": 1}, id="c"),
            AiMessage(None, [tool_call("cancel", {"number": 7}, id="c"), tool_call("cancel", {"number": -1}, id="d")]),
            "Done.",
        ]
    )


CALLS = (
    ExpectedCall("find", {"wish": "room"}, result='["room"]', is_error=False),
    tool_call("cancel", {"number": 7}),
    ExpectedCall("cancel", result="there is no such booking", is_error=True),
)


def failure(calls: Any, *expected: Any, **how: bool) -> str:
    with pytest.raises(AssertionError) as raised:
        assert_tool_calls(calls, *expected, **how)
    return str(raised.value)


async def test_tool_calls_are_found_in_every_supported_source() -> None:
    model = script()
    service = create_ai_service(Desk, chat_model=model, tools=[find, cancel])
    with invocation_record() as record:
        result = await service.ask("?")
    events = [event async for event in create_ai_service(Desk, chat_model=script(), tools=[find, cancel]).follow("?")]

    for source in (result, record, result.messages, result.tool_executions, events, model, model.requests[-1]):
        assert_tool_calls(source, *CALLS)
    assert_tool_calls([each.request for each in result.tool_executions], "find", "cancel", "cancel")
    assert_tool_calls(AiMessage(None, [tool_call("find")]), "find")


async def test_recorded_calls_collects_the_calls_of_a_container() -> None:
    record = EventRecord()
    registered = register_ai_service(tools=(find, cancel))(Desk)
    container = Container(models={"default": script()}).register(registered).register_instance(record)
    async with container:
        await container.get(Desk).ask("?")

    assert_tool_calls(record, *CALLS)
    assert [user_text(each) for each in record.requests] == ["?", "?", "?"]


async def test_helpers_return_the_texts_and_tools_of_a_request() -> None:
    model = script()
    with pytest.raises(AssertionError, match="has received no request"):
        offered_tools(model)
    await create_ai_service(Desk, chat_model=model, tools=[find, cancel]).ask("What is free?")

    assert offered_tools(model) == offered_tools(model.requests[0]) == ["find", "cancel"]
    assert system_text(model) == "Be brief."
    assert user_text(model) == "What is free?"
    assert system_text(ChatRequest([UserMessage("?")])) is None
    assert user_text(ChatRequest([SystemMessage("!")])) is None


def test_order_and_other_calls_can_be_ignored() -> None:
    calls = [tool_call("a"), tool_call("b"), tool_call("a", {"x": 1})]

    assert_tool_calls(calls, "a", "b", "a")
    assert_tool_calls(calls, "b", "a", "a", in_order=False)
    assert_tool_calls(calls, "a", ExpectedCall("a", {"x": 1}), others=True)
    assert_tool_calls(calls, "b", others=True)
    assert_tool_calls(calls, others=True)
    # A call that two fit goes to the one that has no other.
    assert_tool_calls(calls, "a", ExpectedCall("a", {}, exactly=True), "b", in_order=False)
    assert_tool_calls([], in_order=False)
    for expected, how in [(("a", "b"), {}), (("b", "a"), {}), (("b", "a", "b"), {"in_order": False}), ((), {})]:
        assert failure(calls, *expected, **how)
    assert failure(calls, "b", "a", "b", others=True)


def test_assert_no_tool_calls_rejects_any_or_the_named_tools() -> None:
    calls = [tool_call("find", {"wish": "room"})]

    assert_no_tool_calls([])
    assert_no_tool_calls(calls, "cancel", "refund")
    with pytest.raises(AssertionError, match=r"expected no call of find or cancel, but found:.*\n  find\(.*room"):
        assert_no_tool_calls(calls, "find", "cancel")
    with pytest.raises(AssertionError, match="expected no call of any tool"):
        assert_no_tool_calls(calls)


def test_failures_show_expected_and_actual_calls() -> None:
    calls = [
        tool_call("find", {"wish": "room"}),
        tool_call("cancel", {"number": 8, "why": "ill"}),
        ToolExecutionResultMessage("x", "y", "z"),
    ]

    assert failure(calls, "find", tool_call("cancel", {"number": 7}), "refund").splitlines() == [
        "unexpected tool calls (compared in this order):",
        "    expected               actual",
        '    find(…)                find({"wish":"room"})',
        '  ✗ cancel({"number": 7})  cancel({"number":8,"why":"ill"})',
        "      argument 'number' is 8, not 7",
        "      argument 'why' is unexpected: \"ill\"",
        "  ✗ refund(…)              -",
    ]


def test_a_call_in_another_place_is_the_only_one_that_is_marked() -> None:
    calls = [tool_call(name) for name in ("b", "c", "d", "a")]

    assert failure(calls, "a", "b", "c", "d").count("✗") == 2
    assert failure(calls, "b", "c", "x", "d", others=True).count("✗") == 1


def test_only_the_expected_arguments_are_compared() -> None:
    calls = [tool_call("find", {"wish": "room", "at": [1.0000001, 2], "n": None})]

    assert_tool_calls(calls, ExpectedCall("find", {"wish": ANY, "at": pytest.approx([1, 2]), "n": None}))
    assert "argument 'm' is missing" in failure(calls, ExpectedCall("find", {"m": None}))
    assert "argument 'n' is null, not ANY" not in failure(calls, ExpectedCall("find", {"n": 1}))


def test_results_and_errors_are_compared() -> None:
    calls = [
        AiMessage(None, [tool_call("a", id="1")]),
        ToolExecutionResultMessage("1", "a", "fine"),
        AiMessage(None, [tool_call("a", id="1"), tool_call("b", id="2")]),
        ToolExecutionResultMessage("1", "a", "broken", is_error=True),
    ]

    assert [(each.result, each.is_error) for each in called_tools(calls)] == [
        ("fine", False),
        ("broken", True),
        (None, False),
    ]
    fine, broken, open_end = calls[:2], calls[2:], calls[2:3]
    assert "the call succeeded; expected it to fail" in failure(fine, ExpectedCall("a", is_error=True))
    assert "the result is 'fine', not 'good'" in failure(fine, ExpectedCall("a", result="good"))
    assert "the call failed; expected it to succeed" in failure(broken, ExpectedCall("a", is_error=False), "b")
    assert "the call has no result; expected it to succeed" in failure(open_end, "a", ExpectedCall("b", is_error=False))


def test_arguments_are_repaired_before_they_are_compared() -> None:
    calls = [tool_call("find", '{"wish": "room",}'), tool_call("find", "{"), tool_call("find", "")]

    assert [each.arguments for each in called_tools(calls)] == [{"wish": "room"}, {}, {}]
    assert "find({)" in failure(calls)


@pytest.mark.parametrize("source", ["text", 7, {"a": 1}, None])
def test_values_without_tool_calls_are_rejected(source: Any) -> None:
    with pytest.raises(TypeError, match="cannot read tool calls from"):
        assert_tool_calls(source)


async def test_replies_can_be_added_to_a_scripted_model() -> None:
    model = ScriptedChatModel(["one"])
    model.will_reply("two", tool_call("find"))
    ask = ChatRequest([UserMessage("?")])

    replies = [(await model.chat(ask)).ai_message for _ in range(3)]
    assert [each.text for each in replies] == ["one", "two", None]
    with pytest.raises(AssertionError):
        await model.chat(ask)
    model.will_reply("three")
    assert (await model.chat(ask)).ai_message.text == "three"
