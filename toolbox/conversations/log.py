"""The log of a conversation as data: its head, its turns, their entries; and pure functions that change them.

Turns are numbered from 1 in each conversation. A number is never used again, so that a `Position` stays valid whatever
is appended, replaced or hidden. Not here: what is sent of a log (`views`), keeping it (`stores`), its JSON
(`log_forms`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from datetime import datetime
from itertools import count
from typing import Annotated, Any, Literal, TypeAlias
from uuid import uuid4

from ..chat import AiMessage, Message, PendingCall, TokenUsage, UserMessage
from ..passages import Passage, source_from_dict
from ..safe_text import is_text
from .keys import ChatMemoryKey, Owner
from .message_fields import AsTranscript

TurnState: TypeAlias = Literal["answered", "failed", "stopped", "waiting"]

NO_USAGE = TokenUsage(0, 0)

NOTES: Mapping[TurnState, str] = {
    "failed": "[This turn failed before it had an answer. What its tools did before that remains done.]",
    "stopped": "[This turn was stopped before it had an answer. What its tools did before that remains done.]",
    "waiting": "[This turn waits for an approval or a result, and has no answer yet.]",
}
"""What a model reads at the end of a turn that did not end well."""


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The place of an entry: the number of its turn, and its index there."""

    turn: int
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call in a log: the user's message, the rounds, the answer.

    - `id` is unique in the store; a turn whose id is there already is not appended again.
    - `number` is its place in the log, 0 before it is stored. `at` is the time at which it was stored.
    - `run_id`: the run that it belongs to. It replaces what this run had stored before.
    - `note` is what a model reads at its end, unless it was answered; by default that of `NOTES`.
    - `client_ids` are ids that a client gave to messages, by index. `sources` and `answered_by` belong to the answer.
    - `in_charge` is the method that answers the next call, such as `"Billing.chat"`; None if it did not change.
    - `beans` are the conversation-scoped beans that changed in it, as JSON, by name. A turn without messages has
      nothing but them and `in_charge`.
    - `start` is the index of its first message; above 0, messages before it are gone for good. From the index
      `hidden_from` on, a rewind has hidden it.
    """

    id: str = field(default_factory=lambda: uuid4().hex)
    messages: tuple[Message, ...] = ()
    state: TurnState = "answered"
    usage: TokenUsage = NO_USAGE
    run_id: str | None = None
    note: str | None = None
    client_ids: Mapping[int, str] = field(default_factory=dict)
    sources: tuple[Mapping[str, Any], ...] = ()
    answered_by: str | None = None
    in_charge: str | None = None
    beans: Mapping[str, Any] = field(default_factory=dict)
    at: datetime | None = None
    number: int = 0
    start: int = 0
    hidden_from: int | None = None

    @property
    def end(self) -> int:
        """The index behind its last message that is not hidden."""
        end = self.start + len(self.messages)
        return end if self.hidden_from is None else max(self.start, min(end, self.hidden_from))

    @property
    def shown(self) -> tuple[Message, ...]:
        """The messages that are not hidden."""
        return self.messages[: self.end - self.start]

    @property
    def is_whole(self) -> bool:
        """True if its end is not hidden."""
        return self.hidden_from is None or self.hidden_from >= self.start + len(self.messages)

    @property
    def counts(self) -> bool:
        """True unless a rewind has hidden it as a whole; a turn without messages has beans that count."""
        return bool(self.shown) or (not self.messages and self.hidden_from is None)

    @property
    def note_for_model(self) -> str | None:
        """The text that a model reads at its end; None if the turn was answered, or its end is hidden."""
        return (self.note or NOTES[self.state]) if self.state != "answered" and self.is_whole else None


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One message of a conversation's log.

    - `id`: a text, unique in the store. `at`: the time at which its turn was stored, with a time zone.
    - `state`: `"answered"`; `"failed"` or `"stopped"` if its call did not end well; `"waiting"` while it waits.
    - `usage`: the tokens of all requests of its call but summaries, at the last entry of the call; None at the others.
    - `run_id`: the run that it belongs to, or None. `client_id`: the id that a client gave to the message, or None.
    - `sources`: of an answer, the passages that retrievers found for it, without their texts.
    - `answered_by`: of an answer, the method that gave it, such as `"Billing.chat"`; None without hand-overs.

    As JSON, `message` has the form of `toolbox.transcripts`.
    """

    id: str
    at: datetime
    message: Annotated[Message, AsTranscript()]
    state: TurnState
    usage: TokenUsage | None = None
    run_id: str | None = None
    client_id: str | None = None
    sources: tuple[Passage, ...] = ()
    answered_by: str | None = None


