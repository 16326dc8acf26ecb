"""`runs_router`: lists, shows, follows, answers and cancels runs, for an application's own front end.

Not here: who may use the runs, which is the application's decision; the runs themselves (`toolbox.runs`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter, Header, HTTPException, Path, Query, Response
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel, ConfigDict, Field

from toolbox.container import Container, internals_of
from toolbox.errors import RunAnswerError, RunNotFoundError, RunSuspendedError
from toolbox.execution.markers import marked_execution
from toolbox.execution.runners import LoopRunner
from toolbox.introspection import takes
from toolbox.runs.run_answers import Answer, Run, approve, fail, reject, respond, retry
from toolbox.runs.run_events import number_after
from toolbox.runs.store import RunStatus
from toolbox.security import SecurityIdentity, identity_in

from .exchanges import current_exchange
from .problems import challenge, pending_view, problem_details, suspension
from .streaming import as_json, sse

_MAX_ANSWERS = 1000  # in one request
_MAX_TEXT = 10_000  # characters of a reason
_PAGE = 100  # runs that are read at once while `may_see` chooses
_MAX_LOOKED_AT = 10_000  # runs for which `may_see` is called for one list


class PendingCallView(BaseModel):
    """A call that waits for an answer. `call_id` is the model's own id of the call, which a model may repeat."""

    model_config = ConfigDict(extra="forbid")  # a new field of `PendingCall` must not be left out here

    id: str
    tool_name: str
    arguments: dict[str, Any]
    service: str
    kind: Literal["approval", "deferred", "unknown_outcome"]
    reason: str | None
    attributes: dict[str, Any]
    started_by: str | None
    call_id: str
    expires_at: datetime | None
    may_remember: bool


class HistoryEntryView(BaseModel):
    """One answer that a run received; or that it was cancelled or retried."""

    at: datetime
    by: str | None
    call_id: str | None
    tool_name: str | None
    answer: str
    reason: str | None
    remembered: bool


class RunView(BaseModel):
    """A run. `error` is only the type of the error. Clients do not see the attributes of the identity."""

    id: str
    service: str
    method: str
    status: RunStatus
    pending: list[PendingCallView]
    created_at: datetime
    updated_at: datetime
    history: list[HistoryEntryView]
    error: str | None
    started_by: str | None
    memory_id: str | None
    attempts: int


_FIELDS = {"approve": ("arguments", "remember"), "respond": ("value",), "reject": ("reason",), "fail": ("reason",)}
"""The fields that each kind of answer has."""


