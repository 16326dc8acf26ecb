"""The errors of the library, and `Problem`, which configuration checks report.

Errors keep their facts as attributes and can be pickled and copied. Their texts name the place, the fact and the fix.
A `FrameworkError` always reaches the caller and is never sent to a model. Tools raise `ToolRetry` and `ToolAbort`,
which are not `ToolboxError`s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .chat import Message, PendingCall, ToolExecutionRequest
from .safe_text import brief

Path: TypeAlias = str
"""The place of a problem in a value: `"city"`, `"stops.0.name"`, or `""` for the whole value."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One configuration problem: `where` is the place, `what` the fact, `fix` what to do.

    `str(problem)` is `"where: what; fix"`.
    """

    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"


class ToolboxError(Exception):
    """Base class of the errors of this library."""


class EndsInvocation(Exception):  # noqa: N818 - a base class of several kinds of errors
    """Base class of errors that end the invocation and all outer ones: every `FrameworkError`, and `ToolAbort`.

    Error handlers do not get them.
    """


class _Timeout(ToolboxError, TimeoutError):  # noqa: N818 - not public
    """A `TimeoutError` that pickles all its facts; `TimeoutError` alone, an `OSError`, keeps at most two arguments."""

    def __init__(self, *facts: object) -> None:
        super().__init__()
        self._facts = facts

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), self._facts


# --- configuration and use of the framework


class FrameworkError(ToolboxError, EndsInvocation):
    """Base class of configuration and usage errors. They reach the caller and are never sent to a model."""


class IllegalConfigurationError(FrameworkError):
    """The program's configuration is invalid; `.problems` lists all problems."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        return f"{len(self.problems)} problems:{lines}"


class MissingBeanError(FrameworkError):
    """No bean provides the requested type or name.

    `.near` has the names of similar beans, `.where` the parameter that needs the bean, if there is one, and `.fix` the
    fix, if it is not to register a bean.
    """

    def __init__(self, wanted: str, near: Sequence[str] = (), where: str = "", fix: str = "") -> None:
        super().__init__(wanted, tuple(near), where, fix)
        self.wanted, self.near, self.where, self.fix = wanted, tuple(near), where, fix

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        near = f"; did you mean {' or '.join(self.near)}?" if self.near else ""
        fix = self.fix or "register one, or seed it into the request scope"
        fix += ", or pass the argument yourself" if self.where else ""
        return f"{place}no bean provides {self.wanted}{near}; {fix}"


class AmbiguousBeanError(FrameworkError):
    """Several beans provide the requested type; `.candidates` has their names."""

    def __init__(self, wanted: str, candidates: Sequence[str]) -> None:
        super().__init__(wanted, tuple(candidates))
        self.wanted, self.candidates = wanted, tuple(candidates)

    def __str__(self) -> str:
        beans = ", ".join(self.candidates)
        return (
            f"several beans provide {self.wanted}: {beans}; request one by its class or name, or choose one with bind()"
        )


class AsyncBeanError(FrameworkError):
    """`get` was called for a bean that async code creates; `.path` leads from the bean to the async producer."""

    def __init__(self, wanted: str, path: str) -> None:
        super().__init__(wanted, path)
        self.wanted, self.path = wanted, path

    def __str__(self) -> str:
        path = f" ({self.path})" if self.path != self.wanted else ""
        return f"{self.wanted} is created by async code{path}; use `await aget(…)`"


class ScopeNotActiveError(FrameworkError):
    """A bean was requested outside its scope, or in a scope that has ended; `.reason` says which."""

    def __init__(self, wanted: str, reason: str) -> None:
        super().__init__(wanted, reason)
        self.wanted, self.reason = wanted, reason

    def __str__(self) -> str:
        return f"{self.wanted}: {self.reason}; look it up inside `async with container.request_scope():`"


