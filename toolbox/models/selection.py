"""Finds models by name, and creates them from settings by provider.

A name is looked up in the container's `models=`, then in the settings, then (for the default model) in the provider's
environment variables, then it is the demo model. Not here: the fields of the settings (`settings`), models that
producers make, and the beans of all of them (`hosts.model_beans`).
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..chat import ChatModel
from ..errors import (
    IllegalConfigurationError,
    Problem,
)
from ..safe_text import did_you_mean
from .fallbacks import fallback_names

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
        provider = PROVIDERS[DEFAULT_PROVIDER]()
        has_default = provider.is_in_environment() or self._settings.demo
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
        wanted = self.spelled(name)
        if wanted in self._given:
            return self._given[wanted]
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
            return Problem(
                where,
                f"unknown model {name!r}{did_you_mean(name, names)}",
                f"pass it as Container(models={{{name!r}: …}}) or set {variable}, or register a producer of ChatModel "
                f"with this name",
            )
        if provider.is_in_environment():
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
        if section is None and not provider.is_in_environment():
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


def _no_default() -> str:
    for variable in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        if os.environ.get(variable):
            return f"no default model is configured ({variable} is set, but OPENAI_MODEL is not)"
    if os.environ.get("OPENAI_MODEL"):
        return "no default model is configured (OPENAI_MODEL is set, but neither OPENAI_API_KEY nor OPENAI_BASE_URL)"
    return "no default model is configured"


# --- providers: create models from settings


class ModelProvider(Protocol):
    """Creates models of one kind from a section of the settings, or only from the environment (`section` is None)."""

    def is_in_environment(self) -> bool:
        """Return True if the provider's environment variables are sufficient for a default model."""
        ...

    def model_in_environment(self) -> str | None:
        """Return the name of the default model in the provider's environment variables."""
        ...

    def problem(self, name: str, section: ModelSettings | None, where: str) -> Problem | None:
        """Return the problem with the model called `name`, or None."""
        ...

    def make(self, section: ModelSettings | None) -> ChatModel:
        """Return the model."""
        ...


class OpenAiProvider:
    """Creates an `OpenAiChatModel`. `wire` overrides the `wire` of the settings."""

    def __init__(self, wire: Literal["responses"] | None = None) -> None:
        self._wire = wire

    def is_in_environment(self) -> bool:
        return bool(
            self.model_in_environment() and (os.environ.get("OPENAI_API_KEY") or os.environ.get("OPENAI_BASE_URL"))
        )

    def model_in_environment(self) -> str | None:
        return os.environ.get("OPENAI_MODEL") or None

    def problem(self, name: str, section: ModelSettings | None, where: str) -> Problem | None:
        from .openai_settings import OpenAiSettings, problems_of
        from .server_settings import is_address

        given = arguments_of(section, OpenAiSettings) if section is not None else {}
        if section is not None and (fault := unknown_settings(name, section, _names(OpenAiSettings), where)):
            return fault
        prefix = f"TOOLBOX_MODELS__{variable_of(name)}__"
        found = OpenAiSettings(name, **given).with_environment()
        if found.base_url and not is_address(found.base_url):
            variable = f"{prefix}BASE_URL" if given.get("base_url") else "OPENAI_BASE_URL"
            what = f"invalid base URL of model {name!r}: it must begin with http:// or https://"
            return Problem(where, what, f"set {variable} to a URL such as http://localhost:11434/v1")
        problem = _first_problem(problems_of(found))
        if problem is None:
            return None
        variables = f"the variables are {prefix}BASE_URL, __API_KEY, __HEADERS, then OPENAI_BASE_URL, OPENAI_API_KEY"
        return Problem(where, f"model {name!r}: {problem.what}", f"{problem.fix}; {variables}")

    def make(self, section: ModelSettings | None) -> ChatModel:
        from .openai import OpenAiChatModel
        from .openai_settings import OpenAiSettings

        given = arguments_of(section, OpenAiSettings) if section is not None else {}
        if self._wire is not None:
            given["wire"] = self._wire
        model = section.model if section is not None else None
        return OpenAiChatModel(model or self.model_in_environment() or "", **given)


