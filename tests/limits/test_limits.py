"""Limits of services and of blocks: what counts, when a call is refused, and which call raises the error."""

import asyncio
import contextvars
import copy
import logging
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    IllegalConfigurationError,
    Inject,
    OutputParsingError,
    Result,
    TokenStream,
    TokenUsage,
    ToolAbort,
    ToolErrors,
    ToolExecutionResult,
    create_ai_service,
    register_ai_service,
    return_to_model,
    tool,
    user_message,
)
from toolbox.context import current_invocation
from toolbox.guardrails import (
    GuardrailResult,
    InputGuardrail,
    InputGuardrailRequest,
    OutputGuardrail,
    OutputGuardrailRequest,
    ToolInputGuardrail,
    ToolInputGuardrailRequest,
    input_guardrails,
    output_guardrails,
    tool_input_guardrails,
)
from toolbox.interceptors import (
    ModelInterceptor,
    ModelInvocation,
    ModelProceed,
    ToolInterceptor,
    ToolInvocation,
    ToolProceed,
)
from toolbox.limits import (
    CostEstimator,
    Usage,
    UsageLimitExceededError,
    UsageLimits,
    current_usage,
    usage_limits,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


ASKED, SAID = TokenUsage(10, 1), TokenUsage(10, 5)


def asks(*calls: Any, usage: TokenUsage | None = ASKED) -> ChatResponse:
    return ChatResponse(AiMessage(None, calls), usage)


def says(text: str, usage: TokenUsage | None = SAID, model: str | None = None) -> ChatResponse:
    return ChatResponse(AiMessage(text), usage, model=model)


ran: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    ran.clear()


@tool
async def note(text: str) -> str:
    ran.append(text)
    return text


@tool
def noted_on_thread(text: str) -> str:
    ran.append(text)
    return text


class Assistant(Protocol):
    async def ask(self, question: str) -> str: ...
    async def result(self, question: str) -> Result[str]: ...
    async def number(self, question: str) -> int: ...
    def events(self, question: str) -> TokenStream: ...
    def texts(self, question: str) -> AsyncIterator[str]: ...


class Sync(Protocol):
    def ask(self, question: str) -> str: ...


def assistant(*replies: Any, of: Any = Assistant, **options: Any) -> Any:
    return create_ai_service(of, chat_model=ScriptedChatModel(replies), **{"tools": [note], **options})


def limits(**given: Any) -> dict[str, Any]:
    return {"limits": UsageLimits(**given)}


NOTE = tool_call("note", {"text": "a"})


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
    with pytest.raises(IllegalConfigurationError, match="limits is 3"):
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


# --- cost


class Prices(CostEstimator):
    def __init__(self, price: Any = Decimal("0.10")) -> None:
        self.price, self.models = price, list[str]()

    def estimate(self, model: str, usage: TokenUsage) -> Decimal | None:
        self.models.append(model)
        if isinstance(self.price, Exception):
            raise self.price
        return self.price  # type: ignore[no-any-return]  # wrong values as well


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


# --- the whole tree


@register_ai_service(tools=note)
class Inner(Protocol):
    @tool
    @user_message("{topic}")
    async def inner(self, topic: str) -> str: ...


INNER = tool_call("inner", {"topic": "t"})


def tree(
    outer_limits: UsageLimits | None, inner_limits: UsageLimits | None, outer: Any, inner: Any, **options: Any
) -> Any:
    """Return a service with another service as its tool; each has its own model."""
    made: Any = create_ai_service(Inner, chat_model=ScriptedChatModel(inner), limits=inner_limits)
    return create_ai_service(
        Assistant, chat_model=ScriptedChatModel(outer), tools=[made], limits=outer_limits, **options
    )


async def test_a_service_called_as_a_tool_draws_on_the_same_account() -> None:
    service = tree(UsageLimits(model_calls=3), None, [asks(INNER), says("never")], [asks(NOTE), asks(NOTE), says("x")])
    with pytest.raises(UsageLimitExceededError) as caught:
        await service.ask("q")

    assert caught.value.usage == Usage(3, 3, TokenUsage(30, 3), None)
    # The outer invocation raises: its transcript, not that of the inner one.
    assert [type(each).__name__ for each in caught.value.transcript] == ["UserMessage", "AiMessage"]
    assert caught.value.transcript[1] == AiMessage(None, (INNER,))


async def test_the_limit_of_an_inner_service_ends_the_outer_one_past_its_handlers() -> None:
    handled: list[Exception] = []

    def handler(error: Exception, context: Any) -> str:
        handled.append(error)
        return "failed"

    service = tree(
        None,
        UsageLimits(model_calls=1),
        [asks(INNER), says("never")],
        [asks(NOTE), says("never")],
        on_tool_execution_error=handler,
    )
    with pytest.raises(UsageLimitExceededError) as caught:
        await service.ask("q")

    assert caught.value.transcript[0].text == "t"  # type: ignore[union-attr]  # the inner user message
    assert handled == []


async def test_the_tightest_limit_applies() -> None:
    replies = [asks(NOTE), asks(NOTE), says("never")]
    service = tree(UsageLimits(model_calls=10), UsageLimits(model_calls=2), [asks(INNER)], replies)
    with pytest.raises(UsageLimitExceededError) as caught:
        await service.ask("q")
    assert (caught.value.allowed, caught.value.usage.model_calls) == (2, 2)

    service = tree(UsageLimits(model_calls=2), UsageLimits(model_calls=10), [asks(INNER)], replies)
    with pytest.raises(UsageLimitExceededError) as caught:
        await service.ask("q")
    assert (caught.value.allowed, caught.value.usage.model_calls) == (2, 2)
    assert caught.value.transcript[0].text == "q"  # type: ignore[union-attr]  # the outer user message


class Caught(Protocol):
    async def ask(self, question: str) -> str: ...


@pytest.mark.parametrize("swallow", [Exception, BaseException])
async def test_code_between_the_invocations_cannot_stop_the_error(swallow: type[BaseException]) -> None:
    inner: Any = create_ai_service(Inner, chat_model=ScriptedChatModel([says("one"), says("two"), says("three")]))
    seen: list[type[BaseException]] = []

    @tool
    async def careless() -> str:
        for _ in range(3):
            try:
                await inner.inner("t")
            except swallow as error:
                seen.append(type(error))
        return "all is well"

    model = ScriptedChatModel([asks(tool_call("careless", {})), says("never")])
    service: Any = create_ai_service(Caught, chat_model=model, tools=[careless], **limits(model_calls=2))
    with pytest.raises(UsageLimitExceededError, match="model_calls=2"):
        await service.ask("q")

    assert len(model.requests) == 1
    assert seen in ([], [asyncio.CancelledError] * 2)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_swallowed_cancellation_of_an_immediate_tool_still_raises() -> None:
    from toolbox import ReturnBehavior

    inner: Any = create_ai_service(Inner, chat_model=ScriptedChatModel([says("one")]))

    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    async def careless() -> str:
        try:
            await inner.inner("t")
        except BaseException:
            return "swallowed"
        return "all is well"

    class Immediate(Protocol):
        async def result(self, question: str) -> Result[str]: ...

    model = ScriptedChatModel([asks(tool_call("careless", {}))])
    service: Any = create_ai_service(Immediate, chat_model=model, tools=[careless], **limits(model_calls=1))
    with pytest.raises(UsageLimitExceededError):
        await service.result("q")
    await asyncio.sleep(0)  # no cancellation is left over


async def test_concurrent_inner_services_cannot_overdraw() -> None:
    asked = 0

    async def reply(request: ChatRequest) -> ChatResponse:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        return says("x")

    inner: Any = create_ai_service(Inner, chat_model=ScriptedChatModel([reply] * 20))
    model = ScriptedChatModel([asks(*(tool_call("inner", {"topic": str(n)}) for n in range(20))), says("never")])
    service: Any = create_ai_service(
        Assistant, chat_model=model, tools=[inner], concurrent_tools=True, **limits(model_calls=5)
    )
    with pytest.raises(UsageLimitExceededError) as caught:
        await service.ask("q")

    assert (asked, caught.value.usage.model_calls) == (4, 5)


async def test_threads_of_blocking_tools_draw_on_the_same_account() -> None:
    inner: Any = create_ai_service(Sync, chat_model=ScriptedChatModel([says("x")] * 9))
    seen: list[str] = []

    @tool
    def blocking() -> str:
        for _ in range(9):
            try:
                inner.ask("t")
            except Exception as error:  # of a thread that runs on after its call was cancelled
                seen.append(type(error).__name__)
        return "done"

    model = ScriptedChatModel([asks(tool_call("blocking", {})), says("never")])
    service: Any = create_ai_service(Assistant, chat_model=model, tools=[blocking], **limits(model_calls=4))
    with pytest.raises(UsageLimitExceededError) as caught:
        await service.ask("q")

    assert caught.value.usage.model_calls == 4
    assert "UsageLimitExceededError" not in seen


class LateThread:
    """A blocking tool whose first call ends its caller by a limit, and whose thread runs on after that."""

    def __init__(self) -> None:
        self.replies = 0
        self.inner_goes_on, self.has_ended = threading.Event(), threading.Event()
        self.seen: list[BaseException] = []

    async def reply(self, request: ChatRequest) -> ChatResponse:
        self.replies += 1
        return says("x")

    def run(self, ask: Callable[[str], str]) -> None:
        for _ in range(3):
            try:
                ask("t")
            except BaseException as error:
                self.seen.append(error)
                assert self.inner_goes_on.wait(60)
        self.has_ended.set()


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("in_block", [False, True])
async def test_a_thread_that_runs_on_after_a_limit_ended_its_call_is_cancelled(in_block: bool, forgets: bool) -> None:
    late = LateThread()
    inner: Any = create_ai_service(Sync, chat_model=ScriptedChatModel([late.reply] * 9))

    @tool
    def blocking() -> str:
        if forgets:  # a plain thread of the program, which only draws on the account
            outside = contextvars.copy_context()
            outside.run(current_invocation.set, None)
            threading.Thread(target=outside.run, args=(late.run, inner.ask)).start()
            late.has_ended.wait(60)
        else:
            late.run(inner.ask)
        return "done"

    model = ScriptedChatModel([asks(tool_call("blocking", {})), says("never")])
    own = {} if in_block else limits(model_calls=2)
    service: Any = create_ai_service(Assistant, chat_model=model, tools=[blocking], **own)
    with usage_limits(**({"model_calls": 2} if in_block else {})), pytest.raises(UsageLimitExceededError):
        await service.ask("q")
    late.inner_goes_on.set()  # the call has ended; the thread asks again
    assert await asyncio.to_thread(late.has_ended.wait, 60)

    assert late.replies == 1
    assert [type(each).__name__ for each in late.seen] == ["CancelledError"] * 2


async def test_a_call_that_ends_well_while_a_limit_is_reached_does_not_leave_the_other_one_waiting() -> None:
    begun, asked = asyncio.Event(), asyncio.Event()
    inner: Any = create_ai_service(Inner, chat_model=ScriptedChatModel(["never"] * 3))
    detached: list[asyncio.Task[Any]] = []

    async def later() -> str:
        begun.set()
        await asked.wait()
        answer: str = await inner.inner("t")
        return answer

    @tool
    async def detaching() -> str:
        detached.append(asyncio.create_task(later()))
        await begun.wait()
        return "done"

    service = assistant(asks(tool_call("detaching", {})), "ok", tools=[detaching], **limits(model_calls=2))
    assert await service.ask("q") == "ok"
    asked.set()
    with pytest.raises(UsageLimitExceededError):  # of the detached call itself: the other one has ended
        async with asyncio.timeout(60):
            await detached[0]


def test_synchronous_services_have_limits() -> None:
    service = assistant(asks(tool_call("noted_on_thread", {"text": "a"})), says("x"), of=Sync, tools=[noted_on_thread])
    with usage_limits(model_calls=1), pytest.raises(UsageLimitExceededError):
        service.ask("q")

    assert ran == ["a"]


async def test_output_corrections_are_model_calls() -> None:
    with pytest.raises(UsageLimitExceededError):
        await assistant(says("no number"), says("7"), **limits(model_calls=1)).number("q")
    assert await assistant(says("no number"), says("7"), **limits(model_calls=2)).number("q") == 7
    with pytest.raises(OutputParsingError):
        await assistant(*[says("x")] * 3, **limits(model_calls=3)).number("q")


class Cached(ModelInterceptor):
    async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        return says("from the cache")


class Stubborn(ModelInterceptor):
    async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        while True:
            try:
                await proceed(call)
            except Exception:
                ran.append("seen")


class Twice(ModelInterceptor):
    async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        await proceed(call)
        return await proceed(call)


async def test_a_reply_from_the_cache_of_an_interceptor_costs_nothing() -> None:
    service = assistant(interceptors=[Cached()], **limits(model_calls=0, total_tokens=0))

    assert await service.ask("q") == "from the cache"


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_interceptor_that_asks_again_and_again_is_stopped(streamed: bool) -> None:
    model = ScriptedChatModel([says("x")] * 9)
    service: Any = create_ai_service(Assistant, chat_model=model, interceptors=[Stubborn()], **limits(model_calls=3))
    with pytest.raises(UsageLimitExceededError):
        if streamed:
            _ = [each async for each in service.texts("q")]
        else:
            await service.ask("q")

    assert len(model.requests) == 3
    assert ran == []


async def test_each_request_of_an_interceptor_counts() -> None:
    service = assistant(asks(NOTE, NOTE), says("dropped"), interceptors=[Twice()], **limits(tool_calls=1))
    with pytest.raises(UsageLimitExceededError, match="tool_calls"):
        await service.ask("q")

    with usage_limits():
        assert await assistant(says("a"), says("b"), interceptors=[Twice()]).ask("q") == "b"
        assert (current_usage().model_calls, current_usage().tokens) == (2, TokenUsage(20, 10))


# --- streams


@pytest.mark.parametrize("stream", ["events", "texts"])
@pytest.mark.parametrize("given", [{"model_calls": 1}, {"total_tokens": 10}, {"tool_calls": 0}], ids=str)
async def test_streams_raise_the_error_at_the_step_that_exceeds(stream: str, given: Any) -> None:
    service = assistant(asks(NOTE), says("never"), **limits(**given))
    with pytest.raises(UsageLimitExceededError, match=next(iter(given))):
        _ = [each async for each in getattr(service, stream)("q")]


async def test_a_stream_is_ended_by_the_limit_that_its_inner_service_reaches() -> None:
    service = tree(UsageLimits(model_calls=2), None, [asks(INNER), says("never")], [asks(NOTE), says("never")])
    with pytest.raises(UsageLimitExceededError) as caught:
        _ = [each async for each in service.events("q")]

    assert caught.value.transcript[0].text == "q"  # type: ignore[union-attr]  # the outer user message
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_stream_draws_on_the_block_in_which_it_was_made() -> None:
    service = assistant(asks(NOTE), says("never"))
    with usage_limits(model_calls=1):
        events = service.events("q")
    with pytest.raises(UsageLimitExceededError):
        _ = [each async for each in events]


# --- blocks


async def test_a_block_is_one_account_for_all_calls_in_it() -> None:
    with usage_limits(model_calls=2):
        assert await assistant(says("a")).ask("q") == "a"
        assert await assistant(says("b")).ask("q") == "b"
        with pytest.raises(UsageLimitExceededError):
            await assistant(says("c")).ask("q")


async def test_a_block_counts_the_tasks_and_threads_that_it_starts() -> None:
    with usage_limits(model_calls=3):
        results = await asyncio.gather(*(assistant(says("a")).ask("q") for _ in range(5)), return_exceptions=True)
        assert sorted(type(each).__name__ for each in results) == ["UsageLimitExceededError"] * 2 + ["str"] * 3
        sync = create_ai_service(Sync, chat_model=ScriptedChatModel([says("x")]))
        with pytest.raises(UsageLimitExceededError):
            await asyncio.to_thread(sync.ask, "q")
        assert current_usage().model_calls == 3


async def test_the_outermost_call_in_a_block_raises() -> None:
    service = tree(None, None, [asks(INNER), says("never")], [asks(NOTE), says("never")])
    with usage_limits(model_calls=2), pytest.raises(UsageLimitExceededError) as caught:
        await service.ask("q")

    assert caught.value.transcript[0].text == "q"  # type: ignore[union-attr]  # the outer user message


async def test_a_block_in_a_tool_limits_only_its_own_calls() -> None:
    inner: Any = create_ai_service(Inner, chat_model=ScriptedChatModel([asks(NOTE), says("never")]))

    @tool
    async def careful() -> str:
        try:
            with usage_limits(model_calls=1):
                return str(await inner.inner("t"))
        except UsageLimitExceededError as error:
            return f"stopped after {error.usage.model_calls}"

    service = assistant(asks(tool_call("careful", {})), says("done"), tools=[careful])
    result = await service.result("q")

    assert (result.content, result.tool_executions[0].result) == ("done", "stopped after 1")


async def test_a_task_that_outlives_its_invocation_raises_itself() -> None:
    inner: Any = create_ai_service(Inner, chat_model=ScriptedChatModel([says("one"), says("two")]))
    tasks: list[asyncio.Task[Any]] = []
    go = asyncio.Event()

    async def later() -> Any:
        await go.wait()
        return [await inner.inner("t"), await inner.inner("t")]

    @tool
    async def leave_behind() -> str:
        tasks.append(asyncio.create_task(later()))
        return "started"

    service = assistant(
        asks(tool_call("leave_behind", {})), says("done"), tools=[leave_behind], **limits(model_calls=3)
    )
    assert await service.ask("q") == "done"
    go.set()
    with pytest.raises(UsageLimitExceededError):
        await tasks[0]


async def test_a_task_that_is_not_awaited_ends_its_running_invocation() -> None:
    inner: Any = create_ai_service(Inner, chat_model=ScriptedChatModel([says("one")]))
    tasks: list[asyncio.Task[Any]] = []

    @tool
    async def wait_for_ever() -> str:
        tasks.append(asyncio.create_task(inner.inner("t")))
        await asyncio.Event().wait()
        return "never"

    service = assistant(asks(tool_call("wait_for_ever", {})), says("x"), tools=[wait_for_ever], **limits(model_calls=1))
    with pytest.raises(UsageLimitExceededError):
        await service.ask("q")
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]


