"""The commit thread of one disk: one write and one sync per log for all queued units.

A unit is the append of one request, to one or several logs. Promises to callers:

- A unit is all or nothing: refused (out of order, too large, disk full) means no row of the unit is
  stored in any of its logs, also after a crash.
- Acknowledged means durable in every log of the unit. Rows of all units committed together become
  visible in one step: `CommitGroup.complete`. Only buckets of primary key tables are published by
  their own writer (_key_writer.py), after their rows can be looked up.
- UnknownOutcomeError means a disk failed to sync. Rows of the unit in *other* logs are durable and
  become visible, unacknowledged: a rollback would need another sync of the same kind, and would
  prove nothing. Rows in the failed log may reappear at the next start. Repeating the unit with the
  same writer id and sequences completes the unit: each log recognises its own batches.
- With an awaited replica, durable includes the replica: groups are published in order once stored
  in the replica, while the commit thread continues with later groups. `on_synced` tells earlier
  about a unit that only the replica lacks.
- A crash between the syncs of two logs can leave a unit in only one of them, unacknowledged. The
  same repetition completes the unit.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final, NamedTuple, Protocol

from streamhouse.core.errors import (
    InternalError,
    NotOwnerError,
    OutOfOrderSequenceError,
    OverloadedError,
    StorageFailedError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.core.threads import NamedThread, Pool
from streamhouse.core.traces.stages import Stages
from streamhouse.storage_service.log._stored_in_order import ReplicaLag, StoredInOrder
from streamhouse.storage_service.log.append_queue import AppendResult, RoutedBatch
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.log.replica import Replication

__all__ = [
    "CommitGroup",
    "CommitLimits",
    "CommitOutcome",
    "CommitTimes",
    "GroupCommitter",
    "OnOutcome",
    "Submit",
    "Unit",
]

_logger = logging.getLogger(__name__)

# Beside the commit thread.
_SYNC_THREADS: Final = 4
# The approximate cost of waking other threads, all in need of the interpreter.
_SYNCED_ALONE_S: Final = 0.002
# How fast the estimate for a once quick disk may grow.
_SLOWER: Final = 1.25


Unit = Sequence[tuple[LogTablet, RoutedBatch]]
"""Batches stored together, each with its log."""


class CommitTimes:
    """The begin of a group's commit and its durability, by `time.perf_counter`."""

    __slots__ = ("begun_s", "stored_s", "synced_s")

    def __init__(self) -> None:
        self.begun_s = self.synced_s = time.perf_counter()
        self.stored_s: float | None = None
        """The time when an awaited replica had stored the group."""


class CommitOutcome(NamedTuple):
    """A unit's outcome: one result for each of its batches, or the error of the refusal.

    `times` belong to the unit's group, if committed.
    """

    results: tuple[AppendResult, ...]
    error: StreamhouseError | None
    times: CommitTimes | None = None

    def tell(self, stages: Stages | None) -> None:
        """Report the commit's timing to the request's trace, if any."""
        if stages is None or self.times is None:
            return
        stages.end("queue", self.times.begun_s)
        stages.end("sync", self.times.synced_s)
        if self.times.stored_s is not None:
            stages.end("journal", self.times.stored_s)


OnOutcome = Callable[[CommitOutcome], None]


