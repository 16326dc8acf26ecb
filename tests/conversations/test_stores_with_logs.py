"""Options of services that need a store with logs, and stores of programs, which have none."""

from typing import Any, Protocol

import pytest

from toolbox import (
    ChatMemoryStore,
    Container,
    IllegalConfigurationError,
    InMemoryChatMemoryStore,
    MemoryId,
    create_ai_service,
    produces,
    register_ai_service,
)
from toolbox.testing import ScriptedChatModel

from .three_methods import ThreeMethods

pytestmark = pytest.mark.anyio


class Changing(InMemoryChatMemoryStore):
    async def get_messages(self, key: Any) -> Any:
        return await super().get_messages(key)


@register_ai_service(on_suspended="continue")
class Open(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


@register_ai_service(on_suspended="continue")
class Forgetful(Protocol):
    async def chat(self, text: str) -> str: ...


@produces(scope="application")
def some_store() -> ChatMemoryStore:
    return ThreeMethods()


KINDS = ["instance", "class", "producer", "changed"]


def container(service: type[Any], store: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel([])}).register(service)
    if isinstance(store, (ThreeMethods, InMemoryChatMemoryStore)):
        return made.register_instance(store, ChatMemoryStore)
    return made.register(store)


@pytest.mark.parametrize("store", [ThreeMethods(), ThreeMethods, some_store, Changing()], ids=KINDS)
async def test_a_conversation_cannot_go_on_in_a_store_without_logs(store: Any) -> None:
    here = container(Open, store)
    with pytest.raises(IllegalConfigurationError) as raised:
        async with here:
            pass
    [problem] = raised.value.problems
    assert problem.where == "Open"
    name = type(store).__name__ if isinstance(store, Changing) else "ThreeMethods"
    assert problem.what.startswith(f'on_suspended="continue" needs a store with logs, and {name} has only')


@pytest.mark.parametrize("store", [ThreeMethods(), some_store], ids=["instance", "producer"])
async def test_a_service_without_conversations_does_not_need_one(store: Any) -> None:
    async with container(Forgetful, store):
        pass


async def test_stores_with_logs_and_services_without_a_container_have_them() -> None:
    async with container(Open, InMemoryChatMemoryStore()):
        pass
    create_ai_service(Open, chat_model=ScriptedChatModel([]))
