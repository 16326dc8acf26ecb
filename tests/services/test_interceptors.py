"""Interceptors around tool calls: their order, what they see and change, results and errors."""

import asyncio
import threading
from typing import Annotated, Any, Protocol

import pytest
from pydantic import AfterValidator, BaseModel, Field

from toolbox import (
    AiMessage,
    AiServiceTool,
    Container,
    IllegalConfigurationError,
    Inject,
    InvocationContext,
    InvocationTimeoutError,
    Result,
    ToolArgumentsError,
    ToolExecuted,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolProviderResult,
    ToolRetry,
    ToolSpecification,
    call_scoped,
    create_ai_service,
    register_ai_service,
    return_to_model,
    time_limit,
    tool,
    tool_executor_from,
)
from toolbox.interceptors import (
    ToolInterceptor,
    ToolInvocation,
    ToolProceed,
    global_interceptor,
    interceptors,
)
from toolbox.testing import tool_call

from .intercepted import (
    ADD,
    PLUS,
    Assistant,
    Desk,
    Noting,
    OfClass,
    OfMethod,
    OfTool,
    Stop,
    add,
    around,
    assistant,
    execution,
    plus,
    scripted,
    swallowing,
)
from .log import LOG

pytestmark = pytest.mark.anyio


@global_interceptor
class First(Noting): ...


@global_interceptor
class Second(Noting): ...


@global_interceptor(priority=-1)
class Outermost(Noting): ...


# --- order and kinds


async def test_interceptors_run_by_priority_then_class_method_and_tool() -> None:
    model = scripted(ADD, "done")
    async with Container(models={"default": model}).register(First, Desk, Second, Outermost) as container:
        result = await container.get(Desk).ask("1 + 5?")

    names = ["Outermost", "First", "Second", "OfClass", "OfMethod", "OfTool"]
    asks = [f"{each} asks default" for each in names[:-1]]
    calls = [f"{each} add" for each in names], [f"{each} 6" for each in reversed(names)]
    assert [*asks, *calls[0], "add 1 5", *calls[1], *asks] == LOG
    assert result.content == "done"


async def test_a_service_without_a_container_instantiates_named_classes_and_takes_global_ones() -> None:
    desk = create_ai_service(Desk, chat_model=scripted(ADD, "done"), interceptors=[First(), Outermost])

    await desk.ask("1 + 5?")

    assert [each for each in LOG if each.endswith(" add")] == [
        f"{each} add" for each in ("Outermost", "First", "OfClass", "OfMethod", "OfTool")
    ]


async def test_decorators_above_each_other_apply_from_top_to_bottom_and_base_classes_come_first() -> None:
    @interceptors(OfClass)
    class Base(Protocol):
        @interceptors(OfMethod, OfTool)
        @interceptors(First)
        async def ask(self, question: str) -> str: ...

    @register_ai_service(tools=[plus])
    @interceptors(Second)
    class Child(Base, Protocol): ...

    await create_ai_service(Child, chat_model=scripted(PLUS, "done")).ask("x")

    names = [each.split()[0] for each in LOG if each.endswith(" plus")]
    assert names == ["OfClass", "Second", "OfMethod", "OfTool", "First"]


async def test_interceptors_on_a_class_of_tools_wrap_all_its_tools() -> None:
    @interceptors(OfClass)
    class Tools:
        @tool
        @interceptors(OfTool)
        def one(self) -> str:
            return "1"

        @tool
        def two(self) -> str:
            return "2"

    @register_ai_service(tools=Tools)
    class Caller(Protocol):
        async def ask(self, question: str) -> str: ...

    model = scripted(tool_call("one"), tool_call("two"), "done")
    async with Container(models={"default": model}).register(Caller) as container:
        await container.get(Caller).ask("x")

    assert LOG == ["OfClass one", "OfTool one", "OfTool 1", "OfClass 1", "OfClass two", "OfClass 2"]


