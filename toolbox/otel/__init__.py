"""OpenTelemetry traces and metrics of AI services (extra `otel`), by the conventions for generative AI.

Not here: log records (`logs`).
"""

from __future__ import annotations

try:
    import opentelemetry.trace as _  # noqa: F401 - is it installed?
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        "toolbox.otel needs OpenTelemetry; install it with: pip install 'toolbox-di[otel]'", name=_error.name
    ) from None

from .span_listener import OpenTelemetryListener

__all__ = ["OpenTelemetryListener"]
