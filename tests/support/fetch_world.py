"""What a consumer does to the Kafka door of `kafka_world`: records fetched, offsets listed.

Rows that have left the log are in a lake in memory: what reads real lake files has tests of its
own.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from kio.schema.errors import ErrorCode

from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.lake.older_rows import OlderRows, WrittenAt
from streamhouse.core.model.records.record_format import RAW_TOPIC
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.kafka.records.batches import read_batches
from tests.support.in_process_service import append_body
from tests.support.kafka_world import KafkaClient, KafkaWorld

__all__ = [
    "FETCH",
    "LIST_OFFSETS",
    "ROWS",
    "TIMES_US",
    "FetchedRecord",
    "MemoryHistory",
    "append",
    "fetch",
    "fetch_values",
    "fetched",
    "list_offsets",
    "next_offset_after",
    "raw_rows",
    "records_in",
    "tiered_clicks",
]

ROWS = 60
TIMES_US = [1_600_000_000_000_000 + i * 1_000_000 for i in range(3)]
FETCH = 1
LIST_OFFSETS = 2


class FetchedRecord(NamedTuple):
    """A record as a consumer sees it."""

    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: tuple[tuple[str, bytes | None], ...] = ()


def raw_rows(start: int, end: int, *, value_bytes: int = 10) -> pa.RecordBatch:
    """Return rows of a raw topic with keys k<i> and values v<i>, i from `start` to `end`."""
    ids = range(start, end)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([b"k%d" % i for i in ids], pa.binary()),
            pa.array([(b"v%d" % i).ljust(value_bytes, b".") for i in ids], pa.binary()),
            pa.array([1_700_000_000_000_000 + i * 1_000 for i in ids], pa.timestamp("us", "UTC")),
            pa.array([[{"key": "h", "value": b"%d" % i}] for i in ids], RAW_TOPIC.field(3).type),
        ],
        schema=RAW_TOPIC,
    )


async def append(world: KafkaWorld, table: str, bucket: int, *batches: pa.RecordBatch) -> None:
    """Append rows to a log table, each batch as one stored batch."""
    for rows in batches:
        body = append_body(rows.schema, [(bucket, 0, rows)])
        answer = await world.http.call("POST", f"/v1/tables/{table}/append", body=body)
        assert answer.status == 200, answer.body


async def fetch(
    client: KafkaClient,
    offsets: Mapping[str, Mapping[int, int]],
    *,
    version: int = 11,
    wait_ms: int = 0,
    min_bytes: int = 1,
    max_bytes: int = 50 << 20,
    partition_max_bytes: int = 1 << 20,
    **identity: Any,
) -> Any:
    """Fetch from offsets by topic and partition; return the answer."""
    values = fetch_values(
        offsets,
        version=version,
        wait_ms=wait_ms,
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        each=partition_max_bytes,
        **identity,
    )
    return await client.call(FETCH, version, **values)


def fetch_values(
    offsets: Mapping[str, Mapping[int, int]],
    *,
    version: int = 11,
    wait_ms: int = 0,
    min_bytes: int = 1,
    max_bytes: int = 50 << 20,
    each: int = 1 << 20,
    topic_ids: Mapping[str, uuid.UUID] | None = None,
    **epochs: int,
) -> dict[str, Any]:
    """Return the fields of a Fetch request; `topic_ids` are those of version 13."""
    newer = {"log_start_offset": -1} if version >= 5 else {}
    newer |= {"current_leader_epoch": -1} if version >= 9 else {}
    return {
        **({"replica_id": -1} if version < 15 else {}),
        "max_wait": timedelta(milliseconds=wait_ms),
        "min_bytes": min_bytes,
        "max_bytes": max_bytes,
        "isolation_level": 0,
        "topics": [
            {
                **({"topic": topic} if topic_ids is None else {"topic_id": topic_ids[topic]}),
                "partitions": [
                    {
                        "partition": partition,
                        "fetch_offset": offset,
                        "partition_max_bytes": each,
                        **newer,
                        **epochs,
                    }
                    for partition, offset in partitions.items()
                ],
            }
            for topic, partitions in offsets.items()
        ],
    }


def records_in(data: bytes, *, since: int = 0) -> list[FetchedRecord]:
    """Return the records of a partition's bytes, as a consumer that is at `since` takes them."""
    found = []
    for batch in read_batches(memoryview(data), bytes_max=1 << 30, records_max=1 << 24):
        columns = batch.columns
        headers: Sequence[Any] = [None] * len(columns)
        if columns.headers is not None:
            headers = columns.headers.to_pylist()
        found += [
            FetchedRecord(
                batch.header.base_offset + delta,
                key,
                value,
                time,
                tuple((h["key"], h["value"]) for h in of_record or ()),
            )
            for delta, key, value, time, of_record in zip(
                batch.offset_deltas.tolist(),
                columns.keys.to_pylist(),
                columns.values.to_pylist(),
                columns.timestamps_ms.tolist(),
                headers,
                strict=True,
            )
        ]
    return [record for record in found if record.offset >= since]


