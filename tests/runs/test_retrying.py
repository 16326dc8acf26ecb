"""Failed and cancelled runs go on from their records: `runs.retry`, and `run_retries=` of a service."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest
from pydantic import BaseModel
from sqlalchemy.exc import OperationalError

from toolbox import (
    ChatResponse,
    Container,
    ConversationSuspendedError,
    FinishReason,
    IllegalConfigurationError,
    InvocationContext,
    MemoryId,
    ModelConnectionError,
    ModelRefusedError,
    OAuthError,
    Result,
    TokenUsage,
    ToolAbort,
    ToolExecutionRequest,
    compensate_for,
    produces,
    register_ai_service,
    sql,
    tool,
)
from toolbox.guardrails import OutputGuardrail, OutputGuardrailError, OutputGuardrailRequest, output_guardrails
from toolbox.limits import UsageLimitExceededError, usage_limits
from toolbox.runs import (
    InMemoryRunStore,
    Retries,
    Run,
    RunCancelledError,
    RunChanges,
    RunId,
    RunNotFoundError,
    RunStateError,
    RunStore,
    RunStoreError,
    StoredRun,
    approve,
    durable,
)
from toolbox.runs.documents import RunDocument
from toolbox.security import SecurityIdentity
from toolbox.services.declaration import ServiceOptions
from toolbox.services.outputs import ANSWER_TOOL
from toolbox.testing import ScriptedChatModel, skip_time, tool_call

from .replies import asks, ran, says

pytestmark = pytest.mark.anyio

USAGE = TokenUsage(10, 1)
DOWN = ModelConnectionError("the model server is down")
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


class BrokenError(Exception):
    pass


def raise_it(error: Exception, context: InvocationContext) -> str:
    raise error


class Work:
    """Tools that note what they did; `fragile` fails as often as `failures` says."""

    failures = 0

    @tool
    async def step(self, n: int) -> str:
        ran.append(n)
        return f"step {n}"

    @tool
    async def fragile(self) -> str:
        ran.append("fragile")
        if Work.failures:
            Work.failures -= 1
            raise BrokenError("no connection")
        return "worked"

    @tool
    async def give_up(self) -> str:
        ran.append("give_up")
        if Work.failures:
            Work.failures -= 1
            return "went on"
        raise ToolAbort("not today")

    @tool
    async def fetch(self) -> str:
        """Fail with the token server, as often as `failures` says."""
        ran.append("fetch")
        if Work.failures:
            Work.failures -= 1
            raise OAuthError(None, "https://login.example/token", "")
        return "fetched"

    @tool(requires_approval=True)
    async def pay(self, euros: int) -> str:
        ran.append(("pay", euros))
        return "paid"


class Answer(BaseModel):
    number: int


class Refusing(OutputGuardrail):
    max_retries = 0

    def validate(self, request: OutputGuardrailRequest) -> Any:
        return self.fatal("no") if "bad" in request.text else self.success()


@register_ai_service(tools=Work, on_tool_execution_error=raise_it)
class Helper(Protocol):
    @tool
    async def delegate(self, wish: str) -> str:
        """Let another service work."""
        ...


@register_ai_service(tools=Work, max_tool_rounds=2, max_output_retries=0, on_tool_execution_error=raise_it)
class Clerk(Protocol):
    async def ask(self, text: str) -> Result[str]: ...

    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    async def count(self, text: str) -> Answer: ...

    @output_guardrails(Refusing)
    async def judged(self, text: str) -> str: ...

    @output_guardrails(Refusing)
    async def judged_with_result(self, text: str) -> Result[str]: ...


@register_ai_service(tools=Work, max_output_retries=0, output_mode="tool")
class Teller(Protocol):
    async def count(self, text: str) -> Answer: ...


@register_ai_service
class Keeper(Protocol):
    @durable
    async def ask(self, run: RunId, text: str) -> str: ...


@register_ai_service(tools=[Work, Helper], on_tool_execution_error=raise_it)
class Boss(Protocol):
    async def ask(self, text: str) -> str: ...


@register_ai_service(
    tools=Work, run_retries=Retries(attempts=3, wait=MINUTE), max_tool_rounds=1, on_tool_execution_error=raise_it
)
class Patient(Protocol):
    async def ask(self, text: str) -> str: ...

    async def with_id(self, run: RunId, text: str) -> str: ...

    @output_guardrails(Refusing)
    async def judged(self, text: str) -> str: ...


Start = Callable[..., Awaitable[Container]]


class Kept(InMemoryRunStore):
    persistent = True


@pytest.fixture(params=["memory", "SQLite"])
async def start(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts containers with the same runs."""
    in_memory = Kept()
    async with AsyncExitStack() as stack:

        async def make(*replies: Any, **options: Any) -> Container:
            model = ScriptedChatModel(replies)
            container = Container(models={"default": model}, **options).register(
                Clerk, Teller, Keeper, Patient, Boss, Helper
            )
            if request.param == "memory":
                container.register_instance(in_memory, RunStore)
            else:
                engine = await stack.enter_async_context(sql.open_engine(f"sqlite:///{tmp_path / 'data.db'}"))
                container.register_instance(sql.SqlRunStore(engine), RunStore)
            return await stack.enter_async_context(container)

        yield make


