"""Approval: calls wait for a person, in memory or in a database, at any depth, and run once."""

import asyncio
import functools
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    ChatResponse,
    Container,
    FinishReason,
    IllegalConfigurationError,
    Inject,
    InvocationContext,
    Result,
    TokenUsage,
    ToolExecutionRequest,
    ToolExecutionResult,
    create_ai_service,
    produces,
    register_ai_service,
    tool,
    tool_executor_from,
)
from toolbox.runs import (
    InMemoryRunStore,
    RunAnswerError,
    RunNotFoundError,
    RunStore,
    RunSuspendedError,
    ToolDeferred,
    approve,
    fail,
    reject,
    respond,
    retry,
)
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, tool_call

from .replies import ANN, BOB, LOOK, REFUND, WRITE_OFF, Refunds, WriteOffs, asks, ran, says

pytestmark = pytest.mark.anyio


@register_ai_service(tools=Refunds)
class Desk(Protocol):
    async def chat(self, text: str) -> Result[str]: ...


def container(*replies: Any, store: RunStore | None = None, services: Any = (Desk,), **options: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, **options).register(*services)
    if store is not None:
        made.register_instance(store, RunStore)
    return made


async def test_a_call_waits_for_approval_while_the_others_of_the_reply_run() -> None:
    async with container(asks(REFUND, LOOK), says("done")) as here:
        result = await here.get(Desk).chat("refund order 7")

        [call] = result.pending
        assert (result.content, result.finish_reason) == (None, FinishReason.TOOL_EXECUTION)
        assert (call.id, call.tool_name, call.arguments, call.kind) == (
            "0",
            "refund",
            {"order": 7, "euros": "12.50"},
            "approval",
        )
        assert ran == [("look", 7)]
        assert result.run_id is not None

        result = await here.runs.resume(result.run_id, {call.id: approve()})

        assert (result.content, result.pending, result.run_id) == ("done", (), None)
        assert ran == [("look", 7), ("refund", 7, Decimal("12.50"))]
        assert [each.result for each in result.tool_executions] == ["refunded 7", "order 7 is paid"]
        assert result.token_usage == TokenUsage(20, 6)


async def test_a_rejected_call_does_not_run_and_the_model_reads_the_reason() -> None:
    model = ScriptedChatModel([asks(REFUND), says("sorry")])
    async with Container(models={"default": model}).register(Desk) as here:
        waiting = await here.get(Desk).chat("refund")
        result = await here.runs.resume(waiting.run_id or "", {"0": reject("over the limit")})

    assert result.content == "sorry"
    assert ran == []
    [execution] = result.tool_executions
    assert (execution.result, execution.is_error) == ("over the limit", True)


async def test_a_run_is_continued_by_another_container_with_the_same_store() -> None:
    store = InMemoryRunStore()
    async with container(asks(REFUND), store=store) as first:
        waiting = await first.get(Desk).chat("refund")
    async with container(says("done"), store=store) as second:
        run = await second.runs.get(waiting.run_id or "")
        assert run.pending == waiting.pending
        result = await second.runs.resume(run.id, {"0": approve()})

    assert result.content == "done"
    assert ran == [("refund", 7, Decimal("12.50"))]


# --- nested services


class Cellar:
    @tool(requires_approval=True)
    async def open(self, bottle: int) -> str:
        ran.append(("open", bottle))
        return f"opened {bottle}"


@register_ai_service(tools=Cellar)
class Sommelier(Protocol):
    @tool
    async def advise(self, wish: str) -> str:
        """Advise."""
        ...


@register_ai_service(tools=Sommelier)
class Waiter(Protocol):
    @tool
    async def serve(self, order: str) -> str:
        """Serve."""
        ...


@register_ai_service(tools=[Waiter, Refunds])
class Restaurant(Protocol):
    async def host(self, text: str) -> Result[str]: ...
    async def plain(self, text: str) -> str: ...


