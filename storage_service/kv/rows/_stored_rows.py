"""The stored rows under the keys of a batch."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.storage_service.kv.rows.row_codec import RowCodec, versions_of

__all__ = ["StoredRows", "only_written_in"]


class StoredRows:
    """The stored row under each of a number of distinct keys, if any.

    `values` are the stored values, in the current version of the schema, null without a row.
    `found`, `versions` (-1 without a row) and `place` (position in `rows`, meaningless without a
    row) are by key.
    """

    def __init__(self, values: pa.Array, codec: RowCodec) -> None:
        self.values = codec.in_current_version(values)
        self._codec = codec
        self._present = self.values.drop_null() if values.null_count else self.values

    @cached_property
    def found(self) -> npt.NDArray[np.bool_]:
        """By key, whether a row is stored."""
        if self._present is self.values:
            return np.ones(len(self.values), dtype=np.bool_)
        found: npt.NDArray[np.bool_] = self.values.is_valid().to_numpy(zero_copy_only=False)
        return found

    @cached_property
    def versions(self) -> npt.NDArray[np.int64]:
        """By key, the offset of the stored version, or -1."""
        if self._present is self.values:
            return versions_of(self.values)
        versions = np.full(len(self.values), -1, dtype=np.int64)
        versions[self.found] = versions_of(self._present)
        return versions

    @cached_property
    def place(self) -> npt.NDArray[np.int64]:
        """By key, the position of its row in `rows`."""
        if self._present is self.values:
            return np.arange(len(self.values))
        return np.cumsum(self.found) - 1

    @cached_property
    def rows(self) -> pa.RecordBatch:
        """The rows that are stored, in order of their keys."""
        return self._codec.decode(self._present)


def only_written_in(values: pa.Array, versions: range) -> pa.Array:
    """Return `values` with null for values not written at the offsets `versions`.

    A value's stamp is the offset of its write.
    """
    is_stored = values.is_valid().to_numpy(zero_copy_only=False)
    positions = np.flatnonzero(is_stored)
    stamps = versions_of(values.drop_null())
    positions = positions[(stamps >= versions.start) & (stamps < versions.stop)]
    if len(positions) == int(is_stored.sum()):
        return values
    mask = np.ones(len(values), dtype=np.bool_)
    mask[positions] = False
    return values.take(pa.array(np.arange(len(values)), mask=mask))
