"""What is stored of a run, place by place, while this process executes it.

`RunRecords` reads and writes records; `PlaceState` is what a process knows about one place. Not here: when something is
recorded (`tool_records`, `run_session`), what a record contains (`record_contents`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from ..errors import LeaseLostError, RunIncompatibleError, RunStoreError, TranscriptError
from ..services.invocation import Invocation
from ..services.state import State
from ..tools.codec import Encoded
from ..tools.tool_calls import ToolCall
from .documents import GivenAnswer, RunDocument, WaitingCall, read_stored_json
from .places import RecordKey, is_attempt_of, place_of_attempt
from .store import RunStore, StoredRecord


@dataclass(frozen=True, slots=True)
class Unjudged:
    """An attempt of a call that output guardrails have not judged. `result` is None if a record has it."""

    place: str
    arguments: dict[str, Any] | None
    result: Encoded | None


@dataclass(slots=True)
class PlaceState:
    """What this process knows about one place. The place of a service that runs as a tool is also that of its call."""

    # What is stored of a tool call or one of its attempts.
    result: StoredRecord | None = None
    """Its result, or that it is deferred."""
    starts: list[StoredRecord] = field(default_factory=list)
    is_outside: bool = False
    """True if its transaction cannot contain the record of its result."""

    # What is stored of an invocation.
    model: StoredRecord | None = None
    """The name of the model that a router has chosen for it."""
    replies: dict[int, StoredRecord] = field(default_factory=dict)
    snapshots: list[StoredRecord] = field(default_factory=list)
    failure: StoredRecord | None = None

    # A tool call in this process. An attempt has only `unstored` and `waiting`.
    attempts: int = 0
    unstored: StoredRecord | None = None
    """Its result, which is stored if the run is suspended within this call."""
    waiting: WaitingCall | None = None
    as_decoded: ToolCall | None = None
    """The call with the arguments that the model gave it, to know later whether they were changed."""
    has_new_answer: bool = False
    """True until the answer of a person has been applied to the call."""
    has_edited_arguments: bool = False
    """True if the next attempt gets the arguments that a person chose."""
    was_requested_before: bool = False
    """True if the model made the call before this process continued the run."""
    is_judged_next: bool = False
    """True while output guardrails wait for the result, which is then recorded as they let it through."""
    unjudged: Unjudged | None = None

    # An invocation in this process.
    is_entered: bool = False
    is_checked: bool = False
    next_reply: int = 0
    written: State | None = None
    """The state in the last record: the next one contains only what is new."""
    suspended: Invocation | None = None

    def add(self, key: RecordKey, record: StoredRecord) -> None:
        """Take in a record of this place that is stored."""
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

    `generation` is None until the run is stored. `document` is its header, once there is one.
    """

    def __init__(self, run_id: str | None = None) -> None:
        self.id = run_id or uuid4().hex
        self.store: RunStore | None = None
        self.generation: int | None = None
        self.document: RunDocument | None = None
        self.places: dict[str, PlaceState] = {}

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
    def owned_generation(self) -> int:
        """The generation with which this process took the run."""
        assert self.generation is not None
        return self.generation

    @property
    def cancels(self) -> bool:
        """True if the run was cancelled: what is recorded is undone, and nothing else happens."""
        return self.document is not None and self.document.cancels

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

    def result_at(self, place: str) -> StoredRecord | None:
        """Return the recorded result of a call or one of its attempts, or that it is deferred."""
        state = self.places.get(place)
        return None if state is None else state.result

    def has_result(self, call: str) -> bool:
        """Return True if a call, or an attempt of it, has a recorded result."""
        return any(
            state.result is not None and state.result.kind == "result" and is_attempt_of(place, call)
            for place, state in self.places.items()
        )

    def last_result(self, call: str) -> StoredRecord:
        """Return the record of the last attempt of a call that has a result."""
        last, number = self.result_at(call), 2
        assert last is not None
        while (after := self.result_at(place_of_attempt(call, number))) is not None and after.kind == "result":
            last, number = after, number + 1
        return last

    # --- reading and writing

    def add(self, record: StoredRecord) -> None:
        """Take in a record that is stored."""
        key = RecordKey.read(record.key)
        self.at(key.place).add(key, record)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read records inside the block. Raises `RunIncompatibleError` for those of another version of the program."""
        try:
            yield
        except (ValueError, KeyError, TypeError, TranscriptError) as error:
            raise RunIncompatibleError(self.id, f"its records cannot be read: {error}") from error

    def read(self, record: StoredRecord) -> dict[str, Any]:
        """Return the content of a record. Raises `RunIncompatibleError`."""
        with self.reading():
            return read_stored_json(record.data)

    async def write(self, record: StoredRecord) -> None:
        """Write a record. Raises `LeaseLostError` and `RunStoreError`."""
        # Fencing: a process can be paused for minutes between two statements, and wake up after another one has taken
        # the run. Neither its clock nor its lease tells it so. Therefore taking a run raises the generation in the
        # header, and each write names the generation that its process took: the store refuses a late owner. The next
        # effect begins only after this returns.
        with self.using_store() as store:
            await store.append(self.id, self.owned_generation, [record])
        self.add(record)

    async def keep(self, record: StoredRecord) -> None:
        """Write a result; before the run is stored, remember it for a suspension."""
        if self.is_stored:
            await self.write(record)
        else:
            self.at(record.key).unstored = record

    @contextmanager
    def using_store(self) -> Iterator[RunStore]:
        """Use the store inside the block. Raises `LeaseLostError`, and `RunStoreError` for errors of the store."""
        assert self.store is not None
        try:
            yield self.store
        except LeaseLostError:
            raise
        except Exception as error:
            raise RunStoreError(self.id, describe_store_error(error)) from error


def describe_store_error(error: BaseException) -> str:
    """Return the type and the text of an error of a store, without the statement and its values, such as documents."""
    cause = getattr(error, "orig", None)  # of SQLAlchemy: the error of the database
    return f"{type(error).__name__}: {error if cause is None else cause}"
