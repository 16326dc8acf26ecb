"""Limits of the cost, and the bean that estimates it."""

from decimal import Decimal
from typing import Any, Protocol

import pytest

from toolbox import (
    Container,
    IllegalConfigurationError,
    TokenUsage,
    create_ai_service,
    register_ai_service,
)
from toolbox.limits import (
    CostEstimator,
    UsageLimitExceededError,
    UsageLimits,
    usage_limits,
)
from toolbox.testing import ScriptedChatModel

from .metered import (
    NOTE,
    Assistant,
    Prices,
    asks,
    assistant,
    limits,
    says,
)

pytestmark = pytest.mark.anyio


async def test_cost_is_checked_after_each_reply() -> None:
    service = assistant(asks(NOTE), says("never"), cost_estimator=Prices(), **limits(cost=Decimal("0.15")))
    with pytest.raises(UsageLimitExceededError) as caught:
        await service.ask("q")

    assert (caught.value.limit, caught.value.allowed, caught.value.used) == ("cost", Decimal("0.15"), Decimal("0.20"))


async def test_the_estimator_gets_the_servers_name_of_the_model_or_the_configured_one() -> None:
    class Named(ScriptedChatModel):
        model = "gpt-configured"

    prices = Prices()
    replies = [says("a", model="gpt-of-server"), says("b")]
    service: Any = create_ai_service(Assistant, chat_model=Named(replies), cost_estimator=prices, **limits(cost=1))
    await service.ask("q")
    await service.ask("q")

    assert prices.models == ["gpt-of-server", "gpt-configured"]


@pytest.mark.parametrize(
    "price", [None, Decimal("nan"), Decimal(-1), "1", float("inf"), ValueError("no price"), True], ids=repr
)
async def test_an_unknown_cost_raises_under_a_limit_of_the_cost(price: Any, caplog: pytest.LogCaptureFixture) -> None:
    service = assistant(says("ok"), cost_estimator=Prices(price), **limits(cost=Decimal(100)))
    with pytest.raises(UsageLimitExceededError) as caught:
        await service.ask("q")

    assert (caught.value.limit, caught.value.used, caught.value.usage.cost) == ("cost", None, None)
    assert "unknown" in str(caught.value)
    assert bool(caplog.text) == (price is not None)  # an estimator that fails is logged


async def test_a_reply_without_usage_is_estimated_with_0_tokens_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    class PerToken(CostEstimator):
        def estimate(self, model: str, usage: TokenUsage) -> Decimal | None:
            return usage.total_tokens * Decimal(1)

    assert await assistant(says("ok", usage=None), cost_estimator=PerToken(), **limits(cost=0)).ask("q") == "ok"
    assert "has no usage" in caplog.text


async def test_an_unknown_cost_does_not_matter_without_a_limit_of_the_cost() -> None:
    assert await assistant(says("ok"), cost_estimator=Prices(None), **limits(model_calls=1)).ask("q") == "ok"


async def test_enormous_costs_are_added_exactly_and_refused() -> None:
    prices = Prices(Decimal("9E+999999"))
    service = assistant(asks(NOTE), says("never"), cost_estimator=prices, **limits(cost=Decimal("9.5E+999999")))
    with pytest.raises(UsageLimitExceededError, match="cost"):
        await service.ask("q")


@pytest.mark.parametrize("given", [3, Prices, "prices"], ids=str)
def test_an_estimator_that_cannot_be_used_is_a_problem(given: Any) -> None:
    if given is Prices:  # its constructor needs no arguments
        assert assistant("hi", cost_estimator=given, **limits(cost=1)) is not None
        return
    with pytest.raises(IllegalConfigurationError, match="cost_estimator="):
        assistant("hi", cost_estimator=given)


def test_an_estimator_class_with_arguments_or_async_is_a_problem() -> None:
    class Needy(CostEstimator):
        def __init__(self, url: str) -> None: ...
        def estimate(self, model: str, usage: TokenUsage) -> Decimal | None: ...

    class Async(CostEstimator):
        async def estimate(self, model: str, usage: TokenUsage) -> Decimal | None: ...  # type: ignore[override]

    with pytest.raises(IllegalConfigurationError, match="needs arguments"):
        assistant("hi", cost_estimator=Needy)
    with pytest.raises(IllegalConfigurationError, match="not a CostEstimator"):
        assistant("hi", cost_estimator=Async())


def test_an_estimator_with_other_parameters_is_a_problem_at_start() -> None:
    class Short(CostEstimator):
        def estimate(self, model: str) -> Decimal | None: ...  # type: ignore[override]  # the mistake

    [problem] = Container(models={"default": ScriptedChatModel(["hi"])}).register(Short).check()
    assert problem.what == "Short.estimate does not take two arguments, the model's name and the usage"
    assert problem.fix == "declare it `def estimate(self, model, usage)`"


def test_a_limit_of_the_cost_without_an_estimator_is_a_problem() -> None:
    with pytest.raises(IllegalConfigurationError, match="needs a CostEstimator"):
        assistant("hi", **limits(cost=1))

    @register_ai_service(limits=UsageLimits(cost=Decimal(1)))
    class Researcher(Protocol):
        async def ask(self, question: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel(["hi"])}).register(Researcher).check()
    assert (problem.where, "needs a CostEstimator" in problem.what) == ("Researcher, limits=", True)


async def test_usage_limits_with_a_cost_need_an_estimator() -> None:
    @register_ai_service
    class Researcher(Protocol):
        async def ask(self, question: str) -> str: ...

    async with Container(models={"default": ScriptedChatModel(["hi"])}).register(Researcher):
        with pytest.raises(IllegalConfigurationError, match="CostEstimator"), usage_limits(cost=Decimal(1)):
            pytest.fail("the block was entered")


async def test_a_call_of_a_container_without_an_estimator_is_refused_in_a_block_with_a_cost() -> None:
    @register_ai_service
    class Researcher(Protocol):
        async def ask(self, question: str) -> str: ...

    model = ScriptedChatModel(["hi"])
    async with (
        Container(models={"default": model}).register(Researcher) as without,
        Container(models={"default": model}).register(Prices, Researcher) as other,
    ):
        with usage_limits(cost=Decimal(1)):
            with pytest.raises(IllegalConfigurationError, match="CostEstimator"):
                await (await without.aget(Researcher)).ask("q")
            assert other.is_started
    assert model.requests == []


async def test_the_estimator_is_a_bean_that_tests_can_override() -> None:
    @register_ai_service(limits=UsageLimits(cost=Decimal("0.15")))
    class Researcher(Protocol):
        async def ask(self, question: str) -> str: ...

    model = ScriptedChatModel([says("one"), says("two")])
    async with Container(models={"default": model}).register(Prices, Researcher) as container:
        researcher = await container.aget(Researcher)
        assert await researcher.ask("q") == "one"
        with container.override(CostEstimator, Prices(Decimal(3))), pytest.raises(UsageLimitExceededError):
            await researcher.ask("q")


def test_two_estimators_and_async_ones_are_problems() -> None:
    class Other(Prices): ...

    class Async(CostEstimator):
        async def estimate(self, model: str, usage: TokenUsage) -> Decimal | None: ...  # type: ignore[override]

    assert Container().register(Prices, Other).check(models=False)
    [problem] = Container().register(Async).check(models=False)
    assert "async def" in problem.what
