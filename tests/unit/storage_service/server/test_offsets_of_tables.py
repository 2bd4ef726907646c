"""Every request with an offset or an epoch says of which table; of a dropped one it is refused.

The routes are walked: a parameter or a field that a route gets is an offset or is none, and whoever
adds one says so here. A route with offsets takes `table_id`, and has a request below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pytest

from streamhouse.storage_service.server.routes import Answer
from tests.support.asgi_call import AsgiAnswer
from tests.support.in_process_service import (
    EVENTS,
    ROUTE_TABLE,
    InProcessService,
    append_body,
    event_rows,
    in_process_service,
)

OFFSETS: Final = frozenset(
    (
        *("after", "at_least", "end_offset", "offset", "offsets", "read_offsets", "start"),
        *("expired_offsets", "tiered_offsets", "truncated_offsets"),
    )
)
"""Names of parameters and fields that are offsets."""
EPOCHS: Final = frozenset(("epoch",))
"""Names of those that are epochs of a claim: each table counts its own."""
NO_OFFSETS: Final = frozenset(
    re.findall(
        r"\w+",
        """
        app_id batch broken catalog changelog changes columns
        damaged data_files database debt delete_files deleted_share detail dry_run
        durable error expired_at_us fingerprint fingerprints first_row force format
        include_idle is_whole isolation join keep_lease lost lake lake_snapshot_id
        lake_table_uuid limit maintained_at_us maintenance_due_us maintenance_error
        max_bytes max_wait_ms name needed_files on_error operation part partitioned_by
        parts read_from reads_lake rejected remove replace round_files round_rows rounds rows_done
        rows_planned run schema_id set small_files snapshot_id snapshots source step table
        table_id table_uuid tables ticket timeout_ms timestamp_us to token
        transaction_id ttl_ms version with_lake worker_id writer_id
        """,
    )
)
"""Names of all others."""
EARLY: Final = str(10**13)
"""A time before all rows: the least that is one in microseconds."""
EVENTS_PATH: Final = "/v1/tables/events"
KEYED: Final = "keyed"
ID: Final = pa.schema([EVENTS.field("id")])
FETCH: Final = f"{EVENTS_PATH}/buckets/0/fetch"
SUBSCRIBE: Final = f"{EVENTS_PATH}/subscribe"
_PLACES: Final = {"path": "events", "bucket": "0", "name": "reader", "transaction_id": "0" * 32}


class Request(NamedTuple):
    """A request with an offset of a table, whose id is sent with it."""

    method: str
    path: str
    query: Mapping[str, str] = {}
    body: Mapping[str, Any] | None = None
    keys: bytes = b""
    """A body that is no JSON."""

    @property
    def table(self) -> str:
        """The table of the request."""
        return KEYED if f"/{KEYED}/" in self.path else "events"

    async def send(
        self, service: InProcessService, table_id: int | None, transaction: str = "0" * 32
    ) -> AsgiAnswer:
        """Send it, the offsets being of the table with this id."""
        said = {} if table_id is None else {"table_id": table_id}
        path = self.path.format(transaction=transaction)
        if self.body is not None:
            body = {**self.body, **said}
            return await service.call(self.method, path, query=self.query, json_body=body)
        query = {**self.query, **{name: str(value) for name, value in said.items()}}
        if self.keys:
            return await service.call(self.method, path, query=query, body=self.keys)
        call, answering = service.start(self.method, path, query=query)
        # What is pushed has no end: its beginning is answer enough.
        if path == SUBSCRIBE:
            await call.sent(1)
            call.disconnect()
        return await answering


COMPLETE: Final = {
    "table": "events",
    "epoch": 1,
    "lake_snapshot_id": "1",
    "lake_table_uuid": "u",
    "tiered_offsets": {"0": 3},
}
COMPARE: Final = {"table": "events", "offsets": {"0": 3}}
HEARTBEAT: Final = {"table": "events", "epoch": 1}
FAIL: Final = {"table": "events", "epoch": 1, "error": "late"}
COMMIT: Final = f"{EVENTS_PATH}/transactions/{{transaction}}/commit"
CONSUMER: Final = f"{EVENTS_PATH}/consumers/reader"
HISTORY: Final = f"{EVENTS_PATH}/lake/history"
LEAST: Final = {"at_least": '{"0": 3}'}
KEYS: Final = append_body(ID, [(None, 0, pa.record_batch([pa.array([1], pa.int64())], schema=ID))])
REQUESTS: Final = {
    "fetch": Request("GET", FETCH, {"offset": "3"}),
    "fetch up to": Request("GET", FETCH, {"offset": "0", "end_offset": "3"}),
    "subscribe": Request("GET", SUBSCRIBE, {"start": '{"0": 3}'}),
    "row": Request("GET", f"/v1/tables/{KEYED}/rows/1", LEAST),
    "lookup": Request("POST", f"/v1/tables/{KEYED}/lookup", LEAST, keys=KEYS),
    "prefix_lookup": Request("POST", f"/v1/tables/{KEYED}/prefix_lookup", LEAST, keys=KEYS),
    "offsets_for_timestamp": Request(
        "GET", f"{EVENTS_PATH}/offsets", {"timestamp_us": EARLY, "start": '{"0": 3}'}
    ),
    "table_state": Request("GET", f"{EVENTS_PATH}/state", {"after": '{"0": 3}'}),
    "report_position": Request("PUT", CONSUMER, {}, {"offsets": {"0": 3}}),
    "commit_transaction": Request("POST", COMMIT, {}, {"parts": [], "read_offsets": {"0": 3}}),
    "check_lake_history": Request("POST", HISTORY, {}, {"tiered_offsets": {"0": 3}}),
    "complete": Request("POST", "/v1/tiering/complete", {}, COMPLETE),
    "compare_history": Request("POST", "/v1/tiering/history", {}, COMPARE),
    "heartbeat": Request("POST", "/v1/tiering/heartbeat", {}, HEARTBEAT),
    "fail": Request("POST", "/v1/tiering/fail", {}, FAIL),
}
"""By the function that answers, the words after it besides."""
OF_WORKERS: Final = ("complete", "compare_history", "heartbeat", "fail")
"""They take no request at all without the table's id."""


