"""What a type checker knows of conversations. Checked by mypy and pyright, never run."""

from typing import Any, Protocol, assert_type

from toolbox import Container, Inject, MemoryId, Message, register_ai_service
from toolbox.conversations import Conversation, ConversationInfo, Conversations, LogEntry
from toolbox.security import SecurityIdentity


@register_ai_service(when_busy="raise", shared_conversations=True)
class Assistant(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


async def conversations_of_a_container(container: Container, user: Inject[SecurityIdentity]) -> None:
    conversations = container.conversations
    assert_type(conversations, Conversations)
    assert_type(await container.aget(Conversations), Conversations)
    assert_type(await conversations.create(Assistant, 7, owner=user, title="Trip"), Conversation)
    listed = await conversations.list(owner=user.name, service="assistant", limit=50)
    assert_type(listed, list[ConversationInfo])
    await conversations.list(before=listed[0])
    await conversations.list(before=listed[0].cursor)
    assert_type(await conversations.forget(service=Assistant, memory_id=7), dict[str, int])
    assert_type(await conversations.restore(Assistant, "room", {"turns": []}, owner="ann"), Conversation)


async def one_conversation(conversations: Inject[Conversations]) -> None:
    room = conversations.of(Assistant, "room", operator=True)
    assert_type(room, Conversation)
    entries = await room.history(limit=50)
    assert_type(entries, list[LogEntry])
    await room.history(before=entries[0])
    assert_type(entries[0].message, Message)
    assert_type(await room.messages(), list[Message])
    assert_type(await room.info(), ConversationInfo)
    assert_type(await room.export(), dict[str, Any])
    assert_type(await room.fork("other", upto=entries[0].id), Conversation)
    assert_type(await room.stop(by="ann"), bool)
    await room.rename(None)
    await room.adopt("ann")
    await room.rewind(entries[0])
    await room.delete()