class ContainerNotStartedError(FrameworkError):
    """A container was used before it was started or after it was stopped.

    `.reason` is set in a process that was forked while the container was running: its event loop and beans belong to
    the parent process.
    """

    def __init__(self, what: str, reason: str = "") -> None:
        super().__init__(what, reason)
        self.what, self.reason = what, reason

    def __str__(self) -> str:
        if self.reason:
            return (
                f"{self.what}: {self.reason}; start the container in each process, after the fork "
                "(`with container:` works here and creates new beans)"
            )
        return (
            f"{self.what}: the container is not started; use it inside `async with container:` or `with container:` "
            "(in a web application: while its lifespan runs; in tests: inside `with TestClient(app)`)"
        )


class BlockingCallNotAllowedError(FrameworkError):
    """A blocking call was made on a thread that runs an event loop."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return (
            f"{self.what} would block the event loop of this thread; "
            "declare it `async def` and await it, or call it on a worker thread (`await asyncio.to_thread(…)`)"
        )


class MemoryInUseError(FrameworkError):
    """A call would wait for itself: a tool, or the reader of a stream, called a service in its own conversation."""

    def __init__(self, service: str, memory_id: str) -> None:
        super().__init__(service, memory_id)
        self.service, self.memory_id = service, memory_id

    def __str__(self) -> str:
        return (
            f"conversation {self.memory_id!r} of {self.service} is in use by an outer call or by an open stream of the "
            "same caller; use another memory id or a service without a MemoryId parameter, "
            "or close the stream first (`async with`, `aclose()`)"
        )


# --- tools


class ToolRetry(Exception):  # noqa: N818 - part of the public API
    """Raise it in a tool to let the model try again.

        raise ToolRetry("unknown room; call list_rooms first")

    The model reads `text` as an error result. Error handlers do not get it.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(text)
        self.text = text


class ToolAbort(EndsInvocation):
    """Raise it, or a subclass, in a tool to end the invocation and all outer ones.

        raise ToolAbort("the customer has no account")

    The caller of the service gets the exception unchanged.
    """


class ToolDeferred(EndsInvocation):
    """Raise it in a tool marked `@tool(deferred=True)` whose result comes later: the call is suspended.

        raise ToolDeferred(reason="the warehouse answers by mail", attributes={"ticket": 7})

    `runs.resume(run_id, {call.id: respond(value)})` supplies the result. `attributes` are JSON values.
    """

    def __init__(self, reason: str | None = None, attributes: Mapping[str, object] | None = None) -> None:
        super().__init__(reason, dict(attributes or {}))
        self.reason, self.attributes = reason, dict(attributes or {})

    def __str__(self) -> str:
        return f"the result of this tool call comes later: {self.reason or 'no reason given'}"


class ToolArgumentsError(ToolboxError):
    """The model called a tool with invalid arguments; `.problems` has a (path, message) pair for each problem."""

    def __init__(self, request: ToolExecutionRequest, problems: Sequence[tuple[Path, str]]) -> None:
        super().__init__(request, problems)
        self.request, self.problems = request, list(problems)

    def __str__(self) -> str:
        problems = "; ".join(f"{path}: {message}" if path else message for path, message in self.problems)
        return f"invalid arguments for tool {self.request.name!r}: {problems}"


class UnknownToolError(ToolboxError):
    """The model called a tool that is not offered in this call; `.tool_names` has the offered ones.

    `.search_tool` is the name of the tool that finds more tools, or None.
    """

    is_refusal = False  # True if the framework refused the call; a tool can raise this error too

    def __init__(
        self, request: ToolExecutionRequest, tool_names: Sequence[str], search_tool: str | None = None
    ) -> None:
        super().__init__(request, tuple(tool_names), search_tool)
        self.request, self.tool_names, self.search_tool = request, tuple(tool_names), search_tool

    def __str__(self) -> str:
        offered = ", ".join(self.tool_names) or "none"
        search = f"; more tools can be found with {self.search_tool!r}" if self.search_tool is not None else ""
        fix = "add it to tools= or set on_unknown_tool="
        return f"unknown tool {brief(self.request.name)!r}; offered: {offered}{search}; {fix}"


