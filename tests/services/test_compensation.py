"""`@compensate_for`: tools that succeeded are undone when another tool fails, and the result and events say so.

Not here: the failure of a whole call (`test_compensated_calls`), runs (`test_compensated_runs`), problems at startup
(`test_compensation_checks`).
"""

import asyncio
import json
import logging
from typing import Any

import pytest

from tests.listening import Events
from tests.services.bank import CREDIT, WITHDRAW, Bank, Trips, assistant, book, results, rolled_back, trips
from toolbox import (
    AiMessage,
    CompensatedEvent,
    Compensation,
    ToolExecution,
    compensate_for,
    hide_details,
    return_to_model,
    tool,
)
from toolbox.errors import RunStoreError
from toolbox.runs import IdempotencyKey, RunId
from toolbox.testing import tool_call

pytestmark = pytest.mark.anyio


# --- a failed tool


async def test_a_failed_tool_undoes_the_tools_of_earlier_rounds() -> None:
    service, model, bank = assistant(CREDIT, WITHDRAW, "sorry")
    result = await service.ask("q")

    assert bank.accounts == {"ada": 0}
    arguments = {"name": "ada", "euros": "10.50", "note": "none"}
    assert bank.undone == [("credit", json.dumps(arguments), "TX-ada")]
    assert result.content == "sorry"
    assert results(model) == [rolled_back("credit"), ("bob has no money", True)]
    assert [each.result for each in result.tool_executions] == ["TX-ada", "bob has no money"]


async def test_nothing_is_undone_without_the_options() -> None:
    service, model, bank = assistant(CREDIT, WITHDRAW, "sorry", compensate_on_tool_errors=False)
    await service.ask("q")
    assert bank.undone == []
    assert results(model)[0] == ("TX-ada", False)


@pytest.mark.parametrize(
    ("calls", "undone"),
    [
        (("full", "hotel", "car"), ["car", "hotel"]),
        (("flight", "full", "car"), ["car", "flight"]),
        (("flight", "hotel", "full"), ["hotel", "flight"]),
    ],
)
@pytest.mark.parametrize("together", [False, True])
async def test_all_tools_of_the_round_run_and_are_undone_in_reverse_order(
    calls: tuple[str, ...], undone: list[str], together: bool
) -> None:
    reply = AiMessage(None, [book(each) for each in calls])
    service, model, bank = assistant(reply, "sorry", concurrent_tools=together)
    await service.ask("q")
    assert [each[0] for each in bank.undone] == undone
    texts = results(model)
    assert [text == rolled_back("book", "book") for text in texts] == [each != "full" for each in calls]


async def test_each_success_is_undone_once_when_the_model_tries_again() -> None:
    service, model, bank = assistant(CREDIT, WITHDRAW, CREDIT, WITHDRAW, "sorry")
    await service.ask("q")
    assert len(bank.undone) == 2
    assert results(model) == [
        rolled_back("credit"),
        ("bob has no money", True),
        rolled_back("credit"),
        ("bob has no money", True),
    ]


async def test_successes_after_a_compensation_stay() -> None:
    service, model, bank = assistant(WITHDRAW, CREDIT, "done")
    await service.ask("q")
    assert bank.undone == []
    assert results(model)[1] == ("TX-ada", False)


async def test_the_first_failed_call_of_the_reply_gives_the_name() -> None:
    service, model, _ = assistant(AiMessage(None, [CREDIT, book("full"), WITHDRAW]), "sorry", concurrent_tools=True)
    await service.ask("q")
    assert results(model)[0] == rolled_back("credit", "book")


async def test_the_conversation_remembers_what_was_rolled_back() -> None:
    service, model, _ = assistant(CREDIT, WITHDRAW, "sorry", "later")
    await service.chat("room", "a")
    await service.chat("room", "b")
    assert results(model) == [rolled_back("credit"), ("bob has no money", True)]


async def test_a_compensation_can_take_the_tools_own_parameters_with_defaults() -> None:
    service, _, bank = assistant(AiMessage(None, [book("hotel"), book("car", nights="3"), WITHDRAW]), "sorry")
    await service.ask("q")
    assert bank.undone == [("car", 3), ("hotel", 1)]