async def wait_until(here: Container, run_id: str, holds: Callable[[Run[Any]], bool]) -> Run[Any]:
    async with asyncio.timeout(60):
        while not holds(run := await here.runs.get(run_id)):  # noqa: ASYNC110 - the store has no event
            await asyncio.sleep(0.01)
    return run


async def fail(here: Container, method: Any, *args: Any) -> Run[Any]:
    """Start a run, and return it when it has failed."""
    run = await here.runs.start(method, *args)
    return await wait_until(here, run.id, lambda run: run.status == "failed")


# --- runs.retry


async def test_a_failed_run_goes_on_from_its_records(start: Start) -> None:
    here = await start(tool_call("step", {"n": 1}), DOWN, "done")
    failed = await fail(here, Clerk.ask, "hi")
    assert (failed.attempts, failed.error) == (1, "ModelConnectionError: the model server is down")

    result = await here.runs.retry(failed.id, by=SecurityIdentity("ann"))

    assert (result.content, ran) == ("done", [1])
    run = await here.runs.get(failed.id)
    assert (run.status, run.error, run.attempts) == ("completed", None, 2)
    assert [(each.by, each.answer, each.call_id) for each in run.history] == [("ann", "retry", None)]


async def test_a_durable_call_returns_the_answer_of_the_retried_run(start: Start) -> None:
    here = await start(DOWN, "done")
    with pytest.raises(ModelConnectionError):
        await here.get(Keeper).ask("7", "hi")

    assert (await here.runs.retry("7")).content == "done"

    assert await here.get(Keeper).ask("7", "hi") == "done"


async def test_a_retried_run_can_fail_again(start: Start) -> None:
    here = await start(DOWN, DOWN, "done")
    failed = await fail(here, Clerk.ask, "hi")

    with pytest.raises(ModelConnectionError):
        await here.runs.retry(failed.id)

    assert (await here.runs.get(failed.id)).attempts == 2
    assert (await here.runs.retry(failed.id)).content == "done"
    assert (await here.runs.get(failed.id)).attempts == 3


async def test_a_tool_whose_error_ended_the_run_runs_again(start: Start) -> None:
    Work.failures = 2
    here = await start(asks(tool_call("step", {"n": 1}), tool_call("fragile")), "done")
    failed = await fail(here, Clerk.ask, "hi")
    assert failed.error == "BrokenError: no connection"
    with pytest.raises(BrokenError):
        await here.runs.retry(failed.id)

    result = await here.runs.retry(failed.id)

    assert (result.content, ran) == ("done", [1, "fragile", "fragile", "fragile"])
    assert [each.result for each in result.tool_executions] == ["step 1", "worked"]


async def test_a_tool_that_aborted_the_run_runs_again(start: Start) -> None:
    here = await start(tool_call("give_up"), "done")
    failed = await fail(here, Clerk.ask, "hi")
    Work.failures = 1

    assert (await here.runs.retry(failed.id)).content == "done"
    assert ran == ["give_up", "give_up"]


async def test_a_tool_that_aborted_does_not_run_again_after_a_crash() -> None:
    model = ScriptedChatModel([tool_call("give_up"), "done"])
    container = Container(models={"default": model}).register(Clerk).register_instance(Fragile("failed"), RunStore)
    async with container as here:
        run = await here.runs.start(Clerk.ask, "hi")
        async with asyncio.timeout(60):
            while "give_up" not in ran:  # noqa: ASYNC110 - the store has no event
                await asyncio.sleep(0.01)
        await skip_time(here, MINUTE)

        result = await here.runs.result(run, timeout=60)
    assert "unknown" in result.tool_executions[0].result
    assert ran == ["give_up"]


