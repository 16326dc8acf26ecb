"""Limits of services: their values, which calls and tokens count, and when a call is refused."""

import copy
import logging
import pickle
from decimal import Decimal
from typing import Any

import pytest

from toolbox import (
    AiMessage,
    ChatRequest,
    IllegalConfigurationError,
    TokenUsage,
    ToolAbort,
    create_ai_service,
    return_to_model,
    tool,
)
from toolbox.limits import (
    Usage,
    UsageLimitExceededError,
    UsageLimits,
    current_usage,
    usage_limits,
)
from toolbox.testing import ScriptedChatModel, tool_call

from .metered import (
    NOTE,
    Assistant,
    Prices,
    asks,
    assistant,
    limits,
    note,
    ran,
    says,
)

pytestmark = pytest.mark.anyio


# --- the values


@pytest.mark.parametrize("name", ["model_calls", "tool_calls", "input_tokens", "output_tokens", "total_tokens"])
@pytest.mark.parametrize("value", [-1, 1.5, float("nan"), float("inf"), "3", True, Decimal(1)])
def test_limits_of_calls_and_tokens_are_whole_numbers_of_0_or_more(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        UsageLimits(**{name: value})
    with pytest.raises(ValueError, match=name), usage_limits(**{name: value}):
        pytest.fail("the block was entered")


@pytest.mark.parametrize(
    "cost", [Decimal(-1), Decimal("nan"), Decimal("inf"), Decimal("-0.01"), "1", float("nan"), True]
)
def test_a_limit_of_the_cost_is_an_amount_of_0_or_more(cost: Any) -> None:
    with pytest.raises(ValueError, match="cost"):
        UsageLimits(cost=cost)


def test_limits_are_optional_and_can_be_given_in_order() -> None:
    assert UsageLimits() == UsageLimits(None, None, None, None, None, None)
    assert UsageLimits(1, 2, 3, 4, 5, Decimal(6)).cost == Decimal(6)
    assert UsageLimits(cost=0.1).cost == Decimal("0.1")  # type: ignore[arg-type]  # floats become exact decimals


def test_a_wrong_option_is_a_problem() -> None:
    with pytest.raises(IllegalConfigurationError, match="invalid limits=3"):
        assistant("hi", limits=3)


def test_the_error_has_its_facts_and_can_be_pickled() -> None:
    usage = Usage(2, 1, TokenUsage(10, 5), Decimal("0.1"))
    error = UsageLimitExceededError("total_tokens", 10, 15, usage, (AiMessage("hi"),))
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (other.limit, other.allowed, other.used, other.usage, other.transcript) == (
            "total_tokens",
            10,
            15,
            usage,
            (AiMessage("hi"),),
        )
    assert "total_tokens=10" in str(error)
    assert "15 used" in str(error)


# --- calls are reserved


async def test_a_model_call_too_many_is_not_sent() -> None:
    model = ScriptedChatModel([asks(NOTE), asks(NOTE), says("never")])
    service: Any = create_ai_service(Assistant, chat_model=model, tools=[note], **limits(model_calls=2))
    with pytest.raises(UsageLimitExceededError) as caught:
        await service.ask("q")

    error = caught.value
    assert (error.limit, error.allowed, error.used) == ("model_calls", 2, 2)
    assert error.usage == Usage(2, 2, TokenUsage(20, 2), None)
    assert len(model.requests) == 2
    assert [type(each).__name__ for each in error.transcript] == [
        "UserMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
    ]


async def test_a_limit_of_0_refuses_the_first_call() -> None:
    model = ScriptedChatModel(["never"])
    service: Any = create_ai_service(Assistant, chat_model=model, **limits(model_calls=0))
    with pytest.raises(UsageLimitExceededError, match="model_calls=0"):
        await service.ask("q")

    assert model.requests == []


async def test_no_tool_runs_if_a_reply_has_too_many_calls() -> None:
    service = assistant(asks(NOTE, NOTE, NOTE), says("never"), **limits(tool_calls=2))
    with pytest.raises(UsageLimitExceededError) as caught:
        await service.ask("q")

    assert ran == []
    assert (caught.value.limit, caught.value.allowed, caught.value.used) == ("tool_calls", 2, 0)
    assert caught.value.transcript[-1] == AiMessage(None, (NOTE, NOTE, NOTE))


@pytest.mark.parametrize("concurrent", [False, True])
async def test_streams_start_no_tool_of_a_reply_with_too_many_calls(concurrent: bool) -> None:
    service = assistant(asks(NOTE, NOTE), says("never"), concurrent_tools=concurrent, **limits(tool_calls=1))
    with pytest.raises(UsageLimitExceededError):
        _ = [each async for each in service.events("q")]

    assert ran == []


async def test_exactly_as_many_calls_as_allowed_run() -> None:
    service = assistant(asks(NOTE, NOTE), says("done"), **limits(tool_calls=2, model_calls=2))

    assert await service.ask("q") == "done"
    assert ran == ["a", "a"]


async def test_calls_count_whether_or_not_they_run() -> None:
    unknown, invalid = tool_call("nothing", {}), tool_call("note", {"wrong": 1})
    handlers = {"on_unknown_tool": return_to_model, "on_tool_arguments_error": return_to_model}
    service = assistant(asks(unknown), asks(invalid), asks(NOTE), says("never"), **handlers, **limits(tool_calls=2))
    with pytest.raises(UsageLimitExceededError) as caught:
        await service.ask("q")

    assert caught.value.usage.tool_calls == 2
    assert ran == []


async def test_the_call_that_is_the_answer_is_not_a_tool_call() -> None:
    answer = asks(tool_call("give_answer", {"value": 7}))
    service = assistant(answer, output_mode="tool", **limits(tool_calls=0))
    names = {each.name for each in (await _request_of(service)).tool_specifications}

    service = assistant(asks(tool_call(_answer_tool(names), {"value": 7})), output_mode="tool", **limits(tool_calls=0))
    assert await service.number("q") == 7


def _answer_tool(names: set[str]) -> str:
    [name] = names - {"note"}
    return name


async def _request_of(service: Any) -> ChatRequest:
    model = ScriptedChatModel([OSError("stop")])
    made: Any = create_ai_service(Assistant, chat_model=model, tools=[note], output_mode="tool")
    with pytest.raises(OSError, match="stop"):
        await made.number("q")
    return model.requests[0]


# --- tokens


@pytest.mark.parametrize(
    ("name", "allowed", "used"), [("input_tokens", 19, 20), ("output_tokens", 1, 2), ("total_tokens", 21, 22)]
)
async def test_tokens_are_checked_after_each_reply(name: str, allowed: int, used: int) -> None:
    model = ScriptedChatModel([asks(NOTE), asks(NOTE), says("never")])
    service: Any = create_ai_service(Assistant, chat_model=model, tools=[note], **limits(**{name: allowed}))
    with pytest.raises(UsageLimitExceededError) as caught:
        await service.ask("q")

    assert (caught.value.limit, caught.value.allowed, caught.value.used) == (name, allowed, used)
    assert ran == ["a"]  # the tools of the second reply did not run
    assert caught.value.transcript[-1] == AiMessage(None, (NOTE,))


async def test_tokens_are_exceeded_when_more_are_used_than_allowed() -> None:
    assert await assistant(says("ok"), **limits(total_tokens=15)).ask("q") == "ok"
    with pytest.raises(UsageLimitExceededError, match="total_tokens=14"):
        await assistant(says("ok"), **limits(total_tokens=14)).ask("q")


async def test_tokens_are_checked_before_each_request() -> None:
    model = ScriptedChatModel([says("one"), says("two")])
    service: Any = create_ai_service(Assistant, chat_model=model)
    with usage_limits(total_tokens=10):
        with pytest.raises(UsageLimitExceededError):
            await service.ask("q")
        with pytest.raises(UsageLimitExceededError):
            await service.ask("q")

    assert len(model.requests) == 1


async def test_a_reply_without_usage_is_logged_and_counts_0(caplog: pytest.LogCaptureFixture) -> None:
    service = assistant(says("ok", usage=None), **limits(total_tokens=0))
    with caplog.at_level(logging.WARNING, "toolbox.limits"):
        assert await service.ask("q") == "ok"

    assert "has no usage; it counts as 0 tokens" in caplog.text


async def test_a_reply_without_usage_is_not_logged_if_tokens_have_no_limit(caplog: pytest.LogCaptureFixture) -> None:
    assert await assistant(says("ok", usage=None), **limits(model_calls=1)).ask("q") == "ok"
    assert caplog.text == ""


async def test_a_server_cannot_lower_the_count_with_negative_usage() -> None:
    service = assistant(asks(NOTE, usage=TokenUsage(-1000, -5, -3)), says("ok"), **limits(total_tokens=14))
    with pytest.raises(UsageLimitExceededError) as caught:
        await service.ask("q")

    assert caught.value.usage.tokens == TokenUsage(10, 5)


async def test_huge_usages_are_refused_like_others() -> None:
    with pytest.raises(UsageLimitExceededError) as caught:
        await assistant(says("ok", usage=TokenUsage(10**30, 10**400)), **limits(total_tokens=5)).ask("q")

    assert caught.value.used == 10**30 + 10**400


# --- current usage


async def test_current_usage_is_that_of_the_innermost_account() -> None:
    seen: list[Usage] = []

    @tool
    def look() -> str:
        seen.append(current_usage())
        return "seen"

    look_call = asks(tool_call("look", {}))
    assert current_usage() == Usage(0, 0, TokenUsage(0, 0), Decimal(0))
    with usage_limits(total_tokens=1000):
        assert current_usage() == Usage()
        await assistant(look_call, says("x"), tools=[look]).ask("q")
        await assistant(look_call, says("x"), tools=[look], cost_estimator=Prices(), **limits(tool_calls=9)).ask("q")
        assert current_usage() == Usage(4, 2, TokenUsage(40, 12), None)  # the first service has no estimator
    assert seen == [Usage(1, 1, TokenUsage(10, 1), None), Usage(1, 1, TokenUsage(10, 1), Decimal("0.10"))]
    assert current_usage() == Usage()


async def test_an_invocation_without_limits_has_no_account() -> None:
    seen: list[Usage] = []

    @tool
    def look() -> str:
        seen.append(current_usage())
        return "seen"

    await assistant(asks(tool_call("look", {})), says("x"), tools=[look]).ask("q")
    assert seen == [Usage()]


async def test_each_call_of_a_service_has_a_new_account() -> None:
    service = assistant(says("a"), says("b"), **limits(model_calls=1))

    assert [await service.ask("q"), await service.ask("q")] == ["a", "b"]


async def test_failed_requests_count_as_calls() -> None:
    with usage_limits(model_calls=1):
        with pytest.raises(OSError, match="down"):
            await assistant(OSError("down")).ask("q")
        with pytest.raises(UsageLimitExceededError):
            await assistant(says("x")).ask("q")


async def test_a_failed_call_stores_nothing_in_memory_and_abort_stays_abort() -> None:
    @tool
    def stop() -> str:
        raise ToolAbort("stop")

    service = assistant(asks(tool_call("stop", {})), tools=[stop], **limits(model_calls=1))
    with pytest.raises(ToolAbort):
        await service.ask("q")
