"""Which tools were called, in a test's words: assertions on the calls of an invocation, and what a model was sent.

Not here: which actual call is which expected one (`pairing`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from ..chat import (
    AiMessage,
    ChatRequest,
    Message,
    SystemMessage,
    ToolExecuted,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
)
from ..json_text import compact_json, object_text
from .pairing import Likeness, Pair, pairs_in_any_order, pairs_in_order
from .scripted import ScriptedChatModel

_WIDTH = 60


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A call that was made: `arguments` as an object, `{}` when their text is none; `result` is None without one."""

    name: str
    arguments: Mapping[str, Any] = field(hash=False)
    text: str = field(repr=False)
    """The arguments as the model wrote them."""
    result: str | None = None
    is_error: bool = False

    def __str__(self) -> str:
        said = f"{self.name}({compact_json(self.arguments) if self.arguments else self.text.strip()})"
        if self.result is None:
            return said
        return f"{said} -> {'error ' if self.is_error else ''}{self.result!r}"


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """A call of the tool `name`; what is None may be anything.

    `arguments` are those that must be there, among others that may, unless `exactly`. They and `result`, the text for
    the model, are compared by `==`, the expected on the left: `unittest.mock.ANY` or `pytest.approx` fit. `is_error`
    says whether the call failed.
    """

    name: str
    arguments: Mapping[str, Any] | None = field(default=None, hash=False)
    result: object = None
    is_error: bool | None = None
    exactly: bool = False

    def __str__(self) -> str:
        inside = "…"
        if self.arguments is not None:
            inside = ", ".join(f"{json.dumps(name)}: {_shown(value)}" for name, value in self.arguments.items())
            inside = f"{{{inside}}}" if self.exactly else f"{{{inside}{', ' if inside else ''}…}}"
        end = "" if self.result is None else f" -> {self.result!r}"
        error = "" if self.is_error is None else " an error" if self.is_error else " no error"
        return f"{self.name}({inside}){end}{error}"

    def likeness(self, call: CalledTool) -> Likeness:
        """Whether `call` is the one, or at least of the same tool."""
        if self.name != call.name:
            return Likeness.NONE
        return Likeness.SAME_TOOL if any(self.differences(call)) else Likeness.FITS

    def differences(self, call: CalledTool) -> Iterator[str]:
        """What is wrong with `call`; nothing when it is the one."""
        if self.name != call.name:
            yield f"the tool is {call.name!r}, not {self.name!r}"
            return
        expected = {} if self.arguments is None else self.arguments
        for name, value in expected.items():
            if name not in call.arguments:
                yield f"argument {name!r} is missing; expected {_shown(value)}"
            elif value != call.arguments[name]:
                yield f"argument {name!r} is {_shown(call.arguments[name])}, not {_shown(value)}"
        if self.exactly:
            for name in call.arguments.keys() - expected.keys():
                yield f"argument {name!r} is {_shown(call.arguments[name])}, and not expected"
        if self.result is not None and self.result != call.result:
            yield f"the result is {call.result!r}, not {self.result!r}"
        if self.is_error is not None and (call.result is None or self.is_error != call.is_error):
            said = "there is no result" if call.result is None else "it failed" if call.is_error else "it did not fail"
            yield f"{said}, and should{'' if self.is_error else ' not'} have failed"


Expected: TypeAlias = str | ToolExecutionRequest | ExpectedCall
"""A tool's name; `tool_call(name, arguments)`: exactly these arguments, whatever the id; or an `ExpectedCall`."""


class HasToolExecutions(Protocol):
    """A `Result`, an `invocation_record()`, the fixture `toolbox_record`."""

    @property
    def tool_executions(self) -> Sequence[ToolExecution]:
        """The calls that have ended, in order."""
        ...


Calls: TypeAlias = "HasToolExecutions | ScriptedChatModel | ChatRequest | AiMessage | Iterable[object]"
"""Where calls are found: what has `tool_executions`; messages, executions, requests, a stream's events; of a scripted
model those in its last request."""


def called_tools(calls: Calls) -> tuple[CalledTool, ...]:
    """The calls in `calls`, in order. Raises `TypeError` for what holds none."""
    return tuple(_calls_in(calls))


def assert_tool_calls(calls: Calls, *expected: Expected, in_order: bool = True, others: bool = False) -> None:
    """Asserts that these tools were called, in this order and no others, unless said otherwise.

    `in_order=False`: in any order. `others=True`: other calls may come before, between and after.
    """
    __tracebackhide__ = True
    actual = called_tools(calls)
    wanted = tuple(map(_expected, expected))
    table = [[each.likeness(call) for call in actual] for each in wanted]
    pairs = (pairs_in_order if in_order else pairs_in_any_order)(table, len(actual))
    if all(pair.fits or (others and pair.expected is None) for pair in pairs):
        return
    order = "in this order" if in_order else "in any order"
    told = f"the tool calls are not these, {order}{', among others' if others else ''}:"
    raise AssertionError("\n".join([told, *_side_by_side(wanted, actual, pairs, others)]))


