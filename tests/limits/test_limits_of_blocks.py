"""Limits of streams and of blocks, and which call raises the error."""

import asyncio
from typing import Any

import pytest

from toolbox import (
    ChatRequest,
    ChatResponse,
    create_ai_service,
    tool,
)
from toolbox.limits import (
    UsageLimitExceededError,
    UsageLimits,
    current_usage,
    usage_limits,
)
from toolbox.testing import ScriptedChatModel, tool_call

from .metered import (
    INNER,
    NOTE,
    Inner,
    Sync,
    asks,
    assistant,
    limits,
    says,
    tree,
)

pytestmark = pytest.mark.anyio


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
