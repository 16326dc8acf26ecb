"""Which tools were called, in a test's words: assertions on the calls of an invocation, and what a model was sent.

Not here: which actual call is which expected one (`pairing`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import zip_longest
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
from ..events import EventListener, InvocationEvent, ModelRequestEvent, ToolExecutedEvent
from ..json_text import compact_json, object_text
from .scripted import ScriptedChatModel

_WIDTH = 60


@dataclass(slots=True, eq=False)
class EventRecord(EventListener):
    """Keeps all events of its container: `record = EventRecord(); container.register_instance(record)`.

    Unlike `invocation_record()`, which follows a context, it sees also what a server under test does.
    """

    events: list[InvocationEvent] = field(default_factory=list)

    def on_event(self, event: InvocationEvent) -> None:
        """Keeps it."""
        self.events.append(event)

    @property
    def tool_executions(self) -> list[ToolExecution]:
        """The tool calls that have a result, in the order they ended."""
        return [each.execution for each in self.events if isinstance(each, ToolExecutedEvent)]

    @property
    def requests(self) -> list[ChatRequest]:
        """What models were sent, in order."""
        return [each.request for each in self.events if isinstance(each, ModelRequestEvent)]


class Likeness(IntEnum):
    """How an expected call and an actual one are alike."""

    NONE = 0
    SAME_TOOL = 1
    FITS = 2


Table: TypeAlias = Sequence[Sequence[Likeness]]
"""For each expected call its likeness with each actual one."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What is shown in one line: the positions of an expected and an actual call; one of them may be None."""

    expected: int | None
    actual: int | None
    fits: bool


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


# --- matching expected and actual calls


def pairs_in_order(table: Table, actual: int) -> list[Pair]:
    """As many that fit as can be, then as many of the same tool, and beside each other what is left between."""
    pairs: list[Pair] = []
    start = (0, 0)
    for left, right in _longest_run(table, actual):
        pairs += _unlike(range(start[0], left), range(start[1], right))
        pairs.append(Pair(left, right, table[left][right] is Likeness.FITS))
        start = left + 1, right + 1
    return [*pairs, *_unlike(range(start[0], len(table)), range(start[1], actual))]


def _longest_run(table: Table, actual: int) -> Iterator[tuple[int, int]]:
    # One that fits counts more than all that are of the same tool together.
    worth = {Likeness.SAME_TOOL: 1, Likeness.FITS: len(table) + 1}
    best = [[0] * (actual + 1) for _ in range(len(table) + 1)]
    for left in reversed(range(len(table))):
        for right in reversed(range(actual)):
            apart = max(best[left + 1][right], best[left][right + 1])
            likeness = table[left][right]
            best[left][right] = max(apart, best[left + 1][right + 1] + worth[likeness]) if likeness else apart
    left = right = 0
    while left < len(table) and right < actual:
        likeness = table[left][right]
        if likeness and best[left][right] == best[left + 1][right + 1] + worth[likeness]:
            yield left, right
            left, right = left + 1, right + 1
        elif best[left + 1][right] >= best[left][right + 1]:
            left += 1
        else:
            right += 1


def pairs_in_any_order(table: Table, actual: int) -> list[Pair]:
    """As many that fit as can be: a call that two expected ones fit goes to the one that has no other."""
    fitting = _matched(table, range(len(table)), range(actual), Likeness.FITS)
    expected = [left for left in range(len(table)) if left not in fitting]
    unexpected = [right for right in range(actual) if right not in fitting.values()]
    alike = _matched(table, expected, unexpected, Likeness.SAME_TOOL)
    return [
        *(Pair(left, right, True) for left, right in sorted(fitting.items())),
        *(Pair(left, right, False) for left, right in sorted(alike.items())),
        *_unlike(
            [left for left in expected if left not in alike],
            [right for right in unexpected if right not in alike.values()],
        ),
    ]


def _matched(table: Table, expected: Sequence[int], actual: Sequence[int], least: Likeness) -> dict[int, int]:
    """A largest matching: who comes later may send an earlier one on to another call."""
    taken: dict[int, int] = {}

    def find(left: int, seen: set[int]) -> bool:
        for right in actual:
            if table[left][right] >= least and right not in seen:
                seen.add(right)
                if right not in taken or find(taken[right], seen):
                    taken[right] = left
                    return True
        return False

    for left in expected:
        find(left, set())
    return {left: right for right, left in taken.items()}


def _unlike(expected: Sequence[int], actual: Sequence[int]) -> Iterator[Pair]:
    for left, right in zip_longest(expected, actual):
        yield Pair(left, right, False)


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
