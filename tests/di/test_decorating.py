"""`@decorates`: classes that take the place of beans and get them in their constructor."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Generic, Protocol, TypeVar

import pytest
from dependency_injector import containers, providers

from toolbox import (
    Container,
    Instance,
    Named,
    Result,
    ScopeNotActiveError,
    application_scoped,
    decorates,
    dependent,
    only_if,
    produces,
    register_ai_service,
    request_scoped,
    tool,
)
from toolbox.container import internals_of
from toolbox.testing import ScriptedChatModel, tool_call

T = TypeVar("T")


class Sender(Protocol):
    def send(self, text: str) -> str: ...


class Mailer(Sender, Protocol): ...


@application_scoped
class Smtp(Mailer):
    def send(self, text: str) -> str:
        return text


class Counter:
    def __init__(self) -> None:
        self.count = 0


@decorates(Mailer)
class Counting(Mailer):
    def __init__(self, inner: Mailer, counter: Counter) -> None:
        self.inner, self.counter = inner, counter

    def send(self, text: str) -> str:
        self.counter.count += 1
        return f"counted({self.inner.send(text)})"


@decorates(Mailer, order=-1)
class Shouting(Mailer):
    def __init__(self, inner: Mailer) -> None:
        self.inner = inner

    def send(self, text: str) -> str:
        return f"shouted({self.inner.send(text)})"


class Shop:
    def __init__(
        self, mailer: Mailer, sender: Sender, every: list[Mailer], later: Instance[Mailer], smtp: Smtp
    ) -> None:
        self.mailer, self.sender, self.every, self.later, self.smtp = mailer, sender, every, later, smtp


def started(*registered: Any, **options: Any) -> Container:
    return Container(**options).register(*registered)


# --- which lookups give the decorator


def test_a_decorator_takes_the_place_of_a_bean_of_its_type_and_its_base_classes() -> None:
    with started(Smtp, Counting, Counter, Shop) as container:
        shop = container.get(Shop)
        found = [
            shop.mailer,
            shop.sender,
            *shop.every,
            shop.later.get(),
            container.get(Mailer),
            container.get(Counting),
        ]

        assert [type(each) for each in found] == [Counting] * 6
        assert len({id(each) for each in found}) == 1
        assert type(shop.smtp) is type(container.get(Smtp)) is Smtp
        assert container.get(Mailer).send("x") == "counted(x)"
        assert shop.mailer.inner is shop.smtp  # type: ignore[attr-defined]


def test_a_smaller_order_is_further_outside_and_equal_ones_are_in_the_order_of_registration() -> None:
    @decorates(Mailer, order=-1)
    class Trimming(Mailer):
        def __init__(self, inner: Mailer) -> None:
            self.inner = inner

        def send(self, text: str) -> str:
            return f"trimmed({self.inner.send(text)})"

    with started(Counting, Trimming, Smtp, Shouting, Counter) as container:
        assert container.get(Mailer).send("x") == "trimmed(shouted(counted(x)))"


def test_every_bean_of_the_type_is_decorated_and_keeps_its_name_and_place() -> None:
    @produces(scope="application", name="letter")
    def letters() -> Mailer:
        return Smtp()

    with started(letters, Smtp, Shouting) as container:
        every, named = container.get(list[Mailer]), container.get(dict[str, Mailer])

        assert [type(each) for each in every] == [Shouting, Shouting]
        assert every[1].inner is container.get(Smtp)  # type: ignore[attr-defined]
        assert named == {"letter": every[0]}
        assert container.get(Mailer, "letter") is every[0]


def test_a_name_restricts_it() -> None:
    @decorates(Mailer, name="letter")
    class Stamped(Shouting): ...

    @produces(scope="application", name="letter")
    def letters() -> Mailer:
        return Smtp()

    with started(letters, Smtp, Stamped) as container:
        assert type(container.get(Mailer)) is Smtp
        assert type(container.get(Mailer, "letter")) is Stamped


def test_bound_beans_are_decorated() -> None:
    class Own:
        def send(self, text: str) -> str:
            return f"own {text}"

    for container in (
        started(Shouting).bind(Mailer, Own),
        started(Shouting, Smtp).bind(Mailer, Own),
        started(Shouting).bind(Mailer, Own).bind(Sender, Mailer),
    ):
        with container:
            assert container.get(Mailer).send("x") == "shouted(own x)"
            assert type(container.get(Own)) is Own


def test_a_binding_to_the_decorated_type_gives_the_decorator() -> None:
    class Speaks(Protocol):
        def send(self, text: str) -> str: ...

    with started(Smtp, Shouting).bind(Speaks, Mailer) as container:
        assert type(container.get(Speaks)) is Shouting


def test_instances_and_beans_of_included_containers_are_decorated() -> None:
    class Old(containers.DeclarativeContainer):
        mailer: providers.Provider[Smtp] = providers.Singleton(Smtp)

    with started(Shouting).register_instance(Smtp(), Mailer) as container:
        assert container.get(Mailer).send("x") == "shouted(x)"
    with started(Shouting).include(Old) as container:
        assert container.get(Mailer).send("x") == "shouted(x)"


def test_a_class_that_is_itself_the_type_is_decorated() -> None:
    @application_scoped
    class Clock:
        def now(self) -> str:
            return "12:00"

    @decorates(Clock)
    class Fast(Clock):
        def __init__(self, inner: Clock) -> None:
            self.inner = inner

        def now(self) -> str:
            return f"almost {self.inner.now()}"

    with started(Clock, Fast) as container:
        assert container.get(Clock).now() == "almost 12:00"


def test_of_a_union_and_an_exact_type_the_decorator_is_found_as_the_bean_was() -> None:
    @produces(scope="application")
    def exact() -> Mailer:
        return Smtp()

    with started(exact, Smtp, Shouting) as container:  # the bean of exactly this type wins
        assert container.get(Mailer).inner is not container.get(Smtp)  # type: ignore[attr-defined]
    with started(Smtp, Shouting) as container:
        assert type(container.get(Mailer | Counter)) is Shouting  # type: ignore[arg-type]


# --- scopes and lifetimes


@pytest.mark.parametrize("scope", ["application", "request", "call", "dependent"])
def test_its_scope_is_that_of_the_bean(scope: Any) -> None:
    @produces(scope=scope)
    def mailer() -> Mailer:
        return Smtp()

    with started(mailer, Shouting) as container:
        with container.request_scope():
            one, other = container.get(Mailer), container.get(Mailer)
        with container.request_scope():
            third = container.get(Mailer)

        assert (one is other) == (scope != "dependent")
        assert (one is third) == (scope == "application")
        if scope in ("request", "call"):
            with pytest.raises(ScopeNotActiveError):
                container.get(Mailer)


@pytest.mark.anyio
async def test_a_bean_of_an_async_producer_is_decorated_and_both_are_closed_the_decorator_first() -> None:
    closed: list[str] = []

    @produces(scope="request")
    async def mailer() -> AsyncIterator[Mailer]:
        yield Smtp()
        closed.append("bean")

    @decorates(Mailer)
    class Closing(Shouting):
        async def stop(self) -> None:
            closed.append("decorator")

    async with started(mailer, Closing) as container, container.request_scope():
        one, other = await asyncio.gather(container.aget(Mailer), container.aget(Mailer))
        assert one is other

    assert closed == ["decorator", "bean"]


def test_a_dependency_that_lives_shorter_than_the_bean_is_a_problem() -> None:
    @request_scoped
    class Session: ...

    @decorates(Mailer)
    class Logging(Shouting):
        def __init__(self, inner: Mailer, session: Session) -> None: ...

    [problem] = started(Smtp, Logging, Session).check()

    assert problem.where == "Logging.session"
    assert "Logging is application_scoped but holds Session" in problem.what


# --- overrides


def test_an_override_of_the_type_replaces_the_whole_chain() -> None:
    fake = Smtp()

    with started(Smtp, Counting, Counter, Shouting, Shop) as container:
        before = container.get(Shop)
        with container.override(Mailer, fake):
            assert container.get(Shop).mailer is fake
            assert container.get(list[Mailer]) == [fake]
        assert container.get(Shop).mailer is before.mailer
    with started(Smtp, Shouting).override(Mailer, fake) as given:
        assert given is fake


def test_an_override_of_the_concrete_class_replaces_the_innermost_bean() -> None:
    class Fake(Smtp):
        def send(self, text: str) -> str:
            return "fake"

    with started(Smtp, Shouting) as container:
        assert container.get(Mailer).send("x") == "shouted(x)"
        with container.override(Smtp, Fake()):
            assert container.get(Mailer).send("x") == "shouted(fake)"
        assert container.get(Mailer).send("x") == "shouted(x)"


def test_a_seed_of_the_type_replaces_the_whole_chain() -> None:
    fake = Smtp()

    with started(Smtp, Shouting) as container, container.request_scope({Mailer: fake}):
        assert container.get(Mailer) is fake


# --- generics


class Repository(Protocol[T]):
    def find(self) -> T: ...


class Users(Repository[str]):
    def find(self) -> str:
        return "ann"


class Numbers(Repository[int]):
    def find(self) -> int:
        return 1


class Stored(Repository[T]):
    def __init__(self, of: type[T] | None = None) -> None: ...

    def find(self) -> Any:
        return "stored"


@decorates(Repository)
class Cached(Repository[T]):
    def __init__(self, inner: Repository[T]) -> None:
        self.inner = inner

    def find(self) -> Any:
        return ("cached", self.inner.find())


def test_a_generic_decorator_takes_the_place_of_all_parametrizations() -> None:
    with started(Users, Numbers, Cached) as container:
        assert container.get(Repository[str]).find() == ("cached", "ann")
        assert container.get(Repository[int]).find() == ("cached", 1)
        assert len(container.get(list[Repository[str]])) == 1
        assert container.get(Cached[int]).find() == ("cached", 1)
        assert container.get(Users).find() == "ann"


def test_a_decorator_of_one_parametrization_leaves_the_others_alone() -> None:
    @decorates(Repository[str])
    class Upper(Repository[str]):
        def __init__(self, inner: Repository[str]) -> None:
            self.inner = inner

        def find(self) -> str:
            return self.inner.find().upper()

    with started(Users, Numbers, Upper) as container:
        assert container.get(Repository[str]).find() == "ANN"
        assert type(container.get(Repository[int])) is Numbers


@pytest.mark.parametrize("bound", [False, True])
def test_beans_of_a_generic_class_are_decorated_when_they_are_requested(bound: bool) -> None:
    class Plain(Generic[T]):
        def find(self) -> Any:
            return "stored"

    class Needs:
        def __init__(self, names: Repository[str], numbers: Repository[int]) -> None:
            self.found = names.find(), numbers.find()

    container = started(Cached, Needs)
    container = container.bind(Repository, Plain) if bound else container.register(Stored)
    with container:
        assert container.get(Repository[bytes]).find() == ("cached", "stored")
        assert container.get(Needs).found == (("cached", "stored"), ("cached", "stored"))


def test_a_parametrization_of_a_generic_class_is_decorated() -> None:
    @decorates(Repository[str])
    class Upper(Repository[str]):
        def __init__(self, inner: Repository[str]) -> None:
            self.inner = inner

        def find(self) -> str:
            return self.inner.find().upper()

    with started(Stored, Upper) as container:
        assert container.get(Repository[str]).find() == "STORED"
        assert container.get(Repository[int]).find() == "stored"


# --- services and tools


@pytest.mark.anyio
async def test_a_service_and_its_tools_can_be_decorated() -> None:
    @application_scoped
    class Orders:
        @tool
        def cancel(self, order: int) -> str:
            """Cancel an order."""
            return f"cancelled {order}"

    @decorates(Orders)
    class Audited(Orders):
        def __init__(self, inner: Orders) -> None:
            self.inner = inner

        def cancel(self, order: int) -> str:
            return f"{self.inner.cancel(order)}, audited"

    @register_ai_service(tools=Orders)
    class Desk(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    @decorates(Desk)
    class Polite(Desk):
        def __init__(self, inner: Desk) -> None:
            self.inner = inner

        async def ask(self, text: str) -> Result[str]:
            return await self.inner.ask(f"Please: {text}")

    model = ScriptedChatModel([tool_call("cancel", {"order": 1}), "done"])
    async with started(Desk, Polite, Audited, Orders, models={"default": model}) as container:
        result = await container.get(Desk).ask("x")

    assert result.tool_executions[0].result == "cancelled 1, audited"
    assert model.requests[0].messages[0].text == "Please: x"


def test_the_graph_shows_decorators_with_what_they_decorate() -> None:
    nodes = {each.name: each for each in internals_of(started(Smtp, Shouting, Shop)).describe()}

    assert (nodes["shouting"].made_by, nodes["shouting"].dependencies) == (
        "decorator of Mailer",
        {"inner": ("smtp",)},
    )
    assert nodes["shop"].dependencies["mailer"] == ("shouting",)
    assert nodes["shop"].dependencies["smtp"] == ("smtp",)


def test_tools_of_a_decorated_bean_are_listed_once() -> None:
    class Orders:
        @tool
        def cancel(self) -> None: ...

    @decorates(Orders)
    class Audited(Orders):
        def __init__(self, inner: Orders) -> None: ...

    assert internals_of(started(Orders, Audited)).tool_beans() == (Orders,)


# --- problems


def of(constructor: Callable[..., None], base: type[Any] = Mailer, wanted: Any = Mailer) -> Any:
    class Wrong(base):  # type: ignore[misc]
        __init__ = constructor

        def send(self, text: str) -> str:
            return text

    return decorates(wanted)(Wrong)


def without(self: Any) -> None: ...


def twice(self: Any, one: Mailer, other: Mailer) -> None: ...


def right(self: Any, inner: Mailer) -> None: ...


@pytest.mark.parametrize(
    ("registered", "texts"),
    [
        ([Smtp, of(without)], ["exactly one parameter of type Mailer", "found 0", "add `inner: Mailer`"]),
        ([Smtp, of(twice)], ["exactly one parameter of type Mailer", "found 2", "Named"]),
        ([Smtp, of(right, object)], []),  # it has all methods of the Protocol
        ([of(right)], ["no bean provides Mailer, which it decorates", "register one"]),
        ([Smtp, decorates(Mailer, name="x")(type("A", (Shouting,), {}))], ["no bean provides Mailer named 'x'"]),
        ([Smtp, decorates(Mailer)(request_scoped(type("B", (Shouting,), {})))], ["request_scoped", "application"]),
        ([Smtp, decorates(Mailer)(application_scoped(type("C", (Shouting,), {})))], []),
    ],
)
def test_what_cannot_decorate_is_a_problem(registered: list[Any], texts: list[str]) -> None:
    problems = started(*registered).check()

    assert len(problems) == bool(texts)
    for text in texts:
        assert text in f"{problems[0].what} {problems[0].fix}"


def test_a_class_that_is_not_of_the_type_is_a_problem() -> None:
    class Base: ...

    @decorates(Base)
    class Other:
        def __init__(self, inner: Base) -> None: ...

    @decorates(Mailer)
    class Dumb:
        def __init__(self, inner: Mailer) -> None: ...

    assert [each.what for each in started(Base, Smtp, Other, Dumb).check()] == [
        "Other is not a subclass of Base",
        "Dumb has no send, which Mailer requires",
    ]


def test_seeds_and_beans_that_may_be_none_are_problems() -> None:
    class User: ...

    @decorates(User)
    class Known(User):
        def __init__(self, inner: User) -> None: ...

    @produces()
    def perhaps() -> Mailer | None:
        return None

    [of_seed] = started(Known, seeds=[User]).check()
    [of_none] = started(perhaps, Shouting).check()

    assert "a seed, which cannot be decorated" in of_seed.what
    assert (of_none.where, of_none.fix) == ("Shouting.inner", "take `Mailer | None`")


def test_what_was_left_out_is_not_decorated_and_a_decorator_can_be_left_out() -> None:
    @only_if(profile="prod")
    class Remote(Smtp): ...

    @decorates(Mailer)
    @only_if(profile="prod")
    class Loud(Shouting): ...

    [problem] = started(Remote, Shouting).check()
    with started(Smtp, Loud) as container:
        assert type(container.get(Mailer)) is Smtp

    assert "Remote was left out" in problem.what


def test_a_decorator_that_needs_its_own_type_elsewhere_is_a_cycle() -> None:
    class Templates:
        def __init__(self, mailer: Mailer) -> None: ...

    @decorates(Mailer)
    class Rendering(Shouting):
        def __init__(self, inner: Mailer, templates: Templates) -> None: ...

    [problem] = started(dependent(Smtp2), Rendering, Templates).check()

    assert "dependency cycle" in problem.what


class Smtp2(Mailer):
    def send(self, text: str) -> str:
        return text


@pytest.mark.parametrize(
    "use",
    [
        lambda: decorates(),  # type: ignore[call-arg]
        lambda: decorates("Mailer"),
        lambda: decorates(Mailer, order="1"),  # type: ignore[arg-type]
        lambda: decorates(Mailer, order=True),
        lambda: decorates(Mailer, name=1),  # type: ignore[arg-type]
        lambda: decorates(object),
        lambda: decorates(Mailer)(lambda: None),  # type: ignore[type-var]
        lambda: decorates(Sender)(Counting),
    ],
)
def test_invalid_uses_are_type_errors(use: Any) -> None:
    with pytest.raises(TypeError):
        use()


def test_subclasses_do_not_inherit_the_mark() -> None:
    class Other(Shouting):
        def __init__(self, smtp: Smtp) -> None:
            super().__init__(smtp)

    with started(Smtp, Other) as container:
        assert len(container.get(list[Mailer])) == 2


def test_named_parameters_of_the_type_are_injected_as_usual() -> None:
    @produces(scope="application", name="spare")
    def spare() -> Mailer:
        return Smtp()

    @decorates(Mailer, name="main")
    class Failover(Mailer):
        def __init__(self, inner: Mailer, spare: Annotated[Mailer, Named("spare")]) -> None:
            self.inner, self.spare = inner, spare

        def send(self, text: str) -> str:
            return self.spare.send(text)

    @produces(scope="application", name="main")
    def main() -> Mailer:
        return Smtp2()

    with started(main, spare, Failover) as container:
        found: Any = container.get(Mailer, "main")
        assert (type(found.inner), type(found.spare)) == (Smtp2, Smtp)