class AnswerBody(BaseModel):
    """The answer to one pending call: `kind` is the name of the function in `toolbox.runs` that creates it."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["approve", "reject", "respond", "fail", "retry"]
    arguments: dict[str, Any] | None = Field(None, description="For approve: replaces all arguments.")
    value: Any = Field(None, description="For respond: the result of the call.")
    reason: str | None = Field(None, max_length=_MAX_TEXT, description="For reject and fail: the model reads it.")
    remember: Literal["conversation"] | None = Field(
        None, description="For approve: further calls of the tool in the conversation need no approval."
    )

    def answer(self) -> Answer:
        """Return the answer. Raises `ValueError` for a field that its kind does not have."""
        if extra := sorted(self.model_fields_set - {"kind", *_FIELDS.get(self.kind, ())}):
            raise ValueError(f"{self.kind} has no {extra[0]}")
        match self.kind:
            case "approve":
                return approve(self.arguments, remember=self.remember)
            case "reject":
                return reject(self.reason) if self.reason is not None else reject()
            case "respond":
                return respond(self.value)
            case "fail":
                return fail(self.reason) if self.reason is not None else fail()
            case "retry":
                return retry()


class AnswersBody(BaseModel):
    """Answers by the ids of the pending calls. Without answers, a run that was interrupted continues."""

    model_config = ConfigDict(extra="forbid")

    answers: dict[str, AnswerBody] = Field(max_length=_MAX_ANSWERS)


class CancelBody(BaseModel):
    """Why a run is cancelled."""

    model_config = ConfigDict(extra="forbid")

    reason: str | None = Field(None, max_length=_MAX_TEXT)


RunId = Annotated[str, Path(max_length=500)]


MaySee: TypeAlias = Callable[[SecurityIdentity, Run[Any]], bool | Awaitable[bool]]
"""Decides whether a caller may see a run, and so answer and cancel it: only True allows it."""


def runs_router(
    container: Container,
    *,
    prefix: str = "/runs",
    tags: Sequence[str] = ("runs",),
    events: bool = True,
    may_see: MaySee | None = None,
) -> APIRouter:
    """Return a router for the runs of a container. It does not authenticate clients: pass your own dependencies.

        app.include_router(runs_router(container), dependencies=[Depends(current_operator)])

    Without `may_see` everyone who gets in sees all runs. For customers, pass a function, `def` or `async def`, that
    gets the caller's `SecurityIdentity` and the run:

        runs_router(container, may_see=lambda identity, run: run.started_by == identity.name)

    Only True, returned or awaited, shows a run. Any other run is not listed, and is unknown for everything else. To
    compare tenants, name the attribute in `Container(run_identity=("tenant",))` and read `run.identity_attributes`.

    - `GET {prefix}?status=&service=&limit=`: `{"runs": […]}`, newest first, at most 1,000, of the newest 10,000 if
      `may_see` hides some.
    - `GET {prefix}/{id}`: one run.
    - `GET {prefix}/{id}/events`: its events as server-sent events; `Last-Event-ID` continues. Left out with
      `events=False`.
    - `POST {prefix}/{id}/answers` with `{"answers": {"0": {"kind": "approve"}}}`: answers pending calls, and waits
      until the run ends (200, `{"run_id", "status", "content"}`) or is suspended again (202, `{"run_id", "pending"}`).
      `by` is the `SecurityIdentity` of the request.
    - `POST {prefix}/{id}/cancel` with `{"reason": …}`: cancels it, and returns it; an ended run stays as it is. The
      history names the identity of the request.

    An unknown run gets 404. An invalid answer gets 409, or 422 with `problems` for replaced arguments. A person who may
    not answer gets 403, or 401 if anonymous, with the reason. `error` of a failed run is only the name of the
    exception's type. Raises `TypeError` if `may_see` does not take two arguments.
    """
    if may_see is not None and not takes(may_see, 2):
        raise TypeError(f"runs_router: may_see must be a function (identity, run) -> bool, got {may_see!r}")
    router = APIRouter(prefix=prefix, tags=list(tags))
    visible = _VisibleRuns(container, may_see)

    @router.get("", summary="List runs")
    async def list_runs(
        status: RunStatus | None = None,
        service: Annotated[str | None, Query(max_length=500)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> dict[str, list[RunView]]:
        """List runs, newest first."""
        return {"runs": [run_view(each) for each in await visible.list(status, service, limit)]}

    @router.get("/{run_id}", summary="Show a run")
    async def get_run(run_id: RunId) -> RunView:
        """Show one run."""
        return run_view(await visible.get(run_id))

    if events:

        @router.get("/{run_id}/events", summary="Follow a run", response_model=None)
        async def follow(
            run_id: RunId, last_event_id: Annotated[str | None, Header(max_length=100)] = None
        ) -> EventSourceResponse:
            """Send the events of a run, from the beginning or after `Last-Event-ID`."""
            await visible.get(run_id)
            return sse(container.runs.events(run_id, after=number_after(last_event_id)))

    @router.post("/{run_id}/answers", summary="Answer pending calls", response_model=None)
    async def answer(run_id: RunId, body: AnswersBody) -> Response:
        """Answer pending calls, and wait until the run ends or is suspended again."""
        try:
            answers = {call_id: each.answer() for call_id, each in body.answers.items()}
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        await visible.get(run_id)
        return await answer_pending(container, run_id, answers)

    @router.post("/{run_id}/cancel", summary="Cancel a run")
    async def cancel(run_id: RunId, body: CancelBody | None = None) -> RunView:
        """Cancel a run that has not ended."""
        await visible.get(run_id)
        reason = body.reason if body is not None else None
        await container.runs.cancel(run_id, reason, by=await caller_of(container))
        return run_view(await container.runs.get(run_id))

    return router


class _VisibleRuns:
    """The runs that `may_see` shows to the caller of the current request; all without it."""

    def __init__(self, container: Container, may_see: MaySee | None) -> None:
        self._container, self._may_see = container, may_see

    async def get(self, run_id: str) -> Run[Any]:
        """Return a run. Raises `RunNotFoundError`, also for one that is hidden."""
        run = await self._container.runs.get(run_id)
        if not await self._choose_visible([run]):
            raise RunNotFoundError(run_id)
        return run

    async def list(self, status: RunStatus | None, service: str | None, limit: int) -> list[Run[Any]]:
        """Return the newest runs. Calls `may_see` for no more than `_MAX_LOOKED_AT`."""
        found: list[Run[Any]] = []
        page = limit if self._may_see is None else max(limit, _PAGE)
        last: Run[Any] | None = None
        for _ in range(0, _MAX_LOOKED_AT, page):
            runs = await self._container.runs.list(status=status, service=service, limit=page, before=last)
            found += await self._choose_visible(runs)
            if len(found) >= limit or len(runs) < page:
                break
            last = runs[-1]
        return found[:limit]

    async def _choose_visible(self, runs: Sequence[Run[Any]]) -> Sequence[Run[Any]]:
        may_see, internals = self._may_see, internals_of(self._container)
        if may_see is None:
            return runs
        caller = await identity_in(internals)
        runner, execution = LoopRunner(internals.host.workers), marked_execution(may_see)

        async def is_visible(run: Run[Any]) -> bool:
            # Only True: what any kind of callable returns may be an awaitable, which the runner awaits, or anything.
            return await runner.run(execution, partial(may_see, caller, run), "may_see") is True

        return [run for run in runs if await is_visible(run)]


async def caller_of(container: Container) -> SecurityIdentity | None:
    """Return the identity of the request; None for an anonymous one."""
    identity = await identity_in(internals_of(container))
    return None if identity.is_anonymous else identity


async def answer_pending(container: Container, run_id: str, answers: Mapping[str, Answer]) -> Response:
    """Answer pending calls as the identity of the request. Returns the response: 200, 202, 401, 403, 409 or 422."""
    try:
        result = await container.runs.resume(run_id, answers, by=await caller_of(container))
    except RunAnswerError as error:
        return refusal_response(error)
    except RunSuspendedError as error:
        return _json_response(202, suspension(error.run_id, error.pending))
    if result.pending:
        return _json_response(202, suspension(run_id, result.pending))
    status = (await container.runs.get(run_id)).status
    return _json_response(200, {"run_id": run_id, "status": status, "content": result.content})


def run_view(run: Run[Any]) -> RunView:
    """Return what a client sees of a run. The text of an error can contain anything, and stays here."""
    error = run.error
    if run.status in ("failed", "running") and error is not None:  # a running one is tried again
        error = error.partition(":")[0]
    return RunView(
        id=run.id,
        service=run.service,
        method=run.method,
        status=run.status,
        pending=[PendingCallView(**pending_view(each)) for each in run.pending],
        created_at=run.created_at,
        updated_at=run.updated_at,
        history=[
            HistoryEntryView(
                at=each.at,
                by=each.by,
                call_id=each.call_id,
                tool_name=each.tool_name,
                answer=each.answer,
                reason=each.reason,
                remembered=each.remembered,
            )
            for each in run.history
        ],
        error=error,
        started_by=run.started_by,
        memory_id=run.memory_id,
        attempts=run.attempts,
    )


def refusal_response(error: RunAnswerError) -> Response:
    """Return 422 with the problems of replaced arguments, 401 or 403 for the wrong person, and 409 for the others."""
    problem = {**problem_details(error), "detail": error.reason}
    if error.problems:
        problem |= {"title": "Unprocessable Content", "status": 422}
        problem["problems"] = [{"path": _split_path(path), "message": message} for path, message in error.problems]
    headers = challenge(problem["status"], current_exchange())
    return _json_response(problem["status"], problem, "application/problem+json", headers)


def _split_path(path: object) -> list[str | int]:
    parts = path if isinstance(path, (list, tuple)) else (path,)
    return [each if isinstance(each, int) else str(each) for each in parts]


def _json_response(
    status: int,
    content: Mapping[str, Any],
    kind: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> Response:
    return Response(as_json(dict(content)), status, headers, media_type=kind)
