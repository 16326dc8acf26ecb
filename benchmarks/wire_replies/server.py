"""A scripted chat-completions server: replays the replies of a case byte for byte, and checks what the client sends.

    python server.py [--port 0] [--cases cases]

Choose a case by the base URL ``http://127.0.0.1:PORT/case/<id>/v1`` or by the header ``x-case: <id>`` on ``/v1``.
``<id>~<anything>`` plays the same case with a separate state, so runs do not disturb each other.

    POST …/chat/completions     the next reply of the script
    GET  /case/<id>/report      {"requests", "problems", "gaps_ms", "bodies"}
    POST /case/<id>/reset       forget the requests

A piece of a reply (an item of ``chunks``, or ``body``) is a string, or ``{"b64": …}`` for raw bytes, or
``{"repeat": text, "times": n}``, or ``{"parts": [piece, …]}``. Each item of ``chunks`` is sent in a separate write and
HTTP chunk; ``{"each": piece, "times": n}`` means n equal items. ``"cut": true`` drops the connection after the last
item, without the closing HTTP chunk.

Uses the standard library only. Binds 127.0.0.1.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

NAME = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")  # what OpenAI accepts as a function name in the history
GAP_MS = 1.0  # pause between chunks, so that they do not melt into one TCP segment


def load_cases(folder: Path) -> dict[str, dict[str, Any]]:
    cases = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    return {case["id"]: case for case in cases}


def to_bytes(piece: Any) -> bytes:
    if isinstance(piece, str):
        return piece.encode("utf-8")
    if "b64" in piece:
        return base64.b64decode(piece["b64"])
    if "repeat" in piece:
        return piece["repeat"].encode("utf-8") * piece["times"]
    return b"".join(to_bytes(part) for part in piece["parts"])


def expand(chunks: list[Any]) -> Iterator[Any]:
    for piece in chunks:
        if isinstance(piece, dict) and "each" in piece:
            yield from [piece["each"]] * piece["times"]
        else:
            yield piece


# -- judging a request ------------------------------------------------------------------------------------------------


def _strict_object(text: str) -> str | None:
    """None when `text` is a JSON object by RFC 8259; else what is wrong."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(text, parse_constant=refuse)
    except RecursionError:
        return None  # deeper than this judge can follow: not the client's fault
    except ValueError as error:
        return f"not JSON ({error})"
    return None if isinstance(value, dict) else f"JSON, but a {type(value).__name__}, not an object"


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""


def judge(body: dict[str, Any], case: dict[str, Any], number: int) -> list[str]:
    """Problems of request `number` (from 1): what a strict server would answer with a 400."""
    problems: list[str] = []

    def bad(text: str) -> None:
        problems.append(f"request {number}: {text}")

    if bool(body.get("stream")) != case["stream"]:
        bad(f"stream is {body.get('stream')!r}, the case needs {case['stream']}")
    names = sorted(t.get("function", {}).get("name", "?") for t in body.get("tools") or [])
    if names != sorted(case["tools"]):
        bad(f"offers tools {names}, expected {sorted(case['tools'])}")
    messages = body.get("messages") or []
    position = 0
    echoed: list[list[str]] = []
    while position < len(messages):
        message = messages[position]
        position += 1
        role = message.get("role")
        if role not in ("system", "developer", "user", "assistant", "tool"):
            bad(f"message {position - 1} has the role {role!r}")
        if role == "tool":
            bad(f"message {position - 1} is a tool result without a call before it")
        if role != "assistant":
            continue
        if "tool_calls" in message and not message["tool_calls"] and message["tool_calls"] is not None:
            bad("an assistant message carries an empty tool_calls list")
        if message.get("function_call"):
            bad("an assistant message carries the retired function_call")
        calls = message.get("tool_calls") or []
        if not calls and not _text_of(message.get("content")) and not message.get("refusal"):
            bad(f"message {position - 1}: assistant message with neither content nor calls")
        ids: list[str] = []
        for call in calls:
            call_id, function = call.get("id"), call.get("function") or {}
            if not isinstance(call_id, str) or not call_id.strip():
                bad(f"tool call id is {call_id!r}")
            elif call_id in ids:
                bad(f"tool call id {call_id!r} is used twice in one message")
            elif len(call_id) > 64:
                bad(f"tool call id has {len(call_id)} characters")
            ids.append(call_id)
            if call.get("type") != "function":
                bad(f"tool call type is {call.get('type')!r}")
            name = function.get("name")
            if not isinstance(name, str) or not NAME.match(name):
                bad(f"tool call name is {str(name)[:60]!r}")
            arguments = function.get("arguments")
            if not isinstance(arguments, str):
                bad(f"arguments are a {type(arguments).__name__}, not a string")
            elif wrong := _strict_object(arguments):
                bad(f"echoed arguments are {wrong}: {arguments[:60]!r}")
        if calls:
            echoed.append([str((c.get("function") or {}).get("name")) for c in calls])
        answers: list[str] = []
        while position < len(messages) and messages[position].get("role") == "tool":
            answer = messages[position]
            position += 1
            answers.append(answer.get("tool_call_id"))
            if not isinstance(answer.get("content"), (str, list)):
                bad(f"tool result content is {type(answer.get('content')).__name__}")
        if calls and sorted(map(str, answers)) != sorted(map(str, ids)):
            bad(f"calls {ids} were answered by {answers}")
        elif calls and case["expect"].get("ordered_results") and answers != ids:
            bad(f"results are out of call order: calls {ids}, answers {answers}")
    if number == case["expect"]["requests"]:
        expected = case["expect"].get("echo")
        if expected is not None and echoed != expected:
            bad(f"the history holds the calls {echoed}, expected {expected}")
        assistants = [m for m in messages if m.get("role") == "assistant"]
        if (want := case["expect"].get("echo_text")) and not any(
            want in _text_of(m.get("content")) for m in assistants
        ):
            bad(f"the text {want!r} beside the call was lost from the history")
        if (want := case["expect"].get("echo_reasoning")) and not any(
            want in str(m.get("reasoning_content") or m.get("reasoning") or "") for m in assistants
        ):
            bad("reasoning_content of the tool-call turn was not sent back")
        if (want := case["expect"].get("result_contains")) is not None:
            results = [_text_of(m.get("content")) for m in messages if m.get("role") == "tool"]
            if not any(want in text for text in results):
                bad(f"no tool result contains {want[:40]!r}")
    return problems


