"""Failed, invalid and late replies: errors, mappers and time-outs."""

import asyncio
import pickle
import socket
import traceback
from collections.abc import AsyncIterator
from typing import Annotated, Protocol

import pytest
from pydantic import BaseModel

from tests.rest.http_server import Answer
from toolbox import rest
from toolbox.errors import BlockingCallNotAllowedError, RestClientError, RestDecodeError, RestTimeoutError

pytestmark = pytest.mark.anyio


class Thing(BaseModel):
    name: str


class NotThere(Exception):
    pass


@rest.register_rest_client(config_key="things")
class Things(Protocol):
    @rest.get("/things/{name}")
    async def find(self, name: str) -> Thing: ...

    @rest.get("/things/{name}")
    def find_now(self, name: str) -> Thing: ...

    @rest.get("/things/{name}")
    async def maybe(self, name: str) -> Thing | None: ...

    @rest.get("/things/{name}")
    async def whole(self, name: str) -> rest.Response[Thing]: ...

    @rest.get("/text")
    async def maybe_text(self) -> str | None: ...

    @rest.get("/text")
    async def text(self, api_key: str = "sesame") -> str: ...

    @rest.head("/things/{name}")
    async def exists(self, name: str) -> int: ...

    @rest.head("/things/{name}")
    async def headers(self, name: str) -> dict[str, str]: ...

    @rest.post("/things")
    async def create(self, thing: Thing) -> rest.Response[None]: ...


async def test_a_refusal_carries_status_url_and_an_excerpt_of_the_body(server) -> None:
    server.answer(Answer("x" * 2000, 404))
    things = rest.create_rest_client(Things, url=server.url)

    with pytest.raises(RestClientError) as caught:
        await things.find("tea")

    error = caught.value
    assert error.status == 404
    assert error.url == f"{server.url}/things/tea"
    assert error.body.startswith("xxx")
    assert len(error.body) < 600
    assert "Things.find" in str(error)
    assert "404" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


async def test_invalid_replies_raise_errors_with_the_invalid_fields(server) -> None:
    server.answer({"title": 1})
    things = rest.create_rest_client(Things, url=server.url)

    with pytest.raises(RestDecodeError, match="name: Field required") as caught:
        await things.find("tea")

    assert "Things.find: the reply is not a valid Thing" in str(caught.value)
    assert caught.value.status == 200
    assert "title" in caught.value.body
    assert isinstance(caught.value, RestClientError)


@pytest.mark.parametrize("body", ["<html>", b"\xff\xfe", ""])
async def test_replies_that_are_not_json_are_decode_errors(server, body) -> None:
    server.answer(body)
    things = rest.create_rest_client(Things, url=server.url)

    with pytest.raises(RestDecodeError):
        await things.find("tea")


async def test_an_empty_reply_is_returned_as_none_if_the_type_allows_it(server) -> None:
    server.answer(Answer("", 204))
    things = rest.create_rest_client(Things, url=server.url)

    assert await things.maybe("tea") is None
    assert await things.maybe_text() is None
    server.answer("no JSON")
    assert await things.maybe_text() == "no JSON"


async def test_a_broken_encoding_is_a_decode_error(server) -> None:
    server.answer(Answer("no gzip", headers={"Content-Encoding": "gzip"}))
    things = rest.create_rest_client(Things, url=server.url)

    with pytest.raises(RestDecodeError):
        await things.find("tea")


async def test_a_server_that_cannot_be_reached_is_an_error_without_status() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        things = rest.create_rest_client(Things, url=f"http://127.0.0.1:{unused.getsockname()[1]}")

        with pytest.raises(RestClientError) as caught:
            await things.find("tea")

    assert caught.value.status is None
    assert not isinstance(caught.value, RestTimeoutError)


async def test_slow_servers_are_timeouts_in_both_kinds_of_method() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        things = rest.create_rest_client(Things, url=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.05)

        with pytest.raises(RestTimeoutError) as caught:
            await things.find("tea")
        with pytest.raises(RestTimeoutError):
            await asyncio.to_thread(things.find_now, "tea")

    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, RestClientError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


async def test_trickling_bodies_are_timeouts(server) -> None:
    def trickle(received):
        import time

        def chunks():
            for _ in range(100):
                time.sleep(0.03)  # a server that never stops for as long as a time-out between two pieces
                yield b" "

        return Answer(chunks())

    server.handler = trickle
    things = rest.create_rest_client(Things, url=server.url, timeout=0.2)

    with pytest.raises(RestTimeoutError):
        await things.find("tea")
    with pytest.raises(RestTimeoutError):
        await asyncio.to_thread(things.find_now, "tea")


