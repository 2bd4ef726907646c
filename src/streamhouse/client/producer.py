"""Writing in the background: rows are gathered into batches, each delivered once, in order.

A caller may rely on this:
- the rows of a bucket are stored in the order of the calls; each once, also when answers are lost:
  a batch is repeated under its sequence until the service confirms its outcome
- every call returns a future, and an error is in the future and in the next `flush`: nothing fails
  silently
- memory is bounded: a full producer makes the caller wait, then raises OverloadedError
- a delivery that takes longer than `delivery_timeout_s` fails; after `UnknownOutcomeError` the
  service may still have the rows. Later rows of the bucket follow

At most `max_in_flight` buckets have a batch under way, each bucket one.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Final, Literal

import pyarrow as pa

from streamhouse.client._application_client import ApplicationClient
from streamhouse.client._storage_client import StorageClient
from streamhouse.client.values._python_rows import rows_as_arrow, rows_as_tried
from streamhouse.client.values.arguments import checked_calls, choice, names
from streamhouse.client.values.forms import (
    Arrow,
    PythonRows,
    Rows,
    is_arrow,
    normalized_rows,
)
from streamhouse.client.writing._rejects import (
    OnError,
    divided_batches,
    is_rejecting,
    send_divided,
)
from streamhouse.client.writing._request_batches import (
    REQUEST_BYTES_TARGET,
    bounded_batches,
    bounded_parts,
)
from streamhouse.client.writing.writes import (
    AppendWriter,
    ColumnChecks,
    Ranges,
    route,
    send,
)
from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import (
    InvalidRequestError,
    OutOfOrderSequenceError,
    OverloadedError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
    UnsupportedError,
)
from streamhouse.core.model.casts.lossless import fitted
from streamhouse.core.model.transaction import TransactionOperation
from streamhouse.core.threads import NamedThread

__all__ = ["Producer"]

_BACKOFF: Final = Backoff(first_s=0.05, most_s=2.0)


@dataclass
class _Call:
    """One `send`: done when all its pieces are done."""

    future: Future[Ranges]
    pieces_left: int
    ranges: Ranges = field(default_factory=dict)
    error: StreamhouseError | None = None


@dataclass
class _Piece:
    """Rows of one call for one bucket."""

    rows: pa.RecordBatch
    call: _Call
    since: float


@dataclass
class _Lane:
    """One bucket: the waiting rows, and the writer for the batches' numbers."""

    bucket: int
    waiting: deque[_Piece] = field(default_factory=deque)
    rows: int = 0
    writer: AppendWriter = field(default_factory=AppendWriter)
    is_busy: bool = False


def _joined_future(parts: Sequence[Future[Ranges]]) -> Future[Ranges]:
    """Return a future, done after all parts, with the first error if any."""
    joined: Future[Ranges] = Future()
    joined.set_running_or_notify_cancel()
    open_parts = len(parts)
    lock = threading.Lock()

    def count(_: Future[Ranges]) -> None:
        nonlocal open_parts
        with lock:
            open_parts -= 1
            if open_parts:
                return
        error = next((exception for part in parts if (exception := part.exception())), None)
        if error is not None:
            joined.set_exception(error)
            return
        ranges: Ranges = {}
        for part in parts:
            for bucket, span in part.result().items():
                ranges[bucket] = (ranges.get(bucket, span)[0], span[1])
        joined.set_result(ranges)

    for part in parts:
        part.add_done_callback(count)
    return joined


