"""The `toolbox` command line."""

from __future__ import annotations

from .commands import app, main

__all__ = ["app", "main"]
