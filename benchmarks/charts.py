"""Charts of the saved results: `docs/charts/<name>.svg`, their section in `docs/performance.md`, and single figures.

    make charts                                # or python -m benchmarks.charts

Reads `benchmarks/results/*.json`; runs no benchmark and needs only the standard library. A chart follows the light or
dark mode of its reader.

A figure in the README or in a page stands between two comments, and is written here:

    <!-- figure: execution; Time until all runs are done; toolbox -->1.19 s<!-- end -->
    <!-- figure: execution; Time until all runs are done; pydantic-ai; ratio -->5.6 times<!-- end -->
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks import results
from benchmarks.results import Bar, Chart, Group

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGE = DOCS / "performance.md"
PAGES_WITH_FIGURES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
FIGURE = re.compile(r"<!-- figure: (?P<place>[^>]+) -->.*?<!-- end -->", re.DOTALL)

ORDER = (
    *("execution", "connections", "app", "models", "tools", "container", "endpoints", "start", "importing"),
    *("runs", "inbox", "search", "wire"),
)
"""The charts in the order of the page: what users notice first."""

COUNTED = ("cases", "questions", "requests", "tokens")
"""Units that a sentence around a figure names."""

SHORT = {"blocking": ("execution", 2)}
"""Charts with the first groups of another one: (chart, groups)."""
BEGIN, END = "<!-- The charts; `make charts` writes this part. -->", "<!-- End of the charts. -->"

# Lengths in pixels of the drawing; the width is the text column of the documentation.
WIDTH = 760
MARGIN = 20
LABELS = 270
GAP = 10
BAR = 18
TITLE, TEXT, SMALL = 18, 13, 11
LINE = 1.35
"""Height of a line of text, in font sizes."""

STYLE = """
    svg { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
    .page { fill: #ffffff } text { fill: #1f2328 } .muted { fill: #59636e }
    .value { stroke: #ffffff; stroke-width: 4px; paint-order: stroke }
    .grid { stroke: #d1d9e0 } .spread { stroke: #1f2328 } .ours { fill: #0969da } .peer { fill: #a5aeb8 }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117 } text { fill: #f0f6fc } .muted { fill: #9198a1 }
      .value { stroke: #0d1117 }
      .grid { stroke: #3d444d } .spread { stroke: #f0f6fc } .ours { fill: #4493f8 } .peer { fill: #656c76 }
    }
"""


def main() -> None:
    """Draw every saved result, remove the charts of others, and write the section of the page."""
    charts = sorted(results.load(), key=lambda chart: (*ORDER, chart.name).index(chart.name))
    folder = DOCS / "charts"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    for chart in charts:
        (folder / f"{chart.name}.svg").write_text(svg(chart), encoding="utf-8")
    for name, (long, groups) in SHORT.items():
        chart = next(each for each in charts if each.name == long)
        short = replace(chart, name=name, groups=chart.groups[:groups])
        (folder / f"{name}.svg").write_text(svg(short), encoding="utf-8")
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), section(charts)), encoding="utf-8")
    for page in PAGES_WITH_FIGURES:
        page.write_text(with_figures(page.read_text(encoding="utf-8"), charts), encoding="utf-8")
    print(f"{len(charts)} charts in {folder}: {', '.join(each.name for each in charts)}")


# --- the drawing


def svg(chart: Chart) -> str:
    """Draw a chart: a title, a block of bars for each group, and when and where it was measured."""
    drawing = Drawing()
    drawing.paragraph(chart.title, TITLE, bold=True)
    drawing.paragraph(reading(chart), SMALL, "muted")
    for group in chart.groups:
        drawing.group(group)
    drawing.space(14)
    drawing.paragraph(source(chart), SMALL, "muted")
    height = math.ceil(drawing.y + MARGIN)
    about = f"{chart.description} {' '.join(map(sentence, chart.groups))}"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"',
            f'     role="img" aria-labelledby="{chart.name}-title {chart.name}-desc">',
            f'  <title id="{chart.name}-title">{escape(chart.title)}</title>',
            f'  <desc id="{chart.name}-desc">{escape(about)}</desc>',
            f"  <style>{STYLE}  </style>",
            f'  <rect class="page" width="{WIDTH}" height="{height}" rx="6"/>',
            *drawing.shapes,
            "</svg>\n",
        )
    )


class Drawing:
    """The shapes drawn so far, from top to bottom; `y` is where the next one begins."""

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.y = float(MARGIN)

    def space(self, height: float) -> None:
        """Leave some room."""
        self.y += height

    def text(
        self, x: float, y: float, text: str, size: int, kind: str = "", anchor: str = "", weight: str = ""
    ) -> None:
        """Write one line of text whose baseline is at `y`."""
        extra = {"class": kind, "text-anchor": anchor, "font-weight": weight}
        written = "".join(f' {name}="{value}"' for name, value in extra.items() if value)
        self.shapes.append(f'  <text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{written}>{escape(text)}</text>')

    def paragraph(self, text: str, size: int, kind: str = "", *, bold: bool = False) -> None:
        """Write text over the whole width, in as many lines as it needs."""
        for line in wrap(text, WIDTH - 2 * MARGIN, size, bold=bold):
            self.text(MARGIN, self.y + size, line, size, kind, weight="600" if bold else "")
            self.space(size * LINE)

    def group(self, group: Group) -> None:
        """Draw the bars of a group on an axis that starts at zero."""
        self.space(16)
        self.paragraph(group.title, TEXT, bold=True)
        self.space(6)
        labels = [wrap(bar.label, LABELS, TEXT) for bar in group.bars]
        values = [value(bar, group) for bar in group.bars]
        left = MARGIN + max(text_width(line, TEXT) for lines in labels for line in lines) + GAP
        right = WIDTH - MARGIN - GAP - max(text_width(each, TEXT) for each in values)
        ticks = axis(max(max(bar.median, bar.high) for bar in group.bars))
        scale = (right - left) / ticks[-1]
        top = self.y
        below = len(self.shapes)  # the grid lies under the bars
        for bar, lines, written in zip(group.bars, labels, values, strict=True):
            self._bar(bar, lines, written, left, scale)
        free = 0.0  # where the next number has room
        for tick in ticks:
            x = left + tick * scale
            line = f'  <path class="grid" d="M{x:.1f} {top:.1f}V{self.y:.1f}"/>'
            self.shapes.insert(below, line)
            half = text_width(f"{tick:,g}", SMALL) / 2
            if x - half >= free:
                self.text(x, self.y + SMALL + 3, f"{tick:,g}", SMALL, "muted", "middle")
                free = x + half + GAP
        self.space(SMALL * LINE + 3)
        self.text((left + right) / 2, self.y + SMALL, direction(group), SMALL, "muted", "middle")
        self.space(SMALL * LINE)

    def _bar(self, bar: Bar, lines: Sequence[str], written: str, left: float, scale: float) -> None:
        height = max(BAR, len(lines) * TEXT * LINE) + 6
        middle = self.y + height / 2
        first = middle - (len(lines) - 1) * TEXT * LINE / 2 + TEXT * 0.35
        for number, line in enumerate(lines):
            self.text(left - GAP, first + number * TEXT * LINE, line, TEXT, anchor="end")
        length, low, high = (max(0.0, each) * scale for each in (bar.median, bar.low, bar.high))
        kind = "ours" if bar.label.startswith("toolbox") else "peer"
        place = f'x="{left:.2f}" y="{middle - BAR / 2:.1f}" width="{length:.2f}" height="{BAR}"'
        self.shapes.append(f'  <rect class="{kind}" {place} rx="2"/>')
        if high - low >= 1:
            self.shapes.append(f'  <path class="spread" d="M{left + low:.1f} {middle:.1f}H{left + high:.1f}"/>')
        self.text(left + max(length, high) + GAP, middle + TEXT * 0.35, written, TEXT, "value")
        self.space(height)


# --- its words


def number(figure: float, unit: str = "") -> str:
    """Write a figure with about three digits. Counts of cases and requests are whole numbers."""
    if unit in ("cases", "requests"):
        return f"{figure:g}"
    decimals = 0 if abs(figure) >= 100 else 1 if abs(figure) >= 10 else 2
    return f"{figure:,.{decimals}f}"


def value(bar: Bar, group: Group) -> str:
    """Write the median and the ratio: `12.3 µs (1.4×)`."""
    found = ratio_of(bar, group)
    return f"{number(bar.median, group.unit)} {group.unit}{'' if found is None else f' ({found}×)'}"


def ratio_of(bar: Bar, group: Group) -> str | None:
    """Return the printed median divided by that of toolbox; None for toolbox, and where nothing else is compared."""
    ours = next((each for each in group.bars if each.label.startswith("toolbox") and each.ratio is None), None)
    if ours is None or bar is ours or all(each.label.startswith("toolbox") for each in group.bars):
        return None
    divisor = printed(ours, group)
    return number(printed(bar, group) / divisor) if divisor > 0 else None


def printed(bar: Bar, group: Group) -> float:
    """Return a median as it is printed, so that readers who divide get the printed ratio."""
    return float(number(bar.median, group.unit).replace(",", ""))


def direction(group: Group) -> str:
    """Write the unit of the axis, and which bars are better."""
    return f"{group.unit}, {'longer' if group.more_is_better else 'shorter'} is better"


def reading(chart: Chart) -> str:
    """Explain what the bars, the lines and the ratios are."""
    rounds = max(group.rounds for group in chart.groups)
    spread = f"Medians of {rounds} rounds. Thin line: the middle half of the rounds." if rounds > 1 else ""
    has_ratios = any(ratio_of(bar, group) is not None for group in chart.groups for bar in group.bars)
    return f"{spread} {'In parentheses: the ratio to toolbox.' if has_ratios else ''}".strip()


def source(chart: Chart) -> str:
    """Write when, where and with which versions a chart was measured."""
    assert chart.machine is not None
    machine = chart.machine
    versions = ", ".join(f"{name} {each}" for name, each in (chart.versions or {}).items())
    has_times = any(not group.more_is_better for group in chart.groups)
    busy = " The machine was busy: all times are too long." if has_times and machine.load > machine.cores else ""
    return (
        f"Measured on {chart.measured}: {machine.cores} cores ({machine.architecture}), Python {machine.python}, "
        f"load average {machine.load:g} at the start.{busy} {versions}"
    ).strip()


def sentence(group: Group) -> str:
    """Write the figures of a group as a sentence."""
    figures = "; ".join(f"{bar.label}: {value(bar, group)}" for bar in group.bars)
    return f"{group.title} ({direction(group)}): {figures}."


def axis(largest: float) -> list[float]:
    """Return about five round numbers from zero to at least `largest`."""
    if largest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(largest / 5))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each * 5 >= largest * 0.999999)
    return [round(step * each, 10) for each in range(math.ceil(largest / step - 1e-9) + 1)]


# --- the width of text


def text_width(text: str, size: int, *, bold: bool = False) -> float:
    """Estimate the width of text in DejaVu Sans, which is wider than the other fonts of the style."""
    return sum(_width(each) for each in text) * size * (1.13 if bold else 1)


def _width(character: str) -> float:
    if character in "il.,;:'|!()[] /-":
        return 0.4
    if character in "mwMW@%":
        return 1.0
    if character in "—…" or ord(character) >= 0x1100:  # dashes, ellipses, and East Asian characters
        return 1.05
    return 0.84 if character.isupper() or not character.isascii() or character in "+=<>~&#_" else 0.65


def wrap(text: str, width: float, size: int, *, bold: bool = False) -> list[str]:
    """Break text into lines that are at most so wide; a word that is too long is cut."""
    lines = [""]
    for word in _pieces(text, width, size, bold=bold):
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer, size, bold=bold) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _pieces(text: str, width: float, size: int, *, bold: bool) -> Iterator[str]:
    for word in text.split():
        piece = ""
        for character in word:
            if piece and text_width(piece + character, size, bold=bold) > width:
                yield piece
                piece = ""
            piece += character
        yield piece


# --- the page


def section(charts: Sequence[Chart]) -> str:
    """Write the charts as Markdown, each with its figures in a table."""
    return "\n".join(line for chart in charts for line in _markdown(chart))


def _markdown(chart: Chart) -> Iterator[str]:
    yield from (f"### {chart.title}", "", *_lines(chart.description), "")
    yield from (f"![Bar chart: {chart.title}. The table below has the same figures.](charts/{chart.name}.svg)", "")
    yield from ("<details markdown>", "<summary>The figures</summary>", "")
    for group in chart.groups:
        ratios = [ratio_of(bar, group) for bar in group.bars]
        better = "more is better" if group.more_is_better else "less is better"
        spread = " Middle half of the rounds |" if group.rounds > 1 else ""
        compared = " Ratio to toolbox |" if any(ratios) else ""
        yield f"| {group.title} | {group.unit}, {better} |{spread}{compared}"
        yield f"|---|--:|{'--:|' if spread else ''}{'--:|' if compared else ''}"
        for bar, ratio in zip(group.bars, ratios, strict=True):
            middle = f" {number(bar.low)} to {number(bar.high)} |" if spread else ""
            divided = f" {ratio or ''} |" if compared else ""
            yield f"| {bar.label} | {number(bar.median, group.unit)} |{middle}{divided}"
        yield ""
    yield from (*_lines(source(chart)), "", "</details>", "")


def _lines(text: str) -> Iterator[str]:
    line = ""
    for word in text.split():
        if len(line) + len(word) >= 110:
            yield line
            line = ""
        line = f"{line} {word}".strip()
    yield line


def with_section(page: str, written: str) -> str:
    """Return the page with `written` between its two comments."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} has no place for the charts; add the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{written}\n{END}{after}"


# --- single figures


def with_figures(page: str, charts: Sequence[Chart]) -> str:
    """Return the page with its figures written from the saved results. Raises `SystemExit` for an unknown figure."""
    return FIGURE.sub(
        lambda found: f"<!-- figure: {found['place']} -->{figure(found['place'], charts)}<!-- end -->", page
    )


def figure(place: str, charts: Sequence[Chart]) -> str:
    """Return the figure at a place: a median with its unit, or its ratio to toolbox."""
    name, title, label, *form = (part.strip() for part in place.split(";"))
    groups: Mapping[str, Group] = next(({each.title: each for each in c.groups} for c in charts if c.name == name), {})
    bar = next((each for each in groups[title].bars if each.label == label), None) if title in groups else None
    if bar is None:
        raise SystemExit(f"no saved figure {place!r}; run its benchmark with --save, or correct the comment")
    if form == ["ratio"]:
        ratio = float((ratio_of(bar, groups[title]) or "1").replace(",", ""))
        return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.1f} times"
    unit = groups[title].unit
    if unit == "ms" and bar.median >= 1000:
        return f"{bar.median / 1000:.1f} s"
    return number(bar.median, unit) if unit in COUNTED else f"{number(bar.median, unit)} {unit}"


if __name__ == "__main__":
    main()