@checked_calls
class Producer:
    """Writes in the background: each row is stored once, in the order of the calls in its bucket.

    Thread-safe; call `close`, or use a `with` block. `send` returns a future, and an error is in
    the future and in the next `flush`. Memory is bounded: a full producer makes the caller wait.

        with StreamhouseClient() as client, Producer(client, "clicks") as producer:
            for number in range(1_000):
                producer.send({"id": number})
            producer.flush()

    Args:
        client: the client of the service; stays open when the producer is closed.
        path: the table.
        operation: `append` for log tables, `upsert` or `delete` for primary key tables.
        columns: upsert only these columns.
        linger_ms: how long rows wait for more rows of their bucket before they are sent.
        batch_rows: rows after which a batch is sent at once.
        max_in_flight: to how many buckets batches are sent at a time.
        buffer_bytes: the most memory for undelivered rows.
        max_block_s: how long a call waits for room before it raises `OverloadedError`.
        delivery_timeout_s: how long a batch is tried before the failure.
        on_error: `reject`: rows that do not fit go to the table `path$rejected`, in one transaction
            with the fitting rows of their call. A call with misfits waits for the delivery, after
            all earlier calls.
    """

    def __init__(
        self,
        client: ApplicationClient,
        path: str,
        *,
        operation: Literal["append", "upsert", "delete"] = "append",
        columns: Sequence[str] | None = None,
        linger_ms: float = 5.0,
        batch_rows: int = 10_000,
        max_in_flight: int = 4,
        buffer_bytes: int = 64 << 20,
        max_block_s: float = 60.0,
        delivery_timeout_s: float = 120.0,
        on_error: OnError = "refuse",
    ) -> None:
        if batch_rows < 1 or max_in_flight < 1 or buffer_bytes < 1 or linger_ms < 0:
            raise InvalidRequestError(
                "a producer's batch_rows, max_in_flight and buffer_bytes are at least 1, and"
                " linger_ms at least 0"
            )
        self._transport = StorageClient.of(client).transport
        operations = ("append", "upsert", "delete")
        self._operation = TransactionOperation(choice(operation, operations, argument="operation"))
        self._columns = None if columns is None else names(columns, argument="columns")
        self._checks = ColumnChecks()
        self._table = client.describe_table(path)
        if self._table.is_primary_key_table is self._is_append:
            raise UnsupportedError(
                f"table '{path}' has {'a' if self._is_append else 'no'} primary key: it cannot be"
                f" written by {operation}"
            )
        self._is_rejecting = is_rejecting(on_error, columns, path=path)
        self._dividing = threading.Lock()
        self._linger_s = linger_ms / 1000
        self._batch_rows = batch_rows
        self._buffer_bytes = buffer_bytes
        self._max_block_s = max_block_s
        self._delivery_timeout_s = delivery_timeout_s
        self._changed = threading.Condition()
        self._lanes = [_Lane(bucket) for bucket in range(self._table.bucket_count)]
        self._held_bytes = 0
        self._pending: set[Future[Ranges]] = set()
        self._is_flushing = 0
        self._is_closed = False
        self._sticky_bucket = 0
        self._failure: StreamhouseError | None = None
        self._threads = [
            NamedThread("producer", self._run, number=n)
            for n in range(min(max_in_flight, len(self._lanes)))
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"Producer('{self._table.path}', {self._operation})"

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: Rows) -> Future[Ranges]:
        """Take rows; the future gives bucket -> (start, end) once they are durable and visible.

        An append returns the rows' own offsets, an upsert or delete the offsets of all changes of
        the batch with the rows. Rows that cannot fit the table raise in this call.
        """
        rows = data if is_arrow(data) else normalized_rows(data, call="send")
        if isinstance(rows, pa.RecordBatchReader):
            return self._send_stream(rows)
        if isinstance(rows, PythonRows):
            make = rows_as_tried if self._is_rejecting else rows_as_arrow
            rows = make(self._table, rows.rows)
        return self._send_arrow(rows)

    def _send_stream(self, reader: pa.RecordBatchReader) -> Future[Ranges]:
        """Take a stream's rows as there is room; the future is done after the last row.

        If the stream breaks off, the rows before are delivered.
        """
        return _joined_future(
            [self._send_arrow(rows) for rows in bounded_parts(reader, call="send")]
        )

    def _send_arrow(self, data: Arrow) -> Future[Ranges]:
        if not self._is_rejecting:
            return self._send(data)
        batches = list(divided_batches(self._table, data, self._operation))
        # Only the service judges rows by constraints, and only a divided call can reject them.
        has_checks = bool(self._table.descriptor.checks)
        if has_checks or any(checked.misfits for _, checked in batches):
            return self._send_divided([rows for rows, _ in batches])
        fitting = [checked.rows for _, checked in batches]
        return self._send(pa.Table.from_batches(fitting) if fitting else data)

    def _send_divided(self, batches: Iterable[pa.RecordBatch]) -> Future[Ranges]:
        """Deliver rows with misfits among them, after all rows taken before."""
        future: Future[Ranges] = Future()
        future.set_running_or_notify_cancel()
        ranges: Ranges = {}
        # One call at a time: otherwise a later call could overtake.
        with self._dividing:
            self._wait_for_pending()
            first = 0
            try:
                for rows in batches:
                    for bucket, span in self._send_until_divided(rows, first).items():
                        ranges[bucket] = (ranges.get(bucket, span)[0], span[1])
                    first += rows.num_rows
            except StreamhouseError as error:
                with self._changed:
                    self._failure = self._failure or error
                future.set_exception(error)
            else:
                future.set_result(ranges)
        return future

    def _wait_for_pending(self) -> None:
        """Return when all rows taken so far are delivered, or have failed."""
        with self._changed:
            if self._is_closed:
                raise InvalidRequestError("the producer is closed")
            pending = tuple(self._pending)
            self._is_flushing += 1
            self._changed.notify_all()
        try:
            wait_for(pending)
        finally:
            with self._changed:
                self._is_flushing -= 1

    def _send_until_divided(self, rows: pa.RecordBatch, first_row: int) -> Ranges:
        """Let the service divide and write rows; repeat until the outcome is certain."""
        deadline = time.monotonic() + self._delivery_timeout_s
        transaction_id = secrets.token_hex(16)
        failures = 0
        is_unknown = False
        while True:
            try:
                return send_divided(
                    self._transport,
                    self._table,
                    rows,
                    self._operation,
                    source="producer",
                    first_row=first_row,
                    transaction_id=transaction_id,
                )
            except StreamhouseError as error:
                is_unknown |= isinstance(error, UnknownOutcomeError)
                failures += 1
                is_late = time.monotonic() + _BACKOFF.after(failures) > deadline
                if is_late or not _may_pass(error):
                    if is_unknown:
                        raise UnknownOutcomeError(error.message) from error
                    raise
            time.sleep(_BACKOFF.jittered_after(failures))

    def _send(self, data: Arrow) -> Future[Ranges]:
        if data.num_rows:
            checked = self._checks.check(self._table, data.schema, self._operation, self._columns)
            if checked.casts:
                data = fitted(data, checked.casts, table=str(self._table.path))
        routed = [
            (bucket, rows)
            for batch in bounded_batches(data)
            for bucket, rows in self._route(batch).items()
        ]
        future: Future[Ranges] = Future()
        # Taken rows are delivered: the future cannot be cancelled.
        future.set_running_or_notify_cancel()
        if not routed:
            future.set_result({})
            return future
        # A piece may be a slice of a larger batch, which it keeps in memory.
        size = max(data.nbytes, 1)
        call = _Call(future, len(routed))
        with self._changed:
            self._wait_for_room(size)
            self._held_bytes += size
            self._pending.add(future)
            now_s = time.monotonic()
            for bucket, rows in routed:
                lane = self._lanes[bucket]
                lane.waiting.append(_Piece(rows, call, now_s))
                lane.rows += rows.num_rows
            self._changed.notify_all()
        future.add_done_callback(lambda done: self._delivered(done, size))
        return future

    def flush(self, *, timeout_s: float | None = None) -> None:
        """Return after the delivery of all rows taken so far; raises the first error since the last
        flush.

        Raises `UnavailableError` after `timeout_s`; deliveries go on.
        """
        with self._changed:
            self._is_flushing += 1
            self._changed.notify_all()
            try:
                is_done = self._changed.wait_for(lambda: not self._pending, timeout_s)
            finally:
                self._is_flushing -= 1
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if not is_done:
            raise UnavailableError(
                f"rows for '{self._table.path}' are still being delivered after {timeout_s} s"
            )

    def close(self) -> None:
        """Deliver all rows, then refuse more; raises as `flush`. A second call is harmless."""
        with self._changed:
            is_first, self._is_closed = not self._is_closed, True
        if not is_first:
            return
        try:
            self.flush()
        finally:
            with self._changed:
                self._changed.notify_all()
            for thread in self._threads:
                thread.join()

    # -- inside --------------------------------------------------------------------------------

    def _route(self, rows: pa.RecordBatch) -> Mapping[int, pa.RecordBatch]:
        with self._changed:
            lane = self._lanes[self._sticky_bucket]
            if lane.rows >= self._batch_rows or lane.is_busy:
                # Rows without a bucket key fill one batch after the other.
                self._sticky_bucket = (self._sticky_bucket + 1) % len(self._lanes)
            bucket = self._sticky_bucket
        table, operation, columns = self._table, self._operation, self._columns
        return route(table, rows, operation, columns, spread=lambda _, rows: {bucket: rows})

    @property
    def _is_append(self) -> bool:
        """Whether the rows are appended unchanged, each with its own offset."""
        return self._operation is TransactionOperation.APPEND

    def _wait_for_room(self, size: int) -> None:
        def has_room() -> bool:
            # Rows larger than the whole buffer are taken when the buffer is empty.
            return (
                self._is_closed
                or self._held_bytes == 0
                or self._held_bytes + size <= self._buffer_bytes
            )

        is_room = self._changed.wait_for(has_room, self._max_block_s)
        if self._is_closed:
            raise InvalidRequestError("the producer is closed")
        if not is_room:
            raise OverloadedError(
                f"the producer for '{self._table.path}' holds {self._held_bytes} bytes that"
                f" are not delivered, of at most {self._buffer_bytes} (buffer_bytes), and waited"
                f" {self._max_block_s} s for room; send more slowly"
            )

    def _delivered(self, call: Future[Ranges], size: int) -> None:
        with self._changed:
            self._held_bytes -= size
            self._pending.discard(call)
            self._changed.notify_all()

    def _run(self) -> None:
        while (lane_batch := self._next_batch()) is not None:
            lane, pieces = lane_batch
            try:
                self._deliver(lane, pieces)
            finally:
                with self._changed:
                    lane.is_busy = False
                    self._changed.notify_all()

    def _next_batch(self) -> tuple[_Lane, list[_Piece]] | None:
        """Wait for a bucket with a batch to send; None at the end of the producer."""
        with self._changed:
            while True:
                now_s = time.monotonic()
                idle = [lane for lane in self._lanes if lane.waiting and not lane.is_busy]
                first = min(idle, key=lambda lane: lane.waiting[0].since, default=None)
                full = next((lane for lane in idle if lane.rows >= self._batch_rows), None)
                wait_s: float | None = None
                if first is not None:
                    wait_s = first.waiting[0].since + self._linger_s - now_s
                    if full is not None or wait_s <= 0 or self._is_flushing:
                        lane = full or first
                        lane.is_busy = True
                        return lane, self._batch_of(lane)
                elif self._is_closed and not self._pending:
                    return None
                self._changed.wait(wait_s)

    def _batch_of(self, lane: _Lane) -> list[_Piece]:
        pieces: list[_Piece] = []
        rows = size = 0
        while lane.waiting:
            piece = lane.waiting[0].rows
            if pieces and (
                rows + piece.num_rows > self._batch_rows
                or size + piece.nbytes > REQUEST_BYTES_TARGET
                or not piece.schema.equals(pieces[0].rows.schema)
            ):
                break
            rows += piece.num_rows
            size += piece.nbytes
            pieces.append(lane.waiting.popleft())
        lane.rows -= rows
        return pieces

    def _deliver(self, lane: _Lane, pieces: Sequence[_Piece]) -> None:
        try:
            rows = [piece.rows for piece in pieces]
            batch = rows[0] if len(rows) == 1 else pa.concat_batches(rows)
            start, end = self._send_until_answered(lane, batch)
        except StreamhouseError as error:
            if len(pieces) > 1 and not _may_pass(error):
                # Nothing of the batch is stored: now only the pieces with an error fail.
                for piece in pieces:
                    self._deliver(lane, [piece])
                return
            self._fail(pieces, error)
        except Exception as error:  # noqa: BLE001 - outermost loop: futures must end
            self._fail(pieces, UnknownOutcomeError(f"the producer met a bug: {error!r}"))
        else:
            for piece, span in zip(pieces, self._spans(pieces, start, end), strict=True):
                first_span = piece.call.ranges.get(lane.bucket, span)
                self._finish(piece, lane.bucket, (first_span[0], span[1]))

    def _spans(self, pieces: Iterable[_Piece], start: int, end: int) -> list[tuple[int, int]]:
        """Return the offsets of each piece of a delivered batch."""
        spans = []
        for piece in pieces:
            if self._is_append:
                end = start + piece.rows.num_rows
            spans.append((start, end))
            if self._is_append:
                start = end
        return spans

    def _send_until_answered(self, lane: _Lane, rows: pa.RecordBatch) -> tuple[int, int]:
        """Send a batch under the same sequence until the outcome is certain."""
        deadline = time.monotonic() + self._delivery_timeout_s
        failures = 0
        is_unknown = is_renewed = False
        while True:
            try:
                return send(
                    self._transport,
                    self._table,
                    {lane.bucket: rows},
                    self._operation,
                    columns=self._columns,
                    writer=lane.writer,
                    is_repeated=failures > 0,
                )[lane.bucket]
            except OutOfOrderSequenceError as error:
                lane.writer = AppendWriter()
                if is_unknown:
                    raise UnknownOutcomeError(error.message) from error
                if is_renewed:
                    raise
                # The service has forgotten the writer, or has a new table: nothing of this batch is
                # stored.
                is_renewed = True
            except StreamhouseError as error:
                if not _may_pass(error):
                    if not is_unknown:
                        raise
                    lane.writer = AppendWriter()
                    raise UnknownOutcomeError(error.message) from error
                is_unknown |= isinstance(error, UnknownOutcomeError)
                failures += 1
                if time.monotonic() + _BACKOFF.after(failures) > deadline:
                    # The sequence stays in doubt: later batches have another writer.
                    lane.writer = AppendWriter()
                    if is_unknown:
                        raise UnknownOutcomeError(error.message) from error
                    raise
            time.sleep(_BACKOFF.jittered_after(failures))

    def _finish(self, piece: _Piece, bucket: int, span: tuple[int, int]) -> None:
        piece.call.ranges[bucket] = span
        self._end(piece.call)

    def _fail(self, pieces: Iterable[_Piece], error: StreamhouseError) -> None:
        with self._changed:
            self._failure = self._failure or error
        for piece in pieces:
            piece.call.error = piece.call.error or error
            self._end(piece.call)

    def _end(self, call: _Call) -> None:
        """Count a finished piece of a call; the last piece completes the future."""
        with self._changed:
            call.pieces_left -= 1
            if call.pieces_left:
                return
        if call.error is not None:
            # Rows of the call for other buckets may be stored.
            call.future.set_exception(call.error)
        else:
            call.future.set_result(call.ranges)


def _may_pass(error: StreamhouseError) -> bool:
    return error.retriable or isinstance(error, UnknownOutcomeError)
