"""Spans of calls, model requests, tools and guardrails: their names and attributes, and where providers come from.

Not here: which span is inside which (`test_nested_spans`), failures (`test_failed_spans`), content (`test_content`).
"""

import asyncio
import subprocess
import sys
from typing import Protocol

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode, TracerProvider

from tests.models.scripted_server import Scripted, call, chunk, completion, serving, stream
from tests.otel.telemetry import SECRET, Assistant, Telemetry, container_with, last_result
from toolbox import (
    AiMessage,
    ChatModel,
    ChatRequest,
    ChatResponse,
    Container,
    MemoryId,
    MessageWindow,
    OpenAiChatModel,
    ToolboxSettings,
    ToolGuardrailError,
    UserMessage,
    register_ai_service,
    tool,
)
from toolbox.conversations import Summary
from toolbox.guardrails import (
    GuardrailResult,
    InputGuardrail,
    InputGuardrailRequest,
    ToolInputGuardrail,
    ToolInputGuardrailRequest,
    input_guardrails,
    tool_input_guardrails,
)
from toolbox.otel import OpenTelemetryListener
from toolbox.otel.span_attributes import model_attributes
from toolbox.security import SecurityIdentity
from toolbox.settings import OtelSettings
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


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
        "code.function.name": f"{Assistant.__module__}.Assistant.ask",
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
        "gen_ai.agent.name": "Assistant",
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


async def test_one_request_that_is_sent_several_times_at_once_has_several_spans(telemetry: Telemetry) -> None:
    all_asked = asyncio.Barrier(3)

    class Together:
        async def chat(self, request: ChatRequest) -> ChatResponse:
            await all_asked.wait()
            return ChatResponse(AiMessage("hi"))

    container = Container(models={"default": Together()}).register_instance(telemetry.listener())
    async with container:
        model, request = await container.aget(ChatModel), ChatRequest([UserMessage("Hello")])
        await asyncio.gather(*(model.chat(request) for _ in range(3)))

    assert telemetry.tree == ["chat"] * 3


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


