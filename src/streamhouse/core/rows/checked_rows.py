"""The value between readers of rows and writers: the rows that fit, and why others do not."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["CheckedRows", "Misfit", "Misfits", "Original", "ReadRows", "broken_rows", "joined"]


class Misfit(NamedTuple):
    """Why a row does not fit its table; `column` is None if no single column is the cause.

    `constraint` is the name of the constraint that the row breaks, if the row has the table's form.
    """

    column: str | None
    reason: str
    constraint: str | None = None


Misfits = dict[int, Misfit]
"""Position of a row among all rows that were read -> why the row does not fit."""

Original = Callable[[int], Mapping[str, Any]]
"""Returns the values of the row at a position, as the sender wrote them."""


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Rows as columns of the requested types, before the check against a table.

    `rows` has a row at every position; the values of a misfit have no meaning. Without `original`
    the rows themselves have the original values.
    """

    rows: pa.RecordBatch
    misfits: Misfits
    original: Original | None = None


@dataclass(frozen=True, slots=True)
class CheckedRows:
    """Rows that fit their table, in order, and the misfits among the rows that were read.

    Args:
        rows: the rows that fit, in the table's types.
        misfits: the other rows, with ascending positions.
        operations: the operation of each row (`model.changelog`); None: a column of `rows` has the
            change types, or all rows have the operation of the write.
        positions: the position of each row; None: all positions without a misfit.
        original: returns the original values of a misfit.
        original_nbytes: the memory that `original` needs.
    """

    rows: pa.RecordBatch
    misfits: Misfits
    operations: npt.NDArray[np.int8] | None = None
    positions: npt.NDArray[np.int64] | None = None
    original: Original | None = None
    original_nbytes: int = 0

    @property
    def row_count(self) -> int:
        """The number of rows that were read, if each row has one position."""
        return int(self.rows.num_rows) + len(self.misfits)

    def first_misfit(self) -> tuple[int, Misfit]:
        """Return the first misfit and its position; there must be one."""
        return next(iter(self.misfits.items()))

    def original_of(self, position: int) -> Mapping[str, Any]:
        """Return the original values of a misfit; none if they are not kept."""
        return {} if self.original is None else self.original(position)

    def _original_after(self, first: int, position: int) -> Mapping[str, Any]:
        return self.original_of(first + position)

    def parts(self, counts: Sequence[int]) -> Iterator[CheckedRows]:
        """Yield the rows of consecutive ranges of positions, given the lengths of the ranges.

        The rows need `positions`, and are not copied: the parts are slices.
        """
        assert self.positions is not None
        bounds = list(itertools.accumulate(counts, initial=0))
        rows = np.searchsorted(self.positions, bounds).tolist()
        for at, (first, end) in enumerate(itertools.pairwise(bounds)):
            start, stop = rows[at], rows[at + 1]
            yield CheckedRows(
                self.rows.slice(start, stop - start),
                {p - first: misfit for p, misfit in self.misfits.items() if first <= p < end},
                None if self.operations is None else self.operations[start:stop],
                self.positions[start:stop] - first,
                functools.partial(self._original_after, first),
                self.original_nbytes,
            )


def broken_rows(misfits: Iterable[Misfit]) -> Counter[str]:
    """Return how many misfits break each constraint; a row counts for the first it breaks."""
    return Counter(m.constraint for m in misfits if m.constraint is not None)


def joined(parts: Sequence[CheckedRows]) -> CheckedRows:
    """Return the parts of one write as one value.

    There must be a part. The parts have the same columns, and no operations or positions.
    """
    if len(parts) == 1:
        return parts[0]
    starts = list(itertools.accumulate((part.row_count for part in parts), initial=0))
    misfits = {
        start + position: misfit
        for start, part in zip(starts, parts, strict=False)
        for position, misfit in part.misfits.items()
    }

    def original(position: int) -> Mapping[str, Any]:
        part = bisect.bisect_right(starts, position) - 1
        return parts[part].original_of(position - starts[part])

    rows = pa.concat_batches([part.rows for part in parts])
    return CheckedRows(rows, misfits, original=original)
