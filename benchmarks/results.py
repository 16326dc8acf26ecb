"""Results of benchmarks: printed as JSON, saved for the charts of the documentation.

`--save` writes `benchmarks/results/<name>.json`, which is kept in the repository; `benchmarks.charts` draws it.
"""

from __future__ import annotations

import json
import os
import platform
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Group:
    """Bars that are compared with each other: their lengths, by label."""

    title: str
    bars: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: `unit` is that of all its bars; shorter bars are better unless `more_is_better`."""

    name: str
    title: str
    unit: str
    groups: tuple[Group, ...]
    more_is_better: bool = False


def add_options(parser: ArgumentParser) -> None:
    """Adds the options that `finish` follows."""
    parser.add_argument("--json", action="store_true", help="print every measurement as JSON, and no table")
    parser.add_argument("--save", action="store_true", help="save the medians for the charts of the documentation")


def finish(options: Namespace, chart: Chart, measured: Any) -> None:
    """Prints what was `measured` with `--json`, and saves the chart's figures with `--save`."""
    if options.json:
        print(json.dumps(measured))
    if options.save:
        save(chart)


def save(chart: Chart) -> None:
    """Writes the figures of a chart, with the Python and the number of cores that they were measured on."""
    DIRECTORY.mkdir(exist_ok=True)
    machine = f"Python {platform.python_version()}, {os.cpu_count()} cores"
    groups = [{"title": each.title, "bars": {k: round(v, 4) for k, v in each.bars.items()}} for each in chart.groups]
    text = json.dumps({**asdict(chart), "groups": groups, "machine": machine}, indent=2)
    (DIRECTORY / f"{chart.name}.json").write_text(text + "\n", encoding="utf-8")


def load() -> list[tuple[Chart, str]]:
    """The saved charts by name, each with the machine that it was measured on."""
    found = []
    for path in sorted(DIRECTORY.glob("*.json")):
        read = json.loads(path.read_text(encoding="utf-8"))
        machine = read.pop("machine")
        read["groups"] = tuple(Group(**each) for each in read["groups"])
        found.append((Chart(**read), machine))
    return found
