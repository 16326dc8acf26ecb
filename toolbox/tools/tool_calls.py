"""A tool with everything that is prepared before its calls, and the data of a call: its environment and its outcome.

Not here: finding tools (`sources`), running a call (`pipeline`), calling a tool's function (`function_calls`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, TypeAlias, assert_never
from uuid import UUID

from ..bean_references import BeanReference, named_at_first, named_in_class
from ..chat import (
    ChatModel,
    Content,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolProgress,
    ToolSpecification,
)
from ..context import (
    ActiveScope,
    Cancellation,
    InvocationContext,
    current_invocation,
    in_tool,
)
from ..errors import (
    EndsInvocation,
    Problem,
    ToolArgumentsError,
)
from ..events import (
    Listeners,
)
from ..execution.markers import Execution
from ..execution.runners import Runner
from ..introspection import EMPTY, read_signature
from ..parameters import (
    InjectMark,
)
from ..passages import NumberedPassages
from ..security import Access, SecurityIdentity
from ..service_names import SERVICE_MARK
from .codec import decode_request
from .failures import ToolErrors
from .marks import ToolOptions, UnknownOutcome
from .results import Encoded
from .specification import Role, ToolParameter, given_or_default

IMMUTABLE = frozenset({str, int, float, bool, bytes, complex, Decimal, date, datetime, time, UUID, type(None)})
"""Types whose values nobody can change."""
_JSON_TYPES = frozenset({str, int, bool, type(None)})

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
class Tool(ToolOptions):
    """One tool, with everything that can be prepared before a call.

    `bean` is looked up for each call in the current scope, and its attribute `member` is called: a class without a
    scope decorator is a dependent bean, so each call gets a new instance. Without a bean, `function` is called. `run`
    does that, inside of all layers; None for `run_tool`. `decode` is None for an executor written by hand, which gets
    the request itself. `positional` contains the names and defaults of positional-only parameters. `returns` is the
    resolved return annotation, or `EMPTY`. `step` runs a call inside the tool's layers; None if it has none.
    `key_names` and `run_id_names` are hidden parameters about the run, `progress_names` those that report progress.
    `visible` are the parameters that the model fills, `shown_names` its names for them. With `has_hidden`, the
    framework fills others.

    `complete` and `validate` are those of the `ArgumentDecoder`. `owner` is the class of a method. `definitions` are
    the function, or the method in its class and its bases, nearest first: decorators leave their marks there. `access`
    is None if every identity may call the tool. `effects` are known effects, for reports. `former_names` are names in
    stored runs. `hands_over_to` is the method that takes a call over, of a tool that the loop runs itself.
    """

    specification: ToolSpecification
    execution: Execution
    where: str
    function: Callable[..., Any] | None
    encode: Callable[[Any], Encoded]
    decode: Callable[[ToolExecutionRequest], dict[str, Any]] | None = None
    bean: Any = None
    member: str = ""
    positional: tuple[tuple[str, Any], ...] = ()
    memory_id_names: tuple[str, ...] = ()
    context_names: tuple[str, ...] = ()
    needs_memory_id: bool = False
    injected: tuple[InjectedParameter, ...] = ()
    returns: Any = EMPTY
    key_names: tuple[str, ...] = ()
    run_id_names: tuple[str, ...] = ()
    progress_names: tuple[str, ...] = ()
    visible: tuple[ToolParameter, ...] = field(default=(), compare=False, repr=False)
    access: Access | None = None
    effects: tuple[str, ...] = ()
    hands_over_to: str | None = None
    step: ToolStep | None = field(default=None, compare=False, repr=False)
    run: ToolStep | None = field(default=None, compare=False, repr=False)
    complete: Callable[[Mapping[str, Any]], dict[str, Any]] | None = field(default=None, compare=False, repr=False)
    validate: Callable[..., dict[str, Any]] | None = field(default=None, compare=False, repr=False)
    owner: type | None = field(default=None, compare=False, repr=False)
    definitions: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    has_hidden: bool = field(init=False, compare=False, repr=False)
    shown_names: Mapping[str, str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Compute the values that are the same for all calls."""
        hidden = self.memory_id_names or self.context_names or self.injected or self.positional
        object.__setattr__(self, "has_hidden", bool(hidden or self.key_names or self.run_id_names))
        object.__setattr__(self, "shown_names", {each.name: each.shown_name for each in self.visible})

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


