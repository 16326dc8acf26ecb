"""Forgets the calls of the tools between tests."""

import pytest

from .metered import ran


@pytest.fixture(autouse=True)
def _forget() -> None:
    ran.clear()
