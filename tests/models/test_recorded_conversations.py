"""The recorded conversations of `benchmarks/wire_replies`, as `make wire` runs them for toolbox.

Not here: other deviations of real servers (`server_replies`, `seen`), and other libraries (`benchmarks.wire`).
"""

import json
import os
import shlex
from pathlib import Path

from tests import warm_python

ROOT = Path(__file__).parent.parent.parent
# The program starts Python again, for the conversations.
PROGRAM = """
import sys
sys.executable = sys.argv.pop(1)
from benchmarks.wire import main
sys.exit(main())
"""


def test_toolbox_passes_all_recorded_conversations(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join(warm_python.command())} "$@"\n', encoding="utf-8")
    python.chmod(0o700)
    done = warm_python.run(["-c", PROGRAM, str(python), "--ours", "--json"], ROOT, dict(os.environ))

    assert done.returncode == 0, done.stdout + done.stderr
    cases = {path.stem for path in (ROOT / "benchmarks" / "wire_replies" / "cases").glob("*.json")}
    results = json.loads(done.stdout)["toolbox"]
    assert {each["id"] for each in results if each["passed"]} == cases
