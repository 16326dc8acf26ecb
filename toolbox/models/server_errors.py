"""Turns error replies of servers and failures of HTTP libraries into the errors of this library.

Not here: reading successful replies (`chat_wire`, `responses_wire`), retries (`transport`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urljoin, urlsplit

from ..errors import (
    ContextLengthError,
    ModelConnectionError,
    ModelError,
    ModelHttpError,
    ModelProtocolError,
    ModelTimeoutError,
)
from ..json_text import compact_json, parse_json
from ..safe_text import SAFE_HEADERS
from .length_refusals import is_too_long
from .sse import EXCERPT, KEPT, EventReader, excerpt

_TRANSPORTS = frozenset({"httpx2", "httpx", "httpcore2", "httpcore", "h11", "aiohttp", "anyio", "ssl"})


_ONLY_IN_ERRORS = (
    *("detail", "errors", "error_code", "error_message", "error_msg", "errorMessage", "errorCode", "msg", "fault"),
    "Message",
)
_SAYINGS = (
    *("message", "Message", "error", "detail", "errors", "error_message", "error_msg", "errorMessage", "msg", "title"),
    *("status_msg", "faultstring", "fault", "text"),
)
_REQUEST_IDS = (
    *("x-request-id", "request-id", "apim-request-id", "x-ms-request-id", "x-amzn-requestid", "x-correlation-id"),
    "cf-ray",
)


def error_in(value: Mapping[str, Any], status: int = 200, request_id: str | None = None) -> ModelHttpError | None:
    """Return the error inside a reply or an event with a successful status, or None."""
    error = value.get("error")
    answers = value.get("choices") is not None
    if error is not None and not error and not answers:
        error = value
    if not error and not answers:
        says_so = value.get("object") == "error" or value.get("type") == "error"
        named = any(value.get(key) for key in _ONLY_IN_ERRORS) or isinstance(value.get("message"), str)
        if says_so or value.get("success") is False or (named and value.get("type") != "ping"):
            error = value
        elif isinstance(outcome := value.get("base_resp"), Mapping) and outcome.get("status_code"):  # MiniMax
            error = outcome
    if not error:
        return None
    message = message_of(error) or message_of(value) or "an error without a message"
    body = excerpt(compact_json(value).encode())
    return refusal(_status_of(error, value, status), message, body, request_id, value)


def refusal(
    status: int, message: str, body: str, request_id: str | None = None, value: object = None
) -> ModelHttpError:
    """Return the error of a request that a server refused. `value` is the JSON of its reply, or None for a text."""
    # The JSON may repeat the request. A page of a proxy has no message.
    said = message if value is not None else f"{message}\n{body}"
    if is_too_long(status, said, value):
        return ContextLengthError(400 if status == 200 else status, message, body, request_id)
    return ModelHttpError(status, message, body, request_id)


def message_of(error: object) -> str | None:
    """Return the server's message from an error object in any of the common formats, or None."""
    if isinstance(error, str):
        return error.strip() or None
    if isinstance(error, list):
        return next(filter(None, map(message_of, error)), None)
    if not isinstance(error, Mapping):
        return None
    for key in _SAYINGS:
        if found := message_of(error.get(key)):
            inner = _find_raw_message(error) if key == "message" else None
            return f"{found}: {inner}" if inner and inner not in found else found
    for key in ("code", "type", "status"):
        if isinstance(error.get(key), (str, int)) and error[key] not in ("", "error"):
            return f"{key} {error[key]}"
    return None


def _find_raw_message(error: Mapping[str, Any]) -> str | None:
    """Return the message of the provider behind a gateway."""
    metadata = error.get("metadata")
    raw = metadata.get("raw") if isinstance(metadata, Mapping) else None
    if not isinstance(raw, str):
        return message_of(raw)
    try:
        return message_of(parse_json(raw)) or raw[:KEPT]
    except ValueError:
        return raw[:KEPT]


