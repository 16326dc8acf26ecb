"""A store with the three methods of the protocol, as programs write it."""

from collections.abc import Sequence

from toolbox import ChatMemoryKey, ChatMemoryStore, Message


class ThreeMethods(ChatMemoryStore):
    def __init__(self) -> None:
        self.kept: dict[ChatMemoryKey, tuple[Message, ...]] = {}

    async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
        return self.kept.get(key, ())

    async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
        self.kept[key] = tuple(messages)

    async def delete_messages(self, key: ChatMemoryKey) -> None:
        self.kept.pop(key, None)