@dataclass(frozen=True, slots=True)
class ToolOfTeam:
    """A tool of a method to which calls are handed over, and who may call both."""

    method: str
    tool: Tool
    access: Access | None

    @property
    def is_restricted(self) -> bool:
        """True if not every identity may call the method or the tool."""
        return self.access is not None or self.tool.access is not None

    def allows(self, identity: SecurityIdentity) -> bool:
        """Return True if this identity may call the method and the tool."""
        return all(each is None or each.allows(identity) for each in (self.access, self.tool.access))


def read_hidden(parameters: Sequence[ToolParameter]) -> dict[str, Any]:
    """Return the fields of a `Tool` about the parameters that the framework fills, by the names of the fields."""
    hidden: dict[str, tuple[Any, ...]] = defaultdict(tuple)
    for each in parameters:
        match each.role:
            case Role.MODEL | Role.CALL_OPTIONS:
                pass  # the model fills it; it keeps its default
            case Role.MEMORY_ID:
                hidden["memory_id_names"] += (each.name,)
            case Role.CONTEXT:
                hidden["context_names"] += (each.name,)
            case Role.INJECTED:
                hidden["injected"] += (InjectedParameter(each.name, each.wanted, each.has_default),)
            case Role.RUN_ID:
                hidden["run_id_names"] += (each.name,)
            case Role.IDEMPOTENCY_KEY:
                hidden["key_names"] += (each.name,)
            case Role.PROGRESS:
                hidden["progress_names"] += (each.name,)
            case _:
                assert_never(each.role)
        if each.kind is each.kind.POSITIONAL_ONLY:
            hidden["positional"] += ((each.name, each.default),)
    return {**hidden, "needs_memory_id": any(map(_needs_memory_id, parameters))}


def _needs_memory_id(parameter: ToolParameter) -> bool:
    return parameter.role is Role.MEMORY_ID and not parameter.admits_none and not parameter.has_default


def call_options_problems(parameters: Iterable[ToolParameter], where: str) -> Iterator[Problem]:
    """Yield a problem for each `ChatRequestParameters` without a default: only callers of services pass them."""
    for each in parameters:
        if each.role is Role.CALL_OPTIONS and not each.has_default:
            fact = f"parameter {each.name!r} has no value: only methods of AI services get a ChatRequestParameters"
            fix = f"remove it, or give it a default: `{each.name}: ChatRequestParameters | None = None`"
            yield Problem(where, fact, fix)


