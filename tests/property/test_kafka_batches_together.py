"""Batches of producers that are read together are what each of them is alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from random import Random
from typing import Any, Final

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.records.record_format import RAW_TOPIC
from streamhouse.core.model.table import TableInfo
from streamhouse.core.wire.arrow_body import decode_payload
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.kafka.records.batches import Compression
from streamhouse.storage_service.kafka_door.producing._decoding import (
    Decoded,
    decoded,
    decoded_together,
)
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.append_queue import RoutedBatch
from tests.support.examples import examples
from tests.support.kafka_batches import produced
from tests.support.kafka_records import columns_of, record_table

CONFIG: Final = ServiceConfig(data_dir=Path("/nonexistent"))
ROWS: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("name", pa.string()),
        ("tags", pa.list_(pa.string())),
        ("at", pa.timestamp("us", tz="UTC")),
    ]
)


def _in_buckets(info: TableInfo) -> TableInfo:
    """Return the table with rows in three buckets, by their ids."""
    descriptor = dataclasses.replace(info.descriptor, bucket_key=("id",), bucket_count=3)
    return dataclasses.replace(info, descriptor=descriptor)


TABLES: Final = {
    "raw": record_table(RAW_TOPIC),
    "raw texts": record_table(
        RAW_TOPIC.set(0, pa.field("key", pa.string())).set(1, pa.field("value", pa.string()))
    ),
    "json": record_table(ROWS, value_format="json"),
    "json with keys": record_table(
        ROWS, value_format="json", key_columns="id", timestamp_column="at"
    ),
    "rejecting": record_table(ROWS, value_format="json", on_error="reject"),
    "primary key": record_table(ROWS, ("id",), value_format="json"),
    "json in buckets": _in_buckets(record_table(ROWS, value_format="json")),
    "primary key in buckets": _in_buckets(record_table(ROWS, ("id",), value_format="json")),
    "debezium": record_table(
        ROWS, ("id",), value_format="debezium-json", changes_format="debezium-json"
    ),
}


def _value(random: Random, number: int) -> bytes | None:
    row: dict[str, Any] = {"id": number}
    if random.random() < 0.7:
        row["name"] = random.choice(["a", "", "ü" * 50, None])
    if random.random() < 0.3:
        row["tags"] = random.choice([[], ["x", None], None])
    if random.random() < 0.02:
        return random.choice([b'{"id":', b'{"id":"no"}', b'{"id":1}{"id":2}', b"\xff", b"{}"])
    if random.random() < 0.2:
        row = {"before": None, "after": row, "op": "c", "ts_ms": 5}
    return None if random.random() < 0.03 else json.dumps(row, ensure_ascii=False).encode()


def _batch(random: Random, name: str) -> bytes:
    count = random.choice([1, 2, 5, 20, 40])
    values = [_value(random, number) for number in range(count)]
    if name == "debezium" and random.random() < 0.8:
        after = [{"id": number, "name": "n"} for number in range(count)]
        values = [json.dumps({"after": row, "op": "c"}).encode() for row in after]
    elif name != "debezium" and random.random() < 0.6:
        values = [b'{"id":%d,"name":"n"}' % number for number in range(count)]
    keys = None
    if TABLES[name].is_primary_key_table or random.random() < 0.3:
        forms = (b'{"id":%d}',) if name == "debezium" else (b'{"id":%d}', b"%d")
        keys = [random.choice(forms) % number for number in range(count)]
    headers = None
    if random.random() < 0.3:
        headers = [random.choice([[], [{"key": "k", "value": b"v"}]]) for _ in range(count)]
    columns = columns_of(
        values,
        keys,
        ms=[random.choice([-1, 5, 1_700_000_000_000]) for _ in range(count)],
        headers=headers,
    )
    numbers = {}
    if random.random() < 0.7:
        numbers = {"producer_id": 7, "epoch": 0, "sequence": random.randrange(100)}
    made = bytearray(
        produced(
            columns,
            is_transactional=random.random() < 0.02,
            compression=random.choice([Compression.NONE, Compression.NONE, Compression.LZ4]),
            **numbers,
        )
    )
    if random.random() < 0.05:
        made[random.randrange(21, len(made))] ^= 0xFF
    return bytes(made)


def _alone(data: bytes, table: TableInfo, partition: int) -> Decoded | None:
    try:
        return decoded(data, table, partition, CONFIG)
    except StreamhouseError:
        return None


def _routed(batch: RoutedBatch, table: TableInfo) -> tuple[Any, ...]:
    rows = decode_payload(memoryview(batch.payload), table.log_schema)
    rows.validate(full=True)
    return batch._replace(payload=b""), rows.to_pylist()


def _write(write: KeyWrite) -> tuple[Any, ...]:
    operations = None if write.operations is None else write.operations.tolist()
    numbers = None if write.row_numbers is None else list(write.row_numbers)
    return write.bucket, write.rows.to_pylist(), operations, write.sequence, numbers


def _shown(one: Decoded, table: TableInfo) -> tuple[Any, ...]:
    return (
        (one.partition, one.record_count, one.writer_id, one.sequence, one.is_exact),
        [_routed(batch, table) for batch in one.batches],
        [_write(write) for write in one.writes],
        one.rejecting,
    )


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(min_value=0, max_value=2**32), st.sampled_from(sorted(TABLES)))
def test_batches_are_what_they_are_alone(seed: int, name: str) -> None:
    random, table = Random(seed), TABLES[name]
    batches = [(_batch(random, name), 0) for _ in range(random.randint(1, 8))]

    found = decoded_together(batches, table, CONFIG)

    alone = [_alone(data, table, partition) for data, partition in batches]
    assert len(found) == len(batches)
    for one, own in zip(found, alone, strict=True):
        if one is not None:
            assert own is not None
            assert _shown(one, table) == _shown(own, table)
    # What is wrong with some of them may keep those beside them from being read, but nothing else.
    if all(own is not None and own.rejecting is None for own in alone):
        assert None not in found
