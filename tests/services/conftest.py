"""Fixtures of all tests of services."""

import pytest

from .log import LOG


@pytest.fixture(autouse=True)
def fresh_log() -> None:
    LOG.clear()