async def _parameters(service: InProcessService) -> dict[str, set[str]]:
    """Return the parameters and fields of each route, by the function that answers it."""
    spec = (await service.call("GET", "/openapi.json")).json()
    schemas = spec["components"]["schemas"]
    found = {
        route.name: _described(spec["paths"][route.path][route.method.lower()], schemas)
        for route in ROUTE_TABLE.rows
        if route.answer is Answer.CONTROL and route.name != "page"
    }
    for route in ROUTE_TABLE.rows:
        if route.answer is Answer.DATA:
            path = route.path.replace("...", "1").format_map(_PLACES)
            answer = await service.call(route.method, path, query={"unknown": "1"})
            known = re.search(r"\((?:known: (.*)|the route takes none)\)", answer.error()[2])
            assert known is not None, answer.body
            found[route.name] = set(filter(None, (known[1] or "").split(", ")))
    return found


def _described(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> set[str]:
    asked = operation.get("parameters", [])
    return {one["name"] for one in asked if one["in"] == "query"} | set(
        _fields(operation.get("requestBody", {}), schemas)
    )


def _fields(described: Any, schemas: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields of a body, and those of the objects in it."""
    if isinstance(described, list):
        for one in described:
            yield from _fields(one, schemas)
    if isinstance(described, dict):
        if "$ref" in described:
            yield from _fields(schemas[described["$ref"].rpartition("/")[2]], schemas)
        yield from described.get("properties", ())
        for one in described.values():
            yield from _fields(one, schemas)


async def _recreated(service: InProcessService, table: str = "events") -> tuple[int, int]:
    """Make tables, drop them and make them again, as long as before; return both ids of one."""
    ids = []
    for _ in range(2):
        for path in ("events", KEYED):
            await service.call("DELETE", f"/v1/tables/{path}")
        made = {
            "events": (await service.create_table())["table_id"],
            KEYED: (await service.create_table(KEYED, primary_key=("id",)))["table_id"],
        }
        await service.append([(0, 0, event_rows(0, 5))])
        rows = append_body(EVENTS, [(None, 0, event_rows(0, 5))])
        await service.call("POST", f"/v1/tables/{KEYED}/upsert", body=rows)
        ids.append(made[table])
    return ids[0], ids[1]


async def _begun(service: InProcessService) -> str:
    answer = await service.call(
        "POST", f"{EVENTS_PATH}/transactions", json_body={"operation": "append"}
    )
    return str(answer.json()["transaction_id"])


async def test_every_route_with_an_offset_takes_the_id_of_its_table(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        await service.create_table("keyed", primary_key=("id",))
        parameters = await _parameters(service)

    every = {name for names in parameters.values() for name in names}
    assert every == OFFSETS | EPOCHS | NO_OFFSETS, "say of each whether it is an offset"
    of_one_table = OFFSETS | EPOCHS
    with_offsets = {name for name, names in parameters.items() if names & of_one_table}
    assert {name for name in with_offsets if "table_id" not in parameters[name]} == set()
    assert with_offsets == {name.partition(" ")[0] for name in REQUESTS}


@pytest.mark.parametrize("name", REQUESTS)
async def test_an_offset_of_a_dropped_table_is_refused(tmp_path: Path, name: str) -> None:
    request = REQUESTS[name]
    async with in_process_service(tmp_path) as service:
        old, new = await _recreated(service, request.table)
        refused = (await request.send(service, old, await _begun(service))).error()
        taken = await request.send(service, new, await _begun(service))

    assert old != new
    if name == "commit_transaction":
        assert refused[:2] == (409, "commit_conflict")
    else:
        assert refused[:2] == (404, "table_not_found")
    if name not in OF_WORKERS:
        assert "dropped and created again" in refused[2]
        assert f"(table id {old}, now {new})" in refused[2]
    assert b"table id" not in taken.body


@pytest.mark.parametrize("name", [name for name in REQUESTS if name not in OF_WORKERS])
async def test_an_offset_without_a_table_is_refused_and_the_beginning_is_not(
    tmp_path: Path, name: str
) -> None:
    request = REQUESTS[name]
    beginning = Request(
        request.method,
        request.path,
        {key: value.replace("3", "0") for key, value in request.query.items()},
        None if request.body is None else json.loads(json.dumps(request.body).replace("3", "0")),
    )
    async with in_process_service(tmp_path) as service:
        _, table_id = await _recreated(service, request.table)
        refused = (await request.send(service, None, await _begun(service))).error()
        taken = await beginning.send(service, None, await _begun(service))

    assert refused[:2] == (400, "invalid_request")
    assert "offset 3 comes without table_id" in refused[2]
    assert f"has {table_id})" in refused[2]
    assert b"table_id" not in taken.body or taken.status < 300


async def test_a_browser_that_goes_on_is_told_that_its_table_is_gone(tmp_path: Path) -> None:
    query = {"start": "earliest", "format": "sse"}
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        await service.append([(0, 0, event_rows(0, 5))])
        call, answering = service.start("GET", SUBSCRIBE, query=query)
        await call.sent(1)
        call.disconnect()
        reached = re.findall(rb"^id: (.*)$", (await answering).body, re.MULTILINE)[-1].decode()
        await _recreated(service)
        refused = await service.call(
            "GET", SUBSCRIBE, query=query, headers={"last-event-id": reached}
        )

    assert json.loads(reached).keys() == {"table_id", "offsets"}
    assert refused.error()[:2] == (404, "table_not_found")


async def test_answers_with_offsets_say_whose_they_are(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        table_id = (await service.create_table())["table_id"]
        await service.append([(0, 0, event_rows(0, 5))])
        fetched = await service.call("GET", FETCH, query={"offset": "0"})
        text = {"accept": "application/json"}
        page = await service.call("GET", FETCH, query={"offset": "0"}, headers=text)
        appended = await service.call(
            "POST", f"{EVENTS_PATH}/append", body=append_body(EVENTS, [(0, 0, event_rows(5, 6))])
        )
        since = await service.call("GET", f"{EVENTS_PATH}/offsets", query={"timestamp_us": EARLY})
        consumers = await service.call("GET", f"{EVENTS_PATH}/consumers")
        transaction = Request("POST", COMMIT, {}, {"parts": []})
        committed = await transaction.send(service, None, await _begun(service))

    assert fetched.headers["x-table-version"] == f"{table_id}.0"
    for answer in (page, appended, since, consumers, committed):
        assert answer.json()["table_id"] == table_id
