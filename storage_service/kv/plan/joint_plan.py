"""Writes to several buckets of one table, of one or many requests, planned in one go.

A plan takes a fraction of a millisecond however few rows it has, so that a round of small requests
is planned as one. Their rows lie bucket after bucket, each bucket's in the order of the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.storage_service.kv.kv_tablet import KvTablet
from streamhouse.storage_service.kv.plan.upsert_plan import PlannedWrite, Stretch, plan_stretches
from streamhouse.storage_service.kv.plan.write_input import check_rows

__all__ = ["JointPlan", "plan_jointly"]


@dataclass(frozen=True, slots=True)
class JointPlan:
    """One write a bucket, and which of its changes each row made.

    `_row_numbers` are those of the rows that count; `_changes` has, by these, the changes of all
    rows up to it. `_starts` is how many changes there are before each bucket's.
    """

    writes: Sequence[PlannedWrite]
    _row_numbers: npt.NDArray[np.int64]
    _changes: npt.NDArray[np.int64]
    _starts: Sequence[int]

    def change_end(self, bucket: int, row_end: int) -> int:
        """Return how many changes of the bucket at position `bucket` its rows below `row_end` make.

        Rows are numbered as they were given, over all buckets.
        """
        counted = int(np.searchsorted(self._row_numbers, row_end))
        return int(self._changes[counted - 1]) - self._starts[bucket] if counted else 0


def plan_jointly(
    buckets: Sequence[KvTablet],
    rows: pa.RecordBatch,
    row_ends: Sequence[int],
    *,
    operations: npt.NDArray[np.int8] | None = None,
    columns: Sequence[str] | None = None,
) -> JointPlan:
    """Plan rows of several buckets of one table, those of each up to its end in `row_ends`.

    As `KvTablet.plan` for each, and on their threads; `accept` the writes next, or forget them.
    Raises if any row is wrong.
    """
    rules, codec = buckets[0].rules, buckets[0].codec
    for bucket in buckets:
        bucket.check_backlog()
    given = check_rows(rows, rules, operations=operations, columns=columns)

    def fetch(keys: pa.Array, key_ends: Sequence[int]) -> pa.Array:
        starts = [0, *key_ends[:-1]]
        return pa.concat_arrays(
            [
                bucket.newest(keys.slice(start, end - start))
                for bucket, start, end in zip(buckets, starts, key_ends, strict=True)
            ]
        )

    # Rows that do nothing were left out.
    kept_ends = np.searchsorted(given.row_numbers, row_ends).tolist()
    stretches = [
        Stretch(end, bucket.planned_offset) for bucket, end in zip(buckets, kept_ends, strict=True)
    ]
    writes, changes = plan_stretches(given, fetch, rules=rules, codec=codec, stretches=stretches)
    counts = np.cumsum([0, *(write.changelog.num_rows for write in writes)])
    return JointPlan(writes, given.row_numbers, changes, counts[:-1].tolist())
