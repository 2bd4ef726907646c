"""Readers beside the owner: processes that answer the reads of connections handed to them.

The owner accepts every connection. A connection whose last requests were all reads that readers
can answer goes to a reader, as a descriptor over a Unix socket. A reader that cannot answer a
request gives the connection back, with the request's bytes. So writers never pay for readers, and a
reader that dies takes only idle connections and unanswered reads with it.

`_board.py` says how a reader learns what is acknowledged. A table is offered to the readers when
its reads come, in one generation: each change of the table's form ends the generation. Its rows by
key are offered when lookups come.

Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from weakref import WeakValueDictionary

from streamhouse.core.backoff import Backoff
from streamhouse.core.child_process import end_module, start_module
from streamhouse.core.errors import StreamhouseError
from streamhouse.core.log_lines import JsonFormatter
from streamhouse.storage_service.engine.keys.key_bucket import KeyBucket
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.server.http._http_server import HttpServer
from streamhouse.storage_service.server.http._own_task import own_task
from streamhouse.storage_service.server.http.http_exchange import Connection, HttpExchange
from streamhouse.storage_service.server.readers._board import BUCKETS_MAX, SLOTS, Board, Published
from streamhouse.storage_service.server.readers._messages import (
    Changed,
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
    State,
    Stop,
    Watch,
)
from streamhouse.storage_service.server.service import ReaderFigures, Service, nobody_takes
from streamhouse.storage_service.server.status.metrics import Counts

__all__ = ["Readers"]

_logger = logging.getLogger(__name__)

_MODULE: Final = "streamhouse.storage_service.server.readers._reader_process"
_BY_KEY: Final = frozenset(("row", "lookup", "count"))
_ROUTES: Final = _BY_KEY | {"fetch", "table_state"}
# The attributes of a table whose change ends a generation.
_FORM: Final = frozenset(("info", "is_dropped"))
_ANSWERED: Final = frozenset((200, 404))
_READS_BEFORE_MOVE: Final = 16
# A connection that came back stays, longer each time.
_STAYS: Final = Backoff(first_s=0.25, most_s=60.0)
# A reader is offered a table again after it could not hold the table; a load may take minutes.
_REFUSED: Final = Backoff(first_s=30.0, most_s=3_600.0)
_RESTARTS: Final = Backoff(first_s=0.1, most_s=10.0)
_STEADY_S: Final = 10.0
_END_S: Final = 5.0
# How long a subscription waits for a reader of its table.
_OPENED_S: Final = 1.0
# A reader sends its figures every second once it has started. On a machine without time for it a
# start takes long, and another start takes longer.
_SILENT_S: Final = 20.0
_START_S: Final = 120.0
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
        self.silent_s_max = _START_S
        self.connections = 0
        self.figures = Figures(0, 0, 0, None)
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

    def __init__(self, table: OpenTable, slot: int, generation: int) -> None:
        self.table = table
        self.hold = Hold(
            table.info, slot, generation, by_key=False, state=_state(table, generation, 1)
        )
        self.holders: set[_Reader] = set()
        """The readers with the log."""
        self.by_key: set[_Reader] = set()
        """The readers with the rows by key."""
        self.is_held = asyncio.Event()
        """Whether a reader has had the log."""
        self.losses: Counter[_Reader] = Counter()
        self.watches: dict[_Reader, Published] = {}
        """The readers waiting for other offsets, and the offsets of each `Watch`."""

    def published(self) -> Published:
        """Return the offsets for the board."""
        tablets = self.table.tablets
        return Published(
            tuple([tablet.log_start_offset for tablet in tablets]),
            tuple([tablet.high_watermark for tablet in tablets]),
            self.hold.state.number,
        )

    def forget(self, reader: _Reader) -> None:
        """Forget a reader that has ended."""
        self.holders.discard(reader)
        self.by_key.discard(reader)
        self.watches.pop(reader, None)
        self.losses.pop(reader, None)


def _state(table: OpenTable, generation: int, number: int) -> State:
    return State(
        generation, number, table.lake, dict(table.truncated_offsets), table.truncated_at_us
    )


class Readers:
    """All readers of a process. `start` once the service answers, `close` while it still could."""

    def __init__(self, service: Service, server: HttpServer, *, count: int) -> None:
        self._service = service
        self._server = server
        self._count = count
        self._board = Board.create()
        self._readers: set[_Reader] = set()
        self._offers: dict[OpenTable, _Offered] = {}
        self._by_generation: dict[int, _Offered] = {}
        # Also of generations that have ended: their last figures arrive later.
        self._tables: WeakValueDictionary[int, OpenTable] = WeakValueDictionary()
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
        service.hand_over = self.hand_over
        service.metrics.add_counts = self._counts
        service.reader_figures = self._figures

    async def close(self) -> None:
        """Let the readers answer what is in progress, and end them."""
        self._is_closing = True
        self._service.on_answered, self._service.hand_over = None, nobody_takes
        self._send(Stop())
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
            reader = self._reader_for(exchange)
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

    async def hand_over(self, exchange: HttpExchange) -> bool:
        """Give a request and the connection to a reader, if a reader holds the table."""
        connection = exchange.connection
        if self._loop.time() < connection.stays_until_s:
            return False
        # Only then all that has arrived with the request is known.
        await own_task()
        reader = self._reader_for(exchange)
        if reader is None and (offered := self._offered_for(exchange)) and not offered.losses:
            # Readers open a log in milliseconds, and may keep the request for weeks.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_OPENED_S):
                    await offered.is_held.wait()
            reader = self._reader_for(exchange)
        if reader is None or self._is_closing:
            return False
        request = exchange.request_bytes()
        descriptor = connection.take_asking_socket()
        if descriptor is None:
            return False
        reader.connections += 1
        reader.send(Moved(request, connection.moves), descriptor)
        return True

    def _take_back(self, moved: Moved, connection: socket.socket) -> None:
        stays_s = _STAYS.after(moved.moves)
        self._run(self._server.adopt(connection, moved.data, moves=moved.moves, stays_s=stays_s))

    def _reader_for(self, exchange: HttpExchange) -> _Reader | None:
        """Return the reader with the fewest connections among the holders of the table."""
        offered = self._offered_for(exchange)
        if offered is None:
            return None
        holders = offered.holders
        if exchange.route in _BY_KEY:
            holders = offered.by_key
            if not offered.hold.by_key:
                offered.hold = replace(offered.hold, by_key=True)
                self._send(offered.hold)
        heard_since_s = self._loop.time() - _HEARD_S
        heard = [reader for reader in holders if reader.heard_s >= heard_since_s]
        return min(heard, key=lambda reader: reader.connections, default=None)

    def _offered_for(self, exchange: HttpExchange) -> _Offered | None:
        """Return the offer of a URL's table; None for a table that no reader can hold."""
        try:
            table = self._service.readable(exchange.path.split("/", 4)[3])
        except StreamhouseError:
            return None
        return self._offers.get(table) or self._offer(table)

    # -- tables --------------------------------------------------------------------------------

    def _offer(self, table: OpenTable) -> _Offered | None:
        """Have all readers hold a table, in the table's present form."""
        if table.is_dropped or table.info.bucket_count > BUCKETS_MAX or not self._free_slots:
            return None
        offered = _Offered(table, self._free_slots.pop(), next(self._generations))
        self._offers[table] = self._by_generation[offered.hold.generation] = offered
        self._tables[offered.hold.generation] = table
        self._publish(offered)
        table.wakeups.on_wake = functools.partial(self._publish, offered)
        table.on_change = functools.partial(self._on_change, offered)
        self._send(offered.hold)
        return offered

    def _publish(self, offered: _Offered) -> None:
        published, generation = offered.published(), offered.hold.generation
        self._board.write(offered.hold.slot, generation, *published)
        if offered.watches:
            for reader, seen in tuple(offered.watches.items()):
                if seen != published:
                    del offered.watches[reader]
                    reader.send(Changed(generation))

    def _send(self, message: Hold | State | LetGo | Stop) -> None:
        for reader in self._readers:
            reader.send(message)

    def _on_change(self, offered: _Offered, attribute: str) -> None:
        """Send the readers a table's new state, or withdraw a table in another form."""
        if attribute in _FORM:
            self._withdraw(offered)
            return
        hold = offered.hold
        state = _state(offered.table, hold.generation, hold.state.number + 1)
        offered.hold = replace(hold, state=state)
        self._send(state)
        if attribute != "truncated_at_us":
            # The rows behind an overwrite are published in the same step, and the number with them.
            self._publish(offered)

    def _withdraw(self, offered: _Offered) -> None:
        """End a generation: from now on no reader answers with it."""
        self._board.write(offered.hold.slot, 0, (), ())
        offered.table.wakeups.on_wake = offered.table.on_change = None
        del self._offers[offered.table], self._by_generation[offered.hold.generation]
        self._free_slots.append(offered.hold.slot)
        self._send(LetGo(offered.hold.info.path, offered.hold.generation))

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
            remaining_s = heard_s + reader.silent_s_max - self._loop.time()
            # After a pause of this process the messages of the pause are read before the last look.
            look_s = max(min(remaining_s, _SILENT_S), _LAST_LOOK_S)
            await asyncio.wait([reader.ended], timeout=look_s)
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
                may_lose_rows=service.may_lose_rows,
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
            offered.forget(reader)

    def _on_message(self, reader: _Reader, message: Any, connection: socket.socket | None) -> None:
        reader.heard_s, reader.silent_s_max = self._loop.time(), _SILENT_S
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
                self._count_rows(message.read_rows)
            case Opened(generation) | Holds(generation) | Lost(generation) | Watch(generation):
                self._on_table(reader, message, self._by_generation.get(generation))

    def _on_table(
        self, reader: _Reader, message: Opened | Holds | Lost | Watch, offered: _Offered | None
    ) -> None:
        """Take a message about a table; `offered` is None after the generation's end."""
        if isinstance(message, Opened):
            buckets: Sequence[KeyBucket] = ()
            if offered is not None:
                assert isinstance(offered.table, KeyTable)
                buckets = offered.table.key_buckets
            applied = [bucket.rows.applied_offset for bucket in buckets]
            reader.send(Floor(message.generation, applied))
        elif offered is None:
            return
        elif isinstance(message, Holds):
            (offered.by_key if message.by_key else offered.holders).add(reader)
            offered.is_held.set()
            if message.by_key == offered.hold.by_key:
                # The next loss is a first one: the rows did fit.
                offered.losses.pop(reader, None)
        elif isinstance(message, Lost):
            self._lost(reader, offered, message)
        else:
            offered.watches[reader] = message.published
            self._publish(offered)

    def _count_rows(self, read_rows: Mapping[int, int]) -> None:
        for generation, count in read_rows.items():
            if (table := self._tables.get(generation)) is not None:
                table.read_rows += count

    def _lost(self, reader: _Reader, offered: _Offered, message: Lost) -> None:
        (offered.by_key if message.by_key else offered.holders).discard(reader)
        _logger.info(
            "event=reader_lost_table pid=%d table=%s by_key=%s why=%r",
            reader.process.pid,
            offered.table.path,
            message.by_key,
            message.why,
        )
        # Once more after a while: rows may have become visible, or fewer.
        offered.losses[reader] += 1
        pause_s = _REFUSED.after(offered.losses[reader])
        self._loop.call_later(pause_s, self._offer_again, reader, offered)

    def _offer_again(self, reader: _Reader, offered: _Offered) -> None:
        if self._offers.get(offered.table) is offered and reader in self._readers:
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
            subscriptions=sum(reader.figures.subscriptions for reader in self._readers),
        )

    def _counts(self) -> Counter[tuple[str, str, tuple[tuple[str, str], ...]]]:
        """Return the counters of all readers, also of those that have ended."""
        counts = Counter(self._ended)
        for reader in self._readers:
            counts.update(reader.samples)
        return counts
