"""Constraints are judged at every door, and a door that forgets is refused by the engine."""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

from streamhouse.core.errors import CheckFailedError, UnavailableError
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.core.wire.arrow_body import encode_append_body
from streamhouse.storage_service.catalog_door.catalog_door import CatalogDoor
from streamhouse.storage_service.engine.keys.key_bucket import table_rules
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kafka_door._apis import APIS
from streamhouse.storage_service.kafka_door.door import KafkaDoor
from streamhouse.storage_service.kafka_door.registry.registry_door import RegistryDoor
from streamhouse.storage_service.kv.kv_tablet import KvTablet
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite, plan_writes
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.server.routes import ROUTES
from tests.support.kafka_batches import produced, records
from tests.support.kafka_world import KafkaWorld, kafka_world

ROWS: Final = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), pa.field("amount", pa.int64())]
)
CHECK: Final = {"table.check.positive": "amount > 0"}
GOOD: Final = [{"id": 1, "amount": 5}, {"id": 2, "amount": None}]
BAD: Final = [{"id": 3, "amount": 7}, {"id": 4, "amount": -1}]
SENTENCE: Final = "constraint 'positive', CHECK (amount > 0): amount = -1"

Answer = tuple[bool, str]
"""Whether rows were stored, and the answer's text."""
Door = Callable[[KafkaWorld, str, list[dict[str, Any]]], Awaitable[Answer]]


def _arrow(rows: list[dict[str, Any]]) -> bytes:
    batch = pa.RecordBatch.from_pylist(rows, schema=ROWS)
    return encode_append_body(ROWS, [(None, 0, batch)]).to_pybytes()


def _verb(path: str) -> str:
    return "append" if path == "log" else "upsert"


async def _post(
    world: KafkaWorld, path: str, body: bytes, kind: str | None = None, **query: str
) -> Answer:
    headers = {} if kind is None else {"content-type": kind}
    url = f"/v1/tables/{path}/{_verb(path)}"
    answer = await world.http.call("POST", url, body=body, headers=headers, query=query)
    return answer.status == 200, answer.body.decode()


async def _arrow_rows(world: KafkaWorld, path: str, rows: list[dict[str, Any]]) -> Answer:
    return await _post(world, path, _arrow(rows))


async def _json(world: KafkaWorld, path: str, rows: list[dict[str, Any]]) -> Answer:
    return await _post(world, path, json.dumps(rows).encode(), "application/json")


async def _ndjson(world: KafkaWorld, path: str, rows: list[dict[str, Any]]) -> Answer:
    body = "\n".join(map(json.dumps, rows)).encode()
    return await _post(world, path, body, "application/x-ndjson")


async def _csv(world: KafkaWorld, path: str, rows: list[dict[str, Any]]) -> Answer:
    lines = [f"{row['id']},{'' if row['amount'] is None else row['amount']}" for row in rows]
    return await _post(world, path, "\n".join(["id,amount", *lines]).encode(), "text/csv")


async def _repeatable(world: KafkaWorld, path: str, rows: list[dict[str, Any]]) -> Answer:
    return await _post(world, path, _arrow(rows), transaction_id="ab" * 16)


async def _transaction(world: KafkaWorld, path: str, rows: list[dict[str, Any]]) -> Answer:
    base = f"/v1/tables/{path}/transactions"
    begun = await world.http.call("POST", base, json_body={"operation": _verb(path)})
    if begun.status not in (200, 201):
        return False, begun.body.decode()
    one = f"{base}/{begun.json()['transaction_id']}"
    staged = await world.http.call("POST", f"{one}/stage", body=_arrow(rows))
    if staged.status != 200:
        await world.http.call("POST", f"{one}/abort")
        return False, staged.body.decode()
    parts = {"parts": [staged.json()["part"]]}
    answer = await world.http.call("POST", f"{one}/commit", json_body=parts)
    return answer.status == 200, answer.body.decode()


async def _produce(world: KafkaWorld, path: str, rows: list[dict[str, Any]]) -> Answer:
    client = await world.client()
    keys = [json.dumps({"id": row["id"]}).encode() for row in rows] if path == "keys" else None
    kept = ("amount",) if path == "keys" else ("id", "amount")
    values = [json.dumps({name: row[name] for name in kept}).encode() for row in rows]
    batch = produced(records(values, keys=keys))
    topic = {"name": path, "partition_data": [{"index": 0, "records": batch}]}
    answer = await client.call(0, 9, acks=-1, timeout=timedelta(seconds=10), topic_data=[topic])
    (part,) = answer.responses[0].partition_responses
    errors = [e.batch_index_error_message or "" for e in part.record_errors]
    return part.error_code.name == "none", " ".join([part.error_message or "", *errors])


