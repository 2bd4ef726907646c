"""ListOffsets: where a partition begins and ends, and which offset belongs to a time.

A time is when the service made a row durable, whatever timestamp the record has in a column: within
a partition it never goes back, so all rows from the answered offset on are of that time or later.
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
    stands_in,
)
from streamhouse.storage_service.kafka_door.topics._topic_tables import topic_table
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.history.failures import failure_of
from streamhouse.storage_service.server.history.lake_reads import LakeReads, Older
from streamhouse.storage_service.server.history.readable_offsets import (
    ReadableOffsets,
    lake_end,
    readable_offsets,
)
from streamhouse.storage_service.server.history.since_time import TimeQuestion
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = ["answer_list_offsets", "answer_offset_for_leader_epoch", "refuse_list_offsets"]

# What stands for a time, in `timestamp`.
_LATEST: Final = -1
_EARLIEST: Final = -2
_LATEST_TIME: Final = -3
_EARLIEST_IN_LOG: Final = -4
_LATEST_IN_LAKE: Final = -5
_NONE: Final = -1
_NOTHING: Final = WrittenAt(_NONE, _NONE)
_TIME_MS_MAX: Final = ((1 << 63) - 1) // 1_000


@dataclass(slots=True)
class _Asked:
    """A partition, what is asked of it, and what is answered."""

    partition: int
    time_ms: int
    leader_epoch: int
    """That of the topic, as the client knows it."""
    mentions: int = 1
    table: OpenTable | None = None
    info: TableInfo | None = None
    has: ReadableOffsets | None = None
    error: StreamhouseError | None = None
    found: WrittenAt = _NOTHING


async def answer_list_offsets(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Answer an offset of each partition that is asked for, once.

    One that is named twice is refused, as brokers do: the answer has room for one of both times.
    """
    mentions = (
        (topic.name, one.partition_index, one.timestamp, _epoch_told(one))
        for topic in request.topics
        for one in topic.partitions
    )
    asked = await _looked_up(exchange, mentions)
    by_time, latest = [], []
    async for one in in_slices(asked.values()):
        if one.mentions > 1 and one.table is not None:
            one.error = InvalidRequestError(
                f"partition {one.partition} is named {one.mentions} times; name it once"
            )
            exchange.report(one.error)
        if one.error is None and one.time_ms >= 0:
            by_time.append(one)
        elif one.error is None and one.time_ms == _LATEST_TIME:
            latest.append(one)
    if by_time:
        await _look_up_times(exchange, by_time)
    if latest:
        await _look_up_latest(exchange, latest)
    topics: dict[str, list[Mapping[str, Any]]] = {}
    async for (name, _), one in in_slices(asked.items()):
        topics.setdefault(name, []).append(_answered(exchange, one))
    return {"topics": [{"name": name, "partitions": found} for name, found in topics.items()]}


def refuse_list_offsets(request: Any, code: ErrorCode, _: str) -> Mapping[str, Any]:
    """Return the answer that has an error for every partition that was asked for."""
    nothing = {"error_code": code, "timestamp": _NONE, "offset": _NONE, "leader_epoch": _NONE}
    return {
        "topics": [
            {
                "name": topic.name,
                "partitions": [
                    {"partition_index": one.partition_index, **nothing} for one in topic.partitions
                ],
            }
            for topic in request.topics
        ]
    }


async def answer_offset_for_leader_epoch(
    exchange: KafkaExchange, request: Any
) -> Mapping[str, Any]:
    """Answer up to where what a client has read under an epoch is in the table.

    What was acknowledged stays, so that is the table's end; of what was read in an earlier table of
    the name nothing is here, so the client goes on where this one begins.
    """
    mentions = [(topic.topic, one) for topic in request.topics for one in topic.partitions]
    asked = await _looked_up(
        exchange, ((name, one.partition, _LATEST, _epoch_told(one)) for name, one in mentions)
    )
    topics: dict[str, list[Mapping[str, Any]]] = {}
    async for name, given in in_slices(mentions):
        one = asked[name, given.partition]
        epoch, end = _NONE, _NONE
        if one.error is None and one.table is not None and one.has is not None:
            own = epoch_of(one.table)
            if 0 <= given.leader_epoch <= own:
                is_other = is_of_another(one.table.info.table_id, given.leader_epoch)
                epoch, end = own, one.has.start if is_other else one.has.end
        answered = {
            "partition": one.partition,
            "error_code": _noted(exchange, one.error),
            "leader_epoch": epoch,
            "end_offset": end,
        }
        topics.setdefault(name, []).append(answered)
    return {"topics": [{"topic": name, "partitions": found} for name, found in topics.items()]}


def _epoch_told(asked: Any) -> int:
    epoch: int = getattr(asked, "current_leader_epoch", NO_EPOCH)
    return epoch


async def _looked_up(
    exchange: KafkaExchange, mentions: Iterable[tuple[str, int, int, int]]
) -> dict[tuple[str, int], _Asked]:
    """Return each partition that is named, once, with what is readable or what is wrong with it.

    A mention is a topic, a partition, a time, and the leader epoch that the client knows.
    """
    tables: dict[str, OpenTable | StreamhouseError] = {}
    asked: dict[tuple[str, int], _Asked] = {}
    async for topic, partition, time_ms, epoch in in_slices(mentions):
        known = asked.get((topic, partition))
        if known is not None:
            known.mentions += 1
            continue
        if topic not in tables:
            tables[topic] = _found(exchange, topic)
        one = asked[topic, partition] = _Asked(partition, min(time_ms, _TIME_MS_MAX), epoch)
        table = tables[topic]
        if isinstance(table, StreamhouseError):
            one.error = table
        else:
            _look(exchange, table, one)
    return asked


