"""Identities and the marks of roles: their values, and which mark applies to a tool."""

import copy
import functools
import pickle
from typing import Any

import pytest

from toolbox import tool
from toolbox.security import (
    ForbiddenError,
    SecurityIdentity,
    UnauthenticatedError,
    authenticated,
    permit_all,
    roles_allowed,
)
from toolbox.tools.sources import read_tools
from toolbox.tools.tool_calls import Tool

ANN = SecurityIdentity("ann", frozenset({"support"}))
BOB = SecurityIdentity("bob")
ANONYMOUS = SecurityIdentity.anonymous()


def tools_of(*sources: Any) -> dict[str, Tool]:
    tools, problems = read_tools(sources, "here")
    assert problems == ()
    return {each.name: each for each in tools}


def allowed(tool: Tool) -> list[str]:
    return [str(each) for each in (ANN, BOB, ANONYMOUS) if tool.access is None or tool.access.allows(each)]


# --- identities


def test_an_identity_has_a_name_roles_and_attributes() -> None:
    identity = SecurityIdentity("ann", roles=["a", "b", "a"], attributes={"tenant": "acme"})  # type: ignore[arg-type]  # any collection

    assert (identity.name, identity.roles, identity.attributes) == ("ann", {"a", "b"}, {"tenant": "acme"})
    assert not identity.is_anonymous
    assert hash(identity) == hash(SecurityIdentity("ann", frozenset({"a", "b"})))


@pytest.mark.parametrize("name", ["", " ", "\t\n"])
def test_an_empty_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="empty"):
        SecurityIdentity(name)


@pytest.mark.parametrize(("name", "roles"), [(3, ()), (None, ()), ("ann", "admin"), ("ann", [1]), ("ann", 7)])
def test_names_and_roles_must_be_strings(name: Any, roles: Any) -> None:
    with pytest.raises(TypeError, match="SecurityIdentity"):
        SecurityIdentity(name, roles)


def test_only_the_anonymous_identity_is_anonymous() -> None:
    assert ANONYMOUS.is_anonymous
    assert ANONYMOUS.roles == frozenset()
    assert not SecurityIdentity("anonymous").is_anonymous
    assert SecurityIdentity("anonymous") != ANONYMOUS


@pytest.mark.parametrize("identity", [ANN, ANONYMOUS], ids=["known", "anonymous"])
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_identities_can_be_pickled_and_copied(identity: SecurityIdentity, again: Any) -> None:
    assert again(identity) == identity
    assert again(identity).is_anonymous == identity.is_anonymous


def test_later_changes_of_the_given_collections_do_not_change_an_identity() -> None:
    roles, attributes = {"a"}, {"tenant": "acme"}
    identity = SecurityIdentity("ann", roles, attributes)  # type: ignore[arg-type]  # any collection
    roles.add("admin")
    attributes["tenant"] = "other"

    assert (identity.roles, identity.attributes) == ({"a"}, {"tenant": "acme"})


# --- decorators


def test_a_decorator_returns_the_same_object() -> None:
    def refund() -> str: ...

    class Orders: ...

    assert roles_allowed("a")(refund) is refund
    assert authenticated(Orders) is Orders


@pytest.mark.parametrize("roles", [(len,), (1,), ("",), ("a", None)])
def test_roles_must_be_names(roles: Any) -> None:
    with pytest.raises(TypeError, match="roles_allowed"):
        roles_allowed(*roles)


def test_two_marks_on_one_target_are_refused() -> None:
    @roles_allowed("admin")
    def refund() -> str: ...

    with pytest.raises(TypeError, match="refund already has"):
        permit_all(refund)


@pytest.mark.parametrize("decorator", [roles_allowed("a"), authenticated, permit_all])
def test_decorators_need_a_function_or_a_class(decorator: Any) -> None:
    with pytest.raises(TypeError, match="expected a function"):
        decorator("admin")


@tool
@roles_allowed("support", "admin")
def refund(order: int) -> str:
    return f"refunded {order}"


@authenticated
@tool
def mine() -> str:
    return "mine"


@tool
@roles_allowed()
def never() -> str:
    return "never"


def test_functions_are_restricted_by_their_mark() -> None:
    tools = tools_of(refund, mine, never)

    assert allowed(tools["refund"]) == ["ann"]
    assert allowed(tools["mine"]) == ["ann", "bob"]
    assert allowed(tools["never"]) == []


def test_a_partial_keeps_the_mark_of_its_function() -> None:
    assert allowed(tools_of(functools.partial(refund, order=7))["refund"]) == ["ann"]


@roles_allowed("support")
class Desk:
    @tool
    def inherits(self) -> str: ...

    @tool
    @roles_allowed("boss")
    def replaces(self) -> str: ...

    @tool
    @permit_all
    def opens(self) -> str: ...

    @tool
    @staticmethod
    def static() -> str: ...

    @tool
    @classmethod
    def of_class(cls) -> str: ...

    @roles_allowed("boss")
    @staticmethod
    @tool
    def marked_static() -> str: ...


class SubDesk(Desk):
    def replaces(self) -> str: ...

    def inherits(self) -> str: ...


@permit_all
class OpenDesk(Desk):
    """Opens the methods without a mark."""


@pytest.mark.parametrize("source", [Desk, Desk()], ids=["class", "instance"])
def test_the_mark_of_a_method_replaces_that_of_its_class(source: Any) -> None:
    found = {name: allowed(each) for name, each in tools_of(source).items()}

    assert found == {
        "inherits": ["ann"],
        "replaces": [],
        "opens": ["ann", "bob", "anonymous"],
        "static": ["ann"],
        "of_class": ["ann"],
        "marked_static": [],
    }


def test_subclasses_and_overrides_keep_the_marks() -> None:
    found = {name: allowed(each) for name, each in tools_of(SubDesk).items()}

    assert (found["inherits"], found["replaces"]) == (["ann"], [])


def test_a_subclass_can_replace_the_mark_of_its_base_but_not_those_of_methods() -> None:
    found = {name: allowed(each) for name, each in tools_of(OpenDesk).items()}

    assert found["inherits"] == ["ann", "bob", "anonymous"]
    assert found["replaces"] == []


@pytest.mark.parametrize(
    "method",
    [Desk().inherits, functools.partial(Desk().inherits), Desk.static, Desk.of_class, SubDesk().inherits],
    ids=["method", "partial", "static", "class", "override"],
)
def test_single_methods_keep_the_mark_of_their_class(method: Any) -> None:
    [found] = tools_of(method).values()

    assert allowed(found) == ["ann"]


# --- errors


def test_access_errors_name_the_place_and_the_roles() -> None:
    assert "Desk.chat needs an identity" in str(UnauthenticatedError("Desk.chat"))
    error = ForbiddenError("Desk.chat", "bob", ["admin", "support"])
    assert (error.where, error.identity, error.roles) == ("Desk.chat", "bob", ("admin", "support"))
    assert "admin, support" in str(error)
    assert "denies all" in str(ForbiddenError("Desk.chat", "bob", []))


@pytest.mark.parametrize(
    "error",
    [
        UnauthenticatedError("Desk.chat"),
        ForbiddenError("Desk.chat", "bob", ["a"]),
        ForbiddenError("Desk.chat", "bob", (), "Directory no longer knows this identity"),
    ],
)
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_access_errors_can_be_pickled_and_copied(error: Exception, again: Any) -> None:
    other = again(error)

    assert (type(other), vars(other), str(other)) == (type(error), vars(error), str(error))