class ToolResultError(ToolboxError):
    """A tool returned a value that JSON cannot represent; `.reason` says why."""

    def __init__(self, tool: str, type_name: str, reason: str) -> None:
        super().__init__(tool, type_name, reason)
        self.tool, self.type_name, self.reason = tool, type_name, reason

    def __str__(self) -> str:
        if "surrogate" in self.reason:
            return (
                f"the result of tool {self.tool!r} contains a lone surrogate, which is not a valid character "
                f"({self.reason}); decode the original bytes with errors='replace', or use "
                "text.encode(errors='replace').decode()"
            )
        return (
            f"the result of tool {self.tool!r} is a {self.type_name}, which cannot be written as JSON ({self.reason}); "
            "return a str, a pydantic model or a ToolExecutionResult"
        )


class ToolTimeoutError(_Timeout):
    """A tool took longer than its `timeout` (seconds)."""

    def __init__(self, tool: str, timeout: float) -> None:
        super().__init__(tool, timeout)
        self.tool, self.timeout = tool, timeout

    def __str__(self) -> str:
        return f"tool {self.tool!r} took longer than its timeout of {self.timeout:g} s"


class TranscriptError(ToolboxError, ValueError):
    """A text is not a stored conversation or specification, or a conversation cannot be stored.

    `.path` is the place in the JSON, `.what` the problem.
    """

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(path, what)
        self.path, self.what = path, what

    def __str__(self) -> str:
        place = f"{self.path}: " if self.path else ""
        return f"{place}{self.what}; use only text from messages_to_json or specification_to_json, with JSON attributes"


# --- services


class ToolRoundsExceededError(ToolboxError):
    """The model called tools in more rounds than allowed; `.transcript` has the messages including its last reply."""

    def __init__(self, limit: int, transcript: Sequence[Message] = ()) -> None:
        super().__init__(limit, tuple(transcript))
        self.limit, self.transcript = limit, tuple(transcript)

    def __str__(self) -> str:
        rounds = f"{self.limit} round{'' if self.limit == 1 else 's'}"
        return f"the model asked for more tools after {rounds}; raise max_tool_rounds= or change the prompt"


class ToolCallsLimitExceededError(ToolboxError):
    """One reply contained too many tool calls; none of them ran. `.transcript` ends with that reply."""

    def __init__(self, limit: int, attempted: int, transcript: Sequence[Message] = ()) -> None:
        super().__init__(limit, attempted, tuple(transcript))
        self.limit, self.attempted, self.transcript = limit, attempted, tuple(transcript)

    def __str__(self) -> str:
        return (
            f"the model asked for {self.attempted} tools in one reply; the limit is {self.limit}; "
            "raise max_tool_calls_per_response="
        )


class OutputParsingError(ToolboxError):
    """A reply does not match the method's return type.

    `.text` is the reply; `.problems` has a (path, message) pair for each problem.
    """

    def __init__(self, text: str, problems: Sequence[tuple[Path, str]]) -> None:
        super().__init__(text, problems)
        self.text, self.problems = text, list(problems)

    def __str__(self) -> str:
        problems = "; ".join(f"{path}: {message}" if path else message for path, message in self.problems)
        excerpt = self.text if len(self.text) <= 200 else f"{self.text[:200]}…"
        fix = "simplify the type, describe its fields, or raise max_output_retries="
        return f"the model's reply does not match the declared type ({problems}); {fix}; the reply: {excerpt}"


class InputGuardrailError(ToolboxError):
    """Input guardrails refused a user message; nothing was sent to a model.

    `.failures` has a (guardrail class, text) pair for each failure. The message does not contain them, because a model
    reads it if the service is a tool.
    """

    def __init__(self, failures: Sequence[tuple[type, str]]) -> None:
        super().__init__(tuple(failures))
        self.failures = tuple(failures)

    def __str__(self) -> str:
        return "the input was refused by a guardrail"


class OutputGuardrailError(ToolboxError):
    """Output guardrails refused the model's answer.

    `.failures` has a (guardrail class, text) pair for each failure of the last answer, `.text` is that answer. The
    message does not contain them, because a model reads it if the service is a tool.
    """

    def __init__(self, failures: Sequence[tuple[type, str]], text: str) -> None:
        super().__init__(tuple(failures), text)
        self.failures, self.text = tuple(failures), text

    def __str__(self) -> str:
        return "the answer was refused by a guardrail"


