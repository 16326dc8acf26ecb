"""Stores conversations in Redis (extra `redis`): a hash each, with its head and its turns, and the lease of a call.

The fields of the hash: `version`, which each write raises, and those of `_HEAD`; of the turn N `t:N` (a JSON object),
`m:N` (its messages), `a:N` (when it was stored) and `h:N` (from which index on it is hidden); `i:ID` and `r:RUN` are
the numbers of the turns with this id and of this run.

Earlier releases kept a JSON text of all messages under the same key. It becomes the first turn when the conversation is
written for the first time; then a process of an earlier release fails, because the key is a hash. The home of the redis
client. Not here: holding leases (`toolbox.conversations.leases`), what changes in a log (`toolbox.conversations.log`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

try:
    from redis.asyncio import Redis
    from redis.exceptions import ResponseError
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        "toolbox.redis needs the redis client; install it with: pip install 'toolbox-di[redis]'", name=_error.name
    ) from None

from .conversations.keys import ChatMemoryKey, Owner
from .conversations.leases import LEASE, Leases
from .conversations.log import (
    Head,
    Log,
    LogWrite,
    Replaced,
    Turn,
    backwards,
    before_entry,
    begin_head,
    choose_newest,
    emptied,
    head_after,
    head_before,
    knows_state,
    place_of_entry,
    place_of_user_message,
    read_entry_id,
    with_beans_of,
)
from .conversations.log_forms import (
    beans_from_json,
    beans_to_json,
    head_from_json,
    head_to_json,
    time_from_number,
    time_to_number,
    turn_from_json,
    turn_to_json,
)
from .conversations.stores import ChatMemoryStore, Deleted, LogStore
from .di.conditions import only_if
from .di.decorators import application_scoped, checks_settings, produces
from .errors import IllegalConfigurationError, MemoryLeaseLostError, Problem
from .introspection import is_number
from .settings import RedisSettings, ToolboxSettings
from .transcripts import messages_from_json, messages_to_json, read_json, write_json

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


# Scripts whose first key is the lease. Each gets a token first, and returns 0 if another one has the lease.
_RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
_GIVE_BACK = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""

# Without a lease the token is ''. KEYS: the lease, where the conversation lies, where it will lie. ARGV: the token, the
# version that was read ('' for none), the lifetime ('' for ever, '-' as it is), '1' if the lease is released, the
# numbers of fields to delete and of fields to set to the time of the server, these fields, then fields and values.
# Returns -1 for another version.
_WRITE = """
if ARGV[1] ~= '' and redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if (redis.call('HGET', KEYS[2], 'version') or '') ~= ARGV[2] then return -1 end
if KEYS[2] ~= KEYS[3] then redis.call('RENAME', KEYS[2], KEYS[3]) end
local at = 7
for _ = 1, tonumber(ARGV[5]) do redis.call('HDEL', KEYS[3], ARGV[at]); at = at + 1 end
local time = redis.call('TIME')
local now = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
for _ = 1, tonumber(ARGV[6]) do redis.call('HSET', KEYS[3], ARGV[at], now); at = at + 1 end
while at < #ARGV do redis.call('HSET', KEYS[3], ARGV[at], ARGV[at + 1]); at = at + 2 end
if ARGV[3] == '' then redis.call('PERSIST', KEYS[3])
elseif ARGV[3] ~= '-' then redis.call('PEXPIRE', KEYS[3], ARGV[3]) end
if ARGV[1] ~= '' and ARGV[4] == '1' then redis.call('DEL', KEYS[1]) end
return 1
"""
# KEYS: the lease, the conversation. ARGV: the token, the text of the earlier release, then fields and values.
_UPGRADE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if redis.call('GET', KEYS[2]) ~= ARGV[2] then return -1 end
local left = redis.call('PTTL', KEYS[2])
redis.call('DEL', KEYS[2])
local time = redis.call('TIME')
local now = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
for _, name in ipairs({'created_at', 'updated_at', 'a:1'}) do redis.call('HSET', KEYS[2], name, now) end
for at = 3, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1]) end
if left > 0 then redis.call('PEXPIRE', KEYS[2], left) end
return 1
"""
# KEYS: the lease, then all places of a conversation.
_DELETE = """
if ARGV[1] ~= '' and redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
for at = 2, #KEYS do redis.call('DEL', KEYS[at]) end
return 1
"""
# KEYS: the lease, the wish. ARGV: who asks, as JSON. A wish is for the call that has the lease now.
_ASK_TO_STOP = """
local token = redis.call('GET', KEYS[1])
if not token then return 0 end
redis.call('SET', KEYS[2], token .. ':' .. ARGV[1], 'EX', 600)
return 1
"""

