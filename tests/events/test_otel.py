"""Spans and metrics of calls: what they say, how they nest, that each ends, and that nothing said is in them unasked.

In memory by OpenTelemetry's own SDK, through real services.
"""

import asyncio
import contextvars
import gc
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import httpx2
import pytest
from fastapi import FastAPI
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from tests import programs
from tests.conftest import Clock
from tests.models.scripted_server import Scripted, call, chunk, completion, serving, stream
from tests.rest.http_server import Server
from toolbox import (
    AiMessage,
    AudioContent,
    ChatResponse,
    Container,
    EventListener,
    FinishReason,
    ImageContent,
    InvocationContext,
    InvocationEvent,
    InvocationTimeoutError,
    MemoryId,
    ModelHttpError,
    OpenAiChatModel,
    PdfContent,
    Result,
    ServiceFailedEvent,
    ServiceStartedEvent,
    SystemMessage,
    TokenUsage,
    ToolAbort,
    ToolExecutionResult,
    ToolGuardrailError,
    ToolStartedEvent,
    UnknownToolError,
    UserMessage,
    compensate_for,
    register_ai_service,
    rest,
    run_on_thread,
    system_message,
    tool,
    user_message,
)
from toolbox.guardrails import (
    GuardrailResult,
    InputGuardrail,
    InputGuardrailRequest,
    ToolInputGuardrail,
    ToolInputGuardrailRequest,
    input_guardrails,
    tool_input_guardrails,
)
from toolbox.mcp import mcp_server, mcp_toolbox
from toolbox.models.fallbacks import CoolingModels, FallbackModel, NamedModel
from toolbox.otel import OpenTelemetryListener, input_content, model_attributes
from toolbox.runs import InMemoryRunStore, RunStore, RunSuspended, approve
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import Inject, install

pytestmark = pytest.mark.anyio

SECRET = "sk-secret-4711"
VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


class Telemetry:
    """Spans and metrics in memory."""

    def __init__(self, **options: Any) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider(**options)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.meters = MeterProvider([self.reader])
        self.tracer = self.tracers.get_tracer("tests")

    def listener(self, capture_content: bool | None = None) -> OpenTelemetryListener:
        return OpenTelemetryListener(self.tracers, self.meters, capture_content)

    @property
    def spans(self) -> list[ReadableSpan]:
        """In the order in which they began."""
        return sorted(self.exporter.get_finished_spans(), key=lambda each: each.start_time or 0)

    def span(self, name: str) -> ReadableSpan:
        [found] = [each for each in self.spans if each.name == name]
        return found

    @property
    def tree(self) -> list[str]:
        """The names, indented by how deep they lie."""
        spans = self.spans
        by_id = {each.context.span_id: each for each in spans}

        def depth(span: ReadableSpan) -> int:
            return 0 if span.parent is None else 1 + depth(by_id[span.parent.span_id])

        lines: list[str] = []

        def below(parent: int | None) -> None:
            for each in spans:
                if (each.parent.span_id if each.parent else None) == parent:
                    lines.append("  " * depth(each) + each.name)
                    below(each.context.span_id)

        below(None)
        return lines

    def points(self, name: str) -> list[HistogramDataPoint]:
        """Return the data points of a metric."""
        data = self.reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]

    @property
    def text(self) -> str:
        """All that would leave the process."""
        return "".join(each.to_json() for each in self.spans) + str(self.reader.get_metrics_data())


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL", "TOOLBOX_DEMO", "TOOLBOX_MODELS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def nothing_is_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No span stays current where a test began, and nothing goes wrong in silence."""
    before = trace.get_current_span()
    yield
    assert trace.get_current_span() is before
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


def span_id() -> str:
    """The current span's id, as seen by a program."""
    return f"{trace.get_current_span().get_span_context().span_id:016x}"


def id_of(span: ReadableSpan) -> str:
    return f"{span.context.span_id:016x}"


@tool
async def look(n: int = 0) -> str:
    """Looks which span is the current one."""
    return span_id()


