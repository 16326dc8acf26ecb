"""Calls a function of the program with its `Inject[…]` parameters, outside of tools.

Not here: reading the parameters (`tools.tool_calls`), calling a tool (`tools.function_calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..context import ActiveScope
from ..errors import IllegalConfigurationError
from ..execution.markers import marked_execution
from ..execution.runners import Runner
from ..tools.tool_calls import InjectedParameter, read_injected


async def call_with_beans(function: Callable[..., Any], where: str, scope: ActiveScope, runner: Runner) -> Any:
    """Call a function with its `Inject[…]` parameters, where a tool would run. See `current_bean_caller`.

    Raises `IllegalConfigurationError` for parameters that cannot be injected.
    """
    injected, problems = read_injected(function, where)
    if problems:
        raise IllegalConfigurationError(problems)
    beans = await find_beans(injected, scope)
    return await runner.run(marked_execution(function), lambda: function(**beans), where)


async def find_beans(injected: Iterable[InjectedParameter], scope: ActiveScope) -> dict[str, Any]:
    beans: dict[str, Any] = {}
    for each in injected:
        if not each.optional:
            beans[each.name] = await scope.aget(each.wanted)
        elif (bean := await scope.find(each.wanted)) is not None:
            beans[each.name] = bean
    return beans
