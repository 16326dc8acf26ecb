"""Guardrails: beans that accept, change or refuse messages, answers, and the arguments and results of tools.

Input and output guardrails belong to services and their methods, tool guardrails to tools. A guardrail that raises
refuses. `MaxLength`, `MaskSecrets` and `Moderated` are ready to use. Not here: the order of all layers
(`services.layering`), asking again after a refused answer (`services.loop`).
"""

from __future__ import annotations

import asyncio
import json
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, Literal, NoReturn, TypeVar, assert_never, get_args

from pydantic_core import to_json, to_jsonable_python

from .bean_references import BeanReference, naming
from .chat import AiMessage, ChatModel, ChatResponse, Message, ToolExecutionRequest, ToolExecutionResult, UserMessage
from .contents import (
    AudioContent,
    Content,
    ImageContent,
    Media,
    PdfContent,
    TextContent,
    joined_text,
    media_in,
    reason_against,
    url_of,
)
from .context import ActiveScope, InvocationContext
from .di.decorators import Scope
from .errors import (
    EndsInvocation,
    IllegalConfigurationError,
    ModelProtocolError,
    OutputParsingError,
    Problem,
    ToolArgumentsError,
)
from .errors import InputGuardrailError as InputGuardrailError
from .errors import OutputGuardrailError as OutputGuardrailError
from .errors import ToolGuardrailError as ToolGuardrailError
from .events import GuardrailExecutedEvent as GuardrailExecutedEvent
from .events import GuardrailOutcome, Listeners
from .execution.cancellation import own_code
from .execution.markers import EXECUTION_MARK, execution_of, is_async
from .execution.runners import Runner
from .introspection import method_takes
from .services.invocation import Invocation
from .services.loop import AnswerChecked, CheckAnswer, replaced_answer
from .tools.codec import Encoded, EncodedInFull, parsed_exactly, printable, written_exactly
from .tools.failures import message_of
from .tools.pipeline import ToolCall, ToolEnvironment, ToolStep

# --- requests and results


@dataclass(frozen=True, slots=True)
class InputGuardrailRequest:
    """The input of an input guardrail: the user message. `messages` are the conversation so far, without it."""

    user_message: UserMessage
    messages: tuple[Message, ...]
    context: InvocationContext


@dataclass(frozen=True, slots=True)
class OutputGuardrailRequest:
    """The final answer of the model, for an output guardrail.

    `value` is what the caller will get: the parsed value of a structured answer, the list of an `AsyncIterator[T]`, the
    `AiMessage`, or the text. `text` is its text; for a structured answer its JSON, without fences, words around it or
    the `value` wrapper. `messages` are the conversation before it.
    """

    response: ChatResponse
    text: str
    value: Any = field(hash=False)
    messages: tuple[Message, ...]
    context: InvocationContext


@dataclass(frozen=True, slots=True)
class ToolInputGuardrailRequest:
    """The call of a tool, for a tool input guardrail.

    `request` is the model's call. `arguments` are the validated arguments that the model can see, with defaults, by the
    names of the parameters; earlier guardrails may have changed them.
    """

    request: ToolExecutionRequest
    arguments: dict[str, Any] = field(hash=False)
    context: InvocationContext


@dataclass(frozen=True, slots=True)
class ToolOutputGuardrailRequest:
    """The input of a tool output guardrail: the result of a tool. Other fields: see `ToolInputGuardrailRequest`."""

    request: ToolExecutionRequest
    arguments: dict[str, Any] = field(hash=False)
    result: ToolExecutionResult
    context: InvocationContext


@dataclass(frozen=True, slots=True)
class GuardrailResult:
    """The judgement of a guardrail; create it with the methods of the guardrail, such as `self.success()`.

    `text` is the reason of a refusal, `value` the replacement of `"modified"`, `prompt` the user message of
    `"reprompt"`, `cause` the exception behind a `"fatal"`.
    """

    outcome: GuardrailOutcome
    text: str = ""
    value: Any = field(default=None, hash=False)
    prompt: str | None = None
    cause: BaseException | None = field(default=None, hash=False)


# --- the four kinds


class _Guardrail:
    """The results of all kinds. A subclass is a bean, application-scoped without a scope decorator."""

    __toolbox_default_scope__: ClassVar[Scope] = Scope.APPLICATION

    def success(self) -> GuardrailResult:
        """Accept."""
        return GuardrailResult("success")

    def success_with(self, value: Any) -> GuardrailResult:
        """Accept a replacement: a message, an answer or its text, all arguments, or a result or its text."""
        return GuardrailResult("modified", value=value)

    def failure(self, text: str = "") -> GuardrailResult:
        """Refuse. Further guardrails of an input or an answer still run, and all failures are reported together."""
        return GuardrailResult("failure", text)

    def fatal(self, text: str = "", cause: BaseException | None = None) -> GuardrailResult:
        """Refuse, run no further guardrail, and raise an error with this `cause`."""
        return GuardrailResult("fatal", text, cause=cause)


