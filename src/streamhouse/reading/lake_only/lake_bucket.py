"""All rows of one bucket of a primary key table from the lake, without Spark or a service.

A service without its rows by key reads the rows and offsets here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from streamhouse.core.model.lake.facts import LakeCatalog, LakeState
from streamhouse.core.model.lake.older_rows import LakeBucket
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.schema import OFFSET_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.lake.files.lake_filesystem import LakeFilesystem, lake_file_properties
from streamhouse.reading.files.planner import older_lake
from streamhouse.reading.plan._lake_cut import LakeCut, open_lake
from streamhouse.reading.plan._splits import lake_pieces
from streamhouse.reading.plan.row_request import RowRequest
from streamhouse.reading.plan.scan_schema import output_columns, scan_context
from streamhouse.reading.scan._lake_scan import read_lake_piece
from streamhouse.reading.scan.scan import LakePiece, ScanContext

__all__ = ["lake_bucket_rows"]


def lake_bucket_rows(
    catalog: LakeCatalog, table: TableInfo, lake: LakeState, bucket: int
) -> LakeBucket:
    """Return the rows of a bucket from the lake table described by `lake`.

    Batches have the table's columns, then `__offset`; one row group is in memory at a time. If the
    snapshot of `lake` was expired, the current snapshot is read up to its own offset. Raises
    `SnapshotNotFoundError` if the lake table is gone or replaced.
    """
    opened = open_lake(catalog, table, lake)
    snapshot_id, end = lake.snapshot_id, lake.tiered_offsets[bucket]
    assert snapshot_id is not None, "something was tiered"
    current = [row["snapshot_id"] for row in opened.snapshots() if row["is_current"]]
    if snapshot_id not in opened.snapshot_ids() and current:
        opened.check_outside(table)
        # It goes further, and up to here it does not have what the expired one had.
        snapshot_id = current[0]
        end = opened.tiered_offsets(snapshot_id).get(bucket, 0)
        if end < lake.tiered_offsets[bucket]:
            tiered_end = lake.tiered_offsets[bucket]
            name = lake.role.lake_name(str(table.path))
            raise older_lake(name, bucket, end=end, tiered_end=tiered_end)
    cut = LakeCut(
        lake=opened,
        file_properties=lake_file_properties(catalog.properties),
        snapshot_id=snapshot_id,
        role=lake.role,
        ranges={bucket: OffsetRange(bucket=bucket, start=0, end=end)},
    )
    columns = [*table.schema.names, OFFSET_COLUMN]
    output = output_columns(
        table.schema, columns=columns, include_metadata=False, table=str(table.path)
    )
    rows = RowRequest(output=output)
    files = cut.files(table, rows)
    pieces = lake_pieces(files.files, cut.ranges, from_timestamp_us=None, to_timestamp_us=None)
    batches = _batches(
        LakeFilesystem(cut.file_properties), pieces, scan_context(table, rows, files=files)
    )
    return LakeBucket(end, batches, opened.fingerprints(snapshot_id).get(bucket))


def _batches(
    filesystem: LakeFilesystem, pieces: list[LakePiece], context: ScanContext
) -> Iterator[pa.RecordBatch]:
    for piece in pieces:
        yield from read_lake_piece(filesystem, piece, context, context.output)
