"""Invocations: context, notes, attributes, time limits, cancellation and nested services."""

import asyncio
import pickle
import threading
import time
from typing import Any, Protocol

import pytest

from tests.conftest import Clock
from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    Inject,
    InvocationContext,
    InvocationTimeoutError,
    MemoryId,
    Result,
    ScopeNotActiveError,
    ToolboxSettings,
    ToolCallsLimitExceededError,
    ToolExecutionRequest,
    ToolRoundsExceededError,
    ToolSpecification,
    UserMessage,
    call_scoped,
    create_ai_service,
    invocation_attributes,
    invocation_record,
    register_ai_service,
    request_scoped,
    return_to_model,
    run_on_thread,
    time_limit,
    tool,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Assistant(Protocol):
    async def chat(self, session: MemoryId[str], text: str) -> Result[str]: ...


class Simple(Protocol):
    async def chat(self, text: str) -> Result[str]: ...

    def wait(self, text: str) -> Result[str]: ...


# --- the context


async def test_tools_see_the_invocation_context() -> None:
    seen: list[InvocationContext] = []

    @tool
    def note(context: InvocationContext, maybe: InvocationContext | None) -> str:
        assert context is maybe
        assert InvocationContext.current() == context
        seen.append(context)
        return "noted"

    request = tool_call("note")
    service = create_ai_service(Assistant, chat_model=ScriptedChatModel([request, "done"]), tools=(note,))
    before = time.monotonic()
    with invocation_attributes(tenant="a"), time_limit(100):
        await service.chat("room", "hello")

    [context] = seen
    assert context.service is Assistant
    assert context.method == "chat"
    assert context.memory_id == "room"
    assert context.user_message == UserMessage("hello")
    assert context.attributes == {"tenant": "a"}
    assert context.deadline is not None
    assert before + 99 < context.deadline < time.monotonic() + 101
    assert context.request == request
    assert not context.cancelled
    assert InvocationContext.current() is None


async def test_context_has_no_deadline_or_attributes_by_default() -> None:
    seen: list[InvocationContext] = []

    def note(request: ToolExecutionRequest, memory_id: object) -> str:
        context = InvocationContext.current()
        assert context is not None
        seen.append(context)
        return "noted"

    model = ScriptedChatModel([tool_call("note"), "done"])
    await create_ai_service(Simple, chat_model=model, tools={ToolSpecification("note"): note}).chat("x")
    assert seen[0].deadline is None
    assert seen[0].attributes == {}
    assert seen[0].memory_id is None


async def test_tools_of_one_invocation_share_its_context() -> None:
    seen: list[InvocationContext] = []

    @tool
    async def note(context: InvocationContext) -> str:
        seen.append(context)
        return "noted"

    one, two = tool_call("note"), tool_call("note")
    model = ScriptedChatModel([AiMessage(None, [one, two]), "done"])
    await create_ai_service(Simple, chat_model=model, tools=(note,)).chat("x")
    assert [context.request for context in seen] == [one, two]
    assert seen[0].user_message is seen[1].user_message


# --- notes


class Desk(Protocol):
    @tool
    async def ask(self, text: str) -> Result[str]: ...


@tool
def write(key: str, context: InvocationContext) -> list[str]:
    context.notes[key] = len(context.notes)
    return sorted(context.notes)


@tool
async def read(context: InvocationContext) -> dict[str, Any]:
    return context.notes


@run_on_thread
@tool(timeout=5)
def read_on_a_thread(context: InvocationContext) -> dict[str, Any]:
    return context.notes


async def test_tools_of_one_invocation_share_notes_across_threads() -> None:
    model = ScriptedChatModel([tool_call("write", {"key": "a"}), tool_call("read"), tool_call("read_on_a_thread"), "x"])
    service = create_ai_service(Simple, chat_model=model, tools=(write, read, read_on_a_thread))

    with invocation_record() as record:
        await service.chat("x")

    first, second, third = (each.result_object for each in record.tool_executions)
    assert first == ["a"]
    assert second == third == {"a": 0}
    assert second is third


async def test_every_invocation_starts_with_empty_notes() -> None:
    model = ScriptedChatModel([tool_call("write", {"key": "a"}), "x", tool_call("write", {"key": "b"}), "x"])
    service = create_ai_service(Simple, chat_model=model, tools=write)

    with invocation_record() as record:
        await service.chat("x")
        await service.chat("x")

    assert [each.result_object for each in record.tool_executions] == [["a"], ["b"]]


