"""Assertions on the tool calls that models made, with expected and actual calls side by side.

Not here: calls that wait for an answer (`pending_answers`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any, Protocol, TypeAlias

from ..chat import (
    AiMessage,
    ChatRequest,
    Message,
    ToolExecuted,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
)
from ..events import EventListener, InvocationEvent, ModelRequestEvent, ToolExecutedEvent
from ..json_text import compact_json, object_text
from .scripted_model import ScriptedChatModel, last_request

_WIDTH = 60


@dataclass(slots=True, eq=False)
class EventRecord(EventListener):
    """Records all events of a container, from every thread and event loop.

        record = EventRecord()
        container.register_instance(record)

    Unlike `invocation_record()`, which covers the current context only, it also sees the calls of a server under test.
    """

    events: list[InvocationEvent] = field(default_factory=list)

    def on_event(self, event: InvocationEvent) -> None:
        """Add the event to `events`."""
        self.events.append(event)

    @property
    def tool_executions(self) -> list[ToolExecution]:
        """Return the finished tool calls, in the order in which they ended."""
        return [each.execution for each in self.events if isinstance(each, ToolExecutedEvent)]

    @property
    def requests(self) -> list[ChatRequest]:
        """Return the requests sent to models, in order."""
        return [each.request for each in self.events if isinstance(each, ModelRequestEvent)]


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A call that a model made.

    `arguments` is `{}` if their text is not a JSON object; `text` is that text. `result` is the text for the model, or
    None if the call has no result.
    """

    name: str
    arguments: Mapping[str, Any] = field(hash=False)
    text: str = field(repr=False)
    """The arguments as the model wrote them."""
    result: str | None = None
    is_error: bool = False

    def __str__(self) -> str:
        call = f"{self.name}({compact_json(self.arguments) if self.arguments else self.text.strip()})"
        if self.result is None:
            return call
        return f"{call} -> {'error ' if self.is_error else ''}{self.result!r}"


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """An expected call of the tool `name`, for `assert_tool_calls`. None matches anything.

        assert_tool_calls(result, ExpectedCall("add", {"a": 1}, is_error=False))

    `arguments` are required arguments; others are allowed unless `exactly` is true. `result` is the text for the model.
    Values are compared with `expected == actual`, so `unittest.mock.ANY` and `pytest.approx` work. `is_error` tells
    whether the call must fail (True) or succeed (False).
    """

    name: str
    arguments: Mapping[str, Any] | None = field(default=None, hash=False)
    result: object = None
    is_error: bool | None = None
    exactly: bool = False

    def __str__(self) -> str:
        inside = "…"
        if self.arguments is not None:
            inside = ", ".join(f"{json.dumps(name)}: {_show_value(value)}" for name, value in self.arguments.items())
            inside = f"{{{inside}}}" if self.exactly else f"{{{inside}{', ' if inside else ''}…}}"
        end = "" if self.result is None else f" -> {self.result!r}"
        error = "" if self.is_error is None else " an error" if self.is_error else " no error"
        return f"{self.name}({inside}){end}{error}"

    def differences(self, call: CalledTool) -> Iterator[str]:
        """Yield the differences between this call and `call`, one line each."""
        if self.name != call.name:
            yield f"the tool is {call.name!r}, not {self.name!r}"
            return
        expected = {} if self.arguments is None else self.arguments
        for name, value in expected.items():
            if name not in call.arguments:
                yield f"argument {name!r} is missing; expected {_show_value(value)}"
            elif value != call.arguments[name]:
                yield f"argument {name!r} is {_show_value(call.arguments[name])}, not {_show_value(value)}"
        if self.exactly:
            for name in call.arguments.keys() - expected.keys():
                yield f"argument {name!r} is unexpected: {_show_value(call.arguments[name])}"
        if self.result is not None and self.result != call.result:
            yield f"the result is {call.result!r}, not {self.result!r}"
        if self.is_error is not None and (call.result is None or self.is_error != call.is_error):
            outcome = "has no result" if call.result is None else "failed" if call.is_error else "succeeded"
            yield f"the call {outcome}; expected it to {'fail' if self.is_error else 'succeed'}"


Expected: TypeAlias = str | ToolExecutionRequest | ExpectedCall
"""A tool's name, a `tool_call(name, arguments)` with exactly these arguments (any id), or an `ExpectedCall`."""


