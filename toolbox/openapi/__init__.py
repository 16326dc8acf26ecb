"""Tools from a published OpenAPI document (extra `openapi`): a specification and an executor per operation."""

from __future__ import annotations

from .document_reading import Operation  # noqa: F401 - for the annotations of `include` functions
from .operation_tools import tools_from_openapi

__all__ = ["tools_from_openapi"]
