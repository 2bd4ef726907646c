"""From a table's description to the running table: recover its logs, load its lake state."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from streamhouse.storage_service.errors import StreamhouseError
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.log_tablet import LogOptions, LogTablet
from streamhouse.storage_service.model.table import TableInfo
from streamhouse.storage_service.tablet.blocking import RunBlocking
from streamhouse.storage_service.tablet.clock import clock_us
from streamhouse.storage_service.tablet.data_directory import DataDirectory
from streamhouse.storage_service.tablet.lake_store import load_lake_state
from streamhouse.storage_service.tablet.open_table import OpenTable
from streamhouse.storage_service.tablet.wakeups import WaiterLimit, Wakeups

__all__ = ["TableOpener", "close_tablets"]


class TableOpener:
    """Opens the tables of one data directory, several buckets at a time."""

    def __init__(
        self,
        directory: DataDirectory,
        *,
        run_blocking: RunBlocking,
        frame_bytes_max: int,
        waiter_limit: WaiterLimit,
    ) -> None:
        self._directory = directory
        self._run_blocking = run_blocking
        self._frame_bytes_max = frame_bytes_max
        self._waiter_limit = waiter_limit
        self._filesystem = LocalFilesystem()

    async def open(self, info: TableInfo) -> OpenTable:
        """Return the table with every acknowledged row visible.

        Raises an error that names the table, and then leaves nothing open.
        """
        lake = await self._run_blocking(load_lake_state, self._directory, info)
        opened = await asyncio.gather(
            *(
                self._run_blocking(self._open_tablet, info, bucket, lake.tiered_offsets[bucket])
                for bucket in range(info.bucket_count)
            ),
            return_exceptions=True,
        )
        tablets = [tablet for tablet in opened if isinstance(tablet, LogTablet)]
        for error in opened:
            if isinstance(error, BaseException):
                await self._run_blocking(close_tablets, tablets)
                raise error
        return OpenTable(info, tablets, lake=lake, wakeups=Wakeups(self._waiter_limit))

    def _open_tablet(self, info: TableInfo, bucket: int, tiered_offset: int) -> LogTablet:
        try:
            return LogTablet.open(
                self._directory.bucket(info.table_id, bucket),
                table_id=info.table_id,
                bucket=bucket,
                filesystem=self._filesystem,
                options=LogOptions(
                    segment_bytes_max=info.properties().log_segment_bytes,
                    frame_bytes_max=self._frame_bytes_max,
                ),
                clock_us=clock_us,
                end_offset_min=tiered_offset,
            )
        except StreamhouseError as error:
            raise type(error)(f"table '{info.path}' cannot be opened: {error.message}") from error


def close_tablets(tablets: Iterable[LogTablet]) -> None:
    """Close logs, waiting for a commit under way."""
    for tablet in tablets:
        tablet.close()
