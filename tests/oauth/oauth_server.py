"""An OAuth server with Authlib: clients with secrets, client credentials, and token exchange for users.

Authlib checks requests and clients and writes the replies. Only the exchange itself (RFC 8693), which Authlib does not
have, is written here.
"""

import secrets
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from authlib.oauth2.rfc6749 import AuthorizationServer, ClientMixin, OAuth2Request
from authlib.oauth2.rfc6749.errors import InvalidGrantError, InvalidRequestError
from authlib.oauth2.rfc6749.grants import BaseGrant, ClientCredentialsGrant, TokenEndpointMixin
from authlib.oauth2.rfc6749.requests import BasicOAuth2Payload
from authlib.oauth2.rfc6750 import BearerTokenGenerator

from tests.rest.http_server import Answer, Received, Server

EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"
SECRET = "s3cr3t of+the:desk%/é"
"""A secret with characters that must be encoded."""


@dataclass(frozen=True)
class Issued:
    """What the server knows about a token."""

    client: str
    subject: str
    audience: str | None
    scope: str | None


@dataclass
class Client(ClientMixin):
    """A client that may do everything for the scopes `read` and `write`."""

    client_id: str
    client_secret: str
    methods: tuple[str, ...] = ("client_secret_basic", "client_secret_post")

    def get_client_id(self) -> str:
        return self.client_id

    def check_client_secret(self, client_secret: str) -> bool:
        return secrets.compare_digest(self.client_secret.encode(), client_secret.encode())

    def check_endpoint_auth_method(self, method: str, endpoint: str) -> bool:
        return method in self.methods

    def check_grant_type(self, grant_type: str) -> bool:
        return True

    def get_allowed_scope(self, scope: str | None) -> str | None:
        return scope or ""


class Request(OAuth2Request):
    def __init__(self, received: Received) -> None:
        super().__init__(received.verb, f"https://login.example{received.target}", headers=dict(received.headers))
        self.payload = BasicOAuth2Payload(dict(parse_qsl(received.body.decode())))

    @property
    def form(self) -> dict[str, str]:
        return self.payload.data


class Credentials(ClientCredentialsGrant):
    TOKEN_ENDPOINT_AUTH_METHODS = ("client_secret_basic", "client_secret_post")


class Exchange(BaseGrant, TokenEndpointMixin):
    """RFC 8693: the subject token is one that this server has issued, and is not revoked."""

    GRANT_TYPE = EXCHANGE
    TOKEN_ENDPOINT_AUTH_METHODS = ("client_secret_basic", "client_secret_post")

    def validate_token_request(self) -> None:
        self.request.client = self.authenticate_token_endpoint_client()
        data = self.request.payload.data
        if data.get("subject_token_type") != ACCESS_TOKEN:
            raise InvalidRequestError("unsupported subject_token_type")
        issued = self.server.tokens.get(data.get("subject_token"))
        if issued is None:
            raise InvalidGrantError("unknown subject_token")
        self.request.user = issued.subject
        self.validate_requested_scope()

    def create_token_response(self) -> tuple[int, dict[str, Any], Any]:
        token = self.generate_token(
            user=self.request.user, scope=self.request.payload.scope, include_refresh_token=False
        )
        self.save_token(token)
        return 200, {**token, "issued_token_type": ACCESS_TOKEN}, self.TOKEN_RESPONSE_HEADER


class OAuthServer(AuthorizationServer):
    """The server, on a free port. `expires_in` is the lifetime of its tokens; 0 leaves it out.

    A test can set `reply`, which is then the reply to each request for a token.
    """

    def __init__(self) -> None:
        super().__init__(scopes_supported=["read", "write"])
        self.tokens: dict[str, Issued] = {}
        self.clients = {"desk": Client("desk", SECRET)}
        self.expires_in = 3600
        self.reply: Answer | None = None
        self.register_token_generator(
            "default", BearerTokenGenerator(self._make_token, expires_generator=lambda *_: self.expires_in)
        )
        self.register_grant(Credentials)
        self.register_grant(Exchange)
        self.http = Server()
        self.http.handler = self._answer
        self.url = f"{self.http.url}/token"

    @property
    def requests(self) -> list[dict[str, str]]:
        """The fields of all requests for tokens."""
        return [dict(parse_qsl(each.body.decode())) for each in self.http.received]

    def log_in(self, user: str) -> str:
        """Return a token of a user, as another program would have got it."""
        token = f"user-token-of-{user}-{secrets.token_urlsafe(12)}"
        self.tokens[token] = Issued("web", user, None, None)
        return token

    def revoke(self, *tokens: str) -> None:
        for each in tokens or tuple(self.tokens):
            del self.tokens[each]

    def bearer(self, authorization: str | None) -> Issued | None:
        """Return what an `Authorization` header stands for; None for an invalid one."""
        kind, _, token = (authorization or "").partition(" ")
        return self.tokens.get(token) if kind == "Bearer" else None

    def stop(self) -> None:
        self.http.stop()

    def _answer(self, received: Received) -> Answer:
        if self.reply is not None:
            return self.reply
        return self.create_token_response(received)

    def _make_token(self, **_: Any) -> str:
        return f"access-{secrets.token_urlsafe(24)}"

    # --- what Authlib asks for

    def query_client(self, client_id: str) -> Client | None:
        return self.clients.get(client_id)

    def save_token(self, token: dict[str, Any], request: OAuth2Request) -> None:
        data = request.payload.data
        subject = request.user or request.client.client_id
        issued = Issued(request.client.client_id, subject, data.get("audience"), data.get("scope"))
        self.tokens[token["access_token"]] = issued

    def create_oauth2_request(self, request: Received) -> OAuth2Request:
        return Request(request)

    def handle_response(self, status: int, body: Any, headers: Any) -> Answer:
        return Answer(body, status, dict(headers))

    def send_signal(self, name: str, *args: Any, **kwargs: Any) -> None:
        pass


@dataclass
class Resource:
    """A server that accepts the tokens of an OAuth server, on a free port. `seen` is what they stood for.

    `refuse_next`: how many requests get a 401 whatever they bring.
    """

    oauth: OAuthServer
    seen: list[Issued] = field(default_factory=list)
    refuse_next: int = 0

    def __post_init__(self) -> None:
        self.http = Server()
        self.http.handler = self._answer
        self.url = self.http.url

    def _answer(self, received: Received) -> Answer:
        issued = self.oauth.bearer(received.header("Authorization"))
        if self.refuse_next:
            self.refuse_next -= 1
            issued = None
        if issued is None:
            return Answer({"detail": "no valid token"}, 401, {"WWW-Authenticate": "Bearer"})
        self.seen.append(issued)
        return Answer({"subject": issued.subject, "audience": issued.audience, "body": received.body.decode()})

    def stop(self) -> None:
        self.http.stop()
