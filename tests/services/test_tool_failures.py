"""Failures of tools: handlers, retry, abort, nested services, timeouts and records."""

import asyncio
import logging
import threading
import traceback
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    BlockingCallNotAllowedError,
    Container,
    InvocationContext,
    MemoryId,
    MissingBeanError,
    OutputParsingError,
    Result,
    ScopeNotActiveError,
    TokenUsage,
    ToolAbort,
    ToolArgumentsError,
    ToolErrors,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolExecutionResultMessage,
    ToolRetry,
    ToolRoundsExceededError,
    ToolSpecification,
    ToolTimeoutError,
    UnknownToolError,
    UserMessage,
    create_ai_service,
    hide_details,
    invocation_record,
    register_ai_service,
    request_scoped,
    return_to_model,
    tool,
    tool_executor_from,
)
from toolbox import ChatResponse as Response
from toolbox.logs import own_frames
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Assistant(Protocol):
    async def chat(self, text: str) -> Result[str]: ...


class Broken(Exception):
    pass


@tool
def fail(text: str = "broken") -> str:
    raise Broken(text) if text else Broken


@tool
def add(a: int, b: int) -> int:
    return a + b


def assistant(*replies: Any, **options: Any) -> tuple[Any, ScriptedChatModel]:
    model = ScriptedChatModel(replies)
    return create_ai_service(Assistant, chat_model=model, tools=(fail, add), **options), model


def last_result(model: ScriptedChatModel) -> ToolExecutionResultMessage:
    message = model.requests[-1].messages[-1]
    assert isinstance(message, ToolExecutionResultMessage)
    return message


UNKNOWN = tool_call("subtract", {"a": 1})
WRONG = tool_call("add", {"a": "x"})
FAILING = tool_call("fail")


# --- defaults


async def test_unknown_tools_raise_by_default() -> None:
    service, model = assistant(UNKNOWN)
    with pytest.raises(UnknownToolError) as raised:
        await service.chat("x")
    assert raised.value.request == UNKNOWN
    assert tuple(raised.value.tool_names) == ("fail", "add")
    assert "subtract" in str(raised.value)
    assert len(model.requests) == 1


async def test_invalid_arguments_raise_by_default() -> None:
    service, _ = assistant(WRONG)
    with pytest.raises(ToolArgumentsError) as raised:
        await service.chat("x")
    assert raised.value.request == WRONG
    assert [path for path, _ in raised.value.problems] == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "text"), [({}, "broken"), ({"text": ""}, "Broken"), ({"text": "  "}, "Broken"), ({"text": "ü"}, "ü")]
)
async def test_tool_exceptions_are_sent_as_message_or_class_name(arguments: dict[str, str], text: str) -> None:
    service, model = assistant(tool_call("fail", arguments), "done")
    result = await service.chat("x")

    assert last_result(model).text == text
    assert last_result(model).is_error
    [execution] = result.tool_executions
    assert execution.is_error
    assert execution.result == text
    assert execution.result_object is None


# --- handlers


