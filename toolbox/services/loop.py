"""The tool loop as a state machine: takes rules, a state and an event, and returns the next state and an effect.

Pure: no I/O, no clock, no tasks. The state contains all data of an invocation (`state`), the rules its limits and
options. Not here: performing the effects (`driver`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from ..chat import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    FinishReason,
    Message,
    Reasoning,
    SystemMessage,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolSpecification,
    UserMessage,
)
from ..conversations.views import alternating, with_note_if_empty
from ..errors import (
    ModelRefusedError,
    ModelTruncatedError,
    OutputParsingError,
    ToolboxError,
)
from ..limits import Usage
from ..passages import after_texts
from ..tools.tool_calls import ToolEnvironment, ToolOutcome
from .outputs import ANSWER_TOOL, Kind, OutputMode, ParsedAnswer, Structure, answer_text, correction
from .state import PendingToolCall, ReachedLimit, State, identity_of


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits and options of one method: for requests to the model, and for reading its replies.

    `specifications` are those of all tools; `answer_too` also contains the tool for the answer. `immediate` and
    `immediate_if_last` contain the names of tools whose result can end the invocation; with an `immediate_type`, only a
    single value of this type does. `structure` is the structure of a structured answer. `streams` is True for a stream.
    `reads_answer` is False if the loop does not parse the answer, as in most streams. `parameters`, `temperature`,
    `reasoning` and `max_output_tokens` are sent with each request. With `whole_replies`, no tool starts
    before the reply is complete. With `continues_history`, the history is sent without a new user message. With
    `checks_answers`, the answer is checked after it was parsed; the model is asked again up to `max_answer_retries`
    times. `passages` is a text that follows the user's in each request; it is not a part of the message. With
    `answers_at_limit`, a limit that is reached leads to one last request, in which no tool may be called. With
    `listens`, messages that the user adds during the call are looked for at the end of each round. `handovers` are the
    names of the tools that hand the call over to another method.
    """

    max_rounds: int = 10
    max_calls: int | None = None
    max_output_retries: int = 2
    immediate: frozenset[str] = frozenset()
    immediate_if_last: frozenset[str] = frozenset()
    immediate_type: TypeAdapter[Any] | None = None
    kind: Kind = Kind.TEXT
    structure: Structure | None = None
    reads_answer: bool = True
    streams: bool = False
    specifications: tuple[ToolSpecification, ...] = ()
    answer_too: tuple[ToolSpecification, ...] = ()
    tool_choice: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    whole_replies: bool = False
    continues_history: bool = False
    checks_answers: bool = False
    max_answer_retries: int = 0
    answers_at_limit: bool = False
    listens: bool = False
    temperature: float | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    passages: str = ""
    handovers: frozenset[str] = frozenset()
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(each.name for each in self.specifications))


# --- effects: the next thing to do


@dataclass(frozen=True, slots=True)
class CallModel:
    """Ask the model. `recorded` is the reply that a stored run has for this request, for interceptors."""

    request: ChatRequest
    recorded: ModelReplied | None = None


@dataclass(frozen=True, slots=True)
class RunTool:
    """Run one pending call. `environment` is that of a call at a place of a run; None for the invocation's."""

    index: int
    request: ToolExecutionRequest
    environment: ToolEnvironment | None = None


@dataclass(frozen=True, slots=True)
class RunTools:
    """Run the waiting pending calls, in order or at the same time; `first` is the index of one of them."""

    first: int
    pending: Sequence[PendingToolCall]

    @property
    def indexes(self) -> list[int]:
        """The indexes of all waiting calls."""
        return [index for index, each in enumerate(self.pending) if each.status == "waiting"]


@dataclass(frozen=True, slots=True)
class HandOver:
    """Hand the call over to the method that a call of the model names: `indexes` are those of all such calls."""

    indexes: Sequence[int]
    pending: Sequence[PendingToolCall]

    @property
    def request(self) -> ToolExecutionRequest:
        """The call that counts: the first one."""
        return self.pending[self.indexes[0]].request


@dataclass(frozen=True, slots=True)
class CheckAnswer:
    """Check the model's answer. `text` is its text as it came, or the arguments of the answer tool."""

    response: ChatResponse
    text: str
    answer: ParsedAnswer


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """Read the answer of a complete reply. `beside` are the results of calls beside it."""

    response: ChatResponse
    text: str
    beside: Sequence[Message] = ()


@dataclass(frozen=True, slots=True)
class Listen:
    """Look for messages that the user has added. `before` is what comes next if there are none."""

    before: CallModel | ReadAnswer | Finish


