"""The state of an invocation between two effects: frozen, plain data that can be pickled and printed.

Includes writing and reading it as versioned JSON. Not here: the next state (`loop`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic_core import to_jsonable_python

from ..chat import (
    AiMessage,
    ChatResponse,
    FinishReason,
    Message,
    PendingCall,
    SystemMessage,
    TokenUsage,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
)
from ..errors import TranscriptError
from ..frozen_copies import copy_with
from ..tools.tool_calls import ToolOutcome
from ..transcripts import Json, message_from_dict, message_to_dict, read_field, read_json, write_json
from .outputs import Compensation, OutputMode, Result

M = TypeVar("M", bound=Message)

VERSION = 1

Status: TypeAlias = Literal["waiting", "finished", "suspended"]


@dataclass(frozen=True, slots=True)
class PendingToolCall:
    """One tool call of the current reply.

    `outcome` is set when it has finished. `details` are JSON values about its suspension and its answer.
    """

    request: ToolExecutionRequest
    status: Status = "waiting"
    outcome: ToolOutcome | None = None
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)


def identity_of(request: ToolExecutionRequest) -> tuple[str, str, str]:
    """Return what distinguishes a call: models may repeat ids."""
    return request.id, request.name, request.arguments


@dataclass(frozen=True)
class State:
    """All data of an invocation.

    - `history`: the messages before this invocation; `messages`: its own, starting with the user message, or with the
      first reply if the history was sent alone.
    - `prompted`: the last user message with instructions for the model, if it differs from the stored message.
    - `unremembered`: positions in `messages` that are not stored in memory (invalid replies and corrections).
    - `offered`: the names of the tools, in the model's order; `sent`: those in the request for the last reply, which
      interceptors may have narrowed, or None if no request was sent.
    - `response`: the model's last reply; `pending`: its tool calls until all have finished, including calls that were
      started before the reply was complete.
    - `failed`: positions in `executions` of tools that failed; `ran`: of those that ran without an error, whatever the
      model read; `undone`: of those whose compensation was called, as in `compensations`.
    - `arguments`: of tools that ran with others than the model's, by their position, as JSON values.
    - `model`: the name of the model; None in states of earlier versions.
    """

    system: SystemMessage | None
    history: tuple[Message, ...]
    messages: tuple[Message, ...]
    prompted: UserMessage | None = None
    mode: OutputMode = "prompt"
    offered: tuple[str, ...] = ()
    unremembered: frozenset[int] = frozenset()
    rounds: int = 0
    output_retries: int = 0
    answer_retries: int = 0
    executions: tuple[ToolExecution, ...] = ()
    token_usage: TokenUsage | None = None
    response: ChatResponse | None = None
    pending: tuple[PendingToolCall, ...] = ()
    failed: frozenset[int] = frozenset()
    ran: frozenset[int] = frozenset()
    undone: frozenset[int] = frozenset()
    sent: tuple[str, ...] | None = None
    compensations: tuple[Compensation, ...] = ()
    arguments: Mapping[int, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    model: str | None = None

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

    @property
    def last_message(self) -> Message | None:
        """The last message of this invocation; None before the first reply to a history that is sent alone."""
        return self.messages[-1] if self.messages else None

    @property
    def remembered(self) -> tuple[Message, ...]:
        """The messages to store in memory."""
        if not self.unremembered:
            return self.messages
        return tuple(each for position, each in enumerate(self.messages) if position not in self.unremembered)

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

    def result(self, value: Any, finish_reason: FinishReason | None) -> Result[Any]:
        """Return the result of an invocation that has ended with this value."""
        return Result(
            value,
            self.all_executions,
            self.token_usage,
            finish_reason,
            self.remembered,
            compensations=self.compensations,
            response_id=None if self.response is None else self.response.id,
        )

    def result_while_suspended(self, pending: Sequence[PendingCall], run_id: str) -> Result[Any]:
        """Return the result of an invocation that waits for answers."""
        return replace(self.result(None, FinishReason.TOOL_EXECUTION), pending=pending, run_id=run_id)

    def to_json(self) -> str:
        """Write the state as JSON. The `result_object` of an execution is written as JSON if possible, or lost.

        Raises `TranscriptError` for attributes that are not JSON values.
        """
        return write_json(
            {
                "version": VERSION,
                "system": None if self.system is None else message_to_dict(self.system),
                "history": [message_to_dict(each) for each in self.history],
                "messages": [message_to_dict(each) for each in self.messages],
                "prompted": None if self.prompted is None else message_to_dict(self.prompted),
                "mode": self.mode,
                "offered": self.offered,
                "unremembered": sorted(self.unremembered),
                "rounds": self.rounds,
                "output_retries": self.output_retries,
                "answer_retries": self.answer_retries,
                "executions": [execution_to_dict(each) for each in self.executions],
                "token_usage": _usage_to_dict(self.token_usage),
                "response": response_to_dict(self.response),
                "pending": [_pending_to_dict(each) for each in self.pending],
                "failed": sorted(self.failed),
                "ran": sorted(self.ran),
                "undone": sorted(self.undone),
                "sent": self.sent,
                "model": self.model,
                "compensations": [asdict(each) for each in self.compensations],
                "arguments": [[position, dict(each)] for position, each in self.arguments.items()],
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> State:
        """Read a state written by `to_json`. Raises `TranscriptError` if it is invalid."""
        return cls.from_dict(read_json(text, VERSION))

    @classmethod
    def from_dict(cls, written: Json) -> State:
        """Read a state from the object in a text that `to_json` wrote. Raises `TranscriptError` if it is invalid."""
        try:
            executions = tuple(execution_from_dict(each) for each in written["executions"])
            failed = frozenset(written.get("failed", ()))
            return cls(
                system=_of_kind(SystemMessage, written["system"], "system"),
                history=_messages(written, "history"),
                messages=_messages(written, "messages"),
                prompted=_of_kind(UserMessage, written["prompted"], "prompted"),
                mode=written["mode"],
                offered=tuple(written["offered"]),
                unremembered=frozenset(written["unremembered"]),
                rounds=written["rounds"],
                output_retries=written["output_retries"],
                answer_retries=written.get("answer_retries", 0),
                executions=executions,
                token_usage=_usage(written["token_usage"]),
                response=response_from_dict(written["response"]),
                pending=tuple(_pending(each) for each in written["pending"]),
                failed=failed,
                ran=frozenset(written["ran"] if "ran" in written else _guess_ran(executions, failed)),
                undone=frozenset(written.get("undone", ())),
                sent=None if (sent := written.get("sent")) is None else tuple(sent),
                model=written.get("model"),
                compensations=tuple(Compensation(**each) for each in written.get("compensations", ())),
                arguments=dict(written.get("arguments", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, TranscriptError):
                raise
            raise TranscriptError("", f"invalid invocation state: {error!r}") from error


# --- the parts of a state as JSON


def _guess_ran(executions: Sequence[ToolExecution], failed: Collection[int]) -> Iterator[int]:
    """Yield the positions of the tools that ran, for a state of an earlier version, which did not say so."""
    return (at for at, each in enumerate(executions) if at not in failed and not each.is_error)


def _messages(written: Json, name: str) -> tuple[Message, ...]:
    found: Sequence[Any] = read_field(written, name, list, "")
    return tuple(message_from_dict(each, f"{name}.{number}") for number, each in enumerate(found))


def _of_kind(kind: type[M], written: Any, path: str) -> M | None:
    read = None if written is None else message_from_dict(written, path)
    if read is not None and not isinstance(read, kind):
        raise TranscriptError(path, f"expected {kind.__name__}, got {type(read).__name__}")
    return read


def _usage_to_dict(usage: TokenUsage | None) -> Json | None:
    return None if usage is None else {name: getattr(usage, name) for name in TokenUsage.__slots__}


def _usage(written: Any) -> TokenUsage | None:
    return None if written is None else TokenUsage(**written)


def response_to_dict(response: ChatResponse | None) -> Json | None:
    """Return a reply as a JSON object."""
    if response is None:
        return None
    others = {name: getattr(response, name) for name in ChatResponse.__slots__}
    return {
        **others,
        "ai_message": message_to_dict(response.ai_message),
        "token_usage": _usage_to_dict(response.token_usage),
    }


def response_from_dict(written: Any) -> ChatResponse | None:
    """Read a reply written by `response_to_dict`."""
    if written is None:
        return None
    message = message_from_dict(written["ai_message"], "response")
    assert isinstance(message, AiMessage)
    reason = written["finish_reason"]
    known = {
        **written,
        "ai_message": message,
        "token_usage": _usage(written["token_usage"]),
        "finish_reason": None if reason is None else FinishReason(reason),
    }
    return ChatResponse(**known)


def request_to_dict(request: ToolExecutionRequest) -> Json:
    """Return a tool call as a JSON object."""
    calls: list[Json] = message_to_dict(AiMessage(None, (request,)))["tool_execution_requests"]
    return calls[0]


def request_from_dict(written: Any) -> ToolExecutionRequest:
    """Read a tool call written by `request_to_dict`."""
    message = message_from_dict({"type": "ai", "tool_execution_requests": [written]}, "request")
    assert isinstance(message, AiMessage)
    return message.tool_execution_requests[0]


def execution_to_dict(execution: ToolExecution) -> Json:
    """Return an execution as a JSON object; a `result_object` without a JSON form becomes None."""
    try:
        value = to_jsonable_python(execution.result_object)
    except Exception:  # any exception of the value's own serializers
        value = None
    return {
        "request": request_to_dict(execution.request),
        "result": execution.result,
        "result_object": value,
        "is_error": execution.is_error,
        "started_at": execution.started_at.isoformat(),
        "duration": execution.duration,
        "attributes": dict(execution.attributes),
    }


def execution_from_dict(written: Any) -> ToolExecution:
    """Read an execution written by `execution_to_dict`."""
    at = datetime.fromisoformat(written["started_at"])
    return ToolExecution(**{**written, "request": request_from_dict(written["request"]), "started_at": at})


def _pending_to_dict(call: PendingToolCall) -> Json:
    written: Json = {"request": request_to_dict(call.request), "status": call.status, "details": dict(call.details)}
    if call.outcome is not None:
        written["execution"] = execution_to_dict(call.outcome.execution)
        written["message"] = message_to_dict(call.outcome.message)
        written["failed"], written["ran"] = call.outcome.failed, call.outcome.ran
        written["arguments"] = call.outcome.arguments
    return written


def _pending(written: Any) -> PendingToolCall:
    outcome = None
    if "execution" in written:
        message = message_from_dict(written["message"], "pending")
        assert isinstance(message, ToolExecutionResultMessage)
        execution, failed = execution_from_dict(written["execution"]), written.get("failed", False)
        ran = written.get("ran", not failed and not execution.is_error)  # earlier versions did not say it
        outcome = ToolOutcome(execution, tuple(message.contents), failed, ran, written.get("arguments"))
    return PendingToolCall(request_from_dict(written["request"]), written["status"], outcome, written["details"])
