"""Which row versions the changelog retracted, and the names of change types in Spark.

The rule (model/changelog.py): a version at offset p lives until a change retracts p. So a union
read needs only the `__retracts` column of the whole tail. The driver makes one sorted array per
bucket of the column; every piece of the plan gets the part within its own offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.model.changelog import (
    CHANGE_TYPE_NAMES,
    INSERT,
    UPDATE_AFTER,
)

__all__ = ["UPSERTS", "change_type_array", "change_type_mask", "retracted_mask"]

UPSERTS: Final = (INSERT, UPDATE_AFTER)
"""The change types whose row is a new version."""

_DENSE_SPAN_MAX: Final = 16
"""Offsets of a batch that lie this close together, in offsets a row, are found by a table."""

_NAME_BYTES: Final = np.frombuffer("".join(CHANGE_TYPE_NAMES).encode(), dtype=np.uint8).reshape(
    len(CHANGE_TYPE_NAMES), 2
)


def retracted_mask(
    offsets: npt.NDArray[np.int64], retracted: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return for each of `offsets`, in any order, whether the sorted `retracted` has the offset."""
    gone = np.zeros(len(offsets), dtype=np.bool_)
    if len(offsets) == 0 or len(retracted) == 0:
        return gone
    low, high = int(offsets.min()), int(offsets.max())
    near = retracted[np.searchsorted(retracted, low) : np.searchsorted(retracted, high + 1)]
    if len(near) == 0:
        return gone
    if high - low < _DENSE_SPAN_MAX * len(offsets):
        # Two gathers, where a search would cost a binary search a row.
        flags = np.zeros(high - low + 1, dtype=np.bool_)
        flags[near - low] = True
        return flags[offsets - low]
    positions = np.searchsorted(near, offsets)
    positions[positions == len(near)] = 0
    return np.asarray(near[positions] == offsets)


def change_type_mask(names: pa.StringArray, change_types: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Return for each name made by `change_type_array` whether the change type is requested."""
    _, ends, text = names.buffers()
    keep = np.zeros(len(names), dtype=np.bool_)
    if len(names):
        first = int(np.frombuffer(ends, dtype=np.int32)[names.offset])
        letters = np.frombuffer(text, dtype=np.uint8)[first : first + 2 * len(names)].reshape(-1, 2)
        for code in change_types:
            keep |= (letters == _NAME_BYTES[code]).all(axis=1)
    return keep


def change_type_array(codes: npt.NDArray[np.int8]) -> pa.StringArray:
    """Return `+I`, `-U`, ... for codes; all names have two characters."""
    ends = np.arange(len(codes) + 1, dtype=np.int32) * 2
    text = np.ascontiguousarray(_NAME_BYTES[codes])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.string(), len(codes), buffers)
