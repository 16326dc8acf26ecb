"""Reads return annotations into reply plans, and decodes bodies and streams by them.

Not here: failed replies (`exchange`), receiving replies (`exchange`).
"""

from __future__ import annotations

import codecs
import collections.abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from ..errors import RestClientError, RestDecodeError
from ..introspection import class_of, plain, unwrapped
from ..safe_text import brief, faults_of, faults_text

if TYPE_CHECKING:
    from httpx2 import Response as HttpResponse

T = TypeVar("T")

EXCERPT = 500
SEARCHED = 8 * EXCERPT
"""Characters of a body in which secrets are searched before it is cut to `EXCERPT`."""
_NOT_FOR_REPLIES = frozenset({"punycode", "idna", "undefined", "unicode_escape", "raw_unicode_escape"})


@dataclass(frozen=True, slots=True)
class Response(Generic[T]):
    """A whole reply: status, headers (names ignore case), the body as a `T`, and the URL without secrets.

    Use it as a return annotation: `async def order(self, number: int) -> rest.Response[Order]: ...`
    """

    status: int
    headers: Mapping[str, str] = field(hash=False)
    body: T
    url: str = ""

    def __tool_value__(self) -> T:
        """Return the body: the result if the method is a tool."""
        return self.body


class ReplyShape(Enum):
    """The form in which a body is decoded."""

    NOTHING = auto()
    TEXT = auto()
    BYTES = auto()
    JSON = auto()
    EVENT = auto()
    STATUS = auto()
    HEADERS = auto()


class ReplyStream(Enum):
    """The kind of iterator that a streamed reply is read with."""

    NO = auto()
    SYNC = auto()
    ASYNC = auto()


_ACCEPT = {ReplyShape.TEXT: "text/plain, */*;q=0.8", ReplyShape.JSON: "application/json", ReplyShape.BYTES: "*/*"}
_ACCEPT_STREAM = {
    ReplyShape.TEXT: "text/event-stream, text/plain, */*;q=0.8",
    ReplyShape.JSON: "text/event-stream, application/x-ndjson, application/json;q=0.9",
    ReplyShape.EVENT: "text/event-stream",
    ReplyShape.BYTES: "*/*",
}
_STREAMS: dict[Any, ReplyStream] = {
    collections.abc.AsyncIterator: ReplyStream.ASYNC,
    collections.abc.AsyncIterable: ReplyStream.ASYNC,
    collections.abc.AsyncGenerator: ReplyStream.ASYNC,
    collections.abc.Iterator: ReplyStream.SYNC,
    collections.abc.Iterable: ReplyStream.SYNC,
    collections.abc.Generator: ReplyStream.SYNC,
}


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event of a `text/event-stream`: its data, event name and id."""

    data: str
    event: str = "message"
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ReplyPlan:
    """Describes how to decode a reply: the shape of its body, or of each item of a stream.

    With `whole`, the result is a `Response`. With `optional`, an empty text is None.
    """

    shape: ReplyShape
    adapter: TypeAdapter[Any] | None = None
    type_name: str = "None"
    whole: bool = False
    stream: ReplyStream = ReplyStream.NO
    optional: bool = False

    @property
    def accept(self) -> str:
        """Return the value of the `Accept` header for this reply."""
        return (_ACCEPT if self.stream is ReplyStream.NO else _ACCEPT_STREAM).get(self.shape, "*/*")


class UnreadableReplyError(Exception):
    """An unsupported return annotation, with the problem and its fix."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what, fix)
        self.what, self.fix = what, fix


def read_reply(annotation: Any, verb: str, is_async: bool) -> ReplyPlan:
    """Return the plan for a return annotation. Raises `UnreadableReplyError`."""
    inner = plain(annotation)
    origin = class_of(inner)
    if origin is Response:
        body = get_args(inner)[0] if get_args(inner) else bytes
        return replace(_plan_body(body, "GET" if body is not type(None) else verb), whole=True)
    stream = _STREAMS.get(origin, ReplyStream.NO)
    if stream is ReplyStream.NO:
        return _plan_body(annotation, verb)
    if is_async:
        raise UnreadableReplyError(
            "an `async def` method cannot return a stream", "declare it with `def`: a stream is iterated, not awaited"
        )
    pieces = get_args(inner)[0] if get_args(inner) else str
    if pieces is ServerSentEvent:
        return ReplyPlan(ReplyShape.EVENT, type_name="ServerSentEvent", stream=stream)
    return replace(_plan_body(pieces, "GET"), stream=stream)


