"""The TLS contexts of HTTP clients, which share the certificates of the system: reading these takes long.

Not here: the clients (`models`, `rest`, `mcp`).
"""

import functools
import os
import ssl
from pathlib import Path

import httpx2


def tls_context(
    verify: bool | str = True, certificate: str | None = None, trust_environment: bool = True
) -> ssl.SSLContext:
    """Return a TLS context for `httpx2`; it is shared unless `verify` or `certificate` is given.

    Args:
        verify: False to accept any certificate, or the path of a file with certificates to accept.
        certificate: The path of a file with the client's certificate and key.
        trust_environment: Whether `SSL_CERT_FILE` and `SSL_CERT_DIR` replace the certificates of the system.

    Raises `OSError` for a file that cannot be read.
    """
    if verify is True and certificate is None:
        return _load_shared_context(*(_read_environment() if trust_environment else _OF_THE_SYSTEM))
    if isinstance(verify, str):
        context = ssl.create_default_context(cafile=verify)
    else:
        context = httpx2.create_ssl_context(verify, trust_env=trust_environment)
    if certificate is not None:
        context.load_cert_chain(certificate)
    return context


_OF_THE_SYSTEM = (None, None, None)


def _read_environment() -> tuple[str | None, str | None, int | None]:
    """Return the file and the folder of certificates that the environment names, and when the file was changed."""
    file, folder = os.environ.get("SSL_CERT_FILE") or None, os.environ.get("SSL_CERT_DIR") or None
    return file, folder, Path(file).stat().st_mtime_ns if file else None


@functools.lru_cache(maxsize=8)
def _load_shared_context(file: str | None, folder: str | None, changed: int | None) -> ssl.SSLContext:
    return httpx2.create_ssl_context(trust_env=(file or folder) is not None)
