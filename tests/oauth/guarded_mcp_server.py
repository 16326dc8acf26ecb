"""An MCP server of the SDK that accepts the tokens of an OAuth server, and says for whom each call was."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from tests.mcp.uvicorn_server import serving
from tests.oauth.oauth_server import Issued, OAuthServer


class Verifier(TokenVerifier):
    def __init__(self, oauth: OAuthServer) -> None:
        self._oauth = oauth
        self.seen: list[Issued] = []

    async def verify_token(self, token: str) -> AccessToken | None:
        issued = self._oauth.tokens.get(token)
        if issued is None:
            return None
        self.seen.append(issued)
        scopes = (issued.scope or "").split()
        return AccessToken(token=token, client_id=issued.client, scopes=scopes, subject=issued.subject)


@asynccontextmanager
async def guarded_server(
    oauth: OAuthServer, around: Callable[[Any], Any] = lambda app: app
) -> AsyncIterator[tuple[str, Verifier]]:
    """Serve the tools `whoami` and `echo_token`; yield the URL, and the verifier with what it has seen.

    `around` wraps the ASGI application.
    """
    verifier = Verifier(oauth)
    settings = AuthSettings(issuer_url="https://login.example", resource_server_url=None)
    server = MCPServer("crm", token_verifier=verifier, auth=settings)

    @server.tool()
    def whoami() -> str:
        """Return whom the call is for."""
        token = get_access_token()
        assert token is not None
        return str(token.subject)

    @server.tool()
    def echo_token() -> str:
        """Fail with the token in the text."""
        token = get_access_token()
        assert token is not None
        raise ToolError(f"cannot use {token.token}")

    async with serving(around(server.streamable_http_app())) as base:
        yield f"{base}/mcp", verifier
