"""Tests `@on_success` in the requests of runs: before a run is stored as completed or as suspended."""

from typing import Any, Protocol

import pytest

from toolbox import Container, Result, on_success, register_ai_service, request_scoped, tool
from toolbox.runs import InMemoryRunStore, RunStore, approve, durable
from toolbox.runs.store import RunChanges
from toolbox.testing import ScriptedChatModel, tool_call

from .replies import asks

pytestmark = pytest.mark.anyio

log: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    log.clear()
    Unit.error = None


@request_scoped
class Unit:
    error: Exception | None = None

    @on_success
    async def commit(self) -> None:
        log.append("committed" if self.error is None else "failing")
        if self.error is not None:
            raise self.error


class Orders:
    def __init__(self, unit: Unit) -> None: ...

    @tool("Looks")
    async def look(self) -> str:
        return "order 7"

    @tool("Refunds", requires_approval=True)
    async def refund(self) -> str:
        log.append("refunded")
        return "done"


@register_ai_service(tools=Orders)
class Desk(Protocol):
    @durable
    async def chat(self, text: str) -> Result[str]: ...

    async def ask(self, text: str) -> Result[str]: ...


class Store(InMemoryRunStore):
    """Notes when a run is stored as suspended or as ended; good enough for durable methods."""

    persistent = True

    async def append(self, run_id: Any, generation: Any, records: Any, changes: Any = None, *more: Any) -> None:
        if isinstance(changes, RunChanges) and changes.status is not None:
            log.append(changes.status)
        await super().append(run_id, generation, records, changes, *more)


def container(*replies: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}).register(Desk, Unit)
    return made.register_instance(Store(), RunStore)


async def test_a_run_is_stored_as_completed_after_the_methods() -> None:
    async with container(tool_call("look"), "done") as here:
        await here.get(Desk).chat("refund")

    assert log == ["committed", "completed"]


async def test_a_run_is_stored_as_suspended_after_the_methods() -> None:
    async with container(asks(tool_call("look"), tool_call("refund")), "done") as here:
        result = await here.get(Desk).chat("refund")
        assert log == ["committed", "suspended"]
        log.clear()

        assert result.run_id is not None
        await here.runs.resume(result.run_id, {result.pending[0].id: approve()})

    assert log == ["refunded", "committed", "completed"]


@pytest.mark.parametrize("replies", [(tool_call("look"), "done"), (asks(tool_call("look"), tool_call("refund")),)])
async def test_what_a_method_raises_fails_the_run(replies: Any) -> None:
    Unit.error = LookupError("constraint")
    async with container(*replies) as here:
        with pytest.raises(LookupError, match="constraint"):
            await here.get(Desk).chat("refund")

        [run] = await here.runs.list()
        assert (run.status, run.error) == ("failed", "LookupError: constraint")
    assert log == ["failing", "failed"]


async def test_a_call_that_is_part_of_a_request_leaves_its_beans_to_the_request() -> None:
    async with container(asks(tool_call("look"), tool_call("refund"))) as here:
        with pytest.raises(LookupError):
            async with here.request_scope():
                result = await here.get(Desk).ask("refund")
                assert result.pending
                raise LookupError

    assert log == []
