"""Builds a request from a plan, the values of a call and an endpoint, without I/O.

For each sent text it also builds the text that logs and errors may show. Not here: computing values (`exchange`), the
request of the HTTP library (`connections`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticSerializationError, from_json, to_json

from ..errors import RestClientError
from ..safe_text import HIDDEN
from .annotations import Body, File, FixedValue, Path, Place, Upload
from .client_plans import ParameterPlan, RequestPlan
from .encoding import (
    PROTECTED_HEADERS,
    EncodingError,
    cookie_value,
    fields_of,
    header_value,
    is_header_name,
    is_secret,
    is_secret_name,
    literal_path,
    percent,
    revealed,
    segment,
    text_of,
    texts_of,
    variables_of,
)
from .endpoint import RestEndpoint

_MASKS = (b"*", b'""')  # what pydantic writes for a secret, and for an empty one

if TYPE_CHECKING:
    from httpx2 import Request as HttpRequest


@dataclass(slots=True)
class Outgoing:
    """A request that is ready to be sent, once or more often.

    `secrets` are values that errors must not show. `open_headers` are the lower-case names of headers that may be
    shown. `sent` lists the HTTP requests made from it, including redirected ones.
    """

    verb: str
    url: str
    shown_url: str
    headers: dict[str, tuple[str, bytes]]
    content: bytes | None = None
    fields: list[tuple[str, str]] = field(default_factory=list)
    files: list[tuple[str, Upload]] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list, repr=False)
    open_headers: set[str] = field(default_factory=set)
    sent: list[HttpRequest] = field(default_factory=list, repr=False)


def build(
    plan: RequestPlan,
    values: Mapping[str, Any],
    fixed: list[tuple[FixedValue, object]],
    headers: Mapping[str, object],
    endpoint: RestEndpoint,
) -> Outgoing:
    """Return the request of a call. `fixed` has the current fixed values, `headers` the computed headers.

    Raises `RestClientError` for a value that cannot be sent in its place; nothing has been sent then.
    """
    building = _Building(plan, endpoint)
    building.accept(plan.reply.accept)
    building.headers_of(dict(endpoint.headers))
    for each, value in fixed:
        building.fixed(each, value)
    building.headers_of(headers)
    for parameter in plan.parameters:
        building.parameter(parameter, values[parameter.name])
    return building.finish()


class _Building:
    """Collects the parts of one request."""

    def __init__(self, plan: RequestPlan, endpoint: RestEndpoint) -> None:
        self._plan, self._endpoint = plan, endpoint
        self._segments: dict[str, tuple[str, str]] = {}
        self._query: list[tuple[str, str]] = []
        self._shown_query: list[tuple[str, str]] = []
        self._cookies: dict[str, str] = {}
        self._headers: dict[str, tuple[str, bytes]] = {}
        self._fields: list[tuple[str, str]] = []
        self._files: list[tuple[str, Upload]] = []
        self._content: bytes | None = None
        self._fixed_names: set[str] = set()
        self._secrets: list[str] = []
        self._open_headers: set[str] = set()

    def accept(self, media_types: str) -> None:
        self._put(Place.HEADER, "Accept", media_types, False)

    def headers_of(self, headers: Mapping[str, object]) -> None:
        """Add headers of the settings or computed headers. None is omitted."""
        for name, value in headers.items():
            self._putting(name, lambda name=name, value=value: self._put(Place.HEADER, name, value, True))

    def fixed(self, fixed: FixedValue, value: object) -> None:
        variables = [os.environ.get(name, default) or "" for name, default in variables_of(fixed.value)]
        self._secrets += variables
        hidden = is_secret(value) or bool(variables)
        self._fixed_names.add(fixed.name)
        self._putting(fixed.name, lambda: self._put(fixed.place, fixed.name, value, hidden))

    def parameter(self, parameter: ParameterPlan, value: Any) -> None:
        def put() -> None:
            if parameter.place is Place.BODY:
                self._body(parameter, value)
            elif parameter.place is Place.FILE:
                self._file(parameter, value)
            elif parameter.spread:
                self._spread(parameter, value)
            else:
                allow_slash = isinstance(parameter.mark, Path) and parameter.mark.allow_slash
                self._put(parameter.place, parameter.wire_name, value, is_secret(value), allow_slash)

        self._putting(parameter.name, put)

    def _putting(self, name: str, put: Any) -> None:
        try:
            put()
        except (EncodingError, UnicodeEncodeError) as error:
            where = f"{self._endpoint.url}{self._plan.template}"
            raise RestClientError(f"{self._plan.where}: {name} cannot be sent: {error}", where) from error

    def _put(self, place: Place, name: str, value: object, hidden: bool, allow_slash: bool = False) -> None:
        if is_secret(value):
            self._secrets += texts_of(value)
        match place:
            case Place.PATH:
                encoded = segment(value, allow_slash)
                self._segments[name] = encoded, HIDDEN if hidden else encoded
            case Place.QUERY:
                for text in texts_of(value):
                    self._one_query(name, text, hidden)
            case Place.FORM:
                for text in texts_of(value):
                    self._one_field(name, text)
            case Place.HEADER:
                if value is not None:
                    self._header(name, ", ".join(texts_of(value)), hidden)
            case Place.COOKIE:
                if value is not None:
                    self._cookies[name] = cookie_value(text_of(value))
                    self._secrets.append(self._cookies[name])
            case Place.FILE | Place.BODY:
                raise AssertionError("files and bodies cannot be fixed values")

    def _one_query(self, name: str, text: str, hidden: bool) -> None:
        encoded = percent(text)
        self._query.append((percent(name), encoded))
        if is_secret_name(name):
            hidden = True
            self._secrets.append(text)
        self._shown_query.append((percent(name), HIDDEN if hidden else encoded))

    def _one_field(self, name: str, text: str) -> None:
        if is_secret_name(name):
            self._secrets.append(text)
        self._fields.append((name, text))

    def _header(self, name: str, text: str, hidden: bool) -> None:
        if not is_header_name(name) or name.lower() in PROTECTED_HEADERS:
            raise EncodingError("a header of this name cannot be set")
        self._headers[name.lower()] = name, header_value(text)
        if hidden or is_secret_name(name):
            self._open_headers.discard(name.lower())
        else:
            self._open_headers.add(name.lower())

    def _spread(self, parameter: ParameterPlan, value: Any) -> None:
        for name, text, is_hidden in fields_of(value) if value is not None else ():
            if is_hidden:
                self._secrets.append(text)
            if parameter.place is Place.FORM:
                self._one_field(name, text)
            elif name in self._fixed_names:
                raise EncodingError(f"its field {name!r} would replace a fixed value")
            else:
                self._one_query(name, text, is_hidden)

    def _body(self, parameter: ParameterPlan, value: Any) -> None:
        if value is None:
            return
        given = parameter.mark.media_type if isinstance(parameter.mark, Body) else None
        if isinstance(value, (bytes, bytearray)):
            self._content, media_type = bytes(value), "application/octet-stream"
        elif isinstance(value, str) and parameter.mark is not None:
            self._content, media_type = value.encode(), "text/plain; charset=utf-8"
        else:
            self._content, media_type = _json(parameter, value, self._secrets), "application/json"
        self._headers.setdefault("content-type", ("Content-Type", header_value(given or media_type)))

    def _file(self, parameter: ParameterPlan, value: Any) -> None:
        if value is None:
            return
        mark = parameter.mark if isinstance(parameter.mark, File) else File()
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(item, Upload):
                if not isinstance(item, (bytes, bytearray, str)):
                    raise EncodingError(f"a {type(item).__name__} is not a file; use bytes, str or rest.Upload")
                content = item.encode() if isinstance(item, str) else bytes(item)
                default = "text/plain; charset=utf-8" if isinstance(item, str) else "application/octet-stream"
                item = Upload(content, mark.filename or parameter.wire_name, mark.media_type or default)
            header_value(item.media_type)  # it is sent as a header of the part
            self._files.append((parameter.wire_name, item))

    def finish(self) -> Outgoing:
        path, shown_path = "", ""
        for at, part in enumerate(self._plan.path):
            encoded, shown = self._segments[part] if at % 2 else (literal_path(part),) * 2
            path, shown_path = path + encoded, shown_path + shown
        for name, value in self._endpoint.query:
            self._one_query(name, value, True)
        own = {name: value for name, value in self._endpoint.credentials if name.lower() not in self._headers}
        self.headers_of(own)
        if self._cookies:
            self._header("Cookie", "; ".join(f"{name}={value}" for name, value in self._cookies.items()), True)
        if self._fields and not self._files:
            pairs = (f"{percent(name)}={percent(text)}" for name, text in self._fields)
            self._content, self._fields = "&".join(pairs).encode(), []
            self._headers.setdefault("content-type", ("Content-Type", b"application/x-www-form-urlencoded"))
        return Outgoing(
            self._plan.verb,
            self._endpoint.url + path + _query_text(self._query),
            self._endpoint.url + shown_path + _query_text(self._shown_query),
            self._headers,
            self._content,
            self._fields,
            self._files,
            self._secrets,
            self._open_headers | {"content-type"},
        )


def _query_text(pairs: list[tuple[str, str]]) -> str:
    return "?" + "&".join(f"{name}={value}" for name, value in pairs) if pairs else ""


def _json(parameter: ParameterPlan, value: Any, secrets: list[str]) -> bytes:
    """Return a body as JSON with the real values of its secrets, which are added to `secrets`."""
    assert parameter.adapter is not None
    try:
        written = parameter.adapter.dump_json(value, by_alias=True, warnings="error")
        if not any(mask in written for mask in _MASKS):
            return written
        original = parameter.adapter.dump_python(value, by_alias=True, warnings="error")
        found: list[str] = []
        whole = revealed(from_json(written), original, found)
        secrets += found
        return to_json(whole) if found else written
    except PydanticSerializationError as error:
        reason = str(error).partition("\n")[0]
        raise EncodingError(f"a {type(value).__name__} does not match the declared type ({reason})") from error