class ToolCall:
    """One call of a tool with decoded and valid arguments. A layer can pass on a changed call.

    `arguments` maps the names of the function's parameters to the model's values, without those that keep the
    function's default. It is None for an executor written by hand, which reads the request, unless a layer changed it.
    `attempts` are those of the call and of its copies.
    """

    __slots__ = ("arguments", "attempts", "context", "environment", "request", "tool")

    def __init__(
        self,
        tool: Tool,
        request: ToolExecutionRequest,
        arguments: dict[str, Any] | None,
        context: InvocationContext,
        environment: ToolEnvironment,
        attempts: ToolAttempts | None = None,
    ) -> None:
        self.tool, self.request, self.arguments = tool, request, arguments
        self.context, self.environment = context, environment
        self.attempts = ToolAttempts() if attempts is None else attempts

    def with_arguments(self, arguments: dict[str, Any] | None) -> ToolCall:
        """Return the same call with other arguments, which are not validated again."""
        return ToolCall(self.tool, self.request, arguments, self.context, self.environment, self.attempts)

    def with_own_attempts(self) -> ToolCall:
        """Return the same call, whose attempts from now on are known apart from the earlier ones."""
        attempts = ToolAttempts(outer=self.attempts)
        return ToolCall(self.tool, self.request, self.arguments, self.context, self.environment, attempts)

    @property
    def is_late(self) -> bool:
        """True if the tool's timeout ended an earlier run of this call."""
        cancellation = self.context.cancellation
        return self.tool.timeout is not None and isinstance(cancellation, CallCancellation) and cancellation.is_late

    def visible_arguments(self) -> dict[str, Any]:
        """Return a copy of the arguments that a model can see, by the names of the parameters, with defaults.

        Raises `ToolArgumentsError` if the tool is an executor and the model's JSON is invalid.
        """
        if self.arguments is None:
            return decode_request(self.request)
        complete = self.tool.complete
        return dict(self.arguments) if complete is None else complete(self.arguments)

    def json_arguments(self) -> dict[str, Any]:
        """Return the same as JSON values, by the model's names: for people and records.

        Not for comparing calls: all secrets become the same text. Raises whatever the values' own serializers raise.
        """
        names = self.tool.shown_names
        return {names.get(name, name): json_of(value) for name, value in self.visible_arguments().items()}

    def written_arguments(self) -> dict[str, Any]:
        """Return the same without the arguments that JSON cannot have; it raises nothing."""
        names, written = self.tool.shown_names, {}
        with suppress(ToolArgumentsError):
            for name, value in self.visible_arguments().items():
                with suppress(Exception):  # any exception of a value's own serializers
                    written[names.get(name, name)] = json_of(value)
        return written

    def with_validated(self, values: Mapping[str, Any], before: Mapping[str, Any]) -> ToolCall:
        """Return the same call with `values` as its arguments, after validating those that are others.

        `before` are the arguments as they were written before someone may have changed them in place. Raises
        `ToolArgumentsError`.
        """
        validate = self.tool.validate
        if validate is None:
            return self.with_arguments(dict(values))
        # The same object is valid already, and validators may change a value each time they see it.
        known, now = self.visible_arguments(), self.written_arguments()
        names = self.tool.shown_names

        def is_kept(name: str, value: Any) -> bool:
            if value is not known.get(name, self):
                return False
            shown = names[name]
            return type(value) in IMMUTABLE or (shown in now and now[shown] == before.get(shown, self))

        kept = {name: value for name, value in values.items() if is_kept(name, value)}
        changed = {name: value for name, value in values.items() if name not in kept}
        return self.with_arguments(validate(self.request, changed, kept))

    def with_changed(self, changes: Mapping[str, Any]) -> ToolCall:
        """Return the same call with some arguments changed, after validating these. Raises `ToolArgumentsError`."""
        validate = self.tool.validate
        if validate is None:
            return self.with_arguments({**self.visible_arguments(), **changes})
        return self.with_arguments(validate(self.request, changes, self.arguments))


def json_of(value: Any) -> Any:
    """Return an argument as JSON values. Raises whatever its own serializers raise."""
    if type(value) in _JSON_TYPES:  # most arguments; 5 us less for each, see the first row of `benchmarks.tools`
        return value
    from pydantic_core import to_jsonable_python

    written = to_jsonable_python(given_or_default(value), by_alias=True, serialize_unknown=True)
    return json.loads(json.dumps(written), parse_constant=str)  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class ToolAttempt:
    """One attempt of a tool call. `written` are the arguments that it begins with, as JSON values by the model's names.

    They are written before, because the tool may change its `arguments` in place. These are None for an executor
    written by hand, and for an attempt of another process whose arguments this program cannot read.
    """

    arguments: dict[str, Any] | None
    written: Mapping[str, Any]