async def test_a_service_whose_error_ended_the_run_goes_on_from_its_own_records(start: Start) -> None:
    replies = [tool_call("delegate", {"wish": "x"}), tool_call("step", {"n": 1}), DOWN, "helped", "done"]
    here = await start(*replies)
    failed = await fail(here, Boss.ask, "hi")

    result = await here.runs.retry(failed.id)

    assert (result.content, ran) == ("done", [1])
    assert [each.result for each in result.tool_executions] == ["helped"]


async def test_a_reply_that_the_run_failed_with_is_asked_for_again(start: Start) -> None:
    here = await start(tool_call("step", {"n": 1}), "no number", '{"number": 7}')
    failed = await fail(here, Clerk.count, "hi")
    assert (failed.error or "").startswith("OutputParsingError")

    assert (await here.runs.retry(failed.id)).content == Answer(number=7)
    assert ran == [1]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CONTENT_FILTER])
async def test_a_reply_that_was_cut_is_asked_for_again(start: Start, reason: FinishReason) -> None:
    here = await start(replace(says('{"num'), finish_reason=reason), '{"number": 7}')
    failed = await fail(here, Clerk.count, "hi")

    assert (await here.runs.retry(failed.id)).content == Answer(number=7)


async def test_a_reply_that_was_asked_for_again_is_recorded_like_the_first(start: Start) -> None:
    roles: list[list[str]] = []

    def number(request: Any) -> str:
        roles.append([type(each).__name__ for each in request.messages])
        if len(roles) == 1:
            raise DOWN
        return '{"number": 7}'

    here = await start(tool_call("step", {"n": 1}), "no number", tool_call("step", {"n": 2}), number, number)
    failed = await fail(here, Clerk.count, "hi")
    with pytest.raises(ModelConnectionError):
        await here.runs.retry(failed.id)

    await here.runs.retry(failed.id)

    assert ran == [1, 2]
    call = ["AiMessage", "ToolExecutionResultMessage"]
    assert roles[0] == roles[1] == ["UserMessage", *call, *call]


async def test_a_reply_that_is_asked_for_again_was_paid(start: Start) -> None:
    def paid(reply: Any) -> ChatResponse:
        return replace(asks(reply) if isinstance(reply, ToolExecutionRequest) else says(reply), token_usage=USAGE)

    here = await start(paid(tool_call("step", {"n": 1})), paid("bad"), paid("good"), paid("good"))
    with usage_limits(total_tokens=2 * USAGE.total_tokens):
        limited = await fail(here, Clerk.judged_with_result, "hi")
    with pytest.raises(UsageLimitExceededError):
        await here.runs.retry(limited.id)


async def test_all_replies_of_a_retried_run_are_in_its_usage(start: Start) -> None:
    replies = [replace(says(each), token_usage=USAGE) for each in ("bad", "bad", "good")]
    here = await start(*replies)
    failed = await fail(here, Clerk.judged_with_result, "hi")
    with pytest.raises(OutputGuardrailError):
        await here.runs.retry(failed.id)

    assert (await here.runs.retry(failed.id)).token_usage == TokenUsage(30, 3)


class Fragile(Kept):
    """Fails when a run is about to end with a status, once."""

    def __init__(self, status: str) -> None:
        super().__init__()
        self.fails_at: str | None = status

    async def append(
        self, run_id: str, generation: int, records: Any, changes: RunChanges | None = None, events: Any = ()
    ) -> int:
        if changes is not None and changes.status is not None and changes.status == self.fails_at:
            self.fails_at = None
            raise BrokenError
        return await super().append(run_id, generation, records, changes, events)


async def test_a_reply_that_came_when_it_was_asked_for_again_is_not_asked_for_a_third_time() -> None:
    model = ScriptedChatModel(["no number", '{"number": 7}'])
    container = Container(models={"default": model}).register(Clerk).register_instance(Fragile("completed"), RunStore)
    async with container as here:
        failed = await fail(here, Clerk.count, "hi")
        with pytest.raises(RunStoreError):
            await here.runs.retry(failed.id)

        await skip_time(here, MINUTE)
        assert (await here.runs.resume(failed.id, {})).content == Answer(number=7)


