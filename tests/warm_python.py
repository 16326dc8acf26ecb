"""A Python process that has imported the libraries and forks for each program, so that a program starts at once.

`run` starts a program as `python …` does: a new process with its own folder, environment, arguments and output. Only
the imports are done already. Not here: tests that measure or check imports, which start Python themselves.
"""

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from _pytest.assertion.rewrite import AssertionRewritingHook

ROOT = Path(__file__).parent.parent
PRELOADED = (
    "asyncio",
    "typing_extensions",
    "anyio.pytest_plugin",
    "pytest",
    "pytest_timeout",
    "openai",
    "openai.resources.chat.completions",
    "aiohttp",
    "fastapi",
    "fastapi.testclient",
    "uvicorn",
    "uvicorn.protocols.http.auto",
    "uvicorn.loops.auto",
    "sqlalchemy.ext.asyncio",
    "sqlalchemy.dialects.sqlite.aiosqlite",
    "mcp",
    "rich.console",
    "toolbox.container",
    "toolbox.models.openai",
    "toolbox.pytest_plugin",
    "toolbox.sql",
    "toolbox.rest",
    "toolbox.mcp",
    "toolbox.cli",
    "toolbox_fastapi",
)


def run(
    arguments: Sequence[str],
    folder: Path,
    environment: dict[str, str],
    timeout: float = 60,
    *,
    free_at_end: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS…`: options `-W error`, then a file, or `-m` and a module.

    With `free_at_end` the interpreter ends as it does without this module, which takes longer.
    """
    output, errors = folder / ".stdout", folder / ".stderr"
    request = {
        "arguments": list(arguments),
        "folder": str(folder),
        "environment": environment,
        "output": str(output),
        "errors": str(errors),
        "timeout": timeout,
        "free_at_end": free_at_end,
    }
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    status = json.loads(server.stdout.readline())
    texts = [each.read_text(encoding="utf-8", errors="backslashreplace") for each in (output, errors)]
    for each in (output, errors):
        each.unlink()
    if status is None:
        raise subprocess.TimeoutExpired(list(arguments), timeout, *texts)
    return subprocess.CompletedProcess(list(arguments), status, *texts)


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "TOOLBOX_"))}
        | {"PYTHONPATH": str(ROOT)},
    )
    atexit.register(_stop, server)
    return server


def _stop(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.close()
    server.wait(timeout=10)
    server.stdout.close()


# --- in the warm process


def serve() -> None:
    for name in PRELOADED:
        __import__(name)
    # pytest warns about plugins that were imported before it could rewrite their assertions.
    gc.freeze()
    AssertionRewritingHook._warn_already_imported = lambda *_: None  # type: ignore[method-assign]
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            answers.close()
            become(request)
        answers.write(json.dumps(ended(child, request["timeout"])) + "\n")
        answers.flush()


def ended(child: int, timeout: float) -> int | None:
    """Wait for the child and return its exit status; None if it took too long and was killed."""
    late = False

    def kill(*_: object) -> None:
        nonlocal late
        late = True
        os.killpg(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    _, status = os.waitpid(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return None if late else os.waitstatus_to_exitcode(status)


def become(request: dict[str, object]) -> None:
    """Turn this process into the program. Does not return."""
    os.setsid()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    output, errors = (
        os.open(str(request[each]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for each in ("output", "errors")
    )
    for source, target in ((null, 0), (output, 1), (errors, 2)):
        os.dup2(source, target)
    os.chdir(str(request["folder"]))
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]  # written by `run`
    for number, mode in enumerate(("r", "w", "w")):
        opened = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the whole program
        setattr(sys, ("stdin", "stdout", "stderr")[number], opened)
    arguments = list(request["arguments"])  # type: ignore[call-overload]
    while arguments[:1] == ["-W"]:
        sys.warnoptions.append(arguments[1])
        warnings.simplefilter(arguments[1])
        del arguments[:2]
    code: object = 0
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr) if code is not None else None
        code = int(code is not None)
    if request["free_at_end"]:
        sys.exit(code)
    # The interpreter's own end, without freeing every object of the preloaded modules.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
