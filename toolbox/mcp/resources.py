"""Resources and prompts of a container: the marks `@mcp_resource` and `@mcp_prompt`, how they are read and answered.

Each is a method that runs like a tool: in its own call scope, with injected parameters, on its thread, checked for
roles. Not here: the MCP server itself (`serving`).
"""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, assert_never, overload

from pydantic_core import to_json

from ..bean_references import MCP_MARK
from ..chat import AiMessage, Message, SystemMessage, ToolExecutionResultMessage, UserMessage
from ..contents import (
    CONTENT_TYPES,
    AudioContent,
    Content,
    ImageContent,
    PdfContent,
    TextContent,
    base64_of,
    media_type_of,
)
from ..errors import Problem
from ..introspection import local_names
from ..tools.marks import ToolMark
from ..tools.results import Encoded
from ..tools.sources import Member, members_of, read_function, read_member
from ..tools.tool_calls import Tool
from .blocks import block_of

if TYPE_CHECKING:
    from mcp.shared.uri_template import UriTemplate

F = TypeVar("F", bound=Callable[..., Any])

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:.")


# --- marks


@dataclass(frozen=True, slots=True)
class ResourceMark:
    """The mark of `@mcp_resource` on a method."""

    uri: str
    name: str | None
    mime_type: str | None
    tool: ToolMark


@dataclass(frozen=True, slots=True)
class PromptMark:
    """The mark of `@mcp_prompt` on a method."""

    name: str | None
    tool: ToolMark


Mark: TypeAlias = ResourceMark | PromptMark


def mcp_resource(
    uri: str,
    *,
    name: str | None = None,
    description: str | None = None,
    mime_type: str | None = None,
    timeout: float | None = None,
) -> Callable[[F], F]:
    """Mark a method or function as a resource that MCP clients can read.

        @mcp_resource("orders://{number}/invoice")
        def invoice(self, number: int, orders: Inject[Orders]) -> PdfContent: ...

    `uri` may be a template (RFC 6570): its variables are the parameters. Return a `str`, `bytes`, contents, or a value
    that is sent as JSON; None means that there is no such resource. `description` defaults to the docstring's
    beginning, `name` to the function's name, `mime_type` to that of the value. `timeout` is in seconds.

    Values of the variables that are absolute paths, contain NUL or lead out of a folder (`..`) are refused. Raises
    `TypeError` for anything but a function, and if `uri` is not a string.
    """
    if not isinstance(uri, str):
        raise TypeError(f'@mcp_resource: expected a URI, got {uri!r}; write @mcp_resource("orders://{{number}}")')
    tool = ToolMark(description=description, timeout=timeout)
    frame = sys._getframe(1)
    return lambda target: _leave_mark(target, ResourceMark(uri, name, mime_type, tool), "@mcp_resource", frame)


@overload
def mcp_prompt(function: F, /) -> F: ...


@overload
def mcp_prompt(
    *, name: str | None = None, description: str | None = None, timeout: float | None = None
) -> Callable[[F], F]: ...


def mcp_prompt(
    function: Any = None, /, *, name: str | None = None, description: str | None = None, timeout: float | None = None
) -> Any:
    """Mark a method or function as a prompt that users of MCP clients can choose.

        @mcp_prompt
        def complaint(self, order: int, tone: str = "friendly") -> str:
            \"\"\"Answer a complaint.\"\"\"
            return f"Answer the complaint about order {order} in a {tone} tone."

    The parameters are the prompt's arguments. Return a text, a `UserMessage`, an `AiMessage` or a list of them.
    `description` defaults to the docstring's beginning, `name` to the function's name. `timeout` is in seconds. Raises
    `TypeError` for anything but a function.
    """
    mark = PromptMark(name, ToolMark(description=description, timeout=timeout))
    frame = sys._getframe(1)
    if function is not None:
        return _leave_mark(function, mark, "@mcp_prompt", frame)
    return lambda target: _leave_mark(target, mark, "@mcp_prompt", frame)


def _leave_mark(target: Any, mark: Mark, decorator: str, frame: FrameType) -> Any:
    function = getattr(target, "__func__", target)
    if not callable(function) or isinstance(target, type):
        raise TypeError(f"{decorator}: expected a function or method, got {target!r}; put it above a `def`")
    if names := local_names([function], frame):
        mark = replace(mark, tool=replace(mark.tool, local_names=names))
    setattr(target, MCP_MARK, mark)
    return target


def mark_of(member: object) -> Mark | None:
    """Return the mark of a function or method, or None."""
    mark = getattr(member, MCP_MARK, None) or getattr(getattr(member, "__func__", None), MCP_MARK, None)
    return mark if isinstance(mark, (ResourceMark, PromptMark)) else None


