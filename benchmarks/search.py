"""What a search over 1,000 tools saves in the first request, and whether it finds the right tool.

    make bench-search                          # or ARGS="--rounds 15"

The tools in `data/mcp_tools.json.gz` are those that published MCP servers list; each package has its version and its
license there. A name begins with the server's, as clients name them. `data/search_questions.json` has 100 questions,
each with the tool that answers it. A whole question is one search term, which is harder than the terms of a model.

The first call of a service encodes its tools, later calls reuse them; both include a server on this machine that reads
the request. Tokens are estimated: four bytes each. Goal: the right tool is among the first 8 for 90 of 100 questions.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

from benchmarks import results
from toolbox import (
    AiServiceTool,
    OpenAiChatModel,
    ToolExecutionRequest,
    ToolSearchRequest,
    ToolSearchStrategy,
    ToolSpecification,
    create_ai_service,
)
from toolbox.search import Bm25ToolSearch, KeywordToolSearch

DATA = Path(__file__).parent / "data"
FOUND = 8
GOAL = 90
BYTES_PER_TOKEN = 4

STRATEGIES: dict[str, Callable[[], ToolSearchStrategy] | None] = {
    "without search": None,
    "keywords": lambda: KeywordToolSearch(max_results=FOUND),
    "BM25": lambda: Bm25ToolSearch(max_results=FOUND),
}


def tools() -> list[ToolSpecification]:
    """Read the tools of the published servers, as new objects."""
    with gzip.open(DATA / "mcp_tools.json.gz", "rt", encoding="utf-8") as file:
        servers = json.load(file)
    return [ToolSpecification(**tool) for server in servers for tool in server["tools"]]


def questions() -> list[dict[str, str]]:
    """Read the questions, each with the name of the tool that answers it."""
    found: list[dict[str, str]] = json.loads((DATA / "search_questions.json").read_text(encoding="utf-8"))
    return found


# --- the first request


class Assistant(Protocol):
    async def ask(self, question: str) -> str: ...


@dataclass(slots=True)
class Server:
    """A model server that says "done". It keeps the size of the last request."""

    url: str = ""
    received: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        message = {"role": "assistant", "content": "done"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = json.dumps({"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})
        reply = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                self.received = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
                await reader.readexactly(self.received)
                writer.write(reply.encode())
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@dataclass(slots=True)
class FirstRequests:
    """The size of the first request in bytes, and milliseconds of the first and of the second call of a service."""

    size: int
    first: list[float]
    second: list[float]


async def first_request(
    server: Server, specifications: Sequence[ToolSpecification], strategy: Any
) -> tuple[float, float]:
    fresh = [replace(each) for each in specifications]
    offered = [AiServiceTool(each, lambda request, memory_id: "") for each in fresh]
    model = OpenAiChatModel("m", server.url, "none")
    search = None if strategy is None else strategy()
    service: Assistant = create_ai_service(Assistant, chat_model=model, tools=offered, tool_search=search)
    times = []
    for _ in range(2):
        began = perf_counter()
        await service.ask("Which tools do you have?")
        times.append((perf_counter() - began) * 1000)
    await model.aclose()
    return times[0], times[1]


async def first_requests(rounds: int) -> dict[str, FirstRequests]:
    server, specifications = Server(), tools()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, limit=2**24)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    measured: dict[str, FirstRequests] = {}
    for number in range(rounds + 1):
        for name, strategy in STRATEGIES.items():
            first, second = await first_request(server, specifications, strategy)
            row = measured.setdefault(name, FirstRequests(server.received, [], []))
            if number:  # the first round warms up
                row.first.append(first)
                row.second.append(second)
    listening.close()
    return measured


# --- quality


@dataclass(slots=True)
class Quality:
    """How many questions found their tool among the first 8, and as the first; milliseconds of a search."""

    among_first: int
    first: int
    milliseconds: float
    missed: list[str]


def quality(strategy: ToolSearchStrategy) -> Quality:
    specifications, asked = tools(), questions()
    call = ToolExecutionRequest("1", "tool_search_tool", json.dumps({"terms": ["warm up"]}))
    _ = strategy.search(ToolSearchRequest(call, specifications))
    among = first = 0
    missed, times = [], []
    for row in asked:
        call = ToolExecutionRequest("1", "tool_search_tool", json.dumps({"terms": [row["question"]]}))
        with timed(times):
            found: Any = strategy.search(ToolSearchRequest(call, specifications))
        among += row["tool"] in found.tool_names
        first += row["tool"] in found.tool_names[:1]
        if row["tool"] not in found.tool_names:
            missed.append(f"{row['question']} ({row['tool']})")
    return Quality(among, first, median(times), missed)


@contextmanager
def timed(times: list[float]) -> Iterator[None]:
    began = perf_counter()
    yield
    times.append((perf_counter() - began) * 1000)


# --- the report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9, help="first requests of each kind")
    options = results.parse(parser, rounds=1)
    measured = asyncio.run(first_requests(options.rounds))
    found = {name: quality(make()) for name, make in STRATEGIES.items() if make is not None}
    if not options.json:
        report(measured, found)
    chart = results.Chart(
        "search",
        "Tool search over 1,000 tools",
        "The first request of a service with the tools of 18 published MCP servers, and 100 questions for them. "
        "Tokens are estimated as four bytes each.",
        (
            results.compare(
                "Estimated tokens of the first request",
                "tokens",
                {name: [row.size / BYTES_PER_TOKEN] for name, row in measured.items()},
                base="without search",
            ),
            results.compare(
                "Time of the first call",
                "ms",
                {name: row.first for name, row in measured.items()},
                base="without search",
            ),
            results.compare(
                f"Questions whose tool is among the first {FOUND}, of 100",
                "questions",
                {name: [float(row.among_first)] for name, row in found.items()},
                base="keywords",
                more_is_better=True,
            ),
        ),
        ("bm25s",),
    )
    results.finish(options, chart, {name: [row.size, row.first, row.second] for name, row in measured.items()})
    return 0 if all(row.among_first >= GOAL for row in found.values()) else 1


def report(measured: dict[str, FirstRequests], found: dict[str, Quality]) -> None:
    print(f"{'1,000 tools':<16}{'bytes':>12}{'tokens':>10}{'first call':>14}{'later calls':>14}")
    for name, row in measured.items():
        tokens = row.size // BYTES_PER_TOKEN
        print(f"{name:<16}{row.size:>12,}{tokens:>10,}{median(row.first):>11.1f} ms{median(row.second):>11.1f} ms")
    print(f"\n{'100 questions':<16}{f'among {FOUND}':>12}{'first':>10}{'a search':>14}")
    for name, quality_ in found.items():
        print(f"{name:<16}{quality_.among_first:>12}{quality_.first:>10}{quality_.milliseconds:>11.1f} ms")
    for name, quality_ in found.items():
        print(f"\nnot found by {name}:")
        for each in quality_.missed:
            print(f"  {each}")


if __name__ == "__main__":
    sys.exit(main())
