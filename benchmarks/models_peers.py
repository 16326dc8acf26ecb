"""The peers of `benchmarks.models`: each holds the same conversation with the same tools, as is usual with it.

    python -m benchmarks.models_peers PEER URL      # then a line of JSON per measurement on standard input

A setting is (tools, messages of history). A run is four rounds with a tool and an answer: five requests.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from toolbox import (
    AiMessage,
    AnthropicChatModel,
    ChatModel,
    Message,
    OpenAiChatModel,
    PydanticAiChatModel,
    UserMessage,
    create_ai_service,
    system_message,
)

from .models_server import CHUNKS, ROUNDS

TRIPS = ROUNDS + 1
SYSTEM = "You answer questions about the weather, briefly and truthfully."
QUESTION = "What is the weather in Valence?"
SAID = "The forecast for the coming days says that it will be mild and mostly dry, with some wind. " * 2

Run = Callable[[], Awaitable[object]]
Stream = Callable[[], AsyncIterator[object]]


async def forecast(city: str, days: int, metric: bool = True) -> str:
    """Forecasts the weather of a city.

    Args:
        city: the name of the city, in English
        days: how many days, at most sixteen
        metric: whether degrees are Celsius
    """
    return f"{city}: mild for {days} days"


def functions(count: int) -> list[Any]:
    """Tools of one kind under different names."""

    def make(number: int) -> Any:
        async def tool(city: str, days: int, metric: bool = True) -> str:
            return await forecast(city, days, metric)

        tool.__name__ = tool.__qualname__ = f"tool_{number}"
        tool.__doc__ = forecast.__doc__
        return tool

    return [make(number) for number in range(count)]


def wire_tools(count: int) -> list[dict[str, Any]]:
    """The same as the wire has them, for the loops written by hand."""
    properties = {
        "city": {"type": "string", "description": "the name of the city, in English"},
        "days": {"type": "integer", "description": "how many days, at most sixteen"},
        "metric": {"type": "boolean", "description": "whether degrees are Celsius"},
    }
    parameters = {"type": "object", "properties": properties, "required": ["city", "days"]}
    text = "Forecasts the weather of a city."
    return [
        {"type": "function", "function": {"name": f"tool_{number}", "description": text, "parameters": parameters}}
        for number in range(count)
    ]


def history(count: int) -> list[dict[str, Any]]:
    """Messages before the question, by turns the user's and the model's."""
    return [{"role": "assistant" if number % 2 else "user", "content": f"{number}: {SAID}"} for number in range(count)]


# --- ours


class Assistant(Protocol):
    async def ask(self, before: list[Message], question: str) -> str: ...
    def stream(self, question: str) -> AsyncIterator[str]: ...


@system_message(SYSTEM)
class AssistantWithRules(Assistant, Protocol):
    """With a system message."""


class Ours:
    """toolbox, with a service."""

    def __init__(self, model: ChatModel) -> None:
        self.model = model

    def run(self, tools: int, messages: int) -> Run:
        service = create_ai_service(AssistantWithRules, chat_model=self.model, tools=functions(tools))
        before = [
            (AiMessage if number % 2 else UserMessage)(each["content"]) for number, each in enumerate(history(messages))
        ]
        return lambda: service.ask(before, QUESTION)

    def stream(self) -> Stream:
        service = create_ai_service(Assistant, chat_model=self.model)
        return lambda: service.stream(QUESTION)


# --- loops written by hand


class ByHand:
    """The tool loop as one writes it when nothing but speed counts: bytes made once and joined."""

    def run(self, tools: int, messages: int) -> Run:
        tool_bytes = json.dumps(wire_tools(tools)).encode()
        first = [{"role": "system", "content": SYSTEM}, *history(messages), {"role": "user", "content": QUESTION}]
        first_bytes = [json.dumps(each).encode() for each in first]
        table = {f"tool_{number}": each for number, each in enumerate(functions(tools))}

        async def run() -> str:
            sent = list(first_bytes)
            while True:
                reply = await self.post(
                    b'{"model":"m","messages":[' + b",".join(sent) + b'],"tools":' + tool_bytes + b"}"
                )
                message = parse(reply)["choices"][0]["message"]
                if not message.get("tool_calls"):
                    text: str = message["content"]
                    return text
                sent.append(json.dumps(message).encode())
                for call in message["tool_calls"]:
                    result = await table[call["function"]["name"]](**json.loads(call["function"]["arguments"]))
                    sent.append(json.dumps({"role": "tool", "tool_call_id": call["id"], "content": result}).encode())

        return run

    def stream(self) -> Stream:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": QUESTION}], "stream": True}).encode()

        async def stream() -> AsyncIterator[str]:
            tail = b""
            async for block in self.blocks(body):
                *events, tail = (tail + block).split(b"\n\n")
                for event in events:
                    if event != b"data: [DONE]":
                        for choice in parse(event[6:])["choices"]:  # the last event has none, only the usage
                            if text := choice["delta"].get("content"):
                                yield text

        return stream

    async def post(self, body: bytes) -> bytes:
        raise NotImplementedError

    def blocks(self, body: bytes) -> AsyncIterator[bytes]:
        raise NotImplementedError


def parse(data: bytes) -> Any:
    """orjson, where it is."""
    return _loads(data)


try:
    from orjson import loads as _loads
except ImportError:
    _loads = json.loads


class LowLevel(ByHand):
    """On the package's low-level post."""

    def __init__(self, url: str, transport: str) -> None:
        import httpx2
        import openai

        kind = openai.DefaultAioHttpClient if transport == "aiohttp" else openai.DefaultAsyncHttpxClient
        self.client = openai.AsyncOpenAI(base_url=url, api_key="k", http_client=kind())
        self.response = httpx2.Response
        self.options: Any = {"security": {"bearer_auth": True}, "headers": {"content-type": "application/json"}}

    async def post(self, body: bytes) -> bytes:
        response = await self.client.post(
            "/chat/completions", cast_to=self.response, content=body, options=self.options
        )
        content: bytes = response.content
        return content

    async def blocks(self, body: bytes) -> AsyncIterator[bytes]:
        import openai

        response: Any = await self.client.post(
            "/chat/completions",
            cast_to=self.response,
            content=body,
            options=self.options,
            stream=True,
            stream_cls=openai.AsyncStream[Any],
        )
        try:
            async for block in response.aiter_bytes():
                yield block
        finally:
            await response.aclose()