async def test_the_callers_own_cancellation_stays_a_cancellation() -> None:
    started = asyncio.Event()

    async def reply(request: ChatRequest) -> ChatResponse:
        started.set()
        await asyncio.Event().wait()
        return says("never")

    task = asyncio.create_task(assistant(reply, **limits(model_calls=1)).ask("q"))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_deadline_and_a_limit_work_together() -> None:
    from toolbox import InvocationTimeoutError, time_limit

    async def reply(request: ChatRequest) -> ChatResponse:
        await asyncio.Event().wait()
        return says("never")

    with pytest.raises(InvocationTimeoutError):
        await assistant(reply, timeout=0.01, **limits(model_calls=1)).ask("q")
    with time_limit(30), pytest.raises(UsageLimitExceededError):
        await tree(UsageLimits(model_calls=1), None, [asks(INNER)], [says("x")]).ask("q")


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


# --- in a container


async def test_limits_work_in_a_container_on_another_loop() -> None:
    @register_ai_service(tools=Inner, limits=UsageLimits(model_calls=2))
    class Outer(Protocol):
        async def ask(self, question: str) -> str: ...

    model = ScriptedChatModel([asks(INNER), asks(NOTE), says("never")])
    with Container(models={"default": model}).register(Outer) as container:
        outer = container.get(Outer)
        with pytest.raises(UsageLimitExceededError) as caught:
            await outer.ask("q")
    assert caught.value.transcript[0].text == "q"  # type: ignore[union-attr]  # the outer user message


