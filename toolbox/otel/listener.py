"""`OpenTelemetryListener`: makes spans and metrics of events.

A span is the current one while what it stands for runs, in the context in which that runs and in no other. Not here:
what spans say (`attributes`, `content`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.metrics import Histogram, MeterProvider, get_meter
from opentelemetry.trace import Span, SpanKind, StatusCode, TracerProvider, get_tracer, set_span_in_context

from ..di.marks import application_scoped
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
from .content import input_content, is_wanted, output_content, request_content
from .instruments import Instruments

# Set with each span that is made current. A reset that fails tells that this is not the context it was set in, which
# OpenTelemetry's own would log as an error: a coroutine may be closed from anywhere.
_place: ContextVar[None] = ContextVar("toolbox.otel.place", default=None)


@dataclass(slots=True)
class _Operation:
    """What is under way: its span, the context in which that is current, and the attributes of its metrics.

    `subject` is the object it is known by, kept so that no other has its id.
    """

    span: Span
    context: Context
    measured: Attributes
    subject: object
    token: Token[Context] = field(init=False)
    place: Token[None] = field(init=False)

    def enter(self) -> None:
        """Makes its span the current one."""
        self.place, self.token = _place.set(None), attach(self.context)

    def leave(self) -> None:
        """Makes the one before the current one again."""
        try:
            _place.reset(self.place)
        except ValueError:
            return  # left in another context than entered, where it was not the current one
        detach(self.token)


@application_scoped
class OpenTelemetryListener(EventListener):
    """Traces and measures calls of services, requests to models and tool calls, by OpenTelemetry's conventions.

    Spans: `invoke_agent <service>`, inside it `chat <model>` and `execute_tool <tool>`, inside that whatever the tool
    does. The providers are the given ones, else the beans of these types, else those set for the process.

    `capture_content`: whether spans have messages, arguments, results, and the text of errors, which may hold secrets.
    None: as `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT` says (`span_only`, `span_and_event` or `true`).
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        capture_content: bool | None = None,
    ) -> None:
        self._tracer = get_tracer("toolbox", tracer_provider=tracer_provider)
        self._instruments = Instruments(get_meter("toolbox", meter_provider=meter_provider))
        self._content = is_wanted() if capture_content is None else capture_content
        self._open: dict[str | int, _Operation] = {}
        self._told: dict[type[InvocationEvent], Callable[[Any], None]] = {
            ServiceStartedEvent: self._service_started,
            ServiceCompletedEvent: self._service_completed,
            ServiceFailedEvent: self._service_failed,
            ModelRequestEvent: self._model_asked,
            ModelResponseEvent: self._model_answered,
            ModelFailedEvent: self._model_failed,
            ToolStartedEvent: self._tool_started,
            ToolExecutedEvent: self._tool_executed,
            ToolFailedEvent: self._tool_failed,
        }

    def on_event(self, event: InvocationEvent) -> None:
        """See `EventListener`."""
        if (told := self._told.get(type(event))) is not None:
            told(event)

    # --- the service

    def _service_started(self, event: ServiceStartedEvent) -> None:
        attributes = service_attributes(event.context)
        name = event.context.service.__name__
        operation = self._begin(event.invocation_id, None, f"invoke_agent {name}", attributes, {AGENT: name})
        if self._content and event.context.user_message is not None and operation.span.is_recording():
            operation.span.set_attributes(input_content((event.context.user_message,)))

    def _service_completed(self, event: ServiceCompletedEvent) -> None:
        def say(span: Span) -> None:
            span.set_attributes(usage_attributes(event.token_usage) | finish_attributes(event.response))
            if self._content:
                span.set_attributes(output_content(event.response))

        self._end(event.invocation_id, self._instruments.service_duration, event.duration, say)

    def _service_failed(self, event: ServiceFailedEvent) -> None:
        self._end(event.invocation_id, self._instruments.service_duration, event.duration, error=event.error)

    # --- the model

    def _model_asked(self, event: ModelRequestEvent) -> None:
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

    def _model_answered(self, event: ModelResponseEvent) -> None:
        response, first = event.response, event.time_to_first_chunk
        operation = self._open.get(_key(event.request))
        if operation is not None:
            if response.model is not None:
                operation.measured[RESPONSE_MODEL] = response.model
            self._measure_answer(event, operation)

        def say(span: Span) -> None:
            span.set_attributes(response_attributes(response))
            if first is not None:
                span.set_attribute("gen_ai.response.time_to_first_chunk", first)
            if self._content:
                span.set_attributes(output_content(response))

        self._end(event.request, self._instruments.model_duration, event.duration, say)

    def _measure_answer(self, event: ModelResponseEvent, operation: _Operation) -> None:
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
            measured.pop(TOOL, None)  # a name that the model made up is one of any number
        self._begin(event.context, service, name, attributes, measured)

    def _tool_executed(self, event: ToolExecutedEvent) -> None:
        execution = event.execution

        def say(span: Span) -> None:
            if self._content:
                span.set_attribute("gen_ai.tool.call.result", execution.result)

        failed = (event.error or "tool_error") if execution.is_error else None
        self._end(event.context, self._instruments.tool_duration, execution.duration, say, error=failed)

    def _tool_failed(self, event: ToolFailedEvent) -> None:
        self._end(event.context, self._instruments.tool_duration, event.duration, error=event.error)

    # --- any of them

    def _begin(
        self,
        subject: object,
        parent: _Operation | None,
        name: str,
        attributes: Attributes,
        measured: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> _Operation:
        """Begins what is known by `subject`, inside `parent`, or else inside whatever is current."""
        around = get_current()
        if parent is not None:  # a tool may begin while its model still answers, and is no part of that
            around = set_span_in_context(parent.span, around)
        span = self._tracer.start_span(name, around, kind, attributes)
        operation = _Operation(span, set_span_in_context(span, around), measured, subject)
        self._open[_key(subject)] = operation
        operation.enter()
        return operation

    def _end(
        self,
        subject: object,
        histogram: Histogram,
        duration: float,
        say: Callable[[Span], None] | None = None,
        *,
        error: BaseException | str | None = None,
    ) -> None:
        """Ends what is known by `subject`, whatever happens; an error is told by its type, its text is content."""
        operation = self._open.pop(_key(subject), None)
        if operation is None:
            return  # it had begun before this listener was told of anything, or could not
        span = operation.span
        try:
            if error is not None:
                operation.measured[ERROR] = error if isinstance(error, str) else error_type(error)
                span.set_attribute(ERROR, operation.measured[ERROR])
            histogram.record(duration, operation.measured, context=operation.context)
            if error is not None:
                self._fail(span, error)
            if say is not None and span.is_recording():
                say(span)
        finally:
            operation.leave()
            span.end()

    def _fail(self, span: Span, error: BaseException | str) -> None:
        if not isinstance(error, str) and is_cancellation(error):
            return  # somebody wanted no more; nothing has failed
        span.set_status(StatusCode.ERROR)
        if self._content and isinstance(error, BaseException):
            span.set_status(StatusCode.ERROR, str(error))
            span.record_exception(error)


def _key(subject: object) -> str | int:
    """An invocation is known by its id; a request and a context, which may have equal ones, by themselves."""
    return subject if isinstance(subject, str) else id(subject)
