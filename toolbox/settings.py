"""What the environment says: limits, named models and REST keys, under the prefix `TOOLBOX_`.

The home of pydantic_settings, which is why nobody imports this module before it is needed. Not here: which model a
service gets (`models.selection`), what a REST client does with its settings (`rest`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal
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
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from .validation_text import HIDDEN


def settings_key(name: str) -> str:
    """How a model's or a REST client's name stands in the environment: lower case here, `-` and `.` as `_`."""
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
"""Several names: a list, or one text with commas. In the environment also a JSON list."""


def _shown_url(url: str) -> str:
    """Return a URL without its user, password, query and fragment."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return HIDDEN
    # Where the text is not a URL of a host, or a password has an unescaped `/`, `?` or `#`, it may be anywhere.
    if not parts.scheme or not parts.netloc or "@" in url.partition(parts.netloc)[2]:
        return HIDDEN
    query = f"?{HIDDEN}" if parts.query or parts.fragment else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{query}"


def _shown_mcp_url(url: str) -> str:
    """Return the host of an MCP server's URL: hosted servers are often given a URL with a key in its path."""
    shown = _shown_url(url)
    parts = urlsplit(shown)
    return f"{parts.scheme}://{parts.netloc}/{HIDDEN}" if parts.path.strip("/") and parts.netloc else shown


class _Section(BaseModel):
    # A misspelt key is an error; an error shows no value, which may be a secret.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=())

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            show = self._shown.get(name or "") if value and not isinstance(value, SecretStr) else None
            yield name, value if show is None else show(value)

    # How a setting is shown that is not a secret as a whole, but often holds one.
    _shown: ClassVar[Mapping[str, Callable[[Any], object]]] = {
        "base_url": _shown_url,
        "url": _shown_url,
        "args": lambda values: (HIDDEN,) * len(values),
        "command": lambda command: command if " " not in command else f"{command.partition(' ')[0]} {HIDDEN}",
        "parameters": lambda values: dict.fromkeys(values, HIDDEN),
        "extra_body": lambda values: dict.fromkeys(values, HIDDEN),
    }


class ModelSettings(_Section):
    """One named model, `TOOLBOX_MODELS__<NAME>__<FIELD>`; times in seconds.

    `provider` says which kind of server it is (`models.providers`); the other fields are what `OpenAiSettings` has.
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
    stream_usage: bool | None = None
    max_reply_bytes: PositiveInt | None = None
    transport: Literal["aiohttp", "httpx2"] | None = None


class RestSettings(_Section):
    """One REST client: `TOOLBOX_REST__<KEY>__<FIELD>`; times in seconds.

    `timeout` is for one request, from the connection to the end of its body; `connect_timeout` for the first part of
    it. `retries` are for idempotent methods: on connection errors, 502, 503, 504, and 429 with `Retry-After`.
    `max_reply_bytes` limits the body of a reply, counted after decoding; in a stream, each piece. `verify` is False,
    or a file with certificates to trust; `client_certificate` a PEM file with key and certificate. An `api_key` goes
    into the header `api_key_header`, or into the query as `api_key_query`. `proxy` is a URL; without one the
    environment's is taken if `trust_environment`. `log`: a line per request at INFO, not DEBUG.
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
    """The database of `toolbox.sql`, `TOOLBOX_SQL__<FIELD>`; times in seconds.

    `url` is SQLAlchemy's; without a driver in it, an installed one is taken. `pool_size` connections are kept, and up
    to `max_overflow` more opened; who finds none free waits for `pool_timeout`. `pool_recycle`: a connection older than
    this is replaced. `pool_pre_ping`: each connection is tested before use, and replaced if the server has closed it.
    `echo`: statements are logged.
    """

    url: SecretStr | None = None
    pool_size: PositiveInt = 10
    max_overflow: NonNegativeInt = 10
    pool_timeout: PositiveFloat = 30.0
    pool_recycle: PositiveFloat | None = None
    pool_pre_ping: bool = True
    echo: bool = False


class RedisSettings(_Section):
    """The server of `toolbox.redis`, `TOOLBOX_REDIS__<FIELD>`: `url` as `redis://host:6379/0`."""

    url: SecretStr | None = None


class McpSettings(_Section):
    """One MCP server: `TOOLBOX_MCP__<NAME>__<FIELD>`; times in seconds.

    A server over stdio has a `command` with `args`, `env` and `cwd`; one over HTTP a `url` with `headers`. `timeout` is
    for one call, `connect_timeout` for starting or reaching the server. Of its tools those in `include` are offered,
    else all, without those in `exclude` (names, or patterns such as `read_*`); under `names`, else after `prefix`.
    `max_reply_bytes` limits a message of the server, counted after decoding.
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


class ToolboxSettings(BaseSettings):
    """The library's settings; each may be given here, else as `TOOLBOX_<FIELD>`, nested ones with `__`.

    `pool_size`: threads for blocking tools. `thread_limit`: threads of `@run_on_thread`. `stop_timeout` and
    `slow_call_warning` in seconds. `max_result_chars`: a longer tool result is cut; None: never.
    `max_tool_rounds`, `max_tool_calls_per_response` and `timeout` (seconds) limit the calls of every service that does
    not set its own limit.
    `dev_ui_token` opens the dev UI, of 8 characters or more; without one each start prints a new one.
    """

    model_config = SettingsConfigDict(
        env_prefix="TOOLBOX_",
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
