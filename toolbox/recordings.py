"""Records the traffic with a model server in a file, and plays it back without a network.

`Recording` is the `transport=` of an `OpenAiChatModel`. A replayed test therefore runs everything but the socket: the
bytes of each request and the chunks of each stream. Not here: the fixture (`pytest_plugin`), a model without a server
(`testing`).
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
from .validation_text import without_secrets

__all__ = ["Recording", "RecordingError"]

Mode: TypeAlias = Literal["auto", "replay", "record"]

VARIABLE = "TOOLBOX_RECORDING"
RECORD_IT = f"run it once with {VARIABLE}=record and the server's key, and commit the file"

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
_EXCERPT_LENGTH = 40
_MOST_DIFFERENCES = 12


class RecordingError(FrameworkError):
    """A request is not in the recording, or there is no recording, or it cannot be read."""

    def __init__(self, file: str, reason: str, fix: str = RECORD_IT) -> None:
        super().__init__(file, reason, fix)
        self.file, self.reason, self.fix = file, reason, fix

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}; {self.fix}"


class Recording(httpx2.AsyncBaseTransport):
    """A recording in `file`: `OpenAiChatModel("gpt-…", transport=Recording("weather.json"))`.

    `mode` is `"replay"`, `"record"` (from the beginning) or `"auto"`: replay if the file is there, else record. Without
    it the variable `TOOLBOX_RECORDING` decides, then `CI`, under which nothing is recorded; else it is `"auto"`.

    A request is found by its path and body, each as often as it was recorded, in whatever order. `rewrite` is given a
    copy of each body before it is compared and written, and returns it without what changes from run to run. Headers,
    address and query are never written; of a body's top level the wire's own fields, and those in `fields`. `paths` are
    the ends of the paths that belong to the wire: for another one than OpenAI's, give its `paths` and `fields`. Kept
    are replies after which a conversation goes on or ends: not those that are tried again, nor 401 and 403. In replay
    neither key nor address is needed.
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
        """The requests that were not found, as the errors that were raised."""
        mode = mode or mode_from_environment()
        if mode not in ("auto", "replay", "record"):
            raise ValueError(f"mode={mode!r}; use 'auto', 'replay' or 'record'")
        self.is_recording = mode == "record" or (mode == "auto" and not self.file.exists())
        """Whether the server is asked."""
        self._traffic = RecordedTraffic() if self.is_recording else self._read()
        self._played = [False] * len(self._traffic.exchanges)

    def __repr__(self) -> str:
        return f"Recording({str(self.file)!r}, {'record' if self.is_recording else 'replay'!r})"

    def _read(self) -> RecordedTraffic:
        try:
            return RecordedTraffic.read(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RecordingError(str(self.file), "there is no such recording, and nothing is recorded here") from None
        except ValueError as error:
            raise RecordingError(str(self.file), f"it cannot be read: {error}") from error

    # --- the transport that a client is given

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The reply, from the file or from the server. Raises `RecordingError`."""
        body = await request.aread()
        try:
            asked = RecordedRequest.of(request.url.path, body, self._fields, self._rewrite, self._paths)
        except ValueError as error:
            raise RecordingError(str(self.file), str(error), "give other requests another transport") from error
        if self.is_recording:
            return await self._ask(request, asked)
        with self._lock:
            return _response(self._find(asked))

    async def aclose(self) -> None:
        """Nothing is open between requests."""

    # --- playing back

    def _find(self, asked: RecordedRequest) -> RecordedReply:
        same = [number for number, each in enumerate(self._traffic.exchanges) if each.asked == asked]
        for number in same:
            if not self._played[number]:
                self._played[number] = True
                return self._traffic.exchanges[number].reply
        error = RecordingError(str(self.file), self._missing(asked, len(same)), f"if that is right, {RECORD_IT}")
        self.missed.append(error)
        raise error

    def _missing(self, asked: RecordedRequest, times: int) -> str:
        if times:
            return f"this request was recorded {times} times, and is made once more"
        number = f"request {sum(self._played) + 1} is not in the recording of {len(self._traffic.exchanges)}"
        found = [(each, differences(each.asked, asked)) for each in self._unplayed() or self._traffic.exchanges]
        if not found:
            return number
        told = min((lines for _, lines in found), key=len)
        return "\n  ".join([f"{number}; it differs from the nearest:", *told])

    def _unplayed(self) -> list[RecordedExchange]:
        return [each for each, played in zip(self._traffic.exchanges, self._played, strict=True) if not played]

    # --- recording

    async def _ask(self, request: httpx2.Request, asked: RecordedRequest) -> httpx2.Response:
        self._secrets.learn(
            request.headers.multi_items(), json.loads(await request.aread()), str(request.url), self._fields
        )
        request.headers["accept-encoding"] = "identity"  # so that a person can read what came
        with self._lock:
            place = self._traffic.reserve()
        client = httpx2.AsyncClient(follow_redirects=False)
        try:
            response = await client.send(request, stream=True)
        except BaseException:
            await client.aclose()
            raise

        # Some servers compress all the same; a secret in such bytes could not be found.
        is_readable = response.headers.get("content-encoding", "identity") in ("identity", "gzip", "deflate")
        pieces = response.aiter_bytes() if is_readable else response.aiter_raw()
        without = ("content-encoding", "content-length") if is_readable else ()
        headers = [(name, value) for name, value in response.headers.multi_items() if name not in without]

        def keep(chunks: list[bytes]) -> None:
            if is_kept(response.status_code) and is_readable:
                reply = RecordedReply.of(response.status_code, response.headers.get("content-type"), None, chunks)
                with self._lock:
                    self._traffic.put(place, RecordedExchange(asked, self._secrets.hidden_in(reply)))
                    self._write()

        return httpx2.Response(
            response.status_code, headers=headers, stream=_RecordingStream(client, response, pieces, keep)
        )

    def _write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_name(f"{self.file.name}.{os.getpid()}")
        unfinished.write_text(self._traffic.written(), encoding="utf-8")
        unfinished.replace(self.file)


def mode_from_environment() -> Mode:
    """What `TOOLBOX_RECORDING` says, else `"replay"` under `CI`, else `"auto"`."""
    said = os.environ.get(VARIABLE)
    if said:
        return cast(Mode, said.lower())
    return "auto" if os.environ.get("CI", "").lower() in ("", "0", "false") else "replay"


class _RecordingStream(httpx2.AsyncByteStream):
    """A reply on its way to the client, whose pieces are kept when it has come, or when the client has enough."""

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
    """The pieces of a recorded reply."""

    def __init__(self, chunks: tuple[bytes, ...]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            await asyncio.sleep(0)  # as from a network: others run between the pieces
            yield chunk

    async def aclose(self) -> None:
        """Nothing is open."""


def _response(reply: RecordedReply) -> httpx2.Response:
    headers = {"content-type": reply.content_type, "content-encoding": reply.content_encoding}
    given = {name: value for name, value in headers.items() if value is not None}
    return httpx2.Response(reply.status, headers=given, stream=_RecordedStream(reply.chunks))


# --- which replies are recorded


def is_kept(status: int) -> bool:
    """Return True if a reply belongs in a recording: not a redirect, a refused key, or what clients try again."""
    return status < 300 or (400 <= status < 500 and status not in _AGAIN)


# --- what is written


@dataclass(frozen=True, slots=True)
class RecordedRequest:
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
    ) -> RecordedRequest:
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
class RecordedReply:
    """What came back; `chunks` are the pieces of a stream, or one: the body."""

    status: int
    content_type: str | None
    content_encoding: str | None
    chunks: tuple[bytes, ...]

    @classmethod
    def of(
        cls, status: int, content_type: str | None, content_encoding: str | None, chunks: Sequence[bytes]
    ) -> RecordedReply:
        """Of what came: only of a stream do the pieces matter."""
        is_stream = (content_type or "").startswith("text/event-stream")
        return cls(status, content_type, content_encoding, tuple(chunks) if is_stream else (b"".join(chunks),))


@dataclass(frozen=True, slots=True)
class RecordedExchange:
    """A request and its reply."""

    asked: RecordedRequest
    reply: RecordedReply


class RecordedTraffic:
    """Exchanges, in the order in which the requests were made."""

    def __init__(self, exchanges: Iterable[RecordedExchange] = ()) -> None:
        self._places: list[RecordedExchange | None] = list(exchanges)

    @property
    def exchanges(self) -> list[RecordedExchange]:
        """Those that are complete."""
        return [each for each in self._places if each is not None]

    def reserve(self) -> int:
        """A place for a request that begins."""
        self._places.append(None)
        return len(self._places) - 1

    def put(self, place: int, exchange: RecordedExchange) -> None:
        """Fills a reserved place."""
        self._places[place] = exchange

    def written(self) -> str:
        """As the text of a file."""
        exchanges = [_exchange_to_json(each) for each in self.exchanges]
        text = _in_lines({"version": VERSION, "exchanges": exchanges}, "")
        # A lone surrogate cannot be said in UTF-8; outside of strings there is none.
        return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"

    @classmethod
    def read(cls, text: str) -> RecordedTraffic:
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


def _exchange_to_json(exchange: RecordedExchange) -> Json:
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


def _exchange_from_json(written: Json) -> RecordedExchange:
    asked, said = written["request"], written["reply"]
    if "json" in said:
        chunks = [_laid_out(said["json"], said["layout"]).encode()]
    else:
        pieces = said["chunks"]
        chunks = [each.encode() if isinstance(each, str) else base64.b64decode(each["base64"]) for each in pieces]
    reply = RecordedReply(said["status"], said.get("content_type"), said.get("content_encoding"), tuple(chunks))
    return RecordedExchange(RecordedRequest(asked["path"], asked["body"]), reply)


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

    def hidden_in(self, reply: RecordedReply) -> RecordedReply:
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


# --- how a request differs from a recorded one


def differences(recorded: RecordedRequest, asked: RecordedRequest) -> list[str]:
    """In what a request differs from a recorded one, a line each."""
    if recorded.path != asked.path:
        return [f"path: recorded {recorded.path}, now {asked.path}"]
    found = list(_differing(recorded.body, asked.body, ""))
    more = len(found) - _MOST_DIFFERENCES
    return [*found[:_MOST_DIFFERENCES], f"… and {more} more"] if more > 0 else found


def _differing(recorded: Json, asked: Json, path: str) -> Iterator[str]:
    if isinstance(recorded, dict) and isinstance(asked, dict):
        for name in dict.fromkeys([*recorded, *asked]):
            inner = f"{path}.{name}" if path else name
            if name not in asked:
                yield f"{inner}: recorded {_excerpt_of(recorded[name])}, now absent"
            elif name not in recorded:
                yield f"{inner}: recorded nothing, now {_excerpt_of(asked[name])}"
            else:
                yield from _differing(recorded[name], asked[name], inner)
    elif isinstance(recorded, list) and isinstance(asked, list):
        for number, (one, other) in enumerate(zip(recorded, asked, strict=False)):
            yield from _differing(one, other, f"{path}[{number}]")
        if len(recorded) != len(asked):
            longer, where = (recorded, "recorded") if len(recorded) > len(asked) else (asked, "now")
            first = min(len(recorded), len(asked))
            counts = f"{len(recorded)} recorded, now {len(asked)}"
            yield f"{path}: {counts}; the first more, {where}: {_excerpt_of(longer[first])}"
    elif recorded != asked or type(recorded) is not type(asked):
        start = _common_start(recorded, asked)
        yield f"{path}: recorded {_excerpt_of(recorded, start)}, now {_excerpt_of(asked, start)}"


def _common_start(one: Json, other: Json) -> int:
    if not isinstance(one, str) or not isinstance(other, str):
        return 0
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def _excerpt_of(value: Json, place: int = 0) -> str:
    """As JSON, cut; of a long text what stands around `place`."""
    if isinstance(value, str) and place > _EXCERPT_LENGTH:
        value = f"…{value[place - _EXCERPT_LENGTH // 2 :]}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 2 * _EXCERPT_LENGTH else f"{text[: 2 * _EXCERPT_LENGTH]}…"
