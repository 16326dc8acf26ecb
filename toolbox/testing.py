"""Tools for tests of programs with AI services: a scripted model, assertions on tool calls, skipped time, store checks.

Not here: pytest's fixtures (`pytest_plugin`), recorded replies of a real model (`recordings`), a model that answers by
rules (`demo`).
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from . import store_clock
from .chat import (
    AiMessage,
    ChatModel,
    ChatRequest,
    ChatResponse,
    FinishReason,
    Message,
    PendingCall,
    StreamEvent,
    SystemMessage,
    ToolExecuted,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
)
from .chat_streams import events_of, words
from .context import InvocationContext
from .errors import ContainerNotStartedError, IllegalConfigurationError, Problem
from .events import EventListener, InvocationEvent, ModelRequestEvent, ToolExecutedEvent
from .json_text import compact_json, object_text
from .runs.run_answers import Answer, approve

if TYPE_CHECKING:
    from .container import Container
    from .runs.runs_bean import Runs
    from .services.outputs import Result
    from .store_checks.conversation_stores import ConversationStoreCheck
    from .store_checks.run_stores import RunStoreCheck

__all__ = [
    "Answers",
    "CalledTool",
    "EventRecord",
    "ExpectedCall",
    "ScriptedChatModel",
    "approve_all",
    "assert_no_tool_calls",
    "assert_pending",
    "assert_tool_calls",
    "called_tools",
    "conversation_store_checks",
    "offered_tools",
    "resume_until_done",
    "run_store_checks",
    "skip_time",
    "system_text",
    "text_of",
    "tool_call",
    "user_text",
]

Reply: TypeAlias = (
    str
    | AiMessage
    | ChatResponse
    | ToolExecutionRequest
    | BaseException
    | type[BaseException]
    | Callable[[ChatRequest], "Reply | Awaitable[Reply]"]
)

_numbers = itertools.count(1)


def tool_call(
    name: str,
    arguments: Mapping[str, Any] | str | None = None,
    *,
    id: str | None = None,  # noqa: A002 - public name
) -> ToolExecutionRequest:
    """Return a request to call the tool `name`, for a script or an assertion.

    `arguments` is a mapping, or the JSON text itself (also invalid JSON). Without `id`, an id is generated.
    """
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False, default=str)
    return ToolExecutionRequest(id if id is not None else f"call_{next(_numbers)}", name, arguments)


class ScriptedChatModel(ChatModel):
    """Answers each request with the next reply of a script, and keeps the requests in `requests`.

        model = ScriptedChatModel([tool_call("add", {"a": 1, "b": 2}), "The sum is 3."])
        container = Container(models={"default": model})

    A mapping has a script for each service, `{Waiter: ["…"], Cook: ["…"]}`, for services that run at the same time: the
    innermost service that asks gets its next reply. `will_reply(…, service=Waiter)` gives a service its own script at
    any time; the others go on with the common one.

    A reply is a `str`, an `AiMessage`, a `ChatResponse`, one `tool_call(…)`, an exception to raise, or a function that
    takes the request and returns (or awaits) any of these. The model raises `AssertionError` when the script has no
    more replies, and for a service without a script.
    """

    def __init__(
        self,
        replies: Iterable[Reply] | Mapping[type[Any], Iterable[Reply]] = (),
        *,
        supports_response_format: bool = False,
    ) -> None:
        scripts: Mapping[Any, Any] = replies if isinstance(replies, Mapping) else {None: replies}
        self._scripts: dict[type[Any] | str | None, Iterator[Reply]] = {
            service: iter([script] if isinstance(script, str) else script) for service, script in scripts.items()
        }
        self.supports_response_format = supports_response_format
        self.requests: list[ChatRequest] = []

    def will_reply(self, *replies: Reply, service: type[Any] | str | None = None) -> None:
        """Add replies to the end of the script, or to that of `service`: a class, or its name with its module.

        Raises `TypeError` without `service` for a model that was created with a script for each service.
        """
        if service is None and None not in self._scripts:
            raise TypeError("will_reply: pass service= with the class of one service")
        if not (service is None or isinstance(service, (type, str))):
            raise TypeError(f"will_reply: invalid service={service!r}; use the class of the service")
        self._scripts[service] = itertools.chain(self._scripts.get(service, ()), replies)

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """Return the next reply. Raises `AssertionError` if there is none."""
        self.requests.append(request)
        service = self._find_service()
        for reply in self._scripts[service]:
            return await _make_scripted_response(reply, request)
        whose = "" if service is None else f" of {getattr(service, '__name__', service)}"
        raise AssertionError(
            f"no scripted reply for request {len(self.requests)}{whose}, which ends with {request.messages[-1:]!r}; "
            "add a reply with will_reply(…)"
        )

    def _find_service(self) -> type[Any] | str | None:
        """Return the asking service, or one of its bases, if it has a script; None for the common script.

        Raises `AssertionError` without a script.
        """
        context = InvocationContext.current()
        for each in context.service.__mro__ if context is not None else ():
            for key in (each, f"{each.__module__}.{each.__qualname__}"):
                if key in self._scripts:
                    return key
        if None in self._scripts:
            return None
        known = ", ".join(getattr(each, "__name__", str(each)) for each in self._scripts) or "no service"
        if context is None:
            raise AssertionError(f"request {len(self.requests)} comes from no service; there are scripts for {known}")
        raise AssertionError(f"no script for the service {context.service.__name__}; there are scripts for {known}")

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        """Yield the next reply as stream events, word by word. Raises `AssertionError` if there is none."""
        for event in events_of(await self.chat(request), words):
            yield event


async def _make_scripted_response(reply: object, request: ChatRequest) -> ChatResponse:
    if isinstance(reply, BaseException) or (isinstance(reply, type) and issubclass(reply, BaseException)):
        raise reply
    if isinstance(reply, ChatResponse):
        return reply
    if isinstance(reply, str):
        reply = AiMessage(reply)
    elif isinstance(reply, ToolExecutionRequest):
        reply = AiMessage(tool_execution_requests=(reply,))
    if isinstance(reply, AiMessage):
        asks = bool(reply.tool_execution_requests)
        return ChatResponse(reply, finish_reason=FinishReason.TOOL_EXECUTION if asks else FinishReason.STOP)
    if callable(reply):
        made = reply(request)
        return await _make_scripted_response(await made if inspect.isawaitable(made) else made, request)
    expected = "a str, AiMessage, ChatResponse, tool_call(…), exception or function"
    raise AssertionError(f"invalid scripted reply {reply!r}; expected {expected}")


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


class Likeness(IntEnum):
    """Degrees to which an actual call matches an expected one."""

    NONE = 0
    SAME_TOOL = 1
    FITS = 2


Table: TypeAlias = Sequence[Sequence[Likeness]]
"""For each expected call, its likeness to each actual call."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The positions of an expected and an actual call that are shown side by side; one of them may be None."""

    expected: int | None
    actual: int | None
    fits: bool


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

    def likeness(self, call: CalledTool) -> Likeness:
        """Return how well `call` matches."""
        if self.name != call.name:
            return Likeness.NONE
        return Likeness.SAME_TOOL if any(self.differences(call)) else Likeness.FITS

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
    table = [[each.likeness(call) for call in actual] for each in wanted]
    pairs = (pairs_in_order if in_order else pairs_in_any_order)(table, len(actual))
    if all(pair.fits or (others and pair.expected is None) for pair in pairs):
        return
    order = "in this order" if in_order else "in any order"
    title = f"unexpected tool calls (compared {order}{', other calls allowed' if others else ''}):"
    raise AssertionError("\n".join([title, *_show_side_by_side(wanted, actual, pairs, others)]))


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


