"""Bytes on disk that every later release must read: docs/storage_format.md draws them."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa

from streamhouse.core.model.schema import Schema
from streamhouse.storage_service.kv.rocksdb_store import Marker, RocksdbStore
from streamhouse.storage_service.kv.rows.row_codec import RowCodec, stamp_versions

FIELDS = [
    (pa.field("id", pa.int64(), nullable=False), 258),
    (pa.field("flag", pa.bool_()), True),
    (pa.field("name", pa.string()), "ü"),
    (pa.field("price", pa.decimal128(10, 2)), Decimal("-1.50")),
    (pa.field("day", pa.date32()), datetime.date(1970, 1, 3)),
    (pa.field("none", pa.float64()), None),
    (pa.field("tags", pa.list_(pa.string())), ["a", None]),
    (pa.field("sizes", pa.map_(pa.string(), pa.int16())), [("k", 5)]),
    (pa.field("at", pa.struct([("x", pa.int8()), ("y", pa.binary())])), {"x": 1, "y": b"\xff"}),
]
ROW = (
    "0700000000000000"  # version offset 7
    "02"  # schema 2
    "2000"  # null bits: column 5
    "0201000000000000"  # id
    "01"  # flag
    "6affffffffffffffffffffffffffffff"  # price, unscaled -150
    "02000000"  # day
    "0000000000000000"  # none
    "02000000"  # bytes of name, tags, sizes, at
    "17000000"
    "10000000"
    "07000000"
    "c3bc"  # name
    "02000000" "06000000" "05000000" "00" "01000000" "61" "01" "00000000"  # tags
    "01000000" "08000000" "00" "0500" "01000000" "6b"  # sizes
    "00" "01" "01000000" "ff"  # at
)  # fmt: skip


def test_a_row() -> None:
    schema = Schema.from_arrow(pa.schema([f for f, _ in FIELDS]))
    columns = [pa.array([v], c.type) for (_, v), c in zip(FIELDS, schema.columns, strict=True)]
    rows = pa.RecordBatch.from_arrays(columns, schema=schema.to_arrow())
    codec = RowCodec(schema, schema_id=2, table="db.t")

    value = codec.encode(rows)
    stamp_versions(value, np.array([7]))

    assert value[0].as_py().hex() == ROW
    assert codec.decode(pa.array([bytes.fromhex(ROW)])).equals(rows)


def test_a_short_row_is_filled_up() -> None:
    schema = Schema.from_arrow(pa.schema([pa.field("id", pa.int8(), nullable=False)]))
    codec = RowCodec(schema, schema_id=0, table="db.t")
    rows = pa.RecordBatch.from_arrays([pa.array([3], pa.int8())], schema=schema.to_arrow())

    assert codec.encode(rows)[0].as_py().hex() == "00000000000000000000000003"
    assert codec.decode(codec.encode(rows)).equals(rows)


def test_the_marker(tmp_path: Path) -> None:
    store = RocksdbStore(tmp_path / "kv", table_id=3, bucket=1)
    empty = pa.array([], pa.binary())

    store.write(empty, empty, marker=Marker(513, 4))

    marker = store.get_one(b"\xffmarker")
    assert marker is not None
    assert marker.hex() == (
        "53484b56" "0100" "0000" "01000000" "0300000000000000" "0102000000000000" "0400000000000000"
    )  # fmt: skip
    store.close()
