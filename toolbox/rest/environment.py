"""Fixed values with `${NAME}` or `${NAME:default}` in them, which stand for variables of the environment.

Not here: settings (`settings`), values a call gives (`encoding`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

_VARIABLE = re.compile(r"\$\{([^{}:]+)(?::([^{}]*))?\}")


def variables_of(value: object) -> Iterator[tuple[str, str | None]]:
    """The `${NAME}`s of a fixed value, each with its `${NAME:default}`."""
    for text in value if isinstance(value, tuple) else (value,):
        if isinstance(text, str):
            for match in _VARIABLE.finditer(text):
                yield match[1], match[2]


def expanded(value: object) -> object:
    """A fixed value with its `${NAME}`s from the environment; None when one is missing there."""
    if isinstance(value, tuple):
        items = [expanded(each) for each in value]
        return None if None in items else items
    if not isinstance(value, str):
        return value
    if any(variables_missing(value)):
        return None
    return _VARIABLE.sub(lambda match: os.environ.get(match[1], match[2]), value)


def variables_missing(value: object) -> Iterator[str]:
    """The variables a fixed value needs and the environment does not have."""
    return (name for name, default in variables_of(value) if os.environ.get(name, default) is None)