class HasToolExecutions(Protocol):
    """An object with tool executions: a `Result`, an `invocation_record()` or the fixture `toolbox_record`."""

    @property
    def tool_executions(self) -> Sequence[ToolExecution]:
        """The finished calls, in order."""
        ...


Calls: TypeAlias = "HasToolExecutions | ScriptedChatModel | ChatRequest | AiMessage | Iterable[object]"
"""Sources of calls: objects with `tool_executions`, messages, executions, requests, stream events. Of a scripted model,
the messages of its last request are read."""


def called_tools(calls: Calls) -> tuple[CalledTool, ...]:
    """Return the calls in `calls`, in order. Raises `TypeError` for an object that cannot contain calls."""
    return tuple(_find_calls(calls))


def assert_tool_calls(calls: Calls, *expected: Expected, in_order: bool = True, others: bool = False) -> None:
    """Assert that exactly these tools were called, in this order.

        assert_tool_calls(result, "search", tool_call("add", {"a": 1, "b": 2}))

    `in_order=False` allows any order. `others=True` allows other calls before, between and after them.
    Raises `AssertionError` with expected and actual calls side by side.
    """
    __tracebackhide__ = True
    actual = called_tools(calls)
    wanted = tuple(map(_read_expected, expected))
    matches = (_match_in_order if in_order else _match_in_any_order)(wanted, actual)
    if len(matches) == len(wanted) and (others or len(matches) == len(actual)):
        return
    order = "in this order" if in_order else "in any order"
    title = f"unexpected tool calls (compared {order}{', other calls allowed' if others else ''}):"
    pairs = list((_pair_in_order if in_order else _pair_in_any_order)(wanted, actual, matches))
    if in_order:  # a call that moved far may have kept others from their place
        pairs = min(pairs, list(_pair_by_tool(wanted, actual)), key=lambda each: _count_wrong(each, others))
    raise AssertionError("\n".join([title, *_show_side_by_side(pairs, others)]))


def assert_no_tool_calls(calls: Calls, *names: str) -> None:
    """Assert that none of these tools was called. Without `names`, assert that no tool was called.

    Raises `AssertionError` with the calls that were made.
    """
    __tracebackhide__ = True
    actual = called_tools(calls)
    wrong = [str(call) for call in actual if not names or call.name in names]
    if wrong:
        what = " or ".join(names) if names else "any tool"
        raise AssertionError("\n  ".join([f"expected no call of {what}, but found:", *wrong]))


# --- finding calls


def _find_calls(calls: Any) -> Iterator[CalledTool]:
    if isinstance(calls, ScriptedChatModel):
        calls = last_request(calls).messages
    elif isinstance(calls, ChatRequest):
        calls = calls.messages
    elif isinstance(calls, AiMessage):
        calls = [calls]
    elif hasattr(calls, "tool_executions"):
        calls = calls.tool_executions
    if not isinstance(calls, Iterable) or isinstance(calls, (str, bytes, Mapping)):
        fix = "pass a Result (declare the method `-> Result[...]`), an invocation_record(), messages or executions"
        raise TypeError(f"cannot read tool calls from {type(calls).__name__}; {fix}")
    found = list(calls)
    for position, each in enumerate(found):
        if isinstance(each, ToolExecuted):
            each = each.execution
        if isinstance(each, ToolExecution):
            yield _make_called_tool(each.request, each.result, each.is_error)
        elif isinstance(each, ToolExecutionRequest):
            yield _make_called_tool(each)
        elif isinstance(each, AiMessage):
            results = _find_results(found[position + 1 :])
            for request in each.tool_execution_requests:
                result = results.get(request.id)
                yield (
                    _make_called_tool(request)
                    if result is None
                    else _make_called_tool(request, result.text, result.is_error)
                )


def _find_results(messages: Sequence[Message]) -> dict[str, ToolExecutionResultMessage]:
    """Return the results of one round by id. A later round may use the same ids."""
    results: dict[str, ToolExecutionResultMessage] = {}
    for each in messages:
        if not isinstance(each, ToolExecutionResultMessage):
            break
        results[each.id] = each
    return results


def _make_called_tool(request: ToolExecutionRequest, result: str | None = None, is_error: bool = False) -> CalledTool:
    try:
        arguments = json.loads(object_text(request.arguments))
    except ValueError:
        arguments = {}
    return CalledTool(
        request.name, arguments if isinstance(arguments, dict) else {}, request.arguments, result, is_error
    )


