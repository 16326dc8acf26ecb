"""What runs need of the host of their services, a container or `create_ai_service`, as a Protocol.

Not here: what calls need of it (`services.host_needs`), the hosts themselves (`toolbox.hosts`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..services.host_needs import ServiceHost
from ..services.plans import MethodPlan
from ..tools.tool_calls import Tool
from .run_engines import RunEngine
from .store import RunStore

if TYPE_CHECKING:
    from ..conversations.conversations_bean import Conversations

T = TypeVar("T")


class RunsHost(ServiceHost, Protocol):
    """Hosts services and runs: a container, or a service without one."""

    run_seeds: tuple[Any, ...]
    takes_over_runs: bool

    async def run_store(self) -> RunStore:
        """Return the opened store of the runs."""
        ...

    @property
    def conversations(self) -> Conversations:
        """The conversations of the services."""
        ...

    def plans_of(self, service: str) -> Mapping[str, MethodPlan]:
        """Return the plans of the service with this stored name, also a former one; empty for an unknown one."""
        ...

    def find_class(self, service: str) -> type[Any] | None:
        """Return the class of the service with this stored name, also a former one; None for an unknown one."""
        ...

    def names_of(self, service: str | type[Any]) -> tuple[str, ...]:
        """Return all stored names of a service, the present one first; `service` is its class or one of its names."""
        ...

    def label_of(self, service: str) -> str:
        """Return the name of the class of a service with this stored name, for error texts."""
        ...

    def plan_of(self, method: Callable[..., Any]) -> MethodPlan:
        """Return the plan of an async service method. Raises `TypeError` for anything else."""
        ...

    def tools_added_by(self, place: str) -> Sequence[Tool] | None:
        """Return the tools that an endpoint adds to its calls; None if there is no such endpoint."""
        ...

    def open_request(self, seeds: Mapping[Any, Any]) -> AbstractAsyncContextManager[Any]:
        """Return a new request scope with these seeds."""
        ...

    async def application_bean(self, wanted: Any) -> Any:
        """Return a bean from outside of all requests; None if nothing provides it."""
        ...

    async def run_engine(self) -> RunEngine:
        """Return the engine that executes runs."""
        ...

    async def on_own_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await `work()` on the host's loop, as work that its stop waits for."""
        ...
