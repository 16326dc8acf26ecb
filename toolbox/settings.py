"""Settings from environment variables named `TOOLBOX_…`: limits, models, REST clients, MCP servers, databases.

Imported lazily, because pydantic_settings is slow to import. Not here: selecting a service's model
(`models.selection`), applying the settings of a REST client (`rest`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from .safe_text import HIDDEN, did_you_mean


def settings_key(name: str) -> str:
    """Return a name as settings use it: lower case, with `_` for `-` and `.`."""
    return name.replace("-", "_").replace(".", "_").lower()


def _by_settings_key(value: object) -> object:
    return {settings_key(str(key)): each for key, each in value.items()} if isinstance(value, dict) else value


def _names(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [name.strip() for name in value.split(",") if name.strip()]


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)]
"""A list of names, or a string with commas between them. Environment variables can also contain a JSON list."""


def _approval(value: object) -> object:
    """Return the names in a text such as `delete_*, drop_*`; a single word without a pattern is left as it is."""
    if isinstance(value, str) and re.search(r"[,*?\[]", value):
        return _names(value)
    return value


def _shown_url(url: str) -> str:
    """Return a URL without its user, password, query and fragment."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return HIDDEN
    # Not a URL with a host, or a password with an unescaped `/`, `?` or `#`: the secret can be anywhere in the text.
    if not parts.scheme or not parts.netloc or "@" in url.partition(parts.netloc)[2]:
        return HIDDEN
    query = f"?{HIDDEN}" if parts.query or parts.fragment else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{query}"


def _shown_mcp_url(url: str) -> str:
    """Return only the host of an MCP server's URL: URLs of hosted servers often have a key in the path."""
    shown = _shown_url(url)
    parts = urlsplit(shown)
    return f"{parts.scheme}://{parts.netloc}/{HIDDEN}" if parts.path.strip("/") and parts.netloc else shown


class _Section(BaseModel):
    # Misspelt keys are errors. Errors do not show values, which can be secrets.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=())

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            show = self._shown.get(name or "") if value and not isinstance(value, SecretStr) else None
            yield name, value if show is None else show(value)

    # How to show settings that are not secrets but often contain one.
    _shown: ClassVar[Mapping[str, Callable[[Any], object]]] = {
        "base_url": _shown_url,
        "url": _shown_url,
        "args": lambda values: (HIDDEN,) * len(values),
        "command": lambda command: command if " " not in command else f"{command.partition(' ')[0]} {HIDDEN}",
        "parameters": lambda values: dict.fromkeys(values, HIDDEN),
        "extra_body": lambda values: dict.fromkeys(values, HIDDEN),
    }


class ModelSettings(_Section):
    """Settings of one named model: `TOOLBOX_MODELS__<NAME>__<FIELD>`. Times are in seconds.

    `provider` is the kind of model server: `openai`, `openai-responses`, `anthropic` or `pydantic-ai`. The other fields
    are those of `OpenAiChatModel`, `AnthropicChatModel` and `PydanticAiChatModel`; a field that the provider does not
    have is a problem at start.
    """

    provider: str = "openai"
    model: str | None = None
    base_url: str | None = None
    api_key: SecretStr | None = None
    wire: Literal["chat", "responses"] = "chat"
    timeout: PositiveFloat | None = None
    read_timeout: PositiveFloat | None = None
    max_retries: NonNegativeInt | None = None
    max_concurrent_requests: PositiveInt | None = None
    fallback: Names = ()
    reasoning: str | None = None
    cache: bool | Literal["5m", "1h"] | None = None
    temperature: float | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    seed: int | None = None
    parallel_tool_calls: bool | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    extra_body: dict[str, Any] = Field(default_factory=dict)
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    query: dict[str, SecretStr] = Field(default_factory=dict)
    supports_response_format: bool | None = None
    send_tool_metadata: Names = ()
    strict_tools: bool | None = None
    send_reasoning: Literal["always", "with_calls", "never"] | None = None
    stream_usage: bool | None = None
    max_reply_bytes: PositiveInt | None = None
    transport: Literal["aiohttp", "httpx2"] | None = None


