"""The injected `SecurityIdentity` where no request scope is active: it is the anonymous one."""

from collections.abc import Callable
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    Container,
    IllegalConfigurationError,
    Inject,
    Instance,
    ScopeNotActiveError,
    application_scoped,
    produces,
    register_ai_service,
    request_scoped,
    tool,
)
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

ANN = SecurityIdentity("ann", frozenset({"support"}))


class User:
    """A seed of the request."""

    name = "ann"


@produces(scope="request")
def of_the_request(user: User) -> SecurityIdentity:
    return SecurityIdentity(user.name)


@produces()
def of_each_lookup(user: User) -> SecurityIdentity:
    return SecurityIdentity(user.name)


@produces(scope="request")
async def loaded(user: User) -> SecurityIdentity:
    return SecurityIdentity(user.name)


@produces()
async def loaded_for_each_lookup(user: User) -> SecurityIdentity:
    return SecurityIdentity(user.name)


class Session:
    def __init__(self, user: User) -> None:
        self.name = user.name


@produces(scope="request")
async def session(user: User) -> Session:
    return Session(user)


@produces()
async def loaded_from_session(session: Session) -> SecurityIdentity:
    return SecurityIdentity(session.name)


class Audit:
    def __init__(self, who: SecurityIdentity, maybe: SecurityIdentity | None = None) -> None:
        self.names = f"{who}, {maybe}"


class Later:
    def __init__(self, who: Instance[SecurityIdentity]) -> None:
        self.who = who


class Orders:
    def __init__(self, audit: Audit, later: Later) -> None:
        self.audit, self.later = audit, later

    @tool
    async def names(self, who: Inject[SecurityIdentity]) -> str:
        return f"{who}; {self.audit.names}; {await self.later.who.aget()}"


@register_ai_service(tools=Orders)
class Desk(Protocol):
    async def chat(self, text: str) -> str: ...


def program(*beans: Any, seeds: Any = (User,)) -> Container:
    model = ScriptedChatModel([AiMessage(None, (tool_call("names"),)), "done"] * 2)
    return Container(models={"default": model}, seeds=list(seeds)).register(Desk, Audit, Later, *beans)


async def read_names(container: Container) -> str:
    model: Any = container.models["default"]
    assert await (await container.aget(Desk)).chat("x") == "done"
    return str(model.requests[-1].messages[-1].text)


SOURCES: dict[str, Callable[[], Container]] = {
    "seed": lambda: program(seeds=(SecurityIdentity, User)),
    "request": lambda: program(of_the_request),
    "lookup": lambda: program(of_each_lookup),
    "async request": lambda: program(loaded),
    "async lookup": lambda: program(loaded_for_each_lookup),
    "async session": lambda: program(session, loaded_from_session),
}
SYNC = ("seed", "request", "lookup")


@pytest.mark.parametrize("source", SOURCES)
async def test_without_a_scope_the_identity_is_anonymous_everywhere(source: str) -> None:
    async with SOURCES[source]() as container:
        assert await read_names(container) == "anonymous; anonymous, anonymous; anonymous"
        assert (await container.aget(SecurityIdentity)).is_anonymous
        assert (await container.aget(Audit)).names == "anonymous, anonymous"
        assert container.get(SecurityIdentity).is_anonymous
        if source not in ("async lookup", "async session"):  # async code creates what holds their identities
            assert container.get(Audit).names == "anonymous, anonymous"

        async with container.request_scope({User: User(), **({SecurityIdentity: ANN} if source == "seed" else {})}):
            assert await read_names(container) == "ann; ann, ann; ann"
            assert str(await container.aget(SecurityIdentity)) == "ann"
            if source in SYNC:
                assert container.get(Audit).names == "ann, ann"
        assert (await container.aget(SecurityIdentity)).is_anonymous


def test_synchronous_programs_get_the_anonymous_identity_too() -> None:
    with program(of_the_request) as container:
        assert container.get(Audit).names == "anonymous, anonymous"
        with container.request_scope({User: User()}):
            assert container.get(Audit).names == "ann, ann"


async def test_a_replaced_identity_is_used_without_a_scope() -> None:
    async with program(of_the_request) as container:
        with container.override(SecurityIdentity, ANN):
            assert container.get(Audit).names == "ann, ann"
        with container.override(Later, Later(container.get(Later).who)):
            assert container.get(Audit).names == "anonymous, anonymous"
        assert container.get(Audit).names == "anonymous, anonymous"


async def test_other_beans_of_the_request_still_need_a_scope() -> None:
    @request_scoped
    class Basket:
        def __init__(self, who: SecurityIdentity) -> None:
            self.who = who

    async with program(of_the_request, Basket) as container:
        with pytest.raises(ScopeNotActiveError):
            container.get(Basket)
        with pytest.raises(ScopeNotActiveError):
            container.get(User)


async def test_an_identity_of_the_application_is_used_without_a_scope() -> None:
    async with Container().register_instance(ANN).register(Audit) as container:
        assert container.get(Audit).names == "ann, ann"


async def test_a_bean_of_the_application_cannot_hold_the_identity_of_a_request() -> None:
    @application_scoped
    class Kept:
        def __init__(self, who: SecurityIdentity) -> None: ...

    with pytest.raises(IllegalConfigurationError, match="Kept"):
        await program(of_the_request, Kept).__aenter__()
