"""Calls of MCP tools that wait for a person: which ones wait, and that an answered call runs only on its own server."""

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from fastapi import FastAPI

from tests.conftest import free_port
from tests.mcp.uvicorn_server import serving
from toolbox import (
    AiMessage,
    Container,
    Result,
    ToolboxSettings,
    ToolProviderRequest,
    UserMessage,
    register_ai_service,
    tool,
)
from toolbox.deferred_answers import ToolOrigin
from toolbox.mcp import McpServers, mcp_resource, mcp_server, mcp_toolbox, mcp_tools
from toolbox.mcp.tool_choice import address_of
from toolbox.runs import Answer, InMemoryRunStore, RunIncompatibleError, Runs, RunStore, approve, reject
from toolbox.runs.service_calls.stored_calls import find_other_origin
from toolbox.sql import SqlRunStore
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import install, mount_mcp

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


@register_ai_service
class Cook(Protocol):
    @mcp_toolbox()
    async def cook(self, wish: str) -> Result[str]: ...


class Oven:
    """Counts its calls."""

    def __init__(self) -> None:
        self.burnt: list[str] = []

    @tool
    def burn(self, what: str) -> str:
        """Burn something."""
        self.burnt.append(what)
        return f"ashes of {what}"

    @mcp_resource("oven://manual")
    def manual(self) -> str:
        return "Do not touch."


class OtherOven(Oven):
    @tool
    def burn(self, what: str) -> str:
        """Burn something else; the input is the same."""
        return super().burn(f"other {what}")


class HotterOven(Oven):
    @tool
    def burn(self, what: str, degrees: int = 200) -> str:  # type: ignore[override]  # another input schema
        """Burn something."""
        return super().burn(what)


@asynccontextmanager
async def serving_mcp(oven: Oven, port: int = 0) -> AsyncIterator[str]:
    app = FastAPI()
    install(app, served := Container().register_instance(oven))
    mount_mcp(app, served, [type(oven)])
    async with serving(app, port) as base:
        yield f"{base}/mcp"


@asynccontextmanager
async def kitchen(folder: Path, servers: Mapping[str, str], *replies: Any, **options: Any) -> AsyncIterator[Container]:
    """Run a program with these servers, by name, and the runs of `folder`."""
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(f"sqlite+aiosqlite:///{folder}/runs.db")
    container = Container(models={"default": ScriptedChatModel(list(replies))}).register(Cook)
    container.register_instance(SqlRunStore(engine), as_type=RunStore)
    for name, url in servers.items():
        container.register_instance(mcp_server(name, url=url, **{"approval": "all", **options}), name=name)
    async with container:
        yield container
    await engine.dispose()


BURN = AiMessage(None, [tool_call("burn", {"what": "toast"})])
GONE = "http://127.0.0.1:9/mcp"


async def asked(folder: Path, servers: Mapping[str, str]) -> tuple[str, str]:
    """Start a call whose tool needs approval. Returns the ids of the run and the call."""
    async with kitchen(folder, servers, BURN) as container:
        result = await container.get(Cook).cook("Burn the toast.")
        [pending] = result.pending
        assert pending.attributes == {"mcp_server": "own"}
        assert (pending.kind, pending.tool_name, pending.arguments) == ("approval", "burn", {"what": "toast"})
        [listed] = await container.get(Runs).list()
        assert listed.pending[0].attributes == {"mcp_server": "own"}
        return result.run_id or "", pending.id


@pytest.mark.parametrize("answer", [approve(), approve({"what": "bread"})])
async def test_an_approved_call_runs_only_on_the_server_that_its_person_saw(tmp_path: Path, answer: Answer) -> None:
    own, other = Oven(), OtherOven()
    async with serving_mcp(own) as first, serving_mcp(other) as second:
        run_id, call_id = await asked(tmp_path, {"own": first})
        async with kitchen(tmp_path, {"own": GONE, "other": second}, "done") as container:
            with pytest.raises(RunIncompatibleError, match=r"MCP server 'own' does not offer the tool 'burn' now"):
                await container.runs.resume(run_id, {call_id: answer})
            stored = await container.runs.get(run_id)
        assert stored.status == "running"
        assert [(each.answer, each.call_id) for each in stored.history if each.call_id] == [("approve", call_id)]
        assert own.burnt == other.burnt == []
        async with kitchen(tmp_path, {"own": first, "other": second}, "done") as container:
            result = await container.runs.resume(run_id, {})

    assert result.content == "done"
    assert own.burnt == ["toast" if answer.arguments is None else "bread"]
    assert other.burnt == []


