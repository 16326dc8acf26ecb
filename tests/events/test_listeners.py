"""Events: their order and context, and listeners that fail."""

import asyncio
import contextvars
import gc
import logging
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pytest

from tests.conftest import Clock
from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    EventListener,
    IllegalConfigurationError,
    InvocationContext,
    InvocationEvent,
    InvocationTimeoutError,
    MemoryId,
    MemoryWrittenEvent,
    ModelFailedEvent,
    ModelRequestEvent,
    ModelResponseEvent,
    Result,
    ServiceCompletedEvent,
    ServiceFailedEvent,
    ServiceStartedEvent,
    StreamEvent,
    TokenStream,
    TokenUsage,
    ToolAbort,
    ToolErrors,
    ToolExecutedEvent,
    ToolFailedEvent,
    ToolStartedEvent,
    UnknownToolError,
    application_scoped,
    create_ai_service,
    register_ai_service,
    request_scoped,
    return_to_model,
    run_on_thread,
    tool,
    user_message,
)
from toolbox.container import internals_of
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="outside")


@application_scoped
class Journal(EventListener):
    """Records events and the context in which they arrive."""

    def __init__(self) -> None:
        self.events: list[InvocationEvent] = []
        self.seen: list[InvocationContext | None] = []

    def on_event(self, event: InvocationEvent) -> None:
        self.events.append(event)
        self.seen.append(InvocationContext.current())

    @property
    def names(self) -> list[str]:
        return [type(each).__name__.removesuffix("Event") for each in self.events]

    def of(self, kind: type[Any]) -> Any:
        [found] = [each for each in self.events if isinstance(each, kind)]
        return found


class Marks(EventListener):
    """Sets a context variable while something goes on, as a tracer does."""

    def __init__(self) -> None:
        self.tokens: dict[object, contextvars.Token[str]] = {}

    def on_event(self, event: InvocationEvent) -> None:
        if isinstance(event, ServiceStartedEvent):
            self.tokens[event.invocation_id] = mark.set(f"{mark.get()}/{event.context.service.__name__}")
        elif isinstance(event, ToolStartedEvent):
            self.tokens[id(event.context)] = mark.set(f"{mark.get()}/{event.request.name}")
        elif isinstance(event, (ServiceCompletedEvent, ServiceFailedEvent)):
            mark.reset(self.tokens.pop(event.invocation_id))
        elif isinstance(event, (ToolExecutedEvent, ToolFailedEvent)):
            mark.reset(self.tokens.pop(id(event.context)))


@tool
async def where(n: int = 0) -> str:
    return mark.get()


@tool
def where_on_a_worker() -> str:
    return mark.get()


@run_on_thread
@tool
def where_on_a_thread() -> str:
    return mark.get()


@tool
async def fail() -> str:
    raise ValueError("no luck")


@tool
async def abort() -> str:
    raise ToolAbort("enough")


@tool
async def wait() -> str:
    await asyncio.Event().wait()
    return ""


TOOLS = (where, where_on_a_worker, where_on_a_thread, fail, abort, wait)


@register_ai_service(tools=TOOLS)
class Assistant(Protocol):
    async def ask(self, question: str) -> Result[str]: ...

    @user_message("{question}")
    async def remember(self, session: MemoryId[str], question: str) -> str: ...
    def texts(self, question: str) -> AsyncIterator[str]: ...
    def numbers(self, question: str) -> AsyncIterator[int]: ...
    def events(self, question: str) -> TokenStream: ...
    def ask_and_wait(self, question: str) -> str: ...
    def text_pieces(self, question: str) -> Iterator[str]: ...
    @tool
    async def consult(self, question: str) -> str:
        """Asks an expert."""
        ...


@register_ai_service(tools=Assistant)
class Front(Protocol):
    async def ask(self, question: str) -> str: ...


@register_ai_service(tools=TOOLS, concurrent_tools=True)
class Together(Protocol):
    async def ask(self, question: str) -> Result[str]: ...
    def texts(self, question: str) -> AsyncIterator[str]: ...


