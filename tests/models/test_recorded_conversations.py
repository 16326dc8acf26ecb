"""The recorded conversations of `benchmarks/wire_replies`, as `make wire` runs them for toolbox.

Not here: other deviations of real servers (`seen`), and other libraries (`benchmarks.wire`).
"""

import json
import os
from pathlib import Path

from tests import programs

ROOT = Path(__file__).parent.parent.parent


def test_toolbox_passes_all_recorded_conversations() -> None:
    done = programs.run(["-m", "benchmarks.wire", "--ours", "--json"], ROOT, dict(os.environ))

    assert done.returncode == 0, done.stdout + done.stderr
    cases = {path.stem for path in (ROOT / "benchmarks" / "wire_replies" / "cases").glob("*.json")}
    results = json.loads(done.stdout)["toolbox"]
    assert {each["id"] for each in results if each["passed"]} == cases
