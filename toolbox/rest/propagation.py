"""Passes headers of the incoming request on to outgoing requests: trace headers, and others that settings name.

Not here: reading the incoming request (the web framework's adapter), creating spans (a tracing library).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from ..context import Caller, current_caller

_incoming: ContextVar[tuple[Mapping[str, str], Caller | None] | None]
_incoming = ContextVar("toolbox.rest.incoming", default=None)


@contextmanager
def propagate_headers(headers: Mapping[str, str]) -> Iterator[None]:
    """Let the REST clients that are used in this block pass on headers of an incoming request.

    Each client sends the headers that its `propagate_headers` setting names, by default `traceparent` and
    `tracestate`. The same setting applies to the headers of the current OpenTelemetry span.
    """
    token = _incoming.set((headers, current_caller.get()))  # read only when a request is sent
    try:
        yield
    finally:
        _incoming.reset(token)


def propagated_headers(names: tuple[str, ...]) -> dict[str, str]:
    """Return the headers with these names for an outgoing request; those of the current span take precedence."""
    incoming = {name.lower(): value for name, value in _incoming_headers().items()}
    found = {name.lower(): incoming[name.lower()] for name in names if name.lower() in incoming}
    allowed = {name.lower() for name in names}
    # A propagator also adds baggage, which may identify the user. Only named headers are sent.
    return found | {name: value for name, value in _of_current_span().items() if name.lower() in allowed}


def _incoming_headers() -> Mapping[str, str]:
    """Return the headers of the innermost `propagate_headers` block or web request."""
    given, caller = _incoming.get(), current_caller.get()
    if given is not None and given[1] is caller:
        return given[0]
    of_request: Mapping[str, str] | None = getattr(caller, "headers", None)
    return of_request if of_request is not None else given[0] if given is not None else {}


def _of_current_span() -> dict[str, str]:
    # A program that uses tracing has already imported OpenTelemetry; other programs may not have it installed.
    if "opentelemetry.trace" not in sys.modules:
        return {}
    carrier: dict[str, str] = {}
    importlib.import_module("opentelemetry.propagate").inject(carrier)
    return carrier
