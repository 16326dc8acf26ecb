"""`OpenTelemetryListener`: OpenTelemetry traces and metrics of AI services (extra `otel`), by the conventions for
generative AI.

A span is current only in the context of its operation, and only while the operation runs. The names of the
conventions are literals here, because they move between packages of constants. Not here: log records (`logs`).
"""

from __future__ import annotations

try:
    import opentelemetry.trace as _  # noqa: F401 - is it installed?
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        "toolbox.otel needs OpenTelemetry; install it with: pip install 'toolbox-di[otel]'", name=_error.name
    ) from None


import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, fields
from functools import lru_cache
from time import time_ns
from typing import Any, assert_never
from urllib.parse import urlsplit

from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.metrics import Histogram, Meter, MeterProvider, get_meter
from opentelemetry.trace import (
    Link,
    Span,
    SpanKind,
    StatusCode,
    TracerProvider,
    get_current_span,
    get_tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from .chat import (
    AiMessage,
    ChatModel,
    ChatRequest,
    ChatResponse,
    FinishReason,
    Message,
    SystemMessage,
    TokenUsage,
    ToolExecutionRequest,
    ToolSpecification,
    UserMessage,
)
from .contents import PDF, AudioContent, Content, ImageContent, PdfContent, TextContent
from .context import InvocationContext
from .di.decorators import application_scoped
from .errors import ModelHttpError
from .events import (
    CompensatedEvent,
    EventListener,
    GuardrailExecutedEvent,
    InvocationEvent,
    ModelFailedEvent,
    ModelRequestEvent,
    ModelResponseEvent,
    RunAnsweredEvent,
    RunResumedEvent,
    RunStartedEvent,
    ServiceCompletedEvent,
    ServiceFailedEvent,
    ServiceStartedEvent,
    ServiceSuspendedEvent,
    ToolExecutedEvent,
    ToolFailedEvent,
    ToolStartedEvent,
    ToolSuspendedEvent,
    UsageCountedEvent,
)
from .models.fallbacks import FallbackModel

__all__ = ["OpenTelemetryListener"]

# Set together with each current span. If resetting it fails, the operation ends in another context than it began in,
# for example because a coroutine was closed elsewhere; OpenTelemetry's `detach` would log that as an error.
_context_check: ContextVar[None] = ContextVar("toolbox.otel.context_check", default=None)


@dataclass(slots=True)
class _OpenSpan:
    """A running operation: its span, the context in which the span is current, and the attributes of its metrics.

    `subject` identifies the operation; the reference keeps its `id()` unique.
    """

    span: Span
    context: Context
    measured: Attributes
    subject: object
    token: Token[Context] = field(init=False)
    check: Token[None] = field(init=False)

    def enter(self) -> None:
        """Make the span current."""
        self.check, self.token = _context_check.set(None), attach(self.context)

    def leave(self) -> None:
        """Make the previous span current again."""
        try:
            _context_check.reset(self.check)
        except ValueError:
            return  # ends in another context, where the span is not current
        detach(self.token)


RUN_ID = "toolbox.run.id"

_SECONDS = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
_SERVICE_SECONDS = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4, 204.8, 409.6]
_TOKENS: list[float] = [4**exponent for exponent in range(14)]


class _Instruments:
    """The histograms, with the bucket boundaries that the conventions recommend."""

    def __init__(self, meter: Meter) -> None:
        def seconds(name: str, description: str, bounds: list[float] = _SECONDS) -> Histogram:
            return meter.create_histogram(
                name, unit="s", description=description, explicit_bucket_boundaries_advisory=bounds
            )

        self.model_duration = seconds("gen_ai.client.operation.duration", "Duration of model requests")
        self.time_to_first_chunk = seconds(
            "gen_ai.client.operation.time_to_first_chunk", "Time to the first chunk of a streaming response"
        )
        self.tool_duration = seconds("gen_ai.execute_tool.duration", "Duration of tool calls")
        self.service_duration = seconds("gen_ai.invoke_agent.duration", "Duration of service calls", _SERVICE_SECONDS)
        self.tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Tokens used by one model request",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )


