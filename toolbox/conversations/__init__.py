"""Conversations: logs that keep everything that was said, and views, the part that a model reads.

The names are loaded on first use, so that services can use the parts of this package without loading all of it. Type
checkers and editors read `__init__.pyi`, which `make stubs` writes from the table below.
"""

from __future__ import annotations

from ..first_use import names_on_first_use

_LISTED = {
    ".conversations_bean": "Conversation ConversationInfo Conversations",
    "..di.stored_beans": "conversation_scoped",
    ".log": "LogEntry RememberedApproval",
    ".views": "FullHistory MessageWindow Summary TokenWindow",
}

__getattr__, __dir__ = names_on_first_use(__name__, _LISTED)
__all__ = sorted(" ".join(_LISTED.values()).split())  # pyright: ignore[reportUnsupportedDunderAll]  # it reads the .pyi
