"""`DbosRunEngine`: runs on many machines, with a DBOS queue as a doorbell (extra `dbos`).

DBOS only decides which process executes a run next. What a run has done is in the `RunStore`; DBOS gets no step and no
result of it. What is written for DBOS is JSON. Not here: leases and taking over (`toolbox.runs`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from .errors import IllegalConfigurationError, Problem
from .runs.run_engines import RunEngine

__all__ = [
    "DbosRunEngine",
]

if TYPE_CHECKING:
    from dbos import DBOSClient

    from .runs.runs_bean import Runs

WORKFLOW = "toolbox.execute_run"
"""Name of the DBOS workflow; its arguments are the name of the queue and the id of the run."""

_MOST_RINGS = 50  # deliveries of one generation

_attached: dict[str, DbosRunEngine] = {}
"""The engines of this process that execute runs, by queue. DBOS has one instance and one registry per process."""


class DbosRunEngine(RunEngine):
    """Executes started runs in any process that has this engine, through a DBOS queue.

        container.register_instance(DbosRunEngine("postgresql://user:password@host/shop"), as_type=RunEngine)

    - `database_url`: the system database of DBOS, PostgreSQL or SQLite. Default: that of a DBOS instance of this
      process, otherwise the database of the `SqlRunStore` (for SQLite, a file in the same folder).
    - `queue`: name of the queue; `concurrency`: runs that one process executes at the same time.
    - `polling`: seconds between two looks into the queue.

    If the program has created a DBOS instance, the engine joins it. Otherwise the engine launches one, and destroys it
    when the container stops.
    A container with `take_over_runs=False` only adds to the queue, with DBOS's client. A run whose worker dies is
    added again when its lease has expired. Raises `ModuleNotFoundError` without DBOS.
    """

    def __init__(
        self,
        database_url: str | None = None,
        *,
        queue: str = "toolbox_runs",
        concurrency: int = 20,
        polling: float = 0.5,
    ) -> None:
        try:
            import dbos as _  # noqa: F401 - checks that it is installed
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "DbosRunEngine needs DBOS; install it with: pip install 'toolbox-di[dbos]'", name=error.name
            ) from None
        if concurrency < 1:
            raise ValueError(f"invalid concurrency={concurrency}; use 1 or more")
        if not polling > 0:
            raise ValueError(f"invalid polling={polling}; use a number of seconds above 0")
        if not queue or queue.startswith("_dbos_"):
            raise ValueError(f"invalid queue={queue!r}; use a name that does not start with _dbos_")
        self._url, self._queue, self._concurrency, self._polling = database_url, queue, concurrency, polling
        self._runs: Runs | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: DBOSClient | None = None
        self._has_launched = False
        self._running: set[asyncio.Task[Any]] = set()

    # --- start and stop

    async def attach(self, runs: Runs, executes: bool) -> None:
        self._runs, self._loop = runs, asyncio.get_running_loop()
        if not executes:
            return  # the client is made when it is needed
        if self._queue in _attached:
            what = f"another container of this process executes the queue {self._queue!r}"
            raise IllegalConfigurationError([Problem("DbosRunEngine", what, "use one container, or another queue=")])
        _attached[self._queue] = self
        try:
            if not await asyncio.to_thread(self._join):
                await asyncio.to_thread(self._launch, await self._find_system_database())
        except BaseException:
            _attached.pop(self._queue, None)
            raise

    async def detach(self) -> None:
        self._runs = None
        if _attached.get(self._queue) is self:
            del _attached[self._queue]
        running = [*self._running]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.to_thread(self._end_engine)

    def _join(self) -> bool:
        """Join the DBOS instance of this program, and launch it if necessary. Return False if there is none."""
        from dbos import DBOS, WorkflowSerializationFormat, error

        DBOS.workflow(name=WORKFLOW, serialization_type=WorkflowSerializationFormat.PORTABLE)(execute_run)
        if not _is_launched():
            try:
                DBOS.launch()
            except error.DBOSException:  # the program has created no instance
                return False
        self._register_queue()
        return True

    def _launch(self, url: str) -> None:
        """Launch DBOS for the runs alone."""
        from dbos import DBOS, DBOSPortableJSONSerializer

        # A new executor id for each start: DBOS then recovers nothing by itself; runs are taken over by lease.
        assert self._runs is not None
        config: dict[str, Any] = {
            "name": "toolbox",
            "system_database_url": url,
            "application_version": "toolbox",
            "executor_id": self._runs.owner,
            "log_level": "WARNING",
            "serializer": DBOSPortableJSONSerializer(),
        }
        DBOS(config=config)  # type: ignore[arg-type]  # a TypedDict of optional keys
        self._has_launched = True
        try:
            DBOS.launch()
            self._register_queue()
        except BaseException:
            self._end_engine()
            raise

    def _register_queue(self) -> None:
        from dbos import DBOS

        DBOS.register_queue(self._queue, worker_concurrency=self._concurrency, polling_interval_sec=self._polling)

    def _end_engine(self) -> None:
        from dbos import DBOS

        if self._client is not None:
            self._client.destroy()
            self._client = None
        if self._has_launched:
            self._has_launched = False
            DBOS.destroy()

    async def _find_system_database(self) -> str:
        """Return the URL of DBOS's database, which is by default that of the run store."""
        if self._url is not None:
            return self._url
        assert self._runs is not None
        url = getattr(await self._runs.store(), "system_database_url", None)
        if url is None:
            fix = "give DbosRunEngine a database_url"
            raise IllegalConfigurationError([Problem("DbosRunEngine", "missing database for DBOS", fix)])
        return str(url())

    # --- submitting: with DBOS's blocking functions on threads. The async ones replace the loop's default executor.

    async def submit(self, run_id: str, generation: int) -> None:
        """Put the run into the queue, unless the same delivery still waits there."""
        from dbos import EnqueueOptions, WorkflowSerializationFormat

        delivery = f"{run_id}:{generation}"
        for number in range(2, _MOST_RINGS + 2):
            options = EnqueueOptions(
                workflow_name=WORKFLOW,
                queue_name=self._queue,
                workflow_id=delivery,
                serialization_type=WorkflowSerializationFormat.PORTABLE,  # JSON, also in the program's own instance
            )
            status = await self._read_status(delivery)
            if status is None:
                await self._enqueue(options, run_id)
                return
            if status in ("ENQUEUED", "DELAYED"):
                return
            # It was taken, but the run has no owner yet or any more: its worker is gone, or is just beginning.
            delivery = f"{run_id}:{generation}:{number}"

    async def _enqueue(self, options: Any, run_id: str) -> None:
        if await self._uses_instance():
            from dbos import DBOS

            enqueue: Any = DBOS.enqueue_workflow_with_options
        else:
            enqueue = (await self._open_client()).enqueue
        await asyncio.to_thread(enqueue, options, self._queue, run_id)

    async def _read_status(self, workflow_id: str) -> str | None:
        if await self._uses_instance():
            from dbos import DBOS

            find: Any = DBOS.list_workflows
        else:
            find = (await self._open_client()).list_workflows
        found = await asyncio.to_thread(find, workflow_ids=[workflow_id], load_input=False, load_output=False)
        return str(found[0].status) if found else None

    async def _uses_instance(self) -> bool:
        """Return True to write with the DBOS instance of this process instead of a client."""
        if _attached.get(self._queue) is self:
            return True
        return self._url is None and await asyncio.to_thread(_is_launched)

    async def _open_client(self) -> DBOSClient:
        if self._client is None:
            url = await self._find_system_database()
            self._client = await asyncio.to_thread(_client_of, url)
        return self._client

    # --- executing

    async def execute(self, run_id: str) -> None:
        """Execute a run on the container's loop, for the workflow that DBOS calls on a loop of its choice."""
        assert self._loop is not None
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._execute_run(run_id), self._loop))

    async def _execute_run(self, run_id: str) -> None:
        task = asyncio.current_task()
        if self._runs is None or task is None:
            return
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await self._runs.execute_or_try_later(run_id)


async def execute_run(queue: str, run_id: str) -> None:
    """Execute a run: the DBOS workflow. It has no steps, and its result means nothing."""
    engine = _attached.get(queue)
    if engine is None:
        return  # the container is stopping; the run is added again when its lease has expired
    try:
        await engine.execute(run_id)
    except asyncio.CancelledError:
        if _attached.get(queue) is engine:
            raise


def _is_launched() -> bool:
    """Return True if the program has launched DBOS. DBOS has no function for it; a query fails before the launch."""
    from dbos import DBOS, error

    try:
        DBOS.retrieve_queue(WORKFLOW)
    except error.DBOSException:
        return False
    return True


def _client_of(url: str) -> DBOSClient:
    from dbos import DBOS, DBOSClient, DBOSPortableJSONSerializer

    DBOS.migrate(url)
    return DBOSClient(system_database_url=url, serializer=DBOSPortableJSONSerializer())
