"""Where a redirect leads: nowhere unless it is asked for, and never with credentials to another host."""

from typing import Annotated, Protocol

import pytest

from tests.rest.http_server import Answer
from toolbox import rest
from toolbox.errors import RestClientError

pytestmark = pytest.mark.anyio


@rest.register_rest_client(config_key="moving")
class Moving(Protocol):
    @rest.get("/old")
    @rest.client_header_param("X-Fixed", "f1xed")
    async def fetch(
        self,
        tenant: Annotated[str, rest.Header("X-Tenant")] = "acme",
        session: Annotated[str, rest.Cookie()] = "cookie1",
    ) -> str: ...

    @rest.post("/old")
    async def create(self, text: Annotated[str, rest.Body()]) -> str: ...


def redirect(to: str, status: int = 302) -> Answer:
    return Answer("", status, {"Location": to})


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_an_error_unless_it_is_to_be_followed(server, status) -> None:
    server.answer(redirect("/new", status))
    moving = rest.create_rest_client(Moving, url=server.url)

    with pytest.raises(RestClientError, match="redirect") as caught:
        await moving.fetch()

    assert caught.value.status == status
    assert len(server.received) == 1


async def test_redirects_within_a_host_keep_headers_and_cookies(server) -> None:
    server.answer(redirect("new?x=1"), "here")
    moving = rest.create_rest_client(Moving, url=server.url, follow_redirects=True, bearer_token="t0ken")

    assert await moving.fetch() == "here"
    assert server.last.target == "/new?x=1"
    assert server.last.header("Authorization") == "Bearer t0ken"
    assert server.last.header("X-Tenant") == "acme"
    assert server.last.header("Cookie") == "session=cookie1"


async def test_credentials_do_not_follow_to_another_host(server, other_server) -> None:
    server.answer(redirect(f"{other_server.url}/there"))
    other_server.answer("there")
    moving = rest.create_rest_client(
        Moving,
        url=server.url,
        follow_redirects=True,
        bearer_token="t0ken",
        headers={"X-Settings": "s3ttings"},
    )

    assert await moving.fetch() == "there"
    sent = str(other_server.last.headers)
    for secret in ("t0ken", "s3ttings", "f1xed", "acme", "cookie1"):
        assert secret in str(server.last.headers)
        assert secret not in sent
    assert other_server.last.header("Host") == other_server.url.removeprefix("http://")


async def test_an_api_key_does_not_follow_to_another_host(server, other_server) -> None:
    server.answer(redirect(f"{other_server.url}/there"))
    moving = rest.create_rest_client(Moving, url=server.url, follow_redirects=True, api_key="k3y-one")

    await moving.fetch()

    assert server.last.header("X-API-Key") == "k3y-one"
    assert "k3y-one" not in str(other_server.last)


async def test_credentials_are_not_sent_again_after_a_redirect_from_another_host(server, other_server) -> None:
    server.answer(redirect(f"{other_server.url}/there"), "home")
    other_server.answer(redirect(f"{server.url}/home"))
    moving = rest.create_rest_client(Moving, url=server.url, follow_redirects=True, bearer_token="t0ken")

    assert await moving.fetch() == "home"
    assert server.last.header("Authorization") is None


def sign(request) -> None:
    request.headers["X-Signature"] = "signed"


async def test_request_filters_do_not_get_requests_to_other_hosts(server, other_server) -> None:
    @rest.register_rest_client(config_key="moving", request_filters=[sign])
    class Signed(Protocol):
        @rest.get("/old")
        async def fetch(self) -> str: ...

    server.answer(redirect(f"{other_server.url}/there"))

    await rest.create_rest_client(Signed, url=server.url, follow_redirects=True).fetch()

    assert server.last.header("X-Signature") == "signed"
    assert other_server.last.header("X-Signature") is None


async def test_a_body_does_not_follow_to_another_host(server, other_server) -> None:
    server.answer(redirect(f"{other_server.url}/there", 307))
    moving = rest.create_rest_client(Moving, url=server.url, follow_redirects=True)

    with pytest.raises(RestClientError):
        await moving.create("private")

    assert other_server.received == []


async def test_a_body_follows_within_the_host(server) -> None:
    server.answer(redirect("/new", 307), "done")
    moving = rest.create_rest_client(Moving, url=server.url, follow_redirects=True)

    assert await moving.create("private") == "done"
    assert (server.last.path, server.last.body) == ("/new", b"private")


@pytest.mark.parametrize("location", ["ftp://127.0.0.1/x", "http://", "http://[", "javascript:alert(1)"])
async def test_a_location_that_makes_no_sense_is_an_error(server, location) -> None:
    server.answer(redirect(location))
    moving = rest.create_rest_client(Moving, url=server.url, follow_redirects=True)

    with pytest.raises(RestClientError):
        await moving.fetch()


async def test_redirects_that_never_end_are_an_error(server) -> None:
    server.answer(redirect("/old"))
    moving = rest.create_rest_client(Moving, url=server.url, follow_redirects=True, max_redirects=3)

    with pytest.raises(RestClientError, match="more than 3 redirects"):
        await moving.fetch()

    assert len(server.received) == 4
