"""Limits and checks for what clients of front ends send: bodies, ids, texts, files, and JSON values.

Not here: the bodies of the protocols (`vercel_ai`, `ag_ui`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from toolbox.chat import UserMessage
from toolbox.contents import AudioContent, Content, ImageContent, PdfContent, joined_text, media_in

from .chats import invalid

MAX_MESSAGES = 10_000  # with all of a conversation
MAX_PARTS = 10_000  # of one message
MAX_FILES = 20
MAX_TEXT = 1_000_000  # characters of a new message
MAX_DEPTH = 100  # levels of a JSON value
MAX_SHOWN = 1000  # bytes of a mistake that the response repeats

ChatId = Annotated[str, Field(min_length=1, max_length=200)]
"""The id of a conversation."""

Short = Field(max_length=500)
"""The length of all other ids."""


class ClientBody(BaseModel):
    """What a client posts. Its errors say where a mistake is, and repeat only what is short and can be sent."""

    @model_validator(mode="wrap")
    @classmethod
    def _shorten_errors(cls, given: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return read(given)
        except ValidationError as error:
            # FastAPI answers with the inputs. Infinity and lone surrogates, which the parser reads, would be a 500.
            found = error.errors(include_url=False)
            details = [
                InitErrorDetails(
                    type=each["type"], loc=each["loc"], input=_shown_input(each["input"]), ctx=each.get("ctx", {})
                )
                for each in found
            ]
            raise ValidationError.from_exception_data(cls.__name__, details) from None


def _shown_input(given: Any) -> Any:
    try:
        written = json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        return "…"
    return given if len(written) <= MAX_SHOWN else "…"


def read_text(given: Any) -> str:
    """Return a text of the user. Raises `RefusedError`."""
    if not isinstance(given, str):
        raise invalid("A text part needs a text.")
    return given


def read_media(media_type: Any, url: Any, name: str | None = None) -> ImageContent | PdfContent | AudioContent:
    """Return an image, a PDF document or a recording: `url` is an http, https or data URL. Raises `RefusedError`."""
    if not isinstance(media_type, str) or not isinstance(url, str):
        raise invalid("A file needs a media type and an address.")
    is_data = url[:5].lower() == "data:"
    kind = media_type.partition(";")[0].strip().lower()
    try:
        if kind.startswith("image/"):
            return ImageContent(data=url, mime_type=kind) if is_data else ImageContent(url=url, mime_type=kind)
        if kind == "application/pdf":
            return PdfContent(data=url, name=name) if is_data else PdfContent(url=url, name=name)
        if kind.startswith("audio/"):
            return AudioContent(data=url, mime_type=kind)
    except (TypeError, ValueError) as error:
        raise invalid(f"A file is invalid: {str(error)[:200]}") from None
    raise invalid(f"Files of the type {media_type[:100]!r} are not supported; send an image, a PDF or audio.")


def make_message(contents: Sequence[Content]) -> UserMessage:
    """Return a message of the user. Raises `RefusedError` if it is empty or too large."""
    text, files = joined_text(contents), media_in(contents)
    if not (text.strip() or files):
        raise invalid("The message is empty.")
    if len(text) > MAX_TEXT:
        raise invalid(f"The message has more than {MAX_TEXT:,} characters.")
    if len(files) > MAX_FILES:
        raise invalid(f"The message has more than {MAX_FILES} files.")
    return UserMessage(contents)


def read_value(given: Any) -> Any:
    """Return a JSON value of a client. Raises `RefusedError` if it is nested too deeply."""
    level: list[Any] = [given]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return given
    raise invalid(f"A value has more than {MAX_DEPTH} levels.")
