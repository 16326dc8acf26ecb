"""Providers of models: how settings become a model, by the name in `TOOLBOX_MODELS__<NAME>__PROVIDER`.

A new kind of model server is a new entry in `PROVIDERS`. Not here: which name means which model (`selection`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..chat import ChatModel
from ..errors import Problem

if TYPE_CHECKING:
    from ..settings import ModelSettings


class ModelProvider(Protocol):
    """Makes models of one kind from a section of the settings, or from the environment alone (`section` is None)."""

    def is_in_environment(self) -> bool:
        """Return True if the provider's own variables are enough for a default model."""
        ...

    def model_in_environment(self) -> str | None:
        """Return the name of the default model that the provider's own variables give."""
        ...

    def problem(self, name: str, section: ModelSettings | None, where: str) -> Problem | None:
        """Return why the model called `name` cannot be made; None if it can."""
        ...

    def make(self, section: ModelSettings | None) -> ChatModel:
        """Return the model."""
        ...


class OpenAiProvider:
    """Makes `OpenAiChatModel`s; `wire` wins over that of the settings."""

    def __init__(self, wire: Literal["responses"] | None = None) -> None:
        self._wire = wire

    def is_in_environment(self) -> bool:
        return bool(
            self.model_in_environment() and (os.environ.get("OPENAI_API_KEY") or os.environ.get("OPENAI_BASE_URL"))
        )

    def model_in_environment(self) -> str | None:
        return os.environ.get("OPENAI_MODEL") or None

    def problem(self, name: str, section: ModelSettings | None, where: str) -> Problem | None:
        from .openai_settings import OpenAiSettings, is_address, problems_of

        given = arguments_of(section, OpenAiSettings) if section is not None else {}
        prefix = f"TOOLBOX_MODELS__{variable_of(name)}__"
        found = OpenAiSettings(name, **given).with_environment()
        if found.base_url and not is_address(found.base_url):
            variable = f"{prefix}BASE_URL" if given.get("base_url") else "OPENAI_BASE_URL"
            what = f"the address of model {name!r} does not begin with http:// or https://"
            return Problem(where, what, f"set {variable} to an address such as http://localhost:11434/v1")
        if not found.base_url and not found.api_key:
            return None  # a program may give the key later
        problem = next(problems_of(found), None)
        if problem is None:
            return None
        variables = f"the variables are {prefix}BASE_URL, __API_KEY, __HEADERS, then OPENAI_BASE_URL, OPENAI_API_KEY"
        return Problem(where, f"model {name!r} cannot be made: {problem.what}", f"{problem.fix}; {variables}")

    def make(self, section: ModelSettings | None) -> ChatModel:
        from .openai import OpenAiChatModel
        from .openai_settings import OpenAiSettings

        given = arguments_of(section, OpenAiSettings) if section is not None else {}
        if self._wire is not None:
            given["wire"] = self._wire
        model = section.model if section is not None else None
        return OpenAiChatModel(model or self.model_in_environment() or "", **given)


PROVIDERS: Mapping[str, Callable[[], ModelProvider]] = {
    "openai": OpenAiProvider,
    "openai-responses": lambda: OpenAiProvider("responses"),
}
DEFAULT_PROVIDER = "openai"


def provider_of(section: ModelSettings | None) -> ModelProvider | None:
    """Return the provider that a section names; None for an unknown one."""
    make = PROVIDERS.get(section.provider if section is not None else DEFAULT_PROVIDER)
    return make() if make is not None else None


# The settings have shorter names for these.
_RENAMED = {"extra_headers": "headers", "extra_query": "query"}
_NOT_PASSED = frozenset({"model", "fallback"})


def arguments_of(section: ModelSettings, settings: Any) -> dict[str, Any]:
    """Return a section as the arguments of a settings class; what is not set is left out."""
    given: dict[str, Any] = {}
    for field in fields(settings):
        value = getattr(section, _RENAMED.get(field.name, field.name), None)
        if field.name not in _NOT_PASSED and value is not None and value != ():
            given[field.name] = _shown(value)
    return given


def _shown(value: Any) -> Any:
    """Return a setting without the cover of a secret."""
    if isinstance(value, dict):
        return {name: _shown(each) for name, each in value.items()}
    return value.get_secret_value() if hasattr(value, "get_secret_value") else value


def variable_of(name: str) -> str:
    """Return a model's name as it stands in a variable of the environment."""
    from ..settings import settings_key

    return settings_key(name).upper()
