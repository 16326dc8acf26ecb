"""Wire conformance: toolbox and its peers with recorded replies of real servers (`wire_replies/`).

    python -m benchmarks.wire                      # toolbox, then the peers that are installed
    python -m benchmarks.wire --save               # saves the figures for the charts
    python -m benchmarks.wire --cases DIRECTORY    # another folder with run.py, server.py and cases/

`drive` is the driver for that folder's `run.py`: `python run.py --driver benchmarks.wire:drive`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from benchmarks import results
from toolbox import (
    CompleteResponse,
    ModelConnectionError,
    ModelError,
    ModelHttpError,
    ModelProtocolError,
    ModelRefusedError,
    ModelTruncatedError,
    OpenAiChatModel,
    Result,
    TokenStream,
    ToolCallsLimitExceededError,
    ToolRoundsExceededError,
    create_ai_service,
    return_to_model,
)

ROOT = Path(__file__).resolve().parent.parent
KINDS: tuple[tuple[type[Exception], str], ...] = (
    (ModelTruncatedError, "truncated"),
    (ModelRefusedError, "refused"),
    (ModelHttpError, "model_http_error"),
    (ModelProtocolError, "model_protocol_error"),
    (ModelConnectionError, "model_connection_error"),
    (ToolRoundsExceededError, "limit"),
    (ToolCallsLimitExceededError, "limit"),
)


class Whole(Protocol):
    async def ask(self, message: str) -> Result[str]: ...


class Streamed(Protocol):
    def ask(self, message: str) -> TokenStream: ...


async def drive(
    base_url: str, stream: bool, tools: list[Callable[..., Awaitable[object]]], user_message: str
) -> dict[str, Any]:
    """Ask once, with the tools, in one case."""
    model = OpenAiChatModel("m", base_url, "test")
    handlers: dict[str, Any] = dict.fromkeys(
        ("on_unknown_tool", "on_tool_arguments_error", "on_tool_execution_error"), return_to_model
    )
    try:
        if stream:
            text = await _stream(create_ai_service(Streamed, chat_model=model, tools=tools, **handlers), user_message)
        else:
            service = create_ai_service(Whole, chat_model=model, tools=tools, **handlers)
            text = (await service.ask(user_message)).content
    except (ModelError, ToolRoundsExceededError, ToolCallsLimitExceededError) as error:
        kind = next((name for each, name in KINDS if isinstance(error, each)), f"crash:{type(error).__name__}")
        return {"text": None, "error": kind, "calls": None, "detail": str(error)}
    finally:
        await model.aclose()
    return {"text": text, "error": None, "calls": None}


async def _stream(service: Streamed, user_message: str) -> str | None:
    text = None
    async for event in service.ask(user_message):
        if isinstance(event, CompleteResponse):
            text = event.response.ai_message.text
    return text


# --- peers: each in its usual way, configured to return unknown tools and invalid arguments to the model


async def pydantic_ai(base_url: str, stream: bool, tools: list[Any], user_message: str) -> dict[str, Any]:
    """pydantic-ai's agent."""
    from pydantic_ai import Agent, ModelHTTPError, UnexpectedModelBehavior
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(
        OpenAIChatModel("m", provider=OpenAIProvider(base_url=base_url, api_key="test")), tools=tools, retries=3
    )
    try:
        if not stream:
            return {"text": (await agent.run(user_message)).output, "error": None, "calls": None}
        async with agent.run_stream(user_message) as run:
            return {"text": await run.get_output(), "error": None, "calls": None}
    except ModelHTTPError as error:
        return {"text": None, "error": "model_http_error", "calls": None, "detail": str(error)}
    except UnexpectedModelBehavior as error:
        kind = "truncated" if "IncompleteToolCall" in type(error).__name__ else "model_protocol_error"
        return {"text": None, "error": kind, "calls": None, "detail": str(error)}


