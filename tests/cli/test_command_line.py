"""`toolbox check`, `graph` and `tools` on programs as a user has them: a module in the current folder."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from toolbox.cli import app

Program = Callable[..., Result]

SHOP = """
    from typing import Annotated, Protocol
    from toolbox import (
        Container, Instance, ToolboxSettings, application_scoped, register_ai_service, request_scoped, tool
    )

    @request_scoped
    class Cart:
        pass

    @application_scoped
    class Prices:
        def __init__(self, carts: Instance[Cart]) -> None:
            pass

        @tool
        def price(self, article: Annotated[str, "its name"], pieces: int = 1) -> float:
            '''Says what an article costs.

            Not shown to the model.
            '''
            return 1.0

    class Till:
        def __init__(self, prices: Prices, cart: Cart) -> None:
            pass

    @register_ai_service(tools=Prices)
    class Seller(Protocol):
        async def sell(self, wish: str) -> str: ...

    def ship(to: str) -> None:
        '''Ships the order.'''

    class Nothing:
        pass

    container = Container(settings=ToolboxSettings(demo=True)).register(Cart, Prices, Till, Seller)

    def made() -> Container:
        return container
"""

BROKEN = """
    from toolbox import Container, application_scoped, request_scoped

    @request_scoped
    class Cart:
        pass

    class Payments:
        pass

    class Checkout:
        def __init__(self, payments: Payments) -> None:
            pass

    @application_scoped
    class Prices:
        def __init__(self, cart: Cart) -> None:
            pass

    container = Container().register(Cart, Checkout, Prices)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Writes a module into the current folder and runs `toolbox` with these arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(text: str, *arguments: str) -> Result:
        name = f"program_{abs(hash((text, tmp_path)))}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
        return CliRunner().invoke(app, [each.replace("program:", f"{name}:") for each in arguments])

    return run


