"""Creates tools from a published OpenAPI document (extra `openapi`)."""

from __future__ import annotations

from .operations import tools_from_openapi

__all__ = ["tools_from_openapi"]
