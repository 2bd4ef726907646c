"""Fetch: records of many partitions from their offsets on, waiting for some if there are none.

A request says how long it waits and for how many bytes, how many bytes it takes of each partition
and in all; at least one record comes if there is any. Partitions take turns in being the first that
is read. What is wrong with one of them is said of it alone. Nothing is kept between requests: there
are no fetch sessions, and a consumer that reads nothing holds what one answer may hold.
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
    FoundRecords,
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
from streamhouse.storage_service.server.history.lake_reads import LakeReads
from streamhouse.storage_service.server.history.readable_offsets import (
    ReadableOffsets,
    readable_offsets,
)
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = ["FetchRequest", "answer_fetch", "refuse_fetch"]

_BUSY_MS: Final = 1_000
# Rows that have left the log are not counted before they are read.
_LAKE_BYTES_ESTIMATE: Final = 4 << 20
# What Kafka's own consumer knows of a partition in an answer: at another code it raises.
_KNOWN: Final = frozenset(
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
# Each is a read of its own, however few bytes it finds.
_INLINE_PARTS_MAX: Final = 64
# Beyond it the event loop is given to others in between.
_LOOKED_AT_ONCE_MAX: Final = 1_000
_NO_ID: Final = uuid.UUID(int=0)


class _Place(NamedTuple):
    """Where a consumer is in a partition, and which leader epochs it tells."""

    offset: int
    bytes_max: int
    leader_epoch: int
    """That of the topic, as the consumer knows it."""
    last_epoch: int
    """That of the record before `offset`, of which the newest clients alone speak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """What is kept of a request while it waits: partitions that there are, each once."""

    session_id: int
    wait_s: float
    bytes_min: int
    bytes_max: int
    wanted: Mapping[tuple[TopicKey, int], _Place]
    """By topic and partition."""

    @classmethod
    def of(cls, request: Any) -> FetchRequest:
        """Keep of kio's entity, which is many times larger, what an answer needs.

        What names a partition many times is answered once: no client does, and each mention would
        be a read of its own.
        """
        wanted: dict[tuple[TopicKey, int], _Place] = {}
        for topic in request.topics:
            key = topic.topic if hasattr(topic, "topic") else topic.topic_id or _NO_ID
            for one in topic.partitions:
                place = _Place(
                    one.fetch_offset,
                    one.partition_max_bytes,
                    getattr(one, "current_leader_epoch", NO_EPOCH),
                    getattr(one, "last_fetched_epoch", NO_EPOCH),
                )
                wanted.setdefault((key, one.partition), place)
        return cls(
            session_id=getattr(request, "session_id", 0),
            wait_s=request.max_wait.total_seconds(),
            bytes_min=request.min_bytes,
            bytes_max=request.max_bytes,
            wanted=wanted,
        )


async def answer_fetch(exchange: KafkaExchange, request: FetchRequest) -> Sequence[Piece]:
    """Answer the records of the partitions that are asked for."""
    version = exchange.api_version
    if request.session_id:
        # It was never given one: the client begins anew, without.
        exchange.note(ErrorCode.fetch_session_id_not_found)
        return fetch_answer(version, {}, error=ErrorCode.fetch_session_id_not_found)
    fetch = _Fetch(exchange, request)
    await fetch.begin()
    throttle_ms = 0
    try:
        await fetch.wait()
        found = await fetch.read()
    except OverloadedError as error:
        # Consumers take that for nothing yet, and ask again after a moment.
        exchange.report(error)
        found, throttle_ms = FoundRecords(), _BUSY_MS
    write = functools.partial(fetch_answer, version, throttle_ms=throttle_ms)
    topics = await fetch.by_topic(found)
    if fetch.partition_count <= _LOOKED_AT_ONCE_MAX:
        return write(topics)
    return await exchange.service.run_blocking(write, topics)


