"""Runs execute any body: what stores, owns, executes and reads them needs no service."""

import asyncio
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from toolbox import Container, UserMessage
from toolbox.runs.documents import RunDocument, WaitingCall
from toolbox.runs.effects import effect
from toolbox.runs.new_documents import describe_run, new_header
from toolbox.runs.new_runs import NewRuns
from toolbox.runs.places import RecordKey
from toolbox.runs.prepared_runs import PreparedRuns
from toolbox.runs.run_answers import Answer
from toolbox.runs.run_body import PreparedRun, RunBody, SendEvent, ShowWork
from toolbox.runs.run_execution import NewRun, RunExecution
from toolbox.runs.run_session import Recorded, RunSession
from toolbox.runs.store import StoredRun
from toolbox.runs.stored_runs import StoredRuns
from toolbox.services.outputs import Result

pytestmark = pytest.mark.anyio


class Sum:
    """Adds numbers, each as an effect. Before the second it waits until it may go on."""

    waits_in_conversation = False

    def __init__(self) -> None:
        self.counted: list[int] = []
        self.waits, self.may_go_on = asyncio.Event(), asyncio.Event()

    def conversation_of(self, arguments: Mapping[str, Any], /) -> None:
        return None

    def wait_after(self, failures: int, /) -> timedelta | None:
        return None

    def restore(self, run_id: str, document: RunDocument, /) -> Mapping[str, Any]:
        return document.arguments

    def refuse(self, prepared: PreparedRun, /) -> None: ...

    async def execute(
        self, session: RunSession, prepared: PreparedRun, send: SendEvent | None, show: ShowWork | None, /
    ) -> tuple[Result[Any], Mapping[str, Any] | None]:
        total = 0
        for place, number in enumerate(prepared.arguments["numbers"]):

            async def count(number: int = number) -> int:
                if self.counted and not self.may_go_on.is_set():
                    self.waits.set()
                    await self.may_go_on.wait()
                self.counted.append(number)
                return number

            def read(record: Recorded) -> int:
                return int(session.facts_of(record)["value"])

            def write(value: int) -> tuple[str, str]:
                return "result", json.dumps({"version": 1, "value": value})

            total += await effect(session, RecordKey(str(place)), count, write=write, read=read)
        return Result(total), {"result": total}

    def question(self, run_id: str, prepared: PreparedRun, /) -> UserMessage:
        raise NotImplementedError

    async def read_result(self, stored: StoredRun, document: RunDocument, /) -> Result[Any] | None:
        return Result(document.result)

    def value_of(self, result: Result[Any], /) -> Any:
        return result.content

    async def read_turn(self, stored: StoredRun, document: RunDocument, /) -> None:
        return None

    def find_rules(self, run_id: str, prepared: PreparedRun, waiting: WaitingCall, /) -> tuple[tuple[str, ...], bool]:
        raise NotImplementedError

    async def check_answer(
        self, stored: StoredRun, prepared: PreparedRun, waiting: WaitingCall, answer: Answer, /
    ) -> Answer:
        raise NotImplementedError

    async def check_message(
        self, stored: StoredRun, prepared: PreparedRun, message: UserMessage, by: Any, /
    ) -> UserMessage:
        raise NotImplementedError


class Process:
    """What one process has for runs whose only body is `body`."""

    def __init__(self, here: Container, body: RunBody) -> None:
        self.host: Any = here._internals.host
        self.stored, self.body = StoredRuns(self.host), body
        self.preparing = PreparedRuns(self.host, self.stored, lambda service: {"add": body}, lambda: False)
        self.execution = RunExecution(self.host, self.stored, self.preparing, lambda: asyncio.sleep(0))
        self.new = NewRuns(self.host, self.stored, self.execution, lambda stored: asyncio.sleep(0))

    async def make(self, run_id: str, numbers: list[int]) -> NewRun:
        described = await describe_run(self.host, "Sum.add", RunDocument(arguments={"numbers": numbers}), {}, None)
        stored = new_header(run_id, Sum, "add", None, described.document, await self.stored.now())
        arguments = described.document.arguments
        prepared = PreparedRun(self.body, arguments, described.seeds, described.document, described.identity)
        return NewRun(stored, prepared, arguments)


async def test_a_run_of_another_body_goes_on_in_another_process_without_repeating_its_effects() -> None:
    async with Container() as here:
        body = Sum()
        one, other = Process(here, body), Process(here, body)
        calling = asyncio.create_task(one.new.execute_here(await one.make("sum-1", [1, 20, 300])))
        await body.waits.wait()
        await one.execution.stop()
        body.may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await calling

        result = await other.new.wait_for(await other.make("sum-1", [1, 20, 300]))

        assert (result.content, body.counted) == (321, [1, 20, 300])
        stored = await other.stored.load("sum-1")
        assert (stored.status, await other.preparing.outcome_of(stored)) == ("completed", 321)
