# Written by `make stubs` from the tables of names in the __init__.py beside this file.
from ..di.stored_beans import (
    conversation_scoped,
)
from .views import (
    FullHistory,
    Summary,
)

__all__ = [
    "FullHistory",
    "Summary",
    "conversation_scoped",
]
