"""Checks with axe-core that people can read the texts of a page, in light and dark."""

from pathlib import Path
from typing import Any

import pytest

IS_DARK = "matchMedia('(prefers-color-scheme: dark)').matches"
AXE = Path(__file__).parent.parent / "node_modules" / "axe-core" / "axe.min.js"

RUN = """() => axe.run(document, {runOnly: ["color-contrast"], resultTypes: ["violations"]}).then(
    results => results.violations.flatMap(each => each.nodes.map(node => `${node.target}: ${node.failureSummary}`)))"""


def illegible_texts(tab: Any) -> list[str]:
    """Return the texts of the tab that have too little contrast with what is behind them, in light and in dark.

    The test is skipped if axe-core, which `make test` installs from npm, is missing.
    """
    if not AXE.exists():
        pytest.skip("axe-core is not installed; run `make test`")
    first, other = ("dark", "light") if tab.evaluate(IS_DARK) else ("light", "dark")
    found = []
    for scheme in (other, first):  # the scheme of the test comes last, and stays
        tab.emulate_media(color_scheme=scheme)
        # By evaluation, because the pages forbid scripts of other addresses.
        tab.evaluate(AXE.read_text(encoding="utf-8"))
        found += [f"{scheme}: {each}" for each in tab.evaluate(RUN)]
    return found