DOORS: Final[dict[str, Door]] = {
    "arrow": _arrow_rows,
    "json": _json,
    "ndjson": _ndjson,
    "csv": _csv,
    "repeatable": _repeatable,
    "transaction": _transaction,
    "kafka": _produce,
}
WRITING_ROUTES: Final = {
    "append": "the doors above",
    "upsert": "the doors above",
    "stage": "door 'transaction'",
    "delete": "deletes are not judged",
    "begin_transaction": "no rows",
    "commit_transaction": "rows of stage",
    "abort_transaction": "no rows",
    "keep_rejected": "no rows",
}
"""Every route for writers, and how its rows are judged: a new route needs an entry, and a test."""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[KafkaWorld]:
    async with kafka_world(tmp_path) as opened:
        await opened.http.create_table("log", ROWS, properties=CHECK)
        await opened.http.create_table("keys", ROWS, primary_key=("id",), properties=CHECK)
        yield opened


def _count(world: KafkaWorld, path: str) -> int:
    return world.service.manager.table(TablePath.parse(path)).row_count


@pytest.mark.parametrize("path", ["log", "keys"])
async def test_every_door_refuses_a_row_that_breaks_a_constraint(
    world: KafkaWorld, path: str
) -> None:
    table = world.service.manager.table(TablePath.parse(path))
    for number, (name, door) in enumerate(DOORS.items(), 1):
        is_stored, text = await door(world, path, [{**row, "id": number} for row in BAD])

        assert not is_stored, name
        assert SENTENCE in text, (name, text)
        ids = range(100 * number, 100 * number + 2)
        good = [{**row, "id": row_id} for row, row_id in zip(GOOD, ids, strict=True)]
        is_stored, text = await door(world, path, good)
        assert is_stored, (name, text)
        assert _count(world, path) == 2 * number, name
        assert table.broken_rows["positive", "refused"] == number, name


def test_every_route_for_writers_has_an_entry_above() -> None:
    names = {
        route.name
        for route in (*ROUTES, *CatalogDoor.routes, *KafkaDoor.routes, *RegistryDoor.routes)
        if route.need == "write:{path}" and route.name and route.method != "GET"
    }
    assert names == set(WRITING_ROUTES)
    assert {api.name for api in APIS.values() if api.is_write} >= {"produce"}


def test_batches_for_a_log_are_made_by_modules_that_judge() -> None:
    package = Path(__file__).parents[4] / "storage_service"
    makers = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "RoutedBatch"
    }
    assert makers == {
        "server/data/row_routing.py",  # judges
        "server/data/_stage_route.py",  # judges by `check_rows`, or in the commit's rehearsal
        "engine/keys/_key_planner.py",  # of planned rows, which were judged
        "engine/transactions/_transaction_commit.py",  # of staged rows, which were judged
        "log/staged_part.py",  # of staged rows, which were judged
    }


async def test_a_door_that_does_not_judge_is_refused(world: KafkaWorld) -> None:
    manager = world.service.manager
    rows = pa.RecordBatch.from_pylist(GOOD, schema=ROWS)
    batch = RoutedBatch(0, rows.num_rows, memoryview(rows.serialize()))
    for path in ("log", "keys"):
        table = manager.table(TablePath.parse(path))
        transactions = manager.transactions.of(table)
        operation = "upsert" if isinstance(table, KeyTable) else "append"
        transaction_id, _ = await transactions.begin(
            operation, columns=None, app_id=None, version=None, timeout_ms=None
        )
        with pytest.raises(UnavailableError, match="not judged by"):
            await transactions.stage(transaction_id, rows.schema, [batch], token=None)
    with pytest.raises(UnavailableError, match="not judged by"):
        await manager.append(manager.table(TablePath.parse("log")), [batch])
    assert _count(world, "log") == 0


