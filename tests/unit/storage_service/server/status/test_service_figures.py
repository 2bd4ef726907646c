"""The head of the status page, and tables told in brief or alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.model.lake.facts import LakeDebt
from streamhouse.storage_service.server.status._service_figures import quantile_ms
from streamhouse.storage_service.server.status._status import CONSUMERS_BRIEF_MAX, has_much_debt
from tests.support.in_process_service import InProcessService, event_rows, in_process_service

BOUNDS = (0.001, 0.01, 0.1, 1.0, float("inf"))


@given(st.lists(st.floats(0, 5), min_size=1), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_in_the_bucket_that_has_it(seconds: list[float], share: float) -> None:
    buckets = {bound: float(sum(s <= bound for s in seconds)) for bound in BOUNDS}
    wanted = sorted(seconds)[max(0, -(-round(share * 1_000) * len(seconds) // 1_000) - 1)]
    above = next(bound for bound in BOUNDS if wanted <= bound)
    below = max((bound for bound in BOUNDS if bound < above), default=0.0)

    found = quantile_ms(buckets, share)

    assert found is not None
    # What is over the last bound is said to be the last bound.
    most = below if above == float("inf") else above
    assert 1_000 * below - 0.01 <= found <= 1_000 * most + 0.01


def test_there_is_no_quantile_of_nothing() -> None:
    assert quantile_ms({}, 0.5) is None
    assert quantile_ms(dict.fromkeys(BOUNDS, 0.0), 0.5) is None


@pytest.mark.parametrize(
    ("changes", "is_much"),
    [
        ({}, False),
        ({"small_files": 199, "delete_files": 199, "deleted_share": 0.19}, False),
        ({"small_files": 200}, True),
        ({"delete_files": 200}, True),
        ({"deleted_share": 0.2}, True),
        # One file in each of many places, and as many as there must be.
        ({"small_files": 900, "needed_files": 801}, False),
        ({"small_files": 900, "needed_files": 800}, True),
        ({"round_files": 64, "round_rows": 6_399}, True),
        ({"round_files": 64, "round_rows": 6_400}, False),
        ({"round_files": 63, "round_rows": 63}, False),
        ({"maintenance_error": "the catalog is away"}, True),
    ],
)
def test_much_debt_is_what_maintenance_should_have_done(
    changes: dict[str, object], is_much: bool
) -> None:
    debt = {"data_files": 1_000, "delete_files": 0, "snapshots": 3, **changes}

    assert has_much_debt(LakeDebt.from_json(debt)) == is_much


async def _brief(service: InProcessService) -> dict[str, object]:
    answer = await service.call("GET", "/v1/status", query={"detail": "brief"})
    assert answer.status == 200, answer.body
    found: dict[str, object] = answer.json()
    return found


async def test_the_service_says_its_rates_latency_memory_disk_and_errors(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, disk_bytes_max=10_000_000) as service:
        await service.create_table()
        sampler = service.service.status
        await sampler.sample()
        await service.append([(0, 0, event_rows(0, 3))])
        await service.call("GET", "/v1/tables/events/buckets/0/fetch", query={"offset": "0"})
        assert (await service.call("GET", "/v1/tables/nothing")).status == 404
        await service.service.manager.disk_budget.look()
        await sampler.sample()

        figures = (await service.call("GET", "/v1/status")).json()["service"]

        assert figures["written_rows_per_s"] == figures["read_rows_per_s"] > 0
        assert len(figures["history"]["written_rows_per_s"]) == 1
        assert 0 < figures["latency"]["write"]["p50_ms"] <= figures["latency"]["write"]["p99_ms"]
        assert figures["latency"]["lookup"] is None
        assert figures["errors"] == {"table_not_found": 1}
        assert figures["memory_bytes"] > 10_000_000
        assert 0 < figures["disk_bytes"] < figures["disk_bytes_max"] == 10_000_000
        assert 0 < figures["disk_free_bytes"] < figures["disk_total_bytes"]
        assert figures["uptime_ms"] >= 0
        assert {"name": "keys", "alive": 0, "bound": 2} in figures["threads"]
        assert figures["version"]
        assert (figures["role"], figures["journal"]) == ("alone", None)


async def test_rows_of_dropped_tables_do_not_count_against_the_service(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table("gone")
        await service.append([(0, 0, event_rows(0, 50))], path="gone")
        sampler = service.service.status
        await sampler.sample()
        await service.call("DELETE", "/v1/tables/gone")
        await sampler.sample()

        figures = (await service.call("GET", "/v1/status")).json()["service"]

        assert figures["history"]["written_rows_per_s"] == [0]


async def test_a_table_in_brief_has_what_a_line_of_a_list_needs(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, metrics_tables_max=1) as service:
        for name in ("busy", "quiet"):
            await service.create_table(name, bucket_count=16)
        sampler = service.service.status
        for _ in range(4):
            answer = await service.append([(0, 0, event_rows(0, 3))], path="busy")
            assert answer.status == 200, answer.body
            await sampler.sample()

        status = await _brief(service)
        full = (await service.call("GET", "/v1/status")).json()

        # The limit is of what is told in full.
        assert [table["table"] for table in full["tables"]] == ["default.busy"]
        tables = status["tables"]
        assert isinstance(tables, list)
        busy, quiet = tables
        assert busy["row_count"] == 12
        assert busy["tiering"] == {"untiered_rows": 12}
        assert len(busy["history"]["written_rows_per_s"]) == 1
        assert quiet["tiering"] == {}
        assert quiet["history"] == {"written_rows_per_s": []}
        shared = set(busy) & set(full["tables"][0])
        assert shared == set(busy)
        # A list of a thousand is sent every few seconds, however many buckets there are.
        assert len(json.dumps(quiet)) < 400
        assert len(json.dumps(busy)) < 500


async def test_one_table_is_told_in_full_alone(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, metrics_tables_max=1) as service:
        await service.create_table("a")
        await service.create_table("b")

        one = await service.call("GET", "/v1/status", query={"table": "b"})
        none = await service.call("GET", "/v1/status", query={"table": "other.c"})
        wrong = await service.call("GET", "/v1/status", query={"table": "no-name"})
        unknown = await service.call("GET", "/v1/status", query={"detail": "everything"})

        (table,) = one.json()["tables"]
        assert (table["table"], len(table["buckets"])) == ("default.b", 1)
        assert one.json()["table_count"] == 2
        assert none.json()["tables"] == []
        assert (wrong.status, unknown.status) == (400, 400)


async def test_the_most_late_of_many_readers_are_told(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        for table in ("a", "b"):
            table_id = (await service.create_table(table))["table_id"]
            await service.append([(0, 0, event_rows(0, 100))], path=table)
            for number in range(40):
                body = {"table_id": table_id, "offsets": {"0": number}}
                path = f"/v1/tables/{table}/consumers/reader-{number}"
                answer = await service.call("PUT", path, json_body=body)
                assert answer.status == 200, answer.body

        told = (await _brief(service))["consumers"]

        assert isinstance(told, dict)
        assert told["count"] == 80
        worst = told["worst"]
        assert len(worst) == CONSUMERS_BRIEF_MAX
        lags = [one["lag_rows"] for one in worst if one["table"] == "default.a"]
        assert lags == sorted(lags, reverse=True)
        assert {one["table"] for one in worst} == {"default.a", "default.b"}


async def test_a_status_in_brief_is_kept_for_a_moment(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        sampler = service.service.status

        first = await sampler.text(is_brief=True)

        assert await sampler.text(is_brief=True) is first