# --- pending calls of suspended runs


class HasPending(Protocol):
    """A `Result`, a `Run`, a `RunSuspended` event or a `RunSuspendedError`."""

    @property
    def pending(self) -> Sequence[PendingCall]:
        """The calls that wait for an answer."""
        ...


Suspended: TypeAlias = HasPending | Iterable[PendingCall]
Answers: TypeAlias = Mapping[str, Answer | Sequence[Answer]]
"""Answers by the name of the tool: one for all of its calls, or one after another."""


def approve_all(suspended: Suspended) -> dict[str, Answer]:
    """Return an approval for each pending call: `runs.resume(result.run_id, approve_all(result))`.

    Raises `AssertionError` if there are no pending calls, or if one of them does not wait for approval.
    """
    pending = _find_pending(suspended)
    if not pending:
        raise AssertionError("there are no pending calls to approve")
    for call in pending:
        if call.kind != "approval":
            raise AssertionError(f"{call.tool_name} ({call.id}) is of kind {call.kind!r}; answer it with respond(…)")
    return {call.id: approve() for call in pending}


async def resume_until_done(runs: Runs, result: Result[Any], answers: Answers | None = None, by: Any = None) -> Any:
    """Answer pending calls and continue the run until none is left. Return the last `Result`.

    `answers` are those of each tool, by its name; without it every call is approved. Raises `AssertionError` for a
    pending call without an answer.
    """
    left = {name: each if isinstance(each, Answer) else list(each) for name, each in (answers or {}).items()}
    while result.pending:
        assert result.run_id is not None
        given = (
            approve_all(result) if answers is None else {call.id: _choose_next(call, left) for call in result.pending}
        )
        result = await runs.resume(result.run_id, given, by=by)
    return result


