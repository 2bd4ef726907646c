"""`streamhouse.Table` in real Spark: merge, update, delete, truncate and streams that upsert."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

import streamhouse
from integration.spark_world import EVENTS, SparkWorld, event_rows, world
from streamhouse.connector.changes._merge_clauses import Merge
from streamhouse.core.errors import (
    CommitConflictError,
    InvalidRequestError,
    UnknownColumnError,
    UnsupportedError,
)

__all__ = ["world"]

pytestmark = pytest.mark.spark

ACCOUNTS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("balance", pa.int32()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
    ]
)
_tables = iter(range(1000))


def _table(
    world: SparkWorld, rows: int = 0, *, key: bool = True, **options: Any
) -> streamhouse.Table:
    path = f"default.accounts_{next(_tables)}"
    world.client.create_table(
        path, ACCOUNTS, primary_key=("id",) if key else (), bucket_count=2, **options
    )
    if rows:
        data = pa.table(
            {
                "id": range(rows),
                "name": [f"n{i}" for i in range(rows)],
                "balance": pa.array([10 * i for i in range(rows)], pa.int32()),
                "at": pa.array([i * 1_000_000 for i in range(rows)], pa.timestamp("us", tz="UTC")),
            },
            schema=ACCOUNTS,
        )
        (world.client.upsert if key else world.client.append)(path, data)
    return streamhouse.Table(world.spark, path, endpoint=world.endpoint)


def _rows(table: streamhouse.Table) -> dict[int, tuple[str | None, int | None]]:
    found = table.to_df().select("id", "name", "balance").collect()
    assert len({row.id for row in found}) == len(found)
    return {row.id: (row.name, row.balance) for row in found}


def _source(world: SparkWorld, rows: list[tuple[int, str, int]]) -> DataFrame:
    return world.spark.createDataFrame(rows, "user bigint, name string, amount int")


def test_a_merge_updates_deletes_and_inserts(world: SparkWorld) -> None:
    table = _table(world, 5)
    world.tier(table.path)
    source = _source(world, [(1, "one", 5), (2, "gone", -1), (3, "same", 0), (9, "new", 7)])
    changes = (
        table.merge(source, "target.id = source.user")
        .when_matched_delete("source.amount < 0")
        .when_matched_update(
            {"balance": "target.balance + source.amount", "NAME": F.col("source.name")},
            condition=F.col("source.amount") > 0,
        )
        .when_not_matched_insert({"id": "source.user", "name": "source.name", "balance": 70})
        .when_not_matched_by_source_update({"balance": F.lit(-4)}, "target.id = 4")
        .execute()
    )
    assert (changes.rows_inserted, changes.rows_updated, changes.rows_deleted) == (1, 2, 1)
    assert _rows(table) == {
        0: ("n0", 0),
        1: ("one", 15),
        3: ("n3", 30),
        4: ("n4", -4),
        9: ("new", 70),
    }
    kept = table.to_df().where("id IN (1, 4)").select(F.unix_micros("at")).collect()
    assert sorted(row[0] for row in kept) == [1_000_000, 4_000_000]


def test_all_columns_by_name_and_a_delete_of_what_the_source_lacks(world: SparkWorld) -> None:
    table = _table(world, 4)
    source = table.to_df().where("id < 2").withColumn("name", F.upper("name"))
    source = source.unionByName(source.withColumn("id", F.col("id") + 10))
    changes = (
        table.merge(source)
        .when_matched_update_all()
        .when_not_matched_insert_all()
        .when_not_matched_by_source_delete()
        .execute()
    )
    assert (changes.rows_inserted, changes.rows_updated, changes.rows_deleted) == (2, 2, 2)
    assert _rows(table) == {0: ("N0", 0), 1: ("N1", 10), 10: ("N0", 0), 11: ("N1", 10)}


def test_several_source_rows_for_one_key_are_refused_with_an_example(world: SparkWorld) -> None:
    table = _table(world, 3)
    source = _source(world, [(1, "a", 1), (1, "b", 2), (7, "c", 3), (7, "d", 4)])
    merge = table.merge(source.where("user = 1"), {"id": "user"})
    with pytest.raises(InvalidRequestError, match=r"several rows of the source .* with id = 1;"):
        merge.when_matched_update({"balance": "source.amount"}).execute()
    with pytest.raises(InvalidRequestError, match=r"several rows of the source .* with id = 7;"):
        table.merge(source.where("user = 7"), {"id": "user"}).when_not_matched_insert(
            {"id": "source.user"}
        ).execute()
    # Rows that no clause takes are nobody's second.
    merge.when_matched_update({"balance": "source.amount"}, "source.amount = 2").execute()
    assert _rows(table)[1] == ("n1", 2)


def test_a_merge_on_other_columns_finds_rows_but_inserts_no_second_row_of_a_key(
    world: SparkWorld,
) -> None:
    table = _table(world, 3)
    source = _source(world, [(50, "n1", 5)])
    changes = (
        table.merge(source, ["name"]).when_matched_update({"balance": "source.amount"}).execute()
    )
    assert changes.rows_updated == 1
    clashing = _source(world, [(2, "unknown", 5)])
    merge = table.merge(clashing, F.col("target.name") == F.col("source.name"))
    with pytest.raises(InvalidRequestError, match=r"has the key of a row that is there: id = 2"):
        merge.when_not_matched_insert({"id": "source.user"}).execute()
    assert _rows(table) == {0: ("n0", 0), 1: ("n1", 5), 2: ("n2", 20)}


@pytest.mark.end_to_end
def test_update_delete_and_truncate(world: SparkWorld) -> None:
    table = _table(world, 6)
    assert table.update({"balance": "balance + 1", "name": F.lit("x")}, "id >= 4").rows_updated == 2
    assert table.delete(F.col("balance") == 10).rows_deleted == 1
    assert table.delete("balance > 1000").rows_deleted == 0
    assert _rows(table) == {
        0: ("n0", 0),
        2: ("n2", 20),
        3: ("n3", 30),
        4: ("x", 41),
        5: ("x", 51),
    }
    assert table.update({"balance": None}).rows_updated == 5
    assert {balance for _, balance in _rows(table).values()} == {None}
    table.truncate()
    assert _rows(table) == {}


def test_a_version_changes_the_table_once(world: SparkWorld) -> None:
    table = _table(world, 2)
    job: dict[str, Any] = {"app_id": "nightly", "app_version": 7}
    assert not table.update({"balance": "balance + 1"}, **job).is_skipped
    assert table.update({"balance": "balance + 1"}, **job).is_skipped
    assert table.truncate(**job).is_skipped
    source = _source(world, [(0, "again", 1)])
    merge = table.merge(source, {"id": "user"}).when_matched_delete()
    assert merge.execute(**job).is_skipped
    assert _rows(table) == {0: ("n0", 1), 1: ("n1", 11)}
    assert merge.execute(app_id="nightly", app_version=8).rows_deleted == 1
    with pytest.raises(InvalidRequestError, match="app_id needs app_version"):
        table.delete("id = 1", app_id="nightly")


def test_history_shows_what_became_of_each_change_beside_the_lakes_snapshots(
    world: SparkWorld,
) -> None:
    table = _table(world, 4)
    world.tier(table.path)
    read_offsets = {b: at.high_watermark for b, at in world.client.positions(table.path).items()}
    job: dict[str, Any] = {"app_id": "nightly", "app_version": 7}
    table.update({"balance": "balance + 1"}, "id < 3", **job)
    late = world.client.begin_transaction(table.path, operation="overwrite")
    with pytest.raises(CommitConflictError) as conflict:
        late.commit([], read_offsets=read_offsets)
    table.truncate()

    history = table.history()

    assert [row.kind for row in history.collect()] == ["snapshot", *["transaction"] * 3]
    transactions = history.where("kind = 'transaction'")
    found = transactions.select("operation", "status", "row_count", "app_id", "app_version")
    assert [tuple(row) for row in found.collect()] == [
        ("upsert", "committed", 3, "nightly", 7),
        ("overwrite", "refused", 0, None, None),
        ("overwrite", "committed", 0, None, None),
    ]
    refused = history.where("status = 'refused'").first()
    assert refused is not None
    assert refused.transaction_id == late.transaction_id
    assert refused.reason == conflict.value.message
    snapshot = history.where("kind = 'snapshot'").first()
    assert snapshot is not None
    before = world.load(table.path, asOfSnapshot=snapshot.snapshot_id)
    assert before.selectExpr("sum(balance)").collect()[0][0] == 60


def test_a_log_table_is_changed_only_as_a_whole(world: SparkWorld) -> None:
    table = _table(world, 4, key=False)
    with pytest.raises(UnsupportedError, match=r"rewrite=True\) writes the whole table anew"):
        table.delete("id = 1")
    with pytest.raises(UnsupportedError, match="has no primary key, so a merge"):
        table.merge(_source(world, []), {"id": "user"}).when_matched_delete().execute()
    assert table.delete("id = 1", rewrite=True).rows_deleted == 1
    assert table.update({"balance": -1}, "id = 2", rewrite=True).rows_updated == 1
    assert _rows(table) == {0: ("n0", 0), 2: ("n2", -1), 3: ("n3", 30)}
    table.truncate()
    assert _rows(table) == {}


def test_what_cannot_be_is_refused_by_one_sentence(world: SparkWorld) -> None:
    table = _table(world, 2)
    source = _source(world, [(1, "a", 1)])
    merge = table.merge(source, {"id": "user"})
    with pytest.raises(InvalidRequestError, match="has no clause"):
        merge.execute()
    with pytest.raises(UnknownColumnError, match=r"names column 'blance'.*did you mean 'balance'"):
        merge.when_matched_update({"blance": "1"}).execute()
    with pytest.raises(UnsupportedError, match="sets column 'id' of the primary key"):
        merge.when_matched_update({"id": "source.user + 1"}).execute()
    with pytest.raises(UnsupportedError, match="sets column 'id' of the primary key"):
        table.update({"id": "id + 1"})
    with pytest.raises(UnknownColumnError, match="needs a column 'balance' in the source"):
        merge.when_matched_update_all().execute()
    with pytest.raises(UnknownColumnError, match="matches rows by column 'nobody'"):
        table.merge(source, ["nobody"]).when_matched_delete().execute()
    with pytest.raises(InvalidRequestError, match=r"truncate\(\) deletes all rows"):
        table.delete()
    first = _table(world, 0, properties={"table.merge-engine": "first_row"})
    with pytest.raises(UnsupportedError, match=r"table\.merge-engine = first_row"):
        first.update({"balance": 1})
    null_key = world.spark.sql("SELECT CAST(NULL AS bigint) AS user, 'x' AS name, 1 AS amount")
    with pytest.raises(InvalidRequestError, match="column 'id'"):
        table.merge(null_key, {"id": "user"}).when_not_matched_insert({"name": "'x'"}).execute()
    assert _rows(table) == {0: ("n0", 0), 1: ("n1", 10)}


def test_merges_at_once_lose_no_update(world: SparkWorld) -> None:
    """Each of them adds to some balances, and others write in between."""
    table = _table(world, 6)
    added = dict.fromkeys(range(6), 0)
    attempts, failures = [], []

    def add(seed: int) -> None:
        random = Random(seed)
        for _ in range(2):
            keys = random.sample(range(6), 3)
            source = _source(world, [(key, "", 1) for key in keys])
            merge = table.merge(source, {"id": "user"})
            try:
                changes = merge.when_matched_update(
                    {"balance": "target.balance + source.amount"}
                ).execute()
            except CommitConflictError as error:
                failures.append(error)
                continue
            attempts.append(changes.attempts)
            for key in keys:
                added[key] += 1

    threads = [threading.Thread(target=add, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key: balance - 10 * key for key, (_, balance) in _rows(table).items()} == added
    assert len(attempts) + len(failures) == 6
    assert attempts


def test_a_write_between_read_and_commit_is_seen_by_the_next_attempt(
    world: SparkWorld, tmp_path: Path
) -> None:
    """A source that writes to the table while it is computed, the first time only."""
    table = _table(world, 2)
    endpoint, path, mark = world.endpoint, table.path, str(tmp_path / "written")

    def interrupting(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if not Path(mark).exists():
                Path(mark).touch()
                row = pa.table({"id": [1], "balance": pa.array([500], pa.int32())})
                with streamhouse.StreamhouseClient(endpoint) as client:
                    client.upsert(path, row, columns=["id", "balance"])
            yield batch

    source = _source(world, [(1, "one", 1)]).coalesce(1)
    source = source.mapInArrow(interrupting, source.schema)
    merge = table.merge(source, {"id": "user"})
    changes = merge.when_matched_update({"balance": "target.balance + source.amount"}).execute()
    assert (changes.attempts, changes.rows_updated) == (2, 1)
    assert _rows(table)[1] == ("n1", 501)
    Path(mark).unlink()
    with pytest.raises(CommitConflictError, match="in each of its 10 attempts"):
        _unlucky(world, table).execute()
    assert _rows(table)[1][0] == "n1"


def _unlucky(world: SparkWorld, table: streamhouse.Table) -> Merge:
    """Return a merge whose source changes the row that it merges, each time."""
    endpoint, path = world.endpoint, table.path

    def interrupting(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            row = pa.table({"id": [1], "balance": pa.array([time.time_ns() % 10**9], pa.int32())})
            with streamhouse.StreamhouseClient(endpoint) as client:
                client.upsert(path, row, columns=["id", "balance"])
            yield batch

    source = _source(world, [(1, "one", 1)]).coalesce(1)
    source = source.mapInArrow(interrupting, source.schema)
    return table.merge(source, {"id": "user"}).when_matched_update({"name": "source.name"})


def test_a_stream_of_windowed_counts_upserts_exactly_once(
    world: SparkWorld, tmp_path: Path
) -> None:
    events = world.table(rows=60)
    counted = (
        world.stream(events)
        .withWatermark("at", "1 minute")
        .groupBy(F.window("at", "20 seconds"), "region")
        .count()
    )
    counted = counted.withColumn("region", F.coalesce("region", F.lit("none")))
    # A struct of the user's is no window, whatever its fields are called.
    counted = counted.selectExpr("*", "named_struct('start', 1, 'end', 2) AS span")
    table = streamhouse.Table(world.spark, "default.windowed", endpoint=world.endpoint)
    with pytest.raises(InvalidRequestError, match="name its primary key"):
        table.upsert_stream(counted)
    checkpoint = str(tmp_path / "checkpoint")

    def run() -> None:
        writer = table.upsert_stream(counted, keys=["window", "region"], **{"bucket.num": 2})
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        query.awaitTermination()

    def expected() -> list[Any]:
        plain = world.load(events).withColumn("region", F.coalesce("region", F.lit("none")))
        plain = plain.groupBy(F.window("at", "20 seconds"), "region").count()
        plain = plain.select("window.start", "window.end", "region", "count")
        return sorted(tuple(row) for row in plain.collect())

    columns = ["window_start", "window_end", "region", "count"]
    run()
    assert sorted(tuple(r) for r in table.to_df().select(columns).collect()) == expected()
    assert [field for field in table.to_df().columns if field not in columns] == ["span"]
    world.append(events, 60, 100)
    run()
    assert sorted(tuple(r) for r in table.to_df().select(columns).collect()) == expected()
    # Spark forgets that it ran the last micro-batch: it runs again, and changes nothing.
    before = world.client.positions("default.windowed")
    last = max((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda f: int(f.name))
    last.unlink()
    (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
    run()
    assert world.client.positions("default.windowed") == before
    with pytest.raises(InvalidRequestError, match="has the primary key"):
        table.upsert_stream(counted, keys=["region"])


def _event_times(random: Random, number: int) -> tuple[list[int], list[int]]:
    """Return seconds of rows in time for a watermark of a minute, and of rows that are too late.

    No row is over a minute behind another of its own step, and the latest of a step is always
    there: what the watermark lets pass does not depend on where micro-batches end. Windows of the
    rows that are too late ended before the watermark that the steps before this one left.
    """
    base = 1_000 + 30 * number
    in_time = [base + 40] + [base + random.randint(-20, 40) for _ in range(19)]
    random.shuffle(in_time)
    too_late = [base - random.randint(100, 200) for _ in range(5)] if number else []
    return in_time, too_late


@pytest.mark.parametrize("seed", [1, 2])
def test_a_windowed_stream_with_late_rows_and_restarts_is_what_a_batch_computes(
    world: SparkWorld, tmp_path: Path, seed: int
) -> None:
    random = Random(seed)
    events, checkpoint = world.table(bucket_count=2), str(tmp_path / "checkpoint")
    table = streamhouse.Table(world.spark, f"default.late_windows_{seed}", endpoint=world.endpoint)

    def computed(rows: DataFrame) -> DataFrame:
        groups = rows.groupBy(F.window("at", "20 seconds"), F.expr("id % 3 AS part"))
        return groups.agg(F.count("*").alias("rows"), F.sum("id").alias("total"))

    def started(**trigger: Any) -> StreamingQuery:
        rows = world.stream(events, maxOffsetsPerTrigger=8).withWatermark("at", "1 minute")
        writer = table.upsert_stream(computed(rows), keys=["window", "part"])
        writer = writer.option("checkpointLocation", checkpoint).trigger(**trigger)
        return writer.start()

    next_id = 0
    for number in range(3):
        for is_late, seconds in enumerate(_event_times(random, number)):
            ids = range(next_id, next_id + len(seconds))
            next_id += len(seconds)
            rows = event_rows(0, len(seconds)).set_column(
                0, EVENTS.field(0), pa.array([2 * i + is_late for i in ids], pa.int64())
            )
            times = pa.array([s * 1_000_000 for s in seconds], EVENTS.field("at").type)
            world.client.append(events, rows.set_column(4, EVENTS.field("at"), times))
        # Ended in the middle: of a micro-batch, or after one whose end Spark then forgets.
        query = started(processingTime="0 seconds")
        batches = random.randint(1, 2)
        while len(query.recentProgress) < batches and query.isActive:
            query.awaitTermination(0.05)
        query.stop()
        commits = sorted((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=_number)
        if commits and random.random() < 0.5:
            commits[-1].unlink()
            (commits[-1].parent / f".{commits[-1].name}.crc").unlink(missing_ok=True)
        query = started(availableNow=True)
        query.awaitTermination()

    columns = ["window_start", "window_end", "part", "rows", "total"]
    found = sorted(tuple(row) for row in table.to_df().select(columns).collect())
    in_time = computed(world.load(events).where("id % 2 = 0"))
    wanted = in_time.select("window.start", "window.end", "part", "rows", "total").collect()
    assert found == sorted(tuple(row) for row in wanted)


def _number(file: Path) -> int:
    return int(file.name)


def test_spark_refuses_what_upsert_stream_is_for(world: SparkWorld, tmp_path: Path) -> None:
    """When Spark learns output mode `update` for Python sinks, this fails: then use that."""
    path = world.table(primary_key=("id",))
    writer = world.stream(path).writeStream.format("streamhouse").outputMode("update")
    with pytest.raises(StreamingQueryException, match="does not support Update mode"):
        writer.option("checkpointLocation", str(tmp_path)).start(path).awaitTermination()