def _tool_mark(member: object) -> ToolMark | None:
    mark = mark_of(member)
    return None if mark is None else mark.tool


def marked_members(owner: type) -> tuple[Member, ...]:
    """Return the resources and prompts of a class and its bases."""
    return tuple(members_of(owner, _tool_mark))


# --- reading


@dataclass(frozen=True, slots=True)
class OfferedResource:
    """A resource as clients see it, and the method that reads it. `template` is None for a fixed URI."""

    uri: str
    name: str
    description: str | None
    mime_type: str | None
    template: UriTemplate | None
    tool: Tool


@dataclass(frozen=True, slots=True)
class OfferedPrompt:
    """A prompt as clients see it, and the method that writes it."""

    name: str
    description: str | None
    tool: Tool


@dataclass(frozen=True, slots=True)
class Offers:
    """The resources and prompts of an MCP server."""

    resources: list[OfferedResource] = field(default_factory=list)
    prompts: list[OfferedPrompt] = field(default_factory=list)

    def add_member(self, member: Member, bean: Any, instance: Any, problems: list[Problem]) -> None:
        """Add the resource or prompt of a class member."""
        mark = next(mark for each in member.definitions if (mark := mark_of(each)) is not None)
        self._add_offer(mark, read_member(member, bean, instance, problems), member.where, problems)

    def add_function(self, function: Any, problems: list[Problem]) -> None:
        """Add the resource or prompt of a function."""
        mark = mark_of(function)
        assert mark is not None
        tool = read_function(function, problems, mark.tool)
        self._add_offer(mark, tool, str(getattr(function, "__name__", function)), problems)

    def _add_offer(self, mark: Mark, tool: Tool | None, where: str, problems: list[Problem]) -> None:
        if tool is None:
            return
        tool = replace(tool, where=where, encode=_keep_value)
        about = tool.specification.description
        match mark:
            case ResourceMark(uri, name, mime_type):
                found = list(_resource_problems(mark, tool, where))
                problems += found
                if not found:
                    name = name or tool.specification.name
                    self.resources.append(OfferedResource(uri, name, about, mime_type, _parse_template(uri), tool))
            case PromptMark(name):
                self.prompts.append(OfferedPrompt(name or tool.specification.name, about, tool))
            case _:
                assert_never(mark)

    def clashes(self, where: str) -> Iterator[Problem]:
        """Yield a problem for each URI or name that occurs twice."""
        for kind, names in (
            ("resources have the URI", [(each.uri, each.tool.where) for each in self.resources]),
            ("prompts have the name", [(each.name, each.tool.where) for each in self.prompts]),
        ):
            places: dict[str, list[str]] = {}
            for name, place in names:
                places.setdefault(name, []).append(place)
            for name, found in places.items():
                if len(found) > 1:
                    yield Problem(where, f"{len(found)} {kind} {name!r}: {', '.join(found)}", "change one of them")

    def resource(self, uri: str) -> tuple[OfferedResource, Mapping[str, Any]] | None:
        """Return the resource with this URI, and the values of the variables in its template."""
        for each in self.resources:
            if each.template is None and each.uri == uri:
                return each, {}
        for each in self.resources:
            if each.template is not None and (values := each.template.match(uri)) is not None:
                return None if any(map(_is_unsafe, values.values())) else (each, values)
        return None


def _keep_value(value: Any) -> Encoded:
    return Encoded("", value)


def _parse_template(uri: str) -> UriTemplate | None:
    from mcp.shared.uri_template import UriTemplate

    return UriTemplate.parse(uri) if UriTemplate.is_template(uri) else None


def _resource_problems(mark: ResourceMark, tool: Tool, where: str) -> Iterator[Problem]:
    """Yield what is wrong with the URI of a resource, and where it does not fit the parameters."""
    from mcp.shared.uri_template import InvalidUriTemplate

    if not _SCHEME.match(mark.uri):
        yield Problem(where, f"{mark.uri!r} is not a URI", "begin with a scheme, such as orders://")
        return
    try:
        template = _parse_template(mark.uri)
    except InvalidUriTemplate as error:
        yield Problem(where, f"{mark.uri!r} is not a valid URI template: {error}", "correct the template (RFC 6570)")
        return
    variables = [] if template is None else template.variable_names
    parameters = tool.specification.parameters
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    for name in variables:
        if name not in properties:
            yield Problem(where, f"the URI has {{{name}}}, but no parameter has this name", f"add `{name}: str`")
    for name in properties:
        if name not in variables and name in required:
            yield Problem(where, f"parameter {name!r} is not in the URI {mark.uri!r}", f"add {{{name}}} to the URI")
    for name in frozenset() if template is None else template.query_variable_names:
        if name in required:
            fix = f"give it a default: `{name}: str = …`"
            yield Problem(where, f"parameter {name!r} is in the query, which clients may leave out", fix)


