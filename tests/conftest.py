"""Fixtures for all tests."""

import shutil
from collections.abc import Generator, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


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