def assert_no_tool_calls(calls: Calls, *names: str) -> None:
    """Asserts that none of these tools was called; without `names`, that none was."""
    __tracebackhide__ = True
    actual = called_tools(calls)
    wrong = [str(call) for call in actual if not names or call.name in names]
    if wrong:
        what = " or ".join(names) if names else "a tool"
        raise AssertionError("\n  ".join([f"no call of {what} was expected, and there is:", *wrong]))


# --- what a model was sent


def offered_tools(request: ChatRequest | ScriptedChatModel) -> list[str]:
    """The names of the tools that a request offers; of a scripted model, its last."""
    return [each.name for each in _request(request).tool_specifications]


def system_text(request: ChatRequest | ScriptedChatModel) -> str | None:
    """The system message of a request, None without one; of a scripted model, its last."""
    return next((each.text for each in _request(request).messages if isinstance(each, SystemMessage)), None)


def user_text(request: ChatRequest | ScriptedChatModel) -> str | None:
    """The last user message of a request, None without one; of a scripted model, its last."""
    messages = reversed(_request(request).messages)
    return next((each.text for each in messages if isinstance(each, UserMessage)), None)


def _request(request: ChatRequest | ScriptedChatModel) -> ChatRequest:
    if not isinstance(request, ScriptedChatModel):
        return request
    if not request.requests:
        raise AssertionError("the model has not been asked; call the service first")
    return request.requests[-1]


# --- finding calls


def _calls_in(calls: Any) -> Iterator[CalledTool]:
    if isinstance(calls, ScriptedChatModel):
        calls = _request(calls).messages
    elif isinstance(calls, ChatRequest):
        calls = calls.messages
    elif isinstance(calls, AiMessage):
        calls = [calls]
    elif hasattr(calls, "tool_executions"):
        calls = calls.tool_executions
    if not isinstance(calls, Iterable) or isinstance(calls, (str, bytes, Mapping)):
        fix = "give a Result (declare the method `-> Result[...]`), an invocation_record(), messages or executions"
        raise TypeError(f"there are no tool calls in a {type(calls).__name__}; {fix}")
    found = list(calls)
    for position, each in enumerate(found):
        if isinstance(each, ToolExecuted):
            each = each.execution
        if isinstance(each, ToolExecution):
            yield _call(each.request, each.result, each.is_error)
        elif isinstance(each, ToolExecutionRequest):
            yield _call(each)
        elif isinstance(each, AiMessage):
            results = _results_after(found[position + 1 :])
            for request in each.tool_execution_requests:
                result = results.get(request.id)
                yield _call(request) if result is None else _call(request, result.text, result.is_error)


def _results_after(messages: Sequence[Message]) -> dict[str, ToolExecutionResultMessage]:
    """The results of one round, by id: a later round may use the ids again."""
    results: dict[str, ToolExecutionResultMessage] = {}
    for each in messages:
        if not isinstance(each, ToolExecutionResultMessage):
            break
        results[each.id] = each
    return results


def _call(request: ToolExecutionRequest, result: str | None = None, is_error: bool = False) -> CalledTool:
    try:
        arguments = json.loads(object_text(request.arguments))
    except ValueError:
        arguments = {}
    return CalledTool(
        request.name, arguments if isinstance(arguments, dict) else {}, request.arguments, result, is_error
    )


def _expected(expected: Expected) -> ExpectedCall:
    if isinstance(expected, str):
        return ExpectedCall(expected)
    if isinstance(expected, ToolExecutionRequest):
        return ExpectedCall(expected.name, json.loads(object_text(expected.arguments)), exactly=True)
    return expected


# --- showing them


def _side_by_side(
    expected: Sequence[ExpectedCall], actual: Sequence[CalledTool], pairs: Sequence[Pair], others: bool
) -> Iterator[str]:
    rows = []
    for pair in pairs:
        left = "-" if pair.expected is None else str(expected[pair.expected])
        right = "-" if pair.actual is None else str(actual[pair.actual])
        rows.append((_cut(left), _cut(right), pair))
    width = max(len("expected"), *(len(left) for left, _, _ in rows))
    yield f"    {'expected':{width}}  actual"
    for left, right, pair in rows:
        is_fine = pair.fits or (others and pair.expected is None)
        yield f"  {' ' if is_fine else '✗'} {left:{width}}  {right}"
        if not pair.fits and pair.expected is not None and pair.actual is not None:
            for difference in expected[pair.expected].differences(actual[pair.actual]):
                yield f"      {difference}"


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"


def _shown(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(value)
