"""Tests SIGTERM under uvicorn with an open stream: the client gets an event, beans are closed, the process ends."""

import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests import programs
from toolbox.tls import tls_context

PROGRAM = """
import asyncio, socket, threading
from collections.abc import AsyncIterator
from typing import Protocol
import uvicorn
from fastapi import BackgroundTasks, FastAPI
from fastapi.responses import StreamingResponse
from toolbox import Container, ToolboxSettings, produces, register_ai_service
from toolbox.runs import Runs
from toolbox_fastapi import Inject, install, sse

def say(text): print(text, flush=True)

stopping = threading.Event()

class Session: ...
class Database: ...

@produces(scope="application")
async def database() -> AsyncIterator[Database]:
    yield Database()
    say("database closed")

@produces(scope="request")
async def session(database: Database) -> AsyncIterator[Session]:
    try:
        yield Session()
    finally:
        await asyncio.sleep(0)
        say("session closed")

app = FastAPI()
async def endless(awaits_its_end: bool) -> AsyncIterator[str]:
    try:
        while True:
            yield "tick"
            await asyncio.sleep(0.01)
    finally:
        if awaits_its_end:  # which starlette's own streams do not let it
            await asyncio.sleep(0)
        say("stream closed")

@app.get("/events")
async def events(session: Inject[Session]):
    return sse(endless(True))

@app.get("/plain")
async def plain(session: Inject[Session]):
    return StreamingResponse(endless(False))

@app.get("/finite")
async def finite(session: Inject[Session]):
    async def ten() -> AsyncIterator[str]:
        yield "begun "
        while not stopping.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # longer than TOOLBOX_STOP_TIMEOUT
        yield "ended"
    return StreamingResponse(ten())

@register_ai_service
class Assistant(Protocol):
    async def chat(self, text: str) -> str: ...

class Silent:
    async def chat(self, request):
        say("asked")
        await asyncio.Event().wait()

@app.get("/awaited")
async def awaited(assistant: Inject[Assistant], session: Inject[Session]):
    return await assistant.chat("go")

@app.get("/background")
async def background(tasks: BackgroundTasks, assistant: Inject[Assistant], session: Inject[Session]):
    tasks.add_task(assistant.chat, "go")

@app.get("/again")
async def again(assistant: Inject[Assistant], session: Inject[Session]):
    try:
        await assistant.chat("go")
    except Exception:
        await assistant.chat("go")

@app.get("/result")
async def result(runs: Inject[Runs], session: Inject[Session]):
    return await runs.result(await runs.start(Assistant.chat, "go"))

@app.get("/executed")
async def executed(runs: Inject[Runs], session: Inject[Session]):
    return await runs.execute((await runs.start(Assistant.chat, "go")).id)

settings = ToolboxSettings(stop_timeout=STOP_TIMEOUT)
container = Container(models={"default": Silent()}, settings=settings)
install(app, container.register(session, database, Assistant))
listening = socket.create_server(("127.0.0.1", 0))
say(listening.getsockname()[1])

class Server(uvicorn.Server):
    def handle_exit(self, *arguments):
        stopping.set()
        super().handle_exit(*arguments)

Server(uvicorn.Config(app, log_level="warning", **OPTIONS)).run(sockets=[listening])
"""


@pytest.fixture
def started(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    timeout, options = request.param
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM).replace("STOP_TIMEOUT", timeout).replace("OPTIONS", options))
    root = Path(__file__).parent.parent.parent
    process = subprocess.Popen(
        programs.command(str(program)), stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(root)}
    )
    with process:
        yield process
        process.kill()


def stop_while_reading(process: subprocess.Popen[str], path: str) -> tuple[str, list[str], float]:
    """Return the body that the client reads, the output of the program, and the seconds until it ended."""
    assert process.stdout is not None
    port = int(process.stdout.readline())
    text = ""
    with (
        httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=100, verify=tls_context()) as client,
        client.stream("GET", path) as reply,
    ):
        began = 0.0
        try:
            for chunk in reply.iter_text():
                text += chunk
                if not began:
                    began = time.monotonic()
                    process.send_signal(signal.SIGTERM)
        except httpx2.RemoteProtocolError:
            text += "(broken off)"
    said = process.stdout.read().split("\n")
    assert process.wait(60) in (0, -signal.SIGTERM)
    return text, said, time.monotonic() - began


@pytest.mark.parametrize("started", [("10.0", "{}"), ("10.0", '{"timeout_graceful_shutdown": 5}')], indirect=True)
def test_server_sent_events_end_at_the_signal(started: subprocess.Popen[str]) -> None:
    text, said, took = stop_while_reading(started, "/events")

    assert 'event: failure\ndata: {"type": "about:blank", "title": "Service Unavailable", "status": 503' in text
    assert said == ["stream closed", "session closed", "database closed", ""]
    assert took < 5


@pytest.mark.parametrize("started", [("10.0", '{"timeout_graceful_shutdown": 0.2}')], indirect=True)
def test_requests_that_uvicorn_cancels_are_waited_for(started: subprocess.Popen[str]) -> None:
    text, said, took = stop_while_reading(started, "/plain")

    assert text.startswith("tick")
    assert said == ["stream closed", "session closed", "database closed", ""]
    assert took < 8


@pytest.mark.parametrize("started", [("0.2", "{}"), ("0.2", '{"timeout_graceful_shutdown": 5}')], indirect=True)
def test_an_own_stream_may_go_on_to_its_end(started: subprocess.Popen[str]) -> None:
    text, said, _ = stop_while_reading(started, "/finite")

    assert text == "begun ended"
    assert said == ["session closed", "database closed", ""]


@pytest.mark.parametrize("started", [("0.2", "{}")], indirect=True)
@pytest.mark.parametrize(
    ("path", "status"),
    [("/awaited", 503), ("/again", 503), ("/background", 200), ("/result", 503), ("/executed", 503)],
)
def test_an_invocation_that_takes_too_long_is_cancelled(started: subprocess.Popen[str], path: str, status: int) -> None:
    assert started.stdout is not None
    port = int(started.stdout.readline())

    with ThreadPoolExecutor() as pool:
        reply = pool.submit(httpx2.get, f"http://127.0.0.1:{port}{path}", timeout=100, verify=tls_context())
        assert started.stdout.readline() == "asked\n"
        started.send_signal(signal.SIGTERM)
        assert reply.result().status_code == status

    assert started.stdout.read().removeprefix("asked\n").split("\n") == ["session closed", "database closed", ""]
    assert started.wait(60) in (0, -signal.SIGTERM)
