"""What Prometheus sees."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.in_process_service import InProcessService, event_rows, in_process_service


async def _samples(service: InProcessService) -> dict[tuple[str, ...], float]:
    """Every sample by its name and label values."""
    answer = await service.call("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }


async def test_requests_rows_commits_and_tables_are_counted(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table(bucket_count=2)
        await service.append([(0, 0, event_rows(0, 3)), (1, 0, event_rows(0, 2))])
        await service.call("GET", "/v1/tables/events/buckets/0/fetch", query={"offset": "0"})
        await service.call(
            "GET", "/v1/tables/events/buckets/0/fetch", query={"offset": "9", "table_id": "1"}
        )

        samples = await _samples(service)

        assert samples["streamhouse_requests_total", "append", "200"] == 1
        assert samples["streamhouse_requests_total", "fetch", "416"] == 1
        assert samples["streamhouse_errors_total", "offset_out_of_range"] == 1
        assert samples["streamhouse_appended_rows_total",] == 5
        assert samples["streamhouse_sent_rows_total",] == 3
        assert samples["streamhouse_commit_seconds_count",] == 1
        assert samples["streamhouse_table_rows", "default.events"] == 5
        assert samples["streamhouse_table_untiered_rows", "default.events"] == 5
        assert samples["streamhouse_table_log_bytes", "default.events"] > 0
        assert samples["streamhouse_commit_queue_bytes",] == 0


async def test_lag_freshness_and_rounds_are_reported(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, metrics_tables_max=1) as service:
        for name, freshness in (("a", "5s"), ("b", "1s"), ("c", "9s")):
            properties = {"table.datalake.freshness": freshness}
            await service.create_table(name, properties=properties)
        await service.append([(0, 0, event_rows(0, 2))], path="a")
        body = {"worker_id": "w", "force": True}
        claimed = (await service.call("POST", "/v1/tiering/claim", json_body=body)).json()
        report = {
            "table": "a",
            "table_id": claimed["assignment"]["state"]["table"]["table_id"],
            "epoch": 1,
            "lake_snapshot_id": "7",
            "lake_table_uuid": "u",
        }

        behind = await _samples(service)
        assert behind["streamhouse_table_lag_seconds", "default.a"] > 0
        assert behind["streamhouse_table_freshness_seconds", "default.a"] == 5
        # Of several tables the worst is told, not a sum.
        assert behind["streamhouse_table_freshness_seconds", "(other)"] == 9
        assert behind["streamhouse_tiering_rounds_total", "in_time"] == 0
        done = {**report, "tiered_offsets": {"0": 2}}
        await service.call("POST", "/v1/tiering/complete", json_body=done)

        level = await _samples(service)
        assert level["streamhouse_table_lag_seconds", "default.a"] == 0
        assert level["streamhouse_tiering_rounds_total", "in_time"] == 1
        assert level["streamhouse_tiering_rounds_total", "failed"] == 0


async def test_paths_nobody_serves_add_no_labels(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        for i in range(20):
            await service.call("GET", f"/nowhere/{i}")
            await service.call("GET", f"/v1/tables/t{i}/state")

        routes = {
            key[1] for key in await _samples(service) if key[0] == "streamhouse_requests_total"
        }

        assert routes == {"unknown", "table_state"}


async def test_tables_beyond_the_limit_are_added_up(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, metrics_tables_max=1) as service:
        for name in ("a", "b", "c"):
            await service.create_table(name)
            await service.append([(0, 0, event_rows(0, 2))], path=name)

        samples = await _samples(service)

        rows = {k[1]: v for k, v in samples.items() if k[0] == "streamhouse_table_rows"}
        assert rows == {"default.a": 2, "(other)": 4}
