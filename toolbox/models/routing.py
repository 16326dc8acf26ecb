"""`ModelRouter`: a bean that chooses the model of a call.

Not here: finding the model by its name (`hosts.model_beans`), when a router is asked (`services.invocation`).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar, get_args

from ..chat import ChatRequest
from ..context import InvocationContext


class ModelRouter(ABC):
    """Chooses the model of each call. A subclass is a bean, application-scoped without a scope decorator.

        class BySize(ModelRouter):
            names = ("small", "large")

            def choose(self, request: ChatRequest, context: InvocationContext) -> str:
                return "large" if len(request.messages) > 10 else "small"


        @register_ai_service(model=BySize)
        class Assistant(Protocol): ...

    `names` are the models that `choose` may return; another name raises `IllegalConfigurationError`. `choose` is asked
    once per call, with its first request, and may be `async def`; a `def` runs where a `def` tool would. A call that
    names a model in its `ChatRequestParameters` does not ask it.
    """

    __toolbox_default_scope__: ClassVar[str] = "application"

    names: ClassVar[Collection[str]]

    @abstractmethod
    def choose(self, request: ChatRequest, context: InvocationContext) -> Any:
        """Return the name of the model for a call whose first request is `request`, or an awaitable of it."""


def router_in(given: object) -> type[ModelRouter] | None:
    """Return the class of a router, given as a class, as `Annotated` with a name, or as an instance; else None."""
    if given is None or isinstance(given, str):
        return None
    found = next(iter(get_args(given)), given)
    cls = found if inspect.isclass(found) else type(found)
    return cls if issubclass(cls, ModelRouter) else None


def model_names_of(given: object) -> tuple[str | None, ...]:
    """Return the names of the models that the `model=` of a service may mean; None is the default model."""
    if (router := router_in(given)) is not None:
        return names_of_router(router)
    return (given,) if given is None or isinstance(given, str) else ()


def names_of_router(router: Any) -> tuple[str, ...]:
    """Return the names of the models that a router may choose; none if they are missing or invalid."""
    names = getattr(router, "names", ())
    if isinstance(names, str) or not isinstance(names, Collection):
        return ()
    return tuple(names) if all(isinstance(each, str) for each in names) else ()
