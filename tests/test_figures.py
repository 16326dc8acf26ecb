"""The figures of benchmarks in the README and the documentation come from the saved results.

Not here: running a benchmark, and drawing a chart (`benchmarks`).
"""

import re

import pytest

from benchmarks import charts, results
from tests.test_documents import PAGES, ROOT

MEASURED = re.compile(r"\d\s*(?:ms|µs|×|x)(?![\w/])")


def test_figures_are_those_of_the_saved_results() -> None:
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    saved = results.load()

    assert [name for name, text in texts.items() if charts.with_figures(text, saved) != text] == [], "run `make charts`"


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_measured_times_are_not_copied_by_hand(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    by_hand = charts.FIGURE.sub("", text.partition(charts.BEGIN)[0] + text.partition(charts.END)[2])

    assert MEASURED.findall(by_hand) == []
