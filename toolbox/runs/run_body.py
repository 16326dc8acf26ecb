"""What a run asks of its body: the Protocol `RunBody`; and `PreparedRun`, a run whose body this program has.

A body is what a run executes. A call of a service is the first kind, in the package `service_calls`, which alone knows
services. A second kind is a second package with a `RunBody`; `Runs` puts together which body the header of a run names.
Not here: making a new run, which each kind does itself and hands to `new_runs`; effects, which a body makes with
`effects`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

from ..chat import UserMessage
from ..conversations.keys import ChatMemoryKey
from ..conversations.log import Turn
from ..service_events import ServiceEvent, ServiceWork
from ..services.outputs import Result
from .documents import RunDocument, WaitingCall
from .run_answers import Answer
from .run_session import RunSession
from .store import StoredRun

SendEvent: TypeAlias = Callable[[ServiceEvent], Awaitable[None]]
"""Takes an event of a run, and waits until its reader has room."""

ShowWork: TypeAlias = Callable[[ServiceWork], None]
"""Takes what services within a run do, for front ends."""


class RunBody(Protocol):
    """A method of the program that can be a run. It keeps nothing: what a run was asked is in its `PreparedRun`."""

    # --- what it is

    @property
    def waits_in_conversation(self) -> bool:
        """True if its conversation goes on while a run is suspended, with an entry for the turn that waits."""
        ...

    def conversation_of(self, arguments: Mapping[str, Any], /) -> ChatMemoryKey | None:
        """Return the conversation of a run with these arguments; None without one."""
        ...

    def wait_after(self, failures: int, /) -> timedelta | None:
        """Return the time until a run that has failed so often is tried again; None if it has failed for good."""
        ...

    # --- a run that continues

    def restore(self, run_id: str, document: RunDocument, /) -> Mapping[str, Any]:
        """Return the arguments of a stored run. Raises `RunIncompatibleError` if it does not fit this program."""
        ...

    def refuse(self, prepared: PreparedRun, /) -> None:
        """Raise `ForbiddenError` if the identity of a run may no longer do what the run does."""
        ...

    async def execute(
        self, session: RunSession, prepared: PreparedRun, send: SendEvent | None, show: ShowWork | None, /
    ) -> tuple[Result[Any], Mapping[str, Any] | None]:
        """Execute a run in its open scope, from its records on, or undo its effects if its document `cancels`.

        Returns its result, and what the document of a completed run has; None in place of that if it is suspended.
        `send` gets its events. Raises the errors that end the run.
        """
        ...

    # --- what is read of a stored run

    def question(self, run_id: str, prepared: PreparedRun, /) -> UserMessage:
        """Return what the user has asked. Raises `RunIncompatibleError`."""
        ...

    async def read_result(self, stored: StoredRun, document: RunDocument, /) -> Result[Any] | None:
        """Return the result of a completed or suspended run; None if the run has changed since it was read.

        Raises `RunIncompatibleError`.
        """
        ...

    def value_of(self, result: Result[Any], /) -> Any:
        """Return what the caller of the method gets of a result."""
        ...

    async def read_turn(self, stored: StoredRun, document: RunDocument, /) -> tuple[ChatMemoryKey, Turn] | None:
        """Return the turn that a run leaves in its conversation if it is cancelled now; None if it leaves none."""
        ...

    # --- what persons send to it

    def find_rules(self, run_id: str, prepared: PreparedRun, waiting: WaitingCall, /) -> tuple[tuple[str, ...], bool]:
        """Return who may answer a pending call, as this program says: the roles, and if its starter may not."""
        ...

    async def check_answer(
        self, stored: StoredRun, prepared: PreparedRun, waiting: WaitingCall, answer: Answer, /
    ) -> Answer:
        """Return an answer as it is stored. Raises `RunAnswerError` if what it contains is invalid for the call."""
        ...

    async def check_message(
        self, stored: StoredRun, prepared: PreparedRun, message: UserMessage, by: Any, /
    ) -> UserMessage:
        """Return a message that the user adds to a run, as the run reads it. Raises an error to refuse it."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that fits this program: its body, and its arguments and seeds as they are read from its document.

    `identity` is the one under which it is executed; None until it is admitted. `is_without_user` is True if the run
    has a user, but no person makes it go on. `before` is an ended run that goes on: it ends as it was if it turns out
    not to fit this program.
    """

    body: RunBody
    arguments: Mapping[str, Any]
    seeds: Mapping[Any, Any]
    document: RunDocument
    identity: Any = None
    is_without_user: bool = False
    before: StoredRun | None = None

    @property
    def conversation(self) -> ChatMemoryKey | None:
        """The conversation of the run; None without one."""
        return self.body.conversation_of(self.arguments)
