"""Limits on the usage of models and tools: `UsageLimits`, `usage_limits`, `current_usage`, and estimates of the cost.

Each invocation with limits, and each `usage_limits` block, has an `Account`. Accounts are nested: a call draws on its
own account and on all outer ones. Not here: counting the calls of an invocation (`services.usage_layers`).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from decimal import Context, Decimal
from typing import Any, Protocol

from .chat import ChatResponse, Message, TokenUsage
from .errors import EndsInvocation, IllegalConfigurationError, Problem, ToolboxError

__all__ = [
    "CostEstimator",
    "GenAiPrices",
    "Usage",
    "UsageLimitExceededError",
    "UsageLimits",
    "current_usage",
    "usage_limits",
]

logger = logging.getLogger("toolbox.limits")

_EXACT = Context(prec=50, traps=[])  # not the program's own decimal context, which may round to few digits

NO_TOKENS = TokenUsage(0, 0)
_TOKENS = fields(TokenUsage)


# --- limits and usage


@dataclass(frozen=True, slots=True)
class UsageLimits:
    """The largest usage of an invocation, including services that its tools call. None means no limit.

    - `model_calls`: requests to models; `tool_calls`: tool calls that models ask for.
    - `input_tokens`, `output_tokens`, `total_tokens`: as the model servers report them.
    - `cost`: in the unit of the `CostEstimator` bean, which it needs.

    Raises `ValueError` for a limit that is negative, not finite or not a number.
    """

    model_calls: int | None = None
    tool_calls: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    cost: Decimal | None = None

    def __post_init__(self) -> None:
        for each in fields(self)[:-1]:
            value = getattr(self, each.name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ValueError(f"UsageLimits: invalid {each.name}={value!r}; use an integer of 0 or more, or None")
        if self.cost is not None:
            amount = _read_amount(self.cost)
            if amount is None:
                raise ValueError(f"UsageLimits: invalid cost={self.cost!r}; use a Decimal of 0 or more, or None")
            object.__setattr__(self, "cost", amount)

    @property
    def limits_tokens(self) -> bool:
        """Return True if one of the limits counts tokens."""
        return any(each is not None for each in (self.input_tokens, self.output_tokens, self.total_tokens))


def _read_amount(value: object) -> Decimal | None:
    """Return an amount of money; None if it is negative, not finite or not a number."""
    if isinstance(value, bool) or not isinstance(value, (Decimal, int, float)):
        return None
    amount = Decimal(str(value)) if isinstance(value, float) else Decimal(value)
    return amount if amount.is_finite() and amount >= 0 else None


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage so far. `cost` is in the unit of the `CostEstimator`; None if the cost of a reply is unknown."""

    model_calls: int = 0
    tool_calls: int = 0
    tokens: TokenUsage = NO_TOKENS
    cost: Decimal | None = Decimal(0)

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.model_calls + other.model_calls,
            self.tool_calls + other.tool_calls,
            self.tokens + other.tokens,
            None if self.cost is None or other.cost is None else _EXACT.add(self.cost, other.cost),
        )

    def __sub__(self, before: Usage) -> Usage:
        tokens = {each.name: getattr(self.tokens, each.name) - getattr(before.tokens, each.name) for each in _TOKENS}
        return Usage(
            self.model_calls - before.model_calls,
            self.tool_calls - before.tool_calls,
            TokenUsage(**tokens),
            None if self.cost is None or before.cost is None else _EXACT.subtract(self.cost, before.cost),
        )

    def of(self, limit: str) -> int | Decimal | None:
        """Return the usage for the limit of this name, such as `total_tokens`. Raises `AttributeError` for others."""
        if limit in ("model_calls", "tool_calls", "cost"):
            value: int | Decimal | None = getattr(self, limit)
            return value
        tokens: int = getattr(self.tokens, limit)
        return tokens


class UsageLimitExceededError(ToolboxError, EndsInvocation):
    """A limit was reached. The invocation for which it was set raises this error.

    - `limit`: its name, such as `total_tokens`; `allowed`: its value.
    - `used`: the usage so far; None for a cost that is unknown. A call that would exceed the limit is not included.
    - `usage`: everything that was counted. `transcript`: the messages of the invocation that raises the error.
    """

    def __init__(
        self,
        limit: str,
        allowed: int | Decimal,
        used: int | Decimal | None,
        usage: Usage,
        transcript: Sequence[Message] = (),
    ) -> None:
        super().__init__(limit, allowed, used, usage, tuple(transcript))
        self.limit, self.allowed, self.used = limit, allowed, used
        self.usage, self.transcript = usage, tuple(transcript)

    def __str__(self) -> str:
        if self.used is None:
            what = f"cannot enforce {self.limit}={self.allowed}: the cost of a reply is unknown"
            return f"{what}; return a Decimal from CostEstimator.estimate()"
        fix = "raise the limit, or change the prompt or the tools"
        if self.used > self.allowed:
            return f"the limit {self.limit}={self.allowed} was exceeded: {self.used} used; {fix}"
        return f"another call would exceed the limit {self.limit}={self.allowed}: {self.used} used; {fix}"


