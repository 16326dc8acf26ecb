"""The command line: `python -m sample_app` serves the application, `python -m sample_app ask "…"` answers a question.

Not here: the application (`application`).
"""

import argparse
import asyncio
import errno
import socket
import sys
from contextlib import nullcontext

import uvicorn

from toolbox import ToolboxError

from .answers import Answer
from .application import create_app, model_name, uses_real_weather, weather_container
from .stand_in import StandIn
from .weather import WeatherForecastAgent


def main() -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sample_app", description="A weather agent.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    commands = parser.add_subparsers(dest="command")
    ask = commands.add_parser("ask", help="answer one question on the terminal")
    ask.add_argument("question")
    arguments = parser.parse_args()
    try:
        if arguments.command == "ask":
            return asyncio.run(answer(arguments.question))
        return serve(arguments.host, arguments.port)
    except ToolboxError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def serve(host: str, port: int) -> int:
    """Serve the application until it is stopped."""
    try:
        listening = socket.create_server((host, port), backlog=2048)
    except OSError as error:
        reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        print(f"Port {port} {reason}; use another one: make run PORT={port + 1}", file=sys.stderr)
        return 1
    with listening:
        app = create_app()
        shown = "localhost" if host == "127.0.0.1" else host
        port = listening.getsockname()[1]
        text = f"The weather agent is at http://{shown}:{port}, answered by {model_name()}. Ctrl-C ends it."
        print(text, flush=True)
        config = uvicorn.Config(app, host, port, log_level="warning", timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        server.run(sockets=[listening])
        return 0 if server.started else 1


async def answer(question: str) -> int:
    """Print the answer to standard output, and the called tools to standard error."""
    stand_in = None if uses_real_weather() else StandIn()
    with stand_in or nullcontext():
        async with weather_container(stand_in) as container:
            agent = await container.aget(WeatherForecastAgent)
            reply = Answer.of(await agent.chat(question))
    for call in reply.tool_executions:
        outcome = "failed" if call.is_error else f"{call.duration * 1000:.0f} ms"
        print(f"· {call.name} ({outcome})", file=sys.stderr)
    print(reply.answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
