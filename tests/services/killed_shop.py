"""A program that is killed in a durable call, after it has paid an approved and edited amount in a transaction."""

import asyncio
import os
import signal
import sys
from decimal import Decimal
from typing import Annotated, Any, Protocol

from pydantic import BeforeValidator
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from toolbox import (
    Container,
    Inject,
    Result,
    ToolboxSettings,
    ToolExecution,
    application_scoped,
    compensate_for,
    register_ai_service,
    sql,
    tool,
    user_message,
)
from toolbox.interceptors import ToolInterceptor, ToolInvocation, ToolProceed, interceptors
from toolbox.runs import RunId, approve
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel, tool_call

dies = asyncio.Event()
"""Set in the process that is killed."""

Cents = Annotated[int, BeforeValidator(lambda euros: int(Decimal(str(euros)) * 100))]


@application_scoped
class Signing(ToolInterceptor):
    """Adds the number of the process to the note."""

    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> Any:
        if call.replayed or "note" not in call.arguments:
            return await proceed(call)
        return await proceed(call.with_arguments(note=f"{call.arguments['note']}!"))


class Till:
    @tool(requires_approval=lambda arguments, context: not arguments["note"].endswith("!"))
    @interceptors(Signing)
    @sql.transactional
    async def pay(self, cents: Cents, note: str, session: Inject[AsyncSession]) -> str:
        await session.execute(text("INSERT INTO paid VALUES (:cents, :note)"), {"cents": cents, "note": note})
        return "paid"

    @compensate_for(pay)
    @sql.transactional
    async def pay_back(self, execution: ToolExecution, session: Inject[AsyncSession]) -> None:
        paid = dict(execution.arguments)
        await session.execute(text("INSERT INTO paid VALUES (-:cents, :note)"), paid)

    @tool(on_unknown_outcome="retry")
    def fail(self) -> str:
        if dies.is_set():
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no")


@register_ai_service(tools=Till, durable=True, compensate_on_tool_errors=True)
class Shop(Protocol):
    @user_message("{text}")
    async def buy(self, run: RunId, text: str) -> Result[str]: ...


def shop(folder: str, *replies: Any) -> Container:
    settings = ToolboxSettings(sql=SqlSettings(url=f"sqlite:///{folder}/runs.sqlite"))
    made = Container(models={"default": ScriptedChatModel(replies)}, settings=settings, take_over_runs=False)
    return made.register(sql.engine, sql.session, sql.SqlRunStore, Shop, Signing)


async def main(folder: str) -> None:
    dies.set()
    async with shop(folder, tool_call("pay", {"cents": 5, "note": "a"}), tool_call("fail")) as here:
        async with here.request_scope():
            session = await here.aget(AsyncSession)
            await session.execute(text("CREATE TABLE paid (cents INTEGER, note TEXT)"))
            await session.commit()
        await here.get(Shop).buy("run", "x")
        await here.runs.resume("run", {"0": approve(arguments={"cents": 500, "note": "for ann"})})


if __name__ == "__main__":
    from tests.services.killed_shop import main as run  # the service has the name of this module

    asyncio.run(run(sys.argv[1]))