@application_scoped
class OpenTelemetryListener(EventListener):
    """Records OpenTelemetry spans and metrics of service calls, model requests and tool calls. Register it as a bean.

        container.register(OpenTelemetryListener)

    Spans: `invoke_agent <service>`, inside it `chat <model>`, `execute_tool <tool>` and `guardrail <class>`. Spans that
    a tool creates are inside `execute_tool`. `tracer_provider` and `meter_provider`: by default the beans of these
    types, otherwise the global providers.

    A suspended call ends its spans; when it continues, new ones begin. The spans of the service have the attribute
    `toolbox.run.id`, and each answer is a span `answer <tool>`.

    `capture_content`: record messages, arguments, results and error texts, which can contain secrets. None means:
    only if `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT` is `span_only`, `span_and_event` or `true`.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        capture_content: bool | None = None,
    ) -> None:
        self._tracer = get_tracer("toolbox", tracer_provider=tracer_provider)
        self._instruments = _Instruments(get_meter("toolbox", meter_provider=meter_provider))
        self._content = captures_content() if capture_content is None else capture_content
        self._open: dict[str | int, _OpenSpan] = {}
        self._handlers: dict[type[InvocationEvent], Callable[[Any], None]] = {
            ServiceStartedEvent: self._on_service_started,
            ServiceCompletedEvent: self._on_service_completed,
            ServiceFailedEvent: self._on_service_failed,
            ModelRequestEvent: self._on_model_requested,
            ModelResponseEvent: self._on_model_responded,
            ModelFailedEvent: self._on_model_failed,
            ToolStartedEvent: self._on_tool_started,
            ToolExecutedEvent: self._on_tool_executed,
            ToolFailedEvent: self._on_tool_failed,
            GuardrailExecutedEvent: self._on_guardrail_executed,
            UsageCountedEvent: self._on_usage_counted,
            ServiceSuspendedEvent: self._on_service_suspended,
            ToolSuspendedEvent: self._on_tool_suspended,
            RunAnsweredEvent: self._on_run_answered,
            RunStartedEvent: self._on_run_begins,
            RunResumedEvent: self._on_run_begins,
            CompensatedEvent: self._on_compensated,
        }
        self._runs: dict[str, RunStartedEvent | RunResumedEvent] = {}

    def on_event(self, event: InvocationEvent) -> None:
        """Start or end the span of `event`."""
        if (handler := self._handlers.get(type(event))) is not None:
            handler(event)

    # --- the service

    def _on_service_started(self, event: ServiceStartedEvent) -> None:
        attributes = service_attributes(event.context)
        name = event.context.service.__name__
        links: Sequence[Link] = ()
        if (begun := self._runs.pop(event.invocation_id, None)) is not None:
            attributes |= {RUN_ID: begun.run_id, "toolbox.run.resumed": isinstance(begun, RunResumedEvent)}
            links = links_to(begun.trace)
        operation = self._begin_span(
            event.invocation_id, None, f"invoke_agent {name}", attributes, {AGENT: name}, links=links
        )
        if self._content and event.context.user_message is not None and operation.span.is_recording():
            operation.span.set_attributes(input_content((event.context.user_message,)))

    def _on_service_completed(self, event: ServiceCompletedEvent) -> None:
        def describe(span: Span) -> None:
            span.set_attributes(usage_attributes(event.token_usage) | finish_attributes(event.response))
            if self._content:
                span.set_attributes(output_content(event.response))

        self._end_span(event.invocation_id, self._instruments.service_duration, event.duration, describe)

    def _on_service_failed(self, event: ServiceFailedEvent) -> None:
        self._end_span(event.invocation_id, self._instruments.service_duration, event.duration, error=event.error)

    # --- the model

    def _on_model_requested(self, event: ModelRequestEvent) -> None:
        measured = model_attributes(event.model)
        model = measured.get(REQUEST_MODEL)
        service = self._open.get(event.invocation_id)
        if service is not None and model is not None and REQUEST_MODEL not in service.measured:
            service.measured[REQUEST_MODEL] = model
            service.span.set_attribute(REQUEST_MODEL, model)
        attributes = measured | request_attributes(event.model, event.request, event.streaming, event.context)
        name = "chat" if model is None else f"chat {model}"
        operation = self._begin_span(event.request, service, name, attributes, measured, SpanKind.CLIENT)
        if self._content and operation.span.is_recording():
            operation.span.set_attributes(request_content(event.request))

    def _on_model_responded(self, event: ModelResponseEvent) -> None:
        response, first = event.response, event.time_to_first_chunk
        operation = self._open.get(_key_of_operation(event.request))
        if operation is not None:
            if response.model is not None:
                operation.measured[RESPONSE_MODEL] = response.model
            self._record_response(event, operation)

        def describe(span: Span) -> None:
            span.set_attributes(response_attributes(response))
            if first is not None:
                span.set_attribute("gen_ai.response.time_to_first_chunk", first)
            if self._content:
                span.set_attributes(output_content(response))

        self._end_span(event.request, self._instruments.model_duration, event.duration, describe)

    def _record_response(self, event: ModelResponseEvent, operation: _OpenSpan) -> None:
        measured, context = operation.measured, operation.context
        if (first := event.time_to_first_chunk) is not None:
            self._instruments.time_to_first_chunk.record(first, measured, context=context)
        if (usage := event.response.token_usage) is not None:
            for kind, number in (("input", usage.input_tokens), ("output", usage.output_tokens)):
                self._instruments.tokens.record(number, {**measured, "gen_ai.token.type": kind}, context=context)

    def _on_model_failed(self, event: ModelFailedEvent) -> None:
        self._end_span(event.request, self._instruments.model_duration, event.duration, error=event.error)

    # --- tools

    def _on_tool_started(self, event: ToolStartedEvent) -> None:
        service = self._open.get(event.invocation_id)
        attributes = tool_attributes(event.context, event.request, event.specification)
        if service is not None:
            attributes[AGENT] = event.context.service.__name__
        if self._content:
            attributes[TOOL] = event.request.name
            attributes["gen_ai.tool.call.arguments"] = event.request.arguments
        name = "execute_tool" if event.specification is None else f"execute_tool {event.specification.name}"
        measured = {each: attributes[each] for each in (TOOL, TOOL_TYPE, AGENT) if each in attributes}
        if event.specification is None:
            measured.pop(TOOL, None)  # the model can invent any number of names
        self._begin_span(event.context, service, name, attributes, measured)

    def _on_tool_executed(self, event: ToolExecutedEvent) -> None:
        execution = event.execution

        def describe(span: Span) -> None:
            if self._content:
                span.set_attribute("gen_ai.tool.call.result", execution.result)

        failed = (event.error or "tool_error") if execution.is_error else None
        self._end_span(event.context, self._instruments.tool_duration, execution.duration, describe, error=failed)

    def _on_tool_failed(self, event: ToolFailedEvent) -> None:
        self._end_span(event.context, self._instruments.tool_duration, event.duration, error=event.error)

    # --- runs

    def _on_service_suspended(self, event: ServiceSuspendedEvent) -> None:
        def describe(span: Span) -> None:
            calls = [f"{each.tool_name} {each.id}" for each in event.pending]
            span.set_attributes({RUN_ID: event.run_id, "toolbox.run.suspended": True, "toolbox.run.pending": calls})

        self._end_span(event.invocation_id, self._instruments.service_duration, event.duration, describe)

    def _on_tool_suspended(self, event: ToolSuspendedEvent) -> None:
        def describe(span: Span) -> None:
            span.set_attribute("toolbox.run.suspended_by", event.kind)

        self._end_span(event.context, self._instruments.tool_duration, event.duration, describe)

    def _on_run_answered(self, event: RunAnsweredEvent) -> None:
        """Record a finished span. The name of the person is recorded only with `capture_content`."""
        call = event.call
        attributes: Attributes = {
            RUN_ID: event.run_id,
            TOOL: call.tool_name,
            "toolbox.run.call": call.id,
            "toolbox.run.answer": event.answer,
        }
        if self._content and event.by is not None:
            attributes["toolbox.run.answered_by"] = event.by
        name, links = f"answer {call.tool_name}", links_to(event.trace)
        self._tracer.start_span(name, get_current(), SpanKind.INTERNAL, attributes, links).end()

    def _on_run_begins(self, event: RunStartedEvent | RunResumedEvent) -> None:
        self._runs[event.invocation_id] = event  # for the span of the service, which starts next

    def _on_compensated(self, event: CompensatedEvent) -> None:
        """Record a finished span: it begins as long ago as the compensation took."""
        ended, operation = time_ns(), self._open.get(event.invocation_id)
        outer = get_current() if operation is None else operation.context
        attributes: Attributes = {TOOL: event.tool_name, "toolbox.compensation.failed": event.error is not None}
        if self._content:
            attributes["gen_ai.tool.call.arguments"] = json.dumps(dict(event.arguments))
        began = ended - int(event.duration * 1e9)
        name = f"compensate {event.tool_name}"
        span = self._tracer.start_span(name, outer, SpanKind.INTERNAL, attributes, start_time=began)
        if event.error is not None:
            span.set_attribute(ERROR, error_type(event.error))
            self._mark_failed(span, event.error)
        span.end(ended)

    # --- guardrails

    def _on_usage_counted(self, event: UsageCountedEvent) -> None:
        """Record the usage against the limits at the span of the service call."""
        operation = self._open.get(event.invocation_id)
        if operation is None:
            return
        for each in fields(event.limits):
            used, allowed = event.usage.of(each.name), getattr(event.limits, each.name)
            if used is not None:
                operation.span.set_attribute(
                    f"toolbox.usage.{each.name}", float(used) if each.name == "cost" else min(int(used), 2**63 - 1)
                )
            if allowed is not None:
                limit = float(allowed) if each.name == "cost" else allowed
                operation.span.set_attribute(f"toolbox.limit.{each.name}", limit)

    def _on_guardrail_executed(self, event: GuardrailExecutedEvent) -> None:
        """Record a finished span: it begins as long ago as the guardrail took."""
        name, ended = event.guardrail.__name__, time_ns()
        operation = self._open.get(_key_of_operation(event.context)) or self._open.get(event.invocation_id)
        outer = get_current() if operation is None else operation.context
        attributes: Attributes = {"toolbox.guardrail.name": name, "toolbox.guardrail.outcome": event.outcome}
        began = ended - int(event.duration * 1e9)
        span = self._tracer.start_span(f"guardrail {name}", outer, SpanKind.INTERNAL, attributes, start_time=began)
        if event.outcome == "fatal":
            span.set_status(StatusCode.ERROR)
        span.end(ended)

    # --- spans

    def _begin_span(
        self,
        subject: object,
        parent: _OpenSpan | None,
        name: str,
        attributes: Attributes,
        measured: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
    ) -> _OpenSpan:
        """Start the span of `subject` inside `parent`; without a parent, inside the current span."""
        outer = get_current()
        if parent is not None:  # not the current span: a tool can start while the model still streams its response
            outer = set_span_in_context(parent.span, outer)
        span = self._tracer.start_span(name, outer, kind, attributes, links)
        operation = _OpenSpan(span, set_span_in_context(span, outer), measured, subject)
        self._open[_key_of_operation(subject)] = operation
        operation.enter()
        return operation

    def _end_span(
        self,
        subject: object,
        histogram: Histogram,
        duration: float,
        describe: Callable[[Span], None] | None = None,
        *,
        error: BaseException | str | None = None,
    ) -> None:
        """End the span of `subject`, also if recording fails. Error texts are recorded only with `capture_content`."""
        operation = self._open.pop(_key_of_operation(subject), None)
        if operation is None:
            return  # it started before this listener was registered, or its start failed
        span = operation.span
        try:
            if error is not None:
                operation.measured[ERROR] = error if isinstance(error, str) else error_type(error)
                span.set_attribute(ERROR, operation.measured[ERROR])
            histogram.record(duration, operation.measured, context=operation.context)
            if error is not None:
                self._mark_failed(span, error)
            if describe is not None and span.is_recording():
                describe(span)
        finally:
            operation.leave()
            span.end()

    def _mark_failed(self, span: Span, error: BaseException | str) -> None:
        if not isinstance(error, str) and is_cancellation(error):
            return  # cancelled, not failed
        span.set_status(StatusCode.ERROR)
        if self._content and isinstance(error, BaseException):
            span.set_status(StatusCode.ERROR, str(error))
            span.record_exception(error)


def links_to(trace: Mapping[str, str]) -> list[Link]:
    """Return a link to the span that these headers identify, unless it is the current one."""
    other = get_current_span(TraceContextTextMapPropagator().extract(trace, Context())).get_span_context()
    current = get_current_span().get_span_context()
    return [Link(other)] if other.is_valid and other.span_id != current.span_id else []


def _key_of_operation(subject: object) -> str | int:
    """Return the key of an operation: an invocation's id; for requests and contexts, which can be equal, `id()`."""
    return subject if isinstance(subject, str) else id(subject)