class InputGuardrail(_Guardrail, ABC):
    """Judges user messages before anything is sent to the model: `@input_guardrails(…)` at a service or a method.

        class NoInjection(InputGuardrail):
            async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
                if "ignore all instructions" in request.user_message.text:
                    return self.failure("looks like an attack")
                return self.success()

    `success_with` takes a `UserMessage` or its text. A refusal raises `InputGuardrailError`.
    """

    @abstractmethod
    def validate(self, request: InputGuardrailRequest) -> GuardrailResult | Awaitable[GuardrailResult]:
        """Judge a message. `def` or `async def`; a `def` runs where a `def` tool runs."""


class OutputGuardrail(_Guardrail, ABC):
    """Judges final answers as the caller will get them: `@output_guardrails(…)` at a service or a method.

    `success_with` takes the new value, a dict that is validated, or a text; `OutputParsingError` is raised for one that
    does not fit the method's return type. A refusal raises `OutputGuardrailError`.
    """

    @abstractmethod
    def validate(self, request: OutputGuardrailRequest) -> GuardrailResult | Awaitable[GuardrailResult]:
        """Judge an answer. `def` or `async def`; a `def` runs where a `def` tool runs."""

    def retry(self, text: str = "") -> GuardrailResult:
        """Refuse, and ask the model again with the same messages."""
        return GuardrailResult("retry", text)

    def reprompt(self, text: str, prompt: str) -> GuardrailResult:
        """Refuse, and ask the model again with the answer and `prompt` as a user message."""
        return GuardrailResult("reprompt", text, prompt=prompt)


class ToolInputGuardrail(_Guardrail, ABC):
    """Judges the arguments of tool calls: `@tool_input_guardrails(…)` at a tool.

    After a `failure` the tool does not run, and the model reads the text. `fatal` raises `ToolGuardrailError`.
    `success_with` takes all arguments, which are validated again.
    """

    @abstractmethod
    def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult | Awaitable[GuardrailResult]:
        """Judge a call. `def` or `async def`; a `def` runs where a `def` tool runs."""


class ToolOutputGuardrail(_Guardrail, ABC):
    """Judges the results of tools: `@tool_output_guardrails(…)` at a tool. It does not run if the tool raised.

    After a `failure` the model reads the text in place of the result. `fatal` raises `ToolGuardrailError`.
    `success_with` takes a `ToolExecutionResult`, or a text that replaces the result with its contents and its object.
    """

    @abstractmethod
    def validate(self, request: ToolOutputGuardrailRequest) -> GuardrailResult | Awaitable[GuardrailResult]:
        """Judge a result. `def` or `async def`; a `def` runs where a `def` tool runs."""


# --- decorators

D = TypeVar("D")
RETRIES_MARK = "__toolbox_answer_retries__"


def input_guardrails(*guardrails: object) -> Callable[[D], D]:
    """Judge the user messages of a service or one of its methods. Each guardrail is a class (a bean) or an instance.

        @register_ai_service
        @input_guardrails(NoInjection, MaxLength(4_000))
        class Desk(Protocol): ...

    They run in this order, those of a class first. Each sees what the one before changed.
    """
    return naming("input_guardrails", guardrails)


def output_guardrails(*guardrails: object, max_retries: int = 2) -> Callable[[D], D]:
    """Judge the final answers of a service or one of its methods.

    `max_retries` is how often the model is asked again in one call. Of several decorators, the largest counts.
    """
    if isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < 0:
        raise ValueError(f"@output_guardrails: max_retries is {max_retries!r}; use 0 or more")
    leave: Callable[[D], D] = naming("output_guardrails", guardrails)

    def leave_both(target: D) -> D:
        leave(target)
        setattr(target, RETRIES_MARK, max(max_retries, vars(target).get(RETRIES_MARK, 0)))
        return target

    return leave_both


def tool_input_guardrails(*guardrails: object) -> Callable[[D], D]:
    """Judge the calls of a tool, after the arguments were validated and before the tool runs.

    On a class of tools it applies to all of them; on a service or one of its methods, to all tools that it calls.
    """
    return naming("tool_input_guardrails", guardrails)


def tool_output_guardrails(*guardrails: object) -> Callable[[D], D]:
    """Judge the results of a tool before the model reads them. Classes and services: see `tool_input_guardrails`."""
    return naming("tool_output_guardrails", guardrails)


