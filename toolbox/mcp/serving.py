"""A container's tools as an MCP server, over stdio or mounted in a web framework. Each call has its own request scope.

Not here: mounting the server in FastAPI (`toolbox_fastapi`), tools of other MCP servers in services (`servers`).
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args, get_origin

from ..chat import ToolExecutionRequest, ToolExecutionResult, ToolExecutionResultMessage
from ..container import Container, internals_of
from ..contents import CONTENT_TYPES, TextContent
from ..context import InvocationContext
from ..errors import IllegalConfigurationError, Problem, ToolAbort
from ..execution.markers import non_blocking
from ..json_text import compact_json
from ..signatures import EMPTY, Unresolved
from ..tools.codec import awaited
from ..tools.failures import ToolErrors, hide_details, return_to_model
from ..tools.members import Member, members_of, read_member
from ..tools.pipeline import Tool
from ..tools.sources import bean_types, clashes, read_tools
from .blocks import block_of

if TYPE_CHECKING:
    from mcp.server import Server
    from pydantic import TypeAdapter

logger = logging.getLogger("toolbox.mcp")

INTERNAL_ERROR = -32603


class McpEndpoint:
    """The value of `InvocationContext.service` when an MCP client calls a tool."""


@dataclass(frozen=True, slots=True)
class ToolMember:
    """One tool of a class: `Orders.find` as (`Orders`, `"find"`)."""

    owner: type
    attribute: str


def mcp_server_of(container: Container, tools: Iterable[Any], name: str = "toolbox") -> Server[Any]:
    """Return an `mcp.server.Server` that offers `tools`.

        server = mcp_server_of(container, [Orders, Stock.count])

    `tools` are classes, functions, instances, services, or single tools such as `Orders.find`. `name` is the server's
    name for clients. Call this function before the container starts, because classes in `tools` become beans; tool
    calls need the started container. Raises `IllegalConfigurationError` if an item is not a tool.
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
    """Serve the tools on standard input and output until the client disconnects.

        asyncio.run(serve_stdio(Container(), [Calculator]))

    Starts and stops the container. `tools` are the same as for `mcp_server_of`. Output of `print` goes to standard
    error, because standard output belongs to the client.
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
    """Return `Orders.find`, which is a plain function, as a `ToolMember` of its class; other sources unchanged."""
    if not inspect.isfunction(source) or "." not in source.__qualname__.rpartition("<locals>.")[2]:
        return source
    for owner in (*_beans_with(source, container), *_classes_with(source)):
        member = _member_of(owner, source.__name__)
        if member is not None and member.function is source and member.bound_to == "instance":
            return ToolMember(owner, member.attribute)
    return source


def _beans_with(function: Any, container: Container) -> Iterator[type]:
    """Yield the bean class that has this method, possibly inherited, if there is exactly one."""
    if container.is_started:
        return
    found = [
        each for each in internals_of(container).tool_beans() if getattr(each, function.__name__, None) is function
    ]
    if len(found) == 1:
        yield found[0]


def _classes_with(function: Any) -> Iterator[type]:
    """Yield the class that defines a method; includes classes inside functions, which no module attribute names."""
    name = function.__qualname__.rpartition(".")[0]
    found: Any = sys.modules.get(function.__module__)
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type):
        yield found
    pending: list[type[Any]] = [object]
    seen: set[type[Any]] = set()
    while pending:
        subclasses: list[type[Any]] = type.__subclasses__(pending.pop())
        for each in subclasses:
            if each not in seen:
                seen.add(each)
                pending.append(each)
                if each.__qualname__ == name and each.__module__ == function.__module__:
                    yield each


# --- requests


class _Handlers:
    """Answers the requests of MCP clients."""

    def __init__(self, container: Container, tools: Sequence[Tool]) -> None:
        self._container = container
        self._tools = {tool.specification.name: tool for tool in tools}
        self._outputs = {name: StructuredOutput.of(tool) for name, tool in self._tools.items()}

    def _output_of(self, name: str) -> StructuredOutput | None:
        """Return the structured output of a tool; None if it has none or if its results can be truncated."""
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
            on_tool_arguments_error=_argument_errors,
            # Exception messages can contain passwords and paths, and the client is a foreign program.
            on_tool_execution_error=host.failures.on_tool_execution_error or hide_details,
        )
        try:
            async with self._container.request_scope():
                outcome = await host.execute(self._tools, request, McpEndpoint, failures)
        except ToolAbort as error:
            return _answer(ToolExecutionResultMessage.of(request, str(error)), None, failed=True)
        except Exception as error:
            # Failures of scopes, wiring or the framework: details are for the maintainer, not for the client.
            logger.exception("could not run tool %r", params.name)
            raise MCPError(INTERNAL_ERROR, "could not run the tool") from error
        message = outcome.message
        output = None if message.is_error or params.name not in self._tools else self._output_of(params.name)
        structured = None
        if output is not None:
            try:
                structured = output.value(outcome.execution.result_object)
            except Exception:  # serializers of user types can raise anything
                logger.exception("tool %r returned a value that does not match its return annotation", params.name)
                text = f"The tool {params.name!r} failed."
                return _answer(ToolExecutionResultMessage.of(request, text), None, failed=True)
        return _answer(message, structured, failed=message.is_error)


@non_blocking
def _argument_errors(error: Exception, context: InvocationContext) -> str:
    """Return what is wrong with the arguments; hide the details if a validator of the program failed unexpectedly."""
    if error.__cause__ is None or isinstance(error.__cause__, (ValueError, TypeError)):
        return return_to_model(error, context)
    return hide_details(error.__cause__ if isinstance(error.__cause__, Exception) else error, context)


def _answer(message: ToolExecutionResultMessage, structured: Any, *, failed: bool) -> Any:
    from mcp_types import CallToolResult

    content = [block_of(each) for each in message.contents or (TextContent(message.text),)]
    return CallToolResult(content=content, structured_content=structured, is_error=failed)


# --- structured content


# Types without structured content: plain text needs no schema, and the others already define what the model reads.
_TEXT_TYPES = (str, None, type(None), Any, object, EMPTY)
_CONTENT_TYPES = (*CONTENT_TYPES, ToolExecutionResult)
_DEFINITIONS = "#/$defs/"
_WRAPPER_FIELD = "result"


class StructuredOutput:
    """Output schema and structured content of one tool.

    MCP requires an object: any other value is wrapped as `{"result": …}`.
    """

    def __init__(self, adapter: TypeAdapter[Any], schema: dict[str, Any]) -> None:
        from jsonschema.validators import Draft202012Validator  # type: ignore[import-untyped]  # no type hints

        schema = _resolve_root(schema)
        self._is_wrapped = schema.get("type") != "object"
        if self._is_wrapped:
            definitions = schema.pop("$defs", None)
            schema = {"type": "object", "properties": {_WRAPPER_FIELD: schema}, "required": [_WRAPPER_FIELD]}
            if definitions is not None:
                schema["$defs"] = definitions
        self.schema = schema
        self._serializer: Any = adapter.serializer
        self._validator = Draft202012Validator(schema)

    @classmethod
    def of(cls, tool: Tool) -> StructuredOutput | None:
        """Return the structured output for a tool's return annotation, or None if a text is enough."""
        from pydantic import TypeAdapter

        returns = awaited(tool.returns)
        if hasattr(get_origin(returns) or returns, "__tool_value__"):  # `Result[T]` counts as T
            (returns,) = get_args(returns) or (EMPTY,)
        if isinstance(returns, Unresolved) or returns in _TEXT_TYPES or any(map(_is_content, _nested_types(returns))):
            return None
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(returns)
            return cls(adapter, adapter.json_schema(mode="serialization"))
        except Exception:  # pydantic does not support the type or has no schema for it: send text only
            return None

    def value(self, value: Any) -> dict[str, Any]:
        """Return a value as structured content. Raises if it does not match the schema."""
        encoded = self._serializer.to_json(value, warnings=False, by_alias=True, polymorphic_serialization=True)
        plain = json.loads(encoded)
        structured: dict[str, Any] = {_WRAPPER_FIELD: plain} if self._is_wrapped else plain
        self._validator.validate(structured)
        return structured


def _nested_types(annotation: Any) -> Iterator[Any]:
    yield annotation
    for each in get_args(annotation):
        yield from _nested_types(each)


def _is_content(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, _CONTENT_TYPES)


def _resolve_root(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace a reference at the schema's root, as recursive types have, by the definition."""
    reference = schema.get("$ref", "")
    if not reference.startswith(_DEFINITIONS):
        return dict(schema)
    definitions = schema["$defs"]
    return {**definitions[reference.removeprefix(_DEFINITIONS)], "$defs": definitions}
