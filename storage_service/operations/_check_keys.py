"""The check of a bucket's rows by key against the changelog; both stay unchanged.

A row's value begins with the offset of the row's change. The rows must be exactly the versions
which the changelog has written and not retracted, with the same contents. Rows written before the
log's first offset can only be checked against later retractions.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.changelog import INSERT, UPDATE_AFTER
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN, RETRACTS_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.sorted_values import distinct
from streamhouse.storage_service.engine.keys.key_bucket import damage_of, table_rules
from streamhouse.storage_service.kv.plan.write_input import check_keys
from streamhouse.storage_service.kv.rocksdb_store import RocksdbStore
from streamhouse.storage_service.kv.rows.row_codec import RowCodec, stamp_versions, versions_of
from streamhouse.storage_service.kv.table_rules import TableRules
from streamhouse.storage_service.operations._check_log import CheckedLog
from streamhouse.storage_service.operations.findings import BucketFacts, CheckReport

__all__ = ["check_rows_by_key"]


def check_rows_by_key(
    directory: Path,
    log: CheckedLog,
    info: TableInfo,
    facts: BucketFacts,
    report: CheckReport,
    *,
    lake_ends: Collection[int],
) -> dict[int, npt.NDArray[np.int64]]:
    """Check the RocksDB in `directory` against the log with these `facts`.

    Returns end -> offsets for each of `lake_ends`, where known: the row versions of a lake table
    which covers the changes below the end.
    """
    where = f"table '{info.path}', bucket {facts.bucket}"
    if not directory.is_dir() or not any(directory.iterdir()):
        if facts.log_start_offset == 0:
            report.warning(where, "has no rows by key; the next start makes them again")
        else:
            report.error(
                where,
                f"has no rows by key, and the log begins only at {facts.log_start_offset}; a start"
                " makes them again if the lake has the rows before",
            )
        return {}
    damage = damage_of(directory)
    if damage is not None:
        report.error(where, f"{damage.reason}; the next start makes them again, if it can")
        return {}
    try:
        with _opened_copy(directory, info, facts.bucket) as store:
            versions = _check_store(store, log, info, facts, report, where=where)
    except (StreamhouseError, pa.ArrowException) as error:
        report.error(where, f"its rows by key are unreadable: {error}")
        return {}
    if versions is None:
        return {}
    applied = facts.applied_offset
    assert applied is not None, "set together with the versions"
    offsets_by_end = {}
    for end in lake_ends:
        if facts.log_start_offset <= end <= applied:
            # The lake has the live versions, and versions that were replaced after their tiering.
            all_versions = np.concatenate([versions, _retracted(log, applied, start=end)])
            offsets_by_end[end] = np.unique(all_versions[all_versions < end])
    return offsets_by_end


@contextmanager
def _opened_copy(directory: Path, info: TableInfo, bucket: int) -> Iterator[RocksdbStore]:
    """Open a copy: RocksDB writes to an opened directory. Files with rows are linked."""
    with tempfile.TemporaryDirectory(prefix="streamhouse-check-") as name:
        copy = Path(name)
        for path in directory.iterdir():
            if path.suffix == ".sst":
                (copy / path.name).symlink_to(path.absolute())
            elif path.name != "LOCK" and path.is_file():
                shutil.copyfile(path, copy / path.name)
        store = RocksdbStore(copy, table_id=info.table_id, bucket=bucket)
        try:
            yield store
        finally:
            store.close()


def _check_store(
    store: RocksdbStore,
    log: CheckedLog,
    info: TableInfo,
    facts: BucketFacts,
    report: CheckReport,
    *,
    where: str,
) -> npt.NDArray[np.int64] | None:
    """Return the offsets of the row versions; None if the log cannot be compared."""
    marker = store.written_marker
    facts.applied_offset, facts.key_count = marker.applied_offset, marker.row_count
    if marker.applied_offset > facts.log_end_offset:
        report.error(
            where,
            f"its rows by key have changes up to offset {marker.applied_offset}, the log ends at"
            f" {facts.log_end_offset}",
        )
    if marker.applied_offset < facts.log_start_offset:
        report.error(
            where,
            f"its rows by key have changes up to offset {marker.applied_offset}, the log starts at"
            f" {facts.log_start_offset}; the changes between are gone: serve with --rebuild",
        )
        return None
    versions = np.sort(np.concatenate([_no_offsets(), *_scanned_versions(store)]))
    if len(versions) != marker.row_count:
        report.error(where, f"has {len(versions)} rows by key, but counts {marker.row_count}")
    written, retracted = _changes(log, marker.applied_offset)
    live_offsets = np.setdiff1d(written, retracted, assume_unique=False)
    in_log = versions[versions >= facts.log_start_offset]
    for wrong, problem in (
        (np.setdiff1d(live_offsets, in_log), "the changelog has, and the rows by key have not"),
        (np.setdiff1d(in_log, live_offsets), "the rows by key have, and the changelog has not"),
        (np.intersect1d(versions, retracted), "the rows by key have, though they were replaced"),
    ):
        if len(wrong):
            report.error(
                where, f"{len(wrong)} row versions {problem}; the first is of offset {wrong[0]}"
            )
    _check_contents(store, log, info, live_offsets, report, where=where, end=marker.applied_offset)
    return versions


def _no_offsets() -> npt.NDArray[np.int64]:
    return np.empty(0, dtype=np.int64)


def _scanned_versions(store: RocksdbStore) -> Iterator[npt.NDArray[np.int64]]:
    """Read every row, and check every checksum of RocksDB on the way."""
    for _, values in store.scan():
        yield versions_of(values)


def _changes(log: CheckedLog, end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the offsets of the row versions that the log wrote, and of the replaced versions."""
    written, retracted = [_no_offsets()], [_no_offsets()]
    for base, batch in log.batches(end):
        offsets = np.arange(base, base + batch.num_rows, dtype=np.int64)
        written.append(offsets[_is_version(batch)])
        replaced = batch.column(RETRACTS_COLUMN).drop_null()
        retracted.append(replaced.to_numpy(zero_copy_only=False))
    return np.concatenate(written), distinct(np.concatenate(retracted))