def nested(**options: Any) -> Container:
    serve = tool_call("serve", {"order": "dinner"}, id="same")
    advise = tool_call("advise", {"wish": "red"}, id="same")
    opening = [tool_call("open", {"bottle": n}, id="same") for n in (1, 2)]
    replies = [
        asks(LOOK, serve),
        asks(advise, advise),
        asks(opening[0]),
        asks(opening[1]),
        says("bottle one is open"),
        says("bottle two is open"),
        says("both are served"),
        says("enjoy"),
    ]
    services = (Restaurant, Waiter, Sommelier)
    return container(*replies, services=services, **options)


async def test_pending_calls_of_nested_services_are_listed_flat_with_unique_ids() -> None:
    async with nested() as here:
        result = await here.get(Restaurant).host("dinner")

        assert [(each.id, each.tool_name, each.arguments) for each in result.pending] == [
            ("1/0/0", "open", {"bottle": 1}),
            ("1/1/0", "open", {"bottle": 2}),
        ]
        assert {each.service for each in result.pending} == {f"{__name__}.Sommelier"}


async def test_services_at_any_depth_continue_where_they_stopped_without_asking_again() -> None:
    async with nested() as here:
        waiting = await here.get(Restaurant).host("dinner")
        result = await here.runs.resume(waiting.run_id or "", {each.id: approve() for each in waiting.pending})

    assert result.content == "enjoy"
    assert ran == [("look", 7), ("open", 1), ("open", 2)]


async def test_some_answers_leave_the_run_suspended_with_the_others() -> None:
    async with nested() as here:
        waiting = await here.get(Restaurant).host("dinner")
        run_id = waiting.run_id or ""
        half = await here.runs.resume(run_id, {"1/1/0": approve()})

        assert [each.id for each in half.pending] == ["1/0/0"]
        assert (await here.runs.get(run_id)).pending == half.pending
        assert ran == [("look", 7), ("open", 2)]
        again = await here.runs.resume(run_id, {})
        assert again.pending == half.pending

        result = await here.runs.resume(run_id, {"1/0/0": approve()})
        assert result.content == "enjoy"
        assert ran == [("look", 7), ("open", 2), ("open", 1)]


async def test_other_return_types_raise_the_suspension() -> None:
    async with container(asks(REFUND), says("done"), services=(Restaurant, Waiter, Sommelier)) as here:
        with pytest.raises(RunSuspendedError) as raised:
            await here.get(Restaurant).plain("refund")

        assert [each.id for each in raised.value.pending] == ["0"]
        result = await here.runs.resume(raised.value.run_id, {"0": approve()})
        assert result.content == "done"


# --- answers


async def test_edited_arguments_replace_all_and_are_validated() -> None:
    async with container(asks(REFUND), says("done")) as here:
        run_id = (await here.get(Desk).chat("refund")).run_id or ""

        with pytest.raises(RunAnswerError) as raised:
            await here.runs.resume(run_id, {"0": approve(arguments={"order": "x"})})
        assert [path for path, _ in raised.value.problems] == ["order", "euros"]
        with pytest.raises(RunAnswerError, match="unknown"):
            await here.runs.resume(run_id, {"0": approve(arguments={"order": 7, "euros": 1, "to": "me"})})
        assert (await here.runs.get(run_id)).status == "suspended"

        await here.runs.resume(run_id, {"0": approve(arguments={"order": 8, "euros": "2.50"})})
    assert ran == [("refund", 8, Decimal("2.50"))]


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ({"1": approve()}, "no pending call has the id '1'"),
        ({"same": approve()}, "no pending call"),
        ({"0": respond("x")}, "is not a valid answer"),
        ({"0": retry()}, "is not a valid answer"),
        ({"0": "yes"}, "expected an answer"),
        ({"0": approve(), "7": approve()}, "no pending call has the id '7'"),
    ],
)
async def test_answers_that_do_not_fit_change_nothing(answers: Any, text: str) -> None:
    async with container(asks(REFUND)) as here:
        run_id = (await here.get(Desk).chat("refund")).run_id or ""
        before = await here.runs.get(run_id)
        with pytest.raises(RunAnswerError, match=text):
            await here.runs.resume(run_id, answers)

        assert await here.runs.get(run_id) == before
    assert ran == []


