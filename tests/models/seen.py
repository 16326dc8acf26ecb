"""Reads replies that were seen at real servers, from the files of `seen_replies`, one for each kind.

A reply has `events`, each the data of a server-sent event, a JSON `document`, or the exact bytes: `chunks` of a stream
or a `body`, as text or base64. The other fields say what a robust client makes of it.
"""

import json
from base64 import b64decode
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.models.scripted_server import Scripted, chunk, sse
from tests.models.server_replies import Case
from toolbox import errors

HEL, LO, STOP = chunk({"content": "Hel"}), chunk({"content": "lo"}), chunk({}, "stop")


@dataclass(eq=False)
class Seen(Case):
    """A case and where it was seen: a server, a gateway, a report of it; `any` where it may come from everywhere."""

    at: str = ""

    def __str__(self) -> str:
        return f"{self.at}: {self.what}"


def seen(place: str, what: str, reply: Scripted, *calls: tuple[str, dict[str, Any]], **more: Any) -> Seen:
    return Seen(what, reply, list(calls), at=place, **more)


def raw(*pieces: str | bytes, **more: Any) -> Scripted:
    """An event stream of these bytes."""
    chunks = [each.encode() if isinstance(each, str) else each for each in pieces]
    return Scripted(chunks=chunks, content_type="text/event-stream", **more)


def events(*values: Any) -> str:
    return b"".join(sse(*values, done=False)).decode()


# --- data files


def read_seen(kind: str) -> list[Seen]:
    """Return the cases of a kind, such as `calls`."""
    path = Path(__file__).parent / "seen_replies" / f"{kind}.json"
    return [_case(each) for each in json.loads(path.read_text("utf-8"))]


def _case(written: dict[str, Any]) -> Seen:
    reply = _reply(**written.pop("reply"))
    calls = [(name, arguments) for name, arguments in written.pop("calls", ())]
    error = getattr(errors, written.pop("error")) if "error" in written else None
    return Seen(reply=reply, calls=calls, error=error, **written)


def _reply(
    events: list[Any] | None = None,
    chunks: list[Any] | None = None,
    document: Any = None,
    body: Any = None,
    **more: Any,
) -> Scripted:
    if events is not None:
        return Scripted(chunks=sse(*events, done=False), **{"content_type": "text/event-stream; charset=utf-8", **more})
    if chunks is not None:
        return Scripted(chunks=[_bytes(each) for each in chunks], **{"content_type": "text/event-stream", **more})
    return Scripted(_bytes(body) if document is None else json.dumps(document).encode(), **more)


def _bytes(written: str | dict[str, str]) -> bytes:
    return written.encode() if isinstance(written, str) else b64decode(written["base64"])
