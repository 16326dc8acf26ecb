"""`PreparedRuns`: finds the body of a stored run in this program, and restores with it what the run was asked.

`admit` says in whose name a run goes on, `open_scope` opens its request scope. Not here: what a body is (`run_body`),
executing the run (`run_execution`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from inspect import isawaitable
from typing import Any, Protocol

from ..context import current_invocation, restored_attributes
from ..di.scopes import RequestScope
from ..errors import RunCancelledError, RunFailedError, RunIncompatibleError, ScopeNotActiveError
from ..security import ForbiddenError, SecurityIdentity, identity_from
from ..services.outputs import Result
from .persons import is_same_person, read_identity, with_token_of
from .program_values import read_seeds
from .run_body import PreparedRun, RunBody
from .runs_host import RunsHost
from .store import StoredRun
from .stored_runs import StoredRuns, read_document


class IdentityLoader(Protocol):
    """Refreshes the identity of a run that continues. Register a bean of this type.

        class Directory(IdentityLoader):
            async def load(self, identity: SecurityIdentity) -> SecurityIdentity | None: ...

    `load` may be `def` or `async def`. None refuses to continue, and the run stays as it is.
    """

    def load(self, identity: Any) -> Any:
        """Return the current identity of this person; None if it may no longer act."""
        ...


class PreparedRuns:
    """Finds the bodies of the stored runs of a host: to continue them, and to read what came of them.

    `bodies_of` returns the bodies of a service with this stored name, by the names of their methods. `may_undo_tools`
    returns True if a run of this program may have to undo what it has done when it is cancelled.
    """

    def __init__(
        self,
        host: RunsHost,
        runs: StoredRuns,
        bodies_of: Callable[[str], Mapping[str, RunBody]],
        may_undo_tools: Callable[[], bool],
    ) -> None:
        self._host, self._runs, self._bodies_of, self.may_undo_tools = host, runs, bodies_of, may_undo_tools

    def find_body(self, stored: StoredRun) -> RunBody | None:
        """Return the body of a run; None if this program has none."""
        return self._bodies_of(stored.service).get(stored.method)

    def prepare(self, stored: StoredRun) -> PreparedRun:
        """Return what is needed to continue a run. Raises `RunIncompatibleError`."""
        document, run_id = read_document(stored), stored.id
        bodies = self._bodies_of(stored.service)
        if not bodies:
            raise RunIncompatibleError(run_id, f"this program has no service {stored.service}")
        body = bodies.get(stored.method)
        if body is None:
            raise RunIncompatibleError(run_id, f"the service {stored.service} has no method {stored.method!r}")
        arguments = body.restore(run_id, document)
        return PreparedRun(body, arguments, read_seeds(run_id, self._host.run_seeds, document), document)

    async def admit_to_method(self, run_id: str, prepared: PreparedRun, person: Any = None) -> PreparedRun:
        """Admit a run as `admit` does. Raises `ForbiddenError` also if its identity may no longer do what it does."""
        prepared = await admit(self._host, run_id, prepared, person)
        prepared.body.refuse(prepared)
        return prepared

    async def result_of(self, stored: StoredRun) -> Result[Any]:
        """Return the stored result of a run that does not run. Raises `RunFailedError` or `RunCancelledError`."""
        document = read_document(stored)
        if stored.status == "failed":
            raise RunFailedError(stored.id, document.error_type or "", document.error_text or "")
        if stored.status == "cancelled":
            raise RunCancelledError(stored.id, document.reason)
        result = await self._body_of(stored).read_result(stored, document)
        if result is None:
            changed = await self._runs.load(stored.id)
            assert changed.version != stored.version, "the suspension is stored with the state"
            return await self.result_of(changed)
        return result

    async def outcome_of(self, stored: StoredRun) -> Any:
        """Return what the caller of the method of an ended run gets. Raises the errors of `result_of`."""
        result = await self.result_of(stored)
        return self._body_of(stored).value_of(result)

    def _body_of(self, stored: StoredRun) -> RunBody:
        if (body := self.find_body(stored)) is None:
            raise RunIncompatibleError(stored.id, f"this program has no method {stored.service}.{stored.method}")
        return body


async def admit(host: RunsHost, run_id: str, prepared: PreparedRun, person: Any = None) -> PreparedRun:
    """Return a run with the identity under which it continues. Raises `ForbiddenError` if the loader refuses it.

    `person` is who makes it continue: if the run is theirs, it has their token. A cancelled run is undone under the
    stored identity, whatever its person may still do.
    """
    identity = stored = read_identity(prepared.document.identity)
    if not identity.is_anonymous and not prepared.document.cancels:
        identity = await _load_identity(host, run_id, identity)
    if is_same_person(person, stored, host.run_identity):
        identity = with_token_of(person, identity)
    return replace(prepared, identity=identity, is_without_user=person is None and not stored.is_anonymous)


async def _load_identity(host: RunsHost, run_id: str, identity: Any) -> Any:
    try:
        loader: Any = await host.application_bean(IdentityLoader)
    except ScopeNotActiveError:
        return identity
    if loader is None:
        return identity
    loaded = loader.load(identity)
    if isawaitable(loaded):
        loaded = await loaded
    if loaded is None:
        reason = f"{type(loader).__name__} no longer knows this identity"
        raise ForbiddenError(f"run {run_id}", identity.name, (), reason)
    return identity_from(loaded, f"{type(loader).__name__}.load")


@asynccontextmanager
async def open_scope(host: RunsHost, prepared: PreparedRun) -> AsyncIterator[RequestScope | None]:
    """Open the request scope of a run, with its seeds, its identity and its attributes, outside of other calls.

    Yields the scope; None without a container. The identity is a seed also if it is anonymous: a producer, or the one
    of a web request, must not replace it.
    """
    seeds = {**prepared.seeds, SecurityIdentity: prepared.identity}
    token = current_invocation.set(None)
    try:
        with restored_attributes(prepared.document.attributes):
            async with host.open_request(seeds) as scope:
                yield scope
    finally:
        current_invocation.reset(token)
