"""The decorators of AI services: `@register_ai_service`, `@system_message`, `@user_message`.

They only save their arguments. Functions here also find the methods that a service must implement. Not here:
reading and checking declarations (`planning`), answering calls (`driver`).
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from types import FrameType, FunctionType
from typing import Any, Final, Literal, TypeAlias, TypeVar, overload

from typing_extensions import is_protocol

from ..chat import Reasoning
from ..context import InvocationContext
from ..conversations.views import ChosenView
from ..errors import Problem
from ..introspection import bare_decorator, has_body, is_count, local_names, name_decorator, takes
from ..limits import UsageLimits
from ..models.routing import ModelRouter
from ..safe_text import did_you_mean
from ..service_names import SERVICE_MARK
from ..tools.failures import Handler, ToolErrors
from ..tools.marks import UnknownOutcome
from .outputs import OutputMode

C = TypeVar("C", bound=type[Any])
D = TypeVar("D", bound=Callable[..., Any])
H = TypeVar("H", bound="Callable[..., Any] | staticmethod[..., Any]")

SYSTEM_MARK: Final = "__toolbox_system_message__"
PROVIDERS_MARK: Final = "__toolbox_tool_providers__"
USER_MARK: Final = "__toolbox_user_message__"
HANDLER_MARK: Final = "__toolbox_error_handler__"
NAMES_MARK: Final = "__toolbox_local_names__"


DURABLE_MARK: Final = "__toolbox_durable__"

WhenBusy: TypeAlias = Literal["wait", "raise"]
"""A call of a conversation in which another call is at work: wait for its turn, or raise an error."""

UnfinishedTurns: TypeAlias = Literal["keep", "discard"]
"""What a conversation keeps of a call that ends without an answer, after a tool had begun."""

OnLimit: TypeAlias = Literal["raise", "answer"]
"""A limit of the service that is reached: raise its error, or ask the model for its answer."""

OnSuspended: TypeAlias = Literal["raise", "cancel", "continue"]
"""A new call in a conversation with a suspended run: raise an error, cancel that run, or go on beside it."""


class Default:
    """The type of `DEFAULT`."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = Default()
"""Use the default of the container or of the framework."""

MessageFunction: TypeAlias = Callable[..., "str | Awaitable[str]"]
"""Creates a system message. Takes the `InvocationContext`, then `Inject[T]` parameters; returns the text."""


def durable(method: D) -> D:
    """Record every effect of a service method in the `RunStore`, so that its calls continue after a crash.

        @durable
        async def transfer(self, run: RunId, order: Order) -> Receipt: ...

    Returns the same method. A method that cannot be durable is a problem at start.
    """
    setattr(method, DURABLE_MARK, True)
    return method


@dataclass(frozen=True, slots=True)
class Retries:
    """How often, and after which time, a failed run that `runs.start` began is tried again.

        @register_ai_service(run_retries=Retries(attempts=5, wait=timedelta(minutes=1)))

    `attempts` includes the first. `wait` is doubled each time, up to an hour. Raises `TypeError` and `ValueError` for
    anything but a whole number above 0 and a `timedelta` that is not negative.
    """

    attempts: int = 5
    wait: timedelta = timedelta(minutes=1)

    def __post_init__(self) -> None:
        """Check the values."""
        if not is_count(self.attempts, 1):
            raise ValueError(f"Retries: invalid attempts={self.attempts!r}; use 1 or more")
        if not isinstance(self.wait, timedelta):
            raise TypeError(f"Retries: invalid wait={self.wait!r}; use a datetime.timedelta")
        if self.wait < timedelta():
            raise ValueError(f"Retries: invalid wait={self.wait!r}; use a duration of 0 or more")

    def wait_after(self, failures: int) -> timedelta:
        """Return the time until the next try, after this number of failed ones."""
        longest = max(_LONGEST_WAIT, self.wait)  # a wait of several hours is not shortened
        return min(self.wait * 2 ** min(failures - 1, 32), longest) if self.wait < longest else longest


