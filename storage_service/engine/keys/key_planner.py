"""Planning the writes of a round: what each request changes in each bucket, ready for the log.

Small requests are planned together. Wrong ones are refused alone: nothing of them stays planned,
in no bucket.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from streamhouse.storage_service.engine.keys.joint_writes import JointPart, alike, plan_parts
from streamhouse.storage_service.engine.keys.key_bucket import KeyBucket
from streamhouse.storage_service.engine.keys.key_request import KeyPart, KeyRequest, KeyWrite
from streamhouse.storage_service.errors import (
    InternalError,
    RequestTooLargeError,
    StreamhouseError,
)
from streamhouse.storage_service.log.group_commit import PendingAppend

__all__ = ["KeyPlanner"]

_logger = logging.getLogger(__name__)


class KeyPlanner:
    """Plans writes to the buckets of one table."""

    def __init__(self, buckets: Sequence[KeyBucket], *, table: str, frame_bytes_max: int) -> None:
        self._buckets = buckets
        self._table = table
        self._frame_bytes_max = frame_bytes_max

    def plan(self, requests: Sequence[KeyRequest]) -> None:
        """Give every request its parts, or its error; on the thread that changes the rows."""
        for together in alike(requests):
            if not self._is_planned_together(together):
                self._plan_one_by_one(together)

    def _is_planned_together(self, requests: Sequence[KeyRequest]) -> bool:
        """Plan all of `requests` as one; False, and nothing planned, if any of them is wrong."""
        asked = [(write, request) for request in requests for write in request.writes]
        # What has a condition of its own is planned by itself.
        if len(asked) < 2 or any(write.written_below is not None for write, _ in asked):
            return False
        try:
            parts = self._joint_parts(asked)
        except StreamhouseError:
            return False
        except Exception as error:  # outermost loop of a plan: planned one by one
            _logger.error("event=bug table=%s", self._table, exc_info=error)
            return False
        for (_, request), part in zip(asked, parts, strict=True):
            request.parts.append(part)
        for bucket, write in {part.bucket: part.write for part in parts if part.write}.items():
            self._buckets[bucket].rows.accept(write)
        return True

    def _joint_parts(self, asked: Sequence[tuple[KeyWrite, KeyRequest]]) -> list[KeyPart]:
        known = [self._known(write, request) for write, request in asked]
        new = [write for (write, _), part in zip(asked, known, strict=True) if part is None]
        rows = [bucket.rows for bucket in self._buckets]
        planned = iter(plan_parts(rows, new, asked[0][1].columns) if new else ())
        return [
            part or self._part(write, request, next(planned))
            for (write, request), part in zip(asked, known, strict=True)
        ]

    def _plan_one_by_one(self, requests: Iterable[KeyRequest]) -> None:
        for request in requests:
            try:
                for write in request.writes:
                    request.parts.append(self._plan_one(write, request))
            except StreamhouseError as error:
                self._take_back(request, error)
            except Exception as error:  # outermost loop of a request: others go on
                _logger.error("event=bug table=%s", self._table, exc_info=error)
                self._take_back(request, InternalError("planning failed; see the service's log"))

    def _take_back(self, request: KeyRequest, error: StreamhouseError) -> None:
        request.error = error
        for part in reversed(request.parts):
            if part.write is not None:
                self._buckets[part.bucket].rows.abort(part.write)
        request.parts.clear()

    def _plan_one(self, write: KeyWrite, request: KeyRequest) -> KeyPart:
        known = self._known(write, request)
        if known is not None:
            return known
        rows = self._buckets[write.bucket].rows
        planned = rows.plan(
            write.rows,
            base_offset=rows.planned_offset,
            operations=write.operations,
            columns=request.columns,
            row_numbers=write.row_numbers,
            versions=None if write.written_below is None else range(write.written_below),
        )
        try:
            part = self._part(write, request, JointPart(planned, 0, planned.changelog.num_rows))
        except StreamhouseError:
            rows.abort(planned)
            raise
        if part.write is None:
            rows.abort(planned)
        return part

    def _known(self, write: KeyWrite, request: KeyRequest) -> KeyPart | None:
        """Return what became of a repeated write; raises if the bucket takes none."""
        bucket = self._buckets[write.bucket]
        bucket.check_writable()
        if not request.writer_id:
            return None
        known = bucket.log.find_batch(request.writer_id, sequence=write.sequence)
        if known is None:
            return None
        return KeyPart(write.bucket, known.base_offset, known.end_offset, known.timestamp_us)

    def _part(self, write: KeyWrite, request: KeyRequest, planned: JointPart) -> KeyPart:
        base = planned.write.base_offset
        if planned.start == planned.end:
            return KeyPart(write.bucket, base + planned.start, base + planned.start)
        changes = planned.write.changelog.slice(planned.start, planned.end - planned.start)
        payload = memoryview(changes.serialize()).cast("B")
        if len(payload) > self._frame_bytes_max:
            raise RequestTooLargeError(
                f"table '{self._table}', bucket {write.bucket}: {write.rows.num_rows} rows make"
                f" {len(payload)} bytes of changes; at most {self._frame_bytes_max}, send fewer"
            )
        pending = PendingAppend(
            tablet=self._buckets[write.bucket].log,
            payload=payload,
            row_count=changes.num_rows,
            schema_id=self._buckets[write.bucket].rows.rules.schema_id,
            writer_id=request.writer_id,
            sequence=write.sequence,
            timestamp_us=request.timestamp_us,
        )
        end = base + planned.end
        return KeyPart(write.bucket, base + planned.start, end, 0, planned.write, pending)
