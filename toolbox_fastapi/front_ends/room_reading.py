"""Reads a conversation into the messages that front ends show: those of its log, and those of runs that go on.

Not here: the parts of a run's events (`run_reading`), the form of messages on the wire (`vercel_ai`, `ag_ui`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from toolbox.chat import AiMessage, Message, ToolExecutionResultMessage, UserMessage
from toolbox.conversations.conversations_bean import Conversation, find_open_runs
from toolbox.conversations.log import LogEntry
from toolbox.errors import ConversationNotFoundError, RunIncompatibleError, RunNotFoundError
from toolbox.runs.run_answers import Run
from toolbox.runs.runs_bean import Runs
from toolbox.security import AccessDeniedError
from toolbox.services.outputs import ANSWER_TOOL, answer_text

from .run_reading import answer_id, read_parts, read_with_unread, wire_id
from .stream_parts import (
    AddedMessage,
    BlockEnd,
    BlockKind,
    BlockPiece,
    BlockStart,
    CallEnd,
    CallOutcome,
    CallPiece,
    CallReady,
    CallStart,
    Completed,
    Part,
    RoundEnd,
    RoundStart,
    Sources,
)

_ALL = 10**9  # entries


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """A message of the user, or an answer with all its rounds, which has `parts`.

    `id` is that of the client, or the one that clients got. `base` is the run or the turn of a question and its
    answers. `entry_id` is that of a user's message in the log; None while its run goes on.
    """

    id: str
    user: UserMessage | None = None
    entry_id: str | None = None
    base: str = ""
    parts: Sequence[Part] = ()


async def read_room(room: Conversation, *, running: bool = True) -> list[ShownMessage]:
    """Return the messages of a conversation, oldest first. Raises `ConversationNotFoundError` for another's.

    Without `running`, the answers of runs that go on are left out; those of runs that wait are not.
    """
    try:
        # The runs first: one that ends now has left its turn in the log by then.
        host_runs, found = await find_open_runs(room)
        runs = {each.id: each for each in found}
        entries = await room.history(_ALL)
    except AccessDeniedError:
        raise ConversationNotFoundError(room.service, room.memory_id) from None
    shown: list[ShownMessage] = []
    for _, turn in groupby(entries, lambda each: each.id.rpartition(".")[0]):
        said = [*turn]
        run = runs.pop(said[0].run_id or "", None)
        if run is not None and said[0].state == "waiting":  # beside others: it has left its question
            shown += await _messages_of_run(host_runs, run, said[0].id, running)
        else:
            shown += _messages_of_turn(said, await _find_rejected(host_runs, said))
    for run in reversed(runs.values()):
        shown += await _messages_of_run(host_runs, run, None, running)
    return shown


async def _messages_of_run(runs: Runs, run: Run[Any], entry_id: str | None, running: bool) -> list[ShownMessage]:
    """Return the messages of a run that has not ended: its question, and its answers so far.

    Nothing of a run that this program cannot read, or that was deleted just now.
    """
    try:
        question, client_id = await runs.question_of(run.id)
        events, unread = await read_with_unread(runs, run.id)
    except (RunIncompatibleError, RunNotFoundError):
        return []
    shown = [ShownMessage(client_id or entry_id or f"{run.id}#question", question, entry_id, run.id)]
    shown += _split(run.id, await read_parts(runs, run, events))
    if unread:
        return [*shown, *(ShownMessage(each.client_id or "", each.message) for each in unread)]
    if not (running or run.status == "suspended") and shown[-1].user is None:
        shown.pop()
    return shown


def _split(base: str, parts: Iterable[Part]) -> Iterator[ShownMessage]:
    """Yield the answers in parts, and between them the messages that a client has added."""
    number, answer = 0, list[Part]()
    for part in parts:
        if not (isinstance(part, AddedMessage) and part.client_id is not None):
            answer.append(part)
            continue
        if answer:
            yield ShownMessage(answer_id(base, number), base=base, parts=answer)
        yield ShownMessage(part.client_id, part.message, part.entry_id)
        number, answer = number + 1, []
    if answer:
        yield ShownMessage(answer_id(base, number), base=base, parts=answer)


# --- the log


async def _find_rejected(runs: Runs, entries: Sequence[LogEntry]) -> Collection[str]:
    """Return the places of the calls of a turn that a person has rejected: only its run knows, while it is kept."""
    run_id = entries[0].run_id
    if run_id is None or not any(_is_error(each.message) for each in entries):
        return ()
    try:
        history = (await runs.get(run_id)).history
    except RunNotFoundError:
        return ()
    answers = {each.call_id: each.answer for each in history if each.call_id is not None}
    return {place for place, answer in answers.items() if answer == "reject"}


def _is_error(message: Message) -> bool:
    return isinstance(message, ToolExecutionResultMessage) and message.is_error


def _messages_of_turn(entries: Sequence[LogEntry], rejected: Collection[str]) -> Iterator[ShownMessage]:
    first, base = entries[0], entries[0].run_id or entries[0].id.rpartition(".")[0]
    if isinstance(first.message, UserMessage):
        yield ShownMessage(first.client_id or first.id, first.message, first.id, base)
        entries = entries[1:]
    yield from _split(base, _TurnReading(base, rejected).read(entries))


@dataclass(slots=True)
class _TurnReading:
    """Turns the entries of a turn behind its question into parts, as the events of its run were."""

    base: str
    rejected: Collection[str]
    rounds: int = 0
    is_open: bool = False
    blocks: int = 0
    calls: int = 0
    open: list[tuple[str, str]] = field(default_factory=list)  # the model's own ids, and those of the wire

    def read(self, entries: Sequence[LogEntry]) -> Iterator[Part]:
        """Yield the parts of all entries."""
        last = entries[-1] if entries else None
        if last is not None and last.sources:
            yield Sources(last.sources)
        for entry in entries:
            match entry.message:
                case UserMessage():
                    yield from self._end_round()
                    # In a turn that is not a run, only a program can have stored several messages of the user.
                    client_id = entry.client_id or (None if entry.run_id else entry.id)
                    yield AddedMessage(entry.message, None, client_id, entry.id)
                case AiMessage():
                    yield from self._end_round()
                    yield from self._read_reply(entry.message)
                case ToolExecutionResultMessage():
                    yield from self._read_result(entry.message)
        yield from self._end_round()
        if last is not None and last.usage is not None:
            yield Completed(last.usage, None)

    def _end_round(self) -> Iterator[Part]:
        if self.is_open:
            self.is_open = False
            yield RoundEnd(self.rounds - 1)

    def _read_reply(self, reply: AiMessage) -> Iterator[Part]:
        yield RoundStart(self.rounds)
        self.rounds, self.is_open = self.rounds + 1, True
        answers = [each for each in reply.tool_execution_requests if each.name == ANSWER_TOOL]
        yield from self._read_block("thought", reply.reasoning)
        yield from self._read_block("text", answer_text(answers[0].arguments) if answers else reply.text)
        self.open = []
        for each in reply.tool_execution_requests:
            if each.name == ANSWER_TOOL:
                continue
            call_id = wire_id(self.base, str(self.calls))
            self.calls += 1
            self.open.append((each.id, call_id))
            yield CallStart(call_id, each.name)
            yield CallPiece(call_id, each.arguments)
            yield CallReady(call_id, each.name, each.arguments)

    def _read_block(self, kind: BlockKind, text: str | None) -> Iterator[Part]:
        if text:
            yield BlockStart(kind, self.blocks)
            yield BlockPiece(kind, self.blocks, text)
            yield BlockEnd(kind, self.blocks)
            self.blocks += 1

    def _read_result(self, result: ToolExecutionResultMessage) -> Iterator[Part]:
        found = next((each for each in self.open if each[0] == result.id), None)
        if found is not None:  # else of the answer tool, or of a call that the store has left out
            self.open.remove(found)
            outcome: CallOutcome = "error" if result.is_error else "result"
            if result.is_error and found[1].rpartition(":")[2] in self.rejected:
                outcome = "denied"
            yield CallEnd(found[1], outcome, result.text)
