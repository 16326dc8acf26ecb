"""Fixtures of all tests of runs."""

import pytest

from .replies import ran


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()
