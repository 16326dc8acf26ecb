"""Clients with tokens in tools of services, in tools of OpenAPI documents, and behind FastAPI."""

from contextvars import ContextVar
from typing import Any, Protocol

import pytest
from fastapi import FastAPI
from httpx2 import ASGITransport, AsyncClient

from tests.oauth.oauth_server import SECRET, OAuthServer, Resource
from tests.rest.http_server import Answer
from toolbox import Container, Inject, OAuthError, ToolErrors, register_ai_service, rest, tool
from toolbox.di.decorators import request_scoped
from toolbox.oauth import ClientCredentials, TokenExchange
from toolbox.openapi import tools_from_openapi
from toolbox.security import SecurityIdentity, UnauthenticatedError
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import install

pytestmark = pytest.mark.anyio

DOCUMENT = {
    "openapi": "3.1.0",
    "info": {"title": "orders", "version": "1"},
    "paths": {"/orders": {"get": {"operationId": "list_orders", "responses": {"200": {"description": "all"}}}}},
}


class Orders(Protocol):
    @rest.get("/orders")
    async def list(self) -> dict[str, Any]: ...

    @rest.get("/orders")
    def list_now(self) -> dict[str, Any]: ...


def exchange(oauth: OAuthServer) -> TokenExchange:
    return TokenExchange(oauth.url, "desk", SECRET, audience="orders")


def identity(name: str, token: str) -> SecurityIdentity:
    return SecurityIdentity(name, attributes={"token": token})


def swallow(error: Exception, context: object) -> str:
    return "all is well"


def desk(orders: Resource, auth: Any, model: ScriptedChatModel) -> tuple[Container, Any]:
    """Return a container with a service whose tools call the REST client, and the service."""
    client = type("Orders", (Orders, Protocol), {})
    rest.register_rest_client(config_key="orders", auth=auth)(client)

    class Tools:
        def __init__(self, orders: client) -> None:  # type: ignore[valid-type]  # a class of this test
            self._orders: Any = orders

        @tool
        async def list_orders(self) -> str:
            """List the orders."""
            return str((await self._orders.list())["subject"])

        @tool
        def list_on_thread(self) -> str:
            """List the orders on a thread."""
            return str(self._orders.list_now()["subject"])

    @register_ai_service(tools=Tools)
    class Desk(Protocol):
        async def chat(self, text: str) -> str: ...

    handlers = ToolErrors(on_tool_execution_error=swallow)
    container = Container(models={"default": model}, seeds=(SecurityIdentity,), tool_errors=handlers)
    container.register(Tools, client, Desk, rest.rest_settings("orders", url=orders.url))
    return container, Desk


@pytest.mark.parametrize("name", ["list_orders", "list_on_thread"])
async def test_a_tool_acts_for_the_caller_of_the_service(oauth, orders, name) -> None:
    model = ScriptedChatModel([tool_call(name), "done"])
    container, service = desk(orders, exchange(oauth), model)

    async with container, container.request_scope({SecurityIdentity: identity("ann", oauth.log_in("ann"))}):
        await container.get(service).chat("my orders")

    assert [each.subject for each in orders.seen] == ["ann"]


@pytest.mark.parametrize("name", ["list_orders", "list_on_thread"])
async def test_both_errors_reach_the_caller_past_handlers_and_models(oauth, orders, name) -> None:
    model = ScriptedChatModel([tool_call(name), tool_call(name)])
    container, service = desk(orders, exchange(oauth), model)
    oauth.reply = Answer({"error": "invalid_grant"}, 400)

    async with container:
        with pytest.raises(UnauthenticatedError):
            await container.get(service).chat("my orders")
        async with container.request_scope({SecurityIdentity: identity("ann", oauth.log_in("ann"))}):
            with pytest.raises(OAuthError) as raised:
                await container.get(service).chat("my orders")

    assert raised.value.error == "invalid_grant"
    assert orders.http.received == []
    assert [len(each.messages) for each in model.requests] == [1, 1]  # no model read about it


@pytest.mark.parametrize("has_token", [True, False])
async def test_tools_of_a_document_act_for_the_caller(oauth, orders, has_token) -> None:
    @register_ai_service(tools=tools_from_openapi(DOCUMENT, base_url=orders.url, auth=exchange(oauth)))
    class Desk(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("list_orders"), "done"])
    container = Container(models={"default": model}, seeds=(SecurityIdentity,)).register(Desk)
    ann = identity("ann", oauth.log_in("ann")) if has_token else SecurityIdentity("ann")
    async with container, container.request_scope({SecurityIdentity: ann}):
        if has_token:
            await container.get(Desk).chat("my orders")
        else:
            with pytest.raises(UnauthenticatedError):
                await container.get(Desk).chat("my orders")

    assert [each.subject for each in orders.seen] == (["ann"] if has_token else [])