async def openai_agents(base_url: str, stream: bool, tools: list[Any], user_message: str) -> dict[str, Any]:
    """openai-agents' runner."""
    import openai
    from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from agents.exceptions import ModelBehaviorError

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("m", openai.AsyncOpenAI(base_url=base_url, api_key="test"))
    agent = Agent("a", model=model, tools=[function_tool(each) for each in tools])
    try:
        if not stream:
            return {"text": (await Runner.run(agent, user_message)).final_output, "error": None, "calls": None}
        run = Runner.run_streamed(agent, user_message)
        async for _ in run.stream_events():
            pass
        return {"text": run.final_output, "error": None, "calls": None}
    except MaxTurnsExceeded as error:
        return {"text": None, "error": "limit", "calls": None, "detail": str(error)}
    except ModelBehaviorError as error:
        return {"text": None, "error": "model_protocol_error", "calls": None, "detail": str(error)}
    except openai.APIError as error:
        return {"text": None, "error": _openai_kind(error), "calls": None, "detail": str(error)}


async def langchain(base_url: str, stream: bool, tools: list[Any], user_message: str) -> dict[str, Any]:
    """LangChain's agent on langchain-openai."""
    import openai
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="m", base_url=base_url, api_key="test", streaming=stream)
    agent: Any = create_agent(model, [tool(each) for each in tools])
    try:
        state = await agent.ainvoke({"messages": [("user", user_message)]})
    except openai.APIError as error:
        return {"text": None, "error": _openai_kind(error), "calls": None, "detail": str(error)}
    content = state["messages"][-1].content
    return {"text": content, "error": None, "calls": None}


def _openai_kind(error: Exception) -> str:
    import openai

    if isinstance(error, openai.APIConnectionError):
        return "model_connection_error"
    return "model_http_error"


Case = dict[str, Any]
"""One result of `run.py --json`."""

DRIVERS = {
    "toolbox": ("drive", "toolbox"),
    "pydantic-ai": ("pydantic_ai", "pydantic_ai"),
    "openai-agents": ("openai_agents", "agents"),
    "langchain": ("langchain", "langchain_openai"),
}
"""The driver of each library, and the module that it needs."""


def main() -> int:
    """Run the cases with toolbox and each peer, each in a separate process. Fail if toolbox fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--cases", type=Path, default=Path(os.environ.get("WIRE_CASES", ROOT / "benchmarks" / "wire_replies"))
    )
    parser.add_argument("--ours", action="store_true", help="without the peers")
    options = results.parse(parser, ours=True)
    runner = options.cases / "run.py"
    if not runner.exists():
        print(f"{runner} does not exist; name the folder of the conformance cases with --cases", file=sys.stderr)
        return 2
    found: dict[str, list[Case]] = {}
    ours = 1
    with TemporaryDirectory() as folder:
        for name, (driver, module) in DRIVERS.items():
            if options.ours and driver != "drive":
                continue
            if subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode:
                print(f"{driver}: not installed", file=sys.stderr)
                continue
            written = Path(folder, f"{driver}.json")
            status = _run(runner, driver, written, shown=not options.json)
            if driver == "drive":
                ours = status
            if written.exists():
                found[name] = json.loads(written.read_text(encoding="utf-8"))
    if found:
        results.finish(options, chart(found), found)
    return ours


def chart(found: dict[str, list[Case]]) -> results.Chart:
    """Return the figures for the documentation: the cases that each library handles as they require."""
    cases = max(map(len, found.values()))
    passed = {name: [float(sum(bool(each["passed"]) for each in of))] for name, of in found.items()}
    return results.Chart(
        "wire",
        "Replies that break the specification",
        f"{cases} recorded replies of real model servers, many of which break the rules. A library passes a case if it "
        "reads the reply as intended, or raises the right kind of error.",
        (results.compare(f"Cases passed, of {cases}", "cases", passed, more_is_better=True),),
        ("pydantic-ai-slim", "openai-agents", "langchain-openai", "openai"),
    )


def _run(runner: Path, driver: str, written: Path, *, shown: bool) -> int:
    """Run all cases with one driver; print what it prints for ours, and its last line for a peer."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(runner), "--driver", f"benchmarks.wire:{driver}", "--json", str(written)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if shown:
        whole = driver == "drive" or not done.stdout.strip()
        print(done.stdout if whole else done.stdout.strip().rsplit("\n", 1)[-1], flush=True)
    if done.stderr.strip():
        print(done.stderr.strip()[-2000:], file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