async def test_services_called_as_tools_have_their_own_notes() -> None:
    inner = create_ai_service(
        Desk, chat_model=ScriptedChatModel([tool_call("write", {"key": "inner"}), "x"]), tools=(write,)
    )
    calls = [tool_call("write", {"key": "outer"}), tool_call("ask", {"text": "q"}), tool_call("read")]
    outer = create_ai_service(Simple, chat_model=ScriptedChatModel([*calls, "x"]), tools=(write, inner, read))

    with invocation_record() as record:
        await outer.chat("x")

    by_name = [(each.request.name, each.result_object) for each in record.tool_executions]
    assert ("write", ["inner"]) in by_name
    assert by_name[-1] == ("read", {"outer": 0})


def test_picklable_notes_travel_with_the_context_and_do_not_affect_equality() -> None:
    context = InvocationContext(Simple, "chat", notes={"a": 1, "lock": threading.Lock()})

    assert pickle.loads(pickle.dumps(context)).notes == {"a": 1}
    assert context == InvocationContext(Simple, "chat")
    assert hash(context) == hash(InvocationContext(Simple, "chat"))


# --- limits for a whole container


@register_ai_service(tools=read)
class Limited(Protocol):
    async def chat(self, text: str) -> str: ...


@register_ai_service(tools=read, max_tool_rounds=2, max_tool_calls_per_response=None, max_result_chars=None)
class OfItsOwn(Protocol):
    async def chat(self, text: str) -> str: ...


async def test_container_limits_apply_to_services_without_their_own() -> None:
    settings = ToolboxSettings(max_tool_rounds=1)
    model = ScriptedChatModel([tool_call("read")] * 5)
    async with Container(models={"default": model}, settings=settings).register(Limited, OfItsOwn) as container:
        with pytest.raises(ToolRoundsExceededError) as raised:
            await container.get(Limited).chat("q")
        assert raised.value.limit == 1
        with pytest.raises(ToolRoundsExceededError) as raised:
            await container.get(OfItsOwn).chat("q")
        assert raised.value.limit == 2


def test_unknown_arguments_of_the_settings_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"no setting 'max_tool_round'; did you mean max_tool_rounds=\?"):
        ToolboxSettings(max_tool_round=1)  # type: ignore[call-arg]  # the mistake


async def test_tool_calls_limit_can_be_set_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_MAX_TOOL_CALLS_PER_RESPONSE", "1")
    two = AiMessage(None, [tool_call("read"), tool_call("read")])
    async with Container(models={"default": ScriptedChatModel([two, two, "x"])}).register(
        Limited, OfItsOwn
    ) as container:
        with pytest.raises(ToolCallsLimitExceededError) as raised:
            await container.get(Limited).chat("q")
        assert raised.value.limit == 1
        assert await container.get(OfItsOwn).chat("q") == "x"


async def test_container_timeout_applies_to_services_without_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        async def chat(self, request: ChatRequest) -> ChatResponse:
            await asyncio.Event().wait()
            raise AssertionError

    @register_ai_service(timeout=0.02)
    class Quick(Protocol):
        async def chat(self, text: str) -> str: ...

    monkeypatch.setenv("TOOLBOX_TIMEOUT", "0.01")
    async with Container(models={"default": Slow()}).register(Limited, Quick) as container:
        with pytest.raises(InvocationTimeoutError) as raised:
            await container.get(Limited).chat("q")
        assert raised.value.limit == 0.01
        with pytest.raises(InvocationTimeoutError) as raised:
            await container.get(Quick).chat("q")
        assert raised.value.limit == 0.02


@pytest.mark.parametrize("name", ["max_tool_rounds", "max_tool_calls_per_response", "timeout"])
@pytest.mark.parametrize("value", ["0", "-1"])
def test_container_limits_below_1_are_a_problem(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"TOOLBOX_{name.upper()}", value)

    [problem] = Container().check()

    assert name in problem.what
    assert f"TOOLBOX_{name.upper()}" in problem.fix


# --- attributes


async def test_nested_attributes_are_merged() -> None:
    seen: list[dict[str, Any]] = []

    @tool
    def note(context: InvocationContext) -> str:
        seen.append(dict(context.attributes))
        return "noted"

    service = create_ai_service(Simple, chat_model=ScriptedChatModel([tool_call("note"), "done"] * 4), tools=(note,))
    with invocation_attributes(tenant="a", role="user"):
        await service.chat("x")
        with invocation_attributes(role="admin", more=1):
            await service.chat("x")
        await service.chat("x")
    await service.chat("x")
    assert seen == [
        {"tenant": "a", "role": "user"},
        {"tenant": "a", "role": "admin", "more": 1},
        {"tenant": "a", "role": "user"},
        {},
    ]