def _is_unsafe(value: str | Sequence[str]) -> bool:
    from mcp.shared.path_security import contains_path_traversal, is_absolute_path

    values = [value] if isinstance(value, str) else value
    return any("\0" in each or contains_path_traversal(each) or is_absolute_path(each) for each in values)


# --- answers


def list_of_resources(resources: Sequence[OfferedResource]) -> Any:
    """Return the answer to `resources/list`."""
    from mcp_types import ListResourcesResult, Resource

    return ListResourcesResult(
        resources=[
            Resource(name=each.name, uri=each.uri, description=each.description, mime_type=each.mime_type)
            for each in resources
            if each.template is None
        ]
    )


def list_of_templates(resources: Sequence[OfferedResource]) -> Any:
    """Return the answer to `resources/templates/list`."""
    from mcp_types import ListResourceTemplatesResult, ResourceTemplate

    return ListResourceTemplatesResult(
        resource_templates=[
            ResourceTemplate(
                name=each.name, uri_template=each.uri, description=each.description, mime_type=each.mime_type
            )
            for each in resources
            if each.template is not None
        ]
    )


def list_of_prompts(prompts: Sequence[OfferedPrompt]) -> Any:
    """Return the answer to `prompts/list`."""
    from mcp_types import ListPromptsResult, Prompt, PromptArgument

    found = []
    for each in prompts:
        schema = each.tool.specification.parameters
        required = schema.get("required", [])
        arguments = [
            PromptArgument(name=name, description=about.get("description"), required=name in required)
            for name, about in schema.get("properties", {}).items()
        ]
        found.append(Prompt(name=each.name, description=each.description, arguments=arguments))
    return ListPromptsResult(prompts=found)


def resource_answer(resource: OfferedResource, uri: str, value: Any) -> Any:
    """Return the answer to `resources/read`. Raises `ValueError` for contents that have only a URL."""
    from mcp_types import ReadResourceResult

    values = value if isinstance(value, (list, tuple)) and any(map(_is_content, value)) else [value]
    return ReadResourceResult(contents=[_make_part(uri, each, resource.mime_type) for each in values])


def _make_part(uri: str, value: Any, mime_type: str | None) -> Any:
    from mcp_types import BlobResourceContents, TextResourceContents

    if _is_content(value):
        return _make_content_part(uri, value, mime_type)
    if isinstance(value, str):
        return TextResourceContents(uri=uri, mime_type=mime_type or "text/plain", text=value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        blob = base64.b64encode(value).decode()
        return BlobResourceContents(uri=uri, mime_type=mime_type or "application/octet-stream", blob=blob)
    text = to_json(value, inf_nan_mode="null").decode()
    return TextResourceContents(uri=uri, mime_type=mime_type or "application/json", text=text)


def _make_content_part(uri: str, content: Content, mime_type: str | None) -> Any:
    from mcp_types import BlobResourceContents, TextResourceContents

    match content:
        case TextContent(text):
            return TextResourceContents(uri=uri, mime_type=mime_type or "text/plain", text=text)
        case ImageContent() | PdfContent() | AudioContent():
            if (data := base64_of(content)) is None:
                raise ValueError(f"a resource cannot be the {type(content).__name__} of a URL; return its data")
            return BlobResourceContents(uri=uri, mime_type=mime_type or media_type_of(content), blob=data)
        case _:
            assert_never(content)


def _is_content(value: object) -> bool:
    return isinstance(value, CONTENT_TYPES)


def prompt_answer(prompt: OfferedPrompt, value: Any) -> Any:
    """Return the answer to `prompts/get`. Raises `TypeError` for values that are not messages."""
    from mcp_types import GetPromptResult

    values = value if isinstance(value, (list, tuple)) else [value]
    messages = [part for each in values for part in _make_prompt_messages(each)]
    return GetPromptResult(description=prompt.description, messages=messages)


def _make_prompt_messages(value: Any) -> Iterator[Any]:
    from mcp_types import PromptMessage

    message: Message = UserMessage(value) if isinstance(value, str) or _is_content(value) else value
    role: Literal["user", "assistant"]
    parts: Sequence[Content]
    match message:
        case UserMessage(contents):
            role, parts = "user", contents
        case AiMessage(text):
            role, parts = "assistant", [TextContent(text or "")]
        case SystemMessage() | ToolExecutionResultMessage():
            raise TypeError(f"a prompt cannot contain a {type(message).__name__}; MCP has user and assistant messages")
        case _:
            raise TypeError(f"expected a string or a message, got {type(value).__name__}")
    for part in parts:
        yield PromptMessage(role=role, content=block_of(part))