class Submit(Protocol):
    """Hands a unit to the commit thread; `GroupCommitter.submit`."""

    def __call__(
        self, unit: Unit, on_done: OnOutcome, *, on_synced: OnOutcome | None = None
    ) -> None:
        """See `GroupCommitter.submit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitLimits:
    """Limits of unpublished units, including the units being committed.

    A unit larger than a limit is accepted when nothing else waits.
    """

    units_max: int = 10_000
    rows_max: int = 50_000_000
    bytes_max: int = 256 * 1024 * 1024


class _Unit:
    """A submitted unit and its state so far."""

    __slots__ = ("bytes", "entries", "error", "on_done", "on_synced", "results", "rows", "touched")

    def __init__(self, entries: Unit, on_done: OnOutcome, on_synced: OnOutcome | None) -> None:
        self.entries = entries
        self.on_done = on_done
        self.on_synced = on_synced
        self.rows = self.bytes = 0
        for _, batch in entries:
            self.rows += batch.row_count
            self.bytes += len(batch.payload)
        self.results: tuple[AppendResult, ...] = ()
        self.error: StreamhouseError | None = None
        # Logs whose next sync decides about this unit, logs of earlier attempts included.
        self.touched: set[LogTablet] = set()

    def outcome(self, times: CommitTimes) -> CommitOutcome:
        return CommitOutcome(() if self.error else self.results, self.error, times)


class CommitGroup:
    """Units committed together, the durable ends of their logs, and the times."""

    def __init__(
        self,
        ends: Sequence[tuple[LogTablet, int]],
        outcomes: Sequence[tuple[OnOutcome, CommitOutcome]],
        times: CommitTimes,
    ) -> None:
        self.ends = ends
        self.outcomes = outcomes
        self.times = times

    def complete(self, *, deferred: Container[LogTablet] = ()) -> None:
        """Move all high watermarks, then report every outcome. Groups are completed in order.

        Call once, on the thread owning visibility, with nothing else running in between. Logs in
        `deferred` stay unchanged: their writer publishes them later, after the remaining steps
        before visibility.
        """
        # The ends are the group's own: the commit thread may be further on by now, in some logs.
        for tablet, end_offset in self.ends:
            if tablet not in deferred:
                tablet.publish(end_offset)
        for on_done, outcome in self.outcomes:
            on_done(outcome)


class GroupCommitter:
    """Owns the commit thread. `submit` from any thread; `publish` is called on the commit thread.

    `publish` gets every group exactly once, in order, and must arrange a call of `complete`; with
    an awaited replica, on the replica's threads.

    Files of a group are synced in parallel, if a sequence of syncs would take longer than waking
    threads.
    """

    def __init__(
        self,
        publish: Callable[[CommitGroup], None],
        *,
        limits: CommitLimits | None = None,
        name: str = "commit",
        replication: Replication | None = None,
    ) -> None:
        self._syncs = _Syncs(name)
        self._publish = publish
        replication = replication or Replication()
        is_waited_for = replication.is_waited_for and not replication.is_none
        self._stored = StoredInOrder(replication.replica) if is_waited_for else None
        self._lag = None if replication.is_waited_for else ReplicaLag(replication)
        self._limits = limits or CommitLimits()
        # Waiting on a SimpleQueue costs a third of a condition's wait; None ends the queue.
        self._waiting: SimpleQueue[_Unit | None] = SimpleQueue()
        self._units = 0
        self._rows = 0
        self._bytes = 0
        self._stopping = False
        self._counting = threading.Lock()
        self._thread = NamedThread(name, self._run)
        self._thread.start()

    @property
    def shows_unstored(self) -> bool:
        """Whether groups are published before the replica has stored them."""
        return self._lag is not None

    @property
    def queued_units(self) -> int:
        """The number of unpublished units, including the units being committed."""
        return self._units

    @property
    def queued_bytes(self) -> int:
        """The payload bytes of unpublished units, including the units being committed."""
        return self._bytes

    def submit(self, unit: Unit, on_done: OnOutcome, *, on_synced: OnOutcome | None = None) -> None:
        """Queue a unit; `on_done` gets its outcome, from `CommitGroup.complete`.

        With an awaited replica `on_synced` gets the same outcome earlier, on the commit thread: the
        logs of the unit have their new ends, and the replica lacks them.

        Raises OverloadedError at once above a limit, UnavailableError after `stop`; then neither is
        called. Payloads must not change before the outcome.
        """
        pending = _Unit(unit, on_done, on_synced)
        limits = self._limits
        with self._counting:
            if self._stopping:
                raise UnavailableError("the service is stopping and takes no more writes")
            if self._units and (
                self._units >= limits.units_max
                or self._rows + pending.rows > limits.rows_max
                or self._bytes + pending.bytes > limits.bytes_max
            ):
                raise OverloadedError(
                    f"{self._units} writes with {self._rows} rows and {self._bytes} bytes wait for"
                    f" {'the disk' if self._stored is None else 'disk and journal'}; send again"
                    " later, or more slowly"
                )
            self._units += 1
            self._rows += pending.rows
            self._bytes += pending.bytes
            self._waiting.put(pending)

    def stop(self) -> None:
        """Refuse new units, commit and publish queued units, end the thread.

        Stopping twice is harmless.
        """
        with self._counting:
            if not self._stopping:
                self._stopping = True
                self._waiting.put(None)
        self._thread.join()
        if self._stored is not None:
            self._stored.wait_until_none()
        self._syncs.stop()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            waiting = [self._waiting.get()]
            if self._lag is not None:
                # A former owner gets the error from its commit.
                with contextlib.suppress(NotOwnerError):
                    self._lag.wait()
            elif self._stored is not None:
                # One write, one sync and one object for all units waiting for the replica anyway.
                self._stored.gather()
            waiting += [self._waiting.get() for _ in range(self._waiting.qsize())]
            units = [unit for unit in waiting if unit is not None]
            is_last = len(units) < len(waiting)
            if units:
                self._commit_group(units)

    def _commit_group(self, units: list[_Unit]) -> None:
        group = self._commit_safely(units, CommitTimes())
        group.times.synced_s = time.perf_counter()
        if self._lag is not None:
            self._lag.note()
        if self._stored is None:
            self._publish_group(units, group)
        else:
            _report_synced(units, group.times)
            # An outcome may depend on earlier groups, for instance for a repetition.
            self._stored.when_stored(functools.partial(self._publish_stored, units, group))

    def _publish_stored(self, units: list[_Unit], group: CommitGroup) -> None:
        group.times.stored_s = time.perf_counter()
        self._publish_group(units, group)

    def _publish_group(self, units: list[_Unit], group: CommitGroup) -> None:
        with self._counting:
            for unit in units:
                self._units -= 1
                self._rows -= unit.rows
                self._bytes -= unit.bytes
        try:
            self._publish(group)
        except Exception as error:  # noqa: BLE001 - outermost loop: later groups must go on
            _report_bug("publishing", error)

    def _commit_safely(self, units: list[_Unit], times: CommitTimes) -> CommitGroup:
        try:
            ends = _commit(units, self._syncs)
        except Exception as error:  # noqa: BLE001 - outermost loop: callers must get an answer
            failed: StreamhouseError = InternalError(
                "the commit failed; the service's log says why"
            )
            if isinstance(error, NotOwnerError):
                # Ownership of some logs may have been lost before.
                failed = UnknownOutcomeError(
                    f"{error.message}: the rows may or may not be stored; repeat the request there"
                    " with the same writer id and sequence"
                )
            else:
                _report_bug("committing", error)
            ends = []
            for tablet in {tablet for unit in units for tablet, _ in unit.entries}:
                tablet.rollback()
            for unit in units:
                unit.error = failed
        return CommitGroup(ends, [(unit.on_done, unit.outcome(times)) for unit in units], times)


def _report_synced(units: Iterable[_Unit], times: CommitTimes) -> None:
    for unit in units:
        if unit.on_synced is None:
            continue
        try:
            unit.on_synced(unit.outcome(times))
        except Exception as error:  # noqa: BLE001 - outermost loop: later groups must go on
            _report_bug("reporting", error)


def _report_bug(work: str, error: Exception) -> None:
    _logger.error("event=commit_group_failed what=%r", work, exc_info=error)


def _commit(units: list[_Unit], syncs: _Syncs) -> list[tuple[LogTablet, int]]:
    """Decide about every unit; return the changed logs and their durable ends."""
    alive = units
    dirty: set[LogTablet] = set()
    while alive:
        alive = [unit for unit in alive if _append(unit)]
        tablets: set[LogTablet] = set()
        for unit in alive:
            tablets |= unit.touched
        dirty |= tablets
        failed: dict[LogTablet, StorageFailedError] = {}
        for tablet in tablets:
            try:
                tablet.write()
            except StorageFailedError as error:
                failed[tablet] = error
        if not failed:
            break
        # Everything is rolled back, then repeated without the refused units: no other unit
        # suffers, and refused units leave nothing in the healthy logs.
        for tablet in tablets:
            tablet.rollback()
            if tablet.is_read_only:
                failed.setdefault(tablet, StorageFailedError(f"{tablet} cannot be truncated"))
        alive = _without_failed(alive, failed)
    unsynced = syncs.run(dirty)
    for unit in units if unsynced else ():
        for tablet in unit.touched & unsynced.keys():
            unit.error = UnknownOutcomeError(unsynced[tablet].message)
    return [(tablet, tablet.log_end_offset) for tablet in dirty]


def _append(unit: _Unit) -> bool:
    """Queue all batches of a unit, or none and set its error."""
    kept_counts: dict[LogTablet, int] = {}
    results: list[AppendResult] = []
    touched: list[LogTablet] = []
    entries = unit.entries
    try:
        for tablet, batch in entries:
            # A refused batch is not queued: a single batch leaves nothing to take back.
            if len(entries) > 1 and tablet not in kept_counts:
                kept_counts[tablet] = tablet.queued_count
            result = tablet.append(batch)
            results.append(result)
            # A repetition of a batch in this same group is not durable either.
            if result.end_offset > tablet.log_end_offset:
                touched.append(tablet)
    except StreamhouseError as error:
        for tablet, keep in kept_counts.items():
            tablet.take_back(keep=keep)
        unit.error = error
        if unit.touched and isinstance(error, OutOfOrderSequenceError):
            # The sequence was in order at the first attempt: an earlier batch was removed since.
            unit.error = StorageFailedError(
                "the disk refused an earlier batch of the same writer; nothing was stored"
            )
        return False
    unit.results = tuple(results)
    unit.touched.update(touched)
    return True


def _without_failed(
    units: Iterable[_Unit], failed: dict[LogTablet, StorageFailedError]
) -> list[_Unit]:
    alive = []
    for unit in units:
        errors = [error for tablet, error in failed.items() if tablet in unit.touched]
        if not errors:
            alive.append(unit)
        elif any(tablet.is_read_only for tablet in unit.touched):
            # The written bytes could not be truncated: the rows may reappear at the next start.
            unit.error = UnknownOutcomeError(errors[0].message)
        else:
            unit.error = errors[0]
    return alive


class _Syncs:
    """Syncs the logs of a group, on the commit thread or on several threads."""

    def __init__(self, name: str) -> None:
        self._executor = Pool(f"{name}-sync", _SYNC_THREADS)
        self._log_s = 0.0
        """The estimated time of one sync."""

    def run(self, tablets: Collection[LogTablet]) -> dict[LogTablet, UnknownOutcomeError]:
        """Make written bytes durable; return the logs with a failed sync."""
        if not tablets:
            return {}
        started = time.perf_counter()
        is_alone = self._log_s * len(tablets) <= _SYNCED_ALONE_S or len(tablets) == 1
        if is_alone:
            errors = list(map(_sync_one, tablets))
        else:
            # Files of one disk share its journal: parallel syncs cost little more than one.
            # This thread does one sync instead of idling.
            first, *other_tablets = tablets
            futures = [self._executor.submit(_sync_one, tablet) for tablet in other_tablets]
            errors = [_sync_one(first), *(future.result() for future in futures)]
        failed = {}
        for tablet, error in zip(tablets, errors, strict=True):
            if error is not None:
                failed[tablet] = error
        seconds = (time.perf_counter() - started) / (len(tablets) if is_alone else 1)
        # The time includes waiting for the interpreter, so the best time is the disk's.
        self._log_s = min(seconds, self._log_s * _SLOWER) or seconds
        return failed

    def stop(self) -> None:
        """End the threads."""
        self._executor.shutdown()


def _sync_one(tablet: LogTablet) -> UnknownOutcomeError | None:
    try:
        tablet.sync()
    except UnknownOutcomeError as error:
        return error
    return None
