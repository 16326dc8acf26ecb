"""`runs_router`: endpoints that list, show, follow, answer and cancel runs, for an application's own front end.

Not here: who may use them, which is the application's decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, HTTPException, Path, Query, Response
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel, ConfigDict, Field

from toolbox.chat import PendingCall
from toolbox.container import Container, internals_of
from toolbox.errors import RunAnswerError, RunSuspendedError
from toolbox.runs.answers import Answer, Run, approve, fail, reject, respond, retry
from toolbox.runs.event_log import number_after
from toolbox.runs.store import RunStatus
from toolbox.security import identity_in

from .streaming import as_json, sse

_MAX_ANSWERS = 1000  # in one request
_MAX_TEXT = 10_000  # characters of a reason


class PendingCallView(BaseModel):
    """A call that waits for an answer."""

    id: str
    tool_name: str
    arguments: dict[str, Any]
    service: str
    kind: Literal["approval", "deferred", "unknown_outcome"]
    reason: str | None
    attributes: dict[str, Any]


class HistoryEntryView(BaseModel):
    """One answer that a run received, or its cancellation."""

    at: datetime
    by: str | None
    call_id: str | None
    tool_name: str | None
    answer: str
    reason: str | None


class RunView(BaseModel):
    """A run. `error` is only the type of the error."""

    id: str
    service: str
    method: str
    status: RunStatus
    pending: list[PendingCallView]
    created_at: datetime
    updated_at: datetime
    history: list[HistoryEntryView]
    error: str | None


class AnswerBody(BaseModel):
    """The answer to one pending call: `kind` is the name of the function in `toolbox.runs` that creates it."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["approve", "reject", "respond", "fail", "retry"]
    arguments: dict[str, Any] | None = Field(None, description="For approve: replaces all arguments.")
    value: Any = Field(None, description="For respond: the result of the call.")
    reason: str | None = Field(None, max_length=_MAX_TEXT, description="For reject and fail: the model reads it.")

    def answer(self) -> Answer:
        """Return the answer. Raises `ValueError` for a field that its kind does not have."""
        allowed = {"approve": "arguments", "respond": "value", "reject": "reason", "fail": "reason"}.get(self.kind)
        if extra := sorted(self.model_fields_set - {"kind", allowed}):
            raise ValueError(f"{self.kind} has no {extra[0]}")
        match self.kind:
            case "approve":
                return approve(self.arguments) if self.arguments is not None else approve()
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


def runs_router(
    container: Container, *, prefix: str = "/runs", tags: Sequence[str] = ("runs",), events: bool = True
) -> APIRouter:
    """Return a router for the runs of a container. It does not authenticate clients: pass your own dependencies.

        app.include_router(runs_router(container), dependencies=[Depends(current_operator)])

    - `GET {prefix}?status=&service=&limit=`: `{"runs": […]}`, newest first, at most 1,000.
    - `GET {prefix}/{id}`: one run.
    - `GET {prefix}/{id}/events`: its events as server-sent events; `Last-Event-ID` continues. Left out with
      `events=False`.
    - `POST {prefix}/{id}/answers` with `{"answers": {"0": {"kind": "approve"}}}`: answers pending calls, and waits
      until the run ends (200, `{"run_id", "status", "content"}`) or is suspended again (202, `{"run_id", "pending"}`).
      `by` is the `SecurityIdentity` of the request.
    - `POST {prefix}/{id}/cancel` with `{"reason": …}`: cancels it, and returns it; an ended run stays as it is.

    An unknown run gets 404. An invalid answer gets 409, or 422 with `problems` for replaced arguments. `error`
    of a failed run is only the name of the exception's type.
    """
    router = APIRouter(prefix=prefix, tags=list(tags))

    @router.get("", summary="List runs")
    async def list_runs(
        status: RunStatus | None = None,
        service: Annotated[str | None, Query(max_length=500)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> dict[str, list[RunView]]:
        """List runs, newest first."""
        return {
            "runs": [run_view(each) for each in await container.runs.list(status=status, service=service, limit=limit)]
        }

    @router.get("/{run_id}", summary="Show a run")
    async def get_run(run_id: RunId) -> RunView:
        """Show one run."""
        return run_view(await container.runs.get(run_id))

    if events:

        @router.get("/{run_id}/events", summary="Follow a run", response_model=None)
        async def follow(
            run_id: RunId, last_event_id: Annotated[str | None, Header(max_length=100)] = None
        ) -> EventSourceResponse:
            """Send the events of a run, from the beginning or after `Last-Event-ID`."""
            await container.runs.get(run_id)
            return sse(container.runs.events(run_id, after=number_after(last_event_id)))

    @router.post("/{run_id}/answers", summary="Answer pending calls", response_model=None)
    async def answer(run_id: RunId, body: AnswersBody) -> Response:
        """Answer pending calls, and wait until the run ends or is suspended again."""
        try:
            answers = {call_id: each.answer() for call_id, each in body.answers.items()}
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        return await answered(container, run_id, answers)

    @router.post("/{run_id}/cancel", summary="Cancel a run")
    async def cancel(run_id: RunId, body: CancelBody | None = None) -> RunView:
        """Cancel a run that has not ended."""
        await container.runs.cancel(run_id, reason=body.reason if body is not None else None)
        return run_view(await container.runs.get(run_id))

    return router


async def answered(container: Container, run_id: str, answers: Mapping[str, Answer]) -> Response:
    """Answer pending calls as the identity of the request. Returns the response: 200, 202, 409 or 422."""
    identity = await identity_in(internals_of(container))
    by = None if identity.is_anonymous else identity
    try:
        result = await container.runs.resume(run_id, answers, by=by)
    except RunAnswerError as error:
        return _refused(error)
    except RunSuspendedError as error:
        return _suspended(error.run_id, error.pending)
    if result.pending:
        return _suspended(run_id, result.pending)
    status = (await container.runs.get(run_id)).status
    return _json(200, {"run_id": run_id, "status": status, "content": result.content})


def run_view(run: Run[Any]) -> RunView:
    """Return what a client sees of a run. The text of an error can contain anything, and stays here."""
    error = run.error
    if run.status == "failed" and error is not None:
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
            )
            for each in run.history
        ],
        error=error,
    )


def pending_view(call: PendingCall) -> dict[str, Any]:
    """Return the fields of a pending call."""
    return {name: getattr(call, name) for name in PendingCall.__slots__}


def _suspended(run_id: str, pending: Sequence[PendingCall]) -> Response:
    return _json(202, {"run_id": run_id, "pending": [pending_view(each) for each in pending]})


def _refused(error: RunAnswerError) -> Response:
    """Return 422 with the problems of replaced arguments, and 409 for other invalid answers."""
    status = 422 if error.problems else 409
    title = "Unprocessable Content" if error.problems else "Conflict"
    problem: dict[str, Any] = {"type": "about:blank", "title": title, "status": status, "detail": error.reason}
    if error.problems:
        problem["problems"] = [{"path": _path(path), "message": message} for path, message in error.problems]
    return _json(status, problem, "application/problem+json")


def _path(path: object) -> list[str | int]:
    parts = path if isinstance(path, (list, tuple)) else (path,)
    return [each if isinstance(each, int) else str(each) for each in parts]


def _json(status: int, content: Mapping[str, Any], kind: str = "application/json") -> Response:
    return Response(as_json(dict(content)), status, media_type=kind)
