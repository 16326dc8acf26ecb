"""Where tools run, what they see there, and their call scopes."""

import asyncio
import contextvars
import functools
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Annotated, Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    BlockingCallNotAllowedError,
    Container,
    IllegalConfigurationError,
    Inject,
    InvocationContext,
    Problem,
    Result,
    ScopeNotActiveError,
    ToolAbort,
    ToolboxSettings,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolRetry,
    ToolSpecification,
    blocking,
    call_scoped,
    create_ai_service,
    invocation_attributes,
    non_blocking,
    produces,
    register_ai_service,
    request_scoped,
    run_on,
    run_on_thread,
    tool,
    tool_specification_from,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class Both(Protocol):
    async def chat(self, text: str) -> Result[str]: ...

    def wait(self, text: str) -> Result[str]: ...


def where() -> str:
    return threading.current_thread().name


class Places:
    """Notes on which thread each of its tools ran."""

    def __init__(self) -> None:
        self.seen: dict[str, list[threading.Thread]] = {}

    def note(self, name: str) -> str:
        self.seen.setdefault(name, []).append(threading.current_thread())
        return name

    @tool
    def plain(self) -> str:
        return self.note("plain")

    @tool
    @blocking
    def marked(self) -> str:
        return self.note("marked")

    @blocking
    @tool
    def marked_outside(self) -> str:
        return self.note("marked_outside")

    @tool
    @non_blocking
    def quick(self) -> str:
        return self.note("quick")

    @tool
    async def coroutine(self) -> str:
        return self.note("coroutine")

    @tool
    def awaitable(self) -> Awaitable[str]:
        async def later() -> str:
            return self.note("awaitable inside")

        self.note("awaitable")
        return later()

    @tool
    @run_on_thread
    def fresh(self) -> str:
        return self.note("fresh")

    @tool
    @run_on("mine")
    def named(self) -> str:
        return self.note("named")

    @tool
    def surprise(self) -> Any:
        async def later() -> str:
            return self.note("surprise inside")

        self.note("surprise")
        return later()


def places_service(places: Places) -> Any:
    @register_ai_service(tools=(places,))
    class Service(Both, Protocol): ...

    return Service


NAMES = ["plain", "marked", "marked_outside", "quick", "coroutine", "awaitable", "fresh", "named", "surprise"]


def all_calls() -> AiMessage:
    return AiMessage(None, [tool_call(name) for name in NAMES])


async def test_the_table_in_an_asynchronous_method() -> None:
    places = Places()
    service = places_service(places)
    with ThreadPoolExecutor(1) as mine:
        container = Container(models={"default": ScriptedChatModel([all_calls(), "done"])}, executors={"mine": mine})
        async with container.register(service):
            result = await container.get(service).chat("x")
        assert places.seen["named"] == list(mine._threads)
    here = threading.current_thread()
    assert [each.is_error for each in result.tool_executions] == [False] * len(NAMES)
    seen = {name: threads[0] for name, threads in places.seen.items()}
    for on_loop in ("quick", "coroutine", "awaitable", "awaitable inside", "surprise inside"):
        assert seen[on_loop] is here, on_loop
    for elsewhere in ("plain", "marked", "marked_outside", "fresh", "surprise"):
        assert seen[elsewhere] is not here, elsewhere


async def test_the_table_in_a_synchronous_method() -> None:
    places = Places()
    service = places_service(places)
    loop_thread = threading.current_thread()
    callers: list[threading.Thread] = []
    with ThreadPoolExecutor(1) as mine:
        container = Container(models={"default": ScriptedChatModel([all_calls(), "done"])}, executors={"mine": mine})
        async with container.register(service):

            def call() -> None:
                callers.append(threading.current_thread())
                container.get(service).wait("x")

            await asyncio.to_thread(call)
        assert places.seen["named"] == list(mine._threads)
    seen = {name: threads[0] for name, threads in places.seen.items()}
    for on_caller in ("plain", "marked", "marked_outside", "quick", "awaitable", "surprise"):
        assert seen[on_caller] is callers[0], on_caller
    for on_loop in ("coroutine", "awaitable inside", "surprise inside"):
        assert seen[on_loop] is loop_thread, on_loop
    assert seen["fresh"] not in (callers[0], loop_thread)


