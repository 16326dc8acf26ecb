"""What is made of a reply: the return annotation read into a plan, and a body read by it.

Not here: replies that are failures (`exchange`), getting one (`connections`).
"""

from __future__ import annotations

import codecs
import collections.abc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from ..errors import RestDecodeError
from ..type_keys import class_of, plain, unwrapped
from ..validation_text import brief, faults_of

if TYPE_CHECKING:
    from httpx2 import Response as HttpResponse

T = TypeVar("T")

EXCERPT = 500
SEARCHED = 8 * EXCERPT
"""Characters of a body that an error first gets, from which secrets are removed before it is cut to `EXCERPT`."""
_NOT_FOR_REPLIES = frozenset({"punycode", "idna", "undefined", "unicode_escape", "raw_unicode_escape"})


@dataclass(frozen=True, slots=True)
class Response(Generic[T]):
    """A whole reply: status, headers (a mapping that ignores case), the body as a `T`, and where it came from."""

    status: int
    headers: Mapping[str, str] = field(hash=False)
    body: T
    url: str = ""

    def __tool_value__(self) -> T:
        """As the result of a tool: the body."""
        return self.body


class Shape(Enum):
    """What a body is read as."""

    NOTHING = auto()
    TEXT = auto()
    BYTES = auto()
    JSON = auto()
    EVENT = auto()
    STATUS = auto()
    HEADERS = auto()


class Stream(Enum):
    """Whether the reply comes in pieces, and how they are asked for."""

    NO = auto()
    SYNC = auto()
    ASYNC = auto()


_ACCEPT = {Shape.TEXT: "text/plain, */*;q=0.8", Shape.JSON: "application/json", Shape.BYTES: "*/*"}
_ACCEPT_STREAM = {
    Shape.TEXT: "text/event-stream, text/plain, */*;q=0.8",
    Shape.JSON: "text/event-stream, application/x-ndjson, application/json;q=0.9",
    Shape.EVENT: "text/event-stream",
    Shape.BYTES: "*/*",
}
_STREAMS: dict[Any, Stream] = {
    collections.abc.AsyncIterator: Stream.ASYNC,
    collections.abc.AsyncIterable: Stream.ASYNC,
    collections.abc.AsyncGenerator: Stream.ASYNC,
    collections.abc.Iterator: Stream.SYNC,
    collections.abc.Iterable: Stream.SYNC,
    collections.abc.Generator: Stream.SYNC,
}


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event of a `text/event-stream`."""

    data: str
    event: str = "message"
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ReplyPlan:
    """How a reply is read: the shape of its body (in a stream: of each piece).

    `whole`: a `Response` is around it. `optional`: an empty text is None.
    """

    shape: Shape
    adapter: TypeAdapter[Any] | None = None
    type_name: str = "None"
    whole: bool = False
    stream: Stream = Stream.NO
    optional: bool = False

    @property
    def accept(self) -> str:
        """The `Accept` header that asks for it."""
        return (_ACCEPT if self.stream is Stream.NO else _ACCEPT_STREAM).get(self.shape, "*/*")


class UnreadableReplyError(Exception):
    """A return annotation that no reply can be read by: what is wrong, and what to write instead."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what, fix)
        self.what, self.fix = what, fix


def read_reply(annotation: Any, verb: str, is_async: bool) -> ReplyPlan:
    """The plan for a return annotation. Raises `UnreadableReplyError`."""
    inner = plain(annotation)
    origin = class_of(inner)
    if origin is Response:
        body = get_args(inner)[0] if get_args(inner) else bytes
        return replace(_body_plan(body, "GET" if body is not type(None) else verb), whole=True)
    stream = _STREAMS.get(origin, Stream.NO)
    if stream is Stream.NO:
        return _body_plan(annotation, verb)
    if is_async:
        raise UnreadableReplyError(
            "an `async def` method cannot return a stream", "declare it with `def`; a stream is iterated, not awaited"
        )
    pieces = get_args(inner)[0] if get_args(inner) else str
    if pieces is ServerSentEvent:
        return ReplyPlan(Shape.EVENT, type_name="ServerSentEvent", stream=stream)
    return replace(_body_plan(pieces, "GET"), stream=stream)


