"""Python processes that have imported the libraries and fork for each program, so that a program starts at once.

`command` returns what starts a program as `python …` does: a new process with its own folder, environment, arguments
and streams. Signals reach it, and it ends when the started process is killed. Only the imports are done already.
Not here: tests that measure or check imports, which start Python themselves.
"""

import atexit
import builtins
import contextlib
import ctypes
import functools
import gc
import json
import marshal
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
STARTER = Path(__file__).parent / "warm_python_starter.py"
FREE_AT_END = "free_at_end"
SOCKETS = "WARM_PYTHON_SOCKETS"
FEW = (
    "toolbox.container",
    "toolbox.di.wiring",
    "toolbox.models.transport",
    "toolbox.runs.start_checks",
    "toolbox.services.hosting",
    "toolbox.services.standalone",
    "toolbox.settings",
    "toolbox.testing",
)
"""The modules of programs that free everything at their end, which takes time for each object of each module."""

PRELOADED = (
    "asyncio",
    "typing_extensions",
    "anyio.pytest_plugin",
    "pytest",
    "pytest_timeout",
    "xdist.plugin",
    "xdist.dsession",
    "xdist.looponfail",
    "xdist.newhooks",
    "platformdirs",
    "_pytest._argcomplete",
    "pdb",
    "hypothesis",
    "_hypothesis_pytestplugin",
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
    "aiosqlite",
    "asyncpg",
    "mcp",
    "mcp.server.mcpserver",
    "mcp.server.stdio",
    "rich.console",
    "pydantic.v1",
    "docstring_parser",
    "httpcore2",
    "stamina",
    "fastapi.telemetry._runtime",
    "toolbox.container",
    "toolbox.di.wiring",
    "toolbox.demo",
    "toolbox.models.transport",
    "toolbox.models.selection",
    "toolbox.models.openai",
    "toolbox.pytest_plugin",
    "toolbox.recordings",
    "toolbox.runs.start_checks",
    "toolbox.services.standalone",
    "toolbox.sql",
    "toolbox.testing",
    "toolbox.tls",
    "toolbox.redis",
    "toolbox.rest.exchange",
    "toolbox.openapi",
    "jsonschema",
    "rich.table",
    "toolbox.mcp",
    "toolbox.cli",
    "toolbox.cli.commands",
    "toolbox_fastapi",
)


def command(*arguments: str, free_at_end: bool = False) -> list[str]:
    """Return the command that does what `python ARGUMENTS…` does: `-u`, `-W error`, then a file, `-c` or `-m`.

    The program must start in this test run: the command has no effect later. With `free_at_end` the interpreter ends
    as it does without this module, which takes longer.
    """
    return [sys.executable, "-I", "-S", str(STARTER), *_asked(arguments, free_at_end)]


def _asked(arguments: Sequence[str], free_at_end: bool) -> list[str]:
    """Return the address of the process that forks the program, and the arguments for it."""
    if free_at_end:
        return [f"{_sockets()}/few", "-X", FREE_AT_END, *arguments]
    return [f"{_sockets()}/all", *arguments]