KINDS: Mapping[str, type[_Guardrail]] = {
    "input_guardrails": InputGuardrail,
    "output_guardrails": OutputGuardrail,
    "tool_input_guardrails": ToolInputGuardrail,
    "tool_output_guardrails": ToolOutputGuardrail,
}
"""The kind of guardrail that each decorator takes."""


def guardrail_problems(where: str, decorator: str, named: object, *, of_tool: bool) -> Iterator[Problem]:
    """Yield problems with the class of a guardrail; `of_tool` if it is named at a tool."""
    kind = KINDS[decorator]
    name = getattr(named, "__name__", None) or repr(named)
    if not (isinstance(named, type) and issubclass(named, kind)):
        article = "an" if kind.__name__[0] in "IO" else "a"
        yield Problem(where, f"{name} is not {article} {kind.__name__}", f"inherit from {kind.__name__}")
    elif not method_takes(named, "validate", 1):
        fact = f"does not take one argument, the {kind.__name__}Request"
        yield Problem(f"{name}.validate", fact, "declare it `def validate(self, request)`")
    if of_tool and not decorator.startswith("tool_"):
        yield Problem(where, "has no effect on a tool", f"use @tool_{decorator}")


# --- running one guardrail

find_model: ContextVar[Callable[[str | None], ChatModel] | None] = ContextVar("toolbox.guardrail_models", default=None)
"""Finds a model of the host by name, inside a guardrail."""

_REFUSING = frozenset({"failure", "fatal"})
_ASKING_AGAIN = frozenset({"retry", "reprompt"})


@dataclass(frozen=True, slots=True)
class _GuardContext:
    """The invocation or the tool call that a guardrail belongs to."""

    context: InvocationContext
    scope: ActiveScope
    runner: Runner
    listeners: Listeners | None
    model: Callable[[str | None], ChatModel] | None

    @classmethod
    def of_invocation(cls, invocation: Invocation) -> _GuardContext:
        host = invocation.host
        return cls(invocation.context, host.scope, invocation.runner, host.listeners, host.model)

    @classmethod
    def of_tool(cls, call: ToolCall) -> _GuardContext:
        environment: ToolEnvironment = call.environment
        return cls(call.context, environment.scope, environment.runner, environment.listeners, environment.model)


async def _judged(
    named: BeanReference, request: Any, place: _GuardContext, accept: Callable[[Any], Any], *, asks_again: bool = False
) -> GuardrailResult:
    """Run one guardrail. A wrong result and any exception become a fatal result; errors that end the invocation pass.

    `accept` converts the value of `success_with`, and raises if it is wrong. `asks_again`: the kind may retry.
    """
    began = perf_counter()
    outcome: GuardrailOutcome = "fatal"
    task = _current_task()
    cancelling = 0 if task is None else task.cancelling()
    token = find_model.set(place.model)
    try:
        try:
            guardrail = await named.find(place.scope)
            validate = guardrail.validate
            if is_async(validate):
                result = await own_code(validate(request))
            else:
                execution = execution_of(validate, getattr(validate, EXECUTION_MARK, None))
                result = await place.runner.run(
                    execution, lambda: validate(request), f"{_class_name(named)} (guardrail)"
                )
            result = _checked(result, named, asks_again)
            if result.outcome == "modified":
                result = replace(result, value=accept(result.value))
            outcome = result.outcome
        except EndsInvocation:
            raise
        except Exception as error:
            if isinstance(error, ExceptionGroup) and error.subgroup(EndsInvocation) is not None:
                raise
            result = GuardrailResult("fatal", message_of(error), cause=error)
        if task is not None and task.cancelling() > cancelling:  # the guardrail has caught it
            raise asyncio.CancelledError
        return result
    finally:
        find_model.reset(token)
        if place.listeners is not None:
            event = GuardrailExecutedEvent(place.context, named.type, outcome, perf_counter() - began)
            place.listeners.tell(event)


def _current_task() -> asyncio.Task[Any] | None:
    """Return the current task; None without an event loop, for a tool without a service."""
    return asyncio.current_task() if asyncio._get_running_loop() is not None else None


def _checked(result: object, named: BeanReference, asks_again: bool) -> GuardrailResult:
    """Return the result of a guardrail. Raises `TypeError` if it is not one."""
    if not isinstance(result, GuardrailResult):
        returned = type(result).__name__
        raise TypeError(f"{_class_name(named)}.validate returned {returned}; return self.success() or another result")
    if result.outcome not in get_args(GuardrailOutcome):
        raise TypeError(f"{_class_name(named)}.validate returned the unknown outcome {result.outcome!r}")
    if result.outcome in _ASKING_AGAIN and not asks_again:
        raise TypeError(f"{_class_name(named)}.validate returned {result.outcome!r}, which only output guardrails may")
    if result.outcome == "reprompt" and not isinstance(result.prompt, str):
        raise TypeError(f"{_class_name(named)}.validate returned a reprompt without a prompt")
    return result


