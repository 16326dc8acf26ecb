"""A container that stops: nothing of its runs uses the store afterwards."""

import asyncio
from typing import Protocol

import pytest

from toolbox import Container, ToolboxSettings, register_ai_service, tool
from toolbox.runs import InMemoryRunStore, RunId, RunStore, durable
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

SETTINGS = ToolboxSettings(stop_timeout=0.01)


class SlowStore(InMemoryRunStore):
    """Renewing a lease never ends."""

    persistent = True

    def __init__(self) -> None:
        super().__init__(lease=0.03)
        self.renews = asyncio.Event()
        self.in_use = 0

    async def renew(self, run_id: str, generation: int) -> bool:
        self.renews.set()
        self.in_use += 1
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # as a connection that is returned
            self.in_use -= 1
        return True


@tool
async def wait() -> str:
    """Wait."""
    await asyncio.Event().wait()
    return "waited"


@register_ai_service(tools=wait)
class Waiter(Protocol):
    @durable
    async def ask(self, run: RunId, question: str) -> str: ...


async def test_renewals_have_ended_when_the_store_is_closed() -> None:
    store = SlowStore()
    container = Container(
        models={"default": ScriptedChatModel([tool_call("wait")])}, take_over_runs=False, settings=SETTINGS
    )
    container.register(Waiter).register_instance(store, RunStore)

    async with container:
        asking = asyncio.create_task(container.get(Waiter).ask("run", "Hi"))
        await store.renews.wait()
        assert store.in_use == 1

    assert store.in_use == 0
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
