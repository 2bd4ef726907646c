"""A consumer in a process of its own: follows a table, says how long each row took to it.

Rows carry the clock of their write in the column `amount`: CLOCK_MONOTONIC is one for all
processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Literal

from benchmarks.peers import pondra
from streamhouse.client import StorageClient

__all__ = ["Seen", "following"]

_WAIT_S_MAX = 20.0


class Seen:
    """What a consumer has seen, as its parent is told."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def wait(self, sent: float) -> float:
        """Return the seconds that the row took that was written at `sent`."""
        while True:
            if not self._connection.poll(_WAIT_S_MAX):
                raise TimeoutError(f"no row came within {_WAIT_S_MAX:g} s")
            row_sent, seen = self._connection.recv()
            if row_sent == sent:
                return float(seen - sent)


@contextlib.contextmanager
def following(kind: Literal["streamhouse", "pondra"], endpoint: str, table: str) -> Iterator[Seen]:
    """Run a consumer of the rows that are written from now on."""
    ours, its = multiprocessing.Pipe(duplex=False)
    follow = {"streamhouse": _follow_ours, "pondra": _follow_pondra}[kind]
    spawned = multiprocessing.get_context("spawn")
    consumer = spawned.Process(target=follow, args=(endpoint, table, its), daemon=True)
    consumer.start()
    try:
        seen = Seen(ours)
        seen.wait(0.0)
        yield seen
    finally:
        consumer.terminate()
        consumer.join()


def _follow_ours(endpoint: str, table: str, parent: Connection) -> None:
    with StorageClient(endpoint) as client:
        events = client.subscribe(table)
        parent.send((0.0, 0.0))
        for batch in events:
            # Of an upsert the row before it comes first, with its old clock.
            parent.send((batch.data.column("amount")[-1].as_py(), time.perf_counter()))


def _follow_pondra(endpoint: str, table: str, parent: Connection) -> None:
    for row in pondra.follow(endpoint, table):
        parent.send((0.0, 0.0) if row is None else (row["amount"], time.perf_counter()))
