"""`OpenTelemetryListener`: records spans and metrics of service calls, model requests and tool calls.

A span is current only in the context of its operation, and only while the operation runs. Not here: the attributes of
spans and metrics (`attributes`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.metrics import Histogram, Meter, MeterProvider, get_meter
from opentelemetry.trace import Span, SpanKind, StatusCode, TracerProvider, get_tracer, set_span_in_context

from ..di.decorators import application_scoped
from ..events import (
    EventListener,
    InvocationEvent,
    ModelFailedEvent,
    ModelRequestEvent,
    ModelResponseEvent,
    ServiceCompletedEvent,
    ServiceFailedEvent,
    ServiceStartedEvent,
    ToolExecutedEvent,
    ToolFailedEvent,
    ToolStartedEvent,
)
from .attributes import (
    AGENT,
    ERROR,
    REQUEST_MODEL,
    RESPONSE_MODEL,
    TOOL,
    TOOL_TYPE,
    Attributes,
    captures_content,
    error_type,
    finish_attributes,
    input_content,
    is_cancellation,
    model_attributes,
    output_content,
    request_attributes,
    request_content,
    response_attributes,
    service_attributes,
    tool_attributes,
    usage_attributes,
)

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

    Spans: `invoke_agent <service>`, inside it `chat <model>` and `execute_tool <tool>`. Spans that a tool creates are
    inside `execute_tool`. `tracer_provider` and `meter_provider`: by default the beans of these types, otherwise the
    global providers.

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
            ServiceStartedEvent: self._service_started,
            ServiceCompletedEvent: self._service_completed,
            ServiceFailedEvent: self._service_failed,
            ModelRequestEvent: self._model_requested,
            ModelResponseEvent: self._model_responded,
            ModelFailedEvent: self._model_failed,
            ToolStartedEvent: self._tool_started,
            ToolExecutedEvent: self._tool_executed,
            ToolFailedEvent: self._tool_failed,
        }

    def on_event(self, event: InvocationEvent) -> None:
        """Start or end the span of `event`."""
        if (handler := self._handlers.get(type(event))) is not None:
            handler(event)

    # --- the service

    def _service_started(self, event: ServiceStartedEvent) -> None:
        attributes = service_attributes(event.context)
        name = event.context.service.__name__
        operation = self._begin(event.invocation_id, None, f"invoke_agent {name}", attributes, {AGENT: name})
        if self._content and event.context.user_message is not None and operation.span.is_recording():
            operation.span.set_attributes(input_content((event.context.user_message,)))

    def _service_completed(self, event: ServiceCompletedEvent) -> None:
        def describe(span: Span) -> None:
            span.set_attributes(usage_attributes(event.token_usage) | finish_attributes(event.response))
            if self._content:
                span.set_attributes(output_content(event.response))

        self._end(event.invocation_id, self._instruments.service_duration, event.duration, describe)

    def _service_failed(self, event: ServiceFailedEvent) -> None:
        self._end(event.invocation_id, self._instruments.service_duration, event.duration, error=event.error)

    # --- the model

    def _model_requested(self, event: ModelRequestEvent) -> None:
        measured = model_attributes(event.model)
        model = measured.get(REQUEST_MODEL)
        service = self._open.get(event.invocation_id)
        if service is not None and model is not None and REQUEST_MODEL not in service.measured:
            service.measured[REQUEST_MODEL] = model
            service.span.set_attribute(REQUEST_MODEL, model)
        attributes = measured | request_attributes(event.model, event.request, event.streaming, event.context)
        name = "chat" if model is None else f"chat {model}"
        operation = self._begin(event.request, service, name, attributes, measured, SpanKind.CLIENT)
        if self._content and operation.span.is_recording():
            operation.span.set_attributes(request_content(event.request))

    def _model_responded(self, event: ModelResponseEvent) -> None:
        response, first = event.response, event.time_to_first_chunk
        operation = self._open.get(_key(event.request))
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

        self._end(event.request, self._instruments.model_duration, event.duration, describe)

    def _record_response(self, event: ModelResponseEvent, operation: _OpenSpan) -> None:
        measured, context = operation.measured, operation.context
        if (first := event.time_to_first_chunk) is not None:
            self._instruments.time_to_first_chunk.record(first, measured, context=context)
        if (usage := event.response.token_usage) is not None:
            for kind, number in (("input", usage.input_tokens), ("output", usage.output_tokens)):
                self._instruments.tokens.record(number, {**measured, "gen_ai.token.type": kind}, context=context)

    def _model_failed(self, event: ModelFailedEvent) -> None:
        self._end(event.request, self._instruments.model_duration, event.duration, error=event.error)

    # --- tools

    def _tool_started(self, event: ToolStartedEvent) -> None:
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
        self._begin(event.context, service, name, attributes, measured)

    def _tool_executed(self, event: ToolExecutedEvent) -> None:
        execution = event.execution

        def describe(span: Span) -> None:
            if self._content:
                span.set_attribute("gen_ai.tool.call.result", execution.result)

        failed = (event.error or "tool_error") if execution.is_error else None
        self._end(event.context, self._instruments.tool_duration, execution.duration, describe, error=failed)

    def _tool_failed(self, event: ToolFailedEvent) -> None:
        self._end(event.context, self._instruments.tool_duration, event.duration, error=event.error)

    # --- spans

    def _begin(
        self,
        subject: object,
        parent: _OpenSpan | None,
        name: str,
        attributes: Attributes,
        measured: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> _OpenSpan:
        """Start the span of `subject` inside `parent`; without a parent, inside the current span."""
        outer = get_current()
        if parent is not None:  # not the current span: a tool can start while the model still streams its response
            outer = set_span_in_context(parent.span, outer)
        span = self._tracer.start_span(name, outer, kind, attributes)
        operation = _OpenSpan(span, set_span_in_context(span, outer), measured, subject)
        self._open[_key(subject)] = operation
        operation.enter()
        return operation

    def _end(
        self,
        subject: object,
        histogram: Histogram,
        duration: float,
        describe: Callable[[Span], None] | None = None,
        *,
        error: BaseException | str | None = None,
    ) -> None:
        """End the span of `subject`, also if recording fails. Error texts are recorded only with `capture_content`."""
        operation = self._open.pop(_key(subject), None)
        if operation is None:
            return  # it started before this listener was registered, or its start failed
        span = operation.span
        try:
            if error is not None:
                operation.measured[ERROR] = error if isinstance(error, str) else error_type(error)
                span.set_attribute(ERROR, operation.measured[ERROR])
            histogram.record(duration, operation.measured, context=operation.context)
            if error is not None:
                self._fail(span, error)
            if describe is not None and span.is_recording():
                describe(span)
        finally:
            operation.leave()
            span.end()

    def _fail(self, span: Span, error: BaseException | str) -> None:
        if not isinstance(error, str) and is_cancellation(error):
            return  # cancelled, not failed
        span.set_status(StatusCode.ERROR)
        if self._content and isinstance(error, BaseException):
            span.set_status(StatusCode.ERROR, str(error))
            span.record_exception(error)


def _key(subject: object) -> str | int:
    """Return the key of an operation: an invocation's id; for requests and contexts, which can be equal, `id()`."""
    return subject if isinstance(subject, str) else id(subject)