def read(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# --- check


@pytest.mark.parametrize("name", ["container", "made"])
def test_a_program_without_problems_says_so_and_exits_with_0(program: Program, name: str) -> None:
    result = program(SHOP, "check", f"program:{name}")

    assert result.exit_code == 0
    assert result.stdout == "No problems.\n"


def test_all_problems_are_printed_with_their_fixes_and_the_exit_status_is_1(program: Program) -> None:
    result = program(BROKEN, "check", "program:container")

    assert result.exit_code == 1
    assert "Checkout.payments: no bean provides Payments" in result.stdout
    assert "Prices.cart" in result.stdout
    assert "Instance[Cart]" in result.stdout


def test_problems_as_json(program: Program) -> None:
    result = program(BROKEN, "check", "--json", "program:container")

    assert result.exit_code == 1
    problems = json.loads(result.stdout)["problems"]
    assert {problem["where"] for problem in problems} == {"Checkout.payments", "Prices.cart"}
    assert all(problem["what"] and problem["fix"] for problem in problems)


def test_no_problems_as_json(program: Program) -> None:
    assert read(program(SHOP, "check", "program:container", "--json")) == {"problems": []}


def test_problems_are_printed_before_an_mcp_server_reads_input(program: Program) -> None:
    result = program(SHOP.replace("demo=True", "demo=False"), "mcp", "program:container")

    assert result.exit_code == 1
    assert "no default model is configured" in result.stderr
    assert "Traceback" not in result.output


# --- graph


def test_the_graph_shows_scopes_links_and_tools(program: Program) -> None:
    result = program(SHOP, "graph", "program:container")

    assert result.exit_code == 0
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines.index("application") < lines.index("request") < lines.index("dependent")
    assert "seller: Seller (AI service)" in lines
    assert "calls prices" in lines
    assert "offers the tools price" in lines
    assert "looks up cart" in lines
    assert "holds prices" in lines
    assert "holds cart" in lines


def test_the_graph_as_json(program: Program) -> None:
    beans = {bean["name"]: bean for bean in read(program(SHOP, "graph", "program:container", "--json"))["beans"]}

    assert beans["till"]["scope"] == "dependent"
    assert beans["till"]["dependencies"] == {"prices": ["prices"], "cart": ["cart"]}
    assert beans["prices"]["lazy"] == {"carts": ["cart"]}
    assert beans["prices"]["tools"] == ["price"]
    assert beans["seller"]["toolbox"] == ["prices"]


def test_the_sample_s_graph_names_its_services_and_clients(program: Program) -> None:
    shown = read(program("", "graph", "sample_app.application:weather_container", "--json"))["beans"]

    kinds = {bean["name"]: bean["made_by"] for bean in shown}
    assert kinds["weather_forecast_agent"] == kinds["city_extractor_agent"] == "AI service"
    assert kinds["geo_coding_service"] == kinds["weather_forecast_service"] == "REST client"


def test_the_graph_as_a_mermaid_drawing(program: Program) -> None:
    result = program(SHOP, "graph", "program:container", "--mermaid")

    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines[0] == "flowchart LR"
    ids = {line.split('["')[1].split("<")[0].rstrip('"]'): line.split("[")[0] for line in lines if '["' in line}
    assert {"Seller", "Prices", "Cart", "Till"} <= set(ids)
    assert f"{ids['Seller']} ==> {ids['Prices']}" in lines
    assert f"{ids['Prices']} -.-> {ids['Cart']}" in lines
    assert f"{ids['Till']} --> {ids['Cart']}" in lines
    assert lines.count("end") == sum(line.startswith("subgraph") for line in lines)


CONDITIONAL = """
    from toolbox import Container, only_if

    @only_if(profile="prod")
    class Smtp: ...

    class Printing: ...

    container = Container().register(Smtp, Printing)
"""


def test_the_graph_shows_what_was_left_out_and_why(program: Program) -> None:
    why = "the profile 'prod' is not active (none is)"

    shown = program(CONDITIONAL, "graph", "program:container").output
    drawing = program(CONDITIONAL, "graph", "program:container", "--mermaid").output
    data = read(program(CONDITIONAL, "graph", "program:container", "--json"))

    assert f"left out\n  Smtp: {why}" in shown
    assert f"Smtp<br><small>{why}</small>" in drawing
    assert data["left_out"] == [{"name": "Smtp", "why": why}]
    assert "smtp" not in {bean["name"] for bean in data["beans"]}


def test_a_program_with_problems_has_a_graph_too(program: Program) -> None:
    beans = {bean["name"] for bean in read(program(BROKEN, "graph", "program:container", "--json"))["beans"]}

    assert {"cart", "checkout", "prices"} <= beans


# --- tools


@pytest.mark.parametrize("name", ["container", "made", "Seller"])
def test_tools_shows_what_the_model_sees_of_a_service(program: Program, name: str) -> None:
    result = program(SHOP, "tools", f"program:{name}")

    assert result.exit_code == 0, result.output
    assert "Seller.sell  1 tool, about" in result.stdout
    assert "Says what an article costs." in result.stdout
    assert "Not shown to the model." not in result.stdout
    assert "- article (string): its name" in result.stdout
    assert "- pieces (integer, optional)" in result.stdout


def test_tools_as_json_are_the_specifications(program: Program) -> None:
    [offer] = read(program(SHOP, "tools", "--json", "program:Seller"))["offers"]

    [tool] = offer["tools"]
    assert offer["where"] == "Seller.sell"
    assert tool["name"] == "price"
    assert tool["parameters"]["required"] == ["article"]
    assert 10 < tool["tokens"] == offer["tokens"] < 200


def test_tools_of_a_class_and_of_a_function(program: Program) -> None:
    [of_class] = read(program(SHOP, "tools", "--json", "program:Prices"))["offers"]
    [of_function] = read(program(SHOP, "tools", "--json", "program:ship"))["offers"]

    assert [tool["name"] for tool in of_class["tools"]] == ["price"]
    assert of_function["tools"][0]["description"] == "Ships the order."


def test_a_class_without_tools_is_reported(program: Program) -> None:
    result = program(SHOP, "tools", "program:Nothing")

    assert result.exit_code in (1, 2)
    assert "@tool" in result.stderr


# --- invalid targets


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("program", "module:name"),
        ("no_such_module:container", "no_such_module"),
        ("program:nothing", "nothing"),
        ("program:Cart", "Container"),
    ],
)
def test_an_invalid_target_prints_one_line_and_exits_with_2(program: Program, target: str, expected: str) -> None:
    result = program(SHOP, "check", target)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["check", "graph", "tools"])