def test_the_table_in_a_synchronous_method_under_with() -> None:
    places = Places()
    service = places_service(places)
    with ThreadPoolExecutor(1) as mine:
        container = Container(models={"default": ScriptedChatModel([all_calls(), "done"])}, executors={"mine": mine})
        with container.register(service):
            container.get(service).wait("x")
    seen = {name: threads[0] for name, threads in places.seen.items()}
    here = threading.current_thread()
    for on_caller in ("plain", "marked", "marked_outside", "quick", "awaitable", "surprise"):
        assert seen[on_caller] is here, on_caller
    assert seen["coroutine"] is seen["awaitable inside"] is seen["surprise inside"]
    assert seen["coroutine"] is not here


async def test_a_fresh_thread_per_call() -> None:
    places = Places()
    service: Any = create_ai_service(
        Both, chat_model=ScriptedChatModel([tool_call("fresh"), tool_call("fresh"), "done"]), tools=(FreshOnly(places),)
    )
    await service.chat("x")
    one, two = places.seen["fresh"]
    assert one is not two
    assert not one.is_alive()


class FreshOnly:
    def __init__(self, places: Places) -> None:
        self.places = places

    @tool
    @run_on_thread
    def fresh(self) -> str:
        return self.places.note("fresh")


async def test_threads_carry_the_tools_name_while_they_run_it() -> None:
    @tool
    def who() -> str:
        return where()

    @tool
    @run_on_thread
    def who_fresh() -> str:
        return where()

    model = ScriptedChatModel([AiMessage(None, [tool_call("who"), tool_call("who_fresh")]), "done"])
    result = await create_ai_service(Both, chat_model=model, tools=(who, who_fresh)).chat("x")
    assert ["who" in each.result for each in result.tool_executions] == [True, True]
    assert "who_fresh" in result.tool_executions[1].result


async def test_an_executor_may_be_given_itself() -> None:
    with ThreadPoolExecutor(1) as mine:
        seen = []

        @tool
        @run_on(mine)
        def there() -> str:
            seen.append(threading.current_thread())
            return "x"

        model = ScriptedChatModel([tool_call("there"), "done"])
        await create_ai_service(Both, chat_model=model, tools=(there,)).chat("x")
        assert seen == list(mine._threads)
        mine.submit(int).result()  # it is not shut down


def process_of(number: int) -> str:
    """Picklable."""
    return f"{os.getpid()} {number}"


async def test_an_executor_of_processes_runs_picklable_functions() -> None:
    import multiprocessing

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        there = tool(run_on(processes)(process_of))
        model = ScriptedChatModel([tool_call("process_of", {"number": 7}), "done"])
        result = await create_ai_service(Both, chat_model=model, tools=(there,)).chat("x")
    pid, number = result.tool_executions[0].result.split()
    assert number == "7"
    assert int(pid) != os.getpid()


async def test_any_concurrent_executor_will_do() -> None:
    class Inline(Executor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)
            return future

    @tool
    @run_on(Inline())
    def there() -> str:
        return "ran"

    model = ScriptedChatModel([tool_call("there"), "done"])
    result = await create_ai_service(Both, chat_model=model, tools=(there,)).chat("x")
    assert result.tool_executions[0].result == "ran"


# --- problems


def problems_of(*tools: Any) -> list[Problem]:
    @register_ai_service(tools=tools)
    class Service(Protocol):
        async def chat(self, text: str) -> str: ...

    return Container(models={"default": ScriptedChatModel([])}).register(Service).check()


def test_markers_that_take_a_coroutine_off_the_loop_are_problems() -> None:
    class Tools:
        @tool
        @blocking
        async def one(self) -> None: ...

        @tool
        @run_on_thread
        async def two(self) -> None: ...

        @run_on("mine")
        @tool
        async def three(self) -> None: ...

        @tool
        @non_blocking
        async def four(self) -> None: ...

    problems = problems_of(Tools)
    assert [problem.where for problem in problems] == ["Tools.one", "Tools.two", "Tools.three"]
    assert all("async" in problem.what for problem in problems)


def test_an_unknown_executor_is_a_problem() -> None:
    @tool
    @run_on("nowhere")
    def lost() -> None: ...

    [problem] = problems_of(lost)
    assert "nowhere" in problem.what
    assert "executors" in problem.fix


