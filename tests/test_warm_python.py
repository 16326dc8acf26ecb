"""Programs that start in the warm Python process behave like programs that Python starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm_python

CODE = """
import os, sys
print(sys.argv, os.getcwd(), os.environ["GREETING"], sys.stdin.read(), sys.path[0] == {first!r}, __name__, flush=True)
print("to stderr", file=sys.stderr)
sys.exit({status})
"""
READY = "import os, sys; print(os.getpid(), flush=True); "


@pytest.mark.parametrize("way", ["-c", "-u -c", "file", "-m"])
@pytest.mark.parametrize("status", [0, 3, "'a text'"])
def test_a_program_sees_and_returns_what_a_python_program_does(tmp_path: Path, way: str, status: object) -> None:
    code = CODE.format(first="" if "-c" in way else str(tmp_path), status=status)
    (tmp_path / "program.py").write_text(code)
    arguments = {"-c": ["-c", code], "-u -c": ["-u", "-c", code], "file": ["program.py"], "-m": ["-m", "program"]}[way]

    def result(command: list[str]) -> tuple[int, str, str]:
        environment = {**os.environ, "GREETING": "hällo", "PYTHONUTF8": "1"}
        done = subprocess.run(
            [*command, "one", "-two"],
            input="typed",
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    assert result(warm_python.command(*arguments)) == result([sys.executable, *arguments])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_signals_to_the_started_process_reach_the_program(number: signal.Signals) -> None:
    command = warm_python.command("-c", READY + "sys.stdin.read()")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert started.stdout is not None
        program = int(started.stdout.readline())
        started.send_signal(number)
        assert started.stdout.read() == b""  # the program has ended: it held the other end
        assert started.wait() == -number
    assert program != started.pid


def test_the_end_of_the_program_ends_the_started_process() -> None:
    done = warm_python.run(["-c", "import os; os.kill(os.getpid(), 9)"], Path.cwd(), dict(os.environ))

    assert done.returncode == -signal.SIGKILL


def test_warnings_become_errors_on_request() -> None:
    code = "import warnings; warnings.warn('x', ResourceWarning)"
    refused = warm_python.run(["-W", "error::ResourceWarning", "-c", code], Path.cwd(), dict(os.environ))
    allowed = warm_python.run(["-W", "error::DeprecationWarning", "-c", code], Path.cwd(), dict(os.environ))

    assert (refused.returncode, allowed.returncode) == (1, 0)
    assert "ResourceWarning: x" in refused.stderr


def test_programs_that_take_too_long_are_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        warm_python.run(["-c", "import sys, time; time.sleep(60)"], Path.cwd(), dict(os.environ), timeout=0.2)
