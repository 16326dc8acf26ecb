"""The four kinds of guardrails: what they judge and return, their decorators, and the checks of their classes.

Not here: running them (`guard_layers`), guardrails that are ready to use (`ready_made`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ..bean_references import name_beans
from ..chat import ChatResponse, Message, ToolExecutionRequest, ToolExecutionResult, UserMessage
from ..context import InvocationContext
from ..di.decorators import Scope
from ..errors import Problem
from ..events import GuardrailOutcome
from ..introspection import method_takes
from ..passages import Passage

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
    the `value` wrapper. `messages` are the conversation before it, `sources` the passages that retrievers have found.
    """

    response: ChatResponse
    text: str
    messages: tuple[Message, ...]
    context: InvocationContext
    value: Any = field(default=None, hash=False)
    sources: tuple[Passage, ...] = ()


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
    """The result of a tool, for a tool output guardrail.

    `request` is the model's call. `arguments` are the validated arguments that the model can see, with defaults, by the
    names of the parameters.
    """

    request: ToolExecutionRequest
    arguments: dict[str, Any] = field(hash=False)
    result: ToolExecutionResult
    context: InvocationContext


@dataclass(frozen=True, slots=True)
class GuardrailResult:
    """The judgement of a guardrail; create it with the methods of the guardrail, such as `self.success()`.

    `outcome` is `"success"`, `"modified"`, `"failure"`, `"fatal"`, `"retry"` or `"reprompt"`. `text` is the reason of a
    refusal, `value` the replacement of `"modified"`, `prompt` the user message of `"reprompt"`, `cause` the exception
    behind a `"fatal"`.
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
        """Accept the message, answer, arguments or result as it is."""
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
    `success_with` takes all arguments; those that it replaces are validated.
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

    They run in this order, those of a class first. Each gets the message as the one before changed it. Raises
    `TypeError` without guardrails.
    """
    return name_beans("input_guardrails", guardrails)


def output_guardrails(*guardrails: object, max_retries: int = 2) -> Callable[[D], D]:
    """Judge the final answers of a service or one of its methods.

    `max_retries` is how often the model is asked again in one call. Of several decorators, the largest counts. Raises
    `ValueError` for a negative one, and `TypeError` without guardrails.
    """
    if isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < 0:
        raise ValueError(f"@output_guardrails: invalid max_retries={max_retries!r}; use 0 or more")
    leave: Callable[[D], D] = name_beans("output_guardrails", guardrails)

    def leave_both(target: D) -> D:
        leave(target)
        setattr(target, RETRIES_MARK, max(max_retries, vars(target).get(RETRIES_MARK, 0)))
        return target

    return leave_both


def tool_input_guardrails(*guardrails: object) -> Callable[[D], D]:
    """Judge the calls of a tool, after the arguments were validated and before the tool runs.

    On a class of tools it applies to all of them; on a service or one of its methods, to all tools that it calls.
    Raises `TypeError` without guardrails.
    """
    return name_beans("tool_input_guardrails", guardrails)


def tool_output_guardrails(*guardrails: object) -> Callable[[D], D]:
    """Judge the results of a tool before the model reads them.

    On a class of tools it applies to all of them; on a service or one of its methods, to all tools that it calls.
    Raises `TypeError` without guardrails.
    """
    return name_beans("tool_output_guardrails", guardrails)


KINDS: Mapping[str, type[_Guardrail]] = {
    "input_guardrails": InputGuardrail,
    "output_guardrails": OutputGuardrail,
    "tool_input_guardrails": ToolInputGuardrail,
    "tool_output_guardrails": ToolOutputGuardrail,
}
"""The kind of guardrail that each decorator takes."""


def answer_retries(definitions: Iterable[object]) -> int:
    """Return the largest `max_retries` of `@output_guardrails` at these classes and methods."""
    found: list[int] = [vars(each).get(RETRIES_MARK, 0) for each in definitions if hasattr(each, "__dict__")]
    return max(found)


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
