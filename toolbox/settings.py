"""Settings from environment variables named `TOOLBOX_…`: limits, models, REST clients, MCP servers, databases.

Imported lazily, because pydantic_settings is slow to import. Not here: selecting a service's model
(`models.selection`), applying the settings of a REST client (`rest`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
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


def _normalize_keys(value: object) -> object:
    return {settings_key(str(key)): each for key, each in value.items()} if isinstance(value, dict) else value


def _split_names(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [name.strip() for name in value.split(",") if name.strip()]


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_names)]
"""A list of names, or a string with commas between them. Environment variables can also contain a JSON list."""


def _split_approval(value: object) -> object:
    """Return the names in a text such as `delete_*, drop_*`; a single word without a pattern is left as it is."""
    if isinstance(value, str) and re.search(r"[,*?\[]", value):
        return _split_names(value)
    return value


def _hide_in_url(url: str) -> str:
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


def _hide_in_mcp_url(url: str) -> str:
    """Return only the host of an MCP server's URL: URLs of hosted servers often have a key in the path."""
    shown = _hide_in_url(url)
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
        "base_url": _hide_in_url,
        "url": _hide_in_url,
        "token_url": _hide_in_url,
        "args": lambda values: (HIDDEN,) * len(values),
        "command": lambda command: command if " " not in command else f"{command.partition(' ')[0]} {HIDDEN}",
        "parameters": lambda values: dict.fromkeys(values, HIDDEN),
        "extra_body": lambda values: dict.fromkeys(values, HIDDEN),
    }


class ModelSettings(_Section):
    """Settings of one named model: `TOOLBOX_MODELS__<NAME>__<FIELD>`. Times are in seconds.

    `provider` is the kind of model server. The other fields are the arguments of the models of all providers; a field
    that the provider does not have is a problem at start.
    """

    provider: str = "openai"
    """Kind of model server: `openai`, `openai-responses`, `anthropic` or `pydantic-ai`."""
    model: str | None = None
    """Name of the model, as its server knows it."""
    base_url: str | None = None
    """Address of the server. Without it, the address of the provider."""
    api_key: SecretStr | None = None
    """Key of the server."""
    wire: Literal["chat", "responses"] = "chat"
    """API of an OpenAI-compatible server: chat completions or responses."""
    timeout: PositiveFloat | None = None
    """Limit of a whole request with its retries, in seconds."""
    read_timeout: PositiveFloat | None = None
    """Longest silence of the server, in seconds."""
    max_retries: NonNegativeInt | None = None
    """Retries after connection errors, 408, 409, 429 and 5xx."""
    max_concurrent_requests: PositiveInt | None = None
    """Requests that are sent at the same time; further ones wait."""
    fallback: Names = ()
    """Names of the models that are asked if this one does not answer."""
    reasoning: str | None = None
    """How much the model reasons: `none`, `minimal`, `low`, `medium` or `high`."""
    cache: bool | Literal["5m", "1h"] | None = None
    """Prompt cache of Anthropic: `true`, `5m` or `1h`."""
    temperature: float | None = None
    """Sampling temperature."""
    max_tokens: PositiveInt | None = None
    """Most tokens of a reply."""
    max_completion_tokens: PositiveInt | None = None
    """Most tokens of a reply, for models of OpenAI that refuse `max_tokens`."""
    seed: int | None = None
    """Seed of the sampling."""
    parallel_tool_calls: bool | None = None
    """Whether a reply may contain several tool calls."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request, as a JSON object, by the names of the server's API."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Fields that are added to the body as they are, as a JSON object."""
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Further headers, as a JSON object."""
    query: dict[str, SecretStr] = Field(default_factory=dict)
    """Further query parameters, as a JSON object."""
    supports_response_format: bool | None = None
    """Whether the server accepts JSON schemas for answers."""
    send_tool_metadata: Names = ()
    """Names of the tool metadata that are sent."""
    strict_tools: bool | None = None
    """Ask the server to enforce the schemas of tools."""
    send_reasoning: Literal["always", "with_calls", "never"] | None = None
    """When reasoning is sent back: `always`, `with_calls` or `never`."""
    stream_usage: bool | None = None
    """Ask for the token usage of streams."""
    max_reply_bytes: PositiveInt | None = None
    """Limit of a reply after decoding, in bytes."""
    transport: Literal["aiohttp", "httpx2"] | None = None
    """HTTP client: `aiohttp` or `httpx2`."""
    cooldown: NonNegativeFloat | None = None
    """Time for which fallbacks skip this model after its server failed, in seconds; 30 by default, 0 for never."""


class OAuthSettings(_Section):
    """Settings of the OAuth tokens of a REST client or an MCP server, below its own: `…__AUTH__<FIELD>`."""

    kind: Literal["client_credentials", "token_exchange"]
    """`client_credentials`: tokens for the program. `token_exchange`: tokens for the user, in exchange for its own."""
    token_url: str
    """Address of the token server. It must be https, but for loopback addresses."""
    client_id: str
    """Id of the program at the token server."""
    client_secret: SecretStr
    """Secret of the program at the token server."""
    scope: str | None = None
    """Scopes to request, with spaces between them."""
    audience: str | None = None
    """Service that the tokens are for."""
    client_auth: Literal["basic", "body"] = "basic"
    """How id and secret are sent: `basic` for HTTP Basic authentication, or in the `body`."""


class RestSettings(_Section):
    """Settings of one REST client: `TOOLBOX_REST__<KEY>__<FIELD>`. Times are in seconds."""

    url: str | None = None
    """Address of the service. It wins over the one in the decorator."""
    timeout: PositiveFloat = 30.0
    """Limit of one request, from connecting to the end of the body, in seconds."""
    connect_timeout: PositiveFloat = 10.0
    """Limit of connecting, in seconds."""
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Further headers, as a JSON object."""
    retries: NonNegativeInt = 0
    """Retries of idempotent methods, on connection errors, 502, 503, 504, and 429 with `Retry-After`."""
    retry_max_wait: PositiveFloat = 10.0
    """Longest pause before a retry, in seconds."""
    max_reply_bytes: PositiveInt = 64 * 2**20
    """Limit of a reply's body after decoding, in bytes; in a stream, of each item."""
    follow_redirects: bool = False
    """Follow redirects."""
    max_redirects: PositiveInt = 5
    """Most redirects that are followed."""
    bearer_token: SecretStr | None = None
    """Token that is sent as `Authorization: Bearer`."""
    username: str | None = None
    """User name of basic authentication."""
    password: SecretStr | None = None
    """Password of basic authentication."""
    api_key: SecretStr | None = None
    """Key that is sent in the header `api_key_header`, or in the query parameter `api_key_query` if that is set."""
    api_key_header: str = "X-API-Key"
    """Header of the key."""
    api_key_query: str | None = None
    """Query parameter of the key."""
    auth: OAuthSettings | None = None
    """OAuth tokens that are sent as `Authorization: Bearer`; see the table of its fields."""
    proxy: SecretStr | None = None
    """URL of a proxy."""
    trust_environment: bool = True
    """Without `proxy`, use the proxy settings of the environment."""
    verify: Annotated[bool | str, Field(union_mode="left_to_right")] = True
    """`false`, or a file with trusted certificates."""
    client_certificate: str | None = None
    """PEM file with a client certificate and its key."""
    max_connections: PositiveInt = 100
    """Most connections."""
    max_keepalive_connections: NonNegativeInt = 20
    """Connections that stay open."""
    propagate_headers: Names = ("traceparent", "tracestate")
    """Headers that are copied from the incoming request."""
    log: bool = False
    """Log each request at level INFO instead of DEBUG."""


