"""What pydantic found wrong with a value, as paths and messages that stay short whatever the value was.

Not here: who is told of it, and in which error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

SHOWN = 100
"""Faults that are listed; of more, how many they are."""
COUNTED = 10_000
"""Faults from which on none is listed: to build the list would cost more than reading the value did."""
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
