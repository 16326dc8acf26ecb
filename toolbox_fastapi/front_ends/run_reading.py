"""Reads the events of a run into the parts of an answer: `RunReading` is pure, `follow_run` reads a run of the store.

Not here: writing the parts (`vercel_ai`, `ag_ui`), finding the run (`chats`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeGuard

from toolbox.chat import (
    BeforeToolExecution,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    IntermediateResponse,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    PendingCall,
    Retrieved,
    RunSuspended,
    TokenUsage,
    ToolExecuted,
    ToolExecution,
    ToolExecutionRequest,
    ToolProgress,
)
from toolbox.conversations.stopping import STOPPED
from toolbox.errors import RunNotFoundError, ToolboxError
from toolbox.events import ToldEvent
from toolbox.runs.documents import told_from_json
from toolbox.runs.run_answers import HistoryEntry, Run
from toolbox.runs.run_events import RunEnded, RunEvent
from toolbox.runs.runs_bean import Runs
from toolbox.runs.store import RunLook
from toolbox.service_events import HandedOver, ServiceWork
from toolbox.services.outputs import ANSWER_TOOL, answer_text
from toolbox.services.recording_needs import ToldMessage
from toolbox.services.state import identity_of
from toolbox.services.turns import INTERRUPTED

from ..problems import problem_of_type, problem_text
from .stream_parts import (
    AddedMessage,
    BlockEnd,
    BlockKind,
    BlockPiece,
    BlockStart,
    Broken,
    BrokenCall,
    CallEnd,
    CallOutcome,
    CallPiece,
    CallProgress,
    CallReady,
    CallStart,
    Completed,
    Part,
    RoundEnd,
    RoundStart,
    ServiceEnd,
    ServiceStart,
    ServiceText,
    Sources,
    Stopped,
    Waits,
)

NO_SERVICES: Mapping[str, str] = MappingProxyType({})


def wire_id(run_id: str, place: str) -> str:
    """Return the id of a call on the wire: of the call, of its approval, and of its interrupt."""
    return f"{run_id}:{place}"


def answer_id(base: str, number: int) -> str:
    """Return the id of an answer of a run: the messages that a client adds to the run begin further ones."""
    return f"{base}#{number}" if number else base


def begins_answer(event: object) -> TypeGuard[ToldEvent]:
    """Return True for a message that a client has added to a run."""
    return isinstance(event, ToldEvent) and event.client_id is not None


def split_wire_id(written: str) -> tuple[str, str] | None:
    """Return the run and the place in an id of the wire; None for another text."""
    run_id, mark, place = written.rpartition(":")
    is_place = bool(place) and len(place) <= 200 and all(each in "0123456789./" for each in place)
    return (run_id, place) if mark and run_id and is_place else None


@dataclass(slots=True)
class ShownCall:
    """A call of the present round: `state` is `"written"`, `"ready"`, `"waits"` or `"ended"`."""

    place: str
    name: str
    request: ToolExecutionRequest | None = None
    state: str = "written"
    arguments: str = ""

    def is_of(self, request: ToolExecutionRequest) -> bool:
        """Return True if this call is the request and has no result yet."""
        return self.state != "ended" and self.request is not None and identity_of(self.request) == identity_of(request)


class RunReading:
    """Turns the events of one run into parts, in order, from its first event on.

    `holds_text` keeps the text of a round back until it is complete: that of a structured answer, which may be refused
    and asked again. `services` are the stored names of services, by the names of the tools that they are; they are for
    a run that no front end has started, whose events do not tell when a service begins. `history` are the answers of
    persons so far, which say if a call was rejected.
    """

    def __init__(self, run_id: str, *, holds_text: bool = False, services: Mapping[str, str] = NO_SERVICES) -> None:
        self.run_id, self._services = run_id, services
        self.history: Sequence[HistoryEntry] = ()
        self.has_answer = False
        self._holds_text = holds_text
        self._round = -1
        self._is_open = False
        self._reply_is_complete = False
        self._block: tuple[BlockKind, int] | None = None
        self._blocks = 0
        self._text = self._held = ""  # of this round
        self._calls: list[ShownCall] = []  # of this round, by their index in the reply; without the answer
        self._ended_calls = 0  # of earlier rounds
        self._answer_indexes: set[int] = set()
        self._waiting: dict[str, PendingCall] = {}  # by place
        self._working: dict[str, str] = {}  # by the ids of services within: the calls in which they work
        self._replies: dict[str, int] = {}  # texts of services within, by their ids
        self._final: ChatResponse | None = None

    def take(self, event: object) -> Iterator[Part]:
        """Yield the parts of the next event."""
        match event:
            case PartialResponse(text):
                yield from self._take_text("text", text)
            case PartialReasoning(text):
                yield from self._take_text("thought", text)
            case PartialToolCall(index, _, name, arguments):
                yield from self._take_call_piece(index, name, arguments)
            case CompleteToolCall(index, request):
                yield from self._take_call(index, request)
            case IntermediateResponse(response):
                yield from self._take_reply(response)
            case BeforeToolExecution(request):
                yield from self._end_reply()
                if request.name in self._services and (call := self.find_call(request)) is not None:
                    yield from self._start_service(ServiceWork(call.place, call.place, "", self._services[call.name]))
            case ServiceWork():
                yield from self._take_work(event)
            case ToolProgress(request, done, total, message):
                if (call := self.find_call(request)) is not None:
                    yield CallProgress(self._wire(call.place), call.name, done, total, message)
            case HandedOver():
                yield event
            case ToolExecuted(execution):
                yield from self._end_call(execution)
            case RunSuspended(_, pending):
                yield from self._suspend(pending)
            case Retrieved(passages):
                yield Sources(passages)
            case ToldEvent():
                yield from self._close_round()
                yield AddedMessage(event.message, event.by, event.client_id)
            case CompleteResponse(response):
                yield from self._complete(response)
            case RunEnded(status, error):
                yield from self._end_run(status, error)
            case _:  # an event of a later release
                return

    # --- services within

    def _take_work(self, work: ServiceWork) -> Iterator[Part]:
        match work.state:
            case "running":
                yield from self._start_service(work)
            case "replied":
                self._replies[work.id] = number = self._replies.get(work.id, 0) + 1
                yield ServiceText(self._wire(work.id), number, work.text)
            case "finished":
                yield from self._end_service(work.id)
            case "failed":
                yield from self._end_service(work.id, problem_text(problem_of_type(work.text)))

    def _start_service(self, work: ServiceWork) -> Iterator[Part]:
        if work.id not in self._working:
            self._working[work.id] = work.call
            call, parent = (self._wire(each) if each else "" for each in (work.call, work.parent))
            yield ServiceStart(self._wire(work.id), work.service, call, parent)

    def _end_service(self, id_: str, error: str | None = None) -> Iterator[Part]:
        if self._working.pop(id_, None) is not None:
            yield ServiceEnd(self._wire(id_), error)

    def _end_services(self, error: str | None, call: str = "") -> Iterator[Part]:
        """End the services that still work within a call, or within the run: nothing else says that they have ended."""
        for id_, their_call in reversed([*self._working.items()]):
            if not call or their_call == call or their_call.startswith((f"{call}/", f"{call}.")):
                yield from self._end_service(id_, error)

    def find_call(self, request: ToolExecutionRequest) -> ShownCall | None:
        """Return the call of this round to which an event belongs: models may write equal calls."""
        found = [each for each in self._calls if each.is_of(request)]
        answers = {each.call_id: each.at for each in self.history}

        def when_answered(call: ShownCall) -> Any:
            """Return a key that sorts calls as they were answered; those of one moment run in their own order."""
            if call.state != "waits":
                return (0,)
            return (1, answers[call.place]) if call.place in answers else (2,)

        return min(found, key=when_answered, default=None)

    def awaits(self, event: object) -> bool:
        """Return True if an event may end a pending call: then `history` has to be read first."""
        return bool(self._waiting) and isinstance(event, (ToolExecuted, RunSuspended))

    # --- rounds and blocks

    def _open_round(self) -> Iterator[Part]:
        """Begin the next round, unless one is open."""
        if self._is_open and self._reply_is_complete:
            yield from self._close_round()
        if not self._is_open:
            self._round += 1
            self._ended_calls += len(self._calls)
            self._is_open, self._reply_is_complete, self._text, self._held = True, False, "", ""
            self._calls, self._answer_indexes = [], set()
            yield RoundStart(self._round)

    def _close_round(self) -> Iterator[Part]:
        yield from self._close_block()
        if self._is_open:
            self._is_open = False
            yield RoundEnd(self._round)

    def _close_block(self) -> Iterator[Part]:
        if self._block is not None:
            kind, number = self._block
            self._block = None
            yield BlockEnd(kind, number)

    def _take_text(self, kind: BlockKind, text: str) -> Iterator[Part]:
        if not text:
            return
        yield from self._open_round()
        if kind == "text" and self._holds_text:
            self._held += text
            return
        yield from self._write(kind, text)

    def _write(self, kind: BlockKind, text: str) -> Iterator[Part]:
        if self._block is None or self._block[0] != kind:
            yield from self._close_block()
            self._block = (kind, self._blocks)
            self._blocks += 1
            yield BlockStart(*self._block)
        if kind == "text":
            self._text += text
        yield BlockPiece(*self._block, text)

    # --- calls

    def _wire(self, place: str) -> str:
        return wire_id(self.run_id, place)

    def _call_at(self, index: int) -> ShownCall | None:
        """Return the call with this index in the reply, if it has begun."""
        position = self._position_of(index)
        return self._calls[position] if position < len(self._calls) else None

    def _position_of(self, index: int) -> int:
        return index - sum(each < index for each in self._answer_indexes)

    def _take_call_piece(self, index: int, name: str | None, arguments: str) -> Iterator[Part]:
        yield from self._open_round()
        if name == ANSWER_TOOL:
            self._answer_indexes.add(index)
            return
        call = self._call_at(index)
        if call is None:
            # Some servers send the name after the first arguments: the complete call has all of them.
            if name is None or self._position_of(index) != len(self._calls):
                return
            call = yield from self._start_call(name)
        if call.state == "written" and arguments:
            call.arguments += arguments
            yield CallPiece(self._wire(call.place), arguments)

    def _start_call(self, name: str) -> Any:
        yield from self._close_block()
        call = ShownCall(str(self._ended_calls + len(self._calls)), name)
        self._calls.append(call)
        yield CallStart(self._wire(call.place), name)
        return call

    def _take_call(self, index: int, request: ToolExecutionRequest) -> Iterator[Part]:
        yield from self._open_round()
        if request.name == ANSWER_TOOL:
            self._answer_indexes.add(index)
            return
        call = self._call_at(index)
        if call is None:
            if self._position_of(index) != len(self._calls):  # the whole reply has them in order
                return
            call = yield from self._start_call(request.name)
        yield from self._ready(call, request)

    def _ready(self, call: ShownCall, request: ToolExecutionRequest) -> Iterator[Part]:
        if call.state != "written":
            return
        call.request, call.state = request, "ready"
        if not call.arguments and request.arguments:
            yield CallPiece(self._wire(call.place), request.arguments)
        yield CallReady(self._wire(call.place), request.name, request.arguments)

    def _take_reply(self, response: ChatResponse) -> Iterator[Part]:
        """Take a whole reply, which may have calls of which no pieces came."""
        yield from self._open_round()
        requests = [each for each in response.ai_message.tool_execution_requests if each.name != ANSWER_TOOL]
        for index, request in enumerate(requests):
            call = self._calls[index] if index < len(self._calls) else (yield from self._start_call(request.name))
            yield from self._ready(call, request)
        yield from self._end_reply()

    def _end_reply(self) -> Iterator[Part]:
        if self._reply_is_complete or not self._is_open:
            return
        if self._held:
            yield from self._write("text", self._held)
            self._held = ""
        yield from self._close_block()
        self._reply_is_complete = True

    def _end_call(self, execution: ToolExecution) -> Iterator[Part]:
        yield from self._end_reply()
        call = self.find_call(execution.request)
        if call is None:
            return
        yield from self._end_inner_calls(call.place)
        waited = self._waiting.pop(call.place, None) is not None
        call.state = "ended"
        outcome: CallOutcome = "error" if execution.is_error else "result"
        if waited and self._find_rejection(call.place) is not None:
            outcome = "denied"
        yield from self._end_services(execution.result if outcome == "error" else None, call.place)
        yield CallEnd(self._wire(call.place), outcome, execution.result, execution)

    def _end_inner_calls(self, place: str) -> Iterator[Part]:
        """End the pending calls within a call that has ended: their own results are in no event."""
        for each in [waiting for waiting in self._waiting if waiting.startswith((f"{place}/", f"{place}."))]:
            yield self._end_inner_call(each)

    def _end_inner_call(self, place: str) -> Part:
        del self._waiting[place]
        reason = self._find_rejection(place)
        return CallEnd(self._wire(place), "unknown" if reason is None else "denied", reason or "")

    def _interrupt_calls(self) -> Iterator[Part]:
        """End the calls without results, as the log does.

        `useChat` sends an answer to one again and again: as long as a call has one and no result.
        """
        yield from self._close_block()
        known = {each.place for each in self._calls}
        for place in [each for each in self._waiting if each not in known]:
            yield CallEnd(self._wire(place), "error", INTERRUPTED)
        for call in self._calls:
            if call.state == "written":
                yield BrokenCall(self._wire(call.place), call.name, call.arguments, INTERRUPTED)
            elif call.state != "ended":
                yield CallEnd(self._wire(call.place), "error", INTERRUPTED)
            call.state = "ended"
        self._waiting = {}

    def _find_rejection(self, place: str) -> str | None:
        """Return the reason with which a call was rejected; None for one that was not."""
        given = [each for each in self.history if each.call_id == place]
        return (given[-1].reason or "") if given and given[-1].answer == "reject" else None

    # --- ends

    def _suspend(self, pending: Sequence[PendingCall]) -> Iterator[Part]:
        yield from self._end_reply()
        known, now = {each.place: each for each in self._calls}, {each.id: each for each in pending}
        for place in [each for each in self._waiting if each not in now and each not in known]:
            yield self._end_inner_call(place)
        inner = [each for each in pending if each.id not in known and each.id not in self._waiting]
        yield from self._close_round_with(inner)
        for place in now:
            if place in known:
                known[place].state = "waits"
        self._waiting = now
        self._working.clear()
        yield Waits({self._wire(place): call for place, call in now.items()})

    def _close_round_with(self, inner: Sequence[PendingCall]) -> Iterator[Part]:
        """Show pending calls of services within, in a round for them alone: no event came before.

        The client looks at the calls of the last round when it decides whether all have answers; the outer call has
        none yet.
        """
        yield from self._close_block()
        if not inner:
            return
        was_open, self._is_open = self._is_open, False
        if was_open:
            yield RoundEnd(self._round)
        self._round += 1
        yield RoundStart(self._round)
        for each in inner:
            text = json.dumps(dict(each.arguments), ensure_ascii=False)
            yield CallStart(self._wire(each.id), each.tool_name)
            yield CallPiece(self._wire(each.id), text)
            yield CallReady(self._wire(each.id), each.tool_name, text)
        self._is_open = was_open

    def _complete(self, response: ChatResponse) -> Iterator[Part]:
        self._final, self.has_answer = response, True
        message = response.ai_message
        answer = next((each for each in message.tool_execution_requests if each.name == ANSWER_TOOL), None)
        text = message.text if answer is None else answer_text(answer.arguments)
        self._held = ""
        yield from self.add_answer(text)
        yield from self._close_round()

    def add_answer(self, text: str | None) -> Iterator[Part]:
        """Yield what is missing of the text of the last round."""
        if self._reply_is_complete and self._is_open and self._calls:  # tools have ended the call
            return
        if text and text != self._text and text.startswith(self._text):
            missing = text[len(self._text) :]
            yield from self._open_round()
            yield from self._write("text", missing)

    def _end_run(self, status: str, error: str | None) -> Iterator[Part]:
        yield from self._end_services("The answer has ended.")
        if status != "completed":
            yield from self._interrupt_calls()
        yield from self._close_round()
        if status == "cancelled":
            yield Stopped(None if error == STOPPED else error)
        elif status == "failed":
            code = (error or "").partition(":")[0]
            yield Broken(problem_text(problem_of_type(code)), code)
        else:
            final = self._final
            usage: TokenUsage | None = None if final is None else final.token_usage
            yield Completed(usage, None if final is None else final.finish_reason)


async def follow_run(
    runs: Runs,
    run_id: str,
    *,
    after: int = 0,
    passed: int = 0,
    answer: int = 0,
    holds_text: bool = False,
    services: Mapping[str, str] = NO_SERVICES,
) -> AsyncGenerator[Part, None]:
    """Yield the parts of a run whose events have a number above `after`, until it ends or waits.

    Suspensions up to the number `passed` were answered: they do not end the stream. Of the answers of the run, those
    before the one with the number `answer` are left out. `holds_text` and `services` are those of `RunReading`.
    """
    # Earlier events are read, too: the places of calls and the numbers of rounds follow from all of them.
    guessed = NO_SERVICES if await runs.tells_services(run_id) else services
    reading, answers = RunReading(run_id, holds_text=holds_text, services=guessed), 0
    run = await runs.get(run_id)
    if run.pending and not (await look_at(runs, run_id)).events:
        # It was started without a reader: as a call that nobody streamed.
        for part in reading.take(RunSuspended(run_id, run.pending)):
            yield part
        return
    async with aclosing(runs.all_events(run_id)) as events:
        async for each in events:
            parts = await _read_event(runs, reading, each)
            waits = any(isinstance(part, Waits) for part in parts)
            is_end = isinstance(each.event, RunEnded) or (waits and each.number > passed)
            for part in parts:
                if isinstance(part, AddedMessage) and part.client_id is not None:
                    answers += 1  # the client has the message
                    continue
                is_passed = isinstance(part, Waits) and not is_end
                if each.number > after and not is_passed and (answers >= answer or is_end):
                    yield part
            if is_end and each.number > after:
                return


async def read_parts(runs: Runs, run: Run[Any], events: Sequence[RunEvent]) -> list[Part]:
    """Return the parts of the events that a run has so far."""
    reading = RunReading(run.id)
    if run.pending and not events:
        return [*reading.take(RunSuspended(run.id, run.pending))]
    return [part for each in events for part in await _read_event(runs, reading, each)]


async def _read_event(runs: Runs, reading: RunReading, event: RunEvent) -> list[Part]:
    if reading.awaits(event.event):
        reading.history = (await runs.get(reading.run_id)).history
    parts: list[Part] = []
    if isinstance(event.event, RunEnded) and event.event.status == "completed" and not reading.has_answer:
        parts += reading.add_answer(await _read_result(runs, reading.run_id))
    return [*parts, *reading.take(event.event)]


async def _read_result(runs: Runs, run_id: str) -> str | None:
    """Return the answer of a run whose last events are gone: some stores keep only the outcome."""
    try:
        value = await runs.result(run_id)
    except ToolboxError:
        return None
    content = getattr(value, "content", value)
    return content if isinstance(content, str) else None


async def find_passed(runs: Runs, run_id: str) -> int:
    """Return the number of the last event whose suspension was answered: the last one, unless the run waits now."""
    look = await look_at(runs, run_id)
    return look.events - 1 if look.status == "suspended" else look.events


async def read_so_far(runs: Runs, run_id: str) -> list[RunEvent]:
    """Return the events that a run has now."""
    last = (await look_at(runs, run_id)).events
    found: list[RunEvent] = []
    if last:
        async with aclosing(runs.all_events(run_id)) as events:
            async for each in events:
                found.append(each)
                if each.number >= last:
                    break
    return found


async def read_with_unread(runs: Runs, run_id: str) -> tuple[list[RunEvent], list[ToldMessage]]:
    """Return the events that a run has now, and the messages of a client that none of these events has.

    No such messages of a run that waits: nobody knows if it will go on, so its newest answer is the one that waits.
    """
    added: list[ToldMessage] = []
    if (await look_at(runs, run_id)).status == "running":
        written = await (await runs.store()).messages(run_id)
        added = [each for each in map(told_from_json, written) if each.client_id is not None]
    events = await read_so_far(runs, run_id)
    return events, added[sum(begins_answer(each.event) for each in events) :]


async def look_at(runs: Runs, run_id: str) -> RunLook:
    """Return the status of a run, and how many events it has. Raises `RunNotFoundError`."""
    look = await (await runs.store()).look(run_id)
    if look is None:
        raise RunNotFoundError(run_id)
    return look