@dataclass(frozen=True, slots=True)
class Suspend:
    """Wait until the pending calls with these indexes get their results from outside."""

    indexes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Finish:
    """End the invocation; `response` is the last reply. With `is_fallback`, a `@fallback` gave the value."""

    value: Any
    finish_reason: FinishReason | None
    response: ChatResponse
    is_fallback: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """Fail the invocation; the caller gets `error`."""

    error: ToolboxError


Effect: TypeAlias = CallModel | CheckAnswer | RunTools | HandOver | Listen | Suspend | Finish | Fail


# --- events: results of effects


@dataclass(frozen=True, slots=True)
class ModelReplied:
    """The model has replied. `aside` are additional messages before the reply, which are not stored in memory.

    `is_replayed` marks a reply that was recorded earlier: it is not paid again. With `is_followed`, a call of it has
    begun too: the limits have admitted the reply, and do not check it again. `sent` are the names of the tools in the
    request that was sent; None if no request was sent. `reached` is the limit that the reply has reached.
    """

    response: ChatResponse
    aside: Sequence[Message] = ()
    is_replayed: bool = False
    sent: tuple[str, ...] | None = None
    reached: ReachedLimit | None = None
    is_followed: bool = False


@dataclass(frozen=True, slots=True)
class AnswerChecked:
    """The answer was checked. `response`, `text` and `value` may have been changed.

    A refused answer has a `refusal`. With `asks_again`, the model is asked again; `prompt` is then sent after the
    answer, or None to send the same messages.
    """

    response: ChatResponse
    text: str
    value: Any
    refusal: ToolboxError | None = None
    asks_again: bool = False
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class ToolFinished:
    """One pending call has finished."""

    index: int
    outcome: ToolOutcome


@dataclass(frozen=True, slots=True)
class ToolSuspended:
    """One pending call was suspended: its result must come from outside."""

    index: int
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolResumed:
    """A suspended call can run now; `details` contain the answer."""

    index: int
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Heard:
    """The messages that the user has added, oldest first; `before` is that of the `Listen`."""

    messages: Sequence[UserMessage]
    before: CallModel | ReadAnswer | Finish


@dataclass(frozen=True, slots=True)
class Charge:
    """What a method that takes the call over begins with; `rules` are its own from now on.

    `asked` is the user message after its input guardrails. `counted_from` is what was used by then, if its own limits
    count from now on. With an `answer`, it has answered without a model.
    """

    method: str
    system: SystemMessage | None
    mode: OutputMode
    model: str
    asked: UserMessage
    counted_from: Usage | None = None
    answer: Finish | None = None


@dataclass(frozen=True, slots=True)
class TakenOver:
    """The calls that hand over have their results, by index. `charge` is that of the new method; None without one."""

    outcomes: Mapping[int, ToolOutcome]
    charge: Charge | None = None


Event: TypeAlias = (
    ModelReplied
    | AnswerChecked
    | ToolFinished
    | ToolSuspended
    | ToolResumed
    | ReachedLimit
    | Heard
    | TakenOver
    | Finish
)


# --- the steps


def begin(
    rules: Rules,
    system: SystemMessage | None,
    history: Sequence[Message],
    user_message: UserMessage | None,
    *,
    mode: OutputMode = "prompt",
    model: str | None = None,
    recalled: int = 0,
) -> tuple[State, CallModel]:
    """Return the first state and the first effect of an invocation; without a user message, the history has it.

    In mode `prompt`, the instructions for a structured answer follow the last user message. The first `recalled`
    messages of the history are those of the conversation.
    """
    messages = () if user_message is None else (user_message,)
    prompted = None
    if rules.structure is not None and mode == "prompt":
        prompted = _with_instructions(rules.structure, [*history, *messages][-1])
    state = State(system, tuple(history), messages, prompted, mode, rules.names, model=model, recalled=recalled)
    return state, CallModel(request_of(rules, state))


def _with_instructions(structure: Structure, last: Message) -> UserMessage:
    """Return the last user message with the instructions for a structured answer."""
    user = last if isinstance(last, UserMessage) else UserMessage(())
    return UserMessage([*user.contents, structure.instructions], user.name, user.attributes)


