"""The control routes: tables and databases, state, offsets, tiering; and their documentation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.errors import OverloadedError
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.table_state import TableState, TieringAssignment
from tests.support.held_step import around
from tests.support.in_process_service import (
    InProcessService,
    event_rows,
    in_process_service,
    table_descriptor,
)


async def test_a_table_lives_from_creation_to_dropping(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        descriptor = table_descriptor("sales.events", bucket_count=2, bucket_key=("id",))
        created = await service.call("POST", "/v1/databases", json_body={"name": "sales"})
        assert created.status == 201

        info = TableInfo.from_json(await service.create_table("sales.events", bucket_count=2))

        assert (info.table_id, info.nodes) == (1, {0: "", 1: ""})
        described = await service.call("GET", "/v1/tables/sales.events")
        assert TableInfo.from_json(described.json()) == info
        listed = await service.call("GET", "/v1/tables", query={"database": "sales"})
        assert listed.json() == {"tables": ["sales.events"]}
        altered = await service.call(
            "PATCH",
            "/v1/tables/sales.events/properties",
            json_body={"set": {"table.log.ttl": "1h"}},
        )
        assert altered.json()["properties"] == {"table.log.ttl": "1h"}
        again = await service.call("POST", "/v1/tables", json_body=descriptor.to_json())
        assert again.error()[:2] == (409, "table_exists")
        full = await service.call("DELETE", "/v1/databases/sales")
        assert full.error()[:2] == (409, "database_not_empty")
        assert (await service.call("DELETE", "/v1/tables/sales.events")).status == 204
        assert (await service.call("DELETE", "/v1/databases/sales")).status == 204
        databases = await service.call("GET", "/v1/databases")
        assert databases.json() == {"databases": ["default"]}


@pytest.mark.parametrize(
    ("change", "status", "code", "message"),
    [
        ({"path": "none.events"}, 404, "database_not_found", "database 'none' does not exist"),
        ({"path": "a b"}, 400, "invalid_name", "table name 'a b' is not valid"),
        ({"primary_key": ["name"]}, 400, "invalid_schema", "'name' must not be nullable"),
        ({"bucket_count": 0}, 400, "invalid_schema", "bucket count 0 is not in 1..4096"),
        ({"bucket_key": ["nam"]}, 400, "unknown_column", "did you mean 'name'?"),
        ({"partitioned_by": ["days(name)"]}, 400, "invalid_schema", "does not fit column 'name'"),
        ({"properties": {"table.log.tll": "1d"}}, 400, "unknown_option", "'table.log.ttl'"),
        ({"schema": []}, 400, "invalid_schema", ""),
        ({"schema": [{"name": "__offset", "type": "bigint"}]}, 400, "invalid_name", "is reserved"),
        ({"schema": [{"name": "x", "type": "uint8"}]}, 400, "invalid_schema", "column 'x'"),
        ({"bucket.num": 3}, 400, "invalid_request", "no field 'bucket.num'"),
    ],
)
async def test_a_bad_descriptor_is_refused_in_one_sentence_and_makes_nothing(
    tmp_path: Path, change: dict[str, Any], status: int, code: str, message: str
) -> None:
    async with in_process_service(tmp_path) as service:
        body = {**table_descriptor().to_json(), **change}
        answer = await service.call("POST", "/v1/tables", json_body=body)
        assert answer.error()[:2] == (status, code)
        assert message in answer.error()[2]
        assert (await service.call("GET", "/v1/tables")).json() == {"tables": []}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/databases", b"", "body"),
        ("/v1/databases", b"{", "JSON decode error"),
        ("/v1/databases", b"[]", "body"),
        ("/v1/databases", b'{"nam": "x"}', "body.name: Field required"),
        ("/v1/databases", b'{"name": "x", "more": 1}', "body.more: Extra inputs are not permitted"),
        ("/v1/tables", b"[]", "body: Input should be a valid dictionary"),
        ("/v1/tiering/claim", b'{"worker_id": ""}', "body.worker_id: String should have at least"),
        (
            "/v1/tiering/heartbeat",
            b'{"table": "t", "table_id": 1, "epoch": 0}',
            "body.epoch: Input should be",
        ),
    ],
)
async def test_a_malformed_body_is_refused_by_field(
    tmp_path: Path, path: str, body: bytes, message: str
) -> None:
    async with in_process_service(tmp_path) as service:
        answer = await service.call(
            "POST", path, body=body, headers={"content-type": "application/json"}
        )
        assert answer.error()[:2] == (400, "invalid_request")
        assert answer.error()[2].startswith(f"{path}: ")
        assert message in answer.error()[2]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/v1/tables/events/lake/history",
            {"tiered_offsets": {"0": 1, "1": -1}},
            "the value of '1' is not one that can be here",
        ),
        (
            "/v1/tables/events/lake/history",
            {"tiered_offsets": {"0": 1, "first": 1}},
            "'first' is no bucket",
        ),
        (
            "/v1/tables/events/lake/history",
            {"tiered_offsets": {str(bucket): 1 for bucket in range(5_000)}},
            "it has 5000 entries; at most 4096",
        ),
        (
            "/v1/tables/events/lake/history",
            {"tiered_offsets": {}, "fingerprints": {"0": "abc"}},
            "the value of '0' is not one that can be here",
        ),
        (
            "/v1/tables/events/lake/history",
            {"tiered_offsets": {}, "fingerprints": {"0": "z" * 16}},
            "String should match pattern",
        ),
        (
            "/v1/databases",
            {"name": "x", **{f"field{i}": 1 for i in range(200)}},
            "it has 201 entries; at most 100",
        ),
    ],
)
async def test_a_large_object_is_refused_at_its_first_wrong_entry(
    tmp_path: Path, path: str, body: dict[str, Any], message: str
) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        answer = await service.call("POST", path, json_body=body)
        assert answer.error()[:2] == (400, "invalid_request")
        assert message in answer.error()[2]


async def test_a_property_that_is_no_text_is_refused(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        path = "/v1/tables/events/properties"
        for wrong in (7, "x" * 10_001):
            answer = await service.call("PATCH", path, json_body={"set": {"comment": wrong}})
            assert answer.error()[:2] == (400, "invalid_request")
            assert "the value of 'comment' is not one that can be here" in answer.error()[2]


async def test_state_is_a_whole_cut(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table(bucket_count=2)
        await service.append([(0, 0, event_rows(0, 3))])

        state = TableState.from_json((await service.call("GET", "/v1/tables/events/state")).json())

        assert {b: p.high_watermark for b, p in state.positions.items()} == {0: 3, 1: 0}
        assert state.lake == LakeState(tiered_offsets={0: 0, 1: 0})


async def _state(service: InProcessService, **query: str) -> dict[str, int]:
    answer = await service.call("GET", "/v1/tables/events/state", query=query)
    assert answer.status == 200, answer.body
    return {b: p["high_watermark"] for b, p in answer.json()["positions"].items()}


async def test_state_waits_for_rows_beyond_the_given_offsets(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table(bucket_count=2)
        await service.append([(0, 0, event_rows(0, 3))])
        # What is there already is no reason to wait.
        assert await _state(
            service, after='{"0": 2, "1": 0}', table_id="1", max_wait_ms="60000"
        ) == {
            "0": 3,
            "1": 0,
        }
        waiting = asyncio.ensure_future(
            _state(service, after='{"0": 3, "1": 0}', table_id="1", max_wait_ms="60000")
        )
        while not service.service.manager.waiter_limit.count:
            await asyncio.sleep(0)

        await service.append([(1, 0, event_rows(0, 1))])

        assert await asyncio.wait_for(waiting, 60) == {"0": 3, "1": 1}
        assert await _state(service, after='{"0": 3, "1": 1}', table_id="1", max_wait_ms="2") == {
            "0": 3,
            "1": 1,
        }


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"after": "5", "max_wait_ms": "1"}, "parameter after = '5' must be a JSON object"),
        ({"after": '{"7": 0}', "max_wait_ms": "1"}, "has no bucket 7"),
        ({"max_wait_ms": "soon"}, "parameter max_wait_ms = 'soon'"),
    ],
)
async def test_a_bad_wait_is_refused(tmp_path: Path, query: dict[str, str], message: str) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        answer = await service.call("GET", "/v1/tables/events/state", query=query)
        assert answer.error()[:2] == (400, "invalid_request")
        assert message in answer.error()[2]


async def test_offsets_are_found_by_time(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table(bucket_count=2)
        first = (await service.append([(0, 0, event_rows(0, 3))])).json()["timestamp_us"]
        second = (await service.append([(0, 0, event_rows(3, 5))])).json()["timestamp_us"]

        async def offsets(timestamp_us: int) -> Any:
            answer = await service.call(
                "GET",
                "/v1/tables/events/offsets",
                query={"timestamp_us": str(timestamp_us)},
            )
            return answer.json()["offsets"]

        assert await offsets(0) == {"0": 0, "1": 0}
        assert await offsets(first + 1) == {"0": 3, "1": 0}
        assert await offsets(second + 1) == {"0": 5, "1": 0}
        missing = await service.call("GET", "/v1/tables/events/offsets")
        assert "timestamp_us: Field required" in missing.error()[2]


async def test_the_catalog_is_named(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        answer = await service.call("GET", "/v1/lake/catalog")
        named = service.service.config.lake_catalog().to_json()
        named["properties"]["streamhouse.service-id"] = service.service.manager.service_id
        assert answer.json() == named


async def test_a_tiering_round_over_http(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, tiering_backoff_ms_min=60_000) as service:
        await service.create_table()
        await service.append([(0, 0, event_rows(0, 3))])

        async def post(verb: str, **body: Any) -> Any:
            return (await service.call("POST", f"/v1/tiering/{verb}", json_body=body)).json()

        early = await post("claim", worker_id="w")
        assert (early["assignment"], early["reason"]) == (None, "not_due")
        assert 50 <= early["retry_after_ms"] <= 5_000
        claim = await post("claim", worker_id="w", tables=["events"], force=True)
        assignment = TieringAssignment.from_json(claim["assignment"])
        who = {"table": "events", "table_id": assignment.state.table.table_id}
        assert (await post("heartbeat", **who, epoch=1, rows_done=5)) == {"lease_ms": 30_000}
        report = {
            "table": "events",
            "table_id": assignment.state.table.table_id,
            "epoch": assignment.epoch,
            "lake_snapshot_id": "9007199254740993",
            "lake_table_uuid": "u",
            "tiered_offsets": {"0": 3},
        }
        lake = LakeState.from_json(await post("complete", **report))
        assert (lake.snapshot_id, lake.tiered_offsets) == (9007199254740993, {0: 3})
        await service.append([(0, 0, event_rows(0, 3))])
        await post("claim", worker_id="w", force=True)
        fenced = await post("complete", **report)
        assert fenced["error"]["code"] == "fenced"
        assert await post("fail", **who, epoch=2, error="boom") == {"paused_ms": 60_000}
        status = (await service.call("GET", "/v1/tiering")).json()["tables"]["default.events"]
        assert (status["failures"], status["last_error"]) == (1, "boom")
        assert (status["untiered_rows"], status["tiering_epoch"]) == (3, 2)
        assert (status["worker_id"], status["lease_left_ms"]) == ("", 0)
        assert 0 < status["pause_left_ms"] <= 60_000
        unknown = await post("claim", worker_id="w", tables=["nope"])
        assert unknown["error"]["code"] == "table_not_found"


async def test_an_error_of_a_control_route_is_counted_once_and_says_when_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        errors: list[Exception] = [KeyError("a bug"), OverloadedError("too much; try again later")]

        def refuse(*_: object) -> None:
            raise errors.pop()

        around(monkeypatch, "table-found", refuse)
        refused = await service.call("GET", "/v1/tables/events")
        assert refused.error()[:2] == (503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        assert (await service.call("GET", "/v1/tables/events")).error()[:2] == (500, "internal")
        metrics = (await service.call("GET", "/metrics")).body.decode()

        assert 'streamhouse_errors_total{code="overloaded"} 1.0' in metrics
        assert 'streamhouse_errors_total{code="internal"} 1.0' in metrics
