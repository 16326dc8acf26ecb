"""Describes replies of real servers; the `seen_…` files contain them by kind."""

import json
from dataclasses import dataclass
from typing import Any

from tests.models.scripted_server import Scripted, chunk, sse
from tests.models.server_replies import Case, document

TEN = '{"a": 10, "b": 20}'
ADDED_TEN = ("add", {"a": 10, "b": 20})
SAID = {"content": "Hello"}
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


def json_text(**fields: Any) -> Scripted:
    return document(json.dumps(fields))


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, **fields}]}
