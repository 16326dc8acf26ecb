"""The pytest plugin: a started container, a scripted model, overrides, a request scope and recordings for tests.

Tests cannot send requests to model servers unless they allow it (`allow_model_requests`). The plugin imports the
library only when a test uses a fixture. Not here: assertions (`testing`), recording traffic (`recordings`).
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import zlib
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from typing_extensions import TypeForm

    from .chat import ChatModel
    from .container import Container
    from .di.scopes import RequestScope
    from .recordings import Recording
    from .testing import EventRecord, ScriptedChatModel

T = TypeVar("T")

CONTAINER = "toolbox_container"
RECORDING = "--toolbox-recording"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option and the setting of this plugin."""
    parser.addini(CONTAINER, "the container under test, as module:name; a function that returns one also works")
    parser.getgroup("toolbox").addoption(
        RECORDING,
        choices=("auto", "replay", "record"),
        help="replay recordings, record all again, or record only the missing ones (auto); wins over TOOLBOX_RECORDING",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Refuse requests to model servers, and register the async fixtures if pytest-asyncio is installed."""
    config.addinivalue_line("markers", f"{ALLOW}: allow the test to send requests to model servers")
    config.stash[_RULES] = _ModelRequestPolicy()
    plugin = config.pluginmanager.get_plugin("asyncio")
    if (make := getattr(plugin, "fixture", None)) is not None:
        fixtures: Any = ModuleType("toolbox-asyncio")
        fixtures.started = make(name=f"{_STARTED}_asyncio")(_start_container)
        fixtures.scope = make(name=f"{_SCOPE}_asyncio")(_open_scope)
        config.pluginmanager.register(fixtures, "toolbox-asyncio")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Restore the permission to send requests to model servers."""
    if (rules := config.stash.get(_RULES, None)) is not None:
        rules.restore_previous()


# --- requests to model servers

ALLOW = "allow_model_requests"

NEVER_REAL = (".invalid", ".test", ".example", ".localhost")
"""Top-level names that are reserved and never belong to a real server (RFC 2606)."""

REFUSED = (
    "the test sent a request to the model server {url}; "
    "script the replies with the fixture scripted_model, "
    "or allow the request with @pytest.mark.allow_model_requests"
)


class ModelRequestRefusedError(AssertionError):
    """Raised if a test sends a request to a model server without permission. `url` is the server's address."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url

    def __str__(self) -> str:
        return REFUSED.format(url=self.url)


class _ModelRequestPolicy:
    """Decides which model the running test uses, and whether it may send requests to model servers.

    Servers on this machine are allowed, because a test may start one. They are refused if the environment names them
    when the run begins, or if the test scripts its model.
    """

    def __init__(self) -> None:
        from .models import model_requests

        self._before = model_requests.check, model_requests.stand_in
        self._named = {value.rstrip("/") for name, value in os.environ.items() if name.endswith("BASE_URL")}
        self.scripted: dict[pytest.FixtureDef[Any], ScriptedChatModel] = {}
        self.begin_test()
        model_requests.check = self.check_request

    def restore_previous(self) -> None:
        """Restore the previous policy: the one of an outer pytest run, if there is one."""
        from .models import model_requests

        model_requests.check, model_requests.stand_in = self._before

    def begin_test(self, item: pytest.Item | None = None) -> None:
        """Apply the policy of the test `item`, or the policy between two tests."""
        from .models import model_requests

        names = getattr(item, "fixturenames", ())
        self.is_allowed = item is not None and (item.get_closest_marker(ALLOW) is not None or ALLOW in names)
        self._is_scripted = "scripted_model" in names
        model_requests.stand_in = self.stand_in if self._is_scripted else None

    def check_request(self, url: str) -> None:
        """Raise `ModelRequestRefusedError` unless the running test may send requests to this server."""
        if not (self.is_allowed or (_is_local(url) and url.rstrip("/") not in self._named and not self._is_scripted)):
            raise ModelRequestRefusedError(url)

    def stand_in(self, given: ChatModel | None) -> ChatModel | None:
        """Return the test's scripted model, or None to keep a `ScriptedChatModel` that the program passed."""
        from .testing import ScriptedChatModel

        if isinstance(given, ScriptedChatModel):
            return None
        if not self.scripted:
            raise AssertionError("a model was called before the fixture scripted_model existed; request it earlier")
        return next(reversed(self.scripted.values()))


_RULES = pytest.StashKey[_ModelRequestPolicy]()


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(NEVER_REAL):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Apply the policy of each test to all its phases, including fixtures of its class, module and session."""
    rules = item.config.stash[_RULES]
    rules.begin_test(item)
    try:
        return (yield)
    finally:
        rules.begin_test()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """Remember the scripted model, also if the user overrides the fixture, with any scope."""
    made = yield
    if fixturedef.argname == "scripted_model":
        request.config.stash[_RULES].scripted[fixturedef] = made
    return made


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    """Forget a scripted model when its fixture ends, which can be after many tests."""
    if fixturedef.argname == "scripted_model":
        request.config.stash[_RULES].scripted.pop(fixturedef, None)


@pytest.fixture
def allow_model_requests(pytestconfig: pytest.Config) -> Iterator[None]:
    """Allow the test to send requests to model servers, like the marker of the same name."""
    rules = pytestconfig.stash[_RULES]
    before, rules.is_allowed = rules.is_allowed, True
    yield
    rules.is_allowed = before


# --- the container


@pytest.fixture
def toolbox_container_source(pytestconfig: pytest.Config) -> Container:
    """Return the container under test. Set `toolbox_container = module:name`, or override this fixture."""
    from .container import Container

    target = pytestconfig.getini(CONTAINER)
    ways = f"set {CONTAINER} = module:name in pytest's settings, or override the fixture toolbox_container_source"
    if not target:
        raise pytest.UsageError(f"no container is configured for the tests; {ways}")
    module, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except ModuleNotFoundError as error:
        fix = 'add its folder to pythonpath in pytest\'s settings, for example pythonpath = ["."]'
        raise pytest.UsageError(f"{CONTAINER} = {target}: cannot find module {error.name!r}; {fix}") from error
    except AttributeError as error:
        raise pytest.UsageError(f"{CONTAINER} = {target}: {error}; {ways}") from error
    found = found() if inspect.isfunction(found) else found
    if not isinstance(found, Container):
        raise pytest.UsageError(f"{CONTAINER} = {target}: expected a Container, got {type(found).__name__}; {ways}")
    return found


@pytest.fixture
def toolbox_unstarted_container(
    request: pytest.FixtureRequest, toolbox_container_source: Container
) -> Iterator[Container]:
    """Yield the container without starting it, for an application that starts it (such as FastAPI's `TestClient`).

    If the test uses `scripted_model`, it replaces every model of the container. Otherwise it replaces the models that
    the program did not pass to the container. After the test, the container has its own models again.
    """
    from .container import internals_of

    container = toolbox_container_source
    models = dict(container.models)
    is_scripted = "scripted_model" in request.fixturenames
    try:
        if is_scripted or not request.config.stash[_RULES].is_allowed:
            scripted: ScriptedChatModel = request.getfixturevalue("scripted_model")
            stays = {} if is_scripted else models
            names = internals_of(container).model_names()
            container.models.update({**dict.fromkeys(names, scripted), **stays})
        yield container
    finally:
        container.models.clear()
        container.models.update(models)


@pytest.fixture
def toolbox_container(request: pytest.FixtureRequest, toolbox_unstarted_container: Container) -> Iterator[Container]:
    """Start the container for this test and stop it afterwards.

    In an async test, it runs on the event loop of the test, else on a loop it creates. A container that another fixture
    has started, for example with FastAPI's `TestClient`, is used as it is.
    """
    if toolbox_unstarted_container.is_started:
        yield toolbox_unstarted_container
        return
    if (name := _find_async_name(request, _STARTED)) is not None:
        yield request.getfixturevalue(name)
        return
    with toolbox_unstarted_container as container:
        yield container


async def _start_container(toolbox_unstarted_container: Container) -> AsyncIterator[Container]:
    async with toolbox_unstarted_container as container:
        yield container


class OverrideBean(Protocol):
    """The type of the fixture `toolbox_override`."""

    def __call__(self, wanted: TypeForm[T], fake: T, name: str | None = None) -> T:
        """Replace the bean `wanted` by `fake` until the test ends, and return `fake`."""
        ...


@pytest.fixture
def toolbox_override(toolbox_unstarted_container: Container) -> Iterator[OverrideBean]:
    """Replace beans for this test: `toolbox_override(Payments, fake)`. The bean is restored when the test ends."""
    with ExitStack() as overrides:

        def override_bean(wanted: TypeForm[T], fake: T, name: str | None = None) -> T:
            return overrides.enter_context(toolbox_unstarted_container.override(wanted, fake, name))

        yield override_bean


# --- the scripted model, and the record of events


@pytest.fixture
def scripted_model() -> ScriptedChatModel:
    """Return a model that follows a script and replaces every model of the test: `scripted_model.will_reply("Hi")`.

    Every container uses it in this test, no matter when the container was started and which models it has. A
    `ScriptedChatModel` that the program passed to a container is kept.
    """
    from .testing import ScriptedChatModel

    return ScriptedChatModel()


@pytest.fixture
def toolbox_record(toolbox_unstarted_container: Container) -> Iterator[EventRecord]:
    """Yield the record of the container's events in this test: `.tool_executions`, `.requests`, `.events`.

    The container may already be started by another fixture, for example by a client of the application.
    """
    from .container import internals_of
    from .testing import EventRecord

    record = EventRecord()
    with internals_of(toolbox_unstarted_container).listening(record):
        yield record


# --- the request scope


@pytest.fixture
def toolbox_seeds() -> Mapping[Any, Any]:
    """Return the seeds of the test's request scope by type. Override this fixture to set them."""
    return {}


@pytest.fixture
def toolbox_request_scope(
    request: pytest.FixtureRequest, toolbox_container: Container, toolbox_seeds: Mapping[Any, Any]
) -> Iterator[RequestScope]:
    """Run the test in a request scope of the started container, seeded with `toolbox_seeds`."""
    if (name := _find_async_name(request, _SCOPE)) is not None:
        yield request.getfixturevalue(name)
        return
    with toolbox_container.request_scope(toolbox_seeds) as scope:
        yield scope


async def _open_scope(toolbox_container: Container, toolbox_seeds: Mapping[Any, Any]) -> AsyncIterator[RequestScope]:
    async with toolbox_container.request_scope(toolbox_seeds) as scope:
        yield scope


# --- async tests: fixtures that run on the event loop of the test

_STARTED = "_toolbox_started"
_SCOPE = "_toolbox_scope"
_started_anyio = pytest.fixture(name=f"{_STARTED}_anyio")(_start_container)
_scope_anyio = pytest.fixture(name=f"{_SCOPE}_anyio")(_open_scope)


def _find_async_name(request: pytest.FixtureRequest, name: str) -> str | None:
    """Return the name of the async fixture for the test's plugin, or None for a synchronous test."""
    if not inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        return None
    if "anyio_backend" in request.fixturenames:
        return f"{name}_anyio"
    return f"{name}_asyncio" if request.config.pluginmanager.has_plugin("toolbox-asyncio") else None


# --- recordings


@pytest.fixture
def toolbox_recording(request: pytest.FixtureRequest) -> Iterator[Recording]:
    """Yield the `Recording` of this test: pass it to the model as `transport=`.

    The file is `recordings/test_file.test_name.json` next to the test. A request that is not in the recording fails the
    test, even if the program handled the error.
    """
    from .recordings import Recording

    failures = request.session.testsfailed
    recording = Recording(_find_file(request.node), request.config.getoption(RECORDING))
    yield recording
    if recording.missed and request.session.testsfailed == failures:
        raise recording.missed[0]


def _find_file(item: pytest.Item) -> Path:
    name = item.nodeid.partition("::")[2].replace("::", ".").replace("[", "-").replace("]", "")
    plain = re.sub(r"[^\w.\-]", "_", name, flags=re.ASCII)
    if plain != name or len(plain) > 120:
        plain = f"{plain[:120]}-{zlib.crc32(name.encode()):08x}"
    return item.path.parent / "recordings" / f"{item.path.stem}.{plain}.json"
