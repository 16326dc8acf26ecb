# Written by `make stubs` from the tables of names in the __init__.py beside this file.
from .conversations_bean import (
    Conversation,
    ConversationInfo,
    Conversations,
)
from ..di.stored_beans import (
    conversation_scoped,
)
from .log import (
    LogEntry,
    RememberedApproval,
)
from .views import (
    FullHistory,
    MessageWindow,
    Summary,
    TokenWindow,
)

__all__ = [
    "Conversation",
    "ConversationInfo",
    "Conversations",
    "FullHistory",
    "LogEntry",
    "MessageWindow",
    "RememberedApproval",
    "Summary",
    "TokenWindow",
    "conversation_scoped",
]
