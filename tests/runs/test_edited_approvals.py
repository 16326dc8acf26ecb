"""A person changes arguments before approving a call: exactly what the person changed is another value then."""

from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Protocol

import pytest
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from toolbox import (
    Container,
    InvocationContext,
    Result,
    application_scoped,
    compensate_for,
    register_ai_service,
    tool,
    user_message,
)
from toolbox.errors import RunIncompatibleError, RunStoreError
from toolbox.guardrails import GuardrailResult, ToolInputGuardrail, ToolInputGuardrailRequest, tool_input_guardrails
from toolbox.interceptors import ToolInterceptor, ToolInvocation, ToolProceed, interceptors
from toolbox.runs import InMemoryRunStore, RunAnswerError, RunId, RunStore, approve
from toolbox.testing import ScriptedChatModel, tool_call

from .replies import ran

pytestmark = pytest.mark.anyio

Cents = Annotated[int, BeforeValidator(lambda euros: int(Decimal(str(euros)) * 100))]
"""An amount in cents, which a model writes in euros. Validating it twice multiplies it twice."""


def parse_amount(text: Any) -> int:
    if not isinstance(text, str):
        raise TypeError("write it as 5 EUR")
    return int(text.removesuffix(" EUR"))


class Ask(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


def desk(*tools: Any, **options: Any) -> Any:
    """Return a service with these tools. Services of different programs have the same name."""

    class Desk(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    Desk.__qualname__ = "Desk"
    return register_ai_service(tools=tools, **options)(Desk)


def program(service: Any, store: RunStore, *replies: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, take_over_runs=False)
    return made.register(service).register_instance(store, as_type=RunStore)


async def suspend(service: Any, call: Any, store: RunStore) -> tuple[str, dict[str, Any]]:
    """Call a service whose tool waits for approval. Return the id of the run and the arguments that a person sees."""
    async with program(service, store, call) as here:
        waiting = await here.get(service).ask("x")
        [pending] = waiting.pending
    return waiting.run_id or "", dict(pending.arguments)


async def answer(service: Any, store: RunStore, run_id: str, given: Any) -> Result[Any]:
    """Answer in another process."""
    async with program(service, store, "done") as here:
        return await here.runs.resume(run_id, {"0": given})


def paying(**options: Any) -> Any:
    @tool(requires_approval=True, **options)
    def pay(cents: Cents, note: str = "none") -> str:
        ran.append((cents, note))
        return "paid"

    return pay


# --- validators that change a value each time


@pytest.mark.parametrize("written", [5, "5", 5.0])
@pytest.mark.parametrize("sent", [500, "500"])
async def test_an_argument_that_is_sent_as_shown_keeps_its_value(written: Any, sent: Any) -> None:
    service, store = desk(paying()), InMemoryRunStore()
    run_id, shown = await suspend(service, tool_call("pay", {"cents": written}), store)
    assert shown == {"cents": 500, "note": "none"}

    result = await answer(service, store, run_id, approve(arguments={"cents": sent, "note": "for ann"}))

    assert ran == [(500, "for ann")]
    assert result.tool_executions[0].arguments == {"cents": 500, "note": "for ann"}


async def test_a_changed_argument_that_the_tool_would_not_get_as_it_was_sent_is_refused() -> None:
    service, store = desk(paying()), InMemoryRunStore()
    run_id, _ = await suspend(service, tool_call("pay", {"cents": 5}), store)

    with pytest.raises(RunAnswerError, match="another value") as raised:
        await answer(service, store, run_id, approve(arguments={"cents": 300, "note": "none"}))

    assert [path for path, _ in raised.value.problems] == ["cents"]
    assert ran == []
    await answer(service, store, run_id, approve(arguments={"cents": 500, "note": "x"}))
    assert ran == [(500, "x")]


async def test_an_argument_that_is_left_out_gets_its_default() -> None:
    service, store = desk(paying()), InMemoryRunStore()
    run_id, _ = await suspend(service, tool_call("pay", {"cents": 5, "note": "ann"}), store)
    await answer(service, store, run_id, approve(arguments={"cents": 500}))
    assert ran == [(500, "none")]


async def test_an_approval_without_changes_validates_no_shown_value_again() -> None:
    """The default of `at` differs in each process, and the tool gets the one that the person saw."""
    times = iter([datetime(2026, 1, day, tzinfo=UTC) for day in range(1, 20)])

    @tool(requires_approval=True)
    def pay(cents: Cents, at: Annotated[datetime, Field(default_factory=lambda: next(times))]) -> str:
        ran.append((cents, at.isoformat()))
        return "paid"

    service, store = desk(pay), InMemoryRunStore()
    run_id, shown = await suspend(service, tool_call("pay", {"cents": 5}), store)
    await answer(service, store, run_id, approve())
    assert ran == [(500, shown["at"].replace("Z", "+00:00"))]


@pytest.mark.parametrize("given", [approve(), approve(arguments={"amount": 5, "note": "x"})], ids=["approve", "edit"])
async def test_a_validator_that_refuses_its_own_values_does_not_refuse_the_answer(given: Any) -> None:
    @tool(requires_approval=True)
    def pay(amount: Annotated[int, BeforeValidator(parse_amount)], note: str = "none") -> str:
        ran.append((amount, note))
        return "paid"

    service, store = desk(pay), InMemoryRunStore()
    run_id, _ = await suspend(service, tool_call("pay", {"amount": "5 EUR"}), store)
    await answer(service, store, run_id, given)
    assert ran == [(5, "none" if given.arguments is None else "x")]


async def test_the_arguments_of_a_service_that_is_a_tool_are_kept_while_it_waits_inside() -> None:
    @tool(requires_approval=True)
    def sign() -> str:
        ran.append("signed")
        return "signed"

    @register_ai_service(tools=sign)
    class Payer(Protocol):
        @tool(requires_approval=True)
        @user_message("Pay {cents} cents: {note}")
        async def pay(self, cents: Cents, note: str = "none") -> str:
            """Pay."""
            ...

    service, store = desk(Payer), InMemoryRunStore()
    run_id, _ = await suspend(service, tool_call("pay", {"cents": 5}), store)
    model = ScriptedChatModel([tool_call("sign"), "inner", "done"])
    made = Container(models={"default": model}, take_over_runs=False).register(service, Payer)
    async with made.register_instance(store, as_type=RunStore) as here:
        waiting = await here.runs.resume(run_id, {"0": approve(arguments={"cents": 500, "note": "ann"})})
        result = await here.runs.resume(run_id, {waiting.pending[0].id: approve()})

    assert model.requests[0].messages[-1].text == "Pay 500 cents: ann"
    assert result.tool_executions[0].arguments == {"cents": 500, "note": "ann"}
    assert ran == ["signed"]


# --- what counts as the value that was sent


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Line(BaseModel):
    cents: Cents
    text: str = ""
    tags: frozenset[str] = frozenset()


class Order(BaseModel):
    lines: list[Line]
    express: bool = False


@pytest.mark.parametrize(
    ("kind", "first", "sent", "expected"),
    [
        (Decimal, "1", 2.5, Decimal("2.5")),
        (Decimal, "1", "2.50", Decimal("2.50")),
        (float, 1, "2.50", 2.5),
        (int, 1, 2.0, 2),
        (str, "a", "007", "007"),
        (datetime, "2026-01-01T00:00:00Z", "2026-01-02T01:00:00.000+01:00", datetime(2026, 1, 2, tzinfo=UTC)),
        (Color, "red", "BLUE", Color.BLUE),
        (frozenset[int], [1], [3, 2, 1], frozenset({1, 2, 3})),
        (list[Decimal], [1], [2, "3.5"], [Decimal(2), Decimal("3.5")]),
        (dict[str, float], {}, {"a": 1, "b": "2"}, {"a": 1.0, "b": 2.0}),
        (int | None, 1, None, None),
    ],
)
async def test_a_value_that_is_read_as_it_was_sent_is_accepted(kind: Any, first: Any, sent: Any, expected: Any) -> None:
    def pay(value: Any) -> str:
        ran.append(value)
        return "paid"

    pay.__annotations__["value"] = kind
    service, store = desk(tool(requires_approval=True)(pay)), InMemoryRunStore()
    run_id, _ = await suspend(service, tool_call("pay", {"value": first}), store)
    await answer(service, store, run_id, approve(arguments={"value": sent}))
    assert ran == [expected]
    assert type(ran[0]) is type(expected)


@pytest.mark.parametrize(
    ("kind", "first", "sent", "path"),
    [
        (Annotated[int, AfterValidator(lambda value: min(value, 100))], 1, 500, "value"),
        (Annotated[str, AfterValidator(str.upper)], "a", "b", "value"),
        (Annotated[list[str], AfterValidator(lambda value: value[::-1])], ["a"], ["b", "c"], "value.0"),
        (Order, {"lines": [{"cents": 1}]}, {"lines": [{"cents": 2, "text": ""}]}, "value.lines.0.cents"),
        (Order, {"lines": []}, {"lines": [], "expres": True}, "value.expres"),
        (Annotated[bool, BeforeValidator(lambda value: not value)], True, True, "value"),
        (int, 2, True, "value"),
        (float | None, 2.5, False, "value"),
        (dict[str, list[int]], {}, {"a": [1, True]}, "value.a.1"),
    ],
)
async def test_a_value_that_is_read_as_another_one_is_refused(kind: Any, first: Any, sent: Any, path: str) -> None:
    def pay(value: Any) -> str:
        ran.append(value)
        return "paid"

    pay.__annotations__["value"] = kind
    service, store = desk(tool(requires_approval=True)(pay)), InMemoryRunStore()
    run_id, _ = await suspend(service, tool_call("pay", {"value": first}), store)
    with pytest.raises(RunAnswerError) as raised:
        await answer(service, store, run_id, approve(arguments={"value": sent}))
    assert path in [each for each, _ in raised.value.problems]
    assert ran == []


async def test_a_model_among_the_arguments_is_changed_as_a_whole_and_may_leave_out_defaults() -> None:
    class Plain(BaseModel):
        cents: int
        tags: frozenset[str] = frozenset()
        text: str = "-"

    @tool(requires_approval=True)
    def pay(order: Plain) -> str:
        ran.append(order)
        return "paid"

    service, store = desk(pay), InMemoryRunStore()
    run_id, _ = await suspend(service, tool_call("pay", {"order": {"cents": 5}}), store)
    tags = [f"tag {n}" for n in range(20)]
    await answer(service, store, run_id, approve(arguments={"order": {"cents": 6, "tags": tags}}))
    assert ran == [Plain(cents=6, tags=frozenset(tags))]


# --- guardrails


class TenTimes(ToolInputGuardrail):
    """Makes ten times the amount, and a note without numbers."""

    seen: list[Any] = []  # noqa: RUF012 - cleared by the tests

    def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
        self.seen.append(dict(request.arguments))
        note = "".join(each for each in request.arguments["note"] if not each.isdigit())
        return self.success_with({**request.arguments, "cents": request.arguments["cents"] * 10, "note": note})


@tool(requires_approval=True)
@tool_input_guardrails(TenTimes)
def pay_tenfold(cents: Cents, note: str = "none") -> str:
    ran.append((cents, note))
    return "paid"


async def test_a_guardrail_that_rewrites_does_not_rewrite_again_what_the_person_left_alone() -> None:
    TenTimes.seen.clear()
    service, store = desk(pay_tenfold), InMemoryRunStore()
    run_id, shown = await suspend(service, tool_call("pay_tenfold", {"cents": 5}), store)
    # 5 euros are 500 cents, ten times that are 5,000 euros for the validator.
    assert shown == {"cents": 500_000, "note": "none"}

    await answer(service, store, run_id, approve(arguments={**shown, "note": "card 4111"}))

    assert ran == [(500_000, "card ")]
    assert TenTimes.seen[-1] == {"cents": 500_000, "note": "card 4111"}


async def test_a_plain_approval_of_rewritten_arguments_runs_with_them() -> None:
    service, store = desk(pay_tenfold), InMemoryRunStore()
    run_id, shown = await suspend(service, tool_call("pay_tenfold", {"cents": 5}), store)
    await answer(service, store, run_id, approve())
    assert ran == [(shown["cents"], shown["note"])]


class Refusing(ToolInputGuardrail):
    def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
        if request.arguments["note"] == "bad":
            return self.failure("bad note")
        return self.success_with({**request.arguments, "cents": request.arguments["cents"] + 1})


async def test_a_guardrail_judges_what_the_person_changed_in_rewritten_arguments() -> None:
    @tool(requires_approval=True)
    @tool_input_guardrails(Refusing)
    def pay(cents: int, note: str = "none") -> str:
        ran.append((cents, note))
        return "paid"

    service, store = desk(pay), InMemoryRunStore()
    run_id, shown = await suspend(service, tool_call("pay", {"cents": 5}), store)
    result = await answer(service, store, run_id, approve(arguments={**shown, "note": "bad"}))
    assert result.tool_executions[0].result == "Input validation failed: bad note"
    assert result.tool_executions[0].arguments == {}
    assert ran == []


class Renaming(ToolInputGuardrail):
    """Rewrites another argument than the order, whose validator adds a fee."""

    def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
        return self.success_with({**request.arguments, "note": "masked"})


async def test_a_guardrail_that_rewrites_one_argument_does_not_validate_the_others_again() -> None:
    class Fee(BaseModel):
        cents: int

    def add_fee(order: Fee) -> Fee:
        return Fee(cents=order.cents + 100)

    @tool
    @tool_input_guardrails(Renaming)
    def pay(order: Annotated[Fee, AfterValidator(add_fee)], boxes: list[Cents], note: str = "none") -> str:
        ran.append((order.cents, boxes, note))
        return "paid"

    service, store = desk(pay), InMemoryRunStore()
    call = tool_call("pay", {"order": {"cents": 5}, "boxes": [1], "note": "4111"})
    async with program(service, store, call, "done") as here:
        await here.get(service).ask("x")
    assert ran == [(105, [100], "masked")]


# --- interceptors


@application_scoped
class Doubling(ToolInterceptor):
    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> Any:
        return await proceed(call.with_arguments(euros=call.arguments["euros"] * 2))


@tool(requires_approval=True)
@interceptors(Doubling)
def pay_double(euros: int, note: str = "none") -> str:
    ran.append((euros, note))
    return "paid"


async def test_an_edit_of_what_an_interceptor_made_is_not_doubled_again() -> None:
    service, store = desk(pay_double), InMemoryRunStore()
    run_id, _ = await suspend(service, tool_call("pay_double", {"euros": 5}), store)
    waiting = await answer(service, store, run_id, approve())
    assert [each.arguments for each in waiting.pending] == [{"euros": 10, "note": "none"}]

    result = await answer(service, store, run_id, approve(arguments={"euros": 10, "note": "ann"}))

    assert ran == [(10, "ann")]
    assert result.tool_executions[0].arguments == {"euros": 10, "note": "ann"}


async def test_an_edit_before_an_interceptor_is_shown_again_as_the_interceptor_makes_it() -> None:
    service, store = desk(pay_double), InMemoryRunStore()
    run_id, _ = await suspend(service, tool_call("pay_double", {"euros": 5}), store)
    waiting = await answer(service, store, run_id, approve(arguments={"euros": 6, "note": "ann"}))
    assert [each.arguments for each in waiting.pending] == [{"euros": 12, "note": "ann"}]
    await answer(service, store, run_id, approve())
    assert ran == [(12, "ann")]


async def test_two_edits_of_one_call_are_used_where_they_were_asked_for() -> None:
    service, store = desk(pay_double), InMemoryRunStore()
    run_id, _ = await suspend(service, tool_call("pay_double", {"euros": 5}), store)
    await answer(service, store, run_id, approve(arguments={"euros": 6, "note": "ann"}))
    await answer(service, store, run_id, approve(arguments={"euros": 7, "note": "bob"}))
    assert ran == [(7, "bob")]


# --- programs that change, processes that die


def capped(limit: int, requires_approval: Any = True) -> Any:
    class Cap(ToolInputGuardrail):
        def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
            if request.arguments["euros"] <= limit:
                return self.success()
            return self.success_with({**request.arguments, "euros": limit})

    @tool(requires_approval=requires_approval)
    @tool_input_guardrails(Cap)
    def pay(euros: int, note: str = "none") -> str:
        ran.append((euros, note))
        return "paid"

    return desk(pay)


def never(arguments: dict[str, Any], context: InvocationContext) -> bool:
    return False


@pytest.mark.parametrize("rule", [True, False, never], ids=["approval", "no approval", "rule"])
async def test_an_edit_of_arguments_that_do_not_come_again_is_not_ignored(rule: Any) -> None:
    store = InMemoryRunStore()
    run_id, shown = await suspend(capped(100), tool_call("pay", {"euros": 500}), store)
    assert shown == {"euros": 100, "note": "none"}

    waiting = await answer(capped(200, rule), store, run_id, approve(arguments={"euros": 20, "note": "none"}))
    assert [each.arguments for each in waiting.pending] == [{"euros": 200, "note": "none"}]
    assert ran == []
    await answer(capped(200, rule), store, run_id, approve())
    assert ran == [(200, "none")]


@pytest.mark.parametrize("rule", [True, False, never], ids=["approval", "no approval", "rule"])
async def test_an_edit_of_what_a_guardrail_rewrote_holds_for_a_tool_that_needs_no_approval_any_more(rule: Any) -> None:
    store = InMemoryRunStore()
    run_id, _ = await suspend(capped(100), tool_call("pay", {"euros": 500}), store)
    await answer(capped(100, rule), store, run_id, approve(arguments={"euros": 20, "note": "ann"}))
    assert ran == [(20, "ann")]


def chosen(allowed: Callable[[str], bool]) -> Any:
    def check(color: str) -> str:
        if not allowed(color):
            raise ValueError("unknown color")
        return color

    @tool(requires_approval=True)
    def paint(color: Annotated[str, AfterValidator(check)]) -> str:
        ran.append(color)
        return "painted"

    return desk(paint)


async def test_an_edit_that_a_program_does_not_accept_is_left_to_another_program() -> None:
    class Dying(InMemoryRunStore):
        dies = True

        async def append(self, *args: Any) -> int:
            if self.dies:
                raise ConnectionError("the process died")
            return await super().append(*args)

    store, newer, older = Dying(), chosen(lambda color: True), chosen(lambda color: color == "red")
    run_id, _ = await suspend(newer, tool_call("paint", {"color": "red"}), store)
    with pytest.raises(RunStoreError):
        await answer(newer, store, run_id, approve(arguments={"color": "mauve"}))
    store.dies = False
    async with program(older, store, "done") as here:
        with pytest.raises(RunIncompatibleError, match="no longer accepts the arguments of an approval"):
            await here.runs.resume(run_id, {})
        assert (await here.runs.get(run_id)).status == "running"
    async with program(newer, store, "done") as here:
        await here.runs.resume(run_id, {})
    assert ran == ["mauve"]


class Kept(InMemoryRunStore):
    """A store whose process dies before it writes the record `dies_on`."""

    persistent = True
    dies_on: str | None = None

    async def append(self, run_id: str, generation: int, records: Any, *args: Any) -> int:
        if any(each.key == self.dies_on for each in records):
            raise ConnectionError("the process died")
        return await super().append(run_id, generation, records, *args)


class Till:
    @tool(requires_approval=True, on_unknown_outcome="retry")
    def pay(self, cents: Cents, note: str = "none") -> str:
        ran.append((cents, note))
        return "paid"

    @compensate_for(pay)
    def pay_back(self, cents: Cents, note: str) -> None:
        ran.append(("back", cents, note))

    @tool
    def fail(self) -> str:
        raise ValueError("no")


@register_ai_service(tools=Till, durable=True, compensate_on_tool_errors=True)
class Durable(Protocol):
    @user_message("{text}")
    async def ask(self, run: RunId, text: str) -> Result[str]: ...


@pytest.mark.parametrize("dies_on", ["0#start", "0", "#r1", "#r2", "0.0"])
async def test_an_edited_call_of_a_durable_run_keeps_its_values_whenever_the_process_dies(dies_on: str) -> None:
    store, fail = Kept(), tool_call("fail")
    async with program(Durable, store, tool_call("pay", {"cents": 5})) as here:
        await here.get(Durable).ask("run", "x")
    store.dies_on = dies_on
    async with program(Durable, store, fail, "done") as here:
        with pytest.raises(RunStoreError):
            await here.runs.resume("run", {"0": approve(arguments={"cents": 500, "note": "ann"})})
    store.dies_on = None
    left = ["done"] if dies_on in ("#r2", "0.0") else [fail, "done"]
    async with program(Durable, store, *left) as here:
        result = await here.runs.resume("run", {})

    assert set(ran) == {(500, "ann"), ("back", 500, "ann")}
    assert result.tool_executions[0].arguments == {"cents": 500, "note": "ann"}
    assert result.compensations[0].arguments == {"cents": 500, "note": "ann"}
