"""The service's side of the process for live cuts.

A build takes 10 to 50 ms of processor time, mostly in Python. On a thread of the service all
requests would wait for the interpreter's lock. Guarantees:
- the process starts with the first build, has a lower priority than the service, and ends with the
  service, also with a killed one, and after ten minutes without a build
- after the death of a process the next build starts another process, and a build begins anew
- the process opens the lake, and no port; rows of the log come from the service
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from streamhouse.core.child_process import end_module, start_module
from streamhouse.core.errors import StreamhouseError, UnavailableError
from streamhouse.storage_service.live._build_messages import (
    Build,
    CheckHistory,
    Failed,
    Line,
    LineEndedError,
    Opening,
    Page,
    PrepareWriting,
    ReadPage,
    Unchanged,
)
from streamhouse.storage_service.live._service_log import ServiceLog
from streamhouse.storage_service.log.segments.segment import StoredBatch
from streamhouse.storage_service.server.status.process_memory import resident_bytes

if TYPE_CHECKING:
    # Loading the lake library takes a second, and most services show no live tables.
    from streamhouse.reading.live.live_table import LiveCut

__all__ = ["CutBuilder"]

_logger = logging.getLogger(__name__)

_MODULE: Final = "streamhouse.storage_service.live._cut_process"
_IDLE_LOOKS_MAX: Final = 10
_END_S: Final = 10.0


class CutBuilder:
    """Makes at most `builds_max` cuts at the same time, in a separate process. Thread-safe."""

    def __init__(self, opening: Opening, *, builds_max: int) -> None:
        self._opening = opening
        self._builds_max = builds_max
        self._lock = threading.Lock()
        self._process: _CutProcess | None = None

    def cut(
        self, build: Build, log: ServiceLog, prepare_writing: Callable[[str], None]
    ) -> LiveCut | None:
        """Return the cut, None if the service's present cut has all rows.

        Blocking; `prepare_writing` is called before files are written below a location. Raises as
        `LiveLakeTable.cut`, and `UnavailableError` if the process dies twice.
        """
        for is_last in (False, True):
            process, line = self._line()
            try:
                return _talk(line, build, log, prepare_writing)
            except LineEndedError as error:
                if is_last:
                    path = build.served.info.path
                    raise UnavailableError(
                        f"table '{path}': the process that makes live tables has died twice; see"
                        " the service's log, and load the table again"
                    ) from error
                _logger.warning("event=live_process_died pid=%d", process.pid)
            finally:
                process.give_back(line)
        raise AssertionError

    def memory_bytes(self) -> int:
        """Return the resident memory of the process, 0 without a process."""
        process = self._process
        return 0 if process is None else resident_bytes(process.pid) or 0

    def look(self) -> None:
        """End a process without builds for ten minutes; called each minute."""
        with self._lock:
            process = self._process
            if process is not None and process.idle_looks() > _IDLE_LOOKS_MAX:
                self._process = None
                process.end()

    def close(self) -> None:
        """End the process. Blocking."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def _line(self) -> tuple[_CutProcess, Line]:
        with self._lock:
            if self._process is None or not self._process.is_alive():
                if self._process is not None:
                    self._process.end()
                self._process = _CutProcess(self._opening, self._builds_max)
            return self._process, self._process.lines.pop()


class _CutProcess:
    """A running process with the free lines; a line has a single build at a time."""

    def __init__(self, opening: Opening, builds_max: int) -> None:
        pairs = [socket.socketpair() for _ in range(1 + builds_max)]
        self._process = start_module(_MODULE, tuple(pair[1].fileno() for pair in pairs))
        self.pid = self._process.pid
        for pair in pairs:
            pair[1].close()
        self._control, *self.lines = (Line(pair[0].detach()) for pair in pairs)
        self._builds_max = builds_max
        self._idle_looks = 0
        with contextlib.suppress(LineEndedError):
            self._control.send(opening)

    def is_alive(self) -> bool:
        """Whether the process can take builds."""
        return self._control.is_open and self._process.poll() is None

    def idle_looks(self) -> int:
        """Return the number of looks since the last build."""
        is_idle = len(self.lines) == self._builds_max
        self._idle_looks = self._idle_looks + 1 if is_idle else 0
        return self._idle_looks

    def give_back(self, line: Line) -> None:
        """Take a line after a build; a line with half a conversation ends the process."""
        self._idle_looks = 0
        if not line.is_open:
            self._control.close()
        self.lines.append(line)

    def end(self) -> None:
        """End the process. Blocking."""
        for connection in (self._control, *self.lines):
            connection.close()
        end_module(self._process, wait_s=_END_S)


def _talk(
    line: Line, build: Build, log: ServiceLog, prepare_writing: Callable[[str], None]
) -> LiveCut | None:
    """Have a cut made; raise `LineEndedError` if the process is gone."""
    is_over = False
    try:
        line.send(build)
        while True:
            message = line.receive()
            match message:
                case ReadPage() | CheckHistory() | PrepareWriting():
                    _answer(line, message, log, prepare_writing)
                case Failed():
                    is_over = True
                    raise message.error()
                case Unchanged():
                    is_over = True
                    return None
                case _:
                    is_over = True
                    cut: LiveCut = message
                    return cut
    finally:
        if not is_over:
            line.close()


def _answer(
    line: Line,
    question: ReadPage | CheckHistory | PrepareWriting,
    log: ServiceLog,
    prepare_writing: Callable[[str], None],
) -> None:
    page: Sequence[StoredBatch] | None = None
    try:
        match question:
            case ReadPage(bucket, start, end, page_bytes):
                page = log.page(bucket, start, end, page_bytes)
            case CheckHistory(covered, table_id):
                log.check_history(covered, table_id=table_id)
            case PrepareWriting(location):
                prepare_writing(location)
    except StreamhouseError as error:
        line.send(Failed.of(error))
        return
    if page is None:
        line.send(None)
    else:
        line.send(Page([(*stored[:-1], stored.payload.nbytes) for stored in page]))
        line.send_bytes(b"".join(stored.payload for stored in page))