async def test_a_pending_call_has_the_declared_name_of_its_server_and_runs_under_each_spelling(tmp_path: Path) -> None:
    own = Oven()
    read = tool_call("get_resource", {"server": "my_oven", "uri": "oven://manual"})
    calls = AiMessage(None, [*BURN.tool_execution_requests, read])
    options: Any = {"expose_resources": True}
    async with serving_mcp(own) as url:
        servers = {"My-Oven": url, "other": url}
        async with kitchen(tmp_path, servers, calls, **options) as container:
            assert container.get(McpServers).server("my_oven").name == "My-Oven"
            asked = await container.get(Cook).cook("Burn the toast.")
        async with kitchen(tmp_path, {"my.oven": url, "other": url}, "done", **options) as container:
            result = await container.runs.resume(asked.run_id or "", {each.id: approve() for each in asked.pending})

    assert [each.attributes for each in asked.pending] == [{"mcp_server": "My-Oven"}] * 2
    assert [each.result for each in result.tool_executions] == ["ashes of toast", "Do not touch."]


async def test_an_approved_call_does_not_run_if_the_server_changed_the_tools_input(tmp_path: Path) -> None:
    changed, port = HotterOven(), free_port()
    async with serving_mcp(Oven(), port) as url:
        run_id, call_id = await asked(tmp_path, {"own": url})
    async with serving_mcp(changed, port), kitchen(tmp_path, {"own": url}, "done") as container:
        with pytest.raises(RunIncompatibleError, match="or has changed it"):
            await container.runs.resume(run_id, {call_id: approve()})

    assert changed.burnt == []


async def test_another_description_keeps_an_approval(tmp_path: Path) -> None:
    described, port = OtherOven(), free_port()
    async with serving_mcp(Oven(), port) as url:
        run_id, call_id = await asked(tmp_path, {"own": url})
    async with serving_mcp(described, port), kitchen(tmp_path, {"own": url}, "done") as container:
        result = await container.runs.resume(run_id, {call_id: approve()})

    assert result.content == "done"
    assert described.burnt == ["other toast"]


# --- the same name, another server


@pytest.mark.parametrize("answer", [approve(), approve({"what": "bread"})], ids=["approve", "edit"])
async def test_a_server_that_was_exchanged_at_run_time_does_not_run_an_approved_call(answer: Answer) -> None:
    own, other = Oven(), Oven()
    model = ScriptedChatModel([BURN, "done"])
    async with (
        serving_mcp(own) as first,
        serving_mcp(other) as second,
        Container(models={"default": model}).register(Cook, McpServers) as container,
    ):
        servers = container.get(McpServers)
        await servers.add(mcp_server("own", url=first, approval="all"))
        waiting = await container.get(Cook).cook("Burn the toast.")
        await servers.remove("own")
        await servers.add(mcp_server("own", url=second, approval="all"))
        with pytest.raises(RunIncompatibleError, match="MCP server 'own' has another address or command"):
            await container.runs.resume(waiting.run_id or "", {"0": answer})
        assert own.burnt == other.burnt == []

        await servers.remove("own")
        await servers.add(mcp_server("own", url=f"{first}?key=new", approval="all"))
        result = await container.runs.resume(waiting.run_id or "", {})

    assert result.content == "done"
    assert (own.burnt, other.burnt) == (["toast" if answer.arguments is None else "bread"], [])


async def test_reading_a_resource_is_bound_to_the_address_too(tmp_path: Path) -> None:
    read = AiMessage(None, [tool_call("get_resource", {"uri": "oven://manual"})])
    async with serving_mcp(Oven()) as first, serving_mcp(Oven()) as second:
        async with kitchen(tmp_path, {"own": first}, read, expose_resources=True) as container:
            waiting = await container.get(Cook).cook("Read the manual.")
        async with kitchen(tmp_path, {"own": second}, "done", expose_resources=True) as container:
            with pytest.raises(RunIncompatibleError, match="another address or command"):
                await container.runs.resume(waiting.run_id or "", {"0": approve()})


