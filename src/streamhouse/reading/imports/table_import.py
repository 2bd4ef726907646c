"""An existing Iceberg table as the history of a new table, each of its rows once.

Invariants:
- a step is a range of files of one source snapshot and one transaction. The step's cut is always
  the same, and its version is its end. So a step is applied exactly once, even if an import is
  stopped, restarted or run twice in parallel
- only the target knows the progress of an import: nothing in the source is changed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from streamhouse.client import StorageClient, Transaction
from streamhouse.core.errors import (
    DatabaseNotFoundError,
    InvalidRequestError,
    SchemaMismatchError,
    TableExistsError,
    TableNotFoundError,
)
from streamhouse.core.model.progress import NO_PROGRESS, Progress
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.core.threads import Pool
from streamhouse.reading.imports._import_origin import ImportOrigin
from streamhouse.reading.imports._import_progress import last_position, steps, version_of
from streamhouse.reading.options.connection import ICEBERG, TableName
from streamhouse.reading.options.options import STREAM, ReadOptions, read_options
from streamhouse.reading.plan._read_cut import ReadPlan
from streamhouse.reading.plan.iceberg_read import (
    open_source,
    plan_appends,
    source_state,
)
from streamhouse.reading.plan.row_form import row_request, table_columns
from streamhouse.reading.plan.row_request import RowRequest
from streamhouse.reading.scan.scan import Split
from streamhouse.reading.scan.split_reader import read_split

if TYPE_CHECKING:
    from streamhouse.reading.files.append_position import AppendPosition
    from streamhouse.reading.files.appends import SourceTable

__all__ = ["ImportedStep", "TableImport"]

_STAGE_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedStep:
    """One transaction: the source's snapshot, and its rows; at least `rows_left` rows follow.

    `is_skipped`: another import of the same tables has already imported the step.
    """

    snapshot_id: int
    row_count: int
    rows_left: int
    is_skipped: bool


class TableImport:
    """Moves one Iceberg table's rows into one table of the service."""

    def __init__(
        self,
        client: StorageClient,
        source: str,
        target: str,
        *,
        threads: int,
        skipped_snapshots: Sequence[str] = (),
    ) -> None:
        self._client = client
        self._source = TableName(TablePath.parse(source), ICEBERG)
        self._target = str(TablePath.parse(target))
        self._threads = threads
        options = {"table": str(self._source), **dict.fromkeys(skipped_snapshots, "true")}
        self._options: ReadOptions = read_options(options, use=STREAM)
        self._position: AppendPosition | None = None

    def prepare(
        self,
        *,
        primary_key: Sequence[str] = (),
        bucket_count: int = 1,
        bucket_key: Sequence[str] = (),
        partitioned_by: Sequence[str] | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> tuple[TableInfo, list[str]]:
        """Return the target, and the partition fields of the source without a form in the target.

        A missing target is made as described, and otherwise like the source. `partitioned_by` None
        takes the source's partitioning over. Raises `InvalidRequestError` for an existing target
        without an import from this source.
        """
        source = open_source(self._client, self._source)
        try:
            return self._checked(source), []
        except (DatabaseNotFoundError, TableNotFoundError):
            self._check_name_is_free()
        fields, refused = source.partitioning()
        name = str(self._source.path)
        origin = ImportOrigin.of(source, name)
        try:
            self._client.create_table(
                self._target,
                _target_schema(source.whole_schema(), primary_key),
                primary_key=primary_key,
                bucket_count=bucket_count,
                bucket_key=bucket_key,
                partitioned_by=fields if partitioned_by is None else partitioned_by,
                properties={**(properties or {}), ImportOrigin.PROPERTY: origin.to_property()},
            )
        except TableExistsError:
            # Another import was quicker; what it began is continued.
            refused = []
        return self._checked(source), refused if partitioned_by is None else []

    def run(self, progress: Progress = NO_PROGRESS) -> Iterator[ImportedStep]:
        """Import all rows that the target lacks; yield each finished step.

        Progress counts rows as they reach the service. A repeated call imports the rows appended
        meanwhile.
        """
        source = open_source(self._client, self._source)
        table = self._checked(source)
        origin = ImportOrigin.of_table(table, source, str(self._source.path))
        skipped = self._options.skipped_snapshots
        if self._position is None:
            self._position = last_position(
                source,
                origin,
                lambda version: self._is_committed(table, origin, version),
                skipped=skipped,
            )
        ahead = list(steps(source, self._position, until=source.snapshot_id, skipped=skipped))
        if not ahead:
            return
        pinned, rows = self._request()
        rows_left = sum(step.row_count for step in ahead)
        progress.expect(rows_left)
        for step in ahead:
            rows_left -= step.row_count
            plan = plan_appends(source, step.start, step.end, pinned, rows, self._options)
            with self._begin(table, origin, version_of(step.end)) as transaction:
                if transaction.is_skipped:
                    parts = []
                    progress.done(step.row_count)
                else:
                    parts = self._staged(transaction, plan, progress)
                result = transaction.commit(parts)
            self._position = step.end
            assert step.end.snapshot_id is not None, "a step is of a snapshot"
            yield ImportedStep(
                snapshot_id=step.end.snapshot_id,
                row_count=result.row_count,
                rows_left=rows_left,
                is_skipped=result.is_skipped,
            )

    # -- the target ----------------------------------------------------------------------------

    def _checked(self, source: SourceTable) -> TableInfo:
        """Return the target; raises if the source does not fit into the target, or not any more."""
        info = self._client.describe_table(self._target)
        ImportOrigin.of_table(info, source, str(self._source.path))
        names = set(info.schema.names)
        for column in source.whole_schema().columns:
            if column.name not in names:
                raise SchemaMismatchError(
                    f"Iceberg table '{self._source.path}' has a column '{column.name}' that table"
                    f" '{self._target}' lacks; add it with `streamhouse alter {self._target} --add`"
                )
        return info

    def _check_name_is_free(self) -> None:
        try:
            open_source(self._client, TableName(TablePath.parse(self._target), ICEBERG))
        except TableNotFoundError:
            return
        raise InvalidRequestError(
            f"the lake catalog has an Iceberg table '{self._target}' already, which is where the"
            " imported rows would be tiered to; import as another name"
        )

    def _begin(self, table: TableInfo, origin: ImportOrigin, version: int) -> Transaction:
        return self._client.begin_transaction(
            self._target,
            operation="upsert" if table.is_primary_key_table else "append",
            app_id=origin.app_id,
            version=version,
        )

    def _is_committed(self, table: TableInfo, origin: ImportOrigin, version: int) -> bool:
        with self._begin(table, origin, version) as transaction:
            return transaction.is_skipped

    # -- one step ------------------------------------------------------------------------------

    def _request(self) -> tuple[TableInfo, RowRequest]:
        """Return the source as a table, and a request of all its rows."""
        state = source_state(self._client, self._source, columns=None)
        output = table_columns(
            state.table, columns=None, include_metadata=False, has_change_type=False
        )
        # Nulls in a key column are found by the service, which names the row.
        return state.table, row_request(state.table, self._options, output)

    def _staged(self, transaction: Transaction, plan: ReadPlan, progress: Progress) -> list[str]:
        """Stage a step's rows; return the parts in the order of the source's files."""

        def stage(split: Split) -> list[str]:
            parts = []
            for table in _tables(read_split(split, plan.context)):
                parts.append(transaction.stage(table))
                progress.done(table.num_rows)
            return parts

        pool = Pool("streamhouse-import", self._threads)
        try:
            return [part for parts in pool.map(stage, plan.splits) for part in parts]
        finally:
            pool.shutdown(cancel_futures=True)


def _tables(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the rows in pieces worth a request."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        waiting.append(batch)
        size += batch.nbytes
        if size >= _STAGE_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def _target_schema(schema: Schema, primary_key: Sequence[str]) -> pa.Schema:
    fields = []
    for column in schema.columns:
        field = column.to_arrow()
        # Few engines say of a key column that it has no nulls.
        field = field.with_nullable(field.nullable and column.name not in primary_key)
        fields.append(field.with_metadata({"comment": column.comment}) if column.comment else field)
    return pa.schema(fields)
