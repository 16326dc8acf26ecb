"""The errors of the library, and `Problem`, which configuration checks report.

Errors keep their facts as attributes and can be pickled and copied. Their texts name the place, the fact and the fix.
A `FrameworkError` always reaches the caller and is never sent to a model. Tools raise `ToolRetry` and `ToolAbort`,
which are not `ToolboxError`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any, ClassVar, TypeAlias, dataclass_transform

from .chat import Message, PendingCall, ToolExecutionRequest
from .safe_text import brief, faults_text

__all__ = [
    "AmbiguousBeanError",
    "AnswerForbiddenError",
    "AsyncBeanError",
    "BlockingCallNotAllowedError",
    "ContainerNotStartedError",
    "ContextLengthError",
    "ConversationBusyError",
    "ConversationNotFoundError",
    "ConversationStoppedError",
    "ConversationSuspendedError",
    "EndsInvocation",
    "FrameworkError",
    "IllegalConfigurationError",
    "InputGuardrailError",
    "InvalidMemoryIdError",
    "InvocationTimeoutError",
    "LeaseLostError",
    "McpConnectionError",
    "McpError",
    "McpInputRequiredError",
    "McpTimeoutError",
    "MemoryInUseError",
    "MemoryLeaseLostError",
    "MissingBeanError",
    "ModelConnectionError",
    "ModelError",
    "ModelHttpError",
    "ModelProtocolError",
    "ModelRefusedError",
    "ModelTimeoutError",
    "ModelTruncatedError",
    "OAuthError",
    "OpenTransactionError",
    "OutputGuardrailError",
    "OutputParsingError",
    "Problem",
    "RestArgumentError",
    "RestClientError",
    "RestDecodeError",
    "RestTimeoutError",
    "RunAnswerError",
    "RunBusyError",
    "RunCancelledError",
    "RunConflictError",
    "RunFailedError",
    "RunIncompatibleError",
    "RunNotFoundError",
    "RunStateError",
    "RunStoreError",
    "RunSuspendedError",
    "ScopeNotActiveError",
    "StoredBeanError",
    "ToolAbort",
    "ToolArgumentsError",
    "ToolCallsLimitExceededError",
    "ToolDeferred",
    "ToolGuardrailError",
    "ToolResultError",
    "ToolRetry",
    "ToolRoundsExceededError",
    "ToolTimeoutError",
    "ToolboxError",
    "TransactionRolledBackError",
    "TranscriptError",
    "UnknownToolError",
    "UnsupportedContentError",
]

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


@dataclass(frozen=True, slots=True)
class _CopiedFact:
    copy: Callable[[Iterable[Any]], Sequence[Any]]
    default: Any


def _copied(copy: Callable[[Iterable[Any]], Sequence[Any]], *, default: Any = Parameter.empty) -> Any:
    """Declare a fact that the error keeps a copy of, so that it does not change with the caller's list."""
    return _CopiedFact(copy, default)


@dataclass_transform(field_specifiers=(_copied,))
class _WithFacts(Exception):  # noqa: N818 - not public
    """Reads the facts of an error class from its annotations.

    The constructor takes them by position or name and keeps them as attributes and as `args`, so that pickling and
    copying rebuild the error. `template` is the text, with facts in braces; a text that needs more is a `__str__`.
    `hint` is a note for the developer, not part of the text: a model may read that.
    """

    template: ClassVar[str]
    hint: ClassVar[str] = ""
    _facts: ClassVar[Signature] = Signature()
    _copies: ClassVar[dict[str, Callable[[Iterable[Any]], Sequence[Any]]]] = {}
    __signature__: ClassVar[Signature | None]

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        facts, copies = dict(cls._facts.parameters), dict(cls._copies)
        for name, kind in cls.__annotations__.items():
            default = vars(cls).get(name, Parameter.empty)
            if isinstance(default, _CopiedFact):
                copies[name] = default.copy
                default = default.default
            facts[name] = Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)
        cls._facts, cls._copies = Signature(list(facts.values())), copies
        cls.__signature__ = None if "__init__" in vars(cls) else cls._facts

    def __init__(self, *values: object, **named: object) -> None:
        Exception.__init__(self)  # an `OSError`, such as `TimeoutError`, would give two values another meaning
        bound = self._facts.bind(*values, **named)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            setattr(self, name, self._copies[name](value) if name in self._copies else value)
        self.args = tuple(getattr(self, name) for name in self._facts.parameters)
        if self.hint:
            self.add_note(self.hint)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, self.__dict__

    def __str__(self) -> str:
        return self.template.format_map(vars(self))


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


