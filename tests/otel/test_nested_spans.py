"""Which span is inside which: tools, threads, streams, services as tools, web applications and clients."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import httpx2
import pytest
from fastapi import FastAPI
from opentelemetry import baggage, context, trace

from tests import programs
from tests.otel.telemetry import Assistant, Front, Telemetry, Together, container_with, last_result
from tests.rest.http_server import Server
from toolbox import AiMessage, Container, register_ai_service, rest, tool
from toolbox.mcp import mcp_server, mcp_toolbox
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import Inject, install

pytestmark = pytest.mark.anyio


def id_of(span: Any) -> str:
    return f"{span.context.span_id:016x}"


@pytest.mark.parametrize("name", ["look", "look_on_a_worker", "look_on_a_thread"])
async def test_the_span_of_a_tool_is_current_on_any_thread(telemetry: Telemetry, name: str) -> None:
    async with container_with(telemetry, tool_call(name), last_result) as container:
        answer = await container.get(Assistant).ask("Go")

    assert answer == id_of(telemetry.span(f"execute_tool {name}"))


async def test_spans_of_the_program_are_nested_correctly(telemetry: Telemetry) -> None:
    @tool
    def count() -> int:
        with telemetry.tracer.start_as_current_span("counting"):
            return 3

    @register_ai_service(tools=count)
    class Counter(Protocol):
        async def ask(self, question: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel([tool_call("count"), "three"])}).register(Counter)
    async with container.register_instance(telemetry.listener()):
        with telemetry.tracer.start_as_current_span("program"):
            await container.get(Counter).ask("Go")
            with telemetry.tracer.start_as_current_span("afterwards"):
                pass

    assert telemetry.tree == [
        "program",
        "  invoke_agent Counter",
        "    chat",
        "    execute_tool count",
        "      counting",
        "    chat",
        "  afterwards",
    ]


async def test_the_span_of_a_service_called_as_a_tool_is_inside_the_tool(telemetry: Telemetry) -> None:
    replies = (tool_call("consult", {"question": "why"}), tool_call("look_on_a_worker"), "because", "so")
    async with container_with(telemetry, *replies) as container:
        await container.get(Front).ask("Go")

    assert telemetry.tree == [
        "invoke_agent Front",
        "  chat",
        "  execute_tool consult",
        "    invoke_agent Assistant",
        "      chat",
        "      execute_tool look_on_a_worker",
        "      chat",
        "  chat",
    ]


async def test_concurrent_tools_have_separate_spans(telemetry: Telemetry) -> None:
    names = ("look", "look_on_a_worker", "look_on_a_thread")
    calls = AiMessage(tool_execution_requests=[tool_call(name) for name in names])
    seen: list[str] = []

    def done(request: Any) -> str:
        seen.extend(each.text for each in request.messages[-3:])
        return "done"

    async with container_with(telemetry, calls, done) as container:
        await container.get(Together).ask("Go")

    assert seen == [id_of(telemetry.span(f"execute_tool {name}")) for name in names]
    assert sorted(telemetry.tree[1:]) == sorted(["  chat", "  chat", *(f"  execute_tool {name}" for name in names)])


async def test_a_tool_that_starts_while_its_model_streams_is_not_inside_that_request(
    telemetry: Telemetry,
) -> None:
    async with container_with(telemetry, tool_call("look"), "done") as container:
        assert [each async for each in container.get(Together).texts("Go")] == ["done"]

    assert telemetry.tree == ["invoke_agent Together", "  chat", "  execute_tool look", "  chat"]


async def test_concurrent_calls_are_separate_traces(telemetry: Telemetry) -> None:
    def reply(request: Any) -> Any:
        return "done" if len(request.messages) > 1 else tool_call("look")

    async with container_with(telemetry, *[reply] * 40) as container:
        await asyncio.gather(*(container.get(Assistant).ask("Go") for _ in range(20)))

    traces = {each.context.trace_id for each in telemetry.spans}
    assert len(traces) == 20
    assert len(telemetry.spans) == 80
    for each in traces:
        spans = [span.name for span in telemetry.spans if span.context.trace_id == each]
        assert spans == ["invoke_agent Assistant", "chat", "execute_tool look", "chat"]


@pytest.mark.parametrize("name", ["look", "look_on_a_worker"])
async def test_the_span_of_a_synchronous_call_is_inside_the_span_of_its_caller(telemetry: Telemetry, name: str) -> None:
    async with container_with(telemetry, tool_call(name), last_result) as container:

        def caller() -> str:
            with telemetry.tracer.start_as_current_span("caller"):
                answer: str = container.get(Assistant).ask_and_wait("Go")
                assert trace.get_current_span().is_recording()
                return answer

        with ThreadPoolExecutor() as pool:
            answer = await asyncio.get_running_loop().run_in_executor(pool, caller)

    assert answer == id_of(telemetry.span(f"execute_tool {name}"))
    assert telemetry.tree[:2] == ["caller", "  invoke_agent Assistant"]


def test_synchronous_code_is_traced_with_the_loop_of_the_container(telemetry: Telemetry) -> None:
    replies = (tool_call("look_on_a_worker"), "done")
    with container_with(telemetry, *replies) as container, telemetry.tracer.start_as_current_span("caller"):
        container.get(Assistant).ask_and_wait("Go")

    assert telemetry.tree[:2] == ["caller", "  invoke_agent Assistant"]


async def test_the_reader_of_a_stream_keeps_its_current_span(telemetry: Telemetry) -> None:
    async with container_with(telemetry, tool_call("look"), "a b c") as container:
        with telemetry.tracer.start_as_current_span("reader") as reader:
            async for _ in container.get(Assistant).texts("Go"):
                assert trace.get_current_span() is reader
                with telemetry.tracer.start_as_current_span("reading"):
                    await asyncio.sleep(0)
            assert trace.get_current_span() is reader

    assert telemetry.tree == [
        "reader",
        "  invoke_agent Assistant",
        "    chat",
        "    execute_tool look",
        "    chat",
        *["  reading"] * 3,
    ]


async def test_a_span_that_a_tool_leaves_current_is_reset(telemetry: Telemetry) -> None:
    @tool
    async def forget() -> str:
        context.attach(trace.set_span_in_context(telemetry.tracer.start_span("forgotten")))
        return ""

    @register_ai_service(tools=forget)
    class Forgetful(Protocol):
        async def ask(self, question: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel([tool_call("forget"), "done"])}).register(Forgetful)
    async with container.register_instance(telemetry.listener()):
        await container.get(Forgetful).ask("Go")

    assert telemetry.tree == ["invoke_agent Forgetful", "  chat", "  execute_tool forget", "  chat"]


async def test_baggage_reaches_the_tools(telemetry: Telemetry) -> None:
    @tool
    def tenant() -> str:
        return str(baggage.get_baggage("tenant"))

    @register_ai_service(tools=tenant)
    class Tenants(Protocol):
        async def ask(self, question: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel([tool_call("tenant"), last_result])}).register(Tenants)
    async with container.register_instance(telemetry.listener()):
        token = context.attach(baggage.set_baggage("tenant", "a"))
        try:
            assert await container.get(Tenants).ask("Go") == "a"
        finally:
            context.detach(token)


async def test_a_request_of_a_web_application_is_the_parent(telemetry: Telemetry) -> None:
    app = FastAPI(telemetry={"tracer_provider": telemetry.tracers, "operation_spans": False})
    install(app, container_with(telemetry, tool_call("look"), "done"))

    @app.get("/ask")
    async def ask(assistant: Inject[Assistant]) -> str:
        return await assistant.ask("Go")

    transport = httpx2.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        assert (await client.get("/ask")).json() == "done"

    assert telemetry.tree == [
        "GET /ask",
        "  invoke_agent Assistant",
        "    chat",
        "    execute_tool look",
        "    chat",
    ]


async def test_rest_clients_send_the_span_of_the_tool(telemetry: Telemetry) -> None:
    server = Server()
    server.answer("sunny")

    @rest.register_rest_client(config_key="weather")
    class Weather(Protocol):
        @rest.get("/today")
        @tool
        async def weather(self) -> str:
            """The weather."""
            ...

        @rest.get("/tomorrow")
        @tool
        def forecast(self) -> str:
            """The weather of tomorrow."""
            ...

    @register_ai_service(tools=Weather)
    class Forecaster(Protocol):
        async def ask(self, question: str) -> str: ...

    replies = [tool_call("weather"), tool_call("forecast"), "sunny"]
    container = Container(models={"default": ScriptedChatModel(replies)})
    container.register(Weather, Forecaster, rest.rest_settings("weather", url=server.url))
    try:
        async with container.register_instance(telemetry.listener()):
            await container.get(Forecaster).ask("Go")
    finally:
        server.stop()

    for received, name in zip(server.received, ("weather", "forecast"), strict=True):
        span = telemetry.span(f"execute_tool {name}")
        assert received.header("traceparent") == f"00-{span.context.trace_id:032x}-{id_of(span)}-03"


async def test_mcp_servers_receive_the_span_of_the_tool(telemetry: Telemetry) -> None:
    program = Path(__file__).parent / "tracing_server.py"
    environment = {"PYTHONPATH": str(program.parent.parent.parent)}

    @register_ai_service
    class Remote(Protocol):
        @mcp_toolbox("tracing")
        async def ask(self, question: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel([tool_call("trace_of_call"), last_result])})
    container.register(Remote).register_instance(telemetry.listener())
    command, *arguments = programs.command(str(program))
    server = mcp_server("tracing", command=command, args=arguments, env=environment, connect_timeout=110)
    async with container.register_instance(server, name="tracing"):
        answer = await container.get(Remote).ask("Go")

    span = telemetry.span("execute_tool trace_of_call")
    assert answer == f"{span.context.trace_id:032x}-{id_of(span)}"