@pytest.mark.parametrize("streamed", [False, True])
async def test_each_model_of_a_chain_that_is_asked_has_its_span_and_metrics(
    telemetry: Telemetry, streamed: bool
) -> None:
    async with serving(lambda _: Scripted(b"{}", status=503)) as broken:
        big = OpenAiChatModel("big", broken.url, SECRET, fallback=("small",), max_retries=0)
        small = ScriptedChatModel(["done", "done"])
        small.model = "small-1"  # type: ignore[attr-defined]  # as models of servers have it
        container = Container(models={"default": big, "small": small}).register(Assistant)
        async with container.register_instance(telemetry.listener()):
            assistant = container.get(Assistant)
            for _ in range(2):  # the second time, the first model is skipped
                if streamed:
                    assert "".join([each async for each in assistant.texts("Go")]) == "done"
                else:
                    assert await assistant.ask("Go") == "done"
        await big.aclose()

    once = ["invoke_agent Assistant", "  chat small-1"]
    assert telemetry.tree == [once[0], "  chat big", once[1], *once]
    _, failed, answered, _, _ = telemetry.spans
    assert failed.attributes["error.type"] == "503"
    assert failed.attributes["server.address"] == "127.0.0.1"
    assert "server.address" not in answered.attributes
    names = [each.attributes["gen_ai.request.model"] for each in telemetry.points("gen_ai.client.operation.duration")]
    assert {"big", "small-1"} == {*names}
    assert "FallbackModel" not in telemetry.text


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

    careful, strict = telemetry.span("guardrail Careful"), telemetry.span("guardrail Strict")
    assert careful.parent.span_id == telemetry.span("invoke_agent Guarded").context.span_id
    assert strict.parent.span_id == telemetry.span("execute_tool look").context.span_id
    assert careful.attributes == {"toolbox.guardrail.name": "Careful", "toolbox.guardrail.outcome": "success"}
    assert strict.attributes["toolbox.guardrail.outcome"] == "fatal"
    assert (careful.status.status_code, strict.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    assert all(each.end_time > each.start_time for each in (careful, strict))
    assert SECRET not in "".join(each.to_json() for each in (careful, strict))


@register_ai_service(chat_memory=Summary(MessageWindow(2), keep_messages=1))
class Brief(Protocol):
    async def ask(self, memory_id: MemoryId[str], question: str) -> str: ...


async def test_the_request_for_a_summary_is_a_span_of_the_call(telemetry: Telemetry) -> None:
    container = Container(models={"default": ScriptedChatModel(["a1", "a2", "They met.", "a3"])}).register(Brief)
    container.register_instance(telemetry.tracers, as_type=TracerProvider).register_instance(telemetry.listener())
    async with container:
        for question in ("q1", "q2", "q3"):
            await container.get(Brief).ask("c1", question)

    assert telemetry.tree[-3:] == ["invoke_agent Brief", "  chat", "  chat"]


# --- who calls


async def test_spans_have_the_conversation_and_the_user(telemetry: Telemetry) -> None:
    async with (
        _calling(telemetry, telemetry.listener()) as container,
        container.request_scope({SecurityIdentity: SecurityIdentity("ann")}),
    ):
        await container.get(Desk).ask("c1", "Go")

    assert telemetry.tree[0] == "invoke_agent Desk"
    names = {each.name.split()[0] for each in telemetry.spans}
    assert names == {"invoke_agent", "chat", "execute_tool", "guardrail"}
    for each in telemetry.spans:
        assert each.attributes["gen_ai.conversation.id"] == "c1"
        assert each.attributes["user.id"] == "ann"
    for points in map(telemetry.points, ("gen_ai.invoke_agent.duration", "gen_ai.client.operation.duration")):
        assert points
        assert not any("user.id" in each.attributes for each in points)


async def test_an_anonymous_caller_has_no_user_in_spans(telemetry: Telemetry) -> None:
    async with _calling(telemetry, telemetry.listener()) as container, container.request_scope():
        await container.get(Desk).ask("c1", "Go")

    assert not any("user.id" in each.attributes for each in telemetry.spans)


@pytest.mark.parametrize("as_bean", [True, False])
async def test_the_environment_can_leave_the_user_out_of_spans(
    as_bean: bool, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLBOX_OTEL__USER", "false")
    listener = OpenTelemetryListener if as_bean else telemetry.listener()

    async with (
        _calling(telemetry, listener) as container,
        container.request_scope({SecurityIdentity: SecurityIdentity("ann")}),
    ):
        await container.get(Desk).ask("c1", "Go")

    assert {each.attributes["gen_ai.conversation.id"] for each in telemetry.spans} == {"c1"}
    assert not any("user.id" in each.attributes for each in telemetry.spans)


async def test_settings_can_leave_the_user_out_of_spans(telemetry: Telemetry) -> None:
    settings = ToolboxSettings(otel=OtelSettings(user=False))

    async with (
        _calling(telemetry, OpenTelemetryListener, settings) as container,
        container.request_scope({SecurityIdentity: SecurityIdentity("ann")}),
    ):
        await container.get(Desk).ask("c1", "Go")

    assert telemetry.spans
    assert not any("user.id" in each.attributes for each in telemetry.spans)


async def test_requests_to_an_injected_model_have_the_user(telemetry: Telemetry) -> None:
    async with (
        _calling(telemetry, telemetry.listener()) as container,
        container.request_scope({SecurityIdentity: SecurityIdentity("ann")}),
    ):
        await container.get(ChatModel).chat(ChatRequest((UserMessage("Go"),)))

    assert [each.attributes["user.id"] for each in telemetry.spans] == ["ann"]


class Allowing(InputGuardrail):
    def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        return self.success()


@tool
async def look() -> str:
    """Look around."""
    return "nothing"


@register_ai_service(tools=look)
class Desk(Protocol):
    @input_guardrails(Allowing)
    async def ask(self, memory_id: MemoryId[str], question: str) -> str: ...


def _calling(telemetry: Telemetry, listener: object, settings: ToolboxSettings | None = None) -> Container:
    model = ScriptedChatModel([tool_call("look"), "done"])
    container = Container(models={"default": model}, settings=settings).register(Desk, Allowing)
    container.register_instance(telemetry.tracers, as_type=TracerProvider)
    return container.register(listener) if isinstance(listener, type) else container.register_instance(listener)
