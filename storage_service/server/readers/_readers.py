"""Readers beside the owner: processes that answer the lookups of connections handed to them.

The owner accepts every connection. A connection whose last requests were all lookups of a table
that readers hold goes to a reader, as a descriptor over a Unix socket. A reader that cannot answer
a request gives the connection back, with the request's bytes. So writers never pay for readers, and
a reader that dies takes only idle connections and unanswered lookups with it.

`_board.py` says how a reader learns what is acknowledged. A table is offered to the readers when
its lookups come, in one generation: each change of the table's form ends the generation.

Event loop only.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import socket
import subprocess
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from streamhouse.core.backoff import Backoff
from streamhouse.core.child_process import end_module, start_module
from streamhouse.core.errors import StreamhouseError
from streamhouse.core.log_lines import JsonFormatter
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.server.http._http_server import HttpServer
from streamhouse.storage_service.server.http.http_exchange import Connection, HttpExchange
from streamhouse.storage_service.server.readers._board import BUCKETS_MAX, SLOTS, Board
from streamhouse.storage_service.server.readers._messages import (
    Channel,
    Figures,
    Floor,
    Hold,
    Holds,
    LetGo,
    Lost,
    Moved,
    Opened,
    Opening,
    Stop,
)
from streamhouse.storage_service.server.service import ReaderFigures, Service
from streamhouse.storage_service.server.status.metrics import Counts

__all__ = ["Readers"]

_logger = logging.getLogger(__name__)

_MODULE: Final = "streamhouse.storage_service.server.readers._reader_process"
_ROUTES: Final = frozenset(("row", "lookup", "count"))
_ANSWERED: Final = frozenset((200, 404))
_READS_BEFORE_MOVE: Final = 16
# A connection that came back stays, longer each time.
_STAYS: Final = Backoff(first_s=0.25, most_s=60.0)
# A reader is offered a table again after it could not hold the table; a load may take minutes.
_REFUSED: Final = Backoff(first_s=30.0, most_s=3_600.0)
_RESTARTS: Final = Backoff(first_s=0.1, most_s=10.0)
_STEADY_S: Final = 10.0
_END_S: Final = 5.0
# A reader sends its figures every second once it has started.
_SILENT_S: Final = 20.0
_LAST_LOOK_S: Final = 0.1
# A reader that is silent for longer gets no connections.
_HEARD_S: Final = 3.0
_LEASE_LOOK_S: Final = 0.1


class _Reader:
    """One process."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        end: socket.socket,
        on_message: Callable[[_Reader, Any, socket.socket | None], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.process = process
        self.ended: asyncio.Future[None] = loop.create_future()
        self.heard_s = loop.time()
        self.connections = 0
        self.figures = Figures(0, 0, None)
        self.samples: Counts = {}
        self.channel = Channel(
            end, on_message=functools.partial(on_message, self), on_end=self._end
        )
        self.send = self.channel.send

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class _Offered:
    """A table that readers hold or load, in one form."""

    def __init__(self, table: KeyTable, slot: int, generation: int) -> None:
        self.table = table
        self.hold = Hold(table.info, slot, generation)
        self.holders: set[_Reader] = set()
        self.losses: Counter[_Reader] = Counter()


class Readers:
    """All readers of a process. `start` once the service answers, `close` while it still could."""

    def __init__(self, service: Service, server: HttpServer, *, count: int) -> None:
        self._service = service
        self._server = server
        self._count = count
        self._board = Board.create()
        self._readers: set[_Reader] = set()
        self._offers: dict[KeyTable, _Offered] = {}
        self._by_generation: dict[int, _Offered] = {}
        self._generations = itertools.count(1)
        self._free_slots = list(range(SLOTS))
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closing = False
        self._ended: Counter[tuple[str, str, tuple[tuple[str, str], ...]]] = Counter()
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Start the processes; connections move once the processes hold tables."""
        service = self._service
        for _ in range(self._count):
            self._run(self._keep_running())
        if service.tenure is not None:
            self._run(self._publish_lease())
        service.on_answered = self.answered
        service.metrics.add_counts = self._counts
        service.reader_figures = self._figures

    async def close(self) -> None:
        """Let the readers answer what is in progress, and end them."""
        self._is_closing = True
        self._service.on_answered = None
        for reader in self._readers:
            reader.send(Stop())
        for reader in tuple(self._readers):
            await asyncio.to_thread(end_module, reader.process, wait_s=_END_S)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for reader in tuple(self._readers):
            self._forget(reader)
        for offered in list(self._offers.values()):
            self._withdraw(offered)
        self._board.close()

    # -- connections ---------------------------------------------------------------------------

    def answered(self, exchange: HttpExchange) -> None:
        """Count an answered request of a connection, and move the connection if it only reads."""
        connection = exchange.connection
        if exchange.route not in _ROUTES or exchange.status not in _ANSWERED:
            connection.reads = 0
            return
        connection.reads += 1
        if connection.reads < _READS_BEFORE_MOVE:
            return
        connection.reads = 0
        if self._loop.time() >= connection.stays_until_s:
            reader = self._reader_for(exchange.path)
            if reader is not None:
                # After the answer is sent.
                self._loop.call_soon(self._move, connection, reader)

    def _move(self, connection: Connection, reader: _Reader) -> None:
        if reader not in self._readers or self._is_closing:
            return
        descriptor = connection.take_socket()
        if descriptor is not None:
            reader.connections += 1
            reader.send(Moved(b"", connection.moves), descriptor)

    def _take_back(self, moved: Moved, connection: socket.socket) -> None:
        stays_s = _STAYS.after(moved.moves)
        self._run(self._server.adopt(connection, moved.data, moves=moved.moves, stays_s=stays_s))

    def _reader_for(self, path: str) -> _Reader | None:
        """Return the reader with the fewest connections of those that hold the table of a URL."""
        try:
            table = self._service.lookup_table(path.split("/", 4)[3])
        except StreamhouseError:
            return None
        assert isinstance(table, KeyTable)
        offered = self._offers.get(table) or self._offer(table)
        if offered is None:
            return None
        heard_since_s = self._loop.time() - _HEARD_S
        holders = [reader for reader in offered.holders if reader.heard_s >= heard_since_s]
        return min(holders, key=lambda reader: reader.connections, default=None)

    # -- tables --------------------------------------------------------------------------------

    def _offer(self, table: KeyTable) -> _Offered | None:
        """Have all readers hold a table, in the table's present form."""
        if table.is_dropped or table.info.bucket_count > BUCKETS_MAX or not self._free_slots:
            return None
        offered = _Offered(table, self._free_slots.pop(), next(self._generations))
        self._offers[table] = self._by_generation[offered.hold.generation] = offered
        self._publish(offered)
        table.wakeups.on_wake = functools.partial(self._publish, offered)
        table.on_change = functools.partial(self._withdraw, offered)
        for reader in self._readers:
            reader.send(offered.hold)
        return offered

    def _publish(self, offered: _Offered) -> None:
        ends = [tablet.high_watermark for tablet in offered.table.tablets]
        self._board.write(offered.hold.slot, offered.hold.generation, ends)

    def _withdraw(self, offered: _Offered) -> None:
        """End a generation: from now on no reader answers with it."""
        self._board.write(offered.hold.slot, 0, ())
        offered.table.wakeups.on_wake = offered.table.on_change = None
        del self._offers[offered.table], self._by_generation[offered.hold.generation]
        self._free_slots.append(offered.hold.slot)
        for reader in self._readers:
            reader.send(LetGo(offered.hold.info.path, offered.hold.generation))

    # -- processes -----------------------------------------------------------------------------

    async def _keep_running(self) -> None:
        """Run a reader, and start it again until the readers are closed."""
        failures = 0
        while True:
            started_s = self._loop.time()
            reader = self._started()
            await self._ended_or_silent(reader)
            self._forget(reader)
            await asyncio.to_thread(end_module, reader.process, wait_s=_END_S)
            if self._is_closing:
                return
            failures = 1 if self._loop.time() - started_s > _STEADY_S else failures + 1
            pause_s = _RESTARTS.jittered_after(failures)
            code = reader.process.returncode
            _logger.warning(
                "event=reader_ended pid=%d code=%d again_in_s=%.1f",
                reader.process.pid,
                code,
                pause_s,
            )
            await asyncio.sleep(pause_s)

    async def _ended_or_silent(self, reader: _Reader) -> None:
        """Return when a reader has ended, or was killed because it is silent."""
        while not reader.ended.done():
            heard_s = reader.heard_s
            remaining_s = heard_s + _SILENT_S - self._loop.time()
            # After a pause of this process the messages of the pause are read before the last look.
            await asyncio.wait([reader.ended], timeout=max(remaining_s, _LAST_LOOK_S))
            if remaining_s <= 0 and reader.heard_s == heard_s and not reader.ended.done():
                _logger.error("event=reader_silent pid=%d", reader.process.pid)
                reader.process.kill()
                return

    def _started(self) -> _Reader:
        ours, theirs = socket.socketpair()
        inherited = (
            theirs.fileno(),
            self._board.descriptor,
            self._service.manager.directory.lock_descriptor,
        )
        with theirs:
            process = start_module(_MODULE, inherited, ends_with_parent=True)
        reader = _Reader(process, ours, self._on_message)
        root = logging.getLogger()
        is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers)
        service = self._service
        reader.send(
            Opening(
                config=service.config,
                log_level=root.level,
                is_log_json=is_json,
                is_journalled=service.tenure is not None,
                is_traced=service.spans is not None,
                last_grants=service.access.last_grants,
            )
        )
        for offered in self._offers.values():
            reader.send(offered.hold)
        self._readers.add(reader)
        return reader

    def _forget(self, reader: _Reader) -> None:
        """Forget a reader that has ended; the counters stay."""
        if reader not in self._readers:
            return
        self._readers.discard(reader)
        self._ended.update(reader.samples)
        reader.channel.close()
        for offered in self._offers.values():
            offered.holders.discard(reader)
            offered.losses.pop(reader, None)

    def _on_message(self, reader: _Reader, message: Any, connection: socket.socket | None) -> None:
        reader.heard_s = self._loop.time()
        match message:
            case Moved():
                assert connection is not None
                reader.connections -= 1
                self._take_back(message, connection)
            case Figures():
                reader.figures = message
                if message.samples is not None:
                    reader.samples = message.samples
                reader.connections = message.connections
            case Opened(generation):
                offered = self._by_generation.get(generation)
                buckets = () if offered is None else offered.table.key_buckets
                reader.send(Floor(generation, [bucket.rows.applied_offset for bucket in buckets]))
            case Holds(generation):
                if (offered := self._by_generation.get(generation)) is not None:
                    offered.holders.add(reader)
                    # The next loss is a first one: the rows did fit.
                    offered.losses.pop(reader, None)
            case Lost(generation, why):
                self._lost(reader, generation, why)

    def _lost(self, reader: _Reader, generation: int, why: str) -> None:
        offered = self._by_generation.get(generation)
        if offered is None:
            return
        offered.holders.discard(reader)
        _logger.info(
            "event=reader_lost_table pid=%d table=%s why=%r",
            reader.process.pid,
            offered.table.path,
            why,
        )
        # Once more after a while: rows may have become visible, or fewer.
        offered.losses[reader] += 1
        pause_s = _REFUSED.after(offered.losses[reader])
        self._loop.call_later(pause_s, self._offer_again, reader, offered)

    def _offer_again(self, reader: _Reader, offered: _Offered) -> None:
        is_current = self._offers.get(offered.table) is offered
        if is_current and reader in self._readers and reader not in offered.holders:
            reader.send(offered.hold)

    async def _publish_lease(self) -> None:
        tenure = self._service.tenure
        assert tenure is not None
        while True:
            self._board.write_lease(tenure.valid_until_s)
            await asyncio.sleep(_LEASE_LOOK_S)

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _figures(self) -> ReaderFigures:
        return ReaderFigures(
            processes=len(self._readers),
            connections=sum(reader.figures.connections for reader in self._readers),
            key_bytes=sum(reader.figures.key_bytes for reader in self._readers),
        )

    def _counts(self) -> Counter[tuple[str, str, tuple[tuple[str, str], ...]]]:
        """Return the counters of all readers, also of those that have ended."""
        counts = Counter(self._ended)
        for reader in self._readers:
            counts.update(reader.samples)
        return counts
