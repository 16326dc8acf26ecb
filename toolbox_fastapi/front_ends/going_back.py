"""Going back in a conversation: to before a message of the user, which a client edits or has answered again.

Not here: the call with the new text (`chats`), hiding what was said (`toolbox.conversations`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolbox.runs.run_answers import Run

from .chats import Chat, RefusedError, waits_for_others
from .room_reading import ShownMessage, read_room

_REASON = "the user has changed what was said before it"


def unknown_message() -> RefusedError:
    """Return the error for the id of a message that the conversation does not have."""
    return RefusedError(409, "The conversation has no message with this id.", "unknown_message")


async def find_question(chat: Chat, message_id: str | None, *, answers: bool) -> ShownMessage | None:
    """Return the user's message with an id; with `answers` also the one that the answer with this id answers.

    Raises `RefusedError` for another's conversation.
    """
    await chat.find_open_runs()
    if chat.room is None or message_id is None:
        return None
    return _find(await read_room(chat.room), message_id, answers=answers)


def _find(shown: Sequence[ShownMessage], message_id: str, *, answers: bool) -> ShownMessage | None:
    at = next((at for at in range(len(shown) - 1, -1, -1) if shown[at].id == message_id), None)
    if at is not None and answers and shown[at].user is None:
        at = next((before for before in range(at - 1, -1, -1) if shown[before].user is not None), None)
    return None if at is None or shown[at].user is None else shown[at]


async def go_back(chat: Chat, question: ShownMessage) -> None:
    """Hide a message of the user and all that follows it, and cancel the runs that have not ended.

    Raises `RefusedError`, and changes nothing, if this person may not answer all calls that wait.
    """
    assert chat.room is not None
    runs: list[Run[Any]] = await chat.find_open_runs()
    for run in runs:
        if not await chat.may_answer_all(run, run.pending):
            raise waits_for_others()
    entry_id = question.entry_id
    if runs:
        following = _entries_after(await read_room(chat.room), question)
        for run in runs:
            await chat.runs.cancel(run.id, _REASON, chat.person)
        # What the runs have said is at the end of the log now, or is gone.
        shown = await read_room(chat.room)
        hidden = {_find_entry(shown, question), *following} - {None}
        entry_id = next(
            (each.entry_id for each in shown if each.entry_id is not None and each.entry_id in hidden), None
        )
    if entry_id is not None:
        await chat.room.rewind(entry_id)


def _entries_after(shown: Sequence[ShownMessage], question: ShownMessage) -> set[str | None]:
    """Return the entries of the user's messages that follow a question."""
    same = (at for at, each in enumerate(shown) if (each.id, each.base) == (question.id, question.base))
    return {each.entry_id for each in shown[next(same, len(shown)) + 1 :] if each.entry_id is not None}


def _find_entry(shown: Sequence[ShownMessage], question: ShownMessage) -> str | None:
    """Return the entry of a question, whose run may have stored it just now."""
    by_run = (each for each in shown if each.user is not None and question.base and each.base == question.base)
    found = next(by_run, None) or _find(shown, question.id, answers=False)
    return None if found is None else found.entry_id
