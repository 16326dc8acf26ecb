"""Starts a program in the warm process of `warm_python`, forwards signals to it, and ends as it ends.

It runs without site-packages and imports little, so that it starts fast.
"""

import os
import signal
import socket
import sys
from json import dumps


def start(address: str, arguments: list[str]) -> int:
    """Start `python ARGUMENTS…` with the folder, environment and streams of this process; return its exit status."""
    connection = socket.socket(socket.AF_UNIX)
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, lambda number, _: connection.send(bytes([number])))
    connection.connect(address)
    request = {"folder": os.getcwd(), "environment": dict(os.environ), "arguments": arguments}  # noqa: PTH109 - fast
    body = dumps(request).encode()
    socket.send_fds(connection, [len(body).to_bytes(4, "big")], [0, 1, 2])
    connection.sendall(body)
    # The streams are the program's now: it alone decides when they end.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    status = connection.recv(64)
    return int(status) if status else 1


if __name__ == "__main__":
    ended = start(sys.argv[1], sys.argv[2:])
    if ended < 0:
        signal.signal(-ended, signal.SIG_DFL) if -ended not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -ended)
    os._exit(ended)