def _class_name(named: BeanReference) -> str:
    return str(getattr(named.type, "__name__", named.type))


# --- around an invocation: the user message


class InputCheck:
    """The layer of the input guardrails of a method."""

    __slots__ = ("_named",)

    def __init__(self, named: Sequence[BeanReference]) -> None:
        self._named = tuple(named)

    @asynccontextmanager
    async def __call__(self, invocation: Invocation) -> AsyncIterator[None]:
        if not invocation.is_resumed:  # a resumed invocation has passed them
            await self._run(invocation)
        yield

    async def _run(self, invocation: Invocation) -> None:
        """Let the guardrails judge the user message, and replace it. Raises `InputGuardrailError`."""
        place, failures = _GuardContext.of_invocation(invocation), []
        messages = invocation.conversation
        for named in self._named:
            request = InputGuardrailRequest(invocation.user_message, messages, invocation.context)
            result = await _judged(named, request, place, partial(_user_message, invocation.user_message))
            if result.outcome == "modified":
                invocation.replace_user_message(result.value)
            elif result.outcome in _REFUSING:
                failures.append((named.type, result.text or "Input validation failed"))
                if result.outcome == "fatal":
                    raise InputGuardrailError(failures) from result.cause
        if failures:
            raise InputGuardrailError(failures)


def _user_message(message: UserMessage, value: object) -> UserMessage:
    """Return the new message. A text replaces the texts; images and other contents are kept."""
    if isinstance(value, UserMessage):
        return value
    if isinstance(value, str):
        others = with_texts(message.contents, lambda _: "")
        return UserMessage([TextContent(value), *others] if value else others, message.name, message.attributes)
    raise TypeError(f"success_with() of an input guardrail takes a UserMessage or a str, got {type(value).__name__}")


def with_texts(contents: Sequence[Content], change: Callable[[str], str]) -> tuple[Content, ...]:
    """Return the contents with changed texts; without texts that become empty."""
    changed: list[Content] = []
    for each in contents:
        match each:
            case TextContent(text):
                if new := change(text):
                    changed.append(TextContent(new))
            case ImageContent() | PdfContent() | AudioContent():
                changed.append(each)
            case _:
                assert_never(each)
    return tuple(changed)


# --- the answer


class OutputCheck:
    """Performs the effect `CheckAnswer` with the output guardrails of a method."""

    __slots__ = ("_named",)

    def __init__(self, named: Sequence[BeanReference]) -> None:
        self._named = tuple(named)

    async def __call__(self, effect: CheckAnswer, invocation: Invocation) -> AnswerChecked:
        """Let the guardrails judge the answer."""
        place, rules = _GuardContext.of_invocation(invocation), invocation.rules
        response, text, answer = effect.response, effect.text, effect.answer
        messages = (*invocation.state.history, *invocation.state.messages)
        failures: list[tuple[type, str]] = []
        refused = ""
        for named in self._named:
            request = OutputGuardrailRequest(response, answer.text, answer.value, messages, invocation.context)
            result = await _judged(named, request, place, lambda value: value, asks_again=True)
            if result.outcome == "success" or (result.outcome == "modified" and _is_text(result.value, answer.text)):
                continue
            if result.outcome == "modified":
                try:
                    response, answer = replaced_answer(rules, response, result.value)
                except OutputParsingError as unfit:
                    return AnswerChecked(effect.response, effect.text, None, unfit)
                text = response.ai_message.text or ""
                continue
            failures.append((named.type, result.text or "Output validation failed"))
            refused = request.text
            if result.outcome != "failure":
                refusal = OutputGuardrailError(failures, refused)
                refusal.__cause__ = result.cause
                asks_again = result.outcome in _ASKING_AGAIN
                return AnswerChecked(effect.response, effect.text, None, refusal, asks_again, result.prompt)
        refusing = OutputGuardrailError(failures, refused) if failures else None
        return AnswerChecked(response, text, answer.value, refusing)


def _is_text(value: object, text: str) -> bool:
    return isinstance(value, str) and value == text


# --- around a tool


