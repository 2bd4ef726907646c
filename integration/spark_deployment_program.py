"""What test_spark_deployments runs: read, look up, change rows, copy by batch and by stream."""

from __future__ import annotations

import os
import re
import sys
import urllib.request

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import streamhouse
from streamhouse.connector._spark_versions import has_arrow_functions

SOURCE = "default.deployed"
LOOKED_UP = "default.looked_up"


def main(target: str, checkpoint: str) -> None:
    """Run against the service that STREAMHOUSE_ENDPOINT names."""
    builder = SparkSession.builder
    if remote := os.environ.get("SPARK_REMOTE_URL"):
        spark = builder.remote(remote).getOrCreate()
    else:
        if master := os.environ.get("MASTER"):
            builder = (
                builder.master(master)
                .config("spark.executor.memory", "512m")
                .config("spark.scheduler.minRegisteredResourcesRatio", "1.0")
                .config("spark.scheduler.maxRegisteredResourcesWaitingTime", "60s")
            )
        spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    streamhouse.register(spark)
    frame = spark.read.format("streamhouse").load(SOURCE)
    sys.stdout.write(f"read {frame.count()}\n")
    numbers = spark.range(200)
    looked_up = streamhouse.lookup_join(numbers, LOOKED_UP, "id", columns=["name"], how="inner")
    name = "concat('n', id)"
    if has_arrow_functions():
        streamhouse.register_lookup(spark, LOOKED_UP, "looked_up", columns=["name"])
        name = "looked_up(id).name"
    by_name = looked_up.where(f"name = {name}").count()
    sys.stdout.write(f"looked up {looked_up.count()} {by_name}\n")
    sys.stdout.write(f"executors {_executors(spark, remote is not None)}\n")

    if remote:
        # Elsewhere other files do it, with fewer processes to start.
        _change(spark, f"{target}_changed")
        _read_a_part(spark)

    half = spark.read.format("streamhouse").option("where", "id < 2500").load(SOURCE)
    half.write.format("streamhouse").option("bucket.num", 2).mode("append").save(target)
    rest = spark.readStream.format("streamhouse").option("where", "id >= 2500").load(SOURCE)
    writer = rest.writeStream.format("streamhouse").option("checkpointLocation", checkpoint)
    query = writer.trigger(availableNow=True).start(target)
    query.awaitTermination()
    spark.stop()


def _change(spark: SparkSession, path: str) -> None:
    """Merge, update and delete rows of a table with a primary key of 2,000 rows."""
    rows = spark.range(2_000).selectExpr("id", "concat('n', id) AS name", "id * 10 AS balance")
    options = {"primary.key": "id", "bucket.num": "2"}
    rows.write.format("streamhouse").options(**options).mode("append").save(path)
    table = streamhouse.Table(spark, path)
    before = _sent_rows()
    source = spark.sql("SELECT * FROM VALUES (1L, 5L), (2L, -1L), (5000L, 7L) AS s(user, amount)")
    merged = (
        table.merge(source, "target.id = source.user")
        .when_matched_delete("source.amount < 0")
        .when_matched_update({"balance": "target.balance + source.amount"})
        .when_not_matched_insert({"id": "source.user", "balance": "source.amount"})
        .execute()
    )
    updated = table.update({"balance": "balance + 1"}, "id IN (7, 8) AND balance < 75")
    deleted = table.delete("id = 9 OR id = 10 -- both")
    sys.stdout.write(f"changed by key {merged} {updated} {deleted} sent {_sent_rows() - before}\n")
    updated = table.update({"name": F.lit("x")}, F.col("id") == 11)
    deleted = table.delete("balance >= 19900 AND name <> 'n1995'")
    total = table.to_df().selectExpr("count(*)", "sum(balance)", "max_by(id, name)").collect()
    sys.stdout.write(f"changed {updated.rows_updated} {deleted.rows_deleted} {tuple(total[0])}\n")
    done = table.history().where("status = 'committed' AND operation = 'upsert'").count()
    sys.stdout.write(f"history {done}\n")


def _read_a_part(spark: SparkSession) -> None:
    """Read some columns and rows, and let `explain` say which."""
    table = streamhouse.read(spark, SOURCE)
    part = table.select("id", "price").where((F.col("id") >= 3_990) & (table["id"] < 4_010))
    part.explain()
    total = part.groupBy().agg(F.count("price"), F.sum("id")).collect()[0]
    again = table.join(part.select("id"), "id").where("small >= 0").agg(F.max("small")).collect()
    sys.stdout.write(f"part {tuple(total)} {again[0][0]} {sorted(table.limit(1).columns)[0]}\n")
    few = streamhouse.sql(
        spark, f"SELECT count(*) AS n FROM {SOURCE} WHERE id < :n", args={"n": 40}
    )
    counted = streamhouse.sql(spark, f"SELECT count(*) AS n FROM {SOURCE}")
    before = _sent_rows()
    numbers = counted.collect()[0].n, _sent_rows() - before, few.collect()[0].n
    sys.stdout.write(f"by sql {numbers}\n")
    # Columns of one name belong to the tables that they are taken from.
    few = streamhouse.read(spark, SOURCE).where("id < 40")
    pairs = table.join(few, table["id"] == few["id"] + 1).where(few["id"] >= 30)
    sys.stdout.write(f"pairs {pairs.select(table.id, few.id).orderBy(few.id).collect()[0]}\n")


def _sent_rows() -> int:
    """Return how many rows the service has sent, those that were looked up, too."""
    with urllib.request.urlopen(f"{os.environ['STREAMHOUSE_ENDPOINT']}/metrics") as answer:
        found = re.findall(r"^streamhouse_sent_rows_total\S* (\S+)$", answer.read().decode(), re.M)
    return sum(int(float(value)) for value in found)


def _executors(spark: SparkSession, is_remote: bool) -> int:
    """Return how many processes the tasks of a read ran under."""
    if is_remote:
        return 0
    reader = spark.read.format("streamhouse").option("minPartitions", 8)
    parts = reader.option("maxSplitBytes", "32kb").load(SOURCE)
    found = parts.rdd.mapPartitions(lambda _: iter([os.getppid()])).collect()
    return len(set(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
