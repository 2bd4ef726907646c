"""Spark's `streamhouse.cdc.debezium` and the Kafka door read envelopes as the same changes.

Spark's executors run `JsonEnvelopes` on batches of Arrow; the test calls the same function.
"""

from __future__ import annotations

import base64
import json
from random import Random
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.connector.cdc._json_envelopes import JsonEnvelopes
from streamhouse.core.model.changelog import OPERATION_DELETE
from streamhouse.core.model.records.unavailable_value import UNAVAILABLE_VALUE, UnavailableValue
from tests.support.kafka_records import columns_of, read_alone_and_among_many, record_table

COLUMNS: Final = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("tiny", pa.int8()),
        ("flag", pa.bool_()),
        ("size", pa.float64()),
        ("price", pa.decimal128(6, 2)),
        ("raw", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("local", pa.timestamp("us")),
        ("days", pa.list_(pa.date32())),
        ("blobs", pa.list_(pa.binary())),
        ("place", pa.struct([("zone", pa.int32()), ("seen", pa.timestamp("us"))])),
        ("counts", pa.map_(pa.string(), pa.int32())),
    ]
)
# Arrow reads runs of these columns; Python reads each text with all columns.
PLAIN: Final = pa.schema([field for field in COLUMNS if not pa.types.is_nested(field.type)])
KINDS: Final = ("Timestamp", "MicroTimestamp", "NanoTimestamp")
DAYS: Final = (0, 20_000, -719_162, 2_932_897, 1 << 40, "2026-01-01", "soon", 1.5, True, None)
BLOBS: Final = (*(base64.b64encode(bytes(n)).decode() for n in range(4)), "!", "AA")
TIMES: Final = (
    0, -1, 1_999, 1_700_000_000_000, 1_700_000_000_000_001, 253_402_300_799_999_999, 1 << 62,
    -(1 << 63), 1 << 63, "2026-01-01T10:00:00Z", "2026-01-01T10:00:00.5", "x", {}, True, 1.0, 1e3,
)  # fmt: skip
# Values that Arrow reads at once.
GOOD: Final[dict[str, tuple[Any, ...]]] = {
    "name": ("x", "", '"ID": 1', 'x"ID":'),
    "tiny": (0, -128, 127),
    "flag": (True, False),
    "size": (0, 1.5, -1e300),
    "price": ("1.50", "2"),
    "raw": BLOBS[:4],
    "day": (0, 20_000),
    "at": ("2026-01-01T10:00:00.5Z",),
    "local": (0, -1, 1_700_000_000_001),
}
ANY: Final[dict[str, tuple[Any, ...]]] = {
    "name": (UNAVAILABLE_VALUE, "x", 5, {}, True),
    "tiny": (127, 200, 1.5, 5.0, True, [1]),
    "flag": (True, 1, "yes"),
    "size": (0, "NaN", "Infinity", True, {}),
    "price": ("1.50", 1.25, "1.505", 12345.6, "BOI=", "1e2", "", UNAVAILABLE_VALUE),
    "raw": BLOBS,
    "day": DAYS,
    "at": TIMES,
    "local": TIMES,
    "days": ([*DAYS[:3], None], ["soon"], [], list(UNAVAILABLE_VALUE.encode())),
    "blobs": ([*BLOBS[:4], None], ["!"], "x"),
    "place": ({"zone": 1}, {"zone": 1 << 40}, {"seen": 1 << 62}, {"seen": 5, "x": 1}, "{}", 5),
    "counts": ({}, {"a": 1, "b": None}, {"a": 1.5}, [["a", 1]], "x"),
}


OTHER_NAMES: Final = [
    f'"{other}": '.encode() for x in COLUMNS.names for other in (x.upper(), x.title())
]  # fmt: skip


