"""`toolbox worker`: continues runs of other processes until a signal stops it."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import programs

PROGRAM = """
from typing import Protocol
from toolbox import Container, register_ai_service, sql
from toolbox.runs import RunEngine
from toolbox.settings import SqlSettings, ToolboxSettings
from toolbox.testing import ScriptedChatModel


@register_ai_service(durable=True)
class Assistant(Protocol):
    async def ask(self, question: str) -> str: ...


class Nowhere:
    async def submit(self, run_id, generation):
        pass


settings = ToolboxSettings(sql=SqlSettings(url="sqlite:///runs.sqlite"), stop_timeout=5)
container = Container(models={"default": ScriptedChatModel(["done"])}, settings=settings, take_over_runs=False)
container.register(Assistant, sql.engine, sql.SqlRunStore)
only_starting = Container(models={"default": ScriptedChatModel([])}, settings=settings, take_over_runs=False)
only_starting.register(Assistant, sql.engine, sql.SqlRunStore).register_instance(Nowhere(), RunEngine)
in_memory = Container()
"""
START = """
import asyncio, program
async def main():
    async with program.only_starting as container:
        print((await container.runs.start(program.Assistant.ask, "hello")).id)
asyncio.run(main())
"""
STATUS = """
import asyncio, sys, program
async def main():
    async with program.only_starting as container:
        print((await container.runs.get(sys.argv[1])).status)
asyncio.run(main())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def run(folder: Path, *arguments: str) -> Any:
    path = os.pathsep.join((str(folder), str(Path(__file__).parent.parent.parent)))
    return subprocess.Popen(
        programs.command(*arguments),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def output(process: Any) -> str:
    out, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    return str(out).strip()


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGTERM")
def test_a_worker_continues_runs_and_stops_at_sigterm(folder: Path) -> None:
    run_id = output(run(folder, "-c", START))

    worker = run(folder, "-m", "toolbox.cli", "worker", "program:container")
    lines = [worker.stdout.readline() for _ in range(3)]
    worker.send_signal(signal.SIGTERM)
    lines += output(worker).splitlines()

    assert any("is ready; it looks for runs with expired leases every 15 s" in line for line in lines)
    assert any(f"run {run_id} (program.Assistant.ask): continues here" in line for line in lines)
    assert any("completed after" in line for line in lines)
    assert lines[-1].endswith("stopped; 1 ended here")
    assert output(run(folder, "-c", STATUS, run_id)) == "completed"


def test_a_worker_needs_runs_that_others_can_see(folder: Path) -> None:
    worker = run(folder, "-m", "toolbox.cli", "worker", "program:in_memory")
    out, errors = worker.communicate(timeout=110)

    assert worker.returncode == 2
    assert "register sql.engine and sql.SqlRunStore" in out + errors


ROLES = """
from program import *
from toolbox.security import SecurityIdentity, roles_allowed

@register_ai_service(durable=True)
class Clerk(Protocol):
    @roles_allowed("clerk")
    async def ask(self, question: str) -> str: ...

def container_with(seeds=()):
    found = Container(models={"default": ScriptedChatModel(["done"])}, settings=settings, seeds=seeds)
    return found.register(Clerk, sql.engine, sql.SqlRunStore)

without = container_with()
seeded = container_with([SecurityIdentity])

async def begin():
    async with container_with([SecurityIdentity]).register_instance(Nowhere(), RunEngine) as container:
        async with container.request_scope({SecurityIdentity: SecurityIdentity("ann", {"clerk"})}):
            print((await container.runs.start(Clerk.ask, "hello")).id)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGTERM")
def test_a_worker_of_services_with_roles_runs_as_the_identity_that_started_them(folder: Path) -> None:
    (folder / "clerks.py").write_text(ROLES)
    run_id = output(run(folder, "-c", "import asyncio, clerks; asyncio.run(clerks.begin())"))

    refused = run(folder, "-m", "toolbox", "worker", "clerks:without")
    _, errors = refused.communicate(timeout=110)
    worker = run(folder, "-m", "toolbox", "worker", "clerks:seeded")
    lines = [worker.stdout.readline() for _ in range(3)]
    worker.send_signal(signal.SIGTERM)
    output(worker)

    assert refused.returncode == 1
    assert "no bean provides a SecurityIdentity; declare it: Container(seeds=[SecurityIdentity])" in " ".join(
        errors.split()
    )
    assert f"run {run_id} (clerks.Clerk.ask): completed after" in lines[-1]


def test_the_help_says_what_a_worker_does(folder: Path) -> None:
    text = output(run(folder, "-m", "toolbox.cli", "worker", "--help"))

    assert "SIGTERM" in text
    assert "--quiet" in text
