"""Rows in the making: columns over all records, and which records make no row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import RequestTooLargeError
from streamhouse.core.text.text_rows import width_of

__all__ = ["Bad", "Draft", "DraftBounds", "MovedRows", "first_that_differs", "spread_out"]

Bad = dict[int, tuple[str | None, str]]
"""Why records make no row, by their numbers: the column, and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBounds:
    """What the rows of a batch of records may come to."""

    what: str
    """What errors begin with, as in "produce to 'db.t'"."""
    bytes_max: int

    def check(self, types: Mapping[str, pa.DataType], count: int) -> None:
        """Raise `RequestTooLargeError` if so many rows without values take too much."""
        self.check_bytes(count, count * width_of(types.values()))

    def check_bytes(self, count: int, byte_count: int) -> None:
        """Raise `RequestTooLargeError` if the rows of `count` records take too much."""
        if byte_count > self.bytes_max:
            raise RequestTooLargeError(
                f"{self.what}: {count} records take more than {self.bytes_max} bytes as rows"
                " (body_bytes_max); send smaller batches"
            )


@dataclass(frozen=True, slots=True)
class MovedRows:
    """The records, by number, that give a row another key, and the keys that the rows had."""

    records: npt.NDArray[np.int64]
    old_keys: Mapping[str, pa.Array]


@dataclass(slots=True, kw_only=True)
class Draft:
    """What one part of every record says; columns that it does not name are missing.

    `deletes` has the records that delete the row of their key, `skipped` those that say nothing.
    Records of `moved` write their row, and delete the row of the old key before.
    """

    columns: dict[str, pa.Array]
    bad: Bad = field(default_factory=dict)
    deletes: npt.NDArray[np.bool_] | None = None
    skipped: npt.NDArray[np.bool_] | None = None
    moved: MovedRows | None = None


def spread_out(
    texts: pa.BinaryArray, read: Callable[[pa.BinaryArray], tuple[pa.RecordBatch, Bad]]
) -> tuple[pa.RecordBatch, Bad]:
    """Return what `read` makes of the texts that are there; the rows of the others are null."""
    if not texts.null_count:
        return read(texts)
    present = np.flatnonzero(texts.is_valid().to_numpy(zero_copy_only=False))
    rows, bad = read(texts.take(pa.array(present)))
    places = np.full(len(texts), -1, np.int64)
    places[present] = np.arange(len(present))
    indices = pa.array(places, mask=places < 0)
    return rows.take(indices), {int(present[at]): why for at, why in bad.items()}


def first_that_differs(one: pa.Array, other: pa.Array) -> npt.NDArray[np.int64]:
    """Return where both arrays have a value, and not the same."""
    return np.flatnonzero(
        pc.fill_null(pc.not_equal(one, other), False).to_numpy(zero_copy_only=False)
    )
