"""A table's log for the process that makes live cuts: stored batches, and their rows.

The service reads the batches, and the process decodes them. A read is an ordinary reader: the read
sees only published rows, and retention, a drop or a move of the table may end the read with an
error. Blocking; not for the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import pyarrow as pa

from streamhouse.client import LogBatch
from streamhouse.client.reads import cut
from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.schema_change import read_stored
from streamhouse.core.model.table import TableInfo
from streamhouse.core.wire.arrow_body import BatchAddress, decode_payload
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.tiering_desk.history_check import check_history
from streamhouse.storage_service.log.segments.segment import StoredBatch

__all__ = ["PAGE_BYTES", "ServiceLog", "StoredRows"]

PAGE_BYTES: Final = 8 << 20
_KEPT_PAGES_MAX: Final = 8

ReadPage = Callable[[int, int, int, int], Sequence[StoredBatch]]
"""Stored batches of a bucket from an offset to an end, about as many bytes as the last argument."""


class ServiceLog:
    """The log of one table; `info` is the table's description at the moment of a cut."""

    def __init__(self, table: OpenTable, info: TableInfo) -> None:
        self._table = table
        self._info = info

    def page(self, bucket: int, start: int, end: int, page_bytes: int) -> Sequence[StoredBatch]:
        """See `ReadPage`; the payloads are valid while referenced."""
        return self._table.tablet(bucket).read(start, bytes_max=page_bytes, end_offset=end)

    def check_history(self, covered: CoveredOffsets, *, table_id: int) -> None:
        """See `StorageClient.check_lake_history`."""
        self._info.check_positions(covered.tiered_offsets, table_id=table_id)
        check_history(self._table, [covered])


class StoredRows:
    """`LogReads` of a table as `info` has it, over pages of stored batches."""

    def __init__(self, info: TableInfo, read_page: ReadPage) -> None:
        self._info = info
        self._read_page = read_page
        self._schemas: dict[int, pa.Schema] = {}
        self._pages: dict[tuple[int, int, int], Sequence[StoredBatch]] = {}

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
        version = info.schema_id if schema_id is None else schema_id
        position = start
        while position < end:
            page = self._page_at(bucket, position, end, page_bytes, is_kept=columns is not None)
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
                rows = self._rows_of(stored, version, columns)
                batch = cut(path, address, rows, start=position, end=end, table_id=info.table_id)
                if batch is None or batch.base_offset != position:
                    raise CorruptDataError(
                        f"table '{path}', bucket {bucket}: rows at {stored.base_offset} follow"
                        f" offset {position}"
                    )
                position = batch.end_offset
                yield batch

    def _page_at(
        self, bucket: int, start: int, end: int, page_bytes: int, *, is_kept: bool
    ) -> Sequence[StoredBatch]:
        """Return a page; keep the page of a read of some columns for the read of all that follows.

        The changes of a key table are folded before the rows are written.
        """
        page = self._pages.pop((bucket, start, end), None)
        if page is None:
            page = self._read_page(bucket, start, end, page_bytes)
        if is_kept and len(self._pages) < _KEPT_PAGES_MAX:
            self._pages[bucket, start, end] = page
        return page

    def _rows_of(
        self, stored: StoredBatch, version: int, columns: Sequence[str] | None
    ) -> pa.RecordBatch:
        if stored.schema_id != version:
            rows = read_stored(
                stored.payload, self._info, stored_as=stored.schema_id, read_as=version
            )
        else:
            if version not in self._schemas:
                self._schemas[version] = self._info.log_schema_of(version)
            rows = decode_payload(stored.payload, self._schemas[version])
        return rows if columns is None else rows.select(list(columns))
