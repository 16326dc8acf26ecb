"""Routers choose the model of a call; durable runs keep the name of their model."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    ChatModel,
    ChatRequest,
    ChatRequestParameters,
    ChatResponse,
    Container,
    IllegalConfigurationError,
    InvocationContext,
    ToolboxSettings,
    create_ai_service,
    produces,
    register_ai_service,
    sql,
    tool,
)
from toolbox.errors import RunIncompatibleError, RunSuspendedError
from toolbox.models import ModelRouter
from toolbox.runs import InMemoryRunStore, RunId, RunStore, StoredRecord, StoredRun, approve, durable
from toolbox.sql import SqlRunStore
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class ByLength(ModelRouter):
    names: Collection[str] = ("small", "large")

    def __init__(self) -> None:
        self.asked: list[ChatRequest] = []

    def choose(self, request: ChatRequest, context: InvocationContext) -> str:
        self.asked.append(request)
        return "large" if context.method == "long" else "small"


class Orders:
    @tool(requires_approval=True)
    def order(self) -> str:
        """Order."""
        return "ordered"


@register_ai_service(model=ByLength, tools=Orders)
class Desk(Protocol):
    async def short(self, text: str) -> str: ...
    async def long(self, text: str, options: ChatRequestParameters | None = None) -> int: ...


def models(small: ScriptedChatModel, large: ScriptedChatModel) -> dict[str, ChatModel]:
    return {"small": small, "large": large}


async def test_a_router_is_asked_once_per_call_with_the_first_request() -> None:
    small, large = ScriptedChatModel(["hi"]), ScriptedChatModel(["what?", '{"value": 3}'])
    async with Container(models=models(small, large)).register(Desk) as container:
        desk, router = await container.aget(Desk), container.get(ByLength)
        assert await desk.short("Hi") == "hi"
        assert await desk.long("Hi") == 3

    assert len(router.asked) == 2
    assert router.asked[0].messages == small.requests[0].messages
    assert [each.name for each in router.asked[0].tool_specifications] == ["order"]


async def test_the_parameters_of_a_call_win() -> None:
    small, large = ScriptedChatModel(['{"value": 3}']), ScriptedChatModel()
    async with Container(models=models(small, large)).register(Desk) as container:
        assert await (await container.aget(Desk)).long("Hi", ChatRequestParameters(model="small")) == 3
        assert container.get(ByLength).asked == []


async def test_another_name_is_an_error() -> None:
    class Wrong(ModelRouter):
        names = ("default",)

        async def choose(self, request: ChatRequest, context: InvocationContext) -> str:
            return "other"

    @register_ai_service(model=Wrong)
    class Clerk(Protocol):
        async def ask(self, text: str) -> str: ...

    async with Container(models={"default": ScriptedChatModel()}).register(Clerk) as container:
        with pytest.raises(IllegalConfigurationError, match="'other', which is not one of its names: default"):
            await (await container.aget(Clerk)).ask("Hi")


def test_unknown_and_missing_names_are_problems_at_start() -> None:
    class Nameless(ModelRouter):
        def choose(self, request: ChatRequest, context: InvocationContext) -> str:
            return "x"

    @register_ai_service(model=Nameless)
    class Clerk(Protocol):
        async def ask(self, text: str) -> str: ...

    text = "\n".join(map(str, Container(models={"small": ScriptedChatModel()}).register(Desk, Clerk).check()))

    assert "unknown model 'large'" in text
    assert "the router has no names of models" in text
    with pytest.raises(IllegalConfigurationError, match="needs a container"):
        create_ai_service(Clerk, chat_model=ScriptedChatModel())


async def suspended(store: RunStore) -> str:
    given = models(ScriptedChatModel([tool_call("order")]), ScriptedChatModel())
    async with Container(models=given).register(Desk).register_instance(store, as_type=RunStore) as container:
        with pytest.raises(RunSuspendedError) as error:
            await (await container.aget(Desk)).short("Hi")
    return error.value.run_id


async def test_a_run_keeps_the_model_that_was_chosen() -> None:
    store = InMemoryRunStore()
    run_id = await suspended(store)
    small = ScriptedChatModel(["done"])
    other = Container(models=models(small, ScriptedChatModel())).register(Desk)
    async with other.register_instance(store, as_type=RunStore) as container:
        [call] = (await container.runs.get(run_id)).pending
        result = await container.runs.resume(run_id, {call.id: approve()})
        assert result.content == "done"
        assert container.get(ByLength).asked == []


async def test_a_model_that_is_gone_leaves_the_run_to_other_programs() -> None:
    @register_ai_service(model=ByLength, tools=Orders)
    class Desk(Protocol):
        async def short(self, text: str) -> str: ...

    store = InMemoryRunStore()
    given = models(ScriptedChatModel([tool_call("order")]), ScriptedChatModel())
    async with Container(models=given).register(Desk).register_instance(store, as_type=RunStore) as container:
        with pytest.raises(RunSuspendedError) as error:
            await (await container.aget(Desk)).short("Hi")
    run_id = error.value.run_id
    ByLength.names = ("large",)
    try:
        changed = Container(models={"large": ScriptedChatModel(["done"])}).register(Desk)
        async with changed.register_instance(store, as_type=RunStore) as container:
            [call] = (await container.runs.get(run_id)).pending
            with pytest.raises(RunIncompatibleError, match="small"):
                await container.runs.resume(run_id, {call.id: approve()})
    finally:
        ByLength.names = ("small", "large")


# --- durable runs


class Kept(InMemoryRunStore):
    persistent = True


class Crashing(ChatModel):
    """A model whose process ends while it works, the first time."""

    def __init__(self, answer: str) -> None:
        self.answer, self.calls = answer, 0
        self.working = asyncio.Event()

    async def chat(self, request: ChatRequest) -> ChatResponse:
        self.calls += 1
        if self.calls == 1:
            self.working.set()
            await asyncio.Event().wait()
        return ChatResponse(AiMessage(self.answer))


class InTurn(ModelRouter):
    """Chooses another model each time, so that a second choice would be seen."""

    names = ("small", "large")
    asked = 0

    def choose(self, request: ChatRequest, context: InvocationContext) -> str:
        type(self).asked += 1
        return self.names[(type(self).asked - 1) % 2]


@register_ai_service(model=InTurn)
class Durable(Protocol):
    @durable
    async def ask(self, run: RunId, text: str) -> str: ...


async def test_a_durable_run_is_not_routed_again_after_a_crash_before_the_first_reply() -> None:
    InTurn.asked = 0
    store, small, large = Kept(), Crashing("small"), ScriptedChatModel()

    def program() -> Container:
        made = Container(models={"small": small, "large": large}, settings=ToolboxSettings(stop_timeout=0.01))
        return made.register(Durable).register_instance(store, as_type=RunStore)

    async with program() as container:
        calling = asyncio.create_task((await container.aget(Durable)).ask("r", "Hi"))
        await small.working.wait()
    with pytest.raises(asyncio.CancelledError):
        await calling
    async with program() as container:
        assert await (await container.aget(Durable)).ask("r", "Hi") == "small"

    assert InTurn.asked == 1
    assert large.requests == []


# --- models of requests, in runs that are stored in a database


@dataclass
class Tenant:
    name: str


class Asked:
    """The models that a producer has made, by tenant and name."""

    def __init__(self, *replies: Any) -> None:
        self.replies, self.of = list(replies), list[str]()

    def model(self, of: str) -> ChatModel:
        def reply(request: ChatRequest) -> Any:
            self.of.append(of)
            return self.replies.pop(0)

        return ScriptedChatModel([reply])


@produces(scope="request", name="small")
def small_of_tenant(tenant: Tenant, asked: Asked) -> ChatModel:
    return asked.model(f"{tenant.name}/small")


@produces(scope="request", name="large")
def large_of_tenant(tenant: Tenant, asked: Asked) -> ChatModel:
    return asked.model(f"{tenant.name}/large")


@register_ai_service(model="small", tools=Orders)
class Before(Protocol):
    async def ask(self, text: str) -> str: ...


@register_ai_service(model="large", tools=Orders)
class After(Protocol):
    async def ask(self, text: str) -> str: ...


After.__module__, After.__qualname__ = Before.__module__, Before.__qualname__  # the same service, in a newer program


@asynccontextmanager
async def program_in(folder: Path, service: type[Any], asked: Asked, *producers: Any) -> AsyncIterator[Container]:
    async with sql.open_engine(f"sqlite+aiosqlite:///{folder}/runs.db") as engine:
        made = Container(run_seeds=(Tenant,)).register(service, *producers)
        made.register_instance(asked).register_instance(SqlRunStore(engine), as_type=RunStore)
        async with made as container:
            yield container


async def stored_call(folder: Path) -> str:
    asked = Asked(tool_call("order"))
    async with (
        program_in(folder, Before, asked, small_of_tenant, large_of_tenant) as container,
        container.request_scope({Tenant: Tenant("red")}),
    ):
        with pytest.raises(RunSuspendedError) as error:
            await (await container.aget(Before)).ask("Hi")
    assert asked.of == ["red/small"]
    return error.value.run_id


async def test_a_stored_run_finds_its_model_by_name_in_the_resumed_request(tmp_path: Path) -> None:
    run_id, asked = await stored_call(tmp_path), Asked("done")
    async with (
        program_in(tmp_path, After, asked, small_of_tenant, large_of_tenant) as container,
        container.request_scope({Tenant: Tenant("blue")}),  # the request that resumes does not matter
    ):
        [call] = (await container.runs.get(run_id)).pending
        assert (await container.runs.resume(run_id, {call.id: approve()})).content == "done"
    assert asked.of == ["red/small"]


async def test_a_stored_run_whose_model_is_gone_stays_for_other_programs(tmp_path: Path) -> None:
    run_id, asked = await stored_call(tmp_path), Asked("done")
    async with program_in(tmp_path, After, asked, large_of_tenant) as container:
        [call] = (await container.runs.get(run_id)).pending
        with pytest.raises(RunIncompatibleError, match="unknown model 'small'"):
            await container.runs.resume(run_id, {call.id: approve()})
    assert asked.of == []
    async with program_in(tmp_path, Before, asked, small_of_tenant, large_of_tenant) as container:
        assert (await container.runs.resume(run_id, {})).content == "done"
    assert asked.of == ["red/small"]


class WithoutNames(InMemoryRunStore):
    """Keeps records as earlier versions wrote them: without the names of models."""

    async def create(self, run: StoredRun, records: Sequence[StoredRecord], **options: Any) -> bool:
        old = [replace(each, data=each.data.replace('"model":"small"', '"model":null')) for each in records]
        assert old != [*records]
        return await super().create(run, old, **options)


async def test_a_run_of_a_version_without_routers_is_routed_when_it_continues() -> None:
    store, small = WithoutNames(), ScriptedChatModel([tool_call("order"), "done"])
    given = models(small, ScriptedChatModel())
    async with Container(models=given).register(Desk).register_instance(store, as_type=RunStore) as container:
        with pytest.raises(RunSuspendedError) as error:
            await (await container.aget(Desk)).short("Hi")
        router = container.get(ByLength)
        assert len(router.asked) == 1
        answers = {each.id: approve() for each in error.value.pending}
        assert (await container.runs.resume(error.value.run_id, answers)).content == "done"
    assert len(router.asked) == 2
    assert router.asked[1].messages == small.requests[1].messages[:-1]  # the answered call has not run yet
