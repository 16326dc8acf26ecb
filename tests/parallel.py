"""Runs the tests in several pytest processes at once, each with a share of the files.

    python -m tests.parallel [--processes N] [ARGUMENTS OF PYTEST…]

Each process is forked from one that has imported the libraries, and collects only the files of its share. The workers
of pytest-xdist, which also runs the tests, each import and collect all, and report each test to another process: a
third more work for tests as short as these.
"""

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests import warm_python

TESTS = Path(__file__).parent

SECONDS = {
    "databases/test_killed_runs.py": 100,
    "di/test_long_chains.py": 86,
    "databases/test_suspended_runs.py": 72,
    "fastapi/test_dev_ui_page.py": 30,
    "databases/test_dbos.py": 35,
    "databases/test_killed_compensations.py": 32,
    "test_documents_m_to_z.py": 28,
    "databases/test_started_runs.py": 30,
    "testing/test_pytest_plugin.py": 20,
    "models/test_tolerance.py": 26,
    "test_packaging.py": 24,
    "test_site.py": 19,
    "test_documents.py": 20,
    "databases/test_run_stores.py": 21,
    "databases/test_stores.py": 20,
    "mcp/test_client.py": 19,
    "models/test_pydantic_ai.py": 18,
    "cli/test_chat_and_new.py": 16,
    "mcp/test_hostile_servers.py": 16,
    "test_charts.py": 8,
    "sample/test_page.py": 12,
    "test_exports.py": 14,
    "databases/test_processes.py": 14,
    "databases/test_killed_resumes.py": 14,
    "execution/test_process_end.py": 13,
    "models/test_accumulator.py": 12,
    "services/test_outputs.py": 12,
    "test_architecture.py": 3,
    "models/test_statuses.py": 9,
    "fastapi/test_dev_ui.py": 9,
    "fastapi/test_disconnects.py": 9,
    "databases/test_lost_connections.py": 9,
    "rest/test_bounds.py": 8,
    "services/test_tool_rounds.py": 8,
    "mcp/test_lives.py": 8,
    "databases/test_bookings.py": 8,
    "tools/test_round_trip.py": 7,
    "models/test_counterparts.py": 7,
    "models/test_replays.py": 7,
    "runs/test_durable.py": 7,
    "fastapi/test_health.py": 7,
    "di/test_random_graphs.py": 6,
    "databases/test_conversations_with_thoughts.py": 6,
    "sample/test_support.py": 4,
    "sample/test_real_model.py": 6,
    "databases/test_transactions.py": 6,
    "runs/test_crashes.py": 5,
    "runs/test_continuing.py": 5,
    "rest/test_secrets.py": 5,
    "test_first_mistakes.py": 3,
    "execution/test_matrix.py": 5,
    "mcp/test_callers.py": 5,
    "models/test_resilience.py": 5,
    "mcp/test_server.py": 5,
    "tools/test_untrusted_arguments.py": 5,
    "models/test_mutations.py": 5,
    "sample/test_transfers.py": 5,
    "models/test_anthropic_replies.py": 4,
    "services/test_ready_guardrails.py": 4,
    "services/test_compensation.py": 4,
    "execution/test_forks.py": 4,
    "sample/test_weather_agent.py": 4,
    "cli/test_command_line.py": 4,
    "test_wording.py": 4,
    "fastapi/test_dev_ui_inbox.py": 4,
    "mcp/test_questions.py": 4,
    "models/test_recorded_conversations.py": 4,
    "services/test_search_quality.py": 4,
    "events/test_otel.py": 4,
    "databases/test_memory_of_services.py": 4,
    "security/test_reach.py": 4,
    "models/test_anthropic.py": 3,
    "models/test_untrusted_servers.py": 3,
    "di/test_under_load.py": 3,
    "services/test_interceptors.py": 3,
    "tools/test_progress.py": 3,
    "test_warm_python.py": 3,
    "execution/test_time_limits.py": 3,
    "models/test_anthropic_requests.py": 2,
    "tools/test_argument_repairs.py": 2,
}
"""Files that take longer than others, and how long; the shares are equal by this."""

