"""Waiting for retention, which runs in the service on its own clock."""

from __future__ import annotations

from streamhouse.client import ApplicationClient
from tests.support.waiting import wait_until

__all__ = ["EXPIRING", "expire_log"]

EXPIRING = {"table.log.ttl": "1ms", "table.log.segment-bytes": "64kb"}
"""Properties of a table whose log goes as soon as it may."""


def expire_log(client: ApplicationClient, path: str) -> dict[int, int]:
    """Wait until retention took rows of every bucket; return where the log starts then.

    The table needs EXPIRING, and one with a lake must be tiered first.
    """

    def starts() -> dict[int, int]:
        return {b: p.log_start_offset for b, p in client.positions(path).items()}

    wait_until(lambda: all(starts().values()), f"retention takes rows of {path}")
    return starts()