async def test_a_row_that_breaks_a_constraint_is_kept_with_its_name(world: KafkaWorld) -> None:
    body = {"set": {"kafka.on.error": "reject"}}
    await world.http.call("PATCH", "/v1/tables/log/properties", json_body=body)
    lines = "\n".join(map(json.dumps, BAD)).encode()
    bodies: tuple[tuple[bytes, str | None], ...] = (
        (_arrow(BAD), None),
        (json.dumps(BAD).encode(), "application/json"),
        (lines, "application/x-ndjson"),
        (b"id,amount\n3,7\n4,-1", "text/csv"),
    )
    for data, kind in bodies:
        is_stored, text = await _post(world, "log", data, kind, on_error="reject")
        assert is_stored, text
    assert (await _produce(world, "log", BAD))[0]

    assert _count(world, "log") == 5
    rejected = _changes(world, "log__rejected")
    assert len(rejected) == 5
    for row in rejected:
        assert SENTENCE in row["reason"]
        assert (row["column"], json.loads(row["row"])) == ("amount", {"id": 4, "amount": -1})
    table = world.service.manager.table(TablePath.parse("log"))
    assert table.broken_rows == {("positive", "rejected"): 5}
    metrics = await world.http.call("GET", "/metrics")
    line = b'streamhouse_broken_rows_total{constraint="positive",how="rejected"'
    assert line in metrics.body
    status = (await world.http.call("GET", "/v1/status", query={"table": "log"})).json()
    assert status["tables"][0]["constraints"] == [
        {"name": "positive", "predicate": "amount > 0", "refused_rows": 0, "rejected_rows": 5}
    ]


def _changes(world: KafkaWorld, path: str) -> list[dict[str, Any]]:
    table = world.service.manager.table(TablePath.parse(path))
    frames = table.tablets[0].read(0, bytes_max=1 << 20)
    info = table.info
    batches = (table.rows_of(frame, info, schema_id=info.schema_id) for frame in frames)
    return [row for batch in batches for row in batch.to_pylist()]


async def _upsert(world: KafkaWorld, path: str, rows: list[dict[str, Any]], **query: str) -> Answer:
    batch = pa.RecordBatch.from_pylist(rows)
    body = encode_append_body(batch.schema, [(None, 0, batch)]).to_pybytes()
    answer = await world.http.call("POST", f"/v1/tables/{path}/upsert", body=body, query=query)
    return answer.status == 200, answer.body.decode()


@pytest.mark.parametrize("count", [1, 300])
async def test_a_partial_update_is_judged_as_the_row_will_be(world: KafkaWorld, count: int) -> None:
    wide = pa.schema([*ROWS, pa.field("least", pa.int64())])
    properties = {"table.check.enough": "amount >= least"}
    await world.http.create_table("wide", wide, primary_key=("id",), properties=properties)
    rows = [{"id": i, "amount": 5, "least": 3} for i in range(count)]
    assert (await _upsert(world, "wide", rows))[0]

    lower = [{"id": i, "amount": 2 if i == count - 1 else 4} for i in range(count)]
    is_stored, text = await _upsert(world, "wide", lower, columns="id,amount")

    assert not is_stored
    last = count - 1
    assert f"row {last} breaks constraint 'enough', CHECK (amount >= least)" in text
    assert "amount = 2, least = 3" in text
    both = [{"id": i, "amount": 4} for i in range(count)]
    assert (await _upsert(world, "wide", both, columns="id,amount"))[0]
    # A null in a column that the update leaves passes.
    nulls = [{"id": count + i, "amount": -9} for i in range(count)]
    assert (await _upsert(world, "wide", nulls, columns="id,amount"))[0]


async def test_sums_are_judged_and_deletes_are_not(world: KafkaWorld) -> None:
    engine = {"table.merge-engine": "aggregation", "fields.amount.agg": "sum"}
    properties = {**engine, "table.delete.behavior": "allow", "table.check.some": "amount <= 10"}
    await world.http.create_table("sums", ROWS, primary_key=("id",), properties=properties)
    assert (await _upsert(world, "sums", [{"id": 1, "amount": 8}]))[0]

    is_stored, text = await _upsert(world, "sums", [{"id": 1, "amount": 3}])

    assert (is_stored, "amount = 11" in text) == (False, True)
    changes = [{"id": 1, "amount": 99, "__change_type": "-D"}]
    assert (await _upsert(world, "sums", changes))[0]
    # What a transaction merges is judged before its decision.
    assert (await _upsert(world, "sums", [{"id": 1, "amount": 8}]))[0]
    is_stored, text = await _transaction(world, "sums", [{"id": 1, "amount": 3}])
    assert (is_stored, "amount = 11" in text) == (False, True)