WhileAModelWorks: TypeAlias = Literal["release", "raise", "keep"]
"""What database sessions do before a model request."""


RecordsOfEndedRuns: TypeAlias = Literal["keep", "delete"]
"""What a store of runs does with the records of a run that ends."""


class SqlSettings(_Section):
    """Settings of the database of `toolbox.sql`: `TOOLBOX_SQL__<FIELD>`. Times are in seconds."""

    url: SecretStr | None = None
    """SQLAlchemy URL. Without a driver in the URL, an installed driver is used."""
    pool_size: PositiveInt = 10
    """Connections that stay open."""
    max_overflow: NonNegativeInt = 10
    """Additional connections under load."""
    pool_timeout: PositiveFloat = 30.0
    """Longest wait for a free connection, in seconds."""
    pool_recycle: PositiveFloat | None = None
    """Maximum age of a connection, in seconds."""
    pool_pre_ping: bool = True
    """Test each connection before use, and replace it if the server closed it. SQLite has no server: its connections
    are tested only if you set this."""
    echo: bool = False
    """Log SQL statements."""
    migrate: bool = True
    """Create and migrate the tables of the stores. With False, stores only check them at start, and `toolbox migrate`
    creates them."""
    records_of_ended_runs: RecordsOfEndedRuns = "keep"
    """`delete`: when a run ends, its arguments, records, messages and events are deleted."""
    while_a_model_works: WhileAModelWorks = "release"
    """What sessions do before a model request. `release` commits a transaction that has only read, and gives its
    connection back. `raise` does the same, and raises `OpenTransactionError` for a transaction with changes. `keep`
    keeps all transactions."""

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
            migrate: bool = True,
            records_of_ended_runs: RecordsOfEndedRuns = "keep",
            while_a_model_works: WhileAModelWorks = "release",
        ) -> None: ...


class RedisSettings(_Section):
    """Settings of the server of `toolbox.redis`: `TOOLBOX_REDIS__<FIELD>`. `url` is `redis://host:6379/0`."""

    url: SecretStr | None = None
    """URL of the server, such as `redis://host:6379/0`."""

    if TYPE_CHECKING:  # as above

        def __init__(self, *, url: str | SecretStr | None = None) -> None: ...


