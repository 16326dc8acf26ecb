"""Encoding that both wires share: JSON bytes, names, tools, images.

Not here: the format of messages (`chat_wire`, `responses_wire`).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, assert_never

from pydantic_core import PydanticSerializationError, to_json

from ..chat import ChatRequest, Content, ImageContent, TextContent, ToolSpecification
from ..json_text import compact_json
from ..schemas import strict_output, strict_parameters

Fields: TypeAlias = dict[str, bytes]
"""The top-level fields of a request, each value as JSON."""

_ILLEGAL = re.compile(r"[^a-zA-Z0-9_-]")
_KEPT_TOOL_SETS = 64


def json_bytes(value: object) -> bytes:
    """Return compact JSON. Raises `ValueError` or `TypeError` for values that JSON does not support."""
    try:
        return to_json(value, fallback=_plain)
    except PydanticSerializationError:
        return compact_json(value).encode()


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def joined(fields: Fields) -> bytes:
    """Return the body of a request."""
    return b"{" + b",".join([b'"%s":%s' % (name.encode(), value) for name, value in fields.items()]) + b"}"


def offers_tools(request: ChatRequest) -> bool:
    """Return True if the request has tools: the program's, or server-side tools in `parameters`."""
    return bool(request.tool_specifications or request.parameters.get("tools"))


def is_any(request: ChatRequest) -> bool:
    """Return True if the tool choice is `any` (Mistral's word for `required`) and not the name of a tool."""
    return request.tool_choice == "any" and all(each.name != "any" for each in request.tool_specifications)


def function_name(name: str) -> str:
    """Return a name that servers accept in a history. A name invented by a model may contain any characters."""
    return _ILLEGAL.sub("_", name.strip())[:64] or "unknown"


def strict_tool(schema: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return a tool's parameters and True if they have a strict form, else unchanged and False."""
    form = strict_parameters(schema)
    return (dict(schema), False) if form is None else (form, True)


def strict_answer(schema: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the schema of a reply and True if it has a strict form, else unchanged and False."""
    form = strict_output(schema)
    return (dict(schema), False) if form is None else (form, True)


class ToolBytes:
    """Caches the JSON list of tools by the identity of their tuple, which a service reuses for every call."""

    def __init__(self, encode: Callable[[ToolSpecification], bytes]) -> None:
        self._encode = encode
        self._kept: OrderedDict[int, tuple[Sequence[ToolSpecification], bytes]] = OrderedDict()

    def of(self, tools: Sequence[ToolSpecification]) -> bytes:
        """Return the tools as a JSON list."""
        kept = self._kept.get(id(tools))
        if kept is not None and kept[0] is tools:
            return kept[1]
        form = b"[" + b",".join([each.encoded_by(self._encode, each) for each in tools]) + b"]"
        self._kept[id(tools)] = (tools, form)
        if len(self._kept) > _KEPT_TOOL_SETS:
            self._kept.popitem(last=False)
        return form


# --- images

_SIGNATURES = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
)


def images_of(contents: Iterable[Content]) -> list[ImageContent]:
    """Return the images among `contents`."""
    images: list[ImageContent] = []
    for each in contents:
        match each:
            case ImageContent():
                images.append(each)
            case TextContent():
                pass
            case _:
                assert_never(each)
    return images


def data_url(image: ImageContent) -> str:
    """Return the image's URL, or its bytes as a data URL."""
    if image.url is not None:
        return image.url
    data = image.data or b""
    text = base64.b64encode(data).decode() if isinstance(data, bytes) else "".join(data.split())
    if text.startswith("data:"):
        return text
    return f"data:{image.mime_type or _mime_type(text)};base64,{text}"


def _mime_type(text: str) -> str:
    try:
        head = base64.b64decode(text[:32])
    except binascii.Error:
        head = b""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    return next((mime for signature, mime in _SIGNATURES if head.startswith(signature)), "image/png")
