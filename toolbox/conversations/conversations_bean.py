"""`Conversations`: the conversations of a container for programs: listing, reading, changing and deleting them.

Not here: what a log is (`log`), its documented JSON (`log_forms`), one call in a conversation (`services.layers`).
"""

from __future__ import annotations

import builtins
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, TypeAlias, TypeVar

from ..chat import Message, TokenUsage
from ..errors import (
    ConversationNotFoundError,
    ConversationSuspendedError,
    IllegalConfigurationError,
    MemoryInUseError,
    Problem,
)
from ..introspection import checked_limit
from ..json_text import whole_characters
from ..safe_text import is_text
from ..security import AccessDeniedError, SecurityIdentity
from ..service_names import check_service
from ..store_clock import clock_of
from .keys import ChatMemoryKey, Owner, refuse_other
from .log import (
    Head,
    Log,
    LogEntry,
    LogWrite,
    RememberedApproval,
    Turn,
    begin_head,
    fork_log,
    newest_entries,
    without_approvals,
)
from .log_forms import export_log, restore_log
from .memories import DELETED, ChatMemories, MemoryHost, Program
from .stores import Deleted, LogStore, find_head, keeps_logs
from .views import ChosenView

T = TypeVar("T")

_AT_ONCE = 100  # conversations that `forget` finds with one query

_Check: TypeAlias = Callable[[Head | None], Head | None]
"""Raises `AccessDeniedError` if the head is that of another's conversation; returns it."""


class ConversationsHost(MemoryHost, Protocol):
    """Provides the conversations of a container, and what they need of its services, its callers and its runs."""

    run_identity: tuple[str, ...]

    async def caller(self) -> SecurityIdentity | None:
        """Return the identity that acts, which may be anonymous; None for the program itself."""
        ...

    def names_of(self, service: str | type[Any]) -> tuple[str, ...]:
        """Return all stored names of a service, the present one first."""
        ...

    def label_of(self, service: str) -> str:
        """Return the name of the class of a service, for error texts."""
        ...

    def view_of(self, service: str) -> ChosenView | None:
        """Return what `chat_memory=` of a service says, or the default."""
        ...

    def shares_conversations(self, service: str) -> bool:
        """Return True for a service with `shared_conversations=True`."""
        ...

    def find_charge(self, service: str, method: Any) -> str | None:
        """Return the name of a method that can be in charge of conversations of a service; None for all others."""
        ...

    async def stop_conversation(self, key: ChatMemoryKey, by: str | SecurityIdentity | None) -> bool:
        """End the call or the run of a conversation that is at work or waits. Returns False if there is none."""
        ...

    # --- runs

    @property
    def runs(self) -> Any:
        """The runs, `toolbox.runs.Runs`."""
        ...

    async def suspended_run(self, key: ChatMemoryKey) -> str | None:
        """Return the id of the suspended run of a conversation, or None."""
        ...

    async def run_of(self, key: ChatMemoryKey) -> Any:
        """Return the newest `Run` of a conversation that has not ended, or None."""
        ...

    async def forget_runs(
        self, *, owner: Owner | None = None, service: str | None = None, memory_id: str | None = None
    ) -> int:
        """Delete ended runs: those of a conversation, or those that an owner has started outside of conversations."""
        ...


@dataclass(frozen=True, slots=True)
class ConversationInfo:
    """A conversation in a list.

    - `service`: the stored name of the service. `memory_id`: the id as text.
    - `owner`: the name of the person whom it belongs to, or None. `title`: what the program has set, or None.
    - `updated_at` moves with each stored turn only; both times have a time zone.
    - `messages`: the number of entries of `history()`. `usage`: the tokens of all requests, also for summaries.
    - `cursor`: the place in the list, a text for `list(before=…)`.
    - `in_charge`: the method that answers the next call, such as `"Billing.chat"`; None where there are no hand-overs.
    """

    service: str
    memory_id: str
    owner: str | None
    title: str | None
    created_at: datetime
    updated_at: datetime
    messages: int
    usage: TokenUsage
    cursor: str
    in_charge: str | None = None


