"""The JSON of logs: how stores keep turns and heads, and the form that programs export and restore.

Not here: the JSON of messages (`toolbox.transcripts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from datetime import UTC, datetime
from typing import Any, cast, get_args

from ..chat import Message, TokenUsage
from ..errors import TranscriptError
from ..safe_text import brief
from ..transcripts import message_from_dict, message_to_dict, read_field, read_json, write_json
from .keys import ChatMemoryKey, Owner
from .log import (
    NO_USAGE,
    NOTES,
    Head,
    KeptApproval,
    Log,
    Position,
    RememberedApproval,
    Turn,
    TurnState,
    ViewNotes,
    begin_head,
    number_turns,
    state_after,
)

VERSION = 1


# --- turns


def turn_to_json(turn: Turn) -> str:
    """Return what a store keeps of a turn besides its messages, its beans and its place in the log."""
    client_ids = {str(index): each for index, each in turn.client_ids.items()}
    written = {
        "state": turn.state,
        "usage": _usage_to_list(turn.usage),
        "note": turn.note,
        "client_ids": client_ids,
        "sources": [dict(each) for each in turn.sources],
        "answered_by": turn.answered_by,
        "in_charge": turn.in_charge,
    }
    return write_json({"version": VERSION, **_without_empty(written)})


def turn_from_json(text: str, **fields: Any) -> Turn:
    """Return the turn that `turn_to_json` wrote, with the other `fields`. Raises `TranscriptError`."""
    written = read_json(text, VERSION)
    client_ids = read_field(written, "client_ids", dict, "", {})
    return Turn(
        state=_read_state(written, ""),
        usage=_usage_from(read_field(written, "usage", list, "", [])),
        note=read_field(written, "note", (str, type(None)), "", None),
        client_ids={int(index): each for index, each in client_ids.items()},
        sources=tuple(read_field(written, "sources", list, "", [])),
        answered_by=read_field(written, "answered_by", (str, type(None)), "", None),
        in_charge=read_field(written, "in_charge", (str, type(None)), "", None),
        **fields,
    )


def beans_to_json(beans: Mapping[str, Any]) -> str | None:
    """Return the beans of a turn as JSON; None without any."""
    return write_json({"version": VERSION, "beans": dict(beans)}) if beans else None


def beans_from_json(text: str | None) -> Mapping[str, Any]:
    """Return the beans in what `beans_to_json` wrote, or in what a head keeps. Raises `TranscriptError`."""
    found: Mapping[str, Any] = {} if text is None else read_field(read_json(text, VERSION), "beans", dict, "", {})
    return found


# --- heads


def head_to_json(head: Head) -> tuple[str, str]:
    """Return what lists show of a head, and what only its calls need: notes and beans."""
    owner, notes = head.owner, head.notes
    shown = {
        "owner": None if owner is None else _owner_to_dict(owner),
        "title": head.title,
        "usage": _usage_to_list(head.usage),
        "in_charge": head.in_charge,
    }
    written_notes = {
        "begin": _position_to_list(notes.begin),
        "made_by": notes.made_by,
        "summary": notes.summary,
        "summarized": _position_to_list(notes.summarized),
    }
    kept = {
        "notes": _without_empty(written_notes),
        "beans": dict(head.beans),
        "approvals": [_approval_to_dict(each) for each in head.approvals],
    }
    versioned = {"version": VERSION}
    return write_json({**versioned, **_without_empty(shown)}), write_json({**versioned, **_without_empty(kept)})


def head_from_json(shown: str, kept: str | None, **fields: Any) -> Head:
    """Return the head that `head_to_json` wrote, with the other `fields`. Raises `TranscriptError`.

    Lists do not read what it keeps: `kept` is None.
    """
    written = read_json(shown, VERSION)
    more: Mapping[str, Any] = {} if kept is None else read_json(kept, VERSION)
    notes = read_field(more, "notes", dict, "", {})
    owner = read_field(written, "owner", (dict, type(None)), "", None)
    return Head(
        owner=None if owner is None else _owner_from(owner),
        title=read_field(written, "title", (str, type(None)), "", None),
        usage=_usage_from(read_field(written, "usage", list, "", [])),
        in_charge=read_field(written, "in_charge", (str, type(None)), "", None),
        notes=ViewNotes(
            _position_from(notes.get("begin")),
            notes.get("made_by"),
            notes.get("summary"),
            _position_from(notes.get("summarized")),
        ),
        beans=read_field(more, "beans", dict, "", {}),
        approvals=tuple(map(_approval_from, read_field(more, "approvals", list, "", []))),
        **fields,
    )


def _owner_to_dict(owner: Owner) -> dict[str, Any]:
    return {"name": owner.name, "attributes": dict(owner.attributes)}


def _owner_from(written: Mapping[str, Any]) -> Owner:
    return Owner(written["name"], written["attributes"])


def _approval_to_dict(kept: KeptApproval) -> dict[str, Any]:
    return {
        "tool_name": kept.shown.tool_name,
        "by": kept.shown.by,
        "at": kept.shown.at.isoformat(),
        "service": kept.service,
        "owner": _owner_to_dict(kept.owner),
        "person": kept.person,
        "run_id": kept.run_id,
        "call_id": kept.call_id,
        "place": _position_to_list(kept.place),
    }


def _approval_from(written: Mapping[str, Any]) -> KeptApproval:
    at = datetime.fromisoformat(written["at"])
    return KeptApproval(
        shown=RememberedApproval(written["tool_name"], written["by"], at),
        service=written["service"],
        owner=_owner_from(written["owner"]),
        person=written["person"],
        run_id=written["run_id"],
        call_id=written["call_id"],
        place=Position(*written["place"]),
    )


# --- times, in milliseconds since 1970 as in databases


def time_to_number(at: datetime) -> int:
    """Return a time as milliseconds since 1970."""
    return round(at.timestamp() * 1000)


def time_from_number(milliseconds: int) -> datetime:
    """Return the time, in UTC."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


