"""The conversations on the page: a list, what was said and what a model sees of one, and what an operator does to it.

Not here: the routes (`routes`), the conversations themselves (`toolbox.conversations`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, assert_never

from pydantic import BaseModel, ConfigDict

from toolbox.chat import AiMessage, Message, SystemMessage, ToolExecutionResultMessage, UserMessage
from toolbox.container import Container
from toolbox.contents import Content, media_in
from toolbox.conversations import Conversation, LogEntry
from toolbox.errors import ConversationNotFoundError, IllegalConfigurationError
from toolbox.security import SecurityIdentity
from toolbox.service_names import stored_names
from toolbox.services.plans import MethodPlan

from .journal import Entry, media_entry
from .program import ProgramView, describe_memory

PAGE = 50
"""How many conversations, or entries of one, the page gets at once."""

MAX_MESSAGES = 200
"""The newest messages for the model that the page shows."""


class ConversationBody(BaseModel):
    """The body of a change of a conversation: `title` is for `rename`, `entry` is the entry of a `rewind`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    service: str
    memory_id: str
    action: Literal["rename", "rewind", "stop", "delete"]
    title: str | None = None
    entry: str = ""


async def list_conversations(container: Container, program: ProgramView, query: Mapping[str, str]) -> Entry:
    """Return a page of the list, newest first; `unavailable` says why there is none."""
    shown: dict[str, Any] = {"services": _list_services(program), "items": [], "next": None, "unavailable": None}
    owner, service = query.get("owner") or None, query.get("service") or None
    try:
        found = await container.conversations.list(owner, service, PAGE + 1, query.get("before"))
    except IllegalConfigurationError as error:
        return {**shown, "unavailable": _describe_problems(error)}
    items = found[:PAGE]
    return {**shown, "items": items, "next": items[-1].cursor if len(found) > PAGE else None}


async def show_conversation(container: Container, program: ProgramView, query: Mapping[str, str]) -> Entry:
    """Return what is known of a conversation, its run that has not ended, and what a model would see of it."""
    room = conversation_in(container, query)
    try:
        info = await room.info()
    except ConversationNotFoundError:
        info = None
    except IllegalConfigurationError as error:
        return {"unavailable": _describe_problems(error)}
    messages, run = await room.messages(), await room.run()
    plans = program.host.plans_of(room.service).values()
    return {
        "unavailable": None,
        "info": info,
        "view": _view_of(plans),
        "is_known": bool(plans),
        "messages": [_describe_message(each) for each in messages[-MAX_MESSAGES:]],
        "left_out": max(0, len(messages) - MAX_MESSAGES),
        "run": None if run is None else {"id": run.id, "status": run.status},
    }


async def show_history(container: Container, query: Mapping[str, str]) -> Entry:
    """Return a page of what was said, oldest first; `next` is the `before` of the page before it."""
    found = await conversation_in(container, query).history(PAGE + 1, query.get("before"))
    items = found[-PAGE:]
    return {"items": [_describe_entry(each) for each in items], "next": items[0].id if len(found) > PAGE else None}


async def change_conversation(container: Container, body: ConversationBody, by: SecurityIdentity | None) -> Entry:
    """Change, stop or delete a conversation. `stopped` is True if there was something to stop."""
    room, stopped = container.conversations.of(body.service, body.memory_id, operator=True), False
    match body.action:
        case "rename":
            await room.rename(body.title or None)
        case "rewind":
            await room.rewind(body.entry)
        case "stop":
            stopped = await room.stop(by)
        case "delete":
            await room.delete()
        case _:
            assert_never(body.action)
    return {"stopped": stopped}


def conversation_in(container: Container, query: Mapping[str, str]) -> Conversation:
    """Return the conversation that the query of an address names. Raises `ValueError` for an invalid memory id."""
    service, memory_id = query.get("service", ""), query.get("memory_id", "")
    return container.conversations.of(service, memory_id, operator=True)


def _list_services(program: ProgramView) -> list[Entry]:
    """Return the services that keep conversations."""
    keeping = [cls for cls, methods in program.host.plans.items() if _view_of(methods.values())]
    return [{"name": each.__name__, "stored": stored_names(each)[0]} for each in keeping]


def _view_of(plans: Iterable[MethodPlan]) -> str | None:
    """Describe what a model sees of the conversations of a service; None if none of its methods keeps any."""
    return next((view for each in plans if (view := describe_memory(each)) is not None), None)


def _describe_problems(error: IllegalConfigurationError) -> str:
    return " ".join(f"{each.what}; {each.fix}." for each in error.problems)


def _describe_entry(entry: LogEntry) -> Entry:
    return {
        "id": entry.id,
        "at": entry.at,
        "state": entry.state,
        "run_id": entry.run_id,
        "usage": entry.usage,
        "answered_by": entry.answered_by,
        "sources": [" ".join(filter(None, (each.title, each.source))) for each in entry.sources],
        "message": _describe_message(entry.message),
    }


def _describe_message(message: Message) -> Entry:
    match message:
        case SystemMessage(text):
            return {"type": "system", "text": text}
        case UserMessage(contents, name):
            return {"type": "user", "text": message.text, "name": name, "media": _describe_media(contents)}
        case AiMessage(text, requests, reasoning):
            calls = [{"name": each.name, "arguments": each.arguments} for each in requests]
            return {"type": "model", "text": text, "reasoning": reasoning, "calls": calls}
        case ToolExecutionResultMessage(_, tool, text, is_error, _, contents):
            described = {"type": "tool", "name": tool, "text": text, "is_error": is_error}
            return {**described, "media": _describe_media(contents)}
        case _:
            assert_never(message)


def _describe_media(contents: Sequence[Content]) -> list[Entry]:
    return [media_entry(each) for each in media_in(contents)]
