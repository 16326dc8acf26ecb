"""Runs one tool call: decodes it, passes it through the layers of the tool, and turns failures into results.

Services, standalone executors, MCP and the dev UI use the same pipeline. It decides what a model can read; errors of
the framework itself are never sent to a model. Not here: the data of a call (`tool_calls`), calling the tool's function
(`function_calls`), JSON (`codec`), error handlers (`failures`).
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Iterable, Sequence
from contextvars import copy_context
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from ..chat import (
    Content,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResult,
)
from ..context import (
    InContext,
    InvocationContext,
    current_invocation,
    current_scope,
    in_tool,
)
from ..errors import (
    EndsInvocation,
    IllegalConfigurationError,
    Problem,
    ToolArgumentsError,
    ToolDeferred,
    ToolRetry,
    UnknownToolError,
)
from ..events import (
    ToolExecutedEvent,
    ToolFailedEvent,
    ToolStartedEvent,
    ToolSuspendedEvent,
)
from ..execution.markers import marked_execution
from ..safe_text import printable
from ..security import Access, identity_in
from .codec import refuse_doubled_names
from .failures import DEFAULTS, READY, Handler, check_answer, logger, message_of
from .function_calls import run_tool
from .results import Encoded, EncodedInFull, cut
from .tool_calls import CallCancellation, Tool, ToolAttempts, ToolCall, ToolEnvironment, ToolOutcome, ToolSuspension

LARGE_RESULT = 100_000
"""Results with more characters than this are logged as a warning if no limit is set."""


# --- one call


async def execute_tool(request: ToolExecutionRequest, environment: ToolEnvironment) -> ToolOutcome:
    """Run one call in a new context and return its outcome; most failures are outcomes too.

    Context variables that the tool sets do not reach the caller. Raises `EndsInvocation` errors, cancellation, and the
    exceptions of error handlers.
    """
    return await InContext(copy_context(), _execute(request, environment))


async def _execute(request: ToolExecutionRequest, environment: ToolEnvironment) -> ToolOutcome:
    """Run one call in the current context."""
    request, attempts = environment.begin_call(request)
    started_at, clock = datetime.now(UTC), perf_counter()
    tool, listeners, limit = environment.called_tool(request), environment.listeners, environment.max_result_chars
    outer = environment.context
    cancellation = outer.cancellation
    if tool is not None and tool.timeout is not None:
        cancellation = CallCancellation(cancellation)
    context = in_tool(outer, request, cancellation)
    current_invocation.set(context)
    current_scope.set(environment.scope)
    if listeners is not None:
        listeners.tell(ToolStartedEvent(context, request, tool.specification if tool is not None else None))
    raised: Exception | None = None
    try:
        try:
            encoded = await answer(tool, request, context, environment, attempts)
        except Exception as error:
            encoded = await error_result(error, tool, request, context, environment)
            raised = error
        if tool is not None and tool.max_result_chars is not None:
            limit = tool.max_result_chars
        text, contents = encoded.text, encoded.contents
        if len(text) > (LARGE_RESULT if limit is None else limit):
            text, contents = _too_long(request, encoded, limit)
        taken, attributes = perf_counter() - clock, encoded.attributes or {}
        outcome = ToolOutcome(
            ToolExecution(
                request,
                text,
                encoded.value,
                encoded.is_error,
                started_at,
                taken,
                attributes,
                attempts.written_arguments or {},
            ),
            contents,
            encoded.failed or (raised is not None and is_failure(raised, request)),
            ran=attempts.succeeded is not None,
        )
        if listeners is not None:
            listeners.tell(ToolExecutedEvent(context, outcome.execution, raised))
        return outcome
    except BaseException as error:
        if listeners is not None:
            taken = perf_counter() - clock
            if isinstance(error, ToolSuspension):
                listeners.tell(ToolSuspendedEvent(context, request, str(error.details.get("kind", "")), taken))
            else:
                listeners.tell(ToolFailedEvent(context, request, error, taken))
        raise
    finally:
        del raised  # its traceback refers to this frame


def answer(
    tool: Tool | None,
    request: ToolExecutionRequest,
    context: InvocationContext,
    environment: ToolEnvironment,
    attempts: ToolAttempts | None = None,
) -> Awaitable[Encoded]:
    """Decode the request and run the tool with its layers. `attempts` get what is known of it.

    Raises `UnknownToolError`, `ToolArgumentsError`, and the exceptions of the tool and its layers.
    """
    if tool is None and environment.callers is not None:
        return _answer_who_has_it(request, environment)
    if tool is None:
        # A tool that was sent before a resume may be hidden from the identity of today.
        raise _not_offered(request, filter(environment.was_sent, environment.tools), environment)
    if tool.access is not None:
        return _answer_if_allowed(tool, tool.access, request, context, environment, attempts)
    return _run(ToolCall(tool, request, _arguments_in(request, tool), context, environment, attempts))


def _arguments_in(request: ToolExecutionRequest, tool: Tool) -> dict[str, Any] | None:
    """Return the decoded arguments; None for an executor, which reads the request itself."""
    if tool.decode is not None:
        return tool.decode(request)
    refuse_doubled_names(request)
    return None


async def _answer_if_allowed(
    tool: Tool,
    access: Access,
    request: ToolExecutionRequest,
    context: InvocationContext,
    environment: ToolEnvironment,
    attempts: ToolAttempts | None,
) -> Encoded:
    """Check the roles of the identity again, right before the call; a forbidden tool is an unknown tool."""
    identity = await identity_in(environment.scope)
    if not access.allows(identity):
        logger.warning("%s is not allowed to call tool %r", identity, request.name)
        names = [
            name
            for name, each in environment.tools.items()
            if (each.access is None or each.access.allows(identity)) and environment.was_sent(name)
        ]
        raise _not_offered(request, names, environment)
    arguments = _arguments_in(request, tool)
    return await _run(ToolCall(tool, request, arguments, context, environment, attempts))


async def _answer_who_has_it(request: ToolExecutionRequest, environment: ToolEnvironment) -> Encoded:
    """Return the error result of a call of a tool that another method of the team has: models repeat what they see.

    For an identity that may not call the tool there it is an unknown tool.
    """
    name, context = request.name, environment.context
    here = f"{context.service.__name__}.{context.method}"
    having = [each for each in environment.elsewhere.get(name, ()) if each.method != here or each.tool.hands_over_to]
    if any(each.is_restricted for each in having):
        identity = await identity_in(environment.scope)
        having = [each for each in having if each.allows(identity)]
    methods = [each.method for each in having]
    if name not in environment.elsewhere and environment.callers is not None:
        # Of an endpoint, a tool provider or a tool search: who has called it shows who has it.
        methods = [each for each in (environment.callers().get(name),) if each not in (None, here)]
    if not methods:
        raise _not_offered(request, filter(environment.was_sent, environment.tools), environment)
    places = " and ".join(dict.fromkeys(methods))
    return EncodedInFull(f"You do not have the tool {name!r} now; {places} has it.", is_error=True)


def _run(call: ToolCall) -> Awaitable[Encoded]:
    step = call.tool.step or call.tool.run or run_tool  # within its layers; without layers; of most tools
    return step(call)


def _not_offered(request: ToolExecutionRequest, names: Iterable[str], environment: ToolEnvironment) -> UnknownToolError:
    search = environment.search_tool
    error = UnknownToolError(request, tuple(names), search if search and environment.was_sent(search) else None)
    error.is_refusal = True
    return error


def _too_long(request: ToolExecutionRequest, encoded: Encoded, limit: int | None) -> tuple[str, Sequence[Content]]:
    """Cut a result to the limit; without a limit, log a warning."""
    if limit is not None:
        return cut(encoded.text, tuple(encoded.contents), limit)
    logger.warning(
        "the result of tool %r has %d characters and is sent to the model without a limit; "
        "return less, or set @tool(max_result_chars=…) or TOOLBOX_MAX_RESULT_CHARS",
        request.name,
        len(encoded.text),
    )
    return encoded.text, encoded.contents


# --- results of failed calls


def _option_for(error: Exception, request: ToolExecutionRequest) -> str:
    """Return the name of the handler for this error of a call."""
    # The same errors of a service that is called as a tool are failures of this tool.
    if isinstance(error, ToolArgumentsError) and error.request == request:
        return "on_tool_arguments_error"
    if isinstance(error, UnknownToolError) and error.request is request and error.is_refusal:
        return "on_unknown_tool"
    return "on_tool_execution_error"


def is_failure(error: Exception, request: ToolExecutionRequest) -> bool:
    """Return True if the error is the tool's failure: not a request to try again, bad arguments or an unknown tool."""
    return not isinstance(error, ToolRetry) and _option_for(error, request) == "on_tool_execution_error"


