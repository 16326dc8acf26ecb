"""Converts the content blocks of MCP into contents of messages, and contents into blocks.

Not here: requests to a server (`connection`), the tools of servers (`server_tools`), answers to clients (`serving`).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any, assert_never
from urllib.parse import quote, unquote, urlsplit

from ..chat import AiMessage, Message, ToolExecutionResult, UserMessage
from ..contents import (
    PDF,
    AudioContent,
    Content,
    ImageContent,
    PdfContent,
    TextContent,
    base64_of,
    joined_text,
    media_in,
    media_type_of,
)
from ..json_text import compact_json
from .screening import visible

DOCUMENT = "document.pdf"
"""The name of a PDF document without a name."""


# --- from a server


def tool_result(result: Any) -> ToolExecutionResult:
    """Convert the result of a server's tool: the model reads its texts, images, PDF documents and audio.

    The program gets the structured value. Without texts, the model reads the structured value as JSON.
    """
    contents = tuple(map(content_of, result.content))
    structured = result.structured_content
    text = joined_text(contents)
    media = media_in(contents)
    if not text and structured is not None:
        shown = {each.data: each.type for each in result.content if each.type in ("image", "audio")}
        text = compact_json(_without_media(structured, shown))
        contents = (TextContent(text), *media)
    value = text if structured is None else structured
    return ToolExecutionResult(text, value, bool(result.is_error), contents=contents if media else ())


def resource_result(resources: Iterable[Any]) -> ToolExecutionResult:
    """Convert the contents of a resource."""
    contents = tuple(map(_read_resource, resources))
    text = joined_text(contents)
    return ToolExecutionResult(text, text, contents=contents if media_in(contents) else ())


def messages_of(prompt: Any) -> tuple[Message, ...]:
    """Convert the messages of a prompt."""
    return tuple(_make_message(each.role, content_of(each.content)) for each in prompt.messages)


def _make_message(role: str, content: Content) -> Message:
    text = joined_text([content])
    return AiMessage(text) if role == "assistant" and text else UserMessage([content])


def _without_media(value: Any, shown: Mapping[str, str]) -> Any:
    """Replace images and audio in a structured value by `[image]` and `[audio]`: the model already has them."""
    if isinstance(value, dict):
        return {key: _without_media(each, shown) for key, each in value.items()} if shown else value
    if isinstance(value, list):
        return [_without_media(each, shown) for each in value] if shown else value
    return f"[{shown[value]}]" if isinstance(value, str) and value in shown else value


def content_of(block: Any) -> Content:
    """Convert one content block. Blocks that cannot be converted become a note in brackets."""
    match block.type:
        case "text":
            return TextContent(block.text)
        case "image" | "audio" as kind:
            return _make_media(kind, block.data, block.mime_type)
        case "resource":
            return _read_resource(block.resource)
        case "resource_link":
            return TextContent(f"[resource {block.name}: {block.uri}]")
        case kind:
            return TextContent(f"[{kind} content, not supported]")


def _read_resource(resource: Any) -> Content:
    if hasattr(resource, "text"):
        return TextContent(resource.text)
    kind = _kind_of(resource.mime_type)
    if kind is None:
        return TextContent(f"[binary resource {resource.uri}]")
    return _make_media(kind, resource.blob, resource.mime_type, str(resource.uri))


def _kind_of(media_type: str | None) -> str | None:
    """Return the kind of content that carries a binary resource, or None if no kind does."""
    kind = (media_type or "").partition(";")[0].strip().lower()
    if kind == PDF:
        return "document"
    return next((each for each in ("image", "audio") if kind.startswith(f"{each}/")), None)


def _make_media(kind: str, data: str, media_type: str, uri: str = "") -> Content:
    """Return an image, audio or a document of a server, or a note if it is invalid or too large."""
    try:
        decoded = base64.b64decode(data, validate=True)
    except ValueError:
        return TextContent(f"[{kind} with invalid base64]")
    try:
        match kind:
            case "image":
                return ImageContent(data=decoded, mime_type=media_type)
            case "audio":
                return AudioContent(decoded, media_type)
            case _:
                return PdfContent(data=decoded, name=_file_name(uri))
    except ValueError:
        return TextContent(f"[{kind} of an invalid type, or too large]")


def _file_name(uri: str) -> str | None:
    """Return the last part of a URI's path as a file name, or None."""
    try:
        name = visible(unquote(urlsplit(uri).path.rpartition("/")[2])).strip()
    except ValueError:  # such as http://[
        return None
    return name[:200] or None


# --- for clients


def block_of(content: Content) -> Any:
    """Convert one content into a block. Contents with a URL become links."""
    from mcp_types import AudioContent as McpAudio
    from mcp_types import BlobResourceContents, EmbeddedResource, ResourceLink
    from mcp_types import ImageContent as McpImage
    from mcp_types import TextContent as McpText

    match content:
        case TextContent(text):
            return McpText(type="text", text=text)
        case ImageContent():
            if (data := base64_of(content)) is None:
                return ResourceLink(name="image", uri=content.url or "", mime_type=content.mime_type)
            return McpImage(type="image", data=data, mime_type=media_type_of(content))
        case AudioContent():
            return McpAudio(type="audio", data=base64_of(content) or "", mime_type=content.mime_type)
        case PdfContent():
            name = content.name or DOCUMENT
            if (data := base64_of(content)) is None:
                return ResourceLink(name=name, uri=content.url or "", mime_type=PDF)
            uri = f"attachment:///{quote(name, safe='')}"
            return EmbeddedResource(type="resource", resource=BlobResourceContents(uri=uri, mime_type=PDF, blob=data))
        case _:
            assert_never(content)
