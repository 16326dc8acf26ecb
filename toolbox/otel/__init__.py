"""OpenTelemetry traces and metrics of AI services (extra `otel`), by the conventions for generative AI."""

from __future__ import annotations

try:
    import opentelemetry.trace as _  # noqa: F401 - is it installed?
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        "toolbox.otel needs OpenTelemetry; install it with: pip install 'toolbox-di[otel]'", name=_error.name
    ) from None

from .listener import OpenTelemetryListener

__all__ = ["OpenTelemetryListener"]
