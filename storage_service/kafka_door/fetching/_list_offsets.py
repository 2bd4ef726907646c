"""ListOffsets: where a partition begins and ends, and which offset belongs to a time.

The time of a row is when the service made the row durable, not the record's timestamp column. Time
never decreases within a partition, so all rows from the answered offset on are at least as late.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kio.schema.errors import ErrorCode

from streamhouse.core.errors import (
    InvalidRequestError,
    OffsetOutOfRangeError,
    OverloadedError,
    StreamhouseError,
)
from streamhouse.core.model.lake.older_rows import WrittenAt
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kafka_door._error_codes import error_code_of
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from streamhouse.storage_service.kafka_door.topics._table_identity import (
    NO_EPOCH,
    check_leader_epoch,
    epoch_of,
    is_of_another,
    note_validated,
)
from streamhouse.storage_service.kafka_door.topics._topic_tables import topic_table
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.history.failures import failure_of
from streamhouse.storage_service.server.history.lake_reads import Older
from streamhouse.storage_service.server.history.readable_offsets import (
    ReadableOffsets,
    lake_end,
    readable_offsets,
)
from streamhouse.storage_service.server.history.since_time import TimeQuestion
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = ["answer_list_offsets", "answer_offset_for_leader_epoch", "refuse_list_offsets"]

# Special values of `timestamp`.
_LATEST: Final = -1
_EARLIEST: Final = -2
_LATEST_TIME: Final = -3
_EARLIEST_IN_LOG: Final = -4
_LATEST_IN_LAKE: Final = -5
_NONE: Final = -1
_NO_POSITION: Final = WrittenAt(_NONE, _NONE)
_TIME_MS_MAX: Final = ((1 << 63) - 1) // 1_000


@dataclass(slots=True)
class _PartitionQuery:
    """A requested partition, the query for the partition, and the answer."""

    partition: int
    time_ms: int
    leader_epoch: int
    """The topic's epoch, as the client knows the epoch."""
    mentions: int = 1
    table: OpenTable | None = None
    info: TableInfo | None = None
    readable: ReadableOffsets | None = None
    error: StreamhouseError | None = None
    answer: WrittenAt = _NO_POSITION


