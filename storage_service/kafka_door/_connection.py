"""One connection of a Kafka client: frames in, answers out, in the order of the requests.

    length: i32 | request

Guarantees:
- answers leave in the order of their requests; a request begins after the previous answer, but a
  few writes are in progress at a time
- rows are stored in the order of their requests: if a write ends the connection before its rows are
  handed over, no later rows are stored
- a connection's memory is bounded: arriving bytes count in the memory for bodies, and the socket is
  not read while complete requests wait
- a client that sends half a request, reads no answers or stays silent is disconnected after a time

Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Final, NamedTuple

from streamhouse.core.errors import OverloadedError
from streamhouse.storage_service.kafka.groups.coordinator import GroupKey
from streamhouse.storage_service.kafka.messages.answers import Piece
from streamhouse.storage_service.kafka.messages.requests import RequestHeader, parse_header
from streamhouse.storage_service.kafka.messages.shapes import MalformedRequestError
from streamhouse.storage_service.kafka_door._answering import (
    answer_request,
    api_of,
    version_refusal,
)
from streamhouse.storage_service.kafka_door._api import Api, ConnectionEnded
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from streamhouse.storage_service.kafka_door.broker._broker import Broker
from streamhouse.storage_service.kafka_door.broker._producers import RefusedPlaces
from streamhouse.storage_service.kafka_door.broker._read_tables import ReadTables
from streamhouse.storage_service.server.http.body_memory import HeldBody
from streamhouse.storage_service.server.http.http_exchange import ClientGone
from streamhouse.storage_service.server.http.open_connections import OpenConnections

__all__ = ["KafkaConnection"]

_logger = logging.getLogger(__name__)

_LENGTH_BYTES: Final = 4
_API_KEY_BYTES: Final = 2
# Further bytes wait in the socket.
_READ_AHEAD_BYTES: Final = 256 << 10
_READ_AHEAD_CHUNKS: Final = 256
# Smaller pieces of a request are joined: each piece has an overhead of this size.
_PART_BYTES_MIN: Final = 4 << 10
# Allowance for the message around a batch of the largest size.
_AROUND_RECORDS_BYTES: Final = 1 << 20
# The limit for clients without a valid token.
_ANONYMOUS_BYTES_MAX: Final = 64 << 10
# How much of an answer a client must read within `answer_stall_timeout_ms`.
_PROGRESS_BYTES_MIN: Final = 64 << 10
_FIRST_FETCH_MAX: Final = 1 << 20


class _Request(NamedTuple):
    """A complete request with its memory; `refusal` answers an unsupported version."""

    header: RequestHeader
    api: Api
    data: memoryview
    memory: HeldBody
    refusal: list[Piece] | None


class _WriteAnswer:
    """The answer to a write; `frame` is empty if the client wants no answer."""

    __slots__ = ("frame", "is_known")

    def __init__(self) -> None:
        self.frame: list[Piece] = []
        self.is_known = False


class KafkaConnection(asyncio.Protocol):
    """See the module."""

    address = "unknown"
    token: bytes | None = None
    has_shaken_hands = False
    is_gone = False

    def __init__(
        self,
        broker: Broker,
        connections: OpenConnections,
        *,
        apis: Mapping[int, Api],
        next_id: Callable[[], str],
        on_open: Callable[[KafkaConnection], None],
        on_close: Callable[[KafkaConnection], None],
    ) -> None:
        self._broker = broker
        self._service = broker.service
        self._config = broker.service.config
        self._connections = connections
        self._apis = apis
        self._next_id = next_id
        self._on_open = on_open
        self._on_close = on_close
        self.waiting: set[asyncio.Future[None]] = set()
        # A random start: consumers in lockstep, or with one connection per fetch, begin at
        # different partitions.
        self.fetches: Iterator[int] = itertools.count(random.randrange(_FIRST_FETCH_MAX))
        self.members: dict[GroupKey, str] = {}
        self.read_tables = ReadTables()
        self._loop = asyncio.get_running_loop()
        self.refused = RefusedPlaces(self._loop.time)
        self._chunks: deque[memoryview] = deque()
        self._chunk_bytes = 0
        self._arrival: asyncio.Future[None] | None = None
        self._is_reading_paused = False
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._is_closing = False
        self._last: KafkaExchange | None = None
        self._in_progress: set[asyncio.Task[None]] = set()
        # Of the writes in progress, in order.
        self._answers: deque[_WriteAnswer] = deque()
        self._is_flush_due = False

    # -- callbacks of the transport
    # -------------------------------------------------------------------

    # uvloop's transports do not derive from asyncio's classes.
    def connection_made(self, transport: Any) -> None:
        """Begin, unless too many connections are in use."""
        self._transport: asyncio.Transport = transport
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else "unknown"
        try:
            self._connections.opened(self, self.address)
        except OverloadedError:
            self.is_gone = True
            transport.abort()
            return
        self._on_open(self)
        self._serving = self._loop.create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        """Queue the bytes, and pause reading when the queue is full."""
        self._chunks.append(memoryview(data))
        self._chunk_bytes += len(data)
        if self._is_queue_full() and not self._is_reading_paused:
            self._is_reading_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, _: Exception | None) -> None:
        """Wake the requests that wait for this client."""
        self.is_gone = True
        self._connections.closed(self)
        self._on_close(self)
        self._broker.groups.connection_lost(self.members)
        self._can_write.set()
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._wake()

    def pause_writing(self) -> None:
        """Pause answers until the client has read some bytes."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """Resume answers."""
        self._can_write.set()

    def drop(self) -> None:
        """Close at once, and free the place for another connection."""
        self._connections.closed(self)
        self._transport.abort()

    def close_when_answered(self) -> None:
        """Begin no more requests, and close after the requests in progress."""
        self._is_closing = True
        self._wake()

    async def wait_closed(self) -> None:
        """Return when no request is in progress any more."""
        await asyncio.wait([self._serving])

    # -- requests ----------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Answer requests until the connection ends."""
        why = ""
        try:
            while not self._is_closing:
                await self._answer_next()
                if self._chunk_bytes and not self._may_begin_more():
                    # Queued requests are answered without a wait, so give other connections a turn.
                    await asyncio.sleep(0)
            await self._all_answered()
        except ClientGone:
            pass
        except (ConnectionEnded, MalformedRequestError) as error:
            why = str(error)
        except Exception:  # the outermost loop: a bug ends the connection, not the service
            _logger.exception("event=bug route=kafka client=%s", self.address)
            why = "a bug"
        finally:
            await self._end(why)

    def _may_begin_more(self) -> bool:
        """Return whether the next write may begin in this turn, to share a decoding pass.

        The start of a write is cheap, and few writes are in progress.
        """
        return 0 < len(self._in_progress) < self._config.kafka_pipelined_max

    async def _end(self, why: str) -> None:
        if why and not self.is_gone:
            _logger.debug("event=kafka_connection_closed client=%s why=%r", self.address, why)
        # The abort tells the requests in progress that the client has gone.
        if why or self.is_gone:
            self._transport.abort()
        while self._in_progress:
            await asyncio.wait(self._in_progress)
        if not self.is_gone:
            self._transport.close()

    async def _answer_next(self) -> None:
        request = await self._next_request()
        if request is None:
            return
        if request.refusal is not None:
            with request.memory:
                await self._all_answered()
                return await self._send(request.refusal)
        exchange = KafkaExchange(
            self._broker, self, request.header, request.api, request_id=self._next_id()
        )
        if request.api.is_write:
            await self._begin_write(exchange, request)
        else:
            with request.memory:
                await self._all_answered()
                await self._answer(exchange, request)
            self._is_closing = self._is_closing or exchange.is_last
        if not self._in_progress:
            self._connections.idle(self)

    async def _begin_write(self, exchange: KafkaExchange, request: _Request) -> None:
        """Start a write beside earlier writes; return when there is room for another write."""
        if self._last is not None:
            exchange.come_after(self._last)
        self._last = exchange
        answer = _WriteAnswer()
        self._answers.append(answer)

        async def run() -> None:
            try:
                with request.memory:
                    await self._answer(exchange, request, answer)
            except BaseException:
                exchange.break_turn()
                raise
            exchange.pass_turn()

        self._begin(run())
        while len(self._in_progress) >= self._config.kafka_pipelined_max:
            await asyncio.wait(self._in_progress, return_when=asyncio.FIRST_COMPLETED)

    def _begin(self, answering: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(self._guarded(answering))
        self._in_progress.add(task)
        task.add_done_callback(self._has_ended)

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        self._in_progress.discard(task)
        if not self._in_progress:
            self._connections.idle(self)

    async def _guarded(self, answering: Coroutine[Any, Any, None]) -> None:
        """Close the connection if a request with its own task cannot be answered."""
        try:
            return await answering
        except ClientGone:
            return
        except ConnectionEnded as error:
            _logger.debug("event=kafka_connection_closed client=%s why=%r", self.address, error)
        except Exception:  # the outermost loop of a request: a bug closes the connection
            _logger.exception("event=bug route=kafka client=%s", self.address)
        # Requests that arrived later are not begun.
        self.close_when_answered()
        self._transport.abort()

    async def _answer(
        self, exchange: KafkaExchange, request: _Request, write_answer: _WriteAnswer | None = None
    ) -> None:
        """Answer one request; `write_answer` keeps the answer to a write in order."""
        try:
            frame = await answer_request(exchange, request.data)
            if write_answer is not None:
                write_answer.frame, write_answer.is_known = frame or [], True
                self._flush_soon()
                await self._drained()
            elif frame is not None:
                await self._send(frame)
        finally:
            exchange.release()

    def _flush_soon(self) -> None:
        """Send the answers to writes in the next turn: one call for all writes of one commit."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        pieces: list[Piece] = []
        while self._answers and self._answers[0].is_known:
            pieces += self._answers.popleft().frame
        if pieces and not self.is_gone:
            self._transport.writelines(pieces)

    async def _all_answered(self) -> None:
        while self._in_progress:
            await asyncio.wait(self._in_progress)
        self._flush()
        self._last = None
        if self.is_gone:
            raise ClientGone

    # -- bytes in ----------------------------------------------------------------------------------

    async def _next_request(self) -> _Request | None:
        """Return the next request once complete; None if the connection is to be closed."""
        if not await self._has_next(self._config.kafka_idle_timeout_ms):
            return None
        memory = self._service.body_memory.body(self._share_name())
        try:
            data = await self._whole_request(memory)
            header = parse_header(data)
            api = api_of(self._apis, header.api_key)
            refusal = version_refusal(self._apis, header, api)
            self._connections.in_use(self)
            return _Request(header, api, data, memory, refusal)
        except BaseException:
            memory.__exit__()
            raise

    async def _has_next(self, idle_ms: int) -> bool:
        """Wait for the first byte of a request; False if the connection is to be closed."""
        if self._chunk_bytes and not self.is_gone:
            return not self._is_closing
        try:
            async with asyncio.timeout(idle_ms / 1_000):
                while not self._chunk_bytes:
                    if self.is_gone:
                        raise ClientGone
                    if self._is_closing:
                        return False
                    await self._arrive()
        except TimeoutError:
            if not self._in_progress:
                raise ConnectionEnded("it was idle for too long") from None
            return False
        return not self._is_closing

    async def _whole_request(self, memory: HeldBody) -> memoryview:
        """Return a request without its length; the bytes are counted as they arrive."""
        if (whole := self._whole_frame(memory)) is not None:
            return whole
        timeout_ms = self._config.body_read_timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1_000) as limit:
                memory.begin(lambda: None if limit.expired() else limit.reschedule(0))
                data = await self._frame(memory)
        except TimeoutError:
            why = (
                memory.refusal().message
                if memory.is_refused
                else f"no whole request in {timeout_ms}"
            )
            raise ConnectionEnded(why) from None
        memory.end()
        return data

    def _whole_frame(self, memory: HeldBody) -> memoryview | None:
        """Return a small request from a single piece; None otherwise."""
        chunk = self._chunks[0]
        length = int.from_bytes(chunk[:_LENGTH_BYTES], "big", signed=True)
        end = _LENGTH_BYTES + length
        bytes_max = min(self._bytes_max(), self._config.control_body_bytes_max)
        if not _API_KEY_BYTES <= length <= bytes_max or end > len(chunk):
            return None
        if not memory.adds_at_once(length):
            return None
        data = memoryview(bytes(chunk[_LENGTH_BYTES:end]))
        self._take(end)
        memory.end()
        return data

    def _bytes_max(self) -> int:
        """Return the maximal size of a request."""
        if self.token is None and not self._service.access.is_open:
            return _ANONYMOUS_BYTES_MAX
        return self._config.body_bytes_max + _AROUND_RECORDS_BYTES

    async def _frame(self, memory: HeldBody) -> memoryview:
        head = await self._read(_LENGTH_BYTES)
        length = int.from_bytes(head, "big", signed=True)
        bytes_max = self._bytes_max()
        if not _API_KEY_BYTES <= length <= bytes_max:
            raise ConnectionEnded(f"a request of {length} bytes is not within {bytes_max}")
        key = await self._read(_API_KEY_BYTES)
        is_large = length > self._config.control_body_bytes_max
        if is_large and not api_of(self._apis, int.from_bytes(key, "big", signed=True)).is_write:
            raise ConnectionEnded(f"a request of {length} bytes without rows is too large")
        parts: list[Piece] = []
        small = bytearray(key)
        remaining_bytes = length - _API_KEY_BYTES
        await memory.add(len(key))
        while remaining_bytes:
            part = await self._read_some(remaining_bytes)
            await memory.add(len(part))
            remaining_bytes -= len(part)
            if len(part) < _PART_BYTES_MIN:
                small += part
                continue
            parts += (small, part)
            small = bytearray()
        return memoryview(b"".join((*parts, small)))

    async def _read(self, byte_count: int) -> memoryview:
        """Return exactly `byte_count` bytes; for small counts only."""
        parts = b""
        while len(parts) < byte_count:
            parts += await self._read_some(byte_count - len(parts))
        return memoryview(parts)

    async def _read_some(self, bytes_max: int) -> memoryview:
        """Return the queued bytes, at most `bytes_max`; wait for the first byte."""
        while not self._chunks:
            if self.is_gone:
                raise ClientGone
            await self._arrive()
        return self._take(bytes_max)

    def _take(self, bytes_max: int) -> memoryview:
        """Return at most `bytes_max` bytes of the first queued piece."""
        chunk = self._chunks.popleft()
        if len(chunk) > bytes_max:
            self._chunks.appendleft(chunk[bytes_max:])
            chunk = chunk[:bytes_max]
        self._chunk_bytes -= len(chunk)
        if self._is_reading_paused and not self._is_queue_full() and not self.is_gone:
            self._is_reading_paused = False
            self._transport.resume_reading()
        return chunk

    def _is_queue_full(self) -> bool:
        """Return whether reading pauses; many small pieces also fill the queue."""
        return self._chunk_bytes > _READ_AHEAD_BYTES or len(self._chunks) > _READ_AHEAD_CHUNKS

    async def _arrive(self) -> None:
        self._arrival = self._loop.create_future()
        try:
            await self._arrival
        finally:
            self._arrival = None

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _share_name(self) -> str:
        caller = self._service.access.caller_of(self.token or b"")
        return self.address if caller is None else caller.name

    # -- bytes out ---------------------------------------------------------------------------------

    async def _send(self, frame: list[Piece]) -> None:
        """Send an answer; return when the client has read most bytes. Raises `ClientGone`."""
        if self.is_gone:
            raise ClientGone
        self._transport.writelines(frame)
        await self._drained()

    async def _drained(self) -> None:
        """Return when the client has read most of the sent bytes. Raises `ClientGone`."""
        unsent = self._transport.get_write_buffer_size()
        while not self._can_write.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.answer_stall_timeout_ms / 1_000):
                    await self._can_write.wait()
                    break
            still_unsent = self._transport.get_write_buffer_size()
            if still_unsent > unsent - _PROGRESS_BYTES_MIN:
                self._transport.abort()
                raise ClientGone
            unsent = still_unsent
        if self.is_gone:
            raise ClientGone