def _status_of(error: object, value: Mapping[str, Any], status: int) -> int:
    for source in (error, value):
        for key in ("code", "status", "status_code", "error_code"):
            code = source.get(key) if isinstance(source, Mapping) else None
            if isinstance(code, str) and code.isascii() and code.isdigit():
                code = int(code[:4])
            if isinstance(code, int) and not isinstance(code, bool) and 400 <= code <= 599:
                return code
    return status


def request_id_in(headers: Mapping[str, str]) -> str | None:
    """Return the server's request id from the header of OpenAI, Anthropic, Azure, AWS or Cloudflare."""
    return next(filter(None, map(headers.get, _REQUEST_IDS)), None)


def http_error(status: int, body: bytes, request_id: str | None) -> ModelHttpError:
    """Return the error of a reply with an error status."""
    message, value = None, None
    try:
        value = parse_json(body)
        message = message_of(value)
    except ValueError:
        text = excerpt(body)
        message = _message_of_events(body) or (text if text and not text.startswith("<") else None)
    return refusal(status, message or f"HTTP {status}", excerpt(body), request_id, value)


def _message_of_events(body: bytes) -> str | None:
    """Return the message of an error that was sent as an event stream, as LiteLLM does."""
    reader = EventReader()
    values = [*reader.feed(body), *reader.finish()]
    found = (error_in(value) for value in values if isinstance(value, dict))
    return next((each.message for each in found if each is not None), None)


def redirect_error(status: int, headers: Mapping[str, str], address: str) -> ModelHttpError:
    """Return the error of a redirect. Redirects are never followed."""
    try:
        parts = urlsplit(urljoin(address, headers.get("location", "")))
        to = f" to {parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else ""
    except ValueError:
        to = ""
    message = f"the server redirects{to[:200]}; redirects are not followed, because they could send the key and the"
    return ModelHttpError(
        status,
        f"{message} conversation to another server: set base_url to the final address",
        "",
        request_id_in(headers),
    )


HARMLESS_HEADERS = SAFE_HEADERS | frozenset(
    {"anthropic-beta", "anthropic-version", "http-referer", "idempotency-key", "openai-beta", "referer", "x-title"}
)
"""Headers of a request whose values are not secret. Errors and recordings hide the values of all others."""
_CREDENTIAL = re.compile(r"auth|key|token|secret|cookie|passw|session|credential|headers", re.IGNORECASE)


def secrets_in(value: object, named: bool = False, depth: int = 0) -> Iterator[str]:
    """Yield the texts in a request's parameters whose name is that of a credential, at any depth."""
    if depth > 20:
        return
    if isinstance(value, str):
        if named:
            yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from secrets_in(each, named or bool(_CREDENTIAL.search(str(name))), depth + 1)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from secrets_in(each, named, depth + 1)


LONGEST_WAIT = 120.0
"""Seconds that a server may ask to wait before a retry. A longer wait is an error."""
MOST_CONTINUATIONS = 10
"""Requests after the first one that continue a reply which the server paused."""
SHORTEST_SECRET = 8
"""Shorter headers and keys are not hidden in errors: `none` and `true` may be part of any text."""
LONGEST_MESSAGE = 2000
"""Characters of a server's message that an error shows."""


def shorten_texts(error: ModelError) -> None:
    """Cut the texts of an error that come from a server. Secrets must be hidden in them before."""
    if isinstance(error, (ModelHttpError, ModelProtocolError)):
        error.message = _cut_text(error.message, LONGEST_MESSAGE)
        error.body = _cut_text(error.body, EXCERPT)
        error.request_id = _cut_text(error.request_id, 200) if error.request_id else None
        facts = (error.message, error.body)
        if isinstance(error, ModelHttpError):
            error.args = (error.status, *facts, error.request_id)
        else:
            error.args = (*facts, error.status, error.request_id)
    elif isinstance(error, (ModelConnectionError, ModelTimeoutError)):
        error.message = _cut_text(error.message, LONGEST_MESSAGE)
        error.args = (error.message,)


def _cut_text(text: str, longest: int) -> str:
    return text if len(text) <= longest + 1 else f"{text[:longest].rstrip()}…"


