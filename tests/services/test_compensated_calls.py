"""Compensation when the whole call fails, is cancelled, or was changed by an interceptor; services as tools."""

import asyncio
from contextlib import suppress
from typing import Any, Protocol

import pytest

from tests.conftest import Clock
from tests.services.bank import CREDIT, WITHDRAW, Bank, assistant, book, results, rolled_back
from toolbox import (
    AiMessage,
    Container,
    MemoryId,
    ToolAbort,
    ToolboxSettings,
    ToolExecuted,
    ToolExecution,
    ToolExecutionResult,
    ToolExecutionResultMessage,
    ToolRoundsExceededError,
    compensate_for,
    invocation_record,
    register_ai_service,
    tool,
)
from toolbox.interceptors import ToolInterceptor, ToolInvocation, ToolProceed
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


# --- the whole call fails


ON_FAILURE = {"compensate_on_tool_errors": False, "compensate_on_failure": True}


async def test_an_error_of_the_model_undoes_everything_in_reverse_order() -> None:
    service, _, bank = assistant(CREDIT, book("car"), ConnectionError("down"), **ON_FAILURE)
    with pytest.raises(ConnectionError):
        await service.ask("q")
    assert [each[0] for each in bank.undone] == ["car", "credit"]


async def test_a_failed_tool_alone_undoes_nothing_when_the_call_succeeds() -> None:
    service, model, bank = assistant(CREDIT, WITHDRAW, "sorry", **ON_FAILURE)
    await service.ask("q")
    assert bank.undone == []
    assert results(model)[0] == ("TX-ada", False)


async def test_a_limit_undoes_everything() -> None:
    service, _, bank = assistant(CREDIT, CREDIT, max_tool_rounds=1, **ON_FAILURE)
    with pytest.raises(ToolRoundsExceededError):
        await service.ask("q")
    assert len(bank.undone) == 1


async def test_an_abort_undoes_the_finished_tools_of_the_same_round() -> None:
    class Stop:
        @tool
        async def stop(self) -> str:
            raise ToolAbort("stop")

    for together in (False, True):
        bank = Bank()
        calls = AiMessage(None, [CREDIT, tool_call("stop")])
        service, _, _ = assistant(calls, tools=[bank, Stop()], concurrent_tools=together, **ON_FAILURE)
        with pytest.raises(ToolAbort):
            await service.ask("q")
        assert len(bank.undone) <= 1
        if not together:
            assert len(bank.undone) == 1


async def test_both_options_undo_each_success_once() -> None:
    service, _, bank = assistant(CREDIT, WITHDRAW, ConnectionError("down"), compensate_on_failure=True)
    with pytest.raises(ConnectionError):
        await service.ask("q")
    assert len(bank.undone) == 1


# --- services as tools


@register_ai_service(tools=Bank, compensate_on_failure=True)
class Clerk(Protocol):
    @tool
    async def transfer(self, text: str) -> str: ...


async def office(*replies: Any) -> tuple[object, list[Any], list[str]]:
    """Call a service with the clerk as a tool. Returns its answer or error, what the bank undid, undone transfers."""
    bank, undone = Bank(), []

    @compensate_for("transfer")
    def take_back(execution: ToolExecution) -> None:
        undone.append(execution.result)

    @register_ai_service(tools=[Clerk, take_back], compensate_on_failure=True)
    class Office(Protocol):
        async def ask(self, text: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel(replies)}).register(Office, Clerk)
    async with container.register_instance(bank):
        try:
            answer: object = await container.get(Office).ask("q")
        except ConnectionError as error:
            answer = error
    return answer, bank.undone, undone


TRANSFER = tool_call("transfer", {"text": "10 to ada"})


async def test_a_service_that_fails_as_a_tool_undoes_its_tools_although_the_caller_goes_on() -> None:
    answer, bank, undone = await office(TRANSFER, CREDIT, ConnectionError("down"), "try tomorrow")
    assert (answer, [each[0] for each in bank], undone) == ("try tomorrow", ["credit"], [])


async def test_a_service_whose_model_answers_after_a_failed_tool_undoes_nothing() -> None:
    answer, bank, undone = await office(TRANSFER, CREDIT, WITHDRAW, "half of it worked", "done")
    assert (answer, bank, undone) == ("done", [], [])


async def test_a_call_of_a_service_that_succeeded_is_undone_by_its_own_compensation() -> None:
    answer, bank, undone = await office(TRANSFER, CREDIT, "transferred", ConnectionError("down"))
    assert isinstance(answer, ConnectionError)
    assert (bank, undone) == ([], ["transferred"])


class Waiting:
    def __init__(self) -> None:
        self.started = asyncio.Event()

    @tool
    async def wait_for_ever(self) -> str:
        self.started.set()
        await asyncio.Event().wait()
        return ""


