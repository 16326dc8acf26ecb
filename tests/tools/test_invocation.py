"""One call of a tool: its scope, its place, its end, and what the model is told when it goes wrong."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, model_serializer

from toolbox import (
    FrameworkError,
    ImageContent,
    Inject,
    InvocationContext,
    MemoryId,
    ScopeNotActiveError,
    TextContent,
    ToolAbort,
    ToolArgumentsError,
    ToolErrors,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolExecutionResultMessage,
    ToolResultError,
    ToolRetry,
    ToolTimeoutError,
    hide_details,
    non_blocking,
    return_to_model,
    run_on,
    tool,
)
from toolbox.tools.pipeline import execute_tool

from .conftest import Bench, NotedScope, tool_in

pytestmark = pytest.mark.anyio


# --- what comes of a call


async def test_the_outcome_has_all_for_the_caller_and_for_the_model(bench: Bench) -> None:
    async def add(a: int, b: int) -> dict[str, int]:
        return {"sum": a + b}

    before = datetime.now(UTC)
    outcome = await bench.run(add, '{"a": 1, "b": "2"}')
    execution, message = outcome.execution, outcome.message

    assert (execution.result, execution.result_object, execution.is_error) == ('{"sum":3}', {"sum": 3}, False)
    assert before <= execution.started_at <= datetime.now(UTC)
    assert 0 <= execution.duration < 5
    assert message == ToolExecutionResultMessage("1", "add", '{"sum":3}')


async def test_a_ready_result_keeps_its_attributes_and_contents(bench: Bench) -> None:
    async def look() -> ToolExecutionResult:
        parts = [TextContent("seen"), ImageContent(url="http://x/y.png")]
        return ToolExecutionResult("seen", 7, attributes={"k": 1}, contents=parts)

    outcome = await bench.run(look)

    assert (outcome.execution.result_object, outcome.execution.attributes) == (7, {"k": 1})
    assert outcome.message.attributes == {"k": 1}
    assert len(outcome.message.contents) == 2


async def test_a_long_result_is_cut_with_a_note(bench: Bench) -> None:
    @tool(max_result_chars=10)
    async def long() -> str:
        return "x" * 100

    outcome = await bench.run(long)

    assert outcome.message.text == "x" * 10 + "\n[cut here: 10 of 100 characters are shown]"
    assert outcome.execution.result == outcome.message.text
    assert outcome.execution.result_object == "x" * 100


async def test_the_texts_among_contents_are_cut_and_images_stay(bench: Bench) -> None:
    image = ImageContent(url="http://x/y.png")

    async def look() -> list[Any]:
        return [TextContent("abc"), image, TextContent("defgh"), TextContent("ij")]

    bench.max_result_chars = 6
    outcome = await bench.run(look)

    texts = [each.text for each in outcome.message.contents if isinstance(each, TextContent)]
    assert image in outcome.message.contents
    assert texts[:2] == ["abc", "de"]
    assert "6 of 12" in texts[2]
    assert outcome.message.text.startswith("abc\nde\n[cut")


# --- what is filled in


async def test_hidden_parameters_are_filled_and_keys_of_their_names_ignored(bench: Bench) -> None:
    seen: list[Any] = []

    async def look(
        me: MemoryId[str], q: str, context: InvocationContext, bean: Inject[dict[str, int]], more: Inject[int] = 5
    ) -> None:
        seen.extend([me, q, context, bean, more])

    bench.scope.beans[dict[str, int]] = {"a": 1}
    await bench.run(look, '{"q": "x", "me": "forged", "context": {}, "bean": {}, "more": 9}')

    [id_, q, context, bean, more] = seen
    assert (id_, q, bean, more) == ("m1", "x", {"a": 1}, 5)
    assert context.service is Bench
    assert context.request is not None
    assert context.request.name == "look"


async def test_the_context_is_current_in_the_tool_on_every_thread_and_not_after(bench: Bench) -> None:
    def name() -> str:
        context = InvocationContext.current()
        assert context is not None
        assert context.request is not None
        return context.request.name

    async def asynchronous() -> str:
        return name()

    def blocking() -> str:
        assert threading.current_thread() is not threading.main_thread()
        return name()

    assert (await bench.run(asynchronous)).message.text == "asynchronous"
    assert (await bench.run(blocking)).message.text == "blocking"
    assert InvocationContext.current() is None


async def test_a_bean_is_looked_up_for_each_call(bench: Bench) -> None:
    class Counter:
        def __init__(self, start: int) -> None:
            self.count = start

        @tool
        async def next(self) -> int:
            self.count += 1
            return self.count

    bench.scope.beans[Counter] = Counter(1)
    assert (await bench.run(Counter)).message.text == "2"
    bench.scope.beans[Counter] = Counter(10)
    assert (await bench.run(Counter)).message.text == "11"


async def test_a_bean_may_say_how_it_is_called_as_a_tool_and_what_its_value_stands_for(bench: Bench) -> None:
    class Answer:
        def __tool_value__(self) -> str:
            return "the content"

    class Service:
        @tool
        async def chat(self, q: str) -> Any:
            raise AssertionError("not this way")

        def __toolbox_tool_call__(self, name: str) -> Any:
            async def call(q: str) -> Answer:
                return Answer()

            assert name == "chat"
            return call

    bench.scope.beans[Service] = Service()

    assert (await bench.run(Service, '{"q": "x"}')).message.text == "the content"
    assert (await bench.run(Service(), '{"q": "x"}')).message.text == "the content"
    assert (await bench.run(Service().chat, '{"q": "x"}')).message.text == "the content"


# --- the call scope


async def test_the_scope_ends_before_the_result_goes_out(bench: Bench) -> None:
    async def work() -> None: ...

    await bench.run(work)

    assert bench.scope.events == ["entered", ("closed", None), "left"]


async def test_a_blocking_tools_scope_is_closed_on_its_thread_after_its_result_is_written(bench: Bench) -> None:
    threads: list[Any] = []

    class Lazy(NotedScope):
        def close_here(self, error: BaseException | None) -> None:
            threads.append(threading.current_thread())
            super().close_here(error)

    def work() -> Any:
        threads.append(threading.current_thread())
        return (each for each in [scope.events[:], threading.current_thread() is threads[0]])

    scope = bench.scope = Lazy()
    outcome = await bench.run(work)

    assert threads[0] is threads[1] is not threading.main_thread()
    assert outcome.message.text == '[["entered"],true]'
    assert scope.events == ["entered", ("closed here", None), ("closed", None), "left"]


@pytest.mark.parametrize("blocking", [True, False])
async def test_the_tools_exception_is_thrown_into_its_scope(bench: Bench, blocking: bool) -> None:
    error = LookupError("nothing there")

    def blocks() -> None:
        raise error

    async def awaits() -> None:
        raise error

    outcome = await bench.run(blocks if blocking else awaits)

    assert (outcome.message.text, outcome.message.is_error) == ("nothing there", True)
    assert ("closed", error) in bench.scope.events
    assert bench.scope.events[-1] == "left"


async def test_a_result_that_cannot_be_written_ends_the_scope_as_an_error(bench: Bench) -> None:
    class Odd: ...

    async def give() -> Any:
        return {"a": Odd()}

    outcome = await bench.run(give)
    [error] = [each[1] for each in bench.scope.events if isinstance(each, tuple)]

    assert isinstance(error, ToolResultError)
    assert outcome.execution.is_error
    assert "Odd" in outcome.message.text
    assert outcome.execution.result_object is None


@pytest.mark.parametrize("value", ["name\udcff", {"names": ["name\udcff"]}])
async def test_a_result_with_a_lone_surrogate_is_an_error_that_says_what_to_do(bench: Bench, value: Any) -> None:
    def give() -> object:
        return value

    outcome = await bench.run(give)

    assert outcome.message.is_error
    assert "lone surrogate" in outcome.message.text
    assert "errors='replace'" in outcome.message.text
    assert "return a str" not in outcome.message.text
    outcome.message.text.encode()


async def test_a_scope_that_fails_to_close_makes_the_tool_fail(bench: Bench) -> None:
    def work() -> str:
        return "done"

    bench.scope = NotedScope(close_error=ExceptionGroup("closing", [OSError("commit failed")]))
    outcome = await bench.run(work)

    assert (outcome.message.text, outcome.execution.is_error) == ("commit failed", True)


async def test_a_tools_own_error_goes_before_its_scopes(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def work() -> str:
        raise LookupError("the tool's")

    bench.scope = NotedScope(close_error=OSError("the scope's"))
    outcome = await bench.run(work)

    assert outcome.message.text == "the tool's"
    assert "the scope's" in caplog.text


async def test_beans_are_not_opened_for_arguments_that_cannot_be_used(bench: Bench) -> None:
    async def work(n: int) -> None: ...

    with pytest.raises(ToolArgumentsError):
        await bench.run(work, '{"n": "x"}')

    assert bench.scope.events == []


# --- time


async def test_a_late_asynchronous_tool_is_cancelled_and_is_an_error(bench: Bench) -> None:
    ended: list[str] = []

    @tool(timeout=0.01)
    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("tool")

    outcome = await bench.run(wait)

    assert ended == ["tool"]
    assert outcome.message.text == "tool 'wait' took longer than its timeout of 0.01 s"
    assert outcome.execution.is_error


async def test_a_late_blocking_tool_goes_on_alone_and_its_scope_is_closed_when_it_is_left(bench: Bench) -> None:
    leave, closed = threading.Event(), asyncio.Event()
    late: list[bool] = []

    class Watched(NotedScope):
        async def aclose(self, error: BaseException | None) -> None:
            await super().aclose(error)
            closed.set()

    @tool(timeout=0.01)
    def wait() -> str:
        context = InvocationContext.current()
        assert context is not None
        leave.wait(10)
        late.append(context.cancelled)
        return "too late"

    bench.scope = Watched()
    outcome = await bench.run(wait)
    assert outcome.execution.is_error
    assert bench.scope.events == ["entered", "left"]
    leave.set()
    await asyncio.wait_for(closed.wait(), 10)

    assert late == [True]
    [here, rest] = bench.scope.events[2:]
    assert isinstance(here, tuple)
    assert isinstance(here[1], ToolTimeoutError)
    assert isinstance(rest, tuple)
    assert isinstance(rest[1], ToolTimeoutError)
    assert bench.context.cancelled is False


async def test_a_tools_own_timeout_error_is_its_own(bench: Bench) -> None:
    @tool(timeout=10)
    async def fail() -> None:
        raise TimeoutError("the database")

    assert (await bench.run(fail)).message.text == "the database"


async def test_a_timeout_goes_to_the_handler(bench: Bench) -> None:
    seen: list[Exception] = []

    def note(error: Exception, context: InvocationContext) -> str:
        seen.append(error)
        return "late"

    @tool(timeout=0.01)
    async def wait() -> None:
        await asyncio.Event().wait()

    bench.failures = ToolErrors(on_tool_execution_error=note)

    assert (await bench.run(wait)).message.text == "late"
    assert isinstance(seen[0], TimeoutError)


@pytest.mark.parametrize("timeout", [None, 60.0])
async def test_cancellation_is_never_handled_and_closes_the_scope(bench: Bench, timeout: float | None) -> None:
    started = asyncio.Event()

    @tool(timeout=timeout)
    async def wait() -> None:
        started.set()
        await asyncio.Event().wait()

    bench.failures = ToolErrors(on_tool_execution_error=lambda error, context: "handled")
    task = asyncio.create_task(bench.run(wait))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    [closed] = [each for each in bench.scope.events if isinstance(each, tuple)]
    assert isinstance(closed[1], asyncio.CancelledError)


# --- places


def elsewhere(n: int) -> int:
    return n + 1


async def test_a_function_runs_in_another_process(bench: Bench) -> None:
    import multiprocessing

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        outcome = await bench.run(run_on(pool)(elsewhere), '{"n": 1}')

    assert outcome.message.text == "2"
    assert bench.scope.events == ["entered", ("closed", None), "left"]


async def test_a_def_that_returns_an_awaitable_is_awaited_and_then_written(bench: Bench) -> None:
    async def rest() -> str:
        return "awaited"

    def begin() -> Any:
        return rest()

    @non_blocking
    def begin_here() -> Any:
        return asyncio.ensure_future(rest())

    assert (await bench.run(begin)).message.text == "awaited"
    assert (await bench.run(begin_here)).message.text == "awaited"


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_stop_iteration_is_a_failure_like_any_other(bench: Bench, blocking: bool) -> None:
    def first() -> Any:
        return next(iter([]))

    async def first_async() -> Any:
        return next(iter([]))

    outcome = await bench.run(first if blocking else first_async)

    assert outcome.execution.is_error
    assert "StopIteration" in outcome.message.text


# --- what the model is told


class Boom(Exception):
    pass


def failing(error: BaseException) -> Any:
    async def boom() -> None:
        raise error

    return boom


@pytest.mark.parametrize(
    ("error", "text"),
    [(Boom("it broke"), "it broke"), (Boom(), "Boom"), (Boom("  "), "Boom"), (Boom("\ud800"), "\\ud800")],
)
async def test_by_default_the_model_reads_the_message_and_the_log_has_it(
    bench: Bench, caplog: pytest.LogCaptureFixture, error: Exception, text: str
) -> None:
    outcome = await bench.run(failing(error))

    assert (outcome.message.text, outcome.message.is_error) == (text, True)
    [record] = caplog.records
    assert (record.levelno, record.exc_info is not None) == (logging.WARNING, True)
    assert "boom" in record.getMessage()


async def test_hidden_details_stay_in_the_log(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.failures = ToolErrors(on_tool_execution_error=hide_details)

    outcome = await bench.run(failing(Boom("password: 123")))

    assert outcome.message.text == "The tool 'boom' failed."
    assert "password: 123" in caplog.text


async def test_a_retry_needs_no_handler(bench: Bench) -> None:
    bench.failures = ToolErrors(on_tool_execution_error=lambda error, context: 1 / 0)  # type: ignore[arg-type,return-value]  # never called

    outcome = await bench.run(failing(ToolRetry("use the full name")))

    assert (outcome.message.text, outcome.execution.is_error) == ("use the full name", True)


@pytest.mark.parametrize("error", [ToolAbort("enough"), ScopeNotActiveError("Bean", "it has ended")])
@pytest.mark.parametrize("grouped", [False, True])
async def test_aborts_and_the_librarys_own_errors_are_never_handled(
    bench: Bench, error: Exception, grouped: bool
) -> None:
    raised = ExceptionGroup("tasks", [ValueError(), error]) if grouped else error
    bench.failures = ToolErrors(on_tool_execution_error=lambda error, context: "handled")

    with pytest.raises(type(raised)) as caught:
        await bench.run(failing(raised))

    assert caught.value is raised


async def test_a_missing_bean_reaches_the_caller(bench: Bench) -> None:
    class Service:
        @tool
        def work(self) -> None: ...

    with pytest.raises(FrameworkError):
        await bench.run(Service)

    assert bench.scope.events[-1] == "left"
    assert any(isinstance(each, tuple) and each[0] == "closed" for each in bench.scope.events)


async def test_a_handler_gets_the_tools_own_exception_and_the_context(bench: Bench) -> None:
    seen: list[Any] = []

    async def handle(error: Exception, context: InvocationContext) -> ToolExecutionResult:
        seen.extend([error, context.memory_id, context.request])
        return ToolExecutionResult("never mind", result_object=3, attributes={"a": 1})

    bench.failures = ToolErrors(on_tool_execution_error=handle)
    error = Boom()
    outcome = await bench.run(failing(error))

    assert seen[0] is error
    assert seen[1] == "m1"
    assert seen[2].name == "boom"
    assert (outcome.message.text, outcome.execution.is_error) == ("never mind", False)
    assert outcome.execution.result_object == 3
    assert outcome.message.attributes == {"a": 1}


async def test_a_blocking_handler_runs_on_a_thread_and_what_it_raises_reaches_the_caller(bench: Bench) -> None:
    threads: list[threading.Thread] = []
    other = Boom("from the handler")

    def handle(error: Exception, context: InvocationContext) -> str:
        threads.append(threading.current_thread())
        raise other

    bench.failures = ToolErrors(on_tool_execution_error=handle)
    with pytest.raises(Boom) as caught:
        await bench.run(failing(Boom()))

    assert caught.value is other
    assert threads[0] is not threading.main_thread()


async def test_a_handler_that_returns_nothing_says_so(bench: Bench) -> None:
    bench.failures = ToolErrors(on_tool_execution_error=lambda error, context: None)  # type: ignore[arg-type,return-value]  # a mistake

    with pytest.raises(TypeError, match="returned NoneType"):
        await bench.run(failing(Boom()))


async def test_arguments_errors_have_a_handler_of_their_own(bench: Bench) -> None:
    async def add(a: int) -> int:
        return a

    with pytest.raises(ToolArgumentsError):
        await bench.run(add, "{")
    bench.failures = ToolErrors(on_tool_arguments_error=return_to_model)
    outcome = await bench.run(add, '{"a": "x", "b": 1}')

    assert outcome.execution.is_error
    assert outcome.message.text.splitlines() == [
        "The arguments of tool 'add' are not valid:",
        "- a: Input should be a valid integer, unable to parse string as an integer",
    ]


async def test_an_inner_services_arguments_error_is_the_tools_failure(bench: Bench) -> None:
    inner = ToolArgumentsError(ToolExecutionRequest("9", "inner", "{"), [("", "broken")])
    bench.failures = ToolErrors(on_tool_execution_error=lambda error, context: "failure")

    assert (await bench.run(failing(inner))).message.text == "failure"


async def test_an_executor_may_refuse_its_arguments(bench: Bench) -> None:
    from toolbox import ToolSpecification

    def execute(request: ToolExecutionRequest, memory_id: object) -> str:
        raise ToolArgumentsError(request, [("", "not like this")])

    bench.failures = ToolErrors(on_tool_arguments_error=lambda error, context: f"{error.problems}")

    assert "not like this" in (await bench.run({ToolSpecification("by_hand"): execute})).message.text


async def test_an_unknown_tool_is_raised_or_told(bench: Bench) -> None:
    request = ToolExecutionRequest("1", "extract_town", "{}")
    tools = {"a": tool_in(failing(ValueError())), "b": tool_in(failing(ValueError()))}

    with pytest.raises(Exception, match="unknown tool 'extract_town'; offered: a, b"):
        await execute_tool(request, bench.environment(tools))
    bench.failures = ToolErrors(on_unknown_tool=return_to_model)
    outcome = await execute_tool(request, bench.environment(tools))

    assert outcome.message.text == "There is no tool named 'extract_town'. The tools are: a, b."
    assert outcome.execution.is_error


async def test_a_services_handlers_go_before_the_containers() -> None:
    def own(error: Exception, context: InvocationContext) -> str:
        return "own"

    outer = ToolErrors(on_unknown_tool=return_to_model, on_tool_execution_error=hide_details)

    assert ToolErrors(on_tool_execution_error=own).over(outer) == ToolErrors(return_to_model, None, own)


async def test_many_calls_at_once_do_not_disturb_each_other(bench: Bench) -> None:
    async def echo(n: int, context: InvocationContext) -> list[Any]:
        await asyncio.sleep(0)
        current = InvocationContext.current()
        assert current is not None
        assert current.request is not None
        assert context.request is not None
        return [n, current.request.arguments == context.request.arguments == f'{{"n":{n}}}']

    made = tool_in(echo)
    environment = bench.environment({made.name: made})
    outcomes = await asyncio.gather(
        *(execute_tool(ToolExecutionRequest(str(n), "echo", f'{{"n":{n}}}'), environment) for n in range(100))
    )

    assert [each.execution.result_object for each in outcomes] == [[n, True] for n in range(100)]


async def test_an_annotated_string_is_not_mistaken_for_a_bean(bench: Bench) -> None:
    async def greet(name: Annotated[str, "who"] = "you") -> str:
        return f"hello {name}"

    assert (await bench.run(greet)).message.text == "hello you"


@pytest.mark.parametrize("error", [ScopeNotActiveError("User", "no request"), ToolAbort("stop")])
async def test_what_a_result_raises_while_it_is_written_reaches_the_caller_and_not_the_model(
    bench: Bench, error: Exception
) -> None:
    class Lazy(BaseModel):
        @model_serializer
        def written(self) -> dict[str, str]:
            raise error

    async def look() -> list[Lazy]:
        return [Lazy()]

    with pytest.raises(type(error)) as caught:
        await bench.run(look)
    assert caught.value is error
