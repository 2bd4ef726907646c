"""The status page and what it shows."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from streamhouse.storage_service.server import status
from streamhouse.storage_service.server.status._table_history import SAMPLES_MAX
from tests.support.in_process_service import event_rows, in_process_service

ROOT = Path(__file__).resolve().parents[5]


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


async def test_a_trouble_has_the_time_of_its_beginning(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        table_id = (await service.create_table())["table_id"]
        await service.append([(0, 0, event_rows(0, 3))])
        sampler = service.service.status

        async def since_us() -> list[int | None]:
            await sampler.sample()
            sampler._brief_until_s = 0.0
            forms = ({"detail": "brief"}, {"table": "events"})
            answers = [await service.call("GET", "/v1/status", query=form) for form in forms]
            return [answer.json()["tables"][0].get("since_us") for answer in answers]

        async def round_(error: str) -> None:
            claim = {"worker_id": "w", "tables": None, "force": True}
            answer = await service.call("POST", "/v1/tiering/claim", json_body=claim)
            fail = {"table": "events", "table_id": table_id, "error": error}
            fail["epoch"] = answer.json()["assignment"]["epoch"]
            await service.call("POST", "/v1/tiering/fail", json_body=fail)

        assert await since_us() == [None, None]
        await round_("the catalog is away")
        began_us, of_one = await since_us()
        assert began_us is not None
        assert began_us == of_one
        await round_("the catalog is still away")
        assert await since_us() == [began_us, began_us]
        # Another kind of trouble begins anew, and an end of all trouble is an end.
        table = service.service.table("events")
        service.service.manager.tiering.round_of(table).failures = 0
        assert await since_us() == [None, None]


async def test_the_last_rounds_are_shown_with_their_errors(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        table_id = (await service.create_table())["table_id"]
        await service.append([(0, 0, event_rows(0, 3))])
        for number in range(12):
            claim = {"worker_id": "w", "tables": None, "force": True}
            await service.call("POST", "/v1/tiering/claim", json_body=claim)
            fail = {"table": "events", "table_id": table_id, "epoch": number + 1}
            error = f"{number}: " + "x" * 1_000
            await service.call("POST", "/v1/tiering/fail", json_body={**fail, "error": error})

        rounds = (await service.call("GET", "/v1/status")).json()["tables"][0]["tiering"]["rounds"]

    assert [ended["error"].partition(":")[0] for ended in rounds] == [
        str(number) for number in range(11, 1, -1)
    ]
    assert all(len(ended["error"]) <= 500 and ended["ended_us"] for ended in rounds)


async def test_a_worker_that_starts_is_listed_before_it_takes_a_table(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        await service.append([(0, 0, event_rows(0, 3))])
        starting = {"worker_id": "embedded", "tables": [], "force": True}
        answer = await service.call("POST", "/v1/tiering/claim", json_body=starting)
        answered = (await service.call("GET", "/v1/status")).json()

    assert answer.json()["assignment"] is None
    assert answered["idle_workers"] == [{"worker_id": "embedded", "reason": "starting"}]


async def test_a_reader_between_two_samples_is_not_taken_for_one_in_the_lake(
    tmp_path: Path,
) -> None:
    async with in_process_service(tmp_path) as service:
        table_id = (await service.create_table())["table_id"]
        await service.append([(0, 0, event_rows(0, 3))])
        report = {"table_id": table_id, "offsets": {"0": 3}}
        path = "/v1/tables/events/consumers/billing"
        await service.call("PUT", path, json_body=report)
        await service.service.status.sample()
        await service.append([(0, 0, event_rows(3, 5))])

        (consumer,) = (await service.call("GET", "/v1/status")).json()["tables"][0]["consumers"]

    assert consumer["lag_rows"] == 2
    assert 0 <= consumer["lag_ms"] < 60_000


async def test_the_documents_of_this_version_need_no_token(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, token="secret") as service:
        runbook = await service.call("GET", "/docs/runbook.md")
        unknown = await service.call("GET", "/docs/nothing.md")

    assert runbook.status == 200
    assert runbook.headers["content-type"] == "text/markdown; charset=utf-8"
    assert runbook.body.decode() == (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    assert unknown.status == 401


def test_what_to_do_leads_to_sections_of_the_documents() -> None:
    """The page links sections by their names: a renamed section needs a new link."""
    scripts = Path(status.__file__).parent.joinpath("page").glob("*.js")
    text = "".join(script.read_text(encoding="utf-8") for script in scripts)
    headings = {
        file.stem: {_slug(line) for line in file.read_text(encoding="utf-8").splitlines()}
        for file in (ROOT / "docs").glob("*.md")
    }

    alerts = set(re.findall(r'"(Streamhouse[A-Z]\w+)"', text))
    sections = re.findall(r'\["(\w+)", "([\w-]*)"\]', text)
    assert len(alerts) >= 12
    assert alerts <= _runbook_alerts()
    documents = [(file, section) for file, section in sections if file in headings]
    assert {"operations", "watching", "maintenance"} <= {file for file, _ in documents}
    for file, section in documents:
        assert not section or section.lower() in headings[file], (file, section)


def _slug(line: str) -> str:
    text = line.lstrip("#").strip() if line.startswith("#") else ""
    return re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-")


def _runbook_alerts() -> set[str]:
    text = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    return set(re.findall(r"^### (Streamhouse\w+)$", text, flags=re.MULTILINE))
