"""Start reports all configuration problems together, each with place, fact and fix."""

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Annotated, Any, Protocol

import pytest
from starlette.requests import Request
from starlette.websockets import WebSocket

from toolbox import (
    Container,
    DemoChatModel,
    IllegalConfigurationError,
    Inject,
    Instance,
    Named,
    Problem,
    ToolErrors,
    application_scoped,
    blocking,
    call_scoped,
    dependent,
    on_start,
    produces,
    register_ai_service,
    request_scoped,
    return_to_model,
    run_on,
    run_on_thread,
    tool,
)
from toolbox.container import internals_of
from toolbox.rest import get as rest_get
from toolbox.rest import register_rest_client
from toolbox.testing import ScriptedChatModel

pytestmark = pytest.mark.anyio


class Payments(Protocol):
    def pay(self, amount: int) -> str: ...


class CardPayments(Payments):
    def pay(self, amount: int) -> str:
        return ""


class InvoicePayments(Payments):
    def pay(self, amount: int) -> str:
        return ""


class LookAlike:
    def pay(self, amount: int) -> str:
        return ""


class Checkout:
    def __init__(self, payments: Payments) -> None: ...


def test_a_missing_bean_is_reported_with_a_fix() -> None:
    [problem] = Container().register(Checkout).check()

    assert problem.where == "Checkout.payments"
    assert problem.what == "no bean provides Payments"
    assert "register an implementation" in problem.fix


def test_a_missing_bean_suggests_classes_with_the_same_methods() -> None:
    [problem] = Container().register(Checkout, LookAlike).check()

    assert "bind(Payments, LookAlike)" in problem.fix


def test_a_missing_bean_suggests_similar_names() -> None:
    class Payment:
        pass

    [problem] = Container().register(Checkout, Payment).check()

    assert "did you mean Payment?" in problem.fix


def test_two_beans_for_one_interface_are_both_named() -> None:
    [problem] = Container().register(CardPayments, InvoicePayments, Checkout).check()

    assert problem.where == "Checkout.payments"
    assert "CardPayments" in problem.what
    assert "InvoicePayments" in problem.what
    assert "bind(Payments" in problem.fix


@pytest.mark.parametrize(
    ("names", "fix"),
    [
        (("card", "invoice"), 'use Annotated[CardPayments, Named("card")]'),
        (
            (None, None),
            'give them names, such as @produces(name="a"), and use Annotated[CardPayments, Named("a")]',
        ),
    ],
)
def test_two_producers_of_one_class_need_names(names: tuple[str | None, str | None], fix: str) -> None:
    @produces(name=names[0])
    def first() -> CardPayments:
        return CardPayments()

    @produces(name=names[1])
    def second() -> CardPayments:
        return CardPayments()

    class Till:
        def __init__(self, payments: CardPayments) -> None: ...

    [problem] = Container().register(first, second, Till).check()
    assert problem.fix == fix


def test_an_unknown_bean_name_lists_the_known_names() -> None:
    @produces(name="card")
    def card() -> Payments:
        return CardPayments()

    class Uses:
        def __init__(self, payments: Annotated[Payments, Named("invoice")]) -> None: ...

    [problem] = Container().register(card, Uses).check()

    assert problem.what == "no bean provides Payments named 'invoice'"
    assert "Payments 'card'" in problem.fix


def test_an_instance_of_a_missing_bean_is_reported() -> None:
    class Uses:
        def __init__(self, payments: Instance[Payments], maybe: Instance[Payments | None]) -> None: ...

    [problem] = Container().register(Uses).check()

    assert problem.where == "Uses.payments"


def test_lists_of_instances_are_rejected() -> None:
    class Uses:
        def __init__(self, shapes: list[Instance[Payments]], named: dict[str, Instance[Payments]]) -> None: ...

    listed, named = Container().register(Uses).check()

    assert listed.fix == "write Instance[list[Payments]]"
    assert named.fix == "write Instance[dict[str, Payments]]"


def test_unannotated_parameters_are_reported() -> None:
    class Uses:
        def __init__(self, payments, amount=3, *args, **kwargs) -> None: ...  # type: ignore[no-untyped-def]

    [problem] = Container().register(Uses).check()

    assert problem.where == "Uses.payments"
    assert "no annotation" in problem.what


@application_scoped
class A:
    def __init__(self, b: "B") -> None: ...


@application_scoped
class B:
    def __init__(self, c: "C") -> None: ...


