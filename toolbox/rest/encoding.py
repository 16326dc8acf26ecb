"""Encodes values as parts of a request: path segments, query and form values, headers, cookies.

No value can break out of its part: it is encoded or refused. Also decides which texts are secret. Not here: choosing
the part for a value (`outgoing`).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from pydantic import Secret, SecretBytes, SecretStr
from pydantic_core import PydanticSerializationError, SchemaSerializer, core_schema, to_jsonable_python

from ..safe_text import HIDDEN, SAFE_HEADERS

# Characters that the developer may use in a path. Arguments are always encoded.
_PATH_LITERALS = "/!$&'()*+,;=:@%-._~"
_SECRET_NAME = re.compile(
    r"api[-_.]?key|access[-_.]?key|token|secret|passw|pwd|credential|signature|session|^auth|^key$|^sig$", re.IGNORECASE
)
_ANYTHING = SchemaSerializer(core_schema.any_schema())
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_COOKIE_VALUE = re.compile(r"[\x21\x23-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e]*")
# Headers that control the target and the framing of a request. Arguments must not set them.
PROTECTED_HEADERS = frozenset(
    {"connection", "content-length", "expect", "host", "keep-alive", "proxy-connection"}
    | {"te", "trailer", "transfer-encoding", "upgrade"}
)


class EncodingError(ValueError):
    """A value that cannot be sent in its place; the message says why, without the value."""


class DelimitedText(str):
    """A text whose delimiters are sent as they are in a URL, while the words between them are percent-encoded.

    `parts` alternates between delimiters (even indexes) and words (odd indexes): `(".", "a", ",", "b,c")` is sent as
    `.a,b%2Cc`. The delimiters must be characters that URLs allow.
    """

    parts: Sequence[str]

    def __new__(cls, parts: Sequence[str]) -> DelimitedText:
        text = super().__new__(cls, "".join(parts))
        text.parts = parts
        return text


@dataclass(frozen=True, slots=True)
class UrlText:
    """A URL or a part of one: as it is sent, and as logs and errors may show it."""

    sent: str = field(repr=False)
    shown: str

    @classmethod
    def plain(cls, text: str) -> UrlText:
        """Return a part without secrets."""
        return cls(text, text)

    def __add__(self, other: UrlText) -> UrlText:
        return UrlText(self.sent + other.sent, self.shown + other.shown)

    def with_query(self, pairs: Iterable[tuple[str, UrlText]]) -> UrlText:
        """Return the URL with more query parameters: encoded names and values."""
        url = self
        for name, value in pairs:
            url = UrlText(_append(url.sent, name, value.sent), _append(url.shown, name, value.shown))
        return url


def _append(url: str, name: str, value: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{name}={value}"


def is_secret(value: object) -> bool:
    """Return True if the value's type, or that of an item in it, says that it must not be shown."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(is_secret(item) for item in value)
    return isinstance(value, (SecretStr, SecretBytes, Secret))


def is_secret_name(name: str) -> bool:
    """Return True if values with this name must not appear in errors and logs."""
    return _SECRET_NAME.search(name) is not None


def text_of(value: object) -> str:
    """Return one value as text: enums by value, `true` or `false`, others as in pydantic's JSON (dates: ISO 8601)."""
    if isinstance(value, (SecretStr, SecretBytes, Secret)):
        return text_of(value.get_secret_value())
    if isinstance(value, Enum):
        return text_of(value.value)
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    try:
        plain = to_jsonable_python(value)
    except (PydanticSerializationError, UnicodeDecodeError) as error:
        raise EncodingError(f"a {type(value).__name__} cannot be written as text") from error
    if plain is None or isinstance(plain, (dict, list)):
        raise EncodingError(f"expected a single value, got {type(value).__name__}; use rest.Body() to send it as JSON")
    return text_of(plain)


def texts_of(value: object) -> Iterator[str]:
    """Yield the texts of a value or of the items of a list. None is omitted, also in lists."""
    if value is None:
        return
    if isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from (text_of(item),) if item is not None else ()
    else:
        yield text_of(value)


def fields_of(value: object) -> Iterator[tuple[str, str, bool]]:
    """Yield the name and the text of each field of a model, dataclass or mapping, and whether it is secret.

    Lists repeat the field, None is left out. Raises `EncodingError`.
    """
    try:
        plain: Any = _ANYTHING.to_python(value, mode="json", by_alias=True)
    except PydanticSerializationError as error:
        raise EncodingError(f"a {type(value).__name__} cannot be written as fields") from error
    if not isinstance(plain, Mapping):
        raise EncodingError(f"expected a model, dataclass or mapping, got {type(value).__name__}")
    objects: Any = _ANYTHING.to_python(value, by_alias=True)
    are_alike = isinstance(objects, Mapping) and len(objects) == len(plain)  # not if a serializer is for JSON only
    for (name, item), original in zip(plain.items(), (objects if are_alike else plain).values(), strict=True):
        secrets: list[str] = []
        for text in texts_of(with_real_secrets(item, original, secrets)):
            yield str(name), text, bool(secrets)


