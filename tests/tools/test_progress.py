"""`Progress`: tools report how far they are to streams, listeners and tests."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    Container,
    EventListener,
    IntermediateResponse,
    InvocationEvent,
    Progress,
    TokenStream,
    ToolExecuted,
    ToolExecutionRequest,
    ToolProgress,
    ToolProgressEvent,
    create_ai_service,
    register_ai_service,
    run_on_thread,
    tool,
    tool_executor_from,
    tool_specification_from,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Assistant(Protocol):
    async def ask(self, text: str) -> str: ...

    def events(self, text: str) -> TokenStream: ...

    def texts(self, text: str) -> AsyncIterator[str]: ...

    def wait(self, text: str) -> str: ...


@tool
async def on_loop(progress: Progress, rows: int = 2) -> str:
    for number in range(rows):
        await progress(number + 1, rows, f"row {number + 1}")
    return "done"


@tool
def on_worker(rows: int, progress: Progress) -> str:
    for number in range(rows):
        progress(number + 1, rows, f"row {number + 1}")
    return "done"


@tool
@run_on_thread
def on_thread(rows: int, /, progress: Progress | None = None) -> str:
    assert progress is not None
    for number in range(rows):
        progress(number + 1, rows, f"row {number + 1}")
    return "done"


TOOLS = [on_loop, on_worker, on_thread]


def assistant(*replies: Any, tools: Any = TOOLS, **options: Any) -> Assistant:
    service: Assistant = create_ai_service(Assistant, chat_model=ScriptedChatModel(replies), tools=tools, **options)
    return service


def test_the_model_does_not_see_the_parameter() -> None:
    for each in TOOLS:
        assert list(tool_specification_from(each).parameters["properties"]) == ["rows"]


@pytest.mark.parametrize("name", ["on_loop", "on_worker", "on_thread"])
@pytest.mark.parametrize("together", [False, True])
async def test_a_stream_has_the_progress_between_start_and_end_of_the_tool(name: str, together: bool) -> None:
    call = tool_call(name, {"rows": 3})
    events = [each async for each in assistant(call, "x", concurrent_tools=together).events("q")]
    events = [each for each in events if not isinstance(each, IntermediateResponse)]  # a tool may start before it
    kinds = [type(each).__name__ for each in events]
    first = kinds.index("BeforeToolExecution")

    assert kinds[first : first + 5] == ["BeforeToolExecution", *["ToolProgress"] * 3, "ToolExecuted"]
    assert events[first + 1 : first + 4] == [ToolProgress(call, n, 3, f"row {n}") for n in (1, 2, 3)]


async def test_progress_reaches_the_reader_while_the_tool_is_running() -> None:
    proceed = asyncio.Event()

    @tool
    async def slow(progress: Progress) -> str:
        progress(1)
        await proceed.wait()
        return "done"

    seen: list[str] = []
    async for event in assistant(tool_call("slow"), "x", tools=[slow]).events("q"):
        seen.append(type(event).__name__)
        if isinstance(event, ToolProgress):
            assert (event.done, event.total, event.message) == (1, None, None)
            proceed.set()
    assert seen.index("ToolProgress") < seen.index("ToolExecuted")


async def test_several_tools_report_in_one_stream() -> None:
    calls = AiMessage(None, [tool_call("on_loop", {"rows": 2}, id="a"), tool_call("on_worker", {"rows": 2}, id="b")])
    for together in (False, True):
        events = [each async for each in assistant(calls, "x", concurrent_tools=together).events("q")]
        reported = [(each.request.id, each.done) for each in events if isinstance(each, ToolProgress)]
        assert sorted(reported) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
        assert sum(isinstance(each, ToolExecuted) for each in events) == 2


async def test_text_streams_and_plain_methods_ignore_progress() -> None:
    assert [each async for each in assistant(tool_call("on_loop"), "x").texts("q")] == ["x"]
    assert await assistant(tool_call("on_worker", {"rows": 2}), "x").ask("q") == "x"
    assert await asyncio.to_thread(assistant(tool_call("on_worker", {"rows": 2}), "x").wait, "q") == "x"


async def test_leaving_a_stream_during_progress_cancels_the_tool() -> None:
    ended = asyncio.Event()

    @tool
    async def endless(progress: Progress) -> str:
        try:
            while True:
                await progress(1)
        finally:
            ended.set()

    stream = assistant(tool_call("endless"), tools=[endless]).events("q")
    async for event in stream:
        if isinstance(event, ToolProgress):
            break
    await stream.aclose()
    await asyncio.wait_for(ended.wait(), 60)


async def test_an_error_of_a_tool_that_reports_progress_is_handled_as_usual() -> None:
    @tool
    async def fails(progress: Progress) -> str:
        progress(1, 2)
        raise ValueError("broken")

    events = [each async for each in assistant(tool_call("fails"), "x", tools=[fails]).events("q")]
    [executed] = [each.execution for each in events if isinstance(each, ToolExecuted)]
    assert (executed.result, executed.is_error) == ("broken", True)


class Seen(EventListener):
    def __init__(self) -> None:
        self.events: list[ToolProgressEvent] = []
        self.threads: set[int] = set()

    def on_event(self, event: InvocationEvent) -> None:
        if isinstance(event, ToolProgressEvent):
            self.events.append(event)
            self.threads.add(threading.get_ident())


@pytest.mark.parametrize("name", ["on_loop", "on_worker", "on_thread"])
async def test_listeners_get_progress_on_the_event_loop(name: str) -> None:
    @register_ai_service(tools=TOOLS)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    seen = Seen()
    call = tool_call(name, {"rows": 2})
    container = Container(models={"default": ScriptedChatModel([call, "x"])}).register(Desk).register_instance(seen)
    async with container:
        await container.get(Desk).ask("q")
    assert [(each.request, each.done, each.total, each.message) for each in seen.events] == [
        (call, 1, 2, "row 1"),
        (call, 2, 2, "row 2"),
    ]
    assert seen.events[0].context.request == call
    assert seen.threads == {threading.get_ident()}


async def test_progress_after_the_end_of_the_tool_does_nothing() -> None:
    kept: list[Progress] = []
    released, reported = threading.Event(), threading.Event()

    @tool
    async def keeps(progress: Progress) -> str:
        kept.append(progress)
        return "done"

    @tool(timeout=0.05)
    def late(progress: Progress) -> str:
        released.wait(60)
        progress(1)
        reported.set()
        return "late"

    events = []
    service = assistant(tool_call("keeps"), tool_call("late"), "x", tools=[keeps, late])
    async for event in service.events("q"):
        events.append(event)
        if isinstance(event, ToolExecuted):
            kept[0](9)
            if event.execution.request.name == "late":
                released.set()
    assert await asyncio.to_thread(reported.wait, 60)
    await kept[0](10)
    assert [each for each in events if isinstance(each, ToolProgress)] == []


async def test_a_slow_reader_gets_the_newest_reports() -> None:
    @tool
    async def fast(progress: Progress) -> str:
        for number in range(5000):
            progress(number)
        return "done"

    events = [each async for each in assistant(tool_call("fast"), "x", tools=[fast]).events("q")]
    reports = [each.done for each in events if isinstance(each, ToolProgress)]
    assert len(reports) == 1000
    assert reports == sorted(reports)
    assert reports[-1] == 4999


async def test_progress_can_be_constructed_in_a_test() -> None:
    assert await on_loop(Progress(), 2) == "done"
    assert on_worker(2, Progress()) == "done"
    seen: list[tuple[Any, ...]] = []
    await on_loop(Progress(lambda *report: seen.append(report)), 1)
    assert seen == [(1, 1, "row 1")]


async def test_executors_without_a_service_accept_progress() -> None:
    request = ToolExecutionRequest("1", "on_loop", '{"rows": 2}')
    assert (await tool_executor_from(on_loop)(request, None)).text == "done"


@pytest.mark.parametrize("wrong", ["1", True, None])
def test_progress_must_be_a_number(wrong: Any) -> None:
    with pytest.raises(TypeError, match="use a number"):
        Progress()(wrong)
    Progress()(1, None)
    with pytest.raises(TypeError, match="use a number"):
        Progress()(1, "2")  # type: ignore[arg-type]  # the mistake
    for number in (float("nan"), float("inf")):  # JSON has no such numbers
        with pytest.raises(ValueError, match="finite"):
            Progress()(number)
    Progress()(10**400, 10**401)
