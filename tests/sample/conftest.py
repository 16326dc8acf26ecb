"""Runs the sample as its users do: in its own process under uvicorn, on a free port."""

import json
import os
import re
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests import programs

ROOT = Path(__file__).parent.parent.parent
DEV_UI_TOKEN = "token-of-the-sample"


def environment(**more: str) -> dict[str, str]:
    """This process's, without what chooses a model or a weather service, and with `more`."""
    chosen = ("OPENAI_", "TOOLBOX_", "OPEN_METEO")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(chosen)}
    return kept | {"PYTHONIOENCODING": "utf-8"} | more


@dataclass(frozen=True)
class Reply:
    """An HTTP reply."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True)
class Address:
    """Return the address of a server; requests have the `cookie`."""

    url: str
    cookie: str = ""

    def get(self, path: str) -> Reply:
        return self._send(urllib.request.Request(self.url + path))

    def post(self, path: str, body: object) -> Reply:
        content = json.dumps(body).encode()
        return self._send(urllib.request.Request(self.url + path, content, {"content-type": "application/json"}))

    def ask(self, question: str) -> Any:
        reply = self.post("/weather", {"question": question})
        assert reply.status == 200, reply.text
        return reply.json

    def _send(self, request: urllib.request.Request) -> Reply:
        if self.cookie:
            request.add_header("cookie", self.cookie)
        try:
            with urllib.request.urlopen(request, timeout=110) as response:
                return Reply(response.status, response.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, error.read().decode())


@contextmanager
def served(**more: str) -> Iterator[Address]:
    """`python -m sample_app` on a free port; it says itself which."""
    process = subprocess.Popen(
        programs.command("-m", "sample_app", "--port", "0"),
        cwd=ROOT,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    complaints: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None
    errors = process.stderr
    # What it complains about is read all the time, or a full pipe would stop it.
    reader = threading.Thread(target=lambda: complaints.extend(errors), daemon=True)
    reader.start()
    try:
        found = re.search(r"http://localhost:\d+", process.stdout.readline())
        assert found, f"the sample did not start: {''.join(complaints)}"
        yield Address(found[0].replace("localhost", "127.0.0.1"))
    finally:
        process.terminate()
        process.wait(timeout=60)
        reader.join(timeout=60)
        process.stdout.close()
        process.stderr.close()
    assert not any("Traceback" in line for line in complaints), "".join(complaints)


@pytest.fixture(scope="session")
def weather_agent() -> Iterator[Address]:
    """The sample on its embedded default."""
    with served(TOOLBOX_DEV_UI_TOKEN=DEV_UI_TOKEN) as address:
        yield address


class WireServer:
    """A local server that speaks the chat-completions wire; `reply` makes a message of each request's body."""

    def __init__(self, reply: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.requests: list[dict[str, Any]] = []
        wire = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                wire.requests.append(request)
                message = {"role": "assistant", "content": None, **reply(request)}
                finish = "tool_calls" if message.get("tool_calls") else "stop"
                body = json.dumps(
                    {
                        "id": f"chatcmpl-{len(wire.requests)}",
                        "object": "chat.completion",
                        "created": 1,
                        "model": request["model"],
                        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
                        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
                    }
                ).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the overridden name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> "WireServer":
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def wire_server() -> Iterator[Callable[[Callable[[dict[str, Any]], dict[str, Any]]], WireServer]]:
    """Starts wire servers and ends them."""
    started: list[WireServer] = []

    def start(reply: Callable[[dict[str, Any]], dict[str, Any]]) -> WireServer:
        started.append(WireServer(reply).__enter__())
        return started[-1]

    yield start
    for server in started:
        server.__exit__()