@tool
def look_on_a_worker() -> str:
    return span_id()


@run_on_thread
@tool
def look_on_a_thread() -> str:
    return span_id()


@tool
async def fail() -> str:
    raise ValueError(SECRET)


@tool
async def refuse() -> ToolExecutionResult:
    return ToolExecutionResult(SECRET, is_error=True)


@tool
async def abort() -> str:
    raise ToolAbort(SECRET)


@tool
async def wait() -> str:
    await asyncio.Event().wait()
    return ""


TOOLS = (look, look_on_a_worker, look_on_a_thread, fail, refuse, abort, wait)


@register_ai_service(tools=TOOLS)
class Assistant(Protocol):
    async def ask(self, question: str) -> str: ...

    @system_message("Be brief.")
    @user_message("{question}")
    async def remember(self, session: MemoryId[str], question: str) -> str: ...
    def texts(self, question: str) -> AsyncIterator[str]: ...
    def ask_and_wait(self, question: str) -> str: ...
    @tool
    async def consult(self, question: str) -> str:
        """Asks an expert."""
        ...


@register_ai_service(tools=Assistant)
class Front(Protocol):
    async def ask(self, question: str) -> str: ...


@register_ai_service(tools=TOOLS, concurrent_tools=True)
class Together(Protocol):
    async def ask(self, question: str) -> str: ...
    def texts(self, question: str) -> AsyncIterator[str]: ...


@register_ai_service(tools=TOOLS, timeout=100)
class Hasty(Protocol):
    async def ask(self, question: str) -> str: ...


def container_with(telemetry: Telemetry, *replies: Any, content: bool | None = None, **options: Any) -> Container:
    container = Container(models={"default": ScriptedChatModel(replies)}, **options)
    container.register(Assistant, Front, Together, Hasty)
    return container.register_instance(telemetry.listener(content))


def last_result(request: Any) -> str:
    return str(request.messages[-1].text)


# --- what spans say


async def test_the_span_of_a_call_contains_those_of_models_and_tools(telemetry: Telemetry) -> None:
    async with container_with(telemetry, tool_call("look", id="c1"), "done") as container:
        await container.get(Assistant).ask("Go")

    assert telemetry.tree == ["invoke_agent Assistant", "  chat", "  execute_tool look", "  chat"]
    service, first, executed, _ = telemetry.spans
    assert service.kind is SpanKind.INTERNAL
    assert first.kind is SpanKind.CLIENT
    assert executed.kind is SpanKind.INTERNAL
    invocation = service.attributes["toolbox.invocation.id"]
    assert dict(service.attributes) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "Assistant",
        "code.function.name": f"{__name__}.Assistant.ask",
        "toolbox.invocation.id": invocation,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert dict(executed.attributes) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.agent.name": "Assistant",
        "gen_ai.tool.name": "look",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.description": "Looks which span is the current one.",
        "gen_ai.tool.call.id": "c1",
        "toolbox.invocation.id": invocation,
    }
    assert first.attributes["gen_ai.response.finish_reasons"] == ("tool_call",)
    assert {each.status.status_code for each in telemetry.spans} == {StatusCode.UNSET}


