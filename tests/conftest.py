"""Fixtures for all tests."""

import asyncio
import gc
import random
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests import parallel


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--share=2/4`, with which `tests.parallel` runs a part of the files."""
    parser.addoption("--share", metavar="NUMBER/COUNT", type=parallel.share, help="run this share of the test files")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore the files of other shares."""
    share = config.getoption("share")
    is_other = share is not None and collection_path.suffix == ".py" and collection_path not in share
    return True if is_other else None


# The first four cost time: a process that waits for a next page, a new frame for each page, and two hidden pages of
# each window that belong to its address bar.
# The others are of playwright's list, which this one replaces.
DISABLED_FEATURES = (
    "SpareRendererForSitePerProcess",
    "RenderDocument",
    "WebUIOmniboxPopup",
    "WebUIOmniboxAimPopup",
    "AimEnabled",
    "AvoidCorsURLLoaderRestartOnRedirect",
    "AvoidUnnecessaryBeforeUnloadCheckSync",
    "DestroyProfileOnBrowserClose",
    "HttpsFirstBalancedModeAutoEnable",
    "HttpsUpgrades",
    "LensOverlay",
    "MediaRouter",
    "NetworkTimeServiceQuerying",
    "OptimizationHints",
    "PaintHolding",
    "PreconnectToSearch",
    "ThirdPartyStoragePartitioning",
    "Translate",
)
# The first one saves a process. The others are of playwright's list.
ENABLED_FEATURES = ("NetworkServiceInProcess2", "CDPScreenshotNewSurface", "SkipListAccountsWithoutGaiaCookies")
CHROMIUM_OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--in-process-gpu",
    "--force-prefers-reduced-motion",  # of the window around the page; playwright decides for the page
    f"--disable-features={','.join(DISABLED_FEATURES)}",
    f"--enable-features={','.join(ENABLED_FEATURES)}",
)


def pytest_configure(config: pytest.Config) -> None:
    """Share one warm Python process among the workers of a run."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        from tests import warm_python

        warm_python.share()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out other shares of files that the arguments name. Without a share, run the slowest files first."""
    share = config.getoption("share")
    if share is None:
        share = {path: -parallel.seconds_of(path) for path in {each.path for each in items}}
    items[:] = sorted((each for each in items if each.path in share), key=lambda item: share[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from visiting, again and again, what lives as long as the run: modules and tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


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


@pytest.fixture(scope="session")
def warm_executable(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a Python that has imported the libraries, for programs that start Python themselves."""
    from tests import warm_python

    path = tmp_path_factory.mktemp("warm") / "python"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(warm_python.command())} "$@"\n', encoding="utf-8")
    path.chmod(0o700)
    return str(path)


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
