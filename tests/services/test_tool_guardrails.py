"""Tests guardrails of tools: arguments and results, chains, errors, re-checks, events, calls without a service."""

import asyncio
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
from pydantic import BaseModel

from tests.conftest import Clock
from tests.listening import Events
from toolbox import (
    AiMessage,
    AiServiceTool,
    Container,
    GuardrailExecutedEvent,
    IllegalConfigurationError,
    ImageContent,
    InvocationContext,
    InvocationTimeoutError,
    MemoryId,
    Result,
    TextContent,
    ToolArgumentsError,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolSpecification,
    create_ai_service,
    register_ai_service,
    return_to_model,
    time_limit,
    tool,
    tool_executor_from,
)
from toolbox.guardrails import (
    GuardrailResult,
    MaxLength,
    ToolGuardrailError,
    ToolInputGuardrail,
    ToolInputGuardrailRequest,
    ToolOutputGuardrail,
    ToolOutputGuardrailRequest,
    tool_input_guardrails,
    tool_output_guardrails,
)
from toolbox.interceptors import ToolInterceptor, ToolInvocation, ToolProceed, interceptors
from toolbox.testing import ScriptedChatModel, tool_call

from .log import LOG

pytestmark = pytest.mark.anyio


def judging(function: Any, name: str = "Judging") -> Any:
    """Return a tool input guardrail with this function of the guardrail and the request."""

    class Judging(ToolInputGuardrail):
        def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
            LOG.append((name, request))
            return function(self, request)  # type: ignore[no-any-return]  # of a test

    Judging.__name__ = name
    return Judging


def reading(function: Any, name: str = "Reading") -> Any:
    """Return a tool output guardrail with this function of the guardrail and the request."""

    class Reading(ToolOutputGuardrail):
        async def validate(self, request: ToolOutputGuardrailRequest) -> GuardrailResult:
            LOG.append((name, request))
            return function(self, request)  # type: ignore[no-any-return]  # of a test

    Reading.__name__ = name
    return Reading


def echo_with(*decorators: Any) -> Any:
    """Return a tool that notes and returns its text, with these decorators."""

    def echo(text: str, times: int = 1) -> str:
        LOG.append(("echo", text, times))
        if text == "raise":
            raise LookupError("failed")
        return text * times

    for each in reversed(decorators):
        echo = each(echo)
    return tool(echo)


class Assistant(Protocol):
    async def ask(self, question: str) -> Result[str]: ...
    def wait(self, question: str) -> Result[str]: ...


def assistant(echo: Any, *calls: Any, **options: Any) -> Any:
    return create_ai_service(Assistant, chat_model=ScriptedChatModel([*calls, "done"]), tools=[echo], **options)


async def called(echo: Any, arguments: Any = None, **options: Any) -> ToolExecution:
    """Return the execution of one call."""
    used = assistant(echo, tool_call("echo", arguments or {"text": "hello"}), **options)
    [done] = (await used.ask("go")).tool_executions
    return done


def runs() -> list[Any]:
    """Return the runs of the tool."""
    return [each for each in LOG if each[0] == "echo"]


# --- arguments


async def test_a_guardrail_that_accepts_lets_the_tool_run_with_the_original_arguments() -> None:
    done = await called(echo_with(tool_input_guardrails(judging(lambda g, r: g.success()))))

    assert done.result == "hello"
    [(_, request), _] = LOG
    assert request.arguments == {"text": "hello", "times": 1}
    assert request.request.arguments == '{"text": "hello"}'
    assert request.context.request == request.request


async def test_a_failure_keeps_the_tool_from_running_and_the_model_reads_it() -> None:
    echo = echo_with(tool_input_guardrails(judging(lambda g, r: g.failure("unknown recipient"))))
    model = ScriptedChatModel([tool_call("echo", {"text": "x"}), "done"])
    result = await create_ai_service(Assistant, chat_model=model, tools=[echo]).ask("x")

    assert result.content == "done"
    message: Any = model.requests[-1].messages[-1]
    assert (message.text, message.is_error) == ("Input validation failed: unknown recipient", True)
    assert runs() == []


async def test_failures_without_a_text_have_a_default_text() -> None:
    refused = echo_with(tool_input_guardrails(judging(lambda g, r: g.failure())))
    assert (await called(refused)).result == "Input validation failed"
    hidden = echo_with(tool_output_guardrails(reading(lambda g, r: g.failure())))
    assert (await called(hidden)).result == "Output validation failed"


