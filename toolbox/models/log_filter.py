"""Removes queries from addresses that httpx2 logs, because a query may contain a key.

Not here: addresses in errors (`server_errors`), which are shown without a query, too.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass


@dataclass(frozen=True)
class WithoutQuery(logging.Filter):
    """Removes the query from logged addresses that begin with `address`."""

    address: str

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record, and return True to keep it."""
        if isinstance(record.args, tuple):
            record.args = tuple(self._shown(each) for each in record.args)
        return True

    def _shown(self, value: object) -> object:
        if type(value).__name__ != "URL":
            return value
        address, query, _ = str(value).partition("?")
        return f"{address}?…" if query and address.startswith(self.address) else value


def hide_queries(address: str) -> None:
    """Hide the query in all later log records about requests to `address`."""
    logging.getLogger("httpx2").addFilter(WithoutQuery(address.rstrip("/")))  # an equal filter is added only once