# --- the cost of a reply


class CostEstimator(Protocol):
    """Estimates what a reply costs. Implement it in a bean; a `cost` limit needs exactly one.

        class Prices(CostEstimator):
            def estimate(self, model: str, usage: TokenUsage) -> Decimal | None:
                return usage.total_tokens * Decimal("0.000001")

    `model` is the model's name as the server reports it, else the configured name. None means that the cost is unknown;
    then a `cost` limit raises `UsageLimitExceededError`. `estimate` runs on the event loop and must return quickly. Its
    exceptions are logged, and the cost is unknown.
    """

    def estimate(self, model: str, usage: TokenUsage) -> Decimal | None:
        """Return the cost of one reply, 0 or more; None if it is unknown."""
        ...


class GenAiPrices(CostEstimator):
    """Estimates costs in US dollars with the price list of the library `genai-prices` (the extra `prices`).

        container.register(GenAiPrices)

    The prices are those of the installed version; it downloads nothing. `provider` is the provider's id in that
    library, such as `azure`; by default it follows from the model's name. A model that the list does not have has an
    unknown cost. Raises `ImportError` if the library is not installed.
    """

    def __init__(self, provider: str | None = None) -> None:
        try:
            import genai_prices
        except ImportError as error:
            fix = "the library genai-prices is not installed; run: pip install 'toolbox-di[prices]'"
            raise ImportError(fix) from error
        self._provider, self._prices = provider, genai_prices
        self.estimate("gpt-5", NO_TOKENS)  # reads the price list now, not on the event loop

    def estimate(self, model: str, usage: TokenUsage) -> Decimal | None:
        """Return the cost in US dollars; None for an unknown model or provider."""
        cached, written = usage.cached_input_tokens, getattr(usage, "cache_write_tokens", 0)
        counted = self._prices.Usage(
            input_tokens=max(usage.input_tokens, cached + written),
            output_tokens=usage.output_tokens,
            cache_read_tokens=cached,
            cache_write_tokens=written,
        )
        try:
            return self._prices.calc_price(counted, model, provider_id=self._provider).total_price
        except (LookupError, ValueError):
            return None


def cost_of(estimator: CostEstimator | None, model: str, usage: TokenUsage | None) -> Decimal | None:
    """Return the estimated cost of a reply. None if it is unknown, or if the estimator fails or returns no amount.

    A reply without usage is estimated with 0 tokens.
    """
    if estimator is None:
        return None
    try:
        found = estimator.estimate(model, NO_TOKENS if usage is None else usage)
    except Exception:
        logger.exception("%s.estimate failed; the cost of the reply is unknown", type(estimator).__name__)
        return None
    if found is None:
        return None
    amount = _read_amount(found)
    if amount is None:
        name = type(estimator).__name__
        logger.error("%s.estimate returned %r, not a Decimal of 0 or more; the cost is unknown", name, found)
    return amount


# --- accounts


class LimitedInvocation(Protocol):
    """An invocation that a limit can end. `refused` is the error of the limit that ended it."""

    refused: UsageLimitExceededError | None

    @property
    def transcript(self) -> tuple[Message, ...]:
        """The messages so far."""
        ...

    def end_with(self, error: UsageLimitExceededError) -> None:
        """End the invocation with this error, from any thread."""
        ...

    def may_exceed(self, limit: str, allowed: object) -> bool:
        """Return True if the invocation may exceed its own limit of this name and value."""
        ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """A limit that is reached, with the account that has it."""

    account: Account
    limit: str
    allowed: int | Decimal
    used: int | Decimal | None

    def error(self, transcript: Sequence[Message]) -> UsageLimitExceededError:
        """Return the error for the caller, with the numbers as the limit counts them."""
        later, usage = self.account.later, self.account.usage
        if later is None or not later.binds(self.limit):
            return UsageLimitExceededError(self.limit, self.allowed, self.used, usage, transcript)
        usage, allowed = usage - later.counted_from, getattr(later.limits, self.limit)
        return UsageLimitExceededError(self.limit, allowed, usage.of(self.limit), usage, transcript)


