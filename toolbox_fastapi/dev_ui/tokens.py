"""The dev UI's token: made at start, printed, taken out of addresses, compared, kept in a cookie.

A proxy on this machine that adds no headers makes every client look like a local one, so an address alone does not
prove that a client is local. Not here: clients, host names and origins (`access`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_plus

from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import Scope

TOKEN_KEY = "toolbox.dev_ui_token"
"""Where an ASGI scope holds the token that its address had."""

LOCAL = {"", "0.0.0.0", "127.0.0.1", "::", "::1", "localhost"}


class Token:
    """The secret that opens the dev UI; `value` is None when it is turned off."""

    def __init__(self, chosen: str | bool) -> None:
        self.is_chosen = chosen is not True
        self.value = chosen if isinstance(chosen, str) else own_token() if chosen else None

    def opens(self, scope: Scope) -> bool:
        """Return True if the request has the token, in its address or as a cookie."""
        if self.value is None:
            return True
        return self.matches(scope.get(TOKEN_KEY, "")) or self._is_cookie_of(scope)

    def matches(self, given: str) -> bool:
        """Compare in constant time."""
        return self.value is None or hmac.compare_digest(given.encode(), self.value.encode())

    def _is_cookie_of(self, scope: Scope) -> bool:
        found = False
        for name, value in scope["headers"]:
            if name == b"cookie":
                given = cookie_parser(value.decode("latin-1")).get(self._cookie_name, "")
                found |= hmac.compare_digest(given.encode(), self._cookie_value.encode())
        return found

    def remember(self, response: Response, scope: Scope) -> None:
        """Let the browser keep it for the session, for the addresses beside the requested one."""
        is_secure = scope.get("scheme") == "https"
        response.set_cookie(
            self._cookie_name, self._cookie_value, path=None, httponly=True, samesite="lax", secure=is_secure
        )

    # Cookies of one host are shared by all its ports, so each token has a cookie of its own.
    @property
    def _cookie_name(self) -> str:
        return f"toolbox_dev_ui_{self._digest('name')[:12]}"

    @property
    def _cookie_value(self) -> str:
        return self._digest("value")

    def _digest(self, purpose: str) -> str:
        return hmac.new((self.value or "").encode(), purpose.encode(), hashlib.sha256).hexdigest()


def take_token(scope: Scope, path: str) -> None:
    """Move the token of an address below `path` out of the query, so that no access log of the server has it."""
    query: bytes = scope.get("query_string", b"")
    here: str = scope["path"]
    candidates = (here, here.removeprefix(scope.get("root_path", "")))
    if b"=" not in query or not any(f"{each}/".startswith(f"{path}/") for each in candidates):
        return
    rest = []
    for pair in query.split(b"&"):
        name, _, value = pair.decode("latin-1").partition("=")
        if unquote_plus(name) == "token":
            scope[TOKEN_KEY] = unquote_plus(value)
        else:
            rest.append(pair)
    scope["query_string"] = b"&".join(rest)


def announce(path: str, token: str | None, server: str | None) -> None:
    """Print where the dev UI is. To the terminal and not to a log, because of the token."""
    query = "" if token is None else f"?token={quote(token, safe='')}"
    where = f"{server}{path}/{query}" if server else f"{path}/{query} (below the address of this server)"
    if sys.stderr is not None:
        sys.stderr.write(f"Dev UI: {where}\n")
        sys.stderr.flush()


def server_address() -> str | None:
    """Return the address of the uvicorn server that starts this application; None for any other server.

    An ASGI application learns its address with the first request only. Until then uvicorn's lifespan, which has called
    us, holds its configuration.
    """
    frame = sys._getframe()
    while frame.f_globals.get("__name__") != "uvicorn.lifespan.on":
        if frame.f_back is None:
            return None
        frame = frame.f_back
    config: Any = getattr(frame.f_locals.get("self"), "config", None)
    host, port = getattr(config, "host", None), getattr(config, "port", None)
    if not isinstance(host, str) or not isinstance(port, int) or not port:
        return None
    if getattr(config, "uds", None) is not None or getattr(config, "fd", None) is not None:
        return None
    shown = "localhost" if host in LOCAL else f"[{host}]" if ":" in host else host
    return f"{'https' if getattr(config, 'is_ssl', False) else 'http'}://{shown}:{port}"


# --- a token of its own


def own_token() -> str:
    """Return a token that is the same after a reload and in all workers, which have one parent process."""
    secret = secret_of_user() or secrets.token_bytes(32)
    return hmac.new(secret, str(os.getppid()).encode(), hashlib.sha256).hexdigest()[:48]


def secret_of_user() -> bytes | None:
    """Return the secret in the user's cache folder, created when missing; None if there is no private place for it."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "toolbox")
        file = folder / "dev-ui-secret"
        if not file.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = folder / f"{file.name}-{secrets.token_hex(8)}"
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(secrets.token_bytes(32))
            try:
                os.link(draft, file)  # whole at once, and never over that of another process
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        return _read_private(file)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return None


def _read_private(file: Path) -> bytes | None:
    with file.open("rb") as opened:
        facts = os.fstat(opened.fileno())
        if os.name == "posix" and (facts.st_uid != os.getuid() or facts.st_mode & 0o077):
            return None
        secret = opened.read(64)
    return secret if len(secret) == 32 else None
