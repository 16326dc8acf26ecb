"""The messages that begin a call: what the user says, and what the model is told of its task.

Not here: parsing and rendering templates (`templates`), what has been said before (`memory`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..chat import CONTENT_TYPES, Content, SystemMessage, UserMessage
from ..context import InvocationContext
from ..errors import MissingBeanError
from ..execution import BLOCKING, COROUTINE, Runner, is_async
from .host import ServiceHost
from .plans import FunctionMessage, MethodPlan
from .templates import Template, text_of


def _values(plan: MethodPlan, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: arguments[parameter] for name, parameter in plan.values.items()}


def user_message_of(plan: MethodPlan, arguments: Mapping[str, Any]) -> UserMessage:
    """What the user says in this call. Raises `TypeError` when that is None."""
    contents: list[Any] = []
    if plan.user is not None:
        contents.append(plan.user.render(_values(plan, arguments)))
    elif plan.user_parameter is not None:
        contents += _said(plan, arguments[plan.user_parameter])
    for name in plan.contents:
        value = arguments[name]
        if value is not None:
            contents += UserMessage(value).contents
    said = arguments[plan.user_parameter] if plan.user is None and plan.user_parameter is not None else None
    if isinstance(said, UserMessage):
        return UserMessage(contents, said.name, said.attributes)
    return UserMessage(contents)


def _said(plan: MethodPlan, value: object) -> Sequence[Content]:
    match value:
        case UserMessage(contents):
            return contents
        case None if plan.contents:
            return ()
        case None:
            raise TypeError(f"{plan.where}(): {plan.user_parameter} is what the user says, and is None")
        case other if isinstance(other, (str, list, tuple, *CONTENT_TYPES)):
            said: Any = other
            return UserMessage(said).contents
        case other:
            return UserMessage(text_of(other)).contents


async def system_message_of(
    plan: MethodPlan, arguments: Mapping[str, Any], host: ServiceHost, context: InvocationContext, runner: Runner
) -> SystemMessage | None:
    """What the model is told of its task in this call."""
    match plan.system:
        case None:
            return None
        case Template() as template:
            return SystemMessage(template.render(_values(plan, arguments)))
        case FunctionMessage(function) as message:
            beans = await _injected_into(message, host)
            kind = COROUTINE if is_async(function) else BLOCKING
            text = await runner.run(kind, lambda: function(context, **beans), plan.where)
            if not isinstance(text, str):
                returned = type(text).__name__
                raise TypeError(f"the system message function of {plan.where} returned {returned}, not str")
            return SystemMessage(text)


async def _injected_into(message: FunctionMessage, host: ServiceHost) -> dict[str, Any]:
    beans: dict[str, Any] = {}
    for each in message.injected:
        try:
            beans[each.name] = await host.scope.aget(each.wanted)
        except MissingBeanError:
            if not each.optional:
                raise
    return beans