_LONGEST_WAIT = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class MessageMark:
    """A declared message: a text, a file next to the module, or a function.

    `is_repeated` marks the last of several decorators on one object, which is a mistake.
    """

    text: str | None = None
    file: str | None = None
    function: MessageFunction | None = None
    is_repeated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """The limits of a service's calls. A container's settings provide the defaults."""

    max_tool_rounds: int = 10
    max_tool_calls_per_response: int | None = None
    max_result_chars: int | None = None
    timeout: float | None = None


UNSET_LIMITS: Final = CallLimits()
"""The limits if neither the service nor the container sets any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """The options of `@register_ai_service`; each is described there."""

    tools: Any = ()
    tool_provider: Any = None
    model: str | type[ModelRouter] | ModelRouter | None = None
    chat_memory: ChosenView | Default | None = DEFAULT
    max_tool_rounds: int | Default = DEFAULT
    max_tool_calls_per_response: int | Default | None = DEFAULT
    max_output_retries: int = 2
    max_result_chars: int | Default | None = DEFAULT
    timeout: float | Default | None = DEFAULT
    concurrent_tools: bool | Executor = False
    on_unknown_tool: Handler | None = None
    on_tool_arguments_error: Handler | None = None
    on_tool_execution_error: Handler | None = None
    output_mode: OutputMode | None = None
    temperature: float | None = None
    tool_choice: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    reasoning: Reasoning | None = None
    strict: bool | None = None
    tool_search: Any = None
    compensate_on_tool_errors: bool = False
    compensate_on_failure: bool = False
    durable: bool = False
    on_suspended: OnSuspended = "raise"
    when_busy: WhenBusy = "wait"
    shared_conversations: bool = False
    on_unknown_outcome: UnknownOutcome = "tell"
    limits: UsageLimits | None = None
    on_limit: OnLimit = "raise"
    run_retries: Retries | None = None
    inner_events: bool = False
    name: str | None = None
    former_names: Sequence[str] = ()
    unfinished_turns: UnfinishedTurns = "keep"
    retrievers: Any = ()
    passages_prompt: str | None = None
    passages_chars: int = 20_000

    def __post_init__(self) -> None:
        """Make `former_names` a tuple; anything else stays, and is a problem at start."""
        if isinstance(self.former_names, list):
            object.__setattr__(self, "former_names", tuple(self.former_names))

    def call_limits(self, defaults: CallLimits) -> CallLimits:
        """Return the service's own limits, completed with `defaults`."""
        own = {each.name: getattr(self, each.name) for each in fields(CallLimits)}
        return replace(defaults, **{name: value for name, value in own.items() if not isinstance(value, Default)})


@overload
def register_ai_service(cls: C, /) -> C: ...


@overload
def register_ai_service(
    *,
    tools: Any = (),
    tool_provider: Any = None,
    model: str | type[ModelRouter] | ModelRouter | None = None,
    chat_memory: ChosenView | Default | None = DEFAULT,
    max_tool_rounds: int | Default = DEFAULT,
    max_tool_calls_per_response: int | Default | None = DEFAULT,
    max_output_retries: int = 2,
    max_result_chars: int | Default | None = DEFAULT,
    timeout: float | Default | None = DEFAULT,
    concurrent_tools: bool | Executor = False,
    on_unknown_tool: Handler | None = None,
    on_tool_arguments_error: Handler | None = None,
    on_tool_execution_error: Handler | None = None,
    output_mode: OutputMode | None = None,
    temperature: float | None = None,
    tool_choice: Literal["auto", "none", "required"] | str | None = None,
    parameters: Mapping[str, Any] | None = None,
    reasoning: Reasoning | None = None,
    strict: bool | None = None,
    tool_search: Any = None,
    compensate_on_tool_errors: bool = False,
    compensate_on_failure: bool = False,
    durable: bool = False,
    on_suspended: OnSuspended = "raise",
    when_busy: WhenBusy = "wait",
    shared_conversations: bool = False,
    on_unknown_outcome: UnknownOutcome = "tell",
    limits: UsageLimits | None = None,
    on_limit: OnLimit = "raise",
    run_retries: Retries | None = None,
    inner_events: bool = False,
    name: str | None = None,
    former_names: Sequence[str] = (),
    unfinished_turns: UnfinishedTurns = "keep",
    retrievers: Any = (),
    passages_prompt: str | None = None,
    passages_chars: int = 20_000,
) -> Callable[[C], C]: ...


