"""Rows that left the log of a table, judged by constraints that are added to the table."""

from __future__ import annotations

from typing import Final

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.lake.older_rows import OlderRows
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.engine.added_checks import AddedChecks
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.server.history.lake_reads import Older
from streamhouse.storage_service.server.service import Service

__all__ = ["judge_lake_rows"]

_ROWS: Final = 65_536
_BYTES: Final = 8 << 20


async def judge_lake_rows(
    service: Service, table: OpenTable, changed: TableInfo, added: AddedChecks
) -> None:
    """Judge all rows of the lake that the log does not have, a piece at a time."""
    for bucket, offsets in added.of_lake().items():
        offset = offsets.start
        while offset < offsets.stop:

            def read(older: Older, bucket: int = bucket, offset: int = offset) -> OlderRows:
                if isinstance(older, StreamhouseError):
                    raise older
                return older.read(
                    table, changed, bucket, offset=offset, rows_max=_ROWS, bytes_max=_BYTES
                )

            piece = await service.lake_reads.run(read)
            await service.run_blocking(added.judge, piece.rows)
            offset = piece.next_offset
        added.judged_lake(bucket, offset)