async def test_the_span_of_a_model_request_has_the_server_and_parameters(telemetry: Telemetry) -> None:
    usage = {
        "prompt_tokens": 11,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    replies = [
        completion({"role": "assistant", "tool_calls": [call("look", "{}", id="c1")]}, "tool_calls", model="m-2026"),
        completion({"role": "assistant", "content": "done"}, model="m-2026", usage=usage),
    ]
    async with serving(replies) as server:
        model = OpenAiChatModel("m", server.url, SECRET, temperature=0.5, max_tokens=100, parameters={"stop": ["."]})
        container = Container(models={"default": model}).register(Assistant)
        async with container.register_instance(telemetry.listener()):
            await container.get(Assistant).remember("room 7", "Go")
        await model.aclose()

    assert telemetry.tree == ["invoke_agent Assistant", "  chat m", "  execute_tool look", "  chat m"]
    service, *_, answered = telemetry.spans
    host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
    assert dict(answered.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 100,
        "gen_ai.request.stop_sequences": (".",),
        "gen_ai.conversation.id": "room 7",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "m-2026",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 11,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.reasoning.output_tokens": 2,
        "server.address": host,
        "server.port": int(port),
        "toolbox.invocation.id": service.attributes["toolbox.invocation.id"],
    }
    assert service.attributes["gen_ai.request.model"] == "m"
    assert service.attributes["gen_ai.conversation.id"] == "room 7"
    assert service.attributes["gen_ai.usage.input_tokens"] == 22
    assert SECRET not in telemetry.text


async def test_the_span_of_a_streaming_request_has_the_time_to_the_first_chunk(telemetry: Telemetry) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    reply = stream(chunk({"content": "a"}), chunk({"content": "b"}, "stop"), {"id": "x", "choices": [], "usage": usage})
    async with serving([reply]) as server:
        model = OpenAiChatModel("m", server.url)
        container = Container(models={"default": model}).register(Assistant)
        async with container.register_instance(telemetry.listener()):
            assert [each async for each in container.get(Assistant).texts("Go")] == ["a", "b"]
        await model.aclose()

    said = telemetry.span("chat m").attributes
    assert said["gen_ai.request.stream"] is True
    assert said["gen_ai.response.time_to_first_chunk"] > 0
    assert said["gen_ai.usage.output_tokens"] == 2
    assert len(telemetry.points("gen_ai.client.operation.time_to_first_chunk")) == 1


@pytest.mark.parametrize(
    ("base_url", "provider", "port"),
    [
        ("https://api.openai.com/v1", "openai", 443),
        ("https://me.openai.azure.com/openai/v1", "azure.ai.openai", 443),
        ("https://api.groq.com/openai/v1", "groq", 443),
        ("https://generativelanguage.googleapis.com/v1beta/openai", "gcp.gemini", 443),
        ("https://bedrock-runtime.eu-central-1.amazonaws.com/openai/v1", "aws.bedrock", 443),
        ("http://localhost/v1", "openai", 80),
        ("http://localhost:11434/v1", "openai", 11434),
        ("https://notgroq.com", "openai", 443),
    ],
)
def test_the_provider_is_derived_from_the_base_url(base_url: str, provider: str, port: int) -> None:
    said = model_attributes(OpenAiChatModel("m", base_url, "k"))

    assert said["gen_ai.provider.name"] == provider
    assert said["server.port"] == port


def test_custom_models_describe_themselves() -> None:
    class Own(ScriptedChatModel):
        model = "tiny"
        provider_name = "own"

    assert model_attributes(Own([])) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "own",
        "gen_ai.request.model": "tiny",
    }
    assert model_attributes(ScriptedChatModel([]))["gen_ai.provider.name"] == "ScriptedChatModel"


def test_models_with_a_fallback_are_described_by_the_first_without_a_server() -> None:
    first, other = OpenAiChatModel("m", "http://localhost:1", "k"), ScriptedChatModel([])

    links = [NamedModel("first", first), NamedModel("other", other)]
    assert model_attributes(FallbackModel(links, CoolingModels(), lambda name, until: None)) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
    }


# --- how they nest


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


# --- what goes wrong


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


# --- content


async def test_spans_and_metrics_contain_no_content_by_default(telemetry: Telemetry) -> None:
    reply = ChatResponse(AiMessage(SECRET, reasoning=SECRET), TokenUsage(1, 1), FinishReason.STOP)
    calls = tool_call("look", {"n": 1, "extra": SECRET})
    async with container_with(telemetry, calls, reply) as container:
        await container.get(Assistant).remember("s", SECRET)

    assert len(telemetry.spans) == 4
    assert SECRET not in telemetry.text
    assert "Be brief." not in telemetry.text