Attributes = dict[str, AttributeValue]

OPERATION = "gen_ai.operation.name"
AGENT = "gen_ai.agent.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
TOOL = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
ERROR = "error.type"


# --- the service


def service_attributes(context: InvocationContext) -> Attributes:
    """Return the attributes of a service call. All its spans and log records share `toolbox.invocation.id`."""
    service = context.service
    return {
        OPERATION: "invoke_agent",
        AGENT: service.__name__,
        "code.function.name": f"{service.__module__}.{service.__qualname__}.{context.method}",
        **_call_attributes(context),
    }


def _call_attributes(context: InvocationContext) -> Attributes:
    found: Attributes = {"toolbox.invocation.id": context.invocation_id}
    if context.memory_id is not None:
        found["gen_ai.conversation.id"] = str(context.memory_id)
    return found


def usage_attributes(usage: TokenUsage | None) -> Attributes:
    """Return the token usage, if it is known."""
    if usage is None:
        return {}
    found: Attributes = {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
    }
    if usage.cached_input_tokens:
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_input_tokens
    if usage.cache_write_tokens:
        found["gen_ai.usage.cache_creation.input_tokens"] = usage.cache_write_tokens
    if usage.reasoning_tokens:
        found["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning_tokens
    return found


# --- the model


def model_attributes(model: ChatModel) -> Attributes:
    """Return the attributes of a model and its server that spans and metrics share.

    Custom models can set them with the attributes `model`, `base_url` and `provider_name`.
    """
    found: Attributes = {OPERATION: "chat"}
    if isinstance(model, FallbackModel):  # unknown which model will answer; the response has its name
        asked = model_attributes(model.models[0])
        return {name: value for name, value in asked.items() if not name.startswith("server.")}
    base_url, name = getattr(model, "base_url", None), getattr(model, "model", None)
    provider, server = _provider_and_server(base_url) if isinstance(base_url, str) else (type(model).__name__, {})
    provider_name = getattr(model, "provider_name", None)
    found["gen_ai.provider.name"] = provider_name if isinstance(provider_name, str) else provider
    if isinstance(name, str):
        found[REQUEST_MODEL] = name
    return found | server


# Provider names of the conventions, by domain.
_PROVIDERS = {
    "openai.azure.com": "azure.ai.openai",
    "services.ai.azure.com": "azure.ai.inference",
    "generativelanguage.googleapis.com": "gcp.gemini",
    "aiplatform.googleapis.com": "gcp.vertex_ai",
    "amazonaws.com": "aws.bedrock",
    "anthropic.com": "anthropic",
    "cohere.com": "cohere",
    "cohere.ai": "cohere",
    "deepseek.com": "deepseek",
    "groq.com": "groq",
    "mistral.ai": "mistral_ai",
    "moonshot.ai": "moonshot_ai",
    "perplexity.ai": "perplexity",
    "x.ai": "x_ai",
}


@lru_cache(maxsize=64)
def _provider_and_server(base_url: str) -> tuple[str, Attributes]:
    """Return the provider of a URL and the server's attributes. The provider of an unknown domain is `openai`."""
    try:
        parts = urlsplit(base_url)
        host, port = parts.hostname, parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError:
        return "openai", {}
    if host is None:
        return "openai", {}
    known = (name for suffix, name in _PROVIDERS.items() if host == suffix or host.endswith(f".{suffix}"))
    return next(known, "openai"), {"server.address": host, "server.port": port}


# Numeric request parameters, by their names in the providers' APIs.
_PARAMETERS = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
}


