"""Cost of a model round trip: CPU per request and per streamed chunk, and runs per second, for toolbox and its peers.

    make bench-models                        # or ARGS="--rounds 5 --peers toolbox,typed"

Each peer runs in a separate process. The peers are measured in turn, one at a time, for several rounds. A model server
that costs next to nothing answers in another process. The table shows medians, and ratios to the loop on the same
transport written by hand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

from . import results
from .models_peers import PEERS
from .ports import free_port

NEEDS = {
    "pydantic-ai": "pydantic_ai",
    "pydantic-ai anthropic": "pydantic_ai",
    "toolbox bridge": "pydantic_ai",
    "openai-agents": "agents",
    "langchain": "langchain_openai",
}
FRAMEWORKS = ("pydantic-ai", "openai-agents", "langchain")
ANTHROPIC = ("toolbox anthropic", "low-level anthropic", "pydantic-ai anthropic", "toolbox bridge")
"""The peers on Anthropic's Messages API; `toolbox bridge` is `PydanticAiChatModel`."""
ONE_OF_A_KIND = ("toolbox", "floor", "low-level aiohttp", "typed", "low-level anthropic", *FRAMEWORKS)
BY_HAND_GOAL = 1.3
PEERS_GOAL = 5
TRIPS = (("1 tool", 1, 0), ("50 tools", 50, 0), ("50 tools, 200 messages", 50, 200))


@contextmanager
def server() -> Iterator[str]:
    """The model server, up as long as the block lasts."""
    port = free_port()
    child = subprocess.Popen([sys.executable, "-m", "benchmarks.models_server", str(port)])
    base = f"http://127.0.0.1:{port}"
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(urllib.request.Request(f"{base}/0/", data=b"{}")).close()
                break
            except urllib.error.URLError:
                time.sleep(0.05)
        yield base
    finally:
        child.terminate()
        child.wait()


class Process:
    """A process that measures peers."""

    def __init__(self, base: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.models_peers", base],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()

    def measure(self, peer: str, asked: dict[str, Any]) -> list[float]:
        """The numbers for this."""
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps({"peer": peer, **asked}) + "\n")
        self.child.stdin.flush()
        numbers: list[float] = json.loads(self._line())
        return numbers

    def _line(self) -> str:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            raise SystemExit("the process of a peer has ended, see above")
        return line

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.terminate()
        self.child.wait()


