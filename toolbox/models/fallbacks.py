"""Chains of models, in which the next one answers if one does not, and the models that are skipped because they failed.

Not here: finding the models of a chain by their names (`hosts.model_beans`), retries of one model (`transport`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from math import inf
from typing import TypeAlias

from ..chat import ChatModel, ChatRequest, ChatResponse, CompleteResponse, StreamEvent
from ..chat_streams import answer_stream
from ..errors import (
    ContextLengthError,
    ModelConnectionError,
    ModelError,
    ModelHttpError,
    ModelRefusedError,
    ModelTimeoutError,
    ModelTruncatedError,
    Problem,
)

DEFAULT_COOLDOWN = 30.0
"""The seconds for which a model that failed is skipped, unless it says otherwise."""
MOST_FAILED = 1000
"""So many models that failed are remembered: producers may make models of any number of servers."""


# --- the models that failed lately

ModelKey: TypeAlias = tuple[str, object, object]
"""Name, server and model: tenants with different servers share a name, but not what happens to one of them."""


def model_key(name: str, model: ChatModel) -> ModelKey:
    """Return what a failure of this model is remembered by."""
    return name, getattr(model, "base_url", None), getattr(model, "model", None)


@dataclass(slots=True)
class _Failed:
    """A model that failed: when it may be asked again, and if a request tries it now."""

    until: float
    until_time: datetime
    is_tried: bool = False


class CoolingModels:
    """The models of one container that failed, each for as long as its `cooldown` says.

    After that time one request of a chain tries the model, while others still skip it. If the model answers, it is
    asked again as before; if it fails, it cools down again. Anything else, such as a refusal, decides nothing: the next
    request tries. `name_of` returns the name under which the container has the model that a call names.
    """

    def __init__(self, name_of: Callable[[str], str] = str) -> None:
        self._name_of = name_of
        self._failed: dict[ModelKey, _Failed] = {}

    def _find(self, name: str, model: ChatModel) -> _Failed | None:
        return self._failed.get(model_key(self._name_of(name), model)) if self._failed else None

    def skipped_until(self, name: str, model: ChatModel) -> datetime | None:
        """Return until when the model is skipped; None if it may be asked now."""
        failed = self._find(name, model)
        if failed is None or (time.monotonic() >= failed.until and not failed.is_tried):
            return None
        return failed.until_time

    def note_try(self, name: str, model: ChatModel) -> None:
        """Let other chains skip a model that has failed, while it is tried."""
        if (failed := self._find(name, model)) is not None:
            failed.is_tried = True

    def note_answer(self, name: str, model: ChatModel) -> None:
        """Note that a model has answered, or has begun to. A chain notes that for each of its models."""
        if self._failed and not isinstance(model, FallbackModel):
            self._failed.pop(model_key(self._name_of(name), model), None)

    def note_error(self, name: str, model: ChatModel, error: BaseException) -> None:
        """Note how a request to a model has ended without an answer. A chain notes that for each of its models."""
        if isinstance(model, FallbackModel):
            return
        if is_failure(error):
            self._add(model_key(self._name_of(name), model), cooldown_of(model))
        elif (failed := self._find(name, model)) is not None:
            failed.is_tried = False

    def _add(self, key: ModelKey, cooldown: float) -> None:
        if cooldown <= 0:
            return
        now = time.monotonic()
        if len(self._failed) >= MOST_FAILED:
            self._failed = {each: failed for each, failed in self._failed.items() if failed.until > now}
        if len(self._failed) < MOST_FAILED:
            self._failed[key] = _Failed(now + cooldown, datetime.now(UTC) + timedelta(seconds=cooldown))


def fallback_names(model: object) -> tuple[str, ...]:
    """Return the names of the models that are called if this one does not answer."""
    given = getattr(model, "fallback", ())
    return (given,) if isinstance(given, str) else tuple(given)


def cooldown_of(model: ChatModel) -> float:
    """Return the seconds for which a model is skipped after it failed; 0 for never."""
    given = getattr(model, "cooldown", DEFAULT_COOLDOWN)
    return float(given) if isinstance(given, (int, float)) else DEFAULT_COOLDOWN


def cooldown_problem(given: object, where: str) -> Problem | None:
    """Return the problem of an invalid `cooldown`, or None."""
    if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given < inf:
        return None
    return Problem(where, f"invalid cooldown={given!r}", "use seconds of 0 or more; 0 turns it off")


def is_failure(error: BaseException) -> bool:
    """Return True if the server failed: it cannot be reached, is too slow, or answers with 5xx. 429 does not count."""
    if isinstance(error, ModelHttpError):
        return error.status >= 500
    return isinstance(error, (ModelConnectionError, ModelTimeoutError))


# --- the chain


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model of a chain, with its name in the container."""

    name: str
    model: ChatModel


