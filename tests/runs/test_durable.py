"""Durable methods: every effect is recorded, and nothing recorded happens again."""

import asyncio
import json
import os
import signal
import subprocess
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests import programs
from toolbox import (
    ChatResponse,
    CompleteResponse,
    Container,
    EventListener,
    IntermediateResponse,
    InvocationEvent,
    ModelResponseEvent,
    Result,
    ReturnBehavior,
    TokenUsage,
    ToolExecutedEvent,
    ToolStartedEvent,
    application_scoped,
    register_ai_service,
    return_to_model,
    tool,
    user_message,
)
from toolbox.errors import RunStoreError
from toolbox.guardrails import GuardrailResult, InputGuardrail, InputGuardrailRequest, input_guardrails
from toolbox.interceptors import ModelInterceptor, ModelInvocation, ModelProceed, ToolInterceptor, interceptors
from toolbox.limits import CostEstimator, UsageLimits
from toolbox.runs import (
    IdempotencyKey,
    InMemoryRunStore,
    RunConflictError,
    RunFailedError,
    RunId,
    RunStore,
    StoredRecord,
    fail,
    respond,
    retry,
)
from toolbox.security import SecurityIdentity
from toolbox.store_clock import skip
from toolbox.testing import ScriptedChatModel, skip_time, tool_call

from .replies import asks, ran, says

pytestmark = pytest.mark.anyio


class Kept(InMemoryRunStore):
    """A store whose process dies before it writes a record of the kind `dies_on`."""

    persistent = True
    dies_on = ""
    is_dead = False

    async def append(self, run_id: str, generation: int, records: Any, *args: Any) -> None:
        if self.is_dead or any(f"{each.kind}:{each.key}" == self.dies_on for each in records):
            self.is_dead = True
            raise ConnectionError("the process died")
        await super().append(run_id, generation, records, *args)

    async def release(self, run_id: str, generation: int) -> None:
        if not self.is_dead:
            await super().release(run_id, generation)

    def restarted(self) -> "Kept":
        """Return the store for another process, after the lease of the dead one has ended."""
        self.is_dead, self.dies_on = False, ""
        skip([self.clock], timedelta(seconds=self.lease))
        return self


@tool
async def note(n: int) -> int:
    ran.append(n)
    return n


NOTE = tool_call("note", {"n": 1})


@register_ai_service(tools=note, durable=True)
class Desk(Protocol):
    @user_message("{text}")
    async def ask(self, run: RunId, text: str) -> str: ...

    async def other(self, run: RunId, text: str) -> Result[str]: ...


def container(store: Any, *replies: Any, services: Any = (Desk,), **options: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, take_over_runs=False, **options)
    return made.register(*services).register_instance(store, RunStore)


# --- ids


async def test_the_same_id_gives_the_same_answer_without_asking_again() -> None:
    async with container(Kept(), asks(NOTE), says("done")) as here:
        desk = here.get(Desk)
        assert await desk.ask("r", "x") == "done"
        assert await desk.ask("r", "x") == "done"
        run = await here.runs.get("r")

    assert (run.status, run.service, run.method) == ("completed", f"{__name__}.Desk", "ask")
    assert ran == [1]


async def test_the_same_id_with_another_call_is_a_conflict() -> None:
    async with container(Kept(), says("done")) as here:
        desk = here.get(Desk)
        await desk.ask("r", "x")
        with pytest.raises(RunConflictError, match="other arguments"):
            await desk.ask("r", "y")
        with pytest.raises(RunConflictError, match="another method"):
            await desk.other("r", "x")
        async with here.request_scope({SecurityIdentity: SecurityIdentity("ann")}):
            with pytest.raises(RunConflictError, match="another identity"):
                await desk.ask("r", "x")


async def test_calls_with_the_same_id_at_the_same_time_run_once() -> None:
    async with container(Kept(), asks(NOTE), says("done")) as here:
        desk = here.get(Desk)
        assert await asyncio.gather(*(desk.ask("r", "x") for _ in range(5))) == ["done"] * 5
    assert ran == [1]