@application_scoped
class C:
    def __init__(self, a: A, d: "Instance[D]") -> None: ...


@application_scoped
class D:
    def __init__(self, c: C, d: "D") -> None: ...


def test_cycles_are_reported_with_their_paths() -> None:
    problems = Container().register(A, B, C, D).check()

    assert [problem.where for problem in problems] == ["A.b", "D.d"]
    assert "A -> B -> C -> A" in problems[0].what
    assert "Instance[B]" in problems[0].fix
    assert "D -> D" in problems[1].what


def test_all_cycles_that_share_a_bean_are_reported() -> None:
    class Left:
        def __init__(self, middle: "Middle") -> None: ...

    class Right:
        def __init__(self, middle: "list[Middle]") -> None: ...

    class Middle:
        def __init__(self, left: Left, right: Right) -> None: ...

    problems = Container().register(Left, Right, Middle).check()

    assert sorted(problem.what.split(":")[1].split(",")[0].strip() for problem in problems) == [
        "Left -> Middle -> Left",
        "Right -> Middle -> Right",
    ]


def test_captive_scopes_are_reported() -> None:
    @call_scoped
    class Short:
        pass

    @dependent
    class Between:
        def __init__(self, short: Short) -> None: ...

    @dependent
    class Further:
        def __init__(self, between: list[Between]) -> None: ...

    @request_scoped
    class Middle:
        def __init__(self, further: Further) -> None: ...

    @application_scoped
    class Long:
        def __init__(self, middle: Middle, seed: Payments, later: Instance[Middle]) -> None: ...

    problems = Container(seeds=(Payments,)).register(Short, Between, Further, Middle, Long).check()

    assert [problem.where for problem in problems] == ["Middle.further", "Long.middle", "Long.seed"]
    assert "through Further, through Between" in problems[0].what
    assert "request_scoped" in problems[1].what
    assert "Instance[Middle]" in problems[1].fix
    assert "a seed" in problems[2].what


def test_duplicate_provider_names_are_reported() -> None:
    @produces(name="checkout")
    def other() -> int:
        return 1

    [problem] = Container().register(CardPayments, Checkout, other).check()

    assert "'checkout'" in problem.what
    assert "another name" in problem.fix


def test_unsupported_objects_cannot_be_registered() -> None:
    class Shape(ABC):
        @abstractmethod
        def area(self) -> int: ...

    def unmarked() -> int:
        return 1

    @produces()
    def silent():  # type: ignore[no-untyped-def]
        return 1

    @produces()
    def wrong() -> int:
        yield 1  # type: ignore[misc]

    @produces(own_task=True)
    def sync() -> Iterator[str]:
        yield ""

    @produces()
    @contextmanager
    def entered() -> Iterator[bytes]:
        yield b""

    class Factory:
        @produces()
        def method(self) -> float:
            return 1.0

    problems = Container().register(Shape, Payments, unmarked, silent, wrong, sync, entered, Factory, 3).check()

    assert [problem.where for problem in problems] == [
        "register(3)",
        "Shape",
        "Payments",
        "unmarked",
        "silent",
        "wrong",
        "sync",
        "entered",
        "Factory.method",
    ]
    assert all(problem.fix for problem in problems)


def test_invalid_bindings_are_reported() -> None:
    @produces()
    def number() -> int:
        return 1

    problems = (
        Container()
        .register(CardPayments, InvoicePayments)
        .bind(Payments, CardPayments)
        .bind(Payments, InvoicePayments)
        .bind(int, number, name="x")
        .bind(str, lambda: "")
        .check()
    )

    assert len(problems) == 2
    assert "already bound to CardPayments" in problems[0].what
    assert problems[1].where == "bind(str, <lambda>)"


