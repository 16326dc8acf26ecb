"""Contents of messages: text, images, PDF documents and audio, with their bytes, base64 text and media types.

Not here: messages (`chat`), the formats of model servers (`models`).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, assert_never, get_args

MAX_CONTENT_BYTES = 64 * 2**20
"""The largest image, document or recording, in bytes."""

PDF = "application/pdf"
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]*/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]*(;[ -~]*)?")
_DATA_URL = re.compile(r"data:(?P<type>[^;,]*)(?P<more>(?:;[^;,]*)*?)(?P<base64>;base64)?,", re.IGNORECASE)
_ADDRESS = re.compile(r"https?://|data:", re.IGNORECASE)
_SPACE = re.compile(r"\s+")


# --- the kinds


@dataclass(frozen=True, slots=True)
class TextContent:
    """A piece of text."""

    text: str


@dataclass(frozen=True, slots=True)
class ImageContent:
    """An image, given by `url` (an http, https or data URL) or by `data` (the bytes, or their base64 text).

        ImageContent(data=Path("plan.png").read_bytes(), detail="high")

    `mime_type`, such as `image/png`, is detected from the bytes if you omit it. `detail` sets the resolution for the
    model: `low`, `high` or `auto`. Raises `ValueError` unless exactly one of `url` and `data` is given, and for other
    URLs, invalid base64, a `mime_type` that is not an image, unknown bytes without a `mime_type`, or more than 64 MiB.
    """

    url: str | None = None
    data: bytes | str | None = None
    mime_type: str | None = None
    detail: str | None = None

    def __post_init__(self) -> None:
        _check_form(self)
        _check_sendable(self)


@dataclass(frozen=True, slots=True)
class PdfContent:
    """A PDF document, given by `url` (an http, https or data URL) or by `data` (the bytes, or their base64 text).

        PdfContent(data=Path("invoice.pdf").read_bytes(), name="invoice.pdf")

    `name` is the file's name for the model. Raises `ValueError` unless exactly one of `url` and `data` is given, and
    for other URLs, invalid base64 or more than 64 MiB.
    """

    url: str | None = None
    data: bytes | str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        _check_form(self)
        _check_sendable(self)


@dataclass(frozen=True, slots=True)
class AudioContent:
    """A recording: `data` (the bytes, or their base64 text) and `mime_type`, such as `audio/wav` or `audio/mpeg`.

        AudioContent(Path("question.mp3").read_bytes(), "audio/mpeg")

    Raises `ValueError` for invalid base64, a `mime_type` that is not audio, or more than 64 MiB.
    """

    data: bytes | str
    mime_type: str

    def __post_init__(self) -> None:
        _check_form(self)


Content: TypeAlias = TextContent | ImageContent | PdfContent | AudioContent
"""A part of a message. Code that handles contents matches every kind and ends with `assert_never`, so that a type
checker finds all of it when a kind is added."""

Media: TypeAlias = ImageContent | PdfContent | AudioContent
"""A content that is not text."""

CONTENT_TYPES: tuple[type[Any], ...] = get_args(Content)


# --- checks

_Media = TypeVar("_Media", ImageContent, PdfContent)


def stored_content(kind: type[_Media], *fields: Any) -> _Media:
    """Return a stored part as it was written, also if a new one with its address or bytes would be refused.

    A conversation stays readable, and such a part is refused when it would be sent: see `reason_against`. Raises
    `ValueError` and `TypeError` for all other faults.
    """
    content = object.__new__(kind)
    for slot, value in zip(kind.__slots__, fields, strict=True):
        object.__setattr__(content, slot, value)
    _check_form(content)
    return content


def reason_against(content: Content) -> str | None:
    """Return why a part cannot be sent to a model server: the field and the fault; None if it can."""
    match content:
        case ImageContent() | PdfContent() if content.url is not None and not _ADDRESS.match(content.url):
            return f"url: expected an http, https or data URL, got {content.url[:100]!r}"
        case ImageContent() if content.data is not None and _find_known_type(content) is None:
            return "data: these bytes are not a known image; pass mime_type= if they are one"
        case TextContent() | ImageContent() | PdfContent() | AudioContent():
            return None
        case _:
            assert_never(content)


def _check_sendable(content: ImageContent | PdfContent) -> None:
    if (reason := reason_against(content)) is not None:
        raise ValueError(f"{type(content).__name__}.{reason}")


def _check_form(content: Media) -> None:
    """Check the types of a part's fields, the size of its data, and that it has data or an address."""
    match content:
        case ImageContent():
            _check_source(content, content.url, content.data)
            if content.mime_type is not None:
                _check_type("ImageContent.mime_type", content.mime_type, "image/")
            _check_data(content, "image/")
        case PdfContent():
            _check_source(content, content.url, content.data)
            if content.name is not None and not isinstance(content.name, str):
                raise TypeError(f"PdfContent.name: expected a str, got {type(content.name).__name__}")
            _check_data(content, PDF)
        case AudioContent():
            if content.data is None:
                raise ValueError("an AudioContent needs data=")
            _check_type("AudioContent.mime_type", content.mime_type, "audio/")
            _check_data(content, "audio/")
        case _:
            assert_never(content)


def _check_source(content: ImageContent | PdfContent, url: object, data: object) -> None:
    name = type(content).__name__
    if (url is None) == (data is None):
        article = "an" if name[0] in "AI" else "a"
        raise ValueError(f"{article} {name} needs either url= or data=")
    if url is not None and not isinstance(url, str):
        raise TypeError(f"{name}.url: expected a str, got {type(url).__name__}")


