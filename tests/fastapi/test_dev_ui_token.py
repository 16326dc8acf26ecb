"""The dev UI's token and dependencies: who gets in behind a proxy that names no clients."""

import asyncio
import logging
import os
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx2
import pytest
import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException, Request

from tests import programs
from toolbox import Container, IllegalConfigurationError, ToolboxSettings, application_scoped, tool
from toolbox.tls import tls_context
from toolbox_fastapi import DevUi, Inject, install
from toolbox_fastapi.dev_ui import access

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]  # starts processes

HERE = {"host": "localhost"}
TOKEN = "correct horse + battery"
PATHS = ("/dev-ui/", "/dev-ui/api/program", "/dev-ui/api/log", "/dev-ui/page/main.js")


@application_scoped
class Safe:
    def __init__(self) -> None:
        self.opened = 0

    @tool
    def open(self) -> str:
        self.opened += 1
        return "gold"


def program(dev_ui: Any = True, **options: Any) -> FastAPI:
    app = FastAPI(**options)
    install(app, Container().register(Safe), dev_ui=dev_ui)
    return app


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TOOLBOX_DEV_UI_TOKEN", raising=False)


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    found = re.search(r"^Dev UI: (\S+)", capsys.readouterr().err, re.MULTILINE)
    assert found
    return found[1]


CALL = {"tool": "open", "arguments": "{}"}


async def test_clients_behind_a_proxy_without_headers_need_the_token(running: Any) -> None:
    async with running(program()) as client:
        for path in PATHS:
            assert (await client.get(path, headers=HERE)).status_code == 403
            assert (await client.get(f"{path}?token=guess", headers=HERE)).status_code == 403
        for cookie in ("toolbox_dev_ui=1", "x"):
            reply = await client.post("/dev-ui/api/tool", json=CALL, headers={**HERE, "cookie": cookie})
            assert reply.status_code == 403
            assert "token" in reply.json()["detail"]


