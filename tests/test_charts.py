"""The charts of the benchmarks: their figures, their drawing, and the page that shows them.

Not here: running a benchmark.
"""

import dataclasses
import importlib
import json
import re
import sys
from argparse import ArgumentParser
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import charts, results
from benchmarks.results import Bar, Chart, Group, Machine

ROOT = Path(__file__).parent.parent
SVG = "{http://www.w3.org/2000/svg}"
BENCHMARKS = re.findall(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[0]

# Long and unusual texts, figures of very different sizes, and bars that cannot be drawn to their length.
EXTREME = Chart(
    "extreme",
    "WWWW <extreme> & long titles, longer than the drawing is wide, must be broken into several lines of text",
    'Describes "extremes" & <more>.',
    (
        Group(
            "A title of a group with many words, so that it does not fit into one line of the drawing, MMMMM WWWWW",
            "requests per second and core",
            (
                Bar("toolbox", 0.0, -1.0, 0.5, None),
                Bar(
                    "a_label_without_a_single_space_that_is_wider_than_its_column_MMMMMMMMMMMM",
                    12345.6,
                    1,
                    23456.7,
                    9.5,
                ),
                Bar("<script>alert('&')</script> in a label of several words, to be broken", 100.0, 90, 110, 1234.5),
                Bar("slower than nothing", -3.0, -4.0, -2.0, 0.01),
            ),
            5,
            more_is_better=True,
        ),
        Group("All zero", "µs", (Bar("toolbox", 0, 0, 0, None), Bar("日本語のラベル", 0, 0, 0, None)), 1),
    ),
    measured="2026-01-31",
    machine=Machine(2, "x86_64", "3.11.7", 8.0),
    versions={f"package-{number}": "1.2.3" for number in range(40)},
)
SAVED = results.load()


@pytest.fixture(params=[*SAVED, EXTREME], ids=lambda chart: chart.name)
def chart(request: pytest.FixtureRequest) -> Chart:
    assert isinstance(request.param, Chart)
    return request.param


# --- figures


def test_a_group_has_medians_and_the_median_of_the_ratios_within_each_round() -> None:
    group = results.compare("t", "ms", {"toolbox": [1.0, 2.0, 10.0], "other": [3.0, 4.0, 50.0]})

    assert group.bars == (Bar("toolbox", 2.0, 1.5, 6.0, None), Bar("other", 4.0, 3.5, 27.0, 3.0))
    assert group.rounds == 3


def test_ratios_need_the_row_they_refer_to() -> None:
    group = results.compare("t", "ms", {"a": [1.0], "b": [2.0]}, base="toolbox")

    assert [(bar.low, bar.high, bar.ratio) for bar in group.bars] == [(1.0, 1.0, None), (2.0, 2.0, None)]


def test_saved_figures_have_the_date_the_machine_and_the_versions(tmp_path: Path) -> None:
    group = results.compare("t", "ms", {"toolbox": [1.0], "other": [2.0]})
    results.save(Chart("x", "X", "What.", (group,), ("pytest", "not-installed-anywhere")), tmp_path)

    [chart] = results.load(tmp_path)

    assert chart.groups == (group,)
    assert datetime.fromisoformat(chart.measured).date() <= datetime.now(UTC).date()
    assert chart.machine is not None
    assert chart.machine.cores >= 1
    assert chart.machine.python == ".".join(map(str, sys.version_info[:3]))
    assert chart.versions == {"pytest": pytest.__version__}
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["groups"][0]["bars"][1]["ratio"] == 2.0


def test_results_are_only_saved_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "save", lambda chart: (tmp_path / chart.name).touch())
    parser = ArgumentParser()
    results.add_options(parser)

    results.finish(parser.parse_args([]), EXTREME, {})
    assert list(tmp_path.iterdir()) == []

    results.finish(parser.parse_args(["--save"]), EXTREME, {})
    assert [each.name for each in tmp_path.iterdir()] == ["extreme"]


@pytest.mark.parametrize("name", BENCHMARKS.split())
def test_every_benchmark_can_save_its_figures(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module: Any = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])

    with pytest.raises(SystemExit) as ended:
        module.main()

    assert ended.value.code == 0
    assert "--save" in capsys.readouterr().out


def test_make_bench_runs_every_benchmark() -> None:
    with_options = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if "results.finish(" in path.read_text(encoding="utf-8")
    }

    assert set(BENCHMARKS.split()) == with_options


# --- the drawing


