"""Tokens of an OAuth server in the calls of a real MCP server that checks them."""

import asyncio
import logging
import threading
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Protocol

import pytest

from tests.oauth.guarded_mcp_server import guarded_server
from tests.oauth.oauth_server import SECRET, OAuthServer
from tests.rest.http_server import Answer, Server
from toolbox import Container, IllegalConfigurationError, OAuthError, ToolErrors, register_ai_service
from toolbox.di.decorators import request_scoped
from toolbox.errors import McpConnectionError, McpError
from toolbox.mcp import McpServers, mcp_server, mcp_toolbox
from toolbox.oauth import ClientCredentials, TokenExchange
from toolbox.security import SecurityIdentity, UnauthenticatedError
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


def for_the_program(oauth: OAuthServer) -> ClientCredentials:
    return ClientCredentials(oauth.url, "desk", SECRET, scope="read")


def for_the_user(oauth: OAuthServer) -> TokenExchange:
    return TokenExchange(oauth.url, "desk", SECRET, audience="crm")


def using(url: str, auth: Any, **options: Any) -> Container:
    container = Container(seeds=(SecurityIdentity,)).register(McpServers)
    return container.register_instance(mcp_server("crm", url=url, auth=auth, **options), name="crm")


def acting_for(container: Container, name: str, token: str) -> Any:
    return container.request_scope({SecurityIdentity: SecurityIdentity(name, attributes={"token": token})})


async def whoami(container: Container) -> str:
    result = await container.get(McpServers).server("crm").call("whoami", {})
    return str(result.content[0].text)


async def test_a_server_gets_a_token_for_the_program(oauth) -> None:
    async with guarded_server(oauth) as (url, verifier), using(url, for_the_program(oauth)) as container:
        assert [await whoami(container), await whoami(container)] == ["desk", "desk"]
        assert await container.get(McpServers).ready()

    assert {each.scope for each in verifier.seen} == {"read"}
    assert len(oauth.requests) == 1


async def test_a_server_of_the_settings_gets_a_token(oauth, monkeypatch) -> None:
    async with guarded_server(oauth) as (url, _):
        monkeypatch.setenv("TOOLBOX_MCP__CRM__URL", url)
        names = {"KIND": "client_credentials", "TOKEN_URL": oauth.url, "CLIENT_ID": "desk", "CLIENT_SECRET": SECRET}
        for name, value in names.items():
            monkeypatch.setenv(f"TOOLBOX_MCP__CRM__AUTH__{name}", value)
        async with Container().register(McpServers) as container:
            assert await whoami(container) == "desk"


async def test_each_user_has_a_separate_session(oauth) -> None:
    ann, bob = oauth.log_in("ann"), oauth.log_in("bob")

    async def ask(name: str, token: str) -> str:
        async with acting_for(container, name, token):
            return await whoami(container)

    async with guarded_server(oauth) as (url, verifier), using(url, for_the_user(oauth)) as container:
        answers = await asyncio.gather(*(ask(*each) for each in [("ann", ann), ("bob", bob)] * 3))
        assert await container.get(McpServers).ready()  # without a user, the server is not asked

    assert answers == ["ann", "bob"] * 3
    assert {each.audience for each in verifier.seen} == {"crm"}
    assert sorted(each["subject_token"] for each in oauth.requests) == sorted([ann, bob])


async def test_without_a_token_of_the_user_nothing_is_sent(oauth) -> None:
    async with guarded_server(oauth) as (url, verifier), using(url, for_the_user(oauth), required=True) as container:
        with pytest.raises(UnauthenticatedError, match="no token of the user"):
            await whoami(container)

    assert (oauth.requests, verifier.seen) == ([], [])


async def test_a_refused_token_is_replaced_within_the_session(oauth) -> None:
    async with guarded_server(oauth) as (url, _), using(url, for_the_program(oauth)) as container:
        await whoami(container)
        oauth.revoke()
        answers = await asyncio.gather(*(whoami(container) for _ in range(10)))

    assert answers == ["desk"] * 10
    assert len(oauth.requests) == 2


async def test_a_long_session_gets_a_new_token_before_the_old_one_ends(oauth, clock) -> None:
    async with guarded_server(oauth) as (url, _), using(url, for_the_program(oauth), timeout=10**5) as container:
        await whoami(container)
        clock.advance(3571)
        await whoami(container)

    assert len(oauth.requests) == 2


