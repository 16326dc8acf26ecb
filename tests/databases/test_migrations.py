"""`toolbox migrate`, stores that only check their tables, and databases of earlier releases."""

import asyncio
import itertools
import json
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from typer.testing import CliRunner, Result

from tests import programs
from tests.databases.refund_desk import Desk
from toolbox import ChatMemoryKey, Container, IllegalConfigurationError, UserMessage, sql
from toolbox.cli import app
from toolbox.runs import Run, approve
from toolbox.security import SecurityIdentity
from toolbox.settings import SqlSettings, ToolboxSettings
from toolbox.sql import SqlChatMemoryStore, SqlRunStore
from toolbox.sql.conversation_tables import ConversationTables
from toolbox.sql.migrations import migrate
from toolbox.sql.run_tables import FirstRunTables
from toolbox.testing import ScriptedChatModel

pytestmark = pytest.mark.anyio

ROWS = Path(__file__).with_name("runs_of_version_1.sql")
PROGRAM = """
from toolbox import Container, sql

container = Container().register(sql.engine, *sql.stores)
without_stores = Container().register(sql.engine)
"""
_numbers = itertools.count(1)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with a program."""
    name = f"shop_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def run_migrate(shop: str, url: str, *arguments: str, target: str = "container") -> Result:
    """Run `toolbox migrate`. In this process: another one needs seconds to start."""
    sys.modules.pop(shop, None)  # a process imports it once
    return CliRunner().invoke(app, ["migrate", f"{shop}:{target}", *arguments], env={"TOOLBOX_SQL__URL": url})


def container_at(url: str, *beans: object, replies: list[Any] | None = None, **options: Any) -> Container:
    settings = ToolboxSettings(sql=SqlSettings(url=url, **options))
    models = {"default": ScriptedChatModel(replies or [])}
    return Container(models=models, settings=settings, seeds=[SecurityIdentity]).register(sql.engine, *beans)


async def start(container: Container) -> None:
    async with container:
        pass


# --- databases of earlier releases


async def create_version_1(url: str) -> None:
    """Create a database as the first release with runs has left it, and a run that no release can read."""
    async with sql.open_engine(url) as engine:
        await migrate(engine, "toolbox_runs", FirstRunTables("toolbox_runs").steps())
        await migrate(engine, "toolbox_conversations", ConversationTables("toolbox_conversations").steps()[:1])
        lines = ROWS.read_text(encoding="utf-8").splitlines()[1:]
        broken = "INSERT INTO toolbox_runs SELECT 'broken', service, method, 'suspended', 0, 0, NULL, 0, 0, '{\"a'"
        async with engine.begin() as connection:
            for line in (*lines, f"{broken} FROM toolbox_runs LIMIT 1;"):
                await connection.exec_driver_sql(line)
            await connection.exec_driver_sql(
                "INSERT INTO toolbox_runs_leases (run_id, generation, until, events) VALUES ('broken', 0, 0, 0)"
            )


async def test_runs_of_the_first_release_are_listed_and_continue(database_url: str) -> None:
    await create_version_1(database_url)
    async with container_at(database_url, *sql.stores, Desk, replies=["refunded"]) as container:
        listed = await container.runs.list()
        by_status = {status: [run for run in listed if run.status == status] for status in ("failed", "cancelled")}
        of_ann = await container.runs.list(started_by="ann")
        waiting = await container.runs.list(waiting_longer_than=timedelta(0))
        oldest = min((run for run in of_ann if run.pending), key=lambda run: run.created_at)
        result = await container.runs.resume(oldest.id, {"0": approve()}, by="carl")
        after: Run[Any] = await container.runs.get(oldest.id)

    assert len(listed) == 7
    assert by_status["failed"][0].error == "LookupError: the model is away"
    assert [entry.reason for entry in by_status["cancelled"][0].history] == ["a mistake"]
    assert "RunIncompatibleError" in str(next(run for run in listed if run.id == "broken").error)
    assert {run.status for run in of_ann} == {"suspended", "cancelled"}
    assert {run.started_by for run in listed} == {"ann", "bob", "\U0001f99c", None}
    assert [run.id for run in waiting] == [run.id for run in listed if run.status == "suspended"]
    assert dict(oldest.pending[0].arguments) == {"order": "A-7", "euros": 5}
    assert result.content == "refunded"
    assert (after.status, after.history[0].by) == ("completed", "carl")


async def test_conversations_have_their_runs_of_the_first_release(database_url: str) -> None:
    """It has stored the id of a conversation only among the arguments of its runs."""
    await create_version_1(database_url)
    async with container_at(database_url, *sql.stores, Desk) as container:
        stopped = container.conversations.of(Desk, "room 1")
        run = await stopped.run()
        assert (run and run.status, run and run.memory_id) == ("suspended", "room 1")
        assert await stopped.stop(by="ann")
        assert [entry.state for entry in await stopped.history()] == ["stopped"] * 3
        [waiting] = await container.runs.list(memory_id="room 5", service=Desk)
        counts = await container.conversations.forget(service=Desk, memory_id="room 6")
        left = {each.memory_id for each in await container.runs.list(service=Desk) if each.id != "broken"}

    assert waiting.status == "suspended"
    assert counts["runs"] == 1
    assert left == {"room 1", "room 2", "room 3", "room 4", "room 5"}


async def test_lists_show_what_a_worker_of_the_earlier_release_still_writes(database_url: str) -> None:
    """While programs are replaced, old ones change headers, but do not know the new columns."""
    await create_version_1(database_url)
    async with container_at(database_url, *sql.stores, Desk) as container:
        run = (await container.runs.list(started_by="ann"))[0]
        await container.runs.cancel(run.id, "by the new one")
        async with (await container.aget(AsyncEngine)).begin() as connection:
            document = json.loads(
                (await connection.scalar(text(f"SELECT document FROM toolbox_runs WHERE id = '{run.id}'"))) or ""
            )
            document["reason"] = "by the old one"
            await connection.execute(
                text("UPDATE toolbox_runs SET document = :document, version = version + 1 WHERE id = :id"),
                {"document": json.dumps(document), "id": run.id},
            )

        [shown] = [each for each in await container.runs.list() if each.id == run.id]

    assert shown.error == "by the old one"


async def test_lists_do_not_read_what_they_do_not_show(database_url: str) -> None:
    large = "x" * 1_000_000
    async with container_at(database_url, *sql.stores, Desk, replies=["done"] * 3) as container:
        runs = [await container.runs.start(Desk.chat, f"room {number}", large) for number in range(3)]
        for run in runs:
            await container.runs.result(run)
        store = await container.runs.store()
        found = await store.find()
        whole = await store.load(runs[-1].id)

    assert len(found) == 3
    assert max(len(each.document) for each in found) < 1000
    assert whole is not None
    assert len(whole.document) > len(large)


# --- `toolbox migrate`


def test_the_command_creates_all_tables_and_then_has_nothing_to_do(
    shop: str, tmp_path: Path, database_url: str
) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TOOLBOX_SQL__URL": database_url}
    command = ["-m", "toolbox.cli", "migrate", f"{shop}:container"]
    created, again = programs.run(command, tmp_path, environment), run_migrate(shop, database_url)

    assert (created.returncode, again.exit_code) == (0, 0), created.stderr + again.stderr
    assert "toolbox_runs created, version 6" in created.stdout
    assert "toolbox_conversations created" in created.stdout
    assert "nothing to do" in again.stdout
    assert "password" not in created.stdout
    asyncio.run(start(container_at(database_url, *sql.stores, migrate=False)))


async def test_the_command_migrates_a_database_of_an_earlier_release(shop: str, database_url: str) -> None:
    await create_version_1(database_url)
    with pytest.raises(IllegalConfigurationError, match="version 1, but this release needs version 6"):
        await start(container_at(database_url, *sql.stores, migrate=False))

    done = await asyncio.to_thread(run_migrate, shop, database_url)

    assert (done.exit_code, done.stderr) == (0, "")
    assert "toolbox_runs migrated from 1, version 6" in done.stdout
    await start(container_at(database_url, *sql.stores, migrate=False))


@pytest.mark.parametrize("is_old", [False, True], ids=["a new database", "a database of an earlier release"])
async def test_the_printed_statements_do_the_same(shop: str, database_url: str, is_old: bool) -> None:
    if is_old:
        await create_version_1(database_url)
    printed = await asyncio.to_thread(run_migrate, shop, database_url, "--sql")
    assert printed.exit_code == 0, printed.stderr
    with pytest.raises(IllegalConfigurationError, match="toolbox migrate"):  # nothing has changed
        await start(container_at(database_url, *sql.stores, migrate=False))

    await asyncio.to_thread(execute_script, database_url, printed.stdout)

    async with container_at(database_url, *sql.stores, Desk, migrate=False) as container:
        assert len(await container.runs.list(started_by="ann")) == (2 if is_old else 0)
    again = await asyncio.to_thread(run_migrate, shop, database_url, "--sql")
    assert again.exit_code == 0
    assert [line for line in again.stdout.splitlines() if not line.startswith("--")] == []


def execute_script(url: str, script: str) -> None:
    """Execute statements as `psql` or `sqlite3` do."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        connection.executescript(script)
        connection.close()
        return
    import psycopg

    with psycopg.connect(url, autocommit=True) as server:
        server.execute(script.encode())