@pytest.mark.parametrize("run_id", ["", 7, "x" * 300, "a\0b"])
async def test_invalid_ids_are_refused(run_id: Any) -> None:
    async with container(Kept()) as here:
        with pytest.raises(ValueError, match="run id"):
            await here.get(Desk).ask(run_id, "x")


async def test_errors_of_a_durable_method_reach_its_caller_and_are_stored() -> None:
    async with container(Kept(), LookupError("no model")) as here:
        with pytest.raises(LookupError, match="no model"):
            await here.get(Desk).ask("r", "x")
        run = await here.runs.get("r")
        assert (run.status, run.error) == ("failed", "LookupError: no model")
        with pytest.raises(RunFailedError) as raised:
            await here.get(Desk).ask("r", "x")
    assert (raised.value.error_type, raised.value.text) == ("LookupError", "no model")


def test_a_synchronous_durable_method_can_have_a_synchronous_input_guardrail() -> None:
    class Short(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            ran.append(request.user_message.text)
            return self.success()

    @register_ai_service(durable=True)
    class Guarded(Protocol):
        @input_guardrails(Short)
        def ask(self, text: str) -> str: ...

    with container(Kept(), "hi", services=(Guarded, Short)) as started:
        assert started.get(Guarded).ask("hello") == "hi"
    assert ran == ["hello"]


async def test_cancelling_the_caller_does_not_cancel_the_run() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    @tool
    async def slow() -> str:
        started.set()
        await go_on.wait()
        ran.append("slow")
        return "ok"

    @register_ai_service(tools=slow, durable=True)
    class Slow(Protocol):
        async def ask(self, run: RunId, text: str) -> str: ...

    async with container(Kept(), asks(tool_call("slow")), says("done"), services=(Slow,)) as here:
        waiting = asyncio.create_task(here.get(Slow).ask("r", "x"))
        await started.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await here.runs.get("r")).status == "running"
        go_on.set()
        assert await here.runs.result("r") == "done"
    assert ran == ["slow"]


async def test_a_run_continues_if_its_caller_leaves_while_it_is_created() -> None:
    created, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Kept):
        async def create(self, *args: Any, **options: Any) -> bool:
            is_new = await super().create(*args, **options)
            created.set()
            await go_on.wait()
            return is_new

    async with container(Slow(lease=1000), says("done")) as here:
        waiting = asyncio.create_task(here.get(Desk).ask("r", "x"))
        await created.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go_on.set()
        assert await here.runs.result("r", timeout=60) == "done"


async def test_an_answer_that_was_asked_for_again_ends_the_run_after_a_crash_too() -> None:
    @tool(return_behavior=ReturnBehavior.IMMEDIATE_IF_LAST)
    async def look() -> int:
        ran.append("look")
        return 1

    @register_ai_service(tools=look, durable=True, output_mode="tool")
    class Counts(Protocol):
        async def ask(self, run: RunId, text: str) -> Result[int]: ...

    class Ends(Kept):
        async def append(self, run_id: str, generation: int, records: Any, *args: Any) -> None:
            self.is_dead = self.is_dead or (self.dies_on == "end" and not records and bool(args))
            await super().append(run_id, generation, records, *args)

    invalid = asks(tool_call("final_answer", {"value": "x"}), tool_call("look"))
    store = Ends()
    store.dies_on = "end"
    async with container(store, invalid, asks(tool_call("final_answer", {"value": 7})), services=(Counts,)) as here:
        with pytest.raises(RunStoreError):
            await here.get(Counts).ask("r", "x")
    async with container(store.restarted(), services=(Counts,)) as here:
        assert (await here.get(Counts).ask("r", "x")).content == 7
    assert ran == ["look"]


async def test_the_answer_of_the_answer_tool_is_not_an_intermediate_response() -> None:
    @register_ai_service(tools=note, durable=True, output_mode="tool")
    class Counts(Protocol):
        async def ask(self, run: RunId, text: str) -> int: ...

    answer = asks(tool_call("final_answer", {"value": 7}))
    async with container(Kept(), asks(NOTE), answer, services=(Counts,)) as here:
        await here.runs.start(Counts.ask, "r", "x")
        assert await here.runs.result("r") == 7
        events = [each.event async for each in here.runs.events("r")]

    [between] = [each for each in events if isinstance(each, IntermediateResponse)]
    assert [each.name for each in between.response.ai_message.tool_execution_requests] == ["note"]
    assert any(isinstance(each, CompleteResponse) for each in events)


