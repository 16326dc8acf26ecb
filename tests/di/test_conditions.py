"""`@only_if`: what is registered under which conditions, and what the program says about what was left out."""

import types
from typing import Annotated, Any, Protocol, TypeVar

import pytest

from toolbox import (
    Container,
    MissingBeanError,
    Named,
    Problem,
    ToolboxSettings,
    application_scoped,
    only_if,
    produces,
    register_ai_service,
    tool,
)
from toolbox.testing import ScriptedChatModel

T = TypeVar("T")


class Mailer: ...


class Cache: ...


class Repository(Protocol[T]):
    def find(self) -> T: ...


@application_scoped
@only_if(profile="prod")
class Smtp(Mailer): ...


@only_if(profile="test")
class Printing(Mailer): ...


@produces(scope="application")
@only_if(missing=Cache)
def local_cache() -> Cache:
    return Cache()


class Shop:
    def __init__(self, mailer: Mailer) -> None:
        self.mailer = mailer


def in_profile(*profiles: str, **options: Any) -> Container:
    return Container(settings=ToolboxSettings(profile=profiles, demo=True), **options)


# --- profiles


def test_a_bean_of_an_active_profile_is_registered_and_the_others_are_not() -> None:
    with in_profile("eu", "prod").register(Smtp, Printing, Shop) as container:
        assert type(container.get(Shop).mailer) is Smtp
        assert [type(each) for each in container.get(list[Mailer])] == [Smtp]


def test_profiles_come_from_the_environment_with_commas_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_PROFILE", "eu, test")

    with Container().register(Smtp, Printing) as container:
        assert type(container.get(Mailer)) is Printing


@pytest.mark.parametrize("profile", ["eu,prod", ("eu", "prod"), ["prod"]])
def test_profiles_of_the_settings_are_a_text_or_names(profile: Any) -> None:
    assert "prod" in ToolboxSettings(profile=profile).profiles


def test_several_conditions_must_all_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    @only_if(profile="prod")
    @only_if(setting="SMTP_URL")
    class Both(Mailer): ...

    @only_if(profile="prod", setting="SMTP_URL")
    class InOne(Mailer): ...

    monkeypatch.setenv("SMTP_URL", "smtp://localhost")
    with in_profile().register(Both, InOne) as container:
        assert container.get(list[Mailer]) == []
    with in_profile("prod").register(Both, InOne) as container:
        assert len(container.get(list[Mailer])) == 2


# --- settings


def test_a_setting_must_be_set_and_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    @only_if(setting="SMTP_URL")
    class Sending(Mailer): ...

    container = Container().register(Sending, Shop)

    monkeypatch.delenv("SMTP_URL", raising=False)
    [unset] = container.check()
    monkeypatch.setenv("SMTP_URL", "")
    [empty] = container.check()
    monkeypatch.setenv("SMTP_URL", "smtp://localhost")
    assert container.check() == []
    with container:
        assert type(container.get(Shop).mailer) is Sending
    monkeypatch.delenv("SMTP_URL")
    assert container.check() == [unset]

    assert "SMTP_URL is not set" in unset.what
    assert "SMTP_URL is empty" in empty.what
    assert "set SMTP_URL" in unset.fix


# --- missing beans


def test_a_bean_for_a_missing_type_gives_way_to_one_without_conditions() -> None:
    other = Cache()

    with Container().register(local_cache) as alone:
        assert isinstance(alone.get(Cache), Cache)
    with Container().register(local_cache).register_instance(other) as with_other:
        assert with_other.get(list[Cache]) == [other]


def test_a_service_works_beside_a_bean_for_a_missing_type() -> None:
    @register_ai_service
    class Waiter(Protocol):
        def serve(self, wish: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel(["Coming!"])}).register(Waiter, local_cache)

    assert container.check() == []
    with container:
        assert container.get(Waiter).serve("soup") == "Coming!"


def test_any_bean_of_the_type_counts_however_it_is_registered() -> None:
    class Redis(Cache): ...

    @produces()
    def redis() -> Redis:
        return Redis()

    class Store:
        def __init__(self, cache: Cache) -> None: ...

    for register in (
        lambda container: container.register(Redis),
        lambda container: container.register(redis),
        lambda container: container.bind(Cache, Redis),
        lambda container: container.register_instance(Redis(), Cache),
        lambda container: container.register_instance(Redis(), Cache, "second"),
    ):
        container = register(Container().register(local_cache, Store))
        assert container.check() == []
        with container:
            assert [type(each) for each in container.get(list[Cache])] == [Redis]


def test_seeds_count_too() -> None:
    container = Container(seeds=[Cache]).register(local_cache)

    with container, container.request_scope({Cache: (given := Cache())}):
        assert container.get(list[Cache]) == [given]


def test_a_type_with_arguments_is_provided_by_a_generic_class() -> None:
    class Users(Repository[str]):
        def find(self) -> str:
            return "ann"

    @produces()
    @only_if(missing=Repository[str])
    def other() -> Repository[str]:
        return Users()

    class Stored(Repository[T]):
        def find(self) -> Any: ...

    with Container().register(other) as container:
        assert container.get(Repository[str]).find() == "ann"
    with Container().register(other, Stored) as container:
        assert type(container.get(Repository[str])) is Stored