def register_ai_service(cls: C | None = None, /, **options: Any) -> C | Callable[[C], C]:
    """Declare a Protocol or an ABC as an AI service: a language model answers its methods. Returns the same class.

        @register_ai_service(tools=Calculator)
        class Assistant(Protocol):
            async def answer(self, question: str) -> str: ...

    Register the class with a `Container` and get the implementation with `container.get(Assistant)` or by injection.

    - `tools`: one tool or several: bean types, functions, instances, AI services, REST clients, `AiServiceTool`s or
      mappings `{ToolSpecification: ToolExecutor}`. `@toolbox(…)` on a method replaces them for that method.
    - `tool_provider`: a `ToolProvider` (bean type, instance or function) or several, called once per call.
    - `tool_search`: a `ToolSearchStrategy` (bean type or instance), such as `KeywordToolSearch()`. The model sees a
      search tool first, and the tools that it finds with it.
    - `model`: the name of a model, by default `default`; or a `ModelRouter`, which chooses the model of each call.
    - `chat_memory`: how much of a conversation is kept: `MessageWindow`, `TokenWindow`, or None for nothing.
    - `max_tool_rounds`: the maximum number of rounds of tool calls; then `ToolRoundsExceededError`.
    - `max_tool_calls_per_response`: the maximum number of calls in a reply; then `ToolCallsLimitExceededError`.
    - `max_output_retries`: how often the model is asked again after an invalid reply; then `OutputParsingError`.
    - `max_result_chars`: results of tools are cut after this many characters.
    - `timeout`: the limit of a whole call in seconds; then `InvocationTimeoutError`.
    - `concurrent_tools`: True runs the tools of a round at the same time, blocking ones on the container's thread pool.
      An `Executor` does the same and also runs the blocking ones.
    - `on_unknown_tool`, `on_tool_arguments_error`, `on_tool_execution_error`: `(error, context) -> text for the model`.
    - `output_mode`: `"schema"`, `"tool"` or `"prompt"`: how a structured reply is requested.
    - `limits`: the `UsageLimits` of each call, including services that its tools call; then `UsageLimitExceededError`.
    - `on_limit`: `"answer"` asks the model for its answer, without tools, where `max_tool_rounds`,
      `max_tool_calls_per_response` or `limits` would raise. `Result.stopped_by` names the limit.
    - `compensate_on_tool_errors`: when a tool fails, methods marked with `@compensate_for` undo the tools of this call
      that succeeded, and the model reads that. `compensate_on_failure`: the same when the whole call fails.
    - `temperature`, `tool_choice`, `parameters`: sent with each request; `parameters` by the names of the server's API.
    - `reasoning`: `"none"`, `"minimal"`, `"low"`, `"medium"` or `"high"`: how much the model reasons.
    - `strict`: True asks the server to enforce the schemas of tools and replies, False not to, where it can. A tool's
      own `strict=` wins; None leaves it to the model's settings.
    - `durable`: True records every effect of a call in the `RunStore`, so that it continues after a crash.
    - `on_suspended`: a call in a conversation that has a suspended run raises `ConversationSuspendedError`, with
      `"cancel"` cancels that run, or with `"continue"` goes on beside it.
    - `when_busy`: a call of a conversation in which another call is at work waits for its turn, or with `"raise"`
      raises `ConversationBusyError` at once.
    - `shared_conversations`: True lets everyone use each conversation. Otherwise it belongs to the identity of its
      first call, and a call by another one raises `AccessDeniedError`.
    - `on_unknown_outcome`: `"tell"`, `"ask"` or `"retry"`: what a run does after a crash for tools that do not say it.
    - `run_retries`: `Retries(attempts=5, wait=timedelta(minutes=1))` tries runs of `runs.start` again when they fail.
    - `inner_events`: True puts the events of services that run within its tools into its streams, and into
      `runs.events`, as `InnerEvent`s.
    - `name`: the name under which conversations and runs are stored, 1 to 200 of `A-Z a-z 0-9 _ . -`; by default the
      class's `module.qualname`. `former_names`: a tuple or list of the names that the service had.
    - `unfinished_turns`: a call that ends without an answer after a tool had begun stores its turn, or with `"discard"`
      nothing.
    - `retrievers`: one `Retriever` or several, classes (beans) or instances: the model reads what they find for the
      user message. `@retrieves(…)` on a method replaces them for that method.
    - `passages_prompt`: what the model reads with the passages; must contain `{passages}`.
    - `passages_chars`: the maximum number of characters of all passages of a call; the last ones are dropped.

    `DEFAULT` for a limit means the container's setting of the same name. Raises `TypeError` for anything but a class,
    and for unknown options; other mistakes are problems at start.
    """
    given = _options(ServiceOptions(), options, "register_ai_service")  # unknown options fail here
    if cls is None:
        return lambda target: _mark(target, given, sys._getframe(1))
    return _mark(cls, given, sys._getframe(1))