async def _set(world: KafkaWorld, path: str, **properties: str) -> tuple[int, str]:
    body = {"set": {f"table.check.{key}": value for key, value in properties.items()}}
    answer = await world.http.call("PATCH", f"/v1/tables/{path}/properties", json_body=body)
    return answer.status, answer.body.decode()


@pytest.mark.parametrize("path", ["log", "keys"])
async def test_a_constraint_is_added_if_the_rows_hold_it(world: KafkaWorld, path: str) -> None:
    rows = [{"id": i, "amount": i + 1} for i in range(2_000)]
    assert (await _arrow_rows(world, path, rows))[0]

    status, text = await _set(world, path, small="amount < 1990")

    assert status == 400
    assert "11 of its rows break constraint 'small', CHECK (amount < 1990)" in text
    assert "nothing was changed" in text
    assert (await _arrow_rows(world, path, [{"id": 9_000, "amount": 5_000}]))[0]
    assert (await _set(world, path, small="amount < 10_000"))[0] == 400
    assert (await _set(world, path, small="amount < 10000"))[0] == 200
    assert not (await _arrow_rows(world, path, [{"id": 9_001, "amount": 10_000}]))[0]
    status, _ = await _set(world, path, **{"less": "amount < 10", "less.existing": "not enforced"})
    assert status == 200
    assert not (await _arrow_rows(world, path, [{"id": 9_002, "amount": 11}]))[0]
    # Enforced for existing rows as well from now on: they are checked.
    answer = await world.http.call(
        "PATCH",
        f"/v1/tables/{path}/properties",
        json_body={"remove": ["table.check.less.existing"]},
    )
    assert (answer.status, b"1992 of its rows break" in answer.body) == (400, True)
    removed = {"remove": ["table.check.less"]}
    answer = await world.http.call("PATCH", f"/v1/tables/{path}/properties", json_body=removed)
    assert "table.check.less.existing" not in answer.json()["properties"]
    assert (await _arrow_rows(world, path, [{"id": 9_002, "amount": 11}]))[0]


async def test_a_constraint_waits_for_no_open_transaction_for_long(world: KafkaWorld) -> None:
    base = "/v1/tables/keys/transactions"
    begun = await world.http.call("POST", base, json_body={"operation": "upsert"})
    status, text = await _set(world, "keys", small="amount < 3")
    assert (status, "transactions are open" in text) == (400, True)
    adding = asyncio.ensure_future(_set(world, "keys", small="amount < 3"))
    await world.http.call("POST", f"{base}/{begun.json()['transaction_id']}/abort")

    assert (await adding)[0] == 200

    assert not (await _arrow_rows(world, "keys", GOOD))[0]


@pytest.mark.parametrize("path", ["log", "keys"])
async def test_writes_beside_an_added_constraint_never_leave_a_row_that_breaks_it(
    world: KafkaWorld, path: str
) -> None:
    doors = (_arrow_rows, _json, _transaction)
    for attempt in range(8):
        limit, is_late = 100 - attempt, bool(attempt % 2)
        table = world.service.manager.table(TablePath.parse(path))
        adding = asyncio.ensure_future(_set(world, path, limited=f"amount < {limit}"))

        async def write(
            number: int,
            table: OpenTable = table,
            adding: asyncio.Future[tuple[int, str]] = adding,
            attempt: int = attempt,
            is_late: bool = is_late,
            limit: int = limit,
        ) -> None:
            # Late writers begin while the change holds the table; others at any step.
            turns = number * attempt * 10
            while turns > 0 or (is_late and not table.gate.is_stopped and not adding.done()):
                await asyncio.sleep(0)
                turns -= 1
            await doors[number % 3](world, path, [{"id": number, "amount": limit}])

        await _arrow_rows(world, path, [{"id": 100, "amount": limit - 1}])
        await asyncio.gather(*(write(number) for number in range(9)))
        status, _ = await adding
        assert status == 200 or not is_late
        if status == 200:
            assert [row["amount"] for row in _changes(world, path)] == [limit - 1]
        await world.http.call("DELETE", f"/v1/tables/{path}")
        key: dict[str, Any] = {"primary_key": ("id",)} if path == "keys" else {}
        await world.http.create_table(path, ROWS, properties=CHECK, **key)


