"""OAuth tokens for one MCP server: `ServerTokens` finds those of a call, `BearerAuth` sends them in a session.

Not here: requesting and keeping tokens (`oauth.token_sources`), one session (`client_session`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import httpx2

from ..errors import OAuthError
from ..oauth.token_sources import AccessToken, SubjectTokens, TokenAuth
from ..rest.exchange import RestExchange, perform_async

_REMEMBERED = 4
"""Tokens of one session that are hidden in errors: a server may repeat one that was replaced a moment ago."""


@dataclass(frozen=True, slots=True)
class ServerTokens:
    """The tokens for one server. `exchange` sends the requests for them, each within `limit` seconds."""

    exchange: RestExchange
    auth: TokenAuth
    where: str
    limit: float

    @property
    def has_users(self) -> bool:
        """Return True if the tokens are those of users, so that only a user's call can have one."""
        return self.auth.subject is not None

    async def find_tokens(self) -> SubjectTokens:
        """Return the tokens of the current caller, with one in it. Raises `UnauthenticatedError` and `OAuthError`.

        In the task of the caller: the SDK sends requests in other tasks, whose errors do not reach it.
        """
        tokens = await perform_async(self.exchange, self.exchange.find_tokens(self.auth, self.where))
        await self.obtain(tokens)
        return tokens

    def auth_for(self, tokens: SubjectTokens) -> BearerAuth:
        """Return the authentication of a new session."""
        return BearerAuth(self, tokens)

    async def obtain(self, tokens: SubjectTokens, refused: AccessToken | None = None) -> AccessToken:
        """Return a token; see `TokenSource.obtain`."""
        return await perform_async(self.exchange, self.exchange.obtain_token(tokens, self.limit, self.where, refused))


class BearerAuth(httpx2.Auth):
    """Sends the tokens of one subject with all requests of a session, and a new one after a 401.

    `failure`: why there was none; it is the reason for the error of the session that follows. `sent`: the last tokens.
    """

    def __init__(self, server: ServerTokens, tokens: SubjectTokens) -> None:
        self._server, self._tokens = server, tokens
        self.failure: OAuthError | None = None
        self.sent: deque[str] = deque(maxlen=_REMEMBERED)

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Yield the request with a token, and once more if the server does not accept it."""
        token = await self._obtain(None)
        response = yield self._authorized(request, token)
        if response.status_code == 401:
            try:
                token = await self._obtain(token)
            except OAuthError:
                return  # the request ends with the 401
            yield self._authorized(request, token)

    async def _obtain(self, refused: AccessToken | None) -> AccessToken:
        try:
            return await self._server.obtain(self._tokens, refused)
        except OAuthError as error:
            self.failure = error
            raise

    def _authorized(self, request: httpx2.Request, token: AccessToken) -> httpx2.Request:
        if token.value not in self.sent:
            self.sent.append(token.value)
        request.headers["Authorization"] = f"Bearer {token.value}"
        return request