def _mark(cls: C, options: ServiceOptions, frame: FrameType) -> C:
    if not isinstance(cls, type):
        raise TypeError(f"@register_ai_service: expected a Protocol or ABC class, got {cls!r}")
    setattr(cls, SERVICE_MARK, options)
    if names := names_around(cls, frame):
        setattr(cls, NAMES_MARK, names)
    return cls


def options_for(cls: type[Any], given: Mapping[str, Any]) -> ServiceOptions:
    """Return the options of `@register_ai_service` on the class, overridden by `given`."""
    for name in ("name", "former_names"):
        if name in given:  # what is stored belongs to the class
            raise TypeError(f"create_ai_service() has no option {name}=; set it with @register_ai_service({name}=…)")
    return _options(service_options_of(cls) or ServiceOptions(), given, "create_ai_service")


_NOT_OPTIONS = {
    **dict.fromkeys(("system_message", "system_prompt", "instructions"), "@system_message(…) on the class or a method"),
    **dict.fromkeys(("user_message", "prompt"), "@user_message(…) on a method"),
    **dict.fromkeys(("output_type", "result_type", "response_format"), "the return type of a method"),
    "guardrails": "@input_guardrails(…) and @output_guardrails(…)",
    "input_guardrails": "@input_guardrails(…)",
    "output_guardrails": "@output_guardrails(…)",
    "interceptors": "@interceptors(…)",
    "handoffs": "@hands_over_to(…) on a method",
    "mcp_servers": "@mcp_toolbox(…)",
}
"""Options of other libraries, and decorators that are written like options: what to use here."""


def _options(marked: ServiceOptions, given: Mapping[str, Any], what: str) -> ServiceOptions:
    names = [each.name for each in fields(ServiceOptions)]
    for name in given:
        if name not in names:
            place = _NOT_OPTIONS.get(name)
            fix = did_you_mean(name, names, "{}=") if place is None else f"; use {place}"
            raise TypeError(f"{what}() got an unknown option {name}={fix}")
    return replace(marked, **{name: value for name, value in given.items() if (name, value) != ("parameters", None)})


def names_around(cls: type[Any], frame: FrameType | None) -> dict[str, Any]:
    """Return the local names of enclosing functions that the service's annotations use, looked up in `frame`."""
    return local_names(_functions_of(cls), frame) if isinstance(cls, type) else {}


def _functions_of(cls: type[Any]) -> Iterator[Callable[..., Any]]:
    for base in cls.__mro__:
        for member in (base, *vars(base).values()):
            function = getattr(member, "__func__", member)  # also of static methods
            if inspect.isfunction(function):
                yield function
            message: MessageMark | None = vars(member).get(SYSTEM_MARK) if hasattr(member, "__dict__") else None
            if message is not None and message.function is not None:
                yield message.function