def test_two_beans_for_the_same_missing_type_are_ambiguous() -> None:
    @only_if(missing=Mailer)
    class One(Mailer): ...

    @only_if(missing=Mailer)
    class Other(Mailer): ...

    [problem] = Container().register(One, Other, Shop).check()

    assert "multiple beans provide Mailer: One, Other" in problem.what


def test_conditional_beans_do_not_count_for_others() -> None:
    @only_if(profile="prod")
    class Remote(Cache): ...

    with in_profile("prod").register(Remote, local_cache) as container:
        assert [type(each) for each in container.get(list[Cache])] == [Remote, Cache]


# --- what was left out


def test_injecting_what_was_left_out_is_a_problem_that_says_why() -> None:
    assert in_profile("dev").register(Smtp, Shop).check() == [
        Problem(
            "Shop.mailer",
            "no bean provides Mailer: Smtp was left out, because the profile 'prod' is not active "
            "(the active ones are dev)",
            "set TOOLBOX_PROFILE=prod, or use `Mailer | None`",
        )
    ]


def test_looking_up_what_was_left_out_says_why() -> None:
    with in_profile().register(Smtp) as container:
        for wanted in (Smtp, Mailer):
            with pytest.raises(MissingBeanError, match="Smtp was left out, because the profile 'prod' is not active"):
                container.get(wanted)


def test_optional_and_collected_beans_are_just_absent() -> None:
    class Optional:
        def __init__(self, mailer: Mailer | None, every: list[Mailer], smtp: Smtp | None = None) -> None:
            self.found = mailer, every, smtp

    with in_profile().register(Smtp, Optional) as container:
        assert container.get(Optional).found == (None, [], None)


def test_a_named_producer_that_was_left_out_says_why() -> None:
    @produces(name="big")
    @only_if(profile="prod")
    def big() -> Cache:
        return Cache()

    class Uses:
        def __init__(self, cache: Annotated[Cache, Named("big")]) -> None: ...

    [problem] = in_profile().register(big, Uses).check()

    assert "big was left out, because the profile 'prod' is not active (none is)" in problem.what


def test_a_binding_is_left_out_with_its_implementation() -> None:
    container = in_profile("test").bind(Mailer, Smtp).bind(Mailer, Printing).register(Shop)

    assert container.check() == []
    with container:
        assert type(container.get(Mailer)) is Printing

    [problem] = in_profile().bind(Mailer, Smtp).register(Shop).check()
    assert "Smtp was left out" in problem.what


def test_overriding_what_was_left_out_is_a_problem_that_says_why() -> None:
    container = in_profile().register(Smtp)

    with container.override(Smtp, Smtp()):
        [problem] = container.check()

    assert "Smtp was left out, because the profile 'prod' is not active" in problem.what


def test_a_tool_that_was_left_out_is_a_problem_of_its_service() -> None:
    @only_if(profile="prod")
    class Refunds:
        @tool
        def refund(self) -> str:
            return "refunded"

    @register_ai_service(tools=Refunds)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    model = {"default": ScriptedChatModel(["x"])}
    assert "Refunds was left out" in in_profile(models=model).register(Desk).check()[0].what
    assert in_profile("prod", models=model).register(Desk).check() == []


def test_services_can_be_left_out() -> None:
    @only_if(profile="prod")
    @register_ai_service
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    made = in_profile("test", models={"default": ScriptedChatModel(["x"])}).register(Desk)
    with made as container, pytest.raises(MissingBeanError, match="Desk was left out"):
        container.get(Desk)


# --- marks


def test_scanning_finds_what_is_only_marked_with_a_condition() -> None:
    module = types.ModuleType("scanned")
    module.Printing = type("Printing", (Mailer,), {"__module__": "scanned"})  # type: ignore[attr-defined]
    only_if(profile="test")(module.Printing)

    with in_profile("test").scan(module) as container:
        assert type(container.get(Mailer)).__name__ == "Printing"


def test_subclasses_do_not_inherit_conditions() -> None:
    class Other(Smtp): ...

    with in_profile().register(Other) as container:
        assert type(container.get(Mailer)) is Other


def test_a_condition_on_a_method_is_a_problem() -> None:
    class Till:
        @only_if(profile="prod")
        def open(self) -> None: ...

    [problem] = Container().register(Till).check()

    assert (problem.where, problem.fix) == ("Till.open", "put it on Till")


@pytest.mark.parametrize(
    "use",
    [
        lambda: only_if(),  # type: ignore[call-overload, unused-ignore]
        lambda: only_if(profil="prod"),  # type: ignore[call-arg]
        lambda: only_if(Smtp),  # type: ignore[misc]
        lambda: only_if(profile=""),
        lambda: only_if(profile="a,b"),
        lambda: only_if(profile=("a",)),  # type: ignore[arg-type]
        lambda: only_if(setting=" "),
        lambda: only_if(missing="Cache"),
        lambda: only_if(missing=Cache()),
        lambda: only_if(profile="prod")(Cache()),
    ],
)
def test_no_conditions_and_unknown_ones_are_type_errors(use: Any) -> None:
    with pytest.raises(TypeError):
        use()
