"""Tests `@on_success` in the calls of MCP clients: before the result is sent, and its errors are those of the tool."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from mcp import Client, MCPError

from toolbox import Container, ToolErrors, ToolRetry, on_success, produces, request_scoped, return_to_model, tool
from toolbox.mcp import mcp_prompt, mcp_resource, mcp_server_of

pytestmark = pytest.mark.anyio

log: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    log.clear()


@request_scoped
class Unit:
    error: Exception | None = None

    @on_success
    def commit(self) -> None:
        log.append("committed" if self.error is None else "failing")
        if self.error is not None:
            raise self.error


class Connection: ...


class Notes:
    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @tool("Adds a note")
    async def add(self, text: str) -> str:
        log.append("ran")
        if text == "bad":
            self._unit.error = LookupError("deferred constraint")
        if text == "again":
            self._unit.error = ToolRetry("write another text")
        if text == "broken":
            raise ValueError("no luck")
        return "stored"

    @mcp_resource("notes://all")
    async def all(self) -> str:
        return "none"

    @mcp_resource("notes://broken")
    async def broken(self) -> str:
        self._unit.error = LookupError("deferred constraint")
        return "none"

    @mcp_prompt
    async def ask(self) -> str:
        return "Which notes are there?"


async def called(text: str, **options: Any) -> Any:
    container = Container(**options).register(Unit)
    server = mcp_server_of(container, [Notes])
    async with container, Client(server) as client:
        return await client.call_tool("add", {"text": text})


async def test_a_result_is_sent_after_the_methods() -> None:
    result = await called("good")

    assert (result.is_error, result.content[0].text) == (False, "stored")
    assert log == ["ran", "committed"]


async def test_a_tool_that_fails_calls_nothing() -> None:
    assert (await called("broken")).is_error
    assert log == ["ran"]


async def test_arguments_that_do_not_fit_call_nothing() -> None:
    container = Container().register(Unit)
    server = mcp_server_of(container, [Notes])
    async with container, Client(server) as client:
        assert (await client.call_tool("add", {"wrong": 1})).is_error
    assert log == []


async def test_what_a_method_raises_is_the_error_of_the_tool() -> None:
    result = await called("bad")

    assert (result.is_error, result.content[0].text) == (True, "The tool 'add' failed.")
    assert log == ["ran", "failing"]


async def test_producers_get_it_too() -> None:
    @produces(scope="request")
    async def connection() -> AsyncIterator[Connection]:
        try:
            yield Connection()
        except LookupError:
            log.append("rolled back")
            raise

    class Broken:
        def __init__(self, connection: Connection, unit: Unit) -> None:
            unit.error = LookupError("deferred constraint")

        @tool("Adds a note")
        async def add(self) -> str:
            return "stored"

    container = Container().register(Unit, connection)
    server = mcp_server_of(container, [Broken])
    async with container, Client(server) as client:
        assert (await client.call_tool("add", {})).is_error

    assert log == ["failing", "rolled back"]


async def test_the_handlers_of_the_container_get_it() -> None:
    result = await called("bad", tool_errors=ToolErrors(on_tool_execution_error=return_to_model))

    assert result.content[0].text == "deferred constraint"


async def test_a_method_may_ask_the_model_to_try_again() -> None:
    result = await called("again")

    assert (result.is_error, result.content[0].text) == (True, "write another text")


async def test_resources_and_prompts_are_sent_after_the_methods() -> None:
    container = Container().register(Unit)
    server = mcp_server_of(container, [Notes])
    async with container, Client(server) as client:
        assert (await client.read_resource("notes://all")).contents[0].text == "none"
        assert (await client.get_prompt("ask")).messages
        assert log == ["committed", "committed"]
        with pytest.raises(MCPError, match="could not read the resource"):
            await client.read_resource("notes://broken")