def advance(rules: Rules, state: State, event: Event) -> tuple[State, Effect]:
    """Return the state after `event`, and the next effect.

    `Fail` contains a `ToolRoundsExceededError`, a `ToolCallsLimitExceededError`, an `OutputParsingError` (after all
    retries), a `ModelTruncatedError`, or the error of the limit that a `ReachedLimit` was about.
    """
    match event:
        case ToolFinished(index, outcome):
            call = PendingToolCall(state.pending[index].request, "finished", outcome, state.pending[index].details)
            state, effect = _with_pending(rules, state, index, call)
        case ModelReplied():
            state, effect = _take_reply(rules, state, event)
        case AnswerChecked():
            state, effect = _take_check(rules, state, event)
        case ReachedLimit():
            state, effect = _stop_at(rules, state, event)
        case TakenOver():
            state, effect = _take_over(rules, state, event)
        case ToolSuspended(index, details):
            call = PendingToolCall(state.pending[index].request, "suspended", None, details)
            state, effect = _with_pending(rules, state, index, call)
        case ToolResumed(index, details):
            call = PendingToolCall(state.pending[index].request, "waiting", None, details)
            state, effect = _with_pending(rules, state, index, call)
        case Heard():
            return _hear(rules, state, event)
        case Finish():  # a `@fallback` gave the value
            return state, event
    return state, listening(effect) if rules.listens else effect


def listening(effect: Effect) -> Effect:
    """Return the effect, after looking for messages of the user if it is a request or the end."""
    return Listen(effect) if isinstance(effect, (CallModel, Finish)) else effect


def with_early_call(rules: Rules, state: State, request: ToolExecutionRequest) -> tuple[State, int | None]:
    """Add a call of an incomplete reply. The index is None if the call must wait for the complete reply."""
    is_last = state.stopped is not None or state.rounds >= rules.max_rounds
    if is_last or rules.max_calls is not None or rules.whole_replies or request.name in rules.handovers:
        # The complete reply may be refused or changed. `_take_reply` refuses it; limits do: `Invocation.starts_early`.
        return state, None
    return state.changed(pending=(*state.pending, PendingToolCall(request))), len(state.pending)


def next_effect(rules: Rules, state: State) -> Effect:
    """Return the next effect for a state that was stored and read again."""
    effect = _next_effect(rules, state)
    return listening(effect) if rules.listens else effect


def _next_effect(rules: Rules, state: State) -> Effect:
    last = state.last_message
    if isinstance(last, AiMessage) and state.response is not None:
        if state.pending:
            return _after_tools(rules, state, 0)[1]
        return _finish(rules, state.response, read_answer(rules, state.response, last.text or "").value)
    if (ended := _immediate_end(rules, state)) is not None:
        return ended
    return CallModel(request_of(rules, state.changed(pending=())))


def request_of(rules: Rules, state: State) -> ChatRequest:
    """Return the request to the model in this state."""
    structure, choice = rules.structure, rules.tool_choice
    # Use the same tuple for each request with the same tools, because models cache its encoded form.
    specifications, answer_too = rules.specifications, rules.answer_too
    if state.offered != rules.names:
        by_name = {each.name: each for each in specifications}
        # A resumed state can name tools that its caller may no longer use.
        specifications = tuple([by_name[name] for name in state.offered if name in by_name])
        answer_too = (*specifications, structure.tool) if structure is not None else ()
    if state.stopped is not None:
        choice = "none"
    elif state.rounds and choice not in ("auto", "none"):
        choice = None  # a forced tool choice applies to the first round only
    response_format = None
    if structure is not None:
        if state.mode == "tool":
            specifications = answer_too
            choice = ANSWER_TOOL if state.stopped is not None else choice or "required"
        elif state.mode == "schema":
            response_format = structure.response_format
    system = () if state.system is None else (state.system,)
    return ChatRequest(
        (*system, *_conversation(rules, state)),
        specifications,
        response_format,
        choice if specifications or "tools" in rules.parameters else None,
        rules.parameters,
        rules.temperature,
        rules.reasoning,
        rules.max_output_tokens,
    )


def _conversation(rules: Rules, state: State) -> tuple[Message, ...]:
    """Return the messages to send, with the instructions about the answer in the last user message.

    A history that is sent alone may end with the results of tools: the instructions follow them. A conversation may end
    with a user message, such as a summary: it is sent in one message with the user's next one.
    """
    history, messages, prompted = state.history, state.messages, state.prompted
    if state.omitted:
        messages = tuple(_omitted(each) if at in state.omitted else each for at, each in enumerate(messages))
    if state.unremembered or state.added:  # an answer that was refused, or that the user has interrupted, may be empty
        messages = tuple(map(with_note_if_empty, messages))
    if rules.passages:
        prompted = _with_passages(messages[0], prompted, rules.passages)
    sent: tuple[Message, ...]
    if prompted is None:
        sent = (*history, *messages)
    elif not rules.continues_history:
        sent = (*history, prompted, *messages[1:])
    else:
        before = history[:-1] if isinstance(history[-1], UserMessage) else history
        sent = (*before, prompted, *messages)
    joint = state.recalled
    if 0 < joint < len(sent) and type(sent[joint - 1]) is type(sent[joint]):
        sent = (*sent[: joint - 1], *alternating(sent[joint - 1 : joint + 1]), *sent[joint + 1 :])
    return _with_told_joined(sent, state) if state.added else sent