class MissingBeanError(_WithFacts, FrameworkError):
    """No bean provides the requested type or name.

    `.near` has the names of similar beans, `.where` the parameter that needs the bean, if there is one, and `.fix` the
    fix, if it is not to register a bean.
    """

    wanted: str
    near: Sequence[str] = ()  # not copied: similar names are searched for only when somebody reads them
    where: str = ""
    fix: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        near = f"; did you mean {' or '.join(self.near)}?" if self.near else ""
        fix = self.fix or "register one, or seed it into the request scope"
        fix += ", or pass the argument yourself" if self.where else ""
        return f"{place}no bean provides {self.wanted}{near}; {fix}"


class AmbiguousBeanError(_WithFacts, FrameworkError):
    """Several beans provide the requested type; `.candidates` has their names."""

    wanted: str
    candidates: Sequence[str] = _copied(tuple)

    def __str__(self) -> str:
        beans = ", ".join(self.candidates)
        return (
            f"several beans provide {self.wanted}: {beans}; request one by its class or name, or choose one with bind()"
        )


class AsyncBeanError(_WithFacts, FrameworkError):
    """`get` was called for a bean that async code creates; `.path` leads from the bean to the async producer."""

    wanted: str
    path: str

    def __str__(self) -> str:
        path = f" ({self.path})" if self.path != self.wanted else ""
        return f"{self.wanted} is created by async code{path}; use `await aget(…)`"


class ScopeNotActiveError(_WithFacts, FrameworkError):
    """A bean was requested outside its scope, or in a scope that has ended; `.reason` says which."""

    wanted: str
    reason: str
    opened_by: str = "container.request_scope()"
    template = "{wanted}: {reason}; look it up inside `async with {opened_by}:`"


class StoredBeanError(_WithFacts, FrameworkError):
    """A conversation-scoped bean cannot be stored, or no longer reads what is stored.

    `.bean` is the name of its class, `.field` that of the field, or "" for the whole bean, and `.reason` says what is
    wrong. The values are not in the text.
    """

    bean: str
    field: str
    reason: str

    def __str__(self) -> str:
        where = f"{self.bean}.{self.field}" if self.field else self.bean
        fix = 'correct the value or the type, or start with defaults: @conversation_scoped(on_invalid="reset")'
        return f"{where}: {self.reason}; {fix}"


class ContainerNotStartedError(_WithFacts, FrameworkError):
    """A container was used before it was started or after it was stopped.

    `.reason` is set where a container was started, but cannot be used: in a process that was forked while the container
    was running, whose event loop and beans belong to the parent process, or while its event loop does not run.
    """

    what: str
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.what}: {self.reason}"
        return (
            f"{self.what}: the container is not started; use it inside `async with container:` or `with container:` "
            "(in a web application: while its lifespan runs; in tests: inside `with TestClient(app)`, or for httpx's "
            "AsyncClient, which runs no lifespan, inside `async with container, AsyncClient(…)`)"
        )


class BlockingCallNotAllowedError(_WithFacts, FrameworkError):
    """A blocking call was made on a thread that runs an event loop."""

    what: str
    template = (
        "{what} would block the event loop of this thread; "
        "declare it `async def` and await it, or call it on a worker thread (`await asyncio.to_thread(…)`)"
    )