async def test_cancelling_the_caller_undoes_everything() -> None:
    bank, waiting = Bank(), Waiting()
    service, _, _ = assistant(CREDIT, tool_call("wait_for_ever"), tools=[bank, waiting], **ON_FAILURE)
    task = asyncio.create_task(service.ask("q"))
    await waiting.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(bank.undone) == 1


class Stubborn:
    """Two tools that meet. When cancelled, one succeeds; the other waits until it is cancelled again."""

    def __init__(self) -> None:
        self.meeting = asyncio.Barrier(3)
        self.cleaning = asyncio.Event()
        self.undone = 0

    @tool
    async def succeed(self) -> str:
        with suppress(asyncio.CancelledError):
            await self.meeting.wait()
            await asyncio.Event().wait()
        return "done"

    @tool
    async def clean_up(self) -> str:
        try:
            await self.meeting.wait()
            await asyncio.Event().wait()
        finally:
            self.cleaning.set()
            await asyncio.Event().wait()
        return "never"

    @compensate_for(succeed)
    def undo(self) -> None:
        self.undone += 1


async def test_a_second_cancellation_while_tools_clean_up_undoes_everything() -> None:
    tools = Stubborn()
    both = AiMessage(None, [tool_call("succeed"), tool_call("clean_up")])
    service, _, _ = assistant(both, tools=[tools], concurrent_tools=True, **ON_FAILURE)
    with invocation_record() as record:
        task = asyncio.create_task(service.ask("q"))
    await tools.meeting.wait()
    task.cancel()
    await tools.cleaning.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tools.undone == 1
    assert [each.request.name for each in record.tool_executions] == ["succeed"]


