"""Primary key tables written by real Spark: upserts, partial updates, deletes, change streams."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from integration.spark_world import SparkWorld, last_line, world
from streamhouse.core.errors import DatabaseExistsError

__all__ = ["world"]

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ACCOUNTS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
    ]
)


def accounts(world: SparkWorld, path: str, **options: Any) -> str:
    with contextlib.suppress(DatabaseExistsError):
        world.client.create_database("shop")
    world.client.create_table(path, ACCOUNTS, primary_key=["id"], bucket_count=2, **options)
    return path


def rows_of(world: SparkWorld, path: str, ids: range) -> list[tuple[Any, ...]]:
    """Return the values of the rows with these ids that are there."""
    found = world.client.lookup(path, pa.table({"id": pa.array(ids, pa.int64())}))
    return [
        tuple(row.values())[:-1] for row in found.to_pylist() if row["__found"]
    ]  # `__found` is last


@pytest.mark.end_to_end
def test_a_frame_upserts_into_the_table_it_creates(world: SparkWorld) -> None:
    path = "shop.upserted"
    creation = {"primary.key": "id", "bucket.num": "2", "table.changelog.image": "after"}
    first = world.spark.range(1_000).selectExpr("id", "concat('a', id) as name")
    second = world.spark.range(900, 1_100).selectExpr("concat('b', id) as name", "id")

    world.write(first, path, **creation)
    world.write(second, path, **creation)

    info = world.client.describe_table(path)
    assert info.descriptor.primary_key == ("id",)
    assert info.bucket_count == 2
    assert world.client.count(path) == 1_100
    assert rows_of(world, path, range(898, 902)) == [
        (898, "a898"), (899, "a899"), (900, "b900"), (901, "b901"),
    ]  # fmt: skip
    with pytest.raises(Exception, match="'id' must not be null"):
        world.write(first.selectExpr("nullif(id, 3) as id", "name"), path)
    with pytest.raises(Exception, match=r"exists with bucket\.num = 2, and this write says 3"):
        world.write(first, path, **{"bucket.num": "3"})


@pytest.mark.end_to_end
def test_partial_updates_and_deletes(world: SparkWorld) -> None:
    path = accounts(world, "shop.partial")
    world.write(
        world.spark.range(10).selectExpr("id", "'x' as name", "timestamp_micros(id) as at"), path
    )

    world.write(
        world.spark.range(8, 12).selectExpr("'y' as name", "id"), path, **{"write.mode": "partial"}
    )
    world.write(world.spark.range(1, 8), path, **{"write.mode": "delete"})

    found = [(id_, name, at and at.microsecond) for id_, name, at in
             rows_of(world, path, range(20))]  # fmt: skip
    assert found == [(0, "x", 0), (8, "y", 8), (9, "y", 9), (10, "y", None), (11, "y", None)]


@pytest.mark.parametrize("form", ["names", "debezium", "codes"])
def test_a_change_stream_is_applied_in_its_order(world: SparkWorld, form: str) -> None:
    path = accounts(world, f"shop.changes_{form}")
    kinds = {
        "names": ("'+I'", "'-U'", "'+U'", "'-D'"),
        "debezium": ("'c'", "'u'", "'u'", "'d'"),
        "codes": ("1Y", "2Y", "3Y", "4Y"),
    }[form]
    insert, before, after, delete = kinds
    changes = world.spark.sql(
        f"""
        SELECT * FROM VALUES
          (1L, 'one', {insert}), (2L, 'two', {insert}), (3L, 'three', {insert}),
          (2L, 'two', {before}), (2L, 'zwei', {after}), (3L, NULL, {delete}),
          (1L, 'one', {delete}), (1L, 'eins', {insert})
        AS changes(id, name, __change_type)
        """
    ).selectExpr("id", "name", "timestamp_micros(0) as at", "__change_type", "0L as __offset",
                 "0 as __bucket")  # fmt: skip

    world.write(changes.coalesce(1), path)

    assert [row[:2] for row in rows_of(world, path, range(5))] == [(1, "eins"), (2, "zwei")]


@pytest.mark.end_to_end
def test_the_greater_version_wins_across_tasks(world: SparkWorld) -> None:
    """Every task has rows of every key, the newest of them somewhere."""
    frame = world.spark.range(0, 20_000, 1, 8).selectExpr(
        "id % 50 as id", "(id * 7919) % 20000 as version", "concat('v', (id * 7919) % 20000) as v"
    )
    options = {
        "primary.key": "id",
        "sequence.column": "version",
        "table.merge-engine": "versioned",
        "table.merge-engine.versioned.ver-column": "version",
    }

    world.write(frame, "shop.versions", **options)

    newest = {row.id: row.version for row in frame.groupBy("id").agg({"version": "max"})
              .toDF("id", "version").collect()}  # fmt: skip
    found = rows_of(world, "shop.versions", range(50))
    assert {row[0]: row[1] for row in found} == newest


@pytest.mark.end_to_end
def test_a_stream_upserts(world: SparkWorld, tmp_path: Path) -> None:
    source, path = world.table(rows=1_000), "shop.streamed"
    frame = world.stream(source, maxOffsetsPerTrigger=300, columns="id").selectExpr(
        "id % 100 as id", "id as latest"
    )
    writer = frame.writeStream.format("streamhouse").option("endpoint", world.endpoint)
    writer = writer.options(**{"primary.key": "id", "checkpointLocation": str(tmp_path)})

    query = writer.trigger(availableNow=True).start(path)

    query.awaitTermination()
    assert rows_of(world, path, range(100)) == [(id_, 900 + id_) for id_ in range(100)]


@pytest.mark.end_to_end
def test_the_changes_of_one_table_feed_another(world: SparkWorld, tmp_path: Path) -> None:
    """By `$changelog` at once, and by a stream: current rows first, then changes."""
    source, copy, followed = (
        accounts(world, f"shop.{name}") for name in ("feed", "fed", "followed")
    )

    def change(first: int) -> None:
        for round_ in range(3):
            ids = pa.array(range(first, first + 300, round_ + 1), pa.int64())
            names = pa.array([f"{round_}-{id_}" for id_ in ids])
            at = pa.nulls(len(ids), ACCOUNTS.field("at").type)
            world.client.upsert(source, pa.table([ids, names, at], schema=ACCOUNTS))
            world.client.delete(source, pa.table({"id": ids.slice(round_, 40)}))

    def follow() -> None:
        frame = world.stream(source, maxOffsetsPerTrigger=150)
        writer = frame.writeStream.format("streamhouse").option("endpoint", world.endpoint)
        writer = writer.option("checkpointLocation", str(tmp_path))
        writer.trigger(availableNow=True).start(followed).awaitTermination()

    change(0)
    world.tier(source)
    follow()
    change(200)
    follow()
    world.write(world.load(f"{source}$changelog"), copy)

    expected = rows_of(world, source, range(600))
    assert len(expected) == world.client.count(source) > 300
    assert rows_of(world, copy, range(600)) == expected
    assert rows_of(world, followed, range(600)) == expected


def test_what_cannot_be_upserted_is_refused_before_a_row_moves(world: SparkWorld) -> None:
    path = accounts(world, "shop.refused")
    frame = world.spark.range(5).selectExpr("id", "'x' as name", "timestamp_micros(id) as at")
    with pytest.raises(Exception, match=r"use write\.mode = 'upsert'") as caught:
        world.write(frame, path, **{"write.mode": "append"})
    assert "Traceback" not in last_line(caught.value)

    strange = frame.selectExpr("*", "'?' as __change_type")
    with pytest.raises(Exception, match=r"__change_type of row 0 is '\?'"):
        world.write(strange.coalesce(1), path)
    assert world.client.count(path) == 0


@pytest.mark.end_to_end
def test_an_overwrite_replaces_all_rows_in_both_tiers(world: SparkWorld) -> None:
    path = "shop.replaced"
    first = world.spark.range(1_000).selectExpr("id", "concat('a', id) as name")
    world.write(first, path, mode="overwrite", **{"primary.key": "id", "bucket.num": "2"})
    world.tier(path)
    world.write(world.spark.range(5).selectExpr("id", "'log' as name"), path)

    def in_lake() -> list[tuple[int, str]]:
        described = world.client.lake_catalog()
        catalog = load_catalog(described.name, **described.properties)
        found = catalog.load_table(path).scan(selected_fields=("id", "name")).to_arrow().to_pylist()
        return sorted((row["id"], row["name"]) for row in found)

    # From the very table: what a job reads is what was there when it began.
    kept = world.load(path).where("id % 10 = 1").selectExpr("id + 1 as id", "name")
    world.write(kept, path, mode="overwrite")

    expected = [(i + 1, f"a{i}" if i > 4 else "log") for i in range(1, 1_000, 10)]
    assert sorted(tuple(row) for row in world.load(path).collect()) == expected
    assert world.client.count(path) == 100
    assert in_lake() == [(i, f"a{i}") for i in range(1_000)]
    world.tier(path)
    assert in_lake() == expected
    assert sorted(tuple(row) for row in world.load(path).collect()) == expected
    assert rows_of(world, path, range(3)) == [(2, "log")]

    world.write(first.where("id < 0"), path, mode="overwrite")
    assert world.load(path).count() == 0
    world.tier(path)
    assert in_lake() == []


def test_overwrites_that_cannot_be_are_refused(world: SparkWorld) -> None:
    path = accounts(world, "shop.kept")
    frame = world.spark.range(3).selectExpr("id", "'x' as name", "timestamp_micros(id) as at")
    world.write(frame, path)
    for options, sentence in (
        ({"write.transactional": "false"}, "needs a transaction"),
        ({"write.mode": "partial"}, "contradict each other"),
        ({"write.mode": "delete"}, "contradict each other"),
    ):
        with pytest.raises(Exception, match=sentence):
            world.write(frame, path, mode="overwrite", **options)
    assert world.client.count(path) == 3