@register_ai_service(tools=TOOLS, timeout=100)
class Hasty(Protocol):
    async def ask(self, question: str) -> str: ...


def container_with(*replies: Any, listeners: tuple[Any, ...] = (), **options: Any) -> tuple[Container, Journal]:
    journal = Journal()
    container = Container(models={"default": ScriptedChatModel(replies)}, **options)
    container.register(Assistant, Front, Together, Hasty).register_instance(journal)
    for each in listeners:
        container.register_instance(each)
    return container, journal


# --- events of calls


async def test_listeners_receive_the_events_of_a_call_in_order() -> None:
    reply = ChatResponse(AiMessage("done"), TokenUsage(7, 2))
    container, journal = container_with(tool_call("where", {"n": 1}, id="c1"), reply)
    async with container:
        result = await container.get(Assistant).ask("Go")

    assert journal.names == [
        "ServiceStarted",
        "ModelRequest",
        "ModelResponse",
        "ToolStarted",
        "ToolExecuted",
        "ModelRequest",
        "ModelResponse",
        "ServiceCompleted",
    ]
    completed = journal.of(ServiceCompletedEvent)
    assert completed.value == result
    assert completed.response == reply
    assert completed.token_usage == TokenUsage(7, 2)
    assert completed.tool_executions == result.tool_executions
    assert 0 < completed.duration < 60
    executed = journal.of(ToolExecutedEvent)
    assert executed.execution == result.tool_executions[0]
    assert executed.error is None
    assert executed.context.request == executed.execution.request
    assert journal.of(ToolStartedEvent).specification.name == "where"
    request, response = journal.events[1], journal.events[2]
    assert isinstance(request, ModelRequestEvent)
    assert isinstance(response, ModelResponseEvent)
    assert request.request is response.request
    assert request.model is container.models["default"]
    assert not request.streaming
    assert response.time_to_first_chunk is None


async def test_all_events_of_an_invocation_have_its_id_and_no_other_has() -> None:
    container, journal = container_with(tool_call("where"), "one", "two")
    async with container:
        await container.get(Assistant).ask("Go")
        first = {each.invocation_id for each in journal.events}
        journal.events.clear()
        await container.get(Assistant).ask("Go")

    assert len(first) == 1
    assert {each.invocation_id for each in journal.events}.isdisjoint(first)
    assert {each.outer_invocation_id for each in journal.events} == {None}


async def test_a_service_called_as_a_tool_has_the_outer_invocation_id() -> None:
    container, journal = container_with(tool_call("consult", {"question": "why"}), "because", "so")
    async with container:
        await container.get(Front).ask("Go")

    outer, inner = [each for each in journal.events if isinstance(each, ServiceStartedEvent)]
    assert (outer.context.service, inner.context.service) == (Front, Assistant)
    assert inner.outer_invocation_id == outer.invocation_id != inner.invocation_id
    assert outer.outer_invocation_id is None


async def test_events_have_the_context_of_the_invocation_and_tool_call() -> None:
    container, journal = container_with(tool_call("where", id="c7"), "done")
    async with container:
        await container.get(Assistant).ask("Go")

    for event, seen in zip(journal.events, journal.seen, strict=True):
        assert seen is not None
        assert seen.invocation_id == event.invocation_id
        of_tool = isinstance(event, (ToolStartedEvent, ToolExecutedEvent))
        assert (seen.request.id if seen.request else None) == ("c7" if of_tool else None)


async def test_memory_written_comes_before_the_end_of_the_call() -> None:
    container, journal = container_with("Hello, Ann")
    async with container:
        await container.get(Assistant).remember("ann", "I am Ann")
        kept = await container.chat_memory(Assistant, "ann").messages()

    assert journal.names[-2:] == ["MemoryWritten", "ServiceCompleted"]
    written = journal.of(MemoryWrittenEvent)
    assert written.context.memory_id == "ann"
    assert list(written.messages) == kept


# --- what goes wrong


async def test_a_tool_error_that_the_model_reads_is_an_executed_event_with_the_error() -> None:
    container, journal = container_with(tool_call("fail"), "pity")
    async with container:
        await container.get(Assistant).ask("Go")

    executed = journal.of(ToolExecutedEvent)
    assert executed.execution.is_error
    assert isinstance(executed.error, ValueError)
    assert journal.names[-1] == "ServiceCompleted"


