"""Planning the writes of a group: the changes of each request in each bucket, ready for the log.

Small requests of a kind share a plan: requests with equal columns and types, and so few rows that a
separate plan would cost more than the rows. A shared plan is all or nothing: if any request is
wrong, each request is planned separately and gets its own error. Nothing of a refused request stays
planned, in no bucket.

Few rows in memory are planned and applied at once, on any thread: about two milliseconds, without
waiting. The same holds for few plans of rows that meet few bytes; separate plans after a refusal
may be many.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from streamhouse.core.errors import (
    InternalError,
    RequestTooLargeError,
    StreamhouseError,
    UnknownOutcomeError,
)
from streamhouse.core.traces.stages import Stages
from streamhouse.storage_service.directory.runtime import clock_us
from streamhouse.storage_service.engine.keys.key_bucket import KeyBucket
from streamhouse.storage_service.engine.open_table import Appended
from streamhouse.storage_service.kv.plan.upsert_plan import PlannedWrite
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite, PlannedPart, plan_writes
from streamhouse.storage_service.log.append_queue import AppendResult, RoutedBatch

__all__ = ["SHORT_PLANS", "KeyPart", "KeyPlanner", "KeyRequest"]

_logger = logging.getLogger(__name__)

_TOGETHER_ROWS_MAX: Final = 10_000
# What takes about two milliseconds. The bytes are those that come, and those they may meet.
SHORT_PLANS: Final = 2
"""How many plans of few rows are made at once."""
_SHORT_WRITES: Final = 64
_SHORT_ROWS: Final = 1_024
_SHORT_VALUES: Final = 8_192
_SHORT_BYTES: Final = 256 << 10


@dataclass
class KeyPart:
    """The result of one request in one bucket; without `write` there is nothing to store.

    Several requests may have parts of the same `write`.
    """

    bucket: int
    start: int
    end: int
    timestamp_us: int = 0
    write: PlannedWrite | None = None
    changes: RoutedBatch | None = None


@dataclass
class KeyRequest:
    """A request, all or nothing; once planned, `parts` has an entry for each of `writes`."""

    writes: Sequence[KeyWrite]
    columns: Sequence[str] | None
    writer_id: int
    done: asyncio.Future[Appended]
    timestamp_us: int | None = None
    """Of a piece of a transaction, when that was decided; others are stamped as they are stored."""
    stages: Stages | None = None
    """Those of the call that writes, if somebody follows it."""
    parts: list[KeyPart] = field(default_factory=list)
    error: StreamhouseError | None = None

    row_count: int = field(init=False)
    schema: pa.Schema | None = field(init=False)
    """That of all its rows; None: it is not planned with others."""
    numbered_buckets: frozenset[tuple[int, int]] = frozenset()
    """The (writer, bucket) pairs whose next sequences it uses."""
    is_published: bool = field(init=False)
    """False: a piece of a transaction, which is published later and not with others."""

    def __post_init__(self) -> None:
        writes = self.writes
        self.row_count = sum(write.rows.num_rows for write in writes)
        # What has a condition of its own is planned by itself, and so are keys beside whole rows.
        schemas = [write.rows.schema for write in writes if write.versions is None]
        is_plain = len(schemas) == len(writes) and all(s.equals(schemas[0]) for s in schemas)
        self.schema = schemas[0] if schemas and is_plain else None
        if self.writer_id:
            self.numbered_buckets = frozenset((self.writer_id, write.bucket) for write in writes)

        self.is_published = self.timestamp_us is None

    def answer(self, buckets: Sequence[KeyBucket], commit_error: StreamhouseError | None) -> None:
        """Give the caller the offsets or the error, unless the caller has gone."""
        if self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
            return
        timestamp_us = 0
        ranges: dict[int, tuple[int, int]] = {}
        for part in self.parts:
            bucket = buckets[part.bucket]
            visible = bucket.log.high_watermark if self.is_published else bucket.rows.applied_offset
            # Also without changes: the rows may be those of an earlier request of the group.
            if part.end > visible:
                not_applied = UnknownOutcomeError(
                    f"{bucket.where}: the changes are stored but could not be applied; restart the"
                    " service, which applies them, and repeat the request with the same writer id"
                    " and sequence"
                )
                self.done.set_exception(commit_error or not_applied)
                return
            ranges[part.bucket] = (part.start, part.end)
            timestamp_us = max(timestamp_us, part.timestamp_us)
        self.done.set_result(Appended(ranges=ranges, timestamp_us=timestamp_us or clock_us()))

    def give_up(self) -> None:
        """Answer a request without an answer, after a bug or at the end of the writer."""
        if not self.done.done():
            self.done.set_exception(InternalError("the write failed; see the log"))


class KeyPlanner:
    """Plans writes to the buckets of one table."""

    def __init__(self, buckets: Sequence[KeyBucket], *, table: str, frame_bytes_max: int) -> None:
        self._buckets = buckets
        self._table = table
        self._frame_bytes_max = frame_bytes_max

    def is_short(self, requests: Iterable[KeyRequest]) -> bool:
        """Whether `SHORT_PLANS` plans and applying all take little time and wait for no disk."""
        writes = values = size = 0
        counts: dict[int, int] = {}
        for write in (write for request in requests for write in request.writes):
            batch = write.rows
            writes += 1
            counts[write.bucket] = counts.get(write.bucket, 0) + batch.num_rows
            values += batch.num_rows * batch.num_columns
            # Of a slice that is more than it has, which errs on the safe side.
            size += batch.get_total_buffer_size()
        planned = met = 0
        for number, count in counts.items():
            rows = self._buckets[number].rows
            count += rows.planned_row_count
            if not rows.writes_at_once(count):
                return False
            planned += rows.planned_row_count
            met += count * rows.row_bytes_max
        return (
            writes <= _SHORT_WRITES
            and max(sum(counts.values()), planned) <= _SHORT_ROWS
            and values <= _SHORT_VALUES
            and max(size, met) <= _SHORT_BYTES
        )

    def plan_at_once(self, requests: Sequence[KeyRequest]) -> tuple[bool, Iterator[None] | None]:
        """Plan as far as planning takes little time and waits for no disk.

        Returns `is_short`, and the remaining steps of `plan` for a thread, or None after the last
        step.
        """
        is_short = self.is_short(requests)
        steps = self.plan(requests)
        for _ in range(SHORT_PLANS + 1 if is_short else 1):
            if next(steps, self) is self:
                return is_short, None
        return is_short, steps

    def plan(self, requests: Sequence[KeyRequest]) -> Iterator[None]:
        """Give each request its parts or its error, in steps; for the holder of the rows.

        Yields before each step: a thread may do the remaining steps.
        """
        for together in _together(requests):
            pairs = [(write, request) for request in together for write in request.writes]
            if together[0].schema is not None and len(pairs) > 1:
                yield
                if self._refusal(pairs) is None:
                    continue
            for request in together:
                for write in request.writes:
                    yield
                    error = self._refusal([(write, request)])
                    if error is not None:
                        self.take_back([request])
                        request.error = error
                        break

    def take_back(self, requests: Iterable[KeyRequest]) -> None:
        """Undo the latest `plan`: nothing of the plan will be in the log."""
        first: dict[int, PlannedWrite] = {}
        for request in requests:
            for part in request.parts:
                if part.write is not None:
                    first.setdefault(part.bucket, part.write)
            request.parts.clear()
            request.error = None
        for bucket, write in first.items():
            # It and all that was planned after it.
            self._buckets[bucket].rows.abort(write)

    def _refusal(self, asked: Sequence[tuple[KeyWrite, KeyRequest]]) -> StreamhouseError | None:
        """Plan these writes together; return the error, if any: then nothing is planned."""
        try:
            self._plan(asked)
        except StreamhouseError as error:
            return error
        except Exception as error:  # outermost loop of a plan: others go on
            _logger.error("event=bug table=%s", self._table, exc_info=error)
            return InternalError("planning failed; see the service's log")
        return None

    def _plan(self, asked: Sequence[tuple[KeyWrite, KeyRequest]]) -> None:
        """Plan writes of requests with the same columns together, or nothing."""
        rows = [bucket.rows for bucket in self._buckets]
        new: list[KeyWrite] = []
        repeated: list[AppendResult | None] = []
        for write, request in asked:
            batch = self._buckets[write.bucket].repetition_of(write, request.writer_id)
            repeated.append(batch)
            if batch is None:
                new.append(write)
        first = asked[0][1]
        is_decided = not first.is_published
        planned = iter(
            plan_writes(rows, new, columns=first.columns, is_decided=is_decided) if new else ()
        )
        parts: list[KeyPart] = []
        writes: dict[int, PlannedWrite] = {}
        for (write, request), batch in zip(asked, repeated, strict=True):
            if batch is not None:
                ends = batch.base_offset, batch.end_offset
                parts.append(KeyPart(write.bucket, *ends, timestamp_us=batch.timestamp_us))
                continue
            part = self._part(write, request, next(planned))
            parts.append(part)
            if part.write is not None:
                writes[part.bucket] = part.write
        try:
            for bucket, planned_write in writes.items():
                rows[bucket].accept(planned_write)
        except Exception:
            # The next plan begins where the accepted writes end, so none of these may stay.
            for bucket, planned_write in writes.items():
                rows[bucket].abort_from(planned_write.base_offset)
            raise
        for (_, request), part in zip(asked, parts, strict=True):
            request.parts.append(part)

    def _part(self, write: KeyWrite, request: KeyRequest, planned: PlannedPart) -> KeyPart:
        start, end = planned.start, planned.end
        if start == end:
            return KeyPart(write.bucket, start, end)
        changes = planned.changelog
        payload = memoryview(changes.serialize()).cast("B")
        if len(payload) > self._frame_bytes_max:
            raise RequestTooLargeError(
                f"table '{self._table}', bucket {write.bucket}: {write.rows.num_rows} rows make"
                f" {len(payload)} bytes of changes; at most {self._frame_bytes_max}, send fewer"
            )
        batch = RoutedBatch(
            bucket=write.bucket,
            row_count=changes.num_rows,
            payload=payload,
            schema_id=self._buckets[write.bucket].rows.rules.schema_id,
            writer_id=request.writer_id,
            sequence=write.sequence,
            continuity=write.continuity,
        )
        return KeyPart(write.bucket, start, end, 0, planned.write, batch)


def _together(requests: Sequence[KeyRequest]) -> list[list[KeyRequest]]:
    """Return the requests in order, with requests of a shared plan in the same list."""
    groups: list[list[KeyRequest]] = []
    rows = 0
    for request in requests:
        rows += request.row_count
        if groups and rows <= _TOGETHER_ROWS_MAX and _are_alike(groups[-1][0], request):
            groups[-1].append(request)
        else:
            groups.append([request])
            rows = request.row_count
    return groups


def _are_alike(one: KeyRequest, other: KeyRequest) -> bool:
    if one.schema is None or other.schema is None or one.columns != other.columns:
        return False
    return bool(one.schema.equals(other.schema))