def _choose_next(call: PendingCall, left: Mapping[str, Answer | list[Answer]]) -> Answer:
    found = left.get(call.tool_name)
    if isinstance(found, list):
        found = found.pop(0) if found else None
    if found is None:
        raise AssertionError(f"no answer for the pending call {call.tool_name} ({call.id}) {dict(call.arguments)}")
    return found


def assert_pending(suspended: Suspended, *expected: str | ToolExecutionRequest) -> None:
    """Assert that exactly these calls wait for an answer, in this order: names of tools, or `tool_call(…)`s.

    Raises `AssertionError` with the expected and the actual calls.
    """
    pending = _find_pending(suspended)
    wanted = [(each, None) if isinstance(each, str) else (each.name, json.loads(each.arguments)) for each in expected]
    found = [
        (call.tool_name, None if index >= len(wanted) or wanted[index][1] is None else dict(call.arguments))
        for index, call in enumerate(pending)
    ]
    if found != wanted:
        shown = ", ".join(f"{call.tool_name} {dict(call.arguments)}" for call in pending) or "none"
        names = ", ".join(each if isinstance(each, str) else f"{each.name} {each.arguments}" for each in expected)
        raise AssertionError(f"pending calls: expected {names or 'none'}; got {shown}")


def _find_pending(suspended: Suspended) -> Sequence[PendingCall]:
    found: Any = suspended
    return tuple(getattr(found, "pending", found))


# --- the requests that a model received


def offered_tools(request: ChatRequest | ScriptedChatModel) -> list[str]:
    """Return the names of the tools in a request, or in the last request of a scripted model.

    Raises `AssertionError` if the model has received no request.
    """
    return [each.name for each in _find_request(request).tool_specifications]


def system_text(request: ChatRequest | ScriptedChatModel) -> str | None:
    """Return the text of the system message of a request, or of the last request of a scripted model; None without one.

    Raises `AssertionError` if the model has received no request.
    """
    return next((each.text for each in _find_request(request).messages if isinstance(each, SystemMessage)), None)


def user_text(request: ChatRequest | ScriptedChatModel) -> str | None:
    """Return the text of the last user message of a request, or of the last request of a scripted model.

    None without a user message. Raises `AssertionError` if the model has received no request.
    """
    messages = reversed(_find_request(request).messages)
    return next((each.text for each in messages if isinstance(each, UserMessage)), None)


