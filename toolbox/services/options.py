"""Checks the values of a service's options.

Not here: the options (`declaration`), their effect on a method (`planning`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor

from ..chat import REASONING
from ..errors import Problem
from ..signatures import takes
from .declaration import Default, ServiceOptions
from .memory import MessageWindow, TokenWindow

_LEAST = {"max_tool_rounds": 0, "max_tool_calls_per_response": 0, "max_output_retries": 0, "max_result_chars": 1}
_HANDLERS = ("on_unknown_tool", "on_tool_arguments_error", "on_tool_execution_error")


def option_problems(where: str, options: ServiceOptions) -> Iterator[Problem]:
    """Yield a problem for each invalid option."""
    for name, least in _LEAST.items():
        value = getattr(options, name)
        if isinstance(value, Default):
            continue
        if value is None and name in ("max_tool_calls_per_response", "max_result_chars"):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            yield Problem(where, f"{name} is {value!r}", f"use {least} or more")
    timeout = options.timeout
    open_ended = timeout is None or isinstance(timeout, Default)
    if not open_ended and not (isinstance(timeout, (int, float)) and timeout > 0):
        yield Problem(where, f"timeout is {timeout!r}", "use a number of seconds greater than 0, or None")
    if options.output_mode not in (None, "schema", "tool", "prompt"):
        yield Problem(where, f"output_mode is {options.output_mode!r}", 'use "schema", "tool", "prompt" or None')
    if options.reasoning not in (None, *REASONING):
        fix = f"use one of: {', '.join(REASONING)}; or None"
        yield Problem(where, f"reasoning is {options.reasoning!r}", fix)
    if not isinstance(options.concurrent_tools, (bool, Executor)):
        yield Problem(where, f"concurrent_tools is {options.concurrent_tools!r}", "use True, False or an Executor")
    if options.model is not None and not isinstance(options.model, str):
        fix = "use the name of a model, and pass the model to the container: Container(models={name: …})"
        yield Problem(where, f"model is {options.model!r}", fix)
    window = options.chat_memory
    if window is not None and not isinstance(window, Default) and not callable(getattr(window, "newest", None)):
        yield Problem(where, f"chat_memory is {window!r}", "use MessageWindow(…), TokenWindow(…) or None")
    elif isinstance(window, (MessageWindow, TokenWindow)) and not (isinstance(window.limit, int) and window.limit > 0):
        yield Problem(where, f"chat_memory is a {type(window).__name__} of {window.limit!r}", "use 1 or more")
    if not isinstance(options.parameters, Mapping):
        yield Problem(
            where, f"parameters is {options.parameters!r}", "use a mapping, with the names of the server's API"
        )
    for name in _HANDLERS:
        handler = getattr(options, name)
        if handler is not None and not takes(handler, 2):
            yield Problem(
                where, f"{name} is {handler!r}", "use a function that takes the error and the InvocationContext"
            )