async def answer_list_offsets(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Answer with one offset of each requested partition.

    A repeated partition is refused, as by brokers: the answer has room for a single offset.
    """
    mentions = (
        (topic.name, partition.partition_index, partition.timestamp, _client_epoch(partition))
        for topic in request.topics
        for partition in topic.partitions
    )
    queries = await _looked_up(exchange, mentions)
    by_time, latest = [], []
    async for query in in_slices(queries.values()):
        if query.mentions > 1 and query.table is not None:
            query.error = InvalidRequestError(
                f"partition {query.partition} is named {query.mentions} times; name it once"
            )
            exchange.report(query.error)
        if query.error is None and query.time_ms >= 0:
            by_time.append(query)
        elif query.error is None and query.time_ms == _LATEST_TIME:
            latest.append(query)
    if by_time:
        await _look_up_times(exchange, by_time)
    if latest:
        await _look_up_latest(exchange, latest)
    topics: dict[str, list[Mapping[str, Any]]] = {}
    async for (name, _), query in in_slices(queries.items()):
        topics.setdefault(name, []).append(_partition_answer(exchange, query))
    return {
        "topics": [{"name": name, "partitions": partitions} for name, partitions in topics.items()]
    }


def refuse_list_offsets(request: Any, code: ErrorCode, _: str) -> Mapping[str, Any]:
    """Return an answer with an error for every requested partition."""
    failure = {"error_code": code, "timestamp": _NONE, "offset": _NONE, "leader_epoch": _NONE}
    return {
        "topics": [
            {
                "name": topic.name,
                "partitions": [
                    {"partition_index": partition.partition_index, **failure}
                    for partition in topic.partitions
                ],
            }
            for topic in request.topics
        ]
    }


async def answer_offset_for_leader_epoch(
    exchange: KafkaExchange, request: Any
) -> Mapping[str, Any]:
    """Answer with the end of the rows that the client's epoch covers in the table.

    Acknowledged rows stay, therefore the answer is the table's end. If the epoch is of an earlier
    table of the same name, the answer is the start of the present table.
    """
    mentions = [
        (topic.topic, partition) for topic in request.topics for partition in topic.partitions
    ]
    queries = await _looked_up(
        exchange,
        (
            (name, partition.partition, _LATEST, _client_epoch(partition))
            for name, partition in mentions
        ),
    )
    topics: dict[str, list[Mapping[str, Any]]] = {}
    async for name, mention in in_slices(mentions):
        query = queries[name, mention.partition]
        epoch, end = _NONE, _NONE
        if query.error is None and query.table is not None and query.readable is not None:
            table_epoch = epoch_of(query.table)
            if 0 <= mention.leader_epoch <= table_epoch:
                is_earlier_table = is_of_another(query.table.info.table_id, mention.leader_epoch)
                epoch, end = (
                    table_epoch,
                    query.readable.start if is_earlier_table else query.readable.end,
                )
        partition_answer = {
            "partition": query.partition,
            "error_code": _noted(exchange, query.error),
            "leader_epoch": epoch,
            "end_offset": end,
        }
        topics.setdefault(name, []).append(partition_answer)
    return {
        "topics": [{"topic": name, "partitions": partitions} for name, partitions in topics.items()]
    }


def _client_epoch(mention: Any) -> int:
    epoch: int = getattr(mention, "current_leader_epoch", NO_EPOCH)
    return epoch


async def _looked_up(
    exchange: KafkaExchange, mentions: Iterable[tuple[str, int, int, int]]
) -> dict[tuple[str, int], _PartitionQuery]:
    """Return each named partition, with readable offsets or the error.

    A mention is a topic, a partition, a time, and the leader epoch that the client knows.
    """
    tables: dict[str, OpenTable | StreamhouseError] = {}
    queries: dict[tuple[str, int], _PartitionQuery] = {}
    async for topic, partition, time_ms, epoch in in_slices(mentions):
        repeated_query = queries.get((topic, partition))
        if repeated_query is not None:
            repeated_query.mentions += 1
            continue
        if topic not in tables:
            tables[topic] = _table_or_error(exchange, topic)
        query = queries[topic, partition] = _PartitionQuery(
            partition, min(time_ms, _TIME_MS_MAX), epoch
        )
        table = tables[topic]
        if isinstance(table, StreamhouseError):
            query.error = table
        else:
            _look(exchange, table, query)
    return queries


def _table_or_error(exchange: KafkaExchange, topic: str) -> OpenTable | StreamhouseError:
    """Return the table of a topic, or the error that prevents reading the topic."""
    try:
        return topic_table(exchange, topic, Level.READ)
    except StreamhouseError as error:
        exchange.report(error)
        return error.with_traceback(None)


def _look(exchange: KafkaExchange, table: OpenTable, query: _PartitionQuery) -> None:
    """Record the readable offsets of a partition, or the partition's error."""
    try:
        query.table, query.info = table, table.info
        check_leader_epoch(table, query.leader_epoch)
        query.readable = readable_offsets(table, query.partition)
        query.answer = WrittenAt(
            _special_offset(table, query.partition, query.readable, query.time_ms), _NONE
        )
        if query.leader_epoch != NO_EPOCH:
            note_validated(exchange, table, query.partition)
    except StreamhouseError as error:
        exchange.report(error)
        query.error = error.with_traceback(None)


def _special_offset(table: OpenTable, bucket: int, offsets: ReadableOffsets, time_ms: int) -> int:
    """Return the offset for a special value of `timestamp`."""
    if time_ms == _LATEST_IN_LAKE:
        # The last offset in the lake; `lake_end` is exclusive.
        return lake_end(table, bucket) - 1
    names = {_LATEST: offsets.end, _EARLIEST: offsets.start, _EARLIEST_IN_LOG: offsets.log_start}
    return names.get(time_ms, _NONE)


async def _look_up_times(exchange: KafkaExchange, queries: Sequence[_PartitionQuery]) -> None:
    """Record the first row at or after each partition's time.

    A consumer knows one range of offsets, which begins with the readable rows. Rows that are gone
    from log and lake lie below the range, as in Kafka.
    """
    questions = []
    for query in queries:
        assert query.table is not None, "else the partition has an error"
        questions.append(TimeQuestion(query.table, query.partition, query.time_ms * 1_000))
    answers = await exchange.service.first_since(questions)
    for query, answer in zip(queries, answers, strict=True):
        if isinstance(answer, StreamhouseError):
            exchange.report(answer)
            query.error = answer
        elif answer.timestamp_us is not None:
            query.answer = WrittenAt(answer.offset, answer.timestamp_us)


async def _look_up_latest(exchange: KafkaExchange, queries: Sequence[_PartitionQuery]) -> None:
    """Record the last row of each partition: time never decreases within a partition."""
    await exchange.service.run_blocking(_last_in_log, queries)
    older = [query for query in queries if query.error is None and _is_last_in_lake(query)]
    if older:
        try:
            await exchange.service.lake_reads.run(functools.partial(_last_in_lake, older))
        except OverloadedError as error:
            exchange.report(error)
            for query in older:
                query.error = error.with_traceback(None)


def _last_in_log(queries: Sequence[_PartitionQuery]) -> None:
    for query in queries:
        assert query.table is not None, "else the partition has an error"
        assert query.readable is not None, "else the partition has an error"
        if not query.readable.log_start < query.readable.end:
            continue
        try:
            offset = query.readable.end - 1
            written_us = (
                query.table.tablet(query.partition).read(offset, bytes_max=1)[0].timestamp_us
            )
            query.answer = WrittenAt(offset, written_us)
        except OffsetOutOfRangeError:
            # Retention has just removed the row; the next query finds the row in the lake.
            query.answer = _NO_POSITION
        except StreamhouseError as error:
            query.error = error


def _is_last_in_lake(query: _PartitionQuery) -> bool:
    assert query.readable is not None, "else the partition has an error"
    return query.readable.start < query.readable.end <= query.readable.log_start


def _last_in_lake(queries: Sequence[_PartitionQuery], older: Older) -> None:
    for query in queries:
        if isinstance(older, StreamhouseError):
            query.error = older
            continue
        assert query.table is not None, "else the partition has an error"
        assert query.info is not None, "else the partition has an error"
        assert query.readable is not None, "else the partition has an error"
        try:
            last = older.read(
                *(query.table, query.info, query.partition),
                offset=query.readable.end - 1,
                rows_max=1,
                bytes_max=1,
            )
        except Exception as error:  # noqa: BLE001 - outermost for a partition
            doing = f"looking for the last row of '{query.table.path}', bucket {query.partition}"
            query.error = failure_of(error, doing)
            continue
        if last.rows.num_rows:
            query.answer = WrittenAt(int(last.offsets[0]), int(last.timestamps_us[0]))


def _partition_answer(exchange: KafkaExchange, query: _PartitionQuery) -> Mapping[str, Any]:
    code = _noted(exchange, query.error)
    position = query.answer if query.error is None else _NO_POSITION
    has_position = position.offset != _NONE
    written_us = position.timestamp_us
    return {
        "partition_index": query.partition,
        "error_code": code,
        "timestamp": written_us if written_us == _NONE else written_us // 1_000,
        "offset": position.offset,
        "leader_epoch": epoch_of(query.table)
        if query.table is not None and has_position
        else _NONE,
    }


def _noted(exchange: KafkaExchange, error: StreamhouseError | None) -> ErrorCode:
    code = ErrorCode.none if error is None else error_code_of(error)
    exchange.note(code)
    return code
