"""Fixtures for all tests."""

import asyncio
import gc
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

CHROMIUM_OPTIONS = ("--no-sandbox", "--disable-gpu")

SHARED_FOLDER = "TOOLBOX_TESTS_FOLDER"
"""Environment variable with a folder that all pytest processes of a run share, for example for one database server."""

MEMORY = Path("/dev/shm")


ROOT = Path(__file__).resolve().parent.parent

CACHES = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".cache", "site"}
"""Folders in which tools keep what they know, in the folder of the repository."""


def pytest_configure(config: pytest.Config) -> None:
    """Create the folder that the processes of this run share. The workers of pytest-xdist inherit its name."""
    if not hasattr(config, "workerinput"):
        stack = ExitStack()
        os.environ[SHARED_FOLDER] = stack.enter_context(folder_in_memory(2**30))
        config.add_cleanup(stack.close)
        config.pluginmanager.register(UntouchedRepository(arguments=config.invocation_params.args))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int | None:
    """Return three workers for two processors: a third of the time, tests wait for servers and other processes."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return processors + processors // 2


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of the garbage collections of the tests."""
    gc.collect()
    gc.freeze()


class UntouchedRepository:
    """Fails the run if its tests leave files in the repository: a test writes into `tmp_path`.

    Files that `arguments` of the command line name, such as a report, are not from tests.
    """

    def __init__(self, root: Path = ROOT, arguments: Iterable[str | os.PathLike[str]] = ()) -> None:
        self._root, self._before = root, files_in(root)
        self._arguments = " ".join(map(str, arguments))

    @property
    def left(self) -> list[str]:
        """The new files and folders."""
        new = files_in(self._root) - self._before
        return sorted(each for each in new if each not in self._arguments and not each.startswith(".coverage"))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run."""
        if self.left:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say why."""
        if self.left:
            terminalreporter.section("files that tests left in the repository", red=True)
            terminalreporter.line(", ".join(self.left))


def files_in(root: Path) -> set[str]:
    """Return what lies in the repository's folder, and all files in it that git would add; without git, those in it."""
    command = ["git", "ls-files", "--others", "--exclude-standard"]
    done = (
        subprocess.run(command, cwd=root, capture_output=True, text=True, check=False) if shutil.which("git") else None
    )
    added = done.stdout.splitlines() if done is not None and done.returncode == 0 else []
    return {each.name for each in root.iterdir() if each.name not in CACHES} | set(added)


@contextmanager
def folder_in_memory(needed: int) -> Iterator[str]:
    """A folder on a memory file system, to avoid waiting for the disk; on a disk if `needed` bytes are not free."""
    is_large = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > needed
    # Not in pytest's folder: run by root, PostgreSQL has another user, who may not enter pytest's folders.
    with TemporaryDirectory(prefix="toolbox-", dir=MEMORY if is_large else None, ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.fixture(scope="module")
def only_new_garbage() -> None:
    """For tests that collect garbage often: the collector does not visit the objects of earlier tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def free_port() -> int:
    """Return a port for a server that starts later. The system gives it to no other socket: it is below their range."""
    while True:
        with socket.socket() as chosen, suppress(OSError):
            chosen.bind(("127.0.0.1", port := random.randint(10_000, 30_000)))
            return port


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
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_OPTIONS)
        new_page = browser.new_page

        def new_patient_page(**options: Any) -> Any:
            page = new_page(**options)
            page.set_default_timeout(100_000)  # milliseconds
            return page

        browser.new_page = new_patient_page  # type: ignore[method-assign]  # for the tests
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def tab(browser: Any) -> Iterator[Any]:
    """A tab that the tests of a module use one after another: opening one takes longer than most of them."""
    tab = browser.new_page()
    yield tab
    tab.close()


@pytest.fixture
def clean_tab(tab: Any) -> Iterator[Any]:
    """The tab, without anything that an earlier test left."""
    size = tab.viewport_size
    yield tab
    tab.unroute_all()
    tab.evaluate("sessionStorage.clear(); localStorage.clear()")
    tab.goto("about:blank")  # first, so that the page is not drawn again for what follows
    tab.context.clear_cookies()
    if tab.viewport_size != size:
        tab.set_viewport_size(size)
    tab.mouse.move(0, 0)
    tab.emulate_media(color_scheme="light")


@contextmanager
def complaints_of(tab: Any, allowed: Callable[[str], bool] = lambda address: True) -> Iterator[list[str]]:
    """What the pages of a tab report: messages of the console, errors, and requests to addresses not `allowed`."""
    complaints: list[str] = []
    listeners = {
        "console": lambda message: complaints.append(message.text),
        "pageerror": lambda error: complaints.append(str(error)),
        "request": lambda asked: allowed(asked.url) or complaints.append(asked.url),
    }
    for event, listener in listeners.items():
        tab.on(event, listener)
    yield complaints
    for event, listener in listeners.items():
        tab.remove_listener(event, listener)


@pytest.fixture
def calm_tab(clean_tab: Any) -> Iterator[Any]:
    """The clean tab; at the end, its pages have reported no problem."""
    with complaints_of(clean_tab) as complaints:
        yield clean_tab
    assert complaints == []


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