async def test_an_override_of_a_tool_keeps_the_interceptors_unless_it_names_its_own() -> None:
    class Base:
        @tool
        @interceptors(OfTool)
        def one(self) -> str:
            return "1"

        @tool
        @interceptors(OfTool)
        def two(self) -> str:
            return "2"

    class Child(Base):
        def one(self) -> str:
            return "one"

        @interceptors(OfMethod)
        def two(self) -> str:
            return "two"

    model = scripted(tool_call("one"), tool_call("two"), "done")
    await create_ai_service(Assistant, chat_model=model, tools=[Child()]).ask("x")
    assert LOG == ["OfTool one", "OfTool one", "OfMethod two", "OfMethod two"]


async def test_a_registered_interceptor_that_is_neither_global_nor_named_is_not_used() -> None:
    class Unused(Noting): ...

    class ChildOfGlobal(First): ...

    @register_ai_service(tools=[plus])
    class Plain(Protocol):
        async def ask(self, question: str) -> str: ...

    model = scripted(PLUS, "done")
    async with Container(models={"default": model}).register(Plain, Unused, ChildOfGlobal) as container:
        await container.get(Plain).ask("x")
    assert LOG == ["plus 1 5"]


async def test_global_interceptors_may_be_instances_and_producers_and_are_found_by_scan() -> None:
    import sys

    from toolbox import produces

    @global_interceptor
    class Given(Noting): ...

    class Product(Noting): ...

    global_interceptor(priority=5)(Product)

    @produces(scope="application", name="special")
    def product() -> Product:
        return Product()

    @register_ai_service(tools=[plus])
    class Plain(Protocol):
        async def ask(self, question: str) -> str: ...

    container = Container(models={"default": scripted(PLUS, "done")}).register(Plain, product)
    container.register_instance(Given(), ToolInterceptor)
    async with container:
        await container.get(Plain).ask("x")
    assert [each.split()[0] for each in LOG if each.endswith(" plus")] == ["Given", "Product"]

    scanned = Container(models={"default": scripted()}).scan(sys.modules[__name__])
    async with scanned:
        assert isinstance(scanned.get(First), First)


async def test_a_service_method_that_is_a_tool_has_its_interceptors_in_its_own_calls() -> None:
    @register_ai_service(tools=[plus])
    @interceptors(OfClass)
    class Inner(Protocol):
        @tool
        @interceptors(OfMethod)
        async def inner(self, question: str) -> str:
            """Answer."""
            ...

    @register_ai_service(tools=[Inner])
    class Outer(Protocol):
        async def ask(self, question: str) -> str: ...

    model = scripted(tool_call("inner", {"question": "x"}), PLUS, "in", "out")
    async with Container(models={"default": model}).register(Outer, Inner, First) as container:
        assert await container.get(Outer).ask("x") == "out"

    calls = [each for each in LOG if each.endswith((" inner", " plus"))]
    assert calls == ["First inner", "First plus", "OfClass plus", "OfMethod plus"]
    assert LOG.count("OfMethod asks default") == 2
    assert LOG.count("First asks default") == 4


# --- what an interceptor sees and changes


