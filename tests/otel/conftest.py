"""Telemetry for each test, without settings of the environment; no span is left over."""

import logging
from collections.abc import Iterator

import pytest
from opentelemetry import trace

from tests.otel.telemetry import VARIABLE, Telemetry


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL", "TOOLBOX_DEMO", "TOOLBOX_MODELS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def nothing_is_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No span stays current where a test began, and nothing goes wrong in silence."""
    before = trace.get_current_span()
    yield
    assert trace.get_current_span() is before
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()
