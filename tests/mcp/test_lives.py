"""Servers that die, lose the session or never answer: calls fail, the next call reconnects, no process remains."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Clock, free_port
from tests.mcp.warm_servers import stdio_command
from toolbox import Container
from toolbox.mcp import McpConnectionError, McpServer, McpServers, McpTimeoutError, mcp_server

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]  # starts processes
MORTAL = Path(__file__).parent / "mortal_server.py"
ROOT = Path(__file__).parent.parent.parent


def mortal() -> McpServer:
    command, *arguments = stdio_command(MORTAL)
    return mcp_server("mortal", command=command, args=arguments, env={"PYTHONPATH": str(ROOT)}, connect_timeout=110)


def container(server: McpServer) -> Container:
    return Container().register(McpServers).register_instance(server, name=server.name)


async def pid_of(server: Any) -> int:
    return int((await server.call("pid", {})).content[0].text)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def the_end_is_noticed(name: str) -> None:
    held = [task for task in asyncio.all_tasks() if task.get_name() == f"mcp {name}"]
    async with asyncio.timeout(60):
        await asyncio.wait(held)


async def test_a_server_that_died_between_calls_is_restarted_silently() -> None:
    async with container(mortal()) as made:
        server = made.get(McpServers).server("mortal")
        first = await pid_of(server)
        os.kill(first, signal.SIGKILL)
        await the_end_is_noticed("mortal")

        assert await pid_of(server) != first


async def test_all_waiting_calls_fail_when_a_server_dies_and_share_the_restarted_one() -> None:
    seen: set[int] = set()

    async with container(mortal()) as made:
        server = made.get(McpServers).server("mortal")

        async def wait_then_ask() -> int:
            with pytest.raises(McpConnectionError, match="could not run wait: the connection broke"):
                await server.call("wait", {})
            return await pid_of(server)

        for _ in range(3):
            waiting = [asyncio.create_task(wait_then_ask()) for _ in range(6)]
            seen.add(pid := await pid_of(server))
            os.kill(pid, signal.SIGKILL)
            after = set(await asyncio.gather(*waiting))
            assert len(after) == 1
            seen |= after

    assert len(seen) == 4
    assert not [pid for pid in seen if is_alive(pid)]


async def test_concurrent_first_calls_share_one_server() -> None:
    async with container(mortal()) as made:
        server = made.get(McpServers).server("mortal")

        assert len(set(await asyncio.gather(*(pid_of(server) for _ in range(8))))) == 1


async def test_a_silent_server_does_not_delay_stopping_the_container() -> None:
    silent = mcp_server(
        "silent", command=sys.executable, args=["-c", "import sys; sys.stdin.read()"], connect_timeout=100
    )
    async with container(silent) as made:
        asking = asyncio.create_task(made.get(McpServers).server("silent").tools())
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        left = time.monotonic()

    assert time.monotonic() - left < 20


async def test_all_waiting_calls_fail_after_the_connect_timeout() -> None:
    silent = mcp_server(
        "silent", command=sys.executable, args=["-c", "import sys; sys.stdin.read()"], connect_timeout=0.2
    )
    async with container(silent) as made:
        server = made.get(McpServers).server("silent")
        errors = await asyncio.gather(*(server.tools() for _ in range(3)), return_exceptions=True)

    assert [type(each) for each in errors] == [McpConnectionError] * 3
    assert "no answer within 0.2 s" in str(errors[0])


async def test_calls_in_a_stopped_container_raise_a_clear_error() -> None:
    async with container(mortal()) as made:
        server = made.get(McpServers).server("mortal")

    with pytest.raises(McpConnectionError, match="stopped"):
        await server.tools()


# --- a server of another author over HTTP


@asynccontextmanager
async def everything(node_servers: Path, port: int) -> AsyncIterator[Any]:
    """Run server-everything on the port during a block, then kill it."""
    process = await asyncio.create_subprocess_exec(
        "node",
        str(node_servers / "server-everything" / "dist" / "index.js"),
        "streamableHttp",
        env={**os.environ, "PORT": str(port)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(100):
            said = b""
            while b"listening" not in said:
                line = await process.stderr.readline()
                assert line, f"server-everything ended: {said.decode()}"
                said += line
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.timeout(400)  # starts Node three times
async def test_http_servers_can_start_late_stop_and_return(node_servers: Path, clock: Clock) -> None:
    port = free_port()
    far = mcp_server("far", url=f"http://127.0.0.1:{port}/mcp", timeout=100)
    async with container(far) as made:
        server = made.get(McpServers).server("far")

        async def echo() -> str:
            return str((await server.call("echo", {"message": "hällo"})).content[0].text)

        with pytest.raises(McpConnectionError, match="cannot be reached"):
            await echo()
        async with everything(node_servers, port):
            assert "hällo" in await echo()
            long = asyncio.create_task(server.call("trigger-long-running-operation", {"duration": 60, "steps": 1}))
            assert "hällo" in await echo()
            clock.advance(101)
            with pytest.raises(McpTimeoutError):
                await long
            assert "hällo" in await echo()
        async with everything(node_servers, port):  # another process, which does not know the session
            assert "hällo" in await echo()
        with pytest.raises(McpConnectionError, match="could not run echo: the connection broke"):
            await echo()
        async with everything(node_servers, port) as process:
            long = asyncio.create_task(server.call("trigger-long-running-operation", {"duration": 1, "steps": 60}))
            assert "hällo" in await echo()
            process.kill()
            await asyncio.wait([long], timeout=1)
            clock.advance(101)
            with pytest.raises((McpConnectionError, McpTimeoutError)):  # the call can wait until its timeout
                await long