class ToolGuardrailError(ToolboxError, EndsInvocation):
    """A guardrail of a tool ended the invocation and all outer ones.

    `.guardrail` is its class, `.request` the tool call, `.text` the reason.
    """

    def __init__(self, guardrail: type, request: ToolExecutionRequest, text: str = "") -> None:
        super().__init__(guardrail, request, text)
        self.guardrail, self.request, self.text = guardrail, request, text

    def __str__(self) -> str:
        return self.text or f"{self.guardrail.__name__} refused tool {self.request.name!r}"


class InvocationTimeoutError(_Timeout):
    """A service call took longer than its limit; `.limit` is in seconds."""

    def __init__(self, service: str, method: str, limit: float) -> None:
        super().__init__(service, method, limit)
        self.service, self.method, self.limit = service, method, limit

    def __str__(self) -> str:
        return f"{self.service}.{self.method} took longer than its limit of {self.limit:g} s"


class InvalidMemoryIdError(ToolboxError, ValueError):
    """Memory stores cannot keep this memory id; `.reason` says why. It is raised before any store is used."""

    def __init__(self, service: str, memory_id: str, reason: str) -> None:
        super().__init__(service, memory_id, reason)
        self.service, self.memory_id, self.reason = service, memory_id, reason

    def __str__(self) -> str:
        return f"invalid memory id {brief(self.memory_id)!r} for {self.service}: {self.reason}; use another id"


class MemoryLeaseLostError(ToolboxError):
    """A call was not saved, because this process lost its lease on the conversation during the call."""

    def __init__(self, service: str, memory_id: str) -> None:
        super().__init__(service, memory_id)
        self.service, self.memory_id = service, memory_id

    def __str__(self) -> str:
        return (
            f"conversation {self.memory_id!r} of {self.service} was not saved: this process could not renew its lease "
            "in time, so another process may use it now; call again, or give the memory store a longer lease="
        )


# --- runs


class RunSuspendedError(FrameworkError):
    """A call was suspended: `.pending` has the calls that wait for an answer, `.run_id` names the run.

    Methods that return `Result[…]` return these values instead, and streams end with `RunSuspended`.
    """

    is_abandoned = False  # True if the framework cancelled the run, because code that cannot wait let the error through

    def __init__(self, run_id: str, pending: Sequence[PendingCall] = ()) -> None:
        super().__init__(run_id, tuple(pending))
        self.run_id, self.pending = run_id, tuple(pending)

    def __str__(self) -> str:
        calls = ", ".join(f"{each.tool_name} ({each.id})" for each in self.pending)
        return f"run {self.run_id} is suspended until these calls are answered: {calls}; use runs.resume(…)"


class RunAnswerError(FrameworkError):
    """An answer to a suspended run was refused, and the run did not change; `.reason` says why.

    `.problems` has a (path, message) pair for each problem with new arguments or a supplied value; else it is empty.
    """

    def __init__(self, run_id: str, reason: str, problems: Sequence[tuple[Path, str]] = ()) -> None:
        super().__init__(run_id, reason, tuple(problems))
        self.run_id, self.reason, self.problems = run_id, reason, tuple(problems)

    def __str__(self) -> str:
        return f"run {brief(self.run_id)}: {self.reason}"


class AnswerForbiddenError(RunAnswerError):
    """The person may not answer a pending call, because of its `approvers` or `not_self`; `.reason` says why.

    `.is_anonymous` is True if no person was given. `.status` is the HTTP status: 401 for an anonymous person, else 403.
    """

    def __init__(self, run_id: str, reason: str, is_anonymous: bool = False) -> None:
        super().__init__(run_id, reason)
        self.args = (run_id, reason, is_anonymous)
        self.is_anonymous = is_anonymous

    @property
    def status(self) -> int:
        """The HTTP status."""
        return 401 if self.is_anonymous else 403


class RunIncompatibleError(FrameworkError):
    """The program has changed, and a stored run no longer fits; the run stays as it is. `.reason` says why."""

    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(run_id, reason)
        self.run_id, self.reason = run_id, reason

    def __str__(self) -> str:
        return (
            f"run {self.run_id} does not fit this program: {self.reason}; resume it with the old program or cancel it"
        )