class Conversations:
    """The conversations of a container: a bean, and `container.conversations`.

        for each in await conversations.list(owner=user.name, limit=50):
            print(each.title, each.updated_at)
        room = conversations.of(Assistant, "room 7")
        entries = await room.history(limit=50)

    `service` is always the class of a service, or its stored name, also a former one. You can await all methods on any
    event loop. `list`, `forget`, `create` and `restore` check no owner: guard the endpoints that call them. Everything
    raises `IllegalConfigurationError` with a store of your own that has only the three methods of `ChatMemoryStore`.
    """

    def __init__(self, host: ConversationsHost) -> None:
        self._host = host

    def of(self, service: type[Any] | str, memory_id: object, *, operator: bool = False) -> Conversation:
        """Return one conversation, which need not exist.

        With `operator=True` its methods check no owner: guard the endpoint. Raises `InvalidMemoryIdError`.
        """
        return Conversation(self._host, self._key_of(service, memory_id), operator=operator)

    async def create(
        self,
        service: type[Any] | str,
        memory_id: object,
        owner: str | SecurityIdentity | None = None,
        title: str | None = None,
    ) -> Conversation:
        """Create a conversation before its first call, and return it.

        `owner` is an identity, or its name where `run_identity` names no attributes. Raises `ValueError` if the
        conversation exists, or for a name where there are such attributes, and `InvalidMemoryIdError`.
        """
        key, belongs_to, title = self._key_of(service, memory_id), self._owner(owner), _checked_title(title)
        await self._store_new(key, lambda now: Log(begin_head(key, now, belongs_to, title)))
        return Conversation(self._host, key)

    async def restore(
        self,
        service: type[Any] | str,
        memory_id: object,
        exported: Mapping[str, Any],
        owner: str | SecurityIdentity | None = None,
    ) -> Conversation:
        """Store what `export()` returned, or the same form from elsewhere, as a new conversation, and return it.

        `owner` is as in `create`; the owner in `exported` is not used. Raises `TranscriptError`, which is a
        `ValueError`, if `exported` does not have the form, `ValueError` if the conversation exists, and
        `InvalidMemoryIdError`.
        """
        key, belongs_to = self._key_of(service, memory_id), self._owner(owner)
        await self._store_new(key, lambda now: restore_log(key, exported, belongs_to, now))
        return Conversation(self._host, key)

    async def _store_new(self, key: ChatMemoryKey, make: Callable[[datetime], Log]) -> None:
        async def store() -> None:
            await _create(await _open(self._host), key, make)

        await self._host.on_own_loop(store)

    async def list(
        self,
        owner: str | SecurityIdentity | None = None,
        service: type[Any] | str | None = None,
        limit: int = 50,
        before: ConversationInfo | str | None = None,
    ) -> builtins.list[ConversationInfo]:
        """Return at most `limit` conversations, those with the newest turns first.

        `owner` and `service` filter, unless they are None; an empty text matches nothing. `before` is the last item of
        the previous page, or its `cursor`. Raises `ValueError` for a negative limit, an unknown cursor, and for a name
        as `owner` where `run_identity` names attributes. In Redis, raises `IllegalConfigurationError`.
        """
        limit = checked_limit(limit)
        position = None if before is None else _position_of(before)
        if (wanted := self._filter_of(owner, service)) is None:
            return []

        async def find() -> builtins.list[ConversationInfo]:
            store, found, last = await _open(self._host), builtins.list[Head](), position
            while len(found) < limit:
                asked = limit - len(found)
                heads = await store.find_heads(owner=wanted.owner, services=wanted.services, limit=asked, before=last)
                found += [each for each in heads if not await self._is_behind_another(store, each)]
                if len(heads) < asked:
                    break
                last = heads[-1].updated_at, heads[-1].id
            return [self._info_of(each) for each in found]

        return await self._host.on_own_loop(find)

    async def _is_behind_another(self, store: LogStore, head: Head) -> bool:
        """Return True for what lies under a former name where there is a conversation under the present one."""
        key = _key_with(self._host, head.key.service, head.key.memory_id)
        if key == head.key:
            return False
        found = await find_head(store, key)
        return found is not None and found.id != head.id

    def _info_of(self, head: Head) -> ConversationInfo:
        return _info_of(head, self._host.names_of(head.key.service)[0])

    # --- deleting

    async def forget(
        self,
        owner: str | SecurityIdentity | None = None,
        service: type[Any] | str | None = None,
        memory_id: object = None,
    ) -> dict[str, int]:
        """Delete conversations with their summaries, beans and runs. Return how many of each were deleted.

            await conversations.forget(owner="ann")  # {"conversations": 2, "messages": 14, "beans": 1, "runs": 3}

        What is given must match, as in `list`. With `owner`, also deletes ended runs outside of conversations that the
        owner has started. Calls at work are waited for, and waiting runs are cancelled. Raises `TypeError` unless an
        argument is given that is neither None nor an empty text, and for a `memory_id` without a `service`;
        `MemoryInUseError` inside a call of one of the conversations, and then nothing is deleted. In Redis, raises
        `IllegalConfigurationError` without a memory id.
        """
        if owner in (None, "") and service in (None, ""):
            raise TypeError("forget() deletes only what is named; give owner=, service=, or service= with memory_id=")
        if memory_id is not None and service is None:
            raise TypeError("forget(memory_id=…) needs service= as well")
        wanted = self._filter_of(owner, service)
        keys = None if memory_id is None or service is None else [self._key_of(service, memory_id)]
        if wanted is None:
            return _counted(Deleted(), 0)
        forgetting = _Forgetting(self._host, wanted, keys)
        return await self._host.on_own_loop(forgetting.run)

    # --- arguments

    def _key_of(self, service: type[Any] | str, memory_id: object) -> ChatMemoryKey:
        check_service(service)
        if isinstance(service, str) and not is_text(service):
            raise ValueError(f"invalid service={service!r}; use the class of a service, or its stored name")
        return _key_with(self._host, service, str(memory_id))

    def _owner(self, owner: str | SecurityIdentity | None) -> Owner | None:
        return Owner.given(owner, self._host.run_identity)

    def _filter_of(self, owner: str | SecurityIdentity | None, service: type[Any] | str | None) -> _Filter | None:
        """Return what is wanted; None if nothing can match."""
        belongs_to = self._owner(owner)
        is_nobody = owner is not None and belongs_to is None
        if service is not None:
            check_service(service)
        if is_nobody or service == "" or (isinstance(service, str) and not is_text(service)):
            return None
        return _Filter(belongs_to, None if service is None else self._host.names_of(service))


