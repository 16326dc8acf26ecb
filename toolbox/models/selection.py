"""Finds models by name.

A name is looked up in the container's `models=`, then in the settings, then (for the default model) in the environment
variables of OpenAI, then it is the demo model. Not here: creating models from settings (`model_providers`), models that
producers make, and the beans of all of them (`hosts.model_beans`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..chat import ChatModel
from ..errors import IllegalConfigurationError, Problem
from ..safe_text import did_you_mean
from .fallbacks import fallback_names
from .model_providers import PROVIDERS, provider_of, variable_of

if TYPE_CHECKING:
    from ..settings import ModelSettings, ToolboxSettings

DEFAULT_NAME = "default"


class NamedModels:
    """The models of `models=`, the settings and the environment by name. `aclose` closes those that it has created."""

    def __init__(self, given: Mapping[str, ChatModel] | None, settings: ToolboxSettings) -> None:
        self._given = dict(given or {})
        self._settings = settings
        self._made: dict[str, ChatModel] = {}

    @property
    def given(self) -> Mapping[str, ChatModel]:
        """The models that the program passed."""
        return self._given

    def names(self) -> list[str]:
        """Return the names of all models, `default` only if it is configured."""
        has_default = _is_default_in_environment() or self._settings.demo
        return list(dict.fromkeys([*self._given, *self._settings.models, *((DEFAULT_NAME,) if has_default else ())]))

    def is_in_settings(self, name: str) -> bool:
        """Return True if the settings have a section for this model."""
        return self._section(name) is not None

    def spelled(self, name: str | None) -> str:
        """Return the name as `names` has it: by default `default`; settings know names in lower case, with `_`."""
        wanted = name or DEFAULT_NAME
        if wanted in self._given or wanted in self._settings.models or wanted == DEFAULT_NAME:
            return wanted
        from ..settings import settings_key

        key = settings_key(wanted)
        return key if key in self._settings.models else wanted

    def find(self, name: str | None = None) -> ChatModel:
        """Return the model with this name, by default `default`; create it if necessary.

        Raises `IllegalConfigurationError`.
        """
        if (model := self._given.get(name or DEFAULT_NAME)) is not None:
            return model
        wanted = self.spelled(name)
        model = self._made.get(wanted)
        if model is None:
            if (problem := self.problem(name, f"model {name or DEFAULT_NAME!r}")) is not None:
                raise IllegalConfigurationError([problem])
            model = self._made[wanted] = self._make(wanted)
        return model

    def fallbacks_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the models that are called if this one does not answer."""
        model = self._given.get(name)
        if model is not None:
            return fallback_names(model)
        section = self._section(name)
        return section.fallback if section is not None else ()

    def problem(self, name: str | None, where: str, others: Iterable[str] = ()) -> Problem | None:
        """Return the problem with this model, without its fallbacks, or None. `others` are further known names."""
        name = name or DEFAULT_NAME
        if name in self._given:
            return no_model(self._given[name], where, f"Container(models={{{name!r}: …}})")
        variable = f"TOOLBOX_MODELS__{variable_of(name)}__MODEL"
        section = self._section(name)
        provider = provider_of(section)
        if section is not None and provider is None:
            known = ", ".join(PROVIDERS)
            fix = f"set TOOLBOX_MODELS__{variable_of(name)}__PROVIDER to one of: {known}"
            return Problem(where, f"unknown provider {section.provider!r} of model {name!r}", fix)
        assert provider is not None, "the default provider is known"
        if section is not None:
            if section.model or (name == DEFAULT_NAME and provider.model_in_environment()):
                return provider.problem(name, section, where)
            return Problem(where, f"the settings of model {name!r} have no model name", f"set {variable}")
        if name != DEFAULT_NAME:
            names = sorted({*self._given, *self._settings.models, *others})
            settings = f" or set {variable}" if re.fullmatch(r"\w+", variable, re.ASCII) else ""
            return Problem(
                where,
                f"unknown model {name!r}{did_you_mean(name, names)}",
                f"pass it as Container(models={{{name!r}: …}}){settings}, or register a producer of ChatModel with "
                f"this name",
            )
        if _is_default_in_environment():
            return provider.problem(name, None, where)
        if self._settings.demo:
            return None
        return Problem(where, _no_default(), _DEFAULT_MODEL_FIX)

    def section_problems(self, known: Collection[Problem]) -> Iterator[Problem]:
        """Yield problems of models in the settings that name a provider, also of models that no service uses.

        `known` are the problems of the models in use; they are not repeated.
        """
        facts = {each.what for each in known}
        for name, section in self._settings.models.items():
            if "provider" not in section.model_fields_set or name in self._given or not section.model:
                continue
            problem = self.problem(name, f"the settings of model {name!r}")
            if problem is not None and problem.what not in facts:
                yield problem

    async def aclose(self) -> None:
        """Close the models that were created from settings."""
        made, self._made = self._made, {}
        errors: list[Exception] = []
        for model in made.values():
            close: Callable[[], Awaitable[None]] | None = getattr(model, "aclose", None)
            try:
                if close is not None:
                    await close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("some models could not be closed", errors)

    def _section(self, name: str) -> ModelSettings | None:
        from ..settings import settings_key

        return self._settings.models.get(settings_key(name))

    def _make(self, name: str) -> ChatModel:
        section = self._section(name)
        provider = provider_of(section)
        assert provider is not None, "checked by `problem`"
        if section is None and not _is_default_in_environment():
            from ..demo import DemoChatModel

            return DemoChatModel()
        return provider.make(section)


def no_model(given: object, where: str, place: str) -> Problem | None:
    """Return the problem if `given`, passed at `place`, is not a model."""
    if callable(getattr(given, "chat", None)) and not isinstance(given, type):
        return None
    return Problem(where, f"{place}: {given!r} is not a model", "pass an object with `async def chat(request)`")


def key_function_of(model: object) -> Callable[..., Any] | None:
    """Return the function that returns the key of a model, or None."""
    found: Callable[..., Any] | None = getattr(model, "key_function", None)
    return found if callable(found) else None


_DEFAULT_MODEL_FIX = (
    'pass one as Container(models={"default": OpenAiChatModel(…)}), or set TOOLBOX_MODELS__DEFAULT__MODEL (with '
    "__BASE_URL and __API_KEY), or OPENAI_MODEL with OPENAI_API_KEY or OPENAI_BASE_URL, or TOOLBOX_DEMO=1 for the demo"
)


def _is_default_in_environment() -> bool:
    """Return True if the environment variables of OpenAI make a default model; those of other providers do not."""
    is_reachable = os.environ.get("OPENAI_API_KEY") or os.environ.get("OPENAI_BASE_URL")
    return bool(os.environ.get("OPENAI_MODEL") and is_reachable)


def _no_default() -> str:
    for variable in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        if os.environ.get(variable):
            return f"no default model is configured ({variable} is set, but OPENAI_MODEL is not)"
    if os.environ.get("OPENAI_MODEL"):
        return "no default model is configured (OPENAI_MODEL is set, but neither OPENAI_API_KEY nor OPENAI_BASE_URL)"
    return "no default model is configured"
