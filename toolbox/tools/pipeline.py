"""Defines `Tool`, and runs one tool call: decode, layers, run in a call scope, encode.

Services, standalone executors, MCP and the dev UI use the same pipeline. It decides what a model can read; errors of
the framework itself are never sent to a model. Not here: finding tools (`sources`), JSON (`codec`), error handlers
(`failures`), threads and processes (`toolbox.execution`).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, time
from decimal import Decimal
from time import perf_counter
from types import CoroutineType
from typing import Any, TypeAlias
from uuid import UUID

from ..bean_references import BeanReference, named_at_first, named_in_class
from ..chat import (
    ChatModel,
    Content,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolExecutionResultMessage,
    ToolProgress,
    ToolSpecification,
)
from ..context import (
    ActiveScope,
    Cancellation,
    InContext,
    InvocationContext,
    ToolCallScope,
    current_invocation,
    in_tool,
)
from ..errors import (
    EndsInvocation,
    FrameworkError,
    IllegalConfigurationError,
    Problem,
    ScopeNotActiveError,
    ToolArgumentsError,
    ToolDeferred,
    ToolRetry,
    ToolTimeoutError,
    UnknownToolError,
)
from ..events import (
    Listeners,
    ToolExecutedEvent,
    ToolFailedEvent,
    ToolProgressEvent,
    ToolStartedEvent,
    ToolSuspendedEvent,
)
from ..execution.cancellation import CancellationsHere, own_code
from ..execution.markers import EXECUTION_MARK, Execution, execution_of
from ..execution.runners import Runner
from ..execution.threads import call_on
from ..introspection import EMPTY, read_signature
from ..parameters import (
    InjectMark,
    Progress,
    current_progress,
)
from ..security import Access, SecurityIdentity, identity_in, identity_now
from .codec import (
    Encoded,
    EncodedInFull,
    cut,
    printable,
    read_arguments,
    refuse_doubled_names,
    with_written_arguments,
)
from .failures import DEFAULTS, READY, Handler, ToolErrors, check_answer, logger, message_of
from .marks import OWN_TOOL_CALLS, SERVICE_MARK, ApprovalRule, ReturnBehavior, SearchBehavior, UnknownOutcome
from .specification import ToolParameter, given_or_default

IMMUTABLE = frozenset({str, int, float, bool, bytes, complex, Decimal, date, datetime, time, UUID, type(None)})
"""Types whose values nobody can change."""

LARGE_RESULT = 100_000
"""Results with more characters than this are logged as a warning if no limit is set."""


# --- a tool, and the layers around its calls


@dataclass(frozen=True, slots=True)
class InjectedParameter:
    """A parameter that gets a bean. `wanted` is its annotation; an `optional` one keeps its default without a bean."""

    name: str
    wanted: Any
    optional: bool


def read_injected(function: Callable[..., Any], where: str) -> tuple[list[InjectedParameter], list[Problem]]:
    """Return the `Inject[…]` parameters of a function that is called without other arguments, and its problems."""
    injected: list[InjectedParameter] = []
    problems: list[Problem] = []
    for each in read_signature(function).parameters:
        if each.is_variadic:
            continue
        if any(isinstance(mark, InjectMark) for mark in each.metadata):
            injected.append(InjectedParameter(each.name, each.annotation, each.default is not EMPTY))
        elif each.default is EMPTY:
            fix = f"annotate it as a bean, `{each.name}: Inject[…]`, or give it a default"
            problems.append(Problem(where, f"the parameter {each.name!r} has no value", fix))
    return injected, problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool, with everything that can be prepared before a call.

    `bean` is looked up for each call in the current scope, and its attribute `member` is called; without a bean,
    `function` is called. `decode` is None for an executor written by hand, which gets the request itself. `positional`
    contains the names and defaults of positional-only parameters. `returns` is the resolved return annotation, or
    `EMPTY`. `run` is `innermost`, or its layers (see `with_layers`). `key_names` and `run_id_names` are
    hidden parameters about the run, `progress_names` those that report progress. `visible` are the parameters that the
    model fills.

    `complete` and `validate` are those of the `ArgumentDecoder`. `owner` is the class of a method. `definitions` are
    the function, or the method in its class and its bases, nearest first: decorators leave their marks there. `access`
    is None if every identity may call the tool. `effects` are known effects, for reports. `former_names` are names in
    stored runs.
    """

    specification: ToolSpecification
    execution: Execution
    where: str
    function: Callable[..., Any] | None
    encode: Callable[[Any], Encoded]
    decode: Callable[[ToolExecutionRequest], dict[str, Any]] | None = None
    return_behavior: ReturnBehavior = ReturnBehavior.TO_LLM
    search_behavior: SearchBehavior = SearchBehavior.SEARCHABLE
    timeout: float | None = None
    max_result_chars: int | None = None
    bean: Any = None
    member: str = ""
    positional: tuple[tuple[str, Any], ...] = ()
    memory_id_names: tuple[str, ...] = ()
    context_names: tuple[str, ...] = ()
    needs_memory_id: bool = False
    injected: tuple[InjectedParameter, ...] = ()
    returns: Any = EMPTY
    requires_approval: bool | ApprovalRule = False
    approvers: tuple[str, ...] = ()
    not_self: bool = False
    deferred: bool = False
    on_unknown_outcome: UnknownOutcome = "tell"
    former_names: tuple[str, ...] = ()
    key_names: tuple[str, ...] = ()
    run_id_names: tuple[str, ...] = ()
    progress_names: tuple[str, ...] = ()
    visible: tuple[ToolParameter, ...] = field(default=(), compare=False, repr=False)
    access: Access | None = None
    effects: tuple[str, ...] = ()
    run: ToolStep = field(default=None, compare=False, repr=False)  # type: ignore[assignment]  # see `__post_init__`
    complete: Callable[[Mapping[str, Any]], dict[str, Any]] | None = field(default=None, compare=False, repr=False)
    validate: Callable[..., dict[str, Any]] | None = field(default=None, compare=False, repr=False)
    owner: type | None = field(default=None, compare=False, repr=False)
    definitions: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    has_hidden: bool = field(init=False, default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Set `run`, and note if there are parameters that the framework fills."""
        hidden = self.memory_id_names or self.context_names or self.injected or self.positional
        object.__setattr__(self, "has_hidden", bool(hidden or self.key_names or self.run_id_names))
        if self.run in (None, run_here, run_tool, run_reporting):  # also in a copy with another timeout
            object.__setattr__(self, "run", self.innermost)

    @property
    def innermost(self) -> ToolStep:
        """The step inside all layers, which runs the tool."""
        if self.progress_names:
            return run_reporting
        return run_here if self.execution.is_coroutine and self.timeout is None else run_tool

    @property
    def is_service(self) -> bool:
        """True for a method of an AI service, which has no memory as a tool."""
        marked = self.function is not None and hasattr(self.function, SERVICE_MARK)
        return marked or (self.bean is not None and self.owner is not None and SERVICE_MARK in vars(self.owner))

    @property
    def has_immutable_arguments(self) -> bool:
        """True if the types of all arguments are immutable, so that they need not be copied."""
        types = [
            *(each.annotation for each in self.visible),
            *(type(each.default) for each in self.visible if each.has_default),
        ]
        return self.decode is not None and all(isinstance(each, type) and each in IMMUTABLE for each in types)

    def named_by(self, decorator: str) -> tuple[BeanReference, ...]:
        """Return what a decorator names at the tool's class, then at the tool.

        Decorators of an AI service and its methods belong to the invocations of its methods.
        """
        if self.is_service:
            return ()
        of_class = named_in_class(self.owner, decorator) if self.owner is not None else ()
        return (*of_class, *named_at_first(self.definitions, decorator))

    @property
    def name(self) -> str:
        """The name that the model uses."""
        return self.specification.name

    def with_layers(self, layers: Iterable[ToolLayer]) -> Tool:
        """Return the tool with `layers` around its calls, the first one outermost."""
        innermost = run = self.innermost
        for layer in reversed(tuple(layers)):
            run = layer(run, self)
        return self if run is innermost else replace(self, run=run)


class ToolCall:
    """One call of a tool with decoded and valid arguments. A layer can pass on a changed call.

    `arguments` maps the names of the function's parameters to the model's values, without those that keep the
    function's default. It is None for an executor written by hand, which reads the request, unless a layer changed it.
    """

    __slots__ = ("arguments", "context", "environment", "request", "tool")

    def __init__(
        self,
        tool: Tool,
        request: ToolExecutionRequest,
        arguments: dict[str, Any] | None,
        context: InvocationContext,
        environment: ToolEnvironment,
    ) -> None:
        self.tool, self.request, self.arguments = tool, request, arguments
        self.context, self.environment = context, environment

    def with_arguments(self, arguments: dict[str, Any]) -> ToolCall:
        """Return the same call with other arguments, which are not validated again."""
        return ToolCall(self.tool, self.request, arguments, self.context, self.environment)

    @property
    def is_late(self) -> bool:
        """True if the tool's timeout ended an earlier run of this call."""
        cancellation = self.context.cancellation
        return self.tool.timeout is not None and isinstance(cancellation, _CallCancellation) and cancellation.is_late

    def visible_arguments(self) -> dict[str, Any]:
        """Return a copy of the arguments that a model can see, by the names of the parameters, with defaults.

        Raises `ToolArgumentsError` if the tool is an executor and the model's JSON is invalid.
        """
        if self.arguments is None:
            return read_arguments(self.request)
        complete = self.tool.complete
        return dict(self.arguments) if complete is None else complete(self.arguments)

    def json_arguments(self) -> dict[str, Any]:
        """Return the same as JSON values, by the model's names."""
        from pydantic_core import to_jsonable_python

        names = {each.name: each.shown_name for each in self.tool.visible}
        written = {
            names.get(name, name): to_jsonable_python(given_or_default(value), by_alias=True, serialize_unknown=True)
            for name, value in self.visible_arguments().items()
        }
        return dict(json.loads(json.dumps(written)))

    def with_validated(self, values: Mapping[str, Any]) -> ToolCall:
        """Return the same call with `values` as its arguments, after validating all of them.

        Raises `ToolArgumentsError`.
        """
        validate = self.tool.validate
        if validate is None:
            return self.with_arguments(dict(values))
        known = self.visible_arguments()
        # The same immutable object is valid already, and validators may change a value each time they see it.
        kept = {
            name: value for name, value in values.items() if value is known.get(name, self) and type(value) in IMMUTABLE
        }
        changed = {name: value for name, value in values.items() if name not in kept}
        return self.with_arguments(validate(self.request, changed, kept))

    def with_changed(self, changes: Mapping[str, Any]) -> ToolCall:
        """Return the same call with some arguments changed, after validating these. Raises `ToolArgumentsError`."""
        validate = self.tool.validate
        if validate is None:
            return self.with_arguments({**self.visible_arguments(), **changes})
        return self.with_arguments(validate(self.request, changes, self.arguments))


ToolStep: TypeAlias = Callable[[ToolCall], Awaitable[Encoded]]
"""Takes a decoded call and returns the result for the model. Raises the exceptions of the tool."""

ToolLayer: TypeAlias = Callable[[ToolStep, Tool], ToolStep]
"""Wraps the calls of one tool: takes the next step and returns a new step. A layer that this tool does not need returns
the same step and costs nothing.

A step may raise an exception, return an `Encoded`, or call the next step, also several times; each time the tool runs
in a new call scope. Error handlers run outside of all layers, and never for an `EndsInvocation`.
"""


class ToolSuspension(EndsInvocation):
    """Suspends a tool call whose result will be supplied later, from outside. Raised by a layer or a tool.

    `details` are JSON values, which are stored with the pending call.
    """

    def __init__(self, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(details)
        self.details: Mapping[str, Any] = dict(details or {})

    def __str__(self) -> str:
        return "the tool call was suspended until its result is supplied, but nothing here stores suspended calls"


@dataclass(slots=True)
class ToolEnvironment:
    """The shared environment of the tool calls of one invocation: tools, context, scope, runner and error handlers.

    `model` finds a model of the host by name, for guardrails.
    """

    tools: Mapping[str, Tool]
    context: InvocationContext
    scope: ActiveScope
    runner: Runner
    failures: ToolErrors
    max_result_chars: int | None = None
    listeners: Listeners | None = None
    loop: asyncio.AbstractEventLoop | None = None
    """The event loop that runs the calls, if it is known: asking asyncio for it takes a system call."""
    ran: dict[int, ToolCall] | None = None
    """The calls whose tools ran without an error, by the id of their request; None if nobody wants to know."""
    search_tool: str | None = None
    """The name of the tool that finds more tools."""
    sent: tuple[str, ...] | None = None
    """The names of the tools in the request for the current reply, which interceptors may have narrowed. A call of
    another tool is a call of an unknown tool. None if no request was sent."""
    on_progress: Callable[[ToolProgress], object] | None = None
    """Receives the progress of tools, on the event loop."""
    model: Callable[[str | None], ChatModel] | None = None
    abandon_runs: Callable[[Exception], Awaitable[list[str]]] | None = None
    """Cancels the suspended runs of services that a tool called in its own code, and whose error it let through.

    Returns the names of these services.
    """

    def note_ran(self, call: ToolCall, encoded: Encoded) -> None:
        """Note that the tool of a call ran, unless its result is an error. The step that runs a tool calls it."""
        # What the model reads does not tell it: an interceptor can answer for a tool, and a guardrail can replace the
        # result of one that ran. A compensation must undo what ran, and nothing else.
        if self.ran is not None and not encoded.is_error:
            self.ran[id(call.request)] = call

    def was_sent(self, name: str) -> bool:
        """Return True if the model could see a tool of this name when it replied."""
        return self.sent is None or name in self.sent

    def called_tool(self, request: ToolExecutionRequest) -> Tool | None:
        """Return the tool that the model calls; None if it could not see one of this name."""
        return self.tools.get(request.name) if self.was_sent(request.name) else None


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """The result of a tool call: `execution` for the program, `message` (with `contents`) for the model.

    `failed` is True if the tool's exception reached the handler of failed tools. `ran` is True if the tool ran without
    an error, whatever the model reads. `arguments` are those that it ran with, as JSON values by the model's names,
    where a compensation will need them and they are not the model's.
    """

    execution: ToolExecution
    contents: Sequence[Content] = ()
    failed: bool = False
    ran: bool = False
    arguments: Mapping[str, Any] | None = field(default=None, hash=False)

    @property
    def message(self) -> ToolExecutionResultMessage:
        """The message that answers the call; created on access."""
        done = self.execution
        request = done.request
        return ToolExecutionResultMessage(
            request.id, request.name, done.result, done.is_error, done.attributes, self.contents
        )


class NoService:
    """Placeholder for the service in the context of a call without a service."""


# --- one call


async def execute_tool(request: ToolExecutionRequest, environment: ToolEnvironment) -> ToolOutcome:
    """Run one call in a new context and return its outcome; most failures are outcomes too.

    Context variables that the tool sets do not reach the caller. Raises `EndsInvocation` errors, cancellation, and the
    exceptions of error handlers.
    """
    context = copy_context()
    outcomes: list[ToolOutcome] = []
    steps = _execute(request, environment, outcomes).__await__()
    # A coroutine that returns None ends without a StopIteration, whose cost is that of several calls.
    waits_for = context.run(next, steps, _ENDED)
    if waits_for is not _ENDED:
        await InContext(context, steps, waits_for)
    return outcomes[0]


_ENDED: Any = object()


async def _execute(request: ToolExecutionRequest, environment: ToolEnvironment, outcomes: list[ToolOutcome]) -> None:
    """Run one call in the current context, and append its outcome to `outcomes`."""
    started_at, clock = datetime.now(UTC), perf_counter()
    tool, listeners, limit = environment.called_tool(request), environment.listeners, environment.max_result_chars
    outer = environment.context
    cancellation = outer.cancellation
    if tool is not None and tool.timeout is not None:
        cancellation = _CallCancellation(cancellation)
    context = in_tool(outer, request, cancellation)
    current_invocation.set(context)
    if listeners is not None:
        listeners.tell(ToolStartedEvent(context, request, tool.specification if tool is not None else None))
    raised: Exception | None = None
    try:
        try:
            encoded = await answer(tool, request, context, environment)
        except Exception as error:
            encoded = await error_result(error, request, context, environment)
            raised = error
        if tool is not None and tool.max_result_chars is not None:
            limit = tool.max_result_chars
        text, contents = encoded.text, encoded.contents
        if len(text) > (LARGE_RESULT if limit is None else limit):
            text, contents = _too_long(request, encoded, limit)
        taken, attributes = perf_counter() - clock, encoded.attributes or {}
        outcome = ToolOutcome(
            ToolExecution(request, text, encoded.value, encoded.is_error, started_at, taken, attributes),
            contents,
            encoded.failed or (raised is not None and is_failure(raised, request)),
            ran=environment.ran is not None and id(request) in environment.ran,
        )
        if listeners is not None:
            listeners.tell(ToolExecutedEvent(context, outcome.execution, raised))
        outcomes.append(outcome)
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
    tool: Tool | None, request: ToolExecutionRequest, context: InvocationContext, environment: ToolEnvironment
) -> Awaitable[Encoded]:
    """Decode the request and run the tool with its layers.

    Raises `UnknownToolError`, `ToolArgumentsError`, and the exceptions of the tool and its layers.
    """
    if tool is None:
        # A tool that was sent before a resume may be hidden from the identity of today.
        raise _not_offered(request, filter(environment.was_sent, environment.tools), environment)
    if tool.access is not None:
        return _answer_if_allowed(tool, tool.access, request, context, environment)
    arguments = _arguments_in(request, tool)
    return tool.run(ToolCall(tool, request, arguments, context, environment))


def _arguments_in(request: ToolExecutionRequest, tool: Tool) -> dict[str, Any] | None:
    """Return the decoded arguments; None for an executor, which reads the request itself."""
    if tool.decode is not None:
        return tool.decode(request)
    refuse_doubled_names(request)
    return None


async def _answer_if_allowed(
    tool: Tool, access: Access, request: ToolExecutionRequest, context: InvocationContext, environment: ToolEnvironment
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
    return await tool.run(ToolCall(tool, request, arguments, context, environment))


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
    error: Exception, request: ToolExecutionRequest, context: InvocationContext, environment: ToolEnvironment
) -> Encoded:
    """Return what the model reads about a failed call: the answer of the error's handler.

    Raises the error itself if it ends the invocation, and the exceptions of the handler.
    """
    if isinstance(error, ToolRetry):
        return EncodedInFull(printable(message_of(error)), is_error=True)
    if isinstance(error, ToolDeferred):  # in a run, `toolbox.runs` has suspended the call
        raise _not_deferrable(environment.tools[request.name]) from error
    if isinstance(error, EndsInvocation) or (
        isinstance(error, ExceptionGroup) and error.subgroup(EndsInvocation) is not None
    ):
        if environment.abandon_runs is not None and (abandoned := await environment.abandon_runs(error)):
            raise _not_a_tool(environment.tools[request.name], abandoned[0]) from error
        raise error
    option = _option_for(error, request)
    handler: Handler | None = getattr(environment.failures, option) or getattr(DEFAULTS, option)
    assert handler is not None
    if handler in READY:
        answered = handler(error, context)
    else:
        execution = execution_of(handler, getattr(handler, EXECUTION_MARK, None))
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


# --- the innermost step: the tool in its call scope


def run_tool(call: ToolCall) -> Awaitable[Encoded]:
    """Run the tool in a new call scope, on its thread or loop and within its timeout, and encode the result."""
    tool, execution = call.tool, call.tool.execution
    on_loop = execution.is_coroutine or (execution.is_non_blocking and call.environment.runner.is_for_loop)
    if tool.timeout is not None:
        return _within(tool.timeout, call, on_loop)
    return run_here(call) if on_loop else _PlacedCall(call).wait()


async def run_reporting(call: ToolCall) -> Encoded:
    """Run the tool with its `Progress`, which is ignored after the tool's end."""
    progress = Progress(_reporter(call))
    token, given = None, call
    if call.tool.decode is None:
        token = current_progress.set(progress)
    else:
        hidden = dict.fromkeys(call.tool.progress_names, progress)
        given = call.with_arguments({**(call.arguments or {}), **hidden})
    try:
        encoded = await run_tool(given)
        call.environment.note_ran(call, encoded)  # without the `Progress` among its arguments
        return encoded
    finally:
        progress.end()
        if token is not None:
            current_progress.reset(token)


def _reporter(call: ToolCall) -> Callable[[float, float | None, str | None], None] | None:
    """Return the function that sends progress to the listeners and the stream; it can be called on any thread."""
    listeners, context, on_progress = call.environment.listeners, call.context, call.environment.on_progress
    if listeners is None and on_progress is None:
        return None
    loop = asyncio.get_running_loop()

    def send(event: ToolProgress) -> None:
        if listeners is not None:
            listeners.tell(ToolProgressEvent(context, event.request, event.done, event.total, event.message))
        if on_progress is not None:
            on_progress(event)

    def report(done: float, total: float | None, message: str | None) -> None:
        call_on(loop, send, ToolProgress(call.request, done, total, message))

    return report


async def _within(timeout: float, call: ToolCall, on_loop: bool) -> Encoded:
    """Run the tool for at most `timeout` seconds; waiting for beans or for a thread does not count.

    Raises `ToolTimeoutError`.
    """
    late = ToolTimeoutError(call.tool.name, timeout)
    limit = asyncio.timeout(None)
    on_start = _start_of(limit, timeout)
    try:
        async with limit:
            if on_loop:
                return await run_here(call, on_start)
            run = _PlacedCall(call, on_start)
            try:
                return await run.wait()
            except asyncio.CancelledError:
                if limit.expired():
                    run.abandoned_by = late
                raise
    except TimeoutError:
        if not limit.expired():
            raise  # raised by the tool itself
        call.context.cancellation.cancel()
        raise late from None


async def run_here(call: ToolCall, on_start: Callable[[], None] | None = None) -> Encoded:
    """Run the tool on the event loop, in the current task."""
    tool, environment = call.tool, call.environment
    opened = environment.scope.open_call_scope()
    try:
        if tool.bean is not None:
            await environment.scope.prepare(tool.bean)
        if tool.injected:
            await _prepare(tool.injected, environment.scope)
        if on_start is not None:
            on_start()
        began = None if tool.execution.is_coroutine else perf_counter()
        if tool.function is not None and tool.decode is not None and not tool.has_hidden:
            value = tool.function(**call.arguments)  # type: ignore[arg-type]  # `decode` made a dict
        else:
            function, args, kwargs = _bound(call)
            value = function(*args, **kwargs)
        if began is not None:
            environment.runner.warn_if_slow(tool.specification.name, began)
        if type(value) is CoroutineType or inspect.isawaitable(value):
            value = await _result_of(value, call)
        encoded = tool.encode(value)
    except ToolDeferred:
        await _close(opened, None, tool)  # the call ends normally, and its result comes later
        raise
    except BaseException as error:
        await _close(opened, error, tool)
        raise
    else:
        if not opened.close_if_empty():
            await _close(opened, None, tool)
        environment.note_ran(call, encoded)
        return encoded
    finally:
        opened.leave()


async def _result_of(value: Awaitable[Any], call: ToolCall) -> Any:
    """Return what a tool's coroutine returns.

    A `CancelledError` of a task or future that the tool awaited is a failure of the tool, if nobody cancelled the call.
    """
    cancellations = CancellationsHere()
    try:
        return await own_code(value)
    except asyncio.CancelledError as error:
        if cancellations.task is None or cancellations.came or call.environment.context.cancellation.cancelled:
            raise
        raise RuntimeError("something that the tool awaited was cancelled, but not the call itself") from error


class _PlacedCall:
    """A tool call on a thread or in a process: waits for it, encodes, closes its call scope.

    `abandoned_by` is the error because of which the caller stopped waiting, or None.
    """

    __slots__ = ("_call", "_on_start", "_opened", "abandoned_by")

    _opened: ToolCallScope

    def __init__(self, call: ToolCall, on_start: Callable[[], None] | None = None) -> None:
        self._call, self._on_start = call, on_start
        self.abandoned_by: BaseException | None = None

    async def wait(self) -> Encoded:
        """Run the tool where the runner chooses, and wait for its result."""
        tool, environment = self._call.tool, self._call.environment
        self._opened = environment.scope.open_call_scope()
        try:
            try:
                if tool.bean is not None:
                    await environment.scope.prepare(tool.bean)
                if tool.injected:
                    await _prepare(tool.injected, environment.scope)
            except BaseException as error:
                await self.finish(error)
                raise
            value = await environment.runner.run(
                tool.execution,
                self,
                tool.specification.name,
                finish=self.finish,
                shipped=self.shipped,
                has_timeout=tool.timeout is not None,
            )
            # A result from another process is not encoded yet.
            encoded = value if isinstance(value, Encoded) else tool.encode(value)
            environment.note_ran(self._call, encoded)
            return encoded
        except asyncio.CancelledError as error:
            self.abandoned_by = error
            raise
        finally:
            self._opened.leave()

    def __call__(self) -> Any:
        """Call the tool on this thread. Returns the encoded result, or an awaitable of it."""
        tool = self._call.tool
        if self._on_start is not None:
            self._on_start()
        try:
            function, args, kwargs = _bound(self._call)
            value = function(*args, **kwargs)
            kind = type(value)
            if kind is CoroutineType or (kind.__module__ != "builtins" and inspect.isawaitable(value)):
                return self._awaited(value)
            encoded = tool.encode(value)
        except BaseException as error:
            self._close_here(None if isinstance(error, ToolDeferred) else error)
            if isinstance(error, StopIteration):  # coroutines and futures cannot raise it
                raise RuntimeError("the tool raised StopIteration") from error
            raise
        if not self._opened.close_if_empty():
            self._close_here(self.abandoned_by)
        return encoded

    async def _awaited(self, value: Any) -> Encoded:
        return self._call.tool.encode(await value)

    def shipped(self) -> Callable[[], Any]:
        """Return the call for another process, where there are no beans and no scope."""
        if self._on_start is not None:
            self._on_start()
        function, args, kwargs = _bound(self._call)
        return functools.partial(function, *args, **kwargs)

    def _close_here(self, error: BaseException | None) -> None:
        """Close the beans that can be closed on this thread."""
        try:
            self._opened.close_here(error)
        except Exception as failure:
            _judge(failure, error, self._call.tool)

    async def finish(self, error: BaseException | None) -> None:
        """Close the other beans, on the loop. Raises a failure to close, unless the call has already failed."""
        if isinstance(error, ToolDeferred):
            error = None
        if not self._opened.close_if_empty():
            await _close(self._opened, error or self.abandoned_by, self._call.tool)


async def _prepare(injected: Sequence[InjectedParameter], scope: ActiveScope) -> None:
    """Create, on the loop, the beans of parameters that must be awaited."""
    for each in injected:
        try:
            await scope.prepare(each.wanted)
        except ScopeNotActiveError:
            if each.wanted is not SecurityIdentity:  # it is anonymous outside its scope
                raise


def _bound(call: ToolCall) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the function to call, its positional arguments, and its keyword arguments."""
    tool, kwargs, function = call.tool, call.arguments, call.tool.function
    if function is None:
        function = member_of(call.environment.scope.get(tool.bean), tool.member)
    if tool.decode is None:
        request = call.request if kwargs is None else with_written_arguments(call.request, kwargs)
        return function, (request, call.context.memory_id), {}
    assert kwargs is not None
    if tool.has_hidden:
        kwargs = {**kwargs}  # a layer may run the call again
        for name in tool.run_id_names:
            kwargs[name] = run_id_of(call.context)
        for name in tool.key_names:
            kwargs[name] = idempotency_key_of(call.context)
        for name in tool.memory_id_names:
            kwargs[name] = call.context.memory_id
        for name in tool.context_names:
            kwargs[name] = call.context if call.context.service is not NoService else None
        for each in tool.injected:
            if each.wanted is SecurityIdentity:
                kwargs[each.name] = identity_now(call.environment.scope)
            elif not each.optional:
                kwargs[each.name] = call.environment.scope.get(each.wanted)
            elif (bean := call.environment.scope.find_now(each.wanted)) is not None:
                kwargs[each.name] = bean
        if tool.positional:
            return function, tuple(kwargs.pop(name, default) for name, default in tool.positional), kwargs
    return function, (), kwargs


def run_id_of(context: InvocationContext) -> str:
    """Return the id of the run of a tool call; outside of runs, the invocation's id."""
    place = context.place
    return context.invocation_id if place is None else str(place.run_id)


def idempotency_key_of(context: InvocationContext) -> str:
    """Return the same text for the same call of a run, in each process; outside of runs, one for this call."""
    place = context.place
    if place is not None:
        text = f"{place.run_id}:{place.call}"
    else:
        text = f"{context.invocation_id}:{context.request.id if context.request is not None else ''}"
    return hashlib.sha256(text.encode()).hexdigest()


async def _close(opened: ToolCallScope, error: BaseException | None, tool: Tool) -> None:
    """Close what is left in a call scope. Raises a failure to close, unless the call has already failed."""
    try:
        await opened.aclose(error)
    except Exception as failure:
        _judge(failure, error, tool)


def _judge(failure: Exception, error: BaseException | None, tool: Tool) -> None:
    """Raise a failure to close the call scope; if the call has already failed with `error`, log it instead."""
    if isinstance(failure, ExceptionGroup) and len(failure.exceptions) == 1:
        failure = failure.exceptions[0]
    if error is None or isinstance(failure, FrameworkError):
        raise failure
    if failure is not error:
        logger.error("closing the call scope of tool %r failed: %s", tool.name, failure, exc_info=failure)


def _start_of(limit: asyncio.Timeout, timeout: float) -> Callable[[], None]:
    """Return a function, callable on any thread, that starts `limit` with `timeout` seconds."""
    loop = asyncio.get_running_loop()

    def begin(at: float) -> None:
        with suppress(RuntimeError):  # the caller is no longer waiting
            limit.reschedule(at)

    return lambda: call_on(loop, begin, loop.time() + timeout)


def has_own_tool_calls(bean: Any) -> bool:
    """Return True if the bean runs differently as a tool: a service runs without memory."""
    return hasattr(type(bean), OWN_TOOL_CALLS)


def member_of(bean: Any, name: str) -> Callable[..., Any]:
    """Return the function to call for a member of a bean."""
    own_calls = getattr(type(bean), OWN_TOOL_CALLS, None)
    function: Callable[..., Any] = getattr(bean, name) if own_calls is None else own_calls(bean, name)
    return function


@contextmanager
def running_again(call: ToolCall) -> Iterator[ToolCall]:
    """Yield a call that `is_late`, with a new context for one more run."""
    context = in_tool(call.context, call.request, _CallCancellation(call.environment.context.cancellation))
    token = current_invocation.set(context)
    try:
        yield ToolCall(call.tool, call.request, call.arguments, context, call.environment)
    finally:
        current_invocation.reset(token)


class _CallCancellation(Cancellation):
    """The cancellation of a tool with a timeout: set by the timeout or by the invocation's cancellation."""

    def __init__(self, invocation: Cancellation) -> None:
        self._invocation = invocation

    @property
    def is_late(self) -> bool:
        """True if the tool's timeout has passed."""
        return self._given_up

    @property
    def cancelled(self) -> bool:
        return self._given_up or self._invocation.cancelled

    def followed_by(self, follow: Callable[[], object]) -> Callable[[], object]:
        ends = super().followed_by(follow), self._invocation.followed_by(follow)
        return lambda: [end() for end in ends]
