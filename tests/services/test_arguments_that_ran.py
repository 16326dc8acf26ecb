"""The arguments that a tool ran with: in its execution, for what undoes it, and after another process continues."""

import asyncio
import json
import pickle
import signal
import sys
from collections.abc import Callable
from copy import deepcopy
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Protocol
from uuid import uuid4

import pytest
from pydantic import BaseModel, BeforeValidator, Field, PlainSerializer
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from tests.listening import Events
from tests.services.killed_shop import shop
from toolbox import (
    AiMessage,
    AiServiceTool,
    CompensatedEvent,
    Container,
    EventListener,
    Progress,
    Result,
    ToolExecutedEvent,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolProviderResult,
    ToolSpecification,
    application_scoped,
    compensate_for,
    create_ai_service,
    invocation_record,
    register_ai_service,
    return_to_model,
    tool,
    user_message,
)
from toolbox.errors import RunStoreError
from toolbox.guardrails import GuardrailResult, ToolInputGuardrail, ToolInputGuardrailRequest, tool_input_guardrails
from toolbox.interceptors import ToolInterceptor, ToolInvocation, ToolProceed, interceptors
from toolbox.runs import InMemoryRunStore, RunId, RunStore, approve, fail, respond
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

Cents = Annotated[int, BeforeValidator(lambda euros: int(Decimal(str(euros)) * 100))]
"""An amount in cents, which a model writes in euros. Validating it twice multiplies it twice."""

undone: list[Any] = []
booked: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_happened() -> None:
    undone.clear()
    booked.clear()


