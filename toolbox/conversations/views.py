"""Views: which part of a conversation's log is sent. Views read a log and change nothing; they ask no model.

What is sent is cut before a user message only. A cut stays where it is until the window is exceeded again, so that most
requests begin like the one before. Not here: the log itself (`log`), loading it and storing cuts (`memories`), the
request that makes a summary (`services`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, assert_never

from ..chat import (
    AiMessage,
    Message,
    SystemMessage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
)
from ..contents import AudioContent, Content, ImageContent, PdfContent, TextContent, bytes_of
from ..execution.markers import is_async
from ..introspection import takes
from .log import NO_NOTES, Head, Log, Position, Turn, ViewNotes

NEWEST = 1000
"""The number of messages that an object with `newest(messages)` gets."""

FEW = 200
"""A log with so many messages is read at once. Longer ones are read backwards, until a window is full."""

# --- what is sent


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The part of a conversation that a call sends, and the notes to store with its turn.

    `turns` are those that were loaded, as they are in the log, and `head` is that of the conversation, or None for an
    unknown one. `unsummarized` is what a summary would replace, if one is due; until then, `messages` are what the
    window alone leaves.
    """

    messages: tuple[Message, ...] = ()
    notes: ViewNotes = NO_NOTES
    turns: tuple[Turn, ...] = ()
    unsummarized: Unsummarized | None = None
    head: Head | None = None


@dataclass(frozen=True, slots=True)
class Unsummarized:
    """The messages for the next summary, which builds on the `previous` one; `rest` is what stays as it is.

    `reaches` is the first position that is not summarized.
    """

    previous: str | None
    messages: tuple[Message, ...]
    rest: tuple[Piece, ...]
    reaches: Position


@dataclass(frozen=True, slots=True)
class Piece:
    """A user message with all that follows it until the next one, as a model sees it.

    `begins` is its place in the log. The first piece of a log may have no user message. `counted` are its messages in
    the log; `messages` may end with a note as well.
    """

    begins: Position
    counted: tuple[Message, ...]
    messages: tuple[Message, ...]

    @property
    def has_user_message(self) -> bool:
        """True if it begins with a user message."""
        return isinstance(self.counted[0], UserMessage)

    @property
    def ends(self) -> Position:
        """The position behind it."""
        return replace(self.begins, index=self.begins.index + len(self.counted))


def pieces_of(turns: Sequence[Turn]) -> tuple[Piece, ...]:
    """Return the pieces of turns. A first one whose beginning is gone from the log is left out."""
    found = tuple(piece for turn in turns for piece in _split(turn))
    is_cut = bool(turns) and turns[0].start > 0
    return found[1:] if found and is_cut and not found[0].has_user_message else found


def _split(turn: Turn) -> Iterator[Piece]:
    shown, note = turn.shown, turn.note_for_model
    begins = [at for at, each in enumerate(shown) if isinstance(each, UserMessage)]
    bounds = begins if begins[:1] == [0] else [0, *begins]
    for first, end in zip(bounds, [*bounds[1:], len(shown)], strict=True):
        counted = shown[first:end]
        if counted:
            is_last = end == len(shown) and note is not None
            messages = (*repaired(counted), AiMessage(note)) if is_last else counted
            yield Piece(Position(turn.number, turn.start + first), counted, messages)


def since(turns: Sequence[Turn], begin: Position | None) -> Sequence[Turn]:
    """Return the turns without what stands before a position."""
    if begin is None:
        return turns
    return [_from_index(each, begin) for each in turns if each.number >= begin.turn]


def _from_index(turn: Turn, begin: Position) -> Turn:
    if turn.number != begin.turn or begin.index <= turn.start:
        return turn
    index = min(begin.index, turn.start + len(turn.messages))
    return replace(turn, messages=turn.messages[index - turn.start :], start=index)


def sent(pieces: Iterable[Piece], summary: str | None = None) -> tuple[Message, ...]:
    """Return what a model gets: user and assistant alternate, and each tool call has one result."""
    messages = [message for each in pieces for message in each.messages]
    if summary is not None:
        messages.insert(0, UserMessage(SUMMARY.format(summary=summary)))
    return alternating(repaired(messages))