@dataclass(frozen=True, slots=True)
class _Filter:
    """Which conversations are wanted: of this owner, and of the service with these names."""

    owner: Owner | None
    services: tuple[str, ...] | None

    def matches(self, key: ChatMemoryKey, owner: Owner | None) -> bool:
        """Return True for a conversation under this key that belongs to this owner."""
        is_of_service = self.services is None or key.service in self.services
        return is_of_service and (self.owner is None or self.owner == owner)


class Conversation:
    """One conversation: what `Conversations.of`, `create` and `fork` return.

    In a request with another identity than that of the owner, or with none, all methods raise `AccessDeniedError`.
    Where there is no such conversation, `history` and `messages` return `[]`, `run` None and `stop` False; all others
    raise `ConversationNotFoundError`. Reading, `rename`, `adopt`, `put_in_charge`, `forget_approvals` and `stop` do not
    wait for a call that is at work; `rewind` and `delete` do, and inside that call they raise `MemoryInUseError`.
    """

    def __init__(self, host: ConversationsHost, key: ChatMemoryKey, *, operator: bool = False) -> None:
        self._host, self._key, self._is_operator = host, key, operator

    @property
    def service(self) -> str:
        """The stored name of the service."""
        return self._key.service

    @property
    def memory_id(self) -> str:
        """The id of the conversation, as text."""
        return self._key.memory_id

    # --- reading

    async def info(self) -> ConversationInfo:
        """Return what a list shows of it. Raises `ConversationNotFoundError`."""

        async def read(store: LogStore, check: _Check) -> ConversationInfo:
            return _info_of(self._known(check(await find_head(store, self._key))), self._key.service)

        return await self._with(read)

    async def history(self, limit: int = 100, before: LogEntry | str | None = None) -> list[LogEntry]:
        """Return the newest `limit` entries of the log, oldest first; with `before`, those before this entry.

        `before` is the first entry of a page, or its id. Raises `ValueError` for an unknown one, and for a negative
        limit.
        """
        limit = checked_limit(limit)

        async def read(store: LogStore, check: _Check) -> list[LogEntry]:
            try:
                log = await store.read_newest(self._key, limit, None if before is None else _id_of(before))
            except ValueError:  # an unknown entry, which another person than the owner must not learn
                check(await find_head(store, self._key))
                raise
            check(None if log is None else log.head)
            return [] if log is None else [*newest_entries(log.turns, limit)]

        return await self._with(read)

    async def messages(self) -> list[Message]:
        """Return what a model would see of the conversation in the next call, without that call's message."""

        async def read(store: LogStore, check: _Check) -> list[Message]:
            view = self._host.view_of(self._key.service)
            excerpt = await (await self._host.memories()).load(self._key, view)
            check(excerpt.head)
            return [*excerpt.messages]

        return await self._with(read)

    async def export(self) -> dict[str, Any]:
        """Return the whole log as JSON values, for `restore`, another program, or a person who wants the own data.

        Raises `ConversationNotFoundError`.
        """

        async def read(store: LogStore, check: _Check) -> dict[str, Any]:
            log = await store.read_since(self._key, lambda head: 0)
            head = self._known(check(None if log is None else log.head))
            assert log is not None
            return export_log(replace(log, head=replace(head, key=self._key)))

        return await self._with(read)

    async def run(self) -> Any:
        """Return the newest run of the conversation that has not ended, a `toolbox.runs.Run`; None without any."""

        async def read(store: LogStore, check: _Check) -> Any:
            await self._check_with_runs(store, check)
            return await self._host.run_of(self._key)

        return await self._with(read)

    async def approvals(self) -> list[RememberedApproval]:
        """Return the approvals that count for further calls in the conversation, oldest first.

        Raises `ConversationNotFoundError`.
        """

        async def read(store: LogStore, check: _Check) -> list[RememberedApproval]:
            head = self._known(check(await find_head(store, self._key)))
            return [each.shown for each in head.approvals]

        return await self._with(read)

    # --- changing

    async def forget_approvals(self, tool_name: str | None = None) -> None:
        """Let further calls of this tool need an approval again; without a name, those of all tools.

        It holds at once, also for a call that is at work. Raises `ConversationNotFoundError`.
        """
        await self._change(lambda head: without_approvals(head, tool_name))

    async def rename(self, title: str | None) -> None:
        """Set the title; None removes it. Raises `ConversationNotFoundError`."""
        checked = _checked_title(title)
        await self._change(lambda head: replace(head, title=checked))

    async def adopt(self, owner: str | SecurityIdentity) -> None:
        """Let the conversation belong to this identity, or to this name where `run_identity` names no attributes.

        Raises `ConversationNotFoundError`, and `ValueError` for an anonymous identity, an empty name, and a name where
        there are such attributes.
        """
        belongs_to = Owner.given(owner, self._host.run_identity)
        if belongs_to is None:
            raise ValueError(f"invalid owner={owner!r}; use a SecurityIdentity that is not anonymous, or a name")
        await self._change(lambda head: replace(head, owner=belongs_to))

    async def _change(self, change: Callable[[Head], Head]) -> None:
        async def write(store: LogStore, check: _Check) -> None:
            def change_own(head: Head) -> Head:
                check(head)
                return change(head)

            self._known(await store.change(self._key, change_own))

        await self._with(write)

    async def put_in_charge(self, method: Callable[..., Any]) -> None:
        """Let this method answer from the next call on: `await room.put_in_charge(Desk.chat)`.

        Raises `ValueError` for a method that hand-overs of the service do not lead to, and
        `ConversationNotFoundError`. A call that is at work may still change who is in charge.
        """

        async def write(store: LogStore, check: _Check) -> None:
            self._known(check(await find_head(store, self._key)))
            if (charge := self._host.find_charge(self._key.service, method)) is None:
                name, service = getattr(method, "__qualname__", repr(method)), self._host.label_of(self._key.service)
                raise ValueError(f"{name} cannot be in charge of a conversation of {service}: no hand-over leads to it")
            await store.write(self._key, LogWrite(turn=Turn(in_charge=charge)))

        await self._with(write)

    async def rewind(self, entry_id: LogEntry | str) -> None:
        """Go back to before this user message: it and all that follows is hidden, and the next call goes on from there.

        Hidden entries are in no view, no history and no export; they are deleted with the conversation. The argument
        is an entry of `history()`, or its id. Raises `ValueError` for an unknown entry, and for one that is not a user
        message, `ConversationSuspendedError` while a run of the conversation is suspended,
        `ConversationNotFoundError`, and `MemoryInUseError` inside a call of it.
        """
        program, given = Program(), _id_of(entry_id)

        async def write(store: LogStore, check: _Check) -> None:
            self._known(check(await find_head(store, self._key)))
            async with (await self._host.memories()).enter(self._key, program):
                if (run_id := await self._host.suspended_run(self._key)) is not None:
                    raise ConversationSuspendedError(self._host.label_of(self._key.service), run_id)
                self._known(await store.rewind(self._key, given))

        await self._with(write)

    async def fork(self, memory_id: object, upto: LogEntry | str | None = None) -> Conversation:
        """Copy the conversation under another id, and return the copy: all of it, or with `upto` until that turn's end.

        `upto` is an entry of `history()`, or its id. The copy keeps the owner. Raises `ValueError` for an unknown
        entry, and if a conversation with this id exists, `ConversationNotFoundError`, and `InvalidMemoryIdError`.
        """
        key = ChatMemoryKey(self._key.service, str(memory_id), self._key.former)
        given = None if upto is None else _id_of(upto)

        async def copy(store: LogStore, check: _Check) -> None:
            log = await store.read_since(self._key, lambda head: 0)
            self._known(check(None if log is None else log.head))
            assert log is not None
            whole = log
            await _create(store, key, lambda now: fork_log(whole, key, given, now))

        await self._with(copy)
        return Conversation(self._host, key, operator=self._is_operator)

    # --- ending

    async def stop(self, by: str | SecurityIdentity | None = None) -> bool:
        """Stop the call or the run that is at work or waits, in any process. Return False if there is none.

        It takes no lock, and returns when the turn is stored; inside the call itself, at once. The caller gets
        `ConversationStoppedError`, and a run ends as cancelled. `by` is the person who stops it: a name, or an
        identity; for anything else, raises `TypeError`.
        """
        if not (by is None or isinstance(by, (str, SecurityIdentity))):
            raise TypeError(f"stop(by=): expected a str or a SecurityIdentity, got {type(by).__name__}")

        async def end(store: LogStore, check: _Check) -> bool:
            await self._check_with_runs(store, check)
            return await self._host.stop_conversation(self._key, by)

        return await self._with(end)

    async def delete(self) -> None:
        """Delete the conversation with its summaries and its beans, and cancel its runs that wait.

        Waits for a call that is at work. Raises `ConversationNotFoundError`, and `MemoryInUseError` inside such a call.
        """
        program = Program()

        async def delete(store: LogStore, check: _Check) -> None:
            self._known(check(await find_head(store, self._key)))
            async with (await self._host.memories()).enter(self._key, program):
                await self._host.cancel_waiting(self._key, DELETED)
                if not (await store.delete(self._key)).conversations:
                    raise self._not_found()

        await self._with(delete)

    # --- who may, and what there is

    async def _with(self, work: Callable[[LogStore, _Check], Awaitable[T]]) -> T:
        """Await `work` on the container's loop with the store, and with what checks the owner of a head."""

        async def begin() -> T:
            store = await _open(self._host)
            identity = await self._host.caller() if self._is_checked else None

            def check(head: Head | None) -> Head | None:
                if head is not None:
                    refuse_other(head.owner, self._key, identity, self._host.run_identity)
                return head

            return await work(store, check)

        return await self._host.on_own_loop(begin)

    async def _check_with_runs(self, store: LogStore, check: _Check) -> None:
        """Check the owner, also while nothing is stored: the conversation then belongs to who began its first run."""
        if check(await find_head(store, self._key)) is not None or not self._is_checked:
            return
        if (identity := await self._host.caller()) is None:
            return
        runs = await self._host.runs.unended_in(self._key.service, self._key.memory_id)
        if runs and not self._host.runs.is_of(runs[-1], identity):
            raise AccessDeniedError(self._key.service, self._key.memory_id, identity.name)

    async def _find_open_runs(self) -> tuple[Any, list[Any]]:
        async def read(store: LogStore, check: _Check) -> list[Any]:
            check(await find_head(store, self._key))
            found = await self._host.runs.unended_in(self._key.service, self._key.memory_id)
            identity = await self._host.caller() if self._is_checked else None
            return [each for each in found if identity is None or self._host.runs.is_of(each, identity)]

        return self._host.runs, await self._with(read)

    @property
    def _is_checked(self) -> bool:
        return not (self._is_operator or self._host.shares_conversations(self._key.service))

    def _known(self, head: Head | None) -> Head:
        if head is None:
            raise self._not_found()
        return head

    def _not_found(self) -> ConversationNotFoundError:
        return ConversationNotFoundError(self._key.service, self._key.memory_id)


