"""A container's tools as an MCP server: over stdio, or for a web framework to mount.

Each call has its own request scope. Not here: mounting it in FastAPI (`toolbox_fastapi`), MCP servers as tools of
services (`offering`), what a tool returns as structured content (`structured`).
"""

from __future__ import annotations

import base64
import inspect
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, assert_never

from ..chat import Content, ImageContent, TextContent, ToolExecutionRequest, ToolExecutionResultMessage
from ..container import Container, internals_of
from ..context import InvocationContext
from ..errors import IllegalConfigurationError, Problem, ToolAbort
from ..execution import non_blocking
from ..json_text import compact_json
from ..tools.failures import ToolErrors, hide_details, return_to_model
from ..tools.members import Member, members_of, read_member
from ..tools.pipeline import Tool
from ..tools.sources import bean_types, clashes, read_tools
from .structured import StructuredOutput

if TYPE_CHECKING:
    from mcp.server import Server

logger = logging.getLogger("toolbox.mcp")

INTERNAL_ERROR = -32603


class McpEndpoint:
    """What `InvocationContext.service` is in a tool that an MCP client called."""


@dataclass(frozen=True, slots=True)
class ToolMember:
    """One tool of a class: `Orders.find` as (`Orders`, `"find"`)."""

    owner: type
    attribute: str


def mcp_server_of(container: Container, tools: Iterable[Any], name: str = "toolbox") -> Server[Any]:
    """Return an `mcp.server.Server` that offers `tools`.

    `tools` are classes, functions, instances, services, and single tools of them, such as `Orders.find`. Call it before
    the container starts, so that classes among the tools become beans; the server's calls need the started container.
    Raises `IllegalConfigurationError` for what is not a tool.
    """
    from mcp.server import Server

    where = f"MCP server {name!r}"
    sources = tuple(_with_owner(each, container) for each in tools)
    read: list[Tool] = []
    problems: list[Problem] = []
    for source in sources:
        read += _read(source, where, problems)
    problems += clashes(read, where)
    if problems:
        raise IllegalConfigurationError(problems)
    beans = bean_types([each.owner if isinstance(each, ToolMember) else each for each in sources])
    container.register(*(each for each in dict.fromkeys(beans) if not internals_of(container).knows(each)))
    handlers = _Handlers(container, read)
    return Server(name, on_list_tools=handlers.list_tools, on_call_tool=handlers.call_tool)


async def serve_stdio(container: Container, tools: Iterable[Any], name: str = "toolbox") -> None:
    """Serve the tools on standard input and output until the client leaves; starts and stops the container.

    What the program prints meanwhile goes to standard error. `tools` are those of `mcp_server_of`.
    """
    from mcp.server.stdio import stdio_server

    server = mcp_server_of(container, tools, name)
    async with stdio_server() as (reading, writing):
        with redirect_stdout(sys.stderr):
            async with container:
                await server.run(reading, writing, server.create_initialization_options())


# --- single tools of a class


def _read(source: Any, where: str, problems: list[Problem]) -> Sequence[Tool]:
    if not isinstance(source, ToolMember):
        tools, found = read_tools([source], where)
        problems += found
        return tools
    member = _member_of(source.owner, source.attribute)
    if member is None:
        fact = f"{source.owner.__name__}.{source.attribute} is not a tool"
        problems.append(Problem(where, fact, "mark the method with @tool"))
        return ()
    tool = read_member(member, source.owner, None, problems)
    return () if tool is None else (tool,)


def _member_of(owner: type, attribute: str) -> Member | None:
    return next((each for each in members_of(owner) if each.attribute == attribute), None)


def _with_owner(source: Any, container: Container) -> Any:
    """Return a method that was named through its class as the member of that class; anything else as it is."""
    if not inspect.isfunction(source) or "." not in source.__qualname__.rpartition("<locals>.")[2]:
        return source
    for owner in (*_beans_with(source, container), *_classes_with(source)):
        member = _member_of(owner, source.__name__)
        if member is not None and member.function is source and member.bound_to == "instance":
            return ToolMember(owner, member.attribute)
    return source


def _beans_with(function: Any, container: Container) -> Iterator[type]:
    """The bean class that has this method, if there is one only: it may have inherited it."""
    if container.is_started:
        return
    found = [
        each for each in internals_of(container).tool_beans() if getattr(each, function.__name__, None) is function
    ]
    if len(found) == 1:
        yield found[0]


