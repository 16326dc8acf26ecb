"""Start-up time: a large container beside FastAPI with a route of the same parameters for each tool.

Every measurement is a new process that has imported its libraries before the clock starts. The clock covers
registration, all checks and start; for FastAPI, adding the routes and building the OpenAPI document, because a
container also builds the JSON schema of every tool.

    python -m benchmarks.start [--rounds 5] [--json] [--save]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from types import ModuleType

from benchmarks import results

TOOLS_PER_CLASS = 5
CLASSES_PER_SERVICE = 5
PART = 160
"""Beans that depend on each other."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the measured program."""

    beans: int
    services: int
    tools: int

    def __str__(self) -> str:
        return f"{self.beans} beans, {self.services} services, {self.tools} tools"


SIZES = (Size(500, 100, 250), Size(2000, 200, 250))
SMALL = (Size(40, 5, 25),)

# Each tool has another name for the first one: equal parameters would be read once.
PARAMETERS = (
    'city_{0}: str, days: int = 3, unit: Literal["celsius", "fahrenheit"] = "celsius", tags: list[str] | None = None'
)


# --- the programs


def program(size: Size) -> Iterator[str]:
    """The lines of a module with the beans, tools and services."""
    yield "from typing import Literal, Protocol"
    yield "from toolbox import application_scoped, dependent, register_ai_service, request_scoped, tool"
    classes = size.tools // TOOLS_PER_CLASS
    marks = ("application_scoped", "application_scoped", "request_scoped", "dependent")
    plain = size.beans - classes
    for number in range(plain):
        # A bean gets three of those before it that live at least as long, of its part of the program: a chain of
        # more than 250 beans is a problem at start.
        same = [each for each in range(max(number - number % PART, number - 40), number) if each % 4 in (0, 1)]
        needs = same[-3:] if number % 7 else []
        yield f"@{marks[number % 4]}"
        yield f"class Bean{number}:"
        written = ", ".join(f"b{each}: Bean{each}" for each in needs)
        yield f"    def __init__(self{', ' if needs else ''}{written}) -> None: ..."
    for number in range(classes):
        yield "@application_scoped"
        yield f"class Tools{number}:"
        yield f"    def __init__(self, bean: Bean{number * 4}) -> None: ..."
        for each in range(TOOLS_PER_CLASS):
            yield "    @tool"
            yield f"    async def tool_{number}_{each}(self, {PARAMETERS.format(f'{number}_{each}')}) -> str:"
            yield '        """Tells the weather.'
            yield ""
            yield "        Args:"
            yield f"            city_{number}_{each}: The city's name."
            yield "            days: For how many days."
            yield '        """'
            yield '        return ""'
    for number in range(size.services):
        listed = ", ".join(f"Tools{(number + each) % classes}" for each in range(CLASSES_PER_SERVICE))
        yield f"@register_ai_service(tools=[{listed}])"
        yield f"class Service{number}(Protocol):"
        yield "    async def chat(self, question: str) -> str: ..."
        yield "    async def count(self, question: str) -> int: ..."
    yield f"BEANS = [{', '.join(f'Bean{each}' for each in range(plain))}]"
    yield f"BEANS += [{', '.join(f'Tools{each}' for each in range(classes))}]"
    yield f"BEANS += [{', '.join(f'Service{each}' for each in range(size.services))}]"


def routes(size: Size) -> Iterator[str]:
    """The lines of a module with the endpoints."""
    yield "from typing import Literal"
    for number in range(size.tools):
        yield f"async def endpoint_{number}({PARAMETERS.format(number)}) -> str:"
        yield '    """Tells the weather."""'
        yield '    return ""'
    yield f"ENDPOINTS = [{', '.join(f'endpoint_{each}' for each in range(size.tools))}]"


def module_of(lines: Iterator[str]) -> ModuleType:
    module = sys.modules["measured"] = ModuleType("measured")
    exec(compile("\n".join(lines), "<measured>", "exec", dont_inherit=True), vars(module))
    return module


# --- the measurements


def of_toolbox(size: Size, *, checked: bool = False, again: bool = False) -> float:
    """Seconds from registration to the started container; `checked` with `check()` before, `again` for a second one."""
    import dependency_injector.providers  # noqa: F401
    import openai  # noqa: F401 - loaded before the clock starts
    import pydantic_settings  # noqa: F401

    import toolbox.container
    import toolbox.di.wiring
    import toolbox.hosts.hosting  # noqa: F401
    from toolbox import Container, DemoChatModel

    module = module_of(program(size))

    async def start() -> float:
        begin = time.perf_counter()
        container = Container(models={"default": DemoChatModel()}).register(*module.BEANS)
        if checked:
            assert container.check() == []
        async with container:
            return time.perf_counter() - begin

    if again:
        asyncio.run(start())
    return asyncio.run(start())


def of_fastapi(size: Size, *, document: bool) -> float:
    """Seconds to add the routes, and with `document` to build the OpenAPI document."""
    from fastapi import FastAPI

    module = module_of(routes(size))
    begin = time.perf_counter()
    app = FastAPI()
    for number, endpoint in enumerate(module.ENDPOINTS):
        app.get(f"/{number}")(endpoint)
    if document:
        app.openapi()
    return time.perf_counter() - begin


MEASURED: dict[str, Callable[[Size], float]] = {
    "toolbox": of_toolbox,
    "toolbox, check() and start": lambda size: of_toolbox(size, checked=True),
    "toolbox, a second container": lambda size: of_toolbox(size, again=True),
    "FastAPI, routes and OpenAPI": lambda size: of_fastapi(size, document=True),
    "FastAPI, routes alone": lambda size: of_fastapi(size, document=False),
}


def measure(rounds: int, sizes: Sequence[Size]) -> dict[str, dict[str, list[float]]]:
    """Seconds by size, what was measured, and round; the order changes with each round."""
    found: dict[str, dict[str, list[float]]] = {str(size): {name: [] for name in MEASURED} for size in sizes}
    for number in range(rounds):
        for size in sizes:
            for name in list(MEASURED)[:: 1 if number % 2 == 0 else -1]:
                numbers = map(str, astuple(size))
                command = [sys.executable, "-m", "benchmarks.start", "--one", name, "--size", *numbers]
                found[str(size)][name].append(float(subprocess.check_output(command)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", choices=list(MEASURED), help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, nargs=3, help=argparse.SUPPRESS)
    parser.set_defaults(sizes=SIZES)
    options = results.parse(parser, rounds=1, sizes=SMALL)
    if options.one:
        print(MEASURED[options.one](Size(*options.size)))
        return
    found = measure(options.rounds, options.sizes)
    medians = {
        size: {name: statistics.median(times) * 1000 for name, times in of.items()} for size, of in found.items()
    }
    if not options.json:
        for size, of in medians.items():
            print(f"{size:40} {'ms':>8} {'to toolbox':>11}")
            for name, median in of.items():
                print(f"  {name:38} {median:8.0f} {median / of['toolbox']:9.2f} x")
            print()
    results.finish(
        options,
        results.Chart(
            "start",
            "Start-up",
            "Registers all beans, checks them and starts the container, in a new process with all libraries imported. "
            "FastAPI adds one route for each tool, with the same parameters, and builds the OpenAPI document.",
            tuple(
                results.compare(f"{size}", "ms", {name: [each * 1000 for each in times] for name, times in of.items()})
                for size, of in found.items()
            ),
            ("fastapi", "pydantic"),
        ),
        found,
    )


if __name__ == "__main__":
    main()