class RunNotFoundError(FrameworkError):
    """The store has no run with this id."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self.run_id = run_id

    def __str__(self) -> str:
        return f"unknown run {brief(self.run_id)!r}; it may have been deleted or purged"


class RunStateError(FrameworkError):
    """A run cannot do this in its current state; `.reason` says why."""

    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(run_id, reason)
        self.run_id, self.reason = run_id, reason

    def __str__(self) -> str:
        return f"run {self.run_id}: {self.reason}"


class RunConflictError(FrameworkError):
    """The id of a run exists, but with another method, identity, arguments or attributes; `.reason` says which."""

    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(run_id, reason)
        self.run_id, self.reason = run_id, reason

    def __str__(self) -> str:
        return f"run {brief(self.run_id)!r} exists with {self.reason}; use a new id for another call"


class RunBusyError(FrameworkError):
    """Another process runs this run, and the time to wait for it is over."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self.run_id = run_id

    def __str__(self) -> str:
        return f"another process executes run {self.run_id}; try again later"


class RunStoreError(FrameworkError):
    """The store of runs failed, so the run cannot continue here; `.reason` is its error. The run stays as it is."""

    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(run_id, reason)
        self.run_id, self.reason = run_id, reason

    def __str__(self) -> str:
        return f"run {self.run_id}: the store of runs failed: {self.reason}; the run can be continued later"


class LeaseLostError(FrameworkError):
    """Another process has taken over this run, so this process writes nothing more."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self.run_id = run_id

    def __str__(self) -> str:
        return f"this process no longer owns run {self.run_id}, because its lease expired; another process runs it now"


class RunFailedError(ToolboxError):
    """A run has failed: `.error_type` is the name of the exception's type, `.text` its message."""

    def __init__(self, run_id: str, error_type: str, text: str) -> None:
        super().__init__(run_id, error_type, text)
        self.run_id, self.error_type, self.text = run_id, error_type, text

    def __str__(self) -> str:
        return f"run {self.run_id} failed with {self.error_type}: {self.text}"


class RunCancelledError(ToolboxError):
    """A run was cancelled; `.reason` is the reason, if one was given."""

    def __init__(self, run_id: str, reason: str | None = None) -> None:
        super().__init__(run_id, reason)
        self.run_id, self.reason = run_id, reason

    def __str__(self) -> str:
        return f"run {self.run_id} was cancelled" + (f": {self.reason}" if self.reason else "")


class ConversationSuspendedError(FrameworkError):
    """The conversation has a suspended run, `.run_id`, which must be answered or cancelled first."""

    def __init__(self, service: str, run_id: str) -> None:
        super().__init__(service, run_id)
        self.service, self.run_id = service, run_id

    def __str__(self) -> str:
        return (
            f"this conversation of {self.service} has the suspended run {self.run_id}; resume or cancel that run, "
            'or use on_suspended="cancel"'
        )


# --- databases


class TransactionRolledBackError(ToolboxError):
    """A `@transactional` call succeeded, but its changes were rolled back; `.reason` says why."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what, self.reason = what, reason

    def __str__(self) -> str:
        return f"{self.what} was rolled back: {self.reason}"


# --- models


class ModelError(ToolboxError):
    """Base class of model errors: no reply, or an unusable one."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class ModelHttpError(ModelError):
    """The model server answered with an HTTP error status.

    `.status`, `.message` (the server's text), `.body` (an excerpt), `.request_id` (if the server sent one).
    """

    def __init__(self, status: int, message: str, body: str = "", request_id: str | None = None) -> None:
        super().__init__(message)
        self.args = (status, message, body, request_id)
        self.status, self.body, self.request_id = status, body, request_id

    def __str__(self) -> str:
        request = f" (request {self.request_id})" if self.request_id else ""
        return f"the model server answered {self.status}{request}: {self.message}"