def guarded_input(step: ToolStep, named: Sequence[BeanReference]) -> ToolStep:
    """Return the step after tool input guardrails."""
    guardrails = tuple(named)

    async def run(call: ToolCall) -> Encoded:
        place = _GuardContext.of_tool(call)
        for each in guardrails:
            request = ToolInputGuardrailRequest(call.request, call.visible_arguments(), call.context)
            result = await _judged(each, request, place, partial(_with_arguments, call))
            match result.outcome:
                case "success":
                    continue
                case "modified":
                    call = result.value
                case "failure":
                    return _refused("Input validation failed", result.text)
                case _:
                    _end(each, call, result)
        return await step(call)

    return run


def _with_arguments(call: ToolCall, values: object) -> ToolCall:
    if not isinstance(values, Mapping):
        kind = type(values).__name__
        raise TypeError(f"success_with() of a tool input guardrail takes a dict of all arguments, got {kind}")
    try:
        return call.with_validated(values)
    except ToolArgumentsError as error:
        raise ValueError(f"invalid arguments after success_with(): {error}") from error


def guarded_output(step: ToolStep, named: Sequence[BeanReference]) -> ToolStep:
    """Return the step with tool output guardrails after it."""
    guardrails = tuple(named)

    async def run(call: ToolCall) -> Encoded:
        encoded = await step(call)
        place, result = _GuardContext.of_tool(call), encoded.as_result()
        unchanged = result
        for each in guardrails:
            request = ToolOutputGuardrailRequest(call.request, call.visible_arguments(), result, call.context)
            judged = await _judged(each, request, place, partial(_tool_result, result))
            match judged.outcome:
                case "success":
                    continue
                case "modified":
                    result = judged.value
                case "failure":
                    return _refused("Output validation failed", judged.text)
                case _:
                    _end(each, call, judged)
        return encoded if result is unchanged else EncodedInFull.of(replace(result, text=printable(result.text)))

    return run


def _tool_result(result: ToolExecutionResult, value: object) -> ToolExecutionResult:
    if isinstance(value, ToolExecutionResult):
        return value
    if isinstance(value, str):
        return ToolExecutionResult(value, is_error=result.is_error, attributes=result.attributes)
    kind = type(value).__name__
    raise TypeError(f"success_with() of a tool output guardrail takes a ToolExecutionResult or a str, got {kind}")


def _refused(what: str, text: str) -> Encoded:
    return EncodedInFull(printable(f"{what}: {text}" if text else what), is_error=True)


def _end(named: BeanReference, call: ToolCall, result: GuardrailResult) -> NoReturn:
    raise ToolGuardrailError(named.type, call.request, result.text) from result.cause


# --- ready-made: length


class MaxLength(InputGuardrail, OutputGuardrail, ToolInputGuardrail, ToolOutputGuardrail):
    """Limits the length of texts: refuses longer messages and arguments, and cuts longer answers and results.

    A structured answer that is longer is refused, because a part of its JSON is not an answer.

        @input_guardrails(MaxLength(4_000))

    `chars` is the limit in characters; for arguments, of all their strings together.
    """

    def __init__(self, chars: int) -> None:
        if isinstance(chars, bool) or not isinstance(chars, int) or chars < 1:
            raise ValueError(f"MaxLength({chars!r}); use 1 or more characters")
        self.chars = chars

    def __repr__(self) -> str:
        return f"MaxLength({self.chars})"

    async def validate(self, request: Any) -> GuardrailResult:
        """Compare the length with the limit."""
        match request:
            case InputGuardrailRequest():
                return self._limited(len(request.user_message.text), "The message has {} characters")
            case ToolInputGuardrailRequest():
                return self._limited(_length(request.arguments), "The arguments have {} characters together")
            case OutputGuardrailRequest():
                is_text = request.value is None or isinstance(request.value, AiMessage)
                if not is_text and not _is_text(request.value, request.text):
                    return self._limited(len(request.text), "The answer has {} characters")
                long = len(request.text) > self.chars
                return self.success_with(request.text[: self.chars]) if long else self.success()
            case ToolOutputGuardrailRequest():
                result = request.result
                long = len(result.text) > self.chars
                return self.success_with(self._cut(result)) if long else self.success()
        raise TypeError(f"MaxLength does not support {type(request).__name__}")

    def _limited(self, length: int, fact: str) -> GuardrailResult:
        if length <= self.chars:
            return self.success()
        return self.failure(f"{fact.format(length)}; the limit is {self.chars}.")

    def _cut(self, result: ToolExecutionResult) -> ToolExecutionResult:
        left = self.chars

        def cut(text: str) -> str:
            nonlocal left
            kept = text[: max(left, 0)]
            left -= len(text) + 1
            return kept

        return replace(result, text=result.text[: self.chars], contents=with_texts(result.contents, cut))


