"""A recording as a file: what of a request and its reply is written, and how.

Pure: no network, no file. What is written is listed here; whatever is not on the list is not. Not here: asking a
server, playing back (`recording`), in what two requests differ (`differences`).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from ..validation_text import without_secrets

Json: TypeAlias = Any

VERSION = 1
PATHS = ("/chat/completions", "/responses")
"""The ends of paths that are recorded unless others are given; nothing else of an address is written."""
_FIELD_NAMES = """
    frequency_penalty include input instructions logit_bias logprobs max_completion_tokens max_output_tokens
    max_tokens messages min_p modalities model n parallel_tool_calls prediction presence_penalty
    previous_response_id reasoning reasoning_effort repetition_penalty response_format seed service_tier stop
    store stream stream_options temperature text tool_choice tools top_k top_logprobs top_p truncation verbosity
"""
FIELDS = frozenset(_FIELD_NAMES.split())
"""The top level of a request's body. Of another field the name is written: gateways take keys there."""
HIDDEN = "(not recorded)"

_AGAIN = frozenset({401, 403, 408, 409, 429})
_INNER_KEY = re.compile(
    r"(proxy-)?authorization|(x-)?api[_-]?key|(access_)?token|secret|password|cookie", re.IGNORECASE
)
_SHORTEST_SECRET = 8
_LINE = 100


def is_kept(status: int) -> bool:
    """Return True if a reply belongs in a recording: not a redirect, a refused key, or what clients try again."""
    return status < 300 or (400 <= status < 500 and status not in _AGAIN)


# --- what is written


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it is written and compared."""

    path: str
    body: Json = field(hash=False)

    @classmethod
    def of(
        cls,
        path: str,
        body: bytes,
        fields: frozenset[str] = frozenset(),
        rewrite: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        paths: Sequence[str] = PATHS,
    ) -> Asked:
        """Of a request's path and body. Raises `ValueError` for what is no request to a model."""
        end = next((each for each in paths if path.endswith(each)), None)
        if end is None:
            raise ValueError(f"only requests to {' and '.join(paths)} are recorded")
        content = json.loads(body)
        if not isinstance(content, dict):
            raise ValueError("the request's body is no JSON object")
        known = FIELDS | fields
        written = {name: _without_keys(value) if name in known else HIDDEN for name, value in content.items()}
        return cls(end, written if rewrite is None else json.loads(json.dumps(rewrite(written))))


def _without_keys(value: Json) -> Json:
    """A field without what an inner one is called a key for: as those of a tool that the server itself calls."""
    if isinstance(value, list):
        return [_without_keys(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _hidden(each) if _is_hidden(name, each, value) else _without_keys(each) for name, each in value.items()
    }


def _is_hidden(name: str, value: Json, owner: Mapping[str, Json]) -> bool:
    """Return True for a key, and for the headers that the model server sends to an MCP server."""
    if isinstance(value, dict):
        return name == "headers" and (owner.get("type") == "mcp" or "server_url" in owner)
    return _INNER_KEY.fullmatch(name) is not None


def _hidden(value: Json) -> Json:
    return dict.fromkeys(value, HIDDEN) if isinstance(value, dict) else HIDDEN


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back; `chunks` are the pieces of a stream, or one: the body."""

    status: int
    content_type: str | None
    content_encoding: str | None
    chunks: tuple[bytes, ...]

    @classmethod
    def of(cls, status: int, content_type: str | None, content_encoding: str | None, chunks: Sequence[bytes]) -> Reply:
        """Of what came: only of a stream do the pieces matter."""
        is_stream = (content_type or "").startswith("text/event-stream")
        return cls(status, content_type, content_encoding, tuple(chunks) if is_stream else (b"".join(chunks),))


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its reply."""

    asked: Asked
    reply: Reply


class Tape:
    """Exchanges, in the order in which the requests were made."""

    def __init__(self, exchanges: Iterable[Exchange] = ()) -> None:
        self._places: list[Exchange | None] = list(exchanges)

    @property
    def exchanges(self) -> list[Exchange]:
        """Those that are complete."""
        return [each for each in self._places if each is not None]

    def reserve(self) -> int:
        """A place for a request that begins."""
        self._places.append(None)
        return len(self._places) - 1

    def put(self, place: int, exchange: Exchange) -> None:
        """Fills a reserved place."""
        self._places[place] = exchange

    def written(self) -> str:
        """As the text of a file."""
        exchanges = [_exchange_to_json(each) for each in self.exchanges]
        text = _in_lines({"version": VERSION, "exchanges": exchanges}, "")
        # A lone surrogate cannot be said in UTF-8; outside of strings there is none.
        return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"

    @classmethod
    def read(cls, text: str) -> Tape:
        """The tape that `written` wrote. Raises `ValueError`."""
        content = json.loads(text)
        version = content.get("version") if isinstance(content, dict) else None
        if version != VERSION:
            raise ValueError(f"its version is {version!r}, and this toolbox reads {VERSION}")
        try:
            return cls([_exchange_from_json(each) for each in content["exchanges"]])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"an exchange is not complete: {error!r}") from error


