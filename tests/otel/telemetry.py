"""Spans and metrics in memory, by OpenTelemetry's own SDK, and a service with tools to trace."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from toolbox import (
    Container,
    MemoryId,
    ToolAbort,
    ToolExecutionResult,
    register_ai_service,
    run_on_thread,
    system_message,
    tool,
    user_message,
)
from toolbox.otel import OpenTelemetryListener
from toolbox.testing import ScriptedChatModel

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
    def spans(self) -> list[Any]:  # their fields may be None by type, which these spans do not have
        """In the order in which they began."""
        return sorted(self.exporter.get_finished_spans(), key=lambda each: each.start_time or 0)

    def span(self, name: str) -> Any:
        [found] = [each for each in self.spans if each.name == name]
        return found

    @property
    def tree(self) -> list[str]:
        """The names, indented by how deep they lie."""
        spans = self.spans
        by_id = {each.context.span_id: each for each in spans}

        def depth(span: Any) -> int:
            return 0 if span.parent is None else 1 + depth(by_id[span.parent.span_id])

        lines: list[str] = []

        def below(parent: int | None) -> None:
            for each in spans:
                if (each.parent.span_id if each.parent else None) == parent:
                    lines.append("  " * depth(each) + each.name)
                    below(each.context.span_id)

        below(None)
        return lines

    def points(self, name: str) -> list[Any]:
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


def span_id() -> str:
    """The current span's id, as seen by a program."""
    return f"{trace.get_current_span().get_span_context().span_id:016x}"


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