async def test_the_token_server_may_refuse(oauth) -> None:
    oauth.reply = Answer({"error": "invalid_client", "error_description": SECRET}, 401)

    async with guarded_server(oauth) as (url, verifier), using(url, for_the_program(oauth)) as container:
        for attempt in (container.get(McpServers).server("crm").tools, lambda: whoami(container)):
            with pytest.raises(OAuthError, match="MCP server 'crm'") as raised:
                await attempt()
            assert (raised.value.error, raised.value.status) == ("invalid_client", 401)

    assert verifier.seen == []


async def test_the_token_server_may_refuse_later(oauth) -> None:
    async with guarded_server(oauth) as (url, _), using(url, for_the_program(oauth)) as container:
        await whoami(container)
        oauth.revoke()
        oauth.reply = Answer({"error": "unauthorized_client"}, 400)
        errors = await asyncio.gather(*(whoami(container) for _ in range(5)), return_exceptions=True)
        assert {(type(each), getattr(each, "error", None)) for each in errors} == {(OAuthError, "unauthorized_client")}
        oauth.reply = None
        assert await whoami(container) == "desk"


async def test_a_server_that_accepts_no_token_refuses_the_call(oauth) -> None:
    other = OAuthServer()
    try:
        async with guarded_server(other) as (url, _), using(url, for_the_program(oauth)) as container:
            with pytest.raises(McpConnectionError) as raised:
                await whoami(container)
    finally:
        other.stop()

    assert raised.value.status == 401
    assert len(oauth.requests) == 3  # the SDK connects in two ways, and each request may get one new token


async def test_a_computed_authorization_is_refused(oauth) -> None:
    own = {"headers": lambda: {"authorization": "Basic abc"}}
    async with guarded_server(oauth) as (url, _), using(url, for_the_program(oauth), **own) as container:
        with pytest.raises(IllegalConfigurationError, match="auth= sets it"):
            await whoami(container)


async def test_other_headers_are_sent_beside_the_token(oauth) -> None:
    own = {"headers": lambda: {"X-Tenant": "acme"}}
    async with guarded_server(oauth) as (url, _), using(url, for_the_program(oauth), **own) as container:
        assert await whoami(container) == "desk"


async def test_a_token_that_the_server_repeats_is_hidden(oauth, caplog) -> None:
    caplog.set_level(logging.DEBUG)

    @register_ai_service
    @mcp_toolbox("crm")
    class Assistant(Protocol):
        async def chat(self, question: str) -> str: ...

    model = ScriptedChatModel([tool_call("echo_token"), "sorry"])
    async with guarded_server(oauth) as (url, _):
        container = Container(models={"default": model}).register(Assistant)
        async with container.register_instance(mcp_server("crm", url=url, auth=for_the_program(oauth)), name="crm"):
            await container.get(Assistant).chat("who?")

    [token] = oauth.tokens
    shown = str(model.requests[-1].messages[-1])
    ours = [each for each in caplog.records if not each.name.startswith(("authlib", "mcp.server"))]
    logged = "".join(f"{each.getMessage()} {each.exc_info}" for each in ours)
    assert "SSE message: ***" in logged
    assert "cannot use ***" in shown
    assert token not in shown + logged
    assert SECRET not in logged


@pytest.mark.parametrize("when", ["at first", "later"])
async def test_both_errors_reach_the_caller_past_handlers_and_models(oauth, when) -> None:
    @register_ai_service
    @mcp_toolbox("crm")
    class Assistant(Protocol):
        async def chat(self, question: str) -> str: ...

    def swallow(error: Exception, context: object) -> str:
        return "all is well"

    model = ScriptedChatModel(["hello", tool_call("whoami"), "done"])
    handlers = ToolErrors(on_tool_execution_error=swallow)
    async with guarded_server(oauth) as (url, _):
        container = Container(models={"default": model}, seeds=(SecurityIdentity,), tool_errors=handlers)
        container.register(Assistant)
        container.register_instance(mcp_server("crm", url=url, auth=for_the_user(oauth)), name="crm")
        async with container:
            with pytest.raises(UnauthenticatedError):
                await container.get(Assistant).chat("who?")
            async with acting_for(container, "ann", oauth.log_in("ann")):
                if when == "later":
                    await container.get(Assistant).chat("hello")
                    oauth.revoke(*(each for each, issued in oauth.tokens.items() if issued.audience == "crm"))
                oauth.reply = Answer({"error": "invalid_grant"}, 400)
                with pytest.raises(OAuthError) as raised:
                    await container.get(Assistant).chat("who?")
    assert raised.value.error == "invalid_grant"


