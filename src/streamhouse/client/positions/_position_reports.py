"""Reports the position of a reader to the service, without delaying the reader.

Invariants:
- `reached` only notes the position, and neither sends nor waits
- at most one report in REPORT_S; of an idle reader, one in UNMOVED_S
- a failed report is logged once and repeated; the reader never sees the failure
- only `commit` waits for the service; no earlier report arrives after it
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
from streamhouse.core.threads import NamedThread

__all__ = ["PositionReports", "ReportedLag", "ReportsPositions", "Send"]

_logger = logging.getLogger(__name__)

REPORT_S: Final = 1.0
UNMOVED_S: Final = 30.0
_FLUSH_S: Final = 2.0

Send = Callable[[Mapping[int, int]], Mapping[str, int | None]]
"""Reports offsets; returns `lag_rows` and `lag_ms`."""


class ReportedLag(NamedTuple):
    """The service's answer to a report, and its time by `time.monotonic`."""

    rows: int | None
    lag_ms: int | None
    at_s: float


class ReportsPositions(Protocol):
    """The client's call that this module needs."""

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
    """The reports of one reader, sent by a thread with the reader's lifetime."""

    @classmethod
    def of(
        cls, client: ReportsPositions, path: str, consumer: str, *, reads_lake: bool = False
    ) -> PositionReports:
        """Return the reports of a table's consumer, sent by `client`."""
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
        """The reader's lag at its last report."""

    def reached(self, offsets: Mapping[int, int]) -> None:
        """Note that every row below `offsets` is read; the mapping may change later."""
        self._offsets = offsets
        if not self._signals.moved.is_set():
            self._signals.moved.set()
        if self._thread is None:
            # The thread has only a weak reference to the reports: both end with the reader.
            self._thread = NamedThread(
                "streamhouse-position-reports",
                _report_until_gone,
                (weakref.ref(self), self._signals, self._report_s, self._unmoved_s),
            )
            self._thread.start()

    def commit(self, offsets: Mapping[int, int]) -> None:
        """Report that every row below `offsets` is read; durable on return."""
        if self._send_durably is None:
            raise InvalidRequestError(f"consumer '{self._consumer}' cannot commit positions here")
        with self._sending:
            answer = self._send_durably(offsets)
            self._answered(offsets, answer)
            self.reached(offsets)

    def flush(self) -> None:
        """Report the position now; wait for the report, at most for _FLUSH_S."""
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
        """Report the last position, and end the thread; idempotent."""
        if not self._signals.stopped.is_set():
            self.flush()
            self._signals.stop()

    def __del__(self) -> None:
        self._signals.stop()

    def report_if_due(self) -> None:
        """Report if the reader has moved, or after UNMOVED_S. On the reports' own thread."""
        with self._sending:
            self._report_if_due(dict(self._offsets))

    def _report_if_due(self, offsets: Mapping[int, int]) -> None:
        is_recent = time.monotonic() - self._sent_s < self._unmoved_s
        if not offsets or (offsets == self._sent and is_recent):
            return
        try:
            answer = self._send(offsets)
        except StreamhouseError as error:
            self._failed(error.message)
        except Exception as error:  # noqa: BLE001 - outermost loop of a thread: the reader goes on
            self._failed(repr(error))
        else:
            self._answered(offsets, answer)

    def _answered(self, offsets: Mapping[int, int], answer: Mapping[str, int | None]) -> None:
        now_s = time.monotonic()
        with self._tries:
            self._sent, self._sent_s, self._failures = offsets, now_s, 0
            self.lag = ReportedLag(answer.get("lag_rows"), answer.get("lag_ms"), now_s)
            self._tries.notify_all()

    def _failed(self, why: str) -> None:
        level = logging.DEBUG if self._failures else logging.WARNING
        _logger.log(level, "event=position_not_reported consumer=%s why=%r", self._consumer, why)
        with self._tries:
            self._failures += 1
            self._tries.notify_all()


class _Signals:
    """The reader's signals to the thread: moved, in a hurry, gone."""

    def __init__(self) -> None:
        self.moved = threading.Event()
        self.hurried = threading.Event()
        self.stopped = threading.Event()

    def stop(self) -> None:
        self.stopped.set()
        self.hurried.set()
        self.moved.set()


def _report_until_gone(
    reports_ref: weakref.ref[PositionReports], signals: _Signals, report_s: float, unmoved_s: float
) -> None:
    while True:
        signals.moved.wait(unmoved_s)
        signals.moved.clear()
        reports = reports_ref()
        if reports is None or signals.stopped.is_set():
            return
        signals.hurried.clear()
        reports.report_if_due()
        del reports
        signals.hurried.wait(report_s)
