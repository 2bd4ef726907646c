"""Key writes go to the buckets of their keys, in one request, with the table's columns alone."""

from __future__ import annotations

import gc
import json
from typing import Any

import pyarrow as pa

from streamhouse.client.http._any_process import AnyProcess
from streamhouse.client.http._http_connection import Answer
from streamhouse.client.http.endpoint import parse_endpoints
from streamhouse.client.writing.writes import ColumnChecks, TableWrites
from streamhouse.core.errors import SchemaMismatchError, UnknownColumnError
from streamhouse.core.model.bucketing import buckets_for_rows
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.core.model.transaction import TransactionOperation
from tests.support.in_process_service import EVENTS, table_descriptor


class Recorder:
    """A transport whose requests are kept, and answered as if each bucket had one change."""

    def __init__(self) -> None:
        self.any_process = AnyProcess(parse_endpoints("http://127.0.0.1:1"))
        self.sent: list[list[int]] = []
        self.schemas: list[pa.Schema] = []

    def request(self, verb: str, url: str, *, body: Any, **more: Any) -> Answer:
        buckets = []
        with pa.ipc.open_stream(body) as reader:
            self.schemas.append(reader.schema)
            while True:
                try:
                    _, metadata = reader.read_next_batch_with_custom_metadata()
                except StopIteration:
                    break
                buckets.append(int(metadata[b"bucket"]))
        self.sent.append(sorted(buckets))
        return Answer(200, {}, json.dumps({"buckets": {str(b): [0, 1] for b in buckets}}).encode())


def test_all_buckets_of_a_write_are_in_one_request() -> None:
    descriptor = table_descriptor("db.t", bucket_count=4, primary_key=("id",))
    table = TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)
    rows = pa.table({"id": pa.array(range(50)), "name": ["a"] * 50})
    assert set(buckets_for_rows(rows, ["id"], 4).tolist()) == {0, 1, 2, 3}

    for operation, data in (
        (TransactionOperation.UPSERT, rows),
        (TransactionOperation.DELETE, rows.select(["id"])),
    ):
        transport = Recorder()
        offsets = TableWrites(transport).write(  # type: ignore[arg-type]  # only `request` is used
            table, data, operation, writer=None
        )

        assert transport.sent == [[0, 1, 2, 3]]
        assert offsets == dict.fromkeys(range(4), (0, 1))


def test_only_columns_are_sent_of_a_schema() -> None:
    """What pandas adds to a schema is as long as it is wide, and each request would have it."""
    rows = pa.table({"id": [1], "name": ["a"]}, EVENTS.with_metadata({"pandas": "x" * (5 << 20)}))

    for operation, key in (
        (TransactionOperation.APPEND, ()),
        (TransactionOperation.UPSERT, ("id",)),
    ):
        descriptor = table_descriptor("db.t", primary_key=key)
        table = TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)
        transport = Recorder()
        TableWrites(transport).write(  # type: ignore[arg-type]  # only `request` is used
            table, rows, operation, writer=None
        )

        assert transport.schemas == [EVENTS]
        assert transport.schemas[0].metadata is None


def test_what_was_checked_is_checked_again_when_anything_of_it_changes() -> None:
    key = pa.field("id", pa.int64(), nullable=False)
    narrow, wide = pa.schema([key]), pa.schema([key, pa.field("name", pa.string())])
    tables = [
        TableInfo(
            descriptor=TableDescriptor(
                path=TablePath.parse("db.t"), schema=Schema.from_arrow(s), primary_key=("id",)
            ),
            table_id=1,
            created_at_us=0,
        )
        for s in (narrow, wide)
    ]
    rows = {s: pa.Table.from_pylist([{"id": 1, "name": "a"}], s) for s in (narrow, wide)}
    writes = TableWrites(Recorder())  # type: ignore[arg-type]  # only `request` is used

    def write(table: int, schema: pa.Schema, columns: list[str] | None = None) -> bool:
        operation = TransactionOperation.UPSERT
        try:
            writes.write(tables[table], rows[schema], operation, columns=columns, writer=None)
        except (SchemaMismatchError, UnknownColumnError):
            return False
        return True

    for _ in range(2):
        assert write(0, narrow)
        assert not write(0, wide)
        assert not write(1, narrow)
        assert write(1, narrow, ["id"])
        assert not write(1, wide, ["id"])
        assert write(1, wide, ["id", "name"])
        assert write(1, wide)


def test_no_more_is_remembered_than_of_some_tables() -> None:
    checks = ColumnChecks()
    rows = pa.schema([("id", pa.int64()), ("name", pa.string())])
    descriptor = table_descriptor("db.remembered", primary_key=("id",))

    for table_id in range(1, 1_001):
        table = TableInfo(descriptor=descriptor, table_id=table_id, created_at_us=0)
        checks.check(table, rows, TransactionOperation.UPSERT, None)

    kept = [o for o in gc.get_objects() if isinstance(o, TableInfo) and o.descriptor is descriptor]
    assert len(kept) <= 256
