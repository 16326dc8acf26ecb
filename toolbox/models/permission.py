"""Lets a test run decide whether model servers are asked, and which model stands for the named ones.

Empty in a program. The pytest plugin fills it in; models that send requests and containers that look models up ask
here. Imports nothing, so that asking costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..chat import ChatModel


class ModelRequests:
    """The rules of the running process: see `check` and `stand_in`."""

    __slots__ = ("check", "stand_in")

    def __init__(self) -> None:
        self.check: Callable[[str], None] | None = None
        """`check(url)` raises when no request may be sent to that server."""
        self.stand_in: Callable[[ChatModel | None], ChatModel | None] | None = None
        """`stand_in(given)` returns the model to ask instead of a container's; None asks the container's own."""


model_requests = ModelRequests()
"""The rules of this process; any model class that sends requests must call `check` before it does."""
