"""Primary key tables over HTTP: what the routes do, what they refuse and how they say so."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TablePath
from tests.support.asgi_call import AsgiAnswer
from tests.support.big_endian import big_endian_stream
from tests.support.in_process_service import (
    EVENTS,
    InProcessService,
    append_body,
    event_rows,
    in_process_service,
    until,
)

KEYS = pa.schema([EVENTS.field("id")])
CHANGES = pa.schema([*EVENTS, pa.field("__change_type", pa.string())])


@contextlib.asynccontextmanager
async def _tables(directory: Path, **config: Any) -> AsyncIterator[InProcessService]:
    async with in_process_service(directory, **config) as service:
        await service.create_table("keyed", primary_key=("id",), bucket_count=2)
        await service.create_table("plain")
        yield service


def _body(schema: pa.Schema, rows: list[dict[str, Any]]) -> bytes:
    return append_body(schema, [(None, 0, pa.RecordBatch.from_pylist(rows, schema=schema))])


async def _post(
    service: InProcessService, verb: str, body: bytes, path: str = "keyed", **query: str
) -> AsgiAnswer:
    return await service.call("POST", f"/v1/tables/{path}/{verb}", query=query, body=body)


def _rows(answer: AsgiAnswer) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.body
    rows: list[dict[str, Any]] = pa.ipc.open_stream(answer.body).read_all().to_pylist()
    return rows


def _ids(*ids: int | None) -> bytes:
    nullable = pa.schema([pa.field("id", pa.int64())])
    return _body(nullable, [{"id": i} for i in ids])


async def test_a_lookup_by_prefix_tells_what_it_has_included(tmp_path: Path) -> None:
    async with _tables(tmp_path) as service:
        await _post(service, "upsert", append_body(EVENTS, [(None, 0, event_rows(0, 6))]))
        table = service.service.readable("keyed")
        ends = {str(b): tablet.high_watermark for b, tablet in enumerate(table.tablets)}

        answer = await _post(service, "prefix_lookup", _ids(4), at_least="{}")

        included = json.loads(answer.headers["x-included-offsets"])
        assert included.items() <= ends.items()
        assert included
        least = {"at_least": json.dumps({"0": 10**6}), "table_id": str(table.info.table_id)}
        lost = await _post(service, "prefix_lookup", _ids(4), **least)
        assert lost.json()["error"]["code"] == "log_cut"


async def test_an_upsert_is_found_by_every_kind_of_lookup(tmp_path: Path) -> None:
    async with _tables(tmp_path) as service:
        answer = await _post(service, "upsert", append_body(EVENTS, [(None, 0, event_rows(0, 6))]))

        assert answer.status == 200
        assert sum(end - start for start, end in answer.json()["buckets"].values()) == 6
        found = _rows(await _post(service, "lookup", _ids(5, 77, 0, 5)))
        assert found == [
            {"id": 5, "name": "n5", "__found": True},
            {"id": None, "name": None, "__found": False},
            {"id": 0, "name": "n0", "__found": True},
            {"id": 5, "name": "n5", "__found": True},
        ]
        row = await service.call("GET", "/v1/tables/keyed/rows/3")
        assert row.json() == {"id": 3, "name": "n3"}
        assert (await service.call("GET", "/v1/tables/keyed/count")).json() == {"count": 6}
        assert _rows(await _post(service, "prefix_lookup", _ids(4))) == [{"id": 4, "name": "n4"}]
        named = _rows(await _post(service, "lookup", _ids(1), columns="name"))
        assert named == [{"name": "n1", "__found": True}]


async def test_nothing_is_shown_before_it_can_be_fetched(
    tmp_path: Path,
) -> None:
    async with _tables(tmp_path) as service:
        await _post(service, "upsert", append_body(EVENTS, [(None, 0, event_rows(0, 6))]))
        table = service.service.table("keyed")
        limit = service.service.manager.waiter_limit
        for log in table.tablets:
            log.high_watermark -= 1

        there = service.start("GET", "/v1/tables/keyed/rows/3")
        missing = service.start("GET", "/v1/tables/keyed/rows/77")
        gone = service.start("GET", "/v1/tables/keyed/rows/3")
        many = asyncio.ensure_future(_post(service, "lookup", _ids(3, 77)))
        await until(lambda: limit.count == 4)
        assert not there[0].answer.status

        # Woken for something else it waits on; who has gone away is not waited for.
        gone[0].disconnect()
        table.wakeups.wake([0, 1])
        assert (await gone[1]).status == 0
        await until(lambda: limit.count == 3)
        for log in table.tablets:
            log.high_watermark += 1
        table.wakeups.wake([0, 1])

        assert (await there[1]).json() == {"id": 3, "name": "n3"}
        assert (await missing[1]).error()[:2] == (404, "row_not_found")
        assert [row["__found"] for row in _rows(await many)] == [True, False]


async def test_a_name_that_is_only_almost_a_tables_is_none(tmp_path: Path) -> None:
    async with _tables(tmp_path) as service:
        assert (
            await _post(service, "upsert", _body(EVENTS, [{"id": 3, "name": "n"}]))
        ).status == 200
        for url in ("/v1/tables/keyed /rows/3", "/v1/tables/ keyed/count"):
            answer = await service.call("GET", url)
            assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_name"), url


async def test_a_change_stream_upserts_deletes_and_ignores_before_images(tmp_path: Path) -> None:
    async with _tables(tmp_path) as service:
        changes = [
            {"id": 1, "name": "a", "__change_type": "+I"},
            {"id": 1, "name": "a", "__change_type": "-U"},
            {"id": 1, "name": "b", "__change_type": "+U"},
            {"id": 2, "name": "x", "__change_type": "c"},
            {"id": 2, "name": None, "__change_type": "d"},
        ]
        assert (await _post(service, "upsert", _body(CHANGES, changes))).status == 200

        found = _rows(await _post(service, "lookup", _ids(1, 2)))
        assert [(row["name"], row["__found"]) for row in found] == [("b", True), (None, False)]


async def test_a_fetch_may_ask_for_changes_without_their_rows(tmp_path: Path) -> None:
    async with _tables(tmp_path) as service:
        for name in ("a", "b"):
            await _post(service, "upsert", _body(EVENTS, [{"id": 1, "name": name}]))
        found = []
        for bucket in (0, 1):
            answer = await service.call(
                "GET",
                f"/v1/tables/keyed/buckets/{bucket}/fetch",
                query={"offset": "0", "columns": "__change_type,__retracts"},
            )
            found += _rows(answer)

        assert [tuple(row.values()) for row in found] == [(1, None), (2, None), (3, 0)]


async def test_a_partial_update_keeps_the_other_columns(tmp_path: Path) -> None:
    async with _tables(tmp_path) as service:
        await _post(service, "upsert", append_body(EVENTS, [(None, 0, event_rows(0, 2))]))

        answer = await _post(service, "upsert", _ids(1, 9), columns='["id"]')

        assert answer.status == 200
        found = _rows(await _post(service, "lookup", _ids(1, 9)))
        assert [row["name"] for row in found] == ["n1", None]


async def test_a_delete_removes_rows_and_says_where_its_changes_are(tmp_path: Path) -> None:
    async with _tables(tmp_path) as service:
        await _post(service, "upsert", append_body(EVENTS, [(None, 0, event_rows(0, 4))]))

        answer = await _post(service, "delete", _ids(0, 3, 99))

        assert sum(end - start for start, end in answer.json()["buckets"].values()) == 2
        assert (await service.call("GET", "/v1/tables/keyed/count")).json() == {"count": 2}
        missing = await service.call("GET", "/v1/tables/keyed/rows/3")
        assert missing.error() == (
            404,
            "row_not_found",
            "table 'default.keyed' has no row {'id': 3}",
        )


@pytest.mark.parametrize(
    ("path", "verb", "body", "query", "code", "message"),
    [
        ("plain", "upsert", _ids(1), {}, "unsupported", "has no primary key"),
        ("plain", "delete", _ids(1), {}, "unsupported", "has no primary key"),
        ("plain", "lookup", _ids(1), {}, "unsupported", "has no primary key"),
        ("keyed", "append", append_body(EVENTS, [(None, 0, event_rows(0, 1))]), {}, "unsupported",
         "'default.keyed' has a primary key: upsert"),
        ("keyed", "upsert", _body(pa.schema([pa.field("id", pa.int64()), EVENTS.field("name")]),
                                  [{"id": 1, "name": "a"}, {"id": None, "name": "b"}]), {},
         "schema_mismatch", "'default.keyed': column 'id' must not be null, but row 1 is"),
        ("keyed", "upsert", _body(pa.schema([EVENTS.field("name")]), [{"name": "a"}]), {},
         "schema_mismatch", "'id'"),
        ("keyed", "upsert", _ids(1), {}, "schema_mismatch", "'name'"),
        ("keyed", "upsert", _ids(1), {"columns": "id,nam"}, "unknown_column",
         "did you mean 'name'"),
        ("keyed", "upsert", _ids(1), {"columns": "name"}, "schema_mismatch",
         "must name the key column 'id'"),
        ("keyed", "upsert", _body(pa.schema([EVENTS.field("id"), pa.field("name", pa.int64())]),
                                  [{"id": 1, "name": 2}]), {},
         "schema_mismatch", "column 'name' is string, but the data has bigint"),
        ("keyed", "upsert", _body(CHANGES, [{"id": 1, "name": "a", "__change_type": "+I"},
                                            {"id": 1, "name": "a", "__change_type": "?"}]), {},
         "schema_mismatch", "__change_type of row 1 is '?'"),
        ("keyed", "upsert", b"nonsense", {}, "invalid_request", ""),
        ("keyed", "upsert", _body(EVENTS, [{"id": 1, "name": "a"}]), {"writer_id": "x"},
         "invalid_request", "writer_id must be"),
        ("keyed", "upsert", _body(EVENTS, [{"id": 1, "name": "a"}]), {"writer_id": "7"},
         "invalid_request", "needs a sequence from 1 on"),
        ("keyed", "delete", _body(EVENTS, [{"id": 1, "name": "a"}]), {}, "schema_mismatch",
         "column 'name' is not part of the key"),
        ("keyed", "delete", _ids(None), {}, "schema_mismatch", "'id' must not be null, but row 0"),
        ("keyed", "lookup", _body(pa.schema([EVENTS.field("name")]), [{"name": "a"}]), {},
         "schema_mismatch", "a lookup takes the key columns (id)"),
        ("keyed", "lookup", _ids(1, None), {}, "schema_mismatch", "must not be null, but row 1"),
        ("keyed", "lookup", _ids(1), {"columns": "nam"}, "unknown_column", "did you mean 'name'"),
        ("keyed", "prefix_lookup", _ids(1, 2), {"limit": "99999"}, "request_too_large",
         "lookup_rows_max"),
        ("keyed", "prefix_lookup", _ids(1), {"limit": "0"}, "invalid_request", "limit"),
    ],
)  # fmt: skip
async def test_bad_input_is_refused_in_one_sentence_and_applies_nothing(
    tmp_path: Path,
    path: str,
    verb: str,
    body: bytes,
    query: dict[str, str],
    code: str,
    message: str,
) -> None:
    async with _tables(tmp_path) as service:
        answer = await _post(service, verb, body, path, **query)

        _, found_code, sentence = answer.error()
        assert found_code == code
        assert message in sentence
        assert "\n" not in sentence
        assert (await service.call("GET", "/v1/tables/keyed/count")).json() == {"count": 0}


async def test_a_request_wrong_in_one_bucket_changes_no_other(tmp_path: Path) -> None:
    async with _tables(tmp_path) as service:
        created = await service.call(
            "POST",
            "/v1/tables",
            json_body={
                "path": "strict",
                "schema": [
                    {"name": "id", "type": "bigint", "nullable": False},
                    {"name": "name", "type": "string", "nullable": False},
                ],
                "primary_key": ["id"],
                "bucket_count": 4,
            },
        )
        assert created.status == 201
        wrong = pa.RecordBatch.from_pylist([{"id": 50, "name": None}], schema=EVENTS)
        body = append_body(EVENTS, [(None, 0, event_rows(0, 50)), (None, 0, wrong)])

        answer = await _post(service, "upsert", body, "strict")

        _, code, message = answer.error()
        assert code == "schema_mismatch"
        # The request's row: not the batch's, nor that of its bucket's part.
        where = "table 'default.strict': column 'name' must not be null, but row 50 is: "
        assert message.startswith(where)
        state = (await service.call("GET", "/v1/tables/strict/state")).json()
        assert {p["high_watermark"] for p in state["positions"].values()} == {0}

        changes = pa.schema([*EVENTS, pa.field("__change_type", pa.string())])
        rows = [{"id": i, "name": "a", "__change_type": "+I"} for i in range(30)]
        rows[7]["__change_type"] = "-D"
        rows[23]["name"] = None
        answer = await _post(service, "upsert", _body(changes, rows), "strict")
        assert "'name' must not be null, but row 23 is" in answer.error()[2]

        long = [{"id": i, "name": "a" if i != 17 else "x" * (9 << 20)} for i in range(20)]
        answer = await _post(service, "upsert", _body(EVENTS, long), "strict")
        assert answer.error()[1] == "request_too_large"
        assert "'default.strict': row 17 has" in answer.error()[2]
        assert (await service.call("GET", "/v1/tables/strict/count")).json() == {"count": 0}


async def test_keys_of_several_types_are_read_from_the_url(tmp_path: Path) -> None:
    async with _tables(tmp_path) as service:
        schema = pa.schema(
            [
                pa.field("name", pa.string(), nullable=False),
                pa.field("day", pa.date32(), nullable=False),
                pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
                pa.field("price", pa.decimal128(5, 2), nullable=False),
                pa.field("raw", pa.binary(), nullable=False),
                pa.field("on", pa.bool_(), nullable=False),
                pa.field("x", pa.float64()),
            ]
        )
        types = ["string", "date", "timestamp", "decimal(5,2)", "binary", "boolean", "double"]
        created = await service.call(
            "POST",
            "/v1/tables",
            json_body={
                "path": "wide",
                "schema": [
                    {"name": f.name, "type": t, "nullable": f.nullable}
                    for f, t in zip(schema, types, strict=True)
                ],
                "primary_key": schema.names[:-1],
                "bucket_count": 3,
            },
        )
        assert created.status == 201, created.body
        row = pa.RecordBatch.from_arrays(
            [
                pa.array(["a/b c"]),
                pa.array([1], pa.int32()).cast(pa.date32()),
                pa.array([1_000_000], pa.int64()).cast(schema.field("at").type),
                pa.array(["1.50"]).cast(schema.field("price").type),
                pa.array([b"\x00\xff"], pa.binary()),
                pa.array([True]),
                pa.array([float("nan")]),
            ],
            schema=schema,
        )
        upserted = await _post(service, "upsert", append_body(schema, [(None, 0, row)]), "wide")
        assert upserted.status == 200, upserted.body

        url = "/v1/tables/wide/rows/a%2Fb%20c/1970-01-02/1970-01-01T00:00:01Z/1.5/00ff/true"
        found = await service.call("GET", url)

        assert found.json() == {
            "name": "a/b c",
            "day": "1970-01-02",
            "at": "1970-01-01T00:00:01+00:00",
            "price": "1.50",
            "raw": "00ff",
            "on": True,
            "x": "NaN",
        }
        wrong = await service.call("GET", url.replace("1970-01-02", "soon"))
        assert wrong.error()[1:] == (
            "invalid_request",
            "table 'default.wide': 'soon' is no value of key column 'day', which is date",
        )
        few = await service.call("GET", "/v1/tables/wide/rows/a")
        assert "one part for each key column" in few.error()[2]


async def test_a_fetch_can_ask_for_change_types_alone(tmp_path: Path) -> None:
    async with _tables(tmp_path) as service:
        await _post(service, "upsert", append_body(EVENTS, [(None, 0, event_rows(0, 9))]))

        answer = await service.call(
            "GET",
            "/v1/tables/keyed/buckets/0/fetch",
            query={"offset": "0", "columns": "__change_type,id"},
        )

        rows = pa.ipc.open_stream(answer.body).read_all()
        assert rows.column_names == ["__change_type", "id"]
        assert set(rows.column("__change_type").to_pylist()) == {1}


async def test_an_append_only_column_of_a_log_table_is_not_there(tmp_path: Path) -> None:
    async with _tables(tmp_path) as service:
        answer = await service.call(
            "GET",
            "/v1/tables/plain/buckets/0/fetch",
            query={"offset": "0", "columns": "__change_type"},
        )

        assert answer.error()[1] == "unknown_column"


async def test_merge_properties_are_checked_at_creation_and_fixed(tmp_path: Path) -> None:
    async with _tables(tmp_path) as service:
        descriptor = {
            "path": "bad",
            "schema": [{"name": "id", "type": "bigint", "nullable": False},
                       {"name": "name", "type": "string"}],
            "primary_key": ["id"],
            "properties": {"table.merge-engine": "aggregation", "fields.name.agg": "sum"},
        }  # fmt: skip
        answer = await service.call("POST", "/v1/tables", json_body=descriptor)
        assert answer.error()[1:] == (
            "invalid_schema",
            "table 'default.bad': property fields.name.agg: sum of column 'name' needs a number,"
            " not string",
        )

        for key, value in (
            ("table.merge-engine", "first_row"),
            ("table.datalake.changelog", "true"),
        ):
            changed = await service.call(
                "PATCH", "/v1/tables/keyed/properties", json_body={"set": {key: value}}
            )
            assert changed.error()[1] == "unsupported"
            assert f"{key} is fixed when the table is created" in changed.error()[2]


async def test_rows_of_any_year_are_found_under_what_their_json_says(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            pa.field("day", pa.date32(), nullable=False),
            pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
            pa.field("local", pa.timestamp("us")),
            pa.field("days", pa.list_(pa.date32())),
        ]
    )
    days = pa.array([-(2**31), 0, 2_932_897, 2**31 - 1], pa.int32()).view(pa.date32())
    moments = pa.array([-(2**63), 0, 253_402_300_800_000_000, 2**63 - 1], pa.int64())
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3, 4], pa.int32()), days)
    columns = [days, moments.view(schema.field("at").type), moments.view(pa.timestamp("us")), lists]
    body = append_body(schema, [(None, 0, pa.RecordBatch.from_arrays(columns, schema=schema))])
    expected = [
        ("-5877641-06-23", "-290308-12-21T19:59:05.224192"),
        ("1970-01-01", "1970-01-01T00:00:00"),
        ("+10000-01-01", "+10000-01-01T00:00:00"),
        ("+5881580-07-11", "+294247-01-10T04:00:54.775807"),
    ]

    async def check(service: InProcessService) -> None:
        for day, at in expected:
            found = await service.call("GET", f"/v1/tables/far/rows/{day}/{at}Z")
            row = {"day": day, "at": f"{at}+00:00", "local": at, "days": [day]}
            assert found.status == 200, found.body
            assert found.json() == row
        missing = await service.call("GET", "/v1/tables/far/rows/+12000-01-01/+12000-01-01")
        assert missing.error()[1] == "row_not_found"
        keys = pa.RecordBatch.from_arrays(columns[:2], schema=pa.schema(list(schema)[:2]))
        found = await _post(service, "lookup", append_body(keys.schema, [(None, 0, keys)]), "far")
        rows = pa.ipc.open_stream(found.body).read_all().combine_chunks()
        assert rows.drop_columns("__found").to_batches()[0].columns == columns

    async with _tables(tmp_path / "a") as service:
        fields = {"primary_key": ("day", "at"), "bucket_key": ("day",), "bucket_count": 3}
        descriptor = TableDescriptor(
            path=TablePath.parse("far"), schema=Schema.from_arrow(schema), **fields
        )
        created = await service.call("POST", "/v1/tables", json_body=descriptor.to_json())
        assert created.status == 201, created.body
        assert (await _post(service, "upsert", body, "far")).status == 200
        await check(service)

    async with in_process_service(tmp_path / "a") as service:
        await check(service)


async def test_rows_of_a_big_endian_machine_are_the_same_rows(tmp_path: Path) -> None:
    schema = pa.schema([EVENTS.field("id"), pa.field("n", pa.int64())])
    rows = pa.table({"id": [1, 2, 300], "n": [-1, 5, 1 << 40]}, schema).to_batches()[0]
    body = big_endian_stream(rows)
    columns = Schema.from_arrow(schema)
    async with in_process_service(tmp_path) as service:
        for name, key in {"log": (), "keyed": ("id",)}.items():
            made = TableDescriptor(path=TablePath.parse(name), schema=columns, primary_key=key)
            await service.call("POST", "/v1/tables", json_body=made.to_json())

        begun = await service.call(
            "POST", "/v1/tables/log/transactions", json_body={"operation": "append"}
        )
        staging = f"transactions/{begun.json()['transaction_id']}"
        staged = await _post(service, f"{staging}/stage", body, path="log")
        part = staged.json()["part"]
        ended = await service.call(
            "POST", f"/v1/tables/log/{staging}/commit", json_body={"parts": [part]}
        )
        appended = await _post(service, "append", body, path="log")
        upserted = await _post(service, "upsert", body)

        assert [a.status for a in (staged, ended, appended, upserted)] == [200] * 4
        keys = big_endian_stream(rows.select(["id"]))
        found = _rows(await _post(service, "lookup", keys))
        assert found == [{**row, "__found": True} for row in rows.to_pylist()]
        pages = [
            await service.call("GET", f"/v1/tables/{name}/buckets/0/fetch", query={"offset": "0"})
            for name in ("log", "keyed")
        ]
        assert _rows(pages[0]) == 2 * rows.to_pylist()
        assert [row["id"] for row in _rows(pages[1])] == [1, 2, 300]