class LowLevelAnthropic:
    """The tool loop on the low-level post of the `anthropic` package, written like `ByHand`."""

    def __init__(self, url: str) -> None:
        import anthropic
        import httpx2

        self.client = anthropic.AsyncAnthropic(
            base_url=url.removesuffix("/v1"), api_key="k", http_client=anthropic.DefaultAioHttpClient()
        )
        self.response = httpx2.Response
        self.options: Any = {"headers": {"content-type": "application/json"}}

    def run(self, tools: int, messages: int) -> Run:
        offered = [
            {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
            for each in (tool["function"] for tool in wire_tools(tools))
        ]
        tool_bytes = json.dumps(offered).encode()
        first = [*history(messages), {"role": "user", "content": QUESTION}]
        first_bytes = [json.dumps(each).encode() for each in first]
        table = {f"tool_{number}": each for number, each in enumerate(functions(tools))}
        head = b'{"model":"m","max_tokens":4096,"system":%s,"messages":[' % json.dumps(SYSTEM).encode()

        async def run() -> str:
            sent = list(first_bytes)
            while True:
                reply = await self.post(head + b",".join(sent) + b'],"tools":' + tool_bytes + b"}")
                message = parse(reply)
                calls = [block for block in message["content"] if block["type"] == "tool_use"]
                if not calls:
                    text: str = message["content"][0]["text"]
                    return text
                sent.append(json.dumps({"role": "assistant", "content": message["content"]}).encode())
                results = []
                for call in calls:
                    result = await table[call["name"]](**call["input"])
                    results.append({"type": "tool_result", "tool_use_id": call["id"], "content": result})
                sent.append(json.dumps({"role": "user", "content": results}).encode())

        return run

    def stream(self) -> Stream:
        asked = {"model": "m", "max_tokens": 4096, "messages": [{"role": "user", "content": QUESTION}], "stream": True}
        body = json.dumps(asked).encode()

        async def stream() -> AsyncIterator[str]:
            tail = b""
            async for block in self.blocks(body):
                *events, tail = (tail + block).split(b"\n\n")
                for event in events:
                    value = parse(event.partition(b"data: ")[2])
                    if value["type"] == "content_block_delta":
                        yield value["delta"]["text"]

        return stream

    async def post(self, body: bytes) -> bytes:
        response = await self.client.post("/v1/messages", cast_to=self.response, content=body, options=self.options)
        content: bytes = response.content
        return content

    async def blocks(self, body: bytes) -> AsyncIterator[bytes]:
        import anthropic

        response: Any = await self.client.post(
            "/v1/messages",
            cast_to=self.response,
            content=body,
            options=self.options,
            stream=True,
            stream_cls=anthropic.AsyncStream[Any],
        )
        try:
            async for block in response.aiter_bytes():
                yield block
        finally:
            await response.aclose()


class Floor(ByHand):
    """On aiohttp itself: no package, no retries, no errors."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/chat/completions"
        self.session: Any = None

    def connect(self) -> Any:
        import aiohttp

        if self.session is None:
            self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self.session

    async def post(self, body: bytes) -> bytes:
        async with self.connect().post(self.url, data=body) as response:
            content: bytes = await response.read()
            return content

    async def blocks(self, body: bytes) -> AsyncIterator[bytes]:
        async with self.connect().post(self.url, data=body) as response:
            async for block in response.content.iter_any():
                yield block


class Typed:
    """The loop on the package's typed calls, as its documentation shows it."""

    def __init__(self, url: str) -> None:
        import openai

        self.client: Any = openai.AsyncOpenAI(base_url=url, api_key="k")

    def run(self, tools: int, messages: int) -> Run:
        offered = wire_tools(tools)
        first = [{"role": "system", "content": SYSTEM}, *history(messages), {"role": "user", "content": QUESTION}]
        table = {f"tool_{number}": each for number, each in enumerate(functions(tools))}

        async def run() -> Any:
            sent: list[Any] = list(first)
            while True:
                reply = await self.client.chat.completions.create(model="m", messages=sent, tools=offered)
                message = reply.choices[0].message
                if not message.tool_calls:
                    return message.content
                sent.append(message)
                for call in message.tool_calls:
                    result = await table[call.function.name](**json.loads(call.function.arguments))
                    sent.append({"role": "tool", "tool_call_id": call.id, "content": result})

        return run

    def stream(self) -> Stream:
        async def stream() -> AsyncIterator[str]:
            messages = [{"role": "user", "content": QUESTION}]
            async for each in await self.client.chat.completions.create(model="m", messages=messages, stream=True):
                if each.choices and each.choices[0].delta.content:
                    yield each.choices[0].delta.content

        return stream


# --- frameworks


class PydanticAi:
    """pydantic-ai."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @classmethod
    def on_openai(cls, url: str) -> PydanticAi:
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        return cls(OpenAIChatModel("m", provider=OpenAIProvider(base_url=url, api_key="k")))

    @classmethod
    def on_anthropic(cls, url: str) -> PydanticAi:
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        provider = AnthropicProvider(base_url=url.removesuffix("/v1"), api_key="k")
        return cls(AnthropicModel("m", provider=provider))

    def run(self, tools: int, messages: int) -> Run:
        from pydantic_ai import Agent
        from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, UserPromptPart

        agent = Agent(self.model, instructions=SYSTEM, tools=functions(tools))
        before: list[ModelMessage] = [
            ModelResponse([TextPart(each["content"])])
            if number % 2
            else ModelRequest([UserPromptPart(each["content"])])
            for number, each in enumerate(history(messages))
        ]
        return lambda: agent.run(QUESTION, message_history=before)

    def stream(self) -> Stream:
        from pydantic_ai import Agent

        agent = Agent(self.model)

        async def stream() -> AsyncIterator[str]:
            async with agent.run_stream(QUESTION) as run:
                async for each in run.stream_text(delta=True, debounce_by=None):
                    yield each

        return stream


class OpenAiAgents:
    """openai-agents, without tracing."""

    def __init__(self, url: str) -> None:
        import openai
        from agents import OpenAIChatCompletionsModel, set_tracing_disabled

        set_tracing_disabled(True)
        self.model = OpenAIChatCompletionsModel("m", openai.AsyncOpenAI(base_url=url, api_key="k"))

    def run(self, tools: int, messages: int) -> Run:
        from agents import Agent, Runner, function_tool

        agent = Agent(
            "a", instructions=SYSTEM, model=self.model, tools=[function_tool(each) for each in functions(tools)]
        )
        asked: Any = [*history(messages), {"role": "user", "content": QUESTION}]
        return lambda: Runner.run(agent, list(asked))

    def stream(self) -> Stream:
        from agents import Agent, Runner

        agent = Agent("a", model=self.model)

        async def stream() -> AsyncIterator[str]:
            async for each in Runner.run_streamed(agent, QUESTION).stream_events():
                if each.type == "raw_response_event" and each.data.type == "response.output_text.delta":
                    yield each.data.delta

        return stream


class LangChain:
    """langchain with langchain-openai."""

    def __init__(self, url: str) -> None:
        from langchain_openai import ChatOpenAI

        self.model: Any = ChatOpenAI(model="m", base_url=url, api_key="k")

    def run(self, tools: int, messages: int) -> Run:
        from langchain.agents import create_agent
        from langchain_core.tools import tool

        agent: Any = create_agent(self.model, [tool(each) for each in functions(tools)], system_prompt=SYSTEM)
        asked = [(each["role"], each["content"]) for each in history(messages)]
        return lambda: agent.ainvoke({"messages": [*asked, ("user", QUESTION)]})

    def stream(self) -> Stream:
        async def stream() -> AsyncIterator[str]:
            async for each in self.model.astream(QUESTION):
                if each.content:
                    yield each.content

        return stream


PEERS: dict[str, Callable[[str], Any]] = {
    "toolbox": lambda url: Ours(OpenAiChatModel("m", url, "k", transport="aiohttp")),
    "toolbox httpx2": lambda url: Ours(OpenAiChatModel("m", url, "k", transport="httpx2")),
    "floor": Floor,
    "low-level aiohttp": lambda url: LowLevel(url, "aiohttp"),
    "low-level httpx2": lambda url: LowLevel(url, "httpx2"),
    "typed": Typed,
    "pydantic-ai": PydanticAi.on_openai,
    "openai-agents": OpenAiAgents,
    "langchain": LangChain,
    "toolbox anthropic": lambda url: Ours(AnthropicChatModel("m", "k", url.removesuffix("/v1"))),
    "low-level anthropic": LowLevelAnthropic,
    "pydantic-ai anthropic": PydanticAi.on_anthropic,
    "toolbox bridge": lambda url: Ours(PydanticAiChatModel(PydanticAi.on_anthropic(url).model)),
}


# --- measuring


async def cpu_per_trip(run: Run, runs: int, seconds: float) -> float:
    """Milliseconds of this process per request, in at least so many runs."""
    for _ in range(min(runs, 3)):
        await run()
    gc.collect()
    began = time.process_time()
    done = 0
    while done < runs or time.process_time() - began < seconds:
        await run()
        done += 1
    return (time.process_time() - began) * 1000 / (done * TRIPS)


async def per_second(run: Run, at_once: int) -> float:
    """Runs per second when so many run at once, on connections that are there."""
    await asyncio.gather(*(run() for _ in range(at_once)))
    gc.collect()
    began = time.perf_counter()
    await asyncio.gather(*(run() for _ in range(at_once)))
    return at_once / (time.perf_counter() - began)


async def per_chunk(stream: Stream, runs: int, seconds: float) -> tuple[float, float]:
    """Microseconds of this process per chunk, and milliseconds to the first."""
    firsts = []
    for _ in range(min(runs, 2)):
        async for _ in stream():
            pass
    gc.collect()
    used = 0.0
    while len(firsts) < runs or used < seconds:
        began, cpu, first = time.perf_counter(), time.process_time(), None
        seen = 0
        async for _ in stream():
            first = first or time.perf_counter()
            seen += 1
        used += time.process_time() - cpu
        assert seen >= CHUNKS, seen
        firsts.append(((first or 0.0) - began) * 1000)
    return used * 1e6 / (len(firsts) * CHUNKS), sorted(firsts)[len(firsts) // 2]


async def measure(base: str) -> None:
    """Answers each line of standard input, which names a peer, with a line of numbers."""
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    made: dict[str, tuple[Any, Any]] = {}
    kept: dict[str, Any] = {}
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked = json.loads(line)
        name = asked["peer"]
        if name not in made:
            made[name] = PEERS[name](f"{base}/0/v1"), PEERS[name](f"{base}/50/v1")
        at_once, delayed = made[name]
        key = f"{name} {asked['kind']} {asked.get('tools')} {asked.get('messages')}"
        numbers: list[float]
        if asked["kind"] == "trip":
            run = kept.setdefault(key, None) or at_once.run(asked["tools"], asked["messages"])
            numbers = [await cpu_per_trip(run, asked["runs"], asked["seconds"])]
        elif asked["kind"] == "throughput":
            run = kept.setdefault(key, None) or delayed.run(1, 0)
            numbers = [await per_second(run, asked["at_once"])]
        else:
            run = kept.setdefault(key, None) or at_once.stream()
            numbers = list(await per_chunk(run, asked["runs"], asked["seconds"]))
        kept[key] = run
        print(json.dumps(numbers), flush=True)


if __name__ == "__main__":
    try:
        from uvloop import run as run_loop  # the loop that uvicorn serves with
    except ImportError:
        from asyncio import run as run_loop
    run_loop(measure(sys.argv[1]))
