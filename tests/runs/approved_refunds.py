"""A desk whose refunds need the approval of a person, in a container with a scripted model."""

from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import pytest
from pydantic import BaseModel

from toolbox import Container, MemoryId, Result, TokenStream, register_ai_service, tool
from toolbox.runs import RunStore, RunSuspendedError
from toolbox.testing import ScriptedChatModel, tool_call

from .replies import ran


@tool(requires_approval=True)
async def refund(order: int) -> str:
    ran.append(order)
    return f"refunded {order}"


REFUND = tool_call("refund", {"order": 7})


class Invoice(BaseModel):
    number: int


@register_ai_service(tools=refund)
class Desk(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...
    async def invoice(self, text: str) -> Invoice: ...
    def events(self, text: str) -> TokenStream: ...
    def texts(self, text: str) -> AsyncIterator[str]: ...
    def items(self, text: str) -> AsyncIterator[Invoice]: ...
    def waiting(self, text: str) -> str: ...
    def waiting_texts(self, text: str) -> Iterator[str]: ...


@register_ai_service(tools=refund)
class Clerk(Protocol):
    async def do(self, text: str) -> str: ...


def container(*replies: Any, store: Any = None, services: Any = (Desk,), **options: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, **options).register(*services)
    return made if store is None else made.register_instance(store, RunStore)


async def run_id_of(awaited: Any) -> str:
    with pytest.raises(RunSuspendedError) as raised:
        await awaited
    return raised.value.run_id