async def test_a_reply_that_led_to_a_failure_is_asked_for_until_there_is_another(start: Start) -> None:
    here = await start("no number", DOWN, '{"number": 7}')
    failed = await fail(here, Clerk.count, "hi")
    with pytest.raises(ModelConnectionError):
        await here.runs.retry(failed.id)

    assert (await here.runs.retry(failed.id)).content == Answer(number=7)


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (tool_call("invented"), "There is no tool named 'invented'."),
        (tool_call("pay", {"euros": "many"}), "The arguments of tool 'pay' are not valid"),
    ],
)
async def test_the_model_reads_why_a_call_beside_others_ended_the_run(start: Start, call: Any, result: str) -> None:
    here = await start(asks(tool_call("step", {"n": 1}), call), "done")
    failed = await fail(here, Clerk.ask, "hi")

    retried = await here.runs.retry(failed.id)

    assert (retried.content, ran) == ("done", [1])
    assert retried.tool_executions[1].result.startswith(result)


async def test_the_model_reads_why_an_answer_beside_calls_ended_the_run(start: Start) -> None:
    wrong = asks(tool_call("step", {"n": 1}), tool_call(ANSWER_TOOL, {"number": "many"}))
    here = await start(wrong, tool_call(ANSWER_TOOL, {"number": 7}))
    failed = await fail(here, Teller.count, "hi")

    assert (await here.runs.retry(failed.id)).content == Answer(number=7)
    assert ran == [1]


@pytest.mark.parametrize("method", [Clerk.ask, Teller.count])
async def test_the_model_reads_what_was_wrong_until_there_is_another_reply(start: Start, method: Any) -> None:
    wrong = tool_call("invented") if method is Clerk.ask else tool_call(ANSWER_TOOL, {"number": "many"})
    right = "done" if method is Clerk.ask else tool_call(ANSWER_TOOL, {"number": 7})
    here = await start(asks(tool_call("step", {"n": 1}), wrong), DOWN, right)
    failed = await fail(here, method, "hi")
    with pytest.raises(ModelConnectionError):
        await here.runs.retry(failed.id)

    assert (await here.runs.retry(failed.id)).content in ("done", Answer(number=7))
    assert ran == [1]


async def test_an_answer_that_a_guardrail_refused_is_asked_for_again(start: Start) -> None:
    here = await start("bad", "good")
    failed = await fail(here, Clerk.judged, "hi")

    assert (await here.runs.retry(failed.id)).content == "good"


async def test_a_cancelled_run_that_was_waiting_waits_again(start: Start) -> None:
    here = await start(tool_call("pay", {"euros": 5}), "done")
    suspended = await here.get(Clerk).ask("hi")
    run_id = suspended.run_id or ""
    before = (await here.runs.get(run_id)).pending
    cancelled = await here.runs.cancel(run_id, "no")
    assert (cancelled.pending, cancelled.attempts) == ((), 1)

    result = await here.runs.retry(run_id, by="ann")

    run = await here.runs.get(run_id)
    assert (run.status, run.error, run.attempts) == ("suspended", None, 1)
    assert run.pending == before == tuple(result.pending)
    assert [each.answer for each in run.history] == ["cancel", "retry"]
    assert (await here.runs.resume(run_id, {before[0].id: approve()})).content == "done"
    assert ran == [("pay", 5)]
    assert (await here.runs.get(run_id)).attempts == 1


async def test_a_run_that_failed_beside_a_pending_call_asks_again(start: Start) -> None:
    here = await start(asks(tool_call("pay", {"euros": 5}), tool_call("pay", {"euros": 6})), DOWN, "done")
    suspended = await here.get(Clerk).ask("hi")
    run_id = suspended.run_id or ""
    first, second = (each.id for each in suspended.pending)
    await here.runs.resume(run_id, {first: approve()})
    store = await here.runs.store()
    stored = await store.load(run_id)
    assert stored is not None
    # As a run that fails while it continues: for example a bean that cannot be made.
    document = RunDocument.from_json(stored.document).changed(waiting=(), error_type="E", error_text="e")
    await store.change(run_id, stored.version, RunChanges(status="failed", document=document.to_json()))

    result = await here.runs.retry(run_id)

    assert [each.id for each in result.pending] == [second]
    with pytest.raises(ModelConnectionError):
        await here.runs.resume(run_id, {second: approve()})
    assert (await here.runs.retry(run_id)).content == "done"
    assert ran == [("pay", 5), ("pay", 6)]