async def test_an_answer_given_twice_is_refused() -> None:
    async with container(asks(REFUND), says("done")) as here:
        run_id = (await here.get(Desk).chat("refund")).run_id or ""
        await here.runs.resume(run_id, {"0": approve()})
        with pytest.raises(RunAnswerError, match="completed"):
            await here.runs.resume(run_id, {"0": approve()})
        with pytest.raises(RunNotFoundError):
            await here.runs.resume("unknown", {"0": approve()})
    assert len(ran) == 1


async def test_of_two_who_answer_at_once_one_wins() -> None:
    async with container(asks(REFUND), says("done")) as here:
        run_id = (await here.get(Desk).chat("refund")).run_id or ""
        answers: list[Any] = [here.runs.resume(run_id, {"0": approve()}) for _ in range(3)]
        results = await asyncio.gather(*answers, return_exceptions=True)

    assert sorted(type(each).__name__ for each in results) == ["Result", "RunAnswerError", "RunAnswerError"]
    assert len(ran) == 1


async def test_answers_of_a_wrong_type_are_refused_where_they_are_made() -> None:
    values = (reject, None), (reject, 5), (fail, b"no"), (approve, ["order"]), (respond, ToolExecutionResult("x"))
    for make, value in values:
        with pytest.raises(TypeError, match=rf"{make.__name__}\(.*expected .* got {type(value).__name__}"):
            make(value)  # type: ignore[operator]  # a wrong type is the point


@pytest.mark.parametrize("answers", [None, [], [("0", approve())], "0"])
async def test_answers_must_be_a_dictionary(answers: Any) -> None:
    async with container(asks(REFUND)) as here:
        run_id = (await here.get(Desk).chat("refund")).run_id or ""
        with pytest.raises(TypeError, match="dictionary of answers"):
            await here.runs.resume(run_id, answers)
        assert (await here.runs.get(run_id)).status == "suspended"


async def test_an_unknown_status_a_negative_limit_and_a_negative_age_are_refused() -> None:
    async with container(asks(REFUND)) as here:
        await here.get(Desk).chat("refund")
        with pytest.raises(ValueError, match="unknown status 'waiting'; use one of: running, suspended"):
            await here.runs.list(status="waiting")  # type: ignore[arg-type]  # a wrong status is the point
        with pytest.raises(ValueError, match="limit=-1"):
            await here.runs.list(limit=-1)
        with pytest.raises(ValueError, match="older_than"):
            await here.runs.purge(timedelta(seconds=-1))
        with pytest.raises(TypeError, match=r"invalid older_than=30; use a datetime\.timedelta"):
            await here.runs.purge(30)  # type: ignore[arg-type]  # the mistake
        assert await here.runs.list(limit=0) == []


async def test_a_store_in_memory_is_registered_without_naming_its_type() -> None:
    store = InMemoryRunStore()
    here = container(asks(REFUND), says("done")).register_instance(store)
    async with here:
        run_id = (await here.get(Desk).chat("refund")).run_id or ""
    async with here:  # a container that starts again keeps the runs of its store
        assert (await here.runs.resume(run_id, {"0": approve()})).content == "done"


# --- who may approve