def refuse_fetch(request: FetchRequest, code: ErrorCode, _: str) -> Mapping[str, Any]:
    """Return the answer that has an error for every partition that was asked for.

    No error if the service is busy: consumers take that for nothing yet, and ask again later.
    """
    is_busy = code is ErrorCode.request_timed_out
    code = ErrorCode.none if is_busy else code if code in _KNOWN else ErrorCode.unknown_server_error
    topics: dict[TopicKey, list[Mapping[str, Any]]] = {}
    for topic, partition in request.wanted:
        answered = {
            "partition_index": partition,
            "error_code": code,
            "high_watermark": -1,
            "last_stable_offset": -1,
            "log_start_offset": -1,
            "records": b"",
        }
        topics.setdefault(topic, []).append(answered)
    return {
        "throttle_time": timedelta(milliseconds=_BUSY_MS if is_busy else 0),
        "responses": [
            {"topic" if isinstance(topic, str) else "topic_id": topic, "partitions": partitions}
            for topic, partitions in topics.items()
        ],
    }


@dataclass(slots=True)
class _Asked:
    """A partition that is asked for, and what is known of it: its table, or what is wrong."""

    topic: TopicKey
    partition: int
    offset: int
    bytes_max: int
    table: OpenTable | None
    error: StreamhouseError | None
    has: ReadableOffsets | None = None
    bytes_ready: int = 0
    """About how many bytes it has, as it was seen last."""

    @property
    def has_rows(self) -> bool:
        return self.error is None and self.has is not None and self.offset < self.has.end

    @property
    def is_in_lake(self) -> bool:
        return self.has is not None and self.offset < self.has.log_start


