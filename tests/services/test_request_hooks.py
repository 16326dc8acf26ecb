"""`@before_model_request`: methods of beans that are called before each model request."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from toolbox import (
    ConnectionReleasedEvent,
    Container,
    EventListener,
    IllegalConfigurationError,
    InvocationEvent,
    ModelConnectionError,
    ModelRequestEvent,
    TokenStream,
    application_scoped,
    call_scoped,
    create_ai_service,
    produces,
    register_ai_service,
    request_scoped,
    tool,
)
from toolbox.interceptors import before_model_request
from toolbox.limits import UsageLimitExceededError, UsageLimits
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

calls: list[str] = []


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    calls.clear()
    yield
    calls.clear()


@register_ai_service()
class Desk(Protocol):
    async def chat(self, question: str) -> str: ...


@request_scoped
class Basket:
    @before_model_request
    async def unlock(self) -> None:
        calls.append("unlock")


@call_scoped
class Attempt:
    @before_model_request
    def pause(self) -> None:
        calls.append("pause")


class Shelf:
    def __init__(self, attempt: Attempt, desk: Desk) -> None:
        self.attempt, self.desk = attempt, desk

    @tool
    async def look(self) -> str:
        """Look."""
        return "a lamp"

    @tool
    async def ask(self) -> str:
        """Ask another service."""
        return await self.desk.chat("?")


@register_ai_service(tools=Shelf)
class Agent(Protocol):
    async def chat(self, question: str) -> str: ...
    def stream(self, question: str) -> TokenStream: ...


def program(*replies: Any, registered: tuple[Any, ...] = (Basket, Attempt, Shelf, Agent, Desk)) -> Container:
    return Container(models={"default": ScriptedChatModel(replies)}).register(*registered)


async def test_the_beans_of_the_request_are_called_before_each_request() -> None:
    async with program(tool_call("look"), "done") as container, container.request_scope():
        container.get(Basket)

        await container.get(Agent).chat("?")

    assert calls == ["unlock", "unlock"]


async def test_beans_that_were_not_created_are_not_called() -> None:
    async with program("done") as container, container.request_scope():
        await container.get(Agent).chat("?")

    assert calls == []


async def test_the_beans_of_the_tool_calls_that_led_to_a_request_are_called_too() -> None:
    async with program(tool_call("ask"), "inner", "outer") as container, container.request_scope():
        container.get(Basket)

        await container.get(Agent).chat("?")

    assert calls == ["unlock", "pause", "unlock", "unlock"]


async def test_streams_call_them_before_each_request() -> None:
    async with program(tool_call("look"), "done") as container, container.request_scope():
        container.get(Basket)

        assert [each async for each in container.get(Agent).stream("?")]

    assert calls == ["unlock", "unlock"]


async def test_a_request_that_a_limit_refuses_calls_nothing() -> None:
    @register_ai_service(limits=UsageLimits(model_calls=1), tools=Shelf)
    class Limited(Protocol):
        async def chat(self, question: str) -> str: ...

    container = program(tool_call("look"), "done", registered=(Basket, Attempt, Shelf, Desk, Limited))
    async with container, container.request_scope():
        container.get(Basket)
        with pytest.raises(UsageLimitExceededError):
            await container.get(Limited).chat("?")

    assert calls == ["unlock"]


async def test_what_one_raises_ends_the_invocation_before_anything_is_sent() -> None:
    @request_scoped
    class Broken:
        @before_model_request
        def fail(self) -> None:
            raise LookupError("no lock")

    model = ScriptedChatModel(["done"])
    container = Container(models={"default": model}).register(Broken, Desk)
    async with container, container.request_scope():
        container.get(Broken)
        with pytest.raises(LookupError, match="no lock"):
            await container.get(Desk).chat("?")

    assert model.requests == []


async def test_def_methods_run_where_def_tools_do() -> None:
    @register_ai_service()
    class Sync(Protocol):
        def chat(self, question: str) -> str: ...

    threads: list[threading.Thread] = []

    @request_scoped
    class Noting:
        @before_model_request
        def note(self) -> None:
            threads.append(threading.current_thread())

    async with program("done", "done", registered=(Noting, Sync, Desk)) as container, container.request_scope():
        container.get(Noting)
        await container.get(Desk).chat("?")

        def call() -> threading.Thread:
            container.get(Sync).chat("?")
            return threading.current_thread()

        caller = await asyncio.to_thread(call)

    assert threads[0] is not threading.current_thread()  # an asynchronous service does not block its event loop
    assert threads[1] is caller  # which waits


async def test_subclasses_and_several_methods_are_called_once_each() -> None:
    class Base:
        @before_model_request
        def first(self) -> None:
            calls.append("base")

    @request_scoped
    class Derived(Base):
        def first(self) -> None:
            calls.append("derived")

        @before_model_request
        @staticmethod
        def second() -> None:
            calls.append("second")

    @produces(scope="request", name="same")
    def same(derived: Derived) -> Base:
        return derived

    container = program("done", registered=(Derived, same, Desk))
    async with container, container.request_scope():
        assert container.get(Base, "same") is container.get(Derived)
        await container.get(Desk).chat("?")

    assert calls == ["derived", "second"]


async def test_a_service_without_a_container_calls_the_beans_of_the_scope_around_it() -> None:
    desk = create_ai_service(Desk, chat_model=ScriptedChatModel(["done"]))
    async with program() as container, container.request_scope():
        container.get(Basket)
        await desk.chat("?")

    assert calls == ["unlock"]


def marked(scope: Callable[[type], type] | None, **members: Any) -> type:
    cls = type("Marked", (), members)
    return cls if scope is None else scope(cls)


@before_model_request
def method(self: object) -> None: ...


@before_model_request
def with_parameter(self: object, request: str) -> None: ...


@before_model_request
async def generator(self: object) -> Any:
    yield


@pytest.mark.parametrize(
    ("scope", "member", "fact"),
    [
        (application_scoped, method, "application-scoped"),
        (None, method, "dependent-scoped"),
        (request_scoped, with_parameter, "without arguments"),
        (request_scoped, generator, "does not support generators"),
    ],
)
def test_marks_without_effect_are_problems_at_startup(scope: Any, member: Any, fact: str) -> None:
    container = Container().register(marked(scope, release=member))

    [problem] = container.check()

    assert problem.where == "Marked.release"
    assert fact in problem.what
    assert problem.fix


def test_an_instance_with_a_marked_method_is_a_problem() -> None:
    instance = marked(None, release=method)()
    container = Container().register_instance(instance, object)

    [problem] = container.check()

    assert "application-scoped" in problem.what


@pytest.mark.parametrize("wrong", [Basket, 3, "unlock"])
def test_only_methods_can_be_marked(wrong: Any) -> None:
    with pytest.raises(TypeError, match="expected a method"):
        before_model_request(wrong)


async def test_a_program_with_problems_does_not_start() -> None:
    with pytest.raises(IllegalConfigurationError, match="before_model_request"):
        async with Container().register(marked(application_scoped, release=method)):
            pass


async def test_a_chain_of_fallbacks_is_one_request() -> None:
    class Away(ScriptedChatModel):
        fallback = ("local",)

    models = {"default": Away([ModelConnectionError("no answer")]), "local": ScriptedChatModel(["done"])}
    async with Container(models=models).register(Basket, Desk) as container, container.request_scope():
        container.get(Basket)
        assert await container.get(Desk).chat("?") == "done"

    assert calls == ["unlock"]


@pytest.mark.parametrize("returned", [True, ConnectionReleasedEvent, "released"])
async def test_what_a_method_returns_is_told_to_nobody(returned: object) -> None:
    told: list[type[InvocationEvent]] = []

    class Log(EventListener):
        def on_event(self, event: InvocationEvent) -> None:
            told.append(type(event))

    @request_scoped
    class Lock:
        @before_model_request
        def release(self) -> object:
            calls.append("release")
            return returned

    container = Container(models={"default": ScriptedChatModel(["done"])}).register(Desk, Lock)
    async with container.register_instance(Log()), container.request_scope():
        await container.aget(Lock)
        await container.get(Desk).chat("q")

    assert calls == ["release"]
    assert ConnectionReleasedEvent not in told
    assert ModelRequestEvent in told