@register_ai_service(tools=WriteOffs)
class Books(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


async def suspended_by(identity: SecurityIdentity, here: Container) -> str:
    async with here.request_scope({SecurityIdentity: identity}):
        return (await here.get(Books).ask("write off")).run_id or ""


@pytest.mark.parametrize("by", [None, "bob", ANN, SecurityIdentity("carl")])
async def test_only_identities_with_the_role_may_approve(by: Any) -> None:
    async with container(asks(WRITE_OFF), services=(Books,)) as here:
        run_id = await suspended_by(ANN, here)
        with pytest.raises(RunAnswerError):
            await here.runs.resume(run_id, {"0": approve()}, by=by)
        assert (await here.runs.get(run_id)).status == "suspended"
    assert ran == []


@pytest.mark.parametrize("by", [None, "bob", ANN, SecurityIdentity("carl")])
async def test_only_identities_with_the_role_may_reject(by: Any) -> None:
    async with container(asks(WRITE_OFF), services=(Books,)) as here:
        run_id = await suspended_by(ANN, here)
        with pytest.raises(RunAnswerError):
            await here.runs.resume(run_id, {"0": reject("no")}, by=by)
        run = await here.runs.get(run_id)
    assert (run.status, run.history) == ("suspended", ())


async def test_the_person_who_asked_may_not_approve() -> None:
    async with container(asks(WRITE_OFF), services=(Books,)) as here:
        run_id = await suspended_by(BOB, here)
        with pytest.raises(RunAnswerError, match="another person"):
            await here.runs.resume(run_id, {"0": approve()}, by=BOB)
    assert ran == []


async def test_the_tool_sees_who_approved_and_the_history_names_the_person() -> None:
    async with container(asks(WRITE_OFF), says("done"), services=(Books,)) as here:
        run_id = await suspended_by(ANN, here)
        await here.runs.resume(run_id, {"0": approve()}, by=BOB)
        run = await here.runs.get(run_id)

    assert ran == [("write_off", 7, BOB)]
    [entry] = run.history
    assert (entry.by, entry.call_id, entry.tool_name, entry.answer, entry.reason) == (
        "bob",
        "0",
        "write_off",
        "approve",
        None,
    )
    assert run.status == "completed"


async def test_tools_without_approval_have_no_approver() -> None:
    seen: list[Any] = []

    @tool
    def plain(context: InvocationContext) -> str:
        seen.append(context.approved_by)
        return "ok"

    @register_ai_service(tools=plain)
    class Plain(Protocol):
        async def ask(self, text: str) -> str: ...

    async with container(asks(tool_call("plain")), says("done"), services=(Plain,)) as here:
        await here.get(Plain).ask("x")
    assert seen == [None]


# --- approval functions


@pytest.mark.parametrize("kind", ["def", "async def", "lambda", "object", "partial"])
async def test_a_function_decides_about_approval_from_arguments_with_defaults(kind: str) -> None:
    seen: list[Any] = []

    def decide(arguments: dict[str, Any], context: InvocationContext) -> bool:
        seen.append((arguments, context.request is not None))
        return bool(arguments["euros"] > 100)

    async def decide_later(arguments: dict[str, Any], context: InvocationContext) -> bool:
        return decide(arguments, context)

    class DecidesLater:
        async def __call__(self, arguments: dict[str, Any], context: InvocationContext) -> bool:
            return decide(arguments, context)

    rules: dict[str, Any] = {
        "def": decide,
        "async def": decide_later,
        "lambda": lambda arguments, context: decide_later(arguments, context),
        "object": DecidesLater(),
        "partial": functools.partial(decide_later),
    }

    @tool(requires_approval=rules[kind])
    def pay(euros: int, to: str = "the shop") -> str:
        ran.append(euros)
        return "paid"

    @register_ai_service(tools=pay)
    class Payments(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    calls = tool_call("pay", {"euros": 5}), tool_call("pay", {"euros": 500})
    async with container(asks(*calls), says("done"), services=(Payments,)) as here:
        result = await here.get(Payments).ask("pay")
        assert [(each.id, each.arguments) for each in result.pending] == [("1", {"euros": 500, "to": "the shop"})]
        assert ran == [5]
        await here.runs.resume(result.run_id or "", {"1": approve()})

    assert ran == [5, 500]
    assert seen == [({"euros": 5, "to": "the shop"}, True), ({"euros": 500, "to": "the shop"}, True)]


async def test_an_approval_function_that_raises_asks_for_approval(caplog: pytest.LogCaptureFixture) -> None:
    def broken(arguments: dict[str, Any], context: InvocationContext) -> bool:
        raise LookupError("no limits")

    @tool(requires_approval=broken)
    def pay(euros: int) -> str:
        ran.append(euros)
        return "paid"

    @register_ai_service(tools=pay)
    class Payments(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("pay", {"euros": 5})), services=(Payments,)) as here:
        result = await here.get(Payments).ask("pay")

    assert len(result.pending) == 1
    assert ran == []
    assert "no limits" in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"requires_approval": lambda: True},
        {"approvers": ("manager",)},
        {"not_self": True},
        {"requires_approval": True, "approvers": "manager"},
        {"requires_approval": True, "not_self": "yes"},
        {"deferred": "x"},
        {"deferred": 1},
        {"on_unknown_outcome": "guess"},
    ],
)
def test_invalid_options_are_refused_where_they_are_written(options: Any) -> None:
    with pytest.raises(TypeError, match="@tool"):
        tool(**options)


