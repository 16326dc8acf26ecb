"""Creates models from sections of the settings: the table of providers, and the checks of their settings at start.

"A new provider" in CONTRIBUTING.md says what else one needs. Not here: finding the model with a name
(`selection`), the fields of a section (`settings`), the settings that a model's constructor takes (`server_settings`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from ..chat import ChatModel
from ..errors import IllegalConfigurationError, Problem

if TYPE_CHECKING:
    from ..settings import ModelSettings
    from .server_model import ServerChatModel, Wire
    from .server_settings import ServerSettings


class ModelProvider(Protocol):
    """Creates models of one kind from a section of the settings, or only from the environment (`section` is None)."""

    def model_in_environment(self) -> str | None:
        """Return the name of the model in the provider's environment variables, for a section without one."""
        ...

    def problem(self, name: str, section: ModelSettings | None, where: str) -> Problem | None:
        """Return the problem with the model called `name`, or None; a program may set a missing key later."""
        ...

    def make(self, section: ModelSettings | None) -> ChatModel:
        """Return the model."""
        ...


@dataclass(frozen=True, slots=True)
class ServerProvider:
    """Creates the models of one server API. `settings`, `model` and `wire` are its classes, as `module:class`.

    The modules are imported when they are needed: those of models take half a second. `package` is the one that an
    extra of the same name installs, or None. `fixed` are arguments that the provider decides.
    """

    settings: str
    model: str
    wire: str
    package: str | None = None
    fixed: tuple[tuple[str, Any], ...] = ()

    def load_settings(self) -> type[ServerSettings]:
        """Return the settings class."""
        return _load(self.settings)  # type: ignore[no-any-return]  # a test compares the classes

    def load_model(self) -> type[ServerChatModel[Any]]:
        """Return the class of the models."""
        return _load(self.model)  # type: ignore[no-any-return]  # a test compares the classes

    def load_wire(self) -> type[Wire]:
        """Return the class of the wire, which says what recordings write."""
        return _load(self.wire)  # type: ignore[no-any-return]  # a test compares the classes

    def model_in_environment(self) -> str | None:
        return self.load_settings().in_environment("MODEL")

    def problem(self, name: str, section: ModelSettings | None, where: str) -> Problem | None:
        from .server_settings import is_address, missing_package

        if self.package is not None and not _is_installed(self.package):
            return missing_package(self.package, f"{where}, model {name!r}")
        settings = self.load_settings()
        known = [_RENAMED.get(field.name, field.name) for field in fields(settings)]
        if section is not None and (fault := _find_unknown_setting(name, section, known, where)):
            return fault
        given = self._read_arguments(section)
        found = settings(name, **given).with_environment()
        prefix, own = f"TOOLBOX_MODELS__{variable_of(name)}__", settings.variables
        if found.base_url and not is_address(found.base_url):
            variable = f"{prefix}BASE_URL" if given.get("base_url") else f"{own}_BASE_URL"
            what = f"invalid base URL of model {name!r}: it must begin with http:// or https://"
            return Problem(where, what, f"set {variable} to a URL such as {settings.example_url}")
        if (problem := next(found.problems(where), None)) is None:
            return None
        variables = f"the variables are {prefix}BASE_URL, __API_KEY, __HEADERS, then {own}_BASE_URL, {own}_API_KEY"
        return Problem(where, f"model {name!r}: {problem.what}", f"{problem.fix}; {variables}")

    def make(self, section: ModelSettings | None) -> ChatModel:
        name = (section.model if section is not None else None) or self.model_in_environment() or ""
        make: Any = self.load_model()  # each class has other arguments
        model: ChatModel = make(name, **self._read_arguments(section))
        return model

    def _read_arguments(self, section: ModelSettings | None) -> dict[str, Any]:
        """Return a section as arguments of the settings class, without unset values."""
        given: dict[str, Any] = {}
        for field in fields(self.load_settings()):
            value = getattr(section, _RENAMED.get(field.name, field.name), None)
            if field.name != "model" and value is not None and value != ():
                given[field.name] = _reveal(value)
        return {**given, **dict(self.fixed)}


class PydanticAiProvider:
    """Creates a `PydanticAiChatModel`. Keys and addresses are in the library's own variables."""

    def model_in_environment(self) -> str | None:
        return None

    def problem(self, name: str, section: ModelSettings | None, where: str) -> Problem | None:
        from .server_settings import missing_package

        if not _is_installed("pydantic_ai"):
            return missing_package("pydantic-ai", f"{where}, model {name!r}")
        if section is None:
            return None
        if fault := _find_unknown_setting(name, section, _PYDANTIC_AI, where):
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
        given = {name: _reveal(value) for name, value in values.items() if value is not None and value not in ((), {})}
        return PydanticAiChatModel(section.model, **given)


_PYDANTIC_AI = (
    *("temperature", "max_tokens", "parallel_tool_calls", "reasoning", "parameters", "timeout"),
    *("max_retries", "max_reply_bytes", "supports_response_format", "fallback", "cooldown"),
)

_OPENAI = ("openai_settings:OpenAiSettings", "openai:OpenAiChatModel")
PROVIDERS: Mapping[str, ModelProvider] = {
    "openai": ServerProvider(*_OPENAI, wire="chat_wire:ChatWire"),
    "openai-responses": ServerProvider(*_OPENAI, wire="responses_wire:ResponsesWire", fixed=(("wire", "responses"),)),
    "anthropic": ServerProvider(
        "anthropic_settings:AnthropicSettings",
        "anthropic:AnthropicChatModel",
        wire="anthropic_wire:AnthropicWire",
        package="anthropic",
    ),
    "pydantic-ai": PydanticAiProvider(),
}
DEFAULT_PROVIDER = "openai"


def provider_of(section: ModelSettings | None) -> ModelProvider | None:
    """Return the provider of a section, or None if it is unknown."""
    return PROVIDERS.get(section.provider if section is not None else DEFAULT_PROVIDER)


def server_providers() -> tuple[ServerProvider, ...]:
    """Return the providers whose models talk to a server themselves, with a wire."""
    return tuple(each for each in PROVIDERS.values() if isinstance(each, ServerProvider))


def variable_of(name: str) -> str:
    """Return a model's name as it is written in environment variables."""
    from ..settings import settings_key

    return settings_key(name).upper()


# These have shorter names in the settings.
_RENAMED = {"extra_headers": "headers", "extra_query": "query"}


def _load(home: str) -> Any:
    module, _, name = home.partition(":")
    return getattr(import_module(f".{module}", __package__), name)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _find_unknown_setting(name: str, section: ModelSettings, known: Collection[str], where: str) -> Problem | None:
    """Return the problem if a section has settings that its provider does not have."""
    unknown = sorted(section.model_fields_set - {*known, "provider", "model"})
    if not unknown:
        return None
    variables = ", ".join(f"TOOLBOX_MODELS__{variable_of(name)}__{each.upper()}" for each in unknown)
    what = f"the provider {section.provider} of model {name!r} has no setting {', '.join(unknown)}"
    return Problem(where, what, f"remove {variables}")


def _reveal(value: Any) -> Any:
    """Return a setting with secrets as plain text."""
    if isinstance(value, dict):
        return {name: _reveal(each) for name, each in value.items()}
    return value.get_secret_value() if hasattr(value, "get_secret_value") else value
