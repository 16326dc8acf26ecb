"""Tests `RetryOnError`: which errors are retried, how often, and what never is."""

import asyncio
import logging
from typing import Any, Protocol

import pytest

from toolbox import (
    Container,
    IllegalConfigurationError,
    Result,
    ToolAbort,
    ToolExecutionResult,
    ToolRetry,
    call_scoped,
    create_ai_service,
    register_ai_service,
    tool,
)
from toolbox.errors import (
    InputGuardrailError,
    ModelHttpError,
    OutputGuardrailError,
    RunCancelledError,
    ToolRoundsExceededError,
)
from toolbox.guardrails import ToolInputGuardrail, ToolInputGuardrailRequest, tool_input_guardrails
from toolbox.interceptors import (
    RetryOnError,
    ToolInterceptor,
    ToolInvocation,
    ToolProceed,
    global_interceptor,
    interceptors,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

AT_ONCE = {"wait_initial": 0.0, "wait_max": 0.0}


class Failing:
    """A tool that raises the given errors, one in each call, then returns the number of calls."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    @tool
    async def stock(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.calls


def desk(tools: Any, *interceptors: Any, replies: int = 1) -> Any:
    class Desk(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    model = ScriptedChatModel([tool_call("stock"), "done"] * replies)
    return create_ai_service(Desk, chat_model=model, tools=tools, interceptors=interceptors)


async def test_a_failed_tool_is_called_again_until_it_succeeds() -> None:
    failing = Failing(ConnectionError("a"), TimeoutError("b"))

    result = await desk(failing, RetryOnError(**AT_ONCE)).ask("x")

    [execution] = result.tool_executions
    assert (execution.result, execution.is_error, failing.calls) == ("3", False, 3)


async def test_attempts_include_the_first_call_and_the_last_error_is_raised() -> None:
    failing = Failing(*(ConnectionError(str(number)) for number in range(9)))

    result = await desk(failing, RetryOnError(attempts=2, **AT_ONCE)).ask("x")

    assert (result.tool_executions[0].result, failing.calls) == ("1", 2)


async def test_only_the_named_errors_are_retried() -> None:
    failing = Failing(ConnectionError("lost"), KeyError("other"))

    result = await desk(failing, RetryOnError(5, (ConnectionError,), 0.0, 0.0)).ask("x")

    assert (result.tool_executions[0].is_error, failing.calls) == (True, 2)


@pytest.mark.parametrize(
    "error",
    [
        ToolRetry("say it differently"),
        ToolAbort("stop"),
        IllegalConfigurationError([]),
        InputGuardrailError([(object, "no")]),
        OutputGuardrailError([(object, "no")], "text"),
        RunCancelledError("r"),
        ToolRoundsExceededError(1, ()),
        ExceptionGroup("several", [ConnectionError(), ToolAbort("stop")]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_some_errors_are_never_retried(error: Exception) -> None:
    failing = Failing(error)

    await asyncio.gather(desk(failing, RetryOnError(**AT_ONCE)).ask("x"), return_exceptions=True)

    assert failing.calls == 1


async def test_a_refusal_of_a_guardrail_is_never_retried() -> None:
    judged: list[str] = []

    class Refusing(ToolInputGuardrail):
        def validate(self, request: ToolInputGuardrailRequest) -> Any:
            judged.append(request.request.name)
            return self.failure("not today")

    @tool
    @tool_input_guardrails(Refusing())
    async def stock() -> int:
        raise AssertionError("it must not run")

    result = await desk(stock, RetryOnError(**AT_ONCE)).ask("x")

    assert (judged, result.tool_executions[0].is_error) == (["stock"], True)


async def test_a_cancelled_call_is_not_retried() -> None:
    started, calls = asyncio.Event(), []

    @tool
    async def stock() -> int:
        calls.append(1)
        started.set()
        await asyncio.Event().wait()
        return 1

    task = asyncio.ensure_future(desk(stock, RetryOnError(**AT_ONCE)).ask("x"))
    await started.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls == [1]


async def test_a_cancellation_ends_the_wait_between_two_calls() -> None:
    failed = asyncio.Event()

    @tool
    async def stock() -> int:
        failed.set()
        raise ConnectionError("lost")

    task = asyncio.ensure_future(desk(stock, RetryOnError(wait_initial=600, wait_max=600)).ask("x"))
    await failed.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)


async def test_the_timeout_of_a_tool_holds_for_each_call() -> None:
    calls: list[int] = []

    @tool(timeout=0.05)
    async def stock() -> int:
        calls.append(1)
        if len(calls) < 3:
            await asyncio.Event().wait()
        return len(calls)

    result = await desk(stock, RetryOnError(**AT_ONCE)).ask("x")

    assert result.tool_executions[0].result == "3"


async def test_each_call_has_its_own_call_scope_and_a_named_class_needs_no_registration() -> None:
    made: list[int] = []

    @call_scoped
    class Attempt:
        def __init__(self) -> None:
            made.append(len(made))

    class Fast(RetryOnError):
        def __init__(self) -> None:
            super().__init__(attempts=3, wait_initial=0, wait_max=0)

    class Store:
        def __init__(self, attempt: Attempt) -> None:
            self.number = made[-1]

        @tool
        @interceptors(Fast)
        def stock(self) -> int:
            if self.number < 2:
                raise ConnectionError("lost")
            return self.number

    @register_ai_service(tools=Store)
    class Desk(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    model = ScriptedChatModel([tool_call("stock"), "done"])
    async with Container(models={"default": model}).register(Desk, Attempt) as container:
        result = await container.get(Desk).ask("x")

    assert (result.tool_executions[0].result, made) == ("2", [0, 1, 2])


async def test_the_class_itself_can_be_named_and_waits_for_a_short_time() -> None:
    failing = Failing(ConnectionError("lost"))

    result = await asyncio.wait_for(desk(failing, RetryOnError).ask("x"), 5)

    assert result.tool_executions[0].result == "2"


async def test_other_interceptors_see_one_call() -> None:
    seen: list[str] = []

    class Watching(ToolInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
            result = await proceed(call)
            seen.append(result.text)
            return result

    failing = Failing(ConnectionError("lost"))
    inside = desk(failing, RetryOnError(**AT_ONCE), Watching())

    await inside.ask("x")

    assert (seen, failing.calls) == (["2"], 2)


async def test_a_global_one_retries_the_tools_of_all_services() -> None:
    @global_interceptor
    class Patient(RetryOnError):
        def __init__(self) -> None:
            super().__init__(wait_initial=0, wait_max=0)

    failing = Failing(ConnectionError("lost"))

    @register_ai_service(tools=Failing)
    class Desk(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    model = ScriptedChatModel([tool_call("stock"), "done"])
    container = Container(models={"default": model}).register(Desk, Patient).register_instance(failing)
    async with container:
        result = await container.get(Desk).ask("x")

    assert result.tool_executions[0].result == "2"


async def test_a_service_that_is_a_tool_is_called_again() -> None:
    class Inner(Protocol):
        @tool
        async def stock(self, text: str = "x") -> str: ...

    model = ScriptedChatModel([ModelHttpError(503, "unavailable"), "7"])
    inner = create_ai_service(Inner, chat_model=model)

    result = await desk(inner, RetryOnError(**AT_ONCE)).ask("x")

    assert result.tool_executions[0].result == "7"


async def test_retries_are_logged_with_the_tool_and_without_the_text_of_the_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Failing(ConnectionError("password=secret"))

    with caplog.at_level(logging.INFO, "toolbox.interceptors"):
        await desk(failing, RetryOnError(**AT_ONCE)).ask("x")

    [line] = [each.getMessage() for each in caplog.records if each.name == "toolbox.interceptors"]
    assert line == "tool 'stock' raised ConnectionError and is called again (attempt 1 of 3 failed)"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"attempts": 0}, ValueError, "invalid attempts=0"),
        ({"attempts": True}, ValueError, "invalid attempts=True"),
        ({"attempts": 1.5}, ValueError, "invalid attempts=1.5"),
        ({"on": ()}, TypeError, "use a tuple of exception classes"),
        ({"on": (ConnectionError("x"),)}, TypeError, "use a tuple of exception classes"),
        ({"on": (KeyboardInterrupt,)}, TypeError, "use a tuple of exception classes"),
        ({"on": (asyncio.CancelledError,)}, TypeError, "use a tuple of exception classes"),
        ({"wait_initial": -1}, ValueError, "invalid wait_initial=-1"),
        ({"wait_initial": 3, "wait_max": 2}, ValueError, "wait_max=2"),
    ],
)
def test_invalid_arguments_are_rejected(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        RetryOnError(**options)
