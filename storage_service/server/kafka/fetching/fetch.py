"""Fetch: records of many partitions from their offsets on, waiting for some if there are none.

A request says how long it waits and for how many bytes, how many bytes it takes of each partition
and in all; at least one record comes if there is any. Partitions take turns in being the first that
is read. What is wrong with one of them is said of it alone. Nothing is kept between requests: there
are no fetch sessions, and a consumer that reads nothing holds what one answer may hold.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from kio.schema.errors import ErrorCode

from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.wakeups import Wakeups, joint_waiter
from streamhouse.storage_service.errors import (
    CorruptDataError,
    InvalidNameError,
    OffsetOutOfRangeError,
    OverloadedError,
    StreamhouseError,
)
from streamhouse.storage_service.kafka.messages.answers import Piece
from streamhouse.storage_service.kafka.messages.fetch_answer import FetchedPartition, fetch_answer
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.control.registry.schema_desk import keep_reading_schemas
from streamhouse.storage_service.server.kafka.broker.lake_reads import LakeReads
from streamhouse.storage_service.server.kafka.error_codes import error_code_of
from streamhouse.storage_service.server.kafka.exchange import KafkaExchange
from streamhouse.storage_service.server.kafka.failures import failure_of
from streamhouse.storage_service.server.kafka.fetching.partition_records import (
    RecordsWriter,
    TableRecords,
)
from streamhouse.storage_service.server.kafka.fetching.readable_offsets import (
    ReadableOffsets,
    readable_offsets,
)
from streamhouse.storage_service.server.kafka.fetching.reading import (
    FoundRecords,
    Part,
    read_parts,
)
from streamhouse.storage_service.server.kafka.topics.topic_tables import topic_table
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = ["answer_fetch", "refuse_fetch"]

_logger = logging.getLogger(__name__)

_BUSY_MS: Final = 1_000
# Rows that have left the log are not counted before they are read.
_LAKE_BYTES_ESTIMATE: Final = 4 << 20
# What Kafka's own consumer knows of a partition in an answer: at another code it raises.
_KNOWN: Final = frozenset(
    {
        ErrorCode.corrupt_message,
        ErrorCode.kafka_storage_error,
        ErrorCode.not_leader_or_follower,
        ErrorCode.offset_not_available,
        ErrorCode.offset_out_of_range,
        ErrorCode.topic_authorization_failed,
        ErrorCode.unknown_server_error,
        ErrorCode.unknown_topic_or_partition,
    }
)
# Each is a read of its own, however few bytes it finds.
_INLINE_PARTS_MAX: Final = 64
# Beyond it the event loop is given to others in between.
_LOOKED_AT_ONCE_MAX: Final = 1_000
_turns: Final = itertools.count()


async def answer_fetch(exchange: KafkaExchange, request: Any) -> Sequence[Piece]:
    """Answer the records of the partitions that are asked for."""
    version = exchange.api_version
    if getattr(request, "session_id", 0):
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


def refuse_fetch(request: Any, code: ErrorCode, _: str) -> Mapping[str, Any]:
    """Return the answer that has an error for every partition that was asked for.

    No error if the service is busy: consumers take that for nothing yet, and ask again later.
    """
    is_busy = code is ErrorCode.request_timed_out
    code = ErrorCode.none if is_busy else code if code in _KNOWN else ErrorCode.unknown_server_error
    return {
        "throttle_time": timedelta(milliseconds=_BUSY_MS if is_busy else 0),
        "responses": [
            {
                "topic": topic.topic,
                "partitions": [
                    {
                        "partition_index": partition.partition,
                        "error_code": code,
                        "high_watermark": -1,
                        "last_stable_offset": -1,
                        "log_start_offset": -1,
                        "records": b"",
                    }
                    for partition in topic.partitions
                ],
            }
            for topic in request.topics
        ],
    }


@dataclass(slots=True)
class _Asked:
    """A partition that is asked for, and what is known of it: its table, or what is wrong."""

    topic: str
    partition: int
    offset: int
    bytes_max: int
    table: OpenTable | None
    error: StreamhouseError | None
    has: ReadableOffsets | None = None

    @property
    def has_rows(self) -> bool:
        return self.error is None and self.has is not None and self.offset < self.has.end

    @property
    def is_in_lake(self) -> bool:
        return self.has is not None and self.offset < self.has.log_start


class _Fetch:
    """One request. Event loop only."""

    def __init__(self, exchange: KafkaExchange, request: Any) -> None:
        self._exchange = exchange
        self._service = exchange.service
        self._lake_reads: LakeReads | None = exchange.broker.lake_reads
        config = self._service.config
        self._bytes_min = request.min_bytes
        self._bytes_max = max(1, min(request.max_bytes, config.fetch_bytes_max))
        wait_s = request.max_wait.total_seconds()
        wait_s = max(0.0, min(wait_s, config.fetch_wait_ms_max / 1_000))
        self._deadline = asyncio.get_running_loop().time() + wait_s
        self._topics = request.topics
        self._asked: list[_Asked] = []

    async def begin(self) -> None:
        """Find the tables of what is asked for; to be called first.

        What names a partition many times is answered once: no client does, and each mention would
        be a read of its own.
        """
        asked: dict[tuple[str, int], _Asked] = {}
        tables: dict[str, tuple[OpenTable | None, StreamhouseError | None]] = {}
        mentions = ((topic.topic, one) for topic in self._topics for one in topic.partitions)
        async for topic, p in in_slices(mentions):
            if topic not in tables:
                tables[topic] = self._found(topic)
            if (topic, p.partition) not in asked:
                asked[topic, p.partition] = _Asked(
                    topic, p.partition, p.fetch_offset, p.partition_max_bytes, *tables[topic]
                )
        self._asked = list(asked.values())
        if len(asked) > _LOOKED_AT_ONCE_MAX:
            # What is wrong is found now. The others are looked at again, without letting go of the
            # loop, before anything waits: there are not more of them than buckets.
            async for one in in_slices(self._asked):
                self._look(one)

    @property
    def partition_count(self) -> int:
        """How many partitions are asked for."""
        return len(self._asked)

    def _found(self, topic: str) -> tuple[OpenTable | None, StreamhouseError | None]:
        """Return the table of a topic, or what is wrong with it."""
        try:
            return topic_table(self._exchange, topic, Level.READ), None
        except StreamhouseError as error:
            self._exchange.report(error)
            return None, error.with_traceback(None)

    # -- waiting -------------------------------------------------------------------------------

    async def wait(self) -> None:
        """Wait until there is enough to answer, or something wrong to tell, or the time is up."""
        loop = asyncio.get_running_loop()
        while not self._is_enough():
            left_s = self._deadline - loop.time()
            if left_s <= 0 or self._service.is_draining:
                return
            caller = self._exchange.caller
            await self._exchange.wait(self._waiter(left_s))
            if self._exchange.caller != caller:
                self._check_grants()

    def _check_grants(self) -> None:
        """Read nothing of tables that the caller may not read any more."""
        for one in self._asked:
            if one.table is not None and not self._exchange.caller.may(
                Level.READ, str(one.table.path)
            ):
                one.table, one.error = self._found(one.topic)

    def _is_enough(self) -> bool:
        """Look at every partition as it is now, and say whether to answer."""
        bytes_left = self._bytes_min
        is_failed = False
        for one in self._asked:
            self._look(one)
            is_failed = is_failed or one.error is not None
            if bytes_left > 0 and one.has_rows:
                bytes_left -= self._estimate(one) if bytes_left > 1 else 1
        return is_failed or bytes_left <= 0

    def _look(self, one: _Asked) -> None:
        if one.table is None or one.error is not None:
            return
        try:
            self._service.manager.check_readable(one.table)
            has = readable_offsets(
                one.table, one.partition, has_history=self._lake_reads is not None
            )
            one.has = has
            if one.offset not in has:
                raise OffsetOutOfRangeError(
                    f"table '{one.table.path}', bucket {one.partition}: offset {one.offset} is"
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

    def _waiter(self, timeout_s: float) -> asyncio.Future[None]:
        buckets: dict[Wakeups, list[int]] = {}
        for one in self._asked:
            assert one.table is not None, "else there is an error to tell"
            buckets.setdefault(one.table.wakeups, []).append(one.partition)
        return joint_waiter(self._service.manager.waiter_limit, buckets, timeout_s=timeout_s)

    # -- reading -------------------------------------------------------------------------------

    async def read(self) -> FoundRecords:
        """Read what there is now, once there is room for it."""
        await self._keep_schemas()
        parts = await self._parts()
        if not parts:
            return FoundRecords()
        is_in_lake = any(part.is_in_lake for part in parts)
        weight = max(part.table.weight for part in parts)
        read = functools.partial(read_parts, parts, self._bytes_max)

        async def build(expected: int) -> FoundRecords:
            if is_in_lake:
                assert self._lake_reads is not None, "else the log has all that is readable"
                return await self._lake_reads.run(read)
            is_soon_done = expected * weight <= self._service.config.inline_bytes_max
            if is_soon_done and len(parts) <= _INLINE_PARTS_MAX:
                return read()
            return await self._service.run_blocking(read)

        estimate = sum(
            min(part.bytes_max, self._estimate(self._asked[part.number])) for part in parts
        )
        found = await self._service.answers.build(
            self._exchange, min(estimate, self._bytes_max), build
        )
        for part in parts:
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
        turn = next(_turns) % len(found) if found else 0
        return found[turn:] + found[:turn]

    # -- answering -----------------------------------------------------------------------------

    async def by_topic(self, found: FoundRecords) -> dict[str, list[FetchedPartition]]:
        """Return what is answered of every partition that was asked for."""
        topics: dict[str, list[FetchedPartition]] = {}
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