async def test_changed_arguments_replace_all_and_are_validated() -> None:
    def change(guardrail: Any, request: Any) -> GuardrailResult:
        return guardrail.success_with({"text": request.arguments["text"].upper(), "times": "2"})  # type: ignore[no-any-return]

    done = await called(echo_with(tool_input_guardrails(judging(change))), {"text": "ab", "times": 5})
    assert done.result == "ABAB"
    assert done.request.arguments == '{"text": "ab", "times": 5}'

    only_text = judging(lambda g, r: g.success_with({"text": "x"}))
    assert (await called(echo_with(tool_input_guardrails(only_text)), {"text": "ab", "times": 5})).result == "x"


@pytest.mark.parametrize(
    "values", [{"times": 1}, {"text": "a", "times": "many"}, {"text": "a", "more": 1}, None, "text", [("text", "a")]]
)
async def test_invalid_changed_arguments_are_fatal(values: Any) -> None:
    guardrail = judging(lambda g, r: g.success_with(values))
    with pytest.raises(ToolGuardrailError) as caught:
        await called(echo_with(tool_input_guardrails(guardrail)), on_tool_arguments_error=return_to_model)
    assert isinstance(caught.value.__cause__, (TypeError, ValueError))
    assert caught.value.guardrail is guardrail
    assert runs() == []


async def test_the_chain_runs_in_order_and_each_sees_the_changes_of_the_one_before() -> None:
    def mark(number: int) -> Any:
        return judging(
            lambda g, r: g.success_with({**r.arguments, "text": f"{r.arguments['text']}[G{number}]"}), f"G{number}"
        )

    done = await called(echo_with(tool_input_guardrails(*[mark(number) for number in range(1, 6)])))
    assert done.result == "hello[G1][G2][G3][G4][G5]"


@pytest.mark.parametrize("place", [1, 2, 3])
async def test_the_first_failure_stops_the_chain(place: int) -> None:
    def guard(number: int) -> Any:
        return judging(lambda g, r: g.failure(f"no {number}") if number == place else g.success(), f"G{number}")

    done = await called(echo_with(tool_input_guardrails(*[guard(number) for number in range(1, 6)])))
    assert done.result == f"Input validation failed: no {place}"
    assert [name for name, *_ in LOG] == [f"G{number}" for number in range(1, place + 1)]


async def test_a_fatal_guardrail_ends_the_invocation_past_the_error_handlers() -> None:
    cause = KeyError("why")
    guardrail = judging(lambda g, r: g.fatal("never do this", cause))
    echo = echo_with(tool_input_guardrails(guardrail))
    with pytest.raises(ToolGuardrailError, match="never do this") as caught:
        await called(echo, on_tool_execution_error=return_to_model)
    assert (caught.value.guardrail, caught.value.request.name) == (guardrail, "echo")
    assert caught.value.__cause__ is cause
    assert runs() == []


async def test_a_fatal_guardrail_ends_all_outer_invocations() -> None:
    echo = echo_with(tool_input_guardrails(judging(lambda g, r: g.fatal("stop"))))

    @register_ai_service(tools=[echo])
    class Inner(Protocol):
        @tool
        async def inner(self, question: str) -> str:
            """Answer."""
            ...

    @register_ai_service(tools=[Inner])
    class Outer(Protocol):
        async def ask(self, question: str) -> str: ...

    model = ScriptedChatModel([tool_call("inner", {"question": "x"}), tool_call("echo", {"text": "x"}), "never"])
    async with Container(models={"default": model}).register(Inner, Outer) as container:
        with pytest.raises(ToolGuardrailError):
            await container.get(Outer).ask("x")


@pytest.mark.parametrize("text", ["a reason", ""])
async def test_a_guardrail_that_raises_is_fatal_and_later_calls_work(text: str) -> None:
    error = RuntimeError(text) if text else RuntimeError()
    broken = judging(lambda g, r: (_ for _ in ()).throw(error) if r.arguments["text"] == "bad" else g.success())
    echo = echo_with(tool_input_guardrails(broken))
    used = assistant(echo, tool_call("echo", {"text": "bad"}), tool_call("echo", {"text": "good"}))
    with pytest.raises(ToolGuardrailError, match=text or "RuntimeError") as caught:
        await used.ask("x")
    assert caught.value.__cause__ is error
    assert (await used.ask("x")).tool_executions[0].result == "good"


