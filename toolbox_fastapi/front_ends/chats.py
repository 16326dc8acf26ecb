"""`Chat`: a conversation of a front end with a service method. It starts runs, finds them, and answers their calls.

Of what a client sends, three things count: its new message, answers to pending calls, and results of tools that it
runs. Not here: what the protocols send (`vercel_ai`, `ag_ui`), reading the events of a run (`run_reading`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args, get_origin
from uuid import uuid4

from pydantic import ValidationError
from pydantic_core import to_jsonable_python
from starlette.responses import Response

from toolbox.chat import PendingCall, RunSuspended, ToolSpecification, UserMessage
from toolbox.contents import media_in
from toolbox.conversations.conversations_bean import Conversation
from toolbox.conversations.stopping import STOPPED
from toolbox.errors import (
    AnswerForbiddenError,
    ConversationNotFoundError,
    RunAnswerError,
    RunIncompatibleError,
    RunNotFoundError,
    RunStateError,
)
from toolbox.events import ToldEvent
from toolbox.introspection import unwrapped
from toolbox.json_text import whole_json
from toolbox.runs import run_answers
from toolbox.runs.run_answers import Answer, Run
from toolbox.runs.runs_bean import Runs
from toolbox.runs.store import supports_of
from toolbox.security import AccessDeniedError, SecurityIdentity
from toolbox.service_names import stored_name
from toolbox.services.outputs import ANSWER_TOOL
from toolbox.services.plans import MethodPlan
from toolbox.services.recording_needs import ToldMessage
from toolbox.services.stored_forms import adapter_of

from ..problems import describe_problem
from ..run_endpoints import refusal_response
from .run_reading import (
    begins_answer,
    find_passed,
    follow_run,
    look_at,
    read_so_far,
    read_with_unread,
    split_wire_id,
)
from .stream_parts import CallEnd, Part

_MAX_RUNS = 10  # to which the answers in one request may refer; those of a client are for one
_TRIES = 5  # how often answers are sorted again, because others answered at the same time


class RefusedError(Exception):
    """A request of a client is refused: the status and the detail of the response, and a `code` for programs."""

    def __init__(self, status: int, detail: str, code: str | None = None) -> None:
        super().__init__(status, detail, code)
        self.status, self.detail, self.code = status, detail, code

    def __str__(self) -> str:
        return self.detail

    def response(self) -> Response:
        """Return the response with problem details."""
        problem = describe_problem(self.status, self.detail)
        if self.code is not None:
            problem["code"] = self.code
        return Response(json.dumps(problem), self.status, media_type="application/problem+json")


def invalid(detail: str) -> RefusedError:
    """Return the error for a body that cannot be read."""
    return RefusedError(422, detail)


def unknown_run() -> RefusedError:
    """Return the error for another's run."""
    return RefusedError(404, "There is no such run.")


def unknown_conversation() -> RefusedError:
    """Return the error for another's conversation."""
    return RefusedError(404, "There is no such conversation.")


def not_pending(call_id: str) -> RefusedError:
    """Return the error for an answer to a call that has never waited."""
    return RefusedError(409, f"No call with the id {call_id[:100]!r} waits for an answer.", "not_pending")


def answered_by_others() -> RefusedError:
    """Return the error for answers that were too late each time they were tried."""
    return RefusedError(409, "Others answer this conversation at the same time; try again.")


def waits_for_others() -> RefusedError:
    """Return the error for a new message while calls wait."""
    return RefusedError(409, "The conversation waits for answers to pending calls.", "waiting")


@contextmanager
def refusing_others() -> Iterator[None]:
    """Raise `RefusedError` for another's conversation: it does not exist for those who may not use it."""
    try:
        yield
    except AccessDeniedError:
        raise unknown_conversation() from None


@dataclass(frozen=True, slots=True)
class ClientReply:
    """What a client says about one call. `call_id` is that of the wire.

    `answer` returns the answer for the pending call, or None for a call that is not answered in this way. It is None
    for a call that the client shows as one that waits. `is_result` is True for the result of a tool that the client
    runs: it counts only while a call of such a tool waits. Every other answer must be about a call that once waited.
    """

    call_id: str
    answer: Callable[[PendingCall], Answer | None] | None
    is_result: bool = False


