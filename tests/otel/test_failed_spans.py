"""Spans of what goes wrong: errors, cancellations, time limits and dropped streams; each span ends."""

import asyncio
import contextvars
import gc
import json
from typing import Any, Protocol

import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode

from tests.conftest import Clock
from tests.models.scripted_server import Scripted, serving
from tests.otel.telemetry import SECRET, Assistant, Front, Hasty, Telemetry, container_with
from toolbox import (
    Container,
    EventListener,
    InvocationContext,
    InvocationEvent,
    InvocationTimeoutError,
    ModelHttpError,
    OpenAiChatModel,
    ServiceFailedEvent,
    ServiceStartedEvent,
    ToolAbort,
    ToolStartedEvent,
    UnknownToolError,
    register_ai_service,
    tool,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


async def test_a_tool_error_is_recorded_by_type_and_the_call_continues(telemetry: Telemetry) -> None:
    async with container_with(telemetry, tool_call("fail"), tool_call("refuse"), "done") as container:
        await container.get(Assistant).ask("Go")

    failed, refused = telemetry.span("execute_tool fail"), telemetry.span("execute_tool refuse")
    assert (failed.status.status_code, failed.attributes["error.type"]) == (StatusCode.ERROR, "ValueError")
    assert (refused.status.status_code, refused.attributes["error.type"]) == (StatusCode.ERROR, "tool_error")
    assert telemetry.span("invoke_agent Assistant").status.status_code is StatusCode.UNSET
    assert (failed.status.description, failed.events) == (None, ())
    assert SECRET not in telemetry.text


async def test_an_error_that_ends_the_call_is_recorded_on_all_outer_spans(telemetry: Telemetry) -> None:
    async with container_with(telemetry, tool_call("consult", {"question": "?"}), tool_call("abort")) as container:
        with pytest.raises(ToolAbort):
            await container.get(Front).ask("Go")

    failed = [each for each in telemetry.spans if each.status.status_code is StatusCode.ERROR]
    assert [each.name for each in failed] == [
        "invoke_agent Front",
        "execute_tool consult",
        "invoke_agent Assistant",
        "execute_tool abort",
    ]
    assert {each.attributes["error.type"] for each in failed} == {"toolbox.errors.ToolAbort"}
    assert SECRET not in telemetry.text


async def test_an_http_error_of_a_model_server_is_recorded_by_its_status(telemetry: Telemetry) -> None:
    async with serving([Scripted(json.dumps({"error": {"message": SECRET}}).encode(), status=401)]) as server:
        model = OpenAiChatModel("m", server.url, max_retries=0)
        container = Container(models={"default": model}).register(Assistant)
        async with container.register_instance(telemetry.listener()):
            with pytest.raises(ModelHttpError):
                await container.get(Assistant).ask("Go")
        await model.aclose()

    assert [each.attributes["error.type"] for each in telemetry.spans] == ["401", "401"]
    assert {each.status.status_code for each in telemetry.spans} == {StatusCode.ERROR}
    [point] = telemetry.points("gen_ai.client.operation.duration")
    assert point.attributes["error.type"] == "401"
    assert telemetry.points("gen_ai.client.token.usage") == []
    assert SECRET not in telemetry.text


async def test_spans_do_not_contain_the_name_of_an_unknown_tool(telemetry: Telemetry) -> None:
    async with container_with(telemetry, tool_call(SECRET), "done") as container:
        with pytest.raises(UnknownToolError):
            await container.get(Assistant).ask("Go")

    assert telemetry.tree == ["invoke_agent Assistant", "  chat", "  execute_tool"]
    assert telemetry.spans[-1].attributes["error.type"] == "toolbox.errors.UnknownToolError"
    assert SECRET not in telemetry.text


async def test_a_cancelled_call_ends_its_spans_without_an_error_status(telemetry: Telemetry) -> None:
    begun = asyncio.Event()

    @tool
    async def linger() -> str:
        begun.set()
        await asyncio.Event().wait()
        return ""

    @register_ai_service(tools=linger)
    class Slow(Protocol):
        async def ask(self, question: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel([tool_call("linger")])}).register(Slow)
    async with container.register_instance(telemetry.listener()):
        task = asyncio.ensure_future(container.get(Slow).ask("Go"))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert telemetry.tree == ["invoke_agent Slow", "  chat", "  execute_tool linger"]
    assert {each.status.status_code for each in telemetry.spans} == {StatusCode.UNSET}
    for name in ("invoke_agent Slow", "execute_tool linger"):
        assert telemetry.span(name).attributes["error.type"] == "asyncio.exceptions.CancelledError"


async def test_a_late_call_has_an_error_status(telemetry: Telemetry, clock: Clock) -> None:
    class Late(EventListener):
        def on_event(self, event: InvocationEvent) -> None:
            if isinstance(event, ToolStartedEvent):
                asyncio.get_running_loop().call_soon(clock.advance, 101)

    async with container_with(telemetry, tool_call("wait")).register_instance(Late()) as container:
        with pytest.raises(InvocationTimeoutError):
            await container.get(Hasty).ask("Go")

    late = telemetry.span("invoke_agent Hasty")
    assert late.status.status_code is StatusCode.ERROR
    assert late.attributes["error.type"] == "toolbox.errors.InvocationTimeoutError"
    assert telemetry.tree == ["invoke_agent Hasty", "  chat", "  execute_tool wait"]


@pytest.mark.parametrize("how", ["left", "dropped"])
async def test_closed_and_dropped_streams_end_their_spans(telemetry: Telemetry, how: str) -> None:
    async with container_with(telemetry, "a b c") as container:
        stream: Any = container.get(Assistant).texts("Go")
        await anext(stream)
        if how == "left":
            await stream.aclose()
        del stream
        gc.collect()

    assert telemetry.tree == ["invoke_agent Assistant", "  chat"]
    assert {each.attributes["error.type"] for each in telemetry.spans} == {"asyncio.exceptions.CancelledError"}


def test_ending_in_another_context_changes_neither_context(telemetry: Telemetry) -> None:
    """As when a coroutine is closed from outside."""
    listener, invocation = telemetry.listener(), InvocationContext(Assistant, "ask")
    elsewhere = contextvars.copy_context()
    elsewhere.run(listener.on_event, ServiceStartedEvent(invocation))
    with telemetry.tracer.start_as_current_span("here") as here:
        listener.on_event(ServiceFailedEvent(invocation, asyncio.CancelledError(), 0.1))
        assert trace.get_current_span() is here

    assert sorted(telemetry.tree) == ["here", "invoke_agent Assistant"]


async def test_spans_end_even_if_recording_fails(telemetry: Telemetry, caplog: pytest.LogCaptureFixture) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    async with container_with(telemetry, Unspeakable(), content=True) as container:
        with pytest.raises(Unspeakable):
            await container.get(Assistant).ask("Go")

    assert telemetry.tree == ["invoke_agent Assistant", "  chat"]
    assert {each.status.status_code for each in telemetry.spans} == {StatusCode.ERROR}
    assert len(telemetry.points("gen_ai.invoke_agent.duration")) == 1
    assert {each.name for each in caplog.records} == {"toolbox.events"}
    caplog.clear()