async def test_a_guardrail_sees_validated_arguments_and_not_the_text_of_the_model() -> None:
    await called(echo_with(tool_input_guardrails(judging(lambda g, r: g.success()))), '{"text": "a", "times": "3",}')
    assert LOG[0][1].arguments == {"text": "a", "times": 3}

    LOG.clear()
    echo = echo_with(tool_input_guardrails(judging(lambda g, r: g.success())))
    with pytest.raises(ToolArgumentsError):
        await called(echo, {"text": "a", "times": "x"})
    assert LOG == []


async def test_guardrails_may_count_calls_by_memory_id() -> None:
    class RateLimit(ToolInputGuardrail):
        def __init__(self) -> None:
            self.counts: dict[Any, int] = {}

        def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
            room = request.context.memory_id
            self.counts[room] = self.counts.get(room, 0) + 1
            return self.failure("too many calls") if self.counts[room] > 1 else self.success()

    @register_ai_service(tools=[echo_with(tool_input_guardrails(RateLimit))])
    class Rooms(Protocol):
        async def ask(self, room: MemoryId[str], question: str) -> Result[str]: ...

    model = ScriptedChatModel([tool_call("echo", {"text": "x"}), "done"] * 3)
    async with Container(models={"default": model}).register(Rooms) as container:
        rooms = container.get(Rooms)
        results = [(await rooms.ask(room, "x")).tool_executions[0].result for room in ("a", "b", "a")]
    assert results == ["x", "x", "Input validation failed: too many calls"]


# --- results


async def test_an_output_guardrail_accepts_or_replaces_the_result() -> None:
    assert (await called(echo_with(tool_output_guardrails(reading(lambda g, r: g.success()))))).result_object == "hello"

    filtered = await called(echo_with(tool_output_guardrails(reading(lambda g, r: g.success_with("Filtered: ***")))))
    assert (filtered.result, filtered.result_object, filtered.is_error) == ("Filtered: ***", None, False)

    result = ToolExecutionResult("whole", 7, attributes={"kept": 1})
    whole = await called(echo_with(tool_output_guardrails(reading(lambda g, r: g.success_with(result)))))
    assert (whole.result, whole.result_object, whole.attributes) == ("whole", 7, {"kept": 1})


async def test_a_failure_of_an_output_guardrail_hides_the_result_of_a_tool_that_has_run() -> None:
    done = await called(echo_with(tool_output_guardrails(reading(lambda g, r: g.failure("secret inside")))))
    assert (done.result, done.result_object, done.is_error) == ("Output validation failed: secret inside", None, True)
    assert runs() == [("echo", "hello", 1)]


async def test_fatal_and_raising_output_guardrails_end_the_invocation() -> None:
    fatal = reading(lambda g, r: g.fatal("stop", KeyError("why")))
    with pytest.raises(ToolGuardrailError, match="stop") as caught:
        await called(echo_with(tool_output_guardrails(fatal)))
    assert isinstance(caught.value.__cause__, KeyError)

    broken = reading(lambda g, r: 1 / 0)
    with pytest.raises(ToolGuardrailError) as caught:
        await called(echo_with(tool_output_guardrails(broken)))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert len(runs()) == 2


async def test_output_guardrails_run_in_order_and_the_first_failure_stops_them() -> None:
    def mark(number: int) -> Any:
        return reading(lambda g, r: g.success_with(f"{r.result.text}[G{number}]"), f"G{number}")

    stop = reading(lambda g, r: g.failure("stop"), "Stop")
    done = await called(echo_with(tool_output_guardrails(mark(1), mark(2))))
    assert done.result == "hello[G1][G2]"
    LOG.clear()
    done = await called(echo_with(tool_output_guardrails(mark(1), stop, mark(2))))
    assert done.result == "Output validation failed: stop"
    assert [name for name, *_ in LOG] == ["echo", "G1", "Stop"]


