"""The command line `toolbox`: check, graph, tools, chat, new, mcp."""

from __future__ import annotations

from .commands import app, main

__all__ = ["app", "main"]
