"""The tool loop: a state and an event in, the next state and an effect out.

Pure: no I/O, no clock, no tasks. The state between two effects is plain data that pickles and prints; what a call may
do (`Rules`) stays outside of it. Not here: performing the effects (`driver`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ..chat import (
    ChatResponse,
    FinishReason,
    Message,
    SystemMessage,
    TokenUsage,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
)
from ..errors import (
    ModelTruncatedError,
    OutputParsingError,
    ToolboxError,
    ToolCallsLimitExceededError,
    ToolRoundsExceededError,
)
from .outputs import ANSWER_TOOL, Kind, OutputMode, Structure, answer_text, correction


@dataclass(frozen=True, slots=True)
class Rules:
    """What one method's calls may do, and how their reply is read.

    `immediate`: the names of the tools whose result ends the call. `structure` is None where no reply is read here.
    """

    max_rounds: int = 10
    max_calls: int | None = None
    immediate: frozenset[str] = frozenset()
    kind: Kind = Kind.TEXT
    structure: Structure | None = None
    mode: OutputMode = "prompt"
    max_output_retries: int = 2


@dataclass(frozen=True, slots=True)
class State:
    """Where a call stands.

    `history` was there before it, `messages` are its own, in order, from the user's; `prompted` is the user's message
    as it is sent, when that is more than what is remembered; `forgotten` are the positions in `messages` that are not
    remembered (replies that did not validate, and what the model was told of them).
    """

    system: SystemMessage | None
    history: tuple[Message, ...]
    messages: tuple[Message, ...]
    prompted: UserMessage | None = None
    forgotten: frozenset[int] = frozenset()
    rounds: int = 0
    output_retries: int = 0
    executions: tuple[ToolExecution, ...] = ()
    token_usage: TokenUsage | None = None

    @property
    def remembered(self) -> tuple[Message, ...]:
        """The call's messages that count."""
        if not self.forgotten:
            return self.messages
        return tuple(each for position, each in enumerate(self.messages) if position not in self.forgotten)


# --- effects: what is to be done next


@dataclass(frozen=True, slots=True)
class CallModel:
    """Ask the model; `first` is false once tools have run."""

    messages: tuple[Message, ...]
    first: bool


@dataclass(frozen=True, slots=True)
class RunTools:
    """Run these calls and answer with their results in this order."""

    response: ChatResponse
    requests: Sequence[ToolExecutionRequest]


@dataclass(frozen=True, slots=True)
class Finish:
    """The call has ended; `response` is the reply it ended with."""

    value: Any
    finish_reason: FinishReason | None
    response: ChatResponse


@dataclass(frozen=True, slots=True)
class Fail:
    """The call has failed; `error` is what its caller gets."""

    error: ToolboxError


Effect: TypeAlias = CallModel | RunTools | Finish | Fail


# --- events: what has been done


@dataclass(frozen=True, slots=True)
class ModelReplied:
    """The model's reply."""

    response: ChatResponse


@dataclass(frozen=True, slots=True)
class ToolsRan:
    """The outcome of a `RunTools`, in the order of its requests."""

    response: ChatResponse
    executions: Sequence[ToolExecution]
    messages: Sequence[ToolExecutionResultMessage]


Event: TypeAlias = ModelReplied | ToolsRan


def begin(
    system: SystemMessage | None,
    history: Sequence[Message],
    user_message: UserMessage,
    prompted: UserMessage | None = None,
) -> tuple[State, CallModel]:
    """The start of a call."""
    state = State(system, tuple(history), (user_message,), prompted)
    return state, _ask(state)


def advance(rules: Rules, state: State, event: Event) -> tuple[State, Effect]:
    """What follows from `event`.

    `Fail` holds a `ToolRoundsExceededError`, a `ToolCallsLimitExceededError`, an `OutputParsingError` (all retries used
    up) or a `ModelTruncatedError`.
    """
    match event:
        case ModelReplied(response):
            return _replied(rules, state, response)
        case ToolsRan():
            return _ran(rules, state, event)


