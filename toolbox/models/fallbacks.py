"""Chains of models, in which the next one answers if one does not, and the models that are skipped because they failed.

Not here: finding the models of a chain by their names (`hosts.model_beans`), retries of one model (`transport`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Protocol, TypeAlias, cast

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
LONGEST_COOLDOWN = 365 * 86400.0
"""Seconds: a longer `cooldown` counts as a year."""
MOST_FAILED = 1000
"""So many models that failed are remembered: producers may make models of any number of servers."""


# --- the models that failed lately

ModelKey: TypeAlias = tuple[object, ...]


@dataclass(slots=True)
class _Failure:
    """When a model failed, and if a request tries it now. `patience`: the time that was too short for a reply.

    It counts for models that wait no longer: with more patience, the same server may answer.
    """

    at: float
    at_time: datetime
    patience: float
    is_tried: bool = False


@dataclass(slots=True)
class _Failures:
    """The latest failures of a model, the earlier ones with more patience.

    `holder` keeps a program's own model known: its failures are forgotten with it.
    """

    found: list[_Failure]
    holder: object = None

    def of(self, model: ChatModel) -> list[_Failure]:
        """Return those that count for this model."""
        patience = patience_of(model)
        return [each for each in self.found if each.patience >= patience]


class CoolingModels:
    """The models of one container that failed, and when. Each model is skipped for as long as its own `cooldown` says.

    After that time one request of a chain tries the model, while others still skip it. If the model answers, it is
    asked again as before; if it fails, it cools down again. Anything else, such as a refusal, decides nothing: the next
    request tries. Models of one name, server and server's name are one, no matter who made them, but for time-outs: one
    tenant may wait longer than another. A model of a program's own class is one by itself. `name_of` returns the name
    under which the container has the model that a call names.
    """

    def __init__(self, name_of: Callable[[str], str] = str) -> None:
        self._name_of = name_of
        self._failed: dict[ModelKey, _Failures] = {}

    def _find(self, name: str, model: ChatModel) -> list[_Failure]:
        """Return the failures that count for a model."""
        known = self._failed.get(self._key_of(name, model)) if self._failed else None
        return known.of(model) if known is not None else []

    def _key_of(self, name: str, model: ChatModel) -> ModelKey:
        name = self._name_of(name)
        server = server_of(model)
        return (name, id(model)) if server is None else (name, *server)

    def skipped_until(self, name: str, model: ChatModel) -> datetime | None:
        """Return until when the model is skipped; None if it may be asked now."""
        cooldown = cooldown_of(model)
        now = time.monotonic()
        found = [each for each in self._find(name, model) if each.is_tried or now < each.at + cooldown]
        return max(each.at_time for each in found) + timedelta(seconds=cooldown) if found and cooldown > 0 else None

    def note_try(self, name: str, model: ChatModel) -> None:
        """Let other chains skip a model that has failed, while it is tried."""
        for failure in self._find(name, model):
            failure.is_tried = True

    def note_answer(self, name: str, model: ChatModel) -> None:
        """Note that a model has answered, or has begun to. A chain notes that for each of its models."""
        if not self._failed or isinstance(model, FallbackModel):
            return
        key = self._key_of(name, model)
        if (known := self._failed.get(key)) is not None:
            # Others may have too little patience for it.
            over = known.of(model)
            known.found = [each for each in known.found if each not in over]
            if not known.found:
                del self._failed[key]

    def note_error(self, name: str, model: ChatModel, error: BaseException) -> None:
        """Note how a request to a model has ended without an answer. A chain notes that for each of its models."""
        if isinstance(model, FallbackModel):
            return
        if is_failure(error):
            self._add(self._key_of(name, model), model, isinstance(error, ModelTimeoutError))
            return
        for failure in self._find(name, model):
            failure.is_tried = False

    def _add(self, key: ModelKey, model: ChatModel, was_timeout: bool) -> None:
        patience = patience_of(model) if was_timeout else inf
        known = self._failed.pop(key, None) or _Failures([], self._watch(key, model))
        known.found = [each for each in known.found if each.patience > patience]
        known.found.append(_Failure(time.monotonic(), datetime.now(UTC), patience))
        self._failed[key] = known  # the latest is last
        if len(self._failed) > MOST_FAILED:
            del self._failed[next(iter(self._failed))]

    def _watch(self, key: ModelKey, model: ChatModel) -> object:
        """Return what keeps the identity of a program's own model, which another object may get after it."""
        if server_of(model) is not None:
            return None
        try:
            return weakref.ref(model, lambda _: self._failed.pop(key, None))
        except TypeError:  # a class with slots
            return model


