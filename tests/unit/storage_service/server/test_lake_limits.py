"""Rows that the lake cannot hold are refused by every kind of write, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.model.partitioning import PartitionField
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TablePath
from tests.support.in_process_service import InProcessService, append_body, in_process_service

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("price", pa.decimal128(5, 2)),
        ("at", pa.timestamp("us", tz="UTC")),
    ]
)


def _rows(price: int = 1, at: int = 0, id_: int = 1) -> pa.RecordBatch:
    """Return two rows; the second one has these numbers in it."""
    decimals = b"".join(n.to_bytes(16, "little", signed=True) for n in (0, price))
    columns = [
        pa.array([7, id_], pa.int64()),
        pa.Array.from_buffers(SCHEMA.field("price").type, 2, [None, pa.py_buffer(decimals)]),
        pa.array([0, at], pa.int64()).view(SCHEMA.field("at").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


async def _create(service: InProcessService, path: str, **fields: Any) -> None:
    partitioned_by = (PartitionField.parse("hour(at)"), PartitionField.parse("truncate(10, id)"))
    await service.create_table(path, SCHEMA, partitioned_by=partitioned_by, **fields)


async def _stage(service: InProcessService, path: str, body: bytes) -> Any:
    operation = "upsert" if path == "keyed" else "append"
    url = f"/v1/tables/{path}/transactions"
    begun = await service.call("POST", url, json_body={"operation": operation})
    number = begun.json()["transaction_id"]
    return await service.call("POST", f"{url}/{number}/stage", body=body)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (_rows(price=-(2**127)), "column 'price' of row 1 has a value with more digits than"),
        (_rows(at=2**63 - 1), "column 'at' of row 1 has a value that the lake's partition field"),
        (_rows(id_=-(2**63)), "'id' of row 1 has a value that the lake's partition field truncate"),
    ],
)
async def test_every_write_refuses_what_the_lake_cannot_hold(
    tmp_path: Path, rows: pa.RecordBatch, sentence: str
) -> None:
    async with in_process_service(tmp_path) as service:
        await _create(service, "plain")
        await _create(service, "keyed", primary_key=("id",), bucket_count=2)
        body = append_body(SCHEMA, [(None, 0, rows)])

        answers = [
            await service.call("POST", "/v1/tables/plain/append", body=body),
            await service.call("POST", "/v1/tables/keyed/upsert", body=body),
            await _stage(service, "plain", body),
            await _stage(service, "keyed", body),
        ]

        for answer in answers:
            assert answer.status == 400, answer.body
            error = answer.json()["error"]
            assert error["code"] == "schema_mismatch"
            assert sentence in error["message"]
        count = await service.call("GET", "/v1/tables/keyed/count")
        assert count.json() == {"count": 0}
        good = append_body(SCHEMA, [(None, 0, _rows(at=253_402_300_800_000_000))])
        for url in ("plain/append", "keyed/upsert"):
            taken = await service.call("POST", f"/v1/tables/{url}", body=good)
            assert taken.status == 200, taken.body


async def test_a_row_that_is_no_longer_allowed_may_be_deleted(tmp_path: Path) -> None:
    """It may have come before its table was partitioned so."""

    async with in_process_service(tmp_path) as service:
        await _create(service, "keyed", primary_key=("id",))
        rows = _rows(id_=-(2**63))
        changes = pa.schema([*SCHEMA, pa.field("__change_type", pa.string())])
        batch = rows.append_column("__change_type", pa.array(["+I", "-D"]))
        body = append_body(changes, [(None, 0, batch.cast(changes))])

        answer = await service.call("POST", "/v1/tables/keyed/upsert", body=body)

        assert answer.status == 200, answer.body


async def test_a_table_that_is_partitioned_otherwise_has_other_limits(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        for path, key in (("plain", ()), ("keyed", ("id",))):
            descriptor = TableDescriptor(
                path=TablePath.parse(path), schema=Schema.from_arrow(SCHEMA), primary_key=key
            )
            await service.call("POST", "/v1/tables", json_body=descriptor.to_json())
        body = append_body(SCHEMA, [(None, 0, _rows(at=2**63 - 1))])
        for url in ("plain/append", "keyed/upsert"):
            before = await service.call("POST", f"/v1/tables/{url}", body=body)
            assert before.status == 200, before.body
            path = TablePath.parse(url.partition("/")[0])
            await service.service.manager.alter_partitioning(path, ["hour(at)"])

            after = await service.call("POST", f"/v1/tables/{url}", body=body)

            assert after.status == 400, after.body
