"""`OpenTelemetryListener`: begins and ends the spans of service calls, model requests and tool calls; records metrics.

A span is current only in the context of its operation, and only while the operation runs. Not here: the attributes of
spans (`span_attributes`), messages and tools in them (`span_content`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, fields
from time import time_ns
from typing import Any

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

from ..di.decorators import application_scoped
from ..events import (
    CompensatedEvent,
    EventListener,
    GuardrailExecutedEvent,
    HandedOverEvent,
    InvocationEvent,
    ModelFailedEvent,
    ModelRequestEvent,
    ModelResponseEvent,
    RetrievedEvent,
    RunAnsweredEvent,
    RunResumedEvent,
    RunStartedEvent,
    ServiceCompletedEvent,
    ServiceFailedEvent,
    ServiceStartedEvent,
    ServiceSuspendedEvent,
    ToldEvent,
    ToolExecutedEvent,
    ToolFailedEvent,
    ToolStartedEvent,
    ToolSuspendedEvent,
    UsageCountedEvent,
)
from ..settings import ToolboxSettings
from .span_attributes import (
    AGENT,
    ERROR,
    REQUEST_MODEL,
    RESPONSE_MODEL,
    RUN_ID,
    TOOL,
    TOOL_TYPE,
    Attributes,
    caller_attributes,
    conversation_attributes,
    error_type,
    finish_attributes,
    is_cancellation,
    model_attributes,
    request_attributes,
    response_attributes,
    service_attributes,
    tool_attributes,
    usage_attributes,
)
from .span_content import captures_content, input_content, output_content, request_content

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
    only if `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT` is `span_only`, `span_and_event` or `true`. `settings`
    decide if the spans have the name of the caller; without a container, they are read from the environment.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        capture_content: bool | None = None,
        settings: ToolboxSettings | None = None,
    ) -> None:
        self._tracer = get_tracer("toolbox", tracer_provider=tracer_provider)
        self._instruments = _Instruments(get_meter("toolbox", meter_provider=meter_provider))
        self._content = captures_content() if capture_content is None else capture_content
        self._records_user = _records_user() if settings is None else settings.otel.user
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
            RetrievedEvent: self._on_retrieved,
            HandedOverEvent: self._on_handed_over,
            ToldEvent: self._on_told,
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
        attributes = service_attributes(event.context) | self._caller_of(event)
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

    def _on_handed_over(self, event: HandedOverEvent) -> None:
        facts: Attributes = {"toolbox.handover.source": event.source, "toolbox.handover.target": event.target}
        self._add_event(event, "toolbox.handed_over", facts)

    def _on_told(self, event: ToldEvent) -> None:
        self._add_event(event, "toolbox.message_added", {})

    def _add_event(self, event: InvocationEvent, name: str, attributes: Attributes) -> None:
        """Add an event to the span of the service call."""
        if (operation := self._open.get(event.invocation_id)) is not None:
            operation.span.add_event(name, attributes)

    # --- the model

    def _on_model_requested(self, event: ModelRequestEvent) -> None:
        measured = model_attributes(event.model)
        model = measured.get(REQUEST_MODEL)
        service = self._open.get(event.invocation_id)
        if service is not None and model is not None and REQUEST_MODEL not in service.measured:
            service.measured[REQUEST_MODEL] = model
            service.span.set_attribute(REQUEST_MODEL, model)
        attributes = measured | request_attributes(event.model, event.request, event.streaming, event.context)
        attributes |= self._caller_of(event)
        if service is not None:
            attributes[AGENT] = event.context.service.__name__
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
        attributes = tool_attributes(event.context, event.request, event.specification) | self._caller_of(event)
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
        attributes = conversation_attributes(event.context) | self._caller_of(event)
        attributes |= {TOOL: event.tool_name, "toolbox.compensation.failed": event.error is not None}
        if self._content:
            attributes["gen_ai.tool.call.arguments"] = json.dumps(dict(event.arguments))
        began = ended - int(event.duration * 1e9)
        name = f"compensate {event.tool_name}"
        span = self._tracer.start_span(name, outer, SpanKind.INTERNAL, attributes, start_time=began)
        if event.error is not None:
            span.set_attribute(ERROR, error_type(event.error))
            self._mark_failed(span, event.error)
        span.end(ended)

    # --- guardrails and retrievers

    def _on_guardrail_executed(self, event: GuardrailExecutedEvent) -> None:
        name = event.guardrail.__name__
        attributes: Attributes = {"toolbox.guardrail.name": name, "toolbox.guardrail.outcome": event.outcome}
        failed = event.outcome == "fatal"
        self._add_finished_span(event, f"guardrail {name}", event.duration, attributes, failed=failed)

    def _on_retrieved(self, event: RetrievedEvent) -> None:
        name = event.retriever.__name__
        attributes: Attributes = {
            "gen_ai.operation.name": "retrieval",
            "gen_ai.data_source.id": name,
            "toolbox.retrieval.passages": len(event.passages),
        }
        if self._content:
            attributes["gen_ai.retrieval.query.text"] = event.query.text
        self._add_finished_span(event, f"retrieval {name}", event.duration, attributes)

    def _add_finished_span(
        self, event: InvocationEvent, name: str, duration: float, attributes: Attributes, *, failed: bool = False
    ) -> None:
        """Record a finished span: it began `duration` seconds ago."""
        ended = time_ns()
        operation = self._open.get(_key_of_operation(event.context)) or self._open.get(event.invocation_id)
        outer = get_current() if operation is None else operation.context
        attributes = conversation_attributes(event.context) | self._caller_of(event) | attributes
        began = ended - int(duration * 1e9)
        span = self._tracer.start_span(name, outer, SpanKind.INTERNAL, attributes, start_time=began)
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(ended)

    # --- spans

    def _caller_of(self, event: InvocationEvent) -> Attributes:
        return caller_attributes(event.context) if self._records_user else {}

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


def _records_user() -> bool:
    """Return the setting of the environment; False if the environment is invalid, which the start reports."""
    try:
        return ToolboxSettings().otel.user
    except ValueError:
        return False


def links_to(trace: Mapping[str, str]) -> list[Link]:
    """Return a link to the span that these headers identify, unless it is the current one."""
    other = get_current_span(TraceContextTextMapPropagator().extract(trace, Context())).get_span_context()
    current = get_current_span().get_span_context()
    return [Link(other)] if other.is_valid and other.span_id != current.span_id else []


def _key_of_operation(subject: object) -> str | int:
    """Return the key of an operation: an invocation's id; for requests and contexts, which can be equal, `id()`."""
    return subject if isinstance(subject, str) else id(subject)
