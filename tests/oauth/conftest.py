"""An OAuth server, and a server that accepts its tokens."""

from collections.abc import Iterator

import pytest

from tests.oauth.oauth_server import OAuthServer, Resource


@pytest.fixture
def oauth() -> Iterator[OAuthServer]:
    server = OAuthServer()
    yield server
    server.stop()


@pytest.fixture
def orders(oauth: OAuthServer) -> Iterator[Resource]:
    resource = Resource(oauth)
    yield resource
    resource.stop()
