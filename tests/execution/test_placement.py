"""Execution models: threads, executors and event loops on which tools run."""

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Annotated, Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    BlockingCallNotAllowedError,
    Container,
    IllegalConfigurationError,
    InvocationContext,
    Problem,
    Result,
    ToolboxSettings,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolProviderRequest,
    ToolSpecification,
    blocking,
    create_ai_service,
    non_blocking,
    register_ai_service,
    run_on,
    run_on_thread,
    system_message,
    tool,
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
    """Records the thread of each tool."""

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


async def test_execution_models_in_an_asynchronous_method() -> None:
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


async def test_execution_models_in_a_synchronous_method() -> None:
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


def test_execution_models_in_a_synchronous_method_of_a_synchronous_program() -> None:
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


async def test_run_on_thread_uses_a_new_thread_per_call() -> None:
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


async def test_run_on_accepts_an_executor_object() -> None:
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


async def test_run_on_accepts_any_concurrent_futures_executor() -> None:
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


# --- functions that are not tools


async def test_the_markers_of_messages_and_providers_say_where_they_run() -> None:
    seen: dict[str, list[str]] = {}

    with ThreadPoolExecutor(1, thread_name_prefix="mine") as mine:
        marks = {"blocking": blocking, "non_blocking": non_blocking, "thread": run_on_thread, "executor": run_on(mine)}
        for kind, mark in marks.items():
            places = seen.setdefault(kind, [])

            @mark
            def prompt(context: InvocationContext, places: list[str] = places) -> str:
                places.append(where())
                return "Be short."

            @mark
            def provide(request: ToolProviderRequest, places: list[str] = places) -> None:
                places.append(where())

            class Service(Protocol):
                @system_message(prompt)
                async def chat(self, text: str) -> str: ...

            await create_ai_service(Service, chat_model=ScriptedChatModel(["done"]), tool_provider=provide).chat("q")
    assert seen["non_blocking"] == [where()] * 2
    assert seen["executor"] == ["mine_0"] * 2
    assert not {*seen["blocking"], *seen["thread"]} & {where(), "mine_0"}


# --- problems


def problems_of(*tools: Any) -> list[Problem]:
    @register_ai_service(tools=tools)
    class Service(Protocol):
        async def chat(self, text: str) -> str: ...

    return Container(models={"default": ScriptedChatModel([])}).register(Service).check()


def test_blocking_markers_on_async_tools_are_a_problem() -> None:
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


def test_unknown_executors_are_a_problem() -> None:
    @tool
    @run_on("nowhere")
    def lost() -> None: ...

    [problem] = problems_of(lost)
    assert "nowhere" in problem.what
    assert "executors" in problem.fix


def test_unknown_executors_are_a_problem_without_a_container() -> None:
    @tool
    @run_on("nowhere")
    def lost() -> None: ...

    with pytest.raises(IllegalConfigurationError, match="nowhere"):
        create_ai_service(Both, chat_model=ScriptedChatModel([]), tools=(lost,))


def test_unknown_models_are_a_problem() -> None:
    @register_ai_service(model="tool-use")
    class Service(Protocol):
        async def chat(self, text: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Service).check()
    assert "tool-use" in problem.what
    assert problem.where == "Service"


# --- synchronous methods


async def test_synchronous_methods_are_rejected_on_the_event_loop_before_the_model_is_called() -> None:
    model = ScriptedChatModel(["done"])
    with pytest.raises(BlockingCallNotAllowedError, match=r"Both\.wait"):
        create_ai_service(Both, chat_model=model).wait("x")
    assert model.requests == []


def test_synchronous_methods_work_without_a_container() -> None:
    assert create_ai_service(Both, chat_model=ScriptedChatModel(["done"])).wait("x").content == "done"


def test_services_without_a_container_work_from_many_threads() -> None:
    model = ScriptedChatModel(["done"] * 20)
    service = create_ai_service(Both, chat_model=model)
    with ThreadPoolExecutor(10) as pool:
        assert [each.content for each in pool.map(service.wait, ["x"] * 20)] == ["done"] * 20


def test_asynchronous_methods_can_be_awaited_on_any_event_loop() -> None:
    service = create_ai_service(Both, chat_model=ScriptedChatModel(["a", "b"]))
    assert asyncio.run(service.chat("x")).content == "a"
    assert asyncio.run(service.chat("x")).content == "b"


def test_calls_from_another_event_loop_run_on_the_loop_of_the_container() -> None:
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


async def test_cancelling_a_caller_on_another_event_loop_cancels_the_call() -> None:
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
        assert await asyncio.to_thread(entered.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(cancelled.wait, 60)
    finally:
        await asyncio.to_thread(container.__exit__, None, None, None)


# --- calls nested deeper than the pool size


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_blocking_tools_that_call_synchronous_services_do_not_deadlock(
    together: bool, asynchronous: bool
) -> None:
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
            answers = await asyncio.wait_for(asyncio.gather(*calls), 100)
        else:
            threads = [asyncio.to_thread(container.get(Deep).wait, "0") for _ in range(3)]
            answers = await asyncio.wait_for(asyncio.gather(*threads), 100)
    assert set(answers) == {"done"}


# --- executors, pool and marks


async def test_executors_of_tool_specifications_run_like_other_functions() -> None:
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


async def test_the_default_executor_of_asyncio_never_runs_tools() -> None:
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


async def test_calls_wait_for_a_free_thread() -> None:
    running, most, lock, pairs = 0, 0, threading.Lock(), threading.Barrier(2)

    @tool
    def count(n: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        pairs.wait(60)  # the pool has two threads, and both are used
        threading.Event().wait(0.005)  # a third would join them
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


def test_marked_functions_can_have_annotated_parameters() -> None:
    @tool
    @blocking
    def f(a: Annotated[int, "number"]) -> int:
        return a

    assert f(1) == 1


@pytest.mark.parametrize("together", [False, True])
async def test_executors_occupied_by_callers_do_not_deadlock(together: bool) -> None:
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
            assert await asyncio.wait_for(container.get(Deep).chat("0"), 100) == "done"
            assert await asyncio.wait_for(asyncio.to_thread(container.get(Deep).wait, "0"), 100) == "done"
        assert set(threads) == set(mine._threads)
