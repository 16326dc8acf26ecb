"""Resources, prompts, roles and progress of a container that serves MCP clients."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Annotated, Any, Protocol

import pytest
from fastapi import Depends, FastAPI, HTTPException, Request
from mcp import Client, MCPError
from pydantic import BaseModel

from tests.mcp.uvicorn_server import serving
from toolbox import (
    AiMessage,
    AudioContent,
    Container,
    IllegalConfigurationError,
    ImageContent,
    Inject,
    InvocationContext,
    PdfContent,
    Progress,
    SystemMessage,
    TextContent,
    ToolAbort,
    ToolRetry,
    UserMessage,
    call_scoped,
    create_ai_service,
    produces,
    register_ai_service,
    request_scoped,
    tool,
)
from toolbox.mcp import (
    McpConnectionError,
    McpError,
    McpEvent,
    McpListener,
    McpProgress,
    McpServers,
    mcp_prompt,
    mcp_resource,
    mcp_server,
    mcp_server_of,
)
from toolbox.security import SecurityIdentity, permit_all, roles_allowed
from toolbox.testing import ScriptedChatModel
from toolbox_fastapi import install, mount_mcp

pytestmark = pytest.mark.anyio


class Stock:
    def __init__(self) -> None:
        self.wines = {1: "Chianti"}


closed: list[str] = []


@call_scoped
class Session:
    def stop(self) -> None:
        closed.append("session")


class Invoice(BaseModel):
    number: int


class Cellar:
    """A bean with resources, prompts and a tool."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock

    @mcp_resource("cellar://rules", name="The rules", description="What is allowed", mime_type="text/markdown")
    def rules(self) -> str:
        return "# No smoking"

    @mcp_resource("cellar://wines/{number}")
    async def wine(self, number: int, session: Inject[Session], context: InvocationContext) -> str | None:
        """Describe a wine.

        More text.
        """
        assert isinstance(session, Session)
        assert context.method == "wine"
        return self._stock.wines.get(number)

    @mcp_resource("cellar://label/{name}{?size}")
    def label(self, name: str, size: int = 1) -> list[Any]:
        return [TextContent(f"{name} {size}"), ImageContent(data=b"\x89PNG"), AudioContent(b"RIFF", "audio/wav")]

    @mcp_resource("cellar://plan.pdf")
    def plan(self) -> PdfContent:
        return PdfContent(data=b"%PDF", name="plan.pdf")

    @mcp_resource("cellar://raw")
    def raw(self) -> bytes:
        return b"\x00\xff"

    @mcp_resource("cellar://invoice")
    def invoice(self) -> Invoice:
        return Invoice(number=7)

    @mcp_resource("cellar://broken")
    def broken(self) -> str:
        raise ValueError("password: hunter2")

    @mcp_resource("cellar://later")
    def later(self) -> str:
        raise ToolRetry("come back tomorrow")

    @mcp_resource("cellar://never")
    def never(self) -> str:
        raise ToolAbort("closed forever")

    @mcp_resource("cellar://remote")
    def remote(self) -> PdfContent:
        return PdfContent("https://example.org/a.pdf")

    @mcp_prompt
    def recommend(self, dish: str, bottles: Annotated[int, "How many"] = 1) -> str:
        """Recommend a wine."""
        return f"Recommend {bottles} bottles for {dish} from {len(self._stock.wines)} wines."

    @mcp_prompt(name="tell a story", description="A story")
    async def story(self) -> list[Any]:
        return [
            "Begin.",
            AiMessage("Once"),
            UserMessage(["Look", ImageContent(data=b"\x89PNG")]),
            PdfContent(data=b"%"),
        ]

    @mcp_prompt
    def system(self) -> SystemMessage:
        return SystemMessage("no")

    @tool
    def count(self) -> int:
        """Count the wines."""
        return len(self._stock.wines)