def text_of(said: Message | Iterable[Message] | ChatRequest | ScriptedChatModel) -> str:
    """Return the texts of a message, of several messages or of a request, in order, joined by line breaks.

        assert "soup" in text_of(model.requests[0])

    Unlike `.text` it is never None: a message without text gives `""`. Of a scripted model, its last request is read.
    Raises `AssertionError` if the model has received no request.
    """
    if isinstance(said, (ChatRequest, ScriptedChatModel)):
        said = _find_request(said).messages
    elif isinstance(said, (SystemMessage, UserMessage, AiMessage, ToolExecutionResultMessage)):
        said = [said]
    return "\n".join(each.text for each in said if each.text)


def _find_request(request: ChatRequest | ScriptedChatModel) -> ChatRequest:
    if not isinstance(request, ScriptedChatModel):
        return request
    if not request.requests:
        raise AssertionError("the model has received no request; call the service first")
    return request.requests[-1]


# --- finding calls


def _find_calls(calls: Any) -> Iterator[CalledTool]:
    if isinstance(calls, ScriptedChatModel):
        calls = _find_request(calls).messages
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


def pairs_in_order(table: Table, actual: int) -> list[Pair]:
    """Pair calls in order: as many matches as possible, then calls of the same tool, then the calls left between."""
    pairs: list[Pair] = []
    start = (0, 0)
    for left, right in _find_longest_run(table, actual):
        pairs += _find_unlike(range(start[0], left), range(start[1], right))
        pairs.append(Pair(left, right, table[left][right] is Likeness.FITS))
        start = left + 1, right + 1
    return [*pairs, *_find_unlike(range(start[0], len(table)), range(start[1], actual))]


def _find_longest_run(table: Table, actual: int) -> Iterator[tuple[int, int]]:
    # One match is worth more than any number of calls of the same tool.
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
    """Pair calls in any order, with as many matches as possible.

    A call that matches two expected ones goes to the one that has no other match.
    """
    fitting = _match_most(table, range(len(table)), range(actual), Likeness.FITS)
    expected = [left for left in range(len(table)) if left not in fitting]
    unexpected = [right for right in range(actual) if right not in fitting.values()]
    alike = _match_most(table, expected, unexpected, Likeness.SAME_TOOL)
    return [
        *(Pair(left, right, True) for left, right in sorted(fitting.items())),
        *(Pair(left, right, False) for left, right in sorted(alike.items())),
        *_find_unlike(
            [left for left in expected if left not in alike],
            [right for right in unexpected if right not in alike.values()],
        ),
    ]


def _match_most(table: Table, expected: Sequence[int], actual: Sequence[int], least: Likeness) -> dict[int, int]:
    """Return a largest matching: a later expected call may move an earlier one to another actual call."""
    taken: dict[int, int] = {}

    def find_place(left: int, seen: set[int]) -> bool:
        for right in actual:
            if table[left][right] >= least and right not in seen:
                seen.add(right)
                if right not in taken or find_place(taken[right], seen):
                    taken[right] = left
                    return True
        return False

    for left in expected:
        find_place(left, set())
    return {left: right for right, left in taken.items()}


def _find_unlike(expected: Sequence[int], actual: Sequence[int]) -> Iterator[Pair]:
    for left, right in zip_longest(expected, actual):
        yield Pair(left, right, False)


# --- showing them


def _show_side_by_side(
    expected: Sequence[ExpectedCall], actual: Sequence[CalledTool], pairs: Sequence[Pair], others: bool
) -> Iterator[str]:
    rows = []
    for pair in pairs:
        left = "-" if pair.expected is None else str(expected[pair.expected])
        right = "-" if pair.actual is None else str(actual[pair.actual])
        rows.append((_cut_line(left), _cut_line(right), pair))
    width = max(len("expected"), *(len(left) for left, _, _ in rows))
    yield f"    {'expected':{width}}  actual"
    for left, right, pair in rows:
        is_fine = pair.fits or (others and pair.expected is None)
        yield f"  {' ' if is_fine else '✗'} {left:{width}}  {right}"
        if not pair.fits and pair.expected is not None and pair.actual is not None:
            for difference in expected[pair.expected].differences(actual[pair.actual]):
                yield f"      {difference}"


