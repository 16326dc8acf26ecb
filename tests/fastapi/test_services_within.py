"""Services within an answer, on the wires of front ends: at every depth, live and again, also where they wait."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

import pytest
from ag_ui.core import Event as AgUiEvent
from pydantic import TypeAdapter

from tests.fastapi.conftest import Running
from tests.fastapi.front_desk import REFUND, Refunds, answered, answers, events_in, made, message_of, posted, said, says
from toolbox import (
    ChatRequest,
    CompleteResponse,
    Container,
    InnerEvent,
    Instance,
    MemoryId,
    StreamEvent,
    register_ai_service,
    tool,
)
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi.front_ends.run_reading import read_so_far

pytestmark = pytest.mark.anyio
EVENTS: TypeAdapter[Any] = TypeAdapter(AgUiEvent)


@register_ai_service(tools=Refunds, model="scout", name="scout")
class Scout(Protocol):
    @tool
    async def explore(self, text: str) -> str:
        """Explore."""
        ...


@register_ai_service(tools=Scout, model="planner", name="planner")
class Planner(Protocol):
    @tool
    async def plan(self, text: str) -> str:
        """Plan."""
        ...


@register_ai_service(model="scout", name="helper")
class Helper(Protocol):
    async def help(self, text: str) -> str: ...


class Asking:
    def __init__(self, helper: Instance[Helper]) -> None:
        self.helper = helper

    @tool
    async def ask_twice(self, question: str) -> str:
        """Ask twice."""
        helper = self.helper.get()
        return f"{await helper.help(question)} {await helper.help(question)}"


def guide(**options: Any) -> Any:
    @register_ai_service(tools=[Planner, Asking], **options)
    class Guide(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    return Guide


PLAN, EXPLORE = tool_call("plan", {"text": "x"}), tool_call("explore", {"text": "y"})
SERVICES = (Planner, Scout, Helper)


def with_models(planner: list[Any], scout: list[Any] | Any, *, default: list[Any] | None = None) -> dict[str, Any]:
    return {
        "default": ScriptedChatModel(default or [says(PLAN), "Go to Rome."]),
        "planner": ScriptedChatModel(planner),
        "scout": ScriptedChatModel(scout) if isinstance(scout, list) else scout,
    }


def program(models: dict[str, Any], **options: Any) -> tuple[Any, Container]:
    service = guide(**options)
    return made([], service.chat, service, *SERVICES, models=models)


def subagents(chunks: Iterable[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """The places, states and texts of the services in the chunks of `useChat`, as they come."""
    found = [each for each in chunks if each["type"] == "data-subagent"]
    for each in found:
        assert each["id"].startswith(each["data"].get("parentId", ""))
    return [(each["id"].partition(":")[2], each["data"]["state"], each["data"].get("text", "")) for each in found]


def inner_events(events: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """The types and the places of the events of services in a stream of AG-UI that is as the protocol says."""
    open_, known = set[str](), set[str]()
    found = []
    for each in events:
        EVENTS.validate_python(each)
        if (service := each.get("subagentRunId")) is None:
            continue
        if each["type"] == "SUBAGENT_STARTED":
            assert service not in known
            assert each.get("parentSubagentRunId") in (None, *known)
            open_.add(service)
            known.add(service)
        assert service in open_
        if each["type"] in ("SUBAGENT_FINISHED", "SUBAGENT_ERROR"):
            open_.discard(service)
        found.append((each["type"], service.partition(":")[2]))
    assert not open_
    return found


TEXT = ("TEXT_MESSAGE_START", "TEXT_MESSAGE_CONTENT", "TEXT_MESSAGE_END")


@pytest.mark.parametrize("options", [{}, {"inner_events": True}, {"concurrent_tools": True}])
async def test_services_of_every_depth_are_shown_with_their_texts(options: dict[str, Any], running: Running) -> None:
    models = with_models([EXPLORE, "Rome is planned."], ["Rome is sunny."])
    app, _ = program(models, **options)
    async with running(app) as client:
        chunks = events_in((await client.post("/api/chat", json=said("hi"))).text)
    models = with_models([EXPLORE, "Rome is planned."], ["Rome is sunny."])
    app, _ = program(models, **options)
    async with running(app) as client:
        events = events_in((await client.post("/agui", json=posted("hi"))).text)

    assert subagents(chunks) == [
        ("0", "running", ""),
        ("0/0", "running", ""),
        ("0/0", "running", "Rome is sunny."),
        ("0/0", "finished", "Rome is sunny."),
        ("0", "running", "Rome is planned."),
        ("0", "finished", "Rome is planned."),
    ]
    shown = [each["data"]["service"] for each in message_of(chunks)["parts"] if each["type"] == "data-subagent"]
    assert shown == ["planner", "scout"]
    assert inner_events(events) == [
        ("SUBAGENT_STARTED", "0"),
        ("SUBAGENT_STARTED", "0/0"),
        *((each, "0/0") for each in TEXT),
        ("SUBAGENT_FINISHED", "0/0"),
        *((each, "0") for each in TEXT),
        ("SUBAGENT_FINISHED", "0"),
    ]
    started = [each for each in events if each["type"] == "SUBAGENT_STARTED"]
    assert [each["parentToolCallId"] for each in started] == [each["subagentRunId"] for each in started]
    assert [each.get("parentSubagentRunId") for each in started] == [None, started[0]["subagentRunId"]]
    inner_texts = [each["delta"] for each in events if "subagentRunId" in each and "delta" in each]
    assert inner_texts == ["Rome is sunny.", "Rome is planned."]


async def test_services_that_the_code_of_a_tool_calls_are_shown(running: Running) -> None:
    ask = says(tool_call("ask_twice", {"question": "?"}))
    app, _ = program(with_models([], ["one", "two"], default=[ask, "Done."]))
    async with running(app) as client:
        chunks = events_in((await client.post("/api/chat", json=said("hi"))).text)

    shown = [each["data"] for each in message_of(chunks)["parts"] if each["type"] == "data-subagent"]
    [call] = {each["toolCallId"] for each in shown}
    assert [(each["service"], each["state"], each["text"]) for each in shown] == [
        ("helper", "finished", "one"),
        ("helper", "finished", "two"),
    ]
    assert call.endswith(":0")


async def test_a_service_within_a_service_waits_and_goes_on(running: Running) -> None:
    models = with_models([EXPLORE, "Planned."], [says(REFUND, text="I ask."), "Explored."])
    app, _ = program(models)
    async with running(app) as client:
        events = events_in((await client.post("/agui", json=posted("hi"))).text)
        again = events_in((await client.post("/agui", json=posted())).text)
        stored = (await client.get("/agui/room/messages")).json()
        interrupts = events[-1]["outcome"]["interrupts"]
        resume = [{"interruptId": each["id"], "status": "resolved", "payload": True} for each in interrupts]
        following = events_in((await client.post("/agui", json=posted("hi", resume=resume))).text)

    [asked] = interrupts
    assert asked["id"].endswith(":0/0/0")
    assert asked["subagentRunId"] == asked["id"].removesuffix("/0")
    for stream in (events, again):
        assert inner_events(stream) == [
            ("SUBAGENT_STARTED", "0"),
            ("SUBAGENT_STARTED", "0/0"),
            *((each, "0/0") for each in TEXT),
            ("SUBAGENT_FINISHED", "0/0"),
            ("SUBAGENT_FINISHED", "0"),
        ]
        finished = [each["outcome"] for each in stream if each["type"] == "SUBAGENT_FINISHED"]
        assert finished == [
            {"type": "suspended", "interruptIds": [asked["id"]]},
            {"type": "suspended", "interruptIds": []},
        ]
    assert inner_events(following)[:2] == [("SUBAGENT_STARTED", "0"), ("SUBAGENT_STARTED", "0/0")]
    finished = [each["outcome"] for each in following if each["type"] == "SUBAGENT_FINISHED"]
    assert finished == [{"type": "success"}] * 2
    assert EVENTS.validate_python({"type": "MESSAGES_SNAPSHOT", "messages": stored})
    texts = [(each["content"], each["subagentRunId"]) for each in stored if "subagentRunId" in each]
    assert texts == [("I ask.", asked["subagentRunId"])]
    ids = [each["messageId"] for each in (*events, *following) if each["type"] == "TEXT_MESSAGE_START"]
    assert len(ids) == len(set(ids))


async def test_a_client_that_reconnects_gets_the_services_again(running: Running) -> None:
    models = with_models([EXPLORE, "Planned."], [says(REFUND, text="I ask."), "Explored."])
    app, container = program(models)
    async with running(app) as client:
        first = events_in((await client.post("/api/chat", json=said("hi"))).text)
        again = events_in((await client.get("/api/chat/room/stream")).text)
        stored = (await client.get("/api/chat/room/messages")).json()[1]
        waiting = message_of(first)
        second = events_in((await client.post("/api/chat", json=answers(answered(waiting)))).text)
        [run] = await container.runs.list()
        public = [each.event async for each in container.runs.events(run.id)]
        everything = await read_so_far(container.runs, run.id)

    states = [("0", "running"), ("0/0", "running"), ("0/0", "running"), ("0", "suspended"), ("0/0", "suspended")]
    assert [each[:2] for each in subagents(first)] == states
    assert subagents(again) == subagents(first)
    own = [each for each in stored["parts"] if each["type"] == "data-subagent"]
    assert own == [each for each in waiting["parts"] if each["type"] == "data-subagent"]
    assert [each[:2] for each in subagents(second)][-1] == ("0", "finished")
    # The program that follows the run gets what it has always got.
    assert not any(isinstance(each, InnerEvent) or type(each).__name__ == "ServiceWork" for each in public)
    assert len(public) < len(everything)


async def test_a_service_within_that_fails_ends_with_an_error(running: Running) -> None:
    class Broken(ScriptedChatModel):
        async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
            raise RuntimeError("secret text")
            yield

        async def chat(self, request: ChatRequest) -> Any:
            raise RuntimeError("secret text")

    app, _ = program(with_models([EXPLORE, "It failed."], Broken([])))
    async with running(app) as client:
        response = await client.post("/agui", json=posted("hi"))

    found = [each for each in inner_events(events_in(response.text)) if not each[0].startswith("TEXT")]
    assert found == [
        ("SUBAGENT_STARTED", "0"),
        ("SUBAGENT_STARTED", "0/0"),
        ("SUBAGENT_ERROR", "0/0"),
        ("SUBAGENT_FINISHED", "0"),
    ]


async def test_services_of_a_stopped_answer_end_with_it(running: Running) -> None:
    asked = asyncio.Event()

    class Endless(ScriptedChatModel):
        async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
            asked.set()
            await asyncio.Event().wait()
            yield CompleteResponse(await self.chat(request))

    app, _ = program(with_models([EXPLORE], Endless([])))
    async with running(app) as client:
        streaming = asyncio.create_task(client.post("/agui", json=posted("hi")))
        await asked.wait()
        await client.post("/api/chat/room/stop")
        events = events_in((await streaming).text)

    assert events[-1]["outcome"] == {"type": "cancelled"}
    assert [each for each in inner_events(events) if each[0] == "SUBAGENT_ERROR"] == [
        ("SUBAGENT_ERROR", "0/0"),
        ("SUBAGENT_ERROR", "0"),
    ]


async def test_a_service_that_needs_an_approval_is_shown_when_it_begins(running: Running) -> None:
    @register_ai_service(model="scout", name="auditor")
    class Auditor(Protocol):
        @tool(requires_approval=True)
        async def audit(self, text: str) -> str:
            """Audit."""
            ...

    @register_ai_service(tools=Auditor)
    class Office(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    models = with_models([], ["Fine."], default=[says(tool_call("audit", {"text": "x"})), "Done."])
    app, _ = made([], Office.chat, Office, Auditor, models=models)
    async with running(app) as client:
        first = events_in((await client.post("/agui", json=posted("hi"))).text)
        [asked] = first[-1]["outcome"]["interrupts"]
        resume = [{"interruptId": asked["id"], "status": "resolved", "payload": True}]
        second = events_in((await client.post("/agui", json=posted("hi", resume=resume))).text)

    assert inner_events(first) == []
    assert "subagentRunId" not in asked
    assert [each for each in inner_events(second) if each[0] not in TEXT] == [
        ("SUBAGENT_STARTED", "0"),
        ("SUBAGENT_FINISHED", "0"),
    ]


async def test_a_run_that_a_program_has_started_shows_the_services_that_are_its_tools(running: Running) -> None:
    models = with_models([EXPLORE, "Planned."], [says(REFUND), "Explored."])
    service = guide()
    app, container = made([], service.chat, service, *SERVICES, models=models)
    async with running(app) as client:
        run = await container.runs.start(service.chat, "room", "hi")
        async for each in container.runs.events(run.id):
            if type(each.event).__name__ == "RunSuspended":
                break
        chunks = events_in((await client.get("/api/chat/room/stream")).text)
        stored = await read_so_far(container.runs, run.id)

    assert [each[:2] for each in subagents(chunks)] == [("0", "running"), ("0", "suspended")]
    assert not any(type(each.event).__name__ == "ServiceWork" for each in stored)
