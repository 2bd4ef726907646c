"""What a piece of changelog means for the lake: which versions it adds, which ones it retracts.

A task knows it from two narrow columns of its bucket's range, `__change_type` and `__retracts`:
9 bytes a row. The rule is `fold_tail`'s; a task that has only part of the range looks ahead to the
range's end, so that no version is written that the same round retracts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.model.changelog import fold_tail
from streamhouse.storage_service.model.offsets import OffsetRange
from streamhouse.storage_service.model.schema import CHANGE_TYPE_COLUMN, RETRACTS_COLUMN
from streamhouse.tiering.tasks.log_chunks import read_log

__all__ = ["FoldedSplit", "fold_split"]


@dataclass(frozen=True, slots=True)
class FoldedSplit:
    """`survives`: for each row of the split, whether the lake gets it.

    `retracted`: the offsets of lake rows that the split's rows retract, ascending, each once.
    """

    survives: npt.NDArray[np.bool_]
    retracted: npt.NDArray[np.int64]


def fold_split(
    client: StorageClient,
    table: str,
    split: OffsetRange,
    *,
    boundary: int,
    bucket_end: int,
    schema_id: int,
) -> FoldedSplit:
    """Fold the changes of `split`, one of the splits of its bucket's range [boundary, bucket_end).

    `boundary` is the first offset that is not in the lake.
    """
    count = bucket_end - split.start
    change_types = np.empty(count, dtype=np.int8)
    retracts = np.empty(count, dtype=np.int64)
    ahead = OffsetRange(bucket=split.bucket, start=split.start, end=bucket_end)
    columns = (CHANGE_TYPE_COLUMN, RETRACTS_COLUMN)
    position = 0
    for batch in read_log(client, table, ahead, columns=columns, schema_id=schema_id):
        end = position + batch.data.num_rows
        change_types[position:end] = batch.data.column(CHANGE_TYPE_COLUMN).to_numpy()
        filled = batch.data.column(RETRACTS_COLUMN).fill_null(-1)
        retracts[position:end] = filled.to_numpy(zero_copy_only=False)
        position = end
    offsets = np.arange(split.start, bucket_end, dtype=np.int64)
    tail = fold_tail(change_types, retracts, offsets, boundary=split.start)
    if split.start == boundary and split.end == bucket_end:
        return FoldedSplit(survives=tail.survives, retracted=tail.retracted)
    # No version is retracted twice, so none of these comes twice.
    own = retracts[: split.row_count]
    return FoldedSplit(
        survives=tail.survives[: split.row_count],
        retracted=np.sort(own[(own >= 0) & (own < boundary)]),
    )