def test_json_reports_an_invalid_target_as_json(program: Program, command: str) -> None:
    result = program(SHOP, command, "program:nothing", "--json")

    assert result.exit_code == 2
    assert "has no 'nothing'" in json.loads(result.stdout)["error"]
    assert "has no 'nothing'" in result.stderr
    assert program(SHOP, command, "program:nothing").stdout == ""


@pytest.mark.parametrize("name", ["container", "made"])
def test_output_of_imported_modules_is_not_in_the_json(program: Program, name: str) -> None:
    chatty = (
        SHOP.replace("        return container", "        print('made'); return container") + "    print('loaded')\n"
    )
    result = program(chatty, "check", f"program:{name}", "--json")

    assert read(result) == {"problems": []}
    assert "loaded" in result.stderr


@pytest.mark.parametrize("module", ["toolbox", "toolbox.cli"])
def test_the_command_runs_as_a_process(module: str) -> None:
    root = Path(__file__).parent.parent.parent

    done = subprocess.run(
        [sys.executable, "-m", module, "tools", "sample_app.weather:WeatherForecastAgent", "--json"],
        cwd=root,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )

    [offer] = json.loads(done.stdout)["offers"]
    assert [tool["name"] for tool in offer["tools"]] == ["extract_city", "find_city", "forecast"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("raise RuntimeError('no such luck')", "RuntimeError: no such luck"),
        ("import no_such_library", "No module named 'no_such_library'"),
        ("from toolbox import no_such_name", "cannot import name 'no_such_name'"),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_an_import_error_is_shown_with_its_line(program: Program, text: str, expected: str) -> None:
    result = program(text, "check", "program:container")

    assert result.exit_code == 2
    assert expected in result.stderr
    assert "cannot be imported" in result.stderr
    assert ", line 1" in result.stderr
    assert "importlib" not in result.stderr
    assert result.stderr.count("\n") <= 8


def test_an_error_in_a_container_function_is_shown(program: Program) -> None:
    text = """
        from toolbox import Container

        def made() -> Container:
            return Container(1)
        """

    result = program(text, "check", "program:made")

    assert result.exit_code == 2
    assert "made failed: TypeError" in result.stderr


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("program:contaner", "did you mean 'container'?"),
        ("program:Seller", "use the Container, "),
        ("program.py", "such as program"),
        ("program.py:container", "is a file; use the module name"),
    ],
)
def test_a_wrong_target_gets_a_suggestion(program: Program, target: str, expected: str) -> None:
    result = program(SHOP, "check", target)

    assert result.exit_code == 2
    assert expected in result.stderr


def test_the_version_is_that_of_the_distribution() -> None:
    result = CliRunner().invoke(app, ["--version"])

    assert result.stdout.strip() == version("toolbox-di")


@pytest.mark.parametrize(("shell", "variables"), [("bash", {"COMP_CWORD": "1"}), ("zsh", {}), ("fish", {})])
def test_a_shell_completes_commands(shell: str, variables: dict[str, str]) -> None:
    typed = {"_TOOLBOX_COMPLETE": f"complete_{shell}", "COMP_WORDS": "toolbox ch", "_TYPER_COMPLETE_ARGS": "toolbox ch"}

    result = CliRunner().invoke(
        app, prog_name="toolbox", env={**typed, "_TYPER_COMPLETE_FISH_ACTION": "get-args"} | variables
    )

    assert "check" in result.stdout
    assert "chat" in result.stdout
    assert "graph" not in result.stdout


WEB = """
    from typing import Protocol
    from fastapi import FastAPI
    from toolbox import Container, ToolboxSettings, register_ai_service, tool
    from toolbox_fastapi import Inject, install

    class Missing: ...

    @tool
    def look() -> str:
        return ""

    @register_ai_service(tools=look)
    class Desk(Protocol):
        async def ask(self, question: str) -> str: ...

    def made(*, broken: bool = False) -> FastAPI:
        app = FastAPI()
        install(app, Container(settings=ToolboxSettings(demo=True)).register(Desk))
        if broken:
            @app.get("/missing")
            async def missing(missing: Inject[Missing]) -> None: ...
        return app

    def create_app() -> FastAPI:
        return made()

    app, broken, bare = made(), made(broken=True), FastAPI()
"""


