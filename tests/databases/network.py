"""A network between a program and PostgreSQL, which stops delivering or loses its connections when a test says so."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import make_url


class Network:
    """Forwards TCP connections to a PostgreSQL server, until they are cut or dropped."""

    def __init__(self, url: str) -> None:
        self._target = make_url(url)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._cut = asyncio.Event()
        self._server: asyncio.Server

    def cut(self) -> None:
        """Deliver nothing more on open connections, and close none."""
        cut, self._cut = self._cut, asyncio.Event()
        cut.set()

    def drop(self) -> None:
        """Close all open connections at once, on both ends."""
        for each in self._writers:
            each.transport.abort()
        self._writers.clear()

    def refuse(self) -> None:
        """Accept no more connections."""
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = self._target.query.get("host", self._target.host)
        assert isinstance(host, str)
        if host.startswith("/"):
            up = await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{self._target.port or 5432}")
        else:
            up = await asyncio.open_connection(host, self._target.port or 5432)
        self._writers += (writer, up[1])
        cut = self._cut

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                if cut.is_set():
                    await asyncio.Event().wait()
                target.write(data)
                await target.drain()
            target.close()

        for pair in ((reader, up[1]), (up[0], writer)):
            task = asyncio.create_task(pump(*pair))
            self._tasks.add(task)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[str]:
        """Yield the URL of the database through this network."""
        server = self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            url = self._target.set(host="127.0.0.1", port=port, query={})
            yield url.render_as_string(hide_password=False)
        finally:
            server.close()
            for each in self._tasks:
                each.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for writer in self._writers:
                writer.close()
            await asyncio.gather(*(each.wait_closed() for each in self._writers), return_exceptions=True)