@dataclass(frozen=True, slots=True)
class LaterLimits:
    """Limits that an account keeps in addition to its `own`, and that count from a later usage on."""

    limits: UsageLimits
    counted_from: Usage
    own: UsageLimits | None

    @property
    def in_total(self) -> UsageLimits:
        """The limits on top of what was used before."""
        before = self.counted_from
        values = {each.name: getattr(self.limits, each.name) for each in fields(UsageLimits)}
        return UsageLimits(
            **{name: most if most is None else most + (before.of(name) or 0) for name, most in values.items()}
        )

    def binds(self, limit: str) -> bool:
        """Return True if the limit of this name is reached before the account's own."""
        allowed, own = getattr(self.in_total, limit), getattr(self.own, limit, None)
        return allowed is not None and (own is None or allowed < own)


class Account:
    """Counts the usage of one invocation or of one `usage_limits` block, and of everything within it.

    `limits` is None for an invocation without own limits, which only draws on the accounts `outer` of it. All accounts
    of a chain share one lock, so that concurrent calls cannot exceed a limit together. `invocation` is None for a
    block.

    A recorded effect that is replayed must not be counted with `reserve` and `add`, but with `restore` and
    `restore_calls`.
    """

    __slots__ = ("__weakref__", "_lock", "asked", "invocation", "is_running", "later", "limits", "outer", "usage")

    def __init__(self, limits: UsageLimits | None, outer: Account | None, invocation: Any = None) -> None:
        self.limits, self.outer, self.invocation = limits, outer, invocation
        self.later: LaterLimits | None = None
        self.usage = Usage()
        self.is_running = False
        self.asked = 0
        self._lock: threading.Lock = threading.Lock() if outer is None else outer._lock

    def count_later(self, later: LaterLimits) -> None:
        """Keep limits that count from a usage on, beside the account's own; they replace earlier ones of this kind."""
        self.later, self.limits = later, narrowest(later.own, later.in_total)

    def _find_limited(self) -> Iterator[tuple[Account, UsageLimits]]:
        """Yield the accounts that count, innermost first, with their limits."""
        account: Account | None = self
        while account is not None:
            if account.limits is not None:
                yield account, account.limits
            account = account.outer

    @property
    def innermost(self) -> tuple[Usage, UsageLimits]:
        """The usage and the limits of the innermost account that counts."""
        return next((account.usage, limits) for account, limits in self._find_limited())

    @property
    def limits_cost(self) -> bool:
        """Return True if one of the accounts has a limit for the cost."""
        return any(limits.cost is not None for _, limits in self._find_limited())

    @property
    def limits_tokens(self) -> bool:
        """Return True if one of the accounts has a limit for tokens."""
        return any(limits.limits_tokens for _, limits in self._find_limited())

    def reserve(self, model_calls: int = 0, tool_calls: int = 0) -> Refusal | None:
        """Count calls before they happen. If that would exceed a limit, count nothing and return the refusal."""
        with self._lock:
            return self._count_calls(list(self._find_limited()), Usage(model_calls, tool_calls))

    def _count_calls(self, accounts: Sequence[tuple[Account, UsageLimits]], added: Usage) -> Refusal | None:
        if (refusal := self._find_exceeded(accounts)) is not None:
            return refusal
        refused = [
            Refusal(account, name, allowed, account.usage.of(name))
            for account, limits in accounts
            for name in ("model_calls", "tool_calls")
            if (more := getattr(added, name)) and (allowed := getattr(limits, name)) is not None
            if getattr(account.usage, name) + more > allowed and not self._may_exceed(account, name, allowed)
        ]
        if refused:
            return self._choose_first(refused)
        for account, _ in accounts:
            account.usage += added
        return None

    def add(self, tokens: TokenUsage | None, cost: Decimal | None) -> None:
        """Count the tokens and the cost of a reply. None means unknown: unknown tokens count 0."""
        added = Usage(tokens=_replace_invalid(tokens), cost=cost)
        with self._lock:
            for account, _ in self._find_limited():
                account.usage += added

    def read_limits(self) -> list[tuple[Usage, UsageLimits]]:
        """Return the usage and the limits of the accounts that count, innermost first."""
        with self._lock:
            return [(account.usage, limits) for account, limits in self._find_limited()]

    def used_up(self) -> Refusal | None:
        """Return the limit that allows no further call of a model, or None."""
        with self._lock:
            names = [each.name for each in fields(UsageLimits) if each.name != "tool_calls"]
            refused = [
                Refusal(account, name, allowed, used)
                for account, limits in self._find_limited()
                for name in names
                if (allowed := getattr(limits, name)) is not None
                if (used := account.usage.of(name)) is None or used >= allowed
            ]
            return self._choose_first(refused) if refused else None

    def exceeded(self) -> Refusal | None:
        """Return the limit for tokens or cost that is exceeded, or None."""
        with self._lock:
            return self._find_exceeded(self._find_limited())

    def _find_exceeded(self, accounts: Iterable[tuple[Account, UsageLimits]]) -> Refusal | None:
        names = ("input_tokens", "output_tokens", "total_tokens", "cost")
        refused = [
            Refusal(account, name, allowed, used)
            for account, limits in accounts
            for name in names
            if (allowed := getattr(limits, name)) is not None
            if ((used := account.usage.of(name)) is None or used > allowed)
            and not self._may_exceed(account, name, allowed)
        ]
        return self._choose_first(refused) if refused else None

    def _may_exceed(self, account: Account, limit: str, allowed: object) -> bool:
        """Return True for a limit that the invocation itself may exceed, but nothing within it."""
        return account is self and account.invocation is not None and account.invocation.may_exceed(limit, allowed)

    def _choose_first(self, refused: Sequence[Refusal]) -> Refusal:
        """Return the refusal that ends the most: that of the outermost invocation, then the one with the least left."""
        depths: dict[int, int] = {}
        account: Account | None = self
        while account is not None:
            depths[id(account)] = len(depths)
            account = account.outer

        def rank(refusal: Refusal) -> tuple[int, bool, Decimal]:
            left = _EXACT.subtract(Decimal(refusal.allowed), Decimal(refusal.used or 0))
            return -depths[id(self.raising(refusal.account))], refusal.used is not None, left

        return min(refused, key=rank)

    def raising(self, account: Account) -> Account:
        """Return the account of the invocation that raises the error for a limit of `account`.

        It is the invocation that has the limit; for a block, the outermost running invocation in it. An invocation that
        a limit has ended stays the one that raises: a thread that runs on after it must not see the error.
        """
        found, here = self, self
        while True:
            if here.is_running or here.was_refused:
                found = here
            if here is account or here.outer is None:
                return found
            here = here.outer

    @property
    def was_refused(self) -> bool:
        """True if a limit has ended the invocation."""
        return self.invocation is not None and self.invocation.refused is not None

    def stop(self) -> None:
        """Note that the invocation has ended. From now on only a limit that has ended it can name it."""
        with self._lock:
            self.is_running = False

    def refuse(self, refusal: Refusal, reply: Message | None) -> tuple[Any, UsageLimitExceededError, bool]:
        """Choose the invocation that raises, and set its error. Returns both, and True if the error was already set.

        Under the lock: an invocation that ends well at the same time either gets the error or is not chosen.
        """
        with self._lock:
            raising: LimitedInvocation = self.raising(refusal.account).invocation
            if raising.refused is not None:
                return raising, raising.refused, True
            last = (reply,) if reply is not None and raising is self.invocation else ()
            raising.refused = error = refusal.error((*raising.transcript, *last))
            return raising, error, False

    def restore(self, usage: Usage) -> None:
        """Count the usage of an effect that was recorded and is replayed: limits are not checked.

        Only the accounts of the enclosing invocations count it: blocks around a run that is resumed do not pay again.
        """
        with self._lock:
            for account, _ in self._find_enclosing():
                account.usage += usage

    def restore_calls(self, tool_calls: int) -> Refusal | None:
        """Count the calls of a recorded reply before they happen, as `reserve` does, in the accounts of `restore`."""
        with self._lock:
            return self._count_calls(list(self._find_enclosing()), Usage(0, tool_calls))

    def _find_enclosing(self) -> Iterator[tuple[Account, UsageLimits]]:
        """Yield the accounts of the enclosing invocations that count, innermost first, with their limits."""
        account: Account | None = self
        while account is not None and account.invocation is not None:
            if account.limits is not None:
                yield account, account.limits
            account = account.outer