async def test_an_interceptor_sees_validated_arguments_with_defaults_by_parameter_name() -> None:
    seen: list[ToolInvocation] = []

    @tool
    def find(
        kind: Annotated[str, Field(alias="type")], numbers: list[int], context: InvocationContext, n: int = 3
    ) -> str:
        return f"{kind} {numbers} {n}"

    async def look(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        seen.append(call)
        return await proceed(call)

    model = scripted(tool_call("find", {"type": "book", "numbers": ["1", 2]}), "done")
    await assistant(around(look), model=model, tools=[find]).ask("x")

    [call] = seen
    assert call.arguments == {"kind": "book", "numbers": [1, 2], "n": 3}
    assert call.request.arguments == '{"type": "book", "numbers": ["1", 2]}'
    assert call.specification.name == "find"
    assert call.context.request == call.request
    assert call.context.method == "ask"


async def test_changed_arguments_are_validated_again_and_the_request_stays() -> None:
    async def more(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        changed = call.with_arguments(b="7")
        assert call.arguments == {"a": 1, "b": 5}
        assert changed.arguments == {"a": 1, "b": "7"}
        return await proceed(changed)

    done = await execution(around(more), OfTool())
    assert done.result == "8"
    assert done.request.arguments == '{"a": 1}'
    assert LOG[0] == "OfTool asks default"


async def test_invalid_changed_arguments_are_an_arguments_error_for_the_handlers() -> None:
    async def wrong(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        with pytest.raises(ToolArgumentsError) as caught:
            await proceed(call.with_arguments(b="many"))
        assert caught.value.problems[0][0] == "b"
        return await proceed(call.with_arguments(b="many"))

    with pytest.raises(ToolArgumentsError):
        await execution(around(wrong))
    done = await execution(around(wrong), on_tool_arguments_error=return_to_model)
    assert done.is_error
    assert "not valid" in done.result
    assert LOG == []


async def test_unknown_names_of_arguments_are_a_type_error() -> None:
    async def unknown(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        with pytest.raises(TypeError, match="tool 'plus' has no argument 'c'; it has: a, b"):
            call.with_arguments(c=1)
        return await proceed(call)

    assert (await execution(around(unknown))).result == "6"


async def test_only_changed_values_are_validated_again() -> None:
    @tool
    def note(text: Annotated[str, AfterValidator(lambda text: text + "!")], n: int = 1) -> str:
        return f"{text} {n}"

    async def change(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        return await proceed(call.with_arguments(n=2))

    model = scripted(tool_call("note", {"text": "hi"}), "done")
    [done] = (await assistant(around(change), model=model, tools=[note]).ask("x")).tool_executions
    assert done.result == "hi! 2"


async def test_changing_the_dictionary_of_arguments_in_place_has_no_effect() -> None:
    async def sneak(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        call.arguments["a"] = "not a number"  # type: ignore[index]  # the attack
        return await proceed(call)

    assert (await execution(around(sneak))).result == "6"


class Position(BaseModel):
    order: int


class Uncopied:
    """An object that cannot be copied, and cannot be compared."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("it cannot be copied")

    def __eq__(self, other: object) -> bool:
        raise TypeError("it cannot be compared")

    __hash__ = None  # type: ignore[assignment]  # as for all objects with an own equality


@pytest.mark.parametrize("passes_it_on", [False, True])
async def test_changing_a_part_of_an_argument_in_place_does_not_pass_by_the_checks(passes_it_on: bool) -> None:
    seen: list[Any] = []

    @tool
    def ship(orders: Annotated[list[int], Field(max_length=2)], first: Position, last: Position | None = None) -> str:
        seen.append((orders, first.order))
        return "shipped"

    async def sneak(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        call.arguments["orders"].append(666)
        call.arguments["first"].order = 666
        changed = call.with_arguments(orders=call.arguments["orders"], last={"order": 1}) if passes_it_on else call
        return await proceed(changed)

    model = scripted(tool_call("ship", {"orders": [1, 2], "first": {"order": 1}}), "done")
    service = assistant(around(sneak), model=model, tools=[ship], on_tool_arguments_error=return_to_model)
    [done] = (await service.ask("x")).tool_executions
    assert (done.is_error, seen) == ((True, []) if passes_it_on else (False, [([1, 2], 1)]))


async def test_arguments_that_cannot_be_copied_or_compared_are_passed_as_they_are() -> None:
    seen: list[Any] = []

    @tool
    def hold(
        thing: Annotated[Any, AfterValidator(lambda _: Uncopied())],
        things: Annotated[Any, AfterValidator(lambda _: [Uncopied()])],
    ) -> str:
        seen.extend((thing, things))
        return "held"

    async def change(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        seen.append(call.arguments["thing"])
        await proceed(call)
        return await proceed(call.with_arguments(thing=call.arguments["thing"]))

    model = scripted(tool_call("hold", {"thing": 1, "things": 2}), "done")
    [done] = (await assistant(around(change), model=model, tools=[hold]).ask("x")).tool_executions
    assert done.result == "held"
    assert seen[0] is seen[1] is seen[3]


async def test_an_inner_interceptor_sees_the_arguments_that_an_outer_one_changed() -> None:
    seen = []

    async def outer(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        return await proceed(call.with_arguments(a=10))

    async def inner(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        seen.append(dict(call.arguments))
        return await proceed(call.with_arguments(b=call.arguments["a"] + 1))

    assert (await execution(around(outer), around(inner))).result == "21"
    assert seen == [{"a": 10, "b": 5}]


async def test_executors_written_by_hand_get_changed_arguments_as_json() -> None:
    def execute(request: ToolExecutionRequest, memory_id: object) -> str:
        return request.arguments

    specification = ToolSpecification("echo", "", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}})

    async def change(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        assert call.arguments == {"a": 1}
        return await proceed(call.with_arguments(b=[2]))

    model = scripted(tool_call("echo", {"a": 1}), "done")
    used = assistant(around(change), model=model, tools=[AiServiceTool(specification, execute)])
    [done] = (await used.ask("x")).tool_executions
    assert done.result == '{"a":1,"b":[2]}'
    assert done.request.arguments == '{"a": 1}'


# --- results


async def test_the_execution_and_the_events_show_what_the_outermost_interceptor_returned() -> None:
    async def shout(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        result = await proceed(call)
        return ToolExecutionResult(f"{result.text}!", result_object=result.result_object, attributes={"loud": True})

    model = scripted(PLUS, "done")
    used = assistant(around(shout), model=model)
    [event] = [each async for each in used.events("x") if isinstance(each, ToolExecuted)]
    assert (event.execution.result, event.execution.result_object) == ("6!", 6)
    assert event.execution.attributes == {"loud": True}
    message: Any = model.requests[-1].messages[-1]
    assert message.text == "6!"


async def test_an_interceptor_may_skip_the_tool_or_run_it_again() -> None:
    async def skip(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        return ToolExecutionResult("cached", 42)

    done = await execution(around(skip))
    assert (done.result, done.result_object, LOG) == ("cached", 42, [])

    async def twice(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        first = await proceed(call)
        return await proceed(call.with_arguments(a=first.result_object))

    assert (await execution(around(twice))).result == "11"
    assert LOG == ["plus 1 5", "plus 6 5"]


async def test_each_run_of_a_tool_has_its_own_call_scope_which_is_closed_when_proceed_returns() -> None:
    @call_scoped
    class Session:
        def __init__(self) -> None:
            LOG.append("opened")

        def stop(self) -> None:
            LOG.append("closed")

    class Tools:
        @tool
        def use(self, session: Inject[Session]) -> str:
            LOG.append("used")
            return "ok"

    async def twice(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        await proceed(call)
        LOG.append("between")
        return await proceed(call)

    @register_ai_service(tools=Tools)
    @interceptors(around(twice))
    class Caller(Protocol):
        async def ask(self, question: str) -> str: ...

    container = Container(models={"default": scripted(tool_call("use"), "done")}).register(Caller, Session)
    async with container:
        await container.get(Caller).ask("x")
    once = ["opened", "used", "closed"]
    assert [*once, "between", *once] == LOG


async def test_a_failure_to_close_the_call_scope_is_raised_by_proceed() -> None:
    @call_scoped
    class Session:
        def stop(self) -> None:
            raise OSError("commit failed")

    class Tools:
        @tool
        def use(self, session: Inject[Session]) -> str:
            return "ok"

    async def catch(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        try:
            return await proceed(call)
        except OSError as error:
            return ToolExecutionResult(f"caught: {error}")

    @register_ai_service(tools=Tools)
    @interceptors(around(catch))
    class Caller(Protocol):
        async def ask(self, question: str) -> Result[str]: ...

    container = Container(models={"default": scripted(tool_call("use"), "done")}).register(Caller, Session)
    async with container:
        result = await container.get(Caller).ask("x")
    assert result.tool_executions[0].result == "caught: commit failed"


@pytest.mark.parametrize("value", [None, "text", 3])
@pytest.mark.parametrize("proceeds", [True, False])
async def test_an_interceptor_that_returns_something_else_is_a_mistake_for_the_caller(
    value: Any, proceeds: bool
) -> None:
    async def wrong(call: ToolInvocation, proceed: ToolProceed) -> Any:
        if proceeds:
            await proceed(call)
        return value

    with pytest.raises(IllegalConfigurationError, match="return a ToolExecutionResult"):
        await execution(around(wrong))


async def test_proceed_needs_the_invocation() -> None:
    async def wrong(call: ToolInvocation, proceed: Any) -> Any:
        return await proceed(call.arguments)

    with pytest.raises(IllegalConfigurationError, match="pass the ToolInvocation"):
        await execution(around(wrong))


@tool
def fails() -> str:
    raise LookupError("not there")


# --- errors


async def test_proceed_raises_what_the_tool_raised_and_handlers_get_what_the_interceptor_raised() -> None:
    async def translate(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        try:
            return await proceed(call)
        except LookupError as error:
            raise RuntimeError("translated") from error

    handled: list[Exception] = []

    def handler(error: Exception, context: InvocationContext) -> str:
        handled.append(error)
        return f"handled {error}"

    model = scripted(tool_call("fails"), "done")
    used = assistant(around(translate), model=model, tools=[fails], on_tool_execution_error=handler)
    [done] = (await used.ask("x")).tool_executions
    assert (done.result, done.is_error) == ("handled translated", True)
    assert isinstance(handled[0].__cause__, LookupError)


async def test_an_interceptor_may_recover_from_a_failure_and_ask_the_model_to_retry() -> None:
    async def recover(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        try:
            return await proceed(call)
        except LookupError:
            raise ToolRetry("try another") from None

    model = scripted(tool_call("fails"), "done")
    [done] = (await assistant(around(recover), model=model, tools=[fails]).ask("x")).tool_executions
    assert (done.result, done.is_error) == ("try another", True)


@tool
def aborts() -> str:
    LOG.append("aborts")
    raise Stop("stop")


async def translating(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
    try:
        return await proceed(call)
    except BaseException as error:
        raise ValueError("hidden") from error


@pytest.mark.parametrize("attack", [swallowing, translating])
async def test_errors_that_end_the_invocation_pass_an_interceptor_that_swallows_or_replaces_them(attack: Any) -> None:
    model = scripted(tool_call("aborts"), "never")
    with pytest.raises(Stop):
        await assistant(around(attack), OfTool(), model=model, tools=[aborts]).ask("x")
    assert len(model.requests) == 1
    assert LOG.count("aborts") == 1  # proceed does not run it again


@pytest.mark.parametrize("attack", [swallowing, translating])
async def test_errors_that_end_the_invocation_end_the_outer_ones_too(attack: Any) -> None:
    @register_ai_service(tools=[aborts])
    class Inner(Protocol):
        @tool
        async def inner(self, question: str) -> str:
            """Answer."""
            ...

    @register_ai_service(tools=[Inner])
    @interceptors(around(attack))
    class Outer(Protocol):
        async def ask(self, question: str) -> str: ...

    model = scripted(tool_call("inner", {"question": "x"}), tool_call("aborts"), "never")
    async with Container(models={"default": model}).register(Outer, Inner) as container:
        with pytest.raises(Stop):
            await container.get(Outer).ask("x")


@pytest.mark.parametrize("attack", [swallowing, translating])
async def test_a_cancelled_call_ends_although_an_interceptor_swallows_the_cancellation(attack: Any) -> None:
    started = asyncio.Event()

    @tool
    async def hangs() -> str:
        started.set()
        await asyncio.Event().wait()
        return "never"

    model = scripted(tool_call("hangs"), "never")
    used = assistant(around(attack), model=model, tools=[hangs])
    task = asyncio.create_task(used.ask("x"))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(model.requests) == 1

    with pytest.raises(InvocationTimeoutError), time_limit(0.02):
        await assistant(around(attack), model=scripted(tool_call("hangs"), "never"), tools=[hangs]).ask("x")


async def test_an_interceptor_may_limit_the_time_of_a_tool_itself() -> None:
    @tool
    async def hangs() -> str:
        await asyncio.Event().wait()
        return "never"

    async def limited(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        try:
            async with asyncio.timeout(0.01):
                return await proceed(call)
        except TimeoutError:
            return ToolExecutionResult("too slow", is_error=True)

    model = scripted(tool_call("hangs"), "done")
    result = await assistant(around(limited), model=model, tools=[hangs]).ask("x")
    assert (result.content, result.tool_executions[0].result) == ("done", "too slow")


async def test_a_tool_that_was_late_gets_a_fresh_cancellation_when_it_runs_again() -> None:
    @tool(timeout=0.02)
    async def late_once(context: InvocationContext) -> str:
        LOG.append(context.cancelled)
        if len(LOG) == 1:
            await asyncio.Event().wait()
        current = InvocationContext.current()
        assert current is not None
        return f"{context.cancelled} {current.cancelled}"

    async def retry(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        try:
            return await proceed(call)
        except TimeoutError:
            return await proceed(call)

    model = scripted(tool_call("late_once"), "done")
    [done] = (await assistant(around(retry), model=model, tools=[late_once]).ask("x")).tool_executions
    assert (done.result, LOG) == ("False False", [False, False])


# --- where calls come from


@pytest.mark.parametrize("concurrent", [False, True])
async def test_synchronous_services_and_concurrent_tools_have_interceptors(concurrent: bool) -> None:
    calls = AiMessage(None, (PLUS, tool_call("plus", {"a": 2})))
    used = assistant(OfTool(), model=scripted(calls, "done", calls, "done"), concurrent_tools=concurrent)
    result = await asyncio.to_thread(used.wait, "x")
    assert [each.result for each in result.tool_executions] == ["6", "7"]
    assert LOG.count("OfTool plus") == 2
    result = await used.ask("x")
    assert [each.result for each in result.tool_executions] == ["6", "7"]
    assert LOG.count("OfTool plus") == 4


async def test_around_tool_runs_on_the_event_loop_and_a_def_tool_on_its_thread() -> None:
    threads: dict[str, threading.Thread] = {}

    @tool
    def where() -> str:
        threads["tool"] = threading.current_thread()
        return "ok"

    async def look(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        threads["around"] = threading.current_thread()
        return await proceed(call)

    await assistant(around(look), model=scripted(tool_call("where"), "done"), tools=[where]).ask("x")
    assert threads["around"] is threading.current_thread()
    assert threads["tool"] is not threading.current_thread()


async def test_tools_of_providers_and_of_endpoints_have_interceptors() -> None:
    def provide(request: Any) -> ToolProviderResult:
        return ToolProviderResult([plus])

    used = assistant(OfTool(), tools=(), tool_provider=provide)
    await used.ask("x")
    assert "OfTool plus" in LOG


async def test_an_executor_without_a_service_runs_the_interceptors_of_the_tool() -> None:
    request = ToolExecutionRequest("1", "add", '{"a": 1}')
    assert tool_executor_from(add)(request, None).text == "6"
    assert LOG == ["OfTool add", "add 1 5", "OfTool 6"]

    async def waits(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        await asyncio.sleep(0)
        return await proceed(call)

    @tool
    @interceptors(around(waits))
    def slow(a: int) -> int:
        return a

    pending: Any = tool_executor_from(slow)(ToolExecutionRequest("1", "slow", '{"a": 1}'), None)
    assert (await pending).text == "1"
