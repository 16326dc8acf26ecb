"""OAuth tokens for REST clients and MCP servers: for the program, or for the user it acts for."""

from __future__ import annotations

from ..errors import OAuthError
from .grants import ClientCredentials, TokenExchange

__all__ = ["ClientCredentials", "OAuthError", "TokenExchange"]