def test_a_program_without_stores_has_nothing_to_do(shop: str, sqlite_url: str) -> None:
    done = run_migrate(shop, sqlite_url, target="without_stores")

    assert (done.exit_code, done.stdout) == (0, "There are no stores in SQL databases.\n")


def test_a_database_that_cannot_be_reached_is_named(shop: str) -> None:
    done = run_migrate(shop, "postgresql://app:secret@127.0.0.1:1/shop")

    assert done.exit_code == 1
    assert "ConnectionRefusedError" in done.stderr
    assert "secret" not in done.stdout + done.stderr


async def test_a_step_that_fails_changes_no_store(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolbox.sql.migrations import StoreTables, migrate_stores

    def fails(connection: Any) -> None:
        connection.execute(text("CREATE TABLE half (a INTEGER)"))
        raise LookupError("half done")

    async with sql.open_engine(database_url) as engine, sql.open_engine(database_url) as other:
        tables: list[StoreTables] = [SqlRunStore(engine).store_tables, SqlChatMemoryStore(other).store_tables]
        broken = tables[1].schema
        tables[1].schema = type(broken)(broken.name, (*broken.steps, fails), broken.tables)
        with pytest.raises(LookupError):
            await migrate_stores(tables)

        for store in (SqlRunStore(engine, migrate=False).open(), SqlChatMemoryStore(engine, migrate=False).ready()):
            with pytest.raises(IllegalConfigurationError, match="missing"):
                await store


# --- stores that only check


@pytest.mark.parametrize("store", sql.stores)
async def test_a_missing_table_is_a_problem_at_start(database_url: str, store: type[Any]) -> None:
    with pytest.raises(IllegalConfigurationError, match=r"missing.*toolbox migrate"):
        await start(container_at(database_url, store, migrate=False))


async def test_all_stores_whose_tables_do_not_fit_are_named_in_one_error(database_url: str) -> None:
    with pytest.raises(IllegalConfigurationError) as caught:
        await start(container_at(database_url, *sql.stores, migrate=False))

    places = [each.where for each in caught.value.problems]
    assert places == ["the tables of toolbox_conversations", "the tables of toolbox_runs"]
    assert all("toolbox migrate" in each.fix for each in caught.value.problems)


@pytest.mark.parametrize("store", sql.stores)
async def test_a_newer_table_is_a_problem_at_start(database_url: str, store: type[Any]) -> None:
    async with sql.open_engine(database_url) as engine:
        await SqlRunStore(engine).open()
        await SqlChatMemoryStore(engine).ready()
        async with engine.begin() as connection:
            await connection.execute(text("UPDATE toolbox_schemas SET version = 99"))

    with pytest.raises(IllegalConfigurationError, match=r"version 99.*toolbox migrate"):
        await start(container_at(database_url, store, migrate=False))


async def test_options_are_arguments_or_settings(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_SQL__MIGRATE", "false")
    monkeypatch.setenv("TOOLBOX_SQL__URL", sqlite_url)
    with pytest.raises(IllegalConfigurationError, match="toolbox migrate"):
        await start(Container().register(sql.engine, *sql.stores))
    async with sql.open_engine(sqlite_url) as engine:
        await SqlRunStore(engine, migrate=True).open()
        with pytest.raises(IllegalConfigurationError, match="toolbox migrate"):
            await SqlRunStore(engine, table="others", migrate=False).open()


# --- rights


@pytest.fixture
def new_user(postgres_url: str) -> Iterator[Callable[..., str]]:
    """Creates a user of the database, who may not create tables; returns the user's URL."""
    import psycopg

    names: list[str] = []
    with psycopg.connect(postgres_url, autocommit=True, application_name="tests") as connection:

        def create(*grants: str) -> str:
            name = f"app_{os.getpid()}_{next(_numbers)}"
            names.append(name)
            connection.execute(f"CREATE USER {name} PASSWORD 'secret'".encode())
            connection.execute(b"REVOKE CREATE ON SCHEMA public FROM PUBLIC")
            connection.execute(f"GRANT USAGE ON SCHEMA public TO {name}".encode())
            for grant in grants:
                connection.execute(f"GRANT {grant} TO {name}".encode())
            return with_user(postgres_url, name)

        yield create
        for name in names:
            connection.execute(f"DROP OWNED BY {name}; DROP USER {name}".encode())


def with_user(url: str, name: str) -> str:
    from sqlalchemy import make_url

    return make_url(url).set(username=name, password="secret").render_as_string(hide_password=False)


CONVERSATIONS = "toolbox_conversations"
ROWS_ONLY = (
    "SELECT ON toolbox_schemas",
    "SELECT, INSERT, UPDATE, DELETE ON toolbox_runs, toolbox_runs_leases, toolbox_runs_records, toolbox_runs_events",
    "SELECT, INSERT, UPDATE, DELETE ON toolbox_runs_messages",
    f"SELECT, INSERT, UPDATE, DELETE ON {', '.join(each.name for each in ConversationTables(CONVERSATIONS).tables)}",
    "USAGE ON SEQUENCE toolbox_runs_records_number_seq",
)


async def test_a_user_with_rights_on_rows_only_runs_the_program(
    shop: str, postgres_url: str, new_user: Callable[..., str]
) -> None:
    assert (await asyncio.to_thread(run_migrate, shop, postgres_url)).exit_code == 0
    key = ChatMemoryKey("shop.Desk", "room 7")

    for migrates in (False, True):  # a database that is up to date needs no right to create tables
        url = new_user(*ROWS_ONLY)
        async with container_at(url, *sql.stores, Desk, replies=["done"], migrate=migrates) as container:
            run = await container.runs.start(Desk.chat, "room 7", "hello")
            assert await container.runs.result(run.id) == "done"
            assert await container.runs.purge(timedelta(0)) == 1
            conversations = await container.aget(SqlChatMemoryStore)
            await conversations.update_messages(key, [UserMessage("a")])
            await conversations.delete_messages(key)


async def test_a_user_who_may_not_create_tables_gets_a_clear_error(new_user: Callable[..., str], shop: str) -> None:
    url = new_user()
    with pytest.raises(IllegalConfigurationError, match=r"permission denied.*toolbox migrate.*TOOLBOX_SQL__MIGRATE"):
        await start(container_at(url, SqlRunStore))
    done = await asyncio.to_thread(run_migrate, shop, url)
    assert done.exit_code == 1
    assert "permission denied" in done.stderr


@pytest.mark.parametrize("missing", range(len(ROWS_ONLY)))
async def test_a_missing_right_is_named_at_start(
    shop: str, postgres_url: str, new_user: Callable[..., str], missing: int
) -> None:
    await asyncio.to_thread(run_migrate, shop, postgres_url)
    grants = [each for number, each in enumerate(ROWS_ONLY) if number != missing]
    runs, conversations = "SELECT on toolbox_runs", "SELECT on toolbox_conversations"
    names = ("toolbox_schemas", runs, f"{runs}_messages", conversations, "sequence")

    with pytest.raises(IllegalConfigurationError, match=names[missing]):
        await start(container_at(new_user(*grants), *sql.stores, migrate=False))


# --- `sql.stores`


async def test_a_store_of_the_programs_own_replaces_the_one_of_its_kind(sqlite_url: str) -> None:
    class Own(sql.SqlRunStore):
        pass

    async with sql.open_engine(sqlite_url) as engine:
        given = SqlRunStore(engine, lease=7)
        container = container_at(sqlite_url, *sql.stores).register_instance(given, SqlRunStore)
        async with container:
            assert await container.runs.store() is given
            assert isinstance(await container.aget(SqlChatMemoryStore), SqlChatMemoryStore)
        async with container_at(sqlite_url, *sql.stores, Own) as container:
            assert type(await container.runs.store()) is Own
        async with container_at(sqlite_url, Own, *sql.stores) as container:
            assert type(await container.runs.store()) is Own