def cellar() -> tuple[Container, Any]:
    container = Container().register(Stock, Session)
    return container, mcp_server_of(container, [Cellar])


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_resources_and_prompts_are_listed(mode: Any) -> None:
    container, server = cellar()
    async with container, Client(server, mode=mode) as client:
        tools = (await client.list_tools()).tools
        resources = (await client.list_resources()).resources
        templates = (await client.list_resource_templates()).resource_templates
        prompts = (await client.list_prompts()).prompts

    assert [each.name for each in tools] == ["count"]
    rules = resources[0]
    assert (rules.uri, rules.name, rules.description, rules.mime_type) == (
        "cellar://rules",
        "The rules",
        "What is allowed",
        "text/markdown",
    )
    assert [(each.uri_template, each.name, each.description) for each in templates] == [
        ("cellar://wines/{number}", "wine", "Describe a wine."),
        ("cellar://label/{name}{?size}", "label", None),
    ]
    recommend = prompts[0]
    assert (recommend.name, recommend.description) == ("recommend", "Recommend a wine.")
    assert [(each.name, each.description, each.required) for each in recommend.arguments or []] == [
        ("dish", None, True),
        ("bottles", "How many", False),
    ]
    assert prompts[1].name == "tell a story"


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("cellar://rules", [("text/markdown", "# No smoking")]),
        ("cellar://wines/1", [("text/plain", "Chianti")]),
        ("cellar://label/x%20y?size=3", [("text/plain", "x y 3"), ("image/png", b"\x89PNG"), ("audio/wav", b"RIFF")]),
        ("cellar://label/x", [("text/plain", "x 1"), ("image/png", b"\x89PNG"), ("audio/wav", b"RIFF")]),
        ("cellar://plan.pdf", [("application/pdf", b"%PDF")]),
        ("cellar://raw", [("application/octet-stream", b"\x00\xff")]),
        ("cellar://invoice", [("application/json", '{"number":7}')]),
    ],
)
async def test_resources_are_read(uri: str, expected: list[tuple[str, Any]]) -> None:
    container, server = cellar()
    async with container, Client(server) as client:
        contents = (await client.read_resource(uri)).contents

    found = [(each.mime_type, each.text if hasattr(each, "text") else base64.b64decode(each.blob)) for each in contents]
    assert found == expected
    assert {str(each.uri) for each in contents} == {uri}


async def test_each_read_has_its_own_call_scope() -> None:
    closed.clear()
    container, server = cellar()
    async with container, Client(server) as client:
        await client.read_resource("cellar://wines/1")
        assert closed == ["session"]
        await client.read_resource("cellar://wines/1")

    assert closed == ["session", "session"]


@pytest.mark.parametrize(
    ("uri", "code", "text"),
    [
        ("cellar://nothing", -32602, "unknown resource 'cellar://nothing'"),
        ("cellar://wines/2", -32602, "unknown resource 'cellar://wines/2'"),
        ("cellar://wines/red", -32602, "number"),
        ("cellar://label/..%2F..%2Fetc", -32602, "unknown resource"),
        ("cellar://label/%2Fetc%2Fpasswd", -32602, "unknown resource"),
        ("cellar://label/a%00b", -32602, "unknown resource"),
        ("cellar://broken", -32603, "could not read the resource cellar://broken"),
        ("cellar://remote", -32603, "could not read the resource cellar://remote"),
        ("cellar://later", -32603, "come back tomorrow"),
        ("cellar://never", -32603, "closed forever"),
    ],
)
async def test_resources_that_cannot_be_read_are_errors_without_details(uri: str, code: int, text: str) -> None:
    container, server = cellar()
    async with container, Client(server) as client:
        with pytest.raises(MCPError) as raised:
            await client.read_resource(uri)

    assert raised.value.code == code
    assert text in raised.value.message
    assert "hunter2" not in raised.value.message


async def test_prompts_are_written_with_converted_arguments() -> None:
    container, server = cellar()
    async with container, Client(server) as client:
        recommended = await client.get_prompt("recommend", {"dish": "fish", "bottles": "3"})
        story = await client.get_prompt("tell a story")

    assert recommended.description == "Recommend a wine."
    shown = [each.model_dump(by_alias=True, exclude_none=True) for each in recommended.messages]
    text = "Recommend 3 bottles for fish from 1 wines."
    assert shown == [{"role": "user", "content": {"type": "text", "text": text}}]
    kinds = [(each.role, each.content.type) for each in story.messages]
    assert kinds == [
        ("user", "text"),
        ("assistant", "text"),
        ("user", "text"),
        ("user", "image"),
        ("user", "resource"),
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "code", "text"),
    [
        ("nothing", {}, -32602, "unknown prompt 'nothing'"),
        ("recommend", {}, -32602, "dish"),
        ("recommend", {"dish": "x", "bottles": "many"}, -32602, "bottles"),
        ("system", {}, -32603, "could not write the prompt system"),
    ],
)
async def test_prompts_that_cannot_be_written_are_errors(name: str, arguments: Any, code: int, text: str) -> None:
    container, server = cellar()
    async with container, Client(server) as client:
        with pytest.raises(MCPError) as raised:
            await client.get_prompt(name, arguments)

    assert (raised.value.code, text in raised.value.message) == (code, True)


