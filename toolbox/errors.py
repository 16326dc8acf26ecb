"""Every error the library raises, and the `Problem`s a check reports.

An error keeps its facts as attributes and in `args` (so that it can be pickled and copied); `__str__` writes the text,
which ends with what to do. `FrameworkError`s are what the library says of itself: they always reach the caller, never
a model. `ToolRetry` and `ToolAbort` are what a tool says, and so are no `ToolboxError`s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .chat import Message, ToolExecutionRequest
from .validation_text import brief

Path: TypeAlias = str
"""Where in a value something is wrong: `"city"`, `"stops.0.name"`, `""` for the whole."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something a check found: the place, the fact, and the way out."""

    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"


class ToolboxError(Exception):
    """The base of every error of this library."""


class EndsInvocation(Exception):  # noqa: N818 - it marks errors of several kinds
    """Marks the errors that end an invocation, and those around it: no handler and no interceptor keeps them back.

    What the framework raises about itself is one, `ToolAbort` another.
    """


class _Timeout(ToolboxError, TimeoutError):  # noqa: N818 - not public
    """A `TimeoutError` that keeps all its facts: an `OSError` would keep no more than two of them."""

    def __init__(self, *facts: object) -> None:
        super().__init__()
        self._facts = facts

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), self._facts


# --- what the framework says of itself


class FrameworkError(ToolboxError, EndsInvocation):
    """What the library says of itself: of its configuration and its use. Never handled, never sent to a model."""


class IllegalConfigurationError(FrameworkError):
    """The program is put together wrongly; `.problems` has everything that is wrong."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        return f"{len(self.problems)} problems:{lines}"


class MissingBeanError(FrameworkError):
    """No bean provides what was asked for; `.near` names the beans that come close.

    `.where` is the parameter that it was asked for, if it was for one. `.fix` says what to do, if not to register one.
    """

    def __init__(self, wanted: str, near: Sequence[str] = (), where: str = "", fix: str = "") -> None:
        super().__init__(wanted, tuple(near), where, fix)
        self.wanted, self.near, self.where, self.fix = wanted, tuple(near), where, fix

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        near = f"; did you mean {' or '.join(self.near)}?" if self.near else ""
        fix = self.fix or "register one, or seed it into the request scope"
        fix += ", or give the value" if self.where else ""
        return f"{place}no bean provides {self.wanted}{near}; {fix}"


class AmbiguousBeanError(FrameworkError):
    """Several beans provide what was asked for; `.candidates` names them."""

    def __init__(self, wanted: str, candidates: Sequence[str]) -> None:
        super().__init__(wanted, tuple(candidates))
        self.wanted, self.candidates = wanted, tuple(candidates)

    def __str__(self) -> str:
        beans = ", ".join(self.candidates)
        return f"{self.wanted} is provided by {beans}; ask for one of them by class or name, or bind() the one you mean"


class AsyncBeanError(FrameworkError):
    """A bean has to be awaited and was asked for without; `.wanted` names it, `.path` the bean that must be awaited."""

    def __init__(self, wanted: str, path: str) -> None:
        super().__init__(wanted, path)
        self.wanted, self.path = wanted, path

    def __str__(self) -> str:
        path = f" ({self.path})" if self.path != self.wanted else ""
        return f"{self.wanted} is made by awaiting{path}; use `await aget(…)`"


class ScopeNotActiveError(FrameworkError):
    """A bean was asked for outside the scope it lives in, or in one that has ended."""

    def __init__(self, wanted: str, reason: str) -> None:
        super().__init__(wanted, reason)
        self.wanted, self.reason = wanted, reason

    def __str__(self) -> str:
        return f"{self.wanted}: {self.reason}; ask for it inside `async with container.request_scope():`"


class ContainerNotStartedError(FrameworkError):
    """A container was used before it was started, or after it was stopped.

    `.reason` is set in a process that was forked while the container was running: its event loop and its beans belong
    to the parent.
    """

    def __init__(self, what: str, reason: str = "") -> None:
        super().__init__(what, reason)
        self.what, self.reason = what, reason

    def __str__(self) -> str:
        if self.reason:
            return (
                f"{self.what}: {self.reason}; start the container in each process, after the fork "
                "(`with container:` works here, and makes new beans)"
            )
        return (
            f"{self.what}: the container is not started; use it inside `async with container:` or `with container:` "
            "(in a web application: while its lifespan runs, as inside `with TestClient(app)`)"
        )


class BlockingCallNotAllowedError(FrameworkError):
    """A synchronous call that waits was made on a thread that runs an event loop."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return (
            f"{self.what} would block the event loop of this thread; "
            "declare it `async def` and await it, or call it on a worker thread (`await asyncio.to_thread(…)`)"
        )


