"""Requests tokens and keeps them: `TokenSource`, one for each grant, and the bean `TokenSources`, which has them all.

Generators without I/O: the clients perform their steps, with `await` or on the calling thread, and send the requests.
So one source serves all event loops and threads. Not here: the declarations (`grants`), sending requests with a token
(`rest.exchange`, `mcp.bearer_auth`).
"""

from __future__ import annotations

import base64
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from urllib.parse import quote, urlencode

from pydantic import SecretStr
from pydantic_core import from_json

from ..di.decorators import application_scoped
from ..di.graph import BeanGraph
from ..di.injection_points import InjectionPoint, point_of
from ..errors import IllegalConfigurationError, OAuthError, Problem, RestClientError, RestTimeoutError
from ..execution.threads import register_for_fork
from ..safe_text import HIDDEN, without_secrets
from ..security import TOKEN, SecurityIdentity
from .grants import Grant, TokenExchange, grant_problems, label_of, read_secret, token_method

EARLY: Final = 30.0
"""Seconds before its end from which on a token is not used any more."""
MAX_USERS: Final = 1000
"""Users whose tokens one source keeps; those that were not used for the longest time are dropped first."""
MAX_REPLY_BYTES: Final = 2**20
"""Limit of the reply of a token server."""
FOR_THE_PROGRAM: Final = ""
"""The subject of tokens that belong to no user."""

_TOKEN = re.compile(r"[\x21-\x7e]+")  # the characters of RFC 6749; others could not be sent in a header
_ERROR = re.compile(r"[\x20\x21\x23-\x5b\x5d-\x7e]{1,100}")  # those of RFC 6749, in a length for a message
_URN = "urn:ietf:params:oauth"


