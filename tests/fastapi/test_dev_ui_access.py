"""Which hosts, clients and pages may use the dev UI."""

import json
from typing import Any

import pytest

from tests.fastapi.restaurant import HERE, restaurant
from toolbox_fastapi import DevUi

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:80", "[::1]:8000", "LocalHost", "localhost."]
)
async def test_local_host_names_are_allowed(running: Any, host: str) -> None:
    async with running(restaurant()) as client:
        assert (await client.get("/dev-ui/", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "example.org"},
        {"host": "localhost.example.org"},
        {"host": "0.0.0.0:8000"},
        {"host": ""},
        {"host": "localhost", "x-forwarded-for": "203.0.113.9"},
        {"host": "localhost", "x-forwarded-for": "127.0.0.1, 203.0.113.9"},
        {"host": "localhost", "x-real-ip": "203.0.113.9"},
        {"host": "localhost", "forwarded": 'proto=http;for="[2001:db8::1]", for=127.0.0.1'},
        {"host": "localhost", "forwarded": "for=unknown"},
        {"host": "localhost", "forwarded": 'for="203.0.113.9:80"'},
        {"host": "localhost", "forwarded": "for=127.0.0.1;host=example.org"},
        {"host": "localhost", "x-forwarded-host": "example.org"},
        {"host": "localhost", "origin": "https://example.org"},
        {"host": "localhost:8000", "origin": "http://localhost:9000"},
        {"host": "localhost", "origin": "null"},
    ],
)
async def test_other_host_names_are_rejected(running: Any, headers: dict[str, str]) -> None:
    async with running(restaurant()) as client:
        for path in ("/dev-ui/", "/dev-ui/api/program", "/dev-ui/api/log", "/dev-ui/page/main.js"):
            reply = await client.get(path, headers=headers)
            assert reply.status_code == 403
            assert "dev UI" in reply.json()["detail"]


async def test_a_remote_client_is_rejected_with_the_option_that_allows_it(connect: Any, running: Any) -> None:
    for allowed, status in (((), 403), (("203.0.113.0/24",), 200)):
        app = restaurant(dev_ui=DevUi(allowed_clients=allowed, token=False))
        async with running(app):
            client = connect(app, "/dev-ui/")
            client.scope["headers"] = [(b"host", b"localhost")]
            client.scope["client"] = ("203.0.113.9", 5)
            await client.start()
            assert client.status == status
            assert allowed or b"allowed_clients=['203.0.113.9']" in client.body


async def test_an_unknown_client_is_rejected(connect: Any, running: Any) -> None:
    app = restaurant()
    async with running(app):
        client = connect(app, "/dev-ui/")
        client.scope |= {"headers": [(b"host", b"localhost")], "client": None}
        await client.start()
    assert client.status == 403
    assert b"allowed_clients" not in client.body  # which takes addresses only


@pytest.mark.parametrize("path", ["/x/", "/api/v1/x/"])
async def test_the_page_works_below_a_root_path_whether_or_not_a_proxy_removes_it(
    connect: Any, running: Any, path: str
) -> None:
    app = restaurant(dev_ui=DevUi("/x", token=False))
    async with running(app):
        for file in ("", "page/main.js", "api/program"):
            client = connect(app, path + file)
            client.scope |= {"headers": [(b"host", b"localhost")], "root_path": "/api/v1"}
            await client.start()
            assert client.status == 200


@pytest.mark.parametrize("said", ["127.0.0.1", '"127.0.0.1:4711"', '"[::1]"', '"[::1]:4711";host="localhost:80"'])
async def test_a_proxy_can_report_a_local_client(running: Any, said: str) -> None:
    async with running(restaurant()) as client:
        assert (await client.get("/dev-ui/", headers={**HERE, "forwarded": f"for={said}"})).status_code == 200


@pytest.mark.parametrize(
    ("origin", "site", "status"),
    [
        ("http://localhost:9000", "same-origin", 200),
        ("http://evil.example", "same-origin", 403),  # its name leads to the proxy
        ("http://localhost:9000", "same-site", 403),  # another page of this machine
        ("null", "same-origin", 403),
    ],
)
async def test_the_page_works_behind_a_proxy_that_uses_its_own_host_name(
    running: Any, origin: str, site: str, status: int
) -> None:
    shown = {"host": "127.0.0.1:8000", "origin": origin, "sec-fetch-site": site}
    async with running(restaurant()) as client:
        body = {"tool": "add", "arguments": '{"dish": "soup"}'}
        assert (await client.post("/dev-ui/api/tool", json=body, headers=shown)).status_code == status


async def test_other_host_names_can_be_allowed(running: Any) -> None:
    async with running(restaurant(dev_ui=DevUi(allowed_hosts=["dev.example.org"], token=False))) as client:
        assert (await client.get("/dev-ui/", headers={"host": "dev.example.org:8000"})).status_code == 200
        assert (await client.get("/dev-ui/", headers={"host": "example.org"})).status_code == 403


async def test_pages_of_other_sites_cannot_call_anything(running: Any) -> None:
    body = json.dumps({"tool": "add", "arguments": "{}"})
    async with running(restaurant()) as client:
        for headers, status in (
            ({"content-type": "text/plain"}, 422),
            ({}, 422),
            ({"content-type": "application/json", "sec-fetch-site": "cross-site"}, 403),
            ({"content-type": "application/json", "sec-fetch-site": "same-site"}, 403),
            ({"content-type": "application/json", "origin": "http://evil.example"}, 403),
            ({"content-type": "application/json", "origin": "http://localhost", "sec-fetch-site": "same-origin"}, 200),
        ):
            reply = await client.post("/dev-ui/api/tool", content=body, headers={**HERE, **headers})
            assert reply.status_code == status, headers
        assert (await client.get("/dev-ui/api/tool", headers=HERE)).status_code == 405


async def test_websockets_are_rejected(connect: Any, running: Any) -> None:
    app = restaurant()
    async with running(app):
        client = connect(app, "/dev-ui/api/log", "websocket")
        await client.start()
    assert client.response == [{"type": "websocket.close", "code": 1008}]
