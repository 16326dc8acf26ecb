"""The app that `benchmarks.execution` asks, once for each peer.

    python -m benchmarks.execution_apps PEER PORT

`POST /run` is one run with a tool that blocks 100 ms; `POST /eight/{kind}` one with eight tools of 50 ms at once, which
tells how many ms it took; `GET /health` is a `def` endpoint.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn
from fastapi import FastAPI

Ask = Callable[[str, str], Awaitable[str]]
"""Asks the agent with the tool of this name (`block`, `sync`, `async`); gives its answer."""


def block() -> str:
    """Waits 100 ms."""
    time.sleep(0.1)
    return "ok"


def sync_tool() -> str:
    """Waits 50 ms."""
    time.sleep(0.05)
    return "ok"


async def async_tool() -> str:
    """Waits 50 ms."""
    await asyncio.sleep(0.05)
    return "ok"


TOOLS: dict[str, Callable[[], Any]] = {"block": block, "sync": sync_tool, "async": async_tool}


def toolbox_app(app: FastAPI) -> Ask:
    from typing import Protocol

    from toolbox import Container, register_ai_service, tool
    from toolbox import toolbox as offers
    from toolbox_fastapi import install

    tools = {name: tool(function) for name, function in TOOLS.items()}

    @register_ai_service(concurrent_tools=True)
    class Agent(Protocol):
        @offers(tools["block"])
        async def block(self, question: str) -> str: ...
        @offers(tools["sync"])
        async def sync(self, question: str) -> str: ...
        @offers(tools["async"])
        async def asynchronous(self, question: str) -> str: ...

    container = Container().register(Agent)
    install(app, container)

    async def ask(name: str, question: str) -> str:
        agent = container.get(Agent)
        return await {"block": agent.block, "sync": agent.sync, "async": agent.asynchronous}[name](question)

    return ask


def by_hand_app(app: FastAPI) -> Ask:
    import httpx2
    import openai

    client = openai.AsyncOpenAI(http_client=openai.DefaultAioHttpClient())
    pool = ThreadPoolExecutor(64)

    async def call(function: Callable[[], Any]) -> str:
        if asyncio.iscoroutinefunction(function):
            return str(await function())
        return str(await asyncio.get_running_loop().run_in_executor(pool, function))

    async def ask(name: str, question: str) -> str:
        parameters = {"type": "object", "properties": {}}
        offered = [{"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}]
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        while True:
            body = json.dumps({"model": "m", "messages": messages, "tools": offered}).encode()
            response = await client.post(
                "/chat/completions",
                cast_to=httpx2.Response,
                content=body,
                options={"headers": {"content-type": "application/json"}},
            )
            message = json.loads(response.content)["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return str(message["content"])
            results = await asyncio.gather(*(call(TOOLS[each["function"]["name"]]) for each in message["tool_calls"]))
            for each, result in zip(message["tool_calls"], results, strict=True):
                messages.append({"role": "tool", "tool_call_id": each["id"], "content": result})

    return ask


def pydantic_ai_app(app: FastAPI) -> Ask:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    agents = {name: Agent(OpenAIChatModel("m"), tools=[function]) for name, function in TOOLS.items()}

    async def ask(name: str, question: str) -> str:
        return (await agents[name].run(question)).output

    return ask


def langchain_app(app: FastAPI) -> Ask:
    from langchain.agents import create_agent
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI

    def wrapped(function: Callable[[], Any]) -> Any:
        if asyncio.iscoroutinefunction(function):
            return StructuredTool.from_function(coroutine=function)
        return StructuredTool.from_function(function)

    agents = {name: create_agent(ChatOpenAI(model="m"), tools=[wrapped(function)]) for name, function in TOOLS.items()}

    async def ask(name: str, question: str) -> str:
        state = await agents[name].ainvoke({"messages": [{"role": "user", "content": question}]})
        return str(state["messages"][-1].content)

    return ask


APPS: dict[str, Callable[[FastAPI], Ask]] = {
    "toolbox": toolbox_app,
    "by hand": by_hand_app,
    "pydantic-ai": pydantic_ai_app,
    "langchain": langchain_app,
}


def application(peer: str) -> FastAPI:
    app = FastAPI()
    ask = APPS[peer](app)

    @app.get("/health")
    def health() -> str:
        return "up"

    @app.post("/run")
    async def run() -> str:
        return await ask("block", "go")

    @app.post("/eight/{kind}")
    async def eight(kind: str) -> float:
        began = time.perf_counter()
        assert await ask(kind, "eight") == "done"
        return (time.perf_counter() - began) * 1000

    return app


if __name__ == "__main__":
    os.environ.setdefault("OPENAI_API_KEY", "none")
    functools.partial(uvicorn.run, log_level="warning", host="127.0.0.1")(
        application(sys.argv[1]), port=int(sys.argv[2])
    )
