"""The stored names of services: `@register_ai_service(name=…, former_names=…)`, and what lies under them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from toolbox import (
    Container,
    ConversationSuspendedError,
    MemoryId,
    ModelConnectionError,
    Result,
    create_ai_service,
    register_ai_service,
    sql,
    tool,
)
from toolbox.runs import (
    InMemoryRunStore,
    RunChanges,
    RunConflictError,
    RunId,
    RunStore,
    RunSuspendedError,
    approve,
    durable,
)
from toolbox.service_names import stored_name, stored_names
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


@tool(requires_approval=True)
async def pay(euros: int) -> str:
    return f"paid {euros}"


@register_ai_service(tools=pay)
class Old(Protocol):
    async def ask(self, text: str) -> Result[str]: ...

    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    @durable
    async def with_id(self, run: RunId, text: str) -> str: ...


OLD = f"{Old.__module__}.{Old.__qualname__}"


@register_ai_service(tools=pay, name="assistant", former_names=[OLD])
class New(Protocol):
    async def ask(self, text: str) -> Result[str]: ...

    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    @durable
    async def with_id(self, run: RunId, text: str) -> str: ...


@register_ai_service(tools=pay, name="assistant")
class Newest(Protocol):
    async def ask(self, text: str) -> Result[str]: ...

    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    @durable
    async def with_id(self, run: RunId, text: str) -> str: ...


class Kept(InMemoryRunStore):
    persistent = True


Start = Callable[..., Awaitable[Container]]


@pytest.fixture(params=["memory", "SQLite"])
async def start(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts programs with the same runs, each with one service."""
    in_memory = Kept()
    async with AsyncExitStack() as stack:

        async def make(service: type[Any], *replies: Any) -> Container:
            container = Container(models={"default": ScriptedChatModel(replies)}).register(service)
            if request.param == "memory":
                container.register_instance(in_memory, RunStore)
            else:
                engine = await stack.enter_async_context(sql.open_engine(f"sqlite:///{tmp_path / 'data.db'}"))
                container.register_instance(sql.SqlRunStore(engine), RunStore)
            return await stack.enter_async_context(container)

        yield make


def test_a_service_has_the_name_of_its_class_by_default() -> None:
    assert stored_names(Old) == (OLD,)
    assert stored_names(New) == ("assistant", OLD)
    assert stored_name(Newest) == "assistant"


async def test_runs_have_the_stored_name(start: Start) -> None:
    here = await start(New, tool_call("pay", {"euros": 5}))
    suspended = await here.get(New).ask("hi")

    run = await here.runs.get(suspended.run_id or "")

    assert (run.service, run.pending[0].service, suspended.pending[0].service) == ("assistant",) * 3
    for service in (New, "assistant", OLD):
        assert [each.id for each in await here.runs.list(service=service)] == [run.id]


async def test_a_run_that_lies_under_a_former_name_continues_and_moves(start: Start) -> None:
    old = await start(Old, tool_call("pay", {"euros": 5}))
    run_id = (await old.get(Old).ask("hi")).run_id or ""
    new = await start(New, "done")
    before = await new.runs.get(run_id)
    assert (before.service, before.pending[0].service) == ("assistant", "assistant")
    assert [each.id for each in await new.runs.list(service=New)] == [run_id]
    stored = await (await new.runs.store()).load(run_id)
    assert stored is not None
    assert stored.service == OLD

    assert (await new.runs.resume(run_id, {"0": approve()})).content == "done"

    stored = await (await new.runs.store()).load(run_id)
    assert stored is not None
    assert stored.service == "assistant"
    newest = await start(Newest)
    assert (await newest.runs.result(run_id)).content == "done"


@pytest.mark.parametrize("write", ["cancel", "retry", "take over"])
async def test_each_write_moves_a_run(start: Start, write: str) -> None:
    old = await start(Old, ModelConnectionError("down"))
    run = await old.runs.start(Old.ask, "hi")
    async with asyncio.timeout(60):
        while (await old.runs.get(run.id)).status != "failed":  # noqa: ASYNC110 - the store has no event
            await asyncio.sleep(0.01)
    new = await start(New, "done")
    store = await new.runs.store()

    if write == "retry":
        await new.runs.retry(run.id)
    else:
        failed = await store.load(run.id)
        assert failed is not None
        await store.change(run.id, failed.version, RunChanges(status="running"))
        await (new.runs.cancel(run.id) if write == "cancel" else new.runs.execute(run.id))

    stored = await store.load(run.id)
    assert stored is not None
    assert stored.service == "assistant"