WhileWaiting: TypeAlias = Literal["reject", "refuse"]
"""What becomes of a new message while calls wait: they are rejected and the run gets the message, or it is refused."""

WROTE_INSTEAD = "the user wrote instead"
"""What the model reads of a call that was rejected because of a new message."""


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A new message of the user, with its id at the client; `arguments` are those of the method besides.

    `offered` are the tools that the client runs for it.
    """

    message: UserMessage
    client_id: str | None
    arguments: Mapping[str, Any]
    offered: Sequence[ToolSpecification] = ()
    while_waiting: WhileWaiting = "reject"

    def __post_init__(self) -> None:
        """Raise `ValueError` for another `while_waiting`."""
        if self.while_waiting not in get_args(WhileWaiting):
            raise ValueError(f"invalid while_waiting={self.while_waiting!r}; use 'reject' or 'refuse'")


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """The run whose stream a client gets, from after an event; suspensions up to `passed` were answered.

    `answer` is the number of the first answer of the run that the client gets.
    """

    run_id: str
    after: int = 0
    passed: int = 0
    answer: int = 0


class Chat:
    """The conversation of a client with a service method, in the current request.

    `client_tools` are the names of tools that the client runs.
    """

    def __init__(
        self, runs: Runs, plan: MethodPlan, chat_id: str, identity: SecurityIdentity, client_tools: Collection[str] = ()
    ) -> None:
        self.runs, self.plan, self.identity = runs, plan, identity
        self.client_tools = frozenset(client_tools)
        self._memory_id = self._read_memory_id(chat_id)
        self.room: Conversation | None = None  # with a memory id, and a store that keeps logs

    @classmethod
    async def open(
        cls, runs: Runs, method: Callable[..., Any], chat_id: str, client_tools: Collection[str] = ()
    ) -> Chat:
        """Return the chat with this id. Raises `TypeError` for a method that cannot be a run."""
        if isinstance(client_tools, str):
            raise TypeError('client_tools= must be a collection of names, such as ("pick_date",)')
        chat = cls(runs, runs.plan_of(method), chat_id, await runs.caller(), client_tools)
        if chat.plan.memory_parameter is not None:
            chat.room = await runs.room_of(chat.plan.service, chat._memory_id)
        return chat

    @property
    def holds_text(self) -> bool:
        """True if the model's answer is structured: it may be refused and asked again."""
        return self.plan.output.structure is not None

    @property
    def keeps_no_log(self) -> bool:
        """True if the conversation has a store that has only a view of it: nothing in it can be found again."""
        return self._memory_id is not None and self.room is None

    def _read_memory_id(self, chat_id: str) -> Any:
        name = self.plan.memory_parameter
        if name is None:
            return None
        try:
            return adapter_of(self.plan.annotations[name]).validate_python(chat_id)
        except ValidationError:
            raise RefusedError(422, "The conversation id is invalid.") from None

    def follow(self, place: StreamPlace) -> AsyncGenerator[Part, None]:
        """Return the parts of the stream of a run."""
        return follow_run(
            self.runs,
            place.run_id,
            after=place.after,
            passed=place.passed,
            answer=place.answer,
            holds_text=self.holds_text,
            services=self.runs.services_of(self.plan),
        )

    # --- finding runs

    def has_run(self, run: Run[Any]) -> bool:
        """Return True if a run belongs to this conversation."""
        if run.service != stored_name(self.plan.service):
            return False
        return self._memory_id is None or run.memory_id == str(self._memory_id)

    async def find_open_runs(self) -> list[Run[Any]]:
        """Return the runs of the conversation that have not ended, newest first.

        Raises `RefusedError` if one of them, or the conversation, is another's.
        """
        if self._memory_id is None:
            return []
        if self.room is not None:
            with refusing_others(), suppress(ConversationNotFoundError):  # it may not be stored yet
                await self.room.info()
        runs = await self.runs.unended_in(self.plan.service, str(self._memory_id))
        if not (self.plan.options.shared_conversations or all(self.runs.is_of(run, self.identity) for run in runs)):
            raise unknown_conversation()
        return runs

    async def find_open_run(self) -> Run[Any] | None:
        """Return the newest run of the conversation that has not ended. Raises `RefusedError` for another's."""
        return next(iter(await self.find_open_runs()), None)

    async def is_under_way(self, message: UserMessage, client_id: str | None) -> bool:
        """Return True if a run that has not ended answers this message of a client. Raises `RefusedError`."""
        if client_id is None:
            return False
        for run in await self.find_open_runs():
            events, unread = await read_with_unread(self.runs, run.id)
            read = [each.event for each in events if begins_answer(each.event)]
            added: list[ToldEvent | ToldMessage] = [*read, *unread]
            if any((each.message, each.client_id) == (message, client_id) for each in added):
                return True
            with suppress(RunIncompatibleError, RunNotFoundError):
                if await self.runs.question_of(run.id) == (message, client_id):
                    return True
        return False

    async def stop(self) -> bool:
        """Stop what is at work in the conversation, or waits. Return False if nothing is. Raises `RefusedError`."""
        runs = await self.find_open_runs()
        if self.room is not None:
            return await self.room.stop(self.person)
        return bool(runs) and (await self.runs.cancel(runs[0].id, STOPPED, self.person)).status == "cancelled"

    @property
    def person(self) -> SecurityIdentity | None:
        """The identity of the request; None for an anonymous one."""
        return None if self.identity.is_anonymous else self.identity

    # --- a new message

    async def say(self, said: NewMessage, replies: Sequence[ClientReply] = ()) -> StreamPlace | Response:
        """Start a run with a new message of the user; while calls wait, do what `while_waiting` says.

        Answers among `replies` count first. Returns where the stream of the answer begins, or a response if an answer
        is refused. Raises `RefusedError`.
        """
        takes_messages = "tell" in supports_of(await self.runs.store())
        if self.plan.options.on_suspended != "raise" or not takes_messages:
            found = await self.answer(replies) if replies else None
            return found if isinstance(found, Response) else await self._start(said)
        place: StreamPlace | None = None
        for _ in range(_TRIES):
            given = await self._sort(replies)
            run = await self._find_waiting(given.run_id)
            if run is None:
                return await self._start(said) if place is None else place
            answers = {**await self._reject_others(run, given.answers, said), **given.answers}
            place = await self._tell(run, said) if place is None else place
            if place is None:  # it has just ended
                continue
            refused = await self._resume(run.id, answers)
            if refused is None or isinstance(refused, Response):
                return place if refused is None else refused
        raise answered_by_others()

    async def _start(self, said: NewMessage) -> StreamPlace:
        runs = await self.find_open_runs()
        if self.plan.options.on_suspended == "raise" and any(each.status == "suspended" for each in runs):
            raise waits_for_others()  # else a new call begins beside the run that waits, or cancels it
        filled, other = self._fill_parameters(said.message, said.arguments)
        started = await self.runs.start_message(self.plan, filled, other, said.offered, said.client_id)
        return StreamPlace(started.id)

    async def _find_waiting(self, run_id: str) -> Run[Any] | None:
        """Return the run that waits: the one whose calls are answered, or the newest of the conversation."""
        runs = [await self.runs.get(run_id)] if run_id else await self.find_open_runs()
        return next((each for each in runs if each.status == "suspended"), None)

    async def _reject_others(self, run: Run[Any], answered: Collection[str], said: NewMessage) -> dict[str, Answer]:
        """Return the answers to the calls that wait besides: the user wrote instead. Raises `RefusedError`."""
        others = [each for each in run.pending if each.id not in answered]
        if not others:
            return {}
        if said.while_waiting == "refuse" or not await self.may_answer_all(run, others):
            raise waits_for_others()
        return {
            each.id: run_answers.reject(WROTE_INSTEAD) if each.kind == "approval" else run_answers.fail(WROTE_INSTEAD)
            for each in others
        }

    async def may_answer_all(self, run: Run[Any], calls: Sequence[PendingCall]) -> bool:
        """Return True if this person may answer all of these calls of a run."""
        return {each.id for each in calls} <= await self.runs.find_answerable(run.id, self.identity)

    async def _tell(self, run: Run[Any], said: NewMessage) -> StreamPlace | None:
        """Add a message to a run that waits, and return where its answer begins; None if the run has just ended."""
        events = await read_so_far(self.runs, run.id)
        after, answer = len(events), sum(begins_answer(each.event) for each in events) + 1
        try:
            await self.runs.tell_message(run.id, said.message, self.person, said.client_id or uuid4().hex)
        except RunStateError:
            return None
        return StreamPlace(run.id, after, after, answer)

    def _fill_parameters(
        self, message: UserMessage, arguments: Mapping[str, Any]
    ) -> tuple[dict[str, Any], UserMessage | None]:
        """Return the arguments of the method, and the message if no argument can be all of it."""
        plan = self.plan
        filled: dict[str, Any] = {}
        if plan.memory_parameter is not None:
            filled[plan.memory_parameter] = self._memory_id
        if plan.run_id_parameter is not None:
            filled[plan.run_id_parameter] = uuid4().hex
        name, other = self._find_user_parameter(arguments), None
        filled |= {each: [] for each in self._list_files() if each != name and each not in arguments}
        annotation = unwrapped(plan.annotations.get(name, Any)).type
        if takes_text(annotation):
            filled[name] = message.text
            other = message if media_in(message.contents) else None
        else:
            filled[name] = list(message.contents) if is_sequence(annotation) else message
        if other is not None and plan.messages.user is not None:
            raise invalid(f"{plan.where} takes text only.")
        if twice := filled.keys() & arguments.keys():
            raise TypeError(f"{plan.where}: arguments= must not have {min(twice)!r}, which the chat fills")
        return {**filled, **arguments}, other

    def _find_user_parameter(self, arguments: Mapping[str, Any]) -> str:
        """Return the name of the parameter that gets the user's message. Raises `TypeError` if there is none."""
        messages = self.plan.messages
        if messages.user_parameter is not None:
            return messages.user_parameter
        known = {self.plan.memory_parameter, self.plan.run_id_parameter, *arguments}
        candidates = self._list_files() if messages.user is None else dict.fromkeys(messages.values.values())
        left = [each for each in candidates if each not in known]
        if len(left) != 1:
            fix = "pass the other parameters with arguments={…}"
            raise TypeError(f"{self.plan.where} needs one parameter for the user's message; {fix}")
        return left[0]

    def _list_files(self) -> list[str]:
        """Return the names of the parameters with lists of contents, such as images: the message has all of them."""
        annotations = self.plan.annotations
        return [each for each in self.plan.messages.contents if is_sequence(unwrapped(annotations.get(each)).type)]

    def check_offered(self, offered: Sequence[ToolSpecification]) -> None:
        """Raise `RefusedError` for tools that this client may not have."""
        own = {ANSWER_TOOL, *(name for each in (self.plan, *self.plan.team.values()) for name in each.toolset.by_name)}
        for each in offered:
            if each.name not in self.client_tools:
                raise invalid(f"The tool {each.name[:100]!r} is not one that a client may offer.")
            if each.name in own:
                raise invalid(f"The service has a tool with the name {each.name[:100]!r}.")
        if len({each.name for each in offered}) < len(offered):
            raise invalid("Two tools have the same name.")

    # --- answers

    async def answer(self, replies: Sequence[ClientReply]) -> StreamPlace | Response | None:
        """Store the answers among `replies` and continue their run.

        Returns where its stream goes on. Answers to calls that no longer wait are dropped; if nothing else is left, the
        stream after the answer is returned. None if nothing here is about a call of this conversation. Returns a
        response if an answer is refused. Raises `RefusedError`.
        """
        for _ in range(_TRIES):
            sorted_replies = await self._sort(replies)
            if not sorted_replies.answers:
                return await self._find_answered(sorted_replies)
            run_id = sorted_replies.run_id
            position = (await look_at(self.runs, run_id)).events
            after = await self._find_missed(run_id, sorted_replies.missed_in(run_id), position)
            refused = await self._resume(run_id, sorted_replies.answers)
            if refused is None or isinstance(refused, Response):
                return StreamPlace(run_id, after, position) if refused is None else refused
        raise answered_by_others()

    async def _resume(self, run_id: str, answers: Mapping[str, Answer]) -> Response | RunAnswerError | None:
        """Answer calls of a run, which goes on. Returns None, or the response if an answer is refused.

        Returns the error if somebody else was faster: then some of the calls do not wait any more.
        """
        resumed = self.runs.resume_stream(run_id, answers, by=self.person)
        try:
            await resumed.begin()
        except RunAnswerError as error:
            still_wait = answers.keys() <= {each.id for each in (await self.runs.get(run_id)).pending}
            if error.problems or isinstance(error, AnswerForbiddenError) or still_wait:
                return refusal_response(error)
            return error
        finally:
            await resumed.aclose()  # the run goes on
        return None

    async def _sort(self, replies: Sequence[ClientReply]) -> _SortedReplies:
        """Return which replies answer pending calls, and which are about calls that waited earlier."""
        found = _SortedReplies()
        known: dict[str, _KnownRun | None] = {}
        for reply in replies:
            run_id, place = split_wire_id(reply.call_id) or ("", "")
            if run_id not in known:
                if len(known) == _MAX_RUNS:
                    raise invalid("The answers are for calls of several runs.")
                known[run_id] = await self._load(run_id)
            run = known[run_id]
            call = None if run is None else run.find_call(place)
            if reply.answer is None:
                found.shown += [(run_id, place)] if call is None else []
                continue
            if reply.is_result:
                if run is None or not self._is_client_tool(run, place, call):
                    continue
            elif run is None or (call is None and not await self._has_waited(run, place)):
                raise not_pending(reply.call_id)
            if not self._may_answer(run, place):
                raise unknown_run()
            if call is None:
                found.earlier.append((run_id, place))
            elif (answer := reply.answer(call)) is None:
                raise not_pending(reply.call_id)
            elif found.run_id not in ("", run_id):
                raise invalid("The answers are for calls of several runs.")
            elif found.answers.get(place, answer) != answer:
                raise invalid("Two answers to the same call differ.")
            else:
                found.run_id = run_id
                found.answers[place] = answer
        return found

    async def _load(self, run_id: str) -> _KnownRun | None:
        """Return a run of this conversation; None if there is none. Raises `RefusedError` for another's."""
        try:
            run = await self.runs.get(run_id)
        except RunNotFoundError:
            return None
        is_own = self.runs.is_of(run, self.identity)
        answerable = await self.runs.find_answerable(run_id, self.identity) if run.pending else frozenset()
        has_answered = any(each.by is not None and each.by == self.identity.name for each in run.history)
        if not (is_own or answerable or has_answered):
            raise unknown_run()
        return _KnownRun(run, is_own, answerable) if self.has_run(run) else None

    async def _has_waited(self, run: _KnownRun, place: str) -> bool:
        """Return True if a call of the run has waited for an answer."""
        if any(each.call_id == place for each in run.run.history):
            return True
        if run.suspensions is None:
            run.suspensions = await self._suspensions_of(run.run.id)
        return any(place in pending for _, pending in run.suspensions)

    def _may_answer(self, run: _KnownRun, place: str) -> bool:
        """Return True if this person may answer a call, or has answered it. Who has started a run learns why not."""
        if run.is_own or place in run.answerable:
            return True
        return any(each.call_id == place and each.by == self.identity.name for each in run.run.history)

    def _is_client_tool(self, run: _KnownRun, place: str, call: PendingCall | None) -> bool:
        """Return True if a call was of a tool that the client runs: nobody else's results come from a client."""
        if call is not None:
            return waits_for_client(call, self.client_tools)
        return any(each.call_id == place and each.tool_name in self.client_tools for each in run.run.history)

    async def _find_answered(self, replies: _SortedReplies) -> StreamPlace | None:
        """Return where the stream goes on after the earliest of the answers that were given already."""
        if not replies.earlier:
            return None
        run_id = replies.earlier[0][0]
        after = await self._find_missed(run_id, replies.missed_in(run_id), 0)
        return StreamPlace(run_id, after, after)

    async def _find_missed(self, run_id: str, places: Collection[str], default: int) -> int:
        """Return the number of the suspension after which the first of these calls was answered."""
        last: dict[str, int] = {}
        for number, pending in await self._suspensions_of(run_id) if places else ():
            last |= dict.fromkeys(pending.intersection(places), number)
        return min(last.values(), default=default)

    async def _suspensions_of(self, run_id: str) -> list[tuple[int, frozenset[str]]]:
        """Return the number and the pending calls of each suspension so far."""
        return [
            (each.number, frozenset(call.id for call in each.event.pending))
            for each in await read_so_far(self.runs, run_id)
            if isinstance(each.event, RunSuspended)
        ]