class MemoryInUseError(_WithFacts, FrameworkError):
    """A call would wait for itself: a tool, or the reader of a stream, called a service in its own conversation.

    Also code inside of a block that holds the conversation, if it needs the conversation for itself.
    """

    service: str
    memory_id: str
    template = (
        "conversation {memory_id!r} of {service} is in use by an outer call or block, or by an open stream of the "
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
        return f"the tool's result is deferred: {self.reason}" if self.reason else "the tool's result is deferred"


class ToolArgumentsError(_WithFacts, ToolboxError):
    """The model called a tool with invalid arguments; `.problems` has a (path, message) pair for each problem."""

    request: ToolExecutionRequest
    problems: list[tuple[Path, str]] = _copied(list)

    def __str__(self) -> str:
        return f"invalid arguments for tool {self.request.name!r}: {faults_text(self.problems)}"


class UnknownToolError(_WithFacts, ToolboxError):
    """The model called a tool that is not offered in this call; `.tool_names` has the offered ones.

    `.search_tool` is the name of the tool that finds more tools, or None.
    """

    is_refusal = False  # True if the framework refused the call; a tool can raise this error too

    request: ToolExecutionRequest
    tool_names: Sequence[str] = _copied(tuple)
    search_tool: str | None = None

    def __str__(self) -> str:
        offered = ", ".join(self.tool_names) or "none"
        search = f"; more tools can be found with {self.search_tool!r}" if self.search_tool is not None else ""
        fix = "add it to tools= or set on_unknown_tool="
        return f"unknown tool {brief(self.request.name)!r}; offered: {offered}{search}; {fix}"


class ToolResultError(_WithFacts, ToolboxError):
    """A tool returned a value that JSON cannot represent; `.reason` says why."""

    tool: str
    type_name: str
    reason: str

    def __str__(self) -> str:
        return (
            f"the result of tool {self.tool!r} is a {self.type_name}, which cannot be written as JSON ({self.reason}); "
            "return a str, a pydantic model or a ToolExecutionResult"
        )


class ToolTimeoutError(_WithFacts, ToolboxError, TimeoutError):
    """A tool, or a retriever, took longer than its `timeout` (seconds)."""

    tool: str
    timeout: float
    template = "tool {tool!r} took longer than its timeout of {timeout:g} s"
    hint = "raise @tool(timeout=…) or the retriever's `timeout`, or make it faster"


class TranscriptError(_WithFacts, ToolboxError, ValueError):
    """A text is not a stored conversation or specification, or a conversation cannot be stored.

    `.path` is the place in the JSON, `.what` the problem, `.fix` what to do.
    """

    path: Path
    what: str
    fix: str = "use only text from messages_to_json or specification_to_json, with JSON attributes"

    def __str__(self) -> str:
        place = f"{self.path}: " if self.path else ""
        return f"{place}{self.what}; {self.fix}"


# --- services


class ToolRoundsExceededError(_WithFacts, ToolboxError):
    """The model called tools in more rounds than allowed; `.transcript` has the messages including its last reply."""

    limit: int
    transcript: Sequence[Message] = _copied(tuple, default=())

    def __str__(self) -> str:
        rounds = f"{self.limit} round{'' if self.limit == 1 else 's'}"
        return f"the model asked for more tools after {rounds}; raise max_tool_rounds= or change the prompt"


class ToolCallsLimitExceededError(_WithFacts, ToolboxError):
    """One reply contained too many tool calls; none of them ran. `.transcript` ends with that reply."""

    limit: int
    attempted: int
    transcript: Sequence[Message] = _copied(tuple, default=())
    template = (
        "the model asked for {attempted} tools in one reply; the limit is {limit}; raise max_tool_calls_per_response="
    )


class OutputParsingError(_WithFacts, ToolboxError):
    """A reply does not match the method's return type.

    `.text` is the reply; `.problems` has a (path, message) pair for each problem.
    """

    text: str
    problems: list[tuple[Path, str]] = _copied(list)

    def __str__(self) -> str:
        problems = faults_text(self.problems)
        excerpt = self.text if len(self.text) <= 200 else f"{self.text[:200]}…"
        fix = "simplify the type, describe its fields, or raise max_output_retries="
        return f"the model's reply does not match the declared type ({problems}); {fix}; the reply: {excerpt}"


class InputGuardrailError(_WithFacts, ToolboxError):
    """Input guardrails refused a user message; nothing was sent to a model.

    `.failures` has a (guardrail class, text) pair for each failure. The message does not contain them, because a model
    reads it if the service is a tool.
    """

    failures: Sequence[tuple[type, str]] = _copied(tuple)
    template = "the input was refused by a guardrail"


class OutputGuardrailError(_WithFacts, ToolboxError):
    """Output guardrails refused the model's answer.

    `.failures` has a (guardrail class, text) pair for each failure of the last answer, `.text` is that answer. The
    message does not contain them, because a model reads it if the service is a tool.
    """

    failures: Sequence[tuple[type, str]] = _copied(tuple)
    text: str
    template = "the answer was refused by a guardrail"


class ToolGuardrailError(_WithFacts, ToolboxError, EndsInvocation):
    """A guardrail of a tool ended the invocation and all outer ones.

    `.guardrail` is its class, `.request` the tool call, `.text` the reason.
    """

    guardrail: type
    request: ToolExecutionRequest
    text: str = ""

    def __str__(self) -> str:
        return self.text or f"{self.guardrail.__name__} refused tool {self.request.name!r}"


class InvocationTimeoutError(_WithFacts, ToolboxError, TimeoutError):
    """A service call took longer than its limit; `.limit` is in seconds."""

    service: str
    method: str
    limit: float
    template = "{service}.{method} took longer than its limit of {limit:g} s"
    hint = "raise timeout= or time_limit(…), or make the tools faster"


class InvalidMemoryIdError(_WithFacts, ToolboxError, ValueError):
    """Memory stores cannot keep this memory id; `.reason` says why. It is raised before any store is used."""

    service: str
    memory_id: str
    reason: str

    def __str__(self) -> str:
        return f"invalid memory id {brief(self.memory_id)!r} for {self.service}: {self.reason}; use another id"


class MemoryLeaseLostError(_WithFacts, ToolboxError):
    """A call was not saved, because this process lost its lease on the conversation during the call."""

    service: str
    memory_id: str
    template = (
        "conversation {memory_id!r} of {service} was not saved: this process could not renew its lease "
        "in time, so another process may use it now; call again, or give the memory store a longer lease="
    )


# --- runs


class RunSuspendedError(_WithFacts, FrameworkError):
    """A call was suspended: `.pending` has the calls that wait for an answer, `.run_id` names the run.

    Methods that return `Result[…]` return these values instead, and streams end with `RunSuspended`.
    """

    is_abandoned = False  # True if the framework cancelled the run, because code that cannot wait let the error through

    run_id: str
    pending: Sequence[PendingCall] = _copied(tuple, default=())

    def __str__(self) -> str:
        calls = ", ".join(f"{each.tool_name} ({each.id})" for each in self.pending)
        return f"run {self.run_id} is suspended until these calls are answered: {calls}; use runs.resume(…)"


def is_suspension(error: BaseException | None) -> bool:
    """Return True for the error of a call that waits for answers, or a group of such errors; it has not failed."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_suspension, error.exceptions))
    return isinstance(error, RunSuspendedError) and not error.is_abandoned


class RunAnswerError(_WithFacts, FrameworkError):
    """An answer to a suspended run was refused, and the run did not change; `.reason` says why.

    `.problems` has a (path, message) pair for each problem with new arguments or a supplied value; else it is empty.
    """

    run_id: str
    reason: str
    problems: Sequence[tuple[Path, str]] = _copied(tuple, default=())

    def __str__(self) -> str:
        return f"run {brief(self.run_id)}: {self.reason}"


class AnswerForbiddenError(RunAnswerError):
    """The person may not answer a pending call, because of its `approvers` or `not_self`; `.reason` says why.

    `.is_anonymous` is True if no person was given. `.status` is the HTTP status: 401 for an anonymous person, else 403.
    """

    is_anonymous: bool = False

    @property
    def status(self) -> int:
        """Return the HTTP status: 401 for an anonymous person, else 403."""
        return 401 if self.is_anonymous else 403


class RunIncompatibleError(_WithFacts, FrameworkError):
    """The program has changed, and a stored run no longer fits; the run stays as it is. `.reason` says why."""

    run_id: str
    reason: str
    template = "run {run_id} does not fit this program: {reason}; resume it with the old program or cancel it"


class RunNotFoundError(_WithFacts, FrameworkError):
    """The store has no run with this id."""

    run_id: str

    def __str__(self) -> str:
        return f"unknown run {brief(self.run_id)!r}; it may have been deleted or purged"


class RunStateError(_WithFacts, FrameworkError):
    """A run cannot do this in its current state; `.reason` says why."""

    run_id: str
    reason: str
    template = "run {run_id}: {reason}"


class RunConflictError(_WithFacts, FrameworkError):
    """The id of a run exists, but with another method, identity, arguments or attributes; `.reason` says which."""

    run_id: str
    reason: str

    def __str__(self) -> str:
        return f"run {brief(self.run_id)!r} exists with {self.reason}; use a new id for another call"


class RunBusyError(_WithFacts, FrameworkError):
    """Another process runs this run, and the time to wait for it is over."""

    run_id: str
    template = "another process executes run {run_id}; try again later"


class RunStoreError(_WithFacts, FrameworkError):
    """The store of runs, or that of conversations, failed, so the run stays as it is; `.reason` is the error."""

    run_id: str
    reason: str
    template = "run {run_id}: a store failed: {reason}; the run can be continued later"


class LeaseLostError(_WithFacts, FrameworkError):
    """Another process has taken over this run, so this process writes nothing more."""

    run_id: str
    template = "this process no longer owns run {run_id}, because its lease expired; another process runs it now"


def leaves_run_unchanged(error: BaseException, run_id: str) -> bool:
    """Return True for an error after which this run stays as it is, so that it can be continued.

    A tool may raise the same kinds of errors about other runs.
    """
    return isinstance(error, (LeaseLostError, RunStoreError, RunIncompatibleError)) and error.run_id == run_id


class RunFailedError(_WithFacts, ToolboxError):
    """A run has failed: `.error_type` is the name of the exception's type, `.text` its message."""

    run_id: str
    error_type: str
    text: str
    template = "run {run_id} failed with {error_type}: {text}"


class RunCancelledError(_WithFacts, ToolboxError):
    """A run was cancelled; `.reason` is the reason, if one was given."""

    run_id: str
    reason: str | None = None

    def __str__(self) -> str:
        return f"run {self.run_id} was cancelled" + (f": {self.reason}" if self.reason else "")


class ConversationBusyError(_WithFacts, ToolboxError):
    """Another call is at work in the conversation, and this one does not wait for it."""

    service: str
    memory_id: str
    template = "conversation {memory_id!r} of {service} is in use by another call; try again when that has ended"


class ConversationNotFoundError(_WithFacts, ToolboxError):
    """There is no conversation with this memory id."""

    service: str
    memory_id: str

    def __str__(self) -> str:
        return f"unknown conversation {brief(self.memory_id)!r} of {self.service}; it may have been deleted"


class ConversationStoppedError(_WithFacts, ToolboxError):
    """Somebody has stopped the conversation while this call was at work in it; `.by` is their name, if it is known."""

    by: str | None = None

    def __str__(self) -> str:
        return "the conversation was stopped" + (f" by {self.by}" if self.by else "")


class ConversationSuspendedError(_WithFacts, FrameworkError):
    """The conversation has a suspended run, `.run_id`, which must be answered or cancelled first."""

    service: str
    run_id: str
    template = (
        "this conversation of {service} has the suspended run {run_id}; resume or cancel that run, "
        'or use on_suspended="cancel" or "continue"'
    )


# --- databases


class OpenTransactionError(_WithFacts, FrameworkError):
    """A database session would keep its transaction, and its connection, while a model works.

    `.where` is the service method, `.what` the tables or statements that a commit could lose, `.fix` what to do about
    them, unless the transaction is to be kept.
    """

    where: str
    what: str
    fix: str = "commit before the call"
    template = (
        "{where}: a database session keeps its transaction and its connection while the model works "
        "({what}); {fix}, or keep it on purpose: `with sql.keep_transaction():`"
    )


class TransactionRolledBackError(_WithFacts, ToolboxError):
    """A `@transactional` call succeeded, but its changes were rolled back; `.reason` says why."""

    what: str
    reason: str
    template = "{what} was rolled back: {reason}"


# --- models


class ModelError(ToolboxError):
    """Base class of model errors: no reply, or an unusable one."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class ModelHttpError(_WithFacts, ModelError):
    """The model server answered with an HTTP error status.

    `.status`, `.message` (the server's text), `.body` (an excerpt), `.request_id` (if the server sent one).
    """

    status: int
    message: str
    body: str = ""
    request_id: str | None = None

    def __str__(self) -> str:
        request = f" (request {self.request_id})" if self.request_id else ""
        return f"the model server answered {self.status}{request}: {self.message}"


class ContextLengthError(ModelHttpError):
    """The request is too long for the model, alone or with the reply: shorten the conversation.

    The server refused it, or the model's context window was full before the reply was complete. No `fallback` is asked.
    """


class ModelProtocolError(_WithFacts, ModelError):
    """The model server's response is not a chat reply; `.body` is an excerpt of it."""

    message: str
    body: str = ""
    status: int | None = None
    request_id: str | None = None

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


class ModelTruncatedError(_WithFacts, ModelError):
    """The token limit cut the reply: inside a tool call or structured answer, or before any text.

    `.text` is the part that arrived.
    """

    message: str
    text: str = ""
    template = "{message}"


# --- REST clients


class RestClientError(_WithFacts, ToolboxError):
    """A REST call failed.

    `.url`; `.status` (None without a reply); `.body` (an excerpt of the reply).
    """

    message: str
    url: str
    status: int | None = None
    body: str = ""

    def __str__(self) -> str:
        status = f" {self.status}" if self.status is not None else ""
        excerpt = f": {self.body}" if self.body else ""
        return f"{self.message}{status} ({self.url}){excerpt}"


class RestTimeoutError(RestClientError, TimeoutError):
    """A REST server did not answer in time."""


class RestArgumentError(RestClientError, ValueError):
    """An argument of a REST call cannot be sent in its place. Nothing was sent."""


class RestDecodeError(RestClientError):
    """A REST server's reply does not match the declared return type."""


class OAuthError(RestClientError, EndsInvocation):
    """A token server did not issue a token; see `toolbox.oauth`. No error handler and no model gets this error.

    `.error` is the code of its reply, such as `invalid_client`; None without one. `.url` is that of the token server,
    `.body` is always empty. Calls of MCP servers raise it too.
    """

    error: str | None = None


# --- MCP servers


class McpError(_WithFacts, ToolboxError):
    """An MCP server refused a request or reported an error.

    `server` is its name, `message` the text, `code` the JSON-RPC error code, or None.
    """

    server: str
    message: str
    code: int | None = None

    template = "{message}"


class McpConnectionError(McpError):
    """An MCP server cannot be reached, or the connection broke. The next call opens a new connection.

    `.status` is the status of the HTTP server that refused, such as 401 for a token that has expired;
    `.www_authenticate` is its header of that name. Both are None if there was no reply.
    """

    status: int | None = None
    www_authenticate: str | None = None
    template = "MCP server {server!r}: {message}"


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