@application_scoped
class Halving(ToolInterceptor):
    """Passes on half of the amount, and answers for tools without one."""

    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        if "seats" not in call.arguments:
            return await proceed(call)
        return await proceed(call.with_arguments(seats=call.arguments["seats"] // 2))


@application_scoped
class Capping(ToolInputGuardrail):
    """Allows at most 8 seats."""

    def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
        if request.arguments["seats"] <= 8:
            return self.success()
        return self.success_with({**request.arguments, "seats": 8})


class Hotel:
    """Each tool with both forms of what undoes it: an execution, and the parameters."""

    @tool
    @interceptors(Halving)
    @tool_input_guardrails(Capping)
    def book(self, seats: int, note: str = "none") -> str:
        booked.append((seats, note))
        return "booked"

    @compensate_for(book)
    def unbook(self, execution: ToolExecution) -> None:
        undone.append((dict(execution.arguments), json.loads(execution.request.arguments)))

    @tool
    @interceptors(Halving)
    @tool_input_guardrails(Capping)
    def reserve(self, seats: int, note: str = "none") -> str:
        booked.append((seats, note))
        return "reserved"

    @compensate_for(reserve)
    def unreserve(self, seats: int, note: str) -> None:
        undone.append((seats, note))

    @tool
    def fail(self) -> str:
        raise ValueError("no money")


class Ask(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


def service(*replies: Any, tools: Any, **options: Any) -> Any:
    options = {"compensate_on_tool_errors": True, **options}
    return create_ai_service(Ask, chat_model=ScriptedChatModel(replies), tools=tools, **options)


FAIL = tool_call("fail")

# --- an execution


async def test_an_execution_has_the_arguments_after_guardrails_and_interceptors_with_defaults() -> None:
    call = tool_call("book", {"seats": 20})
    with invocation_record() as record:
        result = await service(call, "x", tools=Hotel()).ask("q")

    [execution] = result.tool_executions
    assert booked == [(4, "none")]
    assert execution.arguments == {"seats": 4, "note": "none"}
    assert execution.request == call
    assert record.tool_executions == [execution]


def test_the_arguments_are_read_only_and_are_copied_pickled_and_written_as_others() -> None:
    request = ToolExecutionRequest("1", "book", "{}")
    execution = ToolExecution(request, "ok", None, False, datetime.now(UTC), 0.1, {}, {"seats": [1]})
    changes: list[Callable[[Any], Any]] = [
        lambda given: given.update(seats=2),
        lambda given: given.pop("seats"),
        lambda given: given.clear(),
        lambda given: given.setdefault("a", 1),
        lambda given: given.popitem(),
        lambda given: given.__setitem__("seats", 2),
        lambda given: given.__delitem__("seats"),
        lambda given: given.__ior__({"seats": 2}),
    ]
    for change in changes:
        with pytest.raises(TypeError, match="read-only"):
            change(execution.arguments)

    assert execution.arguments == {"seats": [1]}
    assert pickle.loads(pickle.dumps(execution)) == execution
    assert deepcopy(execution) == execution
    assert json.dumps(execution.arguments) == '{"seats": [1]}'
    assert ToolExecution(request, "ok", None, False, datetime.now(UTC), 0.1).arguments == {}


class Refusing(ToolInputGuardrail):
    def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
        return self.failure("no")


class Answering(ToolInterceptor):
    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        return ToolExecutionResult("from a cache")


async def test_a_tool_that_did_not_run_has_none_and_one_that_failed_has_those_it_began_with() -> None:
    class Tools:
        @tool
        @tool_input_guardrails(Refusing)
        def refused(self, n: int) -> str:
            raise AssertionError

        @tool
        @interceptors(Answering)
        def cached(self, n: int) -> str:
            raise AssertionError

        @tool
        def strict(self, n: int) -> str:
            raise AssertionError

        @tool
        def failing(self, n: int) -> str:
            raise ValueError("no")

    calls = [tool_call(name, {"n": n}) for name, n in (("refused", 1), ("cached", 2), ("strict", "x"), ("failing", 3))]
    options = {"tools": Tools(), "on_tool_arguments_error": return_to_model}
    result = await service(AiMessage(None, calls), "x", **options).ask("q")

    assert [dict(each.arguments) for each in result.tool_executions] == [{}, {}, {}, {"n": 3}]


async def test_a_tool_that_changes_its_arguments_in_place_is_undone_with_those_it_began_with() -> None:
    class Order(BaseModel):
        lines: list[str]

    class Shop:
        @tool
        def ship(self, order: Order, boxes: list[int]) -> str:
            order.lines.clear()
            boxes.append(9)
            return "shipped"

        @compensate_for(ship)
        def unship(self, order: Order, boxes: list[int]) -> None:
            undone.append((order, boxes))

    calls = [tool_call("ship", {"order": {"lines": ["a"]}, "boxes": [1]}), FAIL]
    result = await service(*calls, "x", tools=[Shop(), Hotel()]).ask("q")

    assert result.tool_executions[0].arguments == {"order": {"lines": ["a"]}, "boxes": [1]}
    assert undone == [(Order(lines=["a"]), [1])]


async def test_the_attempt_that_succeeded_counts() -> None:
    class Twice(ToolInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
            if "n" not in call.arguments:
                return await proceed(call)
            done = await proceed(call.with_arguments(n=1))
            with pytest.raises(ValueError, match="too many"):
                await proceed(call.with_arguments(n=2))
            return done

    class Tools:
        @tool
        async def count(self, n: int) -> int:
            if n > 1:
                raise ValueError("too many")
            return n

        @compensate_for(count)
        async def uncount(self, n: int) -> None:
            undone.append(n)

    result = await service(
        tool_call("count", {"n": 7}), FAIL, "x", tools=[Tools(), Hotel()], interceptors=[Twice()]
    ).ask("q")

    assert result.tool_executions[0].arguments == {"n": 1}
    assert undone == [1]


async def test_progress_and_other_hidden_parameters_are_not_among_the_arguments() -> None:
    @tool
    async def slow(n: int, progress: Progress) -> int:
        await progress(1, 2)
        return n

    result = await service(tool_call("slow", {"n": 1}), "x", tools=slow).ask("q")
    assert result.tool_executions[0].arguments == {"n": 1}


async def test_an_executor_written_by_hand_has_the_arguments_that_reached_it() -> None:
    seen = []

    def run(request: ToolExecutionRequest, memory_id: object) -> str:
        seen.append(json.loads(request.arguments))
        return "ran"

    class Doubling(ToolInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
            return await proceed(call.with_arguments(n=call.arguments["n"] * 2))

    specification = ToolSpecification("count", None, {"type": "object", "properties": {"n": {"type": "integer"}}})
    provided = ToolProviderResult([AiServiceTool(specification, run)])
    made = service(
        tool_call("count", {"n": 2}), "x", tools=(), tool_provider=lambda _: provided, interceptors=[Doubling()]
    )
    result = await made.ask("q")

    assert seen == [{"n": 4}]
    assert result.tool_executions[0].arguments == {"n": 4}


async def test_what_json_cannot_have_is_left_out_and_does_not_end_the_call() -> None:
    def refuse(value: Any) -> Any:
        raise RuntimeError("cannot be written")

    class Bad(BaseModel):
        text: Annotated[str, PlainSerializer(refuse)]

    @tool
    def take(bad: Bad, ratio: dict[str, Any], n: int = 1) -> str:
        return bad.text

    text = '{"bad": {"text": "t"}, "ratio": {"x": 1e400}}'
    result = await service(ToolExecutionRequest("1", "take", text), "x", tools=take).ask("q")
    [execution] = result.tool_executions
    assert (execution.result, execution.arguments) == ("t", {"ratio": {"x": "Infinity"}, "n": 1})


# --- what undoes it


@register_ai_service(tools=Hotel, compensate_on_tool_errors=True)
class Guests(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


@pytest.mark.parametrize(
    ("name", "expected"),
    [("book", ({"seats": 4, "note": "a"}, {"seats": 4, "note": "a"})), ("reserve", (4, "a"))],
)
async def test_both_forms_get_the_arguments_that_ran(name: str, expected: Any) -> None:
    events = Events()
    model = ScriptedChatModel([tool_call(name, {"seats": 20, "note": "a"}), FAIL, "x"])
    made = Container(models={"default": model}).register(Guests, Halving, Capping)
    async with made.register_instance(events, EventListener):
        result = await made.get(Guests).ask("q")

    assert booked == [(4, "a")]
    assert undone == [expected]
    [compensated] = events.of(CompensatedEvent)
    assert compensated.arguments == result.compensations[0].arguments == {"seats": 4, "note": "a"}
    assert [each.execution.arguments for each in events.of(ToolExecutedEvent)] == [{"seats": 4, "note": "a"}, {}]


# --- in runs, whose process dies


class Kept(InMemoryRunStore):
    """A store whose process dies before it writes the record `dies_on`."""

    persistent = True
    dies_on: str | None = None

    async def append(self, run_id: str, generation: int, records: Any, *args: Any) -> None:
        if any(each.key == self.dies_on for each in records):
            raise ConnectionError("the process died")
        await super().append(run_id, generation, records, *args)


class Payments:
    @tool
    @interceptors(Halving)
    def pay(self, seats: int, cents: Cents, key: str = Field(default_factory=lambda: uuid4().hex)) -> str:
        booked.append({"seats": seats, "cents": cents, "key": key})
        return "paid"

    @compensate_for(pay)
    def pay_back(self, seats: int, cents: Cents, key: str) -> None:
        undone.append({"seats": seats, "cents": cents, "key": key})

    @tool
    @interceptors(Halving)
    def order(self, seats: int, cents: Cents, key: str = Field(default_factory=lambda: uuid4().hex)) -> str:
        booked.append({"seats": seats, "cents": cents, "key": key})
        return "ordered"

    @compensate_for(order)
    def cancel(self, execution: ToolExecution) -> None:
        undone.append(dict(execution.arguments))
        assert json.loads(execution.request.arguments) == execution.arguments

    @tool
    def fail(self) -> str:
        raise ValueError("no money")

    @tool(requires_approval=True)
    def sign(self) -> str:
        raise ValueError("no pen")


@register_ai_service(tools=Payments, compensate_on_tool_errors=True, compensate_on_failure=True, durable=True)
class Till(Protocol):
    @user_message("{text}")
    async def buy(self, run: RunId, text: str) -> Result[str]: ...


@register_ai_service(tools=Payments, compensate_on_tool_errors=True, compensate_on_failure=True)
class Counter(Protocol):
    async def buy(self, text: str) -> Result[str]: ...


def tills(store: RunStore, *replies: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, take_over_runs=False)
    return made.register(Till, Counter, Halving).register_instance(store, as_type=RunStore)


@pytest.mark.parametrize("name", ["pay", "order"])
@pytest.mark.parametrize("dies_on", ["#r1", "#r2", "#failed", "0.0"])
async def test_a_process_that_continues_a_run_undoes_with_the_arguments_that_ran(name: str, dies_on: str) -> None:
    store = Kept()
    store.dies_on = dies_on
    replies: list[Any] = [tool_call(name, {"seats": 8, "cents": 5}), FAIL, "sorry"]
    if dies_on == "#failed":
        replies[1:] = [RuntimeError("the model is away")]
    async with tills(store, *replies) as here:
        with pytest.raises((RunStoreError, RuntimeError)):
            await here.get(Till).buy("run", "x")
    store.dies_on = None
    left = {"#r1": 1, "#r2": 2, "#failed": 1, "0.0": 2}[dies_on]
    async with tills(store, *replies[left:]) as there:
        if dies_on == "#failed":
            with pytest.raises(RuntimeError, match="away"):
                await there.runs.resume("run", {})
        else:
            result = await there.runs.resume("run", {})
            assert result.tool_executions[0].arguments == booked[0]
            assert result.compensations[0].arguments == booked[0]
            assert (await there.runs.result("run")).tool_executions == result.tool_executions

    [ran] = booked
    assert (ran["seats"], ran["cents"]) == (4, 500)
    assert undone[-1] == ran


@pytest.mark.parametrize("name", ["pay", "order"])
@pytest.mark.parametrize("ends", ["continues", "is cancelled"])
async def test_a_suspended_call_undoes_with_the_arguments_that_ran_in_another_process(name: str, ends: str) -> None:
    store = Kept()
    calls = [tool_call(name, {"seats": 8, "cents": 5}), tool_call("sign")]
    async with tills(store, AiMessage(None, calls)) as here:
        waiting = await here.get(Counter).buy("x")
        assert waiting.tool_executions[0].arguments == booked[0]
    async with tills(store, "sorry") as there:
        if ends == "continues":
            result = await there.runs.resume(waiting.run_id or "", {"1": approve()})
            assert [dict(each.arguments) for each in result.tool_executions] == [booked[0], {}]
        else:
            await there.runs.cancel(waiting.run_id or "")

    [ran] = booked
    assert undone == [ran]


class Unknown:
    @tool(on_unknown_outcome="ask")
    @interceptors(Halving)
    def pay(self, seats: int, key: str = Field(default_factory=lambda: uuid4().hex)) -> str:
        booked.append({"seats": seats, "key": key})
        return "paid"

    @compensate_for(pay)
    def pay_back(self, seats: int, key: str) -> None:
        undone.append({"seats": seats, "key": key})

    @tool
    def fail(self) -> str:
        raise ValueError("no money")


@register_ai_service(tools=Unknown, compensate_on_tool_errors=True, durable=True)
class Asking(Protocol):
    @user_message("{text}")
    async def buy(self, run: RunId, text: str) -> Result[str]: ...


def asking(store: RunStore, *replies: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, take_over_runs=False)
    return made.register(Asking, Halving).register_instance(store, as_type=RunStore)


@pytest.mark.parametrize("answer", [respond("paid"), fail("did not happen")], ids=["respond", "fail"])
async def test_a_call_whose_outcome_a_person_tells_has_the_arguments_it_began_with(answer: Any) -> None:
    store = Kept()
    store.dies_on = "0"
    async with asking(store, tool_call("pay", {"seats": 8})) as here:
        with pytest.raises(RunStoreError):
            await here.get(Asking).buy("run", "x")
    store.dies_on = None
    async with asking(store, FAIL, "sorry") as there:
        [pending] = (await there.runs.resume("run", {})).pending
        result = await there.runs.resume("run", {pending.id: answer})

    [ran] = booked
    assert result.tool_executions[0].arguments == ran
    assert undone == ([ran] if answer.kind == "respond" else [])


async def test_an_interceptor_that_the_program_has_got_since_does_not_change_what_is_undone() -> None:
    @application_scoped
    class Growing(ToolInterceptor):
        growth = 0

        async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
            if "n" not in call.arguments:
                return await proceed(call)
            return await proceed(call.with_arguments(n=call.arguments["n"] + Growing.growth))

    class Tools:
        @tool
        def count(self, n: int) -> str:
            booked.append(n)
            return "counted"

        @compensate_for(count)
        def uncount(self, n: int) -> None:
            undone.append(n)

        @tool
        def fail(self) -> str:
            raise ValueError("no")

    @register_ai_service(tools=Tools, compensate_on_tool_errors=True, durable=True)
    @interceptors(Growing)
    class Counting(Protocol):
        @user_message("{text}")
        async def run(self, run: RunId, text: str) -> Result[str]: ...

    store = Kept()
    store.dies_on = "#r1"

    def program(*replies: Any) -> Container:
        made = Container(models={"default": ScriptedChatModel(replies)}, take_over_runs=False)
        return made.register(Counting, Growing).register_instance(store, as_type=RunStore)

    async with program(tool_call("count", {"n": 1}), FAIL) as here:
        with pytest.raises(RunStoreError):
            await here.get(Counting).run("run", "x")
    store.dies_on, Growing.growth = None, 10
    async with program(FAIL, "sorry") as there:
        result = await there.runs.resume("run", {})

    assert (booked, undone) == ([1], [1])
    assert result.tool_executions[0].arguments == {"n": 1}


async def test_a_killed_process_is_undone_by_another_one_with_what_it_has_paid(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "tests.services.killed_shop", str(tmp_path)]
    killed = await asyncio.create_subprocess_exec(*arguments, cwd=Path(__file__).parents[2])
    assert await asyncio.wait_for(killed.wait(), 120) == -signal.SIGKILL

    async with shop(str(tmp_path), "sorry") as here:
        store: Any = await here.runs.store()
        owned = await store.load("run")
        await store.release("run", owned.generation)  # as if its lease had ended
        result = await here.runs.resume("run", {})
        async with here.request_scope():
            rows = (await (await here.aget(AsyncSession)).execute(text("SELECT * FROM paid"))).all()

    assert [tuple(each) for each in rows] == [(500, "for ann!"), (-500, "for ann!")]
    assert result.tool_executions[0].arguments == {"cents": 500, "note": "for ann!"}
    assert result.tool_executions[0].request.arguments == '{"cents": 5, "note": "a"}'