def request_attributes(
    model: ChatModel, request: ChatRequest, streaming: bool, context: InvocationContext
) -> Attributes:
    """Return the further attributes of the span of a model request."""
    own = getattr(model, "parameters", None)
    parameters: dict[str, Any] = {**(own if isinstance(own, Mapping) else {}), **request.parameters}
    named = {
        "temperature": request.temperature,
        "max_output_tokens": request.max_output_tokens,
        "reasoning_effort": request.reasoning,
    }
    parameters |= {name: value for name, value in named.items() if value is not None}
    found = _call_attributes(context)
    for name, value in parameters.items():
        if name in _PARAMETERS and isinstance(value, (int, float)) and not isinstance(value, bool):
            found[_PARAMETERS[name]] = value
    stop = parameters.get("stop")
    if isinstance(stop, str):
        found["gen_ai.request.stop_sequences"] = (stop,)
    elif isinstance(stop, (list, tuple)):
        found["gen_ai.request.stop_sequences"] = tuple(str(each) for each in stop)
    if isinstance(effort := parameters.get("reasoning_effort"), str):
        found["gen_ai.request.reasoning.level"] = effort
    if isinstance(choices := parameters.get("n"), int) and choices != 1:
        found["gen_ai.request.choice.count"] = choices
    if request.response_format is not None:
        found["gen_ai.output.type"] = "json"
    if streaming:
        found["gen_ai.request.stream"] = True
    return found