# --- what can be offered


@mcp_resource("note://{name}")
def note(name: str, stock: Inject[Stock]) -> str:
    """Read a note."""
    return f"{name}: {len(stock.wines)}"


@mcp_prompt
def greet(name: str) -> str:
    return f"Greet {name}."


class Words:
    @staticmethod
    @mcp_prompt
    def plain() -> str:
        return "plain"

    @mcp_prompt
    @classmethod
    def named(cls) -> str:
        return cls.__name__

    @mcp_resource("words://all")
    def all(self) -> str:
        return "all"


class More(Words):
    def all(self) -> str:
        return "more"


async def test_functions_instances_single_methods_and_static_methods_are_offered() -> None:
    container = Container().register(Stock)
    server = mcp_server_of(container, [note, greet, More(), Cellar.rules, Cellar.recommend])
    async with container, Client(server) as client:
        prompts = {each.name for each in (await client.list_prompts()).prompts}
        resources = {each.uri for each in (await client.list_resources()).resources}
        read = [await client.read_resource(uri) for uri in ("note://a", "words://all", "cellar://rules")]
        written = [await client.get_prompt(name) for name in ("plain", "named")]
        with pytest.raises(MCPError, match="Method not found"):
            await client.list_tools()

    assert prompts == {"greet", "plain", "named", "recommend"}
    assert resources == {"words://all", "cellar://rules"}
    assert [each.contents[0].text for each in read] == ["a: 1", "more", "# No smoking"]  # type: ignore[union-attr]  # texts
    assert [each.messages[0].content.text for each in written] == ["plain", "More"]  # type: ignore[union-attr]  # texts


def test_decorators_leave_functions_as_they_are() -> None:
    assert greet("Ann") == "Greet Ann."
    assert Words.plain() == "plain"
    with pytest.raises(TypeError, match=r"@mcp_resource: expected a URI, got <function"):
        mcp_resource(greet)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(TypeError, match="@mcp_prompt: expected a function or method"):
        mcp_prompt(Words)


def wrong() -> dict[str, Any]:
    @mcp_resource("no-scheme")
    def no_scheme() -> str: ...

    @mcp_resource("a://{x}{y}")
    def adjacent(x: str, y: str) -> str: ...

    @mcp_resource("a://{x}")
    def other_name(y: str) -> str: ...

    @mcp_resource("a://b")
    def needs(y: str) -> str: ...

    @mcp_resource("a://b{?q}")
    def query(q: str) -> str: ...

    @mcp_prompt
    def untyped(x) -> str: ...  # type: ignore[no-untyped-def]  # on purpose

    return {
        "'no-scheme' is not a URI": no_scheme,
        "is not a valid URI template": adjacent,
        "the URI has {x}, but no parameter has this name": other_name,
        "parameter 'y' is not in the URI 'a://b'": needs,
        "parameter 'q' is in the query, which clients may leave out": query,
        "x": untyped,
    }


@pytest.mark.parametrize("text", wrong())
def test_wrong_declarations_are_problems_before_the_start(text: str) -> None:
    with pytest.raises(IllegalConfigurationError) as raised:
        mcp_server_of(Container(), [wrong()[text]])

    assert text in str(raised.value)


def test_duplicates_and_missing_beans_are_problems() -> None:
    @mcp_resource("note://{name}")
    def same(name: str) -> str: ...

    @mcp_prompt(name="greet")
    def hello() -> str: ...

    with pytest.raises(IllegalConfigurationError) as raised:
        mcp_server_of(Container(), [note, same, greet, hello])
    container = Container()
    mcp_server_of(container, [Cellar])

    assert "2 resources have the URI 'note://{name}': note, same" in str(raised.value)
    assert "2 prompts have the name 'greet': greet, hello" in str(raised.value)
    assert "Cellar.stock" in [each.where for each in container.check()]