async def test_concurrent_calls_see_their_own_attributes() -> None:
    seen: dict[str, str] = {}

    @tool
    async def note(who: str, context: InvocationContext) -> str:
        await asyncio.sleep(0)
        seen[who] = context.attributes["who"]
        return "noted"

    def reply(request: Any) -> Any:
        if isinstance(request.messages[-1], UserMessage):
            return tool_call("note", {"who": request.messages[-1].text})
        return "done"

    service = create_ai_service(Simple, chat_model=ScriptedChatModel([reply] * 20), tools=(note,))

    async def call(who: str) -> None:
        with invocation_attributes(who=who):
            await service.chat(who)

    await asyncio.gather(*(call(str(n)) for n in range(10)))
    assert seen == {str(n): str(n) for n in range(10)}


# --- limits


@tool
async def forever() -> str:
    await asyncio.Event().wait()
    return "never"


def slow_service(**options: Any) -> Any:
    model = ScriptedChatModel([tool_call("forever")] * 10)
    return create_ai_service(Simple, chat_model=model, tools=(forever,), **options)


async def test_time_limit_ends_an_invocation() -> None:
    service = slow_service()
    with time_limit(0.02), pytest.raises(InvocationTimeoutError) as raised:
        await service.chat("x")
    assert isinstance(raised.value, TimeoutError)
    assert "Simple.chat" in str(raised.value)
    assert "0.02" in str(raised.value)


async def test_timeout_of_a_service_ends_an_invocation() -> None:
    with pytest.raises(InvocationTimeoutError, match=r"0\.02"):
        await slow_service(timeout=0.02).chat("x")


async def test_the_shorter_of_two_limits_applies() -> None:
    with time_limit(0.02), pytest.raises(InvocationTimeoutError, match=r"0\.02"):
        await slow_service(timeout=100).chat("x")
    with time_limit(100), pytest.raises(InvocationTimeoutError, match=r"0\.02"):
        await slow_service(timeout=0.02).chat("x")
    with time_limit(100), time_limit(0.02), pytest.raises(InvocationTimeoutError, match=r"0\.02"):
        await slow_service().chat("x")
    with time_limit(0.02), time_limit(100), pytest.raises(InvocationTimeoutError, match=r"0\.02"):
        await slow_service().chat("x")


async def test_time_limit_covers_the_whole_block_only(clock: Clock) -> None:
    service = create_ai_service(Simple, chat_model=ScriptedChatModel(["a", "b", "c"]))
    with time_limit(100):
        await service.chat("x")
        clock.advance(101)
        with pytest.raises(InvocationTimeoutError):
            await service.chat("x")
    await service.chat("x")


async def test_time_limit_ends_a_slow_model_call(clock: Clock) -> None:
    cancelled = asyncio.Event()

    async def reply(request: Any) -> str:
        clock.advance(101)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return "never"

    service = create_ai_service(Simple, chat_model=ScriptedChatModel([reply]), timeout=100)
    with pytest.raises(InvocationTimeoutError):
        await service.chat("x")
    assert cancelled.is_set()


def test_time_limit_ends_a_synchronous_call() -> None:
    service = slow_service()
    with time_limit(0.02), pytest.raises(InvocationTimeoutError):
        service.wait("x")
    with pytest.raises(InvocationTimeoutError):
        slow_service(timeout=0.02).wait("x")


def test_time_limit_must_be_above_zero() -> None:
    invalid: list[Any] = [0, True, "3", float("nan")]
    for seconds in invalid:
        with pytest.raises(ValueError, match="time_limit"), time_limit(seconds):
            pass


async def test_timeout_errors_raised_by_a_tool_are_tool_failures() -> None:
    @tool
    async def late() -> str:
        raise TimeoutError("the database")

    model = ScriptedChatModel([tool_call("late"), "done"])
    with time_limit(100):
        result = await create_ai_service(Simple, chat_model=model, tools=(late,)).chat("x")
    assert result.tool_executions[0].result == "the database"