async def test_the_printed_address_opens_the_page_and_the_cookie_keeps_it_open(
    running: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(program()) as client:
        reply = await client.get(printed(capsys), headers=HERE)
        assert (reply.status_code, reply.headers["location"]) == (303, "./")
        cookie = reply.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=lax" in cookie
        for path in PATHS[:2]:
            assert (await client.get(path, headers=HERE)).status_code == 200
        called = await client.post("/dev-ui/api/tool", json=CALL, headers=HERE)
        assert called.status_code == 200
        assert "gold" in called.text


async def test_the_path_without_a_slash_keeps_the_token(running: Any) -> None:
    async with running(program(DevUi(token=TOKEN))) as client:
        reply = await client.get("/dev-ui", params={"token": TOKEN}, headers=HERE, follow_redirects=True)
    assert reply.status_code == 200
    assert reply.url.query == b""


async def test_the_form_accepts_the_token(running: Any) -> None:
    async with running(program(DevUi(token=TOKEN))) as client:
        assert (await client.post("/dev-ui/", data={"token": "else"}, headers=HERE)).status_code == 403
        assert (await client.post("/dev-ui/", data={"token": TOKEN}, headers=HERE)).status_code == 303
        assert (await client.get("/dev-ui/", headers=HERE)).status_code == 200


async def test_the_token_can_be_chosen_in_the_program_and_in_the_environment(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLBOX_DEV_UI_TOKEN", "from the environment")
    for options, right in ((True, "from the environment"), (DevUi(token=TOKEN), TOKEN)):
        async with running(program(options)) as client:
            for token, status in ((right, 200), ("another one", 403)):
                reply = await client.get("/dev-ui/api/program", params={"token": token}, headers=HERE)
                assert reply.status_code == status


async def test_the_token_can_be_turned_off(running: Any, capsys: pytest.CaptureFixture[str]) -> None:
    async with running(program(DevUi(token=False))) as client:
        assert printed(capsys) == "/dev-ui/"
        assert (await client.get("/dev-ui/", headers=HERE)).status_code == 200


@pytest.mark.parametrize("wrong", ["", "short", None, 5])
def test_a_token_that_is_too_short_is_rejected(wrong: Any) -> None:
    with pytest.raises(IllegalConfigurationError, match="8 characters"):
        DevUi(token=wrong)


def test_the_token_is_not_in_the_repr() -> None:
    assert TOKEN not in repr(DevUi(token=TOKEN))
    assert TOKEN not in repr(ToolboxSettings(dev_ui_token=TOKEN))


async def test_a_token_parameter_of_other_paths_is_not_removed(running: Any) -> None:
    app = program()

    @app.get("/dev-ui-of-mine")
    async def mine(token: str) -> str:
        return token

    async with running(app) as client:
        assert (await client.get("/dev-ui-of-mine?token=mine")).json() == "mine"


# --- under a real server


@asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        config = uvicorn.Config(app, port=port, log_config=None, timeout_graceful_shutdown=5, ws="none")
        server = uvicorn.Server(config)
        started = asyncio.Event()
        started_up = server.startup

        async def startup(sockets: Any = None) -> None:
            await started_up(sockets)
            started.set()

        server.startup = startup  # type: ignore[method-assign]
        task = asyncio.create_task(server.serve(sockets=[listening]))
        await started.wait()
        try:
            yield
        finally:
            server.should_exit = True
            await task


async def test_the_address_is_printed_and_the_token_is_not_in_the_access_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    # Another test's server may have configured uvicorn's loggers.
    caplog.set_level(logging.INFO, "uvicorn.access")
    for name in ("uvicorn", "uvicorn.access"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    async with served(program()), httpx2.AsyncClient(follow_redirects=True, verify=tls_context()) as client:
        address = printed(capsys)
        assert re.fullmatch(r"http://localhost:\d+/dev-ui/\?token=[0-9a-f]{48}", address)
        reply = await client.get(address.replace("localhost", "127.0.0.1"))
        assert reply.status_code == 200
        assert (await client.get(f"{reply.url}api/program?token={address[-48:]}")).status_code == 200
    logged = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert any("/dev-ui/api/program" in line for line in logged)
    assert not any(address[-48:] in line for line in logged)


def test_the_token_stays_after_a_reload_and_is_kept_in_a_private_file(tmp_path: Path) -> None:
    made = [
        subprocess.run(
            programs.command("-c", "from toolbox_fastapi.dev_ui.access import make_token; print(make_token())"),
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    [file] = tmp_path.rglob("dev-ui-secret*")

    assert made[0] == made[1]
    assert file.stat().st_mode & 0o077 == 0
    file.chmod(0o644)
    assert access.secret_of_user() is None
    assert access.make_token() not in (made[0].strip(), access.make_token())


# --- dependencies


class Guard:
    def __init__(self) -> None:
        self.seen: list[str] = []

    async def __call__(
        self, request: Request, safe: Inject[Safe], x_login: Annotated[str | None, Header()] = None
    ) -> None:
        self.seen.append(request.url.path)
        if x_login != "ada":
            raise HTTPException(401, "log in first")


async def test_dependencies_run_before_every_request_to_the_dev_ui(running: Any) -> None:
    guard = Guard()
    async with running(program(DevUi(token=False, dependencies=[Depends(guard)]))) as client:
        for path in PATHS:
            reply = await client.get(path, headers=HERE)
            assert (reply.status_code, reply.json()) == (401, {"detail": "log in first"})
        assert (await client.post("/dev-ui/api/tool", json=CALL, headers=HERE)).status_code == 401
        inside = {**HERE, "x-login": "ada"}
        assert (await client.get("/dev-ui", headers=inside, follow_redirects=True)).status_code == 200
        called = await client.post("/dev-ui/api/tool", json=CALL, headers=inside)
        assert "gold" in called.text
        assert (await client.get("/openapi.json")).json()["paths"] == {}
    assert "/dev-ui/api/tool" in guard.seen


async def test_dependencies_may_read_the_body_of_a_call(running: Any) -> None:
    seen: list[Any] = []

    async def read_body(request: Request) -> None:
        seen.append(await request.body())

    async with running(program(DevUi(token=False, dependencies=[Depends(read_body)]))) as client:
        reply = await client.post("/dev-ui/api/tool", json=CALL, headers=HERE)

    assert b"open" in seen[0]
    assert "gold" in reply.text


async def test_dependencies_can_be_overridden_in_a_test(running: Any) -> None:
    guard = Guard()
    app = program(DevUi(token=False, dependencies=[Depends(guard)]))
    app.dependency_overrides[guard] = lambda: None
    async with running(app) as client:
        assert (await client.get("/dev-ui/", headers=HERE)).status_code == 200


async def test_a_dependency_that_yields_ends_after_the_response(running: Any) -> None:
    ended: list[str] = []

    def login() -> Iterator[None]:
        yield
        ended.append("ended")

    async with running(program(DevUi(token=False, dependencies=[Depends(login)]))) as client:
        assert (await client.get("/dev-ui/api/program", headers=HERE)).status_code == 200
    assert ended == ["ended"]


def test_invalid_dependencies_are_rejected() -> None:
    with pytest.raises(IllegalConfigurationError, match="Depends"):
        DevUi(dependencies=[Guard()])


def test_beans_of_dependencies_are_checked_at_start() -> None:
    class Nowhere: ...

    def login(nowhere: Inject[Nowhere]) -> None: ...

    app, container = FastAPI(), Container()
    install(app, container, dev_ui=DevUi(dependencies=[Depends(login)]))

    assert any("Nowhere" in each.what for each in container.check())