def _body_plan(annotation: Any, verb: str) -> ReplyPlan:
    inner = unwrapped(annotation).type
    if inner in (str, bytes) and inner is not plain(annotation) and verb != "HEAD":
        return ReplyPlan(Shape.TEXT if inner is str else Shape.BYTES, type_name=str(annotation), optional=True)
    return ReplyPlan(*_shape_of(annotation, verb))


def _shape_of(annotation: Any, verb: str) -> tuple[Shape, TypeAdapter[Any] | None, str]:
    inner = plain(annotation)
    kind = class_of(inner)
    name = getattr(annotation, "__name__", None) if isinstance(annotation, type) else str(annotation)
    name = name or str(annotation)
    if inner is None or inner is type(None):
        return Shape.NOTHING, None, name
    if verb == "HEAD":
        if inner is int:
            return Shape.STATUS, None, name
        if isinstance(kind, type) and issubclass(kind, Mapping):
            return Shape.HEADERS, None, name
        raise UnreadableReplyError(
            "a reply to HEAD has no body",
            "return None, int (the status), dict[str, str] (headers) or rest.Response[None]",
        )
    if inner is str:
        return Shape.TEXT, None, name
    if inner is bytes:
        return Shape.BYTES, None, name
    try:
        return Shape.JSON, TypeAdapter(annotation), name
    except PydanticUserError as error:
        reason = str(error).partition("\n")[0]
        raise UnreadableReplyError(
            f"pydantic cannot validate the return type {name} ({reason})",
            "return a pydantic model, a dataclass, a TypedDict, str, bytes or rest.Response[…]",
        ) from error


def decode(plan: ReplyPlan, response: HttpResponse, url: str, where: str) -> Any:
    """The value of a good reply. Raises `RestDecodeError` when it is not of the declared type."""
    body = _decode_body(plan, response, url, where)
    return Response(response.status_code, response.headers, body, url) if plan.whole else body


def _decode_body(plan: ReplyPlan, response: HttpResponse, url: str, where: str) -> Any:
    if plan.optional and not response.content:
        return None
    match plan.shape:
        case Shape.NOTHING:
            return None
        case Shape.STATUS:
            return response.status_code
        case Shape.HEADERS:
            return dict(response.headers)
        case Shape.TEXT:
            return response.content.decode(charset(response.headers.get("content-type", "")), "replace")
        case Shape.BYTES:
            return response.content
        case Shape.JSON | Shape.EVENT:  # a single event is none: events come in streams
            return decode_json(plan, response.content, url, response.status_code, where)


def decode_json(plan: ReplyPlan, body: bytes | str, url: str, status: int, where: str) -> Any:
    """A JSON text as the declared type; an empty one is None, where the type admits it."""
    assert plan.adapter is not None
    try:
        if not body.strip():
            return plan.adapter.validate_python(None)
        return plan.adapter.validate_json(body)
    except ValidationError as error:
        message = f"{where}: the reply is no {plan.type_name} ({_faults(error)})"
        raise RestDecodeError(message, url, status, beginning(body)) from error


def _faults(error: ValidationError) -> str:
    faults = [f"{path}: {message}" if path else message for path, message in faults_of(error)[:5]]
    more = error.error_count() - 5
    return "; ".join(faults) + (f"; and {more} more" if more > 0 and len(faults) == 5 else "")


def beginning(body: bytes | str) -> str:
    """Return the beginning of a body as text: more than an excerpt, so that secrets can be removed from it first."""
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
                b"x".decode(found, "replace")  # refuses what is not for text, such as `zlib`
                return "utf-8" if found.replace("-", "_") in _NOT_FOR_REPLIES else found
            except (LookupError, UnicodeError, ValueError):
                break
    return "utf-8"