def drawn(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(charts.svg(chart))


def bars_of(chart: Chart) -> list[float]:
    """Return the lengths of all bars, from top to bottom."""
    rects = [each for each in drawn(chart).iter(f"{SVG}rect") if each.get("class") in ("ours", "peer")]
    return [float(each.attrib["width"]) for each in rects]


def test_a_chart_has_an_accessible_title_and_description(chart: Chart) -> None:
    root = drawn(chart)
    texts = {each.get("id"): each.text or "" for each in root if each.tag in (f"{SVG}title", f"{SVG}desc")}

    assert root.get("role") == "img"
    assert [texts[each] for each in root.attrib["aria-labelledby"].split()] == list(texts.values())
    title, description = texts.values()
    assert title == chart.title
    assert all(
        f"{bar.label}: {charts.number(bar.median, each.unit)}" in description
        for each in chart.groups
        for bar in each.bars
    )


def test_bars_are_proportional_to_their_figures(chart: Chart) -> None:
    lengths = iter(bars_of(chart))
    for group in chart.groups:
        of = [(next(lengths), max(0.0, bar.median)) for bar in group.bars]
        longest, largest = max(of)
        for length, figure in of:
            assert length == pytest.approx(longest * figure / largest if largest else 0, abs=0.02)
        assert longest > 50 or largest < max(bar.high for bar in group.bars) or largest == 0
    assert next(lengths, None) is None


def test_the_axis_says_which_bars_are_better_in_which_unit() -> None:
    texts = [each.text for each in drawn(EXTREME).iter(f"{SVG}text")]

    assert "requests per second and core, longer is better" in texts
    assert "µs, shorter is better" in texts
    assert any("The machine was busy" in str(each) for each in texts)


@pytest.mark.parametrize("largest", [0.003, 0.99, 1, 5, 7.3, 881, 12345.6])
def test_an_axis_has_few_round_numbers_up_to_the_largest_figure(largest: float) -> None:
    ticks = charts.axis(largest)

    assert ticks[0] == 0
    assert ticks[-2] < largest <= ticks[-1] * 1.000001
    assert 3 <= len(ticks) <= 6


def test_every_colour_has_a_light_and_a_dark_value(chart: Chart) -> None:
    light, _, dark = charts.STYLE.partition("@media (prefers-color-scheme: dark)")
    classes = {f".{name}" for each in drawn(chart).iter() for name in each.get("class", "").split()}

    assert {"text", *classes} <= set(re.findall(r"(\.?\w+) \{ (?:fill|stroke)", light))
    assert {"text", *classes} <= set(re.findall(r"(\.?\w+) \{ (?:fill|stroke)", dark))


def test_estimated_texts_stay_inside_the_drawing(chart: Chart) -> None:
    root = drawn(chart)
    height = float(root.attrib["height"])
    for each in root.iter(f"{SVG}text"):
        size = int(each.attrib["font-size"])
        width = charts.text_width(each.text or "", size, bold="font-weight" in each.attrib)
        x = float(each.attrib["x"]) - width * {"middle": 0.5, "end": 1}.get(each.get("text-anchor", ""), 0)
        assert x >= 0, each.text
        assert x + width <= charts.WIDTH, each.text
        assert size <= float(each.attrib["y"]) <= height - size / 2, each.text


def test_drawn_texts_stay_inside_the_drawing_and_apart_from_each_other(tab: Any, chart: Chart) -> None:
    tab.set_viewport_size({"width": 900, "height": 1200})
    tab.set_content(charts.svg(chart))
    box = tab.locator("svg").evaluate("svg => [svg.viewBox.baseVal.width, svg.viewBox.baseVal.height]")
    texts = tab.locator("svg text").evaluate_all(
        "all => all.map(each => [each.textContent, each.getBBox()]).map(([t, b]) => [t, b.x, b.y, b.width, b.height])"
    )

    assert len(texts) > 5
    for number, (text, x, y, width, height) in enumerate(texts):
        assert x >= 0 <= y, text
        assert x + width <= box[0], text
        assert y + height <= box[1], text
        for other, x2, y2, width2, height2 in texts[:number]:
            beside = x + width <= x2 or x2 + width2 <= x
            below = y + height <= y2 + 3 or y2 + height2 <= y + 3  # lines of text may touch
            assert beside or below, (text, other)


# --- the page


def test_every_saved_result_has_its_current_chart() -> None:
    there = {path.stem: path.read_text(encoding="utf-8") for path in (charts.DOCS / "charts").iterdir()}

    assert there == {each.name: charts.svg(each) for each in SAVED}, "run: make charts"


def test_the_page_shows_the_current_figures() -> None:
    page = charts.PAGE.read_text(encoding="utf-8")

    assert page == charts.with_section(page, charts.section(SAVED)), "run: make charts"
    assert all(f"(charts/{each.name}.svg)" in page for each in SAVED)


def test_drawing_replaces_old_charts_and_keeps_the_text_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{charts.BEGIN}\nold figures\n{charts.END}\nafter\n", encoding="utf-8")
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / "removed.svg").touch()
    monkeypatch.setattr(charts, "DOCS", tmp_path)
    monkeypatch.setattr(charts, "PAGE", page)
    newer = dataclasses.replace(EXTREME, name="newer")
    monkeypatch.setattr(results, "load", lambda: [newer])

    charts.main()
    once = page.read_text(encoding="utf-8")
    charts.main()

    assert [each.name for each in (tmp_path / "charts").iterdir()] == ["newer.svg"]
    assert page.read_text(encoding="utf-8") == once
    assert once.startswith(f"before\n{charts.BEGIN}\n\n### WWWW")
    assert once.endswith(f"{charts.END}\nafter\n")
    assert "old figures" not in once


def test_a_page_without_a_place_for_charts_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no place for the charts"):
        charts.with_section("text", "figures")