async def test_a_command_with_other_arguments_does_not_run_an_approved_call(tmp_path: Path) -> None:
    """The first argument is the script of the server, which ignores the others."""

    def office(*replies: Any, args: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> Container:
        script = str(Path(__file__).with_name("growing_server.py"))
        server = mcp_server("own", command=sys.executable, args=[script, *args], env=env, approval="all")
        made = Container(models={"default": ScriptedChatModel(replies)}).register(Cook)
        return made.register_instance(server, name="own").register_instance(store, as_type=RunStore)

    store = InMemoryRunStore()
    async with office(AiMessage(None, [tool_call("grow")])) as container:
        waiting = await container.get(Cook).cook("Grow.")
    async with office("done", args=("--other",)) as container:
        with pytest.raises(RunIncompatibleError, match="another address or command"):
            await container.runs.resume(waiting.run_id or "", {"0": approve()})
    async with office("done", env={"KEY": "new"}) as container:
        result = await container.runs.resume(waiting.run_id or "", {})
    assert result.content == "done"


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ({"url": "https://a.example/mcp?key=1"}, {"url": "https://a.example/mcp?key=2"}, True),
        ({"url": "https://u:p@A.example/mcp"}, {"url": "https://a.example/mcp#x"}, True),
        ({"url": "https://a.example/mcp"}, {"url": "https://a.example/other"}, False),
        ({"url": "https://a.example/mcp"}, {"url": "https://a.example:8443/mcp"}, False),
        ({"url": "https://a.example/mcp"}, {"url": "http://a.example/mcp"}, False),
        ({"command": "a", "args": ["b c"]}, {"command": "a", "args": ["b", "c"]}, False),
        ({"command": "a"}, {"command": "b"}, False),
        ({"command": "a", "cwd": "/x", "env": {"K": "1"}}, {"command": "a", "cwd": "/y"}, True),
    ],
)
def test_an_address_is_compared_without_what_is_secret_or_changes(first: Any, second: Any, is_same: bool) -> None:
    one, other = (address_of(mcp_server("own", **each).settings) for each in (first, second))
    assert (one == other) is is_same
    assert "p@" not in one


async def test_a_rejected_call_needs_no_unchanged_tool(tmp_path: Path) -> None:
    changed = HotterOven()
    async with serving_mcp(Oven()) as first, serving_mcp(changed) as second:
        run_id, call_id = await asked(tmp_path, {"own": first})
        async with kitchen(tmp_path, {"own": second}, "done") as container:
            result = await container.runs.resume(run_id, {call_id: reject("no fire")})

    assert [each.result for each in result.tool_executions] == ["no fire"]
    assert changed.burnt == []


async def test_no_call_of_a_reply_runs_if_one_of_them_would_run_elsewhere(tmp_path: Path) -> None:
    own = Oven()
    calls = AiMessage(None, [tool_call("burn", {"what": "toast"}), tool_call("get_resource", {"uri": "oven://manual"})])
    async with serving_mcp(own) as first:
        async with kitchen(tmp_path, {"own": first}, calls, expose_resources=True) as container:
            asked = await container.get(Cook).cook("Read, then burn.")
        async with kitchen(tmp_path, {"own": first}, "done") as container:  # without its resources
            with pytest.raises(RunIncompatibleError, match="'get_resource'"):
                await container.runs.resume(asked.run_id or "", {each.id: approve() for each in asked.pending})

    assert own.burnt == []


async def test_a_call_that_was_approved_for_a_tool_of_the_program_does_not_run_on_a_server(tmp_path: Path) -> None:
    other = Oven()

    @register_ai_service(tools=burn)
    class Cook(Protocol):
        async def cook(self, wish: str) -> Result[str]: ...

    @register_ai_service
    class Later(Protocol):
        @mcp_toolbox()
        async def cook(self, wish: str) -> Result[str]: ...

    Cook.__qualname__ = Later.__qualname__ = "Cook"  # the same service in two versions of the program
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/runs.db")
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving_mcp(other))
        first = Container(models={"default": ScriptedChatModel([BURN])}).register(Cook)
        async with first.register_instance(SqlRunStore(engine), as_type=RunStore):
            asked = await first.get(Cook).cook("Burn the toast.")
        then = Container(models={"default": ScriptedChatModel(["done"])}).register(Later)
        then.register_instance(mcp_server("other", url=url), name="other")
        async with then.register_instance(SqlRunStore(engine), as_type=RunStore):
            with pytest.raises(RunIncompatibleError, match="was not of an MCP server"):
                await then.runs.resume(asked.run_id or "", {asked.pending[0].id: approve()})
    await engine.dispose()

    assert other.burnt == []


@tool(requires_approval=True)
def burn(what: str) -> str:
    """Burn something at home."""
    return "smoke"


def test_a_call_that_waits_since_an_earlier_version_is_bound_to_the_name() -> None:
    earlier, now = ToolOrigin("own", "fingerprint"), ToolOrigin("own", "fingerprint", "address")

    assert find_other_origin("burn", now, earlier) is None
    assert find_other_origin("burn", ToolOrigin("own", "changed", "address"), earlier) is not None


# --- names of tools


