"""Checks an answer to a pending call before it is stored: that the call waits for it, and who gives it.

Not here: what the answer contains, which the body of the run checks (`run_body`), storing it and continuing the run
(`resuming`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import AnswerForbiddenError, RunAnswerError
from ..safe_text import printable
from .documents import WaitingCall
from .persons import person_name
from .run_answers import KINDS, Answer, AnswerKind
from .run_body import PreparedRun
from .store import StoredRun
from .stored_runs import shortened

MAX_REASON = 10_000
"""The maximum length of a reason, in characters."""


async def check_answer(
    stored: StoredRun, prepared: PreparedRun, call_id: str, answer: object, by: Any
) -> tuple[WaitingCall, Answer]:
    """Return the pending call and its answer. Raises `RunAnswerError` if the answer is invalid."""
    run_id = stored.id
    waiting = next((each for each in prepared.document.waiting if each.call.id == call_id), None)
    if waiting is None:
        pending = ", ".join(each.call.id for each in prepared.document.waiting) or "none"
        raise RunAnswerError(run_id, f"no pending call has the id {shortened(call_id)}; pending: {pending}")
    call = waiting.call
    if not isinstance(answer, Answer):
        fix = "use approve(), reject(…), respond(…), fail(…) or retry()"
        raise RunAnswerError(run_id, f"call {call_id}: expected an answer, got {type(answer).__name__}; {fix}")
    if answer.kind not in KINDS[call.kind]:
        allowed = " or ".join(f"{each}()" for each in KINDS[call.kind])
        raise RunAnswerError(
            run_id,
            f"call {call_id} is of kind {call.kind!r}, so {answer.kind}() is not a valid answer; use {allowed}",
        )
    check_person(run_id, waiting, prepared, answer.kind, by)
    answer = await prepared.body.check_answer(stored, prepared, waiting, answer)
    if answer.reason is not None:
        if not isinstance(answer.reason, str):
            raise RunAnswerError(run_id, f"call {call_id}: the reason must be a string")
        refuse_long(run_id, call_id, "the reason", answer.reason, MAX_REASON)
        answer = replace(answer, reason=printable(answer.reason))
    return waiting, answer


def check_person(run_id: str, waiting: WaitingCall, prepared: PreparedRun, kind: AnswerKind, by: Any) -> None:
    """Raise `AnswerForbiddenError` if this person may not answer the call. The present rules of its tool count."""
    call_id, name, starter = waiting.call.id, person_name(by), prepared.document.identity
    verb = "approve" if waiting.call.kind == "approval" else "answer"
    approvers, not_self = prepared.body.find_rules(run_id, prepared, waiting)
    if approvers:
        roles = getattr(by, "roles", None)
        needed = ", ".join(approvers)
        if roles is None:
            fact = f"call {call_id} needs a person with one of the roles {needed}; pass by=SecurityIdentity(…)"
            raise AnswerForbiddenError(run_id, fact, is_anonymous=by is None)
        if not set(approvers) & set(roles):
            person = repr(name) if name else "an anonymous person"
            fact = f"call {call_id}: {person} may not {verb} it; it needs one of: {needed}"
            raise AnswerForbiddenError(run_id, fact, is_anonymous=not name)
    if not_self:
        if not name:
            fact = f"call {call_id}: another person must {verb} it; pass by="
            raise AnswerForbiddenError(run_id, fact, is_anonymous=True)
        if starter is not None and starter["name"] == name:
            fact = f"call {call_id}: {name!r} started it and cannot {verb} it (not_self=True); another person must"
            raise AnswerForbiddenError(run_id, fact)
        if starter is None and kind not in ("reject", "fail"):
            # From a release in which anonymous callers could ask for it: this person may be the one who asked.
            fact = f"call {call_id}: it is unknown who asked for it; use reject(…) or fail(…), or cancel the run"
            raise AnswerForbiddenError(run_id, fact)


def refuse_long(run_id: str, call_id: str, what: str, text: str, limit: int) -> None:
    """Raise `RunAnswerError` for a part of an answer that is too long."""
    if len(text) > limit:
        fact = f"{what} must have at most {limit:,} characters; got {len(text):,}"
        raise RunAnswerError(run_id, f"call {call_id}: {fact}")