def _classes_with(function: Any) -> Iterator[type]:
    """The class in whose body a function stands; also one that is defined in a function, which no module names."""
    name = function.__qualname__.rpartition(".")[0]
    found: Any = sys.modules.get(function.__module__)
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type):
        yield found
    waiting: list[type[Any]] = [object]
    seen: set[type[Any]] = set()
    while waiting:
        below: list[type[Any]] = type.__subclasses__(waiting.pop())
        for each in below:
            if each not in seen:
                seen.add(each)
                waiting.append(each)
                if each.__qualname__ == name and each.__module__ == function.__module__:
                    yield each


# --- requests


class _Handlers:
    """Answers a client's requests."""

    def __init__(self, container: Container, tools: Sequence[Tool]) -> None:
        self._container = container
        self._tools = {tool.specification.name: tool for tool in tools}
        self._outputs = {name: StructuredOutput.of(tool) for name, tool in self._tools.items()}

    def _output_of(self, name: str) -> StructuredOutput | None:
        """The structured form of a tool's results; None without one, and for results that may be cut."""
        limit = self._tools[name].max_result_chars or internals_of(self._container).host.limits.max_result_chars
        return self._outputs[name] if limit is None else None

    async def list_tools(self, context: Any, params: Any) -> Any:
        from mcp_types import ListToolsResult
        from mcp_types import Tool as McpTool

        offered = []
        for each in (tool.specification for tool in self._tools.values()):
            output = self._output_of(each.name)
            offered.append(
                McpTool(
                    name=each.name,
                    description=each.description,
                    input_schema=dict(each.parameters),
                    output_schema=None if output is None else output.schema,
                )
            )
        return ListToolsResult(tools=offered)

    async def call_tool(self, context: Any, params: Any) -> Any:
        from mcp import MCPError

        request = ToolExecutionRequest(str(context.request_id), params.name, compact_json(params.arguments or {}))
        host = internals_of(self._container).host
        failures = ToolErrors(
            on_unknown_tool=return_to_model,
            on_tool_arguments_error=_argument_faults,
            # The message of an exception may hold a password or a path, and the client is somebody else's program.
            on_tool_execution_error=host.failures.on_tool_execution_error or hide_details,
        )
        try:
            async with self._container.request_scope():
                outcome = await host.execute(self._tools, request, McpEndpoint, failures)
        except ToolAbort as error:
            return _answer(ToolExecutionResultMessage.of(request, str(error)), None, failed=True)
        except Exception as error:
            # What the program says about itself, and what fails around a tool, is for its maintainer, not the client.
            logger.exception("tool %r could not be run", params.name)
            raise MCPError(INTERNAL_ERROR, "the tool could not be run") from error
        message = outcome.message
        output = None if message.is_error or params.name not in self._tools else self._output_of(params.name)
        structured = None
        if output is not None:
            try:
                structured = output.value(outcome.execution.result_object)
            except Exception:  # whatever a value's own serializers raise
                logger.exception("tool %r returned a value that does not match its return annotation", params.name)
                text = f"The tool {params.name!r} failed."
                return _answer(ToolExecutionResultMessage.of(request, text), None, failed=True)
        return _answer(message, structured, failed=message.is_error)


@non_blocking
def _argument_faults(error: Exception, context: InvocationContext) -> str:
    """Tell the client what is wrong with its arguments, unless a program's validator failed for another reason."""
    if error.__cause__ is None or isinstance(error.__cause__, (ValueError, TypeError)):
        return return_to_model(error, context)
    return hide_details(error.__cause__ if isinstance(error.__cause__, Exception) else error, context)


def _answer(message: ToolExecutionResultMessage, structured: Any, *, failed: bool) -> Any:
    from mcp_types import CallToolResult

    content = [_block(each) for each in message.contents or (TextContent(message.text),)]
    return CallToolResult(content=content, structured_content=structured, is_error=failed)


def _block(content: Content) -> Any:
    from mcp_types import ImageContent as McpImage
    from mcp_types import ResourceLink
    from mcp_types import TextContent as McpText

    match content:
        case TextContent(text):
            return McpText(type="text", text=text)
        case ImageContent(data=None):
            return ResourceLink(name="image", uri=content.url or "", mime_type=content.mime_type)
        case ImageContent():
            data = base64.b64encode(content.data).decode() if isinstance(content.data, bytes) else content.data
            return McpImage(type="image", data=data or "", mime_type=content.mime_type or "image/png")
        case _:
            assert_never(content)