def _retracted(log: CheckedLog, end: int, *, start: int) -> npt.NDArray[np.int64]:
    """Return the offsets of the versions replaced by the changes in [start, end)."""
    retracted_parts = [_no_offsets()]
    for base, batch in log.batches(end):
        later = batch.slice(min(max(start - base, 0), batch.num_rows))
        replaced = later.column(RETRACTS_COLUMN).drop_null()
        retracted_parts.append(replaced.to_numpy(zero_copy_only=False))
    return np.concatenate(retracted_parts)


def _is_version(batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    kinds = batch.column(CHANGE_TYPE_COLUMN).to_numpy(zero_copy_only=False)
    versions: npt.NDArray[np.bool_] = (kinds == INSERT) | (kinds == UPDATE_AFTER)
    return versions


def _check_contents(
    store: RocksdbStore,
    log: CheckedLog,
    info: TableInfo,
    live_offsets: npt.NDArray[np.int64],
    report: CheckReport,
    *,
    where: str,
    end: int,
) -> None:
    """Compare every row with a change in the log, byte by byte, by a lookup of its key."""
    rules: TableRules = table_rules(info)
    codec = RowCodec(
        info.schema, schema_id=info.schema_id, table=rules.table, earlier=rules.earlier
    )
    differing = 0
    first = -1
    for base, batch in log.batches(end):
        offsets = np.arange(base, base + batch.num_rows, dtype=np.int64)
        chosen = np.flatnonzero(np.isin(offsets, live_offsets))
        if not len(chosen):
            continue
        rows = batch.select(info.schema.names).take(pa.array(chosen))
        rows = pa.RecordBatch.from_arrays(rows.columns, schema=codec.arrow_schema)
        expected = codec.encode(rows)
        stamp_versions(expected, offsets[chosen])
        stored = codec.in_current_version(store.get(check_keys(rows, rules)))
        same = pc.fill_null(pc.equal(stored, expected), False)
        wrong = np.flatnonzero(~same.to_numpy(zero_copy_only=False))
        if len(wrong):
            first = first if differing else int(offsets[chosen[wrong[0]]])
            differing += len(wrong)
    if differing:
        report.error(
            where,
            f"{differing} rows by key differ from the changelog; the first is of offset {first}",
        )
