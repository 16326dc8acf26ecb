"""The traffic with a real model server, kept in a file and played back without a network."""

from __future__ import annotations

from .recording import Recording, RecordingError

__all__ = ["Recording", "RecordingError"]
