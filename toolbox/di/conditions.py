"""`@only_if`: registers a class or a producer only under conditions, which are decided before the check.

Not here: which registered objects are read (`registry`), problems of beans that were left out (`graph`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeAlias, TypeVar, get_origin

from typing_extensions import TypeForm

from ..introspection import is_key, plain, type_name

D = TypeVar("D")

CONDITIONS_MARK = "__toolbox_conditions__"


@dataclass(frozen=True, slots=True)
class ProfileCondition:
    """Holds while the profile is active."""

    profile: str


@dataclass(frozen=True, slots=True)
class MissingCondition:
    """Holds if no bean of the type is registered without conditions."""

    missing: Any


@dataclass(frozen=True, slots=True)
class SettingCondition:
    """Holds if the environment variable is set and not empty."""

    setting: str


Condition: TypeAlias = ProfileCondition | MissingCondition | SettingCondition


def only_if(
    *, profile: str | None = None, missing: TypeForm[Any] | None = None, setting: str | None = None
) -> Callable[[D], D]:
    """Register a class, a producer or another function only if all conditions hold. Several decorators must all hold.

        @only_if(profile="prod")
        class SmtpMailer(Mailer): ...

        @produces(scope="application")
        @only_if(missing=Cache)
        def local_cache() -> Cache: ...

    - `profile`: the profile is one of `TOOLBOX_PROFILE`, or of `ToolboxSettings(profile=…)`.
    - `missing`: no bean of this type is registered without conditions.
    - `setting`: the environment variable with this name is set and not empty.

    A class or function that does not meet a condition is not registered. Raises `TypeError` without conditions, and for
    values of wrong types.
    """
    conditions: list[Condition] = []
    if profile is not None:
        conditions.append(ProfileCondition(_checked_name("profile", profile)))
    if missing is not None:
        if not _is_type(plain(missing)):
            raise TypeError(f"@only_if: missing= must be the type of a bean, got {missing!r}")
        conditions.append(MissingCondition(missing))
    if setting is not None:
        conditions.append(SettingCondition(_checked_name("setting", setting)))
    if not conditions:
        raise TypeError('@only_if needs a condition: @only_if(profile="prod"), missing=Type or setting="NAME"')

    def apply(target: D) -> D:
        function = getattr(target, "__func__", target)
        if not isinstance(target, type) and not hasattr(function, "__code__"):
            raise TypeError(f"@only_if: expected a class or a function, got {target!r}")
        # In front of those of the decorators below, because decorators are read from above.
        setattr(function, CONDITIONS_MARK, (*conditions, *conditions_of(target)))
        return target

    return apply


def _checked_name(kind: str, name: object) -> str:
    if not isinstance(name, str) or not name.strip() or "," in name:
        raise TypeError(f"@only_if: {kind}= must be one name, got {name!r}")
    return name.strip()


def _is_type(form: Any) -> bool:
    return is_key(form) and (isinstance(form, type) or get_origin(form) is not None or hasattr(form, "__supertype__"))


def conditions_of(registered: object) -> tuple[Condition, ...]:
    """Return the conditions of a class or function. Subclasses do not inherit them."""
    # Each registered class and each of its methods is asked, so classes and functions are not searched for `__func__`.
    is_plain = isinstance(registered, (type, FunctionType))
    function = registered if is_plain else getattr(registered, "__func__", registered)
    found: tuple[Condition, ...] = getattr(function, "__dict__", {}).get(CONDITIONS_MARK, ())
    return found


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A registered object (`source`) whose conditions do not hold.

    `name` and `provides` are its name and the type of its bean, `why` and `fix` are texts.
    """

    name: str
    provides: Any
    why: str
    fix: str
    source: object = None

    def __str__(self) -> str:
        return f"{self.name} was left out, because {self.why}"


@dataclass(frozen=True, slots=True)
class Conditions:
    """Decides conditions for one reading. `provides` tells if a bean of a type is registered without conditions."""

    profiles: Collection[str]
    provides: Callable[[Any], bool]

    def reasons_against(self, conditions: tuple[Condition, ...]) -> list[tuple[str, str]]:
        """Return why conditions do not hold, each with its fix; empty if all of them hold."""
        return [reason for each in conditions if (reason := self._reason_against(each)) is not None]

    def _reason_against(self, condition: Condition) -> tuple[str, str] | None:
        match condition:
            case ProfileCondition(profile):
                if profile in self.profiles:
                    return None
                active = f"the active ones are {', '.join(sorted(self.profiles))}" if self.profiles else "none is"
                return f"the profile {profile!r} is not active ({active})", f"set TOOLBOX_PROFILE={profile}"
            case MissingCondition(missing):
                name = type_name(missing)
                found = f"a bean of type {name} is registered", f"request {name}"
                return found if self.provides(missing) else None
            case SettingCondition(setting):
                if os.environ.get(setting):
                    return None
                return f"{setting} is {'empty' if setting in os.environ else 'not set'}", f"set {setting}"