def _check_type(place: str, media_type: object, expected: str) -> None:
    if not isinstance(media_type, str):
        raise TypeError(f"{place}: expected a str, got {type(media_type).__name__}")
    if not _MEDIA_TYPE.fullmatch(media_type) or not media_type.lower().startswith(expected):
        example = {"image/": "image/png", "audio/": "audio/wav"}.get(expected, expected)
        raise ValueError(f"{place}: invalid media type {media_type[:100]!r}; expected one such as {example!r}")


def _check_data(content: Media, expected: str) -> None:
    """Check data that is base64 text or a data URL, and its size. Turns other buffers into bytes."""
    name, data = type(content).__name__, content.data
    if isinstance(data, (bytearray, memoryview)):
        data = bytes(data)
        object.__setattr__(content, "data", data)
    place = f"{name}.data"
    if data is None:
        data, place = getattr(content, "url", ""), f"{name}.url"
        if data[:5].lower() != "data:":
            return
    if isinstance(data, bytes):
        size = len(data)
    elif isinstance(data, str):
        if len(data) > MAX_CONTENT_BYTES * 3 // 2:
            raise ValueError(f"{place}: more than {MAX_CONTENT_BYTES} bytes")
        size = _decoded_size(place, data, expected)
    else:
        raise TypeError(f"{place}: expected bytes or base64 text, got {type(data).__name__}")
    if size > MAX_CONTENT_BYTES:
        raise ValueError(f"{place}: {size} bytes; the limit is {MAX_CONTENT_BYTES}")


def _decoded_size(place: str, text: str, expected: str) -> int:
    if text[:5].lower() == "data:":
        found = _DATA_URL.match(text)
        if found is None or not found["base64"]:
            raise ValueError(
                f"{place}: expected a data URL in base64, such as 'data:{_make_example(expected)};base64,…'"
            )
        _check_type(place, found["type"], expected)
    try:
        return len(base64.b64decode(_base64_text(text), validate=True))
    except (ValueError, binascii.Error):  # also text that is not ASCII
        raise ValueError(f"{place}: invalid base64") from None


def _make_example(expected: str) -> str:
    return f"{expected}png" if expected == "image/" else f"{expected}wav" if expected == "audio/" else expected


def _base64_text(text: str) -> str:
    """Return base64 text without the head of a data URL and without white space."""
    if text[:5].lower() == "data:":
        text = text.partition(",")[2]
    return _SPACE.sub("", text)


# --- reading


def joined_text(contents: Iterable[Content]) -> str:
    """Return the texts of `contents`, joined by line breaks."""
    texts: list[str] = []
    for each in contents:
        match each:
            case TextContent(text):
                texts.append(text)
            case ImageContent() | PdfContent() | AudioContent():
                pass
            case _:
                assert_never(each)
    return "\n".join(texts)


def media_in(contents: Iterable[Content]) -> tuple[Media, ...]:
    """Return the contents that are not text, in their order."""
    media: list[Media] = []
    for each in contents:
        match each:
            case ImageContent() | PdfContent() | AudioContent():
                media.append(each)
            case TextContent():
                pass
            case _:
                assert_never(each)
    return tuple(media)


def base64_of(content: Media) -> str | None:
    """Return the base64 text of a content, or None if it has only the URL of another server."""
    data = content.data
    if isinstance(data, bytes):
        return base64.b64encode(data).decode()
    if data is None:
        url = getattr(content, "url", "")
        return _base64_text(url) if url[:5].lower() == "data:" else None
    return _base64_text(data)


def bytes_of(content: Media) -> bytes | None:
    """Return the bytes of a content, or None if it has only the URL of another server."""
    if isinstance(content.data, bytes):
        return content.data
    text = base64_of(content)
    return None if text is None else base64.b64decode(text)


def media_type_of(content: Media) -> str:
    """Return the media type: the given one, else that of a data URL, else the detected one.

    It is `image/png` for an image at the address of another server, whose bytes are not here.
    """
    match content:
        case PdfContent():
            return PDF
        case AudioContent():
            return content.mime_type
        case ImageContent():
            return _find_known_type(content) or "image/png"
        case _:
            assert_never(content)


def url_of(content: Media) -> str:
    """Return the URL of a content; its bytes become a data URL."""
    url: str | None = getattr(content, "url", None)
    return url if url is not None else f"data:{media_type_of(content)};base64,{base64_of(content)}"


_SIGNATURES = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
)
_BRANDS = {b"avif": "image/avif", b"avis": "image/avif", b"heic": "image/heic", b"heix": "image/heic"}
_BRANDS |= {b"mif1": "image/heif", b"msf1": "image/heif"}
"""The kinds of files in the container format of MPEG-4 that are images."""


def _find_known_type(image: ImageContent) -> str | None:
    """Return the media type of an image: the given one, that of a data URL, or the detected one; None if unknown."""
    if image.mime_type is not None:
        return image.mime_type
    for source in (image.url, image.data):
        if isinstance(source, str) and (found := _DATA_URL.match(source)) and found["type"]:
            return found["type"].lower()
    head = image.data[:24] if isinstance(image.data, bytes) else base64.b64decode((base64_of(image) or "")[:32])
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    if head[4:8] == b"ftyp" and (brand := _BRANDS.get(head[8:12])):
        return brand
    return next((mime for signature, mime in _SIGNATURES if head.startswith(signature)), None)
