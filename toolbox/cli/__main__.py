"""Runs the command line as `python -m toolbox.cli`."""

from __future__ import annotations

from .commands import main

main()
