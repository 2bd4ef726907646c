"""The rows of a service's tables that have left the log, bucket by bucket in the order of offsets.

For readers by offsets which continue below the start of the log: the values are in
`core/model/lake/older_rows.py`. A plan covers all buckets of a lake table and is kept while it has
the requested offsets; a cursor keeps its files open from read to read.

For a log table the rows come from its lake table, for a primary key table from its full history.
Every later snapshot has the same rows at the same offsets, less expired and deleted rows. So a plan
stays right while its files exist; when a file is gone, the plan is forgotten and the next cursor
makes a new plan.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import CorruptDataError, SnapshotNotFoundError
from streamhouse.core.model.changelog import CHANGE_TYPE_NAMES, CHANGELOG_FIELDS
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import (
    LakeCatalog,
    LakeRole,
    LakeState,
)
from streamhouse.core.model.lake.older_rows import OlderRows, WrittenAt
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.schema import (
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
)
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.numpy_arrays import integer_values
from streamhouse.lake.files.lake_filesystem import (
    LakeFilesystem,
    lake_file_properties,
)
from streamhouse.reading.plan._lake_cut import LakeCut, open_lake
from streamhouse.reading.plan._splits import lake_pieces
from streamhouse.reading.plan.row_request import RowRequest
from streamhouse.reading.plan.scan_schema import (
    SYSTEM_COLUMNS,
    change_type_column,
    output_columns,
    scan_context,
)
from streamhouse.reading.scan._ordered_rows import FILES_OPEN_MAX, WINDOW_ROWS, OrderedRows
from streamhouse.reading.scan.scan import LakeFile, ScanColumn, ScanContext

__all__ = ["IcebergHistory"]

BATCH_ROWS: Final = 1 << 14
_PLANS_MAX: Final = 32
# A plan of so many files is a few dozen megabytes, and is kept alone.
_PLANNED_FILES_MAX: Final = 50_000

_NAMES: Final = pa.array(CHANGE_TYPE_NAMES, pa.string())

_Key = tuple[int, int]
"""Table id and schema id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The files of one snapshot, of all buckets, and how to read them."""

    context: ScanContext
    ends: Mapping[int, int]
    files: tuple[LakeFile, ...]
    covered: CoveredOffsets | None


class IcebergHistory:
    """The history in the lake tables of a catalog. Thread-safe."""

    def __init__(
        self,
        catalog: LakeCatalog,
        *,
        files_open_max: int = FILES_OPEN_MAX,
        window_rows: int = WINDOW_ROWS,
    ) -> None:
        self._catalog = catalog
        self._files_open_max = files_open_max
        self._window_rows = window_rows
        self.plans_made = 0
        """How often the files of a table were looked for."""
        self._filesystem = LakeFilesystem(lake_file_properties(catalog.properties))
        self._lock = threading.Lock()
        self._plans: OrderedDict[_Key, _Plan] = OrderedDict()

    def open(self, table: TableInfo, lake: LakeState, bucket: int, *, offset: int) -> IcebergCursor:
        """Return a cursor before `offset`, which is below the bucket's tiered offset.

        For a primary key table with a full history, the cursor reads the changes in the full
        history. Raises `SnapshotNotFoundError` if the lake table is gone or replaced.
        """
        plan = self._plan(table, lake, bucket, offset)
        return IcebergCursor(self, _key(table), plan, bucket, offset)

    def first_since(
        self, table: TableInfo, lake: LakeState, bucket: int, timestamp_us: int, *, offset: int
    ) -> WrittenAt | None:
        """Return the first row from `offset` on written at or after the time, if the lake has one.

        Raises like `open`, and like a cursor's `read`.
        """
        plan = self._plan(table, lake, bucket, offset)
        context = replace(
            plan.context,
            output=(plan.context.offset_column, plan.context.timestamp_column),
            from_timestamp_us=timestamp_us,
        )
        rows = self.rows(replace(plan, context=context), bucket, offset)
        try:
            # Within a bucket time never goes back: the first such row is the answer.
            batch = rows.read(rows_max=1, bytes_max=1)
        except SnapshotNotFoundError:
            self.forget(_key(table), plan)
            raise
        finally:
            rows.close()
        if batch is None:
            return None
        return WrittenAt(*(int(integer_values(column)[0]) for column in batch.columns))

    def rows(self, plan: _Plan, bucket: int, offset: int) -> OrderedRows:
        """Return the planned rows of a bucket from `offset` on, from the context's time on."""
        since = plan.context.from_timestamp_us
        files = [
            file
            for file in plan.files
            if file.bucket in (None, bucket)
            and (since is None or file.timestamp_max_us is None or file.timestamp_max_us >= since)
        ]
        end = plan.ends.get(bucket, 0)
        offsets = OffsetRange(bucket=bucket, start=min(offset, end), end=end)
        pieces = lake_pieces(
            files, {bucket: offsets}, from_timestamp_us=since, to_timestamp_us=None
        )
        return OrderedRows(
            self._filesystem,
            pieces,
            plan.context,
            offsets,
            files_open_max=self._files_open_max,
            window_rows=self._window_rows,
        )

    def forget(self, key: _Key, plan: _Plan) -> None:
        """Forget a plan whose files are gone."""
        with self._lock:
            if self._plans.get(key) is plan:
                del self._plans[key]

    def _plan(self, table: TableInfo, lake: LakeState, bucket: int, offset: int) -> _Plan:
        """Return a plan with rows of the bucket at `offset`, if the lake has any."""
        key = _key(table)
        with self._lock:
            cached = self._plans.get(key)
            if cached is not None and offset < cached.ends.get(bucket, 0):
                self._plans.move_to_end(key)
                return cached
        # Two threads may both make one: that is rare, and the later is as good.
        plan = _planned(self._catalog, table, lake)
        with self._lock:
            self.plans_made += 1
            self._plans[key] = plan
            self._plans.move_to_end(key)
            while len(self._plans) > 1 and (
                len(self._plans) > _PLANS_MAX
                or sum(len(p.files) for p in self._plans.values()) > _PLANNED_FILES_MAX
            ):
                self._plans.popitem(last=False)
        return plan