class ModelProtocolError(ModelError):
    """The model server's response is not a chat reply; `.body` is an excerpt of it."""

    def __init__(self, message: str, body: str = "", status: int | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.args = (message, body, status, request_id)
        self.body, self.status, self.request_id = body, status, request_id

    def __str__(self) -> str:
        request = f" (request {self.request_id})" if self.request_id else ""
        excerpt = f"; the response begins: {self.body}" if self.body else ""
        return f"{self.message}{request}{excerpt}"


class ModelConnectionError(ModelError):
    """The model server cannot be reached, or the connection broke."""


class ModelTimeoutError(ModelError, TimeoutError):
    """The model server did not answer in time."""

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.message,)


class ModelRefusedError(ModelError):
    """The model refused to answer. `.text` is what it wrote: its refusal, or the beginning of a stopped answer."""

    def __init__(self, message: str, text: str | None = None) -> None:
        super().__init__(message)
        self.text = message if text is None else text
        self.args = (message, self.text)


class UnsupportedContentError(ModelError):
    """A message contains a part that the model's API does not support. Nothing was sent.

    `.content` is the class of the part, such as `PdfContent`; `.place` is where it is, such as `messages.2.contents.0`;
    `.reason` says which API does not support it, and what to do.
    """

    def __init__(self, content: str, reason: str, place: str = "") -> None:
        super().__init__(f"{place}: {content}: {reason}" if place else f"{content}: {reason}")
        self.args = (content, reason, place)
        self.content, self.reason, self.place = content, reason, place


class ModelTruncatedError(ModelError):
    """The token limit cut the reply: inside a tool call or structured answer, or before any text.

    `.text` is the part that arrived.
    """

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.args = (message, text)
        self.text = text


# --- REST clients


class RestClientError(ToolboxError):
    """A REST call failed.

    `.url`; `.status` (None without a reply); `.body` (an excerpt of the reply).
    """

    def __init__(self, message: str, url: str, status: int | None = None, body: str = "") -> None:
        super().__init__(message, url, status, body)
        self.message, self.url, self.status, self.body = message, url, status, body

    def __str__(self) -> str:
        status = f" {self.status}" if self.status is not None else ""
        excerpt = f": {self.body}" if self.body else ""
        return f"{self.message}{status} ({self.url}){excerpt}"


class RestTimeoutError(RestClientError, TimeoutError):
    """A REST server did not answer in time."""

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.message, self.url, self.status, self.body)


class RestDecodeError(RestClientError):
    """A REST server's reply does not match the declared return type."""


# --- MCP servers


class McpError(ToolboxError):
    """An MCP server refused a request or reported an error.

    `server` is its name, `message` the text, `code` the JSON-RPC error code, or None.
    """

    def __init__(self, server: str, message: str, code: int | None = None) -> None:
        super().__init__(server, message, code)
        self.server, self.message, self.code = server, message, code

    def __str__(self) -> str:
        return self.message


class McpConnectionError(McpError):
    """An MCP server cannot be reached, or the connection broke. The next call opens a new connection.

    `.status` is the status of the HTTP server that refused, such as 401 for a token that has expired;
    `.www_authenticate` is its header of that name. Both are None if there was no reply.
    """

    def __init__(
        self,
        server: str,
        message: str,
        code: int | None = None,
        status: int | None = None,
        www_authenticate: str | None = None,
    ) -> None:
        super().__init__(server, message, code)
        self.args = (server, message, code, status, www_authenticate)
        self.status, self.www_authenticate = status, www_authenticate

    def __str__(self) -> str:
        return f"MCP server {self.server!r}: {self.message}"


class McpInputRequiredError(McpError):
    """An MCP server needs input before it can finish a call.

    `requests` is what it asks for, as JSON values by the server's keys: `message`, and the `schema` of the answer or
    the `url` to open. `state` goes back to the server together with the answers.
    """

    def __init__(self, server: str, requests: Mapping[str, Mapping[str, object]], state: str | None = None) -> None:
        super().__init__(server, "; ".join(str(each.get("message", "")) for each in requests.values()))
        self.args = (server, dict(requests), state)
        self.requests, self.state = dict(requests), state

    def __str__(self) -> str:
        return f"MCP server {self.server!r} asks for input: {self.message}"


class McpTimeoutError(McpError, TimeoutError):
    """An MCP server did not answer in time; `timeout` of its settings is the limit."""

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.server, self.message, self.code)
