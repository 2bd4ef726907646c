"""Plans writes to the buckets of one table together; one write is a list of one.

A plan takes a fraction of a millisecond even for few rows, so a group of small writes is planned
together. Rows are grouped by bucket, each bucket's rows in the order of the writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.model.changelog import OPERATION_DELETE, OPERATION_UPSERT
from streamhouse.core.model.hashing.key_hash import HashedKeys
from streamhouse.core.model.records.record_sequence import Continuity
from streamhouse.reading.where.checks import NO_CHECKS
from streamhouse.storage_service.kv.cache._write_behind import WriteBehind
from streamhouse.storage_service.kv.plan._few_rows import (
    FEW_ROWS_MAX,
    FewBucketRows,
    FewRowsPlan,
)
from streamhouse.storage_service.kv.plan.upsert_plan import (
    BucketRows,
    PlannedWrite,
    counts_at,
    plan_rows,
)
from streamhouse.storage_service.kv.plan.write_input import check_rows
from streamhouse.storage_service.kv.rows._stored_rows import only_written_in
from streamhouse.storage_service.kv.rows.row_codec import RowCodec
from streamhouse.storage_service.kv.table_rules import TableRules

__all__ = ["KeyWrite", "PlannedPart", "delete_of", "halves", "plan_writes"]


class KeyWrite(NamedTuple):
    """Changes of one request to one bucket. Without `operations` every row is an upsert.

    `row_numbers` are the rows' positions in the request, for errors. With `versions` only stored
    rows written at these offsets are visible at the write's turn. The columns are of version
    `schema_id` of the table's schema, None for the current version.
    """

    bucket: int
    rows: pa.RecordBatch
    operations: npt.NDArray[np.int8] | None = None
    sequence: int = 0
    row_numbers: npt.NDArray[np.int64] | None = None
    versions: range | None = None
    continuity: Continuity = Continuity.EXACT
    schema_id: int | None = None

    @property
    def deletes(self) -> npt.NDArray[np.bool_] | None:
        """The mask of deleted rows; None if all are upserts."""
        return None if self.operations is None else self.operations == OPERATION_DELETE


def delete_of(bucket: int, keys: pa.RecordBatch, *, written_below: int | None = None) -> KeyWrite:
    """Return a write deleting the rows of `keys`, given as rows of the key columns.

    With `written_below` only rows with a version below the offset are deleted.
    """
    operations = np.full(keys.num_rows, OPERATION_DELETE, dtype=np.int8)
    versions = None if written_below is None else range(written_below)
    return KeyWrite(bucket, keys, operations, versions=versions)


def halves(write: KeyWrite) -> list[KeyWrite]:
    """Cut a write in two, unless it is one row; a `sequence` counts rows, up to the last one."""
    half = write.rows.num_rows // 2
    if half == 0:
        return [write]
    operations = write.operations
    first_half = None if operations is None else operations[:half]
    right = None if operations is None else operations[half:]
    position = write.sequence and write.sequence - (write.rows.num_rows - half)
    return [
        write._replace(rows=write.rows.slice(0, half), operations=first_half, sequence=position),
        write._replace(rows=write.rows.slice(half), operations=right),
    ]


class PlannedPart(NamedTuple):
    """The effect of one `KeyWrite`: the changes of `write` at the offsets [start, end)."""

    write: PlannedWrite
    start: int
    end: int

    @property
    def changelog(self) -> pa.RecordBatch:
        """The changes of the part."""
        first = self.start - self.write.base_offset
        return self.write.changelog.slice(first, self.end - self.start)


class Bucket(Protocol):
    """The bucket's interface for planning; `KvTablet`, on the changing thread."""

    @property
    def rules(self) -> TableRules:
        """The table's rules, the same for all buckets."""

    @property
    def codec(self) -> RowCodec:
        """The table's codec, the same for all buckets."""

    @property
    def few_rows(self) -> FewRowsPlan | None:
        """The table's plan for few rows, the same for all buckets."""

    @property
    def planned_offset(self) -> int:
        """The offset of the next change."""

    @property
    def row_bytes_max(self) -> int:
        """An upper bound of the stored rows' lengths."""

    @property
    def backlog(self) -> WriteBehind:
        """The changes not handed over yet; a full backlog forbids further plans."""

    def newest(self, hashed: HashedKeys) -> pa.Array:
        """Return the values of distinct keys after all planned writes."""

    def newest_few(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """As `newest`, for few keys."""


def plan_writes(
    buckets: Sequence[Bucket],
    writes: Sequence[KeyWrite],
    *,
    columns: Sequence[str] | None,
    is_decided: bool = False,
) -> list[PlannedPart]:
    """Plan `writes` of one schema in order; return the effect of each.

    `columns` makes partial updates. The rows of a decided transaction were judged by the table's
    constraints before the decision, and are not judged again. Nothing is changed: next the buckets
    `accept` the planned writes, or the plan is dropped. Raises for any wrong write; row numbers in
    errors are the request's only for a single write.
    """
    order = sorted(range(len(writes)), key=lambda position: writes[position].bucket)
    ordered = [writes[position] for position in order]
    numbers = sorted({write.bucket for write in writes})
    assert len(numbers) == len(writes) or all(write.versions is None for write in writes)
    for number in numbers:
        buckets[number].backlog.check()
    planned, counts = _few(buckets, ordered, columns, is_decided=is_decided) or _many(
        buckets, ordered, columns, is_decided=is_decided
    )
    of_bucket = dict(zip(numbers, planned, strict=True))
    next_offset = {number: write.base_offset for number, write in of_bucket.items()}
    parts: dict[int, PlannedPart] = {}
    counted = 0
    for position, write, count in zip(order, ordered, counts, strict=True):
        start = next_offset[write.bucket]
        end = start + count - counted
        parts[position] = PlannedPart(of_bucket[write.bucket], start, end)
        next_offset[write.bucket], counted = end, count
    return [parts[position] for position in range(len(writes))]


class _Planned(NamedTuple):
    """Each bucket's write; by write, the changes of all rows up to its last."""

    of_bucket: list[PlannedWrite]
    counts: Sequence[int]


def _few(
    buckets: Sequence[Bucket],
    writes: Sequence[KeyWrite],
    columns: Sequence[str] | None,
    *,
    is_decided: bool,
) -> _Planned | None:
    """Plan few rows one by one; None for too many or unsuitable rows."""
    few_rows = buckets[writes[0].bucket].few_rows
    row_ends = list(itertools.accumulate(write.rows.num_rows for write in writes))
    last = {write.bucket: end for write, end in zip(writes, row_ends, strict=True)}
    is_conditional = any(write.versions is not None for write in writes)
    if few_rows is None or row_ends[-1] > FEW_ROWS_MAX or is_conditional:
        return None
    of_buckets = [
        FewBucketRows(end, bucket.planned_offset, bucket.newest_few, bucket.row_bytes_max)
        for bucket, end in ((buckets[number], end) for number, end in last.items())
    ]
    plan = few_rows.plan(
        _rows(writes), _operations(writes), of_buckets, columns=columns, is_decided=is_decided
    )
    return None if plan is None else _Planned(plan[0], counts_at(plan[1], row_ends))


def _many(
    buckets: Sequence[Bucket],
    writes: Sequence[KeyWrite],
    columns: Sequence[str] | None,
    *,
    is_decided: bool,
) -> _Planned:
    is_one = len(writes) == 1
    rules, codec = buckets[writes[0].bucket].rules, buckets[writes[0].bucket].codec
    if is_decided and rules.checks:
        rules = replace(rules, checks=NO_CHECKS)
    checked = check_rows(
        _rows(writes),
        rules,
        operations=_operations(writes),
        columns=columns,
        row_numbers=writes[0].row_numbers if is_one else None,
    )
    # Rows without an effect were left out.
    row_ends: list[int] = [len(checked.row_numbers)]
    if not is_one:
        ends = list(itertools.accumulate(write.rows.num_rows for write in writes))
        row_ends = np.searchsorted(checked.row_numbers, ends).tolist()
    last = {write.bucket: (write, end) for write, end in zip(writes, row_ends, strict=True)}
    planned, changes = plan_rows(
        checked,
        [
            BucketRows(end, buckets[number].planned_offset, _newest(buckets[number], write))
            for number, (write, end) in last.items()
        ],
        rules=rules,
        codec=codec,
    )
    return _Planned(planned, counts_at(changes, row_ends))


def _rows(writes: Sequence[KeyWrite]) -> pa.RecordBatch:
    if len(writes) == 1:
        return writes[0].rows
    return pa.concat_batches([write.rows for write in writes])


def _operations(writes: Sequence[KeyWrite]) -> npt.NDArray[np.int8] | None:
    if len(writes) == 1:
        return writes[0].operations
    if all(write.operations is None for write in writes):
        return None
    return np.concatenate(
        [
            np.full(write.rows.num_rows, OPERATION_UPSERT, dtype=np.int8)
            if write.operations is None
            else write.operations
            for write in writes
        ]
    )


def _newest(bucket: Bucket, write: KeyWrite) -> Callable[[HashedKeys], pa.Array]:
    versions = write.versions
    if versions is None:
        return bucket.newest
    return lambda hashed: only_written_in(bucket.newest(hashed), versions)
