"""Reading any table of the service's Iceberg catalog, whoever wrote it: `db.table$iceberg`.

A `TableState` pins a snapshot, as for a table of the service; its table has the Iceberg table's
columns under their own field ids, and no log.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from streamhouse.client import StorageClient
from streamhouse.core.errors import SnapshotNotFoundError, UnknownColumnError
from streamhouse.core.extras import require
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.schema import RESERVED_COLUMNS
from streamhouse.core.model.table import TableDescriptor, TableInfo
from streamhouse.core.model.table_state import TableState
from streamhouse.reading.options.connection import TableName
from streamhouse.reading.options.options import ReadOptions
from streamhouse.reading.plan._read_cut import ReadPlan
from streamhouse.reading.plan._splits import SplitSizes, lake_pieces, pack
from streamhouse.reading.plan.row_form import row_request
from streamhouse.reading.plan.row_request import RowRequest
from streamhouse.reading.plan.scan_schema import scan_context
from streamhouse.reading.scan.scan import ScanColumn

if TYPE_CHECKING:
    from streamhouse.reading.files.append_position import AppendPosition
    from streamhouse.reading.files.appends import SourceTable

__all__ = [
    "open_source",
    "plan_appends",
    "plan_source_read",
    "source_state",
]


def open_source(client: StorageClient, name: TableName) -> SourceTable:
    """Open the Iceberg table as it is now."""
    # The lake library takes half a second to import.
    require("lake", f"reading '{name}'")
    from streamhouse.reading.files.appends import open_source_table  # noqa: PLC0415 - pyiceberg is an extra

    return open_source_table(client.lake_catalog(), str(name.path))


def source_state(
    client: StorageClient, name: TableName, *, columns: Collection[str] | None
) -> TableState:
    """Pin the Iceberg table's current snapshot and schema.

    Raises `UnsupportedError` if a column of `columns` (None: all) is unreadable.
    """
    source = open_source(client, name)
    for column in columns or ():
        if column in RESERVED_COLUMNS:
            raise UnknownColumnError(
                f"'{name}' is read without the columns that Streamhouse adds, such as '{column}';"
                f" load '{name.path}' for them"
            )
    descriptor = TableDescriptor(path=name.path, schema=source.schema(columns=columns))
    return TableState(
        table=TableInfo(descriptor=descriptor, table_id=0, created_at_us=0),
        positions={},
        lake=LakeState(snapshot_id=source.snapshot_id, table_uuid=source.uuid),
    )


def plan_source_read(
    client: StorageClient,
    state: TableState,
    options: ReadOptions,
    output: Sequence[ScanColumn],
) -> ReadPlan:
    """Plan the rows of the pinned snapshot, or of `asOfSnapshot`."""
    rows = row_request(state.table, options, output)
    name = options.connection.name
    snapshot_id = options.as_of_snapshot or state.lake.snapshot_id
    if snapshot_id is None:
        return ReadPlan(context=scan_context(state.table, rows, name=str(name)), splits=[])
    source = open_source(client, name)
    if source.uuid != state.lake.table_uuid:
        raise SnapshotNotFoundError(
            f"'{name}' was dropped and created again after it was loaded; load it again"
        )
    start = source.start(snapshot_id)
    end = start.at(start.file_count)
    return plan_appends(source, start, end, state.table, rows, options)


def plan_appends(
    source: SourceTable,
    start: AppendPosition,
    end: AppendPosition,
    table: TableInfo,
    rows: RowRequest,
    options: ReadOptions,
) -> ReadPlan:
    """Plan the rows between two positions, in the order of their files."""
    files = source.files(
        start, end, table.schema, predicate=rows.predicate, skipped=options.skipped_snapshots
    )
    pieces = lake_pieces(files, None, from_timestamp_us=None, to_timestamp_us=None)
    splits = pack(pieces, SplitSizes.of(options))
    context = scan_context(
        table,
        rows,
        name=str(options.connection.name),
        lake_properties=source.file_properties,
        lake_snapshot_id=end.snapshot_id,
    )
    return ReadPlan(context=context, splits=splits)
