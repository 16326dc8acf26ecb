"""Runs the tests in several pytest processes at once, each with a share of the files.

    python -m tests.parallel [--processes N] [ARGUMENTS OF PYTEST…]

Each process is forked from one that has imported the libraries, and collects only the files of its share. One more,
number 0, starts at once, while the libraries are imported: its tests need none of them. The workers of pytest-xdist,
which also runs the tests, each import and collect all, and report each test to another process: a third more work for
tests as short as these.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests import warm_python

TESTS = Path(__file__).parent

FOLDER = "TESTS_FOLDER"
"""Environment variable with a folder that all processes of a run share, such as for a server."""

MEMORY = Path("/dev/shm")

SECONDS = {
    "databases/test_killed_runs.py": 95,
    "fastapi/test_dev_ui_page.py": 42,
    "databases/test_stores.py": 35,
    "testing/test_pytest_plugin.py": 33,
    "databases/test_dbos.py": 32,
    "databases/test_killed_compensations.py": 31,
    "databases/test_started_runs.py": 31,
    "test_documents_m_to_z.py": 26,
    "databases/test_processes.py": 25,
    "di/test_long_chains.py": 24,
    "databases/test_run_stores.py": 22,
    "test_site.py": 22,
    "cli/test_chat_and_new.py": 21,
    "models/test_tolerance.py": 20,
    "mcp/test_client.py": 19,
    "models/test_pydantic_ai.py": 19,
    "databases/test_bookings.py": 18,
    "databases/test_killed_resumes.py": 18,
    "databases/test_suspended_runs.py": 18,
    "sample/test_page.py": 16,
    "execution/test_process_end.py": 14,
    "mcp/test_hostile_servers.py": 14,
    "di/test_random_graphs.py": 12,
    "fastapi/test_dev_ui.py": 10,
    "fastapi/test_injection.py": 9,
    "services/test_outputs.py": 9,
    "test_documents.py": 9,
    "execution/test_forks.py": 8,
    "mcp/test_lives.py": 8,
    "models/test_mutations.py": 8,
    "models/test_resilience.py": 8,
    "models/test_statuses.py": 8,
    "models/test_untrusted_servers.py": 8,
    "rest/test_bounds.py": 8,
    "databases/test_lost_connections.py": 7,
    "fastapi/test_health.py": 7,
    "mcp/test_questions.py": 7,
    "mcp/test_server.py": 7,
    "runs/test_continuing.py": 7,
    "runs/test_durable.py": 7,
    "security/test_reach.py": 7,
    "test_parallel.py": 7,
    "cli/test_command_line.py": 6,
    "databases/test_transactions.py": 6,
    "events/test_otel.py": 6,
    "fastapi/test_disconnects.py": 6,
    "models/test_anthropic_replies.py": 6,
    "runs/test_crashes.py": 6,
    "sample/test_transfers.py": 6,
    "sample/test_weather_agent.py": 6,
    "services/test_tool_rounds.py": 6,
    "test_exports.py": 6,
    "mcp/test_callers.py": 5,
    "mcp/test_resources.py": 5,
    "models/test_accumulator.py": 5,
    "models/test_counterparts.py": 5,
    "models/test_replays.py": 5,
    "rest/test_safety.py": 5,
    "rest/test_secrets.py": 5,
    "rest/test_untrusted_openapi.py": 5,
    "sample/test_real_model.py": 5,
    "test_charts.py": 5,
    "test_packaging.py": 5,
    "tools/test_round_trip.py": 5,
    "tools/test_untrusted_arguments.py": 5,
    "di/test_under_load.py": 4,
    "fastapi/test_identities.py": 4,
    "models/test_anthropic.py": 4,
    "sample/test_support.py": 4,
    "services/test_chaos.py": 4,
    "services/test_compensation.py": 4,
    "test_architecture.py": 4,
    "databases/test_memory_of_services.py": 3,
    "di/test_scopes.py": 3,
    "fastapi/test_shutdown.py": 3,
    "rest/test_retries.py": 3,
    "services/test_ready_guardrails.py": 3,
    "test_warm_python.py": 3,
    "tools/test_argument_repairs.py": 3,
    "cli/test_worker.py": 2,
    "databases/test_conversations_with_thoughts.py": 2,
    "databases/test_engines.py": 2,
    "databases/test_schemas.py": 2,
    "di/test_injection.py": 2,
    "events/test_listeners.py": 2,
    "execution/test_matrix.py": 2,
    "execution/test_other_processes.py": 2,
    "fastapi/test_alongside.py": 2,
    "fastapi/test_endpoint_tools.py": 2,
    "fastapi/test_run_routes.py": 2,
    "limits/test_limits.py": 2,
    "models/test_anthropic_requests.py": 2,
    "models/test_attributes.py": 2,
    "models/test_recorded_conversations.py": 2,
    "models/test_requests.py": 2,
    "models/test_responses_seen.py": 2,
    "rest/test_in_a_container.py": 2,
    "runs/test_approval.py": 2,
    "sample/test_stand_in.py": 2,
    "services/test_interceptors.py": 2,
    "services/test_invocations.py": 2,
    "services/test_memory_windows.py": 2,
    "services/test_return_types.py": 2,
    "services/test_streams.py": 2,
    "services/test_tool_failures.py": 2,
    "test_first_mistakes.py": 2,
}
"""Files that take longer than others, and how long; the shares are equal by this."""

OTHER = 0.6
"""Seconds of a file that is not in `SECONDS`."""

EARLY = ("test_packaging.py", "test_wording.py")
"""Files of the process that starts first."""

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
    """Return the early files and `count` lists of the others that take equally long, in their order.

    The lists begin with their slowest and their fastest files in turn: many slow tests wait, many fast ones compute.
    """
    early = [TESTS / each for each in EARLY]
    others = {file: seconds_of(file) for file in TESTS.rglob("test_*.py") if file not in early}
    found: list[list[Path]] = [[] for _ in range(count)]
    taken = [0.0] * count
    for file in sorted(others, key=lambda file: (-others[file], file)):
        number = taken.index(min(taken))
        found[number].append(file)
        taken[number] += others[file]
    return [early, *(each[:: -1 if number % 2 else 1] for number, each in enumerate(found))]


def share(name: str) -> dict[Path, int]:
    """Return the files of a share such as `2/4`, and the place of each; `0/4` are the early ones."""
    number, count = map(int, name.split("/"))
    return {file: place for place, file in enumerate(shares(count)[number])}


@contextmanager
def folder_in_memory(needed: int) -> Iterator[str]:
    """A folder on a memory file system, to avoid waiting for the disk; on a disk if `needed` bytes are not free."""
    is_large = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > needed
    # Not in pytest's folder: run by root, PostgreSQL has another user, and each further pytest shuts others out of it.
    with TemporaryDirectory(prefix="toolbox-", dir=MEMORY if is_large else None, ignore_cleanup_errors=True) as folder:
        yield folder


class Process:
    """A pytest process with its share of the files. It prints what pytest prints, with its number before each line."""

    def __init__(self, number: int, count: int, arguments: Sequence[str]) -> None:
        self.number = number
        self.counts = Counter[str]()
        self.failures: list[str] = []
        own = [f"--share={number}/{count}", "-o", f"cache_dir=.pytest_cache/{number}", "-p", "no:xdist"]
        command = warm_python.command() if number else [sys.executable]
        self._process = subprocess.Popen(
            [*command, "-m", "pytest", *own, *arguments],
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
    with folder_in_memory(2**30) as os.environ[FOLDER]:
        running = [Process(number, processes, arguments) for number in range(processes + 1)]
        statuses = [each.wait() for each in running]
    for each in running:
        print(*each.failures, sep="", end="")
    counts = sum((each.counts for each in running), Counter[str]())
    said = ", ".join(f"{counts[what]} {what}" for what in sorted(counts, key=place)) or "no tests ran"
    print(f"{said} in {time.monotonic() - begun:.0f} s, in {len(running)} processes")
    if set(statuses) == {NO_TESTS}:
        return NO_TESTS
    return next((each for each in statuses if each not in (0, NO_TESTS)), 0)


def main() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(prog="python -m tests.parallel", description=__doc__.splitlines()[0])
    # Three more than there are cores: tests also wait, for processes, locks and timeouts.
    default = min(cores + 3, 8)
    parser.add_argument(
        "--processes", type=int, default=default, help="how many; default: three more than cores, up to 8"
    )
    known, arguments = parser.parse_known_args()
    try:
        return run(known.processes, arguments)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