_HEAD = ("version", "id", "shown", "kept", "created_at", "updated_at", "entries", "next_number")
_AT_ONCE = 200  # turns that are read with one command


@dataclass(frozen=True, slots=True)
class _Found:
    """A conversation, or None where nothing lies: its key, version and head; `earlier` is what 0.1 has stored.

    `asked` are the values of other fields that were read with it.
    """

    place: ChatMemoryKey
    head: Head | None = None
    version: str = ""
    earlier: bytes | str | None = None
    asked: tuple[str | None, ...] = ()


@dataclass(slots=True)
class _Fields:
    """Fields of a hash to delete, to set to the time of the server, and to set."""

    deleted: list[str] = field(default_factory=list)
    stamped: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


@only_if(missing=ChatMemoryStore)
@application_scoped
class RedisChatMemoryStore(LogStore):
    """Stores conversations in Redis, under keys that begin with `prefix`.

        container.register(redis.client, redis.RedisChatMemoryStore)  # TOOLBOX_REDIS__URL=redis://…

    A call holds a lease of `lease` seconds on its conversation and renews it until it ends; other processes wait. A
    call whose lease was lost raises `MemoryLeaseLostError` and writes nothing. Conversations are deleted
    `expires_after` seconds after their last call; None keeps them. It cannot list conversations. Raises `TypeError` or
    `ValueError` for invalid arguments.
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
        self._write, self._upgrade = client.register_script(_WRITE), client.register_script(_UPGRADE)
        self._delete, self._ask = client.register_script(_DELETE), client.register_script(_ASK_TO_STOP)

    # --- reading

    async def read_since(self, key: ChatMemoryKey, first: Callable[[Head], int]) -> Log | None:
        found = await self._find(key)
        if found.head is None:
            return None
        numbers = range(max(1, first(found.head)), found.head.next_number)
        return Log(found.head, tuple(each for each in await self._read_turns(found, numbers) if each.counts))

    async def read_newest(self, key: ChatMemoryKey, messages: int, before: str | None = None) -> Log | None:
        found = await self._find(key)
        if found.head is None:
            return None
        place = None
        last = found.head.next_number - 1
        if before is not None:
            place = place_of_entry(await self._find_turn(found, before), before)
            last = place.turn
        read: tuple[Turn, ...] = ()
        for first_number, last_number in backwards(last, min(_AT_ONCE, messages // 2) + 1):
            if sum(len(each.shown) for each in read) >= messages:
                break
            earlier = await self._read_turns(found, range(first_number, last_number + 1))
            if place is not None:
                earlier = before_entry(earlier, place)
            read = (*(each for each in earlier if each.shown), *read)
        first = choose_newest(((each.number, len(each.shown)) for each in reversed(read)), messages)
        return Log(found.head, () if first is None else tuple(each for each in read if each.number >= first))

    async def read_run(self, key: ChatMemoryKey, run_id: str) -> Turn | None:
        found = await self._find(key, f"r:{run_id}")
        number = found.asked[0]
        turns = () if number is None else await self._read_turns(found, [int(number)])
        return turns[0] if turns else None

    async def find_heads(
        self,
        *,
        owner: Owner | None = None,
        services: Collection[str] | None = None,
        limit: int,
        before: tuple[datetime, str] | None = None,
    ) -> list[Head]:
        what = "Redis cannot list conversations, because it finds them by their id only"
        raise IllegalConfigurationError([Problem("RedisChatMemoryStore", what, "use toolbox.sql.SqlChatMemoryStore")])

    async def _find(self, key: ChatMemoryKey, *asked: str) -> _Found:
        """Return the first place of a conversation where something lies, or the first of all."""
        for place in key.places:
            name = self._keys(place)[1]
            try:
                values = [_text(each) for each in await self._fields(name, [*_HEAD, *asked])]
            except ResponseError as error:
                if not str(error).startswith("WRONGTYPE"):
                    raise
                if (earlier := await self._client.get(name)) is not None:
                    return _Found(place, _earlier_head(place, earlier), "", earlier, (None,) * len(asked))
                values = [_text(each) for each in await self._fields(name, [*_HEAD, *asked])]  # upgraded since
            if values[0] is not None:
                return _Found(place, _read_head(place, values), values[0], None, tuple(values[len(_HEAD) :]))
        return _Found(key.places[0], asked=(None,) * len(asked))

    async def _fields(self, name: str, fields: Sequence[str]) -> list[Any]:
        read: list[Any] = await self._client.hmget(name, fields)
        return read

    async def _read_turns(self, found: _Found, numbers: Sequence[int]) -> tuple[Turn, ...]:
        if found.earlier is not None:
            return (_earlier_turn(found.place, found.earlier),) if numbers else ()
        read: list[Turn] = []
        for first in range(0, len(numbers), _AT_ONCE):
            some = numbers[first : first + _AT_ONCE]
            fields = [f"{kind}:{number}" for number in some for kind in "tmah"]
            values = await self._fields(self._keys(found.place)[1], fields)
            for number, at in zip(some, range(0, len(values), 4), strict=True):
                if values[at] is not None:
                    read.append(_read_turn(number, *values[at : at + 4]))
        return tuple(read)

    async def _find_turn(self, found: _Found, entry: str) -> Turn | None:
        turn_id, _ = read_entry_id(entry)
        if found.earlier is not None:
            turn = _earlier_turn(found.place, found.earlier)
            return turn if turn.id == turn_id else None
        [number] = await self._fields(self._keys(found.place)[1], [f"i:{turn_id}"])
        turns = () if number is None else await self._read_turns(found, [int(number)])
        return turns[0] if turns else None

    # --- writing

    async def write(self, key: ChatMemoryKey, write: LogWrite) -> None:
        while True:
            turn = write.turn
            asked = () if turn is None else (f"i:{turn.id}", f"r:{turn.run_id}")
            found = await self._find_to_write(key, *asked)
            if turn is None and found.head is None:
                await self._check_lease(key)
                return
            if found.asked and found.asked[0] is not None:
                return
            head = found.head or begin_head(key, time_from_number(0), write.owner)
            fields, replaced = _Fields(), Replaced()
            if turn is not None:
                if turn.run_id is not None and found.asked[1] is not None:
                    for each in await self._read_turns(found, [int(found.asked[1])]):
                        replaced, turn = Replaced(len(each.shown), each.usage), with_beans_of(turn, each.beans, head)
                        fields.deleted += _names_of_turn(each)
                _set_turn(fields, replace(turn, number=head.next_number))
            _set_head(fields, head_after(head, write, head.updated_at, replaced))
            fields.stamped += ["created_at", "updated_at"] if found.head is None else []
            fields.stamped += ["updated_at"] if turn is not None and turn.messages else []
            if await self._store(found, key, fields, self._lifetime or "", leaves=write.leaves):
                return

    async def change(self, key: ChatMemoryKey, change: Callable[[Head], Head]) -> Head | None:
        while True:
            found = await self._find_to_write(key)
            if found.head is None:
                return None
            fields, head = _Fields(), change(found.head)
            _set_head(fields, head)
            if await self._store(found, found.place, fields, "-", is_fenced=False):
                return head

    async def rewind(self, key: ChatMemoryKey, entry: str) -> Head | None:
        while True:
            found = await self._find_to_write(key)
            if found.head is None:
                return None
            place = place_of_user_message(await self._find_turn(found, entry), entry)
            fields, hidden = _Fields(), 0
            for each in await self._read_turns(found, range(place.turn, found.head.next_number)):
                index = place.index if each.number == place.turn else each.start
                changed = replace(each, hidden_from=min(index, each.end))
                hidden += len(each.shown) - len(changed.shown)
                fields.values[f"h:{each.number}"] = changed.hidden_from
            before = list[Turn]()
            for first, last in backwards(place.turn - 1, _AT_ONCE):
                if knows_state(found.head, before):
                    break
                earlier = await self._read_turns(found, range(first, last + 1))
                before[:0] = [each for each in earlier if each.counts]
            head = head_before(found.head, place, hidden, before)
            _set_head(fields, head)
            if await self._store(found, found.place, fields, "-"):
                return head

    async def create(self, key: ChatMemoryKey, log: Log) -> bool:
        found = await self._find(key)
        if found.head is not None:
            return False
        fields, head = _Fields(), log.head
        for each in log.turns:
            assert each.at is not None
            _set_turn(fields, each)
            fields.values[f"a:{each.number}"] = time_to_number(each.at)
            if each.hidden_from is not None:
                fields.values[f"h:{each.number}"] = each.hidden_from
        _set_head(fields, head)
        fields.values["created_at"] = time_to_number(head.created_at)
        fields.values["updated_at"] = time_to_number(head.updated_at)
        fields.stamped.clear()
        return await self._store(found, key, fields, self._lifetime or "")

    async def replace(self, key: ChatMemoryKey, turn: Turn) -> None:
        while True:
            found = await self._find_to_write(key)
            head = found.head or begin_head(key, time_from_number(0))
            fields = _Fields()
            for each in await self._read_turns(found, range(1, head.next_number)):
                fields.deleted += _names_of_turn(each)
            _set_turn(fields, replace(turn, number=head.next_number))
            _set_head(fields, head_after(emptied(head), LogWrite(turn=turn), head.updated_at))
            fields.stamped += ["updated_at"] if found.head is not None else ["created_at", "updated_at"]
            if await self._store(found, key, fields, self._lifetime or ""):
                return

    async def delete(self, key: ChatMemoryKey) -> Deleted:
        places = [await self._find(each) for each in key.places]
        token = self._leases.token(key)
        names = [self._keys(key)[0], *(self._keys(each)[1] for each in key.places)]
        if not await self._delete(names, [token or ""]):
            raise MemoryLeaseLostError(key.service, key.memory_id)
        heads = [each.head for each in places if each.head is not None]
        return sum((Deleted(1, each.messages, len(each.beans)) for each in heads), Deleted())

    async def _store(
        self,
        found: _Found,
        key: ChatMemoryKey,
        fields: _Fields,
        lifetime: int | str,
        *,
        is_fenced: bool = True,
        leaves: bool = False,
    ) -> bool:
        """Write fields at once. Returns False if the conversation has changed since it was read.

        With `leaves`, the lease is released with it. Raises `MemoryLeaseLostError` if this process held the
        conversation and has lost it.
        """
        place = ChatMemoryKey(key.service, key.memory_id)
        token = self._leases.token(place) if is_fenced else None
        fields.values["version"] = int(found.version or 0) + 1
        source = found.place if found.head is not None else place
        names = [self._keys(place)[0], self._keys(source)[1], self._keys(place)[1]]
        values = [each for pair in fields.values.items() for each in pair]
        counts = [int(leaves), len(fields.deleted), len(fields.stamped)]
        if leaves:
            self._leases.leave(place)
        done = await self._write(
            names, [token or "", found.version, lifetime, *counts, *fields.deleted, *fields.stamped, *values]
        )
        if done == 0:
            raise MemoryLeaseLostError(key.service, key.memory_id)
        if leaves and done == 1:
            self._leases.released(place)
        return bool(done == 1)

    # --- data of earlier releases

    async def _find_to_write(self, key: ChatMemoryKey, *asked: str) -> _Found:
        """Return a conversation in today's form."""
        while (found := await self._find(key, *asked)).earlier is not None:
            await self._upgrade_one(found.place)
        return found

    async def _upgrade_one(self, place: ChatMemoryKey) -> bool:
        """Bring what an earlier release has stored into today's form. Returns False if there is no such thing.

        Only under the lease, because a call of an earlier release may still write.
        """
        token = self._leases.token(place)
        if token is None:
            async with self._leases.lock(place):
                return await self._upgrade_one(place)
        found = await self._find(place)
        if found.earlier is None or found.head is None:
            return False
        fields = _Fields()
        _set_head(fields, found.head)
        _set_turn(fields, _earlier_turn(place, found.earlier))
        values = [each for pair in {**fields.values, "version": 1}.items() for each in pair]
        done = await self._upgrade(self._keys(place), [token, found.earlier, *values])
        if done == 0:
            raise MemoryLeaseLostError(place.service, place.memory_id)
        return bool(done == 1)

    async def migrate_all(self) -> int:
        """Bring all conversations of earlier releases into today's form. Returns how many there were."""
        pattern = f"{_ESCAPED.sub(_escape, self._prefix)}:{{*}}:messages"
        upgraded = 0
        async for name in self._client.scan_iter(match=pattern, _type="STRING"):
            written = _text(name) or ""
            service, _, memory_id = written[len(self._prefix) + 2 : -len("}:messages")].partition(":")
            upgraded += await self._upgrade_one(ChatMemoryKey(service, memory_id))
        return upgraded

    # --- one caller at a time

    def lock(self, key: ChatMemoryKey, *, wait: bool = True) -> AbstractAsyncContextManager[None]:
        """Lock the conversation for one call at a time, across all processes that use the server."""
        return self._leases.lock(key, wait=wait)

    async def _check_lease(self, key: ChatMemoryKey) -> None:
        """Raise `MemoryLeaseLostError` if this process held the conversation and has lost it."""
        token = self._leases.token(key)
        if token is not None and await self.holder(key) != token:
            raise MemoryLeaseLostError(key.service, key.memory_id)

    async def holder(self, key: ChatMemoryKey) -> str | None:
        return _text(await self._client.get(self._keys(key)[0]))

    async def ask_to_stop(self, key: ChatMemoryKey, by: str | None) -> bool:
        return bool(await self._ask([self._keys(key)[0], self._wish_of(key)], [json.dumps(by)]))

    async def wishes(self) -> Mapping[ChatMemoryKey, str | None]:
        tokens = self._leases.tokens
        if not tokens:
            return {}
        async with self._client.pipeline(transaction=False) as asking:
            for key in tokens:
                asking.get(self._wish_of(key))
            found = [_text(each) for each in await asking.execute()]
        wishes: dict[ChatMemoryKey, str | None] = {}
        for (key, token), wish in zip(tokens.items(), found, strict=True):
            of, _, by = (wish or "").partition(":")
            if of == token:
                wishes[key] = json.loads(by)
        return wishes

    async def take(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        """Take the lease for `seconds` if it is free. Returns True if `token` has it now."""
        return bool(await self._client.set(self._keys(key)[0], token, nx=True, px=round(seconds * 1000)))

    async def renew(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        """Extend the lease to `seconds` from now. Returns False if `token` has lost it."""
        return bool(await self._renew(self._keys(key), [token, round(seconds * 1000)]))

    async def give_back(self, key: ChatMemoryKey, token: str) -> None:
        """Release the lease if `token` has it."""
        await self._give_back(self._keys(key), [token])

    # --- start and end

    async def stop(self) -> None:
        """Release all leases that are still held."""
        await self._leases.stop()

    async def ready(self) -> bool:
        """Return True if the server answers; raise its error otherwise. For readiness checks."""
        await self._client.get(f"{self._prefix}:ready")  # as any call does, so that missing rights show as well
        return True

    def _keys(self, key: ChatMemoryKey) -> list[str]:
        # The braces keep all keys of a conversation on one node of a cluster. Service names have no colon.
        name = f"{self._prefix}:{{{key.service}:{key.memory_id}}}"
        return [f"{name}:lease", f"{name}:messages"]

    def _wish_of(self, key: ChatMemoryKey) -> str:
        return f"{self._prefix}:{{{key.service}:{key.memory_id}}}:wish"


_ESCAPED = re.compile(r"[*?\[\]\\]")


def _escape(found: re.Match[str]) -> str:
    return f"\\{found[0]}"


def _text(value: Any) -> str | None:
    """Return a value of Redis as text; clients give bytes or texts."""
    return value.decode() if isinstance(value, bytes) else value


# --- fields


def _read_head(place: ChatMemoryKey, values: Sequence[Any]) -> Head:
    _, id_, shown, kept, created_at, updated_at, entries, next_number = values[: len(_HEAD)]
    return head_from_json(
        shown,
        kept,
        key=place,
        id=id_,
        created_at=time_from_number(int(created_at)),
        updated_at=time_from_number(int(updated_at)),
        messages=int(entries),
        next_number=int(next_number),
    )


def _set_head(fields: _Fields, head: Head) -> None:
    shown, kept = head_to_json(head)
    counts = {"entries": head.messages, "next_number": head.next_number}
    fields.values |= {"id": head.id, "shown": shown, "kept": kept, **counts}


def _read_turn(number: int, written: Any, messages: Any, at: Any, hidden_from: Any) -> Turn:
    read = read_json(written)
    return turn_from_json(
        read["details"],
        id=read["id"],
        messages=messages_from_json(messages),
        run_id=read.get("run_id"),
        beans=beans_from_json(read.get("beans")),
        at=time_from_number(int(at)),
        number=number,
        start=read["start"],
        hidden_from=None if hidden_from is None else int(hidden_from),
    )


def _set_turn(fields: _Fields, turn: Turn) -> None:
    """Set the fields of a turn; that of its time is stamped."""
    written = {"version": 1, "id": turn.id, "start": turn.start, "details": turn_to_json(turn)}
    more = {"run_id": turn.run_id, "beans": beans_to_json(turn.beans)}
    written |= {name: each for name, each in more.items() if each is not None}
    fields.values |= {
        f"t:{turn.number}": write_json(written),
        f"m:{turn.number}": messages_to_json(turn.messages),
        f"i:{turn.id}": turn.number,
    }
    if turn.run_id is not None:
        fields.values[f"r:{turn.run_id}"] = turn.number
    fields.stamped.append(f"a:{turn.number}")


def _names_of_turn(turn: Turn) -> Iterable[str]:
    """Return the names of the fields of a turn."""
    yield from (f"{kind}:{turn.number}" for kind in "tmah")
    yield f"i:{turn.id}"
    if turn.run_id is not None:
        yield f"r:{turn.run_id}"


def _earlier_head(place: ChatMemoryKey, earlier: bytes | str) -> Head:
    """Return the head of what an earlier release has stored; its id is the same whenever it is read.

    Nobody knows when it was stored.
    """
    id_ = hashlib.sha256(f"{place.service}\0{place.memory_id}".encode()).hexdigest()[:32]
    count = len(messages_from_json(earlier))
    return replace(begin_head(place, datetime.now(UTC)), id=id_, messages=count, next_number=2)


def _earlier_turn(place: ChatMemoryKey, earlier: bytes | str) -> Turn:
    """Return what an earlier release has stored as the first turn. What its window has cut off is gone."""
    head = _earlier_head(place, earlier)
    return Turn(id=head.id, messages=messages_from_json(earlier), number=1, start=1, at=head.created_at)


stores = (RedisChatMemoryStore,)
"""All stores in Redis: `container.register(redis.client, *redis.stores)`.

A store of your own that you register as well replaces the one of its kind.
"""