async def test_spans_contain_content_if_it_is_enabled(telemetry: Telemetry) -> None:
    async with container_with(telemetry, tool_call("look", {"n": 1}, id="c1"), "done", content=True) as container:
        await container.get(Assistant).remember("s", "Go")

    service, _, executed, answered = telemetry.spans
    result = executed.attributes["gen_ai.tool.call.result"]
    assert executed.attributes["gen_ai.tool.call.arguments"] == '{"n": 1}'
    assert json.loads(answered.attributes["gen_ai.input.messages"]) == [
        {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
        {"role": "user", "parts": [{"type": "text", "content": "Go"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "look", "arguments": {"n": 1}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": result}]},
    ]
    assert json.loads(answered.attributes["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "done"}], "finish_reason": "stop"}
    ]
    assert json.loads(answered.attributes["gen_ai.tool.definitions"])[0]["name"] == "look"
    assert json.loads(service.attributes["gen_ai.input.messages"])[0]["parts"] == [{"type": "text", "content": "Go"}]
    assert json.loads(service.attributes["gen_ai.output.messages"])[0]["parts"] == [{"type": "text", "content": "done"}]


async def test_error_texts_are_recorded_as_content(telemetry: Telemetry) -> None:
    async with container_with(telemetry, tool_call("fail"), "done", content=True) as container:
        await container.get(Assistant).ask("Go")

    failed = telemetry.span("execute_tool fail")
    assert failed.status.description == SECRET
    assert failed.events[0].attributes["exception.message"] == SECRET


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("", False),
        ("no_content", False),
        ("event_only", False),
        ("false", False),
        ("SPAN_ONLY", True),
        ("span_and_event", True),
        ("true", True),
    ],
)
async def test_an_environment_variable_enables_content(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch, value: str, wanted: bool
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    async with container_with(telemetry, SECRET) as container:
        await container.get(Assistant).ask("Go")

    assert (SECRET in telemetry.text) is wanted


async def test_capture_content_overrides_the_environment(telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "span_only")
    async with container_with(telemetry, SECRET, content=False) as container:
        await container.get(Assistant).ask("Go")

    assert SECRET not in telemetry.text


def test_images_documents_and_audio_are_recorded_without_their_bytes() -> None:
    said = input_content(
        (
            SystemMessage("Look."),
            UserMessage(
                [
                    "This?",
                    ImageContent("https://a.example/x.png"),
                    ImageContent(data="QUJD", mime_type="image/png"),
                    PdfContent("https://a.example/x.pdf"),
                    PdfContent(data="QUJD", name="x.pdf"),
                    AudioContent("QUJD", "audio/wav"),
                ]
            ),
            AiMessage("A cat", [tool_call("pet", id="c1")], reasoning="whiskers"),
        )
    )

    _, user, assistant = json.loads(str(said["gen_ai.input.messages"]))
    assert user["parts"] == [
        {"type": "text", "content": "This?"},
        {"type": "uri", "modality": "image", "mime_type": None, "uri": "https://a.example/x.png"},
        {"type": "image", "mime_type": "image/png"},
        {"type": "uri", "modality": "document", "mime_type": "application/pdf", "uri": "https://a.example/x.pdf"},
        {"type": "document", "mime_type": "application/pdf", "name": "x.pdf"},
        {"type": "audio", "mime_type": "audio/wav"},
    ]
    assert [each["type"] for each in assistant["parts"]] == ["reasoning", "text", "tool_call"]


# --- metrics


async def test_calls_requests_and_tools_have_metrics(telemetry: Telemetry) -> None:
    reply = ChatResponse(AiMessage("done"), TokenUsage(300, 20), FinishReason.STOP, model="m-2026")
    async with container_with(telemetry, tool_call("look"), tool_call("fail"), reply) as container:
        await container.get(Assistant).ask("Go")

    tokens = {each.attributes["gen_ai.token.type"]: each for each in telemetry.points("gen_ai.client.token.usage")}
    assert {kind: each.sum for kind, each in tokens.items()} == {"input": 300, "output": 20}
    assert dict(tokens["input"].attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ScriptedChatModel",
        "gen_ai.response.model": "m-2026",
        "gen_ai.token.type": "input",
    }
    assert tokens["input"].explicit_bounds[:5] == (1, 4, 16, 64, 256)
    assert sum(each.count for each in telemetry.points("gen_ai.client.operation.duration")) == 3
    looked, failed = telemetry.points("gen_ai.execute_tool.duration")
    shared = {"gen_ai.tool.type": "function", "gen_ai.agent.name": "Assistant"}
    assert dict(looked.attributes) == {"gen_ai.tool.name": "look", **shared}
    assert dict(failed.attributes) == {"gen_ai.tool.name": "fail", "error.type": "ValueError", **shared}
    assert looked.explicit_bounds[:3] == (0.01, 0.02, 0.04)
    [called] = telemetry.points("gen_ai.invoke_agent.duration")
    assert dict(called.attributes) == {"gen_ai.agent.name": "Assistant"}
    assert called.explicit_bounds[-1] == 409.6
    assert called.sum > 0
    assert telemetry.points("gen_ai.client.operation.time_to_first_chunk") == []


# --- where the providers come from


async def test_providers_can_be_beans_and_the_listener_is_registered_by_its_class(telemetry: Telemetry) -> None:
    container = Container(models={"default": ScriptedChatModel(["done"])}).register(Assistant, OpenTelemetryListener)
    container.register_instance(telemetry.tracers).register_instance(telemetry.meters)
    async with container:
        await container.get(Assistant).ask("Go")

    assert telemetry.tree == ["invoke_agent Assistant", "  chat"]
    assert len(telemetry.points("gen_ai.invoke_agent.duration")) == 1


async def test_without_a_tracer_calls_work_and_propagate_outer_traces() -> None:
    container = Container(models={"default": ScriptedChatModel([tool_call("look"), last_result])})
    outside = trace.NonRecordingSpan(trace.SpanContext(7, 9, is_remote=True, trace_flags=trace.TraceFlags(1)))
    async with container.register(Assistant, OpenTelemetryListener):
        with trace.use_span(outside):
            assert await container.get(Assistant).ask("Go") == f"{9:016x}"


async def test_unsampled_traces_are_measured_but_not_recorded() -> None:
    telemetry = Telemetry(sampler=ALWAYS_OFF)
    async with container_with(telemetry, tool_call("look"), "done", content=True) as container:
        await container.get(Assistant).ask("Go")

    assert telemetry.spans == []
    assert len(telemetry.points("gen_ai.invoke_agent.duration")) == 1


@pytest.fixture(scope="module")
def printed_without_opentelemetry() -> list[str]:
    """Return the lines of a program that imports toolbox, and then toolbox.otel without OpenTelemetry."""
    program = """
import sys
import toolbox
print("opentelemetry" in sys.modules)
sys.modules["opentelemetry"] = None
try:
    import toolbox.otel
except ModuleNotFoundError as error:
    print(error)
import toolbox
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=110)
    return done.stdout.splitlines()


def test_importing_toolbox_does_not_import_opentelemetry(printed_without_opentelemetry: list[str]) -> None:
    assert printed_without_opentelemetry[0] == "False"


def test_without_opentelemetry_the_error_names_the_extra(printed_without_opentelemetry: list[str]) -> None:
    assert printed_without_opentelemetry[1:] == [
        "toolbox.otel needs OpenTelemetry; install it with: pip install 'toolbox-di[otel]'"
    ]


async def test_each_run_of_a_guardrail_is_a_span_inside_its_call(telemetry: Telemetry) -> None:
    class Careful(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            return self.success()

    class Strict(ToolInputGuardrail):
        def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
            raise ValueError(SECRET)

    @tool
    @tool_input_guardrails(Strict)
    def look(text: str) -> str:
        return text

    @register_ai_service(tools=[look])
    @input_guardrails(Careful)
    class Guarded(Protocol):
        async def ask(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("look", {"text": "x"})])
    container = Container(models={"default": model}).register(Guarded)
    container.register_instance(telemetry.listener())
    async with container:
        with pytest.raises(ToolGuardrailError):
            await container.get(Guarded).ask("x")

    spans = {each.name: each for each in telemetry.exporter.get_finished_spans()}
    careful, strict = spans["guardrail Careful"], spans["guardrail Strict"]
    assert careful.parent is not None
    assert strict.parent is not None
    assert careful.parent.span_id == spans["invoke_agent Guarded"].context.span_id
    assert strict.parent.span_id == spans["execute_tool look"].context.span_id
    assert careful.attributes == {"toolbox.guardrail.name": "Careful", "toolbox.guardrail.outcome": "success"}
    assert (strict.attributes or {})["toolbox.guardrail.outcome"] == "fatal"
    assert (careful.status.status_code, strict.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    assert all((each.end_time or 0) > (each.start_time or 0) for each in (careful, strict))
    assert SECRET not in "".join(each.to_json() for each in (careful, strict))


# --- runs


@tool(requires_approval=True)
def pay(euros: int) -> str:
    return f"paid {euros}"


@register_ai_service(tools=pay)
class Desk(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


def desk(telemetry: Telemetry, store: InMemoryRunStore, *replies: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, take_over_runs=False).register(Desk)
    return made.register_instance(store, RunStore).register_instance(telemetry.listener())


def linked(span: ReadableSpan) -> list[int]:
    return [each.context.span_id for each in span.links]


async def test_the_spans_of_one_run_are_linked_over_processes(telemetry: Telemetry) -> None:
    store = InMemoryRunStore()
    async with desk(telemetry, store, tool_call("pay", {"euros": 1})) as here:
        with telemetry.tracer.start_as_current_span("request"):
            run = await here.runs.start(here.get(Desk).ask, "Pay")
        async for event in here.runs.events(run):
            if isinstance(event.event, RunSuspended):
                break
    async with desk(telemetry, store, "done") as there:
        with telemetry.tracer.start_as_current_span("answer"):
            await there.runs.resume(run.id, {"0": approve()})

    started, resumed = [each for each in telemetry.spans if each.name == "invoke_agent Desk"]
    assert linked(started) == [telemetry.span("request").context.span_id]
    assert linked(resumed) == [started.context.span_id]
    assert linked(telemetry.span("answer pay")) == [started.context.span_id]
    facts = [(each.attributes or {}) for each in (started, resumed)]
    assert [each["toolbox.run.id"] for each in facts] == [run.id, run.id]
    assert [each["toolbox.run.resumed"] for each in facts] == [False, True]


async def test_a_compensation_is_a_span_inside_its_call(telemetry: Telemetry) -> None:
    class Hotel:
        @tool
        def book(self, seats: int) -> str:
            return "booked"

        @compensate_for(book)
        def unbook(self, seats: int) -> None:
            raise ValueError(SECRET)

        @tool
        def fail(self) -> str:
            raise ValueError("full")

    @register_ai_service(tools=Hotel, compensate_on_tool_errors=True)
    class Trips(Protocol):
        async def plan(self, text: str) -> str: ...

    model = ScriptedChatModel([AiMessage(None, [tool_call("book", {"seats": 2}), tool_call("fail", {})]), "done"])
    made = Container(models={"default": model}).register(Trips, Hotel).register_instance(telemetry.listener())
    async with made as here:
        await here.get(Trips).plan("x")

    span = telemetry.span("compensate book")
    assert span.parent is not None
    assert span.parent.span_id == telemetry.span("invoke_agent Trips").context.span_id
    assert span.attributes is not None
    assert span.attributes["gen_ai.tool.name"] == "book"
    assert span.attributes["toolbox.compensation.failed"] is True
    assert span.attributes["error.type"] == "ValueError"
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, None)
