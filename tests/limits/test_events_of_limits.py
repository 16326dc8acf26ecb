"""Usage against limits in events, spans and the dev UI's timeline; ready-made prices."""

from decimal import Decimal
from typing import Any, Protocol

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.listening import Events
from toolbox import AiMessage, ChatResponse, Container, TokenUsage, create_ai_service, register_ai_service, tool
from toolbox.events import UsageCountedEvent
from toolbox.limits import CostEstimator, GenAiPrices, Usage, UsageLimitExceededError, UsageLimits, usage_limits
from toolbox.otel import OpenTelemetryListener
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi.dev_ui.journal import DevUiListener, Journal

pytestmark = pytest.mark.anyio


@tool
def note() -> str:
    return "noted"


LIMITS = UsageLimits(model_calls=5, total_tokens=100)


@register_ai_service(tools=note, limits=LIMITS)
class Limited(Protocol):
    async def ask(self, question: str) -> str: ...


def model() -> ScriptedChatModel:
    asks = ChatResponse(AiMessage(None, (tool_call("note", {}),)), TokenUsage(10, 1))
    return ScriptedChatModel([asks, ChatResponse(AiMessage("done"), TokenUsage(20, 2))])


async def test_listeners_receive_the_usage_after_each_reply() -> None:
    async with Container(models={"default": model()}).register(Limited, Events) as container:
        await (await container.aget(Limited)).ask("q")
        counted = container.get(Events).of(UsageCountedEvent)

    assert [each.limits for each in counted] == [LIMITS, LIMITS]
    assert [each.usage for each in counted] == [
        Usage(1, 0, TokenUsage(10, 1), None),
        Usage(2, 1, TokenUsage(30, 3), None),
    ]


async def test_calls_without_limits_have_no_such_event() -> None:
    @register_ai_service(tools=note)
    class Unlimited(Protocol):
        async def ask(self, question: str) -> str: ...

    async with Container(models={"default": model()}).register(Unlimited, Events) as container:
        await (await container.aget(Unlimited)).ask("q")
        assert container.get(Events).seen
        assert container.get(Events).of(UsageCountedEvent) == []


async def test_spans_show_the_usage_and_the_limits() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    container = Container(models={"default": model()}).register(Limited)
    container.register_instance(OpenTelemetryListener(tracer_provider=provider))
    async with container:
        await (await container.aget(Limited)).ask("q")
    [span] = [each for each in exporter.get_finished_spans() if "toolbox.limit.model_calls" in (each.attributes or {})]
    attributes = dict(span.attributes or {})

    assert attributes["toolbox.limit.model_calls"] == 5
    assert attributes["toolbox.limit.total_tokens"] == 100
    assert attributes["toolbox.usage.model_calls"] == 2
    assert attributes["toolbox.usage.total_tokens"] == 33
    assert "toolbox.limit.cost" not in attributes


async def test_the_timeline_of_the_dev_ui_shows_the_usage() -> None:
    journal = Journal()
    container = Container(models={"default": model()}).register(Limited)
    container.register_instance(DevUiListener(journal))
    async with container:
        await (await container.aget(Limited)).ask("q")
    found: list[Any] = [each for each in journal._entries if each["type"] == "usage"]

    assert [each["result"] for each in found] == [
        "model_calls 1 of 5, total_tokens 11 of 100",
        "model_calls 2 of 5, total_tokens 33 of 100",
    ]


# --- ready-made prices


def test_prices_of_known_models() -> None:
    prices = GenAiPrices()

    assert prices.estimate("gpt-5-mini", TokenUsage(1000, 200)) == Decimal("0.00065")
    cached = prices.estimate("gpt-5-mini", TokenUsage(1000, 200, cached_input_tokens=1000))
    assert cached is not None
    assert cached < Decimal("0.00065")
    assert prices.estimate("claude-sonnet-4-5", TokenUsage(1000, 200)) == Decimal("0.006")


@pytest.mark.parametrize("name", ["no-such-model", "", "x" * 10_000])
def test_prices_of_unknown_models_are_unknown(name: str) -> None:
    assert GenAiPrices().estimate(name, TokenUsage(1, 1)) is None


def test_prices_of_an_unknown_provider_are_unknown() -> None:
    assert GenAiPrices("no-such-provider").estimate("gpt-5-mini", TokenUsage(1, 1)) is None


def test_inconsistent_usage_of_a_server_does_not_fail() -> None:
    assert GenAiPrices().estimate("gpt-5-mini", TokenUsage(1, 1, cached_input_tokens=50)) is not None


async def test_the_ready_made_prices_are_a_bean() -> None:
    @register_ai_service(limits=UsageLimits(cost=Decimal("0.0001")))
    class Costly(Protocol):
        async def ask(self, question: str) -> str: ...

    reply = ChatResponse(AiMessage("hi"), TokenUsage(1000, 200), model="gpt-5-mini")
    container = Container(models={"default": ScriptedChatModel([reply])}).register(GenAiPrices, Costly)
    async with container:
        assert isinstance(await container.aget(CostEstimator), GenAiPrices)
        with pytest.raises(UsageLimitExceededError, match="cost"):
            await (await container.aget(Costly)).ask("q")


async def test_the_ready_made_prices_work_without_a_container() -> None:
    reply = ChatResponse(AiMessage("hi"), TokenUsage(50, 20), model="gpt-5-mini")
    service: Any = create_ai_service(Limited, chat_model=ScriptedChatModel([reply]), cost_estimator=GenAiPrices)
    with usage_limits(cost=Decimal("0.01")):
        assert await service.ask("q") == "hi"