async def find_open_runs(room: Conversation) -> tuple[Any, list[Any]]:
    """Return the `Runs` of the container, and the runs of a conversation that have not ended, newest first.

    For front ends, which show them with the log. Without those that others have begun while the conversation belongs to
    nobody yet. Raises `AccessDeniedError` if the conversation is another's.
    """
    return await room._find_open_runs()


class _Forgetting:
    """One call of `forget`: deletes what matches `wanted`, of all conversations or only of those under `keys`."""

    def __init__(self, host: ConversationsHost, wanted: _Filter, keys: list[ChatMemoryKey] | None) -> None:
        self._host, self._wanted, self._keys = host, wanted, keys
        self._program = Program()
        self._deleted, self._runs = Deleted(), 0

    async def run(self) -> dict[str, int]:
        """Delete everything. Returns how many of each kind."""
        store, memories = await _open(self._host), await self._host.memories()
        await self._refuse_inside(store, memories)
        if self._keys is not None:
            for key in self._keys:
                await self._forget_one(store, memories, key)
        else:
            # Deleting moves the others up, and calls may begin new ones.
            while heads := await store.find_heads(
                owner=self._wanted.owner, services=self._wanted.services, limit=_AT_ONCE
            ):
                for each in heads:
                    key = _key_with(self._host, each.key.service, each.key.memory_id)
                    await self._forget_one(store, memories, key)
            service = None if self._wanted.services is None else self._wanted.services[0]
            self._runs += await self._host.forget_runs(owner=self._wanted.owner, service=service)
        return _counted(self._deleted, self._runs)

    async def _refuse_inside(self, store: LogStore, memories: ChatMemories) -> None:
        """Raise `MemoryInUseError` inside a call of what would be deleted, also of one that is not stored yet."""
        for key in memories.entered_by(self._program):
            owner = Owner.of(identity, self._host.run_identity) if (identity := await self._host.caller()) else None
            head = await find_head(store, key)
            is_asked = self._keys is None or key in self._keys
            if is_asked and self._wanted.matches(key, owner if head is None else head.owner):
                raise MemoryInUseError(key.service, key.memory_id)

    async def _forget_one(self, store: LogStore, memories: ChatMemories, key: ChatMemoryKey) -> None:
        """Delete what matches of one conversation, under all names of its service."""
        if not await self._is_wanted(store, key):
            return
        async with memories.enter(key, self._program):
            found = await _heads_under(store, key)
            is_all = all(self._wanted.matches(each.key, each.owner) for each in found)
            if is_all:
                await self._host.cancel_waiting(key, DELETED)
            # A run that was cancelled just now has left its turn, which was in no history, and may have moved the head.
            said = {each.id: each.messages for each in found}
            for head in await _heads_under(store, key):
                if self._wanted.matches(head.key, head.owner):
                    deleted = await store.delete(head.key)
                    self._deleted += replace(deleted, messages=said.get(head.id, head.messages))
            if is_all:
                self._runs += await self._host.forget_runs(service=key.service, memory_id=key.memory_id)

    async def _is_wanted(self, store: LogStore, key: ChatMemoryKey) -> bool:
        """Return True if something under this key matches; where nothing lies, there may be runs that nobody owns."""
        if not (found := await _heads_under(store, key)):
            return self._wanted.owner is None
        return any(self._wanted.matches(each.key, each.owner) for each in found)


