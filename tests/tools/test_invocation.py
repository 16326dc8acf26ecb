"""One tool call: parameters, call scope, timeout, and errors for the model."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import UTC, date, datetime
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, field_serializer, model_serializer

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
    ToolExecutionResultMessage,
    ToolResultError,
    ToolTimeoutError,
    non_blocking,
    return_to_model,
    tool,
)
from toolbox.tools.pipeline import execute_tool

from .conftest import Bench, NotedScope, tool_in

pytestmark = pytest.mark.anyio


# --- outcomes


async def test_outcomes_have_the_execution_and_the_message(bench: Bench) -> None:
    async def add(a: int, b: int) -> dict[str, int]:
        return {"sum": a + b}

    before = datetime.now(UTC)
    outcome = await bench.run(add, '{"a": 1, "b": "2"}')
    execution, message = outcome.execution, outcome.message

    assert (execution.result, execution.result_object, execution.is_error) == ('{"sum":3}', {"sum": 3}, False)
    assert before <= execution.started_at <= datetime.now(UTC)
    assert 0 <= execution.duration < 5
    assert message == ToolExecutionResultMessage("1", "add", '{"sum":3}')


async def test_long_results_are_cut_with_a_note(bench: Bench) -> None:
    @tool(max_result_chars=10)
    async def long() -> str:
        return "x" * 100

    outcome = await bench.run(long)

    assert outcome.message.text == "x" * 10 + "\n[cut here: 10 of 100 characters are shown]"
    assert outcome.execution.result == outcome.message.text
    assert outcome.execution.result_object == "x" * 100


async def test_long_content_parts_are_cut_and_images_kept(bench: Bench) -> None:
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


# --- hidden parameters


async def test_hidden_parameters_are_filled_and_not_read_from_the_arguments(bench: Bench) -> None:
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


async def test_beans_can_replace_their_tool_call_and_its_value(bench: Bench) -> None:
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


async def test_call_scopes_end_before_the_result_is_returned(bench: Bench) -> None:
    async def work() -> None: ...

    await bench.run(work)

    assert bench.scope.events == ["entered", ("closed", None), "left"]


async def test_scopes_of_blocking_tools_close_on_their_thread_after_encoding_the_result(bench: Bench) -> None:
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


async def test_results_that_cannot_be_encoded_end_the_scope_with_an_error(bench: Bench) -> None:
    class Odd: ...

    async def give() -> Any:
        return {"a": Odd()}

    outcome = await bench.run(give)
    [error] = [each[1] for each in bench.scope.events if isinstance(each, tuple)]

    assert isinstance(error, ToolResultError)
    assert outcome.execution.is_error
    assert "Odd" in outcome.message.text
    assert outcome.execution.result_object is None


class Named(str):
    """A text of a class of its own."""


class Person(BaseModel):
    name: str
    born: date


class Written(BaseModel):
    name: str

    @field_serializer("name")
    def write(self, name: str) -> str:
        return name.upper()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("name\udcff", "name\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        (Named("name\udcff"), "name\ufffd"),
        ({"names": ["name\udcff"], "half \ud83d": 1.5}, '{"names":["name\ufffd"],"half \ufffd":1.5}'),
        (Person(name="name\udcff", born=date(2000, 1, 2)), '{"name":"name\ufffd","born":"2000-01-02"}'),
        ([Written(name="name\udcff")], '[{"name":"NAME\ufffd"}]'),
    ],
)
async def test_half_a_character_does_not_cost_a_result(bench: Bench, value: Any, text: str) -> None:
    def give() -> object:
        return value

    outcome = await bench.run(give)

    assert (outcome.message.text, outcome.message.is_error) == (text, False)
    assert outcome.execution.result_object is value


async def test_errors_while_closing_the_scope_are_tool_failures(bench: Bench) -> None:
    def work() -> str:
        return "done"

    bench.scope = NotedScope(close_error=ExceptionGroup("closing", [OSError("commit failed")]))
    outcome = await bench.run(work)

    assert (outcome.message.text, outcome.execution.is_error) == ("commit failed", True)


async def test_tool_errors_take_precedence_over_errors_while_closing_the_scope(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> str:
        raise LookupError("the tool's")

    bench.scope = NotedScope(close_error=OSError("the scope's"))
    outcome = await bench.run(work)

    assert outcome.message.text == "the tool's"
    assert "the scope's" in caplog.text


async def test_scopes_are_not_opened_for_invalid_arguments(bench: Bench) -> None:
    async def work(n: int) -> None: ...

    with pytest.raises(ToolArgumentsError):
        await bench.run(work, '{"n": "x"}')

    assert bench.scope.events == []


# --- timeouts and cancellation


async def test_scopes_of_late_blocking_tools_close_when_their_thread_ends(bench: Bench) -> None:
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
        leave.wait(60)
        late.append(context.cancelled)
        return "too late"

    bench.scope = Watched()
    outcome = await bench.run(wait)
    assert outcome.execution.is_error
    assert bench.scope.events == ["entered", "left"]
    leave.set()
    await asyncio.wait_for(closed.wait(), 60)

    assert late == [True]
    [here, rest] = bench.scope.events[2:]
    assert isinstance(here, tuple)
    assert isinstance(here[1], ToolTimeoutError)
    assert isinstance(rest, tuple)
    assert isinstance(rest[1], ToolTimeoutError)
    assert bench.context.cancelled is False


@pytest.mark.parametrize("timeout", [None, 60.0])
async def test_cancellation_skips_the_handlers_and_closes_the_scope(bench: Bench, timeout: float | None) -> None:
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


async def test_awaitables_returned_by_def_tools_are_awaited(bench: Bench) -> None:
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
async def test_stop_iteration_is_a_tool_failure(bench: Bench, blocking: bool) -> None:
    def first() -> Any:
        return next(iter([]))

    async def first_async() -> Any:
        return next(iter([]))

    outcome = await bench.run(first if blocking else first_async)

    assert outcome.execution.is_error
    assert "StopIteration" in outcome.message.text


# --- errors


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
async def test_tool_exceptions_are_sent_to_the_model_and_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture, error: Exception, text: str
) -> None:
    outcome = await bench.run(failing(error))

    assert (outcome.message.text, outcome.message.is_error) == (text, True)
    [record] = caplog.records
    assert (record.levelno, record.exc_info is not None) == (logging.WARNING, True)
    assert "boom" in record.getMessage()


@pytest.mark.parametrize("error", [ToolAbort("enough"), ScopeNotActiveError("Bean", "it has ended")])
@pytest.mark.parametrize("grouped", [False, True])
async def test_aborts_and_framework_errors_skip_the_handlers(bench: Bench, error: Exception, grouped: bool) -> None:
    raised = ExceptionGroup("tasks", [ValueError(), error]) if grouped else error
    bench.failures = ToolErrors(on_tool_execution_error=lambda error, context: "handled")

    with pytest.raises(type(raised)) as caught:
        await bench.run(failing(raised))

    assert caught.value is raised


async def test_missing_beans_raise_for_the_caller(bench: Bench) -> None:
    class Service:
        @tool
        def work(self) -> None: ...

    with pytest.raises(FrameworkError):
        await bench.run(Service)

    assert bench.scope.events[-1] == "left"
    assert any(isinstance(each, tuple) and each[0] == "closed" for each in bench.scope.events)


async def test_arguments_errors_have_their_own_handler(bench: Bench) -> None:
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


async def test_executors_can_raise_tool_arguments_error(bench: Bench) -> None:
    from toolbox import ToolSpecification

    def execute(request: ToolExecutionRequest, memory_id: object) -> str:
        raise ToolArgumentsError(request, [("", "not like this")])

    bench.failures = ToolErrors(on_tool_arguments_error=lambda error, context: f"{error.problems}")

    assert "not like this" in (await bench.run({ToolSpecification("by_hand"): execute})).message.text


async def test_unknown_tools_raise_or_are_returned_to_the_model(bench: Bench) -> None:
    request = ToolExecutionRequest("1", "extract_town", "{}")
    tools = {"a": tool_in(failing(ValueError())), "b": tool_in(failing(ValueError()))}

    with pytest.raises(Exception, match="unknown tool 'extract_town'; offered: a, b"):
        await execute_tool(request, bench.environment(tools))
    bench.failures = ToolErrors(on_unknown_tool=return_to_model)
    outcome = await execute_tool(request, bench.environment(tools))

    assert outcome.message.text == "There is no tool named 'extract_town'. The tools are: a, b."
    assert outcome.execution.is_error


async def test_annotated_strings_are_not_injected(bench: Bench) -> None:
    async def greet(name: Annotated[str, "who"] = "you") -> str:
        return f"hello {name}"

    assert (await bench.run(greet)).message.text == "hello you"


@pytest.mark.parametrize("error", [ScopeNotActiveError("User", "no request"), ToolAbort("stop")])
async def test_framework_errors_while_encoding_a_result_reach_the_caller(bench: Bench, error: Exception) -> None:
    class Lazy(BaseModel):
        @model_serializer
        def written(self) -> dict[str, str]:
            raise error

    async def look() -> list[Lazy]:
        return [Lazy()]

    with pytest.raises(type(error)) as caught:
        await bench.run(look)
    assert caught.value is error


async def test_an_error_while_encoding_a_result_may_be_its_own_cause(bench: Bench) -> None:
    class Looping(BaseModel):
        @model_serializer
        def written(self) -> dict[str, str]:
            error = ValueError("no")
            raise error from error

    async def look() -> list[Looping]:
        return [Looping()]

    assert (await bench.run(look)).execution.is_error
