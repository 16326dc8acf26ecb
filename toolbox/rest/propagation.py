"""Headers that travel with a request through the services it reaches: trace headers, and what else settings name.

Not here: who knows the incoming request (a web framework's adapter), spans (a tracing library).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_incoming: ContextVar[Mapping[str, str] | None] = ContextVar("toolbox.rest.incoming", default=None)


@contextmanager
def propagate_headers(headers: Mapping[str, str]) -> Iterator[None]:
    """Offers the headers of an incoming request to the REST clients used inside.

    Each takes those that its settings name (`propagate_headers`), by default `traceparent` and `tracestate`; this goes
    for the headers of the current OpenTelemetry span as well.
    """
    token = _incoming.set(headers)  # read when a request is sent: most incoming ones lead to none
    try:
        yield
    finally:
        _incoming.reset(token)


def propagated_headers(names: tuple[str, ...]) -> dict[str, str]:
    """The headers of these names that the current request should carry; the current span's own come first."""
    incoming = {name.lower(): value for name, value in (_incoming.get() or {}).items()}
    found = {name.lower(): incoming[name.lower()] for name in names if name.lower() in incoming}
    allowed = {name.lower() for name in names}
    # A propagator adds what it knows, baggage too, which may say who the user is: only what is named goes out.
    return found | {name: value for name, value in _of_current_span().items() if name.lower() in allowed}


def _of_current_span() -> dict[str, str]:
    # A program that traces has loaded OpenTelemetry itself; one that does not need not have it.
    if "opentelemetry.trace" not in sys.modules:
        return {}
    carrier: dict[str, str] = {}
    importlib.import_module("opentelemetry.propagate").inject(carrier)
    return carrier
