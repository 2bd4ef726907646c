"""Fetch: records of many partitions from given offsets on, with a wait if no records are ready.

A request sets a maximal wait, a minimal number of bytes, and byte limits for each partition and for
the answer. The answer has at least one record if any record is readable. Partitions take turns in
being read first. An error concerns one partition only. No state is kept between requests: fetch
sessions are not supported, and an idle consumer holds at most one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from streamhouse.core.errors import (
    CorruptDataError,
    InvalidNameError,
    OffsetOutOfRangeError,
    OverloadedError,
    StreamhouseError,
)
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.wakeups import Wakeups, Watch
from streamhouse.storage_service.kafka.messages.answers import Piece
from streamhouse.storage_service.kafka.messages.fetch_answer import (
    FetchedPartition,
    TopicKey,
    fetch_answer,
)
from streamhouse.storage_service.kafka_door._error_codes import error_code_of
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from streamhouse.storage_service.kafka_door.fetching._partition_records import (
    RecordsWriter,
    TableRecords,
)
from streamhouse.storage_service.kafka_door.fetching._reading import (
    FetchedRecords,
    Part,
    read_parts,
)
from streamhouse.storage_service.kafka_door.registry._schema_desk import keep_reading_schemas
from streamhouse.storage_service.kafka_door.topics._table_identity import (
    NO_EPOCH,
    check_leader_epoch,
    check_position,
    table_of_id,
)
from streamhouse.storage_service.kafka_door.topics._topic_tables import topic_table
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.history.failures import failure_of
from streamhouse.storage_service.server.history.readable_offsets import (
    ReadableOffsets,
    readable_offsets,
)
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = ["FetchRequest", "answer_fetch", "refuse_fetch"]

_BUSY_MS: Final = 1_000
# The size of rows in the lake is unknown before the rows are read.
_LAKE_BYTES_ESTIMATE: Final = 4 << 20
# The error codes that Kafka's own consumer handles in an answer; other codes make the consumer
# raise.
_CONSUMER_CODES: Final = frozenset(
    {
        ErrorCode.corrupt_message,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.kafka_storage_error,
        ErrorCode.not_leader_or_follower,
        ErrorCode.offset_not_available,
        ErrorCode.offset_out_of_range,
        ErrorCode.topic_authorization_failed,
        ErrorCode.unknown_leader_epoch,
        ErrorCode.unknown_server_error,
        ErrorCode.unknown_topic_id,
        ErrorCode.unknown_topic_or_partition,
    }
)
# Each partition is one read, however few bytes the read returns.
_INLINE_PARTS_MAX: Final = 64
# With more partitions the event loop serves other requests in between.
_INLINE_STATES_MAX: Final = 1_000
_NO_ID: Final = uuid.UUID(int=0)


class _Place(NamedTuple):
    """A consumer's position in a partition, and the leader epochs from the consumer."""

    offset: int
    bytes_max: int
    leader_epoch: int
    """The topic's epoch, as the consumer knows the epoch."""
    last_epoch: int
    """The epoch of the record before `offset`; only the newest clients send this epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """The parts of a request kept during the wait; each partition once."""

    session_id: int
    wait_s: float
    bytes_min: int
    bytes_max: int
    places: Mapping[tuple[TopicKey, int], _Place]
    """By topic and partition."""

    @classmethod
    def of(cls, request: Any) -> FetchRequest:
        """Extract the answer's inputs from kio's entity, which is many times larger.

        A repeated partition is answered once: no client repeats a partition, and each mention would
        cost a read.
        """
        places: dict[tuple[TopicKey, int], _Place] = {}
        for topic in request.topics:
            key = topic.topic if hasattr(topic, "topic") else topic.topic_id or _NO_ID
            for partition in topic.partitions:
                place = _Place(
                    partition.fetch_offset,
                    partition.partition_max_bytes,
                    getattr(partition, "current_leader_epoch", NO_EPOCH),
                    getattr(partition, "last_fetched_epoch", NO_EPOCH),
                )
                places.setdefault((key, partition.partition), place)
        return cls(
            session_id=getattr(request, "session_id", 0),
            wait_s=request.max_wait.total_seconds(),
            bytes_min=request.min_bytes,
            bytes_max=request.max_bytes,
            places=places,
        )


async def answer_fetch(exchange: KafkaExchange, request: FetchRequest) -> Sequence[Piece]:
    """Answer with the records of the requested partitions."""
    version = exchange.api_version
    if request.session_id:
        # The service gives out no session ids; after this code the client starts over without a
        # session.
        exchange.note(ErrorCode.fetch_session_id_not_found)
        return fetch_answer(version, {}, error=ErrorCode.fetch_session_id_not_found)
    fetch = _Fetch(exchange, request)
    await fetch.begin()
    throttle_ms = 0
    try:
        await fetch.wait()
        fetched = await fetch.read()
    except OverloadedError as error:
        # Consumers take an empty answer for "no records yet", and ask again after a moment.
        exchange.report(error)
        fetched, throttle_ms = FetchedRecords(), _BUSY_MS
    write = functools.partial(fetch_answer, version, throttle_ms=throttle_ms)
    topics = await fetch.by_topic(fetched)
    if fetch.partition_count <= _INLINE_STATES_MAX:
        return write(topics)
    return await exchange.service.run_blocking(write, topics)


def refuse_fetch(request: FetchRequest, code: ErrorCode, _: str) -> Mapping[str, Any]:
    """Return an answer with an error for every requested partition.

    A busy service answers without an error: consumers take the empty answer for "no records yet",
    and ask again later.
    """
    is_busy = code is ErrorCode.request_timed_out
    code = (
        ErrorCode.none
        if is_busy
        else code
        if code in _CONSUMER_CODES
        else ErrorCode.unknown_server_error
    )
    topics: dict[TopicKey, list[Mapping[str, Any]]] = {}
    for topic, partition in request.places:
        partition_answer = {
            "partition_index": partition,
            "error_code": code,
            "high_watermark": -1,
            "last_stable_offset": -1,
            "log_start_offset": -1,
            "records": b"",
        }
        topics.setdefault(topic, []).append(partition_answer)
    return {
        "throttle_time": timedelta(milliseconds=_BUSY_MS if is_busy else 0),
        "responses": [
            {"topic" if isinstance(topic, str) else "topic_id": topic, "partitions": partitions}
            for topic, partitions in topics.items()
        ],
    }


@dataclass(slots=True)
class _PartitionState:
    """A requested partition with its table, or with the error of the partition."""

    topic: TopicKey
    partition: int
    offset: int
    bytes_max: int
    table: OpenTable | None
    error: StreamhouseError | None
    readable: ReadableOffsets | None = None
    bytes_ready: int = 0
    """An estimate of the readable bytes, as of the last look."""

    @property
    def has_rows(self) -> bool:
        return self.error is None and self.readable is not None and self.offset < self.readable.end

    @property
    def is_in_lake(self) -> bool:
        return self.readable is not None and self.offset < self.readable.log_start


class _Fetch:
    """One request. Event loop only."""

    def __init__(self, exchange: KafkaExchange, request: FetchRequest) -> None:
        self._exchange = exchange
        self._service = exchange.service
        config = self._service.config
        self._bytes_min = request.bytes_min
        self._bytes_max = max(1, min(request.bytes_max, config.fetch_bytes_max))
        wait_s = max(0.0, min(request.wait_s, config.fetch_wait_ms_max / 1_000))
        self._deadline = asyncio.get_running_loop().time() + wait_s
        self._places = request.places
        self._states: list[_PartitionState] = []
        self._bytes_ready = 0
        self._is_failed = False

    async def begin(self) -> None:
        """Find the tables of the requested partitions; call this method first."""
        tables: dict[TopicKey, tuple[OpenTable | None, StreamhouseError | None]] = {}
        async for (topic, partition), place in in_slices(self._places.items()):
            if topic not in tables:
                tables[topic] = self._table_of(topic)
            state = _PartitionState(topic, partition, place.offset, place.bytes_max, *tables[topic])
            self._states.append(state)
            if state.table is not None:
                self._check_identity(state, state.table, place)
        if len(self._states) > _INLINE_STATES_MAX:
            # This pass finds the failed partitions. `wait` looks at the others again without
            # letting go of the loop: the others are at most as many as there are buckets.
            async for state in in_slices(self._states):
                self._look(state)

    @property
    def partition_count(self) -> int:
        """The number of requested partitions."""
        return len(self._states)

    def _check_identity(self, state: _PartitionState, table: OpenTable, place: _Place) -> None:
        """Record an error if the consumer has read another table of the same name."""
        try:
            table.tablet(state.partition)
            check_leader_epoch(table, place.leader_epoch)
            check_position(self._exchange, table, state.partition, last_epoch=place.last_epoch)
        except StreamhouseError as error:
            self._exchange.report(error)
            state.error = error.with_traceback(None)

    def _table_of(self, topic: TopicKey) -> tuple[OpenTable | None, StreamhouseError | None]:
        """Return the table of a topic, or the error that prevents reading the topic."""
        try:
            if isinstance(topic, uuid.UUID):
                return table_of_id(self._exchange, topic), None
            return topic_table(self._exchange, topic, Level.READ), None
        except StreamhouseError as error:
            self._exchange.report(error)
            return None, error.with_traceback(None)

    # -- waiting -------------------------------------------------------------------------------

    async def wait(self) -> None:
        """Wait until enough bytes are ready, a partition has an error, or the time is up."""
        for state in self._states:
            self._look(state)
        if self._is_enough() or self._is_time_up():
            return
        places: dict[tuple[Wakeups, int], list[_PartitionState]] = {}
        buckets: dict[Wakeups, list[int]] = {}
        for state in self._states:
            assert state.table is not None, "else the partition has an error"
            places.setdefault((state.table.wakeups, state.partition), []).append(state)
            buckets.setdefault(state.table.wakeups, []).append(state.partition)
        with contextlib.closing(Watch(self._service.manager.waiter_limit, buckets)) as watch:
            # Each written row wakes many requests, so a request looks at changed partitions only.
            while not (self._is_enough() or self._is_time_up()):
                caller = self._exchange.caller
                await self._exchange.wait(watch.waiter(timeout_s=self._remaining_s()))
                if self._exchange.caller != caller:
                    self._check_grants()
                for place in watch.take_woken():
                    for state in places[place]:
                        self._look(state)
        # Rows that moved from the log to the lake woke no waiter: look at all partitions again.
        async for state in in_slices(self._states):
            self._look(state)

    def _remaining_s(self) -> float:
        return self._deadline - asyncio.get_running_loop().time()

    def _is_time_up(self) -> bool:
        return self._remaining_s() <= 0 or self._service.is_draining

    def _check_grants(self) -> None:
        """Mark tables without the caller's present grants as failed."""
        for state in self._states:
            if state.table is not None and not self._exchange.caller.may(
                Level.READ, str(state.table.path)
            ):
                state.table, state.error = self._table_of(state.topic)
                self._is_failed = self._is_failed or state.error is not None

    def _is_enough(self) -> bool:
        """Return whether the partitions, as seen last, suffice for an answer."""
        return self._is_failed or self._bytes_ready >= self._bytes_min

    def _look(self, state: _PartitionState) -> None:
        """Update the state of a partition."""
        if state.table is not None and state.error is None:
            self._find_readable(state, state.table)
        self._is_failed = self._is_failed or state.error is not None
        ready = max(1, self._estimate(state)) if state.has_rows else 0
        self._bytes_ready += ready - state.bytes_ready
        state.bytes_ready = ready

    def _find_readable(self, state: _PartitionState, table: OpenTable) -> None:
        try:
            self._service.manager.check_readable(table)
            offsets = readable_offsets(table, state.partition)
            state.readable = offsets
            if state.offset not in offsets:
                raise OffsetOutOfRangeError(
                    f"table '{table.path}', bucket {state.partition}: offset {state.offset} is"
                    f" outside the readable offsets {offsets.start} to {offsets.end}"
                )
        except StreamhouseError as error:
            self._exchange.report(error)
            state.error = error.with_traceback(None)

    def _estimate(self, state: _PartitionState) -> int:
        """Estimate the bytes of a partition's records."""
        assert state.table is not None, "the partition has rows"
        assert state.readable is not None, "the partition has rows"
        if state.is_in_lake:
            return min(state.bytes_max, _LAKE_BYTES_ESTIMATE)
        return state.table.tablet(state.partition).bytes_estimate(state.readable.end - state.offset)

    # -- reading -------------------------------------------------------------------------------

    async def read(self) -> FetchedRecords:
        """Read the readable records, once the memory for answers has room."""
        await self._keep_schemas()
        waiting_parts = await self._parts()
        if not waiting_parts:
            return FetchedRecords()
        is_in_lake = any(part.is_in_lake for part in waiting_parts)
        weight = max(part.table.weight for part in waiting_parts)
        caller = self._exchange.caller

        async def build(expected: int) -> FetchedRecords:
            if self._exchange.caller != caller:
                # The read waited for room, and the grants changed meanwhile.
                self._check_grants()
            parts = [part for part in waiting_parts if self._states[part.number].error is None]
            read = functools.partial(read_parts, parts, self._bytes_max)
            if is_in_lake:
                return await self._service.lake_reads.run(read)
            if len(parts) <= _INLINE_PARTS_MAX:
                byte_count = expected + sum(part.large_batch_bytes() for part in parts)
                if byte_count * weight <= self._service.config.inline_bytes_max:
                    return read()
            return await self._service.run_blocking(read)

        estimate = sum(
            min(part.bytes_max, self._estimate(self._states[part.number])) for part in waiting_parts
        )
        fetched = await self._service.answers.build(
            self._exchange, min(estimate, self._bytes_max), build
        )
        for part in waiting_parts:
            if part.number in fetched.writers:
                part.open_table.read_rows += fetched.writers[part.number].row_count
        self._service.metrics.count_sent(row_count=fetched.row_count, byte_count=fetched.byte_count)
        return fetched

    async def _keep_schemas(self) -> None:
        """Ensure that tables with Avro records have schemas with all columns."""
        errors: dict[OpenTable, StreamhouseError | None] = {}
        async for state in in_slices(self._states):
            if state.has_rows:
                assert state.table is not None, "the partition has rows"
                if state.table not in errors:
                    errors[state.table] = await _schema_error(state.table)
                state.error = errors[state.table]
                if state.error is not None:
                    self._exchange.report(state.error)

    async def _parts(self) -> list[Part]:
        """Return the partitions with rows, rotated with each fetch."""
        parts = []
        records: dict[OpenTable, TableRecords] = {}
        async for number, state in in_slices(enumerate(self._states)):
            if state.has_rows:
                assert state.table is not None, "the partition has rows"
                assert state.readable is not None, "the partition has rows"
                if state.table not in records:
                    records[state.table] = TableRecords.of(state.table)
                part = Part(
                    number=number,
                    partition=state.partition,
                    offset=state.offset,
                    bytes_max=state.bytes_max,
                    open_table=state.table,
                    table=records[state.table],
                    tablet=state.table.tablet(state.partition),
                    readable=state.readable,
                )
                parts.append(part)
        turn = next(self._exchange.client.fetches) % len(parts) if parts else 0
        return parts[turn:] + parts[:turn]

    # -- answering -----------------------------------------------------------------------------

    async def by_topic(self, fetched: FetchedRecords) -> dict[TopicKey, list[FetchedPartition]]:
        """Return the answer for every requested partition."""
        topics: dict[TopicKey, list[FetchedPartition]] = {}
        async for number, state in in_slices(enumerate(self._states)):
            partition_answer = self._partition_answer(
                state, fetched.errors.get(number), fetched.writers.get(number)
            )
            topics.setdefault(state.topic, []).append(partition_answer)
        return topics

    def _partition_answer(
        self, state: _PartitionState, error: StreamhouseError | None, writer: RecordsWriter | None
    ) -> FetchedPartition:
        failure = state.error or error
        if failure is not None:
            if error is not None:
                self._exchange.report(error)
            code = _code_of(failure)
            self._exchange.note(code)
            return FetchedPartition(partition=state.partition, error=code)
        return FetchedPartition(
            partition=state.partition,
            high_watermark=-1 if state.readable is None else state.readable.end,
            log_start_offset=-1 if state.readable is None else state.readable.start,
            records=() if writer is None else writer.pieces,
        )


async def _schema_error(table: OpenTable) -> StreamhouseError | None:
    """Update a table's schemas; return the error if the update fails."""
    try:
        await keep_reading_schemas(table)
    except Exception as error:  # noqa: BLE001 - outermost for the table's partitions
        return failure_of(error, f"keeping the schemas of table '{table.path}' up with its columns")
    return None


def _code_of(error: StreamhouseError) -> ErrorCode:
    """Return a code that consumers handle: other codes end a consumer."""
    if isinstance(error, CorruptDataError):
        return ErrorCode.corrupt_message
    if isinstance(error, InvalidNameError):
        return ErrorCode.unknown_topic_or_partition
    code = error_code_of(error)
    return code if code in _CONSUMER_CODES else ErrorCode.unknown_server_error
