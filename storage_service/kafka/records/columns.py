"""Records as columns: what a record batch carries of each record but its offset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

__all__ = ["HEADERS_TYPE", "TIMESTAMP_MS_MAX", "RecordColumns"]

HEADERS_TYPE: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
"""The headers of a record, in their order; a key may occur again, a value may be null.

A key is never null where it is read; a null one is written as an empty one.
"""

TIMESTAMP_MS_MAX: Final = (1 << 63) // 1000 - 1
"""The last millisecond that a column of microseconds can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordColumns:
    """Records in the order of their offsets, a column for each part of them.

    All columns are equally long; ValueError if they are not, or have another type.
    """

    keys: pa.BinaryArray
    """`binary`; null is a record without a key."""
    values: pa.BinaryArray
    """`binary`; null is a tombstone: a record without a value."""
    timestamps_ms: NDArray[np.int64]
    """Milliseconds since 1970 UTC, up to TIMESTAMP_MS_MAX; -1 is none."""
    headers: pa.ListArray | None = None
    """Of `HEADERS_TYPE`; a null list is an empty one. None where no record has any."""

    def __post_init__(self) -> None:
        if self.keys.type != pa.binary() or self.values.type != pa.binary():
            raise ValueError(f"keys are {self.keys.type}, values {self.values.type}, not binary")
        if self.timestamps_ms.dtype != np.int64 or self.timestamps_ms.ndim != 1:
            raise ValueError("timestamps are not one column of int64")
        if self.headers is not None and self.headers.type != HEADERS_TYPE:
            raise ValueError(f"headers are {self.headers.type}, not {HEADERS_TYPE}")
        lengths = {len(self.keys), len(self.values), len(self.timestamps_ms)}
        if self.headers is not None:
            lengths.add(len(self.headers))
        if len(lengths) > 1:
            raise ValueError(f"columns of {sorted(lengths)} records")

    def __len__(self) -> int:
        return len(self.timestamps_ms)

    def first(self, count: int) -> RecordColumns:
        """Return the first so many records."""
        headers = None if self.headers is None else self.headers.slice(0, count)
        return RecordColumns(
            keys=self.keys.slice(0, count),
            values=self.values.slice(0, count),
            timestamps_ms=self.timestamps_ms[:count],
            headers=headers,
        )
