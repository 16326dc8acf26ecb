"""Builds the request of a call from its plan, the values of the call and an endpoint.

For each text that is sent, building also makes the text that logs and errors may show. Not here: encoding values
(`encoding`), computing them (`exchange`), sending the request (`exchange`).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, unquote_plus

import httpx2
from pydantic_core import PydanticSerializationError, from_json, to_json

from ..environment_variables import variables_of
from ..errors import RestArgumentError
from ..safe_text import HIDDEN
from .annotations import Body, File, FixedValue, Path, Place, Upload
from .client_plans import ParameterPlan, RequestPlan
from .encoding import (
    PROTECTED_HEADERS,
    EncodingError,
    UrlText,
    could_name,
    encode_cookie_value,
    encode_header_value,
    encode_literal_path,
    encode_segment,
    fields_of,
    has_dot_segment,
    is_header_name,
    is_secret,
    is_secret_name,
    percent_encode,
    shown_url,
    text_of,
    texts_of,
    with_real_secrets,
)
from .endpoint import RestEndpoint
from .origins import is_below

T = TypeVar("T")

_NO_ADDRESS = re.compile(r"[\x00-\x20\x7f\\]")
_MASKS = (b"*", b'""')  # what pydantic writes for a secret, and for an empty one


@dataclass(slots=True, kw_only=True)
class Outgoing:
    """A request that is ready to be sent, once or more often.

    `url` includes keys of the settings that are sent in the query. `secrets` are values that errors must not show.
    `open_headers` are the lower-case names of headers that may be shown. `sent` lists the HTTP requests made from it,
    including redirected ones.
    """

    verb: str
    url: UrlText
    headers: dict[str, tuple[str, bytes]]
    content: bytes | None = None
    fields: list[tuple[str, str]] = field(default_factory=list)
    files: list[tuple[str, Upload]] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list, repr=False)
    open_headers: set[str] = field(default_factory=set)
    sent: list[httpx2.Request] = field(default_factory=list, repr=False)


def build_outgoing(
    plan: RequestPlan,
    values: Mapping[str, Any],
    fixed: list[tuple[FixedValue, object]],
    headers: Mapping[str, object],
    endpoint: RestEndpoint,
) -> Outgoing:
    """Return the request of a call. `fixed` has the current fixed values, `headers` the computed headers.

    Raises `RestArgumentError` for a value that cannot be sent in its place; nothing has been sent then.
    """
    builder = _RequestBuilder(plan, endpoint)
    builder.put_accept(plan.reply.accept)
    builder.put_headers(dict(endpoint.headers))
    for each, value in fixed:
        builder.put_fixed(each, value)
    builder.put_headers(headers)
    for parameter in plan.parameters:
        builder.put_parameter(parameter, values[parameter.name])
    return builder.finish_request()


class _RequestBuilder:
    """Collects the parts of one request."""

    def __init__(self, plan: RequestPlan, endpoint: RestEndpoint) -> None:
        self._plan, self._endpoint = plan, endpoint
        self._segments: dict[str, UrlText] = {}
        self._query: list[tuple[str, UrlText]] = []
        self._cookies: dict[str, str] = {}
        self._headers: dict[str, tuple[str, bytes]] = {}
        self._fields: list[tuple[str, str]] = []
        self._files: list[tuple[str, Upload]] = []
        self._content: bytes | None = None
        self._body_fields: dict[str, bytes] = {}
        self._address: str | None = None
        self._address_is_hidden = False
        self._fixed_names = {(Place.QUERY, name) for name, _ in endpoint.query}
        self._secrets: list[str] = []
        self._open_headers: set[str] = set()

    def put_accept(self, media_types: str) -> None:
        self._put_value(Place.HEADER, "Accept", media_types, False)

    def put_headers(self, headers: Mapping[str, object]) -> None:
        """Add headers of the settings or computed headers. None is omitted."""
        for name, value in headers.items():
            self._put_or_explain(name, functools.partial(self._put_value, Place.HEADER, name, value, True))

    def put_fixed(self, fixed: FixedValue, value: object) -> None:
        variables = [os.environ.get(name, default) or "" for name, default in variables_of(fixed.value)]
        self._secrets += variables
        hidden = is_secret(value) or bool(variables)
        self._fixed_names.add((fixed.place, fixed.name))
        self._put_or_explain(fixed.name, lambda: self._put_value(fixed.place, fixed.name, value, hidden))

    def put_parameter(self, parameter: ParameterPlan, value: Any) -> None:
        def put_in_place() -> None:
            if parameter.place is Place.BODY:
                self._put_body(parameter, value)
            elif parameter.place is Place.BODY_FIELD:
                self._put_body_field(parameter, value)
            elif parameter.place is Place.FILE:
                self._put_files(parameter, value)
            elif parameter.spread:
                self._put_fields_of(parameter, value)
            else:
                allow_slash = isinstance(parameter.mark, Path) and parameter.mark.allow_slash
                self._put_value(parameter.place, parameter.wire_name, value, is_secret(value), allow_slash)

        self._put_or_explain(parameter.name, put_in_place)

    def _put_or_explain(self, name: str, put: Callable[[], T]) -> T:
        """Call `put`. Raises `RestArgumentError`, which names the value, if it cannot be sent."""
        try:
            return put()
        except (EncodingError, UnicodeEncodeError) as error:
            where = f"{self._endpoint.url}{self._plan.template}"
            raise RestArgumentError(f"{self._plan.where}: {name} cannot be sent: {error}", where) from error

    def _put_value(self, place: Place, name: str, value: object, hidden: bool, allow_slash: bool = False) -> None:
        if is_secret(value):
            self._secrets += texts_of(value)
        match place:
            case Place.PATH:
                encoded = encode_segment(value, allow_slash)
                self._segments[name] = UrlText(encoded, HIDDEN if hidden else encoded)
            case Place.QUERY:
                for text in texts_of(value):
                    self._put_query(name, text, hidden)
            case Place.FORM:
                for text in texts_of(value):
                    self._put_field(name, text)
            case Place.HEADER:
                if value is not None:
                    self._put_header(name, ", ".join(texts_of(value)), hidden)
            case Place.COOKIE:
                if value is not None:
                    self._cookies[name] = encode_cookie_value(text_of(value))
                    self._secrets.append(self._cookies[name])
            case Place.URL:
                if value is None:
                    raise EncodingError("it is None; the address is required")
                self._address, self._address_is_hidden = text_of(value), hidden
            case Place.FILE | Place.BODY | Place.BODY_FIELD:
                raise AssertionError("files and bodies cannot be fixed values")

    def _put_query(self, name: str, text: str, hidden: bool) -> None:
        encoded = percent_encode(text)
        if is_secret_name(name):
            hidden = True
            self._secrets.append(text)
        self._query.append((percent_encode(name), UrlText(encoded, HIDDEN if hidden else encoded)))

    def _put_field(self, name: str, text: str) -> None:
        if is_secret_name(name):
            self._secrets.append(text)
        self._fields.append((name, text))

    def _put_header(self, name: str, text: str, hidden: bool) -> None:
        if not is_header_name(name) or name.lower() in PROTECTED_HEADERS:
            raise EncodingError("a header of this name cannot be set")
        self._headers[name.lower()] = name, encode_header_value(text)
        if hidden or is_secret_name(name):
            self._open_headers.discard(name.lower())
        else:
            self._open_headers.add(name.lower())

    def _put_fields_of(self, parameter: ParameterPlan, value: Any) -> None:
        for name, text, is_hidden in fields_of(value) if value is not None else ():
            if is_hidden:
                self._secrets.append(text)
            if any(place is parameter.place and could_name(name, fixed) for place, fixed in self._fixed_names):
                raise EncodingError(f"its field {name!r} would replace a fixed value")
            if parameter.place is Place.FORM:
                self._put_field(name, text)
            else:
                self._put_query(name, text, is_hidden)

    def _put_body(self, parameter: ParameterPlan, value: Any) -> None:
        if value is None:
            return
        given = parameter.mark.media_type if isinstance(parameter.mark, Body) else None
        if isinstance(value, (bytes, bytearray)):
            self._content, media_type = bytes(value), "application/octet-stream"
        elif isinstance(value, str) and parameter.mark is not None:
            self._content, media_type = value.encode(), "text/plain; charset=utf-8"
        else:
            self._content, media_type = _encode_body(parameter, value, self._secrets), "application/json"
        self._headers.setdefault("content-type", ("Content-Type", encode_header_value(given or media_type)))

    def _put_body_field(self, parameter: ParameterPlan, value: Any) -> None:
        if value is not None or not parameter.omits_none:
            self._body_fields[parameter.wire_name] = _encode_body(parameter, value, self._secrets)

    def _put_files(self, parameter: ParameterPlan, value: Any) -> None:
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
            encode_header_value(item.media_type)  # it is sent as a header of the part
            self._files.append((parameter.wire_name, item))

    def _join_address(self, base: UrlText, address: str) -> UrlText:
        """Return the address that an argument holds, with the query of the request.

        Raises `RestArgumentError` unless it is below `base`: a server's reply, a user or a model may have chosen it.
        """
        name = next(each.name for each in self._plan.parameters if each.place is Place.URL)
        return self._put_or_explain(name, lambda: self._read_address(base, address))

    def _read_address(self, base: UrlText, address: str) -> UrlText:
        if _NO_ADDRESS.search(address):
            raise EncodingError("it contains white space, a backslash or a control character")
        try:
            scheme, colon, rest = address.partition(":")
            url = httpx2.URL(f"{scheme.lower()}{colon}{rest}")  # it knows default ports of lower-case schemes only
            query = parse_qsl(url.query.decode("ascii"), keep_blank_values=True)
        except (httpx2.InvalidURL, ValueError) as error:
            raise EncodingError("it is not a valid URL") from error
        if has_dot_segment(address.partition("?")[0]) or not is_below(url, httpx2.URL(base.sent)):
            raise EncodingError(f"it must be below {base.shown}, without user info")
        self._secrets += [text for each, text in query if is_secret_name(each)]
        path = f"{url.scheme}://{url.netloc.decode('ascii')}{url.raw_path.decode('ascii')}"
        shown = f"{base.shown}/{HIDDEN}" if self._address_is_hidden else shown_url(path)
        return UrlText(path, shown).with_query(self._query_without(query, url.raw_path.decode("ascii")))

    def _query_without(self, query: list[tuple[str, str]], target: str) -> list[tuple[str, UrlText]]:
        """Return the parameters of the request that an address does not have. `target` is its path with its query.

        Raises `EncodingError` for a parameter that the address has with another value, also if only some servers would
        read it so.
        """
        own: dict[str, list[str]] = {}
        for name, value in self._query:
            own.setdefault(unquote(name), []).append(unquote(value.sent))
        path, _, text = target.partition("?")
        # Some servers separate parameters with `;`, in the query and in the path.
        pieces = re.split("[;&]", text) + [piece for segment in path.split("/") for piece in segment.split(";")[1:]]
        split = (piece.partition("=") for piece in pieces)
        read = [(unquote_plus(name), unquote_plus(value)) for name, _, value in split]
        for name, values in own.items():
            exact = {value for each, value in query if each == name}
            similar = {value for each, value in read if could_name(each, name)}
            if similar.difference(values) or exact not in (set(), set(values)):
                raise EncodingError(f"its query has another value of {name!r}")
        present = {each for each, _ in query}
        return [(name, value) for name, value in self._query if unquote(name) not in present]

    def finish_request(self) -> Outgoing:
        url = UrlText.plain(self._endpoint.url)
        for at, part in enumerate(self._plan.path):
            url += self._segments[part] if at % 2 else UrlText.plain(encode_literal_path(part))
        for name, value in self._endpoint.query:
            self._put_query(name, value, True)
        own = {name: value for name, value in self._endpoint.credentials if name.lower() not in self._headers}
        self.put_headers(own)
        if self._cookies:
            self._put_header("Cookie", "; ".join(f"{name}={value}" for name, value in self._cookies.items()), True)
        if self._fields and not self._files:
            pairs = (f"{percent_encode(name)}={percent_encode(text)}" for name, text in self._fields)
            self._content, self._fields = "&".join(pairs).encode(), []
            self._headers.setdefault("content-type", ("Content-Type", b"application/x-www-form-urlencoded"))
        if any(each.place is Place.BODY_FIELD for each in self._plan.parameters):
            fields = (to_json(name) + b":" + value for name, value in self._body_fields.items())
            self._content = b"{" + b",".join(fields) + b"}"
            self._headers.setdefault("content-type", ("Content-Type", b"application/json"))
        return Outgoing(
            verb=self._plan.verb,
            url=url.with_query(self._query) if self._address is None else self._join_address(url, self._address),
            headers=self._headers,
            content=self._content,
            fields=self._fields,
            files=self._files,
            secrets=self._secrets,
            open_headers=self._open_headers | {"content-type"},
        )


def _encode_body(parameter: ParameterPlan, value: Any, secrets: list[str]) -> bytes:
    """Return a body as JSON with the real values of its secrets, which are added to `secrets`."""
    assert parameter.adapter is not None
    try:
        written = parameter.adapter.dump_json(value, by_alias=True, warnings="error")
        if not any(mask in written for mask in _MASKS):
            return written
        original = parameter.adapter.dump_python(value, by_alias=True, warnings="error")
        found: list[str] = []
        whole = with_real_secrets(from_json(written), original, found)
        secrets += found
        return to_json(whole) if found else written
    except PydanticSerializationError as error:
        reason = str(error).partition("\n")[0]
        raise EncodingError(f"a {type(value).__name__} does not match the declared type ({reason})") from error