def test_an_unknown_executor_is_a_problem_without_a_container_too() -> None:
    @tool
    @run_on("nowhere")
    def lost() -> None: ...

    with pytest.raises(IllegalConfigurationError, match="nowhere"):
        create_ai_service(Both, chat_model=ScriptedChatModel([]), tools=(lost,))


def test_an_unknown_model_is_a_problem() -> None:
    @register_ai_service(model="tool-use")
    class Service(Protocol):
        async def chat(self, text: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Service).check()
    assert "tool-use" in problem.what
    assert problem.where == "Service"


# --- synchronous methods


async def test_a_synchronous_method_is_refused_on_a_loops_thread_before_anything_is_sent() -> None:
    model = ScriptedChatModel(["done"])
    with pytest.raises(BlockingCallNotAllowedError, match=r"Both\.wait"):
        create_ai_service(Both, chat_model=model).wait("x")
    assert model.requests == []


def test_a_synchronous_method_on_a_plain_thread_needs_no_container() -> None:
    assert create_ai_service(Both, chat_model=ScriptedChatModel(["done"])).wait("x").content == "done"


def test_a_service_without_container_is_used_from_many_threads() -> None:
    model = ScriptedChatModel(["done"] * 20)
    service = create_ai_service(Both, chat_model=model)
    with ThreadPoolExecutor(10) as pool:
        assert [each.content for each in pool.map(service.wait, ["x"] * 20)] == ["done"] * 20


def test_an_asynchronous_method_may_be_awaited_on_any_loop() -> None:
    service = create_ai_service(Both, chat_model=ScriptedChatModel(["a", "b"]))
    assert asyncio.run(service.chat("x")).content == "a"
    assert asyncio.run(service.chat("x")).content == "b"