class OtelSettings(_Section):
    """Settings of `toolbox.otel`: `TOOLBOX_OTEL__<FIELD>`."""

    user: bool = True
    """Spans have the name of the caller as `user.id`."""

    if TYPE_CHECKING:  # as above

        def __init__(self, *, user: bool = True) -> None: ...


class McpSettings(_Section):
    """Settings of one MCP server: `TOOLBOX_MCP__<NAME>__<FIELD>`. Times are in seconds."""

    _shown: ClassVar[Mapping[str, Callable[[Any], object]]] = {**_Section._shown, "url": _hide_in_mcp_url}

    command: str | None = None
    """Command of a server over stdio."""
    args: Names = ()
    """Arguments of the command."""
    env: dict[str, SecretStr] = Field(default_factory=dict)
    """Environment variables of the command, as a JSON object."""
    cwd: str | None = None
    """Working directory of the command."""
    url: str | None = None
    """URL of a server over HTTP."""
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Headers of a server over HTTP, as a JSON object."""
    auth: OAuthSettings | None = None
    """OAuth tokens for a server over HTTP; see the table of its fields."""
    timeout: PositiveFloat = 30.0
    """Limit of one call, in seconds."""
    connect_timeout: PositiveFloat = 30.0
    """Limit of starting or reaching the server, in seconds."""
    include: Names = ()
    """Names of tools, or patterns such as `read_*`. Without it, all tools are offered."""
    exclude: Names = ()
    """Names or patterns of tools that are not offered."""
    prefix: str = ""
    """Prefix of the names of tools."""
    names: dict[str, str] = Field(default_factory=dict)
    """New names of tools, as a JSON object. They get no prefix."""
    max_reply_bytes: PositiveInt = 64 * 2**20
    """Limit of one message of the server after decoding, in bytes."""
    approval: Annotated[
        Literal["destructive", "all"] | tuple[str, ...] | None, NoDecode, BeforeValidator(_split_approval)
    ] = None
    """`destructive`: a person approves calls of tools that do not say that they only read or add. `all`: calls of all
    tools. Or the names of tools, as the server calls them, or patterns."""
    pin_tools: bool = False
    """Refuse tools that change after they were first listed."""
    expose_resources: bool = False
    """Offer the tools `list_resources` and `get_resource`."""
    required: bool = False
    """A call fails if the server cannot be reached, instead of continuing without its tools."""


_PREFIX = "TOOLBOX_"


class ToolboxSettings(BaseSettings):
    """Settings of the library. Arguments override the environment variables `TOOLBOX_<FIELD>`; nested fields use `__`.

    Give them to the container: `Container(settings=ToolboxSettings(timeout=30, max_tool_rounds=5))`.
    """

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
    )

    profile: Annotated[str | tuple[str, ...], NoDecode, BeforeValidator(_split_names)] = ()
    """Names of the active profiles, with commas between them, for `@only_if(profile=…)`."""
    pool_size: PositiveInt = 32
    """Threads for blocking tools, for each process."""
    thread_limit: PositiveInt = 256
    """Threads of `@run_on_thread` tools that exist at the same time."""
    stop_timeout: PositiveFloat = 10.0
    """Seconds that running calls have when the container stops."""
    max_result_chars: PositiveInt | None = None
    """Longer tool results are cut. Without it, there is no limit."""
    max_concurrent_tools: PositiveInt = 16
    """Tools of one reply that run at the same time."""
    max_tool_rounds: PositiveInt = 10
    """Rounds of tool calls, for services without their own limit."""
    max_tool_calls_per_response: PositiveInt | None = None
    """Tool calls in one reply, for services without their own limit."""
    timeout: PositiveFloat | None = None
    """Seconds of a whole call, for services without their own limit."""
    slow_call_warning: PositiveFloat = 0.1
    """Seconds after which a call that blocks the event loop is logged."""
    demo: bool = False
    """Use the demo model where no model is configured."""
    dev_ui_token: Annotated[SecretStr, Field(min_length=8)] | None = None
    """Token of the dev UI, at least 8 characters. Without it, each start prints a new token."""
    models: Annotated[dict[str, ModelSettings], BeforeValidator(_normalize_keys)] = Field(default_factory=dict)
    """Settings of models, by name."""
    rest: Annotated[dict[str, RestSettings], BeforeValidator(_normalize_keys)] = Field(default_factory=dict)
    """Settings of REST clients, by key."""
    mcp: Annotated[dict[str, McpSettings], BeforeValidator(_normalize_keys)] = Field(default_factory=dict)
    """Settings of MCP servers, by name."""
    sql: SqlSettings = Field(default_factory=SqlSettings)
    """Settings of the database of `toolbox.sql`."""
    redis: RedisSettings = Field(default_factory=RedisSettings)
    """Settings of the server of `toolbox.redis`."""
    otel: OtelSettings = Field(default_factory=OtelSettings)
    """Settings of `toolbox.otel`."""

    @property
    def profiles(self) -> frozenset[str]:
        """Return the names of the active profiles."""
        return frozenset((self.profile,) if isinstance(self.profile, str) else self.profile)

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
