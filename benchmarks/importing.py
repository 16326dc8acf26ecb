"""What importing costs, in fresh processes, beside the peers: milliseconds, megabytes, modules.

    make bench-import                          # or ARGS="--times 9"

A statement is timed in a process of its own, on top of a bare interpreter, compiled files warm; medians are printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from statistics import median

STATEMENTS = {
    "pydantic": "import pydantic",
    "fastapi": "import fastapi",
    "openai": "import openai",
    "toolbox": "import toolbox",
    "toolbox, declaring a service": "from toolbox import Container, Result, register_ai_service, tool, toolbox",
    "toolbox, started": (
        "import asyncio\n"
        "from toolbox import Container\n"
        "async def main():\n    async with Container(): pass\n"
        "asyncio.run(main())"
    ),
    "toolbox_fastapi": "import toolbox_fastapi",
    "pydantic-ai": "import pydantic_ai",
    "openai-agents": "import agents",
    "langchain": "import langchain.agents, langchain_openai",
}

PROBE = """
import json, resource, sys, time
before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
exec({statement!r}, {{}})
took = (time.perf_counter() - began) * 1000
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
print(json.dumps([took, grown, len(sys.modules)]))
"""


def probe(statement: str) -> list[float] | None:
    """Milliseconds, megabytes and modules of one statement in a fresh process; None where it cannot be imported."""
    script = PROBE.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    numbers: list[float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=7, help="processes for each statement, interleaved")
    options = parser.parse_args()
    found: dict[str, list[list[float]]] = {name: [] for name in STATEMENTS}
    for number in range(options.times + 1):
        for name, statement in STATEMENTS.items():
            numbers = probe(statement)
            if numbers is not None and number:
                found[name].append(numbers)
    ours = median(each[0] for each in found["toolbox"])
    print(f"{'':30} {'ms':>7} {'ratio':>7} {'MB':>7} {'modules':>8}")
    for name, numbers in found.items():
        if not numbers:
            print(f"{name:30} is not installed")
            continue
        took, grown, modules = (median(column) for column in zip(*numbers, strict=True))
        print(f"{name:30} {took:7.0f} {took / ours:6.1f}x {grown:7.1f} {modules:8.0f}")


if __name__ == "__main__":
    main()