def response_attributes(response: ChatResponse) -> Attributes:
    """Return the attributes of a model's response."""
    found = usage_attributes(response.token_usage) | finish_attributes(response)
    if response.id is not None:
        found["gen_ai.response.id"] = response.id
    if response.model is not None:
        found[RESPONSE_MODEL] = response.model
    return found


def finish_attributes(response: ChatResponse) -> Attributes:
    """Return the finish reason as an attribute, if it is known."""
    reason = finish_reason(response)
    return {} if reason is None else {"gen_ai.response.finish_reasons": (reason,)}


def finish_reason(response: ChatResponse) -> str | None:
    """Return the finish reason by its name in the conventions."""
    reason = response.finish_reason
    return "tool_call" if reason is FinishReason.TOOL_EXECUTION else reason.value if reason is not None else None


# --- tools


def tool_attributes(
    context: InvocationContext, request: ToolExecutionRequest, specification: ToolSpecification | None
) -> Attributes:
    """Return the attributes of a tool call. An unknown tool gets no name, because the model can invent any name."""
    found: Attributes = {OPERATION: "execute_tool", "gen_ai.tool.call.id": request.id, **_call_attributes(context)}
    if specification is not None:
        found |= {TOOL: specification.name, TOOL_TYPE: "function"}
        if specification.description:
            found["gen_ai.tool.description"] = specification.description
    return found


