"""An OAuth server of another author, which has its own token exchange."""

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.compat.conftest import node_module
from tests.rest.http_server import Answer, Received, Server
from toolbox import Container, OAuthError, rest
from toolbox.oauth import ClientCredentials, TokenExchange
from toolbox.security import SecurityIdentity

pytestmark = pytest.mark.anyio
SECRET = "s3cr3t-of.the_desk~"  # this server does not decode other characters in HTTP Basic authentication


@pytest.fixture
def token_url() -> Iterator[str]:
    script, package = Path(__file__).parent / "token_server.js", node_module("@jmondi/oauth2-server")
    with subprocess.Popen(["node", str(script), str(package), SECRET], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/token"
        process.kill()


@pytest.fixture
def orders() -> Iterator[Server]:
    """Answers with the claims of the token."""

    def claims(received: Received) -> Answer:
        token = (received.header("Authorization") or "").removeprefix("Bearer ")
        payload = token.split(".")[1]
        return Answer(json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))))

    server = Server()
    server.handler = claims
    yield server
    server.stop()


async def claims_for(orders: Server, auth: Any, token: str) -> dict[str, Any]:
    class Orders(Protocol):
        @rest.get("/orders")
        async def claims(self) -> dict[str, Any]: ...

    rest.register_rest_client(config_key="orders", auth=auth)(Orders)
    container = Container(seeds=(SecurityIdentity,)).register(Orders, rest.rest_settings("orders", url=orders.url))
    ann = SecurityIdentity("ann", attributes={"token": token})
    async with container, container.request_scope({SecurityIdentity: ann}):
        return await container.get(Orders).claims()


@pytest.mark.parametrize("client_auth", ["basic", "body"])
async def test_it_issues_both_kinds_of_tokens(token_url, orders, client_auth) -> None:
    program = ClientCredentials(token_url, "desk", SECRET, scope="read", client_auth=client_auth)
    exchange = TokenExchange(token_url, "desk", SECRET, scope="read", audience="orders", client_auth=client_auth)

    of_the_program = await claims_for(orders, program, "user:ann")
    of_the_user = await claims_for(orders, exchange, "user:ann")

    assert (of_the_program.get("sub"), of_the_program["scope"]) == (None, "read")
    assert (of_the_user["sub"], of_the_user["scope"]) == ("ann", "read")


async def test_it_refuses_what_is_wrong(token_url, orders) -> None:
    with pytest.raises(OAuthError) as unknown_client:
        await claims_for(orders, ClientCredentials(token_url, "desk", "wrong"), "user:ann")
    with pytest.raises(OAuthError) as unknown_user:
        await claims_for(orders, TokenExchange(token_url, "desk", SECRET), "nobody")

    assert (unknown_client.value.error, unknown_user.value.error) == ("invalid_client", "invalid_grant")