def questions(options: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Return the measured cases, each with its parameters."""
    least = {"runs": options.runs, "seconds": options.seconds}
    most = options.most
    asked: list[tuple[str, dict[str, Any]]] = [
        (title, {"kind": "trip", "tools": min(tools, most), "messages": min(messages, most), **least})
        for title, tools, messages in TRIPS
    ]
    asked.append(("chunk", {"kind": "stream", **least}))
    asked += [(f"{count} at once", {"kind": "throughput", "at_once": min(count, most)}) for count in (50, 400)]
    return asked


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--runs", type=int, default=8, help="least number of runs in a round")
    parser.add_argument("--seconds", type=float, default=0.5, help="least CPU time: what costs little runs more often")
    parser.add_argument("--most", type=int, default=400, help="limit for tools, messages, and runs at the same time")
    parser.add_argument("--together", action="store_true", help="all peers in one process")
    options = results.parse(parser, rounds=1, runs=1, seconds=0.0, most=2, together=True, peers=",".join(ONE_OF_A_KIND))
    names = results.installed(options.peers.split(","), NEEDS)
    found: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    titles = [title for title, _ in questions(options)]
    with ExitStack() as stack:
        base = stack.enter_context(server())
        processes = [stack.enter_context(Process(base)) for _ in (names[:1] if options.together else names)]
        peers = list(zip(names, processes * len(names), strict=False))
        for round_ in range(options.rounds):
            print(f"round {round_ + 1} of {options.rounds}", file=sys.stderr, flush=True)
            for title, asked in questions(options):
                for name, process in peers if round_ % 2 == 0 else reversed(peers):
                    found[name, title].append(process.measure(name, asked))
    if not options.json:
        report(names, {key: [median(each) for each in zip(*values, strict=True)] for key, values in found.items()})
    results.finish(options, chart(names, found), {name: {t: found[name, t] for t in titles} for name in names})


def chart(names: list[str], found: dict[tuple[str, str], list[list[float]]]) -> results.Chart:
    """Return the figures for the documentation."""

    def group(title: str, unit: str, key: str, index: int = 0, *, more_is_better: bool = False) -> results.Group:
        rounds = {name: [each[index] for each in found[name, key]] for name in names}
        return results.compare(title, unit, rounds, more_is_better=more_is_better)

    return results.Chart(
        "models",
        "Models: one question with one tool call",
        "A question, a tool call and an answer, from a local model server that replies at once. The other loops are "
        "written by hand: 'floor' with aiohttp alone, 'low-level' with the low-level post of the openai client, "
        "'typed' with its typed calls. The rows named 'anthropic' use the Messages API and its package; 'bridge' is "
        "PydanticAiChatModel.",
        (
            *(group(f"CPU time for each request: {title}", "ms", title) for title, *_ in TRIPS),
            group("CPU time for each chunk of a stream", "µs", "chunk"),
            group("Time to the first chunk", "ms", "chunk", 1),
            *(
                group(f"Throughput, {title}", "runs/s", title, more_is_better=True)
                for title in ("50 at once", "400 at once")
            ),
        ),
        ("openai", "anthropic", "aiohttp", "httpx2", "pydantic-ai-slim", "openai-agents", "langchain-openai"),
    )


def report(names: list[str], found: dict[tuple[str, str], list[float]]) -> None:
    """The tables."""
    titles = [title for title, *_ in TRIPS]
    print(f"\nThe ratios are to the low-level loop on the same transport (goal for toolbox: at most {BY_HAND_GOAL}x).")
    print(f"\n{'CPU per request, ms':22}" + "".join(f"{title:>26}" for title in titles))
    for name in names:
        print(
            f"{name:22}"
            + "".join(f"{found[name, title][0]:>19.3f} {_ratio(found, name, title):>6}" for title in titles)
        )
    print(f"\n{'':22}{'chunk, us':>14}{'first, ms':>12}{'50 at once, runs/s':>22}{'400 at once, runs/s':>22}")
    for name in names:
        chunk, first = found[name, "chunk"]
        fifty, many = found[name, "50 at once"][0], found[name, "400 at once"][0]
        print(f"{name:22}{chunk:>14.1f}{first:>12.2f}{fifty:>22.0f}{many:>22.0f}")
    frameworks = [name for name in FRAMEWORKS if name in names]
    if "toolbox" not in names or not frameworks:
        return
    print("\nAgainst the best framework:")
    for title in titles:
        ratio = min(found[name, title][0] for name in frameworks) / found["toolbox", title][0]
        print(f"  {title:24} {ratio:5.1f} times less CPU (goal {PEERS_GOAL})")
    ratio = found["toolbox", "400 at once"][0] / max(found[name, "400 at once"][0] for name in frameworks)
    print(f"  {'400 at once':24} {ratio:5.1f} times the runs per second")
    ratio = min(found[name, "chunk"][0] for name in frameworks) / found["toolbox", "chunk"][0]
    print(f"  {'chunk':24} {ratio:5.1f} times less CPU")


def _ratio(found: dict[tuple[str, str], list[float]], name: str, title: str) -> str:
    """To the low-level loop on the same transport."""
    by_hand = "low-level httpx2" if name == "toolbox httpx2" else "low-level aiohttp"
    hand = found.get(("low-level anthropic" if name in ANTHROPIC else by_hand, title))
    return f"{found[name, title][0] / hand[0]:.2f}x" if hand else ""


if __name__ == "__main__":
    main()
