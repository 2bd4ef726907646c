"""Small requests planned together: what each of them does in each bucket, from one plan.

Only what is alike is put together: the same columns, the same types, and not so many rows that a
plan of its own costs nothing beside them. A plan is for all of them or for none: if any is wrong,
they are planned one by one, and each is told for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.storage_service.engine.keys.key_request import KeyRequest, KeyWrite
from streamhouse.storage_service.kv.kv_tablet import KvTablet
from streamhouse.storage_service.kv.plan.joint_plan import plan_jointly
from streamhouse.storage_service.kv.plan.upsert_plan import PlannedWrite
from streamhouse.storage_service.model.changelog import OPERATION_UPSERT

__all__ = ["JointPart", "alike", "plan_parts"]

_ROWS_MAX: Final = 10_000


class JointPart(NamedTuple):
    """Changes [start, end) of `write`, counted from its first one, are those of one `KeyWrite`."""

    write: PlannedWrite
    start: int
    end: int


def alike(requests: Sequence[KeyRequest]) -> Iterator[list[KeyRequest]]:
    """Yield the requests in order, those that can be planned together in one list."""
    together: list[KeyRequest] = []
    rows = 0
    for request in requests:
        count = request.row_count
        if together and not (rows + count <= _ROWS_MAX and _is_alike(together[0], request)):
            yield together
            together, rows = [], 0
        together.append(request)
        rows += count
    if together:
        yield together


def _is_alike(one: KeyRequest, other: KeyRequest) -> bool:
    if not one.writes or not other.writes or one.columns != other.columns:
        return False
    schema = one.writes[0].rows.schema
    return all(
        write.rows.schema.equals(schema) and write.written_below is None
        for write in (*one.writes, *other.writes)
    )


def plan_parts(
    rows_by_bucket: Sequence[KvTablet],
    writes: Sequence[KeyWrite],
    columns: Sequence[str] | None,
) -> list[JointPart]:
    """Plan `writes` in order, whose rows have one schema; return what each of them does.

    Nothing is accepted by the buckets yet. Raises if anything is wrong with any of them.
    """
    numbers = np.array([write.bucket for write in writes])
    order = np.argsort(numbers, kind="stable")
    ordered = [writes[i] for i in order]
    ends = np.cumsum([write.rows.num_rows for write in ordered])
    buckets, last = np.unique(numbers[order][::-1], return_index=True)
    row_ends = ends[len(ordered) - 1 - last].tolist()
    plan = plan_jointly(
        [rows_by_bucket[bucket] for bucket in buckets],
        pa.concat_batches([write.rows for write in ordered]),
        row_ends,
        operations=_operations(ordered),
        columns=columns,
    )
    parts: list[JointPart | None] = [None] * len(writes)
    place_of = {int(bucket): place for place, bucket in enumerate(buckets)}
    starts = dict.fromkeys(range(len(buckets)), 0)
    for i, write, row_end in zip(order, ordered, ends.tolist(), strict=True):
        place = place_of[write.bucket]
        end = plan.change_end(place, row_end)
        parts[i] = JointPart(plan.writes[place], starts[place], end)
        starts[place] = end
    return [part for part in parts if part is not None]


def _operations(writes: Sequence[KeyWrite]) -> npt.NDArray[np.int8] | None:
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
