"""Which row versions the changelog retracted, and what its change types are called in Spark.

The rule (model/changelog.py): a version at offset p lives until some change retracts p. So a union
read needs of the whole tail nothing but its `__retracts` column, of which the driver makes one
sorted array per bucket; every piece of the plan gets the part within its own offsets.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.storage_service.model.changelog import (
    CHANGE_TYPE_NAMES,
    INSERT,
    UPDATE_AFTER,
)

__all__ = ["UPSERTS", "change_type_array", "retracted_mask"]

UPSERTS: Final = (INSERT, UPDATE_AFTER)
"""The change types whose row is a new version."""

_NAME_BYTES: Final = np.frombuffer("".join(CHANGE_TYPE_NAMES).encode(), dtype=np.uint8).reshape(
    len(CHANGE_TYPE_NAMES), 2
)


def retracted_mask(
    offsets: npt.NDArray[np.int64], retracted: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return for each of `offsets` whether it is in `retracted`, which is sorted.

    Costs by what is retracted within the bounds of `offsets`, if these ascend as tiering wrote
    them.
    """
    gone = np.zeros(len(offsets), dtype=np.bool_)
    if len(offsets) == 0 or len(retracted) == 0:
        return gone
    if np.all(offsets[1:] >= offsets[:-1]):
        first = np.searchsorted(retracted, offsets[0])
        last = np.searchsorted(retracted, offsets[-1], side="right")
        near = retracted[first:last]
        positions = np.searchsorted(offsets, near)
        gone[positions[offsets[positions] == near]] = True
        return gone
    positions = np.searchsorted(retracted, offsets)
    positions[positions == len(retracted)] = 0
    return np.asarray(retracted[positions] == offsets)


def change_type_array(codes: npt.NDArray[np.int8]) -> pa.StringArray:
    """Return `+I`, `-U`, ... for codes; all names have two characters."""
    ends = np.arange(len(codes) + 1, dtype=np.int32) * 2
    text = np.ascontiguousarray(_NAME_BYTES[codes])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.string(), len(codes), buffers)
