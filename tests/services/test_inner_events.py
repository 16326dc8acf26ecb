"""`inner_events=True`: the events of services within the tools of a call, in its stream and in `runs.events`."""

import asyncio
import json
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    BeforeToolExecution,
    CompleteResponse,
    Container,
    IllegalConfigurationError,
    InnerEvent,
    IntermediateResponse,
    PartialResponse,
    Result,
    TokenStream,
    ToolExecuted,
    register_ai_service,
    tool,
)
from toolbox.cli.terminal import ShowJson
from toolbox.runs import approve
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi.streaming import public_json

pytestmark = pytest.mark.anyio


@tool
async def look(place: str) -> str:
    return f"{place} is sunny"


@register_ai_service(tools=look, model="deepest", name="scout")
class Scout(Protocol):
    @tool
    async def explore(self, text: str) -> str:
        """Explore."""
        ...


@register_ai_service(tools=Scout, model="middle", inner_events=True)
class Planner(Protocol):
    @tool
    async def plan(self, text: str) -> str:
        """Plan."""
        ...


@register_ai_service(tools=Planner, inner_events=True)
class Guide(Protocol):
    def stream(self, text: str) -> TokenStream: ...
    async def ask(self, text: str) -> str: ...


@register_ai_service(tools=Planner)
class Silent(Protocol):
    def stream(self, text: str) -> TokenStream: ...


def call(name: str, **arguments: Any) -> Any:
    return tool_call(name, arguments)


def models() -> dict[str, Any]:
    return {
        "default": ScriptedChatModel([call("plan", text="x"), "Go to Rome."]),
        "middle": ScriptedChatModel([call("explore", text="y"), "Rome is planned."]),
        "deepest": ScriptedChatModel([call("look", place="Rome"), "Rome is sunny."]),
    }


def program(*services: Any, **given: Any) -> Container:
    return Container(models=models() | given).register(*services, Planner, Scout)


async def test_events_of_every_depth_are_flat_and_name_their_call() -> None:
    async with program(Guide) as here:
        events = [each async for each in here.get(Guide).stream("Where?")]

    inner = [each for each in events if isinstance(each, InnerEvent)]
    assert not any(isinstance(each.event, InnerEvent) for each in inner)
    assert {(each.service, each.context.service) for each in inner} == {
        (f"{__name__}.Planner", Planner),
        ("scout", Scout),
    }
    own = [each for each in events if isinstance(each, BeforeToolExecution)]
    planning = [each for each in inner if each.service.endswith("Planner")]
    scouting = [each for each in inner if each.service == "scout"]
    assert {each.call_id for each in planning} == {own[0].request.id}
    begun = [each.event.request.id for each in planning if isinstance(each.event, BeforeToolExecution)]
    assert {each.call_id for each in scouting} == set(begun)
    assert {each.context.outer_invocation_id for each in scouting} == {planning[0].context.invocation_id}
    texts = {each.service: "" for each in inner}
    for each in inner:
        if isinstance(each.event, PartialResponse):
            texts[each.service] += each.event.text
    assert texts == {f"{__name__}.Planner": "Rome is planned.", "scout": "Rome is sunny."}
    for service in (planning, scouting):
        assert isinstance(service[-1].event, CompleteResponse)
    # They stand where they happen: within the call.
    kinds = [type(each).__name__ for each in events]
    assert kinds.index("BeforeToolExecution") < kinds.index("InnerEvent") < kinds.index("ToolExecuted")


async def test_without_the_option_a_stream_has_its_own_events_only() -> None:
    async with program(Silent) as here:
        events = [each async for each in here.get(Silent).stream("Where?")]

    assert not any(isinstance(each, InnerEvent) for each in events)


async def test_a_call_that_is_not_streamed_is_as_ever() -> None:
    streamed: list[bool] = []

    class Watched(ScriptedChatModel):
        def stream(self, request: Any) -> Any:
            streamed.append(True)
            return super().stream(request)

    deepest = Watched([call("look", place="Rome"), "Rome is sunny."])
    async with program(Guide, deepest=deepest) as here:
        assert await here.get(Guide).ask("Where?") == "Go to Rome."

    assert streamed == []


async def test_services_that_run_at_the_same_time_are_told_apart() -> None:
    @register_ai_service(tools=Scout, inner_events=True, concurrent_tools=True)
    class Both(Protocol):
        def stream(self, text: str) -> TokenStream: ...

    calls = AiMessage(None, (call("explore", text="a"), call("explore", text="b")))
    chosen = {"default": ScriptedChatModel([calls, "Both."]), "deepest": ScriptedChatModel(["one", "two"])}
    async with program(Both, **chosen) as here:
        events = [each async for each in here.get(Both).stream("Where?")]

    said: dict[str, str] = {}
    for each in events:
        if isinstance(each, InnerEvent) and isinstance(each.event, PartialResponse):
            said[each.call_id] = said.get(each.call_id, "") + each.event.text
    assert sorted(said.values()) == ["one", "two"]