def with_real_secrets(plain: Any, original: Any, secrets: list[str]) -> Any:
    """Return `plain`, a value as JSON, with the real values of pydantic's secret types, which JSON masks.

    `original` is the same value with its Python objects. The texts of its secrets are added to `secrets`. A secret
    that a serializer of the program wrote differently stays as that serializer wrote it.
    """
    if isinstance(original, (SecretStr, SecretBytes, Secret)):
        value = to_jsonable_python(original.get_secret_value(), by_alias=True)
        secrets.extend(_scalar_texts(value))
        return value if plain == _ANYTHING.to_python(original, mode="json") else plain
    if isinstance(original, Mapping) and isinstance(plain, dict) and len(original) == len(plain):
        return {
            name: with_real_secrets(item, each, secrets)
            for (name, item), each in zip(plain.items(), original.values(), strict=True)
        }
    if isinstance(original, (list, tuple, set, frozenset)) and isinstance(plain, list) and len(original) == len(plain):
        return [with_real_secrets(item, each, secrets) for item, each in zip(plain, original, strict=True)]
    return plain


def _scalar_texts(value: Any) -> Iterator[str]:
    """Yield the texts of all scalars in a JSON value, except for empty ones."""
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _scalar_texts(item)
    elif value not in (None, ""):
        yield text_of(value)


def percent_encode(text: str) -> str:
    """Percent-encode all characters that have a meaning in URLs, except the delimiters of a `DelimitedText`."""
    parts = text.parts if isinstance(text, DelimitedText) else ("", text)
    try:
        return "".join(quote(part, safe="") if at % 2 else part for at, part in enumerate(parts))
    except UnicodeEncodeError as error:
        raise EncodingError("it contains a lone surrogate, which is not valid text") from error


def has_dot_segment(path: str, decodings: int = 3) -> bool:
    """Return True for a path or a path template in which a server could find the segment `.` or `..`.

    The segment may be percent-encoded up to `decodings` times, and separated by backslashes or encoded slashes.
    """
    for _ in range(decodings):
        path = unquote(path)
    return any(part.partition(";")[0] in (".", "..") for part in re.split(r"[/\\]", path))


def encode_segment(value: object, allow_slash: bool = False) -> str:
    """Return a value as exactly one segment of a path, or a part of one.

    Raises `EncodingError` for a slash or backslash, unless `allow_slash`: many servers decode `%2F` before they choose
    a route.
    """
    if value is None:
        raise EncodingError("it is None; a path parameter needs a value")
    text = text_of(value)
    if text in ("", ".", ".."):
        raise EncodingError(f"{text!r} would change the path")
    if "/" in text or "\\" in text:
        if not allow_slash:
            raise EncodingError("'/' and '\\' are not allowed in a path parameter without rest.Path(allow_slash=True)")
        if any(part in (".", "..") for part in re.split(r"[/\\]", text)):
            raise EncodingError("'.' and '..' between slashes would change the path")
    return percent_encode(text)


def could_name(given: str, parameter: str) -> bool:
    """Return True if a server could read the query parameter `given` as `parameter`.

    Servers differ: some ignore case, decode twice, or read `name[]` and `name[0]` as `name`.
    """
    read, wanted = unquote(given).strip().casefold(), parameter.casefold()
    return read == wanted or read.startswith(f"{wanted}[")


def encode_literal_path(text: str) -> str:
    """Encode the literal part of a path; text that is already encoded stays unchanged."""
    return quote(text, safe=_PATH_LITERALS)


def is_header_name(name: str) -> bool:
    """Return True for a valid name of a header or cookie."""
    return _TOKEN.fullmatch(name) is not None


def encode_header_value(text: str) -> bytes:
    """Return the value of a header as UTF-8. Raises `EncodingError` for line ends and other control characters."""
    if _CONTROL.search(text):
        raise EncodingError("it contains a control character, which headers cannot have")
    try:
        return text.strip(" \t").encode()
    except UnicodeEncodeError as error:
        raise EncodingError("it contains a lone surrogate, which is not valid text") from error


def encode_cookie_value(text: str) -> str:
    """Return the value of a cookie. Raises `EncodingError` for characters that could start another cookie."""
    if not _COOKIE_VALUE.fullmatch(text):
        raise EncodingError(
            'it contains a character that cookies cannot have (space, `"`, `,`, `;`, a backslash, non-ASCII)'
        )
    return text


def is_safe_header(name: str) -> bool:
    """Return True for well-known headers that hold no secret."""
    return name.lower() in SAFE_HEADERS


def shown_header(name: str, value: str) -> str:
    """Return a header for a log: only well-known harmless headers show their values."""
    return f"{name}: {value if is_safe_header(name) else HIDDEN}"


def secrets_in_header(name: str, value: str) -> Iterator[str]:
    """Yield the parts of a header's value that no error may show; none for well-known harmless headers.

    Of a cookie the values, of `Bearer …` the token, of `Basic …` also the password, of `name=value` lists the long
    values. The rest, such as the scheme, consists of ordinary words.
    """
    if is_safe_header(name):
        return
    if name.lower() == "cookie":
        yield from (pair.partition("=")[2] for pair in value.split("; "))
        return
    scheme, _, rest = value.partition(" ")
    if scheme.lower() == "basic":
        with suppress(binascii.Error):
            yield base64.b64decode(rest, validate=True).decode("utf-8", "replace").partition(":")[2]
    long_parts = [part for part in re.split(r'[\s,;="]+', rest) if len(part) >= 16] if "=" in rest.rstrip("=") else []
    yield from long_parts or (rest if rest and " " not in rest else value,)


def shown_url(url: str) -> str:
    """Return an external URL without user, password and the values of secret query parameters."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    pairs = (pair.partition("=") for pair in parts.query.split("&")) if parts.query else ()
    query = "&".join(f"{name}={HIDDEN}" if is_secret_name(name) else f"{name}{eq}{value}" for name, eq, value in pairs)
    return urlunsplit((parts.scheme, host, parts.path, query, ""))