async def test_an_output_guardrail_sees_the_arguments_that_an_input_guardrail_changed() -> None:
    change = judging(lambda g, r: g.success_with({"text": "changed"}))
    look = reading(lambda g, r: g.success())
    await called(echo_with(tool_input_guardrails(change), tool_output_guardrails(look)))
    request = LOG[-1][1]
    assert request.arguments == {"text": "changed", "times": 1}
    assert request.request.arguments == '{"text": "hello"}'
    assert request.result == ToolExecutionResult("changed", "changed")


async def test_output_guardrails_do_not_run_when_the_tool_raised_or_was_refused() -> None:
    look = reading(lambda g, r: g.failure("never"))
    done = await called(echo_with(tool_output_guardrails(look)), {"text": "raise"})
    assert done.result == "failed"
    refuse = judging(lambda g, r: g.failure("no"))
    done = await called(echo_with(tool_input_guardrails(refuse), tool_output_guardrails(look)))
    assert done.result == "Input validation failed: no"
    assert [name for name, *_ in LOG] == ["echo", "Judging"]


class Customer(BaseModel):
    name: str
    card: str


@dataclass
class Page:
    customers: list[Customer]


async def test_results_of_any_type_are_judged_as_the_text_that_the_model_would_read() -> None:
    seen = []

    def look(guardrail: Any, request: Any) -> GuardrailResult:
        seen.append((request.result.text, request.result.result_object))
        return guardrail.success_with(request.result.text.replace("4111", "[REDACTED]"))  # type: ignore[no-any-return]

    guardrail = reading(look)

    @tool
    @tool_output_guardrails(guardrail)
    async def echo(text: str) -> Page:
        await asyncio.sleep(0)
        return Page([Customer(name=text, card="4111")])

    done = await called(echo)
    assert seen == [('{"customers":[{"name":"hello","card":"4111"}]}', Page([Customer(name="hello", card="4111")]))]
    assert done.result == '{"customers":[{"name":"hello","card":"[REDACTED]"}]}'


async def test_a_text_as_replacement_removes_the_contents_too() -> None:
    @tool
    @tool_output_guardrails(reading(lambda g, r: g.success_with("hidden")))
    def echo(text: str) -> list[Any]:
        return [TextContent("secret"), ImageContent(data=b"x", mime_type="image/png")]

    model = ScriptedChatModel([tool_call("echo", {"text": "x"}), "done"])
    await create_ai_service(Assistant, chat_model=model, tools=[echo]).ask("x")
    message: Any = model.requests[-1].messages[-1]
    assert (message.text, message.contents) == ("hidden", ())


# --- with interceptors


