"""The process for the cuts of live tables: `python -m` with the file descriptors of its lines.

The first line ends when the service is gone, and the process ends at once: files of half a build
lie in folders that the owner of the table deletes. Every other line has a single build at a time.
The process ignores signals of terminals and process managers: the service ends the process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import Any, Final

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.table import TableInfo
from streamhouse.core.threads import NamedThread
from streamhouse.lake.catalogs.open_catalog import OpenCatalog
from streamhouse.lake.staged_lake import StagedLake
from streamhouse.reading.live.live_table import LiveLakeTable
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
from streamhouse.storage_service.live._service_log import StoredRows
from streamhouse.storage_service.log.segments.segment import StoredBatch

__all__ = ["main"]

_logger = logging.getLogger(__name__)

_NICE: Final = 19
_TABLES_MAX: Final = 80
"""A few more than the service caches."""


class _ServiceReads(StoredRows):
    """`TableReads` over a line. Thread-safe."""

    def __init__(self, line: Line, info: TableInfo) -> None:
        super().__init__(info, self._page)
        self._line = line
        self._lock = threading.Lock()

    def _page(self, bucket: int, start: int, end: int, page_bytes: int) -> list[StoredBatch]:
        with self._lock:
            page: Page = self._ask(ReadPage(bucket, start, end, page_bytes))
            payloads = memoryview(self._line.receive_bytes())
        batches, position = [], 0
        for base_offset, row_count, timestamp_us, schema_id, byte_count in page.batches:
            payload = payloads[position : position + byte_count]
            batches.append(StoredBatch(base_offset, row_count, timestamp_us, schema_id, payload))
            position += byte_count
        return batches

    def check_lake_history(
        self,
        path: str,  # noqa: ARG002 - the log of one table
        covered: CoveredOffsets,
        *,
        table_id: int,
    ) -> None:
        """See `StorageClient.check_lake_history`."""
        with self._lock:
            self._ask(CheckHistory(covered, table_id))

    def prepare_writing(self, location: str) -> None:
        """Have the service record a place of files, and look for room."""
        with self._lock:
            self._ask(PrepareWriting(location))

    def _ask(self, question: ReadPage | CheckHistory | PrepareWriting) -> Any:
        self._line.send(question)
        answer = self._line.receive()
        if isinstance(answer, Failed):
            raise answer.error()
        return answer


class _Table:
    """A lake table; `reads` belong to the build in progress."""

    def __init__(self, lake: StagedLake, build: Build) -> None:
        self.reads: _ServiceReads | None = None
        self.live = LiveLakeTable(lake, role=build.role, before_writing=self._prepare)

    def _prepare(self, location: str) -> None:
        assert self.reads is not None
        self.reads.prepare_writing(location)


class _Builds:
    """All builds of the process. Thread-safe for builds of different tables."""

    def __init__(self, opening: Opening) -> None:
        self._described = opening.described
        self._catalog = OpenCatalog(
            opening.described,
            service_id=opening.service_id,
            data_directory=opening.data_directory,
        )
        self._lock = threading.Lock()
        self._tables: OrderedDict[int, _Table] = OrderedDict()

    def serve(self, line: Line) -> None:
        """Make the cuts for a line, until the service ends the line."""
        with suppress(LineEndedError):
            while True:
                build: Build = line.receive()
                line.send(self._made(build, _ServiceReads(line, build.served.info)))

    def _made(self, build: Build, reads: _ServiceReads) -> Any:
        try:
            table = self._table(build)
            table.reads = reads
            cut = table.live.cut(build.served, reads, now_s=build.now_s)
        except StreamhouseError as error:
            return Failed.of(error)
        except LineEndedError:
            raise
        except Exception as error:  # a bug: the service raises it again
            _logger.exception("event=live_cut_failed table=%s", build.served.info.path)
            return Failed.of(error)
        return Unchanged() if cut.metadata_location == build.shown_at else cut

    def _table(self, build: Build) -> _Table:
        with self._lock:
            table = self._tables.get(build.number)
            if table is None:
                lake = StagedLake(self._catalog.get(), self._described)
                table = self._tables[build.number] = _Table(lake, build)
            self._tables.move_to_end(build.number)
            while len(self._tables) > _TABLES_MAX:
                self._tables.popitem(last=False)
        return table


def main() -> None:
    """Serve the lines, until the service is gone."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    os.nice(_NICE)
    control, *lines = (Line(int(argument)) for argument in sys.argv[1:])
    with suppress(LineEndedError):
        builds = _Builds(control.receive())
        for number, line in enumerate(lines):
            NamedThread("live_build", builds.serve, (line,), number=number).start()
        control.receive()
    os._exit(0)


if __name__ == "__main__":
    main()