def _with_told_joined(sent: tuple[Message, ...], state: State) -> tuple[Message, ...]:
    """Return the messages to send with those that the user has added in one message with the user's before them."""
    first, joined = len(sent) - len(state.messages), list[Message]()
    for position, message in enumerate(sent):
        last = joined[-1] if joined else None
        if position - first not in state.added or not isinstance(last, UserMessage):
            joined.append(message)
            continue
        assert isinstance(message, UserMessage)
        is_prompted = state.prompted is not None and state.prompted.contents[-1] is last.contents[-1]
        end = len(last.contents) - is_prompted  # the instructions about the answer stay at the end
        contents = (*last.contents[:end], *message.contents, *last.contents[end:])
        joined[-1] = UserMessage(contents, last.name, last.attributes)
    return tuple(joined)


OMITTED = "[The result of the tool {name} was left out, because it made the conversation too long: {size} characters.]"
"""What a model reads in place of a result, when its context is full."""


def _omitted(result: Message) -> Message:
    """Return the note in place of a result. It keeps the attributes: they tell which tools a search has found."""
    assert isinstance(result, ToolExecutionResultMessage)
    return replace(result, text=OMITTED.format(name=result.tool_name, size=len(result.text)), contents=())


def without_results(state: State) -> State | None:
    """Return the state that sends notes in place of the results of its tools; None if that leaves nothing out."""
    left_out = {
        at
        for at, each in enumerate(state.messages)
        if isinstance(each, ToolExecutionResultMessage) and at not in state.omitted
        if each.contents or len(each.text) > len(OMITTED.format(name=each.tool_name, size=len(each.text)))
    }
    return state.changed(omitted=state.omitted | left_out) if left_out else None


def _with_passages(asked: Message, prompted: UserMessage | None, passages: str) -> UserMessage:
    """Return the user message to send, with passages after the user's own texts."""
    assert isinstance(asked, UserMessage)
    sent = prompted or asked
    return UserMessage(after_texts(sent.contents, len(asked.contents), passages), sent.name, sent.attributes)


def tool_calls_in(rules: Rules, mode: OutputMode, reply: AiMessage) -> Sequence[ToolExecutionRequest]:
    """Return the calls of a reply that run; in output mode `tool`, without those that are the answer."""
    if mode != "tool" or rules.structure is None or not rules.reads_answer:
        return reply.tool_execution_requests
    return [each for each in reply.tool_execution_requests if each.name != ANSWER_TOOL]


def _answer_in(rules: Rules, mode: OutputMode, reply: AiMessage) -> str | None:
    """Return the answer in a reply as it came, or None. The first call of the answer tool counts."""
    requests = reply.tool_execution_requests
    if not requests:
        return reply.text or ""
    if len(tool_calls_in(rules, mode, reply)) == len(requests):
        return None
    return next(answer_text(each.arguments) for each in requests if each.name == ANSWER_TOOL)


def _take_reply(rules: Rules, state: State, replied: ModelReplied) -> tuple[State, Effect]:
    response, reached = replied.response, replied.reached
    if replied.aside:
        state = _with_aside(state, replied.aside)
    usage = state.token_usage
    if response.token_usage is not None:
        usage = response.token_usage if usage is None else usage + response.token_usage
    state = state.changed(sent=replied.sent, token_usage=usage, response=response)
    if response.finish_reason is FinishReason.CONTENT_FILTER and response.ai_message.text:
        if rules.structure is not None or rules.streams:
            return _with_messages(state, response.ai_message), Fail(_refused(response))
        response = _without_calls(response)
        state = state.changed(response=response)
    if state.stopped is not None:
        return _take_last_reply(rules, state, response)
    reply = response.ai_message
    requests, answer = tool_calls_in(rules, state.mode, reply), _answer_in(rules, state.mode, reply)
    if not requests and answer is not None and (reached is None or _is_readable(rules, response, answer)):
        if reached is not None:
            state = state.changed(stopped=reached)
        elif rules.listens:  # a message of the user may wait
            return state, Listen(ReadAnswer(response, answer))
        return _read_or_check(rules, state, response, answer)
    if state.rounds >= rules.max_rounds:
        reached = ReachedLimit("max_tool_rounds", rules.max_rounds)
    elif rules.max_calls is not None and len(requests) > rules.max_calls:
        reached = ReachedLimit("max_tool_calls_per_response", rules.max_calls, len(requests))
    if reached is not None and rules.answers_at_limit:
        return _stop_at(rules, state, reached)
    if reached is not None:
        return _fail_at(reached, _with_messages(state, reply))
    pending = _joined_by(state.pending, requests) if state.pending else tuple(map(PendingToolCall, requests))
    if rules.handovers:
        pending = tuple(_marked_as_handover(rules, state, each) for each in pending)
    messages = (*state.messages, reply)
    return _after_tools(rules, state.changed(messages=messages, rounds=state.rounds + 1, pending=pending), 0)