def test_imports_under_type_checking_are_explained(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checked_only.py").write_text(
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from decimal import Decimal\n"
        "class Shop:\n"
        "    def __init__(self, price: Decimal, other: Missing, card: CardPayments) -> None: ...\n"
        "class CardPayments: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import importlib

    module = importlib.import_module("checked_only")
    problems = Container().register(module.Shop).check()

    assert [problem.where for problem in problems] == ["Shop.price", "Shop.other", "Shop.card"]
    assert "checked_only imports Decimal only under TYPE_CHECKING" in problems[0].what
    assert "outside of `if TYPE_CHECKING:`" in problems[0].fix
    assert "Missing" in problems[1].what
    assert problems[2].what == "no bean provides CardPayments"
    sys.modules.pop("checked_only")


async def test_all_problems_are_reported_together() -> None:
    class Lost:
        def __init__(self, number: int, text) -> None: ...  # type: ignore[no-untyped-def]

    @request_scoped
    class Short:
        pass

    @application_scoped
    class Long:
        def __init__(self, short: Short) -> None: ...

    container = Container().register(Lost, A, B, C, D, Checkout, CardPayments, InvoicePayments, Short, Long)
    with pytest.raises(IllegalConfigurationError) as raised:
        async with container:
            raise AssertionError("it must not start")
    assert list(raised.value.problems) == container.check()
    assert len(raised.value.problems) == 6
    text = str(raised.value)
    assert text.startswith("6 problems:")
    for problem in raised.value.problems:
        assert isinstance(problem, Problem)
        assert str(problem) in text
        assert problem.fix in text


def test_a_container_can_be_started_after_its_problems_are_fixed() -> None:
    container = Container().register(Checkout)
    with pytest.raises(IllegalConfigurationError), container:
        pass
    with container.register(CardPayments):
        assert container.get(Checkout) is not None


async def test_programs_can_add_checks() -> None:
    container = Container()
    internals_of(container).add_check(lambda graph: [Problem("here", "it is wrong", "correct it")])

    assert container.check() == [Problem("here", "it is wrong", "correct it")]


@pytest.mark.parametrize("kind", [Request, WebSocket])
def test_a_missing_web_request_suggests_install(kind: type[Any]) -> None:
    @request_scoped
    class Tenant:
        def __init__(self, request: kind) -> None: ...  # type: ignore[valid-type]

    [problem] = Container().register(Tenant).check()

    assert "toolbox_fastapi.install(app, container)" in problem.fix
    assert f"`{kind.__name__} | None`" in problem.fix
    assert "register" not in problem.fix


def class_in(module: str, name: str = "Service") -> type[Any]:
    return type(name, (), {"__module__": module})


def names_of(*registered: Any) -> set[str]:
    with Container().register(*registered) as container:
        made = {name: type(provider()) for name, provider in container.providers.providers.items()}
        assert set(registered) <= set(made.values())
        return {name for name, cls in made.items() if cls in registered}


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        (["orders", "users"], {"orders_service", "users_service"}),
        (["shop.orders", "shop.users"], {"orders_service", "users_service"}),
        (["shop.orders.services", "shop.users.services"], {"orders_services_service", "users_services_service"}),
        (["a.orders", "b.orders", "c.users"], {"a_orders_service", "b_orders_service", "c_users_service"}),
        (["orders", "app.orders"], {"orders_service", "app_orders_service"}),
        (["app", "app", "app"], {"service", "service_2", "service_3"}),
        (["app", "app", "shop"], {"app_service", "app_service_2", "shop_service"}),
        (["my-app.__main__", "_tests"], {"main_service", "tests_service"}),
    ],
)
def test_classes_with_the_same_name_get_provider_names_with_their_modules(modules: list[str], names: set[str]) -> None:
    classes = [class_in(module) for module in modules]

    assert names_of(*classes) == names


def test_only_beans_with_conflicting_names_are_renamed() -> None:
    assert names_of(class_in("orders"), class_in("users"), CardPayments) == {
        "orders_service",
        "users_service",
        "card_payments",
    }


def test_generated_names_do_not_conflict_with_other_beans() -> None:
    other = class_in("anywhere", "OrdersService")

    assert names_of(class_in("app.orders"), class_in("app.users"), other) == {
        "app_orders_service",
        "app_users_service",
        "orders_service",
    }


def test_an_explicit_name_is_kept_if_classes_have_the_same_name() -> None:
    @produces(name="service")
    def given() -> int:
        return 1

    with Container().register(class_in("orders"), given, class_in("users")) as container:
        assert container.providers.service() == 1
        assert {"orders_service", "users_service"} <= container.providers.providers.keys()


def test_producers_of_the_same_type_get_provider_names_with_their_modules() -> None:
    @produces()
    def first() -> bytes:
        return b"1"

    @produces()
    def second() -> bytes:
        return b"2"

    first.__module__, second.__module__ = "shop.first", "shop.second"
    with Container().register(first, second) as container:
        assert container.providers.first_bytes() == b"1"
        assert container.providers.second_bytes() == b"2"


