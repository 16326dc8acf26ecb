"""Old and new workers take the same runs while a new version of their program is deployed."""

import asyncio

import pytest

from . import deploys
from .forge import create_tables

pytestmark = pytest.mark.anyio


async def test_each_payment_is_made_once_while_a_new_version_is_deployed(database_url: str) -> None:
    await asyncio.to_thread(create_tables, database_url, deploys.TABLES)
    names = [f"payment {number}" for number in range(20)]
    await deploys.start(database_url, 1.0, "old", names[:10])
    await deploys.start(database_url, 1.0, "new", names[10:])
    async with deploys.bank(database_url, 1.0, "old", take_over=True):
        await deploys.work(database_url, 1.0, "new", len(names))
    await asyncio.to_thread(deploys.check_payments, database_url, len(names))
