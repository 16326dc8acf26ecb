"""An MCP server over stdio that sends scripted replies.

The argument is JSON with a list of replies per method; the last reply is repeated. A string is a command, such as
`die`, `flood` or `long`.
"""

import itertools
import json
import os
import sys
import time
from typing import Any

REPLIES: dict[str, list[Any]] = json.loads(sys.argv[1])
COUNTS: dict[str, int] = {}


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def reply_to(method: str) -> Any:
    replies = REPLIES.get(method)
    if replies is None:
        return None
    at = COUNTS.get(method, 0)
    COUNTS[method] = at + 1
    return replies[min(at, len(replies) - 1)]


for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    method = message["method"]
    if method == "initialize":
        version = REPLIES.get("version", ["2025-11-25"])[0]
        information = {
            "protocolVersion": version,
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "x", "version": "1"},
        }
        send({"id": message["id"], "result": information})
        continue
    reply = reply_to(method)
    match reply:
        case None:
            send({"id": message["id"], "error": {"code": -32601, "message": "unknown method"}})
        case "die":
            os._exit(1)
        case "flood":
            for count in itertools.count(1):
                send({"method": "notifications/tools/list_changed"})
                if count == 200:
                    send({"method": "notifications/message", "params": {"level": "info", "data": "200 are sent"}})
                if count > 1000:
                    time.sleep(0.001)  # the client ends this process after two seconds
        case "long":
            sys.stdout.write("x" * 3_000_000)
            sys.stdout.flush()
            sys.stdin.read()
        case "echo secret":
            send(
                {"id": message["id"], "error": {"code": -32000 - 50, "message": f"denied for {os.environ['API_KEY']}"}}
            )
        case "log secret":
            sys.stdout.write(os.environ["API_KEY"] + "\n")
            send({"id": message["id"], "result": {"content": []}})
        case {"error": error}:
            send({"id": message["id"], "error": error})
        case _:
            send({"id": message["id"], "result": reply})
