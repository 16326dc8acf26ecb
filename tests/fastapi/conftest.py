"""Applications under test: called in process, spoken to as an ASGI server would, or served by uvicorn.

Clients share the TLS context: each one of its own would read all certificates, which takes 50 ms.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI

from toolbox.tls import tls_context

Running = Callable[[FastAPI], AbstractAsyncContextManager[httpx2.AsyncClient]]


@pytest.fixture
def running() -> Running:
    """`async with running(app) as client:` starts the application's lifespan and calls it in process."""

    @asynccontextmanager
    async def run(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://app") as client,
        ):
            yield client

    return run


@pytest.fixture
def serving() -> Running:
    """`async with serving(app) as client:` serves the application with uvicorn, on a port of 127.0.0.1."""

    @asynccontextmanager
    async def serve(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5, ws="websockets-sansio")
        started = asyncio.Event()

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                try:
                    await super().startup(sockets)
                finally:
                    started.set()

        server = Server(config)
        task = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            await started.wait()
            url = f"http://127.0.0.1:{port}"
            async with httpx2.AsyncClient(base_url=url, timeout=100, verify=tls_context()) as client:
                yield client
        finally:
            server.should_exit = True
            await task
            listening.close()

    return serve


@pytest.fixture(scope="session")
def serving_on_a_thread() -> Callable[[FastAPI], AbstractContextManager[str]]:
    """`with serving_on_a_thread(app) as url:` serves the application with uvicorn, such as for a browser.

    At the end, it does not wait for pages that are still open and follow a stream.
    """

    @contextmanager
    def serve(app: FastAPI) -> Iterator[str]:
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", timeout_graceful_shutdown=0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            listening.close()

    return serve


class Client:
    """One ASGI connection, message by message: what the server would send and what it would get.

    `leave()` is the client hanging up; `response` has the messages that the application sent.
    """

    def __init__(self, app: Any, path: str, kind: str = "http", method: str = "GET", body: bytes = b"") -> None:
        self.scope: dict[str, Any] = {
            "type": kind,
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"host", b"app"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("app", 80),
            "subprotocols": [],
        }
        self.response: list[dict[str, Any]] = []
        self._app, self._kind = app, kind
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._sent = asyncio.Event()
        self.say({"type": "http.request", "body": body} if kind == "http" else {"type": "websocket.connect"})

    def say(self, message: dict[str, Any]) -> None:
        self._incoming.put_nowait(message)

    def leave(self) -> None:
        self.say({"type": f"{self._kind}.disconnect", "code": 1001, "reason": ""})

    def start(self) -> "asyncio.Task[None]":
        return asyncio.create_task(self._app(self.scope, self._incoming.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        self.response.append(message)
        self._sent.set()

    async def sent(self, what: str) -> dict[str, Any]:
        """The first message of this type, when it has been sent."""
        while True:
            for message in self.response:
                if message["type"] == what:
                    return message
            self._sent.clear()
            await self._sent.wait()

    @property
    def status(self) -> int:
        return int(self.response[0]["status"])

    @property
    def is_complete(self) -> bool:
        last = self.response[-1]
        return last["type"] == "http.response.body" and not last.get("more_body")

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.response)


@pytest.fixture
def connect() -> type[Client]:
    """`connect(app, "/path").start()`: a connection whose every message the test decides."""
    return Client
