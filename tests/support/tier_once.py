"""A tiering worker in this process: everything in the log goes to the lake, or only what is due."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from streamhouse.client import ApplicationClient, StorageClient, TieringIdle

if TYPE_CHECKING:
    from streamhouse.tiering.worker._service import TieringService

__all__ = ["run_due", "tier_once"]


def tier_once(
    client: ApplicationClient, *tables: str, token: str | None = None, threads: int = 2
) -> int:
    """Tier `tables` (none: all) and return how many rows went to the lake."""
    with _worker(client, *tables, token=token, threads=threads) as worker:
        summaries = worker.run_once()
    for summary in summaries:
        if summary.error is not None:
            raise summary.error
    return sum(summary.row_count for summary in summaries)


def run_due(client: ApplicationClient, *tables: str) -> list[str]:
    """Run the rounds of `tables` (none: all) that are due; return what each did, in order.

    That is what a worker gets that comes now and asks for no table by force.
    """
    done = []
    with _worker(client, *tables) as worker:
        while not isinstance(
            answer := StorageClient.of(client).claim_tiering("w", tables=worker.tables), TieringIdle
        ):
            done.append(f"{answer.state.table.path} {worker._run_round(answer).kind}")
    return done


@contextlib.contextmanager
def _worker(
    client: ApplicationClient, *tables: str, token: str | None = None, threads: int = 2
) -> Iterator[TieringService]:
    from streamhouse.lake.lake_tables import IcebergLake
    from streamhouse.tiering.worker._service import TieringService
    from streamhouse.tiering.worker.thread_runner import ThreadRunner

    lake = IcebergLake(client.lake_catalog())
    try:
        yield TieringService(
            client=StorageClient.of(client),
            lake=lake,
            runner=ThreadRunner(threads),
            token=token,
            tables=tables or None,
        )
    finally:
        lake.close()
