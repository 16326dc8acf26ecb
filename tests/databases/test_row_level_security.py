"""Programs of the documentation with row-level security, on a real server, with a user whose rows it restricts."""

import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from tests import programs
from tests.test_documents import ROOT, blocks_of, environment

pytestmark = pytest.mark.timeout(400)  # starts a process


@pytest.fixture
def user_url(postgres_url: str) -> Iterator[str]:
    """The database as a user who may create tables, but is not a superuser."""
    name = f"app_{os.getpid()}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN")
        connection.execute(f"GRANT CREATE, USAGE ON SCHEMA public TO {name}")
        yield make_url(postgres_url).set(username=name).render_as_string(hide_password=False)
        connection.execute(f"DROP OWNED BY {name}")
        connection.execute(f"DROP ROLE {name}")


@pytest.mark.parametrize("page", ["databases.md", "retrieval.md"])
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_each_tenant_sees_its_own_rows_also_after_a_connection_was_given_back(
    page: str, driver: str, user_url: str, tmp_path: Path
) -> None:
    [program] = [each for each in blocks_of(ROOT / "docs" / page) if "ROW LEVEL SECURITY" in each.text]
    (tmp_path / "program.py").write_text(program.text, encoding="utf-8")
    url = user_url.replace("postgresql:", f"postgresql+{driver}:")

    done = programs.run(["-W", "error", "program.py"], tmp_path, environment() | {"TOOLBOX_SQL__URL": url})

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no warning: no transaction was kept
    assert done.stdout == program.prints