def next_offset_after(data: bytes) -> int:
    """Return where a consumer goes on behind these bytes of a partition."""
    batches = read_batches(memoryview(data), bytes_max=1 << 30, records_max=1 << 24)
    last = batches[-1].header
    return last.base_offset + last.last_offset_delta + 1


def fetched(answer: Any) -> dict[tuple[Any, int], list[FetchedRecord] | ErrorCode]:
    """Return the records of each partition of an answer, or its error, by topic as it names it."""
    return {
        (getattr(topic, "topic", None) or topic.topic_id, p.partition_index): p.error_code
        if p.error_code is not ErrorCode.none
        else records_in(p.records or b"")
        for topic in answer.responses
        for p in topic.partitions
    }


async def list_offsets(
    client: KafkaClient, topic: str, partition: int, time_ms: int, *, version: int = 7
) -> tuple[int, int] | ErrorCode:
    """Return (offset, timestamp) of a partition at a time, or at what stands for one."""
    answer = await client.call(
        LIST_OFFSETS,
        version,
        replica_id=-1,
        **({"isolation_level": 0} if version >= 2 else {}),
        topics=[
            {
                "name": topic,
                "partitions": [
                    {
                        "partition_index": partition,
                        "timestamp": time_ms,
                        **({"current_leader_epoch": -1} if version >= 4 else {}),
                    }
                ],
            }
        ],
    )
    found = answer.topics[0].partitions[0]
    if found.error_code is not ErrorCode.none:
        return ErrorCode(found.error_code)
    return found.offset, found.timestamp


@dataclass
class MemoryHistory:
    """A lake that has rows by bucket: (first offset, time in microseconds, rows), in order."""

    runs: dict[int, list[tuple[int, int, pa.RecordBatch]]] = field(default_factory=dict)
    covered: CoveredOffsets | None = None
    failures: list[Exception] = field(default_factory=list)
    """What the next reads raise, one each."""
    opened: int = 0

    def keep(self, bucket: int, first: int, timestamp_us: int, rows: pa.RecordBatch) -> None:
        """Have these rows of a bucket from now on."""
        self.runs.setdefault(bucket, []).append((first, timestamp_us, rows))

    def open(self, table: TableInfo, lake: LakeState, bucket: int, *, offset: int) -> _Cursor:
        """See `IcebergHistory.open`."""
        self.opened += 1
        return _Cursor(self, bucket, offset)

    def first_since(
        self, table: TableInfo, lake: LakeState, bucket: int, timestamp_us: int, *, offset: int
    ) -> WrittenAt | None:
        """See `IcebergHistory.first_since`."""
        late = (
            WrittenAt(max(first, offset), time)
            for first, time, rows in self.runs.get(bucket, [])
            if time >= timestamp_us and first + rows.num_rows > offset
        )
        return next(late, None)


class _Cursor:
    held_bytes = 1

    def __init__(self, history: MemoryHistory, bucket: int, offset: int) -> None:
        self._history = history
        self._runs = history.runs.get(bucket, [])
        self.next_offset = offset
        self.end_offset = self._runs[-1][0] + self._runs[-1][2].num_rows
        self.covered = history.covered

    def read(self, *, rows_max: int, bytes_max: int) -> OlderRows:
        """Return the rest of one run, as far as it fits; no rows if none are left."""
        if self._history.failures:
            raise self._history.failures.pop(0)
        for first, time, rows in self._runs:
            begin = max(first, self.next_offset)
            part = rows.slice(begin - first)
            if not part.num_rows or begin >= first + rows.num_rows:
                continue
            count = min(part.num_rows, rows_max, max(1, bytes_max * part.num_rows // part.nbytes))
            offsets = np.arange(begin, begin + count)
            self.next_offset = begin + count
            times = np.full(count, time)
            return OlderRows(part.slice(0, count), offsets, times, self.next_offset)
        self.next_offset = self.end_offset
        none = np.empty(0, dtype=np.int64)
        return OlderRows(self._runs[-1][2].slice(0, 0), none, none, self.end_offset)

    def close(self) -> None:
        """Nothing is open."""


async def tiered_clicks(
    world: KafkaWorld, history: MemoryHistory, *, end: int = 30, log_start: int = 20
) -> None:
    """Table clicks of sixty rows in six stored batches: a lake up to `end`, a log from `log_start`.

    What is in the lake was written at `TIMES_US`, batch by batch.
    """
    await world.http.create_table("clicks", RAW_TOPIC)
    await append(world, "clicks", 0, *(raw_rows(i, i + 10) for i in range(0, ROWS, 10)))
    for number, first in enumerate(range(0, end, 10)):
        history.keep(0, first, TIMES_US[number % 3], raw_rows(first, first + 10))
    table = world.service.table("clicks")
    table.keep_lake(LakeState(snapshot_id=1, table_uuid="u", tiered_offsets={0: end}))
    table.tablet(0).truncate(log_start)
