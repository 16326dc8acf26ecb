"""Chooses which listed tools of an MCP server a program uses: by settings and names, and unchanged since listed first.

Not here: removing tools that violate the protocol (`screening`), requesting the list (`connection`).
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..search import SEARCH_TOOL
from ..services.outputs import ANSWER_TOOL
from ..settings import McpSettings
from ..tools.specification import name_problems
from .notifications import McpEvent, McpToolChanged
from .screening import MAX_TOOLS, SkippedTools

if TYPE_CHECKING:
    from mcp_types import Tool

logger = logging.getLogger("toolbox.mcp")

_INVALID_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")

RESERVED_NAMES = frozenset({SEARCH_TOOL, ANSWER_TOOL, "list_resources", "get_resource"})
"""Names of the framework's own tools: a server's tool would take their place, or end every call of a service."""

MAX_REMEMBERED = 10_000
"""Number of tools, and of their changes, that are remembered of one server."""


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return True if a tool has one of these names, or fits one of these patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class ToolChoice:
    """The tools of one server that the program uses, under the names that models see.

    It remembers each tool as it was listed first: a server could change one after somebody has reviewed it.
    """

    def __init__(self, server: str, settings: McpSettings, notify: Callable[[McpEvent], None]) -> None:
        self._server, self._settings, self._notify = server, settings, notify
        # Shared by all headers: a token that is renewed must not make a changed tool look new.
        self._pins: dict[str, dict[str, str]] = {}
        self._reported: set[tuple[str, tuple[str, ...]]] = set()
        self._unmatched: set[str] = set()

    def choose(self, found: list[Tool], output_schemas: Mapping[str, Any]) -> tuple[tuple[Tool, ...], frozenset[str]]:
        """Return the tools to offer, with their output schemas, and the names of those that `pin_tools` refuses.

        Each offered name occurs once. Logs the tools that are not offered.
        """
        self._report_patterns([each.name for each in found])
        skipped = SkippedTools(self._server)
        tools: dict[str, Tool] = {}
        refused: set[str] = set()
        for each in found:
            if not self._is_offered(each.name):
                continue
            name = self.offered_name(each.name)
            if name in RESERVED_NAMES:
                skipped.add(each.name, "toolbox has a tool of this name; rename it with names= or prefix=")
            elif name_problems(name, ""):
                skipped.add(each.name, "models do not accept this name; rename it with names= or prefix=")
            elif name in tools:
                skipped.add(each.name, f"another tool has the name {name!r}; rename one with names=")
            elif len(tools) == MAX_TOOLS:
                skipped.add(each.name, f"more than {MAX_TOOLS}")
            elif (changed := self._note_changes(each)) and self._settings.pin_tools:
                refused.add(each.name)
                skipped.add(each.name, f"it has changed since it was first listed: {', '.join(changed)}")
            else:
                tools[name] = each
        skipped.log()
        offered = tuple(
            each.model_copy(update={"output_schema": output_schemas[each.name]})
            if each.name in output_schemas
            else each
            for each in tools.values()
        )
        return offered, frozenset(refused)

    def _report_patterns(self, names: list[str]) -> None:
        """Log each pattern of `approval` that matches no tool, once: a typing error would leave a tool unguarded."""
        patterns = self._settings.approval if isinstance(self._settings.approval, tuple) else ()
        known = [*names, "get_resource"] if self._settings.expose_resources else names
        for pattern in patterns:
            if pattern not in self._unmatched and not any(matches_any(name, (pattern,)) for name in known):
                self._unmatched.add(pattern)
                logger.warning("MCP server %r: approval=%r matches none of its tools", self._server, pattern)

    def _note_changes(self, tool: Tool) -> tuple[str, ...]:
        """Return what differs from the first listing of a tool, and report it. Remembers a tool that is new."""
        now = _make_fingerprints(tool)
        if tool.name not in self._pins and len(self._pins) < MAX_REMEMBERED:
            self._pins[tool.name] = now
        first = self._pins.get(tool.name, {})
        changed = tuple(part for part, value in now.items() if first.get(part) != value)
        if changed and (tool.name, tuple(now.values())) not in self._reported:
            if len(self._reported) < MAX_REMEMBERED:
                self._reported.add((tool.name, tuple(now.values())))
            self._notify(McpToolChanged(self._server, tool.name, changed, self._settings.pin_tools))
            if not self._settings.pin_tools:
                logger.warning(
                    "MCP server %r: the %s of tool %r changed after it was first listed; review it, or refuse changed "
                    "tools with pin_tools=True",
                    self._server,
                    " and the ".join(changed),
                    tool.name,
                )
        return changed

    def _is_offered(self, name: str) -> bool:
        include, exclude = self._settings.include, self._settings.exclude
        return (not include or matches_any(name, include)) and not matches_any(name, exclude)

    def offered_name(self, name: str) -> str:
        """Return the name that models see; MCP allows characters such as dots, which models do not accept."""
        new_name = self._settings.names.get(name)
        return _INVALID_IN_NAMES.sub("_", f"{self._settings.prefix}{name}")[:64] if new_name is None else new_name


def _make_fingerprints(tool: Tool) -> dict[str, str]:
    """Return a short hash of each part of a tool that a model or an approval depends on."""
    annotations = None if tool.annotations is None else tool.annotations.model_dump(mode="json", exclude_none=True)
    parts = {"description": [tool.title, tool.description], "schema": tool.input_schema, "annotations": annotations}
    return {name: _hash_json(value) for name, value in parts.items()}


def fingerprint_of(tool: Tool) -> str:
    """Return a short hash of what an approval of a call covers: the tool's own name, input schema and annotations."""
    parts = _make_fingerprints(tool)
    return _hash_json([tool.name, parts["schema"], parts["annotations"]])


def address_of(settings: McpSettings) -> str:
    """Return a hash of a server's address, without its query, or of its command with the arguments: it is stored.

    Queries, users and passwords can change without changing the server.
    """
    if settings.url is None:
        return _hash_json([settings.command, *settings.args])
    address = urlsplit(settings.url)
    return _hash_json([address.scheme.lower(), address.netloc.rpartition("@")[2].lower(), address.path])


def _hash_json(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()[:16]