async def test_a_wrong_declaration_is_refused(oauth) -> None:
    with pytest.raises(ValueError, match="no effect on a process"):
        mcp_server("crm", command="crm", auth=for_the_program(oauth))
    with pytest.raises(ValueError, match="expected auth=ClientCredentials"):
        mcp_server("crm", url="https://crm.example", auth=lambda: "token")


async def test_a_server_that_is_added_later_is_checked_then(oauth, monkeypatch) -> None:
    async with guarded_server(oauth) as (url, _), Container().register(McpServers) as container:
        servers = container.get(McpServers)
        wrong = ClientCredentials(oauth.url, "desk", "${TOOLBOX_TESTS_NO_SECRET}")
        with pytest.raises(IllegalConfigurationError, match="TOOLBOX_TESTS_NO_SECRET is not set"):
            await servers.add(mcp_server("crm", url=url, auth=wrong))
        assert servers.names == ()
        await servers.add(mcp_server("crm", url=url, auth=for_the_program(oauth), required=True))
        assert await whoami(container) == "desk"


async def test_a_failed_request_is_not_a_token_error(oauth) -> None:
    """Also if a request of the session without a caller, its subscription, had no token before."""
    may_refuse, is_asked = asyncio.Event(), threading.Event()
    answer = oauth.http.handler

    def note(received: Any) -> Answer:
        replied = answer(received)
        if may_refuse.is_set():
            is_asked.set()
        return replied

    def refusing_the_subscription(app: Any) -> Any:
        async def refuse(scope: Any, receive: Any, send: Any) -> None:
            messages = [await receive()] if scope["type"] == "http" else []

            async def receive_again() -> Any:
                return messages.pop() if messages else await receive()

            if not messages or b"subscriptions/listen" not in messages[0]["body"]:
                await app(scope, receive_again, send)
                return
            await may_refuse.wait()
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body"})

        return refuse

    oauth.http.handler = note
    guarded = guarded_server(oauth, refusing_the_subscription)
    async with guarded as (url, _), using(url, for_the_program(oauth)) as container:
        await whoami(container)
        oauth.reply = Answer({"error": "temporarily_unavailable"}, 503)
        may_refuse.set()
        await asyncio.to_thread(is_asked.wait, 30)
        oauth.reply = None
        with suppress(OAuthError):  # if it waits for the same request
            await whoami(container)
        assert await whoami(container) == "desk"
        with pytest.raises(McpError):
            await container.get(McpServers).server("crm").read_resource("file:///nothing")


async def test_the_token_comes_from_a_bean_that_is_named(oauth) -> None:
    tokens = {name: oauth.log_in(name) for name in ("ann", "bob")}
    who: ContextVar[str] = ContextVar("who")

    @request_scoped
    class Session:
        def __init__(self) -> None:
            self._token = tokens[who.get()]

        async def token(self) -> str:
            return self._token

    async def ask(name: str) -> str:
        who.set(name)
        async with container.request_scope():
            return await whoami(container)

    auth = TokenExchange(oauth.url, "desk", SECRET, subject=Session)
    async with guarded_server(oauth) as (url, _), using(url, auth) as container:
        assert await asyncio.gather(*(ask(each) for each in ["ann", "bob"] * 3)) == ["ann", "bob"] * 3


async def test_a_token_is_not_sent_to_another_origin(oauth) -> None:
    other, redirecting = Server(), Server()
    try:
        redirecting.handler = lambda received: Answer(None, 307, {"Location": f"{other.url}/mcp"})
        async with using(f"{redirecting.url}/mcp", for_the_program(oauth)) as container:
            with pytest.raises(McpError):
                await whoami(container)
        assert redirecting.last.header("Authorization") is not None
        assert other.received == []
    finally:
        other.stop()
        redirecting.stop()