class AnthropicProvider:
    """Creates an `AnthropicChatModel`."""

    def is_in_environment(self) -> bool:
        return bool(self.model_in_environment() and os.environ.get("ANTHROPIC_API_KEY"))

    def model_in_environment(self) -> str | None:
        return os.environ.get("ANTHROPIC_MODEL") or None

    def problem(self, name: str, section: ModelSettings | None, where: str) -> Problem | None:
        from .anthropic import AnthropicSettings, missing_package, problems_of

        if not _is_installed("anthropic"):
            return missing_package(f"{where}, model {name!r}")
        given = arguments_of(section, AnthropicSettings) if section is not None else {}
        if section is not None and (fault := unknown_settings(name, section, _names(AnthropicSettings), where)):
            return fault
        found = AnthropicSettings(name, **given).with_environment()
        problem = _first_problem(problems_of(found))
        if problem is None:
            return None
        prefix = f"TOOLBOX_MODELS__{variable_of(name)}__"
        variables = f"the variables are {prefix}BASE_URL, __API_KEY, then ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY"
        return Problem(where, f"model {name!r}: {problem.what}", f"{problem.fix}; {variables}")

    def make(self, section: ModelSettings | None) -> ChatModel:
        from .anthropic import AnthropicChatModel, AnthropicSettings

        given = arguments_of(section, AnthropicSettings) if section is not None else {}
        model = section.model if section is not None else None
        return AnthropicChatModel(model or self.model_in_environment() or "", **given)


class PydanticAiProvider:
    """Creates a `PydanticAiChatModel`. Keys and addresses are in the library's own variables."""

    def is_in_environment(self) -> bool:
        return False

    def model_in_environment(self) -> str | None:
        return None

    def problem(self, name: str, section: ModelSettings | None, where: str) -> Problem | None:
        from .pydantic_ai import missing_package

        if not _is_installed("pydantic_ai"):
            return missing_package(f"{where}, model {name!r}")
        if section is None:
            return None
        if fault := unknown_settings(name, section, _PYDANTIC_AI, where):
            return fault
        try:
            self.make(section)
        except IllegalConfigurationError as error:
            found = error.problems[0]
            return Problem(where, f"model {name!r}: {found.what}", found.fix)
        return None

    def make(self, section: ModelSettings | None) -> ChatModel:
        from .pydantic_ai import PydanticAiChatModel

        assert section is not None, "checked by `problem`"
        values = {name: getattr(section, name) for name in _PYDANTIC_AI}
        given = {name: _shown(value) for name, value in values.items() if value is not None and value not in ((), {})}
        return PydanticAiChatModel(section.model, **given)


_PYDANTIC_AI = (
    *("temperature", "max_tokens", "parallel_tool_calls", "reasoning", "parameters", "timeout"),
    *("max_retries", "max_reply_bytes", "supports_response_format", "fallback", "cooldown"),
)

PROVIDERS: Mapping[str, Callable[[], ModelProvider]] = {
    "openai": OpenAiProvider,
    "openai-responses": lambda: OpenAiProvider("responses"),
    "anthropic": AnthropicProvider,
    "pydantic-ai": PydanticAiProvider,
}
DEFAULT_PROVIDER = "openai"


def provider_of(section: ModelSettings | None) -> ModelProvider | None:
    """Return the provider of a section, or None if it is unknown."""
    make = PROVIDERS.get(section.provider if section is not None else DEFAULT_PROVIDER)
    return make() if make is not None else None


# These have shorter names in the settings.
_RENAMED = {"extra_headers": "headers", "extra_query": "query"}


def _first_problem(problems: Iterable[Problem]) -> Problem | None:
    """Return the first problem, unless it is the missing key, which the program may set later."""
    return next((each for each in problems if not each.what.startswith("missing API key")), None)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _names(settings: Any) -> tuple[str, ...]:
    return tuple(_RENAMED.get(field.name, field.name) for field in fields(settings))


def unknown_settings(name: str, section: ModelSettings, known: Collection[str], where: str) -> Problem | None:
    """Return the problem if a section has settings that its provider does not have."""
    unknown = sorted(section.model_fields_set - {*known, "provider", "model"})
    if not unknown:
        return None
    variables = ", ".join(f"TOOLBOX_MODELS__{variable_of(name)}__{each.upper()}" for each in unknown)
    what = f"the provider {section.provider} of model {name!r} has no setting {', '.join(unknown)}"
    return Problem(where, what, f"remove {variables}")


def arguments_of(section: ModelSettings, settings: Any) -> dict[str, Any]:
    """Return a section as arguments of a settings class, without unset values."""
    given: dict[str, Any] = {}
    for field in fields(settings):
        value = getattr(section, _RENAMED.get(field.name, field.name), None)
        if field.name != "model" and value is not None and value != ():
            given[field.name] = _shown(value)
    return given


def _shown(value: Any) -> Any:
    """Return a setting with secrets as plain text."""
    if isinstance(value, dict):
        return {name: _shown(each) for name, each in value.items()}
    return value.get_secret_value() if hasattr(value, "get_secret_value") else value


def variable_of(name: str) -> str:
    """Return a model's name as it is written in environment variables."""
    from ..settings import settings_key

    return settings_key(name).upper()