# --- hidden parameters


async def test_ids_and_keys_are_hidden_from_the_model_and_keys_stay_the_same_over_retries() -> None:
    seen: list[tuple[str, str]] = []

    @application_scoped
    class Twice(ToolInterceptor):
        async def around_tool(self, call: Any, proceed: Any) -> Any:
            await proceed(call)
            return await proceed(call)

    @tool
    @interceptors(Twice)
    async def send(to: str, key: IdempotencyKey, run: RunId) -> str:
        seen.append((key, run))
        return "sent"

    @register_ai_service(tools=send, durable=True)
    class Mail(Protocol):
        async def ask(self, run: RunId, text: str) -> str: ...

    model = ScriptedChatModel([asks(*[tool_call("send", {"to": "ann"})] * 2), says("done")])
    made = Container(models={"default": model}).register(Mail).register_instance(Kept(), RunStore)
    async with made as here:
        await here.get(Mail).ask("r", "x")

    assert list(model.requests[0].tool_specifications[0].parameters["properties"]) == ["to"]
    assert model.requests[0].messages[-1].text == "x"
    assert [run for _, run in seen] == ["r"] * 4
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert seen[0] != seen[2]


async def test_keys_of_methods_that_are_not_durable_differ_between_calls() -> None:
    keys: list[str] = []

    @tool
    def send(key: IdempotencyKey) -> str:
        keys.append(key)
        return "sent"

    @register_ai_service(tools=send)
    class Mail(Protocol):
        async def ask(self, text: str) -> str: ...

    async with container(
        Kept(), asks(tool_call("send")), says("x"), asks(tool_call("send")), says("x"), services=(Mail,)
    ) as here:
        await here.get(Mail).ask("x")
        await here.get(Mail).ask("x")
    assert len(set(keys)) == 2


# --- after a crash


class Seen(EventListener):
    def __init__(self) -> None:
        self.events: list[InvocationEvent] = []

    def on_event(self, event: InvocationEvent) -> None:
        self.events.append(event)

    def count(self, kind: type[InvocationEvent]) -> int:
        return sum(isinstance(each, kind) for each in self.events)


async def test_recorded_effects_do_not_happen_again_and_are_not_traced_again() -> None:
    store, first, second = Kept(), Seen(), Seen()
    store.dies_on = "reply:#r1"
    async with container(store, asks(NOTE, tool_call("note", {"n": 2})), says("lost")).register_instance(
        first, EventListener
    ) as here:
        with pytest.raises(RunStoreError):
            await here.get(Desk).ask("r", "x")
    assert (first.count(ToolExecutedEvent), first.count(ModelResponseEvent)) == (2, 2)

    async with container(store.restarted(), says("done")).register_instance(second, EventListener) as here:
        result = await here.runs.resume("r", {})

    assert result.content == "done"
    assert ran == [1, 2]
    assert [each.result for each in result.tool_executions] == ["1", "2"]
    assert (second.count(ToolStartedEvent), second.count(ToolExecutedEvent)) == (0, 0)
    assert second.count(ModelResponseEvent) == 1


async def test_the_record_of_a_reply_keeps_the_tools_that_were_sent() -> None:
    class Narrowing(ModelInterceptor):
        narrows = True

        async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
            left = [each for each in call.request.tool_specifications if each.name == "note" or not self.narrows]
            return await proceed(replace(call, request=replace(call.request, tool_specifications=left)))

    @tool
    async def delete() -> str:
        ran.append("deleted")
        return "deleted"

    @register_ai_service(tools=[note, delete], durable=True, on_unknown_tool=return_to_model)
    @interceptors(Narrowing)
    class Careful(Protocol):
        async def ask(self, run: RunId, text: str) -> Result[str]: ...

    store = Kept()
    store.dies_on = "result:0"
    async with container(store, asks(NOTE, tool_call("delete")), services=(Careful,)) as here:
        with pytest.raises(RunStoreError):
            await here.get(Careful).ask("r", "x")

    Narrowing.narrows = False  # the program as it is now does not decide about a reply that was recorded before
    async with container(store.restarted(), says("done"), services=(Careful,)) as here:
        result = await here.runs.resume("r", {})

    assert "deleted" not in ran
    assert "no tool named 'delete'" in result.tool_executions[1].result