@pytest.mark.parametrize(
    ("approval", "needed"),
    [(("burn",), {"burn"}), (["b*"], {"burn"}), ("b*", {"burn"}), (("get_*",), {"get_resource"})],
)
async def test_approval_can_name_tools_by_the_servers_names(approval: Any, needed: set[str]) -> None:
    async with serving_mcp(Oven()) as url:
        server = mcp_server("own", url=url, prefix="x_", expose_resources=True, approval=approval)
        container = Container(models={"default": ScriptedChatModel([])}).register(Cook)
        async with container.register_instance(server, name="own"):
            guarded = await names_of_guarded_tools(container)

    assert guarded == {each if each == "get_resource" else f"x_{each}" for each in needed}


async def names_of_guarded_tools(container: Container) -> set[str]:
    context: Any = None
    request = ToolProviderRequest(UserMessage(""), None, context)
    offered: Any = (await container.get(mcp_tools()).provide_tools(request)).tools
    return {each.specification.name for each in offered if each.requires_approval}


@pytest.mark.parametrize("text", ["b*", "b*, other_*", '["burn"]', "all"])
async def test_the_environment_can_name_the_tools_that_need_approval(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving_mcp(Oven()) as url:
        monkeypatch.setenv("TOOLBOX_MCP__OWN__URL", url)
        monkeypatch.setenv("TOOLBOX_MCP__OWN__APPROVAL", text)
        container = Container(models={"default": ScriptedChatModel([])}, settings=ToolboxSettings()).register(Cook)
        async with container:
            assert await names_of_guarded_tools(container) == {"burn"}


async def test_a_name_that_matches_no_tool_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with serving_mcp(Oven()) as url:
        container = Container(models={"default": ScriptedChatModel([])}).register(Cook)
        container.register_instance(mcp_server("own", url=url, approval=("burn", "delete_*")), name="own")
        async with container:
            for _ in range(2):
                await names_of_guarded_tools(container)

    assert caplog.text.count("approval='delete_*' matches none of its tools") == 1
    assert "approval='burn'" not in caplog.text


# --- resources


async def test_reading_a_resource_waits_for_approval_where_all_calls_do(tmp_path: Path) -> None:
    read = AiMessage(None, [tool_call("list_resources"), tool_call("get_resource", {"uri": "oven://manual"})])
    async with (
        serving_mcp(Oven()) as url,
        kitchen(tmp_path, {"own": url}, read, "done", expose_resources=True) as container,
    ):
        first = await container.get(Cook).cook("Read the manual.")
        [pending] = first.pending
        second = await container.runs.resume(first.run_id or "", {pending.id: approve()})

    assert (pending.tool_name, pending.arguments) == ("get_resource", {"uri": "oven://manual"})
    assert pending.attributes == {"mcp_server": "own"}
    assert [each.result for each in second.tool_executions][1] == "Do not touch."


async def test_reading_a_resource_waits_only_for_the_servers_that_ask_for_it(tmp_path: Path) -> None:
    calls = [tool_call("get_resource", {"server": name, "uri": "oven://manual"}) for name in ("free", "own")]
    async with serving_mcp(Oven()) as url:
        container = Container(models={"default": ScriptedChatModel([AiMessage(None, calls), "done"])}).register(Cook)
        for name, approval in (("free", None), ("own", "all")):
            server = mcp_server(name, url=url, prefix=name, expose_resources=True, approval=approval)
            container.register_instance(server, name=name)
        async with container:
            first = await container.get(Cook).cook("Read both manuals.")
            [pending] = first.pending
            second = await container.runs.resume(first.run_id or "", {pending.id: approve()})

    assert pending.arguments["server"] == "own"
    assert pending.attributes == {"mcp_server": "own"}
    assert [each.result for each in second.tool_executions] == ["Do not touch."] * 2


# --- what a run has when it continues


class Tenant:
    """A seed that is not stored with runs."""


def tenant_headers(tenant: Tenant) -> dict[str, str]:
    return {}


def optional_headers(tenant: Tenant | None) -> dict[str, str]:
    return {}


@pytest.mark.parametrize(
    ("headers", "approval", "ways"),
    [
        (tenant_headers, "all", ["Cook.cook -> McpTools_all -> McpServers -> McpServer 'own' -> Tenant"]),
        (tenant_headers, None, []),
        (optional_headers, "all", []),
    ],
)
def test_headers_that_need_a_seed_are_a_problem_if_calls_wait_for_approval(
    headers: Any, approval: Any, ways: list[str]
) -> None:
    container = Container(models={"default": ScriptedChatModel([])}, seeds=(Tenant,)).register(Cook)
    container.register_instance(mcp_server("own", url=GONE, headers=headers, approval=approval), name="own")

    assert [each.where for each in container.check()] == ways