# --- deferred results


class Warehouse:
    @tool(deferred=True)
    async def stock(self, item: str) -> int:
        ran.append(("stock", item))
        if item == "known":
            return 3
        raise ToolDeferred(reason="asked by mail", attributes={"ticket": 7})

    @tool
    def impatient(self) -> str:
        raise ToolDeferred()


@register_ai_service(tools=Warehouse)
class Stock(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


STOCK = tool_call("stock", {"item": "unknown"})


@pytest.mark.parametrize(("answer", "text", "is_error"), [(respond(12), "12", False), (fail("closed"), "closed", True)])
async def test_the_result_of_a_deferred_call_comes_later(answer: Any, text: str, is_error: bool) -> None:
    async with container(asks(STOCK), says("done"), services=(Stock,)) as here:
        waiting = await here.get(Stock).ask("how many?")
        [call] = waiting.pending
        assert (call.kind, call.reason, call.attributes) == ("deferred", "asked by mail", {"ticket": 7})
        result = await here.runs.resume(waiting.run_id or "", {call.id: answer})

    [execution] = result.tool_executions
    assert (execution.result, execution.is_error) == (text, is_error)
    assert ran == [("stock", "unknown")]


@pytest.mark.parametrize("name", ["later", "other"])
def test_a_deferred_tool_without_a_service_cannot_defer_whatever_name_the_request_has(name: str) -> None:
    @tool(deferred=True)
    def later() -> str:
        raise ToolDeferred(reason="later")

    with pytest.raises(IllegalConfigurationError, match="later: raised ToolDeferred in a call without a run"):
        tool_executor_from(later)(ToolExecutionRequest("1", name, "{}"), None)


async def test_only_deferred_tools_may_defer() -> None:
    async with container(asks(tool_call("impatient")), services=(Stock,)) as here:
        with pytest.raises(IllegalConfigurationError, match="deferred=True"):
            await here.get(Stock).ask("x")


async def test_answers_that_do_not_fit_a_deferred_call_are_rejected() -> None:
    async with container(asks(STOCK), services=(Stock,)) as here:
        run_id = (await here.get(Stock).ask("x")).run_id or ""
        with pytest.raises(RunAnswerError, match="is not a valid answer"):
            await here.runs.resume(run_id, {"0": approve()})
        with pytest.raises(RunAnswerError, match="JSON"):
            await here.runs.resume(run_id, {"0": respond(object())})


async def test_a_deferred_tool_may_also_need_approval() -> None:
    @tool(deferred=True, requires_approval=True)
    def ask_bank(euros: int) -> str:
        ran.append(euros)
        raise ToolDeferred

    @register_ai_service(tools=ask_bank)
    class Bank(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("ask_bank", {"euros": 5})), says("done"), services=(Bank,)) as here:
        waiting = await here.get(Bank).ask("x")
        assert [each.kind for each in waiting.pending] == ["approval"]
        waiting = await here.runs.resume(waiting.run_id or "", {"0": approve(arguments={"euros": 6})})
        assert [(each.kind, each.arguments) for each in waiting.pending] == [("deferred", {"euros": 6})]
        assert ran == [6]
        result = await here.runs.resume(waiting.run_id or "", {"0": respond("granted")})

    assert result.tool_executions[0].result == "granted"
    assert ran == [6]


