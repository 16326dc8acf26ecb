"""Checks the options of a service, such as `timeout` and `model`.

Not here: the options themselves and the error handlers of a class (`declaration`), tool providers (`declared_sources`),
`tool_choice`, which depends on the tools of a method (`planning`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor

from ..bean_references import BeanReference
from ..chat import REASONING, ToolSpecification
from ..conversations.views import as_view
from ..errors import Problem
from ..introspection import is_count, is_number, takes
from ..limits import UsageLimits
from ..models.routing import router_in
from ..service_names import invalid_name_problems
from .declaration import Default, Retries, ServiceOptions

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
        if not is_count(value, least):
            yield Problem(where, f"invalid {name}={value!r}", f"use {least} or more")
    timeout = options.timeout
    open_ended = timeout is None or isinstance(timeout, Default)
    if not open_ended and not (is_number(timeout) and timeout > 0):
        yield Problem(where, f"invalid timeout={timeout!r}", "use a number of seconds greater than 0, or None")
    if options.temperature is not None and not is_number(options.temperature):
        yield Problem(where, f"invalid temperature={options.temperature!r}", "use a number, or None")
    if options.output_mode not in (None, "schema", "tool", "prompt"):
        yield Problem(where, f"invalid output_mode={options.output_mode!r}", 'use "schema", "tool", "prompt" or None')
    if options.reasoning not in (None, *REASONING):
        fix = f"use one of: {', '.join(REASONING)}; or None"
        yield Problem(where, f"invalid reasoning={options.reasoning!r}", fix)
    if options.on_suspended not in ("raise", "cancel", "continue"):
        fix = 'use "raise", "cancel" or "continue"'
        yield Problem(where, f"invalid on_suspended={options.on_suspended!r}", fix)
    if options.when_busy not in ("wait", "raise"):
        yield Problem(where, f"invalid when_busy={options.when_busy!r}", 'use "wait" or "raise"')
    if not isinstance(options.shared_conversations, bool):
        fact = f"invalid shared_conversations={options.shared_conversations!r}"
        yield Problem(where, fact, "use True or False")
    if options.unfinished_turns not in ("keep", "discard"):
        yield Problem(where, f"invalid unfinished_turns={options.unfinished_turns!r}", 'use "keep" or "discard"')
    if options.on_unknown_outcome not in ("tell", "ask", "retry"):
        fact = f"invalid on_unknown_outcome={options.on_unknown_outcome!r}"
        yield Problem(where, fact, 'use "tell", "ask" or "retry"')
    yield from invalid_name_problems(where, options.name, options.former_names)
    yield from _retries_problems(where, options)
    if not isinstance(options.durable, bool):
        yield Problem(where, f"invalid durable={options.durable!r}", "use True or False")
    for name in ("compensate_on_tool_errors", "compensate_on_failure"):
        if not isinstance(getattr(options, name), bool):
            yield Problem(where, f"invalid {name}={getattr(options, name)!r}", "use True or False")
    if not isinstance(options.concurrent_tools, (bool, Executor)):
        yield Problem(where, f"invalid concurrent_tools={options.concurrent_tools!r}", "use True, False or an Executor")
    if options.model == "" or not (options.model is None or isinstance(options.model, str) or router_in(options.model)):
        fix = "use the name of a model, and pass the model to the container: Container(models={name: …})"
        yield Problem(where, f"invalid model={options.model!r}", fix)
    if options.chat_memory is not None and not isinstance(options.chat_memory, Default):
        for what, fix in as_view(options.chat_memory).problems():
            yield Problem(where, f"chat_memory: {what}", fix)
    if options.limits is not None and not isinstance(options.limits, UsageLimits):
        yield Problem(where, f"invalid limits={options.limits!r}", "use UsageLimits(…) or None")
    if not isinstance(options.parameters, Mapping):
        yield Problem(
            where, f"invalid parameters={options.parameters!r}", "use a mapping, with the names of the server's API"
        )
    for name in _HANDLERS:
        handler = getattr(options, name)
        if handler is not None and not takes(handler, 2):
            yield Problem(
                where, f"invalid {name}={handler!r}", "use a function that takes the error and the InvocationContext"
            )


def options_with_logs(options: ServiceOptions) -> Iterator[str]:
    """Yield the options that need a store which keeps the whole log of a conversation."""
    if options.shared_conversations is True:
        yield "shared_conversations=True"
    if options.when_busy == "raise":
        yield 'when_busy="raise"'
    if options.on_suspended == "continue":
        yield 'on_suspended="continue"'
    if options.former_names:
        yield "former_names="


def log_problem(where: str, option: str, store: str) -> Problem:
    """Return the problem of such an option with a store that only keeps messages."""
    fact = f"{option} needs a store with logs, and {store} has only the three methods of ChatMemoryStore"
    return Problem(where, fact, "use InMemoryChatMemoryStore, sql.SqlChatMemoryStore or redis.RedisChatMemoryStore")


def _retries_problems(where: str, options: ServiceOptions) -> Iterator[Problem]:
    """Yield problems of `run_retries=`."""
    if options.run_retries is None:
        return
    if not isinstance(options.run_retries, Retries):
        fix = "use Retries(attempts=…, wait=…) (from toolbox.runs), or None"
        yield Problem(where, f"invalid run_retries={options.run_retries!r}", fix)
    elif options.compensate_on_failure is True:
        fact = "run_retries= goes on after a failure, but compensate_on_failure=True undoes the tools then"
        yield Problem(where, fact, "use one of them")


def search_problems(where: str, options: ServiceOptions) -> Iterator[Problem]:
    """Yield problems with the strategy of the tool search."""
    strategy = options.tool_search
    if strategy is None:
        return
    named = BeanReference.to(strategy)
    if not takes(
        getattr(strategy if named.bean is None else named.type, "search", None), 1 if named.bean is None else 2
    ):
        name = getattr(strategy, "__name__", None) or repr(strategy)
        fix = "use KeywordToolSearch(), Bm25ToolSearch(), or a class or instance of ToolSearchStrategy"
        yield Problem(where, f"invalid tool_search={name}: it is not a ToolSearchStrategy", fix)
    elif named.bean is None and not isinstance(getattr(strategy, "specification", None), ToolSpecification):
        fix = "set `specification` to the ToolSpecification of the search tool"
        yield Problem(where, f"the tool_search {type(strategy).__name__} has no specification", fix)
