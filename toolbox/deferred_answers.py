"""What a tool of another server gets when its call continues: the answer to its question, and where the call came from.

Not here: suspending and resuming calls (`runs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DeferredAnswer:
    """The answer to a deferred call, for a tool that continues with it.

    `attributes` are those of the `ToolDeferred`; `value` is that of `respond`.
    """

    attributes: Mapping[str, Any]
    value: Any


current_answer: ContextVar[DeferredAnswer | None] = ContextVar("toolbox.answer", default=None)
"""Set while a deferred tool runs again with its answer."""


TAKES_ANSWERS = "__toolbox_takes_answers__"
"""The attribute of tools that run again with the answer to a deferred call; for others, it is the result."""


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """The MCP server that a call goes to, and a fingerprint of the tool as that server listed it.

    `address` is a hash of the server's address, or of its command with the arguments; an empty text in runs of earlier
    versions.
    """

    mcp_server: str
    fingerprint: str
    address: str = ""


TOOL_ORIGIN = "__toolbox_origin__"
"""The attribute of tools of other servers: a function that takes the request of a call and returns its `ToolOrigin`."""
