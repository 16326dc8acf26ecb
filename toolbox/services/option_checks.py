"""Checks the options of a service, such as `timeout` and `model`.

Not here: the options themselves and the error handlers of a class (`declaration`), tool providers (`declared_sources`),
`tool_choice`, which depends on the tools of a method (`planning`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor

from ..bean_references import BeanReference
from ..chat import REASONING, ToolSpecification
from ..conversations.views import as_view
from ..errors import Problem
from ..introspection import is_count, is_number, takes
from ..limits import UsageLimits
from ..models.routing import router_in
from ..service_names import invalid_name_problems
from ..tools.failures import ToolErrors
from .declaration import Default, Retries, ServiceOptions
from .templates import parse

_LEAST = {
    "max_tool_rounds": 0,
    "max_tool_calls_per_response": 0,
    "max_output_retries": 0,
    "max_result_chars": 1,
    "passages_chars": 1,
}
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
    if options.on_limit not in ("raise", "answer"):
        yield Problem(where, f"invalid on_limit={options.on_limit!r}", 'use "raise" or "answer"')
    if options.on_unknown_outcome not in ("tell", "ask", "retry"):
        fact = f"invalid on_unknown_outcome={options.on_unknown_outcome!r}"
        yield Problem(where, fact, 'use "tell", "ask" or "retry"')
    yield from invalid_name_problems(where, options.name, options.former_names)
    yield from _retries_problems(where, options)
    yield from _passages_problems(where, options.passages_prompt)
    if not isinstance(options.durable, bool):
        yield Problem(where, f"invalid durable={options.durable!r}", "use True or False")
    for name in ("compensate_on_tool_errors", "compensate_on_failure", "inner_events"):
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
    yield from handler_problems(where, options)


def handler_problems(where: str, handlers: ServiceOptions | ToolErrors) -> Iterator[Problem]:
    """Yield a problem for each error handler that cannot be called with an error and the context."""
    for name in _HANDLERS:
        handler = getattr(handlers, name)
        if handler is not None and not takes(handler, 2):
            yield Problem(
                where, f"invalid {name}={handler!r}", "use a function that takes the error and the InvocationContext"
            )


def options_with_logs(options: ServiceOptions) -> Iterator[str]:
    """Yield the options that need a store which keeps the whole log of a conversation."""
    used = {
        'on_suspended="continue"': options.on_suspended == "continue",
        "shared_conversations=True": options.shared_conversations is True,
        'when_busy="raise"': options.when_busy == "raise",
        "former_names=": bool(options.former_names),
    }
    yield from (name for name, is_used in used.items() if is_used)


def log_problem(where: str, option: str, store: type[object]) -> Problem:
    """Return the problem of such an option with a store that only keeps messages."""
    fact = f"{option} needs a store with logs, and {store.__name__} has only the three methods of ChatMemoryStore"
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


def _passages_problems(where: str, prompt: object) -> Iterator[Problem]:
    """Yield problems of `passages_prompt=`."""
    if prompt is None:
        return
    fix = 'use a text with {passages}, such as "Answer from these passages only:\\n{passages}", or None'
    if not isinstance(prompt, str):
        yield Problem(where, f"invalid passages_prompt={prompt!r}", fix)
        return
    template, faults = parse(prompt)
    for fault in faults:
        yield Problem(where, f"passages_prompt has {fault}", "write {{ or }} for a brace")
    for name in sorted(template.variables - {"passages"}):
        yield Problem(where, f"passages_prompt uses unknown parameter {{{name}}}", "use {passages} only")
    if "passages" not in template.variables:
        yield Problem(where, "passages_prompt has no {passages}", fix)


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


def choice_problems(
    where: str, options: ServiceOptions, names: Sequence[str], *, has_providers: bool
) -> Iterator[Problem]:
    """Yield a problem for a `tool_choice=` that no tool of a method has; `names` are those of its tools."""
    choice = options.tool_choice
    if choice is None or choice in {*names, "auto", "none"} or has_providers:
        return
    if options.parameters.get("tools") and choice in ("required", "any"):
        return  # for tools of the server
    if not names:
        fact, fix = "the method offers no tools", "list tools in tools= or @toolbox(…), or remove tool_choice"
        yield Problem(where, f"invalid tool_choice={choice!r}: {fact}", fix)
    elif choice not in ("required", "any"):
        offered = ", ".join(repr(name) for name in names)
        fact, fix = "no tool of this name is offered", f'use one of: {offered}, "required", "auto", "none"'
        yield Problem(where, f"invalid tool_choice={choice!r}: {fact}", fix)
