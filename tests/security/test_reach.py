"""The reach report: all ways from entries to tools, compared with calls by every identity."""

import asyncio
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncSession
from typer.testing import CliRunner

from toolbox import (
    AiMessage,
    AiServiceTool,
    ChatResponse,
    Container,
    IllegalConfigurationError,
    Inject,
    ToolErrors,
    ToolSpecification,
    UserMessage,
    create_ai_service,
    register_ai_service,
    rest,
    return_to_model,
    sql,
    tool,
    toolbox,
    user_message,
)
from toolbox.cli.commands import app as cli
from toolbox.cli.terminal import reach_as_table
from toolbox.errors import FrameworkError
from toolbox.guardrails import MaxLength, input_guardrails, tool_input_guardrails
from toolbox.runs import Runs
from toolbox.security import Reach, SecurityIdentity, authenticated, permit_all, roles_allowed
from toolbox.testing import ScriptedChatModel, offered_tools, tool_call
from toolbox_fastapi import Inject as InjectBean
from toolbox_fastapi import install, mount_mcp


@rest.register_rest_client(path="/menu", base_url="http://127.0.0.1:9")
class Menu(Protocol):
    @tool
    @roles_allowed("cook")
    @rest.delete("/{dish}")
    async def remove_dish(self, dish: str) -> None: ...


class Short(MaxLength):
    def __init__(self) -> None:
        super().__init__(100)


class Orders:
    @tool
    @roles_allowed("support", "admin")
    @sql.transactional
    async def refund(self, order: int, session: Inject[AsyncSession]) -> str: ...

    @tool(requires_approval=True)
    @tool_input_guardrails(Short)
    def write_off(self, order: int) -> str: ...

    @tool
    @authenticated
    def mine(self) -> str: ...

    @tool
    @roles_allowed()
    def never(self) -> str: ...


@register_ai_service(tools=[Orders, Menu])
class Expert(Protocol):
    @tool
    @roles_allowed("admin")
    @user_message("{topic}")
    async def expert(self, topic: str) -> str: ...


@register_ai_service(tools=[Expert], tool_provider=lambda request: None)
@input_guardrails(Short)
class Desk(Protocol):
    @authenticated
    async def chat(self, text: str) -> str: ...

    @permit_all
    @toolbox()
    async def hello(self, text: str) -> str: ...


class Waiter:
    def __init__(self, desk: Desk) -> None:
        self.desk = desk


def container() -> Container:
    return Container(models={"default": ScriptedChatModel([])}, seeds=[SecurityIdentity]).register(
        sql.engine, sql.session, Desk, Waiter
    )


ROLES = frozenset({"support", "admin"})


def test_each_row_is_one_way_with_all_its_checks() -> None:
    rows = container().reach()
    desk = [each for each in rows if each.entry == "Desk.chat"]

    assert [(each.path, each.tool) for each in desk] == [
        ((), "expert"),
        (("Expert.expert",), "refund"),
        (("Expert.expert",), "write_off"),
        (("Expert.expert",), "mine"),
        (("Expert.expert",), "remove_dish"),
        ((), "?"),
    ]
    expert, refund, write_off, mine, remove, unknown = desk
    assert (expert.roles, expert.effects, expert.guardrails) == ({"admin"}, (), (Short,))
    assert (refund.roles, refund.checks, refund.effects) == (
        {"admin"},
        (frozenset({"admin"}), ROLES),
        ("transactional",),
    )
    assert (write_off.requires_approval, write_off.guardrails, refund.requires_approval) == (True, (Short,), False)
    assert (mine.roles, mine.needs_identity) == ({"admin"}, True)
    assert (remove.roles, remove.effects) == ({"admin", "cook"}, ("DELETE /menu/{dish}",))
    assert (unknown.roles, unknown.needs_identity) == (frozenset(), True)
    assert str(refund) == "Desk.chat -> Expert.expert -> refund"


def test_methods_are_entries_with_their_own_roles() -> None:
    rows = container().reach()

    assert {each.entry for each in rows} == {"Desk.chat", "Desk.hello", "Expert.expert"}
    assert [each.tool for each in rows if each.entry == "Desk.hello"] == ["?"]
    refund = next(each for each in rows if each.entry == "Expert.expert" and each.tool == "refund")
    assert (refund.path, refund.roles) == ((), {"admin"})