def _cut_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"


def _show_value(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(value)


# --- the time of stores


async def skip_time(container: Container, duration: timedelta) -> None:
    """Move the clocks of a container's stores forward, for tests of leases and expiries that wait for nothing.

        await skip_time(container, timedelta(hours=1))

    The `RunStore` and the `ChatMemoryStore` must be in memory or on SQLite. When it returns, the container has renewed
    the leases that it holds, and has looked for runs to take over. Stores of other containers in this process move
    too if they have the same SQLite file; those of other processes, and stores that are made later, do not. Raises
    `IllegalConfigurationError` for stores on servers, `TypeError` or `ValueError` for an invalid duration, and
    `ContainerNotStartedError`.
    """
    from .container import internals_of  # late: most tests do not skip time

    if not isinstance(duration, timedelta):
        raise TypeError(f"skip_time: expected a datetime.timedelta, got {type(duration).__name__}")
    if duration < timedelta():
        raise ValueError(f"skip_time: invalid duration {duration}; clocks move forward only")
    if not container.is_started:
        raise ContainerNotStartedError("skip_time")
    host = internals_of(container).host

    async def skip() -> None:
        runs, conversations = await host.run_store(), (await host.memories()).store
        store_clock.skip([clock for each in (runs, conversations) for clock in _find_clocks(each)], duration)
        if (renew_leases := getattr(conversations, "renew_leases", None)) is not None:
            await renew_leases()
        await host.runs.follow_clock()

    await host.on_own_loop(skip)


def _find_clocks(store: object) -> Iterator[store_clock.StoreClock]:
    """Yield the clock of a store. A store of conversations without `lock` needs none: it has no leases."""
    clock = store_clock.own_clock_of(store)
    if clock is not None:
        yield clock
    elif hasattr(store, "lease") or hasattr(store, "lock"):
        fact = f"the clock of {type(store).__name__} cannot be moved: it does not measure time in this process"
        raise IllegalConfigurationError([Problem("skip_time", fact, "test with a store in memory or on SQLite")])


# --- stores of your own


def run_store_checks() -> tuple[RunStoreCheck, ...]:
    """Return a check for each promise of `RunStore`. The stores of toolbox pass the same ones.

        @pytest.mark.parametrize("check", run_store_checks())
        async def test_the_store_keeps_its_promises(check: RunStoreCheck, tmp_path: Path) -> None:
            await check(lambda lease: MyRunStore(tmp_path, lease))

    Each check gets a function that returns a store whose leases last that many seconds. It is called twice, as two
    processes would; both stores must have the same runs, and may be one object. The check opens them, and raises
    `AssertionError`. Some let a lease of one second end: they move the store's `clock`, or wait if it has none. Start
    with an empty store: runs are purged.
    """
    from .store_checks.run_stores import RUN_STORE_CHECKS  # late: most tests need no store

    return RUN_STORE_CHECKS


def conversation_store_checks() -> tuple[ConversationStoreCheck, ...]:
    """Return a check for each promise of `ChatMemoryStore`; those of `lock` check only stores that have it.

        @pytest.mark.parametrize("check", conversation_store_checks())
        async def test_the_store_keeps_its_promises(check: ConversationStoreCheck, tmp_path: Path) -> None:
            await check(lambda: Files(tmp_path))

    Each check gets a function that returns a store. It is called twice, as two processes would; both stores must have
    the same conversations, and may be one object. The check raises `AssertionError`.
    """
    from .store_checks.conversation_stores import CONVERSATION_STORE_CHECKS  # late: as above

    return CONVERSATION_STORE_CHECKS
