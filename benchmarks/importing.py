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

from benchmarks import results

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

# The peak that `getrusage` knows begins with that of the parent process, so Linux is asked for the memory in use.
PROBE = """
import json, os, resource, sys, time
def memory():
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before, began = memory(), time.perf_counter()
exec({statement!r}, {{}})
took = (time.perf_counter() - began) * 1000
print(json.dumps([took, (memory() - before) / 1024 / 1024, len(sys.modules)]))
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
    parser.set_defaults(warm_up=True, names=list(STATEMENTS))
    ours = [name for name in STATEMENTS if name.startswith("toolbox")]
    options = results.parse(parser, times=1, warm_up=False, names=ours)
    found: dict[str, list[list[float]]] = {name: [] for name in options.names}
    for number in range(0 if options.warm_up else 1, options.times + 1):
        for name in options.names:
            numbers = probe(STATEMENTS[name])
            if numbers is not None and number:
                found[name].append(numbers)
    if not options.json:
        report(found)
    installed = {name: numbers for name, numbers in found.items() if numbers}
    groups = (("Time of the import, on top of a bare interpreter", "ms", 0), ("Memory of the import", "MB", 1))
    chart = results.Chart(
        "importing",
        "Import time and memory",
        "Each statement runs in a new process with compiled files in the cache. 'declaring a service' imports the "
        "names that a service needs; 'started' also starts an empty container.",
        tuple(
            results.compare(title, unit, {name: [each[index] for each in of] for name, of in installed.items()})
            for title, unit, index in groups
        ),
        ("pydantic", "fastapi", "openai", "pydantic-ai-slim", "openai-agents", "langchain"),
    )
    results.finish(options, chart, found)


def report(found: dict[str, list[list[float]]]) -> None:
    """Print the table."""
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