class RestSettings(_Section):
    """Settings of one REST client: `TOOLBOX_REST__<KEY>__<FIELD>`. Times are in seconds.

    - `timeout`: limit of one request, from connecting to the end of the body. `connect_timeout`: limit of connecting.
    - `retries`: for idempotent methods, on connection errors, 502, 503, 504, and 429 with `Retry-After`.
      `retry_max_wait`: longest pause before a retry.
    - `max_reply_bytes`: limit of a reply's body after decoding; in a stream, of each item.
    - `verify`: False, or a file with trusted certificates. `client_certificate`: PEM file with key and certificate.
    - `api_key`: sent in the header `api_key_header`, or in the query parameter `api_key_query` if that is set.
    - `proxy`: URL of a proxy. Without it, `trust_environment` uses the environment's proxy settings.
    - `propagate_headers`: headers that are copied from the incoming request.
    - `log`: log each request at level INFO instead of DEBUG.
    """

    url: str | None = None
    timeout: PositiveFloat = 30.0
    connect_timeout: PositiveFloat = 10.0
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    retries: NonNegativeInt = 0
    retry_max_wait: PositiveFloat = 10.0
    max_reply_bytes: PositiveInt = 64 * 2**20
    follow_redirects: bool = False
    max_redirects: PositiveInt = 5
    bearer_token: SecretStr | None = None
    username: str | None = None
    password: SecretStr | None = None
    api_key: SecretStr | None = None
    api_key_header: str = "X-API-Key"
    api_key_query: str | None = None
    proxy: SecretStr | None = None
    trust_environment: bool = True
    verify: Annotated[bool | str, Field(union_mode="left_to_right")] = True
    client_certificate: str | None = None
    max_connections: PositiveInt = 100
    max_keepalive_connections: NonNegativeInt = 20
    propagate_headers: Names = ("traceparent", "tracestate")
    log: bool = False


class SqlSettings(_Section):
    """Settings of the database of `toolbox.sql`: `TOOLBOX_SQL__<FIELD>`. Times are in seconds.

    - `url`: SQLAlchemy URL. Without a driver in the URL, an installed driver is used.
    - `pool_size`: connections that stay open. `max_overflow`: additional connections under load. `pool_timeout`:
      longest wait for a free connection. `pool_recycle`: maximum age of a connection.
    - `pool_pre_ping`: test each connection before use, and replace it if the server closed it. SQLite has no server:
      its connections are tested only if you set it.
    - `echo`: log SQL statements.
    """

    url: SecretStr | None = None
    pool_size: PositiveInt = 10
    max_overflow: NonNegativeInt = 10
    pool_timeout: PositiveFloat = 30.0
    pool_recycle: PositiveFloat | None = None
    pool_pre_ping: bool = True
    echo: bool = False

    if TYPE_CHECKING:  # a text becomes a secret, which type checkers see only with pydantic's plugin

        def __init__(
            self,
            *,
            url: str | SecretStr | None = None,
            pool_size: int = 10,
            max_overflow: int = 10,
            pool_timeout: float = 30.0,
            pool_recycle: float | None = None,
            pool_pre_ping: bool = True,
            echo: bool = False,
        ) -> None: ...


class RedisSettings(_Section):
    """Settings of the server of `toolbox.redis`: `TOOLBOX_REDIS__<FIELD>`. `url` is `redis://host:6379/0`."""

    url: SecretStr | None = None

    if TYPE_CHECKING:  # as above

        def __init__(self, *, url: str | SecretStr | None = None) -> None: ...


