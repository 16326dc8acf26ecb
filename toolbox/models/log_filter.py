"""Keeps what may be a key in a query out of the log: httpx2 writes the address of each request there.

Not here: addresses in errors (`server_errors`), which show no query either.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass


@dataclass(frozen=True)
class WithoutQuery(logging.Filter):
    """Cuts the query off addresses that begin with `address`."""

    address: str

    def filter(self, record: logging.LogRecord) -> bool:
        """Changes the record; it stays."""
        if isinstance(record.args, tuple):
            record.args = tuple(self._shown(each) for each in record.args)
        return True

    def _shown(self, value: object) -> object:
        if type(value).__name__ != "URL":
            return value
        address, query, _ = str(value).partition("?")
        return f"{address}?…" if query and address.startswith(self.address) else value


def hide_queries(address: str) -> None:
    """From now on, what is logged of requests to `address` shows no query."""
    logging.getLogger("httpx2").addFilter(WithoutQuery(address.rstrip("/")))  # adding an equal one changes nothing