async def stop_chat(runs: Runs, method: Callable[..., Any], room: Any) -> bool:
    """Stop what is at work in a conversation. Raises `ConversationNotFoundError` for another's, and an invalid id."""
    try:
        return await (await Chat.open(runs, method, room)).stop()
    except RefusedError:
        service = stored_name(runs.plan_of(method).service)
        raise ConversationNotFoundError(service, str(room)) from None


@dataclass(slots=True)
class _KnownRun:
    """A run to which a client refers, and what this person may do with it."""

    run: Run[Any]
    is_own: bool
    answerable: frozenset[str]
    suspensions: list[tuple[int, frozenset[str]]] | None = None  # once they were read

    def find_call(self, place: str) -> PendingCall | None:
        """Return the pending call at a place."""
        return next((each for each in self.run.pending if each.id == place), None)


class _SortedReplies:
    """Answers to the pending calls of a run, by place; and what has been answered earlier, by run and place.

    `earlier` are the calls that the client answers again, `shown` those that it shows as if they still waited.
    """

    def __init__(self) -> None:
        self.run_id = ""
        self.answers: dict[str, Answer] = {}
        self.earlier: list[tuple[str, str]] = []
        self.shown: list[tuple[str, str]] = []

    def missed_in(self, run_id: str) -> set[str]:
        """Return the places of calls of a run that have been answered without the client's knowledge."""
        return {place for run, place in (*self.earlier, *self.shown) if run == run_id}