async def test_recorded_effects_are_not_charged_again() -> None:
    class Prices(CostEstimator):
        def estimate(self, model: str, usage: TokenUsage) -> Decimal:
            return Decimal("0.01")

    @register_ai_service(
        tools=note, durable=True, limits=UsageLimits(model_calls=2, tool_calls=1, output_tokens=6, cost=Decimal("0.02"))
    )
    class Cheap(Protocol):
        async def ask(self, run: RunId, text: str) -> Result[str]: ...

    store = Kept()
    store.dies_on = "result:0"
    for number in range(3):
        replies = () if number else (asks(NOTE),)
        async with container(store, *replies, services=(Cheap,)).register_instance(Prices(), CostEstimator) as here:
            with pytest.raises(RunStoreError):
                await (here.runs.resume("r", {}) if number else here.get(Cheap).ask("r", "x"))
        store.restarted().dies_on = "result:0"

    restarted = container(store.restarted(), says("done"), services=(Cheap,))
    async with restarted.register_instance(Prices(), CostEstimator) as here:
        result = await here.runs.resume("r", {})

    assert result.content == "done"  # with exactly the usage that the limits allow
    assert result.token_usage == TokenUsage(20, 6)


async def test_the_events_of_a_round_are_stored_before_the_next_reply_is_recorded() -> None:
    written: list[str] = []

    class Slow(Kept):
        async def append(self, run_id: str, generation: int, records: Any, *args: Any) -> None:
            written.extend(each.key for each in records)
            await super().append(run_id, generation, records, *args)

        async def add_events(self, run_id: str, generation: int, events: Any) -> None:
            await asyncio.sleep(0.05)  # slower than a model that answers at once
            await super().add_events(run_id, generation, events)
            written.extend(json.loads(each)["type"] for each in events)

    async with container(Slow(), asks(NOTE), says("done")) as here:
        run = await here.runs.start(here.get(Desk).ask, "r", "x")
        assert await here.runs.result(run) == "done"

    assert written.index("ToolExecuted") < written.index("#r1")


async def test_interceptors_are_applied_again_to_recorded_results() -> None:
    around: list[str] = []

    @application_scoped
    class Loud(ToolInterceptor):
        async def around_tool(self, call: Any, proceed: Any) -> Any:
            around.append("around")
            result = await proceed(call)
            return type(result)(result.text + "!")

    @register_ai_service(tools=note, durable=True)
    @interceptors(Loud)
    class Wrapped(Protocol):
        async def ask(self, run: RunId, text: str) -> Result[str]: ...

    store = Kept()
    store.dies_on = "reply:#r1"
    async with container(store, asks(NOTE), says("lost"), services=(Wrapped,)) as here:
        with pytest.raises(RunStoreError):
            await here.get(Wrapped).ask("r", "x")
    async with container(store.restarted(), says("done"), services=(Wrapped,)) as here:
        result = await here.runs.resume("r", {})

    assert ran == [1]
    assert around == ["around", "around"]
    assert result.tool_executions[0].result == "1!"


async def test_recorded_failures_reach_the_error_handler_again_with_the_same_text() -> None:
    @tool
    async def broken() -> str:
        ran.append("broken")
        raise LookupError("no such room")

    @register_ai_service(tools=broken, durable=True)
    class Broken(Protocol):
        async def ask(self, run: RunId, text: str) -> Result[str]: ...

    store = Kept()
    store.dies_on = "reply:#r1"
    async with container(store, asks(tool_call("broken")), says("lost"), services=(Broken,)) as here:
        with pytest.raises(RunStoreError):
            await here.get(Broken).ask("r", "x")
    async with container(store.restarted(), says("done"), services=(Broken,)) as here:
        result = await here.runs.resume("r", {})

    assert ran == ["broken"]
    assert (result.tool_executions[0].result, result.tool_executions[0].is_error) == ("no such room", True)


