"""Appends over HTTP: routing to buckets, idempotence, and every way to be refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.model.bucketing import buckets_for_rows
from streamhouse.core.wire.arrow_body import decode_fetch_body
from tests.support.in_process_service import (
    EVENTS,
    InProcessService,
    append_body,
    event_rows,
    in_process_service,
)


async def _ids(service: InProcessService, bucket: int) -> list[int]:
    answer = await service.call(
        "GET", f"/v1/tables/events/buckets/{bucket}/fetch", query={"offset": "0"}
    )
    body = decode_fetch_body(pa.py_buffer(answer.body))
    assert body is not None
    return [id_ for _, batch in body.batches for id_ in batch.column("id").to_pylist()]


async def test_rows_for_named_buckets_go_there_in_order(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table(bucket_count=3)

        answer = await service.append(
            [(2, 0, event_rows(0, 3)), (0, 0, event_rows(3, 5)), (2, 0, event_rows(5, 6))]
        )

        assert answer.json()["buckets"] == {"2": [0, 4], "0": [0, 2]}
        assert await _ids(service, 2) == [0, 1, 2, 5]
        assert await _ids(service, 0) == [3, 4]


async def test_rows_without_a_bucket_go_where_the_bucket_key_says(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table(bucket_count=4, bucket_key=("id",))
        rows = event_rows(0, 100)

        answer = await service.append([(None, 0, rows)])

        wanted = buckets_for_rows(rows, ["id"], 4).tolist()
        for bucket in range(4):
            ids = [id_ for id_, b in enumerate(wanted) if b == bucket]
            assert await _ids(service, bucket) == ids
            assert answer.json()["buckets"][str(bucket)] == [0, len(ids)]


async def test_rows_without_a_bucket_or_key_are_spread_evenly(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, spread_rows_min=10) as service:
        await service.create_table(bucket_count=4)

        large = await service.append([(None, 0, event_rows(0, 100))])
        small = [await service.append([(None, 0, event_rows(i, i + 1))]) for i in range(4)]

        assert {b: e - s for b, (s, e) in large.json()["buckets"].items()} == dict.fromkeys(
            "0123", 25
        )
        # Rows that are too few to share out take turns.
        assert {next(iter(a.json()["buckets"])) for a in small} == set("0123")


@pytest.mark.parametrize("inline_bytes_max", [1, 1 << 20])
async def test_large_and_small_bodies_are_handled_alike(
    tmp_path: Path, inline_bytes_max: int
) -> None:
    async with in_process_service(tmp_path, inline_bytes_max=inline_bytes_max) as service:
        await service.create_table()
        await service.append([(0, 0, event_rows(0, 500))])

        assert await _ids(service, 0) == list(range(500))


async def test_a_repeated_batch_is_stored_once(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()

        answers = [
            await service.append([(0, 1, event_rows(0, 3))], writer_id="ab") for _ in range(3)
        ]

        assert [a.json()["buckets"] for a in answers] == [{"0": [0, 3]}] * 3
        assert await _ids(service, 0) == [0, 1, 2]
        gap = await service.append([(0, 3, event_rows(0, 3))], writer_id="ab")
        assert gap.error()[:2] == (409, "out_of_order_sequence")


async def test_a_body_without_rows_is_fine(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        for parts in ([], [(0, 0, event_rows(0, 0))]):
            answer = await service.append(parts)
            assert (answer.status, answer.json()["buckets"]) == (200, {})


def _wrong_schema(*fields: pa.Field) -> bytes:
    schema = pa.schema(list(fields))
    columns = [pa.nulls(1, field.type) for field in fields]
    return append_body(schema, [(0, 0, pa.record_batch(columns, schema=schema))])


ROWS = event_rows(0, 3)
BAD_BODIES: Sequence[tuple[bytes, int, str, str]] = [
    (b"", 400, "invalid_request", "the body is not an Arrow IPC stream"),
    (b"hello world, no arrow", 400, "invalid_request", "the body is not an Arrow IPC stream"),
    (append_body(EVENTS, [(0, 0, ROWS)])[:-60], 400, "invalid_request", "bad message at byte"),
    (append_body(EVENTS, [(4, 0, ROWS)]), 404, "bucket_not_found", "has no bucket 4; its buck"),
    (
        _wrong_schema(pa.field("id", pa.string()), pa.field("name", pa.string())),
        400,
        "schema_mismatch",
        "column 'id' is bigint, but the data has string",
    ),
    (
        _wrong_schema(pa.field("id", pa.int64()), pa.field("nam", pa.string())),
        400,
        "unknown_column",
        "has no column 'nam'; did you mean 'name'?",
    ),
    (_wrong_schema(pa.field("id", pa.int64())), 400, "schema_mismatch", "'name' is missing"),
    (
        _wrong_schema(pa.field("id", pa.int64()), pa.field("name", pa.string())),
        400,
        "schema_mismatch",
        "column 'id' must not be null, but row 0 is",
    ),
    (append_body(EVENTS, [(0, 1, ROWS)]), 400, "invalid_request", "needs the parameter writer_id"),
    (
        append_body(EVENTS, [(0, 0, ROWS)] * 4),
        413,
        "request_too_large",
        "more than 3 batches in one request",
    ),
    (
        append_body(EVENTS, [(0, 0, event_rows(0, 200))] * 2),
        413,
        "request_too_large",
        "400 rows in one request; at most 300",
    ),
    (
        append_body(EVENTS, [(0, 0, event_rows(0, 290))]),
        413,
        "request_too_large",
        "at most 4096, send smaller batches",
    ),
]


@pytest.mark.parametrize(("body", "status", "code", "message"), BAD_BODIES)
async def test_a_bad_body_is_refused_in_one_sentence_and_stores_nothing(
    tmp_path: Path, body: bytes, status: int, code: str, message: str
) -> None:
    limits = {"append_rows_max": 300, "append_batches_max": 3, "batch_bytes_max": 4_096}
    async with in_process_service(tmp_path, **limits) as service:
        await service.create_table(bucket_count=4)

        answer = await service.call("POST", "/v1/tables/events/append", body=body)

        assert answer.error()[:2] == (status, code)
        assert message in answer.error()[2]
        assert "default.events" in answer.error()[2] or "the body" in answer.error()[2]
        (table,) = service.service.manager.open_tables()
        assert [tablet.high_watermark for tablet in table.tablets] == [0] * 4


async def test_rows_in_a_bucket_that_is_not_theirs_are_refused(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table(bucket_count=4, bucket_key=("id",))
        rows = event_rows(0, 50)
        right = buckets_for_rows(rows, ["id"], 4)
        first_wrong = next(i for i, bucket in enumerate(right.tolist()) if bucket != 1)

        answer = await service.append([(1, 0, rows)])

        assert answer.error() == (
            400,
            "schema_mismatch",
            f"append to 'default.events': row {first_wrong} of the batch for bucket 1 belongs"
            " to another bucket by the bucket key id",
        )
        mine = rows.filter(pa.array(right == 1))
        assert (await service.append([(1, 0, mine)])).status == 200


@pytest.mark.parametrize(
    ("parts", "writer_id", "message"),
    [
        ([(0, 0, ROWS)], "ab", "with writer_id every batch needs a sequence from 1 on"),
        ([(None, 1, ROWS)], "ab", "a batch with a sequence must name its bucket"),
        ([(0, 1 << 63, ROWS)], "ab", "9223372036854775808 is no sequence; they count batches"),
        ([(0, 1, ROWS)], "0", "writer_id must be 1 to 16 hexadecimal digits and not 0"),
        ([(0, 1, ROWS)], "xyz", "writer_id must be 1 to 16 hexadecimal digits and not 0"),
        ([(0, 1, ROWS)], "1" * 17, "writer_id must be 1 to 16 hexadecimal digits and not 0"),
    ],
)
async def test_half_an_idempotent_append_is_refused(
    tmp_path: Path, parts: Any, writer_id: str, message: str
) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        answer = await service.append(parts, writer_id=writer_id)
        assert answer.error()[:2] == (400, "invalid_request")
        assert message in answer.error()[2]


async def test_more_than_the_disk_can_take_is_refused_for_now(tmp_path: Path) -> None:
    sizes = dict.fromkeys(("batch_bytes_max", "body_bytes_max", "commit_queue_bytes_max"), 100_000)
    async with in_process_service(tmp_path, **sizes) as service:
        await service.create_table()
        appends = [service.append([(0, 0, event_rows(0, 3_000))]) for _ in range(40)]

        answers = await asyncio.gather(*appends)

        refused = [a for a in answers if a.status != 200]
        assert refused, "40 appends of 70 kB do not fit into a queue of 100 kB"
        assert {a.error()[:2] for a in refused} == {(503, "overloaded")}
        stored = 3_000 * (len(answers) - len(refused))
        (table,) = service.service.manager.open_tables()
        assert table.tablet(0).high_watermark == stored