def takes_text(annotation: Any) -> bool:
    """Return True if a parameter of this type takes a `str`."""
    if is_sequence(annotation):
        return False
    members = get_args(annotation) or (annotation,)
    return annotation is Any or any(isinstance(each, type) and issubclass(each, str) for each in members)


def is_sequence(annotation: Any) -> bool:
    """Return True for a type such as `list[TextContent | ImageContent]`."""
    origin = get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, Sequence)


def shown_value(end: CallEnd) -> Any:
    """Return what the model reads of a result, as a JSON value if the tool returned one.

    Of a result in the log only the text is known: that of an object or a list is read.
    """
    if end.outcome == "unknown":
        return None
    execution = end.execution
    if execution is not None and isinstance(execution.result_object, str):
        return end.text
    try:
        value = json.loads(end.text)
    except (ValueError, RecursionError):
        return end.text
    return end.text if execution is None and not isinstance(value, (dict, list)) else value


def shown_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as every response can have them: without halves of characters, and null for NaN and infinity.

    Models and tools write both, and a response with one of them could not be sent.
    """
    safe: list[dict[str, Any]] = json.loads(whole_json(to_jsonable_python(messages, inf_nan_mode="null")))
    return safe


def waits_for_client(call: PendingCall, client_tools: Collection[str]) -> bool:
    """Return True if a pending call waits for the result of a tool that the client runs."""
    return call.kind == "deferred" and call.tool_name in client_tools


async def find_newest_answer(runs: Runs, run_id: str) -> StreamPlace:
    """Return the beginning of the newest answer of a run, which may have said nothing so far."""
    events, unread = await read_with_unread(runs, run_id)
    begun = [each for each in events if begins_answer(each.event)]
    return StreamPlace(run_id, 0, await find_passed(runs, run_id), len(begun) + len(unread))
