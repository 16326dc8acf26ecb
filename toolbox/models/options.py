"""What is wrong with how a server is to be reached, found when a model is made and not in its first call.

No value that may be a secret is shown. Not here: reaching the server (`transport`); the parameters, which it judges.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from ..errors import Problem
from .transport import TransportSettings


def problems_of(model: object, settings: TransportSettings) -> Iterator[Problem]:
    """Every problem of these settings for `model`."""
    where = f"OpenAiChatModel({model!r})"
    if not isinstance(model, str) or not model.strip():
        yield Problem(where, "it does not say which model", "give the name that the server has for it")
    yield from _of_address(settings.base_url, where)
    yield from _of_limits(settings, where)
    if isinstance(settings.api_key, str):
        if not settings.api_key.isascii() or not settings.api_key.isprintable() or " " in settings.api_key:
            what = "its API key holds a blank, a line end or another character that no header can carry"
            yield Problem(where, what, "give api_key= or OPENAI_API_KEY the key alone")
    elif not callable(settings.api_key):
        what = f"its API key is of type {type(settings.api_key).__name__}"
        yield Problem(where, what, "give a str, or a coroutine function that gives one")
    for name, value in settings.headers.items():
        if not isinstance(value, str) or not value.isprintable() or not f"{name}".isascii() or not name.isprintable():
            yield Problem(where, f"the header {name!r} has no value that can be sent", "give one line of text")
    if isinstance(settings.transport, str) and settings.transport not in ("aiohttp", "httpx2"):
        yield Problem(where, f"there is no transport {settings.transport!r}", "use 'aiohttp' or 'httpx2'")


def _of_address(address: str, where: str) -> Iterator[Problem]:
    try:
        parts = urlsplit(address)
        usable = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        parts, usable = None, False
    if parts is None or not usable or not address.isprintable() or " " in address:
        fix = "mend base_url= or OPENAI_BASE_URL: http://localhost:11434/v1, for example"
        yield Problem(where, "its address is none: the host or the port cannot be read", fix)
    elif "@" in parts.netloc:
        fix = "give api_key=, or extra_headers={'authorization': …}"
        yield Problem(where, "its address holds a name or password, which would go into logs", fix)
    elif parts.query or parts.fragment:
        fix = "give extra_query={…} what stands behind the question mark"
        yield Problem(where, "its address holds a query, and the paths of the API would be put behind it", fix)


def _of_limits(settings: TransportSettings, where: str) -> Iterator[Problem]:
    for name, value in (("timeout", settings.timeout), ("read_timeout", settings.read_timeout)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
            yield Problem(where, f"{name} is {value!r}", "give seconds above 0, or None for no limit")
    limits = (
        ("max_retries", settings.max_retries, 0),
        ("max_concurrent_requests", settings.max_concurrent_requests, 1),
        ("max_reply_bytes", settings.max_reply_bytes, 1),
    )
    for name, count, least in limits:
        if name != "max_retries" and count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            yield Problem(where, f"{name} is {count!r}", f"give a whole number from {least}")
