"""Whether a table's lake is the one that the service registered, and whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
import numpy.typing as npt

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.lake.facts import (
    LakeCatalog,
    LakeRole,
    LakeState,
    SideLakeState,
)
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.schema import OFFSET_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.sorted_values import distinct
from streamhouse.lake.files.lake_filesystem import LakeFilesystem, lake_file_properties
from streamhouse.reading.files.planner import LakeTable, open_lake_table
from streamhouse.reading.plan._lake_cut import LakeCut, open_lake
from streamhouse.reading.plan.lake_bucket import lake_bucket_rows
from streamhouse.reading.plan.row_request import RowRequest

__all__ = ["lake_problems"]


Fingerprints = Callable[[int, Collection[int]], Mapping[int, str]]
"""Returns the fingerprints of a bucket's log at offsets, where they are known."""

LakeOffsets = Mapping[tuple[int, int], npt.NDArray[np.int64]]
"""(bucket, offset) -> the rows' offsets when a lake table covers the bucket up to that offset."""


def lake_problems(
    catalog: LakeCatalog,
    table: TableInfo,
    lake: LakeState,
    *,
    log_ends: Mapping[int, int],
    key_offsets: LakeOffsets,
    fingerprints: Fingerprints,
    read_rows: bool,
) -> list[str]:
    """Return what is wrong with the lake tables of a table that was tiered, a sentence each.

    Always: the table, its snapshot and its tiered offsets, that they are of the log with these
    `fingerprints`, and that each file has its size. With `read_rows` also that no row is there
    twice, of log tables that none is missing but those that have reached `table.datalake.ttl` or,
    if it has deleted any, those of another engine, and that those of a bucket in `key_offsets` are
    exactly these. The same of the batch layout, and of the full history, which has every change.
    """
    expected = key_offsets if read_rows else None
    problems = _problems(catalog, table, lake, log_ends, expected, fingerprints)
    if lake.batch is not None:
        found = _side_problems(
            catalog,
            table,
            lake.batch,
            log_ends,
            expected,
            fingerprints,
            LakeRole.BATCH,
            lasting=_lasting(key_offsets, lake.batch.tiered_offsets, lake.tiered_offsets),
            expired_offsets=lake.expired_offsets,
        )
        problems += [f"batch layout: {problem}" for problem in found]
    if lake.changelog is not None:
        ends = lake.changelog.tiered_offsets
        behind = [b for b, end in lake.tiered_offsets.items() if ends.get(b, 0) < end]
        if behind:
            problems.append(f"bucket {behind[0]}: the full history is behind the rows")
        every = {(bucket, end): np.arange(end) for bucket, end in ends.items()}
        expected = every if read_rows else None
        found = _side_problems(
            catalog, table, lake.changelog, log_ends, expected, fingerprints, LakeRole.CHANGES
        )
        problems += [f"full history: {problem}" for problem in found]
    return problems


def _lasting(
    key_offsets: LakeOffsets, ends: Mapping[int, int], rows_ends: Mapping[int, int]
) -> LakeOffsets:
    """Return what a batch layout that covers `ends` must have, whatever else it may have.

    What came to it from the rows' own lake table came without what had gone there by then.
    """
    found = {}
    for bucket, end in ends.items():
        later = key_offsets.get((bucket, rows_ends[bucket]))
        if later is not None and end < rows_ends[bucket]:
            found[bucket, end] = later[later < end]
    return found


def _side_problems(
    catalog: LakeCatalog,
    table: TableInfo,
    known: SideLakeState,
    log_ends: Mapping[int, int],
    offsets: LakeOffsets | None,
    fingerprints: Fingerprints,
    role: LakeRole,
    *,
    lasting: LakeOffsets | None = None,
    expired_offsets: Mapping[int, int] | None = None,
) -> list[str]:
    """Return the problems of the lake table of this role, which is beside the rows' own."""
    side = known.as_lake_state(role, expired_offsets=expired_offsets)
    return _problems(catalog, table, side, log_ends, offsets, fingerprints, lasting=lasting)


def _problems(
    catalog: LakeCatalog,
    table: TableInfo,
    lake: LakeState,
    log_ends: Mapping[int, int],
    offsets: LakeOffsets | None,
    fingerprints: Fingerprints,
    *,
    lasting: LakeOffsets | None = None,
) -> list[str]:
    """Return the problems of one lake table; rows are read if `offsets` says which to expect."""
    try:
        opened = open_lake(catalog, table, lake)
        return [
            *_offset_problems(opened, lake, log_ends),
            *_history_problems(opened, table, lake.role, fingerprints),
            *_file_problems(catalog, opened, table, lake),
            *(
                ()
                if offsets is None
                else _row_problems(catalog, table, lake, offsets, lasting or {})
            ),
        ]
    except StreamhouseError as error:
        return [error.message]