def _length(value: Any) -> int:
    """Return the number of characters in all strings of a value."""
    total, pending = 0, [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            total += len(each)
        elif isinstance(each, Mapping):
            pending += each.values()
        elif isinstance(each, (list, tuple, set, frozenset)):
            pending += each
        elif isinstance(each, (bytes, bytearray)):
            total += len(each)
        elif each is not None and not isinstance(each, (bool, int, float)):
            plain = to_jsonable_python(each, fallback=str, bytes_mode="base64")
            pending.append(plain)
    return total


# --- secrets

MASK = "***"

_NAMES = (
    r"passw(?:or)?d|passphrase|passcode|\bpwd|secret|credentials?|authorization|"
    r"(?:api|access|private|signing|encryption|client|account|auth|master|shared|subscription|ssh|service)[_ -]?key"
)
_PASS = r"(?:db|database|user|smtp|mail|ftp|ssh|login|admin|root|proxy|mysql|postgres|pg|redis)[_ -]?pass(?![a-z])"
_SECRET_NAME = re.compile(rf"{_NAMES}|\b{_PASS}|\bpwd\b|\bpin\b|\bcvv\b|\bcvc\b|cookie", re.IGNORECASE)
_TOKEN_NAME = re.compile(r"token(?!ize|_?type|_?count)", re.IGNORECASE)
# An assignment in text: `password=…`, `"api_key": "…"`, `token: …`. The length limits keep the search linear.
_ASSIGNED = re.compile(
    rf"""((?:{_NAMES}|{_PASS}|token(?!s|ize|_?type|_?count))[\w-]{{0,30}}["']?\s{{0,5}}(?:[:=]|=>)\s{{0,5}})"""
    r"""("(?:[^"\\\n]|\\.){1,4096}"|'(?:[^'\\\n]|\\.){1,4096}'|(?:(?:bearer|basic)\s{1,5})?[^\s,;&"'<>{}\[\]]{1,4096})""",
    re.IGNORECASE,
)
_SAID = re.compile(
    rf"((?:{_NAMES}|token|\bpin)\s{{1,5}}(?:is|was)\s{{1,5}}:?\s{{0,5}})(?=\S{{0,200}}[\d!@#$%^*_+=-])([^\s,;]{{4,4096}})",
    re.IGNORECASE,
)
_NAME_STARTS = (
    *("passw", "passphrase", "passcode", "pwd", "secret", "credential", "token", "pin"),
    *("api", "access", "private", "signing", "encryption", "client", "account", "auth", "master", "shared"),
    *("subscription", "ssh", "service", "db", "database", "user", "smtp", "mail", "ftp", "login", "admin", "root"),
    *("proxy", "mysql", "postgres", "pg", "redis"),
)
"""The beginnings of the names above, in lower case."""
_COOKIE = re.compile(r"((?:set-)?cookie:[ \t]{0,5})[\w!#$%&'*.^`|~+-]{1,256}=[^\r\n\"]{1,8192}", re.IGNORECASE)
_SECRETS = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)"
    r"|(?<![\w-])eyJ[\w-]{5,8192}\.[\w-]{5,16384}\.[\w-]{0,8192}"  # JSON web tokens
    r"|(?<![\w-])(?:sk|rk|pk)[-_](?:[\w-]{16,512})"  # OpenAI, Anthropic, Stripe
    r"|(?<![\w-])(?:gh[pousr]_|github_pat_|glpat-|npm_|hf_|pypi-|dop_v1_|shpat_|xox[abeprs]-|xapp-)[\w-]{10,512}"
    r"|(?<![\w-])(?:AKIA|ASIA|AROA|AIDA)[0-9A-Z]{16}(?![0-9A-Z])"  # AWS
    r"|(?<![\w-])AIza[\w-]{30,60}|(?<![\w-])ya29\.[\w-]{20,512}|(?<![\w-])SG\.[\w-]{16,64}\.[\w-]{16,128}",
    re.DOTALL,
)
_SECRET_STARTS = (
    *("-----BEGIN ", "eyJ", "sk-", "sk_", "rk-", "rk_", "pk-", "pk_", "gh", "glpat-", "npm_", "hf_", "pypi-"),
    *("github_pat_", "dop_v1_", "shpat_", "xox", "xapp-", "AKIA", "ASIA", "AROA", "AIDA", "AIza", "ya29.", "SG."),
)
"""The beginnings of the secrets above."""
_BEARER = re.compile(r"\b(bearer|basic)(\s{1,5})[\w.~+/=-]{8,8192}", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(://[^\s:/@\"']{0,256}:)[^\s/@\"']{1,256}(?=@)")
_DIGITS = re.compile(r"(?<![\d.])(?:\d[ -]?){12,18}\d(?![\d])")


class MaskSecrets(ToolOutputGuardrail):
    """Replaces secrets in the results of tools by `***`: keys, tokens, passwords and card numbers.

        @tool
        @tool_output_guardrails(MaskSecrets)
        def configuration(self) -> dict[str, str]: ...

    JSON stays valid JSON. The result's object is dropped, because it may contain the same secrets. It finds secrets by
    their names and by well-known formats, so it cannot find all of them.
    """

    def validate(self, request: ToolOutputGuardrailRequest) -> GuardrailResult:
        """Mask the text, the text contents and the attributes of the result."""
        result = request.result
        contents = with_texts(result.contents, masked)
        attributes = _masked_value(result.attributes) if result.attributes else result.attributes
        changed = ToolExecutionResult(masked(result.text), None, result.is_error, attributes, contents)
        return self.success() if changed == result else self.success_with(changed)


def masked(text: str) -> str:
    """Return a text, which may be JSON, with its secrets replaced."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            value = parsed_exactly(text)
            hidden = _masked_value(value)
            return text if hidden == value else written_exactly(hidden)
        except (ValueError, RecursionError):
            pass
    return _masked_text(text)


def _masked_value(value: Any, secret: bool = False, token: bool = False) -> Any:
    """Mask the strings of a JSON value; in a `secret`, all strings and numbers; in a `token`, all strings."""
    if isinstance(value, Mapping):
        return {
            name: _masked_value(
                each,
                secret or _SECRET_NAME.search(_words(name)) is not None,
                token or _TOKEN_NAME.search(name) is not None,
            )
            for name, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_masked_value(each, secret, token) for each in value]
    if value is None or isinstance(value, bool) or value == "":
        return value
    is_text = type(value) is str  # numbers are of a subclass, exactly as written
    if secret or (token and is_text):
        return MASK
    if not is_text:
        return MASK if _is_card(str(value)) else value
    return _masked_text(value)


def _words(name: str) -> str:
    """Return a name in camel case or snake case as words, so that `userPin` is found and `shipping` is not."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[_.-]", " ", name)


def _masked_text(text: str) -> str:
    if len(text) < 5 or (len(text) < 13 and text.isalnum()):
        return text  # shorter than all secrets
    text = _replaced(_SECRETS, MASK, text, text, _SECRET_STARTS)
    lower = _lowered(text)
    for pattern, replacement, starts, needed in (
        (_BEARER, rf"\1\2{MASK}", ("bearer", "basic"), ("bearer", "basic")),
        (_IN_ADDRESS, rf"\1{MASK}", ("://",), ("@",)),
        (_COOKIE, rf"\1{MASK}", ("cookie:", "set-cookie:"), ("=",)),
        (_ASSIGNED, _assigned, _NAME_STARTS, ("=", ":")),
        (_SAID, rf"\1{MASK}", _NAME_STARTS, ("is", "was")),
    ):
        if any(each in lower for each in needed):
            replaced = _replaced(pattern, replacement, text, lower, starts)
            if replaced is not text:
                text, lower = replaced, _lowered(replaced)
    return _DIGITS.sub(lambda found: MASK if _is_card(found.group()) else found.group(), text)


def _replaced(
    pattern: re.Pattern[str],
    replacement: str | Callable[[re.Match[str]], str],
    text: str,
    searched: str,
    starts: Sequence[str],
) -> str:
    """Return the same as `pattern.sub`, many times faster: tries the pattern only where one of `starts` is.

    A search by `re` in a text of a megabyte takes a second, in which no other thread can run. `searched` is the text
    or its lower-case form.
    """
    places: set[int] = set()
    for start in starts:
        place = searched.find(start)
        while place >= 0:
            places.add(place)
            place = searched.find(start, place + 1)
    pieces: list[str] = []
    end = 0
    for place in sorted(places):
        if place >= end and (found := pattern.match(text, place)):
            pieces += (
                text[end:place],
                found.expand(replacement) if isinstance(replacement, str) else replacement(found),
            )
            end = found.end()
    return "".join(pieces) + text[end:] if pieces else text


def _lowered(text: str) -> str:
    """Return the text in lower case, with each character at its place.

    Letters that `re.IGNORECASE` takes for an ASCII letter become that letter.
    """
    return text.replace("\u0130", "i").replace("\u0131", "i").replace("\u017f", "s").lower()


def _assigned(found: re.Match[str]) -> str:
    name, value = found.groups()
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{quote}{MASK}{quote}"


def _is_card(text: str) -> bool:
    """Return True for 13 to 19 digits with a valid check digit (Luhn)."""
    digits = [int(each) for each in text if each.isdigit()]
    if not 13 <= len(digits) <= 19 or not text.replace(" ", "").replace("-", "").isdigit():
        return False
    doubled = [sum(divmod(2 * each, 10)) for each in digits[-2::-2]]
    return any(digits) and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


# --- moderation


class Moderated(InputGuardrail, OutputGuardrail, ToolInputGuardrail, ToolOutputGuardrail):
    """Refuses texts and images that OpenAI's moderation endpoint flags.

        @input_guardrails(Moderated())

    It uses the address and the key of the default model, which must be an `OpenAiChatModel`. `model` is the moderation
    model. If the endpoint cannot be reached, the text is refused. The endpoint cannot judge PDF documents and audio:
    they are refused, or let through with `unjudged="allow"`. Raises `ValueError` for another `unjudged`.
    """

    def __init__(
        self, model: str = "omni-moderation-latest", *, unjudged: Literal["refuse", "allow"] = "refuse"
    ) -> None:
        if unjudged not in ("refuse", "allow"):
            raise ValueError(f"unjudged is {unjudged!r}; use 'refuse' or 'allow'")
        self.model, self.unjudged = model, unjudged

    def __repr__(self) -> str:
        return f"Moderated({self.model!r}, unjudged={self.unjudged!r})"

    async def validate(self, request: Any) -> GuardrailResult:
        """Send the text and the images to the endpoint. Raises `ModelError` if it does not answer."""
        text, media = _parts_to_moderate(request)
        inputs: list[Any] = [text] if text.strip() else []
        for part in media:
            if (reason := reason_against(part)) is not None:  # a part of a stored message
                return self.failure(f"moderation cannot judge {type(part).__name__}: {reason}")
            if (image := _image_to_moderate(part)) is not None:
                inputs.append([image])  # one image for each request, as the endpoint wants it
            elif self.unjudged == "refuse":
                return self.failure(f"moderation cannot judge {type(part).__name__}")
        flagged = dict.fromkeys([name for each in inputs for name in await self._flagged(each)])
        return self.failure(f"flagged by moderation: {', '.join(flagged)}") if flagged else self.success()

    async def _flagged(self, given: Any) -> list[str]:
        """Return the names of the categories that apply to an input of the endpoint."""
        reply = await _default_model().call_endpoint("/moderations", {"model": self.model, "input": given})
        results = reply.get("results") if isinstance(reply, Mapping) else None
        if not isinstance(results, Sequence) or not results or not all(isinstance(each, Mapping) for each in results):
            raise ModelProtocolError("the reply of the moderation endpoint has no results", json.dumps(reply)[:200])
        names: dict[str, None] = {}
        for result in results:
            if not isinstance(result.get("flagged"), bool):
                raise ModelProtocolError("the reply of the moderation endpoint has no flag", json.dumps(reply)[:200])
            if result["flagged"]:
                categories = result.get("categories")
                found = [name for name, applies in categories.items() if applies] if categories else []
                names.update(dict.fromkeys(found or ["unspecified"]))
        return list(names)


def _image_to_moderate(part: Media) -> dict[str, Any] | None:
    """Return an image as the endpoint reads it; None for what it cannot judge."""
    match part:
        case ImageContent():
            return {"type": "image_url", "image_url": {"url": url_of(part)}}
        case PdfContent() | AudioContent():
            return None
        case _:
            assert_never(part)


def _parts_to_moderate(request: Any) -> tuple[str, tuple[Media, ...]]:
    """Return the text, and the images, documents and recordings that a guardrail got."""
    match request:
        case InputGuardrailRequest():
            return request.user_message.text, media_in(request.user_message.contents)
        case OutputGuardrailRequest():
            return request.text, ()
        case ToolInputGuardrailRequest():
            return to_json(request.arguments, fallback=str, bytes_mode="base64").decode(), ()
        case ToolOutputGuardrailRequest():
            text, more = request.result.text, joined_text(request.result.contents)
            # Beside images, models read the texts of the contents.
            return text if more in text else f"{text}\n{more}", media_in(request.result.contents)
    raise TypeError(f"Moderated does not support {type(request).__name__}")


def _default_model() -> Any:
    """Return the default model, or the first of its fallbacks that has a moderation endpoint."""
    find = find_model.get()
    model = find(None) if find is not None else None
    for each in (model, *getattr(model, "models", ())):
        if hasattr(each, "call_endpoint"):
            return each
    fact = f"the default model is {type(model).__name__}" if model is not None else "there is no default model"
    fix = "use an OpenAiChatModel as the default model, or replace Moderated in tests"
    raise IllegalConfigurationError([Problem("Moderated", fact, fix)])
