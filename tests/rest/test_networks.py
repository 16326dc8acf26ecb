"""Between a client and a service: proxies, and certificates of both sides."""

import datetime
import http.server
import ipaddress
import os
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.rest.http_server import Answer, Server
from toolbox import rest
from toolbox.errors import RestClientError
from toolbox.tls import tls_context

pytestmark = pytest.mark.anyio


@rest.register_rest_client(config_key="far")
class Far(Protocol):
    @rest.get("/x")
    async def find(self) -> str: ...

    @rest.get("/x")
    def find_now(self) -> str: ...


# --- proxies


async def test_requests_go_through_the_proxy_of_the_settings(server: Server) -> None:
    server.answer("by proxy")
    proxy = server.url.replace("//", "//user:pass@")
    far = rest.create_rest_client(Far, url="http://far.invalid/base", proxy=proxy, bearer_token="of-the-service")

    assert await far.find() == "by proxy"

    assert server.last.target == "http://far.invalid/base/x"
    assert server.last.header("host") == "far.invalid"
    assert server.last.header("proxy-authorization") == "Basic dXNlcjpwYXNz"
    assert server.last.header("authorization") == "Bearer of-the-service"


async def test_the_environments_proxy_is_used_unless_the_settings_say_no(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer("by proxy")
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)

    assert await rest.create_rest_client(Far, url="http://far.invalid").find() == "by proxy"
    with pytest.raises(RestClientError):
        await rest.create_rest_client(Far, url="http://far.invalid", trust_environment=False).find()


async def test_a_proxys_password_is_in_no_error(server: Server) -> None:
    server.answer(Answer(hang_up=True))
    far = rest.create_rest_client(Far, url="http://far.invalid", proxy=server.url.replace("//", "//user:sesame@"))

    with pytest.raises(RestClientError) as caught:
        await far.find()

    assert "sesame" not in f"{caught.value!r} {caught.value} {caught.value.__cause__!r}"


# --- certificates


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and an unknown certificate for 127.0.0.1."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("certificates") / "both.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return file


class _Greeting(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.request, ssl.SSLSocket)
        text = b"known" if self.request.getpeercert() else b"stranger"
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        pass


class _TlsServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A handshake that fails is the client's to tell."""


@pytest.fixture
def tls_server(certificate: Path) -> Iterator[str]:
    """The URL of a server that asks for a certificate, and says whether it was given one it knows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(certificate)
    served = _TlsServer(("127.0.0.1", 0), _Greeting)
    served.socket = context.wrap_socket(served.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{served.server_address[1]}"
    served.shutdown()
    served.server_close()
    thread.join()


async def test_unknown_certificates_are_rejected(tls_server: str) -> None:
    with pytest.raises(RestClientError, match=r"(?i)certificate") as caught:
        await rest.create_rest_client(Far, url=tls_server).find()

    assert caught.value.status is None


async def test_a_certificate_can_be_trusted_and_checking_be_switched_off(tls_server: str, certificate: Path) -> None:
    assert await rest.create_rest_client(Far, url=tls_server, verify=str(certificate)).find() == "stranger"
    assert await rest.create_rest_client(Far, url=tls_server, verify=False).find() == "stranger"


def test_a_client_shows_its_certificate(tls_server: str, certificate: Path) -> None:
    far = rest.create_rest_client(Far, url=tls_server, verify=str(certificate), client_certificate=str(certificate))

    assert far.find_now() == "known"


def test_clients_share_the_certificates_of_the_system_and_no_others(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    shared = tls_context(True, None, True)
    assert shared.verify_mode is ssl.CERT_REQUIRED
    assert shared.check_hostname
    assert tls_context(True, None, True) is shared
    assert tls_context(True, None, False) is shared
    assert tls_context(False, None, True) is not shared

    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    assert tls_context(True, None, True) is not shared
    assert tls_context(True, None, False) is shared


def test_certificates_of_the_environment_are_shared_until_their_file_changes(monkeypatch, certificate: Path) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    shared = tls_context()
    assert tls_context() is shared
    assert len(shared.get_ca_certs()) == 1

    os.utime(certificate, (1, 1))
    assert tls_context() is not shared

    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.parent / "missing.pem"))
    with pytest.raises(FileNotFoundError):
        tls_context()
