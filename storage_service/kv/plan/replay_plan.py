"""Changes read back from the log, as a planned write: what is left of them to store."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from streamhouse.storage_service.kv.plan.key_chains import chains_of
from streamhouse.storage_service.kv.plan.upsert_plan import PlannedWrite
from streamhouse.storage_service.kv.plan.write_input import TableRules
from streamhouse.storage_service.kv.rows.row_codec import RowCodec, stamp_versions
from streamhouse.storage_service.model.bucketing import encode_key
from streamhouse.storage_service.model.changelog import DELETE, INSERT, UPDATE_BEFORE
from streamhouse.storage_service.model.schema import CHANGE_TYPE_COLUMN

__all__ = ["plan_replay"]


def plan_replay(
    changelog: pa.RecordBatch, *, rules: TableRules, codec: RowCodec, base_offset: int
) -> PlannedWrite:
    """Return what storing the changes of `changelog`, the first at `base_offset`, takes.

    The state they meet is not needed: every change says what it leaves behind.
    """
    types = changelog.column(CHANGE_TYPE_COLUMN).to_numpy()
    lines = np.flatnonzero(types != UPDATE_BEFORE)
    rows = changelog.select(rules.schema.names)
    keys = encode_key([rows.column(name) for name in rules.primary_key]).take(pa.array(lines))
    chains = chains_of(keys)
    last = lines[chains.row[chains.last()]]
    gone = types[last] == DELETE
    values = codec.encode(rows.take(pa.array(last)))
    stamp_versions(values, base_offset + last)
    if gone.any():
        values = values.take(pa.array(np.arange(len(last)), mask=gone))
    return PlannedWrite(
        base_offset=base_offset,
        changelog=changelog,
        keys=chains.keys,
        values=values,
        row_count_delta=int((types == INSERT).sum() - (types == DELETE).sum()),
    )
