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
    for run in runs:
        await chat.runs.cancel(run.id, _REASON, chat.person)
    entry_id = question.entry_id
    if runs:  # what they have said is in the log now, or is gone
        entry_id = await _find_entry(chat, question)
    if entry_id is not None:
        await chat.room.rewind(entry_id)


async def _find_entry(chat: Chat, question: ShownMessage) -> str | None:
    assert chat.room is not None
    shown = await read_room(chat.room)
    by_id = _find(shown, question.id, answers=False)
    by_run = (each for each in shown if each.user is not None and question.base and each.base == question.base)
    found = by_id or next(by_run, None)
    return None if found is None else found.entry_id