# --- unknown outcomes


async def after_unknown_outcome(mode: Any) -> tuple[Kept, Any]:
    """Return a store with a run whose process died during a tool, and its service."""

    @tool(on_unknown_outcome=mode)
    async def send(to: str, key: IdempotencyKey) -> str:
        ran.append((to, key))
        return "sent"

    @register_ai_service(tools=send, durable=True)
    class Mail(Protocol):
        async def ask(self, run: RunId, text: str) -> Result[str]: ...

    store = Kept()
    store.dies_on = "result:0"
    async with container(store, asks(tool_call("send", {"to": "ann"})), services=(Mail,)) as here:
        with pytest.raises(RunStoreError):
            await here.get(Mail).ask("r", "x")
    assert len(ran) == 1
    return store.restarted(), Mail


async def test_by_default_the_model_reads_that_the_outcome_is_unknown() -> None:
    store, mail = await after_unknown_outcome("tell")
    async with container(store, says("I checked"), services=(mail,)) as here:
        result = await here.runs.resume("r", {})

    [execution] = result.tool_executions
    assert execution.is_error
    assert "unknown" in execution.result
    assert len(ran) == 1


async def test_retry_runs_the_call_again_with_the_same_key() -> None:
    store, mail = await after_unknown_outcome("retry")
    async with container(store, says("done"), services=(mail,)) as here:
        result = await here.runs.resume("r", {})

    assert result.tool_executions[0].result == "sent"
    assert len(ran) == 2
    assert ran[0] == ran[1]


@pytest.mark.parametrize(
    ("answer", "text", "is_error", "runs"),
    [
        (respond("it was sent"), "it was sent", False, 1),
        (fail("not sent"), "not sent", True, 1),
        (retry(), "sent", False, 2),
    ],
)
async def test_a_person_can_say_what_happened(answer: Any, text: str, is_error: bool, runs: int) -> None:
    store, mail = await after_unknown_outcome("ask")
    async with container(store, says("done"), services=(mail,)) as here:
        waiting = await here.runs.resume("r", {})
        [call] = waiting.pending
        assert (call.kind, call.id, call.arguments) == ("unknown_outcome", "0", {"to": "ann"})
        result = await here.runs.resume("r", {call.id: answer}, by="bob")

    [execution] = result.tool_executions
    assert (execution.result, execution.is_error) == (text, is_error)
    assert len(ran) == runs


async def test_a_renewal_after_the_last_write_does_not_fail_the_run() -> None:
    refused: list[str] = []

    class Renewed(InMemoryRunStore):
        """Renews a lease after the run has ended, before its process knows that."""

        persistent = True

        async def append(self, run_id: str, generation: int, records: Any, changes: Any = None, *args: Any) -> None:
            await super().append(run_id, generation, records, changes, *args)
            if changes is not None and changes.status == "completed":
                await skip_time(here, timedelta(seconds=1))

        async def renew(self, run_id: str, generation: int) -> bool:
            is_ours = await super().renew(run_id, generation)
            if not is_ours:
                refused.append(run_id)
            return is_ours

    async with container(Renewed(), says("done")) as here:
        assert await here.get(Desk).ask("r", "x") == "done"
    assert refused == ["r"]


# --- exactly once, with real processes