def test_what_is_denied_to_all_cannot_be_reached() -> None:
    assert not any(each.tool == "never" for each in container().reach())


def test_a_row_knows_which_identities_can_take_the_way() -> None:
    both = SecurityIdentity("eve", frozenset({"admin", "cook"}))
    remove = next(each for each in container().reach() if each.entry == "Desk.chat" and each.tool == "remove_dish")

    assert remove.allows(both)
    assert not remove.allows(SecurityIdentity("ann", frozenset({"admin"})))
    assert not remove.allows(SecurityIdentity.anonymous())
    assert Reach("a", (), "b").allows(SecurityIdentity.anonymous())


def test_the_report_is_the_same_before_and_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_SQL__URL", "sqlite://")
    made = container()
    before = made.reach()
    with made:
        assert made.reach() == before


def test_tools_of_mcp_servers_can_be_destructive() -> None:
    def by_annotations(**hints: bool) -> tuple[str, ...]:
        found = AiServiceTool(ToolSpecification("t", "T.", metadata={"annotations": hints}), lambda request, _: "")

        @register_ai_service(tools=[found])
        class Service(Protocol):
            async def chat(self, text: str) -> str: ...

        [row] = Container().register(Service).reach()
        return row.effects

    assert by_annotations(destructiveHint=True) == ("destructive",)
    assert by_annotations(readOnlyHint=False) == ("destructive",)
    assert by_annotations(destructiveHint=False) == by_annotations(readOnlyHint=True) == ()


def test_services_made_without_a_container_are_followed() -> None:
    made: Any = create_ai_service(
        Expert, chat_model=ScriptedChatModel([]), tools=[mine], identity=SecurityIdentity.anonymous()
    )

    @register_ai_service(tools=[made])
    class Service(Protocol):
        async def chat(self, text: str) -> str: ...

    rows = Container(seeds=[SecurityIdentity]).register(Service).reach()
    assert [(each.path, each.tool, set(each.roles)) for each in rows] == [
        ((), "expert", {"admin"}),
        (("Expert.expert",), "mine", {"admin"}),
    ]


@tool
def mine() -> str: ...


# --- applications


def application() -> tuple[FastAPI, Container]:
    app, made = FastAPI(), Container(models={"default": ScriptedChatModel([])}).register(sql.engine, sql.session, Desk)
    install(app, made, identity=lambda: None)

    @app.post("/chat")
    async def chat(waiter: InjectBean[Waiter]) -> str: ...

    @app.websocket("/talk")
    async def talk(desk: InjectBean[Desk]) -> None: ...

    @app.get("/plain")
    @toolbox(mine)
    async def plain(desk: InjectBean[Desk]) -> str: ...

    @app.get("/nothing")
    async def nothing() -> str: ...

    made.register(Waiter)
    mount_mcp(app, made, [Orders.mine, Expert])
    return app, made


def test_endpoints_and_mcp_servers_are_entries() -> None:
    app, made = application()
    rows = made.reach(app)

    assert {each.entry for each in rows} == {
        "POST /chat",
        "WebSocket /talk",
        "GET /plain",
        "MCP /mcp",
        "Desk.chat",
        "Desk.hello",
        "Expert.expert",
    }
    refund = next(each for each in rows if each.entry == "POST /chat" and each.tool == "refund")
    assert (refund.path, refund.roles) == (("Desk.chat", "Expert.expert"), {"admin"})
    added = [each for each in rows if each.entry == "GET /plain" and each.tool == "mine" and len(each.path) == 1]
    assert [each.path for each in added] == [("Desk.chat",), ("Desk.hello",)]
    mcp = [(each.path, each.tool) for each in rows if each.entry == "MCP /mcp"]
    assert mcp[:3] == [((), "mine"), ((), "expert"), (("Expert.expert",), "refund")]
    assert made.reach() == [each for each in rows if each.entry[0] in "DE"]