def _marked_as_handover(rules: Rules, state: State, call: PendingToolCall) -> PendingToolCall:
    """Return a call with the status of one that hands over, if the model could see such a tool."""
    name = call.request.name
    was_sent = state.sent is None or name in state.sent
    return replace(call, status="handover") if name in rules.handovers and was_sent else call


# --- handing over


def _take_over(rules: Rules, state: State, handed: TakenOver) -> tuple[State, Effect]:
    """End the round, and go on with the method that is in charge now. Its rules are `rules`.

    Such a reply is a round, also if it has an answer or the call of an immediate tool.
    """
    calls = [*state.pending]
    for index, outcome in handed.outcomes.items():
        calls[index] = PendingToolCall(calls[index].request, "finished", outcome)
    pending, charge = tuple(calls), handed.charge
    if charge is None:
        return _after_tools(rules, state.changed(pending=pending), 0)
    response = state.response
    assert response is not None
    state, messages = _with_executions(state, pending)
    state = _with_round(state, response.ai_message, messages)
    own, history = state.messages, state.history
    if not rules.continues_history:
        own = (charge.asked, *own[1:])
    elif isinstance(history[-1], UserMessage):
        history = (*history[:-1], charge.asked)
    prompted = None
    if rules.structure is not None and charge.mode == "prompt":
        last = history[-1] if rules.continues_history else charge.asked
        prompted = _with_instructions(rules.structure, last)
    state = state.changed(
        system=charge.system,
        history=history,
        messages=own,
        prompted=prompted,
        mode=charge.mode,
        offered=rules.names,
        sent=None,
        model=charge.model,
        in_charge=charge.method,
        handovers=state.handovers + 1,
        counted_from=charge.counted_from,
        output_retries=0,
        answer_retries=0,
    )
    if (answer := charge.answer) is not None:
        state = state.changed(response=answer.response)
        return _with_messages(state, answer.response.ai_message), answer
    return state, CallModel(request_of(rules, state))


# --- messages that the user adds


def _hear(rules: Rules, state: State, heard: Heard) -> tuple[State, Effect]:
    """Go on with the messages that the user has added: after an answer, which is an intermediate one, if there is one.

    After a limit was reached, nothing more is asked: they stay unanswered.
    """
    before = heard.before
    if not heard.messages:
        match before:
            case ReadAnswer(response, text, beside):
                state, effect = _read_or_check(rules, state, response, text, beside)
                return state, listening(effect)
            case CallModel():  # the state may have changed since
                return state, CallModel(request_of(rules, state))
            case Finish():
                return state, before
    if isinstance(before, ReadAnswer):
        state = _with_intermediate(rules, state, before)
    start = len(state.messages)
    added = state.added | frozenset(range(start, start + len(heard.messages)))
    state = _with_messages(state, *heard.messages).changed(added=added)
    if isinstance(before, Finish) and state.stopped is not None:
        return state, Listen(before)
    return state, CallModel(request_of(rules, state))


def _with_intermediate(rules: Rules, state: State, answer: ReadAnswer) -> State:
    """Return the state with an answer that is not the last one, as it came."""
    message = _answer_message(rules, state, answer.response, answer.text)
    if answer.beside:
        state = _with_round(state, answer.response.ai_message, answer.beside)
    return _with_messages(state, message) if message.text or message.attributes else state


def _with_round(state: State, reply: AiMessage, results: Sequence[Message]) -> State:
    """Return the state with the calls beside an answer as a round like any other: the answer is a separate message."""
    if len(results) < len(reply.tool_execution_requests):  # the calls of the answer tool have no results
        left, ran = [*results], list[ToolExecutionRequest]()
        for request in reply.tool_execution_requests:
            result = left[0] if left else None
            if isinstance(result, ToolExecutionResultMessage) and result.tool_name == request.name:
                ran.append(request)
                del left[0]
        reply = replace(reply, tool_execution_requests=ran)
    return state.changed(messages=(*state.messages[:-1], reply, *results))


