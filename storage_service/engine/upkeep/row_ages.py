"""The ages of rows in a table's buckets: offsets below which all rows are older than a time.

A row by key has the offset of its version, and no time. The log knows times while the log has the
changes. Marks keep this knowledge, in steps of a fraction of the requested age.

Invariants:
- a mark (time, offset) of a bucket: all rows below the offset were written at that time or earlier
- missing marks make rows look younger, never older
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from streamhouse.core.errors import CorruptDataError, OffsetOutOfRangeError
from streamhouse.core.model.offsets import buckets_to_json
from streamhouse.storage_service.directory.state_file import StateFile
from streamhouse.storage_service.log.log_tablet import LogTablet

__all__ = ["RowAges"]

_STEPS_PER_AGE: Final = 64
_STEP_US_MIN: Final = 1_000_000


class _Mark(NamedTuple):
    timestamp_us: int
    offset: int


class RowAges:
    """The marks of one table, in a file of its own. Blocking; one call at a time."""

    def __init__(self, file: StateFile) -> None:
        """Read the marks in `file`, which may be missing."""
        self._file = file
        self._marks = _load(file)

    def ends(self) -> dict[int, int]:
        """Return the greatest marked offset of each bucket with marks."""
        return {bucket: marks[-1].offset for bucket, marks in self._marks.items() if marks}

    def advance(self, tablets: Sequence[LogTablet], *, now_us: int, age_us: int) -> None:
        """Add the knowledge of the logs for rows older than `age_us`; durable on return."""
        step_us = max(age_us // _STEPS_PER_AGE, _STEP_US_MIN)
        old_us = now_us - age_us
        marks = {}
        for bucket, tablet in enumerate(tablets):
            known = self._marks.get(bucket, ())
            times = range(max(_time_us(known), old_us) + step_us, now_us, step_us)
            added = _new_marks(tablet, known[-1].offset if known else 0, times, now_us=now_us)
            marks[bucket] = _thinned([*known, *added], old_us=old_us, step_us=step_us)
        if any(marks[bucket] != self._marks.get(bucket) for bucket in marks):
            self._file.save(buckets_to_json(marks))
            self._marks = marks

    def end_before(self, bucket: int, tablet: LogTablet, timestamp_us: int) -> int:
        """Return an offset of the bucket below which all rows are older than a time, 0 if unknown.

        The greatest such offset, except for a step between two marks.
        """
        marks = self._marks.get(bucket, ())
        place = bisect_right(marks, timestamp_us - 1, key=_timestamp_us)
        marked = marks[place - 1].offset if place else 0
        return max(marked, _logged_end(tablet, timestamp_us) or 0)


def _new_marks(
    tablet: LogTablet, known_offset: int, times_us: Iterable[int], *, now_us: int
) -> Iterator[_Mark]:
    """Yield marks of offsets after `known_offset`, up to the last one there is."""
    end, start = tablet.high_watermark, tablet.log_start_offset
    if known_offset >= end:
        return
    if known_offset < start < end:
        try:
            yield _Mark(tablet.read(start, bytes_max=1)[0].timestamp_us, start)
        except OffsetOutOfRangeError:
            # Retention went on meanwhile; the next look finds where the log begins then.
            return
        known_offset = start
    for time_us in times_us:
        offset = _logged_end(tablet, time_us)
        if offset is not None and offset > known_offset:
            yield _Mark(time_us, offset)
            known_offset = offset
    # What is written next has this time at least.
    yield _Mark(max(now_us, tablet.now_us()), end)


def _logged_end(tablet: LogTablet, timestamp_us: int) -> int | None:
    """Return the offset of the first change of a time or later, if the log has one before it."""
    offset = tablet.offset_for_timestamp(timestamp_us)
    # Of what has left the log it knows only that it came first.
    return offset if offset > tablet.log_start_offset else None


def _thinned(marks: Sequence[_Mark], *, old_us: int, step_us: int) -> list[_Mark]:
    """Return those of `marks`, in order, that make a difference of more than a step."""
    # Rows that are old by any later mark are so already.
    first = max(bisect_right(marks, old_us - 1, key=_timestamp_us) - 1, 0)
    marks_kept: list[_Mark] = []
    for mark in marks[first:]:
        # After the clock was set back, a later mark says more about fewer or equal times.
        while marks_kept and marks_kept[-1].timestamp_us >= mark.timestamp_us:
            marks_kept.pop()
        if len(marks_kept) > 1 and mark.timestamp_us - marks_kept[-2].timestamp_us <= step_us:
            marks_kept.pop()
        marks_kept.append(mark)
    return marks_kept


def _time_us(marks: Sequence[_Mark]) -> int:
    return marks[-1].timestamp_us if marks else 0


def _timestamp_us(mark: _Mark) -> int:
    return mark.timestamp_us


def _load(file: StateFile) -> Mapping[int, Sequence[_Mark]]:
    if not file.exists():
        return {}
    try:
        value = file.load()
        return {
            int(bucket): [_Mark(int(time_us), int(offset)) for time_us, offset in marks]
            for bucket, marks in value.items()
        }
    except (CorruptDataError, TypeError, ValueError) as error:
        raise CorruptDataError(
            f"{file.path} holds no ages of rows ({error}); remove it, and they count from then on"
        ) from error
