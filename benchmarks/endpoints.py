"""What an injected endpoint costs: the container benchmark's ten beans, asked for by a FastAPI endpoint.

Whole ASGI calls, without a network. Printed is what each application takes more than one that injects nothing; the
applications take turns in each round, so that what else the machine does hits all of them alike.

    python -m benchmarks.endpoints [--rounds 15] [--json] [--save]

Not shared alike: ours alone keeps the scope open until the response has been sent, tells it of errors that FastAPI
handles, and notices clients that leave; wireup's middleware mode comes closest.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, FastAPI

from benchmarks import results
from benchmarks.container import APPLICATION, DEPENDENT, REQUEST, Handler
from toolbox import Container, application_scoped, dependent, request_scoped
from toolbox_fastapi import Inject, install

REQUESTED: dict[str, Any] = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "http_version": "1.1",
    "method": "GET",
    "path": "/",
    "raw_path": b"/",
    "query_string": b"",
    "root_path": "",
    "scheme": "http",
    "headers": [(b"host", b"benchmark")],
    "client": ("127.0.0.1", 1),
    "server": ("127.0.0.1", 80),
}


def nothing(routes: Any) -> None:
    @routes.get("/")
    async def endpoint() -> int:
        return 1


def toolbox(routes: Any) -> None:
    @routes.get("/")
    async def endpoint(handler: Inject[Handler]) -> int:
        return 1


def wireup(routes: Any) -> None:
    from wireup import Injected

    async def endpoint(handler: Any) -> int:
        return 1

    endpoint.__annotations__["handler"] = Injected[Handler]
    routes.get("/")(endpoint)


def declared_on(app: FastAPI, routes: APIRouter | None, declare: Callable[[Any], None]) -> FastAPI:
    declare(app if routes is None else routes)
    if routes is not None:
        app.include_router(routes)
    return app


def ours(routes: APIRouter | None = None, declare: Callable[[Any], None] = toolbox) -> FastAPI:
    for mark, classes in ((application_scoped, APPLICATION), (request_scoped, REQUEST), (dependent, DEPENDENT)):
        for cls in classes:
            mark(cls)
    app = FastAPI()
    install(app, Container().register(*APPLICATION, *REQUEST, *DEPENDENT))
    return declared_on(app, routes, declare)


def theirs(routes: APIRouter | None = None, *, own_route: bool = True, middleware: bool = False) -> FastAPI:
    import wireup as library
    from wireup.integration.fastapi import WireupRoute, setup

    lifetimes = (("singleton", APPLICATION), ("scoped", REQUEST), ("transient", DEPENDENT))
    injectables: list[Any] = [
        library.injectable(cls, lifetime=lifetime)  # type: ignore[call-overload]  # one overload for each literal
        for lifetime, classes in lifetimes
        for cls in classes
    ]
    app = FastAPI()
    if own_route:
        app.router.route_class = WireupRoute
    declared_on(app, routes, wireup)
    setup(library.create_async_container(injectables=injectables), app, middleware_mode=middleware)
    return app


APPLICATIONS: dict[str, Callable[[], FastAPI]] = {
    "nothing injected": lambda: declared_on(FastAPI(), None, nothing),
    "toolbox, an endpoint without beans": lambda: ours(declare=nothing),
    "toolbox": ours,
    "wireup, its route class": theirs,
    "wireup, its route class and middleware": lambda: theirs(middleware=True),
    "nothing injected, in a router": lambda: declared_on(FastAPI(), APIRouter(), nothing),
    "toolbox, in a plain router": lambda: ours(APIRouter()),
    "wireup, in a plain router": lambda: theirs(APIRouter(), own_route=False),
}


async def measure(rounds: int, calls: int) -> dict[str, list[float]]:
    """Microseconds per call, for each application and round."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", 200) == 200

    async with AsyncExitStack() as lifespans:
        needs = {name: "wireup" for name in APPLICATIONS if name.startswith("wireup")}
        apps: dict[str, Any] = {name: APPLICATIONS[name]() for name in results.installed(APPLICATIONS, needs)}
        for app in apps.values():
            await lifespans.enter_async_context(app.router.lifespan_context(app))
            for _ in range(calls):
                await app(dict(REQUESTED), receive, send)
        found: dict[str, list[float]] = {name: [] for name in apps}
        for number in range(rounds):
            for name in apps if number % 2 == 0 else reversed(apps):
                gc.collect()
                begin = time.perf_counter()
                for _ in range(calls):
                    await apps[name](dict(REQUESTED), receive, send)
                found[name].append((time.perf_counter() - begin) / calls * 1e6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=150, help="in each round")
    options = results.parse(parser, rounds=1, calls=5)
    found = asyncio.run(measure(options.rounds, options.calls))
    added: dict[str, dict[str, list[float]]] = {}
    for name, times in found.items():
        if name.startswith("nothing"):
            base = times
            rows = added.setdefault(name, {})
        else:
            rows[name] = [mine - other for mine, other in zip(times, base, strict=True)]
    if not options.json:
        print(f"{'':40} {'µs/call':>8} {'added':>8}")
        for without, rows in added.items():
            print(f"{without:40} {statistics.median(found[without]):8.1f} {0:8.1f}")
            for name, times in rows.items():
                print(f"{name:40} {statistics.median(found[name]):8.1f} {statistics.median(times):8.1f}")
    in_the_app, in_a_router = added.values()
    chart = results.Chart(
        "endpoints",
        "FastAPI: one injected endpoint",
        "A FastAPI endpoint that needs a graph of ten beans, called over ASGI without a network. The bars show the "
        "time added to the same endpoint without injection. Only toolbox keeps the request scope open until the "
        "response has been sent; wireup's middleware mode comes closest.",
        (
            results.compare("Endpoint of the application", "µs added", in_the_app),
            results.compare("Endpoint of a router", "µs added", in_a_router, base="toolbox, in a plain router"),
        ),
        ("fastapi", "wireup"),
    )
    results.finish(options, chart, {"microseconds": found})


if __name__ == "__main__":
    main()
