"""Reads of a table's log inside the service: `TableReads` without HTTP and without a token.

A read is an ordinary reader: the read sees only published rows, and retention, a drop or a move of
the table may end the read with an error. Blocking; not for the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from streamhouse.client import LogBatch
from streamhouse.client.reads import cut
from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.table import TableInfo
from streamhouse.core.wire.arrow_body import BatchAddress
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.tiering_desk.history_check import check_history

__all__ = ["ServiceLog"]

PAGE_BYTES: Final = 8 << 20


class ServiceLog:
    """The log of one table; `info` is the table's description at the moment of a cut."""

    def __init__(self, table: OpenTable, info: TableInfo) -> None:
        self._table = table
        self._info = info

    def read_range(
        self,
        path: str,
        bucket: int,
        start: int,
        end: int,
        *,
        columns: Sequence[str] | None = None,
        page_bytes: int = PAGE_BYTES,
        schema_id: int | None = None,
        table_id: int | None = None,
    ) -> Iterator[LogBatch]:
        """See `StorageClient.read_range`."""
        info = self._info
        if table_id is not None:
            info.check_positions({bucket: end}, table_id=table_id)
        tablet = self._table.tablet(bucket)
        version = info.schema_id if schema_id is None else schema_id
        position = start
        while position < end:
            page = tablet.read(position, bytes_max=page_bytes, end_offset=end)
            if not page:
                raise CorruptDataError(
                    f"table '{path}', bucket {bucket}: no rows at offset {position}, wanted up to"
                    f" {end}"
                )
            for stored in page:
                address = BatchAddress(
                    bucket=bucket,
                    base_offset=stored.base_offset,
                    row_count=stored.row_count,
                    timestamp_us=stored.timestamp_us,
                    schema_id=stored.schema_id,
                )
                rows = self._table.rows_of(stored, info, schema_id=version, columns=columns)
                batch = cut(path, address, rows, start=position, end=end, table_id=info.table_id)
                if batch is None or batch.base_offset != position:
                    raise CorruptDataError(
                        f"table '{path}', bucket {bucket}: rows at {stored.base_offset} follow"
                        f" offset {position}"
                    )
                position = batch.end_offset
                yield batch

    def check_lake_history(
        self,
        path: str,  # noqa: ARG002 - the log of one table
        covered: CoveredOffsets,
        *,
        table_id: int,
    ) -> None:
        """See `StorageClient.check_lake_history`."""
        self._info.check_positions(covered.tiered_offsets, table_id=table_id)
        check_history(self._table, [covered])