async def test_handlers_receive_the_error_and_the_context() -> None:
    seen: list[tuple[Exception, InvocationContext]] = []

    def handler(error: Exception, context: InvocationContext) -> str:
        seen.append((error, context))
        assert InvocationContext.current() is not None
        return f"handled {type(error).__name__}"

    class Remembering(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> Result[str]: ...

    model = ScriptedChatModel([AiMessage(None, [UNKNOWN, WRONG, FAILING]), "done"])
    service = create_ai_service(
        Remembering,
        chat_model=model,
        tools=(fail, add),
        on_unknown_tool=handler,
        on_tool_arguments_error=handler,
        on_tool_execution_error=handler,
    )
    result = await service.chat("room", "x")

    assert [type(error) for error, _ in seen] == [UnknownToolError, ToolArgumentsError, Broken]
    assert [context.request for _, context in seen] == [UNKNOWN, WRONG, FAILING]
    assert all(context.memory_id == "room" and context.method == "chat" for _, context in seen)
    texts = ["handled UnknownToolError", "handled ToolArgumentsError", "handled Broken"]
    assert [each.result for each in result.tool_executions] == texts
    assert all(each.is_error for each in result.tool_executions)
    assert [each.text for each in model.requests[1].messages[2:]] == texts  # type: ignore[union-attr]


async def test_handlers_can_be_coroutines_or_any_callable() -> None:
    async def later(error: Exception, context: InvocationContext) -> str:
        await asyncio.sleep(0)
        return "later"

    class Handler:
        def __call__(self, error: Exception, context: InvocationContext) -> str:
            return "object"

        async def method(self, error: Exception, context: InvocationContext) -> str:
            return "method"

    for handler, text in (
        (later, "later"),
        (Handler(), "object"),
        (Handler().method, "method"),
        (lambda error, context: "lambda", "lambda"),
    ):
        service, model = assistant(FAILING, "done", on_tool_execution_error=handler)
        await service.chat("x")
        assert last_result(model).text == text


async def test_handlers_can_return_a_successful_result() -> None:
    def handler(error: Exception, context: InvocationContext) -> ToolExecutionResult:
        return ToolExecutionResult("from the cache", [1], attributes={"stale": True})

    service, model = assistant(FAILING, "done", on_tool_execution_error=handler)
    result = await service.chat("x")
    assert not last_result(model).is_error
    assert last_result(model).attributes == {"stale": True}
    [execution] = result.tool_executions
    assert (execution.result, execution.result_object, execution.is_error) == ("from the cache", [1], False)


async def test_handlers_can_return_an_error_result() -> None:
    service, model = assistant(
        UNKNOWN, "done", on_unknown_tool=lambda error, context: ToolExecutionResult("no", is_error=True)
    )
    await service.chat("x")
    assert last_result(model).is_error


@pytest.mark.parametrize("request_", [UNKNOWN, WRONG, FAILING])
async def test_errors_of_a_handler_end_the_call(request_: ToolExecutionRequest) -> None:
    error = LookupError("mine")

    def handler(failed: Exception, context: InvocationContext) -> str:
        raise error

    service, model = assistant(
        request_,
        on_unknown_tool=handler,
        on_tool_arguments_error=handler,
        on_tool_execution_error=handler,
    )
    with pytest.raises(LookupError) as raised:
        await service.chat("x")
    assert raised.value is error
    assert len(model.requests) == 1


async def test_handlers_can_raise_the_error_of_the_tool() -> None:
    def handler(failed: Exception, context: InvocationContext) -> str:
        raise failed

    service, _ = assistant(FAILING, on_tool_execution_error=handler)
    with pytest.raises(Broken, match="broken"):
        await service.chat("x")


async def test_handlers_that_return_none_raise_type_error() -> None:
    def forgetful(failed: Exception, context: InvocationContext) -> Any: ...

    service, _ = assistant(FAILING, on_tool_execution_error=forgetful)
    with pytest.raises(TypeError, match="forgetful"):
        await service.chat("x")


async def test_synchronous_handlers_run_on_a_thread() -> None:
    threads: list[threading.Thread] = []

    def handler(failed: Exception, context: InvocationContext) -> str:
        threads.append(threading.current_thread())
        return "handled"

    service, _ = assistant(FAILING, "done", on_tool_execution_error=handler)
    await service.chat("x")
    assert threads[0] is not threading.current_thread()

    class Sync(Protocol):
        def chat(self, text: str) -> str: ...

    blocking: Any = create_ai_service(
        Sync, chat_model=ScriptedChatModel([FAILING, "done"]), tools=(fail,), on_tool_execution_error=handler
    )
    caller: list[threading.Thread] = []
    thread = threading.Thread(target=lambda: (caller.append(threading.current_thread()), blocking.chat("x")))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert threads[1] is caller[0]


# --- return_to_model and hide_details


async def test_return_to_model_works_for_all_three_handlers() -> None:
    service, _ = assistant(
        AiMessage(None, [UNKNOWN, WRONG, FAILING]),
        "done",
        on_unknown_tool=return_to_model,
        on_tool_arguments_error=return_to_model,
        on_tool_execution_error=return_to_model,
    )
    result = await service.chat("x")

    unknown, wrong, failed = [each.result for each in result.tool_executions]
    assert "subtract" in unknown
    assert "fail" in unknown
    assert "add" in unknown
    assert "a" in wrong
    assert "b" in wrong
    assert "add" in wrong
    assert failed == "broken"
    assert all(each.is_error for each in result.tool_executions)


async def test_hide_details_sends_only_the_tool_name_and_logs_the_error(caplog: pytest.LogCaptureFixture) -> None:
    service, model = assistant(tool_call("fail", {"text": "secret"}), "done", on_tool_execution_error=hide_details)
    with caplog.at_level(logging.ERROR):
        await service.chat("x")

    assert "secret" not in last_result(model).text
    assert "fail" in last_result(model).text
    assert any("secret" in record.getMessage() or record.exc_info for record in caplog.records)


# --- handlers of the container


@register_ai_service(tools=(fail, add))
class Plain(Protocol):
    async def chat(self, text: str) -> Result[str]: ...


@register_ai_service(tools=(fail, add), on_tool_execution_error=lambda error, context: "own")
class Own(Protocol):
    async def chat(self, text: str) -> Result[str]: ...


async def test_handlers_of_a_service_override_those_of_the_container() -> None:
    script = [AiMessage(None, [UNKNOWN, FAILING]), "done"]
    errors = ToolErrors(
        on_unknown_tool=lambda error, context: "containers unknown",
        on_tool_execution_error=lambda error, context: "containers",
    )
    container = Container(models={"default": ScriptedChatModel([*script, *script])}, tool_errors=errors)
    async with container.register(Plain, Own):
        plain = await container.get(Plain).chat("x")
        own = await container.get(Own).chat("x")
    assert [each.result for each in plain.tool_executions] == ["containers unknown", "containers"]
    assert [each.result for each in own.tool_executions] == ["containers unknown", "own"]


async def test_handlers_that_the_container_does_not_set_keep_their_default() -> None:
    errors = ToolErrors(on_unknown_tool=return_to_model)
    container = Container(models={"default": ScriptedChatModel([FAILING, WRONG])}, tool_errors=errors)
    async with container.register(Plain):
        with pytest.raises(ToolArgumentsError):
            await container.get(Plain).chat("x")


# --- retry and abort


async def test_tool_retry_is_an_error_result_that_skips_the_handlers() -> None:
    @tool
    def again() -> str:
        raise ToolRetry("use a date after today")

    @tool
    async def again_later() -> str:
        raise ToolRetry("later")

    def handler(error: Exception, context: InvocationContext) -> str:
        raise AssertionError("not for a handler")

    model = ScriptedChatModel([AiMessage(None, [tool_call("again"), tool_call("again_later")]), "done"])
    service = create_ai_service(
        Assistant, chat_model=model, tools=(again, again_later), on_tool_execution_error=handler
    )
    result = await service.chat("x")
    assert [each.result for each in result.tool_executions] == ["use a date after today", "later"]
    assert all(each.is_error and each.result_object is None for each in result.tool_executions)


@register_ai_service
class Inner(Protocol):
    @tool
    async def ask(self, question: str) -> str: ...


@register_ai_service(tools=(Inner,))
class Middle(Protocol):
    @tool
    async def delegate(self, task: str) -> Result[str]: ...


@register_ai_service(tools=(Middle,), on_tool_execution_error=return_to_model)
class Outer(Protocol):
    async def chat(self, text: str) -> Result[str]: ...


def nested(innermost: Any) -> Any:
    """Return three nested services; the innermost one offers these tools."""

    @register_ai_service(tools=innermost, on_tool_execution_error=return_to_model)
    class Inner(Protocol):
        @tool
        async def ask(self, question: str) -> str: ...

    @register_ai_service(tools=(Inner,), on_tool_execution_error=return_to_model)
    class Middle(Protocol):
        @tool
        async def delegate(self, task: str) -> Result[str]: ...

    @register_ai_service(tools=(Middle,), on_tool_execution_error=return_to_model)
    class Outer(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    return Outer


DOWN = [tool_call("delegate", {"task": "t"}), tool_call("ask", {"question": "q"})]


async def test_tool_abort_ends_all_outer_invocations_and_reaches_the_caller_unchanged() -> None:
    error = ToolAbort("enough", 1)

    @tool
    def stop() -> str:
        raise error

    outer = nested((stop,))
    model = ScriptedChatModel([*DOWN, tool_call("stop"), "never"])
    async with Container(models={"default": model}).register(outer) as container:
        with pytest.raises(ToolAbort) as raised:
            await container.get(outer).chat("x")
    assert raised.value is error
    assert len(model.requests) == 3


async def test_framework_errors_reach_the_caller_through_nested_services() -> None:
    class Missing: ...

    @tool
    async def look_up() -> str:
        await container.aget(Missing)
        return "never"

    outer = nested((look_up,))
    model = ScriptedChatModel([*DOWN, tool_call("look_up"), "never"])
    container = Container(models={"default": model}).register(outer)
    async with container:
        with pytest.raises(MissingBeanError):
            await container.get(outer).chat("x")
    assert len(model.requests) == 3


@request_scoped
class Session:
    @tool
    def touch(self) -> str:
        return "touched"


async def test_request_scoped_tools_outside_a_scope_raise_and_are_not_sent_to_the_model() -> None:
    outer = nested((Session,))
    script = [*DOWN, tool_call("touch"), "i", "m", "o"]
    model = ScriptedChatModel([*DOWN, tool_call("touch"), *script])
    async with Container(models={"default": model}).register(outer) as container:
        with pytest.raises(ScopeNotActiveError) as raised:
            await container.get(outer).chat("x")
        assert "Session" in str(raised.value)
        assert len(model.requests) == 3
        async with container.request_scope():
            assert (await container.get(outer).chat("x")).content == "o"


async def test_blocking_calls_on_the_event_loop_raise_for_the_caller() -> None:
    @register_ai_service
    class Blocking(Protocol):
        def wait(self, text: str) -> str: ...

    @tool
    async def careless() -> str:
        return container.get(Blocking).wait("x")

    outer = nested((careless,))
    model = ScriptedChatModel([*DOWN, tool_call("careless"), "never"])
    container = Container(models={"default": model}).register(outer, Blocking)
    async with container:
        with pytest.raises(BlockingCallNotAllowedError):
            await container.get(outer).chat("x")
    assert len(model.requests) == 3


async def test_other_errors_of_inner_services_are_tool_failures() -> None:
    seen: list[Exception] = []

    def handler(error: Exception, context: InvocationContext) -> str:
        seen.append(error)
        return "handled"

    @register_ai_service(tools=(add,), max_tool_rounds=1, on_unknown_tool=None)
    class Inner(Protocol):
        @tool
        async def ask(self, question: str) -> str: ...

        @tool
        async def count(self, question: str) -> int: ...

    @register_ai_service(
        tools=(Inner,), on_tool_execution_error=handler, on_tool_arguments_error=None, on_unknown_tool=None
    )
    class Outer(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    ask = tool_call("ask", {"question": "q"})
    good = tool_call("add", {"a": 1, "b": 2})
    for replies, error in (
        ([UNKNOWN], UnknownToolError),
        ([WRONG], ToolArgumentsError),
        ([good, good], ToolRoundsExceededError),
        ([ConnectionError("gone")], ConnectionError),
    ):
        model = ScriptedChatModel([ask, *replies, "done"])
        async with Container(models={"default": model}).register(Outer) as container:
            result = await container.get(Outer).chat("x")
        assert isinstance(seen[-1], error)
        assert [each.result for each in result.tool_executions] == ["handled"]

    model = ScriptedChatModel([tool_call("count", {"question": "q"}), "no", "no", "no", "done"])
    async with Container(models={"default": model}).register(Outer) as container:
        await container.get(Outer).chat("x")
    assert isinstance(seen[-1], OutputParsingError)


async def test_tool_results_of_inner_services_are_their_content() -> None:
    model = ScriptedChatModel([*DOWN, "inner answer", "middle answer", "done"])
    async with Container(models={"default": model}).register(Outer) as container:
        result = await container.get(Outer).chat("x")

    [execution] = result.tool_executions
    assert execution.request.name == "delegate"
    assert execution.result == "middle answer"
    assert execution.result_object == "middle answer"
    assert model.requests[1].messages == (UserMessage("t"),)
    assert model.requests[2].messages == (UserMessage("q"),)


async def test_unknown_tool_errors_raised_by_an_executor_are_tool_failures() -> None:
    request = tool_call("odd")

    def odd(request: ToolExecutionRequest, memory_id: object) -> str:
        raise UnknownToolError(request, ())

    model = ScriptedChatModel([request, "done"])
    service = create_ai_service(Assistant, chat_model=model, tools={ToolSpecification("odd"): odd})
    result = await service.chat("x")
    assert result.tool_executions[0].is_error


# --- timeouts of tools


async def test_tool_timeouts_are_timeout_errors_for_the_handler() -> None:
    ended = asyncio.Event()

    @tool(timeout=0.01)
    async def slow() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "never"

    service: Any = create_ai_service(
        Assistant, chat_model=ScriptedChatModel([tool_call("slow"), "done"]), tools=(slow,)
    )
    result = await service.chat("x")
    assert ended.is_set()
    [execution] = result.tool_executions
    assert execution.is_error
    assert execution.result == "tool 'slow' took longer than its timeout of 0.01 s"

    def handler(error: Exception, context: InvocationContext) -> str:
        assert isinstance(error, TimeoutError)
        assert isinstance(error, ToolTimeoutError)
        raise error

    service = create_ai_service(
        Assistant,
        chat_model=ScriptedChatModel([tool_call("slow")]),
        tools=(slow,),
        on_tool_execution_error=handler,
    )
    with pytest.raises(TimeoutError):
        await service.chat("x")


async def test_timeout_errors_raised_by_a_tool_keep_their_message() -> None:
    @tool(timeout=5)
    async def slow() -> str:
        raise TimeoutError("the database")

    model = ScriptedChatModel([tool_call("slow"), "done"])
    await create_ai_service(Assistant, chat_model=model, tools=(slow,)).chat("x")
    assert last_result(model).text == "the database"


# --- records


async def test_records_keep_all_invocations_inside_the_block() -> None:
    asked = Response(AiMessage(None, [tool_call("add", {"a": 1, "b": 2})]), TokenUsage(1, 1))
    service, _ = assistant(asked, Response(AiMessage("3"), TokenUsage(10, 10)), "second")
    with invocation_record() as record:
        await service.chat("x")
        await service.chat("y")

    assert [type(each).__name__ for each in record.messages] == [
        "UserMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
        "AiMessage",
        "UserMessage",
        "AiMessage",
    ]
    assert [each.result for each in record.tool_executions] == ["3"]
    assert record.token_usage == TokenUsage(11, 11)


async def test_records_without_usage_have_none() -> None:
    service, _ = assistant("hi")
    with invocation_record() as record:
        assert record.token_usage is None
        await service.chat("x")
    assert record.token_usage is None
    assert list(record.messages) == [UserMessage("x"), AiMessage("hi")]


async def test_records_keep_the_messages_of_a_failed_invocation() -> None:
    good = tool_call("add", {"a": 1, "b": 2})
    message = AiMessage(None, [good, WRONG])
    service, _ = assistant(Response(message, TokenUsage(3, 4)))
    with invocation_record() as record, pytest.raises(ToolArgumentsError):
        await service.chat("x")

    assert record.token_usage == TokenUsage(3, 4)
    assert list(record.messages)[:2] == [UserMessage("x"), message]
    assert [each.request for each in record.tool_executions] == [good]


@pytest.mark.parametrize("together", [False, True])
async def test_records_keep_tools_that_ran_before_an_abort(together: bool) -> None:
    @tool
    async def stop() -> str:
        for _ in range(5):
            await asyncio.sleep(0)
        raise ToolAbort("stop")

    @tool
    async def quick() -> str:
        return "ran"

    message = AiMessage(None, [tool_call("quick"), tool_call("stop")])
    service = create_ai_service(
        Assistant, chat_model=ScriptedChatModel([message]), tools=(stop, quick), concurrent_tools=together
    )
    with invocation_record() as record, pytest.raises(ToolAbort):
        await service.chat("x")
    assert [each.result for each in record.tool_executions] == ["ran"]


async def test_records_keep_everything_before_a_model_failure() -> None:
    service, _ = assistant(tool_call("add", {"a": 1, "b": 2}), ConnectionError("gone"))
    with invocation_record() as record, pytest.raises(ConnectionError):
        await service.chat("x")
    assert [each.result for each in record.tool_executions] == ["3"]
    assert len(record.messages) == 3


async def test_records_keep_the_user_message_if_the_first_model_call_fails() -> None:
    service, _ = assistant(ConnectionError("gone"))
    with invocation_record() as record, pytest.raises(ConnectionError):
        await service.chat("x")
    assert list(record.messages) == [UserMessage("x")]


async def test_records_nest_and_include_nested_services() -> None:
    script = [*DOWN, "inner answer", "middle answer", "done"]
    model = ScriptedChatModel([*script, "after"])
    async with Container(models={"default": model}).register(Outer) as container:
        with invocation_record() as outer:
            with invocation_record() as inner:
                await container.get(Outer).chat("x")
            await container.get(Outer).chat("y")
    assert [each.request.name for each in inner.tool_executions] == ["ask", "delegate"]
    assert inner.messages == outer.messages[: len(inner.messages)]
    assert len(outer.messages) == len(inner.messages) + 2


async def test_records_keep_nothing_after_their_block() -> None:
    service, _ = assistant("a", "b")
    with invocation_record() as record:
        await service.chat("x")
    await service.chat("y")
    assert len(record.messages) == 2


def failing_helper() -> str:
    raise ValueError("no such order")


class Failing:
    @tool
    def blocks(self) -> str:
        """Fail on a thread."""
        try:
            return failing_helper()
        except ValueError as error:
            raise LookupError("gone") from error

    @tool
    async def waits(self) -> str:
        """Fail on the event loop."""
        return failing_helper()


@pytest.mark.parametrize("handler", [None, hide_details])
@pytest.mark.parametrize(("name", "frames"), [("blocks", ["blocks"]), ("waits", ["waits", "failing_helper"])])
async def test_the_log_of_a_failure_has_the_frames_of_the_tool_only(
    caplog: pytest.LogCaptureFixture, name: str, frames: list[str], handler: Any
) -> None:
    class Asking(Protocol):
        async def ask(self, question: str) -> str: ...

    model = ScriptedChatModel([tool_call(name), "Sorry."])
    service = create_ai_service(Asking, chat_model=model, tools=[Failing()], on_tool_execution_error=handler)
    with caplog.at_level(logging.WARNING, "toolbox.tools"):
        await service.ask("Go.")

    [record] = caplog.records
    assert record.exc_info is not None
    assert [frame.name for frame in traceback.extract_tb(record.exc_info[2])] == frames
    assert "pipeline.py" not in caplog.text


async def test_the_log_of_a_failure_inside_the_library_has_its_innermost_frame() -> None:
    try:
        tool_executor_from(failing_helper)(ToolExecutionRequest("1", "failing_helper", "[]"), None)
    except ToolArgumentsError as error:
        trace = own_frames(error)[2]

    names = [frame.name for frame in traceback.extract_tb(trace)]
    assert (names[0], len(names)) == ("test_the_log_of_a_failure_inside_the_library_has_its_innermost_frame", 2)
