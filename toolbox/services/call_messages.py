"""What the messages of a method are made of, and those of a call: user and system message, and a given history.

Not here: the roles of parameters (`parameter_roles`), the messages of a conversation (`memory`), what follows in the
call (`loop`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..chat import CONTENT_TYPES, Message, SystemMessage, ToolExecutionResultMessage, UserMessage, check_messages
from ..context import ActiveScope, InvocationContext
from ..execution.markers import marked_execution
from ..execution.runners import Runner
from ..tools.tool_calls import InjectedParameter
from .bean_calls import find_beans
from .declaration import MessageFunction
from .templates import Template, text_of


@dataclass(frozen=True, slots=True)
class FunctionMessage:
    """A system message that a function creates; `injected` are its parameters after the context."""

    function: MessageFunction
    injected: tuple[InjectedParameter, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodMessages:
    """What the messages of a method are made of: its templates, and its parameters by role.

    `user` is the template of the user message; without one, `user_parameter` is the message. `values` has the parameter
    of each variable of the templates. `history` are the parameters with messages, `contents` those with images and
    other contents, and `spoken` those of `contents` and the user message in their order. `where` names the method.
    With `continues_history`, the messages of a parameter are all that is sent, without a user message.
    """

    where: str
    system: Template | FunctionMessage | None
    user: Template | None
    user_parameter: str | None
    values: Mapping[str, str]
    history: tuple[str, ...]
    contents: tuple[str, ...]
    spoken: tuple[str, ...]
    continues_history: bool = field(init=False)

    def __post_init__(self) -> None:
        """Find out whether the history is all that is sent."""
        continues = bool(self.history) and self.user is None and not self.spoken
        object.__setattr__(self, "continues_history", continues)

    def check_history(self, arguments: Mapping[str, Any]) -> None:
        """Raise `TypeError` for anything but lists of messages.

        Raises `ValueError` for a history that is sent alone and that a model cannot answer.
        """
        for name in self.history:
            if (given := arguments[name]) is not None:
                check_messages(given, f"{self.where}(), parameter {name}")
        if not self.continues_history:
            return
        last = next((given[-1] for name in reversed(self.history) if (given := arguments[name])), None)
        if not isinstance(last, (UserMessage, ToolExecutionResultMessage)):
            found = "nothing" if last is None else f"{type(last).__name__}"
            needed = "must end with a UserMessage or a ToolExecutionResultMessage"
            raise ValueError(f"{self.where}(): {self.history[-1]} {needed}, but ends with {found}")

    def read_history(self, arguments: Mapping[str, Any]) -> tuple[Message, ...]:
        """Return the messages in the arguments of a call."""
        return tuple(each for name in self.history for each in arguments[name] or ())

    def make_user_message(self, arguments: Mapping[str, Any]) -> UserMessage:
        """Return the user message of a call. Raises `TypeError` if it is None."""
        if self.continues_history:
            return last_user_message(self.read_history(arguments))
        given = arguments[self.user_parameter] if self.user is None and self.user_parameter is not None else None
        if isinstance(given, str) and not self.contents:
            return UserMessage(given)
        contents: list[Any] = []
        if self.user is not None:
            contents.append(self.user.render(self._template_values(arguments)))
        for name in self.spoken:
            value = arguments[name]
            if name == self.user_parameter:
                contents += UserMessage(self._user_contents(value)).contents
            elif value is not None:
                contents += UserMessage(value).contents
        if isinstance(given, UserMessage):
            return UserMessage(contents, given.name, given.attributes)
        return UserMessage(contents)

    async def make_system_message(
        self, arguments: Mapping[str, Any], context: InvocationContext, scope: ActiveScope, runner: Runner
    ) -> SystemMessage | None:
        """Return the system message of a call. Raises what its function raises, and `TypeError` for no text."""
        match self.system:
            case Template() as template:
                return SystemMessage(template.render(self._template_values(arguments)))
            case FunctionMessage(function) as message:
                beans = await find_beans(message.injected, scope)
                text = await runner.run(marked_execution(function), lambda: function(context, **beans), self.where)
                if not isinstance(text, str):
                    returned = type(text).__name__
                    raise TypeError(f"the system message function of {self.where} returned {returned}, not str")
                return SystemMessage(text)
        return None

    def _template_values(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {name: arguments[parameter] for name, parameter in self.values.items()}

    def _user_contents(self, value: object) -> Any:
        match value:
            case UserMessage(contents):
                return contents
            case None if self.contents:
                return ()
            case None:
                where = f"{self.where}(): {self.user_parameter}"
                raise TypeError(f"{where} is the user message and must not be None")
            case other if isinstance(other, (str, list, tuple, *CONTENT_TYPES)):
                return other
            case other:
                return text_of(other)


def last_user_message(messages: Sequence[Message]) -> UserMessage:
    """Return the last user message; an empty one if there is none."""
    return next((each for each in reversed(messages) if isinstance(each, UserMessage)), UserMessage(()))
