"""Tables that go on from their lake tables alone, on files and in S3, asked of all outside readers.

pyiceberg and DuckDB look at every state as it is made, our union read in Spark at the table that
was adopted, and Iceberg Java at all states at the end, in one session.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from integration.judges.engines import read_many_with_spark35
from streamhouse.api.client import StreamhouseClient
from tests.support.adoption_world import KEYED, LOG, Lake, Rows, adopt, by_id, filled, go_on, rows
from tests.support.object_store import BUCKET, ObjectStore
from tests.support.tier_once import tier_once

pytestmark = [pytest.mark.slow, pytest.mark.judge, pytest.mark.spark]

QUERY = "SELECT id, name, small FROM lake_table ORDER BY id"
CHANGES = (
    "SELECT __change_type AS kind, count(*) AS n, sum(id) AS ids FROM lake_table"
    " GROUP BY __change_type ORDER BY kind"
)


@dataclass
class Judged:
    """A lake, and what Iceberg Java must find in it: (metadata file, query) -> rows."""

    lake: Lake
    expected: dict[tuple[str, str], list[dict[str, object]]] = field(default_factory=dict)

    def look(self, log: Rows, keyed: Rows) -> None:
        """Ask pyiceberg and DuckDB now, Iceberg Java later."""
        for name, model in ((LOG, log), (KEYED, keyed), (f"{KEYED}$batch", keyed)):
            assert self.lake.judged(name) == model
            with self.lake.table(name) as table:
                found = [{"id": i, **row} for i, row in sorted(model.items())]
                self.expected[table.metadata_location, QUERY] = [
                    {key: row[key] for key in ("id", "name", "small")} for row in found
                ]
        with self.lake.table(f"{KEYED}$changelog") as table:
            changes = table.scan().to_arrow().group_by("__change_type")
            counted = changes.aggregate([([], "count_all"), ("id", "sum")]).to_pylist()
            self.expected[table.metadata_location, CHANGES] = sorted(
                (
                    {"kind": c["__change_type"], "n": c["count_all"], "ids": c["id_sum"]}
                    for c in counted
                ),
                key=lambda row: str(row["kind"]),
            )


@pytest.fixture(params=["files", "store"])
def judged(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Judged]:
    if request.param == "files":
        yield Judged(Lake(tmp_path / "lake"))
        return
    with ObjectStore() as store:
        yield Judged(Lake(tmp_path / "lake", store=store))


def _check_in_spark(spark: SparkSession, endpoint: str, log: Rows, keyed: Rows) -> None:
    reader = spark.read.format("streamhouse").option("endpoint", endpoint)
    for name, model in ((LOG, log), (KEYED, keyed)):
        frame = reader.load(name).select("id", "name", "small")
        found = [row.asDict() for row in frame.collect()]
        assert by_id(pa.Table.from_pylist(found)) == model


@pytest.mark.timeout(900)
def test_all_readers_agree_before_and_after_each_adoption(
    judged: Judged, spark: SparkSession, tmp_path: Path
) -> None:
    lake = judged.lake
    layout = {"table.datalake.changelog": "true", "table.datalake.batch-layout.sort": "name"}
    with lake.service("a") as (service, client):
        log, keyed = filled(client, **layout)
        judged.look(log, keyed)
        service.kill()
    lake.lose("a")

    with lake.service("b") as (service, client):
        adopt(client)
        judged.look(log, keyed)
        _check_in_spark(spark, service.endpoint, log, keyed)
        go_on(client, lake, log, keyed)
        judged.look(log, keyed)
        _write_more(client, log, keyed, start=2_000)
        # Rows in both tiers, of the table's second life.
        _check_in_spark(spark, service.endpoint, log, keyed)
        tier_once(client)
        judged.look(log, keyed)
        service.kill()
    lake.lose("b")

    with lake.service("c") as (service, client):
        adopt(client)
        judged.look(log, keyed)
        _write_more(client, log, keyed, start=3_000)
        tier_once(client)
        judged.look(log, keyed)
        _check_in_spark(spark, service.endpoint, log, keyed)

    copy = tmp_path / "copy"
    if lake.store is not None:
        lake.store.copy_to(copy)
    answers = read_many_with_spark35(list(judged.expected), buckets={BUCKET: copy})
    assert dict(zip(judged.expected, answers, strict=True)) == judged.expected


def _write_more(client: StreamhouseClient, log: Rows, keyed: Rows, *, start: int) -> None:
    changed, deleted = (100, 140), (140, 160)
    client.append(LOG, rows(start, start + 100))
    client.upsert(KEYED, rows(*changed, mark=f"of {start}, "))
    client.delete(KEYED, rows(*deleted).select(["id"]))
    log |= by_id(rows(start, start + 100))
    keyed |= by_id(rows(*changed, mark=f"of {start}, "))
    for key in range(*deleted):
        keyed.pop(key, None)