@dataclass(frozen=True, slots=True, eq=False)
class AccessToken:
    """A token that can be sent until `ends`, a moment of `time.monotonic()`."""

    value: str = field(repr=False)
    ends: float


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A request to a token server: always a POST. Its replies have at most `MAX_REPLY_BYTES`."""

    url: str
    headers: dict[str, str] = field(repr=False)
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class TokenRefusal:
    """A reply without a token, and its facts for an `OAuthError`."""

    fact: str
    status: int | None = None
    error: str | None = None


Outcome: TypeAlias = AccessToken | TokenRefusal | None
"""What a request gave: a token, a refusal, or None if it was given up, so that others may try."""


@dataclass(frozen=True, slots=True)
class WaitForToken:
    """A step of a client: wait until another call has requested the token, at most `limit` seconds."""

    outcome: Future[Outcome]
    limit: float


_TOO_LATE: Final = TokenRefusal("did not answer in time")

TokenSteps: TypeAlias = Generator[Any, Any, AccessToken]
Send: TypeAlias = Callable[[TokenRequest, float], Generator[Any, Any, tuple[int, bytes]]]
"""Sends a request within a number of seconds, and returns the status and the body. Raises `RestClientError`."""


class TokenSource:
    """The tokens of one grant: one for the program, or one for each user. Safe to use from any thread.

    Raises `IllegalConfigurationError` for a grant with problems, such as an environment variable that is not set.
    """

    def __init__(self, grant: Grant) -> None:
        if problems := [*grant_problems(grant, label_of(grant))]:
            raise IllegalConfigurationError(problems)
        self.grant = grant
        self._secret = SecretStr(read_secret(grant))
        self._lock = threading.Lock()
        self._tokens: OrderedDict[str, AccessToken] = OrderedDict()
        self._requested: dict[str, Future[Outcome]] = {}
        register_for_fork(self)

    def renew_after_fork(self) -> None:
        """Forget the requests of the parent process, which never end here."""
        self._lock, self._requested = threading.Lock(), {}

    def obtain(
        self, subject: str, send: Send, limit: float, where: str, refused: AccessToken | None = None
    ) -> TokenSteps:
        """Return a token for a subject: the user's own token, or `FOR_THE_PROGRAM`. `where` begins the text of errors.

        `refused` is a token that the resource did not accept: it is replaced, unless another call has replaced it
        already. Calls at the same time share one request. Raises `OAuthError`, also after `limit` seconds.
        """
        deadline = time.monotonic() + limit
        while True:
            with self._lock:
                token = self._tokens.get(subject)
                if token is not None and token is refused:
                    del self._tokens[subject]
                elif token is not None and time.monotonic() < token.ends:
                    self._tokens.move_to_end(subject)
                    return token
                requested = self._requested.get(subject)
                is_first = requested is None
                if requested is None:
                    requested = self._requested[subject] = Future()
            remaining = max(deadline - time.monotonic(), 0.0)
            if is_first:
                return (yield from self._request_token(subject, requested, send, remaining, where))
            yield WaitForToken(requested, remaining)
            if not requested.done():
                raise self._error(_TOO_LATE, where)
            outcome = requested.result()
            if isinstance(outcome, TokenRefusal):
                raise self._error(outcome, where)
            if outcome is not None:
                return outcome

    def _request_token(
        self, subject: str, requested: Future[Outcome], send: Send, limit: float, where: str
    ) -> TokenSteps:
        """Request a token and set the outcome, for all who wait, also if this call is cancelled."""
        outcome: Outcome = None
        started = time.monotonic()
        try:
            try:
                status, body = yield from send(self._build_request(subject), limit)
                outcome = self._read_reply(status, body, subject, started)
            # The errors of the HTTP library have the request with the secret: none of them is the cause of ours.
            except RestTimeoutError:
                pass  # others may have more time
            except RestClientError as error:
                reason = type(error.__cause__ or error).__name__
                outcome = TokenRefusal(f"sent no valid reply ({reason})", error.status)
        finally:
            with self._lock:
                self._requested.pop(subject, None)
                if isinstance(outcome, AccessToken):
                    self._tokens[subject] = outcome
                    self._tokens.move_to_end(subject)
                    if len(self._tokens) > MAX_USERS:
                        self._tokens.popitem(last=False)
            requested.set_result(outcome)
        if isinstance(outcome, AccessToken):
            return outcome
        raise self._error(outcome or _TOO_LATE, where)

    def _build_request(self, subject: str) -> TokenRequest:
        grant, secret = self.grant, self._secret.get_secret_value()
        fields = {"grant_type": "client_credentials"}
        if isinstance(grant, TokenExchange):
            fields = {
                "grant_type": f"{_URN}:grant-type:token-exchange",
                "subject_token": subject,
                "subject_token_type": f"{_URN}:token-type:access_token",
            }
        fields |= {name: value for name in ("scope", "audience") if (value := getattr(grant, name)) is not None}
        headers = {"Accept": "application/json", "Content-Type": "application/x-www-form-urlencoded"}
        if grant.client_auth == "body":
            fields |= {"client_id": grant.client_id, "client_secret": secret}
        else:
            # RFC 6749, 2.3.1: both are form-encoded first. A space is `%20`, which every server decodes, `+` is not.
            pair = ":".join(quote(each, safe="", errors="replace") for each in (grant.client_id, secret))
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        # The server refuses a token with half a character. Python's error about it would contain the token.
        return TokenRequest(grant.token_url, headers, urlencode(fields, errors="replace").encode())

    def _read_reply(self, status: int, body: bytes, subject: str, started: float) -> AccessToken | TokenRefusal:
        try:
            reply = from_json(body)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            return TokenRefusal("sent a reply that is not a JSON object", status)
        value, kind = reply.get("access_token"), reply.get("token_type")
        is_bearer = isinstance(kind, str) and kind.lower() == "bearer"
        if 200 <= status < 300 and is_bearer and isinstance(value, str) and _TOKEN.fullmatch(value):
            lifetime = _read_lifetime(reply.get("expires_in"))
            return AccessToken(value, math.inf if lifetime is None else started + lifetime - EARLY)
        code = reply.get("error")
        if isinstance(code, str) and _ERROR.fullmatch(code):
            shown = without_secrets(code, [self._secret.get_secret_value(), subject])
            return TokenRefusal(f"refused to issue a token ({shown})", status, shown)
        return TokenRefusal("sent a reply without a bearer token", status)

    def _error(self, refusal: TokenRefusal, where: str) -> OAuthError:
        url, query, _ = self.grant.token_url.partition("?")
        shown = url + (query and f"?{HIDDEN}")
        return OAuthError(f"{where}: the token server {refusal.fact}", shown, refusal.status, "", refusal.error)


def _read_lifetime(given: object) -> float | None:
    """Return the seconds of `expires_in`, which some servers send as a text; None if it is missing or invalid."""
    try:
        seconds = float(given) if isinstance(given, (int, float, str)) and not isinstance(given, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) else None


@application_scoped
class TokenSources:
    """The token sources of a container; clients whose grants are equal share one, with its tokens.

    `declared` are those of the program's code, which were read at the start.
    """

    def __init__(self, declared: list[TokenSource]) -> None:
        self._lock = threading.Lock()
        self._sources = {each.grant: each for each in declared}

    def source_of(self, grant: Grant) -> TokenSource:
        """Return the source of a grant."""
        with self._lock:
            if grant not in self._sources:
                self._sources[grant] = TokenSource(grant)
            return self._sources[grant]


# --- who a token is for


@dataclass(frozen=True, slots=True)
class TokenAuth:
    """The authentication of a client: its source, and the bean that has the user's token; None without users."""

    source: TokenSource
    subject: InjectionPoint | None


@dataclass(frozen=True, slots=True)
class SubjectTokens:
    """The tokens of one subject of a source."""

    source: TokenSource
    subject: str = field(repr=False)


def token_auth(source: TokenSource) -> TokenAuth:
    """Return the authentication with the tokens of a source."""
    grant = source.grant
    if not isinstance(grant, TokenExchange):
        return TokenAuth(source, None)
    wanted: Any = SecurityIdentity | None if grant.subject is None else grant.subject
    return TokenAuth(source, point_of(wanted, label_of(grant)))


def subject_points(auth: object, where: str) -> tuple[InjectionPoint, ...]:
    """Return the point of the bean that has the user's token, if an `auth=` names one."""
    if isinstance(auth, TokenExchange) and token_method(auth) is not None:
        return (point_of(auth.subject, f"{where}: {label_of(auth)}"),)
    return ()


def subject_problems(grant: Grant | None, graph: BeanGraph, where: str) -> Iterator[Problem]:
    """Yield the problems of the bean that has the user's token."""
    for point in subject_points(grant, where):
        yield from graph.problems_of(point)


def token_of_identity(identity: object) -> object:
    """Return the token of a caller; None if it has none."""
    return identity.attributes.get(TOKEN) if isinstance(identity, SecurityIdentity) else None


def read_subject(given: object) -> str | None:
    """Return the user's token as text; None without one. Raises `TypeError` for anything but a text or a secret."""
    if isinstance(given, SecretStr):
        given = given.get_secret_value()
    if given is None or isinstance(given, str):
        return given or None
    raise TypeError(f"the token of the user must be a str, got {type(given).__name__}")
