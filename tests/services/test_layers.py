"""Layers around an invocation, a model request and a tool: each a few lines, none of them in the library."""

import contextvars
import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests import programs
from toolbox import (
    AiMessage,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    FrameworkError,
    PartialResponse,
    TokenStream,
    TokenUsage,
    ToolExecuted,
    create_ai_service,
    tool,
)
from toolbox.capabilities import Capabilities
from toolbox.hosts.standalone import StandaloneHost
from toolbox.services.declaration import ServiceOptions
from toolbox.services.invocation import Invocation, Perform
from toolbox.services.loop import CallModel, RunTool
from toolbox.services.methods import implementation_of
from toolbox.services.planning import plan_service
from toolbox.services.plans import Layers
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox.tools.results import Encoded, EncodedInFull
from toolbox.tools.tool_calls import Tool, ToolCall, ToolStep

pytestmark = pytest.mark.anyio


class Assistant(Protocol):
    async def ask(self, question: str) -> str: ...
    def events(self, question: str) -> TokenStream: ...


@tool
async def add(a: int, b: int) -> int:
    return a + b


def assistant(layers: Layers, *replies: Any, tools: Any = (add,), **options: Any) -> Any:
    plans, problems = plan_service(Assistant, ServiceOptions(tools=tools, **options), Capabilities())
    assert not problems
    layered = {name: replace(plan, layers=layers) for name, plan in plans.items()}
    return implementation_of(Assistant, layered, StandaloneHost(ScriptedChatModel(replies)))()


def asks(*calls: Any) -> ChatResponse:
    return ChatResponse(AiMessage(None, calls), TokenUsage(10, 1))


def says(text: str) -> ChatResponse:
    return ChatResponse(AiMessage(text), TokenUsage(10, 5))


ADD = tool_call("add", {"a": 1, "b": 2})


# --- a layer that refuses a tool


def refusing(step: ToolStep, tool: Tool) -> ToolStep:
    if tool.name != "add":
        return step

    async def refuse_negative(call: ToolCall) -> Encoded:
        if call.arguments is not None and call.arguments["a"] < 0:
            return EncodedInFull("negative numbers are not allowed", is_error=True)
        return await step(call)

    return refuse_negative


async def test_layers_can_refuse_a_tool_by_its_decoded_arguments() -> None:
    made = assistant(
        Layers(tools=(refusing,)), asks(tool_call("add", {"a": "-1", "b": 2}), ADD), says("done"), says("done")
    )
    executed = [event.execution async for event in made.events("q") if isinstance(event, ToolExecuted)]

    assert [(each.result, each.is_error) for each in executed] == [
        ("negative numbers are not allowed", True),
        ("3", False),
    ]


async def test_layers_can_run_a_tool_again_with_other_arguments() -> None:
    def doubling(step: ToolStep, tool: Tool) -> ToolStep:
        async def run(call: ToolCall) -> Encoded:
            first = await step(call)
            assert call.arguments is not None
            return await step(call.with_arguments({**call.arguments, "a": first.value}))

        return run

    made = assistant(Layers(tools=(doubling,)), asks(ADD), says("done"))

    [executed] = [event.execution async for event in made.events("q") if isinstance(event, ToolExecuted)]
    assert executed.result == "5"


# --- a layer that counts tokens


class TooExpensive(FrameworkError):
    pass


def limited(tokens: int) -> Callable[[Perform], Perform]:
    def layer(perform: Perform) -> Perform:
        async def counted(effect: CallModel | RunTool, invocation: Invocation) -> Any:
            usage = invocation.state.token_usage
            if isinstance(effect, CallModel) and usage is not None and usage.total_tokens > tokens:
                raise TooExpensive(f"{usage.total_tokens} tokens")
            return await perform(effect, invocation)

        return counted

    return layer


@pytest.mark.parametrize("streamed", [False, True])
async def test_layers_can_count_tokens_and_end_the_invocation(streamed: bool) -> None:
    made = assistant(Layers(effects=(limited(20),)), asks(ADD), asks(ADD), says("never"))
    with pytest.raises(TooExpensive, match="22"):
        if streamed:
            _ = [event async for event in made.events("q")]
        else:
            await made.ask("q")


async def test_model_layers_can_call_the_model_again_and_streams_stay_incremental() -> None:
    def twice(perform: Perform) -> Perform:
        async def ask(effect: CallModel | RunTool, invocation: Invocation) -> Any:
            await perform(effect, invocation)
            return await perform(effect, invocation)

        return ask

    made = assistant(Layers(effects=(twice,)), says("one two"), says("three four"))
    events = [event async for event in made.events("q")]

    assert "".join(each.text for each in events if isinstance(each, PartialResponse)) == "one twothree four"
    assert isinstance(events[-1], CompleteResponse)
    assert events[-1].response.ai_message.text == "three four"


