"""Makes the messages of a call from its arguments: the user message, the system message, and the given history.

Not here: reading templates (`plans`), the messages of a conversation (`memory`), what follows in the call (`loop`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..chat import CONTENT_TYPES, Message, SystemMessage, UserMessage
from ..context import ActiveScope, InvocationContext
from ..execution.markers import BLOCKING, COROUTINE, is_async
from ..execution.runners import Runner
from .bean_calls import find_beans
from .plans import FunctionMessage, MethodPlan, Template, text_of


def make_user_message(plan: MethodPlan, arguments: Mapping[str, Any]) -> UserMessage:
    """Return the user message of a call. Raises `TypeError` if it is None."""
    if plan.continues_history:
        return last_user_message(read_history(plan, arguments))
    given = arguments[plan.user_parameter] if plan.user is None and plan.user_parameter is not None else None
    if isinstance(given, str) and not plan.contents:
        return UserMessage(given)
    contents: list[Any] = []
    if plan.user is not None:
        contents.append(plan.user.render(_template_values(plan, arguments)))
    for name in plan.spoken:
        value = arguments[name]
        if name == plan.user_parameter:
            contents += UserMessage(_user_contents(plan, value)).contents
        elif value is not None:
            contents += UserMessage(value).contents
    if isinstance(given, UserMessage):
        return UserMessage(contents, given.name, given.attributes)
    return UserMessage(contents)


def last_user_message(messages: Sequence[Message]) -> UserMessage:
    """Return the last user message; an empty one if there is none."""
    return next((each for each in reversed(messages) if isinstance(each, UserMessage)), UserMessage(()))


def read_history(plan: MethodPlan, arguments: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the messages in the arguments of a call."""
    return tuple(each for name in plan.history for each in arguments[name] or ())


async def make_system_message(
    plan: MethodPlan, arguments: Mapping[str, Any], context: InvocationContext, scope: ActiveScope, runner: Runner
) -> SystemMessage | None:
    """Return the system message of a call. Raises what the method's function raises, and `TypeError` for no text."""
    match plan.system:
        case Template() as template:
            return SystemMessage(template.render(_template_values(plan, arguments)))
        case FunctionMessage(function) as message:
            beans = await find_beans(message.injected, scope)
            kind = COROUTINE if is_async(function) else BLOCKING
            text = await runner.run(kind, lambda: function(context, **beans), plan.where)
            if not isinstance(text, str):
                returned = type(text).__name__
                raise TypeError(f"the system message function of {plan.where} returned {returned}, not str")
            return SystemMessage(text)
    return None


def _template_values(plan: MethodPlan, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: arguments[parameter] for name, parameter in plan.values.items()}


def _user_contents(plan: MethodPlan, value: object) -> Any:
    match value:
        case UserMessage(contents):
            return contents
        case None if plan.contents:
            return ()
        case None:
            where = f"{plan.where}(): {plan.user_parameter}"
            raise TypeError(f"{where} is the user message and must not be None")
        case other if isinstance(other, (str, list, tuple, *CONTENT_TYPES)):
            return other
        case other:
            return text_of(other)