async def test_a_suspended_run_keeps_its_conversation_under_all_names(start: Start) -> None:
    old = await start(Old, tool_call("pay", {"euros": 5}))
    run_id = (await old.get(Old).chat("room", "hi")).run_id or ""
    new = await start(New, tool_call("pay", {"euros": 6}), "done")

    with pytest.raises(ConversationSuspendedError):
        await new.get(New).chat("room", "again")
    again = await new.runs.resume(run_id, {"0": approve()})
    assert [each.arguments for each in again.pending] == [{"euros": 6}]

    newest = await start(Newest)
    with pytest.raises(ConversationSuspendedError):
        await newest.get(Newest).chat("room", "again")


async def test_the_answer_of_an_id_is_found_under_a_former_name(start: Start) -> None:
    old = await start(Old, "done")
    assert await old.get(Old).with_id("7", "hi") == "done"
    new = await start(New)

    assert await new.get(New).with_id("7", "hi") == "done"
    with pytest.raises(RunConflictError, match="arguments"):
        await new.get(New).with_id("7", "other")


async def test_a_pending_call_within_a_renamed_service_continues(start: Start) -> None:
    @register_ai_service(tools=pay, name="before")
    class Before(Protocol):
        @tool
        async def delegate(self, wish: str) -> str:
            """Let another service work."""
            ...

    @register_ai_service(tools=pay, name="after", former_names=("before",))
    class After(Protocol):
        @tool
        async def delegate(self, wish: str) -> str:
            """Let another service work."""
            ...

    def outer(inner: type[Any]) -> type[Any]:
        @register_ai_service(tools=inner, name="outer")
        class Outer(Protocol):
            async def ask(self, text: str) -> str: ...

        return Outer

    one, other = outer(Before), outer(After)
    old = await start(one, tool_call("delegate", {"wish": "x"}), tool_call("pay", {"euros": 5}))
    with pytest.raises(RunSuspendedError) as suspended:
        await old.get(one).ask("hi")
    assert suspended.value.pending[0].service == "before"
    new = await start(other, "inner", "outer")

    result = await new.runs.resume(suspended.value.run_id, {"0/0": approve()})

    assert result.content == "outer"


# --- problems


def service(**options: Any) -> type[Any]:
    @register_ai_service(**options)
    class Made(Protocol):
        async def ask(self, text: str) -> str: ...

    return Made


def problems_of(*services: type[Any]) -> list[str]:
    container = Container(models={"default": ScriptedChatModel([])}).register(*services)
    return [f"{each.where} {each.what}" for each in container.check()]


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "x" * 201, 7])
def test_an_invalid_name_is_a_problem(name: Any) -> None:
    assert problems_of(service(name=name)) == [f"Made invalid name={name!r}"]


@pytest.mark.parametrize("name", ["a", "x" * 200, "app.agent-2_B"])
def test_valid_names(name: str) -> None:
    assert problems_of(service(name=name, former_names=["a.b", "app.test.<locals>.Agent"])) == []


@pytest.mark.parametrize("given", [("",), ("a b",), (7,), ([],), "abc", 7])
def test_invalid_former_names_are_problems(given: Any) -> None:
    [problem] = problems_of(service(former_names=given))

    assert "invalid former" in problem


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"name": "a"}, {"name": "a"}),
        ({"name": "a"}, {"name": "b", "former_names": ("a",)}),
        ({"name": "a", "former_names": ("x",)}, {"name": "b", "former_names": ("x",)}),
        ({}, {"name": "b", "former_names": (f"{__name__}.service.<locals>.Made",)}),
    ],
)
def test_two_services_with_one_name_are_a_problem(one: dict[str, Any], other: dict[str, Any]) -> None:
    [problem] = problems_of(service(**one), service(**other))

    assert problem.startswith("Made its stored name ")


def test_classes_that_a_function_makes_may_have_the_same_default_name() -> None:
    assert problems_of(service(), service()) == []


def test_a_service_may_have_its_own_name_as_a_former_one() -> None:
    assert problems_of(service(name="a", former_names=("a", "b"))) == []


def test_the_name_belongs_to_the_class() -> None:
    with pytest.raises(TypeError, match=r"register_ai_service\(name="):
        create_ai_service(Old, chat_model=ScriptedChatModel([]), name="x")
