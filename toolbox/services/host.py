"""What services need of whoever hosts them.

Not here: those who do: a container (`hosting`), `create_ai_service` (`standalone`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from ..chat import ChatModel
from ..context import ActiveScope
from ..errors import Problem
from ..events import Listeners
from ..execution import Workers
from ..tools.failures import ToolErrors
from ..tools.pipeline import Tool
from .memory import ChatMemories
from .running import Running


class ServiceHost(Protocol):
    """What services need of whoever hosts them: a container, or `create_ai_service`."""

    workers: Workers
    running: Running
    scope: ActiveScope
    failures: ToolErrors
    max_concurrent_tools: int
    listeners: Listeners | None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that invocations run on; None: the one they are awaited on. Raises `ContainerNotStartedError`."""
        ...

    def sync_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that synchronous methods hand their calls to."""
        ...

    def model(self, name: str | None) -> ChatModel:
        """The named model, or the default one."""
        ...

    async def memories(self) -> ChatMemories:
        """The conversations."""
        ...

    def tool_problems(self, where: str, tool: Tool) -> Iterable[Problem]:
        """What this host lacks for a tool that is offered at `where`: its bean, what it is injected, its executor."""
        ...