async def test_secrets_are_in_no_error(server) -> None:
    server.answer(Answer("denied for hunter22 with k3y-value", 403))
    things = rest.create_rest_client(
        Things, url=server.url.replace("//", "//user:hunter22@"), api_key="k3y-value", api_key_query="auth_key"
    )

    with pytest.raises(RestClientError) as caught:
        await things.text()

    assert "auth_key=***" in caught.value.url
    assert "api_key=***" in caught.value.url
    for secret in ("hunter22", "k3y-value", "sesame"):
        assert secret not in str(caught.value)
        assert secret not in repr(caught.value)
    assert dict(server.last.query)["auth_key"] == "k3y-value"
    assert dict(server.last.query)["api_key"] == "sesame"
    assert server.last.header("authorization").startswith("Basic ")


@pytest.mark.parametrize("status", [200, 400])
async def test_errors_hide_secrets_that_a_server_repeats(server, status) -> None:
    @rest.register_rest_client(config_key="things")
    class Private(Protocol):
        @rest.get("/")
        async def find(self, by: Annotated[str, rest.Header("authorization")]) -> Thing: ...

        @rest.get("/")
        def all(self) -> AsyncIterator[Thing]: ...

    server.answer(*[Answer('{"you sent": "Bearer SECRET-bearer, SECRET-header"}', status)] * 2)
    private = rest.create_rest_client(Private, url=server.url, headers={"x-tenant": "SECRET-header"})

    texts: list[str] = []
    for ask in (private.find("Bearer SECRET-bearer"), anext(private.all())):
        with pytest.raises(RestClientError) as caught:
            await ask
        shown = "".join(traceback.format_exception(caught.value))
        texts.append(f"{shown} {caught.value!r} {pickle.dumps(caught.value)!r}")

    assert "SECRET" not in texts[0]
    assert "SECRET-header" not in texts[1]


async def test_a_whole_response_has_status_headers_and_the_decoded_body(server) -> None:
    server.answer(Answer({"name": "tea"}, 200, {"X-Total": "5"}), Answer("", 201, {"Location": "/things/1"}))
    things = rest.create_rest_client(Things, url=server.url)

    response = await things.whole("tea")
    assert (response.status, response.headers["x-total"], response.body) == (200, "5", Thing(name="tea"))
    assert response.url == f"{server.url}/things/tea"

    created = await things.create(Thing(name="tea"))
    assert (created.status, created.headers["location"], created.body) == (201, "/things/1", None)


async def test_head_gives_the_status_or_the_headers(server) -> None:
    server.answer(Answer("body", 200, {"ETag": "a"}))
    things = rest.create_rest_client(Things, url=server.url)

    assert await things.exists("tea") == 200
    assert (await things.headers("tea"))["etag"] == "a"
    assert server.last.verb == "HEAD"


async def test_a_def_method_on_the_thread_of_a_loop_is_refused_before_anything_is_sent(server) -> None:
    things = rest.create_rest_client(Things, url=server.url)

    with pytest.raises(BlockingCallNotAllowedError, match="find_now"):
        things.find_now("tea")

    assert server.received == []


async def test_a_wrong_call_is_a_type_error_as_in_python(server) -> None:
    things = rest.create_rest_client(Things, url=server.url)

    with pytest.raises(TypeError):
        await things.find()


@rest.register_rest_client(config_key="things")
class Mapped(Protocol):
    @rest.get("/x")
    async def find(self) -> Thing: ...

    @rest.client_exception_mapper(status=404)
    @staticmethod
    def not_there(response: rest.Response[bytes]) -> Exception | None:
        return NotThere(response.body.decode())

    @staticmethod
    @rest.client_exception_mapper()
    def others(response: rest.Response[bytes]) -> Exception | None:
        return LookupError(response.status) if response.status == 500 else None


async def test_failures_become_the_exceptions_that_mappers_make_of_them(server) -> None:
    things = rest.create_rest_client(Mapped, url=server.url)

    server.answer(Answer("gone", 404))
    with pytest.raises(NotThere, match="gone"):
        await things.find()
    server.answer(Answer("", 500))
    with pytest.raises(LookupError):
        await things.find()
    server.answer(Answer("", 400))
    with pytest.raises(RestClientError):
        await things.find()
