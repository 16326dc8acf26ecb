"""Adds the values of conversation-scoped beans to the parts of an answer.

Not here: how the beans are stored (`toolbox.conversations`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from typing import Any

from toolbox.di.stored_beans import BeanForm
from toolbox.runs.runs_bean import Runs

from .stream_parts import BeanValues, Broken, Completed, Part, RoundEnd, Stopped, Waits

_AFTER_CHANGES = (RoundEnd, Waits, Completed, Stopped, Broken)


async def with_state(
    runs: Runs, run_id: str, parts: AsyncGenerator[Part, None], classes: Collection[type[Any]]
) -> AsyncGenerator[Part, None]:
    """Yield the values of the beans of these classes, then the parts, and the values again where they have changed."""
    forms = {each.__name__: BeanForm(each) for each in classes}

    async def read() -> BeanValues:
        stored = await runs.beans_of(run_id)
        return BeanValues({name: stored.get(form.name, json.loads(form.write(form()))) for name, form in forms.items()})

    sent = await read()
    yield sent
    async with aclosing(parts):
        async for part in parts:
            if isinstance(part, RoundEnd):
                yield part
            if isinstance(part, _AFTER_CHANGES) and (now := await read()) != sent:
                sent = now
                yield sent
            if not isinstance(part, RoundEnd):
                yield part
