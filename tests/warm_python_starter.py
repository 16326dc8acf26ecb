"""Starts a program in the warm process of `warm_python`, forwards signals to it, and ends as it ends.

It runs without site-packages and imports only modules written in C, so that it starts in half the time.
"""

import _signal as signal
import marshal
import posix
import sys
from _socket import AF_UNIX, SCM_RIGHTS, SOL_SOCKET, socket


def ask(
    connection: socket,
    folder: str,
    environment: dict[bytes, bytes],
    arguments: list[str],
    streams: tuple[int, int, int],
) -> None:
    """Ask for `python ARGUMENTS…` on a connection, which receives its exit status then, and ends it when closed."""
    body = marshal.dumps((folder, environment, arguments))
    numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in streams)
    connection.sendmsg([len(body).to_bytes(4, "big")], [(SOL_SOCKET, SCM_RIGHTS, numbers)])
    connection.sendall(body)


def start(address: str, arguments: list[str]) -> int:
    """Start `python ARGUMENTS…` with the folder, environment and streams of this process; return its exit status."""
    connection = socket(AF_UNIX)
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, lambda number, _: connection.send(bytes([number])))
    connection.connect(address)
    ask(connection, posix.getcwd(), posix.environ, arguments, (0, 1, 2))
    # The streams are the program's now: it alone decides when they end.
    nothing = posix.open("/dev/null", posix.O_RDWR)
    for number in (0, 1, 2):
        posix.dup2(nothing, number)
    status = connection.recv(64)
    return int(status) if status else 1


if __name__ == "__main__":
    ended = start(sys.argv[1], sys.argv[2:])
    if ended < 0:
        signal.signal(-ended, signal.SIG_DFL) if -ended not in (signal.SIGKILL, signal.SIGSTOP) else None
        posix.kill(posix.getpid(), -ended)
    posix._exit(ended)
