"""Stores conversations in Redis (extra `redis`): two keys each, for the messages and for the lease of the current call.

The home of the redis client. Not here: holding leases (`toolbox.services.conversation_leases`), the JSON of messages
(`toolbox.transcripts`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

try:
    from redis.asyncio import Redis
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        "toolbox.redis needs the redis client; install it with: pip install 'toolbox-di[redis]'", name=_error.name
    ) from None

from .chat import Message
from .di.conditions import only_if
from .di.decorators import application_scoped, checks_settings, produces
from .errors import IllegalConfigurationError, MemoryLeaseLostError, Problem
from .introspection import is_number
from .services.conversation_leases import LEASE, Leases
from .services.memory import ChatMemoryKey, ChatMemoryStore
from .settings import RedisSettings, ToolboxSettings
from .transcripts import messages_from_json, messages_to_json

__all__ = ["MemoryLeaseLostError", "RedisChatMemoryStore", "RedisSettings", "client", "stores"]


def _client_of(settings: ToolboxSettings) -> Redis:
    """Return a client that connects on first use. Raises `IllegalConfigurationError`."""
    example = "redis://localhost:6379/0"
    if settings.redis.url is None:
        problem = Problem("toolbox.redis", "missing server URL", f"set TOOLBOX_REDIS__URL, such as {example}")
        raise IllegalConfigurationError([problem])
    try:
        return Redis.from_url(settings.redis.url.get_secret_value())
    except ValueError:
        problem = Problem("toolbox.redis", "invalid Redis URL", f"set TOOLBOX_REDIS__URL to a URL such as {example}")
    # Raised outside of the handler, because the original error may show the password.
    raise IllegalConfigurationError([problem])


def _client_problems(settings: ToolboxSettings) -> Iterator[Problem]:
    try:
        _client_of(settings)
    except IllegalConfigurationError as error:
        yield from error.problems


@checks_settings(_client_problems)
@produces(scope="application")
async def client(settings: ToolboxSettings) -> AsyncIterator[Redis]:
    """Provide the client of the server in `TOOLBOX_REDIS__URL`; it is closed when the container stops.

    A missing or invalid URL is a problem at start.
    """
    made = _client_of(settings)
    try:
        yield made
    finally:
        await made.aclose()


# KEYS: lease, messages. ARGV: the token, then further values. Each script returns 1 if the token has the lease, else 0.
_RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
_GIVE_BACK = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""
_UPDATE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[3] == '' then redis.call('SET', KEYS[2], ARGV[2])
else redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3]) end
return 1
"""
_DELETE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[2])
return 1
"""


@only_if(missing=ChatMemoryStore)
@application_scoped
class RedisChatMemoryStore(ChatMemoryStore):
    """Stores conversations in Redis, under keys that begin with `prefix`.

        container.register(redis.client, redis.RedisChatMemoryStore)  # TOOLBOX_REDIS__URL=redis://…

    A call holds a lease of `lease` seconds on its conversation and renews it until it ends; other processes wait. A
    call whose lease was lost raises `MemoryLeaseLostError` and writes nothing. Conversations are deleted
    `expires_after` seconds after their last call; None keeps them. Raises `TypeError` or `ValueError` for invalid
    arguments.
    """

    def __init__(
        self, client: Redis, *, lease: float = LEASE, expires_after: float | None = None, prefix: str = "toolbox"
    ) -> None:
        if not hasattr(client, "register_script"):  # RedisCluster is not a subclass of Redis, but has it
            what = f"{type(client).__module__}.{type(client).__name__}"
            raise TypeError(f"expected a redis.asyncio.Redis client such as redis.client provides, got {what}")
        if expires_after is not None and not (is_number(expires_after) and expires_after > 0):
            raise ValueError(f"invalid expires_after={expires_after!r}; use a number of seconds above 0, or None")
        self._client = client
        self._lifetime = None if expires_after is None else round(expires_after * 1000)
        self._prefix = prefix
        self._leases = Leases(self, lease)
        self._renew, self._give_back = client.register_script(_RENEW), client.register_script(_GIVE_BACK)
        self._update, self._delete = client.register_script(_UPDATE), client.register_script(_DELETE)

    # --- ChatMemoryStore

    async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
        text: Any = await self._client.get(self._keys(key)[1])
        return messages_from_json(text) if text is not None else ()

    async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
        """Replace the stored messages. Raises `MemoryLeaseLostError` if another process has the conversation."""
        text, token = messages_to_json(messages), self._leases.token(key)
        if token is None:
            await self._client.set(self._keys(key)[1], text, px=self._lifetime)
        elif not await self._update(self._keys(key), [token, text, self._lifetime or ""]):
            raise MemoryLeaseLostError(key.service, key.memory_id)

    async def delete_messages(self, key: ChatMemoryKey) -> None:
        """Delete the conversation. Raises `MemoryLeaseLostError` if another process has it."""
        token = self._leases.token(key)
        if token is None:
            await self._client.delete(self._keys(key)[1])
        elif not await self._delete(self._keys(key), [token]):
            raise MemoryLeaseLostError(key.service, key.memory_id)

    def lock(self, key: ChatMemoryKey) -> AbstractAsyncContextManager[None]:
        """Lock the conversation for one call at a time, across all processes that use the server."""
        return self._leases.lock(key)

    async def stop(self) -> None:
        """Release all leases that are still held."""
        await self._leases.stop()

    async def ready(self) -> bool:
        """Return True if the server answers; raise its error otherwise. For readiness checks."""
        await self._client.get(f"{self._prefix}:ready")  # as any call does, so that missing rights show as well
        return True

    # --- leases

    async def take(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        """Take the lease for `seconds` if it is free. Returns True if `token` has it now."""
        return bool(await self._client.set(self._keys(key)[0], token, nx=True, px=round(seconds * 1000)))

    async def renew(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        """Extend the lease to `seconds` from now. Returns False if `token` has lost it."""
        return bool(await self._renew(self._keys(key), [token, round(seconds * 1000)]))

    async def give_back(self, key: ChatMemoryKey, token: str) -> None:
        """Release the lease if `token` has it."""
        await self._give_back(self._keys(key), [token])

    def _keys(self, key: ChatMemoryKey) -> list[str]:
        # The braces keep both keys on one node of a cluster. Service names have no colon.
        name = f"{self._prefix}:{{{key.service}:{key.memory_id}}}"
        return [f"{name}:lease", f"{name}:messages"]


stores = (RedisChatMemoryStore,)
"""All stores in Redis: `container.register(redis.client, *redis.stores)`.

A store of your own that you register as well replaces the one of its kind.
"""
