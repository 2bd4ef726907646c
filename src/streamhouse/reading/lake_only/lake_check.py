"""Whether a table's lake is whole, and is the lake registered by the service."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

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
from streamhouse.lake.files.deletes.deleted_positions import read_deleted_positions
from streamhouse.lake.files.lake_filesystem import LakeFilesystem, lake_file_properties
from streamhouse.reading.files.planner import LakeTable, open_lake_table
from streamhouse.reading.lake_only.lake_bucket import lake_bucket_rows
from streamhouse.reading.plan._lake_cut import LakeCut, open_lake
from streamhouse.reading.plan.row_request import RowRequest
from streamhouse.reading.scan.scan import LakeFile

__all__ = ["catalog_problem", "lake_problems"]

_SQLITE: Final = "sqlite:///"


Fingerprints = Callable[[int, Collection[int]], Mapping[int, str]]
"""Returns the fingerprints of a bucket's log at offsets, where they are known."""

LakeOffsets = Mapping[tuple[int, int], npt.NDArray[np.int64]]
"""(bucket, offset) -> the rows' offsets when a lake table covers the bucket up to that offset."""


def catalog_problem(catalog: LakeCatalog) -> str | None:
    """Return the damage of a catalog in an SQLite file, None for a whole file or other catalogs.

    A damaged page may hide from the tables that are checked, and stop the next new table.
    """
    name = catalog.properties.get("uri", "").partition(_SQLITE)[2].partition("?")[0]
    path = Path(name).absolute()
    if not name or not path.exists():
        return None
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as file:
            ((answer,), *_) = file.execute("PRAGMA integrity_check(1)").fetchall()
    except sqlite3.Error as error:
        answer = str(error)
    return None if answer == "ok" else f"{path} is damaged: {answer}"


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
    """Return the problems of the lake tables of a tiered table, a sentence each.

    The check always covers the table, its snapshot, its tiered offsets, the `fingerprints` of the
    log, the size of each file, and every deleted row. With `read_rows` it also covers the rows:

    - no row is in the lake twice
    - a log table lacks only rows that have reached `table.datalake.ttl`, or were deleted by another
      engine
    - a bucket in `key_offsets` has exactly these rows

    The batch layout and the full history, which has every change, are checked in the same way.
    """
    expected = key_offsets if read_rows else None
    problems = _problems(catalog, table, lake, log_ends, expected, fingerprints)
    if lake.batch is not None:
        side_problems = _side_problems(
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
        problems += [f"batch layout: {problem}" for problem in side_problems]
    if lake.changelog is not None:
        ends = lake.changelog.tiered_offsets
        behind = [b for b, end in lake.tiered_offsets.items() if ends.get(b, 0) < end]
        if behind:
            problems.append(f"bucket {behind[0]}: the full history is behind the rows")
        every = {(bucket, end): np.arange(end) for bucket, end in ends.items()}
        expected = every if read_rows else None
        side_problems = _side_problems(
            catalog, table, lake.changelog, log_ends, expected, fingerprints, LakeRole.CHANGES
        )
        problems += [f"full history: {problem}" for problem in side_problems]
    return problems


def _lasting(
    key_offsets: LakeOffsets, ends: Mapping[int, int], rows_ends: Mapping[int, int]
) -> LakeOffsets:
    """Return the rows that a batch layout with the offsets `ends` must have; others may be present.

    Rows that were replaced in the rows' own lake table before the layout read it never reached the
    layout.
    """
    lasting = {}
    for bucket, end in ends.items():
        later = key_offsets.get((bucket, rows_ends[bucket]))
        if later is not None and end < rows_ends[bucket]:
            lasting[bucket, end] = later[later < end]
    return lasting


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
    """Compare each snapshot of tiering with the log; report a bucket's first difference."""
    lake_fingerprints: dict[int, dict[int, str]] = {}
    for covered in opened.histories(table.table_id, role):
        for bucket, fingerprint in covered.fingerprints.items():
            lake_fingerprints.setdefault(bucket, {})[covered.tiered_offsets.get(bucket, 0)] = (
                fingerprint
            )
    problems = []
    for bucket, by_offset in sorted(lake_fingerprints.items()):
        log_fingerprints = fingerprints(bucket, by_offset)
        odd = [
            end
            for end in sorted(by_offset)
            if log_fingerprints.get(end, by_offset[end]) != by_offset[end]
        ]
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
    lake_files = cut.files(table, RowRequest())
    filesystem = LakeFilesystem(cut.file_properties)
    problems = []
    for file in lake_files.files:
        try:
            with filesystem.open_parquet(file.path, file_bytes=file.file_bytes) as opened_file:
                rows = opened_file.metadata.num_rows
        except StreamhouseError as error:
            problems.append(error.message)
            continue
        if rows != file.row_count:
            problems.append(f"file {file.path} has {rows} rows, not {file.row_count}")
    return [*problems, *_delete_problems(filesystem, lake_files.files)]


def _delete_problems(filesystem: LakeFilesystem, files: Sequence[LakeFile]) -> Iterator[str]:
    """Yield the damage of files of deletes; a file with several vectors may be named once each."""
    paths = [file.path for file in files]
    # Many data files may share a file of position deletes.
    for deletes in dict.fromkeys(deletes for file in files for deletes in file.deletes):
        try:
            read_deleted_positions(filesystem, [deletes], data_paths=paths)
        except StreamhouseError as error:
            yield error.message


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
        live_offsets = distinct(offsets[offsets >= start])
        row_count = max(0, end - start)
        if (
            not table.is_primary_key_table
            and len(live_offsets) != row_count
            and not (len(live_offsets) < row_count and _may_lack_rows(catalog, table))
        ):
            problems.append(
                f"bucket {bucket}: the lake has {len(live_offsets)} of the {row_count} rows below"
                " its tiered offset"
            )
        # A successor of an expired snapshot may cover more than what is known of.
        expected_offsets = expected.get((bucket, end))
        if expected_offsets is not None:
            for odd, problem in (
                (
                    np.setdiff1d(lasting.get((bucket, end), expected_offsets), offsets),
                    "that it must have are missing",
                ),
                (np.setdiff1d(offsets, expected_offsets), "that it has were replaced or deleted"),
            ):
                if len(odd):
                    problems.append(
                        f"bucket {bucket}: {len(odd)} rows {problem}; the first is of offset"
                        f" {odd[0]}"
                    )
    return problems


def _may_lack_rows(catalog: LakeCatalog, table: TableInfo) -> bool:
    """Whether another engine has deleted rows of a log table, which is allowed."""
    return open_lake_table(catalog, str(table.path)).was_changed_outside(table)