def _read_expected(expected: Expected) -> ExpectedCall:
    if isinstance(expected, str):
        return ExpectedCall(expected)
    if isinstance(expected, ToolExecutionRequest):
        return ExpectedCall(expected.name, json.loads(object_text(expected.arguments)), exactly=True)
    return expected


# --- matching expected and actual calls


Pair: TypeAlias = tuple[ExpectedCall | None, CalledTool | None]
"""An expected and an actual call that are shown side by side."""


def _fits(expected: ExpectedCall, call: CalledTool) -> bool:
    return not any(expected.differences(call))


def _match_in_order(wanted: Sequence[ExpectedCall], actual: Sequence[CalledTool]) -> dict[int, int]:
    """Return the positions of calls that fit. Each expected call takes the first one behind those before it."""
    taken: dict[int, int] = {}
    start = 0
    for left, expected in enumerate(wanted):
        right = next((at for at in range(start, len(actual)) if _fits(expected, actual[at])), None)
        if right is not None:
            taken[left], start = right, right + 1
    return taken


def _match_in_any_order(wanted: Sequence[ExpectedCall], actual: Sequence[CalledTool]) -> dict[int, int]:
    """Return the positions of calls that fit, as many as possible: a later expected call may move an earlier one."""
    taken: dict[int, int] = {}

    def find_place(left: int, seen: set[int]) -> bool:
        for right, call in enumerate(actual):
            if right not in seen and _fits(wanted[left], call):
                seen.add(right)
                if right not in taken or find_place(taken[right], seen):
                    taken[right] = left
                    return True
        return False

    for left in range(len(wanted)):
        find_place(left, set())
    return {left: right for right, left in sorted(taken.items(), key=lambda each: each[1])}


def _pair_in_order(
    wanted: Sequence[ExpectedCall], actual: Sequence[CalledTool], matches: Mapping[int, int]
) -> Iterator[Pair]:
    """Yield all calls in order; those between two matches are paired by their tools."""
    left = right = 0
    for after_left, after_right in (*matches.items(), (len(wanted), len(actual))):
        yield from _pair_by_tool(wanted[left:after_left], actual[right:after_right])
        if after_left in matches:
            yield wanted[after_left], actual[after_right]
        left, right = after_left + 1, after_right + 1


def _pair_in_any_order(
    wanted: Sequence[ExpectedCall], actual: Sequence[CalledTool], matches: Mapping[int, int]
) -> Iterator[Pair]:
    """Yield the calls that fit, and then the others, paired by their tools."""
    yield from ((wanted[left], actual[right]) for left, right in matches.items())
    missing = [each for at, each in enumerate(wanted) if at not in matches]
    unexpected = [each for at, each in enumerate(actual) if at not in matches.values()]
    yield from _pair_by_tool(sorted(missing, key=_name_of), sorted(unexpected, key=_name_of))


def _pair_by_tool(wanted: Sequence[ExpectedCall], actual: Sequence[CalledTool]) -> Iterator[Pair]:
    names = SequenceMatcher(None, list(map(_name_of, wanted)), list(map(_name_of, actual)), autojunk=False)
    for _, left, after_left, right, after_right in names.get_opcodes():
        yield from zip_longest(wanted[left:after_left], actual[right:after_right])


def _name_of(call: ExpectedCall | CalledTool) -> str:
    return call.name


# --- showing them


def _show_side_by_side(pairs: Iterable[Pair], others: bool) -> Iterator[str]:
    rows = [(_cut_line(str(left or "-")), _cut_line(str(right or "-")), left, right) for left, right in pairs]
    width = max(len("expected"), *(len(row[0]) for row in rows))
    yield f"    {'expected':{width}}  actual"
    for shown, shown_actual, expected, call in rows:
        yield f"  {' ' if _is_fine((expected, call), others) else '✗'} {shown:{width}}  {shown_actual}"
        if expected is not None and call is not None:
            yield from (f"      {difference}" for difference in expected.differences(call))


def _is_fine(pair: Pair, others: bool) -> bool:
    expected, call = pair
    return call is not None and (others if expected is None else _fits(expected, call))


def _count_wrong(pairs: Iterable[Pair], others: bool) -> int:
    return sum(not _is_fine(pair, others) for pair in pairs)


def _cut_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"


def _show_value(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(value)