@pytest.mark.parametrize("status", ["running", "suspended", "completed"])
async def test_only_failed_and_cancelled_runs_are_retried(start: Start, status: str) -> None:
    here = await start(tool_call("pay", {"euros": 5}) if status == "suspended" else "done")
    if status == "running":
        store, run_id = await here.runs.store(), "other"
        now = await store.now()
        run = StoredRun(
            id=run_id, service="x", method="y", status="running", document="{}", created_at=now, updated_at=now
        )
        await store.create(run, owner="another process")
    elif status == "suspended":
        run_id = (await here.get(Clerk).ask("hi")).run_id or ""
    else:
        run_id = (await here.runs.start(Clerk.ask, "hi")).id
        await here.runs.result(run_id)

    with pytest.raises(RunStateError, match=f"it is {status}"):
        await here.runs.retry(run_id)
    with pytest.raises(RunNotFoundError):
        await here.runs.retry("unknown")
    with pytest.raises(TypeError, match="by="):
        await here.runs.retry(run_id, by=7)


async def test_one_of_several_retries_executes_the_run(start: Start) -> None:
    here, other = await start(DOWN, "done"), await start("done")
    failed = await fail(here, Clerk.ask, "hi")

    containers = (here, other) * 3
    outcomes = await asyncio.gather(*(each.runs.retry(failed.id) for each in containers), return_exceptions=True)

    assert [each.content for each in outcomes if isinstance(each, Result)] == ["done"]
    assert sum(isinstance(each, RunStateError) for each in outcomes) == len(containers) - 1
    assert (await here.runs.get(failed.id)).attempts == 2
    with pytest.raises(RunStateError, match="completed"):
        await other.runs.retry(failed.id)


async def test_a_run_whose_tools_were_undone_is_not_retried() -> None:
    class Account:
        @tool
        async def credit(self, euros: int) -> str:
            ran.append(euros)
            return "ok"

        @compensate_for(credit)
        async def uncredit(self, euros: int) -> None:
            ran.append(-euros)

    @register_ai_service(tools=Account, compensate_on_failure=True)
    class Bank(Protocol):
        async def ask(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("credit", {"euros": 5}), DOWN, DOWN, "done"])
    async with Container(models={"default": model}).register(Bank) as here:
        undone, untouched = await fail(here, Bank.ask, "one"), await fail(here, Bank.ask, "two")
        assert ran == [5, -5]

        with pytest.raises(RunStateError, match="undone"):
            await here.runs.retry(undone.id)

        assert (await here.runs.retry(untouched.id)).content == "done"


async def test_a_run_whose_records_are_deleted_is_not_retried(tmp_path: Path) -> None:
    async with sql.open_engine(f"sqlite:///{tmp_path / 'data.db'}") as engine:
        store = sql.SqlRunStore(engine, records_of_ended_runs="delete")
        made = Container(models={"default": ScriptedChatModel([DOWN])}).register(Clerk)
        async with made.register_instance(store, RunStore) as here:
            failed = await fail(here, Clerk.ask, "hi")

            with pytest.raises(RunStateError, match="deletes the records"):
                await here.runs.retry(failed.id)
            assert (await here.runs.get(failed.id)).attempts == 1


async def test_a_retried_run_waits_for_the_turn_of_its_conversation(start: Start) -> None:
    here = await start(DOWN, "done", "later")
    failed = await fail(here, Clerk.chat, "room", "first")

    retried = await here.runs.retry(failed.id)
    await here.get(Clerk).chat("room", "second")

    assert retried.content == "done"
    texts = [getattr(each, "text", None) for each in await here.chat_memory(Clerk, "room").messages()]
    assert texts == ["first", "done", "second", "later"]


async def test_a_run_is_not_retried_beside_another_one_of_its_conversation_that_waits(start: Start) -> None:
    here = await start(DOWN, tool_call("pay", {"euros": 5}), "paid", "done")
    failed = await fail(here, Clerk.chat, "room", "first")
    waiting = (await here.get(Clerk).chat("room", "second")).run_id or ""

    with pytest.raises(ConversationSuspendedError):
        await here.runs.retry(failed.id)

    assert (await here.runs.get(failed.id)).status == "failed"
    await here.runs.resume(waiting, {"0": approve()})
    assert (await here.runs.retry(failed.id)).content == "done"


async def test_a_run_that_was_cancelled_while_it_ran_goes_on(start: Start) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    class Slow:
        @tool(on_unknown_outcome="retry")
        async def wait(self) -> str:
            begun.set()
            await go_on.wait()
            return "waited"

    @register_ai_service(tools=Slow)
    class Waiter(Protocol):
        async def ask(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("wait"), "done"])
    async with Container(models={"default": model}).register(Waiter) as here:
        run = await here.runs.start(Waiter.ask, "hi")
        await begun.wait()
        assert (await here.runs.get(run.id)).attempts == 1
        await here.runs.cancel(run.id)
        go_on.set()

        assert (await here.runs.retry(run.id)).content == "done"
        assert (await here.runs.get(run.id)).attempts == 2