async def error_result(
    error: Exception,
    tool: Tool | None,
    request: ToolExecutionRequest,
    context: InvocationContext,
    environment: ToolEnvironment,
) -> Encoded:
    """Return what the model reads about a failed call: the answer of the error's handler.

    `tool` is None if the call offers none of this name. Raises the error itself if it ends the invocation, and the
    exceptions of the handler.
    """
    if isinstance(error, ToolRetry):
        return EncodedInFull(printable(message_of(error)), is_error=True)
    if isinstance(error, ToolDeferred) and tool is not None:  # in a run, `toolbox.runs` has suspended the call
        raise _not_deferrable(tool) from error
    if isinstance(error, EndsInvocation) or (
        isinstance(error, ExceptionGroup) and error.subgroup(EndsInvocation) is not None
    ):
        abandon = environment.abandon_runs
        if tool is not None and abandon is not None and (abandoned := await abandon(error)):
            raise _not_a_tool(tool, abandoned[0]) from error
        raise error
    option = _option_for(error, request)
    handler: Handler | None = getattr(environment.failures, option) or getattr(DEFAULTS, option)
    assert handler is not None
    if handler in READY:
        answered = handler(error, context)
    else:
        execution = marked_execution(handler)
        label = f"{request.name} (handler)"
        answered = await environment.runner.run(execution, functools.partial(handler, error, context), label)
    checked = check_answer(answered, handler)
    if isinstance(checked, ToolExecutionResult):
        return EncodedInFull.of(checked)
    return EncodedInFull(printable(checked), is_error=True)


def _not_a_tool(tool: Tool, service: str) -> IllegalConfigurationError:
    """Return the error for a service that was suspended in a tool's own code, which cannot be continued there."""
    fact = f"its code called {service}, which was suspended; code cannot wait for the answer, so the run was cancelled"
    return IllegalConfigurationError([Problem(tool.where, fact, f"list {service} as a tool, so that it can wait")])


def _not_deferrable(tool: Tool) -> IllegalConfigurationError:
    if tool.deferred:
        fact = "raised ToolDeferred in a call without a run"
        return IllegalConfigurationError([Problem(tool.where, fact, "call it through an AI service")])
    fact = "raised ToolDeferred, but is not marked as deferred"
    return IllegalConfigurationError([Problem(tool.where, fact, "write @tool(deferred=True)")])