def run(
    arguments: Sequence[str],
    folder: Path,
    environment: dict[str, str],
    timeout: float = 110,
    *,
    free_at_end: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS…` in `folder` and return its output."""
    from tests.warm_python_starter import ask  # not in the warm processes: a program may have a `tests` of its own

    address, *arguments = _asked(arguments, free_at_end)
    given = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
    with socket.socket(socket.AF_UNIX) as connection, contextlib.ExitStack() as stack:
        stdin = stack.enter_context(Path(os.devnull).open("rb"))
        stdout, stderr = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        connection.settimeout(timeout)
        connection.connect(address)
        ask(connection, str(folder), given, arguments, (stdin.fileno(), stdout.fileno(), stderr.fileno()))
        try:
            status = connection.recv(64)
        except TimeoutError:
            raise subprocess.TimeoutExpired(arguments, timeout) from None
        texts = []
        for each in (stdout, stderr):
            each.seek(0)
            texts.append(each.read().decode(errors="backslashreplace"))
    return subprocess.CompletedProcess(arguments, int(status or 1), *texts)


def share(*also: str) -> None:
    """Let the processes that this one starts, such as pytest's workers, use one warm process. It imports `also` too."""
    os.environ[SOCKETS] = _sockets(*also)


@functools.cache
def _sockets(*also: str) -> str:
    """Start the warm process, unless it is shared; return the folder of its sockets."""
    if SOCKETS in os.environ:
        return os.environ[SOCKETS]
    folder = tempfile.mkdtemp(prefix="warm-python-")
    with socket.socket(socket.AF_UNIX) as few, socket.socket(socket.AF_UNIX) as all_:
        for name, listening in (("few", few), ("all", all_)):
            listening.bind(f"{folder}/{name}")
            listening.listen(64)  # programs that start while the process imports wait here
        descriptors = (few.fileno(), all_.fileno())
        server = subprocess.Popen(
            [sys.executable, __file__, *map(str, descriptors), *also],
            stdin=subprocess.PIPE,
            pass_fds=descriptors,
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "TOOLBOX_"))}
            | {"PYTHONPATH": str(ROOT)},
        )
    atexit.register(_stop, server, folder)
    return folder


def _stop(server: subprocess.Popen[bytes], folder: str) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait(timeout=60)
    shutil.rmtree(folder, ignore_errors=True)


# --- in the warm process


def use_huge_pages() -> None:
    """Move the memory of this process to pages of 2 MB where the system can, so that a fork copies fewer of its tables.

    A fork of a process with many libraries takes 1 ms instead of 10 then, and its end too.
    """
    collapse = 25  # MADV_COLLAPSE of Linux 6.1; older systems refuse it
    with contextlib.suppress(OSError):
        madvise = ctypes.CDLL(None).madvise
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            addresses, rights, *_, inode = line.split()[:5]
            start, end = (int(each, 16) for each in addresses.split("-"))
            if rights == "rw-p" and inode == "0":
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), collapse)


class Serving:
    """Forks a program for each connection, forwards signals to it, and sends its exit status back.

    There are no threads: a process with threads cannot fork safely.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._programs: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._waking = socket.socketpair()
        self._woken.setblocking(False)
        self._waking.setblocking(False)

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waking.fileno())
        for each in (self._listening, self._woken, sys.stdin):
            self._selector.register(each, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    for child in self._programs:
                        kill(child, signal.SIGKILL)
                    return
                if key.fileobj is self._listening:
                    self._start(self._listening.accept()[0])
                elif key.fileobj is self._woken:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                    self._report_ends()
                else:
                    self._forward(key.data)

    def _start(self, connection: socket.socket) -> None:
        received, streams, _, _ = socket.recv_fds(connection, 4, 3)
        request = marshal.loads(connection.recv(int.from_bytes(received, "big"), socket.MSG_WAITALL))
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            self._selector.close()
            for each in (self._listening, self._woken, self._waking, connection, *self._programs.values()):
                each.close()
            become(request, streams)
        for stream in streams:
            os.close(stream)
        self._programs[child] = connection
        self._selector.register(connection, selectors.EVENT_READ, child)

    def _forward(self, child: int) -> None:
        """Send the program the signals that its starter received; kill it if the starter was killed."""
        try:
            received = self._programs[child].recv(64, socket.MSG_DONTWAIT)
        except OSError:
            received = b""
        if not received:
            self._selector.unregister(self._programs[child])
            kill(child, signal.SIGKILL)
        for each in received:
            os.kill(child, each)

    def _report_ends(self) -> None:
        while self._programs:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            if child not in self._programs:  # the process of `FEW`
                continue
            connection = self._programs.pop(child)
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            connection.close()


def kill(child: int, number: int) -> None:
    """Send a signal to the program and the processes that it started, or to the program while it has no group yet."""
    try:
        os.killpg(child, number)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)


def become(request: tuple[str, dict[bytes, bytes], list[str]], streams: list[int]) -> None:
    """Turn this process into the program that the starter asks for. Does not return."""
    folder, environment, arguments = request
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()})
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        opened = open(  # noqa: SIM115 - for the whole program
            number,
            "w" if number else "r",
            1 if number == 2 or os.environ.get("PYTHONUNBUFFERED") or os.isatty(number) else -1,
            encoding="utf-8",
            errors="backslashreplace" if number == 2 else "strict",
            closefd=False,
        )
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)
    free_at_end = arguments[:2] == ["-X", FREE_AT_END]
    if free_at_end:
        del arguments[:2]
    if arguments[:1] == ["-u"]:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # opened above
        del arguments[0]
    while arguments[:1] == ["-W"]:
        action, _, category = arguments[1].partition("::")
        sys.warnoptions.append(arguments[1])
        warnings.simplefilter(action, getattr(builtins, category or "Warning"))  # type: ignore[arg-type]  # a word
        del arguments[:2]
    code: object = 0
    interrupted = False
    try:
        execute(arguments)
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        traceback.print_exc()
        code = 1
        interrupted = isinstance(error, KeyboardInterrupt)
    if not isinstance(code, int):
        print(code, file=sys.stderr) if code is not None else None
        code = int(code is not None)
    if free_at_end:
        sys.exit(code)
    # The interpreter's own end, without freeing every object of the preloaded modules.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def execute(arguments: list[str]) -> None:
    added = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each not in sys.path]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[:0] = [str(Path.cwd()), *added]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path[:0] = ["", *added]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = arguments
        sys.path[:0] = [str(Path(arguments[0]).resolve().parent), *added]
        runpy.run_path(arguments[0], run_name="__main__")


def serve(few: int, all_: int, also: Sequence[str]) -> None:
    """Import `FEW`, fork a process that serves with them, import the others, and serve with all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which closes stdin at its end
    if sys.stdin in select.select([few, all_, sys.stdin], [], [])[0]:
        return  # no program was started
    load(FEW)
    if os.fork() == 0:
        os.close(all_)
        serve_on(few)
        return
    os.close(few)
    load((*PRELOADED, *also))
    from _pytest.assertion.rewrite import AssertionRewritingHook
    from _pytest.config import default_plugins

    for name in default_plugins:
        __import__(f"_pytest.{name}")

    # pytest warns about plugins that were imported before it could rewrite their assertions.
    AssertionRewritingHook._warn_already_imported = lambda *_: None  # type: ignore[method-assign]
    serve_on(all_)


def load(modules: Sequence[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as in the tests
        for name in modules:
            __import__(name)


def serve_on(descriptor: int) -> None:
    from toolbox.tls import tls_context

    tls_context()  # it is shared, and reading the certificates takes 50 ms
    # The path starts with the folder of this file, as for any program.
    del sys.path[0]
    gc.collect()
    gc.freeze()
    use_huge_pages()
    Serving(socket.socket(fileno=descriptor)).run()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
