"""`RetryOnError`, the ready-made interceptor that calls a failed tool again (stamina).

Not here: retries of REST clients (`rest.exchange`) and of models (`models`).
"""

from __future__ import annotations

import logging
from typing import ClassVar

import stamina

from ..chat import ToolExecutionResult
from ..errors import (
    EndsInvocation,
    InputGuardrailError,
    OutputGuardrailError,
    RunCancelledError,
    ToolCallsLimitExceededError,
    ToolDeferred,
    ToolRetry,
    ToolRoundsExceededError,
)
from ..introspection import is_count, is_number
from .interception import ToolInterceptor, ToolInvocation, ToolProceed

logger = logging.getLogger("toolbox.interceptors")

_NEVER = (
    EndsInvocation,  # framework errors, limits, suspension, `ToolAbort`, tool guardrails
    ToolRetry,
    ToolDeferred,
    InputGuardrailError,
    OutputGuardrailError,
    ToolRoundsExceededError,
    ToolCallsLimitExceededError,
    RunCancelledError,
)


class RetryOnError(ToolInterceptor):
    """Calls a tool again if it raises one of the errors `on`.

        @tool
        @interceptors(RetryOnError(attempts=5, on=(ConnectionError, TimeoutError)))
        async def stock(article: str) -> int: ...

    `attempts` include the first call. The wait before the second call is `wait_initial` seconds, doubles from call to
    call up to `wait_max`, and has up to `wait_initial` seconds at random added. The last error is raised.

    It never retries on `ToolRetry` and `ToolAbort`, refusals of guardrails, limits, suspended or cancelled calls, and
    framework errors. It is the innermost interceptor, wherever it is named: other interceptors see one call, and a
    durable run records one. Raises `ValueError` or `TypeError` for invalid arguments.
    """

    __toolbox_innermost__: ClassVar[bool] = True

    def __init__(
        self,
        attempts: int = 3,
        on: type[Exception] | tuple[type[Exception], ...] = (Exception,),
        wait_initial: float = 0.1,
        wait_max: float = 5.0,
    ) -> None:
        kinds = on if isinstance(on, tuple) else (on,)
        if not kinds or not all(isinstance(each, type) and issubclass(each, Exception) for each in kinds):
            raise TypeError(
                f"RetryOnError: invalid on={on!r}; use a tuple of exception classes, such as (ConnectionError,)"
            )
        if not is_count(attempts, 1):
            raise ValueError(f"RetryOnError: invalid attempts={attempts!r}; use a whole number of 1 or more")
        if not (is_number(wait_initial) and is_number(wait_max) and 0 <= wait_initial <= wait_max):
            raise ValueError(
                f"RetryOnError: invalid wait_initial={wait_initial!r}, wait_max={wait_max!r}; use seconds, "
                "with 0 <= wait_initial <= wait_max"
            )
        self.attempts, self.on, self.wait_initial, self.wait_max = attempts, kinds, wait_initial, wait_max

    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        """Return the result of the first call that raises none of these errors."""
        failures = 0

        def should_retry(error: Exception) -> bool:
            nonlocal failures
            failures += 1
            if not self._is_retried(error):
                return False
            if failures < self.attempts:
                text = "tool %r raised %s and is called again (attempt %d of %d failed)"
                logger.info(text, call.specification.name, type(error).__name__, failures, self.attempts)
            return True

        async for attempt in stamina.retry_context(
            should_retry,
            attempts=self.attempts,
            timeout=None,
            wait_initial=self.wait_initial,
            wait_max=self.wait_max,
            wait_jitter=self.wait_initial,
        ):
            with attempt:
                return await proceed(call)
        raise AssertionError("the last attempt returns or raises")

    def _is_retried(self, error: Exception) -> bool:
        if isinstance(error, _NEVER) or (isinstance(error, ExceptionGroup) and error.subgroup(_NEVER) is not None):
            return False
        return isinstance(error, self.on)