def test_tools_that_need_approval_are_not_served() -> None:
    @tool(requires_approval=True)
    def delete() -> None: ...

    with pytest.raises(IllegalConfigurationError, match="needs approval, which MCP clients cannot give"):
        mcp_server_of(Container(), [delete])


async def test_a_service_can_be_a_prompt() -> None:
    @register_ai_service
    class Writer(Protocol):
        @mcp_prompt
        async def write(self, topic: str) -> str:
            """Write a prompt."""
            ...

    writer = create_ai_service(Writer, chat_model=ScriptedChatModel(["Tell me about wine."]))
    container = Container()
    server = mcp_server_of(container, [writer])
    async with container, Client(server) as client:
        written = await client.get_prompt("write", {"topic": "wine"})

    assert written.messages[0].content.text == "Tell me about wine."  # type: ignore[union-attr]  # a text


# --- roles

caller: ContextVar[SecurityIdentity | None] = ContextVar("caller", default=None)


@produces(scope="request")
def current() -> SecurityIdentity:
    return caller.get() or SecurityIdentity.anonymous()


@roles_allowed("admin")
class Vault:
    @mcp_resource("vault://gold")
    def gold(self) -> str:
        return "much"

    @mcp_resource("vault://{drawer}")
    def drawer(self, drawer: str) -> str:
        return drawer

    @mcp_prompt
    def rob(self) -> str:
        return "Rob it."

    @tool
    def open(self) -> str:
        return "open"

    @permit_all
    @tool
    def look(self) -> str:
        return "closed"

    @permit_all
    @mcp_prompt
    def admire(self) -> str:
        return "Admire it."


@pytest.mark.parametrize("roles", [None, ["user"], ["admin"]])
async def test_clients_see_only_what_their_identity_may_use(roles: list[str] | None) -> None:
    caller.set(None if roles is None else SecurityIdentity("ann", frozenset(roles)))
    is_admin = roles == ["admin"]
    container = Container().register(current)
    server = mcp_server_of(container, [Vault])
    async with container, Client(server) as client:
        seen = [
            {each.name for each in (await client.list_tools()).tools},
            {each.uri for each in (await client.list_resources()).resources},
            {each.uri_template for each in (await client.list_resource_templates()).resource_templates},
            {each.name for each in (await client.list_prompts()).prompts},
        ]
        opened = await client.call_tool("open", {})
        looked = await client.call_tool("look", {})
        errors = []
        for request in (
            lambda: client.read_resource("vault://gold"),
            lambda: client.read_resource("vault://left"),
            lambda: client.get_prompt("rob"),
        ):
            try:
                await request()
            except MCPError as error:
                errors.append(error.message)

    assert seen == (
        [{"open", "look"}, {"vault://gold"}, {"vault://{drawer}"}, {"rob", "admire"}]
        if is_admin
        else [{"look"}, set(), set(), {"admire"}]
    )
    assert looked.content[0].text == "closed"  # type: ignore[union-attr]  # a text
    assert opened.is_error is not is_admin
    unknown = ["unknown resource 'vault://gold'", "unknown resource 'vault://left'", "unknown prompt 'rob'"]
    assert errors == ([] if is_admin else unknown)


def of_token(request: Request) -> SecurityIdentity | None:
    token = request.headers.get("authorization", "").removeprefix("Bearer ")
    return SecurityIdentity("ann", frozenset({token})) if token else None


@pytest.mark.parametrize("token", ["", "user", "admin"])
async def test_the_identity_of_the_request_decides_over_http(token: str) -> None:
    app, container = FastAPI(), Container()
    install(app, container)
    mount_mcp(app, container, [Vault], identity=of_token)
    async with serving(app) as base:
        client = Container().register(McpServers)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        client.register_instance(mcp_server("vault", url=f"{base}/mcp", headers=headers), name="vault")
        async with client:
            vault = client.get(McpServers).server("vault")
            resources = [each.uri for each in await vault.resources()]
            prompts = [each.name for each in await vault.prompts()]
            if token == "admin":
                assert (await vault.read_resource("vault://left")).contents[0].text == "left"  # type: ignore[union-attr]  # a text
                assert await vault.prompt_messages("rob") == (UserMessage("Rob it."),)
            else:
                with pytest.raises(McpError, match="unknown resource"):
                    await vault.read_resource("vault://left")
                with pytest.raises(McpError, match="unknown prompt"):
                    await vault.prompt("rob")

    assert resources == (["vault://gold"] if token == "admin" else [])
    assert prompts == (["rob", "admire"] if token == "admin" else ["admire"])