async def test_a_compensation_gets_its_own_idempotency_key_and_the_id_of_the_run() -> None:
    keys: list[str] = []
    ids: list[str] = []

    class Payments:
        @tool
        def pay(self, euros: int, key: IdempotencyKey, run: RunId) -> str:
            keys.append(key)
            ids.append(run)
            return "paid"

        @compensate_for(pay)
        def refund(self, euros: int, key: IdempotencyKey, run: RunId) -> None:
            keys.append(key)
            ids.append(run)

    service, _, _ = assistant(tool_call("pay", {"euros": 3}), WITHDRAW, "sorry", tools=[Payments(), Bank()])
    await service.ask("q")
    paid, refunded = keys
    assert paid != refunded
    assert len(set(ids)) == 1


async def test_a_failing_compensation_is_logged_and_the_others_still_run(caplog: pytest.LogCaptureFixture) -> None:
    service, model, bank = assistant(AiMessage(None, [CREDIT, book("stuck"), book("car"), WITHDRAW]), "sorry")
    with caplog.at_level(logging.ERROR):
        assert (await service.ask("q")).content == "sorry"
    assert [each[0] for each in bank.undone] == ["car", "stuck", "credit"]
    [record] = [each for each in caplog.records if "failed to undo" in each.message]
    assert record.getMessage() == "Bank._cancel failed to undo tool 'book': cannot cancel"
    assert record.exc_info is not None
    texts = results(model)
    assert texts[0] == rolled_back("credit")
    assert texts[1] == (
        "Tool 'book' was executed successfully; undoing it after the failure of tool 'withdraw' failed",
        True,
    )


async def test_an_error_of_a_compensation_about_a_run_is_logged_like_others() -> None:
    class Ledger(Bank):
        @compensate_for("credit")
        def uncredit(self, execution: ToolExecution) -> None:
            self.undone.append("credit")
            raise RunStoreError("another run", "no connection")

    bank = Ledger()
    service, model, _ = assistant(AiMessage(None, [book("car"), CREDIT, WITHDRAW]), "sorry", tools=[bank])
    assert (await service.ask("q")).content == "sorry"
    assert bank.undone == ["credit", ("car", 1)]
    assert results(model)[0] == rolled_back("book")


@pytest.mark.parametrize(
    "call",
    [tool_call("again"), tool_call("credit", {"name": 1}), tool_call("unknown")],
    ids=["retry", "arguments", "unknown"],
)
async def test_retries_bad_arguments_and_unknown_tools_undo_nothing(call: Any) -> None:
    service, _, bank = assistant(
        CREDIT, call, "x", on_unknown_tool=return_to_model, on_tool_arguments_error=return_to_model
    )
    await service.ask("q")
    assert bank.undone == []


async def test_an_error_that_a_handler_answers_still_counts_as_a_failure() -> None:
    service, _, bank = assistant(CREDIT, WITHDRAW, "x", on_tool_execution_error=hide_details)
    await service.ask("q")
    assert len(bank.undone) == 1


async def test_streams_and_synchronous_methods_undo_too() -> None:
    service, model, bank = assistant(CREDIT, WITHDRAW, "sorry")
    assert [type(each).__name__ async for each in service.events("q")][-1] == "CompleteResponse"
    assert len(bank.undone) == 1
    assert results(model)[0] == rolled_back("credit")

    service, model, bank = assistant(CREDIT, book("full"), "sorry")
    assert await asyncio.to_thread(service.wait, "q") == "sorry"
    assert len(bank.undone) == 1


# --- what is said about compensations


async def test_a_result_and_an_event_name_what_was_undone_with_the_arguments_that_ran() -> None:
    events = Events()
    calls = [tool_call("book", {"seats": 2}), tool_call("book", {"seats": 6}), tool_call("pay", {})]
    async with trips(AiMessage(None, calls), "failed", events=events) as here:
        result = await here.get(Trips).plan("x")

    assert result.compensations == (
        Compensation("book", {"seats": 12}, "too late"),
        Compensation("book", {"seats": 4}),
    )
    assert [(each.tool_name, each.arguments) for each in events.of(CompensatedEvent)] == [
        ("book", {"seats": 12}),
        ("book", {"seats": 4}),
    ]
    assert [str(each.error) for each in events.of(CompensatedEvent)] == ["too late", "None"]
    assert all(
        each.context.request is not None and each.context.request.name == "book" for each in events.of(CompensatedEvent)
    )


async def test_a_call_without_compensations_says_so() -> None:
    async with trips(tool_call("book", {"seats": 2}), "booked") as here:
        assert (await here.get(Trips).plan("x")).compensations == ()