def nested(inner_timeout: float | None = None, handler: Any = return_to_model) -> Any:
    @register_ai_service(tools=(forever,), timeout=inner_timeout)
    class Inner(Protocol):
        @tool
        async def ask(self, question: str) -> str: ...

    @register_ai_service(tools=(Inner,), on_tool_execution_error=handler)
    class Outer(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    return Outer


ASK = tool_call("ask", {"question": "q"})


async def test_time_limit_of_the_outer_call_is_not_handled_by_its_tools() -> None:
    handled: list[Exception] = []

    def handler(error: Exception, context: InvocationContext) -> str:
        handled.append(error)
        return "handled"

    outer = nested(handler=handler)
    async with Container(models={"default": ScriptedChatModel([ASK, tool_call("forever"), "never"])}).register(
        outer
    ) as container:
        with time_limit(0.02), pytest.raises(InvocationTimeoutError) as raised:
            await container.get(outer).chat("x")
    assert "Outer.chat" in str(raised.value)
    assert handled == []


async def test_timeout_of_an_inner_service_is_a_tool_failure() -> None:
    outer = nested(inner_timeout=0.02)
    model = ScriptedChatModel([ASK, tool_call("forever"), "done"])
    async with Container(models={"default": model}).register(outer) as container:
        result = await container.get(outer).chat("x")
    assert result.content == "done"
    assert result.tool_executions[0].is_error
    assert "Inner.ask" in result.tool_executions[0].result


async def test_time_limit_inside_a_tool_applies_to_its_calls() -> None:
    handled: list[Exception] = []

    def handler(error: Exception, context: InvocationContext) -> str:
        handled.append(error)
        return "handled"

    class Tools:
        def __init__(self, container: Container) -> None:
            self.container = container

        @tool
        async def ask_quickly(self) -> str:
            with time_limit(0.2):
                return await self.container.get(Inner).ask("q")

    @register_ai_service(tools=(forever,))
    class Inner(Protocol):
        async def ask(self, question: str) -> str: ...

    @register_ai_service(tools=(Tools,), on_tool_execution_error=handler)
    class Outer(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    model = ScriptedChatModel([tool_call("ask_quickly"), tool_call("forever"), "done"])
    async with Container(models={"default": model}).register(Outer, Inner) as container:
        result = await container.get(Outer).chat("x")
    assert result.content == "done"
    assert isinstance(handled[0], InvocationTimeoutError)


async def test_inner_invocations_inherit_attributes_deadline_and_request_scope() -> None:
    seen: list[Any] = []

    @request_scoped
    class Session:
        pass

    @tool
    def note(context: InvocationContext, session: Inject[Session]) -> str:
        seen.append((context.service.__name__, dict(context.attributes), context.deadline, session))
        return "noted"

    @register_ai_service(tools=(note,))
    class Inner(Protocol):
        @tool
        async def ask(self, question: str) -> str: ...

    @register_ai_service(tools=(Inner, note))
    class Outer(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("note"), ASK, tool_call("note"), "inner", "done"])
    async with Container(models={"default": model}).register(Outer, Session) as container, container.request_scope():
        with invocation_attributes(tenant="a"), time_limit(100):
            await container.get(Outer).chat("x")
    outer, inner = seen
    assert outer[0] == "Outer"
    assert inner[0] == "Inner"
    assert outer[1:] == inner[1:]


# --- cancellation


async def test_cancelling_the_caller_cancels_async_tools_and_closes_their_scopes() -> None:
    entered = asyncio.Event()
    log: list[str] = []
    seen: list[InvocationContext] = []

    @call_scoped
    class Resource:
        def __init__(self) -> None:
            log.append("open")

        def stop(self) -> None:
            log.append("closed")

    @tool
    async def slow(resource: Inject[Resource], context: InvocationContext) -> str:
        seen.append(context)
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            log.append("cancelled")
            raise
        return "never"

    @register_ai_service(tools=(slow,))
    class Service(Protocol):
        async def chat(self, text: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel([tool_call("slow")])}).register(Service, Resource)
    async with container:
        task = asyncio.create_task(container.get(Service).chat("x"))
        await entered.wait()
        assert not seen[0].cancelled
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["open", "cancelled", "closed"]
        assert seen[0].cancelled