def may_run(rules: Rules, state: State) -> bool:
    """Whether a tool may start before the reply that asks for it is complete: nothing it may hold could forbid it."""
    return state.rounds < rules.max_rounds and rules.max_calls is None


def _ask(state: State) -> CallModel:
    system = (state.system,) if state.system is not None else ()
    messages = state.messages if state.prompted is None else (state.prompted, *state.messages[1:])
    return CallModel((*system, *state.history, *messages), first=state.rounds == 0)


def _replied(rules: Rules, state: State, response: ChatResponse) -> tuple[State, Effect]:
    reply = response.ai_message
    if rules.mode == "tool" and rules.structure is not None:
        for request in reply.tool_execution_requests:
            if request.name == ANSWER_TOOL:
                return _answered(rules, state, response, answer_text(request.arguments))
    if not reply.tool_execution_requests:
        return _answered(rules, state, response, reply.text or "")
    calls = len(reply.tool_execution_requests)
    if state.rounds >= rules.max_rounds:
        state = _with_reply(state, response, reply)
        return state, Fail(ToolRoundsExceededError(rules.max_rounds, state.messages))
    if rules.max_calls is not None and calls > rules.max_calls:
        state = _with_reply(state, response, reply)
        return state, Fail(ToolCallsLimitExceededError(rules.max_calls, calls, state.messages))
    return _with_reply(state, response, reply, rounds=1), RunTools(response, reply.tool_execution_requests)


def _with_reply(state: State, response: ChatResponse, *told: Message, rounds: int = 0, **changes: Any) -> State:
    """The state after a reply, of which `told` are the messages; one `replace`, for it is what a step costs most."""
    usage = state.token_usage
    if response.token_usage is not None:
        usage = response.token_usage if usage is None else usage + response.token_usage
    messages = (*state.messages, *told)
    return replace(state, messages=messages, token_usage=usage, rounds=state.rounds + rounds, **changes)


def _answered(rules: Rules, state: State, response: ChatResponse, text: str) -> tuple[State, Effect]:
    reply = response.ai_message
    if rules.structure is None:
        value = {Kind.TEXT: text, Kind.MESSAGE: reply}.get(rules.kind)
        return _with_reply(state, response, reply), Finish(value, response.finish_reason, response)
    try:
        value = rules.structure.read(text)
    except OutputParsingError as error:
        if response.finish_reason is FinishReason.LENGTH:
            cut = "the model's structured reply was cut at its token limit; raise max_tokens"
            return _with_reply(state, response, reply), Fail(ModelTruncatedError(cut, text))
        if state.output_retries >= rules.max_output_retries:
            return _with_reply(state, response, reply), Fail(error)
        return _correct(state, response, error)
    if reply.has_tool_execution_requests:  # the answer tool's call is the answer: nothing will answer it
        reply = replace(reply, text=text, tool_execution_requests=())
    reason = FinishReason.STOP if response.finish_reason is FinishReason.TOOL_EXECUTION else response.finish_reason
    return _with_reply(state, response, reply), Finish(value, reason, response)


def _correct(state: State, response: ChatResponse, error: OutputParsingError) -> tuple[State, CallModel]:
    """The reply goes back with its errors; neither is remembered."""
    reply = response.ai_message
    told: list[Message] = [reply]
    text = correction(error)
    if reply.has_tool_execution_requests:
        told += [
            replace(ToolExecutionResultMessage.of(request, text), is_error=True)
            for request in reply.tool_execution_requests
        ]
    else:
        told.append(UserMessage(text))
    start = len(state.messages)
    forgotten = state.forgotten | frozenset(range(start, start + len(told)))
    state = _with_reply(state, response, *told, forgotten=forgotten, output_retries=state.output_retries + 1)
    return state, _ask(state)


def _ran(rules: Rules, state: State, event: ToolsRan) -> tuple[State, Effect]:
    state = replace(
        state,
        messages=(*state.messages, *event.messages),
        executions=(*state.executions, *event.executions),
    )
    if all(each.request.name in rules.immediate and not each.is_error for each in event.executions):
        return state, Finish(None, FinishReason.TOOL_EXECUTION, event.response)
    return state, _ask(state)
