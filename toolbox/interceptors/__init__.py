"""Interceptors: code around tool calls and model requests.

They are beans: named by `@interceptors` at a service, a method or a tool, or global with `@global_interceptor`.
`RetryOnError` is ready to use. Not here: guardrails, which accept or refuse (`guardrails`).
"""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use
from ..request_hooks import before_model_request
from .interception import (
    ModelInterceptor,
    ModelInvocation,
    ModelProceed,
    ToolInterceptor,
    ToolInvocation,
    ToolProceed,
    global_interceptor,
    interceptors,
)

if TYPE_CHECKING:
    from .retries import RetryOnError

__getattr__, __dir__ = names_on_first_use(__name__, {".retries": "RetryOnError"})

__all__ = [
    "ModelInterceptor",
    "ModelInvocation",
    "ModelProceed",
    "RetryOnError",
    "ToolInterceptor",
    "ToolInvocation",
    "ToolProceed",
    "before_model_request",
    "global_interceptor",
    "interceptors",
]
