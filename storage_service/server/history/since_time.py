"""The first row of a bucket that was written at a time or later, in log or lake.

A row that left the log counts as long as the lake has the row. If lost rows, in neither log nor
lake, may be of the time or later, the answer contains the range of the lost rows.

`LogTablet` ensures that time never goes back within a bucket. A row older than the time therefore
proves the same of all earlier rows. The log's first segment has the time of the rows removed before
the segment, which gives the same proof without a read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from streamhouse.core.errors import (
    OffsetOutOfRangeError,
    OverloadedError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.core.model.lake.older_rows import WrittenAt
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.directory.runtime import RunBlocking
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.server.history.failures import failure_of
from streamhouse.storage_service.server.history.lake_reads import LakeReads, Older, OlderReads
from streamhouse.storage_service.server.history.readable_offsets import (
    ReadableOffsets,
    readable_offsets,
)

__all__ = ["Answer", "SinceTime", "TimeQuestion", "first_since", "offset_of"]

_ATTEMPTS_MAX: Final = 4


class TimeQuestion(NamedTuple):
    """The search for a bucket's first row from `offset_min` on written at the time or later."""

    table: OpenTable
    bucket: int
    timestamp_us: int
    offset_min: int = 0


class SinceTime(NamedTuple):
    """The offset of the first readable row of a time or later, or the high watermark.

    `timestamp_us` is the row's time; None without such a row. `lost` are rows in neither log nor
    lake that may have been written at the time or later; None without such rows.
    """

    offset: int
    timestamp_us: int | None
    lost: OffsetRange | None


Answer: TypeAlias = SinceTime | StreamhouseError


def offset_of(question: TimeQuestion, answer: Answer, *, skip_lost: bool = False) -> int:
    """Return the offset of an answer; raises the error of a failed search.

    Raises `OffsetOutOfRangeError` if rows of the time may be lost, unless `skip_lost`.
    """
    if isinstance(answer, StreamhouseError):
        raise answer
    if answer.lost is None or skip_lost:
        return answer.offset
    table, lost_rows = question.table, answer.lost
    advice = ""
    if table.info.is_primary_key_table and not table.properties.datalake_changelog:
        advice = ", as the lake keeps the changes of a table with table.datalake.changelog only"
    end = table.tablet(question.bucket).high_watermark
    raise OffsetOutOfRangeError(
        f"table '{table.path}', bucket {question.bucket}: which row is the first since epoch"
        f" microsecond {question.timestamp_us} cannot be told: rows"
        f" [{lost_rows.start}, {lost_rows.end}) have left the log (table.log.ttl) and are not in"
        f" the lake{advice}; begin at a later time, at an offset from {lost_rows.end} to {end}, or"
        " with 'earliest'"
    )


@dataclass(slots=True)
class _Search:
    """A question and the state of its search."""

    question: TimeQuestion
    offsets: ReadableOffsets
    info: TableInfo
    answer: Answer | None = None
    in_log: SinceTime | None = None
    is_moved: bool = False

    @property
    def first(self) -> int:
        """The first offset of the search, readable or not."""
        return max(self.offsets.first, self.question.offset_min)

    @property
    def start(self) -> int:
        """The first readable offset of the search."""
        return max(self.offsets.start, self.question.offset_min)

    def lost(self) -> OffsetRange | None:
        """Return the range of lost rows within the search."""
        if self.first >= self.start:
            return None
        return OffsetRange(bucket=self.question.bucket, start=self.first, end=self.start)


async def first_since(
    questions: Sequence[TimeQuestion], *, run: RunBlocking, lake_reads: LakeReads
) -> list[Answer]:
    """Return the answer to each question, in order. Event loop only."""
    answers: list[Answer | None] = [None] * len(questions)
    open_numbers = list(range(len(questions)))
    for _ in range(_ATTEMPTS_MAX):
        searches = {n: _begun(questions[n]) for n in open_numbers}
        await run(_look_in_log, tuple(searches.values()))
        older = [s for s in searches.values() if s.answer is None and not s.is_moved]
        if older:
            try:
                await lake_reads.run(functools.partial(_look_in_lake, older))
            except OverloadedError as error:
                for search in older:
                    search.answer = error.with_traceback(None)
        for number, search in searches.items():
            answers[number] = search.answer
        open_numbers = [n for n in open_numbers if answers[n] is None]
        if not open_numbers:
            break
    return [_moved(q) if a is None else a for q, a in zip(questions, answers, strict=True)]


def _begun(question: TimeQuestion) -> _Search:
    table = question.table
    offsets = readable_offsets(table, question.bucket)
    return _Search(question, offsets, table.info)


def _moved(question: TimeQuestion) -> StreamhouseError:
    return UnavailableError(
        f"table '{question.table.path}', bucket {question.bucket}: rows left the log"
        f" {_ATTEMPTS_MAX} times while a time was looked for; try again"
    )


def _look_in_log(searches: Sequence[_Search]) -> None:
    for search in searches:
        try:
            _look_in_one_log(search)
        except OffsetOutOfRangeError:
            # Retention took the row just now.
            search.is_moved = True
        except StreamhouseError as error:
            search.answer = error


def _look_in_one_log(search: _Search) -> None:
    """Set `answer` if the log gives the answer alone, else `in_log` for the search in the lake."""
    question, offsets = search.question, search.offsets
    tablet = question.table.tablet(question.bucket)
    begin = max(offsets.log_start, search.start)
    offset = max(tablet.offset_for_timestamp(question.timestamp_us), begin)
    written_us = None
    if offset < offsets.end:
        written_us = tablet.read(offset, bytes_max=1)[0].timestamp_us
    if tablet.first_stored_offset > offsets.log_start:
        search.is_moved = True
        return
    in_log = SinceTime(min(offset, offsets.end), written_us, None)
    if search.first >= begin or offset > begin or question.timestamp_us > tablet.removed_until_us():
        search.answer = in_log
    elif search.start < offsets.log_start:
        search.in_log = in_log
    else:
        search.answer = in_log._replace(lost=search.lost())


def _look_in_lake(searches: Sequence[_Search], older: Older) -> None:
    for search in searches:
        if isinstance(older, StreamhouseError):
            search.answer = older
            continue
        try:
            search.answer = _in_lake(search, older)
        except Exception as error:  # noqa: BLE001 - outermost for a bucket
            question = search.question
            doing = f"looking for a time in table '{question.table.path}', bucket {question.bucket}"
            search.answer = failure_of(error, doing)


def _in_lake(search: _Search, older: OlderReads) -> SinceTime:
    assert search.in_log is not None, "the log was looked at before"
    lost = search.lost()
    if lost is not None:
        oldest = _written_since(search, older, 0)
        if oldest is not None and oldest.timestamp_us < search.question.timestamp_us:
            lost = None
    row = _written_since(search, older, search.question.timestamp_us)
    if row is None:
        return search.in_log._replace(lost=lost)
    return SinceTime(row.offset, row.timestamp_us, lost)


def _written_since(search: _Search, older: OlderReads, timestamp_us: int) -> WrittenAt | None:
    """Return the lake's first row below the log written at `timestamp_us` or later."""
    question = search.question
    row = older.first_since(
        question.table, search.info, question.bucket, timestamp_us, offset=search.start
    )
    return row if row is not None and row.offset < search.offsets.log_start else None