class MemoryInUseError(FrameworkError):
    """A call that would wait for itself: a tool's, or a stream's reader's, in the conversation that it is part of."""

    def __init__(self, service: str, memory_id: str) -> None:
        super().__init__(service, memory_id)
        self.service, self.memory_id = service, memory_id

    def __str__(self) -> str:
        return (
            f"conversation {self.memory_id!r} of {self.service} is in use by the call that this one is part of, or by "
            "a stream that its caller still reads; use another memory id, or a service without a MemoryId parameter, "
            "or close the stream first (`async with`, `aclose()`)"
        )


# --- tools


class ToolRetry(Exception):  # noqa: N818 - the contract's word
    """Raised by a tool: what the model should know to try again. It becomes an error result; no handler sees it."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text)
        self.text = text


class ToolAbort(EndsInvocation):
    """Raised by a tool: ends the invocation, and those around it, and reaches the caller unchanged."""


class ToolArgumentsError(ToolboxError):
    """A tool call's arguments cannot be used; `.problems` has a (path, message) for each fault."""

    def __init__(self, request: ToolExecutionRequest, problems: Sequence[tuple[Path, str]]) -> None:
        super().__init__(request, problems)
        self.request, self.problems = request, list(problems)

    def __str__(self) -> str:
        faults = "; ".join(f"{path}: {message}" if path else message for path, message in self.problems)
        return f"the arguments of tool {self.request.name!r} cannot be used: {faults}"


class UnknownToolError(ToolboxError):
    """The model asked for a tool that this call does not offer."""

    def __init__(self, request: ToolExecutionRequest, tool_names: Sequence[str]) -> None:
        super().__init__(request, tuple(tool_names))
        self.request, self.tool_names = request, tuple(tool_names)

    def __str__(self) -> str:
        offered = ", ".join(self.tool_names) or "none"
        return f"no tool {brief(self.request.name)!r}; offered: {offered}; add it to tools= or set on_unknown_tool="


class ToolResultError(ToolboxError):
    """A tool returned a value that cannot be written as JSON."""

    def __init__(self, tool: str, type_name: str, reason: str) -> None:
        super().__init__(tool, type_name, reason)
        self.tool, self.type_name, self.reason = tool, type_name, reason

    def __str__(self) -> str:
        if "surrogate" in self.reason:
            return (
                f"the result of tool {self.tool!r} contains a lone surrogate, which is not a valid character "
                f"({self.reason}); decode the bytes that it was read from with errors='replace', or use "
                "text.encode(errors='replace').decode()"
            )
        return (
            f"the result of tool {self.tool!r} is a {self.type_name}, which cannot be written as JSON ({self.reason}); "
            "return a str, a pydantic model or a ToolExecutionResult"
        )


class ToolTimeoutError(_Timeout):
    """A tool took longer than its `timeout`, in seconds."""

    def __init__(self, tool: str, timeout: float) -> None:
        super().__init__(tool, timeout)
        self.tool, self.timeout = tool, timeout

    def __str__(self) -> str:
        return f"tool {self.tool!r} took longer than its timeout of {self.timeout:g} s"


