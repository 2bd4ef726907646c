"""Keeps a claim alive in the background, reports the round's progress, and notices a lost claim."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from streamhouse.client import StorageClient
from streamhouse.core.errors import FencedError, NotFoundError, StreamhouseError
from streamhouse.core.threads import NamedThread
from streamhouse.tiering._ports import RoundObserver

__all__ = ["Lease", "RoundTracker"]

_logger = logging.getLogger(__name__)

WRITING: Final = "writing"
COMMITTING: Final = "committing"
MAINTAINING: Final = "maintaining"
_BEATS_PER_LEASE: Final = 3
# Heartbeats carry progress for people to watch.
_BEAT_S_MAX: Final = 2.0


class RoundTracker:
    """A `RoundObserver` that counts rows and forwards each call to another; from any thread."""

    def __init__(self, observer: RoundObserver) -> None:
        self._observer = observer
        self._lock = threading.Lock()
        self.step = ""
        self.rows_done = 0
        self.rows_planned = 0

    def started(self, table: str, *, rows: int, splits: int) -> None:
        """Files are being written."""
        with self._lock:
            self.step, self.rows_done, self.rows_planned = WRITING, 0, rows
        self._observer.started(table, rows=rows, splits=splits)

    def wrote(self, table: str, *, rows: int) -> None:
        """`rows` more rows are in files."""
        with self._lock:
            self.rows_done += rows
        self._observer.wrote(table, rows=rows)

    def ended(self, table: str) -> None:
        """All rows are written, or the round failed."""
        self.step = COMMITTING
        self._observer.ended(table)

    def maintaining(self) -> None:
        """The rows are in the lake; maintenance runs."""
        self.step = MAINTAINING


class Lease:
    """One worker's claim on one table, inside a `with` block; heartbeats carry `tracker`'s counts.

    The claim is lost for good when the service refuses a heartbeat, or answers none for the time
    of the lease: another worker may own the table from then on.
    """

    def __init__(
        self,
        client: StorageClient,
        *,
        table: str,
        table_id: int,
        epoch: int,
        lease_ms: int,
        tracker: RoundTracker | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._table = table
        self._table_id = table_id
        self._epoch = epoch
        self._lease_s = lease_ms / 1000
        self._tracker = tracker
        self._monotonic_s = monotonic_s
        self._held_until_s = monotonic_s() + self._lease_s
        self._lost: StreamhouseError | None = None
        self._stop = threading.Event()
        self._thread = NamedThread("tiering-lease", self._beat)

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def is_lost(self) -> bool:
        """Whether the round must stop."""
        return self._lost is not None or self._monotonic_s() >= self._held_until_s

    def check(self) -> None:
        """Raise `FencedError`, or the service's error, when the claim is lost."""
        if self._lost is not None:
            raise self._lost
        if self.is_lost:
            raise FencedError(
                f"table '{self._table}': no heartbeat of tiering epoch {self._epoch} was answered"
                f" within {self._lease_s:g} s; another worker may have taken over"
            )

    def _beat(self) -> None:
        while not self._stop.wait(min(self._lease_s / _BEATS_PER_LEASE, _BEAT_S_MAX)):
            sent_at_s = self._monotonic_s()
            try:
                self._send()
            except (FencedError, NotFoundError) as error:
                self._lost = error
                return
            except StreamhouseError as error:
                # A later heartbeat may get through before the lease ends.
                _logger.warning("event=heartbeat_failed table=%s why=%r", self._table, str(error))
            else:
                self._held_until_s = sent_at_s + self._lease_s

    def _send(self) -> None:
        tracker = self._tracker
        if tracker is None:
            self._client.heartbeat_tiering(self._table, table_id=self._table_id, epoch=self._epoch)
        else:
            self._client.heartbeat_tiering(
                self._table,
                table_id=self._table_id,
                epoch=self._epoch,
                step=tracker.step,
                rows_done=tracker.rows_done,
                rows_planned=tracker.rows_planned,
            )