def _found(exchange: KafkaExchange, topic: str) -> OpenTable | StreamhouseError:
    """Return the table of a topic, or what is wrong with it."""
    try:
        return topic_table(exchange, topic, Level.READ)
    except StreamhouseError as error:
        exchange.report(error)
        return error.with_traceback(None)


def _look(exchange: KafkaExchange, table: OpenTable, one: _Asked) -> None:
    """Note what is readable of a partition, or what is wrong with it."""
    try:
        one.table, one.info = table, table.info
        check_leader_epoch(table, one.leader_epoch)
        has_history = exchange.service.lake_reads is not None
        one.has = readable_offsets(table, one.partition, has_history=has_history)
        one.found = WrittenAt(_named(table, one.partition, one.has, one.time_ms), _NONE)
        if one.leader_epoch != NO_EPOCH:
            stands_in(exchange, table, one.partition)
    except StreamhouseError as error:
        exchange.report(error)
        one.error = error.with_traceback(None)


def _named(table: OpenTable, bucket: int, has: ReadableOffsets, time_ms: int) -> int:
    """Return the offset that stands under a name instead of a time."""
    if time_ms == _LATEST_IN_LAKE:
        # The last offset of those, not the one behind it.
        return lake_end(table, bucket) - 1
    names = {_LATEST: has.end, _EARLIEST: has.start, _EARLIEST_IN_LOG: has.log_start}
    return names.get(time_ms, _NONE)


async def _look_up_times(exchange: KafkaExchange, asked: Sequence[_Asked]) -> None:
    """Note the first row of each partition's time or later.

    A consumer knows one range of offsets, and begins with what is readable: rows that are gone from
    log and lake are below its range, as they are in Kafka.
    """
    questions = []
    for one in asked:
        assert one.table is not None, "else there is an error"
        questions.append(TimeQuestion(one.table, one.partition, one.time_ms * 1_000))
    answers = await exchange.service.first_since(questions)
    for one, answer in zip(asked, answers, strict=True):
        if isinstance(answer, StreamhouseError):
            exchange.report(answer)
            one.error = answer
        elif answer.timestamp_us is not None:
            one.found = WrittenAt(answer.offset, answer.timestamp_us)


async def _look_up_latest(exchange: KafkaExchange, asked: Sequence[_Asked]) -> None:
    """Note the last row of each partition: within a partition time never goes back."""
    await exchange.service.run_blocking(_last_in_log, asked)
    lake_reads: LakeReads | None = exchange.service.lake_reads
    older = [one for one in asked if one.error is None and _is_last_in_lake(one)]
    if older and lake_reads is not None:
        try:
            await lake_reads.run(functools.partial(_last_in_lake, older))
        except OverloadedError as error:
            exchange.report(error)
            for one in older:
                one.error = error.with_traceback(None)


def _last_in_log(asked: Sequence[_Asked]) -> None:
    for one in asked:
        assert one.table is not None, "else there is an error"
        assert one.has is not None, "else there is an error"
        if not one.has.log_start < one.has.end:
            continue
        try:
            offset = one.has.end - 1
            written_us = one.table.tablet(one.partition).read(offset, bytes_max=1)[0].timestamp_us
            one.found = WrittenAt(offset, written_us)
        except OffsetOutOfRangeError:
            # Retention took it just now; the next question finds it in the lake.
            one.found = _NOTHING
        except StreamhouseError as error:
            one.error = error


def _is_last_in_lake(one: _Asked) -> bool:
    assert one.has is not None, "else there is an error"
    return one.has.start < one.has.end <= one.has.log_start


def _last_in_lake(asked: Sequence[_Asked], older: Older) -> None:
    for one in asked:
        if isinstance(older, StreamhouseError):
            one.error = older
            continue
        assert one.table is not None, "else there is an error"
        assert one.info is not None, "else there is an error"
        assert one.has is not None, "else there is an error"
        try:
            last = older.read(
                *(one.table, one.info, one.partition),
                offset=one.has.end - 1,
                rows_max=1,
                bytes_max=1,
            )
        except Exception as error:  # noqa: BLE001 - outermost for a partition
            doing = f"looking for the last row of '{one.table.path}', bucket {one.partition}"
            one.error = failure_of(error, doing)
            continue
        if last.rows.num_rows:
            one.found = WrittenAt(int(last.offsets[0]), int(last.timestamps_us[0]))


def _answered(exchange: KafkaExchange, one: _Asked) -> Mapping[str, Any]:
    code = _noted(exchange, one.error)
    found = one.found if one.error is None else _NOTHING
    is_known = found.offset != _NONE
    written_us = found.timestamp_us
    return {
        "partition_index": one.partition,
        "error_code": code,
        "timestamp": written_us if written_us == _NONE else written_us // 1_000,
        "offset": found.offset,
        "leader_epoch": epoch_of(one.table) if one.table is not None and is_known else _NONE,
    }


def _noted(exchange: KafkaExchange, error: StreamhouseError | None) -> ErrorCode:
    code = ErrorCode.none if error is None else error_code_of(error)
    exchange.note(code)
    return code