def narrowest(limits: UsageLimits | None, others: UsageLimits | None) -> UsageLimits | None:
    """Return limits that are kept only if both are; None if there are none."""
    if limits is None or others is None:
        return limits or others
    values = {}
    for each in fields(UsageLimits):
        both = [value for side in (limits, others) if (value := getattr(side, each.name)) is not None]
        values[each.name] = min(both, default=None)
    return UsageLimits(**values)


def remaining(account: Account | None, used: Usage | None = None) -> UsageLimits | None:
    """Return what the limits of an account and of all outer ones still allow; None without limits.

    `used` is what a run has counted itself and will count again when it continues: the limits allow that in addition.
    """
    found: UsageLimits | None = None
    for each, limits in () if account is None else account.read_limits():
        left: dict[str, Any] = {}
        for limit in fields(UsageLimits):
            allowed, here = getattr(limits, limit.name), each.of(limit.name)
            if allowed is None:
                continue
            more = 0 if used is None else used.of(limit.name) or 0
            difference = Decimal(0) if here is None else _EXACT.subtract(Decimal(allowed), Decimal(here))
            total = _EXACT.add(max(difference, Decimal(0)), Decimal(more))
            left[limit.name] = total if limit.name == "cost" else int(total)
        found = narrowest(found, UsageLimits(**left))
    return found