@dataclass(frozen=True, slots=True)
class ViewNotes:
    """What a view has stored: where what is sent begins, and the summary of what lies before.

    - `begin`: the position of the first entry that is sent, or None; `made_by` is the view that has cut there.
    - `summary`: the text that stands for all entries before the position `summarized`.
    """

    begin: Position | None = None
    made_by: str | None = None
    summary: str | None = None
    summarized: Position | None = None


NO_NOTES = ViewNotes()


@dataclass(frozen=True, slots=True)
class RememberedApproval:
    """An approval that counts for further calls of a tool in its conversation: `approve(remember="conversation")`.

    `by` is the name of the person who gave it, or None. `at` is the time, in UTC.
    """

    tool_name: str
    by: str | None
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptApproval:
    """What a conversation keeps of a remembered approval.

    - `service`: the stored name of the service whose model called the tool. `owner`: in whose name.
    - `person`: who gave it, as JSON values.
    - `run_id`, `call_id`: the run of the approved call, and the model's own id of the call.
    - `place`: that of the approved call in the log; before its turn is stored, the place that the next turn has.
    """

    shown: RememberedApproval
    service: str
    owner: Owner
    person: Any = None
    run_id: str
    call_id: str
    place: Position = Position(0)

    def replaces(self, other: KeptApproval) -> bool:
        """Return True if the other one says nothing else, but for its time and its place."""
        return (self.service, self.owner, self.shown.tool_name, self.person) == (
            other.service,
            other.owner,
            other.shown.tool_name,
            other.person,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What is known of a conversation besides its turns.

    `key` has the name of the service under which it lies. `messages` is the number of entries that are not hidden.
    `usage` is that of all requests, each once, also for turns that were hidden or replaced. `updated_at` moves with
    each turn.
    """

    key: ChatMemoryKey
    id: str = field(default_factory=lambda: uuid4().hex)
    created_at: datetime
    updated_at: datetime
    owner: Owner | None = None
    title: str | None = None
    messages: int = 0
    usage: TokenUsage = NO_USAGE
    next_number: int = 1
    notes: ViewNotes = NO_NOTES
    beans: Mapping[str, Any] = field(default_factory=dict)
    in_charge: str | None = None
    approvals: tuple[KeptApproval, ...] = ()


@dataclass(frozen=True, slots=True)
class Log:
    """A part of a log: its head, and turns in their order, without those that are hidden as a whole.

    A whole log has turns without messages, too, which only stored beans.
    """

    head: Head
    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogWrite:
    """One write: a turn, and what belongs to it. All of it is stored, or nothing.

    `owner` is that of a conversation whose first turn this is, unless it has one. `notes` are those of the view, if
    they changed. `usage` is that of requests that belong to no turn, such as a summary. `leaves` says that it is the
    last one of who holds the conversation: a lease is released with it.
    """

    turn: Turn | None = None
    notes: ViewNotes | None = None
    owner: Owner | None = None
    usage: TokenUsage = NO_USAGE
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Replaced:
    """What a turn of a run replaces: how many shown messages, and their usage, which the new turn has counted too."""

    messages: int = 0
    usage: TokenUsage = NO_USAGE


def only_beans(turn: Turn) -> Turn:
    """Return a turn without its messages, for a conversation that keeps none."""
    return Turn(id=turn.id, run_id=turn.run_id, state=turn.state, beans=turn.beans)


def make_waiting_turn(run_id: str, suspensions: int, asked: UserMessage, pending: Sequence[PendingCall]) -> Turn:
    """Return the turn of a run that waits for these calls. Its id is the same when this suspension happens again."""
    turn_id = f"{run_id}:waiting:{suspensions}"
    return Turn(id=turn_id, run_id=run_id, state="waiting", messages=(asked,), note=_describe_pending(pending))


def _describe_pending(pending: Sequence[PendingCall]) -> str:
    """Return what a model reads at the end of a turn that waits for these calls."""
    approvals = dict.fromkeys(each.tool_name for each in pending if each.kind == "approval")
    results = dict.fromkeys(each.tool_name for each in pending if each.kind != "approval")
    waits = [f"the approval of a person for {', '.join(approvals)}"] if approvals else []
    waits += [f"the result of {', '.join(results)}"] if results else []
    return f"[This turn waits for {' and '.join(waits)}. It has no answer yet.]"


# --- entries


def entry_id(turn: Turn, index: int) -> str:
    """Return the id of an entry."""
    return f"{turn.id}.{index}"


def read_entry_id(given: str) -> tuple[str, int]:
    """Return the id of the turn and the index in it. Raises `ValueError` for a text that no entry has."""
    turn_id, _, index = given.rpartition(".")
    if not (turn_id and is_text(turn_id) and index.isascii() and index.isdigit() and len(index) < 10):
        raise ValueError(f"unknown entry {given!r}; use an entry of history(), or its id")
    return turn_id, int(index)


def entries_of(turns: Iterable[Turn]) -> Iterator[LogEntry]:
    """Yield the entries of turns that are not hidden, oldest first."""
    for turn in turns:
        assert turn.at is not None
        last = turn.end - 1 if turn.is_whole else None
        for index, message in enumerate(turn.shown, turn.start):
            usage = turn.usage if index == last and turn.usage != NO_USAGE else None
            client_id = turn.client_ids.get(index)
            sources = tuple(map(source_from_dict, turn.sources)) if index == last else ()
            answered_by = turn.answered_by if index == last else None
            about = turn.state, usage, turn.run_id, client_id, sources, answered_by
            yield LogEntry(entry_id(turn, index), turn.at, message, *about)


def newest_entries(turns: Iterable[Turn], limit: int) -> tuple[LogEntry, ...]:
    """Return the last `limit` entries, oldest first."""
    return tuple(entries_of(turns))[-limit:] if limit > 0 else ()


def choose_newest(sizes: Iterable[tuple[int, int]], messages: int) -> int | None:
    """Return the number of the first turn to read for so many messages; None if there is no turn.

    `sizes` are the numbers of turns and how many messages of each are shown, newest first.
    """
    first = None
    for number, size in sizes:
        if messages <= 0:
            break
        first, messages = number, messages - size
    return first


def backwards(last: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last number of ranges of turns, newest first, each four times as long as the one before.

    For what is most often found near the end: a short log, and a long one, cost a few reads of known size.
    """
    while last > 0:
        first = max(1, last - length + 1)
        yield first, last
        last, length = first - 1, length * 4


def before_entry(turns: Sequence[Turn], place: Position) -> tuple[Turn, ...]:
    """Return the turns without an entry and all that follows it."""
    return tuple(
        _hide(each, place.index) if each.number == place.turn else each for each in turns if each.number <= place.turn
    )


def _hide(turn: Turn, index: int) -> Turn:
    return replace(turn, hidden_from=min(turn.end, index))


# --- changing


def begin_head(key: ChatMemoryKey, now: datetime, owner: Owner | None = None, title: str | None = None) -> Head:
    """Return the head of a new conversation."""
    return Head(key=ChatMemoryKey(key.service, key.memory_id), created_at=now, updated_at=now, owner=owner, title=title)


def head_after(head: Head, write: LogWrite, now: datetime, replaced: Replaced = Replaced()) -> Head:
    """Return the head after a write.

    A turn without messages, which only stores beans, does not move `updated_at`.
    """
    turn = write.turn or Turn(id="")
    usage = head.usage + _beyond(turn.usage, replaced.usage) + write.usage
    return replace(
        claimed(head, write.owner),
        updated_at=max(now, head.updated_at) if turn.messages else head.updated_at,
        messages=head.messages - replaced.messages + len(turn.messages),
        usage=usage,
        next_number=head.next_number + (write.turn is not None),
        notes=head.notes if write.notes is None else write.notes,
        beans={**head.beans, **turn.beans},
        in_charge=head.in_charge if turn.in_charge is None else turn.in_charge,
        approvals=tuple(_placed(each, turn, head.next_number) for each in head.approvals),
    )


def emptied(head: Head) -> Head:
    """Return the head of a conversation that begins again: without what belongs to its turns."""
    return replace(head, messages=0, notes=NO_NOTES, approvals=())


def claimed(head: Head, owner: Owner | None) -> Head:
    """Return the head after the first call, by this person: an owner that the program has set stays."""
    is_first = head.messages == 0 and head.owner is None  # turns without messages are of the program
    return replace(head, owner=owner) if is_first and owner is not None else head


def _beyond(usage: TokenUsage, counted: TokenUsage) -> TokenUsage:
    """Return what is used besides what is counted already."""
    numbers = zip(astuple(usage), astuple(counted), strict=True)
    return TokenUsage(*(max(now - before, 0) for now, before in numbers))


def with_beans_of(turn: Turn, replaced: Mapping[str, Any], head: Head) -> Turn:
    """Return a turn with the beans of the turn that it replaces, as they are now: a rewind reads them from the turns.

    The head is not changed for that: others may have changed the beans since then.
    """
    names = [each for each in replaced if each in head.beans and each not in turn.beans]
    return replace(turn, beans={**{each: head.beans[each] for each in names}, **turn.beans}) if names else turn


def place_of_entry(turn: Turn | None, given: str) -> Position:
    """Return the position of an entry. Raises `ValueError` if `given` is not the id of a shown one in `turn`."""
    _, index = read_entry_id(given)
    if turn is None or not turn.start <= index < turn.end:
        raise ValueError(f"unknown entry {given!r}; use an entry of history(), or its id")
    return Position(turn.number, index)


def place_of_user_message(turn: Turn | None, given: str) -> Position:
    """Return the position of a user message. Raises `ValueError` if `given` is not the id of a shown one in `turn`."""
    place = place_of_entry(turn, given)
    assert turn is not None
    if not isinstance(turn.messages[place.index - turn.start], UserMessage):
        raise ValueError(f"entry {given!r} is not a user message; rewind to one")
    return place


def head_before(head: Head, place: Position, hidden: int, before: Sequence[Turn]) -> Head:
    """Return the head after a rewind to before the entry at `place`, which hides so many messages.

    `before` are the turns before that one, of which only beans and who is in charge are read: all of them, or as many
    of the last ones as `knows_state` wants.
    """
    notes = head.notes
    if notes.begin is not None and notes.begin >= place:
        notes = replace(notes, begin=None, made_by=None)
    if notes.summarized is not None and notes.summarized > place:
        notes = replace(notes, summary=None, summarized=None)
    beans, in_charge = state_after(before)
    return replace(
        head,
        messages=head.messages - hidden,
        notes=notes,
        beans=beans,
        in_charge=in_charge,
        approvals=tuple(each for each in head.approvals if each.place < place),
    )


def state_after(turns: Iterable[Turn]) -> tuple[dict[str, Any], str | None]:
    """Return the beans after these turns, and who is in charge."""
    beans: dict[str, Any] = {}
    in_charge = None
    for each in turns:
        beans.update(each.beans)
        in_charge = in_charge if each.in_charge is None else each.in_charge
    return beans, in_charge


def knows_state(head: Head, turns: Iterable[Turn]) -> bool:
    """Return True if turns before a rewind say all about its beans and who is in charge: no earlier ones are needed."""
    beans, in_charge = state_after(turns)
    return head.beans.keys() <= beans.keys() and (head.in_charge is None or in_charge is not None)


def with_approval(head: Head, given: KeptApproval) -> Head:
    """Return the head of a conversation that remembers one more approval, whose turn is not stored yet."""
    others = (each for each in head.approvals if not given.replaces(each))
    return replace(head, approvals=(*others, replace(given, place=Position(head.next_number))))


def without_approvals(head: Head, tool_name: str | None) -> Head:
    """Return the head without the approvals of a tool; without a name, without any."""
    return replace(
        head, approvals=tuple(each for each in head.approvals if tool_name not in (None, each.shown.tool_name))
    )


def _placed(kept: KeptApproval, turn: Turn, number: int) -> KeptApproval:
    """Return an approval with the place of its call, if the turn is that of its run.

    A call of a service within the run is not in the turn. Then any rewind into the turn forgets the approval.
    """
    if turn.run_id != kept.run_id:
        return kept
    found = [
        index
        for index, each in enumerate(turn.messages, turn.start)
        if isinstance(each, AiMessage)
        and any(
            request.id == kept.call_id and request.name == kept.shown.tool_name
            for request in each.tool_execution_requests
        )
    ]
    return replace(kept, place=Position(number, found[-1] if found else turn.start + len(turn.messages)))


def fork_log(log: Log, key: ChatMemoryKey, upto: str | None, now: datetime) -> Log:
    """Return a copy of a whole log under another key: all of it, or until the end of what answers the entry `upto`.

    It keeps the owner and the title, and goes on from the beans and the notes of that time. What waits for a person
    stays in the original alone, but for the beans that it has stored. Raises `ValueError` for an unknown entry.
    """
    kept = log.turns if upto is None else _upto(log.turns, upto)
    turns = tuple(_copy_shown(each) for each in kept if each.state != "waiting" or each.beans)
    beans, in_charge = state_after(turns)
    last = Position(turns[-1].number, turns[-1].end) if turns else Position(0)
    notes = log.head.notes
    if notes.begin is not None and notes.begin > last:
        notes = replace(notes, begin=None, made_by=None)
    if notes.summarized is not None and notes.summarized > last:
        notes = replace(notes, summary=None, summarized=None)
    head = replace(
        begin_head(key, now, log.head.owner, log.head.title),
        messages=sum(len(each.messages) for each in turns),
        next_number=last.turn + 1,
        notes=notes,
        beans=beans,
        in_charge=in_charge,
    )
    return Log(head, turns)


def _copy_shown(turn: Turn) -> Turn:
    """Return a new turn with what is shown of one; of one that waits, only the beans.

    What a rewind has cut has no end any more, so also no state.
    """
    if turn.state == "waiting":
        return Turn(beans=turn.beans, number=turn.number, at=turn.at)
    state = turn.state if turn.is_whole else "answered"
    return replace(turn, id=uuid4().hex, messages=turn.shown, state=state, hidden_from=None)


def _upto(turns: Sequence[Turn], given: str) -> Iterator[Turn]:
    turn_id, index = read_entry_id(given)
    found = next((each for each in turns if each.id == turn_id and each.start <= index < each.end), None)
    if found is None:
        raise ValueError(f"unknown entry {given!r}; use an entry of history(), or its id")
    yield from (each for each in turns if each.number < found.number)
    following = (at for at in range(index + 1, found.end) if isinstance(found.messages[at - found.start], UserMessage))
    yield replace(found, hidden_from=next(following, found.hidden_from))


def number_turns(turns: Iterable[Turn], now: datetime) -> tuple[Turn, ...]:
    """Return turns with numbers from 1, and with a time."""
    return tuple(replace(each, number=number, at=each.at or now) for number, each in zip(count(1), turns, strict=False))
