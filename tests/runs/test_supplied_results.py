"""Results that someone supplies, and results that the store kept: both have the tool's return type."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any, Literal, Protocol

import pytest
from pydantic import BaseModel, Field

from toolbox import Container, Result, ReturnBehavior, register_ai_service, tool
from toolbox.errors import RunAnswerError, RunSuspendedError
from toolbox.runs import InMemoryRunStore, RunId, ToolDeferred, approve, respond
from toolbox.testing import ScriptedChatModel, tool_call

from .replies import asks

pytestmark = pytest.mark.anyio


class Price(BaseModel):
    euros: Decimal
    kind_of: str = Field(default="net", alias="kindOf")


class DearPrice(Price):
    why: str = ""


@dataclass
class Seat:
    row: int


class Size(Enum):
    VERY_LARGE = "XL"


class Found(BaseModel):
    pass


class Missing(BaseModel):
    reason: str = ""


@dataclass
class Opaque:
    """Pydantic can write it, but not read it."""

    value: int

    def __post_init__(self) -> None:
        if not isinstance(self.value, int) or self.value < 0:
            raise ValueError("negative")
        self.value = -self.value


def service_of(*tools: Any, returns: Any = Result[str]) -> Any:
    @register_ai_service(tools=tools)
    class Desk(Protocol):
        async def ask(self, text: str) -> Any: ...

    Desk.ask.__annotations__["return"] = returns
    return Desk


def deferred_tool(returns: Any) -> Any:
    async def later() -> Any:
        raise ToolDeferred

    later.__annotations__["return"] = returns
    return tool(deferred=True)(later)


async def responded(returns: Any, value: Any) -> Any:
    """Return the execution of a deferred call after `respond(value)`."""
    desk = service_of(deferred_tool(returns))
    model = ScriptedChatModel([tool_call("later"), "done"])
    async with Container(models={"default": model}).register(desk).register_instance(InMemoryRunStore()) as here:
        waiting = await here.get(desk).ask("x")
        result = await here.runs.resume(waiting.run_id, {waiting.pending[0].id: respond(value)})
    return result.tool_executions[0]


@pytest.mark.parametrize(
    ("returns", "value", "object_"),
    [
        (Literal["invite", "reject"], "invite", "invite"),
        (Literal["invite", "reject"], "INVITE", "invite"),
        (Size, "very large", Size.VERY_LARGE),
        (Price, {"euros": "7.5", "kindOf": "gross"}, Price(euros=Decimal("7.5"), kindOf="gross")),
        (Price, {"euros": 7}, Price(euros=Decimal(7))),
        (Price, Price(euros=Decimal(7)), Price(euros=Decimal(7))),
        (list[Seat], [{"row": 3}], [Seat(3)]),
        (Found | Missing, Missing(), Missing()),
        (Found | Missing, {"kind": "Missing"}, Missing()),
        (int, "3", 3),
        (None, None, None),
        (Any, {"any": [1]}, {"any": [1]}),
        (str | None, None, None),
    ],
)
async def test_a_supplied_result_has_the_tools_return_type(returns: Any, value: Any, object_: object) -> None:
    execution = await responded(returns, value)

    assert execution.result_object == object_
    assert type(execution.result_object) is type(object_)


@pytest.mark.parametrize(
    ("returns", "value"),
    [
        (Literal["invite", "reject"], {"perhaps": 3}),
        (Price, {"cents": 3}),
        (Price, None),
        (Found | Missing, {"other": 1}),
        (list[Seat], [{"row": "a"}]),
        (int, "three"),
    ],
)
async def test_a_supplied_result_of_another_type_is_refused_and_the_run_stays(returns: Any, value: Any) -> None:
    desk = service_of(deferred_tool(returns))
    async with Container(models={"default": ScriptedChatModel([tool_call("later")])}).register(desk) as here:
        waiting = await here.get(desk).ask("x")
        with pytest.raises(RunAnswerError, match="is not what later returns") as caught:
            await here.runs.resume(waiting.run_id, {waiting.pending[0].id: respond(value)})
        assert (await here.runs.get(waiting.run_id)).status == "suspended"

    assert caught.value.problems


@tool(requires_approval=True)
def pay() -> str:
    return "paid"


async def resumed(function: Any, returns: Any = Result[str], *, together: bool = False) -> tuple[Any, Any]:
    """Return the execution of a tool before and after a suspension in another container."""
    desk, store = service_of(function, pay, returns=returns), InMemoryRunStore()
    name = function.__name__
    replies: Sequence[Any] = [tool_call(name), tool_call("pay"), "done"]
    if together:
        replies = [asks(tool_call(name), tool_call("pay")), "done"]
    model = ScriptedChatModel(list(replies))

    def container() -> Container:
        return Container(models={"default": model}).register(desk).register_instance(store)

    async with container() as here:
        waiting = await here.get(desk).ask("x")
    async with container() as here:
        result = await here.runs.resume(waiting.run_id, {waiting.pending[0].id: approve()})
    return waiting.tool_executions[0], result.tool_executions[0]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("returns", "value"),
    [
        (Price, Price(euros=Decimal("7.5"))),
        (list[Price], [Price(euros=Decimal("7.5"))]),
        (Seat, Seat(3)),
        (Size, Size.VERY_LARGE),
        (set[str], {"a", "b", "c"}),
        (tuple[int, str], (1, "a")),
        (Found | Missing, Missing(reason="gone")),
        (str, "text"),
        (dict[str, int], {"a": 1}),
    ],
)
async def test_a_result_object_has_the_same_type_before_and_after_a_resume(
    returns: Any, value: Any, together: bool
) -> None:
    def look() -> Any:
        return value

    look.__annotations__["return"] = returns
    before, after = await resumed(tool(look), together=together)

    assert before.result_object == after.result_object == value
    assert type(after.result_object) is type(value)
    assert before.result == after.result


@pytest.mark.parametrize(
    ("returns", "value", "written"),
    [
        (Price, DearPrice(euros=Decimal(7), why="rare"), {"euros": "7", "kindOf": "net", "why": "rare"}),
        (Opaque, Opaque(3), {"value": -3}),
        (Any, Seat(3), {"row": 3}),
    ],
)
async def test_a_result_that_pydantic_cannot_read_whole_is_json_after_a_resume(
    returns: Any, value: Any, written: Any
) -> None:
    def look() -> Any:
        return value

    look.__annotations__["return"] = returns
    _, after = await resumed(tool(look))

    assert after.result_object == written


async def test_an_immediate_result_of_a_resumed_call_has_the_type_of_the_method() -> None:
    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    def look() -> Price:
        return Price(euros=Decimal(7))

    @tool(requires_approval=True, return_behavior=ReturnBehavior.IMMEDIATE)
    def confirm() -> Price | Seat:
        return Seat(1)

    desk, store = service_of(look, confirm, returns=Price), InMemoryRunStore()
    model = ScriptedChatModel([asks(tool_call("look"), tool_call("confirm"))])

    def container() -> Container:
        return Container(models={"default": model}).register(desk).register_instance(store)

    async with container() as here:
        with pytest.raises(RunSuspendedError) as caught:
            await here.get(desk).ask("x")
        run = caught.value
    async with container() as here:
        await here.runs.resume(run.run_id, {run.pending[0].id: approve()})
        assert (await here.runs.result(run.run_id)) == Price(euros=Decimal(7))


async def test_the_value_of_a_durable_method_keeps_its_member_of_a_union() -> None:
    @register_ai_service(durable=True)
    class Search(Protocol):
        async def find(self, run: RunId, text: str) -> Found | Missing: ...

    model, store = ScriptedChatModel(['{"kind": "Missing"}']), InMemoryRunStore()

    def container() -> Container:
        return Container(models={"default": model}).register(Search).register_instance(store)

    store.persistent = True
    async with container() as here:
        assert await here.get(Search).find("1", "x") == Missing()
    async with container() as here:
        assert await here.get(Search).find("1", "x") == Missing()
        assert await here.runs.result("1") == Missing()