class TranscriptError(ToolboxError, ValueError):
    """A text is no stored conversation or specification, or one cannot be stored; `.path` says where, `.what` why."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(path, what)
        self.path, self.what = path, what

    def __str__(self) -> str:
        place = f"{self.path} " if self.path else ""
        return f"{place}{self.what}; use what messages_to_json or specification_to_json writes, with JSON attributes"


# --- services


class ToolRoundsExceededError(ToolboxError):
    """The model went on asking for tools; `.transcript` has the messages up to and including its last reply."""

    def __init__(self, limit: int, transcript: Sequence[Message] = ()) -> None:
        super().__init__(limit, tuple(transcript))
        self.limit, self.transcript = limit, tuple(transcript)

    def __str__(self) -> str:
        return f"the model asked for tools again after {self.limit} rounds; raise max_tool_rounds= or change the prompt"


class ToolCallsLimitExceededError(ToolboxError):
    """A reply asked for too many tools at once; none of them ran. `.transcript` ends with that reply."""

    def __init__(self, limit: int, attempted: int, transcript: Sequence[Message] = ()) -> None:
        super().__init__(limit, attempted, tuple(transcript))
        self.limit, self.attempted, self.transcript = limit, attempted, tuple(transcript)

    def __str__(self) -> str:
        return (
            f"the model asked for {self.attempted} tools in one reply, more than the {self.limit} allowed; "
            "raise max_tool_calls_per_response="
        )


class OutputParsingError(ToolboxError):
    """A reply is not what the method returns; `.text` is the reply, `.problems` a (path, message) for each fault."""

    def __init__(self, text: str, problems: Sequence[tuple[Path, str]]) -> None:
        super().__init__(text, problems)
        self.text, self.problems = text, list(problems)

    def __str__(self) -> str:
        faults = "; ".join(f"{path}: {message}" if path else message for path, message in self.problems)
        excerpt = self.text if len(self.text) <= 200 else f"{self.text[:200]}…"
        fix = "make the type simpler, describe its fields, or raise max_output_retries="
        return f"the model's reply is not of the declared type ({faults}); {fix}; it was: {excerpt}"


class InvocationTimeoutError(_Timeout):
    """A call of a service took longer than its limit; `.limit` is in seconds."""

    def __init__(self, service: str, method: str, limit: float) -> None:
        super().__init__(service, method, limit)
        self.service, self.method, self.limit = service, method, limit

    def __str__(self) -> str:
        return f"{self.service}.{self.method} took longer than its limit of {self.limit:g} s"


class InvalidMemoryIdError(ToolboxError, ValueError):
    """A memory id that no store can keep; `.reason` says why. No store was asked."""

    def __init__(self, service: str, memory_id: str, reason: str) -> None:
        super().__init__(service, memory_id, reason)
        self.service, self.memory_id, self.reason = service, memory_id, reason

    def __str__(self) -> str:
        return f"invalid memory id {brief(self.memory_id)!r} for {self.service}: {self.reason}; use another id"


class MemoryLeaseLostError(ToolboxError):
    """A call was not kept: its conversation had meanwhile gone to another process, for its lease ran out."""

    def __init__(self, service: str, memory_id: str) -> None:
        super().__init__(service, memory_id)
        self.service, self.memory_id = service, memory_id

    def __str__(self) -> str:
        return (
            f"conversation {self.memory_id!r} of {self.service} was not written: this process could not renew its "
            "lease in time, and another may be in it now; ask again, or give the memory store a longer lease="
        )


# --- databases


class TransactionRolledBackError(ToolboxError):
    """A `@transactional` call ended well, and yet nothing of it was kept; `.reason` says why."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what, self.reason = what, reason

    def __str__(self) -> str:
        return f"{self.what} was rolled back: {self.reason}"


# --- models


class ModelError(ToolboxError):
    """A model did not answer, or not usably."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class ModelHttpError(ModelError):
    """The server said no: `.status`, `.message` (the server's own), `.body` (an excerpt), `.request_id`."""

    def __init__(self, status: int, message: str, body: str = "", request_id: str | None = None) -> None:
        super().__init__(message)
        self.args = (status, message, body, request_id)
        self.status, self.body, self.request_id = status, body, request_id

    def __str__(self) -> str:
        request = f" (request {self.request_id})" if self.request_id else ""
        return f"the model server answered {self.status}{request}: {self.message}"


class ModelProtocolError(ModelError):
    """What came back is no chat reply: `.body` has an excerpt of it."""

    def __init__(self, message: str, body: str = "", status: int | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.args = (message, body, status, request_id)
        self.body, self.status, self.request_id = body, status, request_id

    def __str__(self) -> str:
        request = f" (request {self.request_id})" if self.request_id else ""
        excerpt = f"; it began: {self.body}" if self.body else ""
        return f"{self.message}{request}{excerpt}"


class ModelConnectionError(ModelError):
    """The server could not be reached, or the connection broke."""


class ModelTimeoutError(ModelError, TimeoutError):
    """The server did not answer in time."""

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.message,)


class ModelRefusedError(ModelError):
    """The model refused, and said nothing else; the message is its refusal."""


class ModelTruncatedError(ModelError):
    """The reply was cut at the token limit inside a tool call or a structured answer, or before it said anything.

    `.text` is what came.
    """

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.args = (message, text)
        self.text = text


# --- REST clients


class RestClientError(ToolboxError):
    """A REST call failed; `.status` is None when there was no reply, `.body` is an excerpt of it."""

    def __init__(self, message: str, url: str, status: int | None = None, body: str = "") -> None:
        super().__init__(message, url, status, body)
        self.message, self.url, self.status, self.body = message, url, status, body

    def __str__(self) -> str:
        status = f" {self.status}" if self.status is not None else ""
        excerpt = f": {self.body}" if self.body else ""
        return f"{self.message}{status} ({self.url}){excerpt}"


class RestTimeoutError(RestClientError, TimeoutError):
    """A REST service did not answer in time."""

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.message, self.url, self.status, self.body)


class RestDecodeError(RestClientError):
    """A REST service's reply is not of the declared type."""