# --- errors


def error_type(error: BaseException) -> str:
    """Return the HTTP status of a `ModelHttpError`, otherwise the full name of the error's class."""
    if isinstance(error, ModelHttpError):
        return str(error.status)
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def is_cancellation(error: BaseException) -> bool:
    """Return True if the operation was cancelled, not failed."""
    return isinstance(error, (asyncio.CancelledError, GeneratorExit))


# --- messages and tools as JSON

_CAPTURE_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_INPUT_MESSAGES = "gen_ai.input.messages"
_OUTPUT_MESSAGES = "gen_ai.output.messages"


def captures_content() -> bool:
    """Return True if the environment asks for message content on spans (not only on log events)."""
    return os.environ.get(_CAPTURE_VARIABLE, "").strip().lower() in ("true", "span_only", "span_and_event")


def input_content(messages: Sequence[Message]) -> dict[str, AttributeValue]:
    """Return the input messages of a model or service as JSON."""
    return {_INPUT_MESSAGES: _write_json([_describe_message(each) for each in messages])}


def request_content(request: ChatRequest) -> dict[str, AttributeValue]:
    """Return the input messages and tool definitions of a model request as JSON."""
    found = input_content(request.messages)
    if request.tool_specifications:
        found["gen_ai.tool.definitions"] = _write_json(
            [
                {"type": "function", "name": each.name, "description": each.description, "parameters": each.parameters}
                for each in request.tool_specifications
            ]
        )
    return found


