"""A real HTTP server on a free port that records requests and sends the replies of a test."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


@dataclass
class Received:
    """A request as it came over the wire."""

    verb: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    port: int = 0

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> list[tuple[str, str]]:
        return parse_qsl(urlsplit(self.target).query, keep_blank_values=True)

    def header(self, name: str) -> str | None:
        values = [value for each, value in self.headers if each.lower() == name.lower()]
        return ", ".join(values) if values else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Answer:
    """A reply: `body` is bytes, text, an iterator of byte chunks, or a value to send as JSON."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hang_up: bool = False


Handler = Callable[[Received], Answer]


class Server:
    """Answers each request with the next of `answers` (the last one repeats) or the result of `handler`."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.answers: list[Answer] = [Answer({})]
        self.handler: Handler | None = None
        self.open_connections = 0
        self.all_closed = threading.Event()
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler_class())
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def answer(self, *answers: object) -> None:
        self.answers = [each if isinstance(each, Answer) else Answer(each) for each in answers]

    @property
    def last(self) -> Received:
        return self.received[-1]

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def count(self, change: int) -> None:
        with self._lock:
            self.open_connections += change
            if self.open_connections:
                self.all_closed.clear()
            else:
                self.all_closed.set()

    def _next(self, received: Received) -> Answer:
        with self._lock:
            self.received.append(received)
            if self.handler is None:
                return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return self.handler(received)

    def _handler_class(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle(self) -> None:
                server.count(1)
                try:
                    super().handle()
                finally:
                    server.count(-1)

            def reply(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                answer = server._next(
                    Received(self.command, self.path, list(self.headers.items()), body, self.client_address[1])
                )
                if answer.hang_up:
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                headers = dict(answer.headers)
                if isinstance(answer.body, Iterator):
                    self.chunks(headers, answer.body)
                    return
                if isinstance(answer.body, bytes):
                    content = answer.body
                elif isinstance(answer.body, str):
                    content = answer.body.encode()
                else:
                    content = json.dumps(answer.body).encode()
                    headers.setdefault("Content-Type", "application/json")
                headers["Content-Length"] = str(len(content))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def chunks(self, headers: dict[str, str], chunks: Iterator[bytes]) -> None:
                for name, value in {**headers, "Transfer-Encoding": "chunked"}.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    for chunk in chunks:
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                    self.wfile.write(b"0\r\n\r\n")

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = reply

            def log_message(self, *args: object) -> None:
                pass

        return Handler