def _offset_problems(opened: LakeTable, lake: LakeState, log_ends: Mapping[int, int]) -> list[str]:
    problems = []
    current = [row["snapshot_id"] for row in opened.snapshots() if row["is_current"]]
    if not current:
        return ["the lake table has no snapshot"]
    covered = opened.tiered_offsets(current[0])
    for bucket, tiered in sorted(lake.tiered_offsets.items()):
        end = covered.get(bucket, 0)
        if end < tiered:
            problems.append(
                f"bucket {bucket}: offset {tiered} is registered as tiered, but the lake ends at"
                f" {end}"
            )
        if end > log_ends.get(bucket, 0):
            problems.append(
                f"bucket {bucket}: the lake has rows up to offset {end}, but the log ends at"
                f" {log_ends.get(bucket, 0)}: an old copy or a twin of this directory has tiered,"
                " or is this one ('Two histories' in docs/operations.md)"
            )
    if lake.snapshot_id in opened.snapshot_ids():
        assert lake.snapshot_id is not None
        if opened.tiered_offsets(lake.snapshot_id) != dict(lake.tiered_offsets):
            problems.append(
                f"snapshot {lake.snapshot_id} covers other offsets than are registered for it"
            )
    return problems


def _history_problems(
    opened: LakeTable, table: TableInfo, role: LakeRole, fingerprints: Fingerprints
) -> list[str]:
    """Compare each snapshot of tiering with the log; of a bucket the first that differs is said."""
    said: dict[int, dict[int, str]] = {}
    for covered in opened.histories(table.table_id, role):
        for bucket, fingerprint in covered.fingerprints.items():
            said.setdefault(bucket, {})[covered.tiered_offsets.get(bucket, 0)] = fingerprint
    problems = []
    for bucket, by_offset in sorted(said.items()):
        own = fingerprints(bucket, by_offset)
        odd = [end for end in sorted(by_offset) if own.get(end, by_offset[end]) != by_offset[end]]
        if odd:
            problems.append(
                f"bucket {bucket}: the lake has other rows below offset {odd[0]} than the log: an"
                " old copy or a twin of this directory has tiered, or is this one ('Two"
                " histories' in docs/operations.md)"
            )
    return problems


def _file_problems(
    catalog: LakeCatalog, opened: LakeTable, table: TableInfo, lake: LakeState
) -> list[str]:
    assert lake.snapshot_id is not None
    ranges = {
        bucket: OffsetRange(bucket=bucket, start=lake.truncated_offsets.get(bucket, 0), end=end)
        for bucket, end in lake.tiered_offsets.items()
    }
    cut = LakeCut(
        lake=opened,
        file_properties=lake_file_properties(catalog.properties),
        snapshot_id=lake.snapshot_id,
        role=lake.role,
        ranges=ranges,
        successor_of=table,
    )
    found = cut.files(table, RowRequest())
    filesystem = LakeFilesystem(cut.file_properties)
    problems = []
    for file in found.files:
        try:
            with filesystem.open_parquet(file.path, file_bytes=file.file_bytes) as opened_file:
                rows = opened_file.metadata.num_rows
        except StreamhouseError as error:
            problems.append(error.message)
            continue
        if rows != file.row_count:
            problems.append(f"file {file.path} has {rows} rows, not {file.row_count}")
    return problems


def _row_problems(
    catalog: LakeCatalog,
    table: TableInfo,
    lake: LakeState,
    expected: LakeOffsets,
    lasting: LakeOffsets,
) -> list[str]:
    problems = []
    for bucket in range(table.bucket_count):
        end, batches, _ = lake_bucket_rows(catalog, table, lake, bucket)
        parts = [batch.column(OFFSET_COLUMN).to_numpy() for batch in batches]
        offsets = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *parts]))
        twice = offsets[1:][offsets[1:] == offsets[:-1]]
        if len(twice):
            problems.append(f"bucket {bucket}: offset {twice[0]} is in the lake more than once")
        start = max(lake.truncated_offsets.get(bucket, 0), lake.expired_offsets.get(bucket, 0))
        found = distinct(offsets[offsets >= start])
        row_count = max(0, end - start)
        if (
            not table.is_primary_key_table
            and len(found) != row_count
            and not (len(found) < row_count and _may_lack_rows(catalog, table))
        ):
            problems.append(
                f"bucket {bucket}: the lake has {len(found)} of the {row_count} rows below its"
                " tiered offset"
            )
        # A successor of an expired snapshot may cover more than what is known of.
        wanted = expected.get((bucket, end))
        if wanted is not None:
            for odd, problem in (
                (
                    np.setdiff1d(lasting.get((bucket, end), wanted), offsets),
                    "that it must have are missing",
                ),
                (np.setdiff1d(offsets, wanted), "that it has were replaced or deleted"),
            ):
                if len(odd):
                    problems.append(
                        f"bucket {bucket}: {len(odd)} rows {problem}; the first is of offset"
                        f" {odd[0]}"
                    )
    return problems


def _may_lack_rows(catalog: LakeCatalog, table: TableInfo) -> bool:
    """Whether another engine has deleted rows of a log table, which it may."""
    return open_lake_table(catalog, str(table.path)).was_changed_outside(table)
