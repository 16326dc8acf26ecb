"""Runs the command line as `python -m toolbox`."""

from __future__ import annotations

from .cli.commands import main

main()