PROGRAM = """
import asyncio, os, signal, sys
from decimal import Decimal
from typing import Protocol
from sqlalchemy import text, event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine, AsyncEngine
from sqlalchemy.orm import Session
from toolbox import AiMessage, ChatResponse, Container, Inject, register_ai_service, sql, tool
from toolbox.runs import RunId, RunStore, Runs
from toolbox.testing import tool_call

url, ledger_url, dies, kind = {url!r}, {ledger_url!r}, sys.argv[1], sys.argv[2]
engine = create_async_engine(url)
ledger = engine if ledger_url == url else create_async_engine(ledger_url)

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

class Bank:
    @tool(on_unknown_outcome="tell")
    @sql.transactional
    async def debit(self, euros: int, session: Inject[AsyncSession]) -> str:
        await session.execute(text("INSERT INTO ledger VALUES (:e)"), {{"e": euros}})
        if dies == "own-commit":
            await session.commit()
            die()
        if dies == "in-tool":
            die()
        if dies == "after-commit":
            event.listen(session.sync_session, "after_commit", die)
        return "debited"

    @tool(on_unknown_outcome="tell")
    @sql.transactional
    def debit_blocking(self, euros: int, session: Inject[Session]) -> str:
        session.execute(text("INSERT INTO ledger VALUES (:e)"), {{"e": euros}})
        if dies == "in-tool":
            die()
        if dies == "after-commit":
            event.listen(session, "after_commit", die)
        return "debited"

class Model:
    async def chat(self, request):
        if len(request.messages) == 1:
            return ChatResponse(AiMessage(None, [tool_call(kind, {{"euros": 5}})]))
        if dies == "in-model":
            die()
        return ChatResponse(AiMessage("result: " + request.messages[-1].text))

@register_ai_service(tools=Bank, durable=True)
class Transfers(Protocol):
    async def transfer(self, run: RunId, order: str) -> str: ...

async def main():
    from sqlalchemy import create_engine
    async with ledger.begin() as connection:
        await connection.execute(text("CREATE TABLE IF NOT EXISTS ledger (euros INTEGER)"))
    container = Container(models={{"default": Model()}}, take_over_runs=False)
    container.register(Transfers, sql.session, sql.sync_session)
    container.register_instance(ledger, AsyncEngine)
    container.register_instance(create_engine(ledger_url.replace("+aiosqlite", "")))
    container.register_instance(sql.SqlRunStore(engine, lease=0.3), RunStore)
    async with container:
        print(await container.get(Transfers).transfer("r", "order"))

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["debit", "debit_blocking"])
@pytest.mark.parametrize("dies", ["in-tool", "after-commit", "in-model"])
def test_a_transactional_tool_takes_effect_exactly_once(tmp_path: Path, dies: str, kind: str) -> None:
    database = tmp_path / "runs.db"
    program = PROGRAM.format(url=f"sqlite+aiosqlite:///{database}", ledger_url=f"sqlite+aiosqlite:///{database}")

    assert process(tmp_path, program, dies, kind).returncode == -signal.SIGKILL
    again = process(tmp_path, program, "never", kind)

    assert again.stdout.strip() == "result: debited", again.stderr
    assert ledger(database) == [5]


@pytest.mark.parametrize("dies", ["own-commit", "other-engine"])
def test_an_effect_outside_of_the_transaction_of_the_record_is_unknown(tmp_path: Path, dies: str) -> None:
    database, other = tmp_path / "runs.db", tmp_path / "ledger.db"
    ledger_at = database if dies == "own-commit" else other
    program = PROGRAM.format(url=f"sqlite+aiosqlite:///{database}", ledger_url=f"sqlite+aiosqlite:///{ledger_at}")

    first = process(tmp_path, program, "after-commit" if dies == "other-engine" else dies, "debit")
    assert first.returncode == -signal.SIGKILL
    again = process(tmp_path, program, "never", "debit")

    assert "unknown" in again.stdout, again.stderr
    assert ledger(ledger_at) == [5]


def process(tmp_path: Path, program: str, dies: str, kind: str) -> "subprocess.CompletedProcess[str]":
    file = tmp_path / "program.py"
    file.write_text(program)
    return programs.run([str(file), dies, kind], tmp_path, dict(os.environ))


def ledger(database: Path) -> list[int]:
    import sqlite3

    with sqlite3.connect(database) as connection:
        return [row[0] for row in connection.execute("SELECT euros FROM ledger")]


async def test_records_are_versioned_json() -> None:
    store = Kept()
    async with container(store, asks(NOTE), says("done")) as here:
        await here.get(Desk).ask("r", "x")
    records: list[StoredRecord] = await store.records("r")

    assert [(each.kind, each.key) for each in records] == [
        ("reply", "#r0"),
        ("start", "0#start"),
        ("result", "0"),
        ("reply", "#r1"),
    ]
    assert {json.loads(each.data)["version"] for each in records} == {1}
