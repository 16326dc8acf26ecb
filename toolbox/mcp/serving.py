"""A container's tools as an MCP server, over stdio or mounted in a web framework. Each call has its own request scope.

Not here: reading what is offered (`served_sources`), mounting the server in FastAPI (`toolbox_fastapi`), tools of other
MCP servers in services (`server_tools`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, redirect_stdout, suppress
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from ..chat import ToolExecutionRequest, ToolExecutionResultMessage, ToolProgress
from ..container import Container, internals_of
from ..contents import TextContent
from ..context import InvocationContext
from ..errors import IllegalConfigurationError, Problem, RunSuspendedError, ToolAbort
from ..execution.markers import non_blocking
from ..hosts.bean_checks import identity_problems, is_restricted, reference_problems
from ..json_text import compact_json
from ..safe_text import brief
from ..schemas import with_properties
from ..security import caller_seeds, identity_in
from ..services.implied_beans import named_beans
from ..services.method_marks import named_at_tool
from ..tools.failures import ToolErrors, hide_details, return_to_model
from ..tools.sources import bean_types, clashes
from ..tools.tool_calls import Tool
from .blocks import block_of
from .error_codes import INTERNAL_ERROR, INVALID_PARAMS
from .resources import (
    OfferedPrompt,
    OfferedResource,
    Offers,
    list_of_prompts,
    list_of_resources,
    list_of_templates,
    prompt_answer,
    resource_answer,
)
from .served_sources import ToolMember, has_bean_offers, read_source, with_owner
from .structured_output import StructuredOutput

if TYPE_CHECKING:
    from mcp.server import Server

    from ..di.graph import BeanGraph

logger = logging.getLogger("toolbox.mcp")

Offer = TypeVar("Offer")

MAX_WAITING_PROGRESS = 100
"""Reports of progress that wait for a slow client; older ones are dropped."""


class McpEndpoint:
    """The value of `InvocationContext.service` when an MCP client calls a tool."""


def mcp_server_of(container: Container, tools: Iterable[Any], name: str = "toolbox") -> Server[Any]:
    """Return an `mcp.server.Server` that offers `tools`, with the resources and prompts of the same classes.

        server = mcp_server_of(container, [Orders, Stock.count])

    `tools` are classes, functions, instances, services, or single tools such as `Orders.find`. Methods of them that are
    marked with `@mcp_resource` or `@mcp_prompt` are offered too. `name` is the server's name for clients. Call this
    function before the container starts, because classes in `tools` become beans; calls need the started container.
    Raises `IllegalConfigurationError` if an item has nothing to offer.
    """
    from mcp.server import Server

    where = f"MCP server {name!r}"
    sources = tuple(with_owner(each, container) for each in tools)
    read: list[Tool] = []
    offers = Offers()
    problems: list[Problem] = []
    for source in sources:
        read += read_source(source, offers, where, problems)
    problems += clashes(read, where)
    problems += offers.clashes(where)
    problems += _approval_problems(read)
    if problems:
        raise IllegalConfigurationError(problems)
    owners = [each.owner if isinstance(each, ToolMember) else each for each in sources]
    beans = dict.fromkeys((*bean_types(owners), *filter(has_bean_offers, owners)))
    if unknown := [each for each in beans if not internals_of(container).knows(each)]:
        container.register(*unknown)
    if not container.is_started:
        served = (*read, *(each.tool for each in offers.resources), *(each.tool for each in offers.prompts))
        restricted = [each.where for each in served if is_restricted(each)]
        internals_of(container).add_check(lambda graph: identity_problems(graph, restricted))
        named = tuple(named_beans(owners))
        internals_of(container).add_implied(lambda: named)
        internals_of(container).add_check(lambda graph: _reference_problems(read, graph))
    handlers = _Handlers(container, read, offers)
    more: dict[str, Any] = {}
    if read or not (offers.resources or offers.prompts):
        more |= {"on_list_tools": handlers.list_tools, "on_call_tool": handlers.call_tool}
    if offers.resources:
        more |= {
            "on_list_resources": handlers.list_resources,
            "on_list_resource_templates": handlers.list_templates,
            "on_read_resource": handlers.read_resource,
        }
    if offers.prompts:
        more |= {"on_list_prompts": handlers.list_prompts, "on_get_prompt": handlers.get_prompt}
    return Server(name, **more)


def _reference_problems(tools: Iterable[Tool], graph: BeanGraph) -> Iterator[Problem]:
    """Yield problems with the interceptors and guardrails that decorators name at the tools."""
    for each in tools:
        yield from reference_problems(named_at_tool(each), graph)


def _approval_problems(tools: Iterable[Tool]) -> Iterator[Problem]:
    """Yield a problem for each tool that a client could call without the approval that it needs."""
    for each in tools:
        if each.requires_approval is not False:
            fix = "leave it out, or serve an AI service that offers it"
            yield Problem(each.where, "needs approval, which MCP clients cannot give", fix)


def served_tools(container: Container, tools: Iterable[Any]) -> tuple[Tool, ...]:
    """Return the tools that a server with these sources offers."""
    return tuple(tool for each in tools for tool in read_source(with_owner(each, container), Offers(), "", []))


def reports_progress(tools: Iterable[Any], container: Container) -> bool:
    """Return True if one of `tools`, or of their resources and prompts, reports its progress to clients."""
    offers = Offers()
    found = [tool for each in tools for tool in read_source(with_owner(each, container), offers, "", [])]
    found += [each.tool for each in offers.resources]
    found += [each.tool for each in offers.prompts]
    return any(each.progress_names for each in found)


async def serve_stdio(container: Container, tools: Iterable[Any], name: str = "toolbox") -> None:
    """Serve the tools on standard input and output until the client disconnects.

        asyncio.run(serve_stdio(Container(), [Calculator]))

    Starts and stops the container. `tools` are the same as for `mcp_server_of`. Output of `print` goes to standard
    error, because standard output belongs to the client. Raises `IllegalConfigurationError` with all problems before
    anything is read from the client.
    """
    from mcp.server.stdio import stdio_server

    server = mcp_server_of(container, tools, name)
    with redirect_stdout(sys.stderr):
        # Here, because inside the block below the error would be in an `ExceptionGroup`, and wait for a line of input.
        if problems := container.check():
            raise IllegalConfigurationError(problems)
    async with stdio_server() as (reading, writing):
        with redirect_stdout(sys.stderr):
            async with container:
                await server.run(reading, writing, server.create_initialization_options())


# --- requests


class _Handlers:
    """Answers the requests of MCP clients."""

    def __init__(self, container: Container, tools: Sequence[Tool], offers: Offers) -> None:
        self._container, self._offers = container, offers
        self._tools = {tool.specification.name: tool for tool in tools}
        self._outputs = {name: StructuredOutput.of(tool) for name, tool in self._tools.items()}

    def _choose_output(self, name: str) -> StructuredOutput | None:
        """Return the structured output of a tool; None if it has none, or if its results can be cut or replaced."""
        tool = self._tools[name]
        limit = tool.max_result_chars or internals_of(self._container).host.limits.max_result_chars
        is_guarded = bool(tool.named_by("tool_output_guardrails"))
        return self._outputs[name] if limit is None and not is_guarded else None

    async def list_tools(self, context: Any, params: Any) -> Any:
        from mcp_types import ListToolsResult
        from mcp_types import Tool as McpTool

        offered = []
        async with self._container.request_scope(caller_seeds()):
            tools = await self._choose_allowed(self._tools.values(), _same)
        for each in (tool.specification for tool in tools):
            output = self._choose_output(each.name)
            offered.append(
                McpTool(
                    name=each.name,
                    description=each.description,
                    input_schema=with_properties(each.parameters),
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
            on_tool_arguments_error=_describe_argument_errors,
            # Exception messages can contain passwords and paths, and the client is a foreign program.
            on_tool_execution_error=host.failures.on_tool_execution_error or hide_details,
        )
        try:
            async with (
                self._container.request_scope(caller_seeds()) as scope,
                _report_progress(context, self._tools.get(params.name)) as on_progress,
            ):
                # A tool that the identity may not call is an unknown tool, and no error names it.
                outcome = await host.execute(
                    scope, self._tools, request, McpEndpoint, failures, on_progress=on_progress
                )
        except ToolAbort as error:
            return _make_tool_answer(ToolExecutionResultMessage.of(request, str(error)), None, failed=True)
        except Exception as error:
            if (waiting := _describe_waiting_run(error)) is not None:
                # A client rejects a result that lacks the content of its output schema, except if it is an error.
                has_schema = self._choose_output(params.name) is not None
                return _make_tool_answer(ToolExecutionResultMessage.of(request, waiting), None, failed=has_schema)
            # Failures of scopes, wiring or the framework: details are for the maintainer, not for the client.
            logger.exception("could not run tool %r", params.name)
            raise MCPError(INTERNAL_ERROR, "could not run the tool") from error
        message = outcome.message
        output = None if message.is_error or params.name not in self._tools else self._choose_output(params.name)
        structured = None
        if output is not None:
            try:
                structured = output.value(outcome.execution.result_object)
            except Exception:  # serializers of user types can raise anything
                logger.exception("tool %r returned a value that does not match its return annotation", params.name)
                text = f"The tool {params.name!r} failed."
                return _make_tool_answer(ToolExecutionResultMessage.of(request, text), None, failed=True)
        return _make_tool_answer(message, structured, failed=message.is_error)

    # --- resources and prompts

    async def _choose_allowed(self, offers: Iterable[Offer], tool_of: Callable[[Offer], Tool]) -> list[Offer]:
        """Return what the identity of the current request scope may use."""
        found = list(offers)
        if all(tool_of(each).access is None for each in found):
            return found
        identity = await identity_in(internals_of(self._container))
        return [each for each in found if (access := tool_of(each).access) is None or access.allows(identity)]

    async def list_resources(self, context: Any, params: Any) -> Any:
        async with self._container.request_scope(caller_seeds()):
            return list_of_resources(await self._choose_allowed(self._offers.resources, _tool_of_resource))

    async def list_templates(self, context: Any, params: Any) -> Any:
        async with self._container.request_scope(caller_seeds()):
            return list_of_templates(await self._choose_allowed(self._offers.resources, _tool_of_resource))

    async def list_prompts(self, context: Any, params: Any) -> Any:
        async with self._container.request_scope(caller_seeds()):
            return list_of_prompts(await self._choose_allowed(self._offers.prompts, _tool_of_prompt))

    async def read_resource(self, context: Any, params: Any) -> Any:
        uri = str(params.uri)
        found = self._offers.resource(uri)
        unknown = f"unknown resource {brief(uri, 200)!r}"
        if found is None:
            raise _make_params_error(unknown)
        resource, values = found
        what = f"read the resource {resource.uri}"
        value = await self._run_method(resource.tool, values, context, what, unknown)
        if value is None:
            raise _make_params_error(unknown)
        return self._convert_or_refuse(lambda: resource_answer(resource, uri, value), what)

    async def get_prompt(self, context: Any, params: Any) -> Any:
        prompt = next((each for each in self._offers.prompts if each.name == params.name), None)
        unknown = f"unknown prompt {brief(params.name, 200)!r}"
        if prompt is None:
            raise _make_params_error(unknown)
        what = f"write the prompt {prompt.name}"
        value = await self._run_method(prompt.tool, params.arguments or {}, context, what, unknown)
        return self._convert_or_refuse(lambda: prompt_answer(prompt, value), what)

    @staticmethod
    def _convert_or_refuse(convert: Callable[[], Any], what: str) -> Any:
        from mcp import MCPError

        try:
            return convert()
        except Exception as error:  # serializers of user types can raise anything
            logger.exception("could not %s: its value cannot be sent", what)
            raise MCPError(INTERNAL_ERROR, f"could not {what}") from error

    async def _run_method(self, tool: Tool, arguments: Mapping[str, Any], context: Any, what: str, unknown: str) -> Any:
        """Run the method of a resource or prompt like a tool, and return its value.

        `what` completes "could not …" in errors; `unknown` is the error for an identity that may not use it. Raises
        `MCPError`.
        """
        from mcp import MCPError

        host, name = internals_of(self._container).host, tool.specification.name
        request = ToolExecutionRequest(str(context.request_id), name, compact_json(dict(arguments)))
        wrong: list[str] = []

        @non_blocking
        def on_arguments_error(error: Exception, context: InvocationContext) -> str:
            wrong.append(_describe_argument_errors(error, context))
            return wrong[0]

        @non_blocking
        def on_error(error: Exception, context: InvocationContext) -> str:
            logger.error("could not %s", what, exc_info=error)
            return f"could not {what}"

        failures = ToolErrors(
            on_unknown_tool=return_to_model,
            on_tool_arguments_error=on_arguments_error,
            on_tool_execution_error=host.failures.on_tool_execution_error or on_error,
        )
        try:
            async with (
                self._container.request_scope(caller_seeds()) as scope,
                _report_progress(context, tool) as on_progress,
            ):
                if not await self._choose_allowed([tool], _same):
                    raise _make_params_error(unknown)
                outcome = await host.execute(
                    scope, {name: tool}, request, McpEndpoint, failures, on_progress=on_progress
                )
        except ToolAbort as error:
            raise MCPError(INTERNAL_ERROR, str(error)) from error
        except MCPError:
            raise
        except Exception as error:
            if (waiting := _describe_waiting_run(error)) is not None:
                raise MCPError(INTERNAL_ERROR, waiting) from error
            logger.exception("could not %s", what)
            raise MCPError(INTERNAL_ERROR, f"could not {what}") from error
        if wrong:
            raise _make_params_error(wrong[0])
        if outcome.execution.is_error:
            raise MCPError(INTERNAL_ERROR, outcome.execution.result)
        return outcome.execution.result_object


def _same(tool: Tool) -> Tool:
    return tool


def _tool_of_resource(resource: OfferedResource) -> Tool:
    return resource.tool


def _tool_of_prompt(prompt: OfferedPrompt) -> Tool:
    return prompt.tool


def _make_params_error(text: str) -> Exception:
    """Return the error for a request that names something unknown, or has invalid arguments."""
    from mcp import MCPError

    return MCPError(INVALID_PARAMS, text)


@asynccontextmanager
async def _report_progress(context: Any, tool: Tool | None) -> AsyncIterator[Callable[[ToolProgress], None] | None]:
    """Yield a function that sends the progress of a tool to the client, if it reports any.

    All is sent before the end of the block. The session sends nothing to clients that did not ask for progress.
    """
    if tool is None or not tool.progress_names:
        yield None
        return
    waiting: deque[ToolProgress] = deque(maxlen=MAX_WAITING_PROGRESS)
    arrived, ended = asyncio.Event(), False

    async def send_progress() -> None:
        last = -inf
        while waiting or not ended:
            await arrived.wait()
            arrived.clear()
            while waiting:
                each = waiting.popleft()
                if each.done > last:  # the protocol wants numbers that increase
                    last = each.done
                    await context.session.report_progress(each.done, each.total, each.message)

    def on_progress(progress: ToolProgress) -> None:
        waiting.append(progress)
        arrived.set()

    sending = asyncio.create_task(send_progress())
    try:
        yield on_progress
    except BaseException:
        sending.cancel()
        raise
    ended = True
    arrived.set()
    with suppress(Exception):  # the client has left
        await sending


@non_blocking
def _describe_argument_errors(error: Exception, context: InvocationContext) -> str:
    """Return what is wrong with the arguments; hide the details if a validator of the program failed unexpectedly."""
    if error.__cause__ is None or isinstance(error.__cause__, (ValueError, TypeError)):
        return return_to_model(error, context)
    return hide_details(error.__cause__ if isinstance(error.__cause__, Exception) else error, context)


def _describe_waiting_run(error: Exception) -> str | None:
    """Return the text for a client whose call waits for a person; None for other errors, and for cancelled runs."""
    if not isinstance(error, RunSuspendedError) or error.is_abandoned:
        return None
    waits = f"The call waits for the approval or the answer of a person, in the run {error.run_id}."
    return f"{waits} Do not call the tool again: that would start another run."


def _make_tool_answer(message: ToolExecutionResultMessage, structured: Any, *, failed: bool) -> Any:
    from mcp_types import CallToolResult

    content = [block_of(each) for each in message.contents or (TextContent(message.text),)]
    return CallToolResult(content=content, structured_content=structured, is_error=failed)
