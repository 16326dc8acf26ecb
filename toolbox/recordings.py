"""Records the traffic with a model server in a file, and plays it back without a network.

`Recording` is the `transport=` of a model with a server, such as `OpenAiChatModel`. A replayed test therefore runs
everything but the socket: the bytes of each request and the chunks of each stream. Not here: the fixture
(`pytest_plugin`), a model without a server (`testing`).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast
from urllib.parse import parse_qsl, urlsplit

import httpx2

from .errors import FrameworkError
from .models.model_providers import server_providers
from .models.server_errors import HARMLESS_HEADERS, SHORTEST_SECRET
from .models.sse import JSON_LINES, STREAM_TYPES
from .safe_text import without_secrets
from .tls import tls_context

__all__ = ["Recording", "RecordingError"]

Mode: TypeAlias = Literal["auto", "replay", "record"]

VARIABLE = "TOOLBOX_RECORDING"
RECORD_IT = f"run it once with {VARIABLE}=record and the server's key, and commit the file"

Json: TypeAlias = Any

VERSION = 1
WIRES = tuple(provider.load_wire() for provider in server_providers())
PATHS = tuple(each.path for each in WIRES)
"""The default endings of recorded paths. Nothing else of an address is written."""
FIELDS = frozenset().union(*(each.recorded_fields for each in WIRES))
"""The top-level fields of a body that are written with their values. Other fields are written by name only:
some gateways take keys there."""
HIDDEN = "(not recorded)"

_AGAIN = frozenset({401, 403, 408, 409, 429})
_INNER_KEY = re.compile(
    r"(proxy-)?authorization|(x-)?api[_-]?key|(access_)?token|secret|password|cookie", re.IGNORECASE
)
_LINE = 100
_EXCERPT_LENGTH = 40
_MOST_DIFFERENCES = 12


class RecordingError(FrameworkError):
    """Raised if a recording is missing or invalid, or does not contain a request.

    `file` is the recording's path, `reason` the fact, `fix` the suggestion.
    """

    def __init__(self, file: str, reason: str, fix: str = RECORD_IT) -> None:
        super().__init__(file, reason, fix)
        self.file, self.reason, self.fix = file, reason, fix

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}; {self.fix}"


class Recording(httpx2.AsyncBaseTransport):
    """Records the requests of a model and the server's replies in a file, or replays them from it.

        model = OpenAiChatModel("gpt-5", transport=Recording("weather.json"))

    `mode` is `"replay"`, `"record"` (start a new recording) or `"auto"` (replay if the file exists, else record).
    Default: the variable `TOOLBOX_RECORDING`, else `"replay"` if `CI` is set, else `"auto"`. Replaying needs no key and
    no address.

    A request matches a recorded one if path and body are equal. Each recorded request is replayed once, in any order.
    `rewrite` receives a copy of each body before it is compared and written. Return the body without values that
    change between runs.

    Headers, addresses and queries are never written. Of a body, only the known top-level fields are written with their
    values; `fields` adds others. `paths` are the endings of the paths to record. For a server that uses other
    paths, pass its `paths` and `fields`. Redirects, server errors and the statuses 401, 403, 408, 409 and 429
    are not recorded.

    Raises `ValueError` for an unknown `mode`, and `RecordingError` if a request cannot be replayed.
    """

    def __init__(
        self,
        file: str | Path,
        mode: Mode | None = None,
        *,
        rewrite: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        fields: Iterable[str] = (),
        paths: Iterable[str] = PATHS,
    ) -> None:
        self.file = Path(file)
        self._rewrite, self._fields = rewrite, frozenset(fields)
        self._paths = tuple(paths)
        self._secrets = Secrets()
        self._lock = threading.Lock()
        self.missed: list[RecordingError] = []
        """The errors raised for requests that were not found."""
        mode = mode or mode_from_environment()
        if mode not in ("auto", "replay", "record"):
            raise ValueError(f"invalid mode={mode!r}; use 'auto', 'replay' or 'record'")
        self.is_recording = mode == "record" or (mode == "auto" and not self.file.exists())
        """True if requests are sent to the server."""
        self._traffic = RecordedTraffic() if self.is_recording else self._read_file()
        self._played = [False] * len(self._traffic.exchanges)

    def __repr__(self) -> str:
        return f"Recording({str(self.file)!r}, {'record' if self.is_recording else 'replay'!r})"

    def _read_file(self) -> RecordedTraffic:
        try:
            return RecordedTraffic.read(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RecordingError(str(self.file), "the recording does not exist, and recording is off") from None
        except ValueError as error:
            raise RecordingError(str(self.file), f"invalid recording: {error}") from error

    # --- the transport of the HTTP client

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return the reply from the file or from the server. Raises `RecordingError`."""
        body = await request.aread()
        try:
            asked = RecordedRequest.of(request.url.path, body, self._fields, self._rewrite, self._paths)
        except ValueError as error:
            raise RecordingError(str(self.file), str(error), "use another transport for other requests") from error
        if self.is_recording:
            return await self._ask_server(request, asked)
        with self._lock:
            return _make_response(self._find_reply(asked))

    async def aclose(self) -> None:
        """Do nothing: no connection stays open between requests."""

    # --- replaying

    def _find_reply(self, asked: RecordedRequest) -> RecordedReply:
        same = [number for number, each in enumerate(self._traffic.exchanges) if each.asked == asked]
        for number in same:
            if not self._played[number]:
                self._played[number] = True
                return self._traffic.exchanges[number].reply
        fix = f"if the change is intended, {RECORD_IT}"
        error = RecordingError(str(self.file), self._explain_missing(asked, len(same)), fix)
        self.missed.append(error)
        raise error

    def _explain_missing(self, asked: RecordedRequest, times: int) -> str:
        if times:
            return f"this request was recorded {times} time{'' if times == 1 else 's'} and was sent once more"
        what = f"request {sum(self._played) + 1} is not in the recording ({len(self._traffic.exchanges)} requests)"
        found = [(each, differences(each.asked, asked)) for each in self._find_unplayed() or self._traffic.exchanges]
        if not found:
            return what
        nearest = min((lines for _, lines in found), key=len)
        return "\n  ".join([f"{what}; differences from the most similar one:", *nearest])

    def _find_unplayed(self) -> list[RecordedExchange]:
        return [each for each, played in zip(self._traffic.exchanges, self._played, strict=True) if not played]

    # --- recording

    async def _ask_server(self, request: httpx2.Request, asked: RecordedRequest) -> httpx2.Response:
        self._secrets.learn(
            request.headers.multi_items(), json.loads(await request.aread()), str(request.url), self._fields
        )
        request.headers["accept-encoding"] = "identity"  # a recording is read by people
        with self._lock:
            place = self._traffic.reserve()
        client = httpx2.AsyncClient(follow_redirects=False, verify=tls_context())
        try:
            response = await client.send(request, stream=True)
        except BaseException:
            await client.aclose()
            raise

        # Some servers compress anyway. Secrets cannot be found in compressed bytes.
        is_readable = response.headers.get("content-encoding", "identity") in ("identity", "gzip", "deflate")
        pieces = response.aiter_bytes() if is_readable else response.aiter_raw()
        without = ("content-encoding", "content-length") if is_readable else ()
        headers = [(name, value) for name, value in response.headers.multi_items() if name not in without]

        def keep_reply(chunks: list[bytes]) -> None:
            if is_kept(response.status_code) and is_readable:
                reply = RecordedReply.of(response.status_code, response.headers.get("content-type"), None, chunks)
                with self._lock:
                    self._traffic.put(place, RecordedExchange(asked, self._secrets.hidden_in(reply)))
                    self._write_file()

        return httpx2.Response(
            response.status_code, headers=headers, stream=_RecordingStream(client, response, pieces, keep_reply)
        )

    def _write_file(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_name(f"{self.file.name}.{os.getpid()}")
        unfinished.write_text(self._traffic.write_text(), encoding="utf-8")
        unfinished.replace(self.file)


def mode_from_environment() -> Mode:
    """Return the value of `TOOLBOX_RECORDING`, else `"replay"` if `CI` is set, else `"auto"`."""
    mode = os.environ.get(VARIABLE)
    if mode:
        return cast(Mode, mode.lower())
    return "auto" if os.environ.get("CI", "").lower() in ("", "0", "false") else "replay"


class _RecordingStream(httpx2.AsyncByteStream):
    """Passes a reply on to the client and keeps its chunks.

    The reply is recorded when it is complete, or when the client closes it early.
    """

    def __init__(
        self,
        client: httpx2.AsyncClient,
        response: httpx2.Response,
        pieces: AsyncIterator[bytes],
        keep: Callable[[list[bytes]], None],
    ) -> None:
        self._client, self._response, self._pieces, self._keep = client, response, pieces, keep
        self._chunks: list[bytes] = []
        self._is_whole = self._is_broken = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._pieces:
                self._chunks.append(chunk)
                yield chunk
        except (Exception, asyncio.CancelledError):
            self._is_broken = True
            raise
        self._is_whole = True

    async def aclose(self) -> None:
        await self._response.aclose()
        await self._client.aclose()
        if self._is_whole or (self._chunks and not self._is_broken):
            self._keep(self._chunks)


class _RecordedStream(httpx2.AsyncByteStream):
    """Yields the chunks of a recorded reply."""

    def __init__(self, chunks: tuple[bytes, ...]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            await asyncio.sleep(0)  # as with a network, other tasks run between the chunks
            yield chunk

    async def aclose(self) -> None:
        """Do nothing."""


def _make_response(reply: RecordedReply) -> httpx2.Response:
    headers = {"content-type": reply.content_type, "content-encoding": reply.content_encoding}
    given = {name: value for name, value in headers.items() if value is not None}
    return httpx2.Response(reply.status, headers=given, stream=_RecordedStream(reply.chunks))


# --- which replies are recorded


def is_kept(status: int) -> bool:
    """Return True if a reply with this status is recorded.

    Redirects, rejected keys and statuses that clients retry are not recorded.
    """
    return status < 300 or (400 <= status < 500 and status not in _AGAIN)


# --- requests and replies


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request in the form that is written and compared."""

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
    ) -> RecordedRequest:
        """Read a request's path and body. Raises `ValueError` if it is not a request to a model."""
        end = next((each for each in paths if path.endswith(each)), None)
        if end is None:
            raise ValueError(f"only requests to {' and '.join(paths)} are recorded")
        content = json.loads(body)
        if not isinstance(content, dict):
            raise ValueError("the request's body is not a JSON object")
        known = FIELDS | fields
        written = {name: _remove_keys(value) if name in known else HIDDEN for name, value in content.items()}
        return cls(end, written if rewrite is None else json.loads(json.dumps(rewrite(written))))


def _remove_keys(value: Json) -> Json:
    """Hide keys inside a field, such as those of a tool that the model server calls."""
    if isinstance(value, list):
        return [_remove_keys(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _hide_secrets(each) if _is_hidden(name, each, value) else _remove_keys(each)
        for name, each in value.items()
    }


def _is_hidden(name: str, value: Json, owner: Mapping[str, Json]) -> bool:
    """Return True for keys, and for the headers that the model server sends to an MCP server."""
    if isinstance(value, dict):
        return name == "headers" and (owner.get("type") == "mcp" or "server_url" in owner)
    return _INNER_KEY.fullmatch(name) is not None


def _hide_secrets(value: Json) -> Json:
    return dict.fromkeys(value, HIDDEN) if isinstance(value, dict) else HIDDEN


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A reply. `chunks` are the chunks of a stream; any other reply has one chunk, its body."""

    status: int
    content_type: str | None
    content_encoding: str | None
    chunks: tuple[bytes, ...]

    @classmethod
    def of(
        cls, status: int, content_type: str | None, content_encoding: str | None, chunks: Sequence[bytes]
    ) -> RecordedReply:
        """Create a reply from the chunks that arrived. Chunks of other media types than streams are joined."""
        is_stream = (content_type or "").startswith(STREAM_TYPES)
        return cls(status, content_type, content_encoding, tuple(chunks) if is_stream else (b"".join(chunks),))


@dataclass(frozen=True, slots=True)
class RecordedExchange:
    """A request and its reply."""

    asked: RecordedRequest
    reply: RecordedReply


class RecordedTraffic:
    """The recorded requests and replies, in the order of the requests; reads and writes the text of a file."""

    def __init__(self, exchanges: Iterable[RecordedExchange] = ()) -> None:
        self._places: list[RecordedExchange | None] = list(exchanges)

    @property
    def exchanges(self) -> list[RecordedExchange]:
        """The complete exchanges."""
        return [each for each in self._places if each is not None]

    def reserve(self) -> int:
        """Reserve a place for a request whose reply is still to come, and return it."""
        self._places.append(None)
        return len(self._places) - 1

    def put(self, place: int, exchange: RecordedExchange) -> None:
        """Fill a reserved place."""
        self._places[place] = exchange

    def write_text(self) -> str:
        """Return the text of a recording file."""
        exchanges = [_exchange_to_json(each) for each in self.exchanges]
        text = _write_lines({"version": VERSION, "exchanges": exchanges}, "")
        # UTF-8 cannot encode a lone surrogate. They only occur in strings, so an escape is valid JSON.
        return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"

    @classmethod
    def read(cls, text: str) -> RecordedTraffic:
        """Parse the text that `write_text` returned. Raises `ValueError`."""
        content = json.loads(text)
        version = content.get("version") if isinstance(content, dict) else None
        if version != VERSION:
            raise ValueError(f"unsupported version {version!r}; this release reads version {VERSION}")
        try:
            return cls([_exchange_from_json(each) for each in content["exchanges"]])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"incomplete exchange: {error!r}") from error


def _write_lines(value: Json, margin: str) -> str:
    """Format JSON for people: a value that fits on a line stays on it, else each part gets its own line."""
    short = json.dumps(value, ensure_ascii=False)
    if len(margin) + len(short) <= _LINE or not value or not isinstance(value, (dict, list)):
        return short
    inner = f"{margin}  "
    if isinstance(value, list):
        lines = [f"{inner}{_write_lines(each, inner)}" for each in value]
    else:
        names = ((json.dumps(name, ensure_ascii=False), each) for name, each in value.items())
        lines = [f"{inner}{name}: {_write_lines(each, inner)}" for name, each in names]
    start, end = "[]" if isinstance(value, list) else "{}"
    return "\n".join([start, ",\n".join(lines), f"{margin}{end}"])


def _exchange_to_json(exchange: RecordedExchange) -> Json:
    reply = exchange.reply
    said: dict[str, Json] = {"status": reply.status}
    if reply.content_type is not None:
        said["content_type"] = reply.content_type
    if reply.content_encoding is not None:
        said["content_encoding"] = reply.content_encoding
    if len(reply.chunks) == 1 and (laid_out := _find_layout(reply.chunks[0])) is not None:
        said["layout"], said["json"] = laid_out
    else:
        said["chunks"] = [_text_or_bytes(each) for each in reply.chunks]
    return {"request": {"path": exchange.asked.path, "body": exchange.asked.body}, "reply": said}


def _exchange_from_json(written: Json) -> RecordedExchange:
    asked, said = written["request"], written["reply"]
    if "json" in said:
        chunks = [_lay_out(said["json"], said["layout"]).encode()]
    else:
        pieces = said["chunks"]
        chunks = [each.encode() if isinstance(each, str) else base64.b64decode(each["base64"]) for each in pieces]
    reply = RecordedReply(said["status"], said.get("content_type"), said.get("content_encoding"), tuple(chunks))
    return RecordedExchange(RecordedRequest(asked["path"], asked["body"]), reply)


def _text_or_bytes(chunk: bytes) -> Json:
    """Return the chunk as text, or as base64 if it ends within a character."""
    try:
        return chunk.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(chunk).decode()}


# The ways servers format JSON. A body is recorded as JSON and the name of its layout, and replays byte for byte.
_LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "compact": {"separators": (",", ":"), "ensure_ascii": False},
    "spaced": {"ensure_ascii": False},
    "indented": {"indent": 2, "ensure_ascii": False},
    "compact ascii": {"separators": (",", ":")},
    "spaced ascii": {},
    "indented ascii": {"indent": 2},
}
_LINE_END = ", with a line end"


def _lay_out(value: Json, layout: str) -> str:
    name = layout.removesuffix(_LINE_END)
    return json.dumps(value, **_LAYOUTS[name]) + ("\n" if name != layout else "")


def _find_layout(body: bytes) -> tuple[str, Json] | None:
    """Return the layout and the value of a JSON object, or None if no layout reproduces its bytes."""
    try:
        text = body.decode()
        value = json.loads(text)
    except ValueError:
        return None
    if isinstance(value, dict):
        for name in _LAYOUTS:
            for layout in (name, f"{name}{_LINE_END}"):
                if _lay_out(value, layout) == text:
                    return layout, value
    return None


# --- secrets


class Secrets:
    """Collects the secrets of requests, and hides them in replies that repeat one.

    These values count as secrets: those in the address's query, in headers that are not harmless, and in fields of the
    body that are not written.
    """

    def __init__(self) -> None:
        self._values: set[str] = set()

    def learn(
        self, headers: Iterable[tuple[str, str]], body: Json, url: str, fields: frozenset[str] = frozenset()
    ) -> None:
        """Remember the secrets of one request. `fields` are written in addition to the known ones."""
        parts = urlsplit(url)
        values = [
            value for name, value in headers if name.lower() not in HARMLESS_HEADERS and not _ABOUT_US.match(name)
        ]
        values += [value for _, value in parse_qsl(parts.query)]
        values += [parts.password or "", *_secrets_in(body, FIELDS | fields)]
        words = [word for value in values for word in re.split(r"[\s;=,]+", value)]
        self._values.update(each for each in (*values, *words) if len(each) >= SHORTEST_SECRET)

    def hidden_in(self, reply: RecordedReply) -> RecordedReply:
        """Return the reply without secrets. If a stream contained one, its chunks become one per event."""
        body = b"".join(reply.chunks).decode("utf-8", "surrogateescape")
        escaped = {json.dumps(value)[1:-1] for value in self._values}
        shown = without_secrets(body, self._values | escaped)
        if shown == body:
            return reply
        end = r"\r?\n" if (reply.content_type or "").startswith(JSON_LINES) else r"\r?\n\r?\n"
        pieces = [shown] if len(reply.chunks) < 2 else re.findall(rf".+?(?:{end}|\Z)", shown, re.DOTALL)
        return replace(reply, chunks=tuple(each.encode("utf-8", "surrogateescape") for each in pieces))


_ABOUT_US = re.compile(r"x-stainless-", re.IGNORECASE)


def _secrets_in(body: Json, written: Collection[str]) -> Iterator[str]:
    """Yield the texts of a body that are not written: those of unknown fields and of keys."""
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


# --- how a request differs from a recorded one


def differences(recorded: RecordedRequest, asked: RecordedRequest) -> list[str]:
    """Return the differences between a recorded request and another, one line each."""
    if recorded.path != asked.path:
        return [f"path: recorded {recorded.path}, now {asked.path}"]
    found = list(_find_differences(recorded.body, asked.body, ""))
    more = len(found) - _MOST_DIFFERENCES
    return [*found[:_MOST_DIFFERENCES], f"… and {more} more"] if more > 0 else found


def _find_differences(recorded: Json, asked: Json, path: str) -> Iterator[str]:
    if isinstance(recorded, dict) and isinstance(asked, dict):
        for name in dict.fromkeys([*recorded, *asked]):
            inner = f"{path}.{name}" if path else name
            if name not in asked:
                yield f"{inner}: recorded {_excerpt_of(recorded[name])}, now missing"
            elif name not in recorded:
                yield f"{inner}: recorded nothing, now {_excerpt_of(asked[name])}"
            else:
                yield from _find_differences(recorded[name], asked[name], inner)
    elif isinstance(recorded, list) and isinstance(asked, list):
        for number, (one, other) in enumerate(zip(recorded, asked, strict=False)):
            yield from _find_differences(one, other, f"{path}[{number}]")
        if len(recorded) != len(asked):
            longer, where = (recorded, "recorded") if len(recorded) > len(asked) else (asked, "now")
            first = min(len(recorded), len(asked))
            counts = f"{len(recorded)} recorded, now {len(asked)}"
            yield f"{path}: {counts}; the first additional one ({where}): {_excerpt_of(longer[first])}"
    elif recorded != asked or type(recorded) is not type(asked):
        start = _count_common(recorded, asked)
        yield f"{path}: recorded {_excerpt_of(recorded, start)}, now {_excerpt_of(asked, start)}"


def _count_common(one: Json, other: Json) -> int:
    if not isinstance(one, str) or not isinstance(other, str):
        return 0
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def _excerpt_of(value: Json, place: int = 0) -> str:
    """Return the value as short JSON. Of a long text, the part around `place` is shown."""
    if isinstance(value, str) and place > _EXCERPT_LENGTH:
        value = f"…{value[place - _EXCERPT_LENGTH // 2 :]}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 2 * _EXCERPT_LENGTH else f"{text[: 2 * _EXCERPT_LENGTH]}…"