def test_beans_have_unique_names_in_the_description() -> None:
    names = [each.name for each in internals_of(Container().register(class_in("orders"), class_in("users"))).describe()]

    assert len(set(names)) == len(names)
    assert {"orders_service", "users_service"} <= set(names)


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        (Request, r"seeds= must be a collection of types: seeds=\(Request,\)"),
        ("Request", r"seeds= must be a collection of types"),
        ((Annotated[int, "x"], list[int], {}), r"seeds= must be types, got an instance of dict"),
    ],
)
def test_seeds_that_are_not_types_are_rejected(seeds: Any, expected: str) -> None:
    with pytest.raises(TypeError, match=expected):
        Container(seeds=seeds)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"models": [DemoChatModel()]}, 'models= must map names to models: {"default": list(…)}'),
        ({"executors": {"reports": 3}}, "executors= must map names to executors, but 'reports' is 3"),
        ({"executors": ThreadPoolExecutor}, "executors= must map names to executors"),
        ({"tool_errors": return_to_model}, "tool_errors= must be ToolErrors(…)"),
        ({"settings": {"pool_size": 3}}, "settings= must be ToolboxSettings(…), got an instance of dict"),
    ],
)
def test_arguments_of_another_type_are_rejected(arguments: Any, expected: str) -> None:
    with pytest.raises(TypeError, match=re.escape(expected)):
        Container(**arguments)


@pytest.mark.parametrize("mark", [blocking, run_on_thread, run_on("reports"), run_on])
def test_markers_of_places_reject_what_they_do_not_support(mark: Any) -> None:
    with pytest.raises(TypeError, match="got 3"):
        mark(3)


def test_invalid_handlers_and_parameters_are_problems() -> None:
    @register_ai_service(parameters=3)  # type: ignore[call-overload]  # not a mapping
    class Shop(Protocol):
        def sell(self, text: str) -> str: ...

    handlers: Any = {"on_unknown_tool": 3, "on_tool_execution_error": lambda error: ""}
    errors = ToolErrors(**handlers)
    container = Container(models={"default": DemoChatModel()}, tool_errors=errors).register(Shop)

    problems = container.check()

    assert [each.where for each in problems] == ["Container(tool_errors=…)"] * 2 + ["Shop"]
    assert [each.what.partition("=")[0] for each in problems] == [
        "invalid on_unknown_tool",
        "invalid on_tool_execution_error",
        "invalid parameters",
    ]


# --- empty names


@pytest.mark.parametrize("name", ["", " ", 3])
def test_an_empty_name_is_a_problem_wherever_it_is(name: Any) -> None:
    class Card:
        @tool
        def pay(self) -> str: ...

    class Checkout:
        def __init__(
            self,
            one: Annotated[Card, Named(name)],
            maybe: Annotated[Card, Named(name)] | None,
            later: Instance[Annotated[Card, Named(name)]],
            default: Annotated[int, Named(name)] = 7,
        ) -> None: ...

    class Account:
        """Implements nothing."""

    class Savings(Account): ...

    @produces(name=name)
    def card() -> Card:
        return Card()

    @produces()
    def named() -> Annotated[Card, Named(name)]:
        return Card()

    @on_start
    def begin(card: Inject[Annotated[Card, Named(name)]]) -> None: ...

    container = Container(models={"default": ScriptedChatModel([])}, executors={name: ThreadPoolExecutor(1)})
    container.register(card, named, Checkout, Savings, begin).register_instance(Account(), name=name)
    container.bind(Account, Savings, name=name)

    found = {each.where for each in container.check() if each.what == f"invalid name={name!r}"}

    assert found >= {"Checkout.one", "Checkout.maybe", "Checkout.default", "card", "named", "Account"}
    assert found >= {"bind(Account, Savings)", "Container(executors=…)", "begin, parameter card"}
    assert any(each.startswith("Checkout.later") for each in found)


def test_an_empty_name_of_a_model_or_of_settings_is_a_problem() -> None:
    @register_ai_service(model="")
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    @register_rest_client(config_key="", base_url="http://cards.test")
    class Cards(Protocol):
        @rest_get("/cards")
        def cards(self) -> str: ...

    models = {"default": ScriptedChatModel([]), "": ScriptedChatModel([])}

    found = {str(each).partition(";")[0] for each in Container(models=models).register(Desk, Cards).check()}

    assert found == {"Desk: invalid model=''", "Cards: invalid config_key=''", "ChatModel: invalid name=''"}
