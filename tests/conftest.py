"""What every test may use."""

from collections.abc import Generator

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logged or showed can be sent to another process: xdist's cannot carry a lone surrogate, and hangs."""
    report = yield
    report.sections = [(title, sendable(text)) for title, text in report.sections]
    if sendable(str(report.longrepr)) != str(report.longrepr):
        report.longrepr = sendable(str(report.longrepr))
    return report


def sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
