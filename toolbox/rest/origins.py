"""Decides where requests and their credentials may be sent: below the base URL, and after a redirect.

Also URLs whose text hides their secrets. Not here: following a chain of redirects (`exchange`).
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urljoin

import httpx2

from .encoding import has_dot_segment, shown_url

# Headers that a redirect may send to another origin: none of them identifies the caller.
_IMPERSONAL = frozenset({"accept", "accept-encoding", "accept-language", "user-agent", "host"})


class MaskedUrl(httpx2.URL):
    """The URL of a request, whose text hides its secrets, because httpx2 and other libraries log URLs.

    Resolve links with `join`; `str` is for people. `httpx2.URL(url)` is the URL without the mask.
    """

    shown = ""

    def __str__(self) -> str:
        return self.shown

    def __repr__(self) -> str:
        return f"URL({self.shown!r})"

    def join(self, url: httpx2.URL | str) -> httpx2.URL:
        """Resolve `url` against the real URL, not against its text."""
        return httpx2.URL(self).join(url)


def mask_url(request: httpx2.Request, shown: str) -> None:
    """Give the URL of a request the text that logs and errors may show."""
    url = MaskedUrl(request.url)
    url.shown = shown
    request.url = url


def shown_url_of(request: httpx2.Request) -> str:
    """Return the text of a request's URL for logs and errors. It is not the URL that is sent."""
    return str(request.url)


def is_below(url: httpx2.URL, base: httpx2.URL) -> bool:
    """Return True if the URL has the origin of `base`, a path below that of `base`, and no user info.

    A server that decodes the path finds no way up in it: `/api/..%2fadmin` is not below `/api`. It decodes once; what
    arguments contain is encoded once more, so that an argument may be the text `%2e%2e`.
    """
    if (url.raw_scheme, url.raw_host, url.port, url.userinfo) != (base.raw_scheme, base.raw_host, base.port, b""):
        return False
    start, path = base.raw_path.rstrip(b"/"), url.raw_path.partition(b"?")[0]
    if path != start and not path.startswith(start + b"/"):
        return False
    return not has_dot_segment(path[len(start) :].decode("ascii"), decodings=1)


def is_same_origin(url: httpx2.URL, other: httpx2.URL) -> bool:
    """Return True if credentials for `url` may be sent to `other`: same origin, or http upgraded to https."""
    if (url.scheme, url.host, url.port) == (other.scheme, other.host, other.port):
        return True
    upgraded = url.scheme == "http" and other.scheme == "https" and url.port is None and other.port is None
    return upgraded and url.host == other.host


def redirected_request(
    request: httpx2.Request, response: httpx2.Response, hide: Callable[[str], str]
) -> httpx2.Request | None:
    """Return the request that a redirect asks for, None when it must not be followed.

    Another origin gets no personal headers and no body. `hide` removes secrets from the text of the new URL.
    """
    following = response.next_request
    try:
        # Only the text to show is resolved against the masked URL; `following` has the real one.
        shown = shown_url(urljoin(shown_url_of(request), response.headers["location"]))
    except ValueError:  # an invalid URL is not followed
        return None
    if following is None or following.url.scheme not in ("http", "https") or not following.url.host:
        return None
    if not is_same_origin(request.url, following.url):
        if following.method not in ("GET", "HEAD"):
            return None
        for name in [name for name in following.headers if name.lower() not in _IMPERSONAL]:
            del following.headers[name]
    elif "cookie" in request.headers:
        following.headers["Cookie"] = request.headers["Cookie"]
    mask_url(following, hide(shown))
    return following
