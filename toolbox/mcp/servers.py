"""The MCP servers of a container: those named in code and those of the settings, a connection each.

Not here: the connections (`connection`), what services get of them (`offering`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr

from ..di.marks import application_scoped
from ..settings import McpSettings, ToolboxSettings, settings_key
from .connection import McpConnection
from .events import McpEvent, McpListener


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server named in code: `container.register_instance(mcp_server("files", …))`."""

    name: str
    settings: McpSettings


def mcp_server(
    name: str,
    *,
    command: str | None = None,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    url: str | None = None,
    headers: Mapping[str, str] | None = None,
    **options: Any,
) -> McpServer:
    """An MCP server over stdio (`command`, `args`, `env`, `cwd`) or over streamable HTTP (`url`, `headers`).

    `options` are the other fields of `McpSettings`: `timeout`, `connect_timeout`, `include`, `exclude`, `prefix`,
    `names`, `max_reply_bytes`. It goes to `container.register_instance(…, name=name)` and comes before settings of the
    same name.
    """
    if (command is None) == (url is None):
        raise ValueError(f"mcp_server({name!r}) takes either command= or url=")
    settings = McpSettings(
        command=command,
        args=tuple(args),
        env={key: SecretStr(value) for key, value in (env or {}).items()},
        cwd=cwd,
        url=url,
        headers={key: SecretStr(value) for key, value in (headers or {}).items()},
        **options,
    )
    return McpServer(name, settings)


def servers_named(settings: ToolboxSettings, given: Sequence[McpServer]) -> dict[str, McpSettings]:
    """The settings of every server there is, by the key of its name."""
    return {**settings.mcp, **{settings_key(each.name): each.settings for each in given}}


@application_scoped
class McpServers:
    """The connections to the MCP servers of a container, opened when first used and closed with it. A bean."""

    def __init__(self, settings: ToolboxSettings, given: list[McpServer], listeners: list[McpListener]) -> None:
        self._settings = servers_named(settings, given)
        self._listeners = listeners
        self._connections: dict[str, McpConnection] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all servers."""
        return tuple(self._settings)

    def server(self, name: str) -> McpConnection:
        """The connection to a server: its tools, resources and prompts. Raises `KeyError` for an unknown name."""
        key = settings_key(name)
        if key not in self._connections:
            tell = self._tell if self._listeners else None
            self._connections[key] = McpConnection(name, self._settings[key], tell)
        return self._connections[key]

    def _tell(self, event: McpEvent) -> None:
        for listener in self._listeners:
            listener.on_mcp_event(event)

    async def stop(self) -> None:
        """Closes all connections, and ends the servers over stdio."""
        await asyncio.gather(*(each.close() for each in self._connections.values()))