# --- run_retries


async def between_tries(here: Container, run_id: str, attempts: int) -> Run[Any]:
    return await wait_until(here, run_id, lambda run: run.attempts == attempts and run.error is not None)


async def test_a_failed_run_is_tried_again_after_its_time(start: Start) -> None:
    here = await start(tool_call("step", {"n": 1}), DOWN, DOWN, "done")
    run = await here.runs.start(Patient.ask, "hi")
    waiting = asyncio.create_task(here.runs.result(run))

    first = await between_tries(here, run.id, 1)
    assert (first.status, first.error) == ("running", "ModelConnectionError: the model server is down")
    await skip_time(here, timedelta(seconds=50))
    assert (await here.runs.get(run.id)).attempts == 1
    await skip_time(here, timedelta(seconds=10))
    await between_tries(here, run.id, 2)
    await skip_time(here, timedelta(seconds=110))  # the second wait is twice as long
    assert (await here.runs.get(run.id)).attempts == 2
    assert not waiting.done()
    await skip_time(here, timedelta(seconds=10))

    assert await waiting == "done"
    done = await here.runs.get(run.id)
    assert (done.status, done.error, done.attempts, ran) == ("completed", None, 3, [1])


async def test_the_number_of_tries_is_limited(start: Start) -> None:
    here = await start(DOWN, DOWN, DOWN, "done")
    run = await here.runs.start(Patient.ask, "hi")
    for attempts in (1, 2):
        await between_tries(here, run.id, attempts)
        await skip_time(here, HOUR)

    failed = await wait_until(here, run.id, lambda run: run.status == "failed")
    assert failed.attempts == 3
    assert (await here.runs.retry(run.id)).content == "done"
    assert (await here.runs.get(run.id)).attempts == 4


async def test_a_run_between_tries_is_executed_by_nobody(start: Start) -> None:
    here = await start(DOWN, "done")
    run = await here.runs.start(Patient.ask, "hi")
    await between_tries(here, run.id, 1)

    with pytest.raises(Exception, match="another process"):
        await here.runs.execute(run.id, timeout=0.1)
    with pytest.raises(RunStateError, match="running"):
        await here.runs.retry(run.id)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(here.runs.resume(run.id, {}), 0.1)
    assert (await here.runs.get(run.id)).attempts == 1


async def test_a_caller_with_the_id_waits_over_tries(start: Start) -> None:
    here = await start(DOWN, DOWN, "done")
    run = await here.runs.start(Patient.with_id, "7", "hi")
    waiting = asyncio.create_task(here.runs.resume("7", {}))
    for attempts in (1, 2):
        await between_tries(here, run.id, attempts)
        await skip_time(here, HOUR)

    assert (await waiting).content == "done"


async def test_another_process_makes_the_next_try(start: Start) -> None:
    here = await start(DOWN, take_over_runs=False)
    run = await here.runs.start(Patient.ask, "hi")
    await between_tries(here, run.id, 1)

    other = await start("done")
    await skip_time(other, HOUR)

    assert await other.runs.result(run.id) == "done"
    assert (await other.runs.get(run.id)).attempts == 2


async def test_a_run_between_tries_can_be_cancelled_and_retried(start: Start) -> None:
    here = await start(DOWN, "done")
    run = await here.runs.start(Patient.ask, "hi")
    await between_tries(here, run.id, 1)

    cancelled = await here.runs.cancel(run.id, "enough")
    await skip_time(here, HOUR)

    assert (cancelled.status, cancelled.error) == ("cancelled", "enough")
    with pytest.raises(RunCancelledError):
        await here.runs.result(run)
    assert (await here.runs.retry(run.id)).content == "done"


async def test_a_call_that_is_not_started_is_not_tried_again(start: Start) -> None:
    here = await start(tool_call("pay", {"euros": 5}), DOWN, DOWN)
    run_id = ""
    try:
        await here.get(Patient).ask("hi")
    except Exception as error:
        run_id = getattr(error, "run_id", "")

    with pytest.raises(ModelConnectionError):
        await here.runs.resume(run_id, {"0": approve()})

    assert (await here.runs.get(run_id)).status == "failed"