OTHER = 1.0
"""Seconds of a file that is not in `SECONDS`."""

IMPORTED = (
    "anthropic",
    "asyncpg",
    "bm25s",
    "dbos",
    "openapi_pydantic",
    "playwright.sync_api",
    "psycopg",
    "pydantic_ai.models.anthropic",
    "pydantic_ai.models.openai",
    "sqlalchemy.dialects.mysql",
)
"""Packages that the tests of several shares import. The processes are forked from one that has imported them."""

COUNTS = re.compile(r"=* ?((?:\d+ \w+(?:, )?)+) in [\d.]+s")
NO_TESTS = 5  # pytest's exit status


def seconds_of(file: Path) -> float:
    """Return about how long the tests of a file take."""
    return SECONDS.get(file.relative_to(TESTS).as_posix(), OTHER)


def shares(count: int) -> list[list[Path]]:
    """Return the test files in `count` lists that take equally long, each with its slowest files first."""
    found: list[list[Path]] = [[] for _ in range(count)]
    for file in sorted(TESTS.rglob("test_*.py"), key=lambda file: (-seconds_of(file), file)):
        min(found, key=lambda share: sum(map(seconds_of, share))).append(file)
    return found


def share(name: str) -> frozenset[Path]:
    """Return the files of a share such as `2/4`."""
    number, count = map(int, name.split("/"))
    return frozenset(shares(count)[number - 1])


class Process:
    """A pytest process with its share of the files. It prints what pytest prints, with its number before each line."""

    def __init__(self, number: int, count: int, arguments: Sequence[str]) -> None:
        self.number = number
        self.counts = Counter[str]()
        self.failures: list[str] = []
        own = [f"--share={number}/{count}", "-o", f"cache_dir=.pytest_cache/{number}", "-p", "no:xdist"]
        self._process = subprocess.Popen(
            warm_python.command("-m", "pytest", *own, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
        )
        self._thread = threading.Thread(target=self._print)
        self._thread.start()

    def _print(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(f"{self.number}| {line}", end="", flush=True)
            if line.startswith(("FAILED ", "ERROR ")):
                self.failures.append(line)
            elif found := COUNTS.match(line):
                self.counts = Counter({what: int(count) for count, what in map(str.split, found[1].split(", "))})

    def wait(self) -> int:
        """Wait for its end and return its exit status."""
        self._thread.join()
        return self._process.wait()


def place(what: str) -> int:
    """Return the place of a count such as `passed` in the sum."""
    order = ("failed", "passed", "skipped", "deselected")
    return order.index(what) if what in order else len(order)


def run(processes: int, arguments: Sequence[str]) -> int:
    """Run the tests; return pytest's exit status."""
    begun = time.monotonic()
    warm_python.share(*IMPORTED)
    running = [Process(number, processes, arguments) for number in range(1, processes + 1)]
    statuses = [each.wait() for each in running]
    for each in running:
        print(*each.failures, sep="", end="")
    counts = sum((each.counts for each in running), Counter[str]())
    said = ", ".join(f"{counts[what]} {what}" for what in sorted(counts, key=place)) or "no tests ran"
    print(f"{said} in {time.monotonic() - begun:.0f} s, in {processes} processes")
    if set(statuses) == {NO_TESTS}:
        return NO_TESTS
    return next((each for each in statuses if each not in (0, NO_TESTS)), 0)


def main() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(prog="python -m tests.parallel", description=__doc__.splitlines()[0])
    # Two more than there are cores: tests also wait, for processes, locks and timeouts.
    default = min(cores + 2, 8)
    parser.add_argument(
        "--processes", type=int, default=default, help="how many; default: two more than cores, up to 8"
    )
    known, arguments = parser.parse_known_args()
    try:
        return run(known.processes, arguments)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