def _in_lines(value: Json, margin: str) -> str:
    """JSON to be read and compared by people: in one line what fits there, else a line for each part."""
    short = json.dumps(value, ensure_ascii=False)
    if len(margin) + len(short) <= _LINE or not value or not isinstance(value, (dict, list)):
        return short
    inner = f"{margin}  "
    if isinstance(value, list):
        lines = [f"{inner}{_in_lines(each, inner)}" for each in value]
    else:
        names = ((json.dumps(name, ensure_ascii=False), each) for name, each in value.items())
        lines = [f"{inner}{name}: {_in_lines(each, inner)}" for name, each in names]
    start, end = "[]" if isinstance(value, list) else "{}"
    return "\n".join([start, ",\n".join(lines), f"{margin}{end}"])


def _exchange_to_json(exchange: Exchange) -> Json:
    reply = exchange.reply
    said: dict[str, Json] = {"status": reply.status}
    if reply.content_type is not None:
        said["content_type"] = reply.content_type
    if reply.content_encoding is not None:
        said["content_encoding"] = reply.content_encoding
    if len(reply.chunks) == 1 and (laid_out := _layout_of(reply.chunks[0])) is not None:
        said["layout"], said["json"] = laid_out
    else:
        said["chunks"] = [_text_or_bytes(each) for each in reply.chunks]
    return {"request": {"path": exchange.asked.path, "body": exchange.asked.body}, "reply": said}


def _exchange_from_json(written: Json) -> Exchange:
    asked, said = written["request"], written["reply"]
    if "json" in said:
        chunks = [_laid_out(said["json"], said["layout"]).encode()]
    else:
        pieces = said["chunks"]
        chunks = [each.encode() if isinstance(each, str) else base64.b64decode(each["base64"]) for each in pieces]
    reply = Reply(said["status"], said.get("content_type"), said.get("content_encoding"), tuple(chunks))
    return Exchange(Asked(asked["path"], asked["body"]), reply)


def _text_or_bytes(chunk: bytes) -> Json:
    """Text where it is text: a piece may end within a character."""
    try:
        return chunk.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(chunk).decode()}


# How servers write JSON: with the name of its layout a body is written as JSON, and read back to the same bytes.
_LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "compact": {"separators": (",", ":"), "ensure_ascii": False},
    "spaced": {"ensure_ascii": False},
    "indented": {"indent": 2, "ensure_ascii": False},
    "compact ascii": {"separators": (",", ":")},
    "spaced ascii": {},
    "indented ascii": {"indent": 2},
}
_LINE_END = ", with a line end"


def _laid_out(value: Json, layout: str) -> str:
    name = layout.removesuffix(_LINE_END)
    return json.dumps(value, **_LAYOUTS[name]) + ("\n" if name != layout else "")


def _layout_of(body: bytes) -> tuple[str, Json] | None:
    """The layout of a JSON object and its value; None for what would not come back as the same bytes."""
    try:
        text = body.decode()
        value = json.loads(text)
    except ValueError:
        return None
    if isinstance(value, dict):
        for name in _LAYOUTS:
            for layout in (name, f"{name}{_LINE_END}"):
                if _laid_out(value, layout) == text:
                    return layout, value
    return None


# --- what must not be written


class Secrets:
    """The secrets of the requests that were made. They are not written with a request; a reply might repeat one.

    Values count whatever their names: of the address's query, of headers that are not standard ones, and of the body's
    fields that are not written.
    """

    def __init__(self) -> None:
        self._values: set[str] = set()

    def learn(
        self, headers: Iterable[tuple[str, str]], body: Json, url: str, fields: frozenset[str] = frozenset()
    ) -> None:
        """Remember the secrets of one request. `fields` of its body are written, besides the wire's."""
        parts = urlsplit(url)
        values = [value for name, value in headers if name.lower() not in _STANDARD and not _ABOUT_US.match(name)]
        values += [value for _, value in parse_qsl(parts.query)]
        values += [parts.password or "", *_secrets_in(body, FIELDS | fields)]
        words = [word for value in values for word in re.split(r"[\s;=,]+", value)]
        self._values.update(each for each in (*values, *words) if len(each) >= _SHORTEST_SECRET)

    def hidden_in(self, reply: Reply) -> Reply:
        """Return the reply without them; the pieces of a reply that holds one become its events."""
        body = b"".join(reply.chunks).decode("utf-8", "surrogateescape")
        escaped = {json.dumps(value)[1:-1] for value in self._values}
        shown = without_secrets(body, self._values | escaped)
        if shown == body:
            return reply
        pieces = [shown] if len(reply.chunks) < 2 else re.findall(r".+?(?:\r?\n\r?\n|\Z)", shown, re.DOTALL)
        return replace(reply, chunks=tuple(each.encode("utf-8", "surrogateescape") for each in pieces))


_STANDARD = frozenset(
    {"accept", "accept-encoding", "accept-language", "connection", "content-length", "content-type", "host"}
    | {"idempotency-key", "transfer-encoding", "user-agent"}
)
_ABOUT_US = re.compile(r"x-stainless-", re.IGNORECASE)


def _secrets_in(body: Json, written: Collection[str]) -> Iterator[str]:
    """Yield the texts of a body that are not written: those of other fields, and what is called a key."""
    for name, value in body.items() if isinstance(body, dict) else ():
        if name in written:
            yield from _keys_in(value)
        else:
            yield from _texts_in(value)


def _keys_in(value: Json) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _keys_in(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _texts_in(each) if _is_hidden(name, each, value) else _keys_in(each)


def _texts_in(value: Json) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(each)
