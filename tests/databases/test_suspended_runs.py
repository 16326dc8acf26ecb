"""Suspended runs in each kind of store: answers of another process, races, people without rights, hostile input."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from decimal import Decimal
from traceback import format_exception
from typing import Any, Protocol

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from tests.runs.replies import ANN, BOB, LOOK, REFUND, WRITE_OFF, Refunds, WriteOffs, asks, ran
from toolbox import (
    Container,
    MemoryId,
    Result,
    UnknownToolError,
    register_ai_service,
    sql,
    tool,
)
from toolbox.guardrails import GuardrailResult, ToolInputGuardrail, ToolInputGuardrailRequest, tool_input_guardrails
from toolbox.interceptors import ToolInterceptor, ToolInvocation, ToolProceed, interceptors
from toolbox.runs import (
    Answer,
    ConversationSuspendedError,
    InMemoryRunStore,
    RunAnswerError,
    RunId,
    RunNotFoundError,
    RunStore,
    RunStoreError,
    RunSuspendedError,
    approve,
    fail,
    reject,
    respond,
)
from toolbox.security import SecurityIdentity, roles_allowed
from toolbox.sql import SqlRunStore
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]  # starts processes

SECRET = "sk-this-is-secret-0123456789abcdef"


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


class NotTooMuch(ToolInputGuardrail):
    def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
        return self.success() if request.arguments["euros"] <= 100 else self.failure("more than 100 euros")


class GuardedRefunds(Refunds):
    @tool(requires_approval=True)
    @tool_input_guardrails(NotTooMuch)
    def refund(self, order: int, euros: Decimal) -> str:
        return super().refund(order, euros)


@register_ai_service(tools=[GuardedRefunds, WriteOffs])
class Clerk(Protocol):
    @tool
    async def delegate(self, wish: str) -> str: ...


@register_ai_service(tools=[GuardedRefunds, WriteOffs, Clerk])
class Desk(Protocol):
    async def chat(self, room: MemoryId[str], wish: str) -> Result[str]: ...
    async def ask(self, wish: str) -> Result[str]: ...


DELEGATE = tool_call("delegate", {"wish": "inner"}, id="same")

Start = Callable[..., Any]


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def start(request: pytest.FixtureRequest) -> Start:
    """Starts containers that share one store; with a database, each has its own connections, like a process."""
    memory = InMemoryRunStore()
    url = None
    if request.param != "memory":
        url = request.getfixturevalue("sqlite_runs_url" if request.param == "sqlite" else "postgres_runs_url")

    @asynccontextmanager
    async def started(*replies: Any, services: Any = (Desk, Clerk), **options: Any) -> AsyncIterator[Container]:
        async with AsyncExitStack() as stack:
            store: Any = memory
            if url is not None:
                store = SqlRunStore(await stack.enter_async_context(sql.open_engine(url)))
            model = ScriptedChatModel(replies)
            made = Container(models={"default": model}, **{"seeds": [SecurityIdentity], **options})
            yield await stack.enter_async_context(made.register(*services).register_instance(store, RunStore))

    return started


async def suspended(start: Start, *calls: Any, by: SecurityIdentity | None = None) -> str:
    async with start(asks(*calls)) as here, here.request_scope({SecurityIdentity: by} if by is not None else {}):
        result = await here.get(Desk).ask("x")
    assert result.content is None
    return str(result.run_id)


# --- answers of another process


async def test_another_process_answers_a_nested_call_and_nothing_runs_twice(start: Start) -> None:
    async with start(asks(LOOK, DELEGATE, REFUND), asks(LOOK, REFUND)) as here:
        result = await here.get(Desk).ask("outer")
    assert [(each.id, each.tool_name) for each in result.pending] == [("1/1", "refund"), ("2", "refund")]
    assert ran == [("look", 7), ("look", 7)]

    async with start("inner done") as here:
        result = await here.runs.resume(result.run_id, {"1/1": approve()}, by="bob")
        assert [each.id for each in result.pending] == ["2"]
        assert ran[2:] == [("refund", 7, Decimal("12.50"))]
    async with start("outer done") as here:
        answers = {"2": approve(arguments={"order": 8, "euros": 1})}
        result = await here.runs.resume(result.run_id, answers, by=BOB)
        assert result.content == "outer done"
        run = await here.runs.get(result.run_id or (await here.runs.list())[0].id)
    assert ran[3:] == [("refund", 8, Decimal(1))]
    assert (run.status, [(each.by, each.answer) for each in run.history]) == (
        "completed",
        [("bob", "approve"), ("bob", "approve")],
    )


async def test_pending_calls_are_the_same_before_and_after_the_store(start: Start) -> None:
    async with start(asks(REFUND)) as here:
        result = await here.get(Desk).ask("x")
    async with start() as here:
        assert (await here.runs.get(result.run_id)).pending == result.pending
        assert result.pending[0].arguments == {"order": 7, "euros": "12.50"}


async def test_of_two_processes_that_answer_at_once_one_wins(start: Start) -> None:
    run_id = await suspended(start, REFUND)
    async with start("done") as one, start("done") as other:
        answers = {"0": approve()}
        results = await asyncio.gather(
            one.runs.resume(run_id, answers), other.runs.resume(run_id, answers), return_exceptions=True
        )
    assert sorted(type(each).__name__ for each in results) == ["Result", "RunAnswerError"]
    assert len(ran) == 1


async def test_a_conversation_waits_for_its_suspended_run_in_each_process(start: Start) -> None:
    async with start(asks(REFUND)) as here:
        run_id = (await here.get(Desk).chat("room", "x")).run_id
    async with start("done", "again") as here:
        with pytest.raises(ConversationSuspendedError) as raised:
            await here.get(Desk).chat("room", "y")
        assert raised.value.run_id == run_id
        assert (await here.get(Desk).chat("other room", "y")).content == "done"
        await here.runs.cancel(run_id, "not needed")
        assert (await here.get(Desk).chat("room", "y")).content == "again"


async def test_ended_runs_are_purged_and_suspended_ones_stay(start: Start) -> None:
    ids = [await suspended(start, REFUND) for _ in range(3)]
    async with start("done") as here:
        await here.runs.resume(ids[0], {"0": reject()})
        assert await here.runs.purge(timedelta(0)) == 1
        assert [each.id for each in await here.runs.list(status="suspended")] == ids[:0:-1]
        assert await here.runs.list(service=Desk, limit=1) == (await here.runs.list())[:1]


# --- people


async def test_only_a_person_with_the_role_decides(start: Start) -> None:
    answers = [approve(), approve(arguments={"order": 8}), reject("no")]
    async with start(*[asks(WRITE_OFF)] * 3) as here, here.request_scope({SecurityIdentity: ANN}):
        ids = [(await here.get(Desk).ask("x")).run_id for _ in answers]
    async with start("done", "done", "done") as here:
        for run_id, answer in zip(ids, answers, strict=True):
            await only_with_the_role(here, run_id, answer)
    assert ran == [("write_off", 7, BOB), ("write_off", 8, BOB)]


async def only_with_the_role(here: Container, run_id: str, answer: Answer) -> None:
    before = await here.runs.get(run_id)
    for by in (None, "bob", "", ANN, SecurityIdentity("carl"), SecurityIdentity.anonymous(), 7):
        with pytest.raises(RunAnswerError):
            await here.runs.resume(run_id, {"0": answer}, by=by)  # type: ignore[arg-type]  # a program's mistake
    assert await here.runs.get(run_id) == before
    assert (await here.runs.resume(run_id, {"0": answer}, by=BOB)).content == "done"


async def test_the_person_who_asked_does_not_decide(start: Start) -> None:
    run_id = await suspended(start, WRITE_OFF, by=BOB)
    async with start() as here:
        for answer in (approve(), reject()):
            with pytest.raises(RunAnswerError, match="another person"):
                await here.runs.resume(run_id, {"0": answer}, by=BOB)
    assert ran == []


async def test_of_several_answers_one_that_is_refused_refuses_all(start: Start) -> None:
    run_id = await suspended(start, REFUND, WRITE_OFF, by=ANN)
    async with start() as here:
        with pytest.raises(RunAnswerError, match="may not approve"):
            await here.runs.resume(run_id, {"0": approve(), "1": approve()}, by=ANN)
        assert [each.id for each in (await here.runs.get(run_id)).pending] == ["0", "1"]
    assert ran == []


async def test_the_present_approvers_of_a_tool_count(start: Start) -> None:
    def program(*approvers: str) -> Any:
        @tool(requires_approval=True, approvers=approvers)
        def pay() -> str:
            ran.append("paid")
            return "paid"

        class Payments(Protocol):
            async def ask(self, wish: str) -> Result[str]: ...

        Payments.__qualname__ = "Payments"
        return register_ai_service(tools=pay)(Payments)

    service = program()
    async with start(asks(tool_call("pay")), services=(service,)) as here:
        run_id = (await here.get(service).ask("x")).run_id
    async with start("done", services=(program("manager"),)) as here:
        with pytest.raises(RunAnswerError, match="manager"):
            await here.runs.resume(run_id, {"0": approve()}, by="somebody")
        assert (await here.runs.resume(run_id, {"0": approve()}, by=BOB)).content == "done"
    assert ran == ["paid"]


# --- edited arguments


async def test_edited_arguments_pass_the_guardrails_again(start: Start) -> None:
    run_id = await suspended(start, REFUND)
    async with start("done") as here:
        result = await here.runs.resume(run_id, {"0": approve(arguments={"order": 7, "euros": 101})})
    [execution] = result.tool_executions
    assert (execution.is_error, execution.result) == (True, "Input validation failed: more than 100 euros")
    assert ran == []


async def test_edited_arguments_do_not_approve_the_arguments_that_they_replaced(start: Start) -> None:
    class Restoring(ToolInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> Any:
            return await proceed(call.with_arguments(euros=500))

    @tool(requires_approval=True)
    @interceptors(Restoring)
    def pay(euros: int) -> str:
        ran.append(euros)
        return "paid"

    @register_ai_service(tools=pay)
    class Payments(Protocol):
        async def ask(self, wish: str) -> Result[str]: ...

    async with start(asks(tool_call("pay", {"euros": 500})), "done", services=(Payments,)) as here:
        first = await here.get(Payments).ask("x")
        second = await here.runs.resume(first.run_id, {"0": approve(arguments={"euros": 50})})
        assert [each.arguments for each in second.pending] == [{"euros": 500}]
        assert ran == []
        assert (await here.runs.resume(first.run_id, {"0": reject("too much")})).content == "done"
    assert ran == []


async def test_a_role_that_was_lost_since_hides_the_approved_tool(start: Start) -> None:
    from toolbox.runs import IdentityLoader

    class Payments:
        @tool(requires_approval=True)
        @roles_allowed("support")
        def pay(self) -> str:
            ran.append("paid")
            return "paid"

    @register_ai_service(tools=Payments)
    class Cashier(Protocol):
        async def ask(self, wish: str) -> Result[str]: ...

    class Directory(IdentityLoader):
        def load(self, identity: SecurityIdentity) -> SecurityIdentity | None:
            return SecurityIdentity(identity.name)

    async with start(asks(tool_call("pay")), services=(Cashier,)) as here, here.request_scope({SecurityIdentity: ANN}):
        run_id = (await here.get(Cashier).ask("x")).run_id
    async with start("done", services=(Cashier, Directory)) as here:
        with pytest.raises(UnknownToolError) as raised:
            await here.runs.resume(run_id, {"0": approve(arguments={})}, by=BOB)
    assert "offered: none" in str(raised.value)
    assert ran == []


# --- hostile input


class Notes:
    @tool(requires_approval=True)
    def note(self, text: str) -> dict[str, str]:
        """Note."""
        ran.append(text)
        return {"noted": "cut \ud83d"}


@register_ai_service(tools=Notes)
class Scribe(Protocol):
    async def ask(self, room: MemoryId[str], text: str) -> str: ...


async def test_texts_with_half_a_character_are_stored_and_continued(start: Start) -> None:
    half, whole = "cut \ud83d", "cut \ufffd"
    async with start(asks(tool_call("note", {"text": half})), services=[Scribe]) as here:
        with pytest.raises(RunSuspendedError) as suspension:
            await here.get(Scribe).ask("room", half)
        run_id = suspension.value.run_id
    async with start(half, services=[Scribe]) as here:
        [pending] = (await here.runs.get(run_id)).pending
        await here.runs.resume(run_id, {pending.id: approve()})
        again = await here.runs.resume(run_id, {})

    assert (pending.arguments, ran, again.content) == ({"text": whole}, [whole], whole)


NO_IDS = ("", "0", "no such run", "x" * 201, "a\0b", "\ud800", "' OR 1=1 --", "%", 7, None, ("a",))


async def test_an_id_that_no_run_has_is_not_found(start: Start) -> None:
    await suspended(start, REFUND)
    async with start() as here:
        for run_id in NO_IDS:
            await is_not_found(here, run_id)
    assert ran == []


async def is_not_found(here: Container, run_id: Any) -> None:
    for use in (
        here.runs.get(run_id),
        here.runs.resume(run_id, {}),
        here.runs.resume(run_id, {"0": approve()}),
        here.runs.cancel(run_id),
        here.runs.delete(run_id),
    ):
        with pytest.raises(RunNotFoundError) as raised:
            await use
        assert len(str(raised.value)) < 500
    assert len(await here.runs.list(status="suspended")) == 1


async def test_a_service_that_does_not_exist_has_no_runs(start: Start) -> None:
    await suspended(start, REFUND)
    async with start() as here:
        for service in ("a\0b", "\ud800", "x" * 100_000, "' OR 1=1 --"):
            assert await here.runs.list(service=service) == []


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


INVALID = {
    "long": lambda: approve(arguments={"order": 7, "euros": "1" * 2_000_000}),
    "many": lambda: approve(arguments={"order": 7, "euros": 1, **{f"x{n}": n for n in range(80_000)}}),
    "nested": lambda: approve(arguments={"order": nested(100_000), "euros": 1}),
    "object": lambda: approve(arguments={"order": object(), "euros": 1}),
    "nan": lambda: approve(arguments={"order": 7, "euros": float("nan")}),
    "reason": lambda: reject("x" * 10_001),
    "number": lambda: Answer("reject", reason=7),  # type: ignore[arg-type]  # a program's mistake
    "respond": lambda: respond("x"),
    "fail": lambda: fail("x"),
}


async def test_oversize_and_invalid_answers_change_nothing(start: Start) -> None:
    run_id = await suspended(start, REFUND)
    async with start() as here:
        before = await here.runs.get(run_id)
        for call_id in ("1" * 1_000_000, "0/0", "00", " 0", "", "\0", "same", 0):
            with pytest.raises(RunAnswerError) as raised:
                await here.runs.resume(run_id, {call_id: approve()})
            assert len(str(raised.value)) < 500
        for name in INVALID:
            await is_refused(here, run_id, name)
            assert await here.runs.get(run_id) == before
    assert ran == []


async def is_refused(here: Container, run_id: str, name: str) -> None:
    answer = INVALID[name]()
    with pytest.raises(RunAnswerError) as raised:
        await here.runs.resume(run_id, {"0": answer})
    assert len(str(raised.value)) < 5_000


async def test_texts_of_answers_can_have_any_characters(start: Start) -> None:
    run_id = await suspended(start, REFUND)
    async with start("done") as here:
        result = await here.runs.resume(run_id, {"0": reject("no \0 \ud800 \x1b[31m")}, by="b\0b")
        [entry] = (await here.runs.get(run_id)).history
    assert result.content == "done"
    assert entry.reason == "no \0 \\ud800 \x1b[31m"  # half a surrogate cannot be written as UTF-8


async def test_an_answer_cannot_be_replayed(start: Start) -> None:
    run_id = await suspended(start, REFUND)
    async with start(asks(REFUND), "done") as here:
        again = await here.runs.resume(run_id, {"0": approve()})
        assert [each.id for each in again.pending] == ["1"]  # the same call of the model needs another approval
        with pytest.raises(RunAnswerError, match="no pending call"):
            await here.runs.resume(run_id, {"0": approve()})
        assert len(ran) == 1
        await here.runs.resume(run_id, {"1": reject()})
        with pytest.raises(RunAnswerError, match="completed"):
            await here.runs.resume(run_id, {"1": approve()})
    assert len(ran) == 1


# --- secrets


async def test_errors_of_the_database_do_not_show_documents(sqlite_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "toolbox")
    async with sql.open_engine(sqlite_url) as engine:
        store = SqlRunStore(engine)
        model = ScriptedChatModel([asks(tool_call("look", {"order": 7}), REFUND)])
        made = Container(models={"default": model}, seeds=[SecurityIdentity]).register(Desk, Clerk)
        async with made.register_instance(store, RunStore) as here:
            await here.runs.list()
            async with engine.connect() as connection:
                await connection.execute(
                    text("CREATE TRIGGER full BEFORE INSERT ON toolbox_runs BEGIN SELECT RAISE(FAIL, 'full'); END")
                )
                await connection.commit()
            with pytest.raises(RunStoreError, match="full") as raised:
                await here.get(Desk).ask(f"use {SECRET}")
    assert SECRET not in "".join(format_exception(raised.value))  # as a log shows it
    assert SECRET not in caplog.text


REFUSING = {
    "sqlite": "CREATE TRIGGER full BEFORE INSERT ON toolbox_runs_records BEGIN SELECT RAISE(ABORT, 'is full'); END",
    "postgresql": "ALTER TABLE toolbox_runs_records ADD CONSTRAINT \"is full\" CHECK (kind <> 'result')",
}
"""Statements after which no result is stored. The error of PostgreSQL has the whole row in its detail."""


@pytest.mark.parametrize("driver", ["aiosqlite", "asyncpg", "psycopg"])
async def test_errors_of_the_database_do_not_show_results(driver: str, request: pytest.FixtureRequest) -> None:
    @tool
    async def look() -> str:
        async with engine.begin() as connection:
            await connection.execute(text(REFUSING[engine.dialect.name]))
        return SECRET

    @register_ai_service(tools=look, durable=True)
    class Looking(Protocol):
        async def ask(self, run: RunId, wish: str) -> str: ...

    url = make_url(request.getfixturevalue("sqlite_url" if driver == "aiosqlite" else "postgres_url"))
    engine = create_async_engine(url.set(drivername=f"{url.get_backend_name()}+{driver}"))
    try:
        made = Container(models={"default": ScriptedChatModel([asks(tool_call("look"))])}, take_over_runs=False)
        made.register(Looking).register_instance(SqlRunStore(engine), RunStore)
        async with made as here:
            with pytest.raises(RunStoreError, match="is full") as raised:
                await here.get(Looking).ask("r", "hi")
    finally:
        await engine.dispose()
    assert SECRET not in "".join(format_exception(raised.value))  # as a log shows it


async def test_attributes_that_only_the_program_knows_are_not_listed(start: Start) -> None:
    run_id = await suspended(start, REFUND, by=SecurityIdentity("ann", attributes={"token": SECRET}))
    async with start() as here:
        shown = await here.runs.get(run_id)
    assert SECRET not in repr(shown)
    assert SECRET not in json.dumps([dict(each.arguments) for each in shown.pending])


async def test_a_run_of_another_kind_of_call_is_not_answered_by_its_error(start: Start) -> None:
    async with start(asks(REFUND)) as here:
        with pytest.raises(RunSuspendedError) as raised:
            await here.get(Clerk).delegate("x")
        assert SECRET not in str(raised.value)
        assert [each.id for each in raised.value.pending] == ["0"]
