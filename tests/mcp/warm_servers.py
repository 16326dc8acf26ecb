"""A process that has imported the library of MCP servers, and forks servers: they start in a fifth of the time.

`stdio_command` returns the command of such a server. It starts `launcher.py`, which sends its files, folder,
environment and arguments to this process, and stands for the server afterwards. Nothing of toolbox is imported here:
what it does depends on what a program has imported. Not here: servers whose start is tested (`test_server`).
"""

import atexit
import functools
import gc
import marshal
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests import programs
from tests.conftest import ROOT, SHARED_FOLDER


def stdio_command(script: Path, *arguments: str) -> list[str]:
    """Return a command that does what `python SCRIPT ARGUMENTS…` does, for an MCP server over stdio."""
    if not hasattr(os, "fork"):
        return programs.command(str(script), *arguments)
    launcher = str(Path(__file__).with_name("launcher.py"))
    return programs.command("-IS", launcher, _address(), str(script), *arguments)


@functools.cache
def _address() -> str:
    """Start the process that forks, once; return the address at which it listens."""
    address = f"{os.environ[SHARED_FOLDER]}/servers-{os.getpid()}"
    command = programs.command("-m", "tests.mcp.warm_servers", address)
    warm = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert warm.stdout is not None
    assert warm.stdout.readline() == "ready\n"
    atexit.register(warm.communicate)  # it ends with its standard input
    return address


# --- the process


def serve(address: str) -> list[Any] | None:
    """Fork a child for each connection. Return in the child, with what the launcher has sent; None at the end."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    woken, wakes = socket.socketpair()
    for each in (woken, wakes):
        each.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for readable in (listener, woken, sys.stdin):
            selector.register(readable, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return None
                if key.fileobj is listener:
                    launcher, _ = listener.accept()
                    request = receive(launcher)
                    pid = os.fork()
                    if pid == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for each in (listener, woken, wakes, launcher, *children.values()):
                            each.close()
                        return request
                    for each in request[0]:
                        os.close(each)
                    children[pid] = launcher
                    launcher.sendall(marshal.dumps(pid))
                    selector.register(launcher, selectors.EVENT_READ, pid)
                elif key.fileobj is woken:
                    woken.recv(4096)
                    bury(children, selector)
                elif key.data in children:  # the launcher was killed, and so is its server
                    os.kill(key.data, signal.SIGKILL)
                    selector.unregister(key.fileobj)


def receive(launcher: socket.socket) -> list[Any]:
    """Return the files, the folder, the environment and the arguments of a program."""
    data, files, _, _ = socket.recv_fds(launcher, 4, 3)
    length = int.from_bytes(data)
    data = b""
    while len(data) < length:
        data += launcher.recv(length - len(data))
    return [files, *marshal.loads(data)]


def bury(children: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    """Tell the launchers of the children that have ended."""
    for pid in [*children]:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            launcher = children.pop(pid)
            if launcher.fileno() in selector.get_map():
                selector.unregister(launcher)
            with suppress(OSError):  # it was killed
                launcher.sendall(marshal.dumps(os.waitstatus_to_exitcode(status)))
            launcher.close()


def run(files: list[int], folder: str, environment: dict[str, str], arguments: list[str]) -> None:
    """Run a script as `python ARGUMENTS…` does."""
    for number, each in enumerate(files):
        os.dup2(each, number)
        os.close(each)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - they stay open until the end
        for number, mode in enumerate("rww")
    )
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    import mcp.server.mcpserver.resolve
    import mcp.server.stdio  # noqa: F401

    gc.collect()
    gc.freeze()
    asked = serve(sys.argv[1])
    if asked is not None:
        run(*asked)