# --- limits


def _stop_at(rules: Rules, state: State, reached: ReachedLimit) -> tuple[State, Effect]:
    """Ask the model for its answer, without the reply that has reached a limit, if it was a reply.

    If calls were running, their round is complete first: those without a result get an error result.
    """
    state = state.changed(stopped=reached)
    if not state.pending:
        return state, CallModel(request_of(rules, state))
    assert reached.at is not None
    text = f"The call did not finish: the limit {reached.limit}={reached.allowed} was reached."
    pending = list(state.pending)
    for index, each in enumerate(pending):
        if each.status in ("waiting", "handover"):
            outcome = ToolOutcome(ToolExecution(each.request, text, None, True, reached.at, 0.0))
            pending[index] = PendingToolCall(each.request, "finished", outcome, each.details)
    return _after_tools(rules, state.changed(pending=tuple(pending)), 0)


def _fail_at(reached: ReachedLimit, state: State) -> tuple[State, Fail]:
    return state, Fail(reached.error(state.messages))


def _is_readable(rules: Rules, response: ChatResponse, text: str) -> bool:
    try:
        read_answer(rules, response, text)
    except OutputParsingError:
        return False
    return True


def _take_last_reply(rules: Rules, state: State, response: ChatResponse) -> tuple[State, Effect]:
    """Read the answer after a limit was reached. Its calls do not run."""
    assert state.stopped is not None
    reply = response.ai_message
    if calls := tool_calls_in(rules, state.mode, reply):
        answers = [each for each in reply.tool_execution_requests if each not in calls]
        if not answers and not (reply.text or "").strip():
            return _fail_at(state.stopped, _with_messages(state, reply))
        response = _with_calls(response, answers)
        state = state.changed(response=response)
    return _read_or_check(rules, state, response, _answer_in(rules, state.mode, response.ai_message) or "")


def _refused(response: ChatResponse) -> ModelRefusedError:
    return ModelRefusedError("the server's content filter stopped the reply", response.ai_message.text)


def _without_calls(response: ChatResponse) -> ChatResponse:
    """Return the response without calls, and without attributes that may repeat them."""
    if not response.ai_message.tool_execution_requests:
        return response
    return _with_calls(response, ())


def _with_calls(response: ChatResponse, calls: Sequence[ToolExecutionRequest]) -> ChatResponse:
    message = replace(response.ai_message, tool_execution_requests=calls, attributes={})
    return replace(response, ai_message=message)


def _with_messages(state: State, *messages: Message) -> State:
    return state.changed(messages=(*state.messages, *messages))


def _with_aside(state: State, messages: Sequence[Message]) -> State:
    start = len(state.messages)
    positions = range(start, start + len(messages))
    return state.changed(messages=(*state.messages, *messages), unremembered=state.unremembered | frozenset(positions))


def _take_check(rules: Rules, state: State, checked: AnswerChecked) -> tuple[State, Effect]:
    response, refusal = checked.response, checked.refusal
    state = state.changed(response=response)
    if refusal is None:
        return _accept_answer(rules, state, response, checked.text, checked.value)
    is_last = state.stopped is not None or state.answer_retries >= rules.max_answer_retries
    if is_last or not checked.asks_again:
        return _with_messages(state, _answer_message(rules, state, response, checked.text)), Fail(refusal)
    state = state.changed(answer_retries=state.answer_retries + 1)
    if checked.prompt is not None:
        answer = AiMessage(checked.text)  # without calls of the answer tool, which have no results
        state = _with_aside(state, (answer, UserMessage(checked.prompt)))
    return state, CallModel(request_of(rules, state))


def _read_or_check(
    rules: Rules, state: State, response: ChatResponse, text: str, beside: Sequence[Message] = ()
) -> tuple[State, Effect]:
    """Read the answer: check it, or end with it. Ask again if it cannot be read.

    `beside` are the results of the calls beside the answer tool; then the last message is the reply.
    """
    reply = response.ai_message
    try:
        answer = read_answer(rules, response, text)
    except OutputParsingError as error:
        said = beside or (reply,)
        if state.stopped is not None:
            return _fail_at(state.stopped, _with_messages(state, *said))
        if response.finish_reason is FinishReason.LENGTH or state.output_retries >= rules.max_output_retries:
            return _with_messages(state, *said), Fail(cut_or_wrong(error, response))
        return _ask_for_correction(rules, state, response, error, beside)
    if beside:
        state = _with_round(state, reply, beside)
    if rules.checks_answers:
        return state, CheckAnswer(response, text, answer)
    return _accept_answer(rules, state, response, text, answer.value)


