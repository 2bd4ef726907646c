"""Drafts of rows: columns over all records, and the records without a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import RequestTooLargeError
from streamhouse.core.rows.checked_rows import Misfits, ReadRows
from streamhouse.core.text.text_rows import width_of

__all__ = ["Draft", "DraftBounds", "MovedRows", "differing_rows", "spread_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBounds:
    """The limit for the rows of a batch of records."""

    what: str
    """The beginning of errors, for example "produce to 'db.t'"."""
    bytes_max: int

    def check(self, types: Mapping[str, pa.DataType], count: int) -> None:
        """Raise `RequestTooLargeError` if `count` rows without values are too large."""
        self.check_bytes(count, count * width_of(types.values()))

    def check_bytes(self, count: int, byte_count: int) -> None:
        """Raise `RequestTooLargeError` if the rows of `count` records are too large."""
        if byte_count > self.bytes_max:
            raise RequestTooLargeError(
                f"{self.what}: {count} records take more than {self.bytes_max} bytes as rows"
                " (body_bytes_max); send smaller batches"
            )


@dataclass(frozen=True, slots=True)
class MovedRows:
    """The numbers of records with a new key for a row, and the old keys of the rows."""

    records: npt.NDArray[np.int64]
    old_keys: Mapping[str, pa.Array]


@dataclass(slots=True, kw_only=True)
class Draft:
    """The content of one part of every record; columns may be missing.

    `deletes` marks the records that delete the row of their key, `skipped` the records without
    effect. A misfit is a record without a row for another reason. Records of `moved` delete the row
    of the old key, then write their row.
    """

    columns: dict[str, pa.Array]
    misfits: Misfits = field(default_factory=dict)
    deletes: npt.NDArray[np.bool_] | None = None
    skipped: npt.NDArray[np.bool_] | None = None
    moved: MovedRows | None = None


def spread_out(texts: pa.BinaryArray, read: Callable[[pa.BinaryArray], ReadRows]) -> ReadRows:
    """Return the rows that `read` makes of present texts; rows of null texts are null."""
    if not texts.null_count:
        return read(texts)
    present = np.flatnonzero(texts.is_valid().to_numpy(zero_copy_only=False))
    present_rows = read(texts.take(pa.array(present)))
    places = np.full(len(texts), -1, np.int64)
    places[present] = np.arange(len(present))
    rows = present_rows.rows.take(pa.array(places, mask=places < 0))
    return ReadRows(rows, {int(present[at]): why for at, why in present_rows.misfits.items()})


def differing_rows(left_array: pa.Array, right_array: pa.Array) -> npt.NDArray[np.int64]:
    """Return the rows in which both arrays have a value, and the values differ."""
    return np.flatnonzero(
        pc.fill_null(pc.not_equal(left_array, right_array), False).to_numpy(zero_copy_only=False)
    )