def refuse_if_used_up(account: Account) -> None:
    """Raise `UsageLimitExceededError` if an account allows no further call of a model."""
    if (refusal := account.used_up()) is not None:
        raise refusal.error(())


def _replace_invalid(tokens: TokenUsage | None) -> TokenUsage:
    """Return a usage without negative numbers, which a server could use to get around limits."""
    if tokens is None:
        return NO_TOKENS
    values = [getattr(tokens, each.name) for each in fields(tokens)]
    return type(tokens)(*(value if isinstance(value, int) and value > 0 else 0 for value in values))


current_account: ContextVar[Account | None] = ContextVar("toolbox.account", default=None)


def current_usage() -> Usage:
    """Return the usage of the innermost invocation or block with limits; zeros outside of all."""
    account = current_account.get()
    return Usage() if account is None else account.innermost[0]


@contextmanager
def usage_limits(
    *,
    model_calls: int | None = None,
    tool_calls: int | None = None,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
    total_tokens: int | None = None,
    cost: Decimal | None = None,
) -> Iterator[None]:
    """Limit the usage of all service calls in the block together, also in tasks and threads that it starts.

        with usage_limits(total_tokens=10_000):
            await researcher.ask("…")

    The outermost service call that runs in the block raises `UsageLimitExceededError`; calls of its tools are
    cancelled. `current_usage()` returns what was used. Blocks can be nested, also in tools: each limit applies. Raises
    `ValueError` for a negative limit, and `IllegalConfigurationError` for a `cost` limit without a `CostEstimator`.
    """
    limits = UsageLimits(model_calls, tool_calls, input_tokens, output_tokens, total_tokens, cost)
    if limits.cost is not None and not _has_estimator():
        raise IllegalConfigurationError([no_estimator("usage_limits(cost=…)")])
    token = current_account.set(Account(limits, current_account.get()))
    try:
        yield
    finally:
        current_account.reset(token)


# --- where estimators are


def no_estimator(where: str, look_alike: str = "") -> Problem:
    """Return the problem of a cost limit without an estimator. `look_alike` names a class that could be one."""
    if look_alike:
        fix = f"let {look_alike} inherit from CostEstimator"
        return Problem(where, "a limit for the cost needs a CostEstimator, but there is none", fix)
    fix = "register one, such as toolbox.limits.GenAiPrices, or pass cost_estimator= to create_ai_service"
    return Problem(where, "a limit for the cost needs a CostEstimator, but there is none", fix)


class EstimatingHost(Protocol):
    """Hosts services: a started container, or a service made without a container."""

    is_container: bool
    has_cost_estimator: bool


_hosts: weakref.WeakSet[Any] = weakref.WeakSet()


def host_started(host: EstimatingHost) -> None:
    """Add a host; `usage_limits` looks for its estimator."""
    _hosts.add(host)


def host_stopped(host: EstimatingHost) -> None:
    """Remove a host."""
    _hosts.discard(host)


def _has_estimator() -> bool:
    """Return True if a started container has an estimator, or, if no container is started, another service."""
    containers = [each for each in _hosts if each.is_container]
    return any(each.has_cost_estimator for each in containers or _hosts)


def model_name(response: ChatResponse, model: object, configured: str | None) -> str:
    """Return the model's name for an estimate: as the server reported it, else as it is configured."""
    name = response.model or getattr(model, "model", None)
    return name if isinstance(name, str) and name else configured or "default"