async def test_cancelled_calls_do_not_wait_for_blocking_tools() -> None:
    entered, release = threading.Event(), threading.Event()
    log: list[Any] = []

    @call_scoped
    class Resource:
        def stop(self) -> None:
            log.append("closed")

    @tool
    def slow(resource: Inject[Resource], context: InvocationContext) -> str:
        entered.set()
        release.wait(60)
        log.append(context.cancelled)
        return "late"

    @register_ai_service(tools=(slow,))
    class Service(Protocol):
        async def chat(self, text: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel([tool_call("slow")])}).register(Service, Resource)
    async with container:
        task = asyncio.create_task(container.get(Service).chat("x"))
        assert await asyncio.to_thread(entered.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == []
        release.set()
    assert log == [True, "closed"]


async def test_failing_task_groups_cancel_their_calls() -> None:
    entered = asyncio.Event()
    service = slow_service()

    async def fail() -> None:
        entered.set()
        await asyncio.sleep(0.01)
        raise LookupError

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(service.chat("x"))
            group.create_task(fail())


async def test_asyncio_timeout_ends_a_call() -> None:
    with pytest.raises(TimeoutError) as raised:
        async with asyncio.timeout(0.02):
            await slow_service().chat("x")
    assert not isinstance(raised.value, InvocationTimeoutError)


# --- scopes of a request


@request_scoped
class Session:
    @tool
    def touch(self) -> str:
        return "touched"


async def test_tasks_that_outlive_their_request_scope_raise_scope_not_active_error() -> None:
    @register_ai_service(tools=(Session,))
    class Service(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("touch"), "done"])
    async with Container(models={"default": model}).register(Service) as container:
        gate = asyncio.Event()

        async def late() -> str:
            await gate.wait()
            return await container.get(Service).chat("x")

        async with container.request_scope():
            task = asyncio.create_task(late())
            await asyncio.sleep(0)
        gate.set()
        with pytest.raises(ScopeNotActiveError):
            await task
    assert len(model.requests) == 1


async def test_tools_can_call_services_of_another_container() -> None:
    @register_ai_service(tools=(Session,))
    class Inner(Protocol):
        async def ask(self, text: str) -> str: ...

    inner_model = ScriptedChatModel([tool_call("touch"), "inner answer"])
    inside = Container(models={"default": inner_model}).register(Inner)

    class Tools:
        @tool
        async def cross(self) -> str:
            async with inside.request_scope():
                return await inside.get(Inner).ask("q")

    @register_ai_service(tools=(Tools, Session))
    class Outer(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    model = ScriptedChatModel([AiMessage(None, [tool_call("cross"), tool_call("touch")]), "done"])
    async with inside, Container(models={"default": model}).register(Outer) as outside, outside.request_scope():
        result = await outside.get(Outer).chat("x")
    assert [each.result for each in result.tool_executions] == ["inner answer", "touched"]


# --- other loops and threads


def test_record_attributes_and_limit_apply_to_calls_from_other_loops_and_threads() -> None:
    seen: list[Any] = []

    @tool
    async def note(context: InvocationContext) -> str:
        seen.append((dict(context.attributes), context.deadline is not None))
        return "noted"

    @register_ai_service(tools=(note, forever))
    class Service(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

        def wait(self, text: str) -> Result[str]: ...

    script = [tool_call("note"), "done"]
    model = ScriptedChatModel([*script, *script, tool_call("forever"), tool_call("forever")])
    with Container(models={"default": model}).register(Service) as container:
        service = container.get(Service)

        async def elsewhere() -> None:
            with invocation_record() as record, invocation_attributes(tenant="a"), time_limit(100):
                await service.chat("x")
            assert [each.result for each in record.tool_executions] == ["noted"]

        asyncio.run(elsewhere())
        with invocation_record() as record, invocation_attributes(tenant="b"), time_limit(100):
            service.wait("x")
        assert [each.result for each in record.tool_executions] == ["noted"]
        assert seen == [({"tenant": "a"}, True), ({"tenant": "b"}, True)]

        async def late() -> None:
            with time_limit(0.02):
                await service.chat("x")

        with pytest.raises(InvocationTimeoutError):
            asyncio.run(late())
        with time_limit(0.02), pytest.raises(InvocationTimeoutError):
            service.wait("x")


async def test_concurrent_calls_do_not_mix_their_results() -> None:
    @tool
    async def double(n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    @tool
    def triple(n: int) -> int:
        return 3 * n

    def reply(request: Any) -> Any:
        text = request.messages[0].text
        if len(request.messages) == 1:
            return AiMessage(None, [tool_call("double", {"n": int(text)}), tool_call("triple", {"n": int(text)})])
        return ",".join(each.text for each in request.messages[2:])

    service = create_ai_service(
        Simple, chat_model=ScriptedChatModel([reply] * 400), tools=(double, triple), concurrent_tools=True
    )
    results = await asyncio.gather(*(service.chat(str(n)) for n in range(200)))
    assert [result.content for result in results] == [f"{2 * n},{3 * n}" for n in range(200)]