async def _heads_under(store: LogStore, key: ChatMemoryKey) -> list[Head]:
    """Return the heads under all names of the service: several, if an older program has used the same id."""
    return [head for each in key.places if (head := await find_head(store, each)) is not None]


async def _open(host: ConversationsHost) -> LogStore:
    """Return the store. Raises `IllegalConfigurationError` for one that keeps no logs."""
    store = (await host.memories()).store
    if not keeps_logs(store):
        fact = f"{type(store).__name__} has only a view of each conversation, not its log"
        fix = "use the store of toolbox.sql or toolbox.redis, or no store, to keep logs in memory"
        raise IllegalConfigurationError([Problem("Conversations", fact, fix)])
    return store


async def _create(store: LogStore, key: ChatMemoryKey, make: Callable[[datetime], Log]) -> None:
    if not await store.create(key, make(clock_of(store).now())):
        raise ValueError(f"the conversation {key.memory_id!r} of {key.service} exists; use another memory id")


def _key_with(host: ConversationsHost, service: type[Any] | str, memory_id: str) -> ChatMemoryKey:
    name, *former = host.names_of(service)
    return ChatMemoryKey(name, memory_id, tuple(former))


# --- small values


def _info_of(head: Head, service: str) -> ConversationInfo:
    return ConversationInfo(
        service=service,
        memory_id=head.key.memory_id,
        owner=None if head.owner is None else head.owner.name,
        title=head.title,
        created_at=head.created_at,
        updated_at=head.updated_at,
        messages=head.messages,
        usage=head.usage,
        cursor=f"{(head.updated_at - _EPOCH) // _MICROSECOND}.{head.id}",
        in_charge=head.in_charge,
    )


_EPOCH, _MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)


def _position_of(before: ConversationInfo | str) -> tuple[datetime, str]:
    """Return the place in lists that an item or its cursor names. Raises `ValueError`."""
    cursor = before.cursor if isinstance(before, ConversationInfo) else before
    at, _, head_id = str(cursor).partition(".")
    try:
        if head_id.isascii() and head_id.isalnum():
            return _EPOCH + int(at) * _MICROSECOND, head_id
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"invalid before={cursor!r}; use an item of list(), or its cursor") from None


def _id_of(entry: LogEntry | str) -> str:
    return entry.id if isinstance(entry, LogEntry) else str(entry)


def _checked_title(title: str | None) -> str | None:
    if title is None:
        return None
    if not isinstance(title, str):
        raise TypeError(f"invalid title={title!r}; use a text, or None")
    return whole_characters(title)


def _counted(deleted: Deleted, runs: int) -> dict[str, int]:
    counts = {"conversations": deleted.conversations, "messages": deleted.messages, "beans": deleted.beans}
    return {**counts, "runs": runs}
