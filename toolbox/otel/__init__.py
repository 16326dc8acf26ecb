"""Traces and metrics by OpenTelemetry (extra `otel`): a listener that follows the conventions for generative AI."""

from __future__ import annotations

try:
    import opentelemetry.trace as _  # noqa: F401 - whether it is there
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        "toolbox.otel needs OpenTelemetry; install it with: pip install 'toolbox-di[otel]'", name=_error.name
    ) from None

from .listener import OpenTelemetryListener

__all__ = ["OpenTelemetryListener"]