def _accept_answer(rules: Rules, state: State, response: ChatResponse, text: str, value: Any) -> tuple[State, Effect]:
    message = _answer_message(rules, state, response, text)
    if state.pending:  # a call that was started early but is missing in the complete reply
        state = state.changed(executions=state.all_executions, pending=())
    return _with_messages(state, message), _finish(rules, response, value)


def _answer_message(rules: Rules, state: State, response: ChatResponse, text: str) -> AiMessage:
    """Return the message of an answer. A call of the answer tool becomes a text: it gets no result."""
    reply = response.ai_message
    if not reply.tool_execution_requests:
        return reply
    if tool_calls_in(rules, state.mode, reply):  # the message with the other calls has everything else
        return AiMessage(text, name=reply.name)
    return replace(reply, text=text, tool_execution_requests=())


def read_answer(rules: Rules, response: ChatResponse, text: str) -> ParsedAnswer:
    """Return the answer in a reply; `text` is its text as it came. Raises `OutputParsingError`."""
    if rules.structure is not None and rules.reads_answer:
        return rules.structure.read(text, complete=response.finish_reason is not FinishReason.LENGTH)
    value = text if rules.kind is Kind.TEXT else response.ai_message if rules.kind is Kind.MESSAGE else None
    return ParsedAnswer(value, text)


def read_items(structure: Structure, response: ChatResponse) -> Any:
    """Return the items that a stream has sent as a list. Raises `OutputParsingError` or `ModelTruncatedError`."""
    text = response.ai_message.text or ""
    try:
        return structure.read(text, complete=response.finish_reason is not FinishReason.LENGTH).value
    except OutputParsingError as error:
        raise cut_or_wrong(error, response) from None


def cut_or_wrong(error: OutputParsingError, response: ChatResponse) -> ToolboxError:
    """Return the error for an answer that cannot be read: a `ModelTruncatedError` if the token limit cut the reply."""
    if response.finish_reason is not FinishReason.LENGTH:
        return error
    cut = "the model's structured reply was cut off at the token limit; increase max_tokens"
    return ModelTruncatedError(cut, error.text)


def replaced_answer(rules: Rules, response: ChatResponse, given: Any) -> tuple[ChatResponse, ParsedAnswer]:
    """Return the response and the answer with what a guardrail gave in place of it. Raises `OutputParsingError`."""
    if rules.structure is not None:
        answer = rules.structure.accept(given)
    elif rules.kind is Kind.MESSAGE and isinstance(given, AiMessage):
        return replace(response, ai_message=given, attributes={}), ParsedAnswer(given, given.text or "")
    elif isinstance(given, str):
        answer = ParsedAnswer(given, given)
    else:
        wanted = "an AiMessage or a str" if rules.kind is Kind.MESSAGE else "a str"
        raise OutputParsingError(str(given), [("", f"expected {wanted}, got {type(given).__name__}")])
    # What may repeat the old text is removed: reasoning, attributes and calls of the answer tool.
    text = given if isinstance(given, str) else answer.text
    message = AiMessage(text, name=response.ai_message.name)
    response = replace(response, ai_message=message, attributes={})
    return response, answer if rules.structure is not None else read_answer(rules, response, text)


def _finish(rules: Rules, response: ChatResponse, value: Any) -> Finish:
    reason = response.finish_reason
    if rules.structure is not None and rules.reads_answer and reason is FinishReason.TOOL_EXECUTION:
        reason = FinishReason.STOP
    return Finish(value, reason, response)


def _ask_for_correction(
    rules: Rules, state: State, response: ChatResponse, error: OutputParsingError, beside: Sequence[Message]
) -> tuple[State, CallModel]:
    """Send the reply back with its errors; neither is stored in memory. Calls beside the answer keep their results."""
    reply, text, results = response.ai_message, correction(error), iter(beside)
    requests = reply.tool_execution_requests
    state = state.changed(output_retries=state.output_retries + 1)
    if not beside:
        state = _with_aside(state, (reply,) if requests else (reply, UserMessage(text)))
    for request in requests:
        if beside and request.name != ANSWER_TOOL:
            state = _with_messages(state, next(results))
        else:
            refused = replace(ToolExecutionResultMessage.of(request, text), is_error=True)
            state = _with_aside(state, (refused,))
    return state, CallModel(request_of(rules, state))


# --- pending calls


def _with_pending(rules: Rules, state: State, index: int, call: PendingToolCall) -> tuple[State, Effect]:
    calls = list(state.pending)
    calls[index] = call
    return _after_tools(rules, state.changed(pending=tuple(calls)), index + 1)


