"""Reads replies that break the rules of the wire, as real servers send them, from the files of `seen_replies`.

Each file has the replies of one kind. A reply has `events`, each the data of a server-sent event, a JSON `document`, or
the exact bytes: `chunks` of a stream or a `body`, as text or base64. The other fields say what a robust client makes of
it; what is asked next is answered "done". Not here: replies that a program writes (`generated_replies`).
"""

import json
from base64 import b64decode
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.models.scripted_server import Scripted, sse
from toolbox import ModelError, errors

KINDS = ("calls", "names", "arguments", "ids", "ends", "errors", "shapes")


@dataclass(eq=False)
class Case:
    """A deviation and what a robust client makes of it: the calls that ran, or the error, or the text.

    `at` is where it was seen: a server, a gateway, a report of it; `any` where it may come from everywhere. `sent_back`
    is a part of the message that goes back to the server; None stands for a field that is missing.
    """

    what: str
    reply: Scripted
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    error: type[ModelError] | None = None
    says: str = ""
    status: int | None = None
    text: str | None = None
    sent_back: dict[str, Any] | None = None
    result: str | None = None
    at: str = "any"

    def __str__(self) -> str:
        return f"{self.at}: {self.what}"

    @property
    def is_stream(self) -> bool:
        return self.reply.chunks is not None


def seen(place: str, what: str, reply: Scripted, *calls: tuple[str, dict[str, Any]], **more: Any) -> Case:
    return Case(what, reply, list(calls), at=place, **more)


def raw(*pieces: str | bytes, **more: Any) -> Scripted:
    """An event stream of these bytes."""
    chunks = [each.encode() if isinstance(each, str) else each for each in pieces]
    return Scripted(chunks=chunks, content_type="text/event-stream", **more)


# --- data files


def read_seen(kind: str) -> list[Case]:
    """Return the cases of a kind, such as `calls`."""
    path = Path(__file__).parent / "seen_replies" / f"{kind}.json"
    return [_read_case(kind, each) for each in json.loads(path.read_text("utf-8"))]


def _read_case(kind: str, written: dict[str, Any]) -> Case:
    reply = _read_reply(**written.pop("reply"))
    calls = [(name, arguments) for name, arguments in written.pop("calls", ())]
    error = getattr(errors, written.pop("error")) if "error" in written else None
    what = f"{kind}: {written.pop('what')}"
    return Case(what, reply, calls, error, **written)


def _read_reply(
    events: list[Any] | None = None,
    chunks: list[Any] | None = None,
    document: Any = None,
    body: Any = None,
    **more: Any,
) -> Scripted:
    if events is not None:
        return Scripted(chunks=sse(*events, done=False), **{"content_type": "text/event-stream; charset=utf-8", **more})
    if chunks is not None:
        return Scripted(chunks=[_bytes_of(each) for each in chunks], **{"content_type": "text/event-stream", **more})
    return Scripted(_bytes_of(body) if document is None else json.dumps(document).encode(), **more)


def _bytes_of(written: str | dict[str, str]) -> bytes:
    return written.encode() if isinstance(written, str) else b64decode(written["base64"])
