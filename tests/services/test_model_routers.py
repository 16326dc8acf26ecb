"""Routers choose the model of a call; durable runs keep the name of their model."""

from collections.abc import Collection
from typing import Protocol

import pytest

from toolbox import (
    ChatModel,
    ChatRequest,
    ChatRequestParameters,
    Container,
    IllegalConfigurationError,
    InvocationContext,
    create_ai_service,
    register_ai_service,
    tool,
)
from toolbox.errors import RunIncompatibleError, RunSuspendedError
from toolbox.models import ModelRouter
from toolbox.runs import InMemoryRunStore, RunStore, approve
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