# --- the documented form


def export_log(log: Log) -> dict[str, Any]:
    """Return a whole log as JSON values, in the form that `restore_log` reads."""
    head = log.head
    return {
        "version": VERSION,
        "service": head.key.service,
        "memory_id": head.key.memory_id,
        "owner": None if head.owner is None else head.owner.name,
        "title": head.title,
        "created_at": head.created_at.isoformat(),
        "turns": _turns_to_dicts(log.turns),
        "beans": dict(head.beans),
    }


def _turns_to_dicts(turns: Iterable[Turn]) -> list[dict[str, Any]]:
    """Return the turns with messages. Who was put in charge between two of them is in the one before."""
    written: list[dict[str, Any]] = []
    for each in turns:
        if each.shown:
            written.append(_turn_to_dict(each))
        elif each.in_charge is not None and written:
            written[-1]["in_charge"] = each.in_charge
    return written


def _turn_to_dict(turn: Turn) -> dict[str, Any]:
    assert turn.at is not None
    optional: dict[str, Any] = {"in_charge": turn.in_charge, "answered_by": turn.answered_by}
    if turn.sources and turn.is_whole:
        optional["sources"] = [dict(each) for each in turn.sources]
    return {
        "at": turn.at.isoformat(),
        "state": turn.state if turn.is_whole else "answered",
        "messages": [message_to_dict(each) for each in turn.shown],
        **{name: each for name, each in optional.items() if each is not None},
    }


def restore_log(key: ChatMemoryKey, exported: object, owner: Owner | None, now: datetime) -> Log:
    """Return the log in JSON values of the documented form, under `key`. Raises `TranscriptError`, a `ValueError`.

    `turns` is required; of a turn, its messages are. `owner` and the times of turns without one are given. The beans
    belong to the last turn: what they were before is not known.
    """
    try:
        return _read_log(key, exported, owner, now)
    except TranscriptError as error:
        fix = "use what export() of a conversation returns, or the same form"
        raise TranscriptError(error.path, error.what, fix) from None


