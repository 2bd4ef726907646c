"""Running aggregates over segments of consecutive values, without Python per value.

A segment is a run of values aggregated into one state, from a start to the next. Each function
returns the state after every value: the aggregate of its segment up to the value.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = [
    "Segments",
    "extreme_positions",
    "latest_valid_positions",
    "running_any",
    "running_decimal_sums",
    "running_float_sums",
    "running_integer_sums",
    "running_texts",
]


class Segments:
    """The starts of segments among `count` values; the first starts at 0."""

    def __init__(self, starts: npt.NDArray[np.int64], count: int) -> None:
        self.starts: Final = starts
        self.lengths: Final = np.diff(np.append(starts, count))
        self.index: Final = np.repeat(np.arange(len(starts)), self.lengths)


def latest_valid_positions(
    valid: npt.NDArray[np.bool_], segments: Segments
) -> npt.NDArray[np.int64]:
    """Return the position of the latest valid value so far, else of the segment's start."""
    places = np.zeros(len(valid), dtype=np.int64)
    places[segments.starts] = segments.starts
    valid_positions = np.flatnonzero(valid)
    places[valid_positions] = valid_positions
    latest: npt.NDArray[np.int64] = np.maximum.accumulate(places)
    return latest


def running_any(marked: npt.NDArray[np.bool_], segments: Segments) -> npt.NDArray[np.bool_]:
    """Return whether any value of the segment was marked so far."""
    total = np.cumsum(marked, dtype=np.int64)
    counts_before = total[segments.starts] - marked[segments.starts]
    any_marked: npt.NDArray[np.bool_] = total > counts_before[segments.index]
    return any_marked


def running_integer_sums(
    values: npt.NDArray[np.int64], segments: Segments
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the sums, and the overflows of 64 bits; sums after an overflow are meaningless."""
    # Sums over all segments wrap around; the difference within one is right modulo 2**64.
    with np.errstate(over="ignore"):
        total = np.cumsum(values)
        sums_before = total[segments.starts] - values[segments.starts]
        sums = total - sums_before[segments.index]
        previous = sums - values
    overflow = ((previous ^ sums) & (values ^ sums)) < 0
    return sums, overflow


def running_decimal_sums(values: npt.NDArray[Any], segments: Segments) -> npt.NDArray[Any]:
    """Return the sums of Python integers, an object array; they never overflow."""
    total = np.cumsum(values)
    sums_before = total[segments.starts] - values[segments.starts]
    sums: npt.NDArray[Any] = total - sums_before[segments.index]
    return sums


def running_float_sums(values: npt.NDArray[Any], segments: Segments) -> npt.NDArray[Any]:
    """Return the sums, added strictly one by one for the rounding of single upserts."""
    sums = values.copy()
    bits = np.frexp(segments.lengths - 1)[1]
    # Segments of similar lengths make a matrix: the number of length classes is always small.
    for bit in np.unique(bits[segments.lengths > 1]):
        chosen = np.flatnonzero((bits == bit) & (segments.lengths > 1))
        lengths = segments.lengths[chosen]
        width = int(lengths.max())
        columns = np.arange(width)
        positions = segments.starts[chosen][:, None] + np.minimum(columns, lengths[:, None] - 1)
        matrix = np.add.accumulate(values[positions], axis=1)
        inside = columns < lengths[:, None]
        sums[positions[inside]] = matrix[inside]
    return sums


def extreme_positions(
    values: pa.Array, segments: Segments, *, greatest: bool
) -> npt.NDArray[np.int64]:
    """Return the position of the least or greatest value so far; the earliest of equal values.

    Nulls are skipped; with only nulls so far the position is the segment's start. NaN is greater
    than any other number, as in Spark.
    """
    count = len(values)
    order = "descending" if greatest else "ascending"
    # Ranks are unique; equal values are ranked in order of position, and nulls come last.
    ranks = pc.rank(values, sort_keys=order, tiebreaker="first")
    rank = ranks.to_numpy().astype(np.int64) - 1
    if greatest and pa.types.is_floating(values.type):
        rank = _with_nans_first(rank, values)
    position = np.empty(count, dtype=np.int64)
    position[rank] = np.arange(count)
    # The least rank so far, in one pass: segments are kept apart by falling offsets.
    fall = (len(segments.starts) - 1 - segments.index) * count
    least = np.minimum.accumulate(rank + fall) - fall
    return position[least]


def _with_nans_first(rank: npt.NDArray[np.int64], values: pa.Array) -> npt.NDArray[np.int64]:
    """Return the ranks with NaN first; Arrow ranks NaN before the nulls."""
    is_nan = pc.is_nan(values).fill_null(False).to_numpy(zero_copy_only=False)
    nan_count = int(np.count_nonzero(is_nan))
    number_count = len(values) - values.null_count - nan_count
    moved = np.where(rank < number_count, nan_count, 0)
    return rank + np.where(is_nan, -number_count, moved)


def running_texts(texts: pa.Array, segments: Segments, *, delimiter: str) -> pa.Array:
    """Return the texts so far joined by `delimiter`; nulls are skipped, null without a text.

    One pass for each value of the longest segment: a text growing with every row is long anyway.
    """
    current = texts.take(pa.array(segments.starts))
    passes = [current]
    places = [segments.starts]
    alive = np.arange(len(segments.starts))
    for step in range(1, int(segments.lengths.max(initial=1))):
        longer = np.flatnonzero(segments.lengths[alive] > step)
        alive = alive[longer]
        current = current.take(pa.array(longer))
        positions = segments.starts[alive] + step
        next_texts = texts.take(pa.array(positions))
        joined = pc.binary_join_element_wise(current, next_texts, delimiter)
        current = pc.coalesce(joined, current, next_texts)
        passes.append(current)
        places.append(positions)
    back = np.empty(len(texts), dtype=np.int64)
    back[np.concatenate(places)] = np.arange(len(texts))
    return pa.concat_arrays(passes).take(pa.array(back))
