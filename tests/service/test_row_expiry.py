"""Rows by key that reach their time in a real service: lookups, streams and every lake agree."""

from __future__ import annotations

import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from tests.support.adoption_world import KEYED, SCHEMA, Lake, by_id, rows
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

HOUR_S = 3_600
PROPERTIES = {
    "table.datalake.ttl": "1d",
    "table.datalake.changelog": "true",
    "table.datalake.batch-layout.sort": "name",
}


def _wait_for_count(client: StreamhouseClient, count: int) -> None:
    wait_until(lambda: client.count(KEYED) == count, f"{count} rows are left")


def _changes(client: StreamhouseClient) -> Counter[str]:
    return Counter(client.read(f"{KEYED}$changelog")["__change_type"].to_pylist())


def _found(client: StreamhouseClient) -> set[int]:
    keys = pa.table({"id": range(700)}, schema=pa.schema([SCHEMA.field("id")]))
    return {row["id"] for row in client.lookup(KEYED, keys).to_pylist() if row["__found"]}


def test_old_rows_leave_every_place_and_young_ones_none(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    lake = Lake(tmp_path / "lake")
    process: dict[str, Any] = {
        "command": ("-m", "tests.support.clocked_service", str(clock)),
        "options": ("--retention-interval-ms", "50"),
    }
    young = by_id(rows(0, 100)) | by_id(rows(100, 200, mark="changed"))
    with lake.service("a", **process) as (service, client):
        client.create_database("shop")
        client.create_table(
            KEYED, SCHEMA, primary_key=["id"], bucket_count=2, properties=PROPERTIES
        )
        client.upsert(KEYED, rows(0, 700))
        tier_once(client)

        clock.write_text(str(20 * HOUR_S))
        client.upsert(KEYED, rows(0, 100))
        client.upsert(KEYED, rows(100, 200, mark="changed"))
        clock.write_text(str(26 * HOUR_S))
        _wait_for_count(client, 200)
        assert by_id(client.read(KEYED)) == young
        tier_once(client)

        assert _found(client) == set(range(200))
        assert by_id(client.read(KEYED)) == young
        assert lake.judged(KEYED) == lake.judged(f"{KEYED}$batch") == young
        changes = _changes(client)
        assert (changes["-D"], changes["+I"], changes["+U"]) == (500, 700, 200)
        with urllib.request.urlopen(f"{client.endpoint}/metrics") as answer:
            assert b"streamhouse_expired_rows_total 500.0" in answer.read()
        service.kill()

    with lake.service("a", **process) as (_, client):
        assert by_id(client.read(KEYED)) == young
        # Who writes a row that has gone begins anew, and everybody sees a new row.
        client.upsert(KEYED, rows(600, 610, mark="back"))
        back = by_id(rows(600, 610, mark="back"))
        tier_once(client)
        assert by_id(client.read(KEYED)) == lake.judged(KEYED) == young | back
        assert _changes(client)["+I"] == 710

    # What is old is looked for at once after a start, then now and then.
    clock.write_text(str(45 * HOUR_S))
    with lake.service("a", **process) as (_, client):
        _wait_for_count(client, 10)
        tier_once(client)
        assert lake.judged(KEYED) == lake.judged(f"{KEYED}$batch") == back

    # A service that goes on from the lake alone knows no ages: rows stay their time from then on.
    lake.lose("a")
    with lake.service("b", **process) as (_, client):
        client.create_database("shop")
        client.adopt_table(KEYED, force=True)
        assert by_id(client.read(KEYED)) == back
        ages = (lake.folder / "b" / "tables").glob
        wait_until(lambda: any(ages("*/row_ages.json")), "ages")
        clock.write_text(str(65 * HOUR_S))
        client.upsert(KEYED, rows(0, 5))
        assert by_id(client.read(KEYED)) == back | by_id(rows(0, 5))
        clock.write_text(str(70 * HOUR_S))
        _wait_for_count(client, 5)
        tier_once(client)
        assert lake.judged(KEYED) == by_id(rows(0, 5))


@pytest.mark.long
def test_rows_are_there_or_deleted_when_the_service_is_killed_on_the_way(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    command = ("-m", "tests.support.clocked_service", str(clock))
    arguments = ("--retention-interval-ms", "10")
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])
    count, ids = 10_000, pa.array(range(10_000), pa.int64())
    kills = 0
    while count:
        with (
            ServiceProcess(tmp_path / "data", *arguments, command=command) as service,
            StreamhouseClient(service.endpoint) as client,
        ):
            if not kills:
                client.create_table(
                    "t", schema, primary_key=["id"], properties={"table.datalake.ttl": "1d"}
                )
                # Looking for old rows takes many pieces.
                text = pa.array(["x" * 1_000] * len(ids))
                client.upsert("t", pa.table([ids, text], schema=schema))
                clock.write_text(str(30 * HOUR_S))
            wait_until(lambda seen=count, c=client: c.count("t") < seen, "fewer rows")
            service.kill()
        kills += 1
        with (
            ServiceProcess(tmp_path / "data", "--retention-interval-ms", "3600000") as service,
            StreamhouseClient(service.endpoint) as client,
        ):
            left = set(client.read("t", columns=["id"])["id"].to_pylist())
            found = client.lookup(
                "t", pa.table([ids], schema=schema.empty_table().select(["id"]).schema)
            )
            assert {
                row["id"] for row in found.select(["id", "__found"]).to_pylist() if row["__found"]
            } == left
            assert client.count("t") == len(left)
            count = len(left)
    assert kills > 1, "it was killed on the way"
