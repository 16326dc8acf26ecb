"""Alembic proposes nothing for the tables of the stores: the `env.py` of the documentation, run by Alembic itself."""

import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from sqlalchemy import inspect, text

from tests import programs
from tests.test_documents import ROOT, blocks_of
from toolbox import ToolboxSettings, sql
from toolbox.settings import SqlSettings
from toolbox.sql.migrations import migrate_stores

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]  # starts processes

MODELS = """
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    {column}
"""


class Project:
    """A folder with models and migrations, as `alembic init` makes it, with the `env.py` of the page."""

    def __init__(self, folder: Path, url: str) -> None:
        pytest.importorskip("alembic")
        self.folder, self.url = folder, url
        self.write_models("")
        self.alembic("init", "migrations")
        [env] = [each.text for each in blocks_of(ROOT / "docs" / "alembic.md") if each.language == "python"]
        (folder / "migrations" / "env.py").write_text(env, encoding="utf-8")

    def write_models(self, column: str) -> None:
        (self.folder / "shop.py").write_text(MODELS.format(column=column), encoding="utf-8")

    def alembic(self, *arguments: str) -> CompletedProcess[str]:
        environment = {**os.environ, "TOOLBOX_SQL__URL": self.url, "PYTHONPATH": f"{ROOT}{os.pathsep}{self.folder}"}
        done = programs.run(["-m", "alembic", *arguments], self.folder, environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def propose(self, name: str) -> str:
        """Return the migration that Alembic generates."""
        self.alembic("revision", "--autogenerate", "-m", name)
        [path] = (self.folder / "migrations" / "versions").glob(f"*_{name}.py")
        return path.read_text(encoding="utf-8")


async def table_names(url: str) -> set[str]:
    async with sql.open_engine(url) as engine, engine.connect() as connection:
        return set(await connection.run_sync(lambda found: inspect(found).get_table_names()))


async def migrate_all_stores(url: str) -> None:
    settings = ToolboxSettings(sql=SqlSettings(url=url))
    async with sql.open_engine(url) as engine:
        await migrate_stores([each(engine, settings=settings).store_tables for each in sql.stores])


async def test_autogenerate_leaves_the_tables_of_the_stores_alone(database_url: str, tmp_path: Path) -> None:
    await migrate_all_stores(database_url)
    of_stores = await table_names(database_url)
    project = Project(tmp_path, database_url)

    created = project.propose("orders")
    project.alembic("upgrade", "head")
    project.write_models("note: Mapped[str | None]")
    changed = project.propose("note")
    project.alembic("upgrade", "head")

    assert "op.create_table('orders'" in created
    assert "op.add_column('orders'" in changed
    assert not any(each in created + changed for each in of_stores)
    project.alembic("check")
    assert await table_names(database_url) == of_stores | {"orders", "alembic_version"}


async def test_every_table_of_the_stores_is_known_and_no_other(database_url: str) -> None:
    await migrate_all_stores(database_url)
    of_stores = await table_names(database_url)
    async with sql.open_engine(database_url) as engine, engine.begin() as connection:
        await connection.execute(text("CREATE TABLE toolbox_orders (id INTEGER)"))

    assert len(of_stores) >= 6
    assert all(map(sql.is_store_table, of_stores))
    assert not any(
        map(sql.is_store_table, ["toolbox_orders", "orders", "toolbox", "toolbox_runs_records_key", "", None])
    )


async def test_tables_with_other_names_are_known_when_their_store_was_created(sqlite_url: str) -> None:
    assert not sql.is_store_table("agent_runs_events")
    async with sql.open_engine(sqlite_url) as engine:
        await sql.SqlRunStore(engine, table="agent_runs").open()
    assert all(map(sql.is_store_table, await table_names(sqlite_url)))