async def test_services_in_the_code_of_beans_draw_on_the_same_account() -> None:
    class Desk:
        def __init__(self, inner: Inner) -> None:
            self.inner = inner

        @tool
        async def look_up(self, topic: str, again: Inject[Inner]) -> str:
            return await self.inner.inner(topic) + await again.inner(topic)

    @register_ai_service(tools=Desk, limits=UsageLimits(model_calls=2))
    class Outer(Protocol):
        async def ask(self, question: str) -> str: ...

    model = ScriptedChatModel([asks(tool_call("look_up", {"topic": "t"})), says("one"), says("never")])
    async with Container(models={"default": model}, tool_errors=ToolErrors()).register(Inner, Outer) as container:
        with pytest.raises(UsageLimitExceededError):
            await (await container.aget(Outer)).ask("q")
    assert len(model.requests) == 2


def test_many_threads_cannot_overdraw_a_block() -> None:
    asked: list[int] = []

    def reply(request: ChatRequest) -> ChatResponse:
        asked.append(1)
        return says("x")

    failed: list[BaseException] = []

    def work(service: Any, run: Callable[[Callable[[], object]], object]) -> None:
        try:
            run(lambda: service.ask("q"))
        except UsageLimitExceededError as error:
            failed.append(error)

    from contextvars import copy_context

    with usage_limits(model_calls=7):
        threads = [
            threading.Thread(target=work, args=(assistant(reply, of=Sync), copy_context().run)) for _ in range(20)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    assert (len(asked), len(failed)) == (7, 13)


# --- guardrails and interceptors


class Judge(Protocol):
    async def is_attack(self, text: str) -> bool: ...


JUDGE_REPLY = says("true")


def judge() -> Any:
    return create_ai_service(Judge, chat_model=ScriptedChatModel([JUDGE_REPLY] * 9), output_mode="prompt")


class Judged(InputGuardrail):
    def __init__(self) -> None:
        self.judge = judge()

    async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        assert await self.judge.is_attack("x") is True
        return self.success()


class JudgedTool(ToolInputGuardrail):
    def __init__(self) -> None:
        self.judge = judge()

    async def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
        assert await self.judge.is_attack("x") is True
        return self.success()


class JudgedAnswer(OutputGuardrail):
    def __init__(self) -> None:
        self.judge = judge()

    async def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
        assert await self.judge.is_attack("x") is True
        return self.retry("again") if request.text == "bad" else self.success()


@input_guardrails(Judged)
class Guarded(Protocol):
    @output_guardrails(JudgedAnswer)
    async def ask(self, question: str) -> str: ...

    def events(self, question: str) -> TokenStream: ...


@tool
@tool_input_guardrails(JudgedTool)
async def guarded_note() -> str:
    return "noted"


async def test_judges_in_guardrails_and_retries_draw_on_the_account() -> None:
    replies = [asks(tool_call("guarded_note", {})), says("bad"), says("good")]
    with usage_limits():
        assert await assistant(*replies, of=Guarded, tools=[guarded_note]).ask("q") == "good"
        # 3 requests, 1 input guardrail, 1 tool guardrail, 2 answers
        assert current_usage().model_calls == 7


@pytest.mark.parametrize("allowed", [0, 1, 2, 4, 6])
async def test_a_limit_that_a_judge_reaches_ends_the_call(allowed: int) -> None:
    replies = [asks(tool_call("guarded_note", {})), says("bad"), says("good")]
    service = assistant(*replies, of=Guarded, tools=[guarded_note], **limits(model_calls=allowed))
    with pytest.raises(UsageLimitExceededError) as caught:
        await service.ask("q")
    assert caught.value.used == allowed


async def test_a_judge_of_a_stream_draws_on_the_account() -> None:
    with pytest.raises(UsageLimitExceededError):
        _ = [each async for each in assistant("never", of=Guarded, tools=[], **limits(model_calls=0)).events("q")]


class Swallowing(ToolInterceptor):
    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        try:
            return await proceed(call)
        except BaseException:
            return ToolExecutionResult("all is well")


@pytest.mark.parametrize("of_inner", [False, True])
async def test_an_interceptor_that_swallows_the_error_does_not_stop_it(of_inner: bool) -> None:
    inner_limits = UsageLimits(model_calls=1) if of_inner else None
    outer_limits = None if of_inner else UsageLimits(model_calls=2)
    service = tree(
        outer_limits, inner_limits, [asks(INNER), says("never")], [asks(NOTE), says("x")], interceptors=[Swallowing()]
    )
    with pytest.raises(UsageLimitExceededError):
        await service.ask("q")