def output_content(response: ChatResponse) -> dict[str, AttributeValue]:
    """Return the output message of a model as JSON."""
    return {
        _OUTPUT_MESSAGES: _write_json(
            [{**_describe_message(response.ai_message), "finish_reason": finish_reason(response)}]
        )
    }


def _write_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def _describe_message(message: Message) -> dict[str, Any]:
    if isinstance(message, SystemMessage):
        return {"role": "system", "parts": [_describe_text(message.text)]}
    if isinstance(message, UserMessage):
        return {"role": "user", "parts": [_describe_content(each) for each in message.contents]}
    if isinstance(message, AiMessage):
        parts = [{"type": "reasoning", "content": message.reasoning}] if message.reasoning else []
        parts += [_describe_text(message.text)] if message.text else []
        return {
            "role": "assistant",
            "parts": parts + [_describe_tool_call(each) for each in message.tool_execution_requests],
        }
    answer = {"type": "tool_call_response", "id": message.id, "response": message.text}
    parts = [_describe_content(each) for each in message.contents]
    return {"role": "tool", "parts": [answer, *(each for each in parts if each["type"] != "text")]}


def _describe_text(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text}


def _describe_tool_call(request: ToolExecutionRequest) -> dict[str, Any]:
    arguments: Any = request.arguments
    with suppress(ValueError):  # keep invalid JSON as text
        arguments = json.loads(arguments)
    return {"type": "tool_call", "id": request.id, "name": request.name, "arguments": arguments}


def _describe_content(content: Content) -> dict[str, Any]:
    match content:
        case TextContent(text):
            return _describe_text(text)
        case ImageContent(str() as url) if not url.startswith("data:"):
            return {"type": "uri", "modality": "image", "mime_type": content.mime_type, "uri": url}
        case ImageContent():  # data is too large for a span
            return {"type": "image", "mime_type": content.mime_type}
        case PdfContent(str() as url) if not url.startswith("data:"):
            return {"type": "uri", "modality": "document", "mime_type": PDF, "uri": url}
        case PdfContent():
            return {"type": "document", "mime_type": PDF, **({"name": content.name} if content.name else {})}
        case AudioContent():
            return {"type": "audio", "mime_type": content.mime_type}
        case _:
            assert_never(content)