def local_names_of(cls: type[Any]) -> dict[str, Any]:
    """Return the local names that were saved when the service and its bases were decorated."""
    return {name: each for base in reversed(cls.__mro__) for name, each in vars(base).get(NAMES_MARK, {}).items()}


def provided_by(provider: type[Any]) -> Callable[[D], D]:
    """Add a tool provider, a bean type, to a service or to one of its methods."""

    def leave(target: D) -> D:
        setattr(target, PROVIDERS_MARK, (*vars(target).get(PROVIDERS_MARK, ()), provider))
        return target

    return leave


def service_options_of(cls: type[Any]) -> ServiceOptions | None:
    """Return the options of a class; None if the class itself is not decorated."""
    options: ServiceOptions | None = vars(cls).get(SERVICE_MARK) if isinstance(cls, type) else None
    return options


def system_message(
    text: str | Callable[[InvocationContext], object] | MessageFunction | None = None,
    *more: str,
    file: str | None = None,
) -> Callable[[D], D]:
    """Set the instructions for the model, on a method or on the class for all of its methods.

        @system_message("You translate into {language}.")
        def translate(self, text: str, language: str) -> str: ...

    The message is a template (`{name}` is a parameter, `{{` and `}}` are braces), a UTF-8 `file` next to the module, or
    a function. Several texts are joined with newlines. A function, `def` or `async def`, takes the `InvocationContext`
    and `Inject[T]` parameters, and returns the text. Raises `TypeError` without a message, and for both text and file.
    """
    if callable(text) and not isinstance(text, type) and file is None and not more:
        function: Any = text
        return name_decorator("@system_message", _leaving(SYSTEM_MARK, MessageMark(function=function)), function)
    return _leaving(SYSTEM_MARK, _message("@system_message", text, more, file))


def user_message(text: str | None = None, *more: str, file: str | None = None) -> Callable[[D], D]:
    """Set the user message of a method: a template, or a UTF-8 `file` next to the module.

        @user_message("What is the mood of: {text}")
        def mood(self, text: str) -> Mood: ...

    `{name}` is a parameter, `{it}` the only one besides the memory id. Several texts are joined with newlines. Raises
    `TypeError` without a message, and for both text and file.
    """
    return _leaving(USER_MARK, _message("@user_message", text, more, file))


def _leaving(name: str, mark: MessageMark) -> Callable[[D], D]:
    def leave(target: D) -> D:
        setattr(target, name, replace(mark, is_repeated=name in vars(target)))
        return target

    return leave


def repeated_messages(cls: type[Any]) -> Iterator[Problem]:
    """Yield a problem for each object with several decorators for the same message: only one of them would count."""
    for where, target in ((cls.__name__, cls), *((f"{cls.__name__}.{name}", each) for name, each in vars(cls).items())):
        marks = getattr(target, "__dict__", {})
        for name, decorator in ((SYSTEM_MARK, "@system_message"), (USER_MARK, "@user_message")):
            mark = marks.get(name)
            if isinstance(mark, MessageMark) and mark.is_repeated:
                fix = f'keep one; it may have several texts: {decorator}("…", "…")'
                yield Problem(where, f"has several {decorator} decorators", fix)


def _message(decorator: str, text: object, more: tuple[object, ...], file: str | None) -> MessageMark:
    if (text is None) == (file is None) or (more and file is not None):
        raise TypeError(f"{decorator} needs the message either as text or as file=")
    if text is None:
        return MessageMark(file=file)
    texts = [each for each in (text, *more) if isinstance(each, str)]
    if len(texts) <= len(more):
        raise TypeError(f'{decorator} needs text, got {text!r}; write {decorator}("…") with parentheses')
    return MessageMark(text="\n".join(texts))


# --- error handlers in the service


def handle_unknown_tool(handler: H) -> H:
    """Use a static method of an AI service as its handler of unknown tools, like the option `on_unknown_tool`.

        @register_ai_service(tools=Orders)
        class Desk(Protocol):
            async def chat(self, text: str) -> str: ...

            @staticmethod
            @handle_unknown_tool
            def unknown(error: UnknownToolError, context: InvocationContext) -> str:
                return "Use one of your tools."

    The method returns the text for the model. Raises `TypeError` for anything but a function.
    """
    return _handling("on_unknown_tool", handler)


