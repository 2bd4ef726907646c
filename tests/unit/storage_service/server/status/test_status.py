"""The status page and what it shows."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from streamhouse.storage_service.server.status._table_history import SAMPLES_MAX
from tests.support.in_process_service import event_rows, in_process_service


async def test_the_page_needs_no_token_and_allows_only_its_own_script(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, token="secret") as service:
        answer = await service.call("GET", "/")
        html = answer.body.decode()

        assert answer.status == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        (script,) = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert f"script-src 'sha256-{digest}';" in policy
        # What it shows needs the token.
        assert (await service.call("GET", "/v1/status")).error()[1] == "unauthorized"


async def test_status_has_rows_rates_bytes_and_lag_of_each_bucket(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table(bucket_count=2)
        await service.create_table("idle", properties={"table.datalake.enabled": "false"})
        sampler = service.service.status
        await sampler.sample()
        await service.append([(0, 0, event_rows(0, 3))])
        await service.call(
            "GET", "/v1/tables/events/buckets/0/fetch", query={"offset": "1", "table_id": "1"}
        )
        await sampler.sample()

        status = (await service.call("GET", "/v1/status")).json()

        events, idle = status["tables"]
        assert [events["table"], idle["table"]] == ["default.events", "default.idle"]
        assert events["row_count"] == 3
        assert events["log_bytes"] > 0
        assert events["written_rows_per_s"] > 0
        # Whole batches are sent, whichever row was asked for.
        assert events["read_rows_per_s"] == events["written_rows_per_s"]
        assert [bucket["high_watermark"] for bucket in events["buckets"]] == [3, 0]
        assert [len(lags) for lags in events["history"]["lag_ms"]] == [2, 2]
        assert events["history"]["lag_ms"][0] == [0, 0]
        assert events["lag_ms"] == events["buckets"][0]["lag_ms"] >= 0
        assert events["is_tiered"]
        assert not idle["is_tiered"]
        assert idle["lag_ms"] == 0
        assert status["workers"] == []


async def test_rows_by_key_that_are_out_of_use_are_shown_with_the_reason(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table("keyed", primary_key=("id",), bucket_count=2)
        (before,) = (await service.call("GET", "/v1/status")).json()["tables"]
        table = service.service.table("keyed")
        table.key_buckets[1].fail("the disk failed")

        (after,) = (await service.call("GET", "/v1/status")).json()["tables"]

        assert before["unusable"] == []
        (why,) = after["unusable"]
        assert "bucket 1" in why
        assert "out of use, the disk failed; restart the service" in why


async def test_a_running_round_is_shown_with_its_worker(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        table_id = (await service.create_table())["table_id"]
        await service.append([(0, 0, event_rows(0, 3))])
        claim = {"worker_id": "w1", "tables": None, "force": True}
        await service.call("POST", "/v1/tiering/claim", json_body=claim)

        (worker,) = (await service.call("GET", "/v1/status")).json()["workers"]

        assert worker["worker_id"] == "w1"
        assert worker["table"] == "default.events"
        assert worker["untiered_rows"] == 3
        assert worker["progress"] == {"step": "", "rows_done": 0, "rows_planned": 0}

        beat = {"table": "events", "table_id": table_id, "epoch": 1, "future": "field"}
        beat |= {"step": "writing", "rows_done": 1, "rows_planned": 3}
        await service.call("POST", "/v1/tiering/heartbeat", json_body=beat)
        await service.call("POST", "/v1/tiering/claim", json_body={**claim, "worker_id": "w2"})

        status = (await service.call("GET", "/v1/status")).json()
        progress = {"step": "writing", "rows_done": 1, "rows_planned": 3}
        assert status["workers"][0]["progress"] == progress
        assert status["idle_workers"] == [{"worker_id": "w2", "reason": "leased"}]


async def test_history_is_bounded_and_forgets_dropped_tables(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, metrics_tables_max=1) as service:
        await service.create_table("a")
        await service.create_table("b")
        sampler = service.service.status
        sampler._tables_max = 1
        for _ in range(SAMPLES_MAX + 5):
            await sampler.sample()

        status = (await service.call("GET", "/v1/status")).json()
        assert status["table_count"] == 2
        assert [table["table"] for table in status["tables"]] == ["default.a"]
        assert len(status["tables"][0]["history"]["lag_ms"]) == SAMPLES_MAX

        await service.call("DELETE", "/v1/tables/a")
        await sampler.sample()
        status = (await service.call("GET", "/v1/status")).json()
        assert [table["table"] for table in status["tables"]] == ["default.b"]
        assert len(status["tables"][0]["history"]["lag_ms"]) == 1
