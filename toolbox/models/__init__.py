"""Models of all providers, and two hooks for test runs, which may refuse requests or replace the models of containers.

The pytest plugin sets the hooks; in a program they are None. Models call the first before each request, containers call
the second for each lookup. The public names are loaded on first use, to keep both cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from ..chat import ChatModel
    from ..events import FallbackUsedEvent, ModelSkippedEvent
    from .fallback_marks import fallback
    from .routing import ModelRouter

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {"..events": "FallbackUsedEvent ModelSkippedEvent", ".fallback_marks": "fallback", ".routing": "ModelRouter"},
)
__all__ = ["FallbackUsedEvent", "ModelRouter", "ModelSkippedEvent", "fallback"]


class ModelRequests:
    """The hooks of this process: `check` and `stand_in`."""

    __slots__ = ("check", "stand_in")

    def __init__(self) -> None:
        self.check: Callable[[str], None] | None = None
        """`check(url)` raises if requests to that server are not allowed."""
        self.stand_in: Callable[[ChatModel | None], ChatModel | None] | None = None
        """`stand_in(model)` returns the model to use instead of a container's, or None to keep the container's."""


model_requests = ModelRequests()
"""The hooks of this process. A model class that sends requests must call `check` before each request."""
