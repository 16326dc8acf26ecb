"""A database that refuses a statement: what callers and logs get of it, whatever they do with a run."""

import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from traceback import format_exception
from typing import Any, Protocol

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from toolbox import Container, Result, register_ai_service, sql, tool
from toolbox.runs import RunStore, RunStoreError, approve, durable
from toolbox.testing import ScriptedChatModel, skip_time, tool_call

from .replies import asks

pytestmark = pytest.mark.anyio

SECRET = "my private words"


@tool(requires_approval=True, approval_expires=timedelta(hours=1))
async def refund(order: int) -> str:
    return "refunded"


@register_ai_service(tools=refund)
class Desk(Protocol):
    async def ask(self, text: str) -> Result[str]: ...
    @durable
    async def order(self, text: str) -> Result[str]: ...


Act = Callable[[Container, str], Coroutine[Any, Any, object]]


async def follow(here: Container, run_id: str) -> None:
    async for _ in here.runs.events(run_id):
        pass


ACTS: dict[str, Act] = {
    "start": lambda here, _: here.runs.start(Desk.ask, SECRET),
    "durable": lambda here, _: here.get(Desk).order(SECRET),
    "get": lambda here, run_id: here.runs.get(run_id),
    "resume": lambda here, run_id: here.runs.resume(run_id, {"0": approve()}),
    "cancel": lambda here, run_id: here.runs.cancel(run_id),
    "retry": lambda here, run_id: here.runs.retry(run_id),
    "execute": lambda here, run_id: here.runs.execute(run_id),
    "result": lambda here, run_id: here.runs.result(run_id),
    "events": follow,
    "delete": lambda here, run_id: here.runs.delete(run_id),
}


@pytest.mark.parametrize("name", ACTS)
async def test_an_error_of_the_database_shows_no_values(name: str, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG, "toolbox")
    refuses = True

    def refuse(*arguments: Any) -> None:
        statement, values = arguments[2], arguments[3]
        if refuses and "toolbox_runs" in statement:
            raise OperationalError(statement, (values, SECRET), Exception("disk I/O error"))

    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(sql.open_engine(f"sqlite:///{tmp_path / 'data.db'}"))
        store = sql.SqlRunStore(engine, lease=0.3)
        container = Container(models={"default": ScriptedChatModel([asks(tool_call("refund", {"order": 7}))] * 3)})
        here = await stack.enter_async_context(container.register(Desk).register_instance(store, RunStore))
        run_id = str((await here.get(Desk).ask(SECRET)).run_id)
        if name == "retry":
            await here.runs.cancel(run_id)
        event.listen(engine.sync_engine, "before_cursor_execute", refuse)
        with pytest.raises(RunStoreError, match="disk I/O error") as raised:
            await ACTS[name](here, run_id)
        refuses = False
    shown = "".join(format_exception(raised.value)) + caplog.text
    assert SECRET not in shown
    assert "UPDATE" not in shown


async def test_an_expiry_that_cannot_be_stored_logs_no_values_and_is_tried_again(tmp_path: Path, caplog: Any) -> None:
    refusals = 2

    class Refusing(sql.SqlRunStore):
        async def change(self, run_id: str, version: int, changes: Any, records: Any = ()) -> Any:
            nonlocal refusals
            if refusals:
                refusals -= 1
                raise OperationalError("UPDATE runs", (changes.document,), Exception("disk I/O error"))
            return await super().change(run_id, version, changes, records)

    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(sql.open_engine(f"sqlite:///{tmp_path / 'data.db'}"))
        model = ScriptedChatModel([asks(tool_call("refund", {"order": 7})), "nobody approved"])
        container = Container(models={"default": model}).register(Desk)
        here = await stack.enter_async_context(container.register_instance(Refusing(engine), RunStore))
        run_id = str((await here.get(Desk).ask(SECRET)).run_id)
        await skip_time(here, timedelta(hours=2))
        assert (await here.runs.result(run_id, timeout=60)).content == "nobody approved"
    assert "disk I/O error" in caplog.text
    assert SECRET not in caplog.text
