"""Secrets and tokens appear nowhere but in the requests that they are for."""

import asyncio
import logging
import traceback
from typing import Any, Protocol

import pytest

from tests.oauth.oauth_server import SECRET, OAuthServer, Resource
from tests.otel.telemetry import Telemetry
from tests.rest.http_server import Answer, Received
from toolbox import Container, Inject, OAuthError, RestClientError, register_ai_service, rest, tool
from toolbox.container import internals_of
from toolbox.oauth import TokenExchange
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Orders(Protocol):
    @rest.get("/orders")
    async def list(self) -> dict[str, Any]: ...

    @rest.get("/orders")
    def list_now(self) -> dict[str, Any]: ...


def shown(error: BaseException) -> str:
    """Return all that a program or a log can easily show of an error."""
    texts = [*traceback.format_exception(error), repr(vars(error)), repr(error.args)]
    for below in (error.__cause__, error.__context__):
        if below is not None:
            texts.append(shown(below))
            request = getattr(below, "_request", None)
            texts.append(repr(getattr(request, "content", "")))
    return "".join(texts)


async def refusals(oauth: OAuthServer, orders: Resource, token: str, **settings: Any) -> str:
    """Return all that is shown of the errors of one call for ann, async and sync."""
    client = type("Orders", (Orders, Protocol), {})
    auth = TokenExchange(oauth.url, "desk", SECRET, audience="orders")
    rest.register_rest_client(config_key="orders", auth=auth)(client)
    container = Container(seeds=(SecurityIdentity,))
    container.register(client, rest.rest_settings("orders", url=orders.url, log=True, **settings))
    ann = SecurityIdentity("ann", attributes={"token": token})
    texts: list[str] = []
    async with container, container.request_scope({SecurityIdentity: ann}):
        for call in (container.get(client).list, lambda: asyncio.to_thread(container.get(client).list_now)):
            with pytest.raises((OAuthError, RestClientError)) as raised:
                await call()
            texts.append(shown(raised.value))
    return "".join(texts)


def echo(received: Received) -> Answer:
    """Repeat the whole request, as some servers do in their errors."""
    return Answer(f"{received.headers} {received.body!r}", 500)


def error_with(text: str) -> Any:
    return lambda received: Answer({"error": text}, 400)


async def test_a_token_that_cannot_be_encoded_is_in_no_error(oauth, orders, caplog) -> None:
    """Python's errors about characters contain the whole text."""
    caplog.set_level(logging.DEBUG)

    text = await refusals(oauth, orders, "user-token-of-ann-\ud800-and-more") + caplog.text

    assert "invalid_grant" in text
    assert "user-token" not in text


@pytest.mark.parametrize("place", ["description", "code", "cut code", "no server", "resource", "refused twice"])
async def test_no_secret_is_in_errors_and_logs(oauth, orders, caplog, place) -> None:
    caplog.set_level(logging.DEBUG)
    token = oauth.log_in("ann")
    match place:
        case "description":
            oauth.http.handler = echo
        case "code":
            oauth.http.handler = error_with(f"bad {token}")
        case "cut code":
            oauth.http.handler = error_with(f"bad {token[:15]}")
        case "no server":
            oauth.http.handler = lambda received: Answer(hang_up=True)
        case "resource":
            orders.http.handler = echo
        case _:
            orders.http.handler = lambda received: Answer(str(received.headers), 401)

    text = await refusals(oauth, orders, token)

    ours = [each for each in caplog.records if not each.name.startswith("authlib")]
    text += "".join(f"{each.getMessage()} {each.exc_text}" for each in ours)
    issued = [each for each in oauth.tokens if each != token]
    assert len(issued) == {"resource": 1, "refused twice": 3}.get(place, 0)
    for secret in (SECRET, token, *issued):
        assert secret not in text
        assert secret[:12] not in text


async def test_no_secret_is_in_traces_and_descriptions_of_the_program(oauth, orders, monkeypatch) -> None:
    monkeypatch.setenv("DESK_SECRET", SECRET)
    telemetry, token = Telemetry(), oauth.log_in("ann")
    client = type("Orders", (Orders, Protocol), {})
    auth = TokenExchange(f"{oauth.url}?key=query4711", "desk", "${DESK_SECRET}", audience="orders")
    rest.register_rest_client(config_key="orders", auth=auth)(client)

    @tool
    async def orders_of_user(orders: Inject[client]) -> str:  # type: ignore[valid-type]  # a class of this test
        """List the orders."""
        return str((await orders.list())["subject"])  # type: ignore[attr-defined]

    @register_ai_service(tools=orders_of_user)
    class Desk(Protocol):
        async def chat(self, text: str) -> str: ...

    models = {"default": ScriptedChatModel([tool_call("orders_of_user"), "done", tool_call("orders_of_user")])}
    container = Container(models=models, seeds=(SecurityIdentity,)).register(Desk, client)
    container.register(rest.rest_settings("orders", url=orders.url))
    container.register_instance(telemetry.listener(capture_content=True))
    ann = SecurityIdentity("ann", attributes={"token": token})
    async with container, container.request_scope({SecurityIdentity: ann}):
        await container.get(Desk).chat("Which orders?")
        issued = [each for each in oauth.tokens if each != token]
        oauth.reply = Answer({"error": f"bad {token}"}, 400)
        oauth.revoke()
        with pytest.raises(OAuthError):
            await container.get(Desk).chat("Which orders?")
        text = repr(internals_of(container).describe()) + repr(container.check())

    spans = "".join(each.to_json() for each in telemetry.spans)
    assert "invoke_agent" in spans
    assert len(issued) == 1
    for secret in (SECRET, "query4711", token, *issued):
        assert secret not in spans
        assert secret not in text
