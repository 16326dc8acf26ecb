"""What errors may show: the faults that pydantic found, kept short whatever the value was; texts without secrets.

Not here: who is told of it, and in which error.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

SHOWN = 100
"""Faults that are listed; of more, how many they are."""
COUNTED = 10_000
"""Faults from which on none is listed: to build the list would cost more than reading the value did."""
HIDDEN = "***"
LONGEST = 500
"""Characters of a path or a message: either may hold what was sent."""


def faults_of(error: ValidationError) -> list[tuple[str, str]]:
    """The faults, as (path, message)."""
    count = error.error_count()
    if count > COUNTED:
        return [("", f"{count} values in it are wrong")]
    faults = [
        (brief(".".join(map(str, each["loc"]))), brief(each["msg"]))
        for each in error.errors(include_url=False, include_context=False, include_input=False)[:SHOWN]
    ]
    return [*faults, ("", f"and {count - SHOWN} more")] if count > SHOWN else faults


def brief(text: str, longest: int = LONGEST) -> str:
    """The beginning of `text`, where it is too long to be shown."""
    return text if len(text) <= longest else f"{text[:longest]}…"


def without_secrets(text: str, secrets: Collection[str]) -> str:
    """The text with each of these secrets hidden; very short ones are no secrets."""
    for secret in secrets:
        if len(secret) >= 4:
            text = text.replace(secret, HIDDEN)
    return text


def hide_secrets(error: BaseException, secrets: Collection[str]) -> None:
    """Takes these out of the error's facts; what caused it is cut off where its text shows one."""
    error.args = tuple(without_secrets(each, secrets) if isinstance(each, str) else each for each in error.args)
    for name, value in list(vars(error).items()):
        if isinstance(value, str):
            setattr(error, name, without_secrets(value, secrets))
    shown: BaseException = error
    while (below := shown.__cause__ or shown.__context__) is not None:
        text = f"{below!r} {below}"
        if without_secrets(text, secrets) != text:
            shown.__cause__ = shown.__context__ = None
            return
        shown = below