@pytest.mark.parametrize("name", ["app", "create_app"])
def test_an_application_can_be_the_target(program: Program, name: str) -> None:
    assert program(WEB, "check", f"program:{name}").exit_code == 0
    assert "Desk" in program(WEB, "graph", f"program:{name}").output
    assert "look" in program(WEB, "tools", f"program:{name}").output


def test_tools_of_endpoints_are_listed_with_those_of_services(program: Program) -> None:
    source = (
        WEB
        + """
    @app.post("/ask")
    @toolbox(look)
    async def ask(desk: Inject[Desk]) -> None: ...

    container = app.state.toolbox_container
"""
    )
    source = source.replace("tool\n", "tool, toolbox\n", 1)
    for name in ("app", "container"):
        offers = read(program(source, "tools", "--json", f"program:{name}"))["offers"]

        assert [offer["where"] for offer in offers] == ["Desk.ask", "POST /ask (ask), @toolbox"]
        assert [tool["name"] for offer in offers for tool in offer["tools"]] == ["look", "look"]


def test_the_endpoints_of_an_application_are_checked_too(program: Program) -> None:
    done = program(WEB, "check", "program:broken")

    assert done.exit_code == 1
    assert "GET /missing" in done.output


def test_an_application_without_a_container_is_rejected_with_the_fix(program: Program) -> None:
    done = program(WEB, "check", "program:bare")

    assert done.exit_code == 2
    assert "install(bare, container)" in done.output


EXTRAS = """
    from toolbox import Container, redis, sql

    container = Container().register(sql.engine, sql.sync_engine, sql.session, redis.client)
"""


def test_missing_settings_of_an_extra_are_a_problem(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOOLBOX_SQL__URL", "TOOLBOX_REDIS__URL"):
        monkeypatch.delenv(name, raising=False)

    done = program(EXTRAS, "check", "program:container")

    assert done.exit_code == 1
    assert "TOOLBOX_SQL__URL" in done.output
    assert "TOOLBOX_REDIS__URL" in done.output
    assert done.output.count("TOOLBOX_SQL__URL") == 1


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("sqlite:///nowhere/shop.db", "nowhere"),
        ("oracle9://host/shop", "oracle9"),
        ("shop.db", "invalid URL"),
        ("mysql+aiomysql://user:pa55@host/shop", "pip install aiomysql"),
    ],
)
def test_an_invalid_database_url_is_a_problem_and_its_password_is_hidden(
    program: Program, monkeypatch: pytest.MonkeyPatch, url: str, expected: str
) -> None:
    monkeypatch.setenv("TOOLBOX_SQL__URL", url)
    monkeypatch.setenv("TOOLBOX_REDIS__URL", "http://me:pa55@host")

    done = program(EXTRAS, "check", "program:container")

    assert expected in done.output
    assert "invalid Redis URL" in done.output
    assert "pa55" not in done.output


def test_an_overridden_engine_needs_no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from toolbox import Container, sql

    monkeypatch.delenv("TOOLBOX_SQL__URL", raising=False)
    container = Container().register(sql.engine, sql.session)

    with container.override(AsyncEngine, object()):  # type: ignore[type-var]  # only its place is taken
        assert container.check() == []
    assert [problem.where for problem in container.check()] == ["toolbox.sql"]


MODELS = """
    from typing import Protocol
    from toolbox import Container, register_ai_service

    class Needed: ...

    @register_ai_service
    class Desk(Protocol):
        async def ask(self, question: str) -> str: ...

    class Broken:
        def __init__(self, needed: Needed) -> None: ...

    container, broken = Container().register(Desk), Container().register(Desk, Broken)
"""


def test_no_models_checks_a_program_without_models(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_MODEL", "OPENAI_API_KEY", "OPENAI_BASE_URL", "TOOLBOX_DEMO"):
        monkeypatch.delenv(name, raising=False)

    with_models = program(MODELS, "check", "program:container")
    assert with_models.exit_code == 1
    assert "--no-models" in with_models.output
    assert program(MODELS, "check", "program:container", "--no-models").exit_code == 0
    broken = program(MODELS, "check", "program:broken", "--no-models", "--json")
    assert broken.exit_code == 1
    [problem] = json.loads(broken.stdout)["problems"]
    assert "Needed" in problem["what"]