def test_an_endpoint_that_can_start_runs_reaches_every_async_method() -> None:
    class Jobs:
        def __init__(self, runs: Runs) -> None: ...

    @register_ai_service(tools=mine)
    class Blocking(Protocol):
        def ask(self, text: str) -> str: ...

    app, made = application()
    made.register(Blocking, Jobs)

    @app.post("/jobs")
    @roles_allowed("clerk")
    async def start(runs: InjectBean[Runs], desk: InjectBean[Desk]) -> str: ...

    @app.post("/later")
    async def later(jobs: InjectBean[Jobs]) -> str: ...

    rows = made.reach(app)
    by_entry = {
        entry: [each.path[0] for each in rows if each.entry == entry and len(each.path) == 1]
        for entry in ("POST /jobs", "POST /later")
    }

    assert set(by_entry["POST /jobs"]) == set(by_entry["POST /later"]) == {"Desk.chat", "Desk.hello", "Expert.expert"}
    assert len(by_entry["POST /jobs"]) == len(by_entry["POST /later"])  # each way once
    assert all({"clerk"} in each.checks for each in rows if each.entry == "POST /jobs")


def test_a_row_names_the_roles_that_may_approve() -> None:
    class Money:
        @tool(requires_approval=True, approvers=("manager", "owner"))
        def pay(self) -> str: ...

    @register_ai_service(tools=Money)
    class Payer(Protocol):
        @tool(requires_approval=True, approvers=["manager", "clerk"])
        async def settle(self, text: str) -> str: ...

    @register_ai_service(tools=Payer)
    class Office(Protocol):
        async def chat(self, text: str) -> str: ...

    rows = {str(each): each for each in Container().register(Office, Payer, Money).reach()}

    assert rows["Payer.settle -> pay"].approvers == ("manager", "owner")
    assert rows["Office.chat -> settle"].approvers == ("manager", "clerk")
    way = rows["Office.chat -> Payer.settle -> pay"]
    assert way.approvers == ("manager", "clerk", "owner")
    assert way.as_json()["approvers"] == ["manager", "clerk", "owner"]
    assert [line.split("  ")[-1] for line in reach_as_table([way])][-1] == "manager, clerk, owner"


def test_an_application_of_another_container_is_refused() -> None:
    for app in (FastAPI(), application()[0], 3):
        with pytest.raises(IllegalConfigurationError, match="not an application of this container"):
            container().reach(app)


