"""Asks the retrievers of a method for the user message of a call, and keeps the numbers of all passages of the call.

They are asked once per call, before the first model request, and again when a run continues: it may have another
identity, and what is stored has no texts. Known passages keep their numbers, so that what the model has cited stays
true. Not here: running one retriever (`tools.retrievers`), adding the text to a request (`loop`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from contextvars import copy_context
from dataclasses import replace
from typing import Any, TypeVar

from ..chat import ToolExecution
from ..context import InContext
from ..errors import EndsInvocation
from ..execution.cancellation import CancellationsHere
from ..passages import EXPLANATION, NumberedPassages, Passage, passages_text, source_from_dict, source_to_dict, within
from ..request_hooks import RELEASES_CONNECTION
from ..tools.retrievers import BoundRetriever, ask, search
from .invocation import Invocation, Perform
from .loop import CallModel, RunTool, ToolFinished, request_of
from .model_calls import call_hooks
from .recording_needs import EffectForm
from .streamed_call import StreamedCall
from .templates import parse

logger = logging.getLogger("toolbox.retrieval")

T = TypeVar("T")

SOURCES: EffectForm[Sequence[Passage]] = EffectForm(
    "sources",
    lambda passages: {"sources": [source_to_dict(each) for each in passages]},
    lambda written: tuple(source_from_dict(each) for each in written["sources"]),
)
"""The passages that retrievers found first, without their texts. After a suspension, the state has them."""


async def find_passages(invocation: Invocation, streamed: StreamedCall | None) -> None:
    """Ask the retrievers, and let each request of the call have what they find. A run that continues asks later.

    Raises what a retriever raises, unless it is optional.
    """
    place = invocation.place
    if not invocation.user_message.text.strip() or (place is not None and place.run.cancels):
        return
    if place is None:
        await _search(invocation, streamed)
        return
    has_asked = False

    async def ask_first() -> Sequence[Passage]:
        nonlocal has_asked
        has_asked = True
        await _search(invocation, streamed)
        return _numbers_of(invocation).passages

    known = () if invocation.is_resumed else await place.effect(SOURCES, ask_first)
    if not has_asked:
        _numbers_of(invocation).expect(known)
        invocation.asks_again = True


def after_retrieval(perform: Perform, streamed: StreamedCall | None) -> Perform:
    """Return the layer that asks the retrievers in a run that continues, before the first request that the model gets.

    Before that, replies and results of tools are read from records: the numbers that their passages have are taken.
    """

    async def ask(effect: CallModel | RunTool, invocation: Invocation) -> Any:
        if isinstance(effect, RunTool) or not invocation.asks_again:
            return await perform(effect, invocation)
        if invocation.place is None or invocation.place.has_recorded_reply:
            return await perform(effect, invocation)
        invocation.asks_again = False
        await _search(invocation, streamed)
        note_passages(invocation)
        return await perform(CallModel(request_of(invocation.rules, invocation.state)), invocation)

    return ask


async def find_passages_of_charge(invocation: Invocation, streamed: StreamedCall | None) -> None:
    """Ask the retrievers of a method that has taken the call over. Known passages keep their numbers."""
    if not invocation.user_message.text.strip() or (invocation.place is not None and invocation.place.run.cancels):
        return
    invocation.asks_again = False
    await _search(invocation, streamed)


async def _search(invocation: Invocation, streamed: StreamedCall | None) -> None:
    numbers, cancellations = _numbers_of(invocation), CancellationsHere()
    before = len(numbers.passages)
    found = numbers.add(await _ask_all(invocation, invocation.user_message.text))
    if cancellations.came:
        raise asyncio.CancelledError("cancelled; a retriever caught the first CancelledError")
    if not found:
        return
    prompt, block = invocation.plan.options.passages_prompt, passages_text(found)
    text = f"{EXPLANATION}\n{block}" if prompt is None else parse(prompt)[0].render({"passages": block})
    invocation.passages = text
    invocation.rules = replace(invocation.rules, passages=text)
    if streamed is not None and len(numbers.passages) > before:
        await streamed.send_passages(tuple(numbers.passages))


def note_passages(invocation: Invocation, event: object = None) -> None:
    """Take the passages of the call into its state: after it has begun, and after each `event`.

    A retriever that is a tool may have been called by another process, which recorded the result.
    """
    numbers = _numbers_of(invocation)
    if event is None:
        _add_results(numbers, invocation.state.executions, invocation)
    elif isinstance(event, ToolFinished):
        _add_results(numbers, (event.outcome.execution,), invocation)
    passages = tuple(numbers.passages)
    if passages != invocation.state.passages:
        invocation.state = invocation.state.changed(passages=passages)


def _add_results(numbers: NumberedPassages, executions: Iterable[ToolExecution], invocation: Invocation) -> None:
    for each in executions:
        tool, found = invocation.find_tool(each.request.name), each.result_object
        if tool is not None and tool.run is search and isinstance(found, list):
            numbers.add_shown((passage for passage in found if isinstance(passage, Passage)), each.result)


def _numbers_of(invocation: Invocation) -> NumberedPassages:
    assert invocation.environment.passages is not None
    return invocation.environment.passages


# --- asking


async def _ask_all(invocation: Invocation, text: str) -> list[Passage]:
    """Return what the retrievers find, in their order, as much as the service allows."""
    await call_hooks(invocation, RELEASES_CONNECTION)
    retrievers, runner = invocation.plan.retrievers, invocation.runner
    if len(retrievers) == 1:
        asking: InContext[Sequence[Passage]] = InContext(copy_context(), _ask(retrievers[0], text, invocation))
        found = [await asking]
    else:
        runner.together = True
        try:
            found = await _all_of([_ask(each, text, invocation) for each in retrievers])
        finally:
            runner.together = False
    limit = invocation.plan.options.passages_chars
    kept, dropped = within(limit, (passage for passages in found for passage in passages))
    if dropped:
        logger.warning(
            "%s: the retrievers found more than %d characters; the last %d of %d passages are not sent; "
            "return less, or raise passages_chars=",
            invocation.where,
            limit,
            dropped,
            dropped + len(kept),
        )
    return kept


async def _ask(retriever: BoundRetriever, text: str, invocation: Invocation) -> Sequence[Passage]:
    messages = _numbers_of(invocation).messages
    try:
        return await ask(retriever.tool, text, messages, invocation.context, invocation.environment)
    except Exception as error:
        ends = isinstance(error, EndsInvocation) or (
            isinstance(error, ExceptionGroup) and error.subgroup(EndsInvocation) is not None
        )
        if ends or not retriever.optional:
            raise
        name, where = retriever.tool.where, invocation.where
        logger.warning("%s failed, and %s goes on without its passages: %s", name, where, error, exc_info=error)
        return ()


async def _all_of(steps: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run steps together. If one fails, cancel the others, wait for their end, and raise its error."""
    tasks = [asyncio.ensure_future(each) for each in steps]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
