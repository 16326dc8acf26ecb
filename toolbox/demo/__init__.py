"""The demo model: answers without a language model, by rules; English only."""

from __future__ import annotations

from .model import DemoChatModel

__all__ = ["DemoChatModel"]
