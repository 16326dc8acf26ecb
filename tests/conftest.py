"""Fixtures for all tests."""

import asyncio
import gc
import os
import shutil
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

SLOWEST_FIRST = [
    "databases/test_killed_runs.py",
    "fastapi/test_dev_ui_page.py",
    "di/test_long_chains.py",
    "databases/test_suspended_runs.py",
    "databases/test_killed_compensations.py",
    "databases/test_killed_resumes.py",
    "databases/test_dbos.py",
    "mcp/test_client.py",
    "models/test_counterparts.py",
    "databases/test_started_runs.py",
    "databases/test_run_stores.py",
    "databases/test_bookings.py",
    "test_site.py",
    "models/test_accumulator.py",
    "testing/test_pytest_plugin.py",
    "test_documents_m_to_z.py",
    "test_documents.py",
    "tools/test_round_trip.py",
    "services/test_chaos.py",
    "databases/test_stores.py",
    "databases/test_processes.py",
    "execution/test_process_end.py",
    "execution/test_forks.py",
    "di/test_random_graphs.py",
    "rest/test_bounds.py",
    "models/test_tolerance.py",
    "mcp/test_hostile_servers.py",
    "sample/test_page.py",
    "test_packaging.py",
    "test_charts.py",
    "test_exports.py",
    "cli/test_chat_and_new.py",
    "databases/test_lost_connections.py",
    "mcp/test_lives.py",
    "runs/test_crashes.py",
]
"""Files that take long. They start first, so that no worker waits for the other one at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """Share one warm Python process among the workers of a run."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        from tests import warm_python

        warm_python.share()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first; the others keep their order."""
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from visiting, again and again, what lives as long as the run: modules and tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Use two workers more than there are cores: tests also wait, for processes, locks and timeouts."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist reads it
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 2


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


class Clock:
    """The clock of event loops and time limits. A test moves it ahead, so limits end in order under any load."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead, real = 0.0, time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + self._ahead)

    def advance(self, seconds: float, *loops: asyncio.AbstractEventLoop) -> None:
        """Move the clock ahead. Call it on the loop that waits, or name the loops."""
        self._ahead += seconds
        for each in loops:
            each.call_soon_threadsafe(lambda: None)  # the loop wakes and reads the clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium with playwright; the test is skipped if either is missing."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def tab(browser: Any) -> Iterator[Any]:
    """A tab that the tests of a module use one after another: opening one takes longer than most of them."""
    tab = browser.new_page()
    yield tab
    tab.close()


@pytest.fixture(params=["light", "dark"])
def fresh_tab(tab: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The tab, light and dark, without anything that an earlier test left."""
    tab.emulate_media(color_scheme=request.param)
    yield tab
    tab.unroute_all()
    tab.evaluate("sessionStorage.clear(); localStorage.clear()")
    tab.context.clear_cookies()
    tab.mouse.move(0, 0)
    tab.goto("about:blank")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape lone surrogates in reports: xdist cannot send them and hangs."""
    report = yield
    report.sections = [(title, sendable(text)) for title, text in report.sections]
    if sendable(str(report.longrepr)) != str(report.longrepr):
        report.longrepr = sendable(str(report.longrepr))
    return report


def sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
