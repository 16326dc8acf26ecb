"""Which requests are sent again, and which are not."""

import asyncio
import email.utils
import time
from typing import Protocol

import pytest

from tests.rest.http_server import Answer
from toolbox import rest
from toolbox.errors import RestClientError

pytestmark = pytest.mark.anyio


@rest.register_rest_client(config_key="flaky")
class Flaky(Protocol):
    @rest.get("/x")
    async def fetch(self) -> str: ...

    @rest.get("/x")
    def fetch_now(self) -> str: ...

    @rest.post("/x")
    async def create(self) -> str: ...

    @rest.post("/x", idempotent=True)
    async def ensure(self) -> str: ...

    @rest.put("/x")
    async def change(self) -> str: ...


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_an_idempotent_request_is_sent_again_while_the_server_is_unavailable(server, status) -> None:
    server.answer(Answer("", status), Answer("", status), Answer("here"))
    flaky = rest.create_rest_client(Flaky, url=server.url, retries=2)

    assert await flaky.fetch() == "here"
    assert len(server.received) == 3


async def test_a_synchronous_request_is_sent_again_too(server) -> None:
    server.answer(Answer("", 503), Answer("here"))
    flaky = rest.create_rest_client(Flaky, url=server.url, retries=2)

    assert await asyncio.to_thread(flaky.fetch_now) == "here"
    assert len(server.received) == 2


async def test_the_last_failure_is_raised_when_the_retries_are_used_up(server) -> None:
    server.answer(Answer("busy", 503))
    flaky = rest.create_rest_client(Flaky, url=server.url, retries=1)

    with pytest.raises(RestClientError, match="busy") as caught:
        await flaky.fetch()

    assert caught.value.status == 503
    assert len(server.received) == 2


async def test_a_broken_connection_is_tried_again(server) -> None:
    server.answer(Answer(hang_up=True), Answer("here"))
    flaky = rest.create_rest_client(Flaky, url=server.url, retries=1)

    assert await flaky.change() == "here"


async def test_posts_are_retried_only_if_marked_idempotent(server) -> None:
    flaky = rest.create_rest_client(Flaky, url=server.url, retries=3)

    server.answer(Answer("", 503), Answer("here"))
    with pytest.raises(RestClientError):
        await flaky.create()
    server.answer(Answer(hang_up=True), Answer("here"))
    with pytest.raises(RestClientError):
        await flaky.create()
    assert len(server.received) == 2
    server.answer(Answer("", 503), Answer("here"))
    assert await flaky.ensure() == "here"


@pytest.mark.parametrize("status", [400, 404, 429, 500])
async def test_other_failures_are_not_sent_again(server, status) -> None:
    server.answer(Answer("", status))
    flaky = rest.create_rest_client(Flaky, url=server.url, retries=3)

    with pytest.raises(RestClientError):
        await flaky.fetch()

    assert len(server.received) == 1


async def test_requests_are_not_repeated_without_retries_in_the_settings(server) -> None:
    server.answer(Answer("", 503))
    flaky = rest.create_rest_client(Flaky, url=server.url)

    with pytest.raises(RestClientError):
        await flaky.fetch()

    assert len(server.received) == 1


async def test_retry_after_is_waited_for_when_it_is_not_too_long(server) -> None:
    flaky = rest.create_rest_client(Flaky, url=server.url, retries=2)

    server.answer(Answer("", 429, {"Retry-After": "0"}), Answer("here"))
    assert await flaky.fetch() == "here"
    past = email.utils.formatdate(time.time() - 60, usegmt=True)
    server.answer(Answer("", 503, {"Retry-After": past}), Answer("here"))
    assert await flaky.fetch() == "here"
    server.answer(Answer("", 503, {"Retry-After": "3600"}), Answer("here"))
    with pytest.raises(RestClientError):
        await flaky.fetch()


async def test_cancelling_ends_the_waiting_between_attempts(server) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def refuse(received):
        loop.call_soon_threadsafe(asked.set)
        return Answer("", 503, {"Retry-After": "9"})

    server.handler = refuse
    flaky = rest.create_rest_client(Flaky, url=server.url, retries=2)
    task = asyncio.create_task(flaky.fetch())
    await asked.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
