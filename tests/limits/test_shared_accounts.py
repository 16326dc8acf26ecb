"""Services called by tools, threads, guardrails and interceptors draw on one account."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    Inject,
    OutputParsingError,
    Result,
    TokenStream,
    TokenUsage,
    ToolErrors,
    ToolExecutionResult,
    create_ai_service,
    register_ai_service,
    tool,
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
    Usage,
    UsageLimitExceededError,
    UsageLimits,
    current_usage,
    usage_limits,
)
from toolbox.testing import ScriptedChatModel, tool_call

from .metered import (
    INNER,
    NOTE,
    Assistant,
    Inner,
    Sync,
    asks,
    assistant,
    limits,
    ran,
    says,
    tree,
)

pytestmark = pytest.mark.anyio


@tool
def noted_on_thread(text: str) -> str:
    ran.append(text)
    return text


# --- the whole tree


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


# --- guardrails and interceptors


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