def changing(**changes: Any) -> Any:
    class Changing(ToolInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
            LOG.append(("interceptor", dict(call.arguments)))
            return await proceed(call.with_arguments(**changes))

    return Changing()


async def test_arguments_that_an_interceptor_changed_are_judged_again() -> None:
    allowed = judging(lambda g, r: g.success() if r.arguments["text"] == "hello" else g.failure("not allowed"))
    echo = echo_with(tool_input_guardrails(allowed), interceptors(changing(text="attack")))
    done = await called(echo)
    assert (done.result, done.is_error) == ("Input validation failed: not allowed", True)
    assert [name for name, *_ in LOG] == ["Judging", "interceptor", "Judging"]


async def test_a_guardrail_may_change_what_an_interceptor_changed() -> None:
    shorten = judging(lambda g, r: g.success_with({**r.arguments, "text": r.arguments["text"][:3]}))
    echo = echo_with(tool_input_guardrails(shorten), interceptors(changing(text="a long text"), changing(times=2)))
    assert (await called(echo)).result == "a la l"


async def test_interceptors_do_not_see_refused_calls_and_output_guardrails_have_the_last_word() -> None:
    class Loud(ToolInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
            LOG.append(("Loud", call))
            result = await proceed(call)
            return ToolExecutionResult(f"{result.text} 4111", result.result_object)

    refuse = judging(lambda g, r: g.failure("no") if r.arguments["text"] == "bad" else g.success())
    mask = reading(lambda g, r: g.success_with(r.result.text.replace("4111", "***")))
    echo = echo_with(tool_input_guardrails(refuse), tool_output_guardrails(mask), interceptors(Loud))
    assert (await called(echo)).result == "hello ***"
    LOG.clear()
    assert (await called(echo, {"text": "bad"})).result == "Input validation failed: no"
    assert [name for name, *_ in LOG] == ["Judging"]


# --- where guardrails come from


async def test_guardrails_of_a_service_apply_to_all_its_tools_before_those_of_the_tool() -> None:
    def named(name: str) -> Any:
        return judging(lambda g, r: g.success(), name)

    class Tools:
        @tool
        @tool_input_guardrails(named("tool"))
        def echo(self, text: str) -> str:
            return text

    tool_input_guardrails(named("tools"))(Tools)

    @register_ai_service(tools=Tools)
    @tool_input_guardrails(named("class"))
    class Guarded(Protocol):
        @tool_input_guardrails(named("method"))
        async def ask(self, question: str) -> str: ...

        async def plain(self, question: str) -> str: ...

    model = ScriptedChatModel([tool_call("echo", {"text": "x"}), "done"] * 2)
    async with Container(models={"default": model}).register(Guarded) as container:
        await container.get(Guarded).ask("x")
        assert [name for name, _ in LOG] == ["class", "method", "tools", "tool"]
        LOG.clear()
        await container.get(Guarded).plain("x")
        assert [name for name, _ in LOG] == ["class", "tools", "tool"]


async def test_a_slow_guardrail_of_one_tool_does_not_hold_up_the_others() -> None:
    release = threading.Event()
    slow = judging(lambda g, r: g.success() if release.wait(60) else g.failure("late"))

    @tool
    async def other() -> str:
        release.set()
        return "other"

    model = ScriptedChatModel([AiMessage(None, (tool_call("echo", {"text": "x"}), tool_call("other"))), "done"])
    tools = [echo_with(tool_input_guardrails(slow)), other]
    used = create_ai_service(Assistant, chat_model=model, tools=tools, concurrent_tools=True)
    assert [each.result for each in (await used.ask("x")).tool_executions] == ["x", "other"]


async def test_a_guardrail_that_hangs_is_bounded_by_the_deadline() -> None:
    class Hanging(ToolInputGuardrail):
        async def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
            await asyncio.Event().wait()
            return self.success()

    used = assistant(echo_with(tool_input_guardrails(Hanging)), tool_call("echo", {"text": "x"}))
    with pytest.raises(InvocationTimeoutError), time_limit(0.02):
        await used.ask("x")


@pytest.mark.parametrize("kind", [ToolInputGuardrail, ToolOutputGuardrail])
async def test_a_guardrail_that_catches_a_cancellation_cannot_let_the_call_go_on(kind: Any, clock: Clock) -> None:
    class Catching(kind):  # type: ignore[misc]  # one of two classes
        async def validate(self, request: Any) -> GuardrailResult:
            clock.advance(101)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                LOG.append(("caught",))
            return self.success()  # type: ignore[no-any-return]  # of a parameter

    decorator = tool_input_guardrails if kind is ToolInputGuardrail else tool_output_guardrails
    calls = AiMessage(None, (tool_call("echo", {"text": "x"}), tool_call("echo", {"text": "y"})))
    used = assistant(echo_with(decorator(Catching)), calls)
    with pytest.raises(InvocationTimeoutError), time_limit(100):
        await used.ask("x")
    assert [each for each in LOG if each[0] != "echo"] == [("caught",)]
    assert LOG.count(("echo", "x", 1)) == (kind is ToolOutputGuardrail)
    assert ("echo", "y", 1) not in LOG


async def test_a_guardrail_class_that_only_a_providers_tool_names_must_be_registered() -> None:
    refuse = judging(lambda g, r: g.failure("no"), "Refusing")
    echo = echo_with(tool_input_guardrails(refuse))

    @register_ai_service(tool_provider=lambda request: [echo])
    class Provided(Protocol):
        async def ask(self, question: str) -> Result[str]: ...

    model = ScriptedChatModel([tool_call("echo", {"text": "x"}), "done"])
    container = Container(models={"default": model})
    async with container.register(Provided):
        with pytest.raises(IllegalConfigurationError, match="no bean provides Judging; register Judging; classes"):
            await container.get(Provided).ask("x")
    async with container.register(refuse):
        [done] = (await container.get(Provided).ask("x")).tool_executions
    assert done.result == "Input validation failed: no"


async def test_executors_written_by_hand_and_plain_executors_are_guarded() -> None:
    allowed = judging(
        lambda g, r: g.success_with({"text": "changed"}) if r.arguments["text"] == "a" else g.failure("b")
    )

    @tool_input_guardrails(allowed)
    def execute(request: ToolExecutionRequest, memory_id: object) -> str:
        return request.arguments

    by_hand = AiServiceTool(ToolSpecification("echo", "", {"type": "object"}), execute)
    assert (await called(by_hand, {"text": "a"})).result == '{"text":"changed"}'
    assert (await called(by_hand, {"text": "b"})).is_error

    executor = tool_executor_from(echo_with(tool_input_guardrails(allowed), tool_output_guardrails(MaxLength(3))))
    assert executor(ToolExecutionRequest("1", "echo", '{"text": "a"}'), None).text == "cha"
    assert executor(ToolExecutionRequest("1", "echo", '{"text": "b"}'), None).is_error


async def test_a_guardrail_with_invalid_json_of_an_executor_never_runs() -> None:
    @tool_input_guardrails(judging(lambda g, r: g.success()))
    def execute(request: ToolExecutionRequest, memory_id: object) -> str:
        return "ran"

    by_hand = AiServiceTool(ToolSpecification("echo", "", {"type": "object"}), execute)
    done = await called(by_hand, "[1, 2", on_tool_arguments_error=return_to_model)
    assert done.is_error
    assert LOG == []


async def test_tool_events_and_guardrail_events_share_the_context_of_the_call() -> None:
    refuse = judging(lambda g, r: g.failure("no"), "Refusing")

    @register_ai_service(tools=[echo_with(tool_input_guardrails(refuse))])
    class Guarded(Protocol):
        async def ask(self, question: str) -> str: ...

    model = ScriptedChatModel([tool_call("echo", {"text": "x"}), "done"])
    async with Container(models={"default": model}).register(Guarded, Events) as container:
        await container.get(Guarded).ask("x")
        seen = container.get(Events).seen
        started, guarded, executed = [each for each in seen if each.context.request is not None]
    assert isinstance(guarded, GuardrailExecutedEvent)
    assert (guarded.guardrail, guarded.outcome) == (refuse, "failure")
    assert started.context is guarded.context is executed.context
    assert guarded.duration > 0


def test_problems_with_guardrails_of_tools_are_found_at_start() -> None:
    class Needy(ToolInputGuardrail):
        def __init__(self, page: Page) -> None: ...

        def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
            return self.success()

    class Tools:
        @tool
        @tool_input_guardrails(Needy, Page)
        @tool_output_guardrails(Needy)
        def echo(self, text: str) -> str:
            return text

    problems = [str(each) for each in Container(models={"default": ScriptedChatModel([])}).register(Tools).check()]
    assert len(problems) == 3
    assert any("no bean provides Page" in each for each in problems)
    assert (
        "Tools.echo, @tool_input_guardrails: Page is not a ToolInputGuardrail; inherit from ToolInputGuardrail"
        in problems
    )
    assert any("Needy is not a ToolOutputGuardrail" in each for each in problems)
    with pytest.raises(IllegalConfigurationError):
        tool_executor_from(Tools().echo)


async def test_a_context_of_the_call_is_given_to_guardrails_of_synchronous_services() -> None:
    def where(guardrail: Any, request: Any) -> GuardrailResult:
        current = InvocationContext.current()
        assert current is not None
        assert current.request == request.request
        LOG.append(("thread", threading.current_thread()))
        return guardrail.success()  # type: ignore[no-any-return]

    used = assistant(echo_with(tool_input_guardrails(judging(where))), tool_call("echo", {"text": "x"}))

    def call() -> threading.Thread:
        used.wait("x")
        return threading.current_thread()

    assert ("thread", await asyncio.to_thread(call)) in LOG


def test_the_reach_report_lists_the_guardrails_on_the_way_to_a_tool() -> None:
    of_class = judging(lambda g, r: g.success(), "OfClass")
    of_tool = reading(lambda g, r: g.success(), "OfTool")

    @register_ai_service(tools=[echo_with(tool_output_guardrails(of_tool))])
    @tool_input_guardrails(of_class)
    class Guarded(Protocol):
        async def ask(self, question: str) -> str: ...

    [row] = Container(models={"default": ScriptedChatModel([])}).register(Guarded).reach()
    assert row.guardrails == (of_class, of_tool)
