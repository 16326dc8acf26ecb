"""Settings classes as beans: they are built from the environment, and the problems of invalid ones contain no values.

Not here: the settings of the library (`toolbox.settings`).
"""

from __future__ import annotations

import sys
from typing import Any

from ..errors import IllegalConfigurationError, Problem
from ..introspection import type_name


def is_settings(form: Any) -> bool:
    """Return True for subclasses of `pydantic_settings.BaseSettings`."""
    module = sys.modules.get("pydantic_settings")
    base = getattr(module, "BaseSettings", None) if module is not None else None
    return base is not None and isinstance(form, type) and base in form.__mro__ and form is not base


def build_settings(cls: Any) -> Any:
    """Return the settings from the environment. Raises `IllegalConfigurationError`."""
    try:
        return cls()
    except Exception as error:  # settings classes can raise any error
        problem = settings_problem(cls, error)
    # Outside the handler, so that the context of the error does not contain the values.
    raise IllegalConfigurationError([problem])


def settings_problem(settings: Any, error: Exception) -> Problem:
    """Return the problem of settings that cannot be built, without values."""
    where = type_name(settings)
    report = getattr(error, "errors", None)
    if report is None:
        return Problem(where, f"the settings cannot be read ({type(error).__name__})", "correct the environment")
    faults = report(include_url=False, include_context=False, include_input=False)
    what = "; ".join(f"{'.'.join(map(str, each['loc']))}: {_error_text(each)}" for each in faults)
    missing = _variables(settings, [each for each in faults if each["type"] == "missing"])
    wrong = _variables(settings, [each for each in faults if each["type"] != "missing"])
    fix = " and ".join(f"{verb} {', '.join(names)}" for verb, names in (("set", missing), ("correct", wrong)) if names)
    return Problem(where, f"the settings cannot be read: {what}", fix or "correct the environment")


def _variables(settings: Any, faults: list[Any]) -> dict[str, None]:
    """Return the names of the invalid environment variables."""
    prefix, delimiter = (settings.model_config.get(each) or "" for each in ("env_prefix", "env_nested_delimiter"))
    places = [list(map(str, each["loc"])) for each in faults if each["loc"]]
    return dict.fromkeys((prefix + (delimiter.join(each) if delimiter else each[0])).upper() for each in places)


def _error_text(fault: Any) -> str:
    # The message of a custom validator can contain the value, which can be a secret.
    own = fault["type"] in ("value_error", "assertion_error")
    return "rejected by its validator" if own else str(fault["msg"])