class IcebergCursor:
    """A position in the lake rows of one bucket. Not thread-safe."""

    def __init__(
        self, history: IcebergHistory, key: _Key, plan: _Plan, bucket: int, offset: int
    ) -> None:
        self._history = history
        self._key = key
        self._plan = plan
        self._rows = history.rows(plan, bucket, offset)
        self._columns = [
            column.name
            for column in plan.context.output
            if column.name not in (OFFSET_COLUMN, TIMESTAMP_COLUMN)
        ]

    @property
    def next_offset(self) -> int:
        """The offset where the next read begins."""
        return self._rows.next_offset

    @property
    def end_offset(self) -> int:
        """The end of the cursor; rows tiered later need a new cursor."""
        return self._rows.end_offset

    @property
    def held_bytes(self) -> int:
        """The approximate memory of the cursor."""
        return self._rows.held_bytes

    @property
    def covered(self) -> CoveredOffsets | None:
        """The offsets covered by the lake table when opened; None if its properties have none."""
        return self._plan.covered

    def read(self, *, rows_max: int, bytes_max: int) -> OlderRows:
        """Return the next rows within the limits, at least one row unless the cursor is at its end.

        Raises `SnapshotNotFoundError` if the files have been removed since the open.
        """
        try:
            batch = self._rows.read(rows_max=rows_max, bytes_max=bytes_max)
        except SnapshotNotFoundError:
            self._history.forget(self._key, self._plan)
            raise
        if batch is None:
            schema = self._plan.context.output_schema
            batch = pa.RecordBatch.from_pylist([], schema=schema)
        return OlderRows(
            rows=_as_logged(batch.select(self._columns), table=self._plan.context.table),
            offsets=integer_values(batch.column(OFFSET_COLUMN)),
            timestamps_us=integer_values(batch.column(TIMESTAMP_COLUMN)).astype(np.int64),
            next_offset=self._rows.next_offset,
        )

    def close(self) -> None:
        """Release all resources. Idempotent."""
        self._rows.close()


def _key(table: TableInfo) -> _Key:
    return table.table_id, table.schema_id


def _planned(catalog: LakeCatalog, table: TableInfo, lake: LakeState) -> _Plan:
    """Plan all files of the snapshot of `lake`; of the current one if that was expired."""
    role = LakeRole.CHANGES if table.is_primary_key_table else LakeRole.ROWS
    registered: LakeState | None = lake
    if role is LakeRole.CHANGES:
        registered = None if lake.changelog is None else lake.changelog.as_lake_state(role)
    if registered is None or registered.snapshot_id is None:
        name = role.lake_name(str(table.path))
        raise SnapshotNotFoundError(f"table '{table.path}' has no lake table '{name}' yet")
    opened = open_lake(catalog, table, registered)
    ranges = {}
    for bucket, end in registered.tiered_offsets.items():
        # Rows below were overwritten, or have reached their time to live.
        first = max(
            registered.truncated_offsets.get(bucket, 0), lake.expired_offsets.get(bucket, 0)
        )
        ranges[bucket] = OffsetRange(bucket=bucket, start=min(first, end), end=end)
    cut = LakeCut(
        lake=opened,
        file_properties=lake_file_properties(catalog.properties),
        snapshot_id=registered.snapshot_id,
        role=role,
        ranges=ranges,
        successor_of=table,
    )
    rows = RowRequest(output=_output(table), batch_rows=BATCH_ROWS)
    lake_files = cut.files(table, rows)
    context = scan_context(
        table, rows, files=lake_files, lake_is_changelog=role is LakeRole.CHANGES
    )
    covered = opened.covered(table.table_id, role)
    ends = dict(registered.tiered_offsets)
    return _Plan(context=context, ends=ends, files=lake_files.files, covered=covered)


def _output(table: TableInfo) -> tuple[ScanColumn, ...]:
    """Return the columns of the table's rows, with their offsets and times."""
    is_changelog = table.is_primary_key_table
    columns = output_columns(
        table.schema,
        columns=None,
        include_metadata=False,
        table=str(table.path),
        change_columns=(change_type_column(has_changelog=True),) if is_changelog else (),
    )
    _, offset, timestamp = SYSTEM_COLUMNS
    return (*columns, offset, timestamp)


def _as_logged(rows: pa.RecordBatch, *, table: str) -> pa.RecordBatch:
    """Return rows with their change types as the log has them: codes."""
    at = rows.schema.get_field_index(CHANGE_TYPE_COLUMN)
    if at < 0:
        return rows
    codes = pc.index_in(rows.column(at), value_set=_NAMES).cast(pa.int8())
    if codes.null_count:
        raise CorruptDataError(
            f"table '{table}': its full history in the lake has a row whose {CHANGE_TYPE_COLUMN} is"
            f" none of {', '.join(CHANGE_TYPE_NAMES)}"
        )
    return rows.set_column(at, CHANGELOG_FIELDS[0], codes)