def _plan_body(annotation: Any, verb: str) -> ReplyPlan:
    inner = unwrapped(annotation).type
    if inner in (str, bytes) and inner is not plain(annotation) and verb != "HEAD":
        return ReplyPlan(
            ReplyShape.TEXT if inner is str else ReplyShape.BYTES, type_name=str(annotation), optional=True
        )
    return ReplyPlan(*_shape_of(annotation, verb))


def _shape_of(annotation: Any, verb: str) -> tuple[ReplyShape, TypeAdapter[Any] | None, str]:
    inner = plain(annotation)
    kind = class_of(inner)
    name = getattr(annotation, "__name__", None) if isinstance(annotation, type) else str(annotation)
    name = name or str(annotation)
    if inner is None or inner is type(None):
        return ReplyShape.NOTHING, None, name
    if verb == "HEAD":
        if inner is int:
            return ReplyShape.STATUS, None, name
        if isinstance(kind, type) and issubclass(kind, Mapping):
            return ReplyShape.HEADERS, None, name
        raise UnreadableReplyError(
            "a HEAD reply has no body",
            "return None, int (the status), dict[str, str] (headers) or rest.Response[None]",
        )
    if inner is str:
        return ReplyShape.TEXT, None, name
    if inner is bytes:
        return ReplyShape.BYTES, None, name
    try:
        return ReplyShape.JSON, TypeAdapter(annotation), name
    except PydanticUserError as error:
        reason = str(error).partition("\n")[0]
        raise UnreadableReplyError(
            f"pydantic cannot validate the return type {name} ({reason})",
            "return a pydantic model, a dataclass, a TypedDict, str, bytes or rest.Response[…]",
        ) from error


def decode(plan: ReplyPlan, response: HttpResponse, url: str, where: str) -> Any:
    """Return the value of a successful reply. Raises `RestDecodeError` if it does not match the declared type."""
    body = _decode_body(plan, response, url, where)
    return Response(response.status_code, response.headers, body, url) if plan.whole else body


def _decode_body(plan: ReplyPlan, response: HttpResponse, url: str, where: str) -> Any:
    if plan.optional and not response.content:
        return None
    match plan.shape:
        case ReplyShape.NOTHING:
            return None
        case ReplyShape.STATUS:
            return response.status_code
        case ReplyShape.HEADERS:
            return dict(response.headers)
        case ReplyShape.TEXT:
            return response.content.decode(charset(response.headers.get("content-type", "")), "replace")
        case ReplyShape.BYTES:
            return response.content
        case ReplyShape.JSON | ReplyShape.EVENT:  # EVENT occurs only in streams
            return decode_json(plan, response.content, url, response.status_code, where)


def decode_json(plan: ReplyPlan, body: bytes | str, url: str, status: int, where: str) -> Any:
    """Decode a JSON text as the declared type. An empty text is None if the type allows it."""
    assert plan.adapter is not None
    try:
        if not body.strip():
            return plan.adapter.validate_python(None)
        return plan.adapter.validate_json(body)
    except ValidationError as error:
        message = f"{where}: the reply is not a valid {plan.type_name} ({_describe_faults(error)})"
        raise RestDecodeError(message, url, status, beginning(body)) from error


def _describe_faults(error: ValidationError) -> str:
    faults = faults_of(error)[:5]
    more = error.error_count() - 5
    return faults_text(faults) + (f"; and {more} more" if more > 0 and len(faults) == 5 else "")


def beginning(body: bytes | str) -> str:
    """Return the beginning of a body as text, longer than an excerpt: secrets are removed before it is cut."""
    if isinstance(body, bytes):
        body = body[: SEARCHED + 1].decode("utf-8", "replace")
    return brief(body, SEARCHED)


