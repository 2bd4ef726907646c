"""Tells the service where a reader stands, beside the reading and never in its way.

Invariants:
- `reached` only notes where the reader is: it asks nobody and waits for nobody
- at most one report in REPORT_S, and one in UNMOVED_S of a reader that has not moved
- a report that fails is told of once and tried again; the reader never hears of it
- `commit` is the one call that waits for the service; no report that is older arrives after it
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

from streamhouse.core.errors import InvalidRequestError, StreamhouseError

__all__ = ["PositionReports", "ReportedLag", "ReportsPositions", "Send"]

_logger = logging.getLogger(__name__)

REPORT_S: Final = 1.0
UNMOVED_S: Final = 30.0
_FLUSH_S: Final = 2.0

Send = Callable[[Mapping[int, int]], Mapping[str, int | None]]
"""Reports offsets; returns `lag_rows` and `lag_ms`."""


class ReportedLag(NamedTuple):
    """What the service answered to a report, and when, by `time.monotonic`."""

    rows: int | None
    lag_ms: int | None
    at_s: float


class ReportsPositions(Protocol):
    """What is asked of a client here."""

    def report_position(
        self,
        path: str,
        consumer: str,
        offsets: Mapping[int, int],
        *,
        reads_lake: bool = False,
        is_durable: bool = False,
    ) -> Mapping[str, int | None]: ...


class PositionReports:
    """The reports of one reader, sent by a thread of its own, which ends with it."""

    @classmethod
    def of(
        cls, client: ReportsPositions, path: str, consumer: str, *, reads_lake: bool = False
    ) -> PositionReports:
        """Return the reports of one consumer of a table, which `client` sends."""
        send = functools.partial(client.report_position, path, consumer, reads_lake=reads_lake)
        send_durably = functools.partial(send, is_durable=True)
        return cls(send, consumer=consumer, send_durably=send_durably)

    def __init__(
        self,
        send: Send,
        *,
        consumer: str,
        send_durably: Send | None = None,
        report_s: float = REPORT_S,
        unmoved_s: float = UNMOVED_S,
    ) -> None:
        self._send = send
        self._send_durably = send_durably
        self._sending = threading.Lock()
        self._report_s, self._unmoved_s = report_s, unmoved_s
        self._consumer = consumer
        self._offsets: Mapping[int, int] = {}
        self._sent: Mapping[int, int] = {}
        self._sent_s = float("-inf")
        self._failures = 0
        self._tries = threading.Condition()
        self._signals = _Signals()
        self._thread: threading.Thread | None = None
        self.lag: ReportedLag | None = None
        """How far the reader was behind at its last report."""

    def reached(self, offsets: Mapping[int, int]) -> None:
        """Note that every row below `offsets` is read; the map may go on to change."""
        self._offsets = offsets
        if not self._signals.moved.is_set():
            self._signals.moved.set()
        if self._thread is None:
            # It holds no reference to the reports: they end with their reader, and it with them.
            self._thread = threading.Thread(
                target=_report_until_gone,
                args=(weakref.ref(self), self._signals, self._report_s, self._unmoved_s),
                name="streamhouse-position-reports",
                daemon=True,
            )
            self._thread.start()

    def commit(self, offsets: Mapping[int, int]) -> None:
        """Report that every row below `offsets` is read; it is durable on return."""
        if self._send_durably is None:
            raise InvalidRequestError(f"consumer '{self._consumer}' cannot commit positions here")
        with self._sending:
            said = self._send_durably(offsets)
            self._answered(offsets, said)
            self.reached(offsets)

    def flush(self) -> None:
        """Report now what was reached since the last report; wait for it, but not for long."""
        if self._thread is None or self._offsets == self._sent:
            return
        failures = self._failures
        self._signals.hurried.set()
        self._signals.moved.set()
        with self._tries:
            self._tries.wait_for(
                lambda: self._offsets == self._sent or self._failures > failures, _FLUSH_S
            )

    def close(self) -> None:
        """Report what is left, and end the thread; idempotent."""
        if not self._signals.stopped.is_set():
            self.flush()
            self._signals.stop()

    def __del__(self) -> None:
        self._signals.stop()

    def report_if_due(self) -> None:
        """Report if the reader has moved, or has not for long. On the reports' own thread."""
        with self._sending:
            self._report_if_due(dict(self._offsets))

    def _report_if_due(self, offsets: Mapping[int, int]) -> None:
        is_recent = time.monotonic() - self._sent_s < self._unmoved_s
        if not offsets or (offsets == self._sent and is_recent):
            return
        try:
            said = self._send(offsets)
        except StreamhouseError as error:
            self._failed(error.message)
        except Exception as error:  # noqa: BLE001 - outermost loop of a thread: the reader goes on
            self._failed(repr(error))
        else:
            self._answered(offsets, said)

    def _answered(self, offsets: Mapping[int, int], said: Mapping[str, int | None]) -> None:
        now_s = time.monotonic()
        with self._tries:
            self._sent, self._sent_s, self._failures = offsets, now_s, 0
            self.lag = ReportedLag(said.get("lag_rows"), said.get("lag_ms"), now_s)
            self._tries.notify_all()

    def _failed(self, why: str) -> None:
        level = logging.DEBUG if self._failures else logging.WARNING
        _logger.log(level, "event=position_not_reported consumer=%s why=%r", self._consumer, why)
        with self._tries:
            self._failures += 1
            self._tries.notify_all()


class _Signals:
    """What the reader tells the thread: it has moved, it cannot wait, it is gone."""

    def __init__(self) -> None:
        self.moved = threading.Event()
        self.hurried = threading.Event()
        self.stopped = threading.Event()

    def stop(self) -> None:
        self.stopped.set()
        self.hurried.set()
        self.moved.set()


def _report_until_gone(
    of: weakref.ref[PositionReports], signals: _Signals, report_s: float, unmoved_s: float
) -> None:
    while True:
        signals.moved.wait(unmoved_s)
        signals.moved.clear()
        reports = of()
        if reports is None or signals.stopped.is_set():
            return
        signals.hurried.clear()
        reports.report_if_due()
        del reports
        signals.hurried.wait(report_s)
