"""Records as columns, without offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

__all__ = ["HEADERS_TYPE", "TIMESTAMP_MS_MAX", "RecordColumns"]

HEADERS_TYPE: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
"""The headers of a record, in order; keys may repeat, and values may be null.

Keys read from records are never null; a null key is written as an empty key.
"""

TIMESTAMP_MS_MAX: Final = (1 << 63) // 1000 - 1
"""The last millisecond of a column of microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordColumns:
    """Records in the order of their offsets, with a column for each part.

    All columns are equally long; other lengths or types raise ValueError.
    """

    keys: pa.BinaryArray
    """`binary`; null for a record without a key."""
    values: pa.BinaryArray
    """`binary`; null for a tombstone, a record without a value."""
    timestamps_ms: NDArray[np.int64]
    """Milliseconds since 1970 UTC, up to TIMESTAMP_MS_MAX; -1 for no timestamp."""
    headers: pa.ListArray | None = None
    """`HEADERS_TYPE`; a null list is empty. None if no record has headers."""

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
        """Return the first `count` records."""
        headers = None if self.headers is None else self.headers.slice(0, count)
        return RecordColumns(
            keys=self.keys.slice(0, count),
            values=self.values.slice(0, count),
            timestamps_ms=self.timestamps_ms[:count],
            headers=headers,
        )