class FallbackModel(ChatModel):
    """Calls several models in order until one answers. A stream switches only before its first event.

    Models that cool down are skipped, which `tell_skipped` gets with the name of the model and the end of its time. If
    all of them cool down, only the first is asked. A reply without a model's name gets that of the model that answered.
    """

    def __init__(
        self, chain: Sequence[NamedModel], cooling: CoolingModels, tell_skipped: Callable[[str, datetime], None]
    ) -> None:
        self._chain, self._cooling, self._tell_skipped = tuple(chain), cooling, tell_skipped
        self.models = tuple(each.model for each in chain)
        self.supports_response_format = all(getattr(each, "supports_response_format", False) for each in self.models)

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """Return the reply of the first model that answers. Raises the error of the last model that was asked."""
        failure: ModelError | None = None
        for each in self._asked():
            try:
                response = await each.model.chat(request)
            except BaseException as error:
                self._cooling.note_error(each.name, each.model, error)
                if not isinstance(error, ModelError) or not is_worth_another_model(error):
                    raise
                failure = error
            else:
                self._cooling.note_answer(each.name, each.model)
                return _name_model(response, each.model)
        assert failure is not None, "one model is always asked"
        raise failure

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        """Yield the stream of the first model that starts one. Raises the error of the last model that was asked."""
        failure: ModelError | None = None
        for each in self._asked():
            begun = False
            try:
                async with aclosing(answer_stream(each.model, request)) as events:
                    async for event in events:
                        if not begun:
                            begun = True
                            self._cooling.note_answer(each.name, each.model)
                        if isinstance(event, CompleteResponse):
                            event = CompleteResponse(_name_model(event.response, each.model))
                        yield event
                self._cooling.note_answer(each.name, each.model)
                return
            except BaseException as error:
                if not begun:
                    self._cooling.note_error(each.name, each.model, error)
                if begun or not isinstance(error, ModelError) or not is_worth_another_model(error):
                    raise
                failure = error
        assert failure is not None, "one model is always asked"
        raise failure

    def _asked(self) -> Iterator[NamedModel]:
        """Yield the models to ask; send the events of those that are skipped on the way."""
        skipped: list[tuple[str, datetime]] = []
        is_asked = False
        for each in self._chain:
            until = self._cooling.skipped_until(each.name, each.model)
            if until is not None:
                skipped.append((each.name, until))
                continue
            while skipped:
                self._tell_skipped(*skipped.pop(0))
            is_asked = True
            self._cooling.note_try(each.name, each.model)
            yield each
        if not is_asked:
            yield self._chain[0]
            return
        for name, until in skipped:
            self._tell_skipped(name, until)


def _name_model(response: ChatResponse, model: ChatModel) -> ChatResponse:
    """Return the reply with the name of the model that gave it, if the server reported none.

    Who called the chain cannot know which of its models answered; prices and traces need to.
    """
    name = getattr(model, "model", None)
    if not isinstance(response, ChatResponse) or response.model is not None or not isinstance(name, str):
        return response
    return replace(response, model=name)


def is_worth_another_model(error: ModelError) -> bool:
    """Return True if another model may succeed: the server failed, not the request or the model's answer."""
    if isinstance(error, (ContextLengthError, ModelRefusedError, ModelTruncatedError)):
        return False
    return not isinstance(error, ModelHttpError) or error.status not in (400, 413, 415, 422)