async def test_an_error_that_ends_the_invocation_fails_the_tool_and_the_service() -> None:
    container, journal = container_with(tool_call("abort"))
    async with container:
        with pytest.raises(ToolAbort) as caught:
            await container.get(Assistant).ask("Go")

    assert journal.names[-3:] == ["ToolStarted", "ToolFailed", "ServiceFailed"]
    assert journal.of(ToolFailedEvent).error is caught.value
    assert journal.of(ServiceFailedEvent).error is caught.value


async def test_the_event_of_an_unknown_tool_has_no_specification() -> None:
    container, journal = container_with(tool_call("nowhere"))
    async with container:
        with pytest.raises(UnknownToolError):
            await container.get(Assistant).ask("Go")

    assert journal.of(ToolStartedEvent).specification is None
    assert isinstance(journal.of(ToolFailedEvent).error, UnknownToolError)


async def test_an_unknown_tool_with_a_handler_is_an_executed_event() -> None:
    errors = ToolErrors(on_unknown_tool=return_to_model)
    container, journal = container_with(tool_call("nowhere"), "ok", tool_errors=errors)
    async with container:
        await container.get(Assistant).ask("Go")

    assert isinstance(journal.of(ToolExecutedEvent).error, UnknownToolError)


async def test_a_failing_model_fails_its_request_and_the_service() -> None:
    container, journal = container_with(ValueError("overloaded"))
    async with container:
        with pytest.raises(ValueError, match="overloaded"):
            await container.get(Assistant).ask("Go")

    assert journal.names == ["ServiceStarted", "ModelRequest", "ModelFailed", "ServiceFailed"]


async def test_an_invalid_model_response_is_a_failure() -> None:
    class Wrong:
        async def chat(self, request: ChatRequest) -> ChatResponse:
            return "text"  # type: ignore[return-value]

    container, journal = container_with()
    container.models["default"] = Wrong()
    async with container:
        with pytest.raises(TypeError, match="must return a ChatResponse, got str"):
            await container.get(Assistant).ask("Go")

    assert isinstance(journal.of(ModelFailedEvent).error, TypeError)


async def test_a_late_call_fails_with_its_timeout_error(clock: Clock) -> None:
    class Late(EventListener):
        def on_event(self, event: InvocationEvent) -> None:
            if isinstance(event, ToolStartedEvent):
                asyncio.get_running_loop().call_soon(clock.advance, 101)

    container, journal = container_with(tool_call("wait"), listeners=(Late(),))
    async with container:
        with pytest.raises(InvocationTimeoutError):
            await container.get(Hasty).ask("Go")

    assert isinstance(journal.of(ServiceFailedEvent).error, InvocationTimeoutError)
    assert isinstance(journal.of(ToolFailedEvent).error, asyncio.CancelledError)


async def test_a_cancelled_call_fails_with_cancelled_error() -> None:
    begun = asyncio.Event()

    class Telling(EventListener):
        def on_event(self, event: InvocationEvent) -> None:
            if isinstance(event, ToolStartedEvent):
                begun.set()

    container, journal = container_with(tool_call("wait"), listeners=(Telling(),))
    async with container:
        call = asyncio.ensure_future(container.get(Assistant).ask("Go"))
        await begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    assert journal.names[-2:] == ["ToolFailed", "ServiceFailed"]
    assert isinstance(journal.of(ServiceFailedEvent).error, asyncio.CancelledError)