class SlowToUndo(Waiting):
    """A tool whose compensation waits until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.undoing, self.released, self.undone = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @tool
    async def pay(self) -> str:
        return "paid"

    @compensate_for(pay)
    async def pay_back(self) -> None:
        self.undoing.set()
        await self.released.wait()
        self.undone.set()


@register_ai_service(tools=SlowToUndo, compensate_on_failure=True)
class Cashier(Protocol):
    async def ask(self, text: str) -> str: ...


async def start_a_payment(tools: SlowToUndo) -> tuple[Container, "asyncio.Task[str]"]:
    """Start a container and a call that has paid and waits."""
    model = ScriptedChatModel([tool_call("pay"), tool_call("wait_for_ever")])
    container = Container(models={"default": model}, settings=ToolboxSettings(stop_timeout=100))
    await container.register(Cashier).register_instance(tools).__aenter__()
    call = asyncio.create_task(container.get(Cashier).ask("q"))
    await tools.started.wait()
    return container, call


async def test_a_call_that_the_stop_cancels_has_time_to_undo_its_tools(clock: Clock) -> None:
    container, call = await start_a_payment(tools := SlowToUndo())
    stopping = asyncio.create_task(container.__aexit__(None, None, None))
    while not (tools.undoing.is_set() or stopping.done()):
        clock.advance(1)
        await asyncio.sleep(0)
    for _ in range(20):
        clock.advance(1)
        await asyncio.sleep(0)
    assert not stopping.done()
    tools.released.set()
    await stopping
    assert tools.undone.is_set()
    assert call.cancelled()


async def test_a_stop_names_the_compensation_that_does_not_end(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    container, call = await start_a_payment(tools := SlowToUndo())
    call.cancel()
    await tools.undoing.wait()
    call.cancel()
    while not call.done():  # it leaves a compensation that takes too long
        clock.advance(101)
        await asyncio.sleep(0)
    caplog.clear()
    stopping = asyncio.create_task(container.__aexit__(None, None, None))
    while not stopping.done():
        clock.advance(101)
        await asyncio.sleep(0)
    assert caplog.messages == ["cancelled because the container is stopping (waited 100 s): Cashier.ask (compensation)"]
    tools.released.set()
    await tools.undone.wait()


class PaysTwice:
    """A tool that is undone when the test lets it, and one that fails."""

    def __init__(self) -> None:
        self.undoing, self.released, self.undone = asyncio.Event(), asyncio.Event(), list[int]()

    @tool
    async def pay(self, order: int) -> str:
        return f"paid {order}"

    @compensate_for(pay)
    async def pay_back(self, order: int) -> None:
        self.undoing.set()
        await self.released.wait()
        self.undone.append(order)

    @tool
    async def refuse(self) -> str:
        raise ConnectionError("no")


TWICE = (tool_call("pay", {"order": 1}), tool_call("pay", {"order": 2}))


@pytest.mark.parametrize("of_run", [False, True])
@pytest.mark.parametrize("in_round", [False, True])
async def test_who_ends_a_call_that_undoes_its_tools_waits_and_each_is_undone_once(
    in_round: bool, of_run: bool, caplog: pytest.LogCaptureFixture
) -> None:
    @register_ai_service(tools=PaysTwice, compensate_on_failure=True, compensate_on_tool_errors=in_round)
    class Teller(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    replies: list[Any] = [AiMessage(None, TWICE), OSError("away")]
    if in_round:
        replies = [AiMessage(None, [*TWICE, tool_call("refuse")])]
    container = Container(models={"default": ScriptedChatModel(replies)})
    async with container.register(Teller).register_instance(tools := PaysTwice()) as here:
        call = asyncio.create_task(here.get(Teller).chat("r", "pay")) if not of_run else None
        run = await here.runs.start(Teller.chat, "r", "pay") if of_run else None
        await tools.undoing.wait()
        ending = call if run is None else asyncio.create_task(here.runs.cancel(run.id))
        if call is not None:
            call.cancel()
        assert ending is not None
        assert not (await asyncio.wait([ending], timeout=0.05))[0]
        tools.released.set()
        await asyncio.wait([ending])
        kept = [each.message for each in await here.conversations.of(Teller, "r").history()]

    assert tools.undone == [2, 1]
    assert ["rolled back" in each.text for each in kept if isinstance(each, ToolExecutionResultMessage)][:2] == [
        True
    ] * 2
    assert "not all its tools are undone" not in caplog.text


async def test_a_deadline_undoes_everything(clock: Clock) -> None:
    bank, waiting = Bank(), Waiting()
    service, _, _ = assistant(CREDIT, tool_call("wait_for_ever"), tools=[bank, waiting], timeout=100, **ON_FAILURE)
    task = asyncio.create_task(service.ask("q"))
    await waiting.started.wait()
    clock.advance(101)
    with pytest.raises(TimeoutError):
        await task
    assert len(bank.undone) == 1


async def test_leaving_a_stream_undoes_everything() -> None:
    service, _, bank = assistant(CREDIT, "x", **ON_FAILURE)
    stream = service.events("q")
    async for event in stream:
        if isinstance(event, ToolExecuted):
            break
    await stream.aclose()
    assert len(bank.undone) == 1


async def test_a_stream_that_is_read_to_its_end_undoes_nothing() -> None:
    service, _, bank = assistant(CREDIT, "x", **ON_FAILURE)
    assert [type(each).__name__ async for each in service.events("q")][-1] == "CompleteResponse"
    assert bank.undone == []


async def test_the_next_call_reads_that_the_tools_of_a_failed_one_were_undone() -> None:
    service, model, _ = assistant(CREDIT, ConnectionError("down"), "again", **ON_FAILURE)
    with pytest.raises(ConnectionError):
        await service.chat("room", "a")
    await service.chat("room", "b")
    [result] = [each for each in model.requests[-1].messages if isinstance(each, ToolExecutionResultMessage)]
    assert "rolled back" in result.text
    assert result.is_error


# --- interceptors


class Skipping(ToolInterceptor):
    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        if call.specification.name == "credit":
            return ToolExecutionResult("from a cache")
        return await proceed(call)


class Changing(ToolInterceptor):
    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        if call.specification.name == "book":
            await proceed(call.with_arguments(what="bus"))
            return ToolExecutionResult("refused", is_error=True)
        return await proceed(call)


async def test_a_tool_that_an_interceptor_skipped_is_not_undone() -> None:
    service, model, bank = assistant(AiMessage(None, [CREDIT, WITHDRAW]), "x", interceptors=[Skipping])
    await service.ask("q")
    assert bank.undone == []
    assert results(model)[0] == ("from a cache", False)


async def test_a_tool_that_ran_with_other_arguments_is_undone_with_these() -> None:
    service, model, bank = assistant(AiMessage(None, [book("car"), WITHDRAW]), "x", interceptors=[Changing])
    await service.ask("q")
    assert bank.undone == [("bus", 1)]
    assert results(model)[0] == rolled_back("book")


class Counting(ToolInterceptor):
    """Numbers the calls of `book`, and answers the third one itself."""

    def __init__(self) -> None:
        self.calls = 0

    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        self.calls += 1
        if self.calls == 3:
            return ToolExecutionResult("from a cache")
        return await proceed(call.with_arguments(what=f"car {self.calls}"))


@pytest.mark.parametrize("together", [False, True])
async def test_a_request_object_that_a_model_gives_again_is_another_call(together: bool) -> None:
    same = book("car")
    replies = [AiMessage(None, [same, same, same])] if together else [same, same, same]
    service, _, bank = assistant(*replies, ConnectionError("down"), interceptors=[Counting()], **ON_FAILURE)
    with pytest.raises(ConnectionError):
        await service.ask("q")
    assert bank.undone == [("car 2", 1), ("car 1", 1)]
