"""Results of benchmarks: printed as JSON, saved for the charts of the documentation.

`--save` writes `benchmarks/results/<name>.json`, which is kept in the repository; `benchmarks.charts` draws it. Nothing
here runs a benchmark.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any

DIRECTORY = Path(__file__).parent / "results"
DECIMALS = 4


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure of a chart: the median over the rounds, the middle half of the rounds, and the ratio to toolbox.

    `ratio` is the median of the ratios within each round; None for the row that the others are compared with.
    """

    label: str
    median: float
    low: float
    high: float
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Group:
    """Bars on one axis, compared with each other; shorter bars are better unless `more_is_better`."""

    title: str
    unit: str
    bars: tuple[Bar, ...]
    rounds: int
    more_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """The computer and the Python of a measurement; `load` is the load average of the minute before it."""

    cores: int
    architecture: str
    python: str
    load: float


@dataclass(frozen=True, slots=True)
class Chart:
    """The saved figures of one benchmark; `finish` adds the date, the machine and the installed versions."""

    name: str
    title: str
    description: str
    groups: tuple[Group, ...]
    distributions: tuple[str, ...] = ()
    """The packages whose versions are saved with the figures."""
    measured: str = ""
    """The date of the measurement, in UTC: `2026-11-22`."""
    machine: Machine | None = None
    versions: Mapping[str, str] | None = None


def _load() -> float:
    """Return the load average of the last minute; 0 where the system has none."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


LOAD_AT_START = _load()


def compare(
    title: str,
    unit: str,
    rounds: Mapping[str, Sequence[float]],
    *,
    base: str = "toolbox",
    more_is_better: bool = False,
) -> Group:
    """Compare the figures of several rounds with those of `base`, round by round.

    Args:
        title: what the group shows
        unit: the unit of all figures, as written on the axis
        rounds: one figure for each round, by label; the rounds of all labels are in the same order
        base: the label that the others are compared with
        more_is_better: True for throughput, False for time and memory
    """
    bars = []
    for label, figures in rounds.items():
        low, _, high = quantiles(figures, n=4, method="inclusive") if len(figures) > 1 else [figures[0]] * 3
        ratios = [each / of for each, of in zip(figures, rounds.get(base, ()), strict=False) if of > 0]
        ratio = round(median(ratios), DECIMALS) if ratios and label != base else None
        middle, low, high = (round(each, DECIMALS) for each in (median(figures), low, high))
        bars.append(Bar(label, middle, low, high, ratio))
    return Group(title, unit, tuple(bars), max(map(len, rounds.values())), more_is_better)


def parse(parser: ArgumentParser, **smoke: Any) -> Namespace:
    """Return the options of a benchmark, with those that `finish` follows.

    With `--smoke`, the `smoke` options replace those with the same names: the benchmark runs once and small, so that a
    test can tell if it still works. Its figures say nothing.
    """
    parser.add_argument("--json", action="store_true", help="print every measurement as JSON, and no table")
    parser.add_argument("--save", action="store_true", help="save the figures for the charts of the documentation")
    parser.add_argument("--smoke", action="store_true", help="run once and small, to see if it works")
    options = parser.parse_args()
    if options.smoke:
        if options.save:
            parser.error("--smoke measures nothing worth saving; leave out --save")
        vars(options).update(smoke)
    return options


def installed(names: Iterable[str], needs: Mapping[str, str]) -> list[str]:
    """Return the names whose module, in `needs`, is installed; print the others."""
    found = []
    for name in names:
        if (module := needs.get(name)) is None or find_spec(module) is not None:
            found.append(name)
        else:
            print(f"{name} is not installed", file=sys.stderr)
    return found


def finish(options: Namespace, chart: Chart, measured: Any) -> None:
    """Print what was `measured` with `--json`, and save the chart's figures with `--save`."""
    if options.json:
        print(json.dumps(measured))
    if options.save:
        save(chart)


def save(chart: Chart, directory: Path = DIRECTORY) -> None:
    """Write the figures of a chart with today's date, this machine, and the versions of the compared packages."""
    dated = replace(
        chart,
        measured=datetime.now(UTC).date().isoformat(),
        machine=Machine(os.cpu_count() or 1, platform.machine(), platform.python_version(), LOAD_AT_START),
        versions=_versions(chart.distributions),
    )
    directory.mkdir(exist_ok=True)
    text = json.dumps(asdict(dated), indent=2, ensure_ascii=False)
    (directory / f"{chart.name}.json").write_text(text + "\n", encoding="utf-8")


def load(directory: Path = DIRECTORY) -> list[Chart]:
    """Read the saved charts, ordered by name."""
    return [_read(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(directory.glob("*.json"))]


def _read(saved: Any) -> Chart:
    groups = tuple(Group(**{**each, "bars": tuple(Bar(**bar) for bar in each["bars"])}) for each in saved["groups"])
    machine = Machine(**saved["machine"])
    return Chart(**{**saved, "groups": groups, "machine": machine, "distributions": tuple(saved["distributions"])})


def _versions(distributions: Sequence[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for each in distributions:
        try:
            found[each] = version(each)
        except PackageNotFoundError:
            continue
    return found
