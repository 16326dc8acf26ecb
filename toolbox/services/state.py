"""The state of an invocation between two effects: frozen, plain data that can be pickled and printed.

Includes writing and reading it as versioned JSON. Not here: the next state (`loop`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import PlainSerializer

from ..chat import (
    AiMessage,
    FinishReason,
    Message,
    PendingCall,
    TokenUsage,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
)
from ..conversations.log import NO_USAGE
from ..errors import ToolboxError, ToolCallsLimitExceededError, ToolRoundsExceededError
from ..frozen_copies import copy_with
from ..limits import Usage, UsageLimitExceededError
from ..passages import Passage, source_from_dict, source_to_dict
from ..tools.tool_calls import ToolOutcome
from ..transcripts import (
    Json,
    message_from_dict,
    message_to_dict,
    read_json,
    request_from_dict,
    request_to_dict,
    write_json,
)
from .outputs import Compensation, OutputMode, Result
from .stored_forms import (
    StoredExecution,
    StoredForm,
    StoredMessage,
    StoredResponse,
    StoredSystemMessage,
    StoredUserMessage,
    execution_from_dict,
    execution_to_dict,
    fields_from_dict,
    fields_to_dict,
    usage_from_dict,
    usage_to_dict,
)

VERSION = 1

Status: TypeAlias = Literal["waiting", "finished", "suspended", "handover"]


@dataclass(frozen=True, slots=True)
class PendingToolCall:
    """One tool call of the current reply.

    `outcome` is set when it has finished. `details` are JSON values about its suspension and its answer. A call with
    the status `"handover"` hands over, after the other calls have ended.
    """

    request: ToolExecutionRequest
    status: Status = "waiting"
    outcome: ToolOutcome | None = None
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class ReachedLimit:
    """A limit of the service that was reached: its name and its value.

    `used` is what was used or asked for, `usage` everything that was counted, and `at` the time, of a limit of
    `UsageLimits`.
    """

    limit: str
    allowed: int | Decimal
    used: int | Decimal | None = None
    usage: Usage | None = None
    at: datetime | None = None

    @classmethod
    def of(cls, error: UsageLimitExceededError) -> ReachedLimit:
        """Return the limit that an error is about."""
        return cls(error.limit, error.allowed, error.used, error.usage, datetime.now(UTC))

    def error(self, transcript: Sequence[Message]) -> ToolboxError:
        """Return the error with which a call fails at the limit."""
        if self.usage is not None:
            return UsageLimitExceededError(self.limit, self.allowed, self.used, self.usage, transcript)
        if self.limit == "max_tool_rounds":
            return ToolRoundsExceededError(int(self.allowed), transcript)
        return ToolCallsLimitExceededError(int(self.allowed), int(self.used or 0), transcript)


def _reached_to_dict(reached: ReachedLimit | None) -> Json | None:
    if reached is None:
        return None
    usage = None if reached.usage is None else usage_to_dict(reached.usage)
    numbers = {name: _number_to_json(getattr(reached, name)) for name in ("allowed", "used")}
    at = None if reached.at is None else reached.at.isoformat()
    return {"limit": reached.limit, **numbers, "usage": usage, "at": at}


def _reached_from_dict(written: Any) -> ReachedLimit | None:
    if written is None:
        return None
    usage = None if written["usage"] is None else usage_from_dict(written["usage"])
    allowed, used = _number_from_json(written["allowed"]), _number_from_json(written["used"])
    at = None if written["at"] is None else datetime.fromisoformat(written["at"])
    return ReachedLimit(written["limit"], 0 if allowed is None else allowed, used, usage, at)


def _number_to_json(number: int | Decimal | None) -> int | str | None:
    return str(number) if isinstance(number, Decimal) else number


def _number_from_json(written: int | str | None) -> int | Decimal | None:
    return Decimal(written) if isinstance(written, str) else written


def identity_of(request: ToolExecutionRequest) -> tuple[str, str, str]:
    """Return what distinguishes a call: models may repeat ids."""
    return request.id, request.name, request.arguments


def _has_run(execution: ToolExecution, failed: bool) -> bool:
    """Return True if a tool ran, for a state of an earlier version, which did not say so."""
    return not failed and not execution.is_error


def _pending_to_dict(call: PendingToolCall) -> Json:
    written: Json = {"request": request_to_dict(call.request), "status": call.status, "details": dict(call.details)}
    if (outcome := call.outcome) is not None:
        written["execution"] = execution_to_dict(outcome.execution)
        written["message"] = message_to_dict(outcome.message)
        written |= {"failed": outcome.failed, "ran": outcome.ran}
    return written


def _pending_from_dict(written: Any) -> PendingToolCall:
    outcome = None
    if "execution" in written:
        message = message_from_dict(written["message"], "message")
        assert isinstance(message, ToolExecutionResultMessage)
        execution, failed = execution_from_dict(written["execution"]), written.get("failed", False)
        if not execution.arguments and written.get("arguments"):  # of a state of an earlier version
            execution = replace(execution, arguments=written["arguments"])
        ran = written.get("ran", _has_run(execution, failed))
        outcome = ToolOutcome(execution, tuple(message.contents), failed, ran)
    request = request_from_dict(written["request"], "request")
    return PendingToolCall(request, written["status"], outcome, written["details"])


def _arguments_to_pairs(arguments: Mapping[int, Mapping[str, Any]]) -> list[Any]:
    return [[position, dict(each)] for position, each in arguments.items()]


StoredPendingCall: TypeAlias = Annotated[PendingToolCall, StoredForm(_pending_to_dict, _pending_from_dict)]
StoredArguments: TypeAlias = Annotated[Mapping[int, Mapping[str, Any]], StoredForm(_arguments_to_pairs, dict)]
StoredPassage: TypeAlias = Annotated[Passage, StoredForm(source_to_dict, source_from_dict)]
StoredUsage: TypeAlias = Annotated[
    Usage | None,
    StoredForm(
        lambda usage: None if usage is None else usage_to_dict(usage),
        lambda written: None if written is None else usage_from_dict(written),
    ),
]
StoredLimit: TypeAlias = Annotated[ReachedLimit | None, StoredForm(_reached_to_dict, _reached_from_dict)]
Positions: TypeAlias = Annotated[frozenset[int], PlainSerializer(sorted)]


@dataclass(frozen=True)
class State:
    """All data of an invocation.

    - `history`: the messages before this invocation; `messages`: its own, starting with the user message, or with the
      first reply if the history was sent alone.
    - `prompted`: the last user message with instructions for the model, if it differs from the stored message.
    - `unremembered`: positions in `messages` that are not stored in memory (invalid replies and corrections).
    - `offered`: the names of the tools, in the model's order; `sent`: those in the request for the last reply, which
      interceptors may have narrowed, or None if no request was sent.
    - `response`: the model's last reply, also an answer that was refused and is not in `messages`; `pending`: its tool
      calls until all have finished, including calls that were started before the reply was complete.
    - `failed`: positions in `executions` of tools that failed; `ran`: of those that ran without an error, whatever the
      model read; `undone`: of those whose compensation was called, as in `compensations`.
    - `arguments`: in states of earlier versions, those of tools that ran with others than the model's, by position.
    - `model`: the name of the model; None in states of earlier versions.
    - `recalled`: so many messages of `history` are those of the conversation; parameters gave the others.
    - `compactions`: how often something was left out because the model's context was full; `omitted`: positions in
      `messages` of results that are sent as notes since then.
    - `noted_usage`: the part of `token_usage` that was stored with the conversation already: that of summaries.
    - `passages`: what retrievers have found, in the order of their numbers. They are stored without their text.
    - `added`: positions in `messages` of those that the user has added while the run was running or suspended.
    - `stopped`: the limit of the service after which only the answer is asked for; None before.
    - `in_charge`: the method that has taken the call over, such as `"Billing.chat"`; None for the one that was called.
      `handovers`: how often it was handed over. `counted_from`: what was used when it was handed over last, if the
      method in charge has its own limits.
    """

    system: StoredSystemMessage | None
    history: tuple[StoredMessage, ...]
    messages: tuple[StoredMessage, ...]
    prompted: StoredUserMessage | None = None
    mode: OutputMode = "prompt"
    offered: tuple[str, ...] = ()
    unremembered: Positions = frozenset()
    rounds: int = 0
    output_retries: int = 0
    answer_retries: int = 0
    executions: tuple[StoredExecution, ...] = ()
    token_usage: TokenUsage | None = None
    response: StoredResponse | None = None
    pending: tuple[StoredPendingCall, ...] = ()
    failed: Positions = frozenset()
    ran: Positions = frozenset()
    undone: Positions = frozenset()
    sent: tuple[str, ...] | None = None
    compensations: tuple[Compensation, ...] = ()
    arguments: StoredArguments = field(default_factory=dict, hash=False)
    model: str | None = None
    recalled: int = 0
    compactions: int = 0
    omitted: Positions = frozenset()
    noted_usage: TokenUsage | None = None
    passages: tuple[StoredPassage, ...] = ()
    stopped: StoredLimit = None
    added: Positions = frozenset()
    in_charge: str | None = None
    handovers: int = 0
    counted_from: StoredUsage = None

    def changed(self, **changes: Any) -> State:
        """Return the state with changed fields."""
        return copy_with(self, **changes)

    def with_results(self, read: Callable[[str, Any], Any]) -> State:
        """Return the state with other `result_object`s; `read` takes a tool's name and the present one."""

        def changed(execution: ToolExecution) -> ToolExecution:
            value = read(execution.request.name, execution.result_object)
            return execution if value is execution.result_object else replace(execution, result_object=value)

        pending = tuple(
            call
            if call.outcome is None
            else replace(call, outcome=replace(call.outcome, execution=changed(call.outcome.execution)))
            for call in self.pending
        )
        return self.changed(executions=tuple(map(changed, self.executions)), pending=pending)

    def position_of(self, index: int) -> int:
        """Return the position in `executions` that a call of `pending` will have: a part of its place in a run."""
        return len(self.executions) + index

    def pending_at(self, position: int) -> PendingToolCall:
        """Return the call of `pending` that will have this position in `executions`."""
        return self.pending[position - len(self.executions)]

    @property
    def last_message(self) -> Message | None:
        """The last message of this invocation; None before the first reply to a history that is sent alone."""
        return self.messages[-1] if self.messages else None

    @property
    def answered_requests(self) -> Sequence[ToolExecutionRequest]:
        """The calls whose results are the last messages; empty if the invocation has gone on since."""
        # Not those of `response`: it may be a newer reply, whose answer was refused and is not in the messages.
        if not isinstance(self.last_message, ToolExecutionResultMessage):
            return ()
        positions = reversed(range(len(self.messages)))
        return self._remembered_calls(next(each for each in positions if isinstance(self.messages[each], AiMessage)))

    def _remembered_calls(self, position: int) -> Sequence[ToolExecutionRequest]:
        """Return the calls of a reply without those of a refused answer, whose results are not stored in memory."""
        reply = self.messages[position]
        assert isinstance(reply, AiMessage)
        results = range(position + 1, position + 1 + len(reply.tool_execution_requests))
        if self.unremembered.isdisjoint(results):
            return reply.tool_execution_requests
        pairs = zip(results, reply.tool_execution_requests, strict=True)
        return [request for result, request in pairs if result not in self.unremembered]

    @property
    def remembered(self) -> tuple[Message, ...]:
        """The messages to store in memory."""
        if not self.unremembered:
            return self.messages
        kept: list[Message] = []
        for position, each in enumerate(self.messages):
            if position in self.unremembered:
                continue
            if isinstance(each, AiMessage):
                calls = self._remembered_calls(position)
                each = each if calls is each.tool_execution_requests else replace(each, tool_execution_requests=calls)
            kept.append(each)
        return tuple(kept)

    def result_positions(self) -> dict[int, int]:
        """Return the position of the result message in `messages` for the position of each execution."""
        found: dict[int, int] = {}
        for index, message in enumerate(self.messages):
            if not isinstance(message, AiMessage) or index in self.unremembered:
                continue
            at = index + 1
            for request in message.tool_execution_requests:
                if at >= len(self.messages) or not isinstance(result := self.messages[at], ToolExecutionResultMessage):
                    break
                if (result.id, result.tool_name) != (request.id, request.name):
                    continue  # an answer that was refused for the last time has no result
                for position, execution in enumerate(self.executions):
                    if position not in found and identity_of(execution.request) == identity_of(request):
                        found[position] = at
                        break
                at += 1
        return found

    @property
    def usage_of_turn(self) -> TokenUsage:
        """The tokens of all requests, to store with the turn: without those of summaries."""
        total, noted = self.token_usage or NO_USAGE, self.noted_usage
        if noted is None:
            return total
        return TokenUsage(**{name: getattr(total, name) - getattr(noted, name) for name in TokenUsage.__slots__})

    def with_usage(self, usage: TokenUsage | None) -> State:
        """Return the state with the tokens of one more request."""
        if usage is None:
            return self
        return self.changed(token_usage=usage if self.token_usage is None else self.token_usage + usage)

    def with_summary_usage(self, usage: TokenUsage | None) -> State:
        """Return the state with the tokens of a request for a summary, which are stored with the conversation."""
        if usage is None:
            return self
        counted = (usage if each is None else each + usage for each in (self.token_usage, self.noted_usage))
        return self.changed(**dict(zip(("token_usage", "noted_usage"), counted, strict=True)))

    @property
    def all_executions(self) -> tuple[ToolExecution, ...]:
        """The executions, including those of an incomplete round."""
        return (*self.executions, *(each.outcome.execution for each in self.pending if each.outcome is not None))

    @property
    def all_messages(self) -> tuple[Message, ...]:
        """The messages, including the results of an incomplete round."""
        if not self.pending or not isinstance(self.last_message, AiMessage):  # the reply is incomplete, too
            return self.messages
        return (*self.messages, *(each.outcome.message for each in self.pending if each.outcome is not None))

    def result(self, value: Any, finish_reason: FinishReason | None, answered_by: str | None) -> Result[Any]:
        """Return the result of an invocation that has ended with this value; `answered_by` is the method in charge."""
        return Result(
            value,
            self.all_executions,
            self.token_usage,
            finish_reason,
            self.remembered,
            compensations=self.compensations,
            response_id=None if self.response is None else self.response.id,
            sources=self.passages,
            stopped_by=None if self.stopped is None else self.stopped.limit,
            answered_by=answered_by,
        )

    def result_while_suspended(self, pending: Sequence[PendingCall], run_id: str, in_charge: str) -> Result[Any]:
        """Return the result of an invocation that waits for answers."""
        return replace(self.result(None, FinishReason.TOOL_EXECUTION, in_charge), pending=pending, run_id=run_id)

    def to_json(self) -> str:
        """Write the state as JSON. The `result_object` of an execution is written as JSON if possible, or lost.

        Raises `TranscriptError` for attributes that are not JSON values.
        """
        return write_json(self.to_dict())

    def to_dict(self) -> Json:
        """Return the state as the values in the JSON of `to_json`."""
        written = fields_to_dict(self)
        if not self.passages:  # most invocations have none, and earlier releases know none
            del written["passages"]
        if self.in_charge is None and not self.handovers:  # the same
            del written["in_charge"], written["handovers"], written["counted_from"]
        return {"version": VERSION, **written}

    @classmethod
    def from_json(cls, text: str | bytes) -> State:
        """Read a state written by `to_json`. Raises `TranscriptError` if it is invalid."""
        return cls.from_dict(read_json(text, VERSION))

    @classmethod
    def from_dict(cls, written: Json) -> State:
        """Read a state from the object in a text that `to_json` wrote. Raises `TranscriptError` if it is invalid."""
        state = fields_from_dict(cls, written)
        if "ran" in written:
            return state
        ran = (at for at, each in enumerate(state.executions) if _has_run(each, at in state.failed))
        return state.changed(ran=frozenset(ran))
