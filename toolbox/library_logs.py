"""Keeps secrets out of what other libraries log about requests and MCP servers: keys, cookies, queries, messages.

Not here: what this library logs (`logs`), secrets in errors (`safe_text`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .safe_text import HIDDEN, SAFE_HEADERS

_OF_ALL_PROGRAMS = "httpx2"
"""The logger whose records may be about any request of the program."""
_LOGGERS = (
    *("anthropic._base_client", "openai._base_client"),
    *("httpcore2.http11", "httpcore2.http2", "httpcore2.proxy"),
    *("mcp.client.streamable_http", "mcp.client.sse"),
)
"""The loggers whose records are about requests with keys: at DEBUG, they have whole headers and addresses."""

_QUERY = re.compile(r"(https?://[^\s?'\"<>]*)\?[^\s'\"<>]+")
_HEADER_BYTES = re.compile(r"""\(b'([^']*)', b(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\)""")
_SESSION = re.compile(r"(session ID: )\S+")
_REPLY = re.compile(r"(SSE message: ).+", re.DOTALL)
"""What an MCP server sends: a server that fails may repeat the token of the request."""

_hides_queries: ContextVar[bool] = ContextVar("toolbox.hides_queries", default=False)


@contextmanager
def hidden_queries() -> Iterator[None]:
    """Hide the queries of addresses in the records of HTTP clients inside the block."""
    token = _hides_queries.set(True)
    try:
        yield
    finally:
        _hides_queries.reset(token)


class _OfThisRequest(logging.Filter):
    """Hides the queries of addresses in records about requests in `hidden_queries`."""

    def filter(self, record: logging.LogRecord) -> bool:
        if _hides_queries.get() and isinstance(record.args, tuple):
            record.args = tuple(_without_query(each) for each in record.args)
        return True


class _WithoutSecrets(logging.Filter):
    """Hides headers that may be secret, queries, and the content of requests."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = _shown_text(record.msg) if isinstance(record.msg, str) else record.msg
        if isinstance(record.args, Mapping):
            record.args = _shown_options(record.args)
        elif record.args:
            record.args = tuple(_shown_value(each) for each in record.args)
        if record.exc_info and record.exc_text is None:
            # A handler writes this text instead of the traceback, which repeats the address.
            record.exc_text = _shown_text(logging.Formatter().formatException(record.exc_info))
        return True


_of_this_request, _without_secrets = _OfThisRequest(), _WithoutSecrets()


def hide_secrets_in_logs() -> None:
    """Hide secrets in the logs of the libraries that send requests, from now on. Calling it again changes nothing."""
    logging.getLogger(_OF_ALL_PROGRAMS).addFilter(_of_this_request)
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_without_secrets)


# --- what is shown


def _shown_text(text: str) -> str:
    text = _REPLY.sub(rf"\1{HIDDEN}", _SESSION.sub(rf"\1{HIDDEN}", _QUERY.sub(r"\1?…", text)))
    return _HEADER_BYTES.sub(_shown_header, text) if "(b'" in text else text


def _shown_header(found: re.Match[str]) -> str:
    return found[0] if found[1].lower() in SAFE_HEADERS else f"(b'{found[1]}', b'{HIDDEN}')"


def _without_query(value: object) -> object:
    return _QUERY.sub(r"\1?…", str(value)) if type(value).__name__ == "URL" else value


def _shown_value(value: object) -> object:
    if isinstance(value, str):
        return _shown_text(value)
    if type(value).__name__ == "Headers" and isinstance(value, Mapping):
        return _shown_headers(value)
    return _shown_options(value) if isinstance(value, Mapping) else _without_query(value)


def _shown_options(options: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the options of a request: its headers without secrets, and how long the rest is."""
    shown: dict[Any, Any] = {}
    for name, value in options.items():
        if name == "headers" and isinstance(value, Mapping):
            shown[name] = _shown_headers(value)
        elif name in ("content", "json_data", "extra_json", "params") and value is not None:
            shown[name] = f"<{len(value)} bytes>" if isinstance(value, (str, bytes)) else HIDDEN
        else:
            shown[name] = _shown_text(value) if isinstance(value, str) else value
    return shown


def _shown_headers(headers: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: value if str(name).lower() in SAFE_HEADERS else HIDDEN for name, value in headers.items()}
