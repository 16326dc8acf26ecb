"""The command line `toolbox` with the commands check, graph, tools, chat, new and mcp."""

from __future__ import annotations

from .commands import app, main

__all__ = ["app", "main"]
