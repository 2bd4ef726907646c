"""Waiting for retention, which runs in the service on its own clock."""

from __future__ import annotations

import time

from streamhouse.client import ApplicationClient

__all__ = ["EXPIRING", "expire_log"]

EXPIRING = {"table.log.ttl": "1ms", "table.log.segment-bytes": "64kb"}
"""Properties of a table whose log goes as soon as it may."""


def expire_log(client: ApplicationClient, path: str) -> dict[int, int]:
    """Wait until retention took rows of every bucket; return where the log starts then.

    The table needs EXPIRING, and one with a lake must be tiered first.
    """
    deadline = time.monotonic() + 60
    while True:
        starts = {b: p.log_start_offset for b, p in client.positions(path).items()}
        if all(starts.values()):
            return starts
        assert time.monotonic() < deadline, f"retention took nothing of {path}"
        time.sleep(0.05)  # sleep: retention runs in the service, on its own clock
