"""The routes of consumers: reports, where they stand, metrics and the status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamhouse.storage_service.server._gauges import CONSUMERS_MAX
from streamhouse.storage_service.server.status._status import CONSUMERS_SHOWN_MAX
from tests.support.in_process_service import InProcessService, event_rows, in_process_service

CONSUMERS = "/v1/tables/events/consumers"


async def _report(service: InProcessService, name: str, body: Any) -> Any:
    body = {"table_id": 1, **body}
    return await service.call("PUT", f"{CONSUMERS}/{name}", json_body=body)


async def _standing(service: InProcessService) -> dict[str, tuple[int, dict[str, int]]]:
    listed = (await service.call("GET", CONSUMERS)).json()["consumers"]
    return {one["name"]: (one["lag_rows"], one["offsets"]) for one in listed}


async def test_a_consumer_reports_is_listed_and_forgotten(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table(bucket_count=2)
        await service.append([(0, 0, event_rows(0, 10)), (1, 0, event_rows(0, 5))])
        assert await _standing(service) == {}

        behind = await _report(service, "billing", {"offsets": {"0": 4, "1": 5}})
        done = await _report(service, "one-bucket", {"offsets": {"0": 10}, "reads_lake": True})

        assert behind.json()["lag_rows"] == 6
        assert behind.json()["lag_ms"] >= 0
        assert done.json() == {"lag_rows": 0, "lag_ms": 0}

    async with in_process_service(tmp_path) as service:
        assert await _standing(service) == {
            "billing": (6, {"0": 4, "1": 5}),
            "one-bucket": (0, {"0": 10}),
        }
        assert (await service.call("DELETE", f"{CONSUMERS}/billing")).status == 204
        assert (await service.call("DELETE", f"{CONSUMERS}/billing")).status == 204
        assert (await _standing(service)).keys() == {"one-bucket"}
        await service.call("DELETE", "/v1/tables/events")
        await service.create_table()
        assert await _standing(service) == {}


async def test_metrics_and_the_status_show_how_far_consumers_are_behind(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        await service.append([(0, 0, event_rows(0, 10))])
        await _report(service, "billing", {"offsets": {"0": 4}})
        await _report(service, "done", {"offsets": {"0": 10}})

        text = (await service.call("GET", "/metrics")).body.decode()
        await service.service.status.sample()
        [table] = (await service.call("GET", "/v1/status")).json()["tables"]

        labels = '{consumer="billing",table="default.events"}'
        assert f"streamhouse_consumer_lag_rows{labels} 6.0" in text
        assert f"streamhouse_consumer_lag_seconds{labels}" in text
        assert f"streamhouse_consumer_rows_at_risk{labels} 0.0" in text
        assert [(one["name"], one["lag_rows"]) for one in table["consumers"]] == [
            ("billing", 6),
            ("done", 0),
        ]


async def test_a_report_of_some_buckets_leaves_the_others_where_they_were(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table(bucket_count=3)
        await service.append([(0, 0, event_rows(0, 10)), (1, 0, event_rows(0, 5))])
        await _report(service, "group", {"offsets": {"0": 4, "1": 5}})
        part = {"offsets": {"0": 6}, "part": True, "durable": True}
        assert (await _report(service, "group", part)).json()["lag_rows"] == 4
        assert await _standing(service) == {"group": (4, {"0": 6, "1": 5})}


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("a", {}, "body.offsets"),
        ("a", {"offsets": {"0": -1}}, "body.offsets"),
        ("a", {"offsets": {"x": 1}}, "body.offsets"),
        ("a", {"offsets": {"0": 1}, "other": 1}, "body.other"),
        ("a%20b", {"offsets": {"0": 0}}, "a consumer is named by"),
    ],
)
async def test_a_wrong_report_is_refused(
    tmp_path: Path, name: str, body: Any, message: str
) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        status, code, text = (await _report(service, name, body)).error()[:3]
        assert (status, code) == (400, "invalid_request")
        assert message in text
        assert await _standing(service) == {}


async def test_a_bucket_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        text = (await _report(service, "a", {"offsets": {"1": 1}})).error()[2]
        assert "table 'default.events' has no bucket 1" in text


async def test_a_reader_of_a_table_that_was_made_again_does_not_stand_in_it(
    tmp_path: Path,
) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        await service.append([(0, 0, event_rows(0, 10))])
        assert (await _report(service, "billing", {"offsets": {"0": 10}})).status == 200
        await service.call("DELETE", "/v1/tables/events")
        await service.create_table()
        await service.append([(0, 0, event_rows(0, 3))])

        late = await _report(service, "billing", {"offsets": {"0": 2}})
        beyond = await _report(service, "billing", {"table_id": 2, "offsets": {"0": 10}})

        assert late.error()[:2] == (404, "table_not_found")
        assert "dropped and created again" in late.error()[2]
        assert beyond.error()[:2] == (416, "offset_out_of_range")
        assert await _standing(service) == {}
        own = {"table_id": 2, "offsets": {"0": 1}}
        assert (await _report(service, "billing", own)).json()["lag_rows"] == 2


@pytest.mark.slow
async def test_a_thousand_consumers_are_listed_measured_and_shown(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        for number in range(10):
            path = f"t{number}"
            table_id = (await service.create_table(path))["table_id"]
            await service.append([(0, 0, event_rows(0, 10))], path=path)
            for consumer in range(100):
                at = f"/v1/tables/{path}/consumers/c{consumer}"
                body = {"table_id": table_id, "offsets": {"0": consumer % 11}}
                said = await service.call("PUT", at, json_body=body)
                assert said.json()["lag_rows"] == 10 - consumer % 11
        text = (await service.call("GET", "/metrics")).body.decode()
        await service.service.status.sample()
        tables = (await service.call("GET", "/v1/status")).json()["tables"]

        # Metrics and the page are bounded; lists have all of them.
        assert text.count("\nstreamhouse_consumer_lag_rows{") == CONSUMERS_MAX
        assert [len(table["consumers"]) for table in tables] == [CONSUMERS_SHOWN_MAX] * 10
        assert {table["consumers"][0]["lag_rows"] for table in tables} == {10}
        for number in range(10):
            found = await service.call("GET", f"/v1/tables/t{number}/consumers")
            assert len(found.json()["consumers"]) == 100