# -- the server -------------------------------------------------------------------------------------------------------


@dataclass
class Session:
    case: dict[str, Any]
    requests: int = 0
    problems: list[str] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        gaps = [round((b - a) * 1000) for a, b in pairwise(self.times)]
        return {"requests": self.requests, "problems": self.problems, "gaps_ms": gaps, "bodies": self.bodies}


class ScriptedServer:
    def __init__(self, cases: dict[str, dict[str, Any]]) -> None:
        self.cases = cases
        self.sessions: dict[str, Session] = {}

    def session(self, key: str) -> Session | None:
        case = self.cases.get(key.split("~", 1)[0])
        if case is None:
            return None
        return self.sessions.setdefault(key, Session(case))

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.split("\r\n")
            method, path, _ = first.split(" ", 2)
            headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
            raw = await reader.readexactly(int(headers.get("content-length", "0")))
            await self.route(method, path.split("?")[0], headers, raw, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away
        finally:
            writer.close()

    async def route(
        self, method: str, path: str, headers: dict[str, str], raw: bytes, out: asyncio.StreamWriter
    ) -> None:
        match = re.match(r"^/case/([^/]+)(/.*)$", path)
        key, rest = (match[1], match[2]) if match else (headers.get("x-case", ""), path)
        session = self.session(key)
        if session is None:
            return await self.plain(out, 404, {"error": {"message": f"no case {key!r}"}})
        if rest == "/report":
            return await self.plain(out, 200, session.report())
        if rest == "/reset":
            self.sessions.pop(key, None)
            return await self.plain(out, 200, {})
        if not rest.endswith("/chat/completions") or method != "POST":
            session.problems.append(f"unexpected {method} {rest}")
            return await self.plain(out, 404, {"error": {"message": "only POST …/chat/completions here"}})
        body = json.loads(raw)
        session.requests += 1
        session.times.append(time.monotonic())
        session.bodies.append(body if len(raw) < 200_000 else f"<{len(raw)} bytes>")
        session.problems += judge(body, session.case, session.requests)
        if session.requests > len(session.case["replies"]):
            session.problems.append(
                f"request {session.requests}: the script has {len(session.case['replies'])} replies"
            )
            return await self.plain(out, 400, {"error": {"message": "the script is exhausted", "code": "exhausted"}})
        return await self.replay(session.case["replies"][session.requests - 1], out)

    async def plain(self, out: asyncio.StreamWriter, status: int, value: Any) -> None:
        await self.replay({"status": status, "content_type": "application/json", "body": json.dumps(value)}, out)

    async def replay(self, reply: dict[str, Any], out: asyncio.StreamWriter) -> None:
        await asyncio.sleep(reply.get("delay_ms", 0) / 1000)
        chunked = "chunks" in reply
        payload = b"" if chunked else to_bytes(reply["body"])
        head = [f"HTTP/1.1 {reply['status']} Scripted", f"content-type: {reply['content_type']}", "connection: close"]
        head += [f"{name}: {value}" for name, value in reply.get("headers", {}).items()]
        head.append("transfer-encoding: chunked" if chunked else f"content-length: {len(payload)}")
        out.write(("\r\n".join(head) + "\r\n\r\n").encode("latin-1") + payload)
        await out.drain()
        if not chunked:
            return
        gap = reply.get("gap_ms", GAP_MS) / 1000
        for piece in expand(reply["chunks"]):
            data = to_bytes(piece)
            out.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await out.drain()
            if gap:
                await asyncio.sleep(gap)
        if reply.get("cut"):
            await asyncio.sleep(0.02)
            sock = out.get_extra_info("socket")
            if reply["cut"] == "reset":  # RST instead of FIN
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            out.transport.abort()
            return
        out.write(b"0\r\n\r\n")
        await out.drain()


class BackgroundServer:
    """The server on a thread with a separate event loop, so that a busy client cannot block it."""

    def __init__(self, cases: dict[str, dict[str, Any]]) -> None:
        self.scripted = ScriptedServer(cases)
        self.loop = asyncio.new_event_loop()
        self.port = 0

    def __enter__(self) -> BackgroundServer:
        ready = threading.Event()

        async def start() -> None:
            server = await asyncio.start_server(self.scripted.handle, "127.0.0.1", 0, limit=1 << 20)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()

        def run() -> None:
            asyncio.set_event_loop(self.loop)
            self.loop.create_task(start())
            self.loop.run_forever()

        threading.Thread(target=run, daemon=True).start()
        ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)

    def base_url(self, key: str) -> str:
        return f"http://127.0.0.1:{self.port}/case/{key}/v1"

    def report(self, key: str) -> dict[str, Any]:
        session = self.scripted.sessions.get(key)
        return session.report() if session else {"requests": 0, "problems": [], "gaps_ms": [], "bodies": []}


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--cases", type=Path, default=Path(__file__).parent / "cases")
    options = parser.parse_args()
    scripted = ScriptedServer(load_cases(options.cases))
    server = await asyncio.start_server(scripted.handle, "127.0.0.1", options.port, limit=1 << 20)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}  {len(scripted.cases)} cases", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
