"""What is stored of a run, place by place, while this process executes it.

`RunRecords` reads and writes records; `PlaceState` is what a process knows about one place. Not here: when something is
recorded (`tool_records`, `run_session`), what a record contains (`record_contents`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any
from uuid import uuid4

from ..chat import TokenUsage
from ..errors import LeaseLostError, RunIncompatibleError, RunStoreError, TranscriptError, leaves_run_unchanged
from ..limits import Usage
from ..security import UnauthenticatedError
from ..services.invocation import Invocation
from ..services.loop import ModelReplied
from ..services.state import State
from ..services.stored_forms import fields_from_dict, fields_to_dict
from ..tools.results import Encoded
from ..tools.tool_calls import ToolCall
from .documents import GivenAnswer, RunDocument, WaitingCall, read_stored_json
from .places import RecordKey, is_attempt_of, place_of_attempt
from .store import RunStore, StoredRecord


@dataclass(frozen=True, slots=True)
class Unjudged:
    """An attempt of a call that output guardrails have not judged. `result` is None if a record has it."""

    place: str
    arguments: Mapping[str, Any] | None
    result: Encoded | None
    has_run: bool


@dataclass(frozen=True)
class Recorded:
    """A record that is stored."""

    kind: str
    data: str

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """The JSON object, read once. A program's own code may change what it gets, so it gets nothing of this."""
        return read_stored_json(self.data)


@dataclass(frozen=True, slots=True)
class OpenReply:
    """The last recorded reply of an invocation that continues: its calls have still to run, or to give their records.

    `unfit` are the positions of the calls that the program refused when the reply came.
    """

    replied: ModelReplied
    unfit: Sequence[int]


@dataclass(slots=True)
class PlaceState:
    """What this process knows about one place. The place of a service that runs as a tool is also that of its call."""

    # What is stored of a tool call or one of its attempts.
    result: Recorded | None = None
    """Its result, or that it is deferred."""
    starts: list[Recorded] = field(default_factory=list)
    is_outside: bool = False
    """True if its transaction cannot contain the record of its result."""

    # What is stored of an invocation.
    model: Recorded | None = None
    """The name of the model that a router has chosen for it."""
    replies: dict[int, Recorded] = field(default_factory=dict)
    snapshots: list[Recorded] = field(default_factory=list)
    failure: Recorded | None = None

    # A tool call in this process. An attempt has only `unstored` and `waiting`.
    attempts: int = 0
    unstored: StoredRecord | None = None
    """Its result, which is stored if the run is suspended within this call."""
    waiting: WaitingCall | None = None
    as_decoded: ToolCall | None = None
    """The call with the arguments that the model gave it, to know later whether they were changed."""
    edits: list[GivenAnswer] = field(default_factory=list)
    """The approvals that change the arguments of the call, and have not been used."""
    was_requested_before: bool = False
    """True if the model made the call before this process continued the run."""
    is_judged_next: bool = False
    """True while output guardrails wait for the result, which is then recorded as they let it through."""
    unjudged: Unjudged | None = None

    # An invocation in this process.
    is_entered: bool = False
    is_checked: bool = False
    open_reply: OpenReply | None = None
    """The recorded reply that comes next; None if the model is asked."""
    next_reply: int = 0
    written: State | None = None
    """The state in the last record: the next one contains only what is new."""
    suspended: Invocation | None = None

    def add(self, key: RecordKey, record: Recorded) -> None:
        """Take in a record of this place."""
        match key.fact:
            case "":
                self.result = record
            case "start":
                self.starts.append(record)
            case "outside":
                self.is_outside = True
            case "model":
                self.model = record
            case "r":
                self.replies[key.number] = record
            case "s":
                self.snapshots.append(record)
            case "failed":
                self.failure = record


