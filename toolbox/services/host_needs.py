"""What a call needs of the host of its service, a container or `create_ai_service`, as Protocols.

Not here: what it needs of a run (`recording_needs`), the hosts themselves (`toolbox.hosts`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from ..chat import ChatModel
from ..context import ActiveScope, InvocationContext
from ..conversations.keys import ChatMemoryKey
from ..conversations.memories import ChatMemories
from ..di.stored_beans import StoredBeans
from ..errors import Problem
from ..events import Listeners
from ..execution.threads import Workers
from ..limits import CostEstimator
from ..models.fallbacks import CoolingModels
from ..models.pools import ConnectionPools
from ..security import SecurityIdentity
from ..tools.failures import ToolErrors
from ..tools.tool_calls import Tool
from .open_calls import Running
from .plans import MethodPlan
from .recording_needs import PlaceInRun


class HostModels(Protocol):
    """The models of a host, by their names."""

    async def find(self, name: str | None, context: InvocationContext | None = None, /) -> ChatModel:
        """Return the named model, or the default one, with its fallbacks. `context` is that of their events."""
        ...

    async def choose(self, name: str, where: str, context: InvocationContext, /) -> ChatModel:
        """Return the model that a call chose. Raises `IllegalConfigurationError` for an unknown name."""
        ...

    @property
    def cooling(self) -> CoolingModels:
        """The models that failed lately. It notes how each request to a model ends."""
        ...


class ServiceHost(Protocol):
    """Hosts services: a container, or `create_ai_service`."""

    workers: Workers
    running: Running
    scope: ActiveScope
    failures: ToolErrors
    max_concurrent_tools: int
    listeners: Listeners | None
    run_identity: tuple[str, ...]

    @property
    def plans(self) -> Mapping[type[Any], Mapping[str, MethodPlan]]:
        """The method plans of all services, by class."""
        ...

    @property
    def runs(self) -> Any:
        """The runs, for durable methods."""
        ...

    @property
    def abandon_runs(self) -> Callable[[BaseException], Awaitable[list[str]]]:
        """Return the function that cancels the runs of a `RunSuspendedError` that left a tool.

        It returns the names of the services of these runs.
        """
        ...

    def new_run(self, run_id: str | None) -> PlaceInRun:
        """Return the place of the outermost invocation of a new run; without an id, it gets one."""
        ...

    def tool_may_suspend(self, tool: Tool) -> bool:
        """Return True if a call of this tool may be suspended."""
        ...

    @property
    def added_may_suspend(self) -> bool:
        """True if calls of tools that code outside of services adds may be suspended."""
        ...

    async def suspended_run(self, key: ChatMemoryKey) -> str | None:
        """Return the id of the suspended run of a conversation."""
        ...

    async def cancel_run(self, run_id: str, reason: str) -> str:
        """Cancel a suspended run. Returns the name of the class of its service."""
        ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of invocations; None for the caller's loop. Raises `ContainerNotStartedError`."""
        ...

    def sync_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop for synchronous methods."""
        ...

    @property
    def models(self) -> HostModels:
        """The models in the active scope, by their names."""
        ...

    @property
    def pools(self) -> ConnectionPools | None:
        """The connections that the models share; None without a container."""
        ...

    async def memories(self) -> ChatMemories:
        """Return the conversations."""
        ...

    async def caller(self) -> SecurityIdentity | None:
        """Return the identity that acts, which may be anonymous; None for the program itself."""
        ...

    def open_conversation(self, key: ChatMemoryKey, beans: StoredBeans) -> AbstractAsyncContextManager[object]:
        """Return a new scope for the beans of a conversation."""
        ...

    async def note_caller(self, context: InvocationContext) -> None:
        """Note the name of the caller in a context, for logs and traces."""
        ...

    async def cost_estimator(self) -> CostEstimator | None:
        """Return the bean that estimates costs, if there is one."""
        ...

    def class_behind(self, cls: type[Any]) -> type[Any]:
        """Return the class of the bean that provides `cls`: a subclass, or `cls` itself."""
        ...

    def tool_problems(self, where: str, tool: Tool) -> Iterable[Problem]:
        """Yield problems with a tool in this host: missing beans, an unknown executor."""
        ...