@pytest.mark.parametrize("on_thread", [True, False])
async def test_a_client_without_a_container_acts_for_the_caller_of_the_tool(oauth, orders, on_thread) -> None:
    client = rest.create_rest_client(Orders, url=orders.url, auth=exchange(oauth))

    @tool(name="list")
    async def list_orders() -> str:
        """List the orders."""
        return str((await client.list())["subject"])

    @tool(name="list")
    def list_on_thread() -> str:
        """List the orders on a thread."""
        return str(client.list_now()["subject"])

    @register_ai_service(tools=list_on_thread if on_thread else list_orders)
    class Desk(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("list"), "done"])
    container = Container(models={"default": model}, seeds=(SecurityIdentity,)).register(Desk)
    async with container, container.request_scope({SecurityIdentity: identity("ann", oauth.log_in("ann"))}):
        await container.get(Desk).chat("my orders")

    assert [each.subject for each in orders.seen] == ["ann"]


async def test_a_client_without_a_container_asks_the_bean_of_each_caller(oauth, orders) -> None:
    """The token of the first user is never that of the next one."""
    who: ContextVar[str] = ContextVar("who")
    tokens = {name: oauth.log_in(name) for name in ("ann", "bob", "eve")}

    @request_scoped
    class Session:
        def __init__(self) -> None:
            self._token = tokens[who.get()]

        def token(self) -> str:
            return self._token

    auth = TokenExchange(oauth.url, "desk", SECRET, subject=Session)
    client = rest.create_rest_client(Orders, url=orders.url, auth=auth)

    @tool
    async def list_mine() -> str:
        """List the orders."""
        return str((await client.list())["subject"])

    @tool
    def list_on_thread() -> str:
        """List the orders on a thread."""
        return str(client.list_now()["subject"])

    @register_ai_service(
        tools=[list_mine, list_on_thread, tools_from_openapi(DOCUMENT, base_url=orders.url, auth=auth)]
    )
    class Desk(Protocol):
        async def chat(self, text: str) -> str: ...

    calls = [tool_call(each) for each in ("list_mine", "list_on_thread", "list_orders")]
    async with Container(models={"default": ScriptedChatModel([*calls, "done"] * 2)}).register(Desk, Session) as here:
        for name in ("ann", "bob"):
            who.set(name)
            async with here.request_scope():
                await here.get(Desk).chat("my orders")
    who.set("eve")
    await client.list()  # outside of tools there is no scope, and the class is created

    assert [each.subject for each in orders.seen] == [*["ann"] * 3, *["bob"] * 3, "eve"]


def test_credentials_go_to_no_server_that_only_a_document_names(oauth) -> None:
    document = {**DOCUMENT, "servers": [{"url": "https://elsewhere.example"}]}

    with pytest.raises(Exception, match="auth would go to"):
        tools_from_openapi(document, auth=ClientCredentials(oauth.url, "desk", SECRET))


@pytest.mark.parametrize(
    ("has_token", "refuses", "status"), [(True, False, 200), (True, True, 502), (False, False, 401)]
)
async def test_fastapi_answers_with_the_status_of_the_error(oauth, orders, has_token, refuses, status) -> None:
    client = type("Orders", (Orders, Protocol), {})
    rest.register_rest_client(config_key="orders", auth=exchange(oauth))(client)
    container = Container(seeds=(SecurityIdentity,)).register(client, rest.rest_settings("orders", url=orders.url))
    token = oauth.log_in("ann")
    app = FastAPI()
    install(app, container)

    @app.get("/mine")
    async def mine(orders: Inject[client]) -> Any:  # type: ignore[valid-type]  # a class of this test
        async with container.request_scope({SecurityIdentity: identity("ann", token)}):
            return await orders.list() if has_token else {}  # type: ignore[attr-defined]

    @app.get("/nobodys")
    async def nobodys(orders: Inject[client]) -> Any:  # type: ignore[valid-type]  # a class of this test
        return await orders.list()  # type: ignore[attr-defined]

    if refuses:
        oauth.reply = Answer({"error": "invalid_grant", "error_description": "hunter2"}, 400)
    async with container, AsyncClient(transport=ASGITransport(app), base_url="http://test") as http:
        answer = await http.get("/mine" if has_token else "/nobodys")

    assert answer.status_code == status
    assert "hunter2" not in answer.text
    assert token not in answer.text
