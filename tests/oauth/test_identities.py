"""The token of one identity never goes with the call of another, whatever happens at the same time."""

import asyncio
import random
from typing import Any, Protocol

import pytest
from fastapi import FastAPI, Request
from httpx2 import ASGITransport, AsyncClient

from tests.oauth.guarded_mcp_server import guarded_server
from tests.oauth.oauth_server import SECRET, OAuthServer, Resource
from toolbox import Container, Inject, Result, register_ai_service, rest, tool
from toolbox.mcp import McpServers, mcp_server
from toolbox.oauth import TokenExchange
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import install, runs_router

pytestmark = pytest.mark.anyio

USERS = [f"user-{number}" for number in range(12)]


class Orders(Protocol):
    @rest.get("/orders")
    async def list(self) -> dict[str, Any]: ...

    @rest.get("/orders")
    def list_now(self) -> dict[str, Any]: ...


def client_for(oauth: OAuthServer, orders: Resource) -> Any:
    client = type("Orders", (Orders, Protocol), {})
    auth = TokenExchange(oauth.url, "desk", SECRET, audience="orders")
    return rest.register_rest_client(config_key="orders", auth=auth, base_url=orders.url)(client)


def identity(name: str, token: str) -> SecurityIdentity:
    return SecurityIdentity(name, attributes={"token": token})


def revoke_some(oauth: OAuthServer, chance: random.Random) -> None:
    exchanged = [token for token, issued in [*oauth.tokens.items()] if issued.client == "desk"]
    for token in chance.sample(exchanged, len(exchanged) // 2):
        oauth.tokens.pop(token, None)


@pytest.mark.parametrize("seed", range(3))
async def test_each_call_has_the_token_of_its_user_while_tokens_are_refused(oauth, orders, seed) -> None:
    """On the event loop and on threads, while a server refuses tokens that it has issued."""
    chance = random.Random(seed)
    tokens = {name: oauth.log_in(name) for name in USERS}
    client = client_for(oauth, orders)
    container = Container(seeds=(SecurityIdentity,)).register(client)
    wrong: list[tuple[str, str]] = []

    async def ask(name: str, on_thread: bool) -> None:
        async with container.request_scope({SecurityIdentity: identity(name, tokens[name])}):
            calls = container.get(client)
            answer = await (asyncio.to_thread(calls.list_now) if on_thread else calls.list())
        if answer["subject"] != name:
            wrong.append((name, answer["subject"]))

    async with container:
        for _ in range(4):
            names = chance.choices(USERS, k=30)
            asked = [asyncio.create_task(ask(each, chance.random() < 0.3)) for each in names]
            outcomes = await asyncio.gather(
                *asked, asyncio.to_thread(revoke_some, oauth, chance), return_exceptions=True
            )
            refused = [each for each in outcomes if each is not None]
            assert all(getattr(each, "status", None) == 401 for each in refused)  # its second token was revoked too

    assert wrong == []


async def test_each_call_of_an_mcp_server_has_the_token_of_its_user_while_tokens_are_refused(oauth) -> None:
    chance = random.Random(4)
    tokens = {name: oauth.log_in(name) for name in USERS[:6]}
    auth = TokenExchange(oauth.url, "desk", SECRET, audience="crm")
    container = Container(seeds=(SecurityIdentity,)).register(McpServers)

    async def ask(name: str) -> tuple[str, str]:
        async with container.request_scope({SecurityIdentity: identity(name, tokens[name])}):
            result = await container.get(McpServers).server("crm").call("whoami", {})
        return name, str(result.content[0].text)

    async with guarded_server(oauth) as (url, _):
        container.register_instance(mcp_server("crm", url=url, auth=auth), name="crm")
        async with container:
            for _ in range(3):
                answers = await asyncio.gather(*(ask(each) for each in chance.choices([*tokens], k=18)))
                revoke_some(oauth, chance)
                assert [name for name, subject in answers if name != subject] == []


async def test_a_person_who_answers_over_http_continues_the_own_run_only(oauth, orders) -> None:
    client = client_for(oauth, orders)
    tokens = {name: oauth.log_in(name) for name in ("ann", "bob")}

    class Tools:
        def __init__(self, orders: client) -> None:  # type: ignore[valid-type]  # a class of this test
            self._orders: Any = orders

        @tool(requires_approval=True)
        async def pay(self) -> str:
            """Pay the order."""
            return str((await self._orders.list())["subject"])

    @register_ai_service(tools=Tools)
    class Desk(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    async def caller(request: Request) -> SecurityIdentity:
        name = request.headers["x-user"]
        return identity(name, tokens[name])

    app = FastAPI()
    program = Container(models={"default": ScriptedChatModel([tool_call("pay"), "done"])})
    program.register(Tools, Desk, client)
    install(app, program, identity=caller)
    app.include_router(runs_router(program))

    @app.post("/chat")
    async def chat(desk: Inject[Desk]) -> str:
        return (await desk.chat("Pay")).run_id or ""

    async with program, AsyncClient(transport=ASGITransport(app), base_url="http://test") as http:
        run_id = (await http.post("/chat", headers={"x-user": "ann"})).json()
        [pending] = (await http.get(f"/runs/{run_id}", headers={"x-user": "bob"})).json()["pending"]
        answers, path = {pending["id"]: {"kind": "approve"}}, f"/runs/{run_id}/answers"
        of_bob = await http.post(path, json={"answers": answers}, headers={"x-user": "bob"})
        assert (of_bob.status_code, orders.seen) == (401, [])
        of_ann = await http.post(path, json={"answers": {}}, headers={"x-user": "ann"})

    assert (of_ann.status_code, of_ann.json()["content"]) == (200, "done")
    assert [each.subject for each in orders.seen] == ["ann"]


async def test_a_service_acts_for_the_identity_of_the_request(oauth, orders) -> None:
    client = client_for(oauth, orders)
    tokens = {name: oauth.log_in(name) for name in USERS}

    @tool
    async def mine(orders: Inject[client]) -> str:  # type: ignore[valid-type]  # a class of this test
        """Return whose orders these are."""
        return str((await orders.list())["subject"])  # type: ignore[attr-defined]

    @register_ai_service(tools=mine)
    class Desk(Protocol):
        async def chat(self, text: str) -> str: ...

    def reply(request: Any) -> Any:
        last = request.messages[-1]
        return last.text if hasattr(last, "tool_name") else tool_call("mine")

    async def caller(request: Request) -> SecurityIdentity:
        name = request.headers["x-user"]
        return identity(name, tokens[name])

    app = FastAPI()
    program = Container(models={"default": ScriptedChatModel([reply] * 100)})
    program.register(Desk, client)
    install(app, program, identity=caller)

    @app.post("/chat")
    async def chat(desk: Inject[Desk]) -> str:
        return await desk.chat("Whose?")

    async with program, AsyncClient(transport=ASGITransport(app), base_url="http://test") as http:

        async def ask(name: str) -> str:
            return str((await http.post("/chat", headers={"x-user": name})).json())

        assert await asyncio.gather(*(ask(each) for each in USERS * 2)) == USERS * 2
