"""`DemoChatModel`, which answers by rules instead of a language model. English only."""

from __future__ import annotations

from .model import DemoChatModel

__all__ = ["DemoChatModel"]
