"""Lets `warm_servers` fork a server, and stands for it: signals and the exit status are passed on.

`python -IS launcher.py ADDRESS SCRIPT ARGUMENTS…`. It imports little, because it is started for each server.
"""

import marshal
import os
import signal
import socket
import sys


def main(address: str, arguments: list[str]) -> None:
    """Run the server, and end as it does."""
    with socket.socket(socket.AF_UNIX) as warm:
        warm.connect(address)
        data = marshal.dumps([os.getcwd(), dict(os.environ), arguments])  # noqa: PTH109 - pathlib takes time
        socket.send_fds(warm, [len(data).to_bytes(4)], [0, 1, 2])
        warm.sendall(data)
        pid = marshal.loads(warm.recv(64))
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda number, _: os.kill(pid, number))
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # the server alone has them
            os.dup2(null, number)
        answer = warm.recv(64)
    status = marshal.loads(answer) if answer else 1
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main(sys.argv[1], sys.argv[2:])