@dataclass(slots=True)
class ToolAttempts:
    """What is known about the attempts of one tool call: the last one that began, and the last one without an error.

    What the model reads does not tell it: an interceptor can answer for a tool, and a guardrail can replace the result
    of one that ran. A compensation must undo what ran, and nothing else. Runs record it with the result. `outer` are
    the attempts among which these are.
    """

    begun: ToolAttempt | None = None
    succeeded: ToolAttempt | None = None
    outer: ToolAttempts | None = None

    def note_begun(self, attempt: ToolAttempt) -> None:
        """Note that the function of the tool is called, or was called by another process."""
        self.begun = attempt
        if self.outer is not None:
            self.outer.note_begun(attempt)

    def note_succeeded(self, attempt: ToolAttempt) -> None:
        """Note that the function ran without an error."""
        self.begun = self.succeeded = attempt
        if self.outer is not None:
            self.outer.note_succeeded(attempt)

    @property
    def written_arguments(self) -> Mapping[str, Any] | None:
        """The arguments that ran, as JSON values; None if the tool did not run."""
        last = self.succeeded or self.begun
        return None if last is None else last.written


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
        return "this tool needs approval or a later result, which only AI services support; call it through a service"


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
    attempts: dict[int, ToolAttempts] | None = None
    """The attempts of each call by the id of its request, for compensations. None outside of services: nothing is
    undone there, and the environment of an executor would collect its calls for ever."""
    on_unknown_outcome: UnknownOutcome = "tell"
    """What a run does for tools that do not say it themselves."""
    search_tool: str | None = None
    """The name of the tool that finds more tools."""
    sent: tuple[str, ...] | None = None
    """The names of the tools in the request for the current reply, which interceptors may have narrowed. A call of
    another tool is a call of an unknown tool. None if no request was sent."""
    on_progress: Callable[[ToolProgress], object] | None = None
    """Receives the progress of tools, on the event loop."""
    model: Callable[[str | None], Awaitable[ChatModel]] | None = None
    elsewhere: Mapping[str, Sequence[ToolOfTeam]] = field(default_factory=dict)
    """Where the methods of the team have their tools, by the names of the tools."""
    callers: Callable[[], Mapping[str, str]] | None = None
    """Returns which method of the team called a tool last in this conversation, by the names of the tools."""
    passages: NumberedPassages | None = None
    """The passages of the invocation, if a retriever or one as a tool can find some."""
    abandon_runs: Callable[[Exception], Awaitable[list[str]]] | None = None
    """Cancels the suspended runs of services that a tool called in its own code, and whose error it let through.

    Returns the names of these services.
    """

    def begin_call(self, request: ToolExecutionRequest) -> tuple[ToolExecutionRequest, ToolAttempts]:
        """Return the request object of one execution, and its attempts, which are found by this object.

        It is a copy if the model has given the object before.
        """
        attempts = ToolAttempts()
        if self.attempts is not None:
            if id(request) in self.attempts:
                request = replace(request)
            self.attempts[id(request)] = attempts
        return request, attempts

    def attempts_of(self, request: ToolExecutionRequest) -> ToolAttempts:
        """Return the attempts of an execution in this process; without any if there was none."""
        return (self.attempts or {}).get(id(request)) or ToolAttempts()

    def was_sent(self, name: str) -> bool:
        """Return True if the model could see a tool of this name when it replied."""
        return self.sent is None or name in self.sent

    def called_tool(self, request: ToolExecutionRequest) -> Tool | None:
        """Return the tool that the model calls; None if it could not see one of this name."""
        return self.tools.get(request.name) if self.was_sent(request.name) else None


@dataclass(slots=True)
class ToolOutcome:
    """The result of a tool call: `execution` for the program, `message` (with `contents`) for the model.

    `failed` is True if the tool's exception reached the handler of failed tools. `ran` is True if the tool ran without
    an error, whatever the model reads.
    """

    execution: ToolExecution
    contents: Sequence[Content] = ()
    failed: bool = False
    ran: bool = False

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


# --- timeouts


@contextmanager
def running_again(call: ToolCall) -> Iterator[ToolCall]:
    """Yield a call that `is_late`, with a new context for one more run."""
    context = in_tool(call.context, call.request, CallCancellation(call.environment.context.cancellation))
    token = current_invocation.set(context)
    try:
        yield ToolCall(call.tool, call.request, call.arguments, context, call.environment, call.attempts)
    finally:
        current_invocation.reset(token)


class CallCancellation(Cancellation):
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