async def test_approval_between_tries_does_not_count(start: Start) -> None:
    here = await start(tool_call("pay", {"euros": 5}), DOWN, "done")
    run = await here.runs.start(Patient.ask, "hi")
    await wait_until(here, run.id, lambda run: run.status == "suspended")
    waiting = asyncio.create_task(here.runs.resume(run.id, {"0": approve()}))
    await between_tries(here, run.id, 1)
    await skip_time(here, HOUR)

    assert (await waiting).content == "done"
    assert ((await here.runs.get(run.id)).attempts, ran) == (2, [("pay", 5)])


async def test_a_run_whose_token_server_failed_calls_the_tool_again(start: Start) -> None:
    Work.failures = 2
    here = await start(tool_call("fetch"), "done")
    run = await here.runs.start(Patient.ask, "hi")
    for attempts in (1, 2):
        await between_tries(here, run.id, attempts)
        await skip_time(here, HOUR)

    assert await here.runs.result(run) == "done"
    assert ran == ["fetch"] * 3


FINAL: dict[str, tuple[Any, ...]] = {
    "ModelRefusedError": (ModelRefusedError("no"),),
    "ToolRoundsExceededError": (tool_call("step", {"n": 1}), tool_call("step", {"n": 2})),
    "ToolAbort": (tool_call("give_up"),),
}


@pytest.mark.parametrize("name", FINAL)
async def test_some_errors_are_final(start: Start, name: str) -> None:
    here = await start(*FINAL[name])

    failed = await fail(here, Patient.ask, "hi")

    assert ((failed.error or "").partition(":")[0], failed.attempts) == (name, 1)


async def test_a_guardrail_is_final(start: Start) -> None:
    here = await start("bad", "good")

    failed = await fail(here, Patient.judged, "hi")

    assert (failed.error or "").startswith(OutputGuardrailError.__name__)


async def test_runs_are_tried_again_without_a_bean_for_their_store() -> None:
    model = ScriptedChatModel([DOWN, "done"])
    async with Container(models={"default": model}).register(Patient) as here:
        run = await here.runs.start(Patient.ask, "hi")
        await between_tries(here, run.id, 1)
        await skip_time(here, HOUR)

        assert await here.runs.result(run) == "done"


async def test_runs_are_tried_again_when_their_time_has_passed_by_itself() -> None:
    @register_ai_service(run_retries=Retries(attempts=3, wait=timedelta(milliseconds=1)))
    class Quick(Protocol):
        async def ask(self, text: str) -> str: ...

    model = ScriptedChatModel([DOWN, DOWN, "done"])
    async with Container(models={"default": model}).register(Quick) as here:
        run = await here.runs.start(Quick.ask, "hi")

        assert await here.runs.result(run, timeout=60) == "done"
        assert (await here.runs.get(run.id)).attempts == 3


class Crashing(Kept):
    """Works on runs until the write with the number `at`, and fails from then on; `after`: that write is done."""

    def __init__(self, runs: dict[str, Any], at: int, after: bool) -> None:
        super().__init__()
        self._runs, self.at, self.after, self.writes = runs, at, after, 0

    def __getattribute__(self, name: str) -> Any:
        work, writes = super().__getattribute__(name), ("create", "append", "change", "acquire", "add_events")
        if name not in (*writes, "load", "lapsed", "records", "find"):
            return work

        async def call(*args: Any, **kwargs: Any) -> Any:
            was_dead = 0 < self.at <= self.writes
            self.writes += name in writes
            is_dead = 0 < self.at <= self.writes
            if was_dead or (is_dead and not self.after):
                raise BrokenError
            result = await work(*args, **kwargs)
            if is_dead:
                raise BrokenError
            return result

        return call


class Shaky:
    """A model that answers from the conversation, and fails the first two times after the tool has run."""

    def __init__(self) -> None:
        self.failures = 2

    async def chat(self, request: Any) -> ChatResponse:
        if len(request.messages) == 1:
            return asks(tool_call("step", {"n": 1}))
        if self.failures:
            self.failures -= 1
            raise DOWN
        return says("done")


async def run_to_the_end(store: InMemoryRunStore, model: Shaky) -> Run[Any]:
    """Start a run unless there is one, and let time pass until it has ended, or the store has crashed."""
    container = Container(models={"default": model}).register(Patient).register_instance(store, RunStore)
    async with container as here:
        run_id = next(iter(store._runs), None) or (await here.runs.start(Patient.ask, "hi")).id
        async with asyncio.timeout(60):
            while (run := await here.runs.get(run_id)).status == "running":
                await skip_time(here, HOUR)
                await asyncio.sleep(0.001)
    return run


