"""Rows that were kept elsewhere, in the lake, as a planned write: what storing them again takes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.storage_service.errors import CorruptDataError
from streamhouse.storage_service.kv.plan.key_chains import chains_of
from streamhouse.storage_service.kv.plan.upsert_plan import PlannedWrite
from streamhouse.storage_service.kv.plan.write_input import TableRules
from streamhouse.storage_service.kv.rows.row_codec import RowCodec, stamp_versions
from streamhouse.storage_service.model.bucketing import encode_key

__all__ = ["plan_restore"]


def plan_restore(
    rows: pa.RecordBatch,
    versions: npt.NDArray[np.int64],
    *,
    rules: TableRules,
    codec: RowCodec,
    where: str,
) -> PlannedWrite:
    """Return what storing `rows`, written at the offsets `versions`, takes; no change is logged.

    Raises `CorruptDataError` if two of them have the same key.
    """
    assert len(versions) == rows.num_rows
    chains = chains_of(encode_key([rows.column(name) for name in rules.primary_key]))
    if not chains.distinct:
        raise CorruptDataError(f"{where}: the lake has two rows with the same key")
    values = codec.encode(rows)
    stamp_versions(values, versions)
    return PlannedWrite(
        base_offset=0,
        changelog=rows.slice(0, 0),
        keys=chains.keys,
        values=values,
        row_count_delta=rows.num_rows,
    )
