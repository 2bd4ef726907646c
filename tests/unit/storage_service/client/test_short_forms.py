"""What is shown in a shell: short, and without what is secret."""

from __future__ import annotations

import pyarrow as pa

from streamhouse import LogBatch, StreamhouseClient, TableInfo
from streamhouse.storage_service.model.schema import Schema
from streamhouse.storage_service.model.table import TableDescriptor, TablePath

COLUMNS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def test_a_client_shows_where_it_asks_and_no_token() -> None:
    with StreamhouseClient("http://127.0.0.1:9", token="secret") as client:
        assert repr(client) == "StreamhouseClient('http://127.0.0.1:9')"


def test_a_table_shows_its_columns_and_key() -> None:
    descriptor = TableDescriptor(
        path=TablePath.parse("db.t"), schema=Schema.from_arrow(COLUMNS), primary_key=("id",)
    )

    assert repr(TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)) == (
        "TableInfo('db.t', columns: id bigint NOT NULL, name string; primary key: id; buckets: 1)"
    )


def test_a_batch_shows_its_place_and_no_rows() -> None:
    rows = pa.record_batch({"id": [1, 2]})
    batch = LogBatch(bucket=3, base_offset=5, timestamp_us=0, data=rows, table="db.t")

    assert repr(batch) == "LogBatch('db.t', bucket 3, offsets 5 to 7)"