async def test_errors_of_a_listener_are_logged_and_have_no_other_effect(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(EventListener):
        def on_event(self, event: InvocationEvent) -> None:
            raise RuntimeError("disk full")

    container, journal = container_with(tool_call("where"), "fine", listeners=(Broken(),))
    with caplog.at_level(logging.ERROR, "toolbox.events"):
        async with container:
            result = await container.get(Assistant).ask("Go")

    assert result.content == "fine"
    assert len(journal.events) == 8
    assert caplog.records[0].getMessage() == "Broken.on_event failed on ServiceStartedEvent; the call continues"
    assert len(caplog.records) == 8


# --- streams


async def test_stream_events_have_the_time_to_the_first_chunk() -> None:
    container, journal = container_with(tool_call("where"), "a b c")
    async with container:
        assert [piece async for piece in container.get(Assistant).texts("Go")] == ["a ", "b ", "c"]

    responses = [each for each in journal.events if isinstance(each, ModelResponseEvent)]
    assert all(each.time_to_first_chunk is not None and each.time_to_first_chunk <= each.duration for each in responses)
    assert journal.names[0] == "ServiceStarted"
    assert journal.names[-1] == "ServiceCompleted"


async def test_a_stream_that_is_not_read_sends_no_events() -> None:
    container, journal = container_with("a b c")
    async with container:
        container.get(Assistant).texts("Go")

    assert journal.events == []


async def test_a_closed_stream_fails_with_cancelled_error() -> None:
    container, journal = container_with("a b c")
    async with container:
        stream: Any = container.get(Assistant).texts("Go")
        async for _ in stream:
            break
        await stream.aclose()

    assert journal.names == ["ServiceStarted", "ModelRequest", "ModelFailed", "ServiceFailed"]
    assert isinstance(journal.of(ServiceFailedEvent).error, asyncio.CancelledError)


async def test_a_stream_closed_at_its_last_event_is_completed() -> None:
    container, journal = container_with("a b c")
    async with container:
        stream: Any = container.get(Assistant).events("Go")
        async for event in stream:
            if type(event).__name__ == "CompleteResponse":
                break
        await stream.aclose()

    assert journal.names[-1] == "ServiceCompleted"
    assert "ServiceFailed" not in journal.names


async def test_a_stream_without_an_end_is_a_failure() -> None:
    class Endless:
        async def chat(self, request: ChatRequest) -> ChatResponse:
            raise AssertionError

        async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
            for event in ():
                yield event

    container, journal = container_with()
    container.models["default"] = Endless()
    async with container:
        with pytest.raises(RuntimeError, match=r"Endless: stream\(\) ended without a CompleteResponse"):
            _ = [each async for each in container.get(Assistant).texts("Go")]

    assert isinstance(journal.of(ModelFailedEvent).error, RuntimeError)


# --- context


@pytest.mark.parametrize("name", ["where", "where_on_a_worker", "where_on_a_thread"])
async def test_tools_see_context_variables_of_listeners_on_any_thread(name: str) -> None:
    container, _ = container_with(tool_call(name), "done", listeners=(Marks(),))
    async with container:
        result = await container.get(Assistant).ask("Go")

    assert result.tool_executions[0].result == f"outside/Assistant/{name}"
    assert mark.get() == "outside"


async def test_concurrent_tools_see_separate_context_variables() -> None:
    calls = AiMessage(
        tool_execution_requests=[tool_call("where"), tool_call("where_on_a_worker"), tool_call("where_on_a_thread")]
    )
    container, _ = container_with(calls, "done", listeners=(Marks(),))
    async with container:
        result = await container.get(Together).ask("Go")

    assert [each.result for each in result.tool_executions] == [
        "outside/Together/where",
        "outside/Together/where_on_a_worker",
        "outside/Together/where_on_a_thread",
    ]


@pytest.mark.parametrize("name", ["where", "where_on_a_worker", "where_on_a_thread"])
async def test_a_synchronous_service_on_a_thread(name: str) -> None:
    container, _ = container_with(tool_call(name), lambda request: request.messages[-1].text, listeners=(Marks(),))
    async with container:
        with ThreadPoolExecutor() as pool:
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(pool, container.get(Assistant).ask_and_wait, "Go")

    assert answer == f"outside/Assistant/{name}"


async def test_a_nested_service_sees_the_context_of_its_tool() -> None:
    model_replies = (
        tool_call("consult", {"question": "why"}),
        tool_call("where_on_a_worker"),
        lambda request: request.messages[-1].text,
        lambda request: request.messages[-1].text,
    )
    container, _ = container_with(*model_replies, listeners=(Marks(),))
    async with container:
        answer = await container.get(Front).ask("Go")

    assert answer == "outside/Front/consult/Assistant/where_on_a_worker"


async def test_the_reader_of_a_stream_does_not_see_context_variables_of_listeners() -> None:
    container, _ = container_with(tool_call("where"), "a b c", listeners=(Marks(),))
    async with container:
        seen = [mark.get() async for _ in container.get(Assistant).texts("Go")]

    assert set(seen) == {"outside"}
    assert mark.get() == "outside"


async def test_listeners_can_reset_context_variables_of_closed_and_dropped_streams(
    caplog: pytest.LogCaptureFixture,
) -> None:
    marks = Marks()
    container, _ = container_with("a b c", "a b c", listeners=(marks,))
    async with container:
        for leave in (True, False):
            stream: Any = container.get(Assistant).texts("Go")
            await anext(stream)
            if leave:
                await stream.aclose()
            del stream
            gc.collect()
            await asyncio.sleep(0)

    assert marks.tokens == {}
    assert mark.get() == "outside"
    assert caplog.records == []


def test_synchronous_code_receives_events_on_the_loop_of_the_container() -> None:
    container, journal = container_with(tool_call("where_on_a_worker"), "a b", "a b", listeners=(Marks(),))
    with container:
        assert container.get(Assistant).ask_and_wait("Go") == "a b"
        assert list(container.get(Assistant).text_pieces("Go")) == ["a ", "b"]

    assert journal.names.count("ServiceCompleted") == 2
    assert mark.get() == "outside"


# --- who listens


async def test_listeners_are_created_with_their_dependencies_at_each_start() -> None:
    made: list[EventListener] = []

    @application_scoped
    class Counting(EventListener):
        def __init__(self, journal: Journal) -> None:
            self.journal = journal
            made.append(self)

        def on_event(self, event: InvocationEvent) -> None:
            self.journal.on_event(event)

    container = Container(models={"default": ScriptedChatModel(["a", "b"])}).register(Assistant, Counting, Journal)
    for _ in range(2):
        async with container:
            await container.get(Assistant).ask("Go")
            assert len(container.get(Journal).events) == 8  # it listens itself

    assert len(made) == 2


async def test_listeners_with_an_invalid_scope_are_reported_at_startup() -> None:
    @request_scoped
    class OfARequest(EventListener):
        def on_event(self, event: InvocationEvent) -> None: ...

    class Awaited(EventListener):
        async def on_event(self, event: InvocationEvent) -> None:  # type: ignore[override]
            ...

    container = Container().register(OfARequest, Awaited)

    with pytest.raises(IllegalConfigurationError) as caught:
        async with container:
            pass

    facts = [each.what for each in caught.value.problems]
    assert any("request-scoped" in fact for fact in facts)
    assert any("on_event is async def" in fact for fact in facts)


async def test_a_service_without_a_container_sends_no_events() -> None:
    service = create_ai_service(Assistant, chat_model=ScriptedChatModel(["done"]))

    assert (await service.ask("Go")).content == "done"


async def test_tools_called_outside_of_services_send_events() -> None:
    from toolbox.tools.sources import read_tools

    container, journal = container_with()
    tools, _ = read_tools((where,), "test")
    async with container, container.request_scope() as scope:
        by_name = {each.specification.name: each for each in tools}
        await internals_of(container).host.execute(scope, by_name, tool_call("where"), Assistant, ToolErrors())

    assert journal.names == ["ToolStarted", "ToolExecuted"]


# --- the id


def test_another_process_receives_the_invocation_id() -> None:
    context = InvocationContext(Assistant, "ask", outer_invocation_id="outer")
    there = pickle.loads(pickle.dumps(context))

    assert (there.invocation_id, there.outer_invocation_id) == (context.invocation_id, "outer")


def test_invocation_ids_are_unique_across_threads() -> None:
    made: list[str] = []

    def make() -> None:
        made.extend(InvocationContext(Assistant, "ask").invocation_id for _ in range(500))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert len(set(made)) == 2000