@request_scoped
class Visit:
    def __init__(self, who: SecurityIdentity) -> None:
        self.who = who


@pytest.mark.parametrize("place", ["install", "mount_mcp", "mount_mcp, async"])
async def test_dependencies_of_the_server_run_when_the_caller_is_known(place: str) -> None:
    seen: list[str] = []

    async def of_token_later(request: Request) -> SecurityIdentity | None:
        return of_token(request)

    async def note(who: Inject[SecurityIdentity], visit: Inject[Visit]) -> None:
        seen.append(f"{who.name} {visit.who.name}")

    def note_on_a_thread(who: Inject[SecurityIdentity]) -> None:
        seen.append(str(who.name))
        if not who.roles:
            raise HTTPException(403, "nobody")

    app, container = FastAPI(), Container().register(Visit)
    install(app, container, identity=of_token if place == "install" else None)
    identity = {"install": None, "mount_mcp": of_token}.get(place, of_token_later)
    mount_mcp(app, container, [Vault], identity=identity, dependencies=[Depends(note), Depends(note_on_a_thread)])
    async with serving(app) as base:
        client = Container().register(McpServers)
        headers = {"Authorization": "Bearer admin"}
        client.register_instance(mcp_server("vault", url=f"{base}/mcp", headers=headers), name="vault")
        client.register_instance(mcp_server("closed", url=f"{base}/mcp"), name="closed")
        async with client:
            assert (await client.get(McpServers).server("vault").call("look", {})).content[0].text == "closed"  # type: ignore[union-attr]  # a text
            assert set(seen) == {"ann ann", "ann"}
            with pytest.raises(McpConnectionError) as raised:
                await client.get(McpServers).server("closed").tools()

    assert raised.value.status == 403


# --- progress


class Importer:
    @tool
    async def load(self, progress: Progress) -> str:
        for number in range(3):
            progress(number + 1, 3, f"row {number + 1}")
        progress(2)  # does not increase
        return "loaded"

    @tool
    def load_in_a_thread(self, progress: Progress) -> str:
        progress(1, 2)
        progress(2, 2, "done")
        return "loaded"

    @mcp_resource("rows://all")
    async def rows(self, progress: Progress) -> str:
        await progress(1, 1, "reading")
        return "rows"


@pytest.fixture
async def importer() -> AsyncIterator[str]:
    app, container = FastAPI(), Container()
    install(app, container)
    mount_mcp(app, container, [Importer])
    async with serving(app) as base:
        yield f"{base}/mcp"


class Heard(McpListener):
    def __init__(self) -> None:
        self.events: list[McpEvent] = []

    def on_mcp_event(self, event: McpEvent) -> None:
        self.events.append(event)


async def test_progress_of_tools_reaches_clients_over_http(importer: str) -> None:
    heard = Heard()
    container = Container().register(McpServers).register_instance(heard)
    container.register_instance(mcp_server("far", url=importer), name="far")
    async with container:
        server = container.get(McpServers).server("far")
        assert (await server.call("load", {})).content[0].text == "loaded"  # type: ignore[union-attr]  # a text
        assert (await server.call("load_in_a_thread", {})).content[0].text == "loaded"  # type: ignore[union-attr]  # a text

    assert heard.events == [
        McpProgress("far", "load", 1, 3, "row 1"),
        McpProgress("far", "load", 2, 3, "row 2"),
        McpProgress("far", "load", 3, 3, "row 3"),
        McpProgress("far", "load_in_a_thread", 1, 2),
        McpProgress("far", "load_in_a_thread", 2, 2, "done"),
    ]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_progress_is_sent_to_clients_that_ask_for_it(mode: Any) -> None:
    container = Container()
    server = mcp_server_of(container, [Importer])
    got: list[Any] = []

    async def on_progress(*progress: Any) -> None:
        got.append(progress)

    async with container, Client(server, mode=mode) as client:
        await client.call_tool("load", {}, progress_callback=on_progress)
        await client.call_tool("load", {})
        assert (await client.read_resource("rows://all")).contents[0].text == "rows"  # type: ignore[union-attr]  # a text

    assert got == [(1, 3, "row 1"), (2, 3, "row 2"), (3, 3, "row 3")]
