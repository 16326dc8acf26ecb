"""Environment variables in texts of the program: `${NAME}` and `${NAME:default}`.

Not here: settings (`settings`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

_VARIABLE = re.compile(r"\$\{([^{}:]+)(?::([^{}]*))?\}")


def variables_of(value: object) -> Iterator[tuple[str, str | None]]:
    """Yield name and default of each variable in a text or in a tuple of texts."""
    for text in value if isinstance(value, tuple) else (value,):
        if isinstance(text, str):
            for match in _VARIABLE.finditer(text):
                yield match[1], match[2]


def is_variable(text: str) -> bool:
    """Return True for a text that is one variable and nothing else."""
    return _VARIABLE.fullmatch(text) is not None


def expand_variables(value: object) -> object:
    """Return a value with its variables replaced; None if a variable without a default is not set."""
    if isinstance(value, tuple):
        items = [expand_variables(each) for each in value]
        return None if None in items else items
    if not isinstance(value, str):
        return value
    if any(variables_missing(value)):
        return None
    return _VARIABLE.sub(lambda match: os.environ.get(match[1], match[2]), value)


def variables_missing(value: object) -> Iterator[str]:
    """Yield the names of variables that a value needs but the environment does not set."""
    return (name for name, default in variables_of(value) if os.environ.get(name, default) is None)
