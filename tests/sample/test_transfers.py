"""The money transfer of the sample: booked once, also if its worker is killed; the page shows the ledger."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import OperationalError

from tests import programs

ROOT = Path(__file__).parent.parent.parent
START = """
import asyncio
from sample_app.transfers import TransferAgent, transfer_container
from toolbox.runs import RunEngine
class Nobody:
    async def submit(self, run_id, generation): pass
async def main():
    async with transfer_container(take_over_runs=False).register_instance(Nobody(), RunEngine) as container:
        await container.runs.start(TransferAgent.transfer, "order-7", "ann", "bob", 1250)
asyncio.run(main())
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    known = {key: value for key, value in os.environ.items() if not key.startswith(("OPENAI_", "TOOLBOX_"))}
    return known | {
        "PYTHONPATH": str(ROOT),
        "TOOLBOX_SQL__URL": f"sqlite:///{tmp_path}/bank.sqlite",
        "TRANSFER_LEASE": "2",
    }


def rows(environment: dict[str, str], statement: str) -> list[tuple[Any, ...]]:
    engine = create_engine(environment["TOOLBOX_SQL__URL"], poolclass=NullPool)
    try:
        with engine.connect() as connection:
            return [tuple(each) for each in connection.execute(text(statement))]
    except OperationalError:
        return []  # no tables yet


def until(holds: Any) -> None:
    end = time.monotonic() + 100
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@contextmanager
def worker(environment: dict[str, str], pause: str) -> Iterator["subprocess.Popen[str]"]:
    arguments = programs.command("-m", "toolbox.cli", "worker", "--quiet", "sample_app.transfers:container")
    running = subprocess.Popen(arguments, env=environment | {"TRANSFER_PAUSE": pause}, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_worker_loses_no_money(environment: dict[str, str]) -> None:
    subprocess.run(programs.command("-c", START), env=environment, check=True)

    with worker(environment, "60") as running:
        until(lambda: rows(environment, "SELECT 1 FROM toolbox_runs_records WHERE key = '1#start'"))
        running.send_signal(signal.SIGKILL)
        running.wait()
    assert rows(environment, "SELECT account, cents FROM ledger") == [("ann", -1250)]
    with worker(environment, "0"):
        until(lambda: rows(environment, "SELECT status FROM toolbox_runs") == [("completed",)])

    assert rows(environment, "SELECT account, cents FROM ledger") == [("ann", -1250), ("bob", 1250)]


@pytest.mark.anyio
async def test_the_page_shows_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx2

    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOOLBOX_SQL__URL", f"sqlite:///{tmp_path}/page.sqlite")
    monkeypatch.setenv("TRANSFER_PAUSE", "0")
    from sample_app.transfers import app

    order = {"id": "order-7", "payer": "ann", "payee": "bob", "cents": 1250}
    transport = httpx2.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://app") as client,
    ):
        started = [await client.post("/transfers", json=order) for _ in range(2)]
        events = await client.get("/transfers/order-7/events")
        page = await client.get("/")
        other = await client.post("/transfers", json={**order, "cents": 1})

    assert [each.status_code for each in started] == [202, 202]
    assert "event: RunEnded" in events.text
    assert page.text.count("<td>-12.50") == page.text.count("<td>12.50") == 1
    assert "Sum: 0.00" in page.text
    assert other.status_code == 409
