"""Statements are judged by their SQL: none that wrote, locked or set something in a database counts as reading."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from toolbox.sql.transaction_notes import judge_statement

FUNCTIONS = ("make_order", "prüfe", "é", "🔒", "a\u00a0b", "select", "by", "filter", "is", "join", "like", "sets", "_1")
"""Names of one function, which writes a row."""

CREATE = """
    CREATE TABLE users (id int, name text, tags text[]);
    INSERT INTO users VALUES (1, 'Ada', '{a,b}');
    CREATE TYPE pair AS (a int, b int);
    CREATE FUNCTION of_pair(pair) RETURNS int LANGUAGE plpgsql AS $$ BEGIN RETURN make_order(); END $$;
"""
CREATE_FUNCTION = """
    CREATE FUNCTION "{}"(VARIADIC given text[] DEFAULT '{{}}') RETURNS int LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO users VALUES (2); RETURN 1; END $$;
"""

Effects = Callable[[str], bool]


@pytest.fixture(scope="module")
def has_effects(postgres: Any) -> Iterator[Effects]:
    """Executes a statement on PostgreSQL. Returns True if it has written or locked a row; invalid ones have not."""
    import psycopg

    from tests.databases.conftest import new_database

    with new_database(postgres) as url, psycopg.connect(url, autocommit=True) as connection:
        connection.execute(CREATE)
        for each in FUNCTIONS:
            connection.execute(CREATE_FUNCTION.format(each))

        def execute(statement: str) -> bool:
            with connection.transaction(force_rollback=True):
                try:
                    connection.execute(statement)
                except psycopg.Error:
                    return False
                return connection.execute("SELECT pg_current_xact_id_if_assigned()").fetchone() != (None,)

        yield execute


def is_kept(statement: str, dialect: str = "postgresql") -> bool:
    return judge_statement(statement, None, dialect) is not None


WRITE = [
    "SELECT make_order() IS DISTINCT FROM 1",
    "SELECT make_order() IS NOT DISTINCT FROM 1",
    "SELECT 1 WHERE make_order() IS DISTINCT FROM 2",
    "SELECT * FROM ROWS FROM (make_order())",
    "SELECT * FROM ROWS FROM (make_order(), generate_series(1, 2)) AS f (a, b)",
    "SELECT * FROM LATERAL make_order()",
    "SELECT * FROM public.make_order() AS f",
    "SELECT * FROM (make_order() CROSS JOIN generate_series(1, 2))",
    "SELECT * FROM (VALUES (make_order())) AS v (a)",
    "SELECT make_order() FROM (SELECT 1) AS s",
    "SELECT make_order() FROM (VALUES (1)) AS v",
    "SELECT make_order() FROM generate_series(1, 2)",
    "SELECT 1 UNION VALUES (make_order())",
    "SELECT id FROM users UNION VALUES (make_order())",
    "SELECT id FROM users UNION ALL SELECT make_order()",
    "SELECT make_order() AS from LIMIT 1",
    "SELECT make_order() AS from ORDER BY 1",
    "SELECT 1 AS as INTO others FROM users",
    "SELECT ARRAY[make_order()]",
    "SELECT (ARRAY[1, 2])[1:make_order()]",
    "SELECT prüfe()",
    "SELECT é()",
    "SELECT 🔒 ()",
    "SELECT a\u00a0b()",
    'SELECT "select"()',
    "SELECT public.select()",
    "SELECT filter('a')",
    "SELECT by('a')",
    "SELECT sets('a')",
    "SELECT is('a')",
    "SELECT join('a')",
    "SELECT like('a')",
    "SELECT 1 WHERE 1 = like('a')",
    "SELECT (ROW(1, 2)::pair).of_pair",
    "SELECT make_order/* a comment */ ()",
    "SELECT name FROM users FOR/**/SHARE",
    "SELECT name FROM users FOR -- a comment\n SHARE",
    "SELECT name FROM users FOR /* ' */ KEY /* ' */ SHARE",
    "SELECT name FROM users FOR NO/**/KEY/**/UPDATE",
    "SELECT name FROM users -- a comment\r FOR SHARE",
    "SELECT name FROM users /* /* */ */ FOR SHARE",
    "SELECT (SELECT id FROM users FOR SHARE)",
    "SELECT name /**/INTO/**/ others FROM users",
    'SELECT U&"make\\005forder"()',
    "SELECT U&\"make!005forder\" UESCAPE '!' ()",
    "SELECT $a$'$a$, make_order(), $a$'$a$",
    "SELECT E'\\'', make_order(), E'\\''",
]


@pytest.mark.parametrize("statement", WRITE)
def test_statements_that_write_or_lock_are_kept(statement: str, has_effects: Effects) -> None:
    assert has_effects(statement)
    assert is_kept(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT set_config/* a comment */('a.b', name, true) FROM users",
        "SELECT pg_advisory_xact_lock(id) FROM users",
        "SELECT pg_export_snapshot() FROM users",
        "SELECT lo_create(0) FROM users",
        'SELECT "lo_open"(1, 2) FROM users',
        "SELECT dblink_exec('INSERT INTO a VALUES (1)') FROM users",
        "SELECT 1 `f()` 2 FROM users",
        "SET/**/LOCAL a.b = 'x'",
    ],
)
def test_statements_that_do_more_than_read_rows_are_kept(statement: str) -> None:
    assert is_kept(statement)


@pytest.mark.parametrize("statement", ["SELECT [abs](-1)", "SELECT 1 [a'], abs(-1), 2 [b']", "SELECT `abs`(-1)"])
def test_names_in_the_marks_of_sqlite_may_be_functions(statement: str) -> None:
    assert is_kept(statement, "sqlite")


@pytest.mark.parametrize("statement", ["SELECT 1 # ' \n, f() # '", "SELECT 5--1, f()", "SELECT 1 /*! , f() */"])
def test_a_text_for_another_database_is_kept(statement: str) -> None:
    assert is_kept(statement, "mysql")
    assert is_kept("SELECT name FROM users", "mysql")


READ = [
    "SELECT id FROM users WHERE name IS DISTINCT FROM 'Ada'",
    "SELECT lower(name) IS NOT DISTINCT FROM 'ada' FROM users",
    "SELECT count(*) FROM (SELECT id FROM users) AS some",
    "SELECT lower(some.name) FROM ((SELECT name FROM users UNION SELECT name FROM users)) AS some",
    "SELECT upper(name) FROM ONLY users",
    "SELECT upper(name) FROM ONLY (users)",
    "SELECT upper(a.name) FROM (users AS a JOIN users AS b ON a.id = b.id)",
    "SELECT upper(name) FROM generate_series(1, 2) AS n JOIN users ON users.id = n",
    "SELECT upper(name) FROM (VALUES (1, 'x'), (2, 'y')) AS v (a, b), users WHERE id = a",
    "SELECT upper(tag) FROM users, unnest(tags) AS tag",
    "SELECT replace(name, 'a', 'b') FROM users",
    "SELECT extract(year FROM now()), substring(name FROM 1 FOR 2) FROM users",
    "SELECT count(*) FILTER (WHERE id > 1) OVER (PARTITION BY (name) ORDER BY (id)) FROM users",
    "SELECT name FROM users GROUP BY GROUPING SETS ((name))",
    "SELECT tags[1], tags[1:2], ARRAY['a', 'b'] FROM users",
    "SELECT name FROM users WHERE name LIKE ('a') OR name IN ('b') OR id = ANY (ARRAY[1, 2])",
    "SELECT CAST(id AS numeric(10, 2)), name::varchar(10) FROM users",
    "SELECT name -- a comment FOR UPDATE\nFROM users /* into, with */;",
    "SELECT CASE WHEN (id = 1) THEN ('a') ELSE ('b') END FROM users",
    "SELECT 1 WHERE 1 IS DISTINCT FROM 2",
    "SELECT v.a FROM (VALUES (1), (2)) AS v (a)",
    'SELECT größe FROM (SELECT id AS größe FROM users) AS "Maße"',
    "SELECT $1, '🔒' FROM users".replace("$1", "1"),
]


@pytest.mark.parametrize("statement", READ)
def test_statements_that_read_are_released(statement: str, has_effects: Effects) -> None:
    assert not has_effects(statement)
    assert not is_kept(statement)


# --- statements of SQLAlchemy


class Base(DeclarativeBase): ...


class Node(Base):
    __tablename__ = "nodes"
    id: Mapped[int] = mapped_column(primary_key=True)
    parent: Mapped[int]
    name: Mapped[str]


def is_built_kept(statement: Any) -> bool:
    return judge_statement(str(statement.compile(dialect=postgresql.dialect())), statement, "postgresql") is not None  # type: ignore[no-untyped-call]


def test_functions_of_a_named_subquery_are_released_if_it_has_a_table() -> None:
    named, constant = select(Node.id).cte("named"), select(func.abs(1).label("id")).cte("constant")
    tree = select(Node.id, Node.name).where(Node.parent == 0).cte("tree", recursive=True)
    tree = tree.union_all(select(Node.id, func.concat(tree.c.name, Node.name)).where(Node.parent == tree.c.id))

    assert not is_built_kept(select(func.count()).select_from(named))
    assert not is_built_kept(select(func.upper(tree.c.name)))
    assert not is_built_kept(select(func.count()).select_from(select(Node).subquery()))
    assert is_built_kept(select(constant.c.id))
    assert is_built_kept(select(func.abs(select(Node.id.label("a")).where(False).cte("x").c.a)).select_from(constant))


# --- generated statements: all but the last kind read no table


def _sql(*parts: Any) -> st.SearchStrategy[str]:
    return st.tuples(*(st.just(each) if isinstance(each, str) else each for each in parts)).map(" ".join)


@st.composite
def calls(draw: st.DrawFn) -> str:
    name, schema = draw(st.sampled_from(FUNCTIONS)), draw(st.sampled_from(["", "public.", "public . "]))
    quoted, gap = draw(st.sampled_from(["", '"'])), draw(st.sampled_from(["", " ", "/* FROM users */", "-- x\n"]))
    given = draw(st.sampled_from(["", "'a'", "'a', 'b'"]))
    return f"{schema}{quoted}{name}{quoted}{gap}({given})"


def _numbers(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        _sql("(", inner, st.sampled_from(["IS DISTINCT FROM", "IS NOT DISTINCT FROM", "="]), inner, ") :: int"),
        _sql(inner, "+", inner),
        _sql("COALESCE (", inner, ",", inner, ")"),
        _sql("CASE WHEN", inner, "IS DISTINCT FROM", inner, "THEN", inner, "ELSE", inner, "END"),
        _sql("COALESCE ( ( ARRAY [", inner, ", 2 ] ) [", inner, "] , 1 )"),
        _sql("( ( ARRAY [ 1 , 2 ] ) [ 1 :", inner, "] IS NULL ) :: int"),
        _sql("CAST (", inner, "AS numeric ( 10 , 2 ) ) :: int"),
        _sql("(", inner, "IN (", inner, ",", inner, ") ) :: int"),
        _sql("( EXISTS ( SELECT", inner, ") ) :: int"),
        _sql("( SELECT", inner, ")"),
        _sql("extract ( day FROM interval '1day' *", inner, ") :: int"),
    )


NUMBERS = st.recursive(st.sampled_from(["1", "2.5::int", "'7'::int", "E'7'::int"]) | calls(), _numbers, max_leaves=4)
VALUES = NUMBERS | _sql(NUMBERS, st.sampled_from(["IS DISTINCT FROM", "IS NOT DISTINCT FROM"]), NUMBERS)
LABELS = st.sampled_from(["", "AS from", "AS into", "AS select", "AS as", "AS values", 'AS " FROM users"', "AS é", "x"])
TABLES = st.one_of(
    _sql("( SELECT", VALUES, LABELS, ")"),
    _sql("( VALUES (", VALUES, ") )"),
    _sql("LATERAL ( SELECT", VALUES, ")"),
    calls(),
    _sql("LATERAL", calls()),
    _sql("ROWS FROM (", calls(), ")"),
    _sql("(", calls(), "AS a CROSS JOIN", calls(), "AS b )"),
)
SELECTS = st.one_of(
    _sql("SELECT", VALUES, LABELS),
    _sql("SELECT", VALUES, LABELS, ",", VALUES, LABELS),
    _sql("SELECT", VALUES, LABELS, "FROM", TABLES, "AS one"),
    _sql("SELECT * FROM", TABLES, "AS one ,", TABLES, "AS two"),
    _sql("SELECT * FROM", TABLES, "AS one JOIN", TABLES, "AS two ON", NUMBERS, "= 1"),
    _sql("SELECT", "1", "WHERE", NUMBERS, "IS DISTINCT FROM", NUMBERS),
    _sql("SELECT", NUMBERS, LABELS, st.sampled_from(["UNION", "UNION ALL", "EXCEPT"]), "SELECT", NUMBERS),
    _sql("SELECT", NUMBERS, LABELS, "UNION ALL VALUES (", NUMBERS, ")"),
    _sql("SELECT 1", LABELS, "FROM users FOR", st.sampled_from(["SHARE", "UPDATE", "KEY SHARE", "NO KEY UPDATE"])),
)
ENDS = st.sampled_from(["", "LIMIT 1", "ORDER BY 1", "FETCH FIRST 1 ROW ONLY", "OFFSET 0", ";"])


@st.composite
def statements(draw: st.DrawFn) -> str:
    """A statement with comments between its parts."""
    words = f"{draw(SELECTS)} {draw(ENDS)}".split(" ")
    gaps = draw(
        st.lists(st.sampled_from([" ", " ", " ", "\n", "/**/ ", "/* ' */", "-- it's\n", "-- \r\n"]), min_size=1)
    )
    return "".join(f"{word}{gaps[number % len(gaps)]}" for number, word in enumerate(words))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(statement=statements())
def test_no_generated_statement_that_writes_or_locks_is_taken_for_reading(statement: str, has_effects: Effects) -> None:
    if has_effects(statement):
        assert is_kept(statement)