class RunRecords:
    """The records of a run, and its answers.

    `generation` is None until the run is stored. `document` is its header, once there is one. `has_new_records` is True
    after the first record that this process has written, `is_without_user` as in `PreparedRun`.
    """

    has_new_records = False
    is_without_user = False

    def __init__(self, run_id: str | None = None) -> None:
        self.id = run_id or uuid4().hex
        self.store: RunStore | None = None
        self.generation: int | None = None
        self.document: RunDocument | None = None
        self.places: dict[str, PlaceState] = {}
        self._counted: list[RecordKey] = []

    def at(self, place: str) -> PlaceState:
        """Return what is known about a place."""
        if (state := self.places.get(place)) is None:
            state = self.places[place] = PlaceState()
        return state

    @property
    def is_stored(self) -> bool:
        """True if this process owns a stored run, so that each record is written before the next effect."""
        return self.generation is not None

    @property
    def cancels(self) -> bool:
        """True if the run was cancelled: what is recorded is undone, and nothing else happens."""
        return self.document is not None and self.document.cancels

    def waits_for_user(self, error: BaseException) -> bool:
        """Return True if the token of the run's user is missing, and only that user can help, who may be gone.

        A run that goes on after an interruption or a suspension, or in another process, is kept for its user, with its
        answers. One that was cancelled ends: anyone who may cancel it can end it.
        """
        is_continued = self.is_without_user or bool(self.answers) or (self.generation or 0) > 1
        lacks_token = isinstance(error, UnauthenticatedError) and error.lacks_token
        return lacks_token and is_continued and not self.cancels

    def stays_after(self, error: BaseException) -> bool:
        """Return True for an error after which the run stays as it is, so that it can be continued."""
        return leaves_run_unchanged(error, self.id) or self.waits_for_user(error)

    @property
    def answers(self) -> Sequence[GivenAnswer]:
        """All answers so far, oldest first."""
        return self.document.answers if self.document is not None else ()

    def answers_at(self, place: str) -> list[GivenAnswer]:
        """Return the answers to the call with this id, oldest first."""
        return [each for each in self.answers if each.call_id == place]

    def answers_to(self, call: str) -> list[GivenAnswer]:
        """Return the answers to a call and its attempts, oldest first."""
        return [each for each in self.answers if is_attempt_of(each.call_id, call)]

    # --- recorded results of a call

    def next_record(self, call: str) -> str | None:
        """Return the kind of the record that the next attempt of a call has; None if the tool will run."""
        record = self.result_at(place_of_attempt(call, self.at(call).attempts + 1))
        return None if record is None else record.kind

    def result_at(self, place: str) -> Recorded | None:
        """Return the recorded result of a call or one of its attempts, or that it is deferred."""
        state = self.places.get(place)
        return None if state is None else state.result

    def has_result(self, call: str) -> bool:
        """Return True if a call, or an attempt of it, has a recorded result."""
        return any(
            state.result is not None and state.result.kind == "result" and is_attempt_of(place, call)
            for place, state in self.places.items()
        )

    def last_result(self, call: str) -> Recorded:
        """Return the record of the last attempt of a call that has a result."""
        last, number = self.result_at(call), 2
        assert last is not None
        while (after := self.result_at(place_of_attempt(call, number))) is not None and after.kind == "result":
            last, number = after, number + 1
        return last

    # --- reading and writing

    def add_record(self, record: StoredRecord) -> None:
        """Take in a record that was read from the store."""
        key = RecordKey.read(record.key)
        self.at(key.place).add(key, Recorded(record.kind, record.data))
        if key.fact in ("r", "s"):
            self._counted.append(key)

    def keys_after(self, place: str) -> Sequence[RecordKey]:
        """Return the keys of the replies and states that were stored after the last one of an invocation."""
        own = [position for position, key in enumerate(self._counted) if key.place == place]
        return self._counted[own[-1] + 1 :] if own else ()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read records inside the block. Raises `RunIncompatibleError` for those of another version of the program."""
        try:
            yield
        except (ValueError, KeyError, TypeError, TranscriptError) as error:
            raise RunIncompatibleError(self.id, f"its records cannot be read: {error}") from error

    def read_record(self, record: Recorded) -> dict[str, Any]:
        """Return the content of a record, for a program's code. Raises `RunIncompatibleError`."""
        with self.reading():
            return read_stored_json(record.data)

    def facts_of(self, record: Recorded) -> Mapping[str, Any]:
        """Return the content of a record, for questions about it. Raises `RunIncompatibleError`."""
        with self.reading():
            return record.facts

    async def write_record(self, key: RecordKey, kind: str, data: str, *, replaces: bool = False) -> None:
        """Write a record; before the run is stored, remember a result for a suspension.

        Raises `LeaseLostError` and `RunStoreError`.
        """
        place, record = self.at(key.place), StoredRecord(str(key), kind, data, replaces)
        if self.generation is None:
            # Until the first suspension nothing is stored. That one stores the states of all invocations, which have
            # everything but the results inside of the calls that are suspended.
            if key.fact == "":
                place.unstored = record
            return
        # Fencing: a process can be paused for minutes between two statements, and wake up after another one has taken
        # the run. Neither its clock nor its lease tells it so. Therefore taking a run raises the generation in the
        # header, and each write names the generation that its process took: the store refuses a late owner. The next
        # effect begins only after this returns.
        with self.using_store() as store:
            await store.append(self.id, self.generation, [record])
        place.add(key, Recorded(kind, data))
        self.has_new_records = True

    @contextmanager
    def using_store(self) -> Iterator[RunStore]:
        """Use the store inside the block. Raises `LeaseLostError`, and `RunStoreError` for errors of the store."""
        assert self.store is not None
        try:
            yield self.store
        except LeaseLostError:
            raise
        except Exception as error:
            # Logs show the cause too. That of a database has the values of the statement, such as results of tools.
            cause = None if _error_of_database(error) is not None else error
            raise RunStoreError(self.id, describe_store_error(error)) from cause


def describe_store_error(error: BaseException) -> str:
    """Return the type and the text of an error of a store, without the statement and its values, such as documents."""
    inner = _error_of_database(error)
    # PostgreSQL's error continues with a detail, which can be a whole row.
    text = str(error) if inner is None else str(inner).split("\n", 1)[0]
    return f"{type(error).__name__}: {text}"


def _error_of_database(error: BaseException) -> BaseException | None:
    """Return the error of the database that an error of SQLAlchemy is about; None for other errors."""
    return getattr(error, "orig", None)


# --- usage


def write_usage(invocation: Invocation) -> dict[str, Any] | None:
    """Return the usage that an invocation with limits has counted, as JSON values."""
    account = invocation.account
    if account is None or account.limits is None:
        return None
    usage = account.usage
    tokens = fields_to_dict(usage.tokens)
    cost = None if usage.cost is None else str(usage.cost)
    return {"model_calls": usage.model_calls, "tool_calls": usage.tool_calls, "tokens": tokens, "cost": cost}


def read_usage(written: Mapping[str, Any]) -> Usage:
    """Return the usage that `write_usage` wrote."""
    cost = None if written["cost"] is None else Decimal(written["cost"])
    return Usage(written["model_calls"], written["tool_calls"], fields_from_dict(TokenUsage, written["tokens"]), cost)