def _read_log(key: ChatMemoryKey, exported: object, owner: Owner | None, now: datetime) -> Log:
    version = read_field(exported, "version", int, "", VERSION)
    if version != VERSION:
        raise TranscriptError("version", f"unsupported version {version}; this release reads version {VERSION}")
    found = read_field(exported, "turns", list, "")
    read = [_turn_from_dict(each, f"turns.{number}") for number, each in enumerate(found)]
    beans = _read_beans(exported)
    said = [each for each in read if each.messages] or [Turn()] * bool(beans)
    turns = number_turns([*said[:-1], *(replace(each, beans=beans) for each in said[-1:])], now)
    created = _read_time(exported, "created_at", "")
    times = [each.at for each in turns if each.at is not None]
    head = begin_head(key, created or min(times, default=now), owner, _read_text(exported, "title", ""))
    head = Head(
        key=head.key,
        id=head.id,
        created_at=head.created_at,
        updated_at=max(times, default=head.created_at),
        owner=owner,
        title=head.title,
        messages=sum(len(each.messages) for each in turns),
        next_number=len(turns) + 1,
        beans=beans,
        in_charge=state_after(turns)[1],
    )
    return Log(head, turns)


def _turn_from_dict(written: Any, path: str) -> Turn:
    found = read_field(written, "messages", list, path)
    messages = tuple(_read_message(each, f"{path}.messages.{number}") for number, each in enumerate(found))
    state = _read_state(written, path)
    return Turn(
        messages=messages,
        state=state,
        note=NOTES["failed"] if state == "waiting" else None,  # no run will ever answer it
        at=_read_time(written, "at", path),
        in_charge=_read_text(written, "in_charge", path),
        answered_by=_read_text(written, "answered_by", path),
        sources=tuple(read_field(written, "sources", list, path, [])),
    )


def _read_message(written: Any, path: str) -> Message:
    message = message_from_dict(written, path)
    _refuse_unwritable(message_to_dict(message), path)
    return message


def _read_beans(exported: object) -> Mapping[str, Any]:
    beans: Mapping[str, Any] = read_field(exported, "beans", dict, "", {})
    for name, each in beans.items():
        _refuse_unwritable({"bean": each}, f"beans.{name}")
    return beans


def _refuse_unwritable(values: dict[str, Any], path: str) -> None:
    """Raise `TranscriptError` for what is not JSON, such as NaN, and for what is nested too deeply."""
    try:
        write_json(values)
    except TranscriptError as error:
        raise TranscriptError(path, error.what) from None


def _read_state(written: Any, path: str) -> TurnState:
    state = read_field(written, "state", str, path, "answered")
    if state not in (states := get_args(TurnState)):
        place = f"{path}.state" if path else "state"
        raise TranscriptError(place, f"unknown state {brief(state)!r}; use one of: {', '.join(states)}")
    return cast("TurnState", state)


def _read_text(written: Any, name: str, path: str) -> str | None:
    found: str | None = read_field(written, name, (str, type(None)), path, None)
    return found


def _read_time(written: Any, name: str, path: str) -> datetime | None:
    text = _read_text(written, name, path)
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
        return at.astimezone(UTC) if at.tzinfo is not None else at.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        place = f"{path}.{name}" if path else name
        raise TranscriptError(place, f"invalid time {brief(text)!r}; use ISO 8601") from None


# --- small values


def _usage_to_list(usage: TokenUsage) -> list[int]:
    return [] if usage == NO_USAGE else list(astuple(usage))


def _usage_from(written: Sequence[int]) -> TokenUsage:
    return TokenUsage(*written) if written else NO_USAGE


def _position_to_list(position: Position | None) -> list[int] | None:
    return None if position is None else [position.turn, position.index]


def _position_from(written: Sequence[int] | None) -> Position | None:
    return None if written is None else Position(*written)


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in values.items() if each or each == ""}


def messages_of(turns: Iterable[Turn]) -> tuple[Message, ...]:
    """Return all messages of turns that are not hidden."""
    return tuple(message for turn in turns for message in turn.shown)
