"""Servers for the tests of REST clients."""

from collections.abc import Iterator

import pytest

from tests.rest.http_server import Server


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def other_server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()
