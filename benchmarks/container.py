"""What a container costs: a request graph of ten beans in a new request scope, beside other containers.

The graph: 2 application beans, 3 request beans, 5 dependent ones. One round of each after the other, so that what else
the machine does hits all of them alike; printed are medians over the rounds, and ratios within each round.

    python -m benchmarks.container [--rounds 9] [--json] [--save]

Not shared alike: svcs has no dependent beans (all are kept in the scope), plain dependency_injector factories have no
scopes at all, FastAPI's `Depends` is asked as an endpoint does it. Their rows are there to compare, not to rank.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from benchmarks import results
from toolbox import Container, application_scoped, dependent, request_scoped

# --- the graph


class Settings:
    pass


class Engine:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings


class Session:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine


class User:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings


class Audit:
    def __init__(self, session: Session, user: User) -> None:
        self.session, self.user = session, user


class Users:
    def __init__(self, session: Session) -> None:
        self.session = session


class Orders:
    def __init__(self, session: Session, audit: Audit) -> None:
        self.session, self.audit = session, audit


class Pricing:
    def __init__(self, settings: Settings, user: User) -> None:
        self.settings, self.user = settings, user


class Checkout:
    def __init__(self, orders: Orders, pricing: Pricing) -> None:
        self.orders, self.pricing = orders, pricing


class Handler:
    def __init__(self, users: Users, checkout: Checkout, audit: Audit) -> None:
        self.users, self.checkout, self.audit = users, checkout, audit


APPLICATION = (Settings, Engine)
REQUEST = (Session, User, Audit)
DEPENDENT = (Users, Orders, Pricing, Checkout, Handler)

Round = Callable[[int], Awaitable[None]]


def verify(first: Handler, second: Handler) -> None:
    """That two handlers of different requests share what they should, and nothing else."""
    assert first.users.session.engine is second.users.session.engine
    assert first.users.session is first.checkout.orders.session is not second.users.session
    assert first.audit is first.checkout.orders.audit is not second.audit


# --- the containers


async def ours() -> Round:
    for cls in APPLICATION:
        application_scoped(cls)
    for cls in REQUEST:
        request_scoped(cls)
    for cls in DEPENDENT:
        dependent(cls)
    container = Container().register(*APPLICATION, *REQUEST, *DEPENDENT)
    await container.__aenter__()

    async def one() -> Handler:
        async with container.request_scope():
            return container.get(Handler)

    verify(await one(), await one())

    async def run(count: int) -> None:
        for _ in range(count):
            async with container.request_scope():
                container.get(Handler)

    return run


async def dishka() -> Round:
    from dishka import Provider, Scope, make_async_container

    provider = Provider()
    for cls in APPLICATION:
        provider.provide(cls, scope=Scope.APP)
    for cls in REQUEST:
        provider.provide(cls, scope=Scope.REQUEST)
    for cls in DEPENDENT:
        provider.provide(cls, scope=Scope.REQUEST, cache=False)
    container = make_async_container(provider)

    async def one() -> Handler:
        async with container() as scope:
            return await scope.get(Handler)

    verify(await one(), await one())

    async def run(count: int) -> None:
        for _ in range(count):
            async with container() as scope:
                await scope.get(Handler)

    return run


async def wireup() -> Round:
    import wireup as library

    injectables: list[Any] = [library.injectable(cls, lifetime="singleton") for cls in APPLICATION]
    injectables += [library.injectable(cls, lifetime="scoped") for cls in REQUEST]
    injectables += [library.injectable(cls, lifetime="transient") for cls in DEPENDENT]
    container = library.create_async_container(injectables=injectables)

    async def one() -> Handler:
        async with container.enter_scope() as scope:
            return await scope.get(Handler)

    verify(await one(), await one())

    async def run(count: int) -> None:
        for _ in range(count):
            async with container.enter_scope() as scope:
                await scope.get(Handler)

    return run


async def svcs() -> Round:
    import svcs as library

    registry = library.Registry()
    settings = Settings()
    engine = Engine(settings)
    registry.register_value(Settings, settings)
    registry.register_value(Engine, engine)
    registry.register_factory(Session, lambda svcs_container: Session(svcs_container.get(Engine)))
    registry.register_factory(User, lambda svcs_container: User(svcs_container.get(Settings)))
    registry.register_factory(
        Audit, lambda svcs_container: Audit(svcs_container.get(Session), svcs_container.get(User))
    )
    registry.register_factory(Users, lambda svcs_container: Users(svcs_container.get(Session)))
    registry.register_factory(
        Orders, lambda svcs_container: Orders(svcs_container.get(Session), svcs_container.get(Audit))
    )
    registry.register_factory(
        Pricing, lambda svcs_container: Pricing(svcs_container.get(Settings), svcs_container.get(User))
    )
    registry.register_factory(
        Checkout, lambda svcs_container: Checkout(svcs_container.get(Orders), svcs_container.get(Pricing))
    )
    registry.register_factory(
        Handler,
        lambda svcs_container: Handler(
            svcs_container.get(Users), svcs_container.get(Checkout), svcs_container.get(Audit)
        ),
    )

    async def one() -> Handler:
        async with library.Container(registry) as scope:
            return scope.get(Handler)

    verify(await one(), await one())

    async def run(count: int) -> None:
        for _ in range(count):
            async with library.Container(registry) as scope:
                scope.get(Handler)

    return run


async def plain_factories() -> Round:
    from dependency_injector import providers

    settings = providers.ThreadSafeSingleton(Settings)
    engine = providers.ThreadSafeSingleton(Engine, settings)
    session = providers.Factory(Session, engine)
    user = providers.Factory(User, settings)
    audit = providers.Factory(Audit, session, user)
    users = providers.Factory(Users, session)
    orders = providers.Factory(Orders, session, audit)
    pricing = providers.Factory(Pricing, settings, user)
    handler = providers.Factory(Handler, users, providers.Factory(Checkout, orders, pricing), audit)

    async def run(count: int) -> None:
        for _ in range(count):
            handler()

    return run


async def fastapi_depends() -> Round:
    from contextlib import AsyncExitStack

    from fastapi import Depends, FastAPI, Request

    the_settings = Settings()
    the_engine = Engine(the_settings)

    async def settings() -> Settings:
        return the_settings

    async def engine() -> Engine:
        return the_engine

    async def session(engine: Annotated[Engine, Depends(engine)]) -> Session:
        return Session(engine)

    async def user(settings: Annotated[Settings, Depends(settings)]) -> User:
        return User(settings)

    async def audit(session: Annotated[Session, Depends(session)], user: Annotated[User, Depends(user)]) -> Audit:
        return Audit(session, user)

    async def users(session: Annotated[Session, Depends(session)]) -> Users:
        return Users(session)

    async def orders(session: Annotated[Session, Depends(session)], audit: Annotated[Audit, Depends(audit)]) -> Orders:
        return Orders(session, audit)

    async def pricing(
        settings: Annotated[Settings, Depends(settings)], user: Annotated[User, Depends(user)]
    ) -> Pricing:
        return Pricing(settings, user)

    async def checkout(
        orders: Annotated[Orders, Depends(orders)], pricing: Annotated[Pricing, Depends(pricing)]
    ) -> Checkout:
        return Checkout(orders, pricing)

    async def endpoint(
        users: Annotated[Users, Depends(users)],
        checkout: Annotated[Checkout, Depends(checkout)],
        audit: Annotated[Audit, Depends(audit)],
    ) -> None: ...

    from fastapi.dependencies.utils import get_dependant, solve_dependencies

    dependant = get_dependant(path="/", call=endpoint)

    async def run(count: int) -> None:
        for _ in range(count):
            async with AsyncExitStack() as stack:
                scope = {
                    "type": "http",
                    "method": "GET",
                    "path": "/",
                    "headers": [],
                    "query_string": b"",
                    "app": app,
                    "fastapi_inner_astack": stack,
                    "fastapi_function_astack": stack,
                }
                await solve_dependencies(
                    request=Request(scope), dependant=dependant, async_exit_stack=stack, embed_body_fields=False
                )

    app = FastAPI()
    await run(1)
    return run


async def by_hand() -> Round:
    settings = Settings()
    engine = Engine(settings)

    async def run(count: int) -> None:
        for _ in range(count):
            session, user = Session(engine), User(settings)
            audit = Audit(session, user)
            Handler(Users(session), Checkout(Orders(session, audit), Pricing(settings, user)), audit)

    return run


CONTAINERS: dict[str, Callable[[], Awaitable[Round]]] = {
    "toolbox": ours,
    "dishka": dishka,
    "wireup": wireup,
    "svcs": svcs,
    "dependency_injector, plain factories": plain_factories,
    "FastAPI Depends": fastapi_depends,
    "by hand": by_hand,
}
RANKED = ("dishka", "wireup", "svcs")
NEEDS = {name: name for name in RANKED}


async def measure(rounds: int, seconds: float) -> dict[str, list[float]]:
    """Microseconds per request, for each container and round."""
    runs = {name: await CONTAINERS[name]() for name in results.installed(CONTAINERS, NEEDS)}
    counts: dict[str, int] = {}
    for name, run in runs.items():  # as many requests as fit into a part of a second
        await run(200)
        begin = time.perf_counter()
        await run(200)
        counts[name] = max(50, int(200 * seconds / (time.perf_counter() - begin)))
    found: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for number in range(rounds):
        for name in order if number % 2 == 0 else reversed(order):
            gc.collect()
            begin = time.perf_counter()
            await runs[name](counts[name])
            found[name].append((time.perf_counter() - begin) / counts[name] * 1e6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.25, help="for each container in each round")
    options = results.parse(parser, rounds=2, seconds=0.001)
    found = asyncio.run(measure(options.rounds, options.seconds))
    medians = {name: statistics.median(times) for name, times in found.items()}
    ratios = {
        name: statistics.median(other / mine for other, mine in zip(times, found["toolbox"], strict=True))
        for name, times in found.items()
    }
    ranked = [name for name in RANKED if name in found]
    fastest = [min(each) for each in zip(*(found[name] for name in ranked), strict=True)]
    to_fastest = [other / mine for other, mine in zip(fastest, found["toolbox"], strict=False)]
    goal = statistics.median(to_fastest) if to_fastest else None
    if not options.json:
        print(f"{'':38} {'µs/request':>10} {'toolbox is':>12}")
        for name, median in sorted(medians.items(), key=lambda item: item[1]):
            print(f"{name:38} {median:10.2f} {ratios[name]:10.2f} x")
        if goal is not None:
            print(f"\nmedian ratio to the fastest of {', '.join(ranked)}: {goal:.2f} (goal: at least 0.95)")
    chart = results.Chart(
        "container",
        "Container: one request",
        "Opens a request scope, creates a graph of ten beans in it (2 application, 3 request, 5 dependent), and closes "
        "it. svcs has no dependent beans, and plain dependency_injector factories have no scopes.",
        (results.compare("Time for a request scope with ten beans", "µs", found),),
        ("dishka", "wireup", "svcs", "dependency-injector", "fastapi"),
    )
    results.finish(options, chart, {"microseconds": found, "medians": medians, "to_fastest": goal})


if __name__ == "__main__":
    main()