def excerpt(text: str) -> str:
    """Return the part of a body that an error shows."""
    return brief(text, EXCERPT)


def charset(content_type: str) -> str:
    """Return the name of the text encoding that a reply says it has, UTF-8 if it is unknown or not for text."""
    for parameter in content_type.lower().split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset":
            try:
                found = codecs.lookup(value.strip(" \"'")).name
                b"x".decode(found, "replace")  # raises for codecs that are not for text, such as `zlib`
                return "utf-8" if found.replace("-", "_") in _NOT_FOR_REPLIES else found
            except (LookupError, UnicodeError, ValueError):
                break
    return "utf-8"


# --- streams


class PieceDecoder:
    """Splits a streamed body into lines, JSON lines, server-sent events or the items of a JSON list."""

    def __init__(
        self, plan: ReplyPlan, content_type: str, url: str, status: int, where: str, max_piece: int = 64 * 2**20
    ) -> None:
        self._plan, self._url, self._status, self._where = plan, url, status, where
        self._media_type = content_type.lower().partition(";")[0].strip()
        self._text = codecs.getincrementaldecoder(charset(content_type))("replace")
        self._max_piece = max_piece
        self._held = 0  # number of characters in the next three fields
        self._pending: list[str] = []  # the parts of an incomplete line or document
        self._event: dict[str, str] = {}
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[Any]:
        """Yield the items that `chunk` completes."""
        if self._plan.shape is ReplyShape.BYTES:
            yield chunk
            return
        text = self._text.decode(chunk)
        if not self._is_one_document and "\n" in text:
            *lines, text = "".join((*self._pending, text)).split("\n")
            self._pending.clear()
            self._held = sum(map(len, self._data))
            for line in lines:
                yield from self._take_line(line.removesuffix("\r"))
        self._pending.append(text)
        self._hold(len(text))

    def end(self) -> Iterator[Any]:
        """Yield the remaining items at the end of the body."""
        rest = "".join((*self._pending, self._text.decode(b"", True)))
        if self._is_one_document:
            yield from self._take_document(rest)
        elif rest:
            yield from self._take_line(rest.removesuffix("\r"))
        if self._event or self._data:
            yield from self._take_line("")

    def _hold(self, characters: int) -> None:
        """Count the characters of an incomplete item. Raises `RestClientError` above the limit."""
        self._held += characters
        if self._held > self._max_piece:
            message = f"{self._where}: a piece of the reply is longer than max_reply_bytes ({self._max_piece} bytes)"
            raise RestClientError(message, self._url, self._status)

    @property
    def _is_one_document(self) -> bool:
        return self._plan.shape is ReplyShape.JSON and self._media_type == "application/json"

    def _take_document(self, text: str) -> Iterator[Any]:
        if not text.strip():
            return
        try:
            document = from_json(text)
        except ValueError as error:
            message = f"{self._where}: the reply is not valid JSON ({error})"
            raise RestDecodeError(message, self._url, self._status, beginning(text)) from error
        for item in document if isinstance(document, list) else (document,):
            yield self._decode_value(to_json(item))

    def _take_line(self, line: str) -> Iterator[Any]:
        if self._media_type == "text/event-stream":
            yield from self._take_event_line(line)
        elif self._plan.shape is ReplyShape.TEXT:
            yield line
        elif line.strip("\x1e \t"):
            yield self._decode_value(line.strip("\x1e \t"))

    def _take_event_line(self, line: str) -> Iterator[Any]:
        if not line:
            event, self._event = self._event, {}
            data, self._data = self._data, []
            self._held -= sum(map(len, data))
            if data:
                yield self._decode_event(
                    ServerSentEvent("\n".join(data), event.get("event", "message"), event.get("id"))
                )
            return
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
            self._hold(len(value))
        elif name in ("event", "id"):
            self._event[name] = value

    def _decode_event(self, event: ServerSentEvent) -> Any:
        if self._plan.shape is ReplyShape.EVENT:
            return event
        return event.data if self._plan.shape is ReplyShape.TEXT else self._decode_value(event.data)

    def _decode_value(self, text: bytes | str) -> Any:
        return decode_json(self._plan, text, self._url, self._status, self._where)
