"""Services without runs: no layers, no places, no import."""

import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest

from toolbox import AiMessage, ChatResponse, Container, Result, register_ai_service, tool
from toolbox.runs import RunStore, approve
from toolbox.sql import SqlRunStore
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

seen: list[Any] = []


@tool
async def add(a: int, b: int) -> int:
    return a + b


@tool(requires_approval=True)
async def pay(euros: int) -> str:
    seen.append(euros)
    return "paid"


@register_ai_service(tools=add)
class Plain(Protocol):
    async def ask(self, text: str) -> str: ...


@register_ai_service(tools=[add, pay])
class Paying(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


async def test_a_service_that_cannot_be_suspended_has_no_layers() -> None:
    model = ScriptedChatModel([tool_call("add", {"a": 1, "b": 2}), "3"])
    async with Container(models={"default": model}).register(Plain, Paying) as here:
        plans = here._internals.host.plans
        plain, paying = plans[Plain]["ask"], plans[Paying]["ask"]
        assert await here.get(Plain).ask("x") == "3"

    assert (plain.may_suspend, plain.checks_suspended, plain.layers.effects) == (False, False, ())
    assert plain.toolset.by_name["add"].step is None
    assert paying.may_suspend
    assert paying.toolset.by_name["add"].step is None
    assert paying.in_run.toolset.by_name["add"].step is not None


def test_services_without_a_container_import_neither_recordings_of_runs_nor_interceptors_nor_guardrails() -> None:
    program = """
import asyncio, sys
from typing import Protocol
from toolbox import create_ai_service, tool
from toolbox.testing import ScriptedChatModel, tool_call

@tool
def add(a: int, b: int) -> int:
    return a + b

class Plain(Protocol):
    async def ask(self, text: str) -> str: ...

class Synchronous(Protocol):
    def ask(self, text: str) -> str: ...

def model():
    return ScriptedChatModel([tool_call("add", {"a": 1, "b": 2}), "3"])

assert asyncio.run(create_ai_service(Plain, chat_model=model(), tools=[add]).ask("x")) == "3"
assert create_ai_service(Synchronous, chat_model=model(), tools=[add]).ask("x") == "3"
unused = ("runs.run_session", "runs.runs_bean", "runs.documents", "interceptors", "guardrails")
print([name for name in unused if f"toolbox.{name}" in sys.modules])
"""
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_run_in_a_database_is_continued_by_another_container(tmp_path: Path) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'runs.db'}")
    calls = [tool_call("pay", {"euros": 5}), tool_call("add", {"a": 1, "b": 2})]

    def program(*replies: Any) -> Container:
        made = Container(models={"default": ScriptedChatModel(replies)}).register(Paying)
        return made.register_instance(SqlRunStore(engine), RunStore)

    async with program(ChatResponse(AiMessage(None, calls))) as first:
        waiting = await first.get(Paying).ask("x")
    async with program("done") as second:
        run = await second.runs.get(waiting.run_id or "")
        assert run.pending == waiting.pending
        result = await second.runs.resume(run.id, {"0": approve()}, by="ann")
        run = await second.runs.get(run.id)
    await engine.dispose()

    assert (result.content, run.status, seen) == ("done", "completed", [5])
    assert [(each.by, each.answer) for each in run.history] == [("ann", "approve")]