def transport_error(error: BaseException, address: str, begun: bool = False) -> ModelError | None:
    """Return the error for what a transport to `address` raised; None for an error that is not a transport's.

    `begun`: the reply had begun to arrive.
    """
    if isinstance(error, ModelError):
        return error
    chain = [error]
    while (below := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < 10:
        chain.append(below)
    if any(isinstance(each, UnicodeError) for each in chain):  # its text would show the bytes
        return ModelProtocolError("the headers of the model server's reply are not valid text")
    said = next((str(each) for each in reversed(chain) if str(each)), type(error).__name__)
    kind = type(error).__module__.partition(".")[0]
    if kind not in _TRANSPORTS and kind not in ("openai", "anthropic") and not isinstance(error, (OSError, EOFError)):
        return None
    # Without credentials that an address may contain.
    parts = urlsplit(address)
    server = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if any(type(each).__name__ == "DecodingError" for each in chain):
        return ModelProtocolError(f"the reply contains invalid compressed data: {said}")
    if any(isinstance(each, TimeoutError) or _says_timeout(each) for each in chain) and not _is_disconnection(chain):
        return ModelTimeoutError(f"timeout while waiting for the model server {server}: {said}")
    if begun:
        return ModelConnectionError(f"the connection to the model server {server} was lost during the reply: {said}")
    if not _never_connected(chain):
        return ModelConnectionError(f"the model server {server} closed the connection: {said}")
    return ModelConnectionError(
        f"cannot connect to the model server {server}: {said}; check that it is running and that base_url is correct"
    )


def _never_connected(chain: list[BaseException]) -> bool:
    """Return True if no connection was made: no server, or not a model server, at the address."""
    if any(isinstance(each, (ConnectionResetError, BrokenPipeError)) for each in chain):
        return False
    names = {type(each).__name__ for each in chain}
    broken = {"ReadError", "WriteError", "RemoteProtocolError", "ServerDisconnectedError", "ClientPayloadError"}
    return not names & broken


def _says_timeout(error: BaseException) -> bool:
    return "Timeout" in type(error).__name__


def _is_disconnection(chain: list[BaseException]) -> bool:
    """Return True if the cause is a broken connection, which one adapter reports as a timeout of connecting."""
    root = next((each for each in reversed(chain) if type(each).__module__.startswith("aiohttp")), None)
    return root is not None and not isinstance(root, TimeoutError) and not _says_timeout(root)


def too_large(limit: int) -> ModelProtocolError:
    """Return the error for a reply with more than `limit` bytes."""
    what = f"the model server's reply is larger than {limit} bytes"
    return ModelProtocolError(f"{what}; raise max_reply_bytes= if you expect replies of this size")


def paused_error() -> ModelProtocolError:
    """Return the error for a reply that the server pauses too often."""
    return ModelProtocolError(
        f"the server paused the reply again after {MOST_CONTINUATIONS} continuations; ask for less in one reply"
    )


def compression_error(refusal: str, detail: str) -> ModelProtocolError:
    """Return the error for a reply whose compression was refused; see `RefusedBody`."""
    if refusal == "broken":
        return ModelProtocolError(f"the reply contains invalid compressed data: {detail}")
    if refusal == "not requested":
        return ModelProtocolError(f"the reply is compressed ({detail[:40]}), but the request did not accept that")
    what = f"unsupported compression of the reply: {detail[:40]}"
    return ModelProtocolError(f"{what}; set the header accept-encoding to gzip or deflate, or remove it")


def with_request(error: ModelError, status: int, request_id: str | None) -> ModelError:
    """Return the error with the request's id and status, if its class has them."""
    if request_id is None and not isinstance(error, ModelProtocolError):
        return error
    if isinstance(error, ModelHttpError) and error.request_id is None:
        return type(error)(error.status, error.message, error.body, request_id)
    if isinstance(error, ModelProtocolError) and error.status is None:
        return ModelProtocolError(error.message, error.body, status, request_id)
    return error