def _row(random: Random, values: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return a row with few columns, of which one may have a name in another case."""
    row: dict[str, Any] = {"id": random.randrange(4)}
    for name in random.sample(sorted(values), random.randrange(5)):
        row[name] = random.choice([*values[name], None])
    if random.random() < 0.4:
        name = random.choice([*row])
        row[random.choice([name.upper(), name.title()])] = row[name]
        if random.random() < 0.7:
            del row[name]
    return row | random.choice([{}, {"unknown": {"id": [1]}}])


def _record(random: Random, values: dict[str, tuple[Any, ...]]) -> tuple[bytes, bytes]:
    """Return a key and a value."""
    op = random.choice("cuuurddmx")
    source = {"lsn": random.choice([0, 5, 9, "x"]), "name": "ID"}
    envelope: dict[str, Any] = {"op": op, "source": source}
    if op in "cur":
        envelope["after"] = _row(random, values)
    if op in "ud":
        envelope["before"] = random.choice([None, _row(random, values)])
    row = envelope.get("after") or envelope.get("before") or {"id": 7}
    key = {"id": row.get("id", row.get("ID", row.get("Id")))}
    if random.random() < 0.05:
        return json.dumps(key).encode(), b'{"op": "c", "after": '
    if random.random() < 0.4:
        kind = f"io.debezium.time.{random.choice(KINDS)}"
        fields = [{"field": name, "name": kind} for name in ("at", "local")]
        parts = [{"field": part, "fields": fields} for part in ("before", "after")]
        envelope = {"schema": {"fields": parts}, "payload": envelope}
        key = {"payload": key}
    return json.dumps(key).encode(), json.dumps(envelope).encode()


def _by_spark(schema: pa.Schema, records: list[tuple[bytes, bytes]], again: int) -> list[Any]:
    """Return the changes of each record, None for a record that is malformed or no change."""
    reader = JsonEnvelopes(schema=schema, unit="us", unavailable=UnavailableValue(), has_keys=False)
    keys, values = zip(*records * again, strict=True)
    batch = pa.record_batch(
        {"v": values, "kt": keys}, pa.schema([(n, pa.binary()) for n in ("v", "kt")])
    )
    (read,) = reader.read([batch])
    changes = []
    for record in read.to_pylist():
        op, before, after, key = (record[part] for part in ("op", "before", "after", "k"))
        if op not in ("c", "u", "r", "d") or record["misfit"] is not None:
            changes.append(None)
        elif op == "d":
            changes.append([("-", (before or key)["id"])])
        elif (
            op == "u"
            and before is not None
            and before["id"] != after["id"]
            and key["id"] is not None
        ):
            changes.append([("-", before["id"]), ("+", after)])
        else:
            changes.append([("+", after)])
    return changes


def _by_kafka(schema: pa.Schema, records: list[tuple[bytes, bytes]]) -> list[Any]:
    info = record_table(
        pa.schema([schema.field(0).with_nullable(False), *list(schema)[1:]]),
        ("id",),
        value_format="debezium-json",
        on_error="reject",
    )
    keys, values = zip(*records, strict=True)
    read = read_alone_and_among_many(columns_of(values, keys), info)
    assert read.operations is not None
    changes: list[Any] = [None] * len(records)
    for at, operation, row in zip(
        read.positions.tolist(), read.operations.tolist(), read.rows.to_pylist(), strict=True
    ):
        is_delete = operation == OPERATION_DELETE
        changes[at] = (changes[at] or []) + [("-", row["id"]) if is_delete else ("+", row)]
    return changes


@pytest.mark.parametrize("schema", [PLAIN, COLUMNS], ids=["plain", "all"])
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_both_doors_read_the_same_changes(schema: pa.Schema, seed: int) -> None:
    random = Random(seed)
    values = random.choice([GOOD, ANY])
    records = [_record(random, values) for _ in range(random.choice([1, 1, 2, 3]))]

    alone, many = _by_spark(schema, records, 1), _by_spark(schema, records, 20)

    # NaN is not equal to itself, and its text is.
    assert repr(many) == repr(alone * 20)
    if not any(name in value for _, value in records for name in OTHER_NAMES):
        assert repr(alone) == repr(_by_kafka(schema, records))


def test_names_match_in_any_case_in_spark_and_the_very_name_comes_first() -> None:
    both = {"id": 2, "ID": 9, "name": None, "NAME": "x"}
    rows = [{"ID": 1, "Name": "Ann"}, both]
    records = [(b"{}", json.dumps({"op": "c", "after": row}).encode()) for row in rows]
    deleted = (b'{"ID": 9}', b'{"op": "d"}')

    for again in (1, 20):
        changes = _by_spark(PLAIN, [*records, deleted], again)[:3]
        assert [(c[0][1]["id"], c[0][1]["name"]) for c in changes[:2]] == [(1, "Ann"), (2, None)]
        assert changes[2] == [("-", 9)]