class _Fetch:
    """One request. Event loop only."""

    def __init__(self, exchange: KafkaExchange, request: FetchRequest) -> None:
        self._exchange = exchange
        self._service = exchange.service
        self._lake_reads: LakeReads | None = exchange.service.lake_reads
        config = self._service.config
        self._bytes_min = request.bytes_min
        self._bytes_max = max(1, min(request.bytes_max, config.fetch_bytes_max))
        wait_s = max(0.0, min(request.wait_s, config.fetch_wait_ms_max / 1_000))
        self._deadline = asyncio.get_running_loop().time() + wait_s
        self._wanted = request.wanted
        self._asked: list[_Asked] = []
        self._bytes_ready = 0
        self._is_failed = False

    async def begin(self) -> None:
        """Find the tables of what is asked for; to be called first."""
        tables: dict[TopicKey, tuple[OpenTable | None, StreamhouseError | None]] = {}
        async for (topic, partition), place in in_slices(self._wanted.items()):
            if topic not in tables:
                tables[topic] = self._found(topic)
            one = _Asked(topic, partition, place.offset, place.bytes_max, *tables[topic])
            self._asked.append(one)
            if one.table is not None:
                self._check_identity(one, one.table, place)
        if len(self._asked) > _LOOKED_AT_ONCE_MAX:
            # What is wrong is found now. The others are looked at again, without letting go of the
            # loop, before anything waits: there are not more of them than buckets.
            async for one in in_slices(self._asked):
                self._look(one)

    @property
    def partition_count(self) -> int:
        """How many partitions are asked for."""
        return len(self._asked)

    def _check_identity(self, one: _Asked, table: OpenTable, place: _Place) -> None:
        """Note what is wrong with a partition whose consumer has read another table of the name."""
        try:
            table.tablet(one.partition)
            check_leader_epoch(table, place.leader_epoch)
            check_position(self._exchange, table, one.partition, last_epoch=place.last_epoch)
        except StreamhouseError as error:
            self._exchange.report(error)
            one.error = error.with_traceback(None)

    def _found(self, topic: TopicKey) -> tuple[OpenTable | None, StreamhouseError | None]:
        """Return the table of a topic, or what is wrong with it."""
        try:
            if isinstance(topic, uuid.UUID):
                return table_of_id(self._exchange, topic), None
            return topic_table(self._exchange, topic, Level.READ), None
        except StreamhouseError as error:
            self._exchange.report(error)
            return None, error.with_traceback(None)

    # -- waiting -------------------------------------------------------------------------------

    async def wait(self) -> None:
        """Wait until there is enough to answer, or something wrong to tell, or the time is up."""
        for one in self._asked:
            self._look(one)
        if self._is_enough() or self._is_time_up():
            return
        places: dict[tuple[Wakeups, int], list[_Asked]] = {}
        buckets: dict[Wakeups, list[int]] = {}
        for one in self._asked:
            assert one.table is not None, "else there is an error to tell"
            places.setdefault((one.table.wakeups, one.partition), []).append(one)
            buckets.setdefault(one.table.wakeups, []).append(one.partition)
        with contextlib.closing(Watch(self._service.manager.waiter_limit, buckets)) as watch:
            # Each row that is written wakes many: nobody looks at more than has changed.
            while not (self._is_enough() or self._is_time_up()):
                caller = self._exchange.caller
                await self._exchange.wait(watch.waiter(timeout_s=self._left_s()))
                if self._exchange.caller != caller:
                    self._check_grants()
                for place in watch.take_woken():
                    for one in places[place]:
                        self._look(one)
        # Some have changed without waking anybody: what has left the log is in the lake.
        async for one in in_slices(self._asked):
            self._look(one)

    def _left_s(self) -> float:
        return self._deadline - asyncio.get_running_loop().time()

    def _is_time_up(self) -> bool:
        return self._left_s() <= 0 or self._service.is_draining

    def _check_grants(self) -> None:
        """Read nothing of tables that the caller may not read any more."""
        for one in self._asked:
            if one.table is not None and not self._exchange.caller.may(
                Level.READ, str(one.table.path)
            ):
                one.table, one.error = self._found(one.topic)
                self._is_failed = self._is_failed or one.error is not None

    def _is_enough(self) -> bool:
        """Say whether to answer, by what was seen of the partitions."""
        return self._is_failed or self._bytes_ready >= self._bytes_min

    def _look(self, one: _Asked) -> None:
        """Look at a partition as it is now."""
        if one.table is not None and one.error is None:
            self._find_readable(one, one.table)
        self._is_failed = self._is_failed or one.error is not None
        ready = max(1, self._estimate(one)) if one.has_rows else 0
        self._bytes_ready += ready - one.bytes_ready
        one.bytes_ready = ready

    def _find_readable(self, one: _Asked, table: OpenTable) -> None:
        try:
            self._service.manager.check_readable(table)
            has = readable_offsets(table, one.partition, has_history=self._lake_reads is not None)
            one.has = has
            if one.offset not in has:
                raise OffsetOutOfRangeError(
                    f"table '{table.path}', bucket {one.partition}: offset {one.offset} is"
                    f" outside those that are readable, {has.start} to {has.end}"
                )
        except StreamhouseError as error:
            self._exchange.report(error)
            one.error = error.with_traceback(None)

    def _estimate(self, one: _Asked) -> int:
        """Return about how many bytes of records a partition has."""
        assert one.table is not None, "it has rows"
        assert one.has is not None, "it has rows"
        if one.is_in_lake:
            return min(one.bytes_max, _LAKE_BYTES_ESTIMATE)
        return one.table.tablet(one.partition).bytes_estimate(one.has.end - one.offset)

    # -- reading -------------------------------------------------------------------------------

    async def read(self) -> FoundRecords:
        """Read what there is now, once there is room for it."""
        await self._keep_schemas()
        has_rows = await self._parts()
        if not has_rows:
            return FoundRecords()
        is_in_lake = any(part.is_in_lake for part in has_rows)
        weight = max(part.table.weight for part in has_rows)
        caller = self._exchange.caller

        async def build(expected: int) -> FoundRecords:
            if self._exchange.caller != caller:
                # There was no room for a while, and the grants are others now.
                self._check_grants()
            parts = [part for part in has_rows if self._asked[part.number].error is None]
            read = functools.partial(read_parts, parts, self._bytes_max)
            if is_in_lake:
                assert self._lake_reads is not None, "else the log has all that is readable"
                return await self._lake_reads.run(read)
            if len(parts) <= _INLINE_PARTS_MAX:
                byte_count = expected + sum(part.large_batch_bytes() for part in parts)
                if byte_count * weight <= self._service.config.inline_bytes_max:
                    return read()
            return await self._service.run_blocking(read)

        estimate = sum(
            min(part.bytes_max, self._estimate(self._asked[part.number])) for part in has_rows
        )
        found = await self._service.answers.build(
            self._exchange, min(estimate, self._bytes_max), build
        )
        for part in has_rows:
            if part.number in found.writers:
                part.open_table.read_rows += found.writers[part.number].row_count
        self._service.metrics.count_sent(row_count=found.row_count, byte_count=found.byte_count)
        return found

    async def _keep_schemas(self) -> None:
        """See to it that tables whose records are Avro have schemas with all of their columns."""
        kept: dict[OpenTable, StreamhouseError | None] = {}
        async for one in in_slices(self._asked):
            if one.has_rows:
                assert one.table is not None, "it has rows"
                if one.table not in kept:
                    kept[one.table] = await _schemas_kept(one.table)
                one.error = kept[one.table]
                if one.error is not None:
                    self._exchange.report(one.error)

    async def _parts(self) -> list[Part]:
        """Return the partitions that have rows; each time another one is the first."""
        found = []
        records: dict[OpenTable, TableRecords] = {}
        async for number, one in in_slices(enumerate(self._asked)):
            if one.has_rows:
                assert one.table is not None, "it has rows"
                assert one.has is not None, "it has rows"
                if one.table not in records:
                    records[one.table] = TableRecords.of(one.table)
                part = Part(
                    number=number,
                    partition=one.partition,
                    offset=one.offset,
                    bytes_max=one.bytes_max,
                    open_table=one.table,
                    table=records[one.table],
                    tablet=one.table.tablet(one.partition),
                    has=one.has,
                )
                found.append(part)
        turn = next(self._exchange.client.fetches) % len(found) if found else 0
        return found[turn:] + found[:turn]

    # -- answering -----------------------------------------------------------------------------

    async def by_topic(self, found: FoundRecords) -> dict[TopicKey, list[FetchedPartition]]:
        """Return what is answered of every partition that was asked for."""
        topics: dict[TopicKey, list[FetchedPartition]] = {}
        async for number, one in in_slices(enumerate(self._asked)):
            answered = self._answered(one, found.errors.get(number), found.writers.get(number))
            topics.setdefault(one.topic, []).append(answered)
        return topics

    def _answered(
        self, one: _Asked, error: StreamhouseError | None, writer: RecordsWriter | None
    ) -> FetchedPartition:
        wrong = one.error or error
        if wrong is not None:
            if error is not None:
                self._exchange.report(error)
            code = _code_of(wrong)
            self._exchange.note(code)
            return FetchedPartition(partition=one.partition, error=code)
        return FetchedPartition(
            partition=one.partition,
            high_watermark=-1 if one.has is None else one.has.end,
            log_start_offset=-1 if one.has is None else one.has.start,
            records=() if writer is None else writer.pieces,
        )


async def _schemas_kept(table: OpenTable) -> StreamhouseError | None:
    """See to a table's schemas; return what is wrong with that."""
    try:
        await keep_reading_schemas(table)
    except Exception as error:  # noqa: BLE001 - outermost for the table's partitions
        return failure_of(error, f"keeping the schemas of table '{table.path}' up with its columns")
    return None


def _code_of(error: StreamhouseError) -> ErrorCode:
    """Return the code of an error as consumers take it: at others they end."""
    if isinstance(error, CorruptDataError):
        return ErrorCode.corrupt_message
    if isinstance(error, InvalidNameError):
        return ErrorCode.unknown_topic_or_partition
    code = error_code_of(error)
    return code if code in _KNOWN else ErrorCode.unknown_server_error