async def test_invocation_layers_see_the_outcome() -> None:
    seen: list[object] = []

    @asynccontextmanager
    async def watching(invocation: Invocation) -> AsyncIterator[None]:
        seen.append(invocation.user_message.text)
        try:
            yield
        except Exception as error:
            seen.append(type(error))
            raise
        seen.append(type(invocation.end).__name__)

    layers = Layers(around_turn=(watching,))
    assert await assistant(layers, says("hello")).ask("q") == "hello"
    with pytest.raises(RuntimeError):
        await assistant(layers, RuntimeError("down")).ask("r")
    assert [type(each) async for each in assistant(layers, says("hello")).events("s")][-1] is CompleteResponse

    assert seen == ["q", "Finish", "r", RuntimeError, "s", "Finish"]


# --- a layer that stores the state after every effect; another process goes on from it

PROGRAM = """
import asyncio, os, sys
sys.path.insert(0, {folder!r})
from test_layers import Assistant, Layers, assistant, asks, says, tool, tool_call
from toolbox.services.driver import run
from toolbox.services.invocation import Invocation
from toolbox.services.planning import plan_service
from toolbox.capabilities import Capabilities
from toolbox.services.state import State
from toolbox.hosts.standalone import StandaloneHost
from toolbox.services.declaration import ServiceOptions
from toolbox.testing import ScriptedChatModel
from dataclasses import replace
from pathlib import Path

store, log, dies = Path({store!r}), Path({log!r}), {dies!r}

def storing(perform):
    async def stored(effect, invocation):
        store.write_text(invocation.state.to_json())
        return await perform(effect, invocation)
    return stored

@tool
async def note(n: int) -> int:
    if n == dies:
        os._exit(7)
    with log.open("a") as file:
        file.write(str(n))
    return n

async def main():
    plans, _ = plan_service(Assistant, ServiceOptions(tools=[note]), Capabilities())
    plan = replace(plans["ask"], layers=Layers(effects=(storing,)))
    replies = [says("done")]
    if not store.exists():
        replies.insert(0, asks(*(tool_call("note", {{"n": n}}) for n in (1, 2, 3))))
    invocation = Invocation(plan, StandaloneHost(ScriptedChatModel(replies)), {{"question": "q"}})
    if store.exists():
        invocation.stored_state = State.from_json(store.read_text())
    print(await run(invocation), len(invocation.state.executions), invocation.state.token_usage.total_tokens)

asyncio.run(main())
"""


def test_stored_states_resume_in_a_new_process_without_repeating_tools(tmp_path: Path) -> None:
    store, log = tmp_path / "state.json", tmp_path / "log"

    def process(dies: int) -> "subprocess.CompletedProcess[str]":
        file = tmp_path / "program.py"
        file.write_text(PROGRAM.format(folder=str(Path(__file__).parent), store=str(store), log=str(log), dies=dies))
        return programs.run([str(file)], tmp_path, dict(os.environ))

    assert process(dies=2).returncode == 7
    stored = json.loads(store.read_text())
    assert [each["status"] for each in stored["pending"]] == ["finished", "waiting", "waiting"]
    again = process(dies=0)

    assert again.stdout.split() == ["done", "3", "26"], again.stderr
    assert log.read_text() == "123"


# --- what a tool does stays in its call

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@pytest.mark.parametrize("concurrent_tools", [False, True])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("streamed", [False, True])
async def test_context_variables_set_by_a_tool_do_not_reach_the_caller(
    concurrent_tools: bool, calls: int, streamed: bool
) -> None:
    seen: list[str] = []

    @tool
    async def mark() -> str:
        seen.append(variable.get())
        variable.set("tool")
        return "ok"

    variable.set("caller")
    made = assistant(
        Layers(), asks(*[tool_call("mark")] * calls), says("x"), tools=[mark], concurrent_tools=concurrent_tools
    )
    if streamed:
        _ = [event async for event in made.events("q")]
    else:
        await made.ask("q")

    assert variable.get() == "caller"
    assert seen == ["caller"] * calls


# --- streams


async def test_tools_run_once_for_any_call_indexes_in_a_stream() -> None:
    ran: list[int] = []

    @tool
    async def once(n: int) -> int:
        ran.append(n)
        return n

    class FromOne:
        asked = 0

        async def chat(self, request: Any) -> ChatResponse:
            raise AssertionError

        async def stream(self, request: Any) -> AsyncIterator[Any]:
            self.asked += 1
            if self.asked == 2:
                yield CompleteResponse(says("done"))
                return
            calls = [tool_call("once", {"n": n}, id=f"call {n}") for n in (1, 2)]
            for index, call in enumerate(calls, start=1):
                yield CompleteToolCall(index, call)
            yield CompleteResponse(asks(*calls))

    made = create_ai_service(Assistant, chat_model=FromOne(), tools=[once], concurrent_tools=True)
    executed = [event.execution async for event in made.events("q") if isinstance(event, ToolExecuted)]

    assert sorted(ran) == [1, 2]
    assert sorted(each.result for each in executed) == ["1", "2"]


async def test_the_last_event_of_a_stream_has_the_usage_of_all_rounds() -> None:
    made = create_ai_service(Assistant, chat_model=ScriptedChatModel([asks(ADD), says("three")]), tools=[add])
    events = [event async for event in made.events("q")]

    assert isinstance(events[-1], CompleteResponse)
    assert events[-1].response.token_usage == TokenUsage(20, 6)