def test_a_service_awaited_on_another_loop_hands_its_work_to_the_containers() -> None:
    seen: list[asyncio.AbstractEventLoop] = []

    @tool
    async def which() -> str:
        seen.append(asyncio.get_running_loop())
        return variable.get()

    @register_ai_service(tools=(which,))
    class Service(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

        def stream(self, text: str) -> AsyncIterator[str]: ...

    model = ScriptedChatModel([tool_call("which"), "done", tool_call("which"), "a b"])
    with Container(models={"default": model}).register(Service) as container:

        async def elsewhere() -> None:
            variable.set("carried")
            result = await container.get(Service).chat("x")
            assert result.tool_executions[0].result == "carried"
            assert [each async for each in container.get(Service).stream("x")] == ["a ", "b"]
            assert asyncio.get_running_loop() not in seen

        asyncio.run(elsewhere())
    assert seen[0] is seen[1]


async def test_cancelling_a_caller_on_another_loop_cancels_the_work() -> None:
    entered, cancelled = threading.Event(), threading.Event()

    @tool
    async def slow() -> str:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return "never"

    @register_ai_service(tools=(slow,))
    class Service(Protocol):
        async def chat(self, text: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel([tool_call("slow")])}).register(Service)
    await asyncio.to_thread(container.__enter__)
    try:
        task = asyncio.create_task(container.get(Service).chat("x"))
        assert await asyncio.to_thread(entered.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(cancelled.wait, 5)
    finally:
        await asyncio.to_thread(container.__exit__, None, None, None)


# --- nested deeper than the pool is wide


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_blocking_tools_that_call_def_services_do_not_deadlock(together: bool, asynchronous: bool) -> None:
    depth, width = 6, 2

    class Tools:
        def __init__(self, container: Container) -> None:
            self.container = container

        @tool
        def deeper(self, level: int) -> str:
            return self.container.get(Deep).wait(str(level + 1))

        @tool
        def leaf(self) -> str:
            return "leaf"

    @register_ai_service(tools=(Tools,), concurrent_tools=together)
    class Deep(Protocol):
        def wait(self, text: str) -> str: ...

        async def chat(self, text: str) -> str: ...

    def reply(request: Any) -> Any:
        if isinstance(request.messages[-1], ToolExecutionResultMessage):
            return "done"
        level = int(request.messages[0].text)
        if level >= depth:
            return AiMessage(None, [tool_call("leaf")] * 2)
        return AiMessage(None, [tool_call("deeper", {"level": level}), tool_call("leaf")])

    model = ScriptedChatModel([reply] * 1000)
    container = Container(models={"default": model}, settings=ToolboxSettings(pool_size=width))
    async with container.register(Deep):
        if asynchronous:
            calls = [container.get(Deep).chat("0") for _ in range(width + 2)]
            answers = await asyncio.wait_for(asyncio.gather(*calls), 30)
        else:
            threads = [asyncio.to_thread(container.get(Deep).wait, "0") for _ in range(3)]
            answers = await asyncio.wait_for(asyncio.gather(*threads), 30)
    assert set(answers) == {"done"}


# --- what they see


@request_scoped
class Session:
    pass


@pytest.mark.parametrize("name", ["plain", "quick", "coroutine", "fresh", "named"])
@pytest.mark.parametrize("synchronous", [False, True])
async def test_tools_see_their_callers_variables_scope_and_invocation(name: str, synchronous: bool) -> None:
    seen: list[Any] = []

    class Tools:
        def __init__(self, container: Container) -> None:
            self.container = container

        def note(self) -> str:
            context = InvocationContext.current()
            assert context is not None
            assert context.request is not None
            seen.append((variable.get(), self.container.get(Session), context.attributes, context.request.name))
            return "noted"

        @tool
        def plain(self) -> str:
            return self.note()

        @tool
        @non_blocking
        def quick(self) -> str:
            return self.note()

        @tool
        async def coroutine(self) -> str:
            return self.note()

        @tool
        @run_on_thread
        def fresh(self) -> str:
            return self.note()

        @tool
        @run_on("mine")
        def named(self) -> str:
            return self.note()

    @register_ai_service(tools=(Tools,))
    class Service(Both, Protocol): ...

    with ThreadPoolExecutor(1) as mine:
        model = ScriptedChatModel([tool_call(name), "done"])
        container = Container(models={"default": model}, executors={"mine": mine}).register(Service, Session)
        async with container, container.request_scope():
            variable.set("carried")
            session = container.get(Session)
            with invocation_attributes(tenant="a"):
                if synchronous:
                    await asyncio.to_thread(container.get(Service).wait, "x")
                else:
                    await container.get(Service).chat("x")
    [(carried, seen_session, attributes, request)] = seen
    assert carried == "carried"
    assert seen_session is session
    assert attributes == {"tenant": "a"}
    assert request == name


# --- call scopes


class Log:
    def __init__(self) -> None:
        self.said: list[str] = []


@call_scoped
class Transaction:
    def __init__(self, log: Log) -> None:
        self.log = log
        self.thread = threading.current_thread()
        log.said.append("begin")

    def stop(self) -> None:
        self.log.said.append("end")


class Repository:
    def __init__(self, transaction: Transaction, log: Log) -> None:
        self.transaction, self.log = transaction, log

    @tool
    def save(self, same: Inject[Transaction]) -> str:
        assert same is self.transaction
        assert self.transaction.thread is threading.current_thread()
        self.log.said.append("save")
        return "saved"

    @tool
    async def later(self, same: Inject[Transaction]) -> str:
        assert same is self.transaction
        self.log.said.append("later")
        return "saved"

    @tool
    def fail(self, same: Inject[Transaction]) -> str:
        raise ValueError("broken")


@register_ai_service(tools=(Repository,))
class Keeper(Protocol):
    async def chat(self, text: str) -> Result[str]: ...

    def wait(self, text: str) -> Result[str]: ...


async def test_a_call_has_its_own_scope_which_ends_before_the_result_goes_to_the_model() -> None:
    log = Log()

    def reply(request: Any) -> str:
        log.said.append("model")
        return "done"

    model = ScriptedChatModel([AiMessage(None, [tool_call("save"), tool_call("later")]), reply])
    container = Container(models={"default": model}).register(Keeper, Transaction).register_instance(log)
    async with container:
        await container.get(Keeper).chat("x")
    assert log.said == ["begin", "save", "end", "begin", "later", "end", "model"]


def test_also_in_a_synchronous_method() -> None:
    log = Log()
    model = ScriptedChatModel([AiMessage(None, [tool_call("save"), tool_call("later")]), "done"])
    container = Container(models={"default": model}).register(Keeper, Transaction).register_instance(log)
    with container:
        result = container.get(Keeper).wait("x")
    assert not any(each.is_error for each in result.tool_executions)
    assert log.said == ["begin", "save", "end", "begin", "later", "end"]


class Connection:
    pass


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_the_tools_exception_is_thrown_into_its_scope(asynchronous: bool) -> None:
    thrown: list[BaseException | None] = []

    @produces(scope="call")
    def connection() -> Iterator[Connection]:
        try:
            yield Connection()
        except BaseException as error:
            thrown.append(error)
            raise
        thrown.append(None)

    @produces(scope="call")
    async def async_connection() -> AsyncIterator[Connection]:
        try:
            yield Connection()
        except BaseException as error:
            thrown.append(error)
            raise
        thrown.append(None)

    class Tools:
        @tool
        def fine(self, connection: Inject[Connection]) -> str:
            return "fine"

        @tool
        def fail(self, connection: Inject[Connection]) -> str:
            raise ValueError("broken")

        @tool
        async def fail_later(self, connection: Inject[Connection]) -> str:
            raise ValueError("broken later")

        @tool
        def retry(self, connection: Inject[Connection]) -> str:
            raise ToolRetry("again")

        @tool
        def abort(self, connection: Inject[Connection]) -> str:
            raise ToolAbort("stop")

    @register_ai_service(tools=(Tools,))
    class Service(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    names = ["fine", "fail", "fail_later", "retry", "abort"]
    model = ScriptedChatModel([AiMessage(None, [tool_call(name) for name in names])])
    producer = async_connection if asynchronous else connection
    async with Container(models={"default": model}).register(Service, producer) as container:
        with pytest.raises(ToolAbort):
            await container.get(Service).chat("x")
    assert [type(each) for each in thrown] == [type(None), ValueError, ValueError, ToolRetry, ToolAbort]


async def test_what_closing_raises_is_the_tools_failure() -> None:
    @produces(scope="call")
    def connection() -> Iterator[Connection]:
        yield Connection()
        raise OSError("commit failed")

    class Tools:
        @tool
        def save(self, connection: Inject[Connection]) -> str:
            return "saved"

        @tool
        async def save_later(self, connection: Inject[Connection]) -> str:
            return "saved"

    @register_ai_service(tools=(Tools,))
    class Service(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    model = ScriptedChatModel([AiMessage(None, [tool_call("save"), tool_call("save_later")]), "done"])
    async with Container(models={"default": model}).register(Service, connection) as container:
        result = await container.get(Service).chat("x")
    assert [each.is_error for each in result.tool_executions] == [True, True]
    assert [each.result for each in result.tool_executions] == ["commit failed"] * 2


async def test_a_late_thread_closes_its_scope_when_it_leaves() -> None:
    log = Log()
    release = threading.Event()

    class Tools:
        @tool(timeout=0.01)
        def slow(self, transaction: Inject[Transaction]) -> str:
            release.wait(5)
            log.said.append("leaves")
            return "late"

    @register_ai_service(tools=(Tools,))
    class Service(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    model = ScriptedChatModel([tool_call("slow"), "done"])
    container = Container(models={"default": model}).register(Service, Transaction).register_instance(log)
    async with container:
        result = await container.get(Service).chat("x")
        assert result.content == "done"
        assert log.said == ["begin"]
        release.set()
    assert log.said == ["begin", "leaves", "end"]


async def test_a_services_tools_have_call_scopes_inside_call_scopes() -> None:
    log = Log()

    @register_ai_service(tools=(Repository,))
    class Inner(Protocol):
        @tool
        async def ask(self, question: str) -> str: ...

    @register_ai_service(tools=(Inner,))
    class Outer(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("ask", {"question": "q"}), tool_call("save"), "inner", "outer"])
    container = Container(models={"default": model}).register(Outer, Transaction).register_instance(log)
    async with container:
        await container.get(Outer).chat("x")
    assert log.said == ["begin", "save", "end"]


async def test_a_call_scoped_bean_outside_of_a_call_and_a_request_is_not_to_be_had() -> None:
    container = Container(models={"default": ScriptedChatModel([])}).register(Transaction)
    async with container.register_instance(Log()):
        with pytest.raises(ScopeNotActiveError):
            container.get(Transaction)


# --- handlers and executors where a def tool would run


async def test_an_executor_of_a_programmatic_tool_runs_where_a_def_tool_would() -> None:
    seen: dict[str, threading.Thread] = {}

    def sync(request: ToolExecutionRequest, memory_id: object) -> str:
        seen["sync"] = threading.current_thread()
        return "x"

    async def later(request: ToolExecutionRequest, memory_id: object) -> str:
        seen["later"] = threading.current_thread()
        return "x"

    @non_blocking
    def quick(request: ToolExecutionRequest, memory_id: object) -> str:
        seen["quick"] = threading.current_thread()
        return "x"

    tools = {ToolSpecification("sync"): sync, ToolSpecification("later"): later, ToolSpecification("quick"): quick}
    model = ScriptedChatModel([AiMessage(None, [tool_call(name) for name in ("sync", "later", "quick")]), "done"])
    await create_ai_service(Both, chat_model=model, tools=tools).chat("x")
    assert seen["sync"] is not threading.current_thread()
    assert seen["later"] is threading.current_thread()
    assert seen["quick"] is threading.current_thread()


async def test_asyncios_default_executor_never_runs_a_tool() -> None:
    class Refusing(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("not for tools")

    asyncio.get_running_loop().set_default_executor(Refusing(1))
    model = ScriptedChatModel([all_calls(), "done"])
    places = Places()
    service = places_service(places)
    with ThreadPoolExecutor(1) as mine:
        container = Container(models={"default": model}, executors={"mine": mine})
        async with container.register(service):
            result = await container.get(service).chat("x")
    assert not any(each.is_error for each in result.tool_executions)


async def test_more_calls_than_threads_wait() -> None:
    running, most, lock = 0, 0, threading.Lock()

    @tool
    def count(n: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.005)
        with lock:
            running -= 1
        return n

    @register_ai_service(tools=(count,), concurrent_tools=True)
    class Service(Protocol):
        async def chat(self, text: str) -> str: ...

    message = AiMessage(None, [tool_call("count", {"n": n}) for n in range(8)])
    model = ScriptedChatModel([message, "done"])
    container = Container(models={"default": model}, settings=ToolboxSettings(pool_size=2))
    async with container.register(Service):
        await container.get(Service).chat("x")
    assert most == 2


def test_a_marked_partial_keeps_its_mark() -> None:
    def f(a: int, b: int) -> int:
        return a + b

    assert list(tool_specification_from(functools.partial(f, 1)).parameters["properties"]) == ["b"]


def test_an_annotated_parameter_of_a_marked_function() -> None:
    @tool
    @blocking
    def f(a: Annotated[int, "number"]) -> int:
        return a

    assert f(1) == 1


@pytest.mark.parametrize("together", [False, True])
async def test_an_executor_that_is_full_of_callers_does_not_deadlock(together: bool) -> None:
    threads: list[threading.Thread] = []

    with ThreadPoolExecutor(1) as mine:

        class Tools:
            def __init__(self, container: Container) -> None:
                self.container = container

            @tool
            @run_on(mine)
            def deeper(self, level: int) -> str:
                return self.container.get(Deep).wait(str(level + 1))

            @tool
            @run_on(mine)
            def leaf(self) -> str:
                threads.append(threading.current_thread())
                return "leaf"

        @register_ai_service(tools=(Tools,), concurrent_tools=mine if together else False)
        class Deep(Protocol):
            def wait(self, text: str) -> str: ...

            async def chat(self, text: str) -> str: ...

        def reply(request: Any) -> Any:
            if isinstance(request.messages[-1], ToolExecutionResultMessage):
                return "done"
            level = int(request.messages[0].text)
            calls = [tool_call("leaf")] * 2 if level == 3 else [tool_call("deeper", {"level": level})] * 2
            return AiMessage(None, calls)

        container = Container(models={"default": ScriptedChatModel([reply] * 200)})
        async with container.register(Deep):
            assert await asyncio.wait_for(container.get(Deep).chat("0"), 30) == "done"
            assert await asyncio.wait_for(asyncio.to_thread(container.get(Deep).wait, "0"), 30) == "done"
        assert set(threads) == set(mine._threads)