@pytest.mark.parametrize("kind", ["call", "stream", "thread"])
async def test_a_service_that_the_code_of_a_tool_calls_is_an_inner_one(kind: str) -> None:
    @register_ai_service(model="deepest")
    class Helper(Protocol):
        async def help(self, text: str) -> str: ...
        def stream(self, text: str) -> TokenStream: ...
        def wait(self, text: str) -> str: ...

    @tool
    async def consult() -> str:
        if kind == "call":
            return await here.get(Helper).help("x")
        return "".join([e.text async for e in here.get(Helper).stream("x") if isinstance(e, PartialResponse)])

    @tool(name="consult")
    def consult_on_a_thread() -> str:
        return here.get(Helper).wait("x")

    @register_ai_service(tools=consult_on_a_thread if kind == "thread" else consult, inner_events=True)
    class Asking(Protocol):
        def stream(self, text: str) -> TokenStream: ...

    chosen = {"default": ScriptedChatModel([call("consult"), "Done."]), "deepest": ScriptedChatModel(["Helped."])}
    async with program(Asking, Helper, **chosen) as here:
        events = [each async for each in here.get(Asking).stream("Where?")]

    inner = [each for each in events if isinstance(each, InnerEvent)]
    assert "".join(each.event.text for each in inner if isinstance(each.event, PartialResponse)) == "Helped."
    assert {each.context.service for each in inner} == {Helper}
    [executed] = [each.execution for each in events if isinstance(each, ToolExecuted)]
    assert executed.result == "Helped."


async def test_a_reader_that_leaves_ends_the_services_within() -> None:
    ended = asyncio.Event()

    class Endless(ScriptedChatModel):
        async def stream(self, request: Any) -> Any:
            try:
                while True:
                    yield PartialResponse("and on ")
            finally:
                ended.set()

    async with program(Guide, deepest=Endless([])) as here:
        async with here.get(Guide).stream("Where?") as stream:
            async for each in stream:
                if isinstance(each, InnerEvent) and isinstance(each.event, PartialResponse):
                    break
        await asyncio.wait_for(ended.wait(), 30)


async def test_events_of_runs_have_them_too_and_each_once() -> None:
    @tool(requires_approval=True)
    async def pay(amount: int) -> str:
        return "paid"

    @register_ai_service(tools=[pay, look], model="deepest", name="cashier")
    class Cashier(Protocol):
        @tool
        async def settle(self, text: str) -> str:
            """Settle."""
            ...

    @register_ai_service(tools=Cashier, inner_events=True)
    class Shop(Protocol):
        async def buy(self, text: str) -> Result[str]: ...

    chosen = {
        "default": ScriptedChatModel([call("settle", text="x"), "Bought."]),
        "deepest": ScriptedChatModel([call("look", place="Rome"), call("pay", amount=3), "Settled."]),
    }
    async with program(Shop, Cashier, **chosen) as here:
        run = await here.runs.start(Shop.buy, "Buy it")
        async for event in here.runs.events(run.id):
            if type(event.event).__name__ == "RunSuspended":
                break
        waiting = await here.runs.get(run.id)
        await here.runs.resume(run.id, {each.id: approve() for each in waiting.pending})
        events = [each.event async for each in here.runs.events(run.id)]

    inner = [each for each in events if isinstance(each, InnerEvent)]
    assert {(each.service, each.context.service, each.context.method) for each in inner} == {
        ("cashier", Cashier, "settle")
    }
    begun = [each.event.request.name for each in inner if isinstance(each.event, BeforeToolExecution)]
    ended = [each.event.execution.request.name for each in inner if isinstance(each.event, ToolExecuted)]
    assert ended == ["look", "pay"]
    assert begun[0] == "look"
    assert sum(isinstance(each.event, CompleteResponse) for each in inner) == 1
    assert len({each.event.response.id for each in inner if isinstance(each.event, IntermediateResponse)}) <= 2


async def test_a_value_that_is_not_a_bool_is_a_problem_at_start() -> None:
    @register_ai_service(inner_events="yes")  # type: ignore[call-overload]  # what a program may say
    class Wrong(Protocol):
        async def ask(self, text: str) -> str: ...

    with pytest.raises(IllegalConfigurationError, match="invalid inner_events='yes'"):
        async with program(Wrong):
            pass


async def test_the_terminal_shows_them_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    show = ShowJson()
    async with program(Guide) as here:
        async for each in here.get(Guide).stream("Where?"):
            show.event(each)

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    inner = [line for line in lines if line["event"] == "InnerEvent"]
    assert {line["service"] for line in inner} == {f"{__name__}.Planner", "scout"}
    assert {"PartialResponse", "ToolExecuted"} <= {line["inner"]["event"] for line in inner}


async def test_the_json_for_clients_has_neither_the_context_nor_what_a_tool_returned() -> None:
    async with program(Guide) as here:
        events = [each async for each in here.get(Guide).stream("Where?")]

    inner = [json.loads(public_json(each)) for each in events if isinstance(each, InnerEvent)]
    assert all(set(each) == {"service", "call_id", "event"} for each in inner)
    executed = [each["event"]["execution"] for each in inner if "execution" in each["event"]]
    assert executed
    assert all("result_object" not in each for each in executed)