class McpSettings(_Section):
    """Settings of one MCP server: `TOOLBOX_MCP__<NAME>__<FIELD>`. Times are in seconds.

    - `command`, `args`, `env`, `cwd`: a server over stdio. `url`, `headers`: a server over HTTP.
    - `timeout`: limit of one call. `connect_timeout`: limit of starting or reaching the server.
    - `include`, `exclude`: names of tools, or patterns such as `read_*`. Without `include`, all tools are offered.
    - `names`: new names for tools. `prefix`: prefix for all other names.
    - `max_reply_bytes`: limit of one message of the server after decoding.
    - `approval`: `destructive`: a person approves calls of tools that do not say that they only read or add;
      `all`: calls of all tools; or the names of tools, as the server calls them, or patterns.
    - `pin_tools`: refuse tools that change after they were first listed.
    - `expose_resources`: offer the tools `list_resources` and `get_resource`.
    - `required`: a call fails if the server cannot be reached, instead of continuing without its tools.
    """

    _shown: ClassVar[Mapping[str, Callable[[Any], object]]] = {**_Section._shown, "url": _shown_mcp_url}

    command: str | None = None
    args: Names = ()
    env: dict[str, SecretStr] = Field(default_factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    timeout: PositiveFloat = 30.0
    connect_timeout: PositiveFloat = 30.0
    include: Names = ()
    exclude: Names = ()
    prefix: str = ""
    names: dict[str, str] = Field(default_factory=dict)
    max_reply_bytes: PositiveInt = 64 * 2**20
    approval: Annotated[
        Literal["destructive", "all"] | tuple[str, ...] | None, NoDecode, BeforeValidator(_approval)
    ] = None
    pin_tools: bool = False
    expose_resources: bool = False
    required: bool = False


_PREFIX = "TOOLBOX_"


class ToolboxSettings(BaseSettings):
    """Settings of the library. Arguments override the environment variables `TOOLBOX_<FIELD>`; nested fields use `__`.

        Container(settings=ToolboxSettings(timeout=30, max_tool_rounds=5))

    - `pool_size`: threads for blocking tools. `thread_limit`: threads of `@run_on_thread`.
    - `stop_timeout`: seconds that running calls have when the container stops.
    - `slow_call_warning`: seconds after which a call that blocks the event loop is logged.
    - `max_result_chars`: longer tool results are truncated; None means no limit.
    - `max_concurrent_tools`: tools of one reply that run at the same time.
    - `max_tool_rounds`, `max_tool_calls_per_response`, `timeout` (seconds): limits of service calls, for services that
      do not set their own.
    - `demo`: use the demo model where no model is configured.
    - `dev_ui_token`: token of the dev UI, at least 8 characters. Without it, each start prints a new token.
    - `models`, `rest`, `mcp`, `sql`, `redis`: settings of models, REST clients, MCP servers and databases.
    """

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
    )

    pool_size: PositiveInt = 32
    thread_limit: PositiveInt = 256
    stop_timeout: PositiveFloat = 10.0
    max_result_chars: PositiveInt | None = None
    max_concurrent_tools: PositiveInt = 16
    max_tool_rounds: PositiveInt = 10
    max_tool_calls_per_response: PositiveInt | None = None
    timeout: PositiveFloat | None = None
    slow_call_warning: PositiveFloat = 0.1
    demo: bool = False
    dev_ui_token: Annotated[SecretStr, Field(min_length=8)] | None = None
    models: Annotated[dict[str, ModelSettings], BeforeValidator(_by_settings_key)] = Field(default_factory=dict)
    rest: Annotated[dict[str, RestSettings], BeforeValidator(_by_settings_key)] = Field(default_factory=dict)
    mcp: Annotated[dict[str, McpSettings], BeforeValidator(_by_settings_key)] = Field(default_factory=dict)
    sql: SqlSettings = Field(default_factory=SqlSettings)
    redis: RedisSettings = Field(default_factory=RedisSettings)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the usual sources. Raises `TypeError` for unknown arguments, which `extra="ignore"` would drop."""
        if settings_cls is ToolboxSettings:  # the fields of a subclass may have other names of variables
            _refuse_unknown(getattr(init_settings, "init_kwargs", {}), settings_cls.model_fields)
        return init_settings, env_settings, dotenv_settings, file_secret_settings


def _refuse_unknown(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise `TypeError` for arguments that are not settings: `extra="ignore"` is for variables and files."""
    fields = tuple(known)
    for name in given:
        if name not in fields:
            raise TypeError(f"ToolboxSettings has no setting {name!r}{did_you_mean(name, fields, '{}=')}")