def _after_tools(rules: Rules, state: State, start: int) -> tuple[State, Effect]:
    """Return the next effect. The search for waiting calls begins at `start`, so that many calls take linear time."""
    pending = state.pending
    for index in chain(range(start, len(pending)), range(start)):
        if pending[index].status == "waiting":
            return state, RunTools(index, pending)
    suspended = [index for index, each in enumerate(pending) if each.status == "suspended"]
    if suspended or not isinstance(state.last_message, AiMessage):  # the reply is incomplete
        return state, Suspend(suspended)
    if handing := [index for index, each in enumerate(pending) if each.status == "handover"]:
        return state, HandOver(handing, pending)
    return _round_ended(rules, state, pending)


def _round_ended(rules: Rules, state: State, pending: Sequence[PendingToolCall]) -> tuple[State, Effect]:
    response = state.response
    assert response is not None
    executed, results = _with_executions(state, pending)
    if (answer := _answer_in(rules, state.mode, response.ai_message)) is not None:
        if rules.listens and state.stopped is None:  # a message of the user may wait
            return executed, Listen(ReadAnswer(response, answer, results))
        return _read_or_check(rules, executed, response, answer, results)
    state = _with_messages(executed, *results)
    if (rules.immediate or rules.immediate_if_last) and (ended := _immediate_end(rules, state)) is not None:
        return state, ended
    return state, CallModel(request_of(rules, state))


def _with_executions(state: State, pending: Sequence[PendingToolCall]) -> tuple[State, Sequence[Message]]:
    """Return the state with the executions of a round, and the messages of its results in the order of the calls."""
    assert state.response is not None
    messages, executions, failed, ran = [], [*state.executions], state.failed, state.ran
    for call in pending:
        outcome = call.outcome
        assert outcome is not None, "the round has ended"
        if outcome.failed:
            failed |= {len(executions)}
        if outcome.ran:
            ran |= {len(executions)}
        executions.append(outcome.execution)
        messages.append(outcome.message)
    if len(pending) > 1:
        messages = [messages[index] for index in _places(pending, state.response.ai_message.tool_execution_requests)]
    return state.changed(executions=tuple(executions), pending=(), failed=failed, ran=ran), messages


def may_end(rules: Rules, requests: Sequence[ToolExecutionRequest]) -> bool:
    """Return True if the invocation ends after these calls, provided that none of them fails."""
    if not requests:
        return False
    last = requests[-1].name
    if last in rules.immediate_if_last:
        return True
    return last in rules.immediate and all(
        each.name in rules.immediate or each.name in rules.immediate_if_last for each in requests
    )


def _immediate_end(rules: Rules, state: State) -> Finish | None:
    """Return the end of the invocation if the tools of the last reply end it and none failed."""
    response, requests = state.response, state.answered_requests
    if response is None or not may_end(rules, requests):
        return None
    if _answer_in(rules, state.mode, response.ai_message) is not None:  # an answer that was refused
        return None
    if any(each.is_error for each in state.executions[-len(requests) :]):
        return None
    if rules.immediate_type is None:
        return Finish(None, FinishReason.TOOL_EXECUTION, response)
    values = []
    for each in immediate_executions(rules, state):
        with suppress(ValidationError):
            values.append(rules.immediate_type.validate_python(each.result_object, strict=True))
    return Finish(values[0], FinishReason.TOOL_EXECUTION, response) if len(values) == 1 else None


def immediate_executions(rules: Rules, state: State) -> list[ToolExecution]:
    """Return the executions of the immediate tools that ended the invocation; none if it ended with an answer."""
    if not (requests := state.answered_requests):
        return []
    names = rules.immediate | rules.immediate_if_last
    return [each for each in state.executions[-len(requests) :] if each.request.name in names]


def _joined_by(
    early: Sequence[PendingToolCall], requests: Sequence[ToolExecutionRequest]
) -> tuple[PendingToolCall, ...]:
    """Return the calls that were started early, and the other calls of the complete reply."""
    left = [identity_of(each.request) for each in early]
    added = []
    for request in requests:
        if identity_of(request) in left:
            left.remove(identity_of(request))
        else:
            added.append(PendingToolCall(request))
    return (*early, *added)


def _places(pending: Sequence[PendingToolCall], requests: Sequence[ToolExecutionRequest]) -> list[int]:
    """Return the index of the pending call for each request, matched by id, name and arguments.

    The calls of the answer tool are not pending.
    """
    free = list(range(len(pending)))
    places = []
    for request in requests:
        index = next((each for each in free if identity_of(pending[each].request) == identity_of(request)), None)
        if index is None:
            continue
        free.remove(index)
        places.append(index)
    return places
