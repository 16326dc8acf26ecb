"""What a type checker knows of the testing kit. Checked by mypy and pyright, never run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, assert_type

from toolbox import ChatRequest, Message, OpenAiChatModel, Result, ToolExecution, invocation_record, tool
from toolbox.pytest_plugin import OverrideBean
from toolbox.recordings import Recording
from toolbox.testing import (
    CalledTool,
    EventRecord,
    ExpectedCall,
    ScriptedChatModel,
    assert_no_tool_calls,
    assert_tool_calls,
    called_tools,
    offered_tools,
    system_text,
    text_of,
    tool_call,
    user_text,
)


class Prices(Protocol):
    def of(self, dish: str) -> float: ...


class Waiter(Protocol):
    async def serve(self, wish: str) -> str: ...


class Cook(Protocol):
    @tool
    async def cook(self, dish: str) -> Result[str]: ...


class Free:
    def of(self, dish: str) -> float:
        return 0.0


def calls_are_found_in_all_that_keeps_them(
    result: Result[str], messages: Sequence[Message], executions: list[ToolExecution], request: ChatRequest
) -> None:
    model = ScriptedChatModel()
    model.will_reply("one", tool_call("find"))
    assert_tool_calls(result, "find", tool_call("find", {"a": 1}), ExpectedCall("find", {"a": 1}), in_order=False)
    assert_tool_calls(messages)
    assert_tool_calls(executions)
    assert_tool_calls(request)
    assert_no_tool_calls(model, "find")
    assert_tool_calls(EventRecord())
    with invocation_record() as record:
        assert_tool_calls(record)
    assert_type(called_tools(result), tuple[CalledTool, ...])
    assert_type(offered_tools(model), list[str])
    assert_type(system_text(request), str | None)
    assert_type(user_text(request), str | None)
    assert_type(text_of(request), str)
    assert_type(text_of(messages), str)
    assert_type(text_of(messages[-1]), str)


def a_model_may_have_a_script_for_each_service() -> None:
    model = ScriptedChatModel({Waiter: ["one", tool_call("find")], Cook: [lambda request: text_of(request)]})
    model.will_reply("two", service=Waiter)
    ScriptedChatModel(["one", tool_call("find"), lambda request: text_of(request)])
    ScriptedChatModel("one")


def a_fake_fits_the_protocol_it_stands_for(toolbox_override: OverrideBean) -> None:
    fake = Free()
    assert_type(toolbox_override(Prices, fake), Prices)


def a_recording_is_a_transport(file: Path) -> None:
    OpenAiChatModel("m", transport=Recording(file))