def handle_tool_arguments_error(handler: H) -> H:
    """Use a static method of an AI service as its handler of invalid arguments, like `on_tool_arguments_error`.

    The method takes a `ToolArgumentsError` and the `InvocationContext`, and returns the text for the model. Raises
    `TypeError` for anything but a function.
    """
    return _handling("on_tool_arguments_error", handler)


def handle_tool_execution_error(handler: H) -> H:
    """Use a static method of an AI service as its handler of failed tools, like `on_tool_execution_error`.

    The method takes the exception of the tool and the `InvocationContext`, and returns the text for the model. Raises
    `TypeError` for anything but a function.
    """
    return _handling("on_tool_execution_error", handler)


def _handling(option: str, handler: H) -> H:
    function = getattr(handler, "__func__", handler)
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"@{_decorator_of(option)}: expected a static method, got {handler!r}")
    setattr(handler, HANDLER_MARK, option)
    return handler


def _decorator_of(option: str) -> str:
    return option.replace("on_", "handle_", 1)


def handlers_of(cls: type[Any], options: ServiceOptions) -> tuple[ToolErrors, list[Problem]]:
    """Return the error handlers of a service, from its options and its static methods, and the problems with them."""
    handlers = {each.name: getattr(options, each.name) for each in fields(ToolErrors)}
    places = {name: f"{name}=" for name, handler in handlers.items() if handler is not None}
    problems: list[Problem] = []
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    for name in names:
        raw = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
        option = next((found for each in raw if (found := _handled_by(each)) is not None), None)
        if option is None or raw[0] is None:  # `name = None` in a subclass removes the handler
            continue
        where, decorator = f"{cls.__name__}.{name}", f"@{_decorator_of(option)}"
        if not isinstance(raw[0], staticmethod):
            fix = "add @staticmethod, and declare it `(error, context)` without `self`"
            problems.append(Problem(where, f"{decorator} is not on a static method", fix))
        elif not takes(raw[0].__func__, 2):
            fix = "declare it `(error, context)`"
            problems.append(Problem(where, f"{decorator} needs a method with two parameters", fix))
        elif option in places:
            problems.append(Problem(where, f"{decorator} is given twice: {places[option]} and {name}", "keep only one"))
        else:
            handlers[option], places[option] = getattr(cls, name), name
    return ToolErrors(**handlers), problems


def _handled_by(member: object) -> str | None:
    mark = getattr(member, HANDLER_MARK, None) or getattr(getattr(member, "__func__", None), HANDLER_MARK, None)
    return mark if isinstance(mark, str) else None


# --- the methods of a Protocol or ABC that a service must implement


def is_interface(cls: type[Any]) -> bool:
    """Return True for a Protocol or an ABC."""
    # Not `issubclass`: that of `ABC` asks all of its subclasses in the process.
    return is_protocol(cls) or ABC in cls.__mro__ or inspect.isabstract(cls)


def method_names(cls: type[Any]) -> list[str]:
    """Return the methods to implement: the abstract methods of an ABC, or a Protocol's methods without a body."""
    names: list[str] = []
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            if not isinstance(member, FunctionType) or (name.startswith("__") and name.endswith("__")):
                continue
            if name in names:
                names.remove(name)
            if _is_declared_only(base, member):
                names.append(name)
    return names


def _is_declared_only(owner: type[Any], function: Any) -> bool:
    if getattr(function, "__isabstractmethod__", False):
        return True
    if hasattr(function, USER_MARK) or hasattr(function, SYSTEM_MARK):
        return True
    return is_protocol(owner) and not has_body(function)


def bare_decorators(cls: type[Any]) -> Iterator[Problem]:
    """Yield a problem for each decorator that is used without parentheses."""
    for name, member in vars(cls).items():
        if (bare := bare_decorator(member)) is not None:
            yield Problem(f"{cls.__name__}.{name}", f"{bare.name} has no parentheses", f"write {bare.name}(…)")