class ServedModel(ChatModel, Protocol):
    """A model behind a server, which other objects may be too.

    `server_identity` tells its server, and its model there, from others; None if nothing does. `patience` are the
    seconds that it waits for a reply, at most.
    """

    @property
    def server_identity(self) -> tuple[str, str] | None: ...
    @property
    def patience(self) -> float: ...


def _as_served(model: ChatModel) -> ServedModel | None:
    # By its class: a wrapper of the program may pass on all attributes of the model inside.
    return cast("ServedModel", model) if hasattr(type(model), "server_identity") else None


def server_of(model: ChatModel) -> tuple[str, str] | None:
    """Return the server and the name of a model there; None for a model of a program's own class."""
    served = _as_served(model)
    return None if served is None else served.server_identity


def patience_of(model: ChatModel) -> float:
    """Return the seconds that a model waits for a reply, at most."""
    served = _as_served(model)
    return inf if served is None else served.patience


def fallback_names(model: object) -> tuple[str, ...]:
    """Return the names of the models that are called if this one does not answer.

    Raises `TypeError` for a `fallback` that contains no names.
    """
    given = getattr(model, "fallback", None)
    if given is None or isinstance(given, str):
        return () if given is None else (given,)
    if not isinstance(given, Iterable):
        raise TypeError(f"{type(model).__name__}.fallback: expected a tuple of names of models, got {given!r}")
    return tuple(given)


def cooldown_of(model: ChatModel) -> float:
    """Return the seconds for which a model is skipped after it failed, at most a year; 0 for never."""
    given = getattr(model, "cooldown", DEFAULT_COOLDOWN)
    if not isinstance(given, (int, float)):
        return DEFAULT_COOLDOWN
    return min(float(given), LONGEST_COOLDOWN) if given > 0 else 0.0


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
    `first_answer` and `first_stream` let the caller ask each model itself, with events for example.
    """

    def __init__(
        self, chain: Sequence[NamedModel], cooling: CoolingModels, tell_skipped: Callable[[str, datetime], None]
    ) -> None:
        self._chain, self._cooling, self._tell_skipped = tuple(chain), cooling, tell_skipped
        self.supports_response_format = all(getattr(each.model, "supports_response_format", False) for each in chain)

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """Return the reply of the first model that answers. Raises the error of the last model that was asked."""

        async def ask(model: ChatModel) -> ChatResponse:
            return name_answering_model(await model.chat(request), model)

        return await self.first_answer(ask)

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        """Yield the stream of the first model that starts one. Raises the error of the last model that was asked."""

        async def read(model: ChatModel) -> AsyncGenerator[StreamEvent, None]:
            async with aclosing(answer_stream(model, request)) as events:
                async for event in events:
                    if isinstance(event, CompleteResponse):
                        event = CompleteResponse(name_answering_model(event.response, model))
                    yield event

        async with aclosing(self.first_stream(read)) as events:
            async for event in events:
                yield event

    async def first_answer(self, ask: Callable[[ChatModel], Awaitable[ChatResponse]]) -> ChatResponse:
        """Return what `ask` returns for the first model that answers."""
        failure: ModelError | None = None
        for each in self._asked():
            try:
                response = await ask(each.model)
            except BaseException as error:
                self._cooling.note_error(each.name, each.model, error)
                if not isinstance(error, ModelError) or not is_worth_another_model(error):
                    raise
                failure = error
            else:
                self._cooling.note_answer(each.name, each.model)
                return response
        assert failure is not None, "one model is always asked"
        raise failure

    async def first_stream(
        self, read: Callable[[ChatModel], AsyncGenerator[StreamEvent, None]]
    ) -> AsyncGenerator[StreamEvent, None]:
        """Yield what `read` yields for the first model that starts a stream."""
        failure: ModelError | None = None
        for each in self._asked():
            begun = False
            try:
                async with aclosing(read(each.model)) as events:
                    async for event in events:
                        if not begun:
                            begun = True
                            self._cooling.note_answer(each.name, each.model)
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


def name_answering_model(response: ChatResponse, model: ChatModel) -> ChatResponse:
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