# --- the command line


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "shop_of_reach.py").write_text(
        "from fastapi import FastAPI\n"
        "from tests.security.test_reach import application\n"
        "from toolbox import Container\n"
        "app, container = application()\n"
        "def create_app() -> FastAPI: return app\n"
        "def create_container() -> Container: return container\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(Path(__file__).parents[2])
    yield "shop_of_reach"
    sys.modules.pop("shop_of_reach", None)


def test_the_command_prints_a_table_json_and_mermaid(program: str) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(cli, ["reach", *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    table = run(f"{program}:app").splitlines()
    assert table[0].split() == ["entry", "path", "tool", "roles", "approval", "guardrails", "effects"]
    [refund] = [line for line in table if line.startswith("POST /chat") and " refund " in line]
    assert refund.split("  ")[1:] != []
    assert "Desk.chat → Expert.expert" in refund
    assert refund.endswith("transactional")
    assert any("any identity" in line for line in table)

    rows = json.loads(run(f"{program}:app", "--json"))["reach"]
    assert {"entry": "POST /chat", "path": ["Desk.chat"], "tool": "expert"}.items() <= rows[0].items()
    assert len(rows) == len(table) - 1
    assert all(
        not each["entry"].startswith("POST") for each in json.loads(run(f"{program}:container", "--json"))["reach"]
    )

    drawing = run(f"{program}:app", "--mermaid")
    assert drawing.startswith("flowchart LR\n")
    assert '"admin"' in drawing
    assert "DELETE /menu/{dish}" in drawing


@pytest.mark.parametrize("name", ["app", "container"])
def test_the_command_calls_a_function_that_returns_an_application_or_a_container(program: str, name: str) -> None:
    made, given = (CliRunner().invoke(cli, ["reach", f"{program}:{each}"]) for each in (f"create_{name}", name))
    assert (made.exit_code, made.output) == (0, given.output)


def test_a_program_without_tools_has_an_empty_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty_reach.py").write_text("from toolbox import Container\ncontainer = Container()\n")
    monkeypatch.syspath_prepend(tmp_path)
    result = CliRunner().invoke(cli, ["reach", "empty_reach:container"])
    assert result.output.strip() == "No tool can be reached."


# --- the report and real calls agree

NAMES = ("a", "b", "c")
MARKS = st.one_of(
    st.none(),
    st.just("authenticated"),
    st.just("open"),
    st.sets(st.sampled_from(NAMES), max_size=2).map(lambda roles: tuple(sorted(roles))),
)


def marked(target: Any, mark: Any) -> Any:
    if mark is None:
        return target
    if mark == "authenticated":
        return authenticated(target)
    return permit_all(target) if mark == "open" else roles_allowed(*mark)(target)


@st.composite
def programs(draw: Any) -> list[type[Any]]:
    """Draw services. Each has its own tools, and earlier services as further tools."""
    services: list[type[Any]] = []
    for number in range(draw(st.integers(1, 3))):
        methods = {}
        for letter in "xy"[: draw(st.integers(0, 2))]:

            def method(self: Any) -> str:
                return "called"

            method.__name__ = f"tool_{letter}{number}"
            methods[method.__name__] = marked(tool(method), draw(MARKS))
        holder = marked(type(f"Tools{number}", (), {**methods}), draw(MARKS) if methods else None)
        inner = draw(st.lists(st.sampled_from(services), unique=True, max_size=2)) if services else []

        async def ask(self: Any, text: str) -> str: ...

        ask.__name__ = f"ask{number}"
        ask.__qualname__ = f"Service{number}.ask{number}"
        ask = marked(tool(user_message("{text}")(ask)), draw(MARKS))
        bases: Any = (Protocol,)
        service = type(f"Service{number}", bases, {f"ask{number}": ask, "_is_protocol": True})
        listed = [*([holder] if methods else []), *inner]
        services.append(register_ai_service(tools=listed)(marked(service, draw(MARKS))))
    return services


IDENTITIES = [
    SecurityIdentity.anonymous(),
    *(
        SecurityIdentity("eve", frozenset(roles))
        for size in range(len(NAMES) + 1)
        for roles in itertools.combinations(NAMES, size)
    ),
]


class Walker:
    """A model that calls every tool it is offered, and follows the services among them."""

    def __init__(self) -> None:
        self.called: set[tuple[tuple[str, ...], str]] = set()

    async def chat(self, request: Any) -> Any:
        first = next(each for each in request.messages if isinstance(each, UserMessage))
        path = tuple(json.loads(first.text))
        if len(request.messages) > 1:
            return ChatResponse(AiMessage("done"))
        calls = []
        for name in offered_tools(request):
            self.called.add((path, name))
            is_service = name.startswith("ask")
            inner = json.dumps([*path, f"Service{name[3:]}.{name}"])
            calls.append(tool_call(name, {"text": inner} if is_service else {}))
        return ChatResponse(AiMessage(None if calls else "nothing to call", tuple(calls)))


Called = set[tuple[str, tuple[str, ...], str]]


async def walk(services: list[type[Any]]) -> list[Called]:
    """Call every method of every service as each identity, and every tool that is offered on the way."""
    walker: Any = Walker()
    failures = ToolErrors(on_unknown_tool=return_to_model)
    made = Container(models={"default": walker}, seeds=[SecurityIdentity], tool_errors=failures).register(*services)
    async with made:
        return [await walk_as(identity, made, walker, services) for identity in IDENTITIES]


async def walk_as(identity: SecurityIdentity, made: Container, walker: Any, services: list[type[Any]]) -> Called:
    found: Called = set()
    async with made.request_scope({SecurityIdentity: identity}):
        for number, service in enumerate(services):
            walker.called.clear()
            try:
                await getattr(await made.aget(service), f"ask{number}")("[]")
            except FrameworkError:  # the identity may not call the method
                assert not walker.called
            found |= {(f"Service{number}.ask{number}", path, name) for path, name in walker.called}
    return found


@settings(max_examples=40, deadline=None)
@given(programs())
def test_the_report_equals_what_every_identity_can_really_call(services: list[type[Any]]) -> None:
    rows = Container(seeds=[SecurityIdentity]).register(*services).reach()
    for identity, called in zip(IDENTITIES, asyncio.run(walk(services)), strict=True):
        reported = {(each.entry, each.path, each.tool) for each in rows if each.allows(identity)}
        assert reported == called, identity
        # `roles` says the same for identities with one role.
        if len(identity.roles) == 1 and all(len(each.checks) <= 1 for each in rows):
            assert reported == {
                (each.entry, each.path, each.tool) for each in rows if not each.roles or identity.roles & each.roles
            }