@pytest.mark.parametrize("after", [False, True])
async def test_a_crash_at_any_write_loses_no_try(after: bool) -> None:
    counting = Crashing({}, 0, False)
    assert (await run_to_the_end(counting, Shaky())).attempts == 3
    assert counting.writes > 10

    for at in range(1, counting.writes + 1):
        ran.clear()
        runs: dict[str, Any] = {}
        model, kept = Shaky(), Kept()
        with suppress(BrokenError, RunStoreError):
            await run_to_the_end(Crashing(runs, at, after), model)
        kept._runs = deepcopy(runs)
        run = await run_to_the_end(kept, model)

        place = f"write {at}"
        assert run.status == "completed", (place, run.error)
        assert run.attempts in (2, 3, 4), place  # a failure that was not stored, or an execution that was not ended
        assert ran in ([1], []), place  # never twice; a start without a result is an unknown outcome


def test_waits_are_doubled_up_to_an_hour() -> None:
    waits = [Retries(10, timedelta(minutes=10)).wait_after(failures) for failures in range(1, 6)]
    assert [each // MINUTE for each in waits] == [10, 20, 40, 60, 60]
    assert Retries(10, timedelta(hours=3)).wait_after(4) == timedelta(hours=3)
    assert Retries(2000, timedelta(microseconds=1)).wait_after(1500) == HOUR
    assert Retries(5, timedelta()).wait_after(3) == timedelta()


@pytest.mark.parametrize("given", [{"attempts": 0}, {"attempts": True}, {"attempts": "5"}, {"wait": -MINUTE}])
def test_invalid_retries_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"invalid {next(iter(given))}="):
        Retries(**given)
    with pytest.raises(TypeError, match=r"datetime\.timedelta"):
        Retries(wait=60)  # type: ignore[arg-type]  # the mistake


class Older(InMemoryRunStore):
    """A store of the program's own, which keeps no `next_at`."""

    supports = frozenset()


@pytest.mark.parametrize("as_type", ["instance", "class", "producer"])
async def test_run_retries_need_a_store_that_supports_them(as_type: str) -> None:
    container = Container(models={"default": ScriptedChatModel(["done"])}).register(Patient)
    if as_type == "instance":
        container.register_instance(Older(), RunStore)
    elif as_type == "class":
        container.register(Older)
    else:

        @produces(scope="application")
        def store() -> RunStore:
            return Older()

        container.register(store)

    with pytest.raises(IllegalConfigurationError, match="Patient: run_retries= needs a RunStore"):
        async with container:
            pass


async def test_everything_else_works_with_an_older_store() -> None:
    model = ScriptedChatModel([DOWN, "done"])
    async with Container(models={"default": model}).register(Clerk).register_instance(Older(), RunStore) as here:
        failed = await fail(here, Clerk.ask, "hi")

        assert (await here.runs.retry(failed.id)).content == "done"
        assert (await here.runs.get(failed.id)).attempts == 2


def test_run_retries_and_compensation_exclude_each_other() -> None:
    @register_ai_service(run_retries=Retries(), compensate_on_failure=True)
    class Both(Protocol):
        async def ask(self, text: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Both).check()

    assert "run_retries=" in problem.what
    assert "compensate_on_failure" in problem.what


def test_other_values_of_run_retries_are_problems() -> None:
    given: Any = 3

    @register_ai_service(run_retries=given)
    class Wrong(Protocol):
        async def ask(self, text: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Wrong).check()

    assert "invalid run_retries=3" in problem.what
    assert ServiceOptions().run_retries is None


class Locked(sql.SqlRunStore):
    """A store whose database refuses the first write of an execution, with the statement and its values."""

    refusals = 1

    async def append(self, run_id: str, generation: int, records: Any, changes: Any = None, events: Any = ()) -> None:
        if self.refusals and changes is not None:
            self.refusals -= 1
            raise OperationalError("UPDATE runs SET document=?", (changes.document,), Exception("database is locked"))
        await super().append(run_id, generation, records, changes, events)


async def test_a_write_that_fails_when_an_execution_begins_does_not_log_the_arguments(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    container = Container(models={"default": ScriptedChatModel(["done"])}).register(Patient)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(sql.open_engine(f"sqlite:///{tmp_path / 'data.db'}"))
        here = await stack.enter_async_context(container.register_instance(Locked(engine), RunStore))
        run = await here.runs.start(Patient.ask, "my private words")

        assert await here.runs.result(run, timeout=60) == "done"
    assert "database is locked" in caplog.text
    assert "my private words" not in caplog.text