def alternating(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return messages in which neither two of the user follow each other, nor two of the assistant: they are joined."""
    joined: list[Message] = []
    for each in messages:
        last = joined[-1] if joined else None
        if isinstance(each, UserMessage) and isinstance(last, UserMessage):
            joined[-1] = UserMessage(
                (*last.contents, *each.contents), each.name, {**last.attributes, **each.attributes}
            )
        elif isinstance(each, AiMessage) and isinstance(last, AiMessage) and not last.has_tool_execution_requests:
            # What a server needs to continue its own reply, in its attributes, fits no joined text.
            text = "\n\n".join(part for part in (last.text, each.text) if part)
            kept = each if each.has_tool_execution_requests else AiMessage(None, name=last.name)
            joined[-1] = AiMessage(text, kept.tool_execution_requests, kept.reasoning, kept.attributes, kept.name)
        else:
            joined.append(each)
    return tuple(map(with_note_if_empty, joined))


def with_note_if_empty(message: Message) -> Message:
    """Return the message, or a note in place of an answer that says nothing."""
    return AiMessage(EMPTY) if _is_empty(message) else message


EMPTY = "[This answer was empty.]"
"""What a model reads in place of an empty answer: servers refuse it, and left out, the user would speak twice."""

_UNSPOKEN = frozenset({"text", "message", "thinking", "redacted_thinking", "reasoning"})


def _is_empty(message: Message) -> bool:
    """Return True for a reply that says nothing, and with which its server keeps nothing but thoughts."""
    if not isinstance(message, AiMessage) or message.tool_execution_requests or (message.text or "").strip():
        return False
    kept = [block for each in message.attributes.values() if isinstance(each, Sequence) for block in each]
    return not any(isinstance(each, Mapping) and each.get("type") not in _UNSPOKEN for each in kept)


# --- the views


class View(ABC):
    """Chooses what is sent of a log; see `ViewNotes` for what it may store."""

    __slots__ = ()

    def first_turn(self, head: Head) -> int:
        """Return the number of the first turn to read: all from there on are read."""
        begin = self.begin(head.notes)
        return 0 if begin is None else begin.turn

    def begin(self, notes: ViewNotes) -> Position | None:
        """Return where it has cut the log. What another view has cut does not count."""
        return notes.begin if notes.made_by == type(self).__name__ else None

    @abstractmethod
    def excerpt(self, log: Log) -> Excerpt:
        """Return what is sent of a log, of which all turns from `first_turn` on are there."""

    @abstractmethod
    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with its options, each with a fix."""

    @abstractmethod
    def describe(self) -> str:
        """Return what it keeps, for a reader."""

    def cut(self, notes: ViewNotes, at: Position) -> ViewNotes:
        """Return the notes with which what it sends begins at a position."""
        return replace(notes, begin=at, made_by=type(self).__name__)

    def halved(self, excerpt: Excerpt) -> Excerpt | None:
        """Return what is sent of the newer half of the turns, because the model's context is full; None without any."""
        pieces = self._sent_pieces(excerpt)
        if not pieces:
            return None
        rest = pieces[_first_of_newer_half(pieces) :]
        notes = self.cut(excerpt.notes, _begin_of(rest, pieces))
        return replace(excerpt, messages=sent(rest, notes.summary), notes=notes, unsummarized=None)

    def _sent_pieces(self, excerpt: Excerpt) -> Sequence[Piece]:
        return pieces_of(since(excerpt.turns, self.begin(excerpt.notes)))


class Window(View):
    """A view of the newest messages. `limit` is the largest size, `size` that of some messages."""

    __slots__ = ()

    @property
    @abstractmethod
    def limit(self) -> int:
        """Return the largest size, which must be 1 or more at startup."""

    @abstractmethod
    def size(self, messages: Sequence[Message]) -> int:
        """Return the size of messages."""

    def first_turn(self, head: Head) -> int:
        """Return the number of the first turn to read; none of a long log that is not cut, for `has_enough`."""
        return head.next_number if self.begin(head.notes) is None and head.messages > FEW else super().first_turn(head)

    def has_enough(self, log: Log) -> bool:
        """Return True if no earlier turns are needed: all are there, or they exceed the window."""
        shown = [message for each in log.turns for message in each.shown]
        is_cut = self.begin(log.head.notes) is not None
        return is_cut or len(shown) >= log.head.messages or self.size(shown) > self.limit

    def excerpt(self, log: Log) -> Excerpt:
        notes = log.head.notes
        pieces = pieces_of(since(log.turns, self.begin(notes)))
        first = self.first_kept(pieces)
        if first > 0:
            notes = self.cut(notes, pieces[first].begins)
        return Excerpt(sent(pieces[first:]), notes, log.turns, head=log.head)

    def first_kept(self, pieces: Sequence[Piece]) -> int:
        """Return the index of the first piece to keep: 0 if all fit, else so that at most two thirds remain.

        The newest piece stays, even if it is larger than the window.
        """
        sizes = [self.size(each.counted) for each in pieces]
        if sum(sizes) <= self.limit:
            return 0
        kept = 0
        for index in range(len(pieces) - 1, -1, -1):
            kept += sizes[index]
            if 3 * kept > 2 * self.limit:
                return min(index + 1, len(pieces) - 1)
        return 0

    def newest(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return the messages to keep, oldest first."""
        pieces = pieces_of([Turn(messages=tuple(messages))])
        return tuple(message for each in pieces[self.first_kept(pieces) :] for message in each.counted)

    def problems(self) -> Iterator[tuple[str, str]]:
        if not isinstance(self.limit, int) or isinstance(self.limit, bool) or self.limit < 1:
            yield f"invalid {type(self).__name__}.limit={self.limit!r}", "use 1 or more"


@dataclass(frozen=True, slots=True)
class MessageWindow(Window):
    """Sends the last `max_messages` messages: `@register_ai_service(chat_memory=MessageWindow(50))`.

    Once there are more, what is sent begins with a later user message, so that at most two thirds remain.
    """

    max_messages: int = 20

    @property
    def limit(self) -> int:
        """Return `max_messages`."""
        return self.max_messages

    def size(self, messages: Sequence[Message]) -> int:
        """Return the number of messages."""
        return len(messages)

    def describe(self) -> str:
        """Return what it keeps, for a reader."""
        return f"the last {self.max_messages} messages"


def estimate_tokens(message: Message) -> int:
    """Estimate the tokens of a message without a tokenizer.

    1 per 4 bytes of text, 85 per image, 1500 per page of a PDF document, 1 per 1600 bytes of audio, plus 4.
    """
    match message:
        case SystemMessage(text):
            texts = [text]
        case UserMessage(contents):
            return _estimate_tokens(message.text) + sum(map(_beside_text, contents)) + 4
        case AiMessage(text, requests):
            texts = [text or "", *(f"{each.name}{each.arguments}" for each in requests)]
        case ToolExecutionResultMessage():
            besides = sum(map(_beside_text, message.contents)) if message.contents else 0
            return _estimate_tokens(message.tool_name) + _estimate_tokens(message.text) + besides + 4
    return sum(map(_estimate_tokens, texts)) + 4


_PAGE = re.compile(rb"/Type\s*/Page\b")


def _beside_text(content: Content) -> int:
    match content:
        case TextContent():
            return 0
        case ImageContent():
            return 85
        case PdfContent():
            return 1500 * max(1, len(_PAGE.findall(bytes_of(content) or b"")))
        case AudioContent():
            return len(bytes_of(content) or b"") // 1600
        case _:
            assert_never(content)


def _estimate_tokens(text: str) -> int:
    return -(-len(text.encode(errors="surrogatepass")) // 4)


@dataclass(frozen=True, slots=True)
class TokenWindow(Window):
    """Sends the last messages that fit into `max_tokens`: `@register_ai_service(chat_memory=TokenWindow(8000))`.

    Once there are more, what is sent begins with a later user message, so that at most two thirds remain. `count`
    returns the tokens of one message; the default is an estimate from its length in bytes.
    """

    max_tokens: int
    count: Callable[[Message], int] = estimate_tokens

    @property
    def limit(self) -> int:
        """Return `max_tokens`."""
        return self.max_tokens

    def size(self, messages: Sequence[Message]) -> int:
        """Return the tokens of messages."""
        return sum(map(self.count, messages))

    def describe(self) -> str:
        """Return what it keeps, for a reader."""
        return f"the last messages with {self.max_tokens} tokens"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with its options, each with a fix."""
        yield from Window.problems(self)
        if is_async(self.count) or not takes(self.count, 1):
            yield (
                f"invalid TokenWindow.count={self.count!r}",
                "use a `def` function that takes a message and returns its tokens",
            )


@dataclass(frozen=True, slots=True)
class FullHistory(View):
    """Sends all messages: `@register_ai_service(chat_memory=FullHistory())`."""

    def excerpt(self, log: Log) -> Excerpt:
        """Return all messages, but for those that were left out because the model's context was full."""
        notes = log.head.notes
        return Excerpt(sent(pieces_of(since(log.turns, self.begin(notes)))), notes, log.turns, head=log.head)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield nothing: it has no options."""
        yield from ()

    def describe(self) -> str:
        """Return what it keeps, for a reader."""
        return "all messages"


SUMMARY = "Summary of the conversation so far:\n{summary}"
"""What a model reads in place of the messages that were summarized."""

SUMMARY_PROMPT = (
    "Summarize the conversation above, for an assistant that continues it without seeing it. Keep names, numbers, "
    "dates, decisions, open questions, and what tools have done. Answer with the summary alone."
)
"""The default `prompt` of `Summary`."""


@dataclass(frozen=True, slots=True)
class Summary(View):
    """Sends a summary of older messages and the newest ones: `Summary(TokenWindow(8_000), keep_messages=10)`.

    When the `window`, a `MessageWindow` or a `TokenWindow`, would leave messages out, a request to `model` (by default
    the service's own) summarizes all but the newest turns with at least `keep_messages` messages. The next summary
    builds on it. `prompt` replaces the instructions for the summary.
    """

    window: MessageWindow | TokenWindow
    keep_messages: int = 10
    model: str | None = None
    prompt: str | None = None

    def begin(self, notes: ViewNotes) -> Position | None:
        """Return where the summary ends, or a later cut: where no summary could be made of a full context."""
        summarized, cut = notes.summarized, notes.begin
        if summarized is None or cut is None or notes.made_by != type(self).__name__:
            return cut if summarized is None else summarized
        return max(summarized, cut)

    def excerpt(self, log: Log) -> Excerpt:
        """Return the summary and what follows it; with `unsummarized` if the window would leave something out.

        Of the newest turns with `keep_messages` messages nothing is left out, even if they exceed the window.
        """
        notes = log.head.notes
        pieces = pieces_of(since(log.turns, self.begin(notes)))
        left = self.window.first_kept(pieces)
        if left == 0 or (first := self._first_kept(pieces)) == 0:
            return Excerpt(sent(pieces, notes.summary), notes, log.turns, head=log.head)
        due = _unsummarized(pieces, first, notes)
        return Excerpt(sent(pieces[left:], notes.summary), notes, log.turns, due, log.head)

    def shortened(self, excerpt: Excerpt) -> Excerpt | None:
        """Return what is sent with `unsummarized`, because the model's context is full; None if there is nothing.

        All but the newest turns with `keep_messages` messages; where there are no others, the older half.
        """
        pieces = pieces_of(since(excerpt.turns, self.begin(excerpt.notes)))
        if not pieces:
            return None
        first = self._first_kept(pieces) or _first_of_newer_half(pieces)
        return replace(excerpt, unsummarized=_unsummarized(pieces, first, excerpt.notes))

    def _sent_pieces(self, excerpt: Excerpt) -> Sequence[Piece]:
        pieces = View._sent_pieces(self, excerpt)
        return pieces if excerpt.unsummarized is None else pieces[self.window.first_kept(pieces) :]

    def _first_kept(self, pieces: Sequence[Piece]) -> int:
        """Return the index of the first of the newest pieces with at least `keep_messages` messages."""
        kept = 0
        for index in range(len(pieces) - 1, -1, -1):
            kept += len(pieces[index].counted)
            if kept >= self.keep_messages:
                return index
        return 0

    def request(self, due: Unsummarized) -> tuple[Message, ...]:
        """Return the messages of the request for a summary: the last summary, what followed it, and the prompt.

        Tool calls and their results are texts in it: servers refuse them in a request that offers no tools, and another
        model knows nothing of what a server has attached to its own replies.
        """
        previous = () if due.previous is None else (UserMessage(SUMMARY.format(summary=due.previous)),)
        texts = map(_as_text, due.messages)
        return alternating((*previous, *texts, UserMessage(self.prompt or SUMMARY_PROMPT)))

    def with_summary(self, excerpt: Excerpt, text: str) -> Excerpt:
        """Return what is sent with a new summary, and the notes to store at once."""
        due = excerpt.unsummarized
        assert due is not None
        notes = replace(excerpt.notes, begin=None, made_by=None, summary=text, summarized=due.reaches)
        return replace(excerpt, messages=sent(due.rest, text), notes=notes, unsummarized=None)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with its options, each with a fix."""
        inner, keep = self.window, self.keep_messages
        for name in ("model", "prompt"):
            given = getattr(self, name)
            if not (given is None or (isinstance(given, str) and given)):
                yield f"invalid Summary({name}={given!r})", "use a text, or None"
        if not isinstance(inner, (MessageWindow, TokenWindow)):
            yield f"invalid Summary(window={inner!r})", "use MessageWindow(…) or TokenWindow(…)"
            return
        yield from inner.problems()
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            yield f"invalid Summary(keep_messages={keep!r})", "use 1 or more"
        elif isinstance(inner, MessageWindow) and isinstance(inner.limit, int) and keep >= inner.limit:
            what = f"Summary(keep_messages={keep}) is not smaller than MessageWindow({inner.limit})"
            yield what, "use a smaller keep_messages, or a larger window"

    def describe(self) -> str:
        """Return what it keeps, for a reader."""
        return f"a summary, and {self.window.describe()}"


def _unsummarized(pieces: Sequence[Piece], first: int, notes: ViewNotes) -> Unsummarized:
    """Return that all pieces before the one with the index `first` are to be summarized."""
    rest = tuple(pieces[first:])
    return Unsummarized(notes.summary, sent(pieces[:first]), rest, _begin_of(rest, pieces))


def _as_text(message: Message) -> Message:
    """Return a message in which calls of tools and their results are texts; without what is of one server alone."""
    if isinstance(message, ToolExecutionResultMessage):
        said = "failed" if message.is_error else "returned"
        return UserMessage(f"[The tool {message.tool_name} {said}: {message.text}]")
    if isinstance(message, AiMessage):
        calls = [f"[Called the tool {each.name} with {each.arguments}]" for each in message.tool_execution_requests]
        return AiMessage("\n".join(filter(None, (message.text, *calls))))
    return message


class ChoosesMessages(Protocol):
    """A view of your own: `newest(messages)` returns those to send, of the newest 1,000 messages."""

    def newest(self, messages: Sequence[Message], /) -> Sequence[Message]:
        """Return the messages to send, oldest first."""
        ...


@dataclass(frozen=True, slots=True)
class OwnView:
    """A program's own object with `newest(messages)`, as a view.

    The object chooses each time, of what a full context has left.
    """

    chooses: ChoosesMessages

    def begin(self, notes: ViewNotes) -> Position | None:
        """Return where a full context has cut the log for this object."""
        return notes.begin if notes.made_by == self.describe() else None

    def excerpt(self, log: Log) -> Excerpt:
        """Return what the object chooses. `log` has the turns with the newest 1,000 messages."""
        pieces = pieces_of(since(log.turns, self.begin(log.head.notes)))
        total = sum(len(each.counted) for each in pieces)
        messages = self._choose(pieces, is_all=total >= log.head.messages)
        return Excerpt(messages, log.head.notes, log.turns, head=log.head)

    def _choose(self, pieces: Sequence[Piece], *, is_all: bool) -> tuple[Message, ...]:
        available = sent(pieces)
        given = available[-NEWEST:]  # one turn may hold more: what `add` or an earlier release has stored
        chosen = tuple(self.chooses.newest(given))
        if chosen != available or not is_all:
            chosen = from_user_message(chosen)
        return alternating(repaired(chosen))

    def halved(self, excerpt: Excerpt) -> Excerpt | None:
        """Return what the object chooses of the newer half of the turns that it chose before; None if that is all."""
        pieces = pieces_of(since(excerpt.turns, self.begin(excerpt.notes)))
        chosen = sum(isinstance(each, UserMessage) for each in excerpt.messages)
        if not pieces or not chosen:
            return None
        rest = pieces[max(0, len(pieces) - chosen // 2) :]
        messages = self._choose(rest, is_all=False)
        notes = replace(excerpt.notes, begin=_begin_of(rest, pieces), made_by=self.describe())
        return replace(excerpt, messages=messages, notes=notes) if len(messages) < len(excerpt.messages) else None

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield a problem for an object without a `newest` that takes messages."""
        if isinstance(self.chooses, type) or not takes(getattr(self.chooses, "newest", None), 1):
            yield f"invalid view {self.chooses!r}", "use MessageWindow(…), TokenWindow(…), FullHistory() or None"

    def describe(self) -> str:
        """Return what it keeps, for a reader."""
        return type(self.chooses).__name__


def from_user_message(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages from the first user message on."""
    first = next((at for at, each in enumerate(messages) if isinstance(each, UserMessage)), len(messages))
    return tuple(messages[first:])


class NoMessages(View):
    """Sends nothing, and keeps no messages: `chat_memory=None`. The conversation has only beans."""

    __slots__ = ()

    def first_turn(self, head: Head) -> int:
        """Return a number behind all turns."""
        return head.next_number

    def excerpt(self, log: Log) -> Excerpt:
        """Return the head alone."""
        return Excerpt(notes=log.head.notes, head=log.head)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield nothing: it has no options."""
        yield from ()

    def describe(self) -> str:
        """Return what it keeps, for a reader."""
        return "no messages"


ChosenView: TypeAlias = View | ChoosesMessages
"""What `chat_memory=` takes besides None: a view, or an object with `newest(messages)`."""


def as_view(chosen: Any) -> View | OwnView:
    """Return a view for what `chat_memory=` was given."""
    if chosen is None:
        return NoMessages()
    return chosen if isinstance(chosen, View) else OwnView(chosen)


def _begin_of(rest: Sequence[Piece], pieces: Sequence[Piece]) -> Position:
    """Return where the last ones of some pieces begin; without any, where the pieces end."""
    return rest[0].begins if rest else pieces[-1].ends


def _first_of_newer_half(pieces: Sequence[Piece]) -> int:
    """Return the index of the first piece to keep; of one, nothing stays."""
    return len(pieces) - len(pieces) // 2


# --- complete tool calls


def repaired(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return the messages with a result after every tool call, as model servers require.

    After a crash, calls may have no results, or results no calls. Missing results are added as errors; results without
    a call are removed. A call with the id of another one of its message, or with none, gets a new one.
    """
    kept: list[Message] = []
    waiting: list[tuple[str, ToolExecutionRequest]] = []
    for message in messages:
        if isinstance(message, ToolExecutionResultMessage):
            at = next((at for at, (id_, _) in enumerate(waiting) if id_ == message.id), None)
            if at is not None:
                _, call = waiting.pop(at)
                kept.append(message if call.id == message.id else replace(message, id=call.id))
            continue
        kept += _answer_interrupted(waiting)
        waiting = []
        if isinstance(message, SystemMessage):
            continue  # the system message is created for each call
        if isinstance(message, AiMessage) and message.tool_execution_requests:
            given = message.tool_execution_requests
            calls = _with_unique_ids(given)
            waiting = [(each.id, own) for each, own in zip(given, calls, strict=True)]
            message = message if calls is given else replace(message, tool_execution_requests=calls)
        kept.append(message)
    return (*kept, *_answer_interrupted(waiting))


def _with_unique_ids(calls: Sequence[ToolExecutionRequest]) -> Sequence[ToolExecutionRequest]:
    """Return calls of one message, with new ids for those whose id is empty or that of another one."""
    taken = {each.id for each in calls}
    if len(taken) == len(calls) and "" not in taken:
        return calls
    made, seen = list[ToolExecutionRequest](), {""}
    for number, each in enumerate(calls):
        own = each.id
        while own in seen or (own != each.id and own in taken):
            own = f"{own or 'call'}_{number}"
        seen.add(own)
        made.append(each if own == each.id else replace(each, id=own))
    return tuple(made)


def _answer_interrupted(waiting: Iterable[tuple[str, ToolExecutionRequest]]) -> list[Message]:
    text = "This call was interrupted; whether it had an effect is not known."
    return [ToolExecutionResultMessage(each.id, each.name, text, is_error=True) for _, each in waiting]
