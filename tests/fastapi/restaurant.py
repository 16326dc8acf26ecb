"""A restaurant as an application with a dev UI, and how its tests call the dev UI over HTTP."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

from fastapi import FastAPI

from toolbox import (
    Container,
    ImageContent,
    MemoryId,
    Result,
    TokenStream,
    ToolAbort,
    UserMessage,
    register_ai_service,
    request_scoped,
    tool,
    user_message,
)
from toolbox.testing import ScriptedChatModel
from toolbox_fastapi import DevUi, install

HERE = {"host": "localhost"}

OPEN = DevUi(token=False)


@request_scoped
class Basket:
    def __init__(self) -> None:
        self.dishes: list[str] = []

    @tool
    def add(self, dish: str, count: int = 1) -> list[str]:
        """Puts a dish into the basket."""
        self.dishes += [dish] * count
        return self.dishes

    @tool
    async def leave(self) -> None:
        raise ToolAbort("the guest has left")

    @tool
    def note(self, text: str, table: MemoryId[str]) -> str:
        return f"{table}: {text}"


@register_ai_service(tools=Basket)
class Waiter(Protocol):
    """Serves guests.

    Friendly.
    """

    async def serve(self, table: MemoryId[str], wish: str) -> Result[str]: ...
    def tell(self, table: MemoryId[str], wish: str) -> TokenStream: ...


@register_ai_service
class Cook(Protocol):
    @user_message("Cook {dish} for {guests}")
    async def cook(self, dish: str, guests: int = 2) -> dict[str, int]: ...
    def recipe(self, dish: str) -> AsyncIterator[str]: ...
    def steps(self, dish: str) -> AsyncIterator[int]: ...
    def taste(self, dish: str) -> str: ...
    def smell(self, dish: str) -> Iterator[str]: ...
    async def look(self, message: UserMessage, photos: list[ImageContent]) -> str: ...


def restaurant(*replies: Any, dev_ui: Any = OPEN, register: tuple[Any, ...] = ()) -> FastAPI:
    app = FastAPI(title="The restaurant")
    container = Container(models={"default": ScriptedChatModel(list(replies))})
    install(app, container.register(Basket, Waiter, Cook, *register), dev_ui=dev_ui)
    return app


def entries_of(text: str) -> list[dict[str, Any]]:
    """The data of a stream's events, without its end."""
    events = [dict(line.split(": ", 1) for line in each.splitlines() if ": " in line) for each in text.split("\n\n")]
    return [json.loads(each["data"]) for each in events if "data" in each and "event" not in each]


async def asked(client: Any, method: str, **arguments: Any) -> list[dict[str, Any]]:
    body = {"method": method, "arguments": json.dumps(arguments)}
    reply = await client.post("/dev-ui/api/ask", json=body, headers=HERE)
    assert reply.status_code == 200, reply.text
    return entries_of(reply.text)


async def called(client: Any, name: str, arguments: str, **more: Any) -> Any:
    reply = await client.post("/dev-ui/api/tool", json={"tool": name, "arguments": arguments, **more}, headers=HERE)
    return reply.json()


async def program_of(client: Any) -> Any:
    return (await client.get("/dev-ui/api/program", headers=HERE)).json()
