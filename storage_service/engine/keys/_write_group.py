"""The write group of a primary key table: requests planned together, stored, applied, published."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from streamhouse.core.errors import InternalError, StreamhouseError
from streamhouse.storage_service.engine._commit_clock import CommitClock
from streamhouse.storage_service.engine.keys._key_planner import KeyRequest
from streamhouse.storage_service.engine.keys.key_bucket import AppliedRows, KeyBucket
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.group_commit import CommitOutcome
from streamhouse.storage_service.log.log_tablet import LogTablet

__all__ = ["WriteGroup"]

_logger = logging.getLogger(__name__)


class WriteGroup:
    """Requests that are planned, stored and applied together.

    `unit` and `publish` belong to the event loop; `apply` belongs to the holder of the rows.
    """

    def __init__(
        self,
        requests: Sequence[KeyRequest],
        buckets: Sequence[KeyBucket],
        *,
        on_changed: Callable[[], None],
    ) -> None:
        self.requests = requests
        self.is_short = False
        """Whether applying takes little time and waits for no disk."""
        self.is_synced = False
        """Whether the logs have their new ends, or keep the old ends after an error."""
        self.error: StreamhouseError | None = None
        """The error of the commit, from `is_synced` on."""
        self.outcome: CommitOutcome | None = None
        """The outcome of the commit, once the changes may be applied and shown."""
        self.size_bytes = 0
        """The bytes of the changes, from `unit` on."""
        self.untidy: set[int] = set()
        """The buckets with due upkeep after `apply`."""
        self._buckets = buckets
        self._on_changed = on_changed
        self._stages = [r.stages for r in requests if r.stages is not None]
        self.is_followed = bool(self._stages)
        """Whether a request is traced."""
        self._applied: dict[int, AppliedRows] = {}

    def end_stage(self, name: str) -> None:
        """Report the end of a stage to the requests' traces."""
        for stages in self._stages:
            stages.end(name)

    def unit(self, clock: CommitClock) -> list[tuple[LogTablet, RoutedBatch]]:
        """Return the planned changes with their logs, in order; each request has a time of its own.

        Raises `InternalError` unless the changes continue the logs and nothing else is planned
        after them: other contents of a log would be no history, and could not be taken back.
        """
        unit: list[tuple[LogTablet, RoutedBatch]] = []
        ends: dict[int, int] = {}
        for request in self.requests:
            time_us = request.timestamp_us or clock.next_us()
            for part in request.parts:
                changes = part.changes
                if changes is None:
                    continue
                bucket = self._buckets[part.bucket]
                end = ends.get(part.bucket, bucket.log.log_end_offset)
                if part.start != end or part.end - end != changes.row_count:
                    raise InternalError(
                        f"{bucket.where}: changes are planned from offset {part.start} to"
                        f" {part.end}, but its log ends at {end}"
                    )
                ends[part.bucket] = part.end
                self.size_bytes += len(changes.payload)
                unit.append((bucket.log, changes._replace(timestamp_us=time_us)))
        for number, end in ends.items():
            if self._buckets[number].rows.planned_offset != end:
                raise InternalError(
                    f"{self._buckets[number].where}: more is planned than what is stored next"
                )
        return unit

    def end_sync(self, outcome: CommitOutcome) -> None:
        """Take the outcome while the journal may lack the changes."""
        self.is_synced = True
        self.error = outcome.error
        self._on_changed()

    def end_commit(self, outcome: CommitOutcome) -> None:
        """Take the outcome of the commit; called once, after `end_sync` if that is called."""
        self.outcome = outcome
        self.end_sync(outcome)

    def apply(self) -> None:
        """Apply the durable changes, and take back the other changes."""
        assert self.outcome is not None
        for stages in self._stages:
            self.outcome.tell(stages)
        results = iter(self.outcome.results)
        aborted: set[int] = set()
        for request in self.requests:
            for part in request.parts:
                result = None if part.changes is None else next(results, None)
                if result is not None:
                    assert result.base_offset == part.start, "nobody else appends to these logs"
                    part.timestamp_us = result.timestamp_us
                if part.write is None or part.bucket in aborted:
                    continue
                bucket = self._buckets[part.bucket]
                if part.write.end_offset > bucket.log.log_end_offset:
                    # All later writes were planned on top of this write.
                    bucket.rows.abort(part.write)
                    aborted.add(part.bucket)
                    continue
                try:
                    applied = bucket.apply(part.write)
                except Exception as error:  # outermost: durable changes must not be lost
                    bucket.fail(f"a durable change was not applied: {error!r}")
                    _logger.error("event=bug table=%s", bucket.rows.rules.table, exc_info=error)
                    continue
                if applied is not None:
                    self._applied[part.bucket] = applied
                    if applied.needs_upkeep:
                        self.untidy.add(part.bucket)

    def publish(self) -> set[int]:
        """Show the applied changes of all buckets in one step, and return the buckets to wake.

        The changes of a transaction's piece stay hidden. Buckets without a published change are
        returned as well: their waiting readers must see a failure.
        """
        for stages in self._stages:
            stages.end("apply")
        touched = {part.bucket for request in self.requests for part in request.parts}
        if self.requests[0].is_published:
            for number, applied in self._applied.items():
                self._buckets[number].publish(applied.end_offset, row_count=applied.row_count)
        return touched