BAD_PREDICATES: Final = [
    ("price > 0", "no column 'price'"),
    ("amount > 'x'", "'x'"),
    ("amount > current_date()", "not supported"),
    ("amount + 1 > 0", "not supported"),
    ("1 = 1", "names no column"),
    ("__offset > 3", "no column of a row that is written"),
    ("amount >", "not a SQL expression"),
    ("amount = 1 OR " * 400 + "TRUE", "at most 4096"),
]


async def test_a_bad_predicate_is_refused(world: KafkaWorld) -> None:
    schema = world.service.manager.table(TablePath.parse("log")).info.schema.to_json()
    for predicate, why in BAD_PREDICATES:
        status, text = await _set(world, "log", bad=predicate)
        assert (status, "constraint 'bad'" in text, why in text) == (400, True, True), text
        properties = {"table.check.bad": predicate}
        body = {"path": "other", "schema": schema, "properties": properties}
        answer = await world.http.call("POST", "/v1/tables", json_body=body)
        assert answer.status == 400


async def test_names_and_the_number_of_constraints_are_checked(world: KafkaWorld) -> None:
    for name in ("", "a b", "1a", "a.b", "existing.existing.existing"):
        status, text = await _set(world, "log", **{name: "amount > 0"})
        assert (status, "constraint" in text) == (400, True), text
    status, text = await _set(world, "log", **{f"c{n}": "amount > 0" for n in range(33)})
    assert (status, "at most 32" in text) == (400, True)
    assert "same name" in (await _set(world, "log", POSITIVE="amount > 0"))[1]


async def test_a_column_of_a_constraint_stays(world: KafkaWorld) -> None:
    url, rename = "/v1/tables/log/schema", {"rename": "amount", "to": "price"}
    for changes in (
        [rename],
        [{"drop": "amount", "confirm": "amount"}],
        [rename, {"add": "amount", "type": "bigint"}],
    ):
        answer = await world.http.call("PATCH", url, json_body={"changes": changes})
        assert answer.status == 400
        assert b"constraint 'positive', CHECK (amount > 0)" in answer.body


async def test_rows_of_an_earlier_schema_are_judged_in_the_current(world: KafkaWorld) -> None:
    add = {"changes": [{"add": "size", "type": "bigint"}]}
    await world.http.call("PATCH", "/v1/tables/log/schema", json_body=add)
    assert (await _set(world, "log", sized="size IS NOT NULL"))[0] == 200

    is_stored, text = await _arrow_rows(world, "log", GOOD)

    assert (is_stored, "size = NULL" in text) == (False, True)


def test_what_is_decided_or_in_the_log_is_not_judged_again(tmp_path: Path) -> None:
    schema = Schema.from_arrow(ROWS)
    descriptor = TableDescriptor(
        path=TablePath.parse("t"), schema=schema, primary_key=("id",), properties=CHECK
    )
    rules = table_rules(TableInfo(descriptor=descriptor, table_id=1, created_at_us=0))
    for count in (1, 300):
        tablet = KvTablet(tmp_path / str(count), table_id=1, bucket=0, rules=rules)
        rows = pa.RecordBatch.from_pylist(
            [{"id": number, "amount": -1} for number in range(count)], schema=ROWS
        )
        with pytest.raises(CheckFailedError):
            plan_writes([tablet], [KeyWrite(0, rows)], columns=None)

        (part,) = plan_writes([tablet], [KeyWrite(0, rows)], columns=None, is_decided=True)
        tablet.replay(part.changelog, base_offset=0)

        assert tablet.row_count == count
        tablet.close()


async def test_clauses_of_columns_are_refused_over_http(world: KafkaWorld) -> None:
    for column, why in (
        ({"name": "a", "type": "int", "default": 5}, "DEFAULT is not supported"),
        ({"name": "a", "type": "int default 5"}, "DEFAULT is not supported"),
        ({"name": "a", "type": "int generated always as identity"}, "IDENTITY is not supported"),
        ({"name": "a", "type": "int", "generated": "b + 1"}, "GENERATED is not supported"),
        ({"name": "a", "type": "int", "widht": 3}, "has no field 'widht'"),
    ):
        body = {"path": "other", "schema": [column]}
        answer = await world.http.call("POST", "/v1/tables", json_body=body)
        assert (answer.status, why in answer.body.decode()) == (400, True), answer.body
        if column.get("default"):
            continue  # An added column can have one.
        add = {"changes": [{"add": "a", **{k: v for k, v in column.items() if k != "name"}}]}
        answer = await world.http.call("PATCH", "/v1/tables/log/schema", json_body=add)
        assert answer.status == 400
