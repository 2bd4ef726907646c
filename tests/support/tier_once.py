"""One tiering round in this process: everything in the log of some tables goes to the lake."""

from __future__ import annotations

from collections.abc import Sequence

from streamhouse.storage_service.client import StorageClient

__all__ = ["tier_once"]


def tier_once(
    client: StorageClient, *tables: str, token: str | None = None, threads: int = 2
) -> int:
    """Tier `tables` (none: all) and return how many rows went to the lake."""
    from streamhouse.tiering.iceberg_lake import IcebergLake
    from streamhouse.tiering.service import TieringService
    from streamhouse.tiering.thread_runner import ThreadRunner

    wanted: Sequence[str] | None = tables or None
    lake = IcebergLake(client.lake_catalog())
    try:
        summaries = TieringService(
            client=client, lake=lake, runner=ThreadRunner(threads), token=token, tables=wanted
        ).run_once()
    finally:
        lake.close()
    for summary in summaries:
        if summary.error is not None:
            raise summary.error
    return sum(summary.row_count for summary in summaries)