async def test_the_call_scope_of_a_deferred_call_ends_normally() -> None:
    ends: list[Any] = []

    class Ticket: ...

    @produces(scope="call")
    def ticket() -> Iterator[Ticket]:
        try:
            yield Ticket()
        except BaseException as error:
            ends.append(error)
            raise
        ends.append("ended")

    @tool(deferred=True)
    def later(ticket: Inject[Ticket]) -> str:
        raise ToolDeferred

    @tool(deferred=True)
    async def later_async(ticket: Inject[Ticket]) -> str:
        raise ToolDeferred

    @register_ai_service(tools=[later, later_async])
    class Bank(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("later"), tool_call("later_async")), services=(Bank, ticket)) as here:
        waiting = await here.get(Bank).ask("x")

    assert len(waiting.pending) == 2
    assert ends == ["ended", "ended"]


async def test_tools_may_not_defer_in_a_service_without_deferred_tools_and_without_a_container() -> None:
    class Shop:
        @tool
        def order(self) -> str:
            raise ToolDeferred(reason="later")

    class PlainDesk(Protocol):
        async def ask(self, question: str) -> str: ...

    model = ScriptedChatModel([tool_call("order")])
    desk = create_ai_service(PlainDesk, chat_model=model, tools=[Shop()])

    with pytest.raises(IllegalConfigurationError, match="deferred=True"):
        await desk.ask("order")


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_rule_that_returns_a_text_asks_for_approval_and_gives_the_reason(is_async: bool) -> None:
    def decide(arguments: dict[str, Any], context: InvocationContext) -> bool | str:
        return {5: False, 50: "", 500: "above 100 euros"}[arguments["euros"]]

    async def decide_later(arguments: dict[str, Any], context: InvocationContext) -> bool | str:
        return decide(arguments, context)

    @tool(requires_approval=decide_later if is_async else decide)
    def pay(euros: int) -> str:
        ran.append(euros)
        return "paid"

    @register_ai_service(tools=pay)
    class Payments(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    calls = [tool_call("pay", {"euros": euros}, id=f"c{euros}") for euros in (5, 50, 500)]
    async with container(asks(*calls), says("done"), services=(Payments,)) as here:
        result = await here.get(Payments).ask("pay")

        assert ran == [5]
        assert [(each.id, each.call_id, each.reason) for each in result.pending] == [
            ("1", "c50", None),
            ("2", "c500", "above 100 euros"),
        ]
        await here.runs.resume(result.run_id or "", {each.id: approve() for each in result.pending})

    assert ran == [5, 50, 500]


@register_ai_service(tools=Refunds)
class InnerDesk(Protocol):
    @tool
    async def handle(self, order: str) -> str:
        """Handle an order."""
        ...


@register_ai_service(tools=[InnerDesk, Refunds])
class OuterDesk(Protocol):
    async def chat(self, text: str) -> Result[str]: ...


async def test_a_pending_call_has_the_id_that_the_model_gave_its_call_at_any_depth_and_after_the_store() -> None:
    store = InMemoryRunStore()
    replies = asks(tool_call("handle", {"order": "7"}, id="outer"), REFUND), asks(REFUND)
    async with container(*replies, store=store, services=(OuterDesk,)) as here:
        result = await here.get(OuterDesk).chat("refund")

    assert sorted((each.id, each.call_id) for each in result.pending) == [("0/0", "same"), ("1", "same")]

    async with container(store=store, services=(OuterDesk,)) as other:
        assert (await other.runs.get(result.run_id or "")).pending == result.pending


async def test_the_result_has_the_id_of_the_last_reply() -> None:
    first = ChatResponse(AiMessage(None, (REFUND,)), id="r1")
    async with container(first, ChatResponse(AiMessage("done"), id="r2"), says("no id")) as here:
        result = await here.get(Desk).chat("refund order 7")
        assert result.response_id == "r1"

        resumed = await here.runs.resume(result.run_id or "", {"0": approve()})
        assert (resumed.content, resumed.response_id) == ("done", "r2")

        assert (await here.get(Desk).chat("hello")).response_id is None
